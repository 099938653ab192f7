"""The last stage goes from a micro-batch's forward pass straight into its backward pass: transfers between make way."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

import gt
from gt.dispatcher.programs.passes.hoist_transfers import backward_of, hoist_transfers
from gt.dispatcher.programs.recording import Instruction, Recording
from gt.dispatcher.programs.reorder_check import CannotReorder, DataFlow, check_same_dataflow
from gt.ir.instr import Define
from gt.ir.spec import contiguous
from tests.dispatcher.programs.passes import context
from tests.dispatcher.programs.passes.test_bucket_reductions import op
from tests.helpers.serving import settled

SPEC = contiguous((8,), "float32").wire()
MADE = op(10, "aten.exp.default", 1, ["new", SPEC, -1])
SUM = Define(11, "all_reduce", {"team": {"workers": [0, 1]}, "op": "sum"})
TAKEN = Define(12, "recv", {"parts": [[{"peer": 1}, []]], "shape": [8], "dtype": "float32"})
GIVEN = Define(13, "send", {"channel": {"peer": 1}, "boxes": []})


def moved(*rows: tuple[Define, list[int], str]) -> list[int]:
    """The old positions of rows of (definition, operands, action), in their new order."""
    tape = Recording(0, [], {})
    tape.code[0] = [Instruction(n, define, operands, action) for n, (define, operands, action) in enumerate(rows)]
    about = context(graphs=True, schedule={"why": ""})
    code = hoist_transfers(tape, about).code[0]
    with contextlib.suppress(CannotReorder):
        check_same_dataflow(0, DataFlow.of(tape.code[0]), code, {})
        return [row.seq for row in code]
    return [row.seq for row in tape.code[0]]


def test_what_is_taken_between_comes_before_what_is_compiled_with_the_forwards_end() -> None:
    rest = [(TAKEN, [5], ""), (MADE, [3, 4], "1I0"), (MADE, [5, 6], "1F1")]
    assert moved((MADE, [1, 2], "1F0"), (MADE, [2, 3], "1F0"), *rest) == [2, 0, 1, 3, 4]
    assert moved((MADE, [1, 2], "1F0"), (SUM, [2], "1F0"), (MADE, [2, 3], "1F0"), *rest) == [0, 1, 3, 2, 4, 5]
    assert moved((MADE, [1, 2], "0F3"), (MADE, [2, 3], "1F0"), *rest) == [0, 2, 1, 3, 4]


@pytest.mark.parametrize("after", ["1F1", "0I0", "1I1", "1W0", ""])
def test_a_transfer_before_another_action_stays(after: str) -> None:
    assert moved((MADE, [1, 2], "1F0"), (TAKEN, [5], ""), (MADE, [5, 6], after), (GIVEN, [2], "")) == [0, 1, 2, 3]


def test_a_transfer_that_reads_the_forward_pass_stays() -> None:
    assert moved((MADE, [1, 2], "1F0"), (GIVEN, [2], ""), (TAKEN, [5], ""), (MADE, [5, 6], "1B0")) == [0, 1, 2, 3]


def test_random_orders_have_the_same_values_and_no_transfer_passes_another() -> None:
    rng = random.Random(3)
    for _ in range(300):
        alive, rows = [1, 2], []
        name = "1F0"
        for n in range(3, 20):
            name = rng.choice([name, name, *backward_of(name), "1F0", "1F1", "0F1"])
            define, action = rng.choice([(MADE, name), (MADE, name), (SUM, name), (TAKEN, ""), (GIVEN, "")])
            read = [] if define is TAKEN else [rng.choice(alive)]
            made = [] if define in (SUM, GIVEN) else [n]
            alive += made
            rows.append((define, read + made, action))
        order = moved(*rows)
        there = {1, 2}
        for n in order:  # what it reads is there; the verifier looks at what was written
            define, operands, _ = rows[n]
            row = Instruction(0, define, operands)
            assert there.issuperset(row.reads)
            there.update(row.makes)
        meets = [n for n in order if rows[n][0] is not MADE]
        assert sorted(order) == [*range(len(rows))] and meets == sorted(meets)


@pytest.mark.usefixtures("plain_threads")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_last_stage_does_both_as_one(schedule: str, session) -> None:
    session("stage0: {shard: {axis: 0, workers: [0]}}\nstage1: {shard: {axis: 0, workers: [1]}}\n")
    torch.manual_seed(0)
    start, data = [torch.randn(16, 16) / 4 for _ in range(2)], torch.randn(5, 8, 16)

    def trained(backend: str) -> list[torch.Tensor]:
        weights = [torch.nn.Parameter(w.to("remote")) for w in start]
        optimizer = torch.optim.SGD(weights, lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), device="remote")
            for part in gt.microbatches(x, 4):
                with gt.signal.context("stage0"):
                    y = torch.tanh(part @ weights[0])
                with gt.signal.context("stage1"):
                    loss = (y @ weights[1]).square().mean()
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            return total

        run = gt.compile(step, backend=backend, schedule=schedule) if backend else step
        losses = [run(x if backend else x.to("remote")) for x in data]
        return [t.detach().cpu() for t in (*losses, *weights)]

    want = trained("")
    assert all(map(torch.equal, trained("eager"), want))
    names = [[name for name, _, _ in worker["actions"]] for worker in settled()["workers"][:2]]
    assert not any("+" in name for row in names for name in row)
    for a, b in zip(trained("cudagraphs"), want, strict=True):  # which here is "inductor"
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    first, last = ([name for name, _, _ in worker["actions"]] for worker in settled()["workers"][:2])
    back = "B" if schedule == "1f1b" else "I"
    assert [name for name in last if "F" in name] == [f"1F{n}+1{back}{n}" for n in range(4)]
    assert not any("+" in name for name in first)
