"""Calls with more tensors than one op may have give what torch gives, and their sessions go on."""

from __future__ import annotations

import pytest
import torch

import gt
from gt.ir import check
from gt.ir.template import weight

LONG = 3000


def values(count: int, seed: int = 0) -> list[torch.Tensor]:
    whole = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return [row.clone() for row in whole.unbind()]


def far(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.to("remote") for t in tensors]


def same(got, wanted) -> None:
    assert len(got) == len(wanted)
    some = slice(None, None, max(len(got) // 40, 1))
    torch.testing.assert_close(torch.stack([t.cpu() for t in got[some]]), torch.stack(list(wanted[some])))


@pytest.mark.parametrize(
    "take",
    [
        lambda x: x.unbind(),
        lambda x: list(x),
        lambda x: x.split(2),
        lambda x: x.split([3] * 1999 + [3]),
        lambda x: x.chunk(2000),
        lambda x: x.tensor_split(2000),
    ],
)
def test_a_tensor_is_taken_apart(one, take):
    x = torch.arange(6000.0)
    for got, want in ((take(x.to("remote")), take(x)),):
        assert len(got) == len(want)
        for n in (0, 1, len(got) // 2, len(got) - 1):
            assert torch.equal(got[n].cpu(), want[n])


def test_what_is_taken_apart_is_views_and_has_gradients(one):
    x = torch.ones(LONG, 2, device="remote", requires_grad=True)
    y = x * 1
    y.unbind()[-1].detach().zero_()
    assert y[-1].tolist() == [0.0, 0.0]
    z = x * 2
    (z.unbind()[LONG - 2].sum() * 3).backward()
    assert x.grad[LONG - 2].tolist() == [6.0, 6.0]
    assert x.grad.sum().item() == 12.0


@pytest.mark.parametrize("join", [torch.stack, torch.cat, lambda ts: torch.stack(ts, 1), lambda ts: torch.cat(ts, -1)])
def test_tensors_are_joined_with_gradients(one, join):
    here = [t.requires_grad_() for t in values(LONG)]
    there = [t.detach().to("remote").requires_grad_() for t in here]
    here[0].data, there[0].data = here[0].data * 2, there[0].data * 2
    got, want = join(there), join(here)
    assert torch.equal(got.detach().cpu(), want.detach())
    (got * got).sum().backward()
    (want * want).sum().backward()
    same([t.grad for t in there], [t.grad for t in here])


def test_joined_dtypes_are_promoted_once(one):
    first, last = torch.full((1,), 1.001, dtype=torch.float16), torch.ones(1, dtype=torch.float64) / 3
    parts = [first, *(torch.full((1,), 1 / 3, dtype=torch.bfloat16) for _ in range(LONG)), last]
    got, want = torch.cat(far(parts)), torch.cat(parts)
    assert got.dtype == want.dtype
    assert torch.equal(got.cpu(), want)


def test_list_ops_of_optimizers_and_of_clipping(one):
    here, there = values(LONG), far(values(LONG))
    for lists in (here, there):
        torch._foreach_add_(lists, lists, alpha=0.5)
        torch._foreach_mul_(lists, [1.0 + n / LONG for n in range(LONG)])
    same(torch._foreach_norm(there), torch._foreach_norm(here))
    same(torch._foreach_maximum(there, 0.1), torch._foreach_maximum(here, 0.1))
    same(there, here)


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}])
def test_an_optimizer_of_thousands_of_parameters(one, how):
    def train(device: str) -> list[torch.Tensor]:
        params = [t.to(device).requires_grad_() for t in values(1500, 3)]
        optimizer = torch.optim.AdamW(params, lr=0.1, **how)
        for _ in range(2):
            optimizer.zero_grad()
            torch.stack([(p * p).sum() for p in params]).sum().backward()
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
        return [p.detach() for p in params]

    same(train("remote"), train("cpu"))


def test_a_program_has_long_lists_too(one):
    @gt.compile
    def step(x):
        return torch.stack([row * 2 for row in x.unbind()]).sum(0)

    x = torch.randn(1500, 3)
    for _ in range(3):
        torch.testing.assert_close(step(x.to("remote")).cpu(), (x * 2).sum(0))


def test_an_infinite_gradient_in_any_chunk_is_found(one):
    grads = far(values(LONG))
    grads[LONG - 1][1] = float("inf")
    found, scale = torch.zeros((), device="remote"), torch.ones((), device="remote")
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)
    assert found.item() == 1.0


def test_a_template_of_few_operands_is_never_too_heavy():
    """LIGHT_OPERANDS is a bound that saves looking: of operands of the highest dim that torch's tensors usually have."""
    spec = [[8] * 8, [8] * 8, 0, "float32"]
    count = check.LIGHT_OPERANDS
    row = ["aten._foreach_add.List", [[{"t": n} for n in range(count)]], {}, [spec] * count, 0, [], [], False, True]
    assert weight(row) <= check.MAX_TEMPLATE_PARTS
