"""Ops of a stage that write to another stage's tensor run there: a schedule keeps their messages in order, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import gt
from gt.dispatcher.programs.recording import Instruction
from gt.dispatcher.programs.reorder_check import CannotReorder, Verifier
from gt.ir.instr import Define
from tests.dispatcher.programs.test_compile_schedules import stages

Step = Callable[[torch.Tensor, Any], torch.Tensor]


def written_by_the_next_stage(part: torch.Tensor, layers: Any) -> torch.Tensor:
    """Stage 2 adds a tensor of stage 0 to one of stage 1, of the size of the message before it."""
    with gt.signal.context("pp_stage0"):
        first = layers[0](part).tanh()
        squares = first.square()
    with gt.signal.context("pp_stage1"):
        second = layers[1](first)
    with gt.signal.context("pp_stage2"):
        second += squares
        third = layers[2](second)
    with gt.signal.context("pp_stage3"):
        return mse_loss(layers[3](third), part)


def trained(device: str, forward: Step, schedule: str = "") -> tuple[list[torch.Tensor], Any]:
    """Losses and weights of four steps with two micro-batches, and the step."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)).to(device)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for part in gt.microbatches(x, 2):
            loss = forward(part, layers)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    run = gt.compile(step, schedule=schedule) if schedule else step
    losses = [run(x) for x in torch.randn(4, 8, 6, dtype=torch.float64)]
    return [t.detach().cpu() for t in (*losses, *layers.parameters())], run


CASES = [((0, 1, 2, 3), "gpipe"), ((0, 1, 2, 3), "zb-h1"), ((0, 1, 0, 1), "interleaved"), ((0, 1, 1, 0), "zb-v")]


@pytest.mark.usefixtures("plain_threads")
@pytest.mark.parametrize(("places", "schedule"), CASES)
def test_messages_for_a_write_to_another_stages_tensor_come_in_the_order_of_their_sends(
    places: tuple[int, ...], schedule: str, session: Callable
) -> None:
    session(stages(*places))
    want = trained("cpu", written_by_the_next_stage)[0]
    got, run = trained("remote", written_by_the_next_stage, schedule)
    torch.testing.assert_close(got, want)
    assert not run._programs[0].answer["schedule"]["why"], run.explain()


@torch.no_grad()
def test_a_stage_that_only_writes_to_another_stages_tensors_is_told(session: Callable) -> None:
    session(stages(0, 1, 2))

    @gt.compile(schedule="1f1b")
    def step(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device="remote")
        for part in gt.microbatches(x, 2):
            with gt.signal.context("pp_stage0"):
                first = part * 2
            with gt.signal.context("pp_stage1"):
                second = first + 1
            with gt.signal.context("pp_stage2"):
                second += 1
            total += second.sum()
        return total

    assert [step(torch.ones(4, 3)).item() for _ in range(4)] == [48.0] * 4
    assert "nothing runs on workers [2] of stage pp_stage2" in step.explain()


# ---- the verifier


def send(tensor: int, peer: int) -> Instruction:
    return Instruction(tensor, Define(50, "send", {"channel": {"peer": peer}, "boxes": [[[0, 8]]]}), [tensor])


def receive(tensor: int, peer: int) -> Instruction:
    parts = [({"peer": peer}, [[0, 8]])]
    return Instruction(tensor, Define(51, "recv", {"parts": parts, "shape": [8], "dtype": "float32"}), [tensor])


def test_messages_of_one_shape_do_not_change_places() -> None:
    sends, receives = [send(1, peer=1), send(2, peer=1)], [receive(3, peer=0), receive(4, peer=0)]
    old = {0: sends, 1: receives}
    Verifier({}, {}).verify(old, {0: sends[::-1], 1: receives[::-1]})
    for new in ({0: sends[::-1], 1: receives}, {0: sends, 1: receives[::-1]}):
        with pytest.raises(CannotReorder, match=r"worker 0 waits in message \d of workers \[0, 1\]"):
            Verifier({}, {}).verify(old, new)
    again = [Instruction(row.seq, row.define, row.operands, stands_for=row) for row in receives]
    Verifier({}, {}).verify(old, {0: sends, 1: again})
    with pytest.raises(CannotReorder, match="message"):
        Verifier({}, {}).verify(old, {0: sends, 1: again[::-1]})
