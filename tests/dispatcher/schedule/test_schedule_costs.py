"""Costs that schedules go by: measured while a step is recorded, nominal where nobody measured; what is done once a step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gt
from gt.dispatcher import schedule
from gt.dispatcher.events import Received, Send
from gt.dispatcher.programs.passes.scheduled_instruction import Key, ScheduledInstruction
from gt.dispatcher.programs.passes.stage_costs import time_instructions
from gt.dispatcher.programs.recording import Instruction
from gt.dispatcher.schedule import Costs
from gt.dispatcher.schedule.balance import balance, said
from gt.ir.dataflow import accesses
from gt.ir.instr import Define
from gt.ir.schedules import asked
from gt.ir.spec import contiguous
from gt.ir.text import size
from gt.observe.dry_run import Dry
from gt.wire.messages import MAX_TIMES, Done, Exit, Run
from gt.worker.process.profiler import TimedSteps, take_times
from tests.helpers import CONFIGS
from tests.helpers.models import accumulating, mini
from tests.helpers.planned import planned

STAGES = "".join(f"stage{n}: {{workers: [{n}]}}\n" for n in range(4))


@pytest.fixture
def four(tmp_path: Path) -> str:
    path = tmp_path / "four.yaml"
    path.write_text(STAGES)
    return str(path)


def train(
    name: str, depths: tuple[int, ...], parts: int = 8, clip: bool = False
) -> gt.client.capture.compiled_function.CompiledFunction:
    """Stages of so many layers, all of one size."""
    weights = [torch.nn.Parameter(torch.randn(32, 32, device="remote")) for _ in range(sum(depths))]
    optimizer = torch.optim.SGD(weights, 0.1)

    @gt.compile(schedule=name)
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        for part in gt.microbatches(x, parts):
            rest = iter(weights)
            for n, depth in enumerate(depths):
                with gt.signal.context(f"stage{n}"):
                    for _ in range(depth):
                        part = torch.tanh(part @ next(rest))
                    if n + 1 == len(depths):
                        loss = part.sum()
            loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        return loss.detach()

    for _ in range(3):
        step(torch.randn(8 * parts, 32))
    return step


def order_of(name: str, depths: tuple[int, ...], config: str, **kwargs: Any) -> dict:
    """The answer to FinishCapture of a step that is only planned."""
    found: list[dict] = []
    gt.plan(lambda: found.append(train(name, depths, **kwargs)._programs[0].answer["schedule"]), config=config)
    return found[0]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """Workers that are only thought of say that ops of these names take so long ("" is of all others), where a Run is timed."""
    seconds: dict[str, float] = {}
    act = Dry._act

    def answer(self: Dry, action: Any) -> Received | None:
        done = act(self, action)
        if done is None or not isinstance(action, Send) or not isinstance(action.message, Run) or not action.message.timed:
            return done
        defines = self.followed[int(action.peer[1:])].defines.values()
        named = [(d.number, d.payload["op"].split(".")[1]) for d in defines if d.kind == "op"]
        took = [(n, seconds.get(op, seconds.get("", 0.0))) for n, op in named if op in seconds or "" in seconds]
        assert isinstance(done.message, Done)
        return Received(done.peer, replace(done.message, times=[part for row in took for part in row]))

    monkeypatch.setattr(Dry, "_act", answer)
    yield seconds


# ---- measured


def test_a_heavy_stage_costs_as_much_more_as_was_measured(four: str, timed: dict[str, float]) -> None:
    timed.update({"mm": 1e-3, "": 0.0})
    order = order_of("auto", (1, 1, 1, 3), four)
    costs = Costs.from_wire(order["costs"])
    assert order["measured"] > 0.99
    assert costs.forward == pytest.approx((1e3, 1e3, 1e3, 3e3), rel=0.05)
    assert costs.input[1:] == pytest.approx((1e3, 1e3, 3e3), rel=0.05) and costs.input[0] < 100  # of what nobody needs none
    assert costs.weight == pytest.approx((1e3, 1e3, 1e3, 3e3), rel=0.05)
    assert order["balance"]["share"][3] == pytest.approx(9 / 17, abs=0.01)


def test_without_measurements_costs_are_nominal_and_say_so(four: str) -> None:
    order = order_of("1f1b", (1, 1, 1, 3), four)
    costs = Costs.from_wire(order["costs"])
    assert order["measured"] == 0 and "(nominal)" in order["said"][0]
    assert costs.forward[0] == pytest.approx(costs.forward[1]) and costs.forward[3] > 2.5 * costs.forward[0]
    square = 4.0 * 32 * 8
    assert costs.activation[0] == square  # tanh's result: the input is a view of the batch
    assert costs.activation[1] == 2 * square and costs.activation[3] == 4 * square + 4  # and the loss


def test_what_was_not_measured_is_as_much_dearer_than_nominal(four: str, timed: dict[str, float]) -> None:
    """mm alone is measured, and slow: all else is scaled as it is."""
    plain = order_of("1f1b", (1, 1, 1, 3), four)
    timed["mm"] = 1.0
    slow = order_of("1f1b", (1, 1, 1, 3), four)
    assert plain["measured"] == 0 and 0.5 < slow["measured"] < 1
    by = [b / a for name in ("forward", "weight", "optimizer") for a, b in zip(plain["costs"][name], slow["costs"][name])]
    assert max(by) < 1.2 * min(by) and min(by) > 1e6


def test_only_what_is_recorded_is_timed(four: str) -> None:
    with planned(STAGES, workers=4) as plan:
        x = torch.randn(4, 4, device="remote")
        (x @ x).sum()
        plan.ask()
        assert plan.runs and not any(run.timed for _, run in plan.runs)


@pytest.mark.parametrize(
    "times",
    [
        [1],
        [1.0, 1.0],
        [16, 1],
        [16, float("nan")],
        [16, -1.0],
        [16, float("inf")],
        [16, 1e9],
        [16, True],
        [0, 1.0] * (MAX_TIMES + 1),
    ],
)
def test_a_worker_that_tells_no_times_is_refused_and_the_others_go_on(times: list, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    with planned(STAGES, workers=4) as plan:
        actions = plan.core.handle(Received(b"w3", Done(plan.core.cluster.workers[3].done, times)))
        told = [a.message for a in actions if isinstance(a, Send) and a.peer == b"w3"]
        assert [type(message) for message in told] == [Exit] and "Done.times" in told[0].reason
        assert not any(w.lost for w in plan.core.cluster.workers[:3])


def test_times_of_what_is_not_a_sessions_are_passed_over_and_the_least_is_kept() -> None:
    with planned(STAGES, workers=4) as plan:
        x = torch.randn(4, 4, device="remote")
        (x @ x).sum()
        plan.ask()
        session = plan.core.sessions[b"client"]
        number = next(iter(session.emitter.defined))
        for took in (3.0, 2.0, 5.0):
            plan.core.handle(Received(b"w0", Done(plan.core.cluster.workers[0].done, [number, took, 999_999, 1.0])))
        assert session.programs.times == {number: 2.0}


def test_a_worker_keeps_the_least_time_of_each_definition_and_tells_it_once() -> None:
    now = [0.0]

    def step(code: list, at: int) -> None:
        now[0] += code[at]

    found: dict[int, float] = {}
    table = TimedSteps({16: (step, 3), 17: (step, 3)}, lambda: now[0], found)
    for number, took in ((16, 3.0), (17, 1.0), (16, 2.0), (16, 4.0)):
        call, length = table[number]
        call([took], 0)
        assert length == 3
    assert take_times(found) == [16, 2.0, 17, 1.0] and take_times(found) == [] and not found
    with pytest.raises(KeyError):
        table[18]
    found.update(dict.fromkeys(range(MAX_TIMES + 5), 1.0))
    assert len(take_times(found)) == 2 * MAX_TIMES and len(take_times(found)) == 10


# ---- a limit, a better cut


@pytest.mark.parametrize(("text", "want"), [("auto", None), ("auto:2GiB", 2 << 30), ("1f1b:1.5 MiB", 3 << 19), ("auto:7", 7)])
def test_a_schedule_is_asked_for_by_name_and_limit(text: str, want: int | None) -> None:
    assert asked(text) == (text.partition(":")[0], want)


@pytest.mark.parametrize(
    "text", ["", "1f2b", "auto:", "auto:2GB", "auto:-1", "auto:0", "auto:many", ":2GiB", "auto:1e3", "auto:٣"]
)
def test_an_unknown_schedule_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"want (one of gpipe|bytes of activations)"):
        asked(text)
    with pytest.raises(ValueError, match="schedule"):
        gt.compile(lambda: None, schedule=text)


@given(st.integers(0, 1 << 45))
def test_sizes_are_written_as_they_are_read(count: int) -> None:
    assert asked(f"auto:{size(count)}")[1] == pytest.approx(count, rel=0.06) if count else True


def test_auto_keeps_within_a_limit_or_says_what_it_would_take(four: str) -> None:
    free = order_of("auto", (1, 1, 1, 1), four)
    least = max(free["costs"]["activation"])
    tight = order_of(f"auto:{2 * least:g}", (1, 1, 1, 1), four)
    assert max(tight["peak"]) <= 2 * least < max(free["peak"]) and tight["makespan"] >= free["makespan"]
    none = order_of("auto:1KiB", (1, 1, 1, 1), four)
    assert "fits 1.0 KiB" in none["why"] and "the smallest needs 2.0 KiB" in none["why"]


def test_a_better_cut_is_proposed_with_what_it_gains(four: str) -> None:
    order = order_of("1f1b", (2, 2, 2, 6), four)
    better = order["balance"]["better"]
    said_ = order["said"][-1]
    assert better["gain"] > 0.2 and max(better["share"]) < 0.3
    assert said_.startswith("a better cut gains") and "move the first 6 of stage3's" in said_ and "to stage2" in said_
    assert "better" not in order_of("1f1b", (2, 2, 2, 2), four)["balance"]


def test_a_proposal_names_what_goes_where() -> None:
    units, request = [[(1.0, "a")] * 6, [(1.0, "b")] * 2], schedule.ScheduleRequest("1f1b", [0, 1], 8)
    found = balance(schedule.uniform(2), units, request)
    assert "better" not in found  # as costs say, not as many ops
    costs = Costs((6.0, 2.0), (6.0, 2.0), (6.0, 2.0), (0.0,), (1.0, 1.0), (1.0, 1.0))
    found = balance(costs, units, request)
    assert found["better"]["gain"] == pytest.approx(1 - 9 * 12 / (8 * 18))
    assert said(found["better"]["moves"], ["x", "y"]) == "move the last 2 of x's 6 ops to y (from a, time 5 of 6)"


# ---- once a step


def test_a_stages_optimizer_follows_its_gradients_and_is_in_the_rows(four: str) -> None:
    rows = order_of("1f1b", (1, 1, 1, 1), four)["rows"].split()
    assert [row.split(",")[-2:] for row in rows] == [[f"{n}B7", f"{n}O"] for n in range(4)]


def test_clipping_makes_every_optimizer_wait_for_all(four: str) -> None:
    order = order_of("1f1b", (1, 1, 1, 1), four, clip=True)
    assert order["costs"]["joint"] and not order["why"]
    line = schedule.simulate(schedule.parse(order["rows"]), Costs.from_wire(order["costs"]))
    last = max(
        end for row, times in zip(schedule.parse(order["rows"]), line.end) for a, end in zip(row, times) if a.kind == "B"
    )
    for row, begins in zip(schedule.parse(order["rows"]), line.start):
        assert row[-1].kind == "O" and begins[-1] >= last


def test_gradients_are_reduced_while_others_still_compute(tmp_path: Path) -> None:
    """Data parallel, two stages a worker: the later stage's all-reduce is done in a gap, and the step is shorter by it."""
    config = tmp_path / "turns.yaml"
    config.write_text(
        "".join(f"stage{n}: {{shard: {{axis: 0, workers: [{2 * (n % 2)}, {2 * (n % 2) + 1}]}}}}\n" for n in range(4))
    )
    order = order_of("interleaved", (1, 1, 1, 1), str(config), parts=4)
    costs, rows = Costs.from_wire(order["costs"]), schedule.parse(order["rows"])
    assert not order["why"] and len(costs.reduce) == 4 and None not in costs.reduce
    for row, late in zip(rows, (2, 3)):
        place = [str(action) for action in row].index(f"{late}R")
        assert any(action.kind == "B" for action in row[place:])
    at_the_end = [[a for a in row if a.kind not in "RO"] + [a for kind in "RO" for a in row if a.kind == kind] for row in rows]
    took = [schedule.simulate(one, costs).makespan for one in (rows, at_the_end)]
    assert took[0] < 0.99 * took[1]


@pytest.mark.parametrize("config", ["dp2pp2", "dp2tp2pp2"])
def test_step_counts_lie_with_what_they_count_for(config: str) -> None:
    """A step of AdamW moves nothing between stages but activations and their gradients."""
    orders: list[dict] = []

    def run() -> None:
        model = mini(gt.signal.groups()).to("remote")
        step = gt.compile(accumulating(model, torch.optim.AdamW(model.parameters(), fused=True), 4), schedule="1f1b")
        for _ in range(4):
            step(torch.randint(64, (8, 16)), torch.randint(64, (8, 16)))
        orders.append(step._programs[0].answer["schedule"])

    body = gt.plan(run, config=str(CONFIGS / f"{config}.yaml")).body
    assert not orders[0]["costs"]["joint"] and not [
        row for row in body["transfers"] if "backward" not in row["where"] and row["bytes"] < 8
    ]
    assert all({f"{n}R", f"{n}O"} <= set(row.split(",")) for n, row in enumerate(orders[0]["rows"].split()))


# ---- what a compiler makes one


def row(name: str, reads: list[int], made: int, kind: str = "new") -> Instruction:
    """An op on tensors of 8 x 8 floats: 256 bytes."""
    payload = {"op": name, "args": [], "kwargs": {}, "tensors": len(reads), "values": 0, "writes": [], "random": None}
    out = [kind, contiguous((8, 8), "float32").wire(), 0]
    return Instruction(0, Define(100 + made, "op", {**payload, "outs": [out]}), [*reads, made])


def test_what_ops_that_are_one_give_each_other_costs_nothing() -> None:
    team = {"id": 0, "workers": [0, 1], "rank": 0, "offset": 0, "bytes": 0}
    forward, backward = Key(0, False, 0), Key(0, True, 0)
    kept = {"shape": [8, 8], "dtype": "float32", "boxes": [[[0, 8], [0, 8]]]}
    parts = [
        (forward, row("aten.relu.default", [1], 10)),  # reads 1; what it makes is in the next
        (forward, row("aten.add.Tensor", [10, 1], 11)),  # 1 is read already; a matmul wants 11
        (forward, row("aten.mm.default", [11, 2], 12)),
        (forward, row("aten.tanh.default", [12], 13)),  # 13 is for the backward
        (forward, row("aten.t.default", [13], 14, "view")),
        (forward, Instruction(0, Define(90, "all_reduce", {"team": team, "op": "sum"}), [12])),
        (forward, row("aten.exp.default", [12], 15)),  # not with what is before the all-reduce; nobody reads 15
        (backward, Instruction(0, Define(91, "shard", kept), [3, 16])),
        (backward, row("aten.mul.Tensor", [14, 16], 17)),  # a view of 13, made by another action
        (backward, row("aten.mm.default", [17, 2], 18)),
    ]
    memory = accesses([row for _, row in parts])
    rows = [ScheduledInstruction(row, n, None, key, memory=memory[n]) for n, (key, row) in enumerate(parts)]  # type: ignore[arg-type]
    lies = lambda worker, tensor: ((8, 8), 4)  # noqa: E731
    plain = time_instructions({0: rows}, {}, lies).seconds
    fused = time_instructions({0: rows}, {}, lies, fuses=True).seconds
    left = [fused[part] / plain[part] if plain[part] else 1.0 for part in rows]
    assert left == pytest.approx([1 / 2, 1 / 3, 1, 1, 1, 1, 1 / 2, 1 / 2, 2 / 3, 1])


def test_a_compiled_steps_costs_are_those_of_compiled_stages(tmp_path: Path) -> None:
    """A stage of many small ops beside one of matmuls."""
    (tmp_path / "two.yaml").write_text("stage0: {workers: [0]}\nstage1: {workers: [1]}\n")
    share = {}

    def steps(backend: str) -> None:
        w = torch.nn.Parameter(torch.randn(256, 256, device="remote"))

        @gt.compile(schedule="1f1b", backend=backend)
        def step(x: torch.Tensor) -> None:
            for part in gt.microbatches(x, 4):
                with gt.signal.context("stage0"):
                    part = part @ w @ w
                with gt.signal.context("stage1"):
                    for _ in range(6):
                        part = part * 0.5 + 1
                    part.sum().backward()

        for _ in range(3):
            step(torch.randn(512, 256))
        share[backend] = step._programs[0].answer["schedule"]["balance"]["share"][1]

    for backend in ("eager", "inductor"):
        gt.plan(lambda backend=backend: steps(backend), config=str(tmp_path / "two.yaml"))
    assert share["eager"] > 2 * share["inductor"] > 0
