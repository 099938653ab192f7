"""Boolean indices in a captured step: a mask that arguments or constants decide gives the program a size, and a guard."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import gt
from gt.client.current_session import current

REMOTE = "remote"
pytestmark = pytest.mark.usefixtures("one")
FORMS: dict[str, Callable[..., torch.Tensor]] = {
    "mask": lambda x, labels: x[labels > 2],
    "mask of rows beside a slice": lambda x, labels: x[:, labels[0] > 2].neg(),
    "mask beside an index": lambda x, labels: x[labels[:, 0] > 0, labels.new_tensor([0, 1])],
    "masked_select": lambda x, labels: x.masked_select((labels > 2)[..., None]),
    "where": lambda x, labels: x[torch.where(labels > 2)],
    "nonzero": lambda x, labels: labels.nonzero() * x[0, 0, :1],
    "repeats": lambda x, labels: x.repeat_interleave(labels.sum(1), 0),
    "constant": lambda x, labels: x[:, torch.ones(3, 3, device=x.device).triu(1).bool()[0]] * labels.sum(),
}


def batch(seed: int, largest: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor([[0, 3, largest], [1, 4, 2]])[:, torch.randperm(3, generator=generator)]
    labels[:, 0] = labels[:, 0].clamp(min=1)
    return torch.randn(2, 3, 4, generator=generator), labels


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_that_arguments_decide_is_a_part_of_one_program(form: str) -> None:
    fixed = batch(0)[1]

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        result = FORMS[form](x, labels)
        (result * 2).sum().float().backward()
        return torch.cat([result.flatten().float(), x.grad.flatten()]) if x.grad is not None else result

    compiled = gt.compile(step)
    for n in range(6):
        x, labels = batch(n)
        # The number of rows stays, and their places change where the form allows it
        labels = labels if form in ("mask", "masked_select", "where", "constant") else fixed
        assert torch.equal(compiled(x.to(REMOTE), labels.to(REMOTE)).cpu(), step(x, labels)), n
    assert [program.replays for program in compiled._programs] == [4], compiled.explain()


def test_no_kernel_of_a_program_counts_what_a_mask_selects() -> None:
    """Neither in the backward pass nor where a mask is written: a CUDA graph cannot wait for a count."""

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        written = torch.zeros_like(x)
        written[labels > 2] = x.detach()[labels > 2].neg()
        (x[labels > 2].square().sum() + (x * written).sum()).backward()
        return x.grad

    compiled = gt.compile(step)
    for n in range(6):
        x, labels = batch(n)
        assert torch.equal(compiled(x.to(REMOTE), labels.to(REMOTE)).cpu(), step(x, labels)), n
    puts = [t for t in current().templates.values() if t.op.startswith(("aten.index_put", "aten._index_put"))]
    assert len(puts) == 2 and not any(spec.dtype == "bool" for template in puts for spec in template.ins), compiled.explain()
    assert [program.replays for program in compiled._programs] == [4]


def test_another_number_of_elements_is_another_program() -> None:
    step = gt.compile(FORMS["mask"])
    for n in range(14):
        x, labels = batch(n, largest=4 if n < 5 or n % 2 else 0)
        assert torch.equal(step(x.to(REMOTE), labels.to(REMOTE)).cpu(), FORMS["mask"](x, labels)), n
    assert len(step._programs) == 2 and sum(program.replays for program in step._programs) > 8, step.explain()


def test_a_mask_that_workers_decide_ends_a_part_as_before() -> None:
    step = gt.compile(lambda x: x[x > 0])
    for n in range(4):
        x, _ = batch(n)
        assert torch.equal(step(x.to(REMOTE)).cpu(), x[x > 0])
    assert "the shape of aten.index.Tensor's result depends on values" in step.explain() and not step._programs


def test_a_negative_number_of_repeats_is_an_error_of_the_op_alone() -> None:
    repeat = gt.compile(lambda x, repeats: x.repeat_interleave(repeats))
    x, repeats = torch.randn(4, device=REMOTE), torch.tensor([1, -1, 1, -1], device=REMOTE)
    for _ in range(4):
        with pytest.raises(gt.OpFailed, match=r"repeats of .* has values from -1 to 1, want 0 to \d{2}"):
            repeat(x, repeats).cpu()
    with pytest.raises(gt.OpFailed, match="has values from -1 to 1, want 0 to 0"):
        torch.repeat_interleave(repeats, output_size=0).cpu()
    with pytest.raises(gt.OpFailed, match="repeats add up to 4, want output_size, which is 5"):
        torch.repeat_interleave(repeats.abs(), output_size=5).cpu()
    assert x.repeat_interleave(repeats.abs(), output_size=4).equal(x)
