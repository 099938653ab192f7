"""Values of arguments that a captured call reads: a replay computes them anew, and another value is never a stale replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gt
from gt.client.values import uploaded_values

REMOTE = "remote"
pytestmark = pytest.mark.usefixtures("one")
FULL, PADDED = torch.ones(2, 4, dtype=torch.int64), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As transformers does: a mask that says nothing is left out."""
    if bool(mask[:, -1:].to(torch.bool).all()):
        return x * 2
    return torch.where(mask.bool(), x * 2, -1)


def uploaded(mask: torch.Tensor) -> torch.Tensor:
    return mask.to(REMOTE)


def on_the_cpu(mask: torch.Tensor) -> torch.Tensor:
    return mask


@pytest.mark.parametrize("given", [uploaded, on_the_cpu])
def test_each_value_of_a_mask_has_a_program(given: Callable) -> None:
    step = gt.compile(masked)
    for n in range(12):
        x, mask = torch.randn(2, 4), FULL if n < 5 or n % 3 == 0 else PADDED
        assert torch.equal(step(x.to(REMOTE), given(mask)).cpu(), masked(x, mask)), n
    assert len(step._programs) == 2 and sum(program.replays for program in step._programs) == 8, step.explain()
    assert "the function reads a value of argument 1, which is another one now" in step.explain()


def test_a_value_that_differs_at_each_call_is_read_at_each_call() -> None:
    @gt.compile
    def step(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return x * tokens.sum().item()

    for n in range(8):
        tokens = torch.arange(n, n + 4)
        assert step(torch.ones(2), tokens).tolist() == [float(tokens.sum())] * 2
    assert "differs from the call before" in step.explain() and not step._programs


def test_alternating_values_are_served_by_a_program_that_reads_none() -> None:
    """A library asks whether it may read: see test_compile_constants.py."""

    @gt.compile
    def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing() and bool(mask.all()):
            return x * 2
        return torch.where(mask.bool(), x * 2, 0)

    for n in range(10):
        x, mask = torch.randn(2, 4), (FULL, PADDED)[n % 2]
        assert torch.equal(step(x, mask).cpu(), torch.where(mask.bool(), x * 2, 0))
    assert [program.replays for program in step._programs] == [6], step.explain()


def in_place(mask: torch.Tensor) -> None:
    mask[0, 3] = 0


def through_a_view(mask: torch.Tensor) -> None:
    mask.view(-1)[3:4].zero_()


def through_data(mask: torch.Tensor) -> None:
    mask.data.mul_(0)


def through_an_alias_by_a_list_op(mask: torch.Tensor) -> None:
    torch._foreach_mul_([mask.detach()], 0)


def by_a_captured_function(mask: torch.Tensor) -> None:
    by_a_captured_function.step(mask)  # type: ignore[attr-defined]


def by_the_state_of_a_captured_function(mask: torch.Tensor) -> None:
    by_the_state_of_a_captured_function.kept.copy_(mask)  # type: ignore[attr-defined]
    mask.copy_(by_the_state_of_a_captured_function.kept * 0)  # type: ignore[attr-defined]


CHANGES = [
    in_place, through_a_view, through_data, through_an_alias_by_a_list_op, by_a_captured_function,
    by_the_state_of_a_captured_function,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_mask_that_changed_since_its_upload_is_not_taken_for_full(change: Any) -> None:
    by_a_captured_function.step = gt.compile(lambda mask: mask.mul_(0).sum())  # type: ignore[attr-defined]
    by_the_state_of_a_captured_function.kept = torch.zeros_like(FULL, device=REMOTE)  # type: ignore[attr-defined]
    for _ in range(4):
        change(FULL.to(REMOTE))
    step = gt.compile(masked)
    for n in range(9):
        x, mask = torch.randn(2, 4), FULL.to(REMOTE)
        if n > 3:
            change(mask)
        now = mask.cpu() if n % 2 else None
        result = step(x.to(REMOTE), mask).cpu()
        assert torch.equal(result, masked(x, mask.cpu() if now is None else now)), (n, step.explain())


def test_writes_of_the_call_before_the_read_count() -> None:
    def step(x: torch.Tensor, mask: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        shift = torch.zeros(4, dtype=torch.int64, device=x.device)
        moved = mask + shift
        shift.fill_(5)  # not what `moved` was made with
        if bool((moved > 0).all()):
            x = x + 1
        shared[0, 0] = 0
        if bool(mask.all()):  # `shared` may be the mask
            x = x * 10
        mask = mask.clone()
        mask[1] -= 1
        return x + int(mask.sum())

    compiled = gt.compile(step)
    for n in range(8):
        x, mask, same = torch.randn(2, 4), FULL if n != 5 else PADDED, n in (2, 3, 6)
        here, there = mask.clone(), mask.to(REMOTE)
        expected = step(x, here, here if same else here.clone())
        result = compiled(x.to(REMOTE), there, there if same else mask.to(REMOTE))
        torch.testing.assert_close(result.cpu(), expected)


def test_a_value_that_is_written_in_the_call_from_two_arguments() -> None:
    def step(x: torch.Tensor, mask: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        both = mask.clone()
        both.mul_(other)
        return x * 2 if bool(both.all()) else x * 3

    compiled = gt.compile(step)
    for n in range(8):
        x, other = torch.randn(2, 4), PADDED if n > 3 else FULL
        assert torch.equal(compiled(x.to(REMOTE), FULL.to(REMOTE), other.to(REMOTE)).cpu(), step(x, FULL, other))


def test_operands_are_those_of_the_moment_and_not_of_the_read() -> None:
    def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shift = torch.zeros(4, dtype=torch.int64, device=x.device)
        moved = mask + shift
        shift.fill_(-1)
        return x * int((moved * 2 + shift).sum())

    compiled = gt.compile(step)
    for n in range(8):
        x, mask = torch.randn(2, 4), (FULL, FULL, FULL, PADDED)[n % 4]
        assert torch.equal(compiled(x.to(REMOTE), mask.to(REMOTE)).cpu(), step(x, mask))
    assert compiled._programs[-1].replays, compiled.explain()


def known(*tensors: torch.Tensor) -> list[bool]:
    recorder = gt.client.current_session.current()
    return [recorder.uploaded_value(t) is not None for t in tensors]


@pytest.mark.parametrize("sent", [False, True], ids=["recorded", "handed over"])
def test_values_are_known_of_what_is_small_until_an_op_may_change_it(sent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gt.compile(torch.add)
    a, b = torch.arange(3).to(REMOTE), torch.tensor([True, False], device=REMOTE)
    c, d = torch.zeros(2, 2, dtype=torch.int32).to(REMOTE), torch.ones(5, dtype=torch.bool).to(REMOTE)
    floats = torch.ones(3).to(REMOTE)
    large = torch.zeros(uploaded_values.MAX_BYTES // 8 + 1, dtype=torch.int64).to(REMOTE)
    assert known(a, b, c, d, floats, large) == [True] * 4 + [False] * 2
    e = a + 1
    c[0, 1] = 5
    d.detach()
    if sent:
        assert e.tolist() == [1, 2, 3]
    assert known(a, b, c, d.t(), e) == [True, True, False, False, False]
    monkeypatch.setattr(uploaded_values, "KEPT_BYTES", 40)
    f = torch.arange(4).to(REMOTE)
    assert known(a, f) == [False, True]


def test_values_are_forgotten_after_many_ops_and_without_a_compiled_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploaded_values, "MAX_FOLLOWED_OPS", 20)
    monkeypatch.setattr(uploaded_values.UploadedValues, "wanted", True)
    mask, x = FULL.to(REMOTE), torch.ones(2, device=REMOTE) / 1  # which only a worker computes
    for _ in range(10):
        x = x + 1
    assert x.tolist() == [11, 11] and known(mask) == [True]
    for _ in range(20):
        x = x + 1
    assert x.tolist() == [31, 31] and known(mask) == [False]
    monkeypatch.setattr(uploaded_values.UploadedValues, "wanted", False)
    mask = FULL.to(REMOTE)
    assert known(mask) == [True]
    assert (x + 1).tolist() == [32, 32] and known(mask) == [False]


def test_ops_on_the_batch_between_its_upload_and_the_call_leave_the_mask_known() -> None:
    """Labels made on the device, a scaled input, another function, a loss that is kept."""
    step, other = gt.compile(masked), gt.compile(torch.square)
    losses = []
    for n in range(12):
        x, mask = torch.randn(2, 4), FULL if n < 6 or n % 3 == 0 else PADDED
        there, x_there = mask.to(REMOTE), x.to(REMOTE)
        labels = there.clone()
        labels[labels == 0] = -100
        x_there = x_there / 2 + labels.sum() * 0
        if n % 2:
            losses.append(labels.sum().item())
        assert torch.equal(step(x_there, there).cpu(), masked(x / 2, mask)), n
        losses.append(other(x_there).sum())
    assert len(step._programs) == 2 and sum(program.replays for program in step._programs) == 8, step.explain()


def test_llama_leaves_a_full_mask_out_as_in_eager_mode_and_uses_a_padded_one() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=50
    )
    plain = LlamaForCausalLM(config)
    model = LlamaForCausalLM(config)
    model.load_state_dict(plain.state_dict())
    model.to(REMOTE)

    def loss(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return model(input_ids=ids, labels=ids, attention_mask=mask).loss

    step = gt.compile(lambda ids, mask: loss(model, ids, mask))
    without = gt.compile(lambda ids: loss(model, ids, None))
    for n in range(8):
        ids = torch.randint(0, 50, (2, 8))
        mask = torch.ones(2, 8, dtype=torch.int64)
        if n > 3:
            mask[1, 5:] = 0
        with torch.no_grad():
            torch.testing.assert_close(step(ids.to(REMOTE), mask.to(REMOTE)).cpu(), loss(plain, ids, mask))
            without(ids.to(REMOTE))
    ops = sorted(program.answer["ops"] for program in step._programs)
    masks = 12  # ops on the mask itself, before it is found to be full
    assert len(ops) == 2 and ops[0] <= without._programs[0].answer["ops"] + masks < ops[1], (step.explain(), without.explain())


def test_a_list_of_places_in_an_argument_may_be_read() -> None:
    """As transformers looks for padding in the first and last token; a library that is refused a read takes slower ways."""

    @gt.compile
    def step(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing() or 0 in tokens[:, [-1, 0]]:
            return x * 3
        return x * 2

    for n in range(6):
        assert step(torch.ones(2), torch.full((2, 4), n + 1).to(REMOTE)).tolist() == [2.0, 2.0]
    assert [program.replays for program in step._programs] == [4], step.explain()
    assert step(torch.ones(2), torch.zeros(2, 4, dtype=torch.int64).to(REMOTE)).tolist() == [3.0, 3.0]


def shifted(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """As seq2seq models shift their labels, and check the result. The order of writes and copies counts."""
    moved = tokens.new_zeros(tokens.shape)
    moved[:, 1:] = tokens[:, :-1].clone()
    before = moved.clone()
    moved[:, 0] = 7
    moved.masked_fill_(moved == -100, 1)
    flat = moved.view(-1)
    flat[1:2].add_(before.view(-1)[1:2])
    if bool((moved > 0).all()) and not bool((before > 0).all()):
        return x * int(flat[1]) + int(before.sum())
    return x * -1


@pytest.mark.parametrize("given", [uploaded, on_the_cpu])
def test_a_value_that_is_written_in_place_from_an_argument_may_be_read(given: Callable) -> None:
    step = gt.compile(shifted)
    batches = [torch.tensor([[1, -100, 3], [4, 5, last]]) for last in (1, 2, 3, 4, 5, 6)]
    batches += [torch.tensor([[2, 8, 3], [4, 5, 6]]), torch.tensor([[0, 8, 3], [4, 5, 6]]), *batches[:2]]
    for tokens in batches:
        x, kept = torch.randn(2), tokens.clone()
        torch.testing.assert_close(step(x.to(REMOTE), given(tokens)).cpu(), shifted(x, kept.clone()))
        assert torch.equal(tokens, kept)
    assert step._programs and max(program.replays for program in step._programs) >= 4, step.explain()


def test_a_value_that_is_written_from_other_memory_is_not_taken_for_known() -> None:
    @gt.compile
    def step(mask: torch.Tensor, unknown: torch.Tensor) -> torch.Tensor:
        own = mask.clone()
        row = own[0]
        row.copy_(unknown)  # only the workers know it
        return mask * int(own.sum())

    for n in range(6):
        unknown = torch.zeros(4, dtype=torch.int64, device=REMOTE) + n
        assert step(FULL.to(REMOTE), unknown)[0, 0].item() == 4 + 4 * n
