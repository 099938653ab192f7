"""Steps in schedules as people write them: without a backward, with the schedule in the config, batches that do not do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gt
from gt.dispatcher import schedule
from gt.dispatcher.schedule import Action
from gt.errors import ConfigError

STAGES = "".join(f"stage{n}: {{workers: [{n % 2}]}}\n" for n in range(4))
WIDE = 16


@pytest.mark.parametrize("workers", [[0, 1, 2], [0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1]])
def test_without_a_backward_forwards_are_left_and_auto_is_the_best_of_them(workers: list[int]) -> None:
    costs = schedule.uniform(len(workers), input=0, weight=0, transfer=0.3, activation=0)
    spans = {}
    for name in schedule.NAMES:
        try:
            made = schedule.make(schedule.ScheduleRequest(name, workers, 5, backward=False), costs)
        except ConfigError:
            continue
        for stage, worker in enumerate(workers):
            mine = [action for action in made.rows[worker] if action.stage == stage]
            assert mine == [Action(stage, "F", micro) for micro in range(5)]
        spans[name] = schedule.simulate(made.rows, costs).makespan
    assert spans["auto"] == min(spans.values()) and {"gpipe", "auto"} < set(spans)


def layers() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter((torch.randn(WIDE, WIDE) / 4).to("remote")) for _ in range(4)]


def forward(weights: list[torch.nn.Parameter], part: torch.Tensor) -> torch.Tensor:
    for n, weight in enumerate(weights):
        with gt.signal.context(f"stage{n}"):
            part = torch.tanh(part @ weight)
    return part


def inference(name: str | None, calls: int = 5) -> tuple[Any, list[torch.Tensor]]:
    weights = layers()

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([forward(weights, part) for part in gt.microbatches(x, 4)])

    run = gt.compile(step, schedule=name) if name is not None else step
    batch = torch.linspace(-1, 1, 8 * WIDE).view(8, WIDE)
    return run, [run(batch if name is not None else batch.to("remote")) for _ in range(calls)]


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "auto"])
def test_a_step_without_a_backward_has_forwards_and_a_report(name: str, session: Callable, tmp_path: Path) -> None:
    session(STAGES)
    _, want = inference(None, 1)
    run, got = inference(name)
    assert all(torch.equal(one.cpu(), want[0].cpu()) for one in got)
    (program,) = run._programs
    order = program.answer["schedule"]
    rows = [row.split(",") for row in order["rows"].split()]
    assert sorted(rows[0]) == sorted(f"{stage}F{micro}" for stage in (0, 2) for micro in range(4))
    assert rows[1][-1] == "3L" and len(rows[1]) == 9 and "gradients" not in run.explain()
    assert gt.trace_replay(tmp_path / "out.json")["rows"] == order["rows"]
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert {e["cat"] for e in events if e["ph"] == "X"} == {"forward", "loss"}


def test_inference_is_planned_with_its_weights_and_its_bubble(tmp_path: Path) -> None:
    path = tmp_path / "four.yaml"
    path.write_text("".join(f"stage{n}: {{workers: [{n}]}}\n" for n in range(4)))
    for name in (None, "1f1b"):
        body = gt.plan(inference, name, config=str(path)).body
        assert [row["weights"] for row in body["memory"]] == [4 * WIDE * WIDE] * 4
        assert not body["pipeline"]["why"]
        assert body["pipeline"]["rows"].split()[1] == "1F0,1F1,1F2,1F3"
        assert {row["bubble"] for row in body["pipeline"]["choices"].values()} == {body["pipeline"]["idle"]}


@pytest.mark.usefixtures("plain_threads")
def test_the_configs_schedule_is_for_steps_that_name_none_and_can_have_it(session: Callable, caplog: Any) -> None:
    session(STAGES + "gt: {schedule: interleaved}\n")
    weights = layers()
    forward(weights, torch.ones(8, WIDE, device="remote"))  # places them

    def step(x: torch.Tensor) -> torch.Tensor:
        for part in gt.microbatches(x, 4):
            forward(weights, part).square().mean().backward()
        with torch.no_grad():
            for weight in weights:
                weight.sub_(weight.grad)
                weight.grad = None
        return x.sum()

    @torch.no_grad()
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x @ weights[0]

    runs = [gt.compile(step), gt.compile(step, schedule="gpipe"), gt.compile(plain), gt.compile(plain, schedule="gpipe")]
    for run in runs:
        for _ in range(4):
            run(torch.ones(8, WIDE))
    orders = [run._programs[0].answer["schedule"] for run in runs]
    assert [order["name"] for order in orders] == ["interleaved", "gpipe", "interleaved", "gpipe"]
    assert [bool(order["why"]) for order in orders] == [False, False, True, True]
    assert "no op runs in a signal group" in runs[2].explain()
    assert caplog.text.count("is not used") == 1 and "plain: schedule gpipe is not used" in caplog.text


@pytest.mark.parametrize(
    ("batch", "n", "said"),
    [
        (torch.ones(7, 2), 4, "7 rows cannot be cut into 4 equal micro-batches: use a batch of a multiple of 4"),
        ({"x": torch.ones(8), "y": (torch.ones(6), 3)}, 4, "6 rows cannot be cut into 4 equal"),
        (torch.tensor(1.0), 1, "no rows cannot be cut"),
        (torch.ones(8), 0, "cannot be cut into 0 micro-batches: want a whole number of at least 1"),
        (torch.ones(8), 2.0, "cannot be cut into 2.0 micro-batches"),
        ([3, "a"], 2, "there is no tensor in the batch, which is list"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused_with_its_numbers(batch: Any, n: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gt.microbatches(batch, n)


def test_the_parts_of_a_batch_are_its_rows_in_order() -> None:
    batch = {"x": torch.arange(8), "y": (torch.arange(16).view(8, 2), "name")}
    parts = list(gt.microbatches(batch, 4))
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"]) and len(parts) == 4
    assert torch.equal(torch.cat([part["y"][0] for part in parts]), batch["y"][0])
    assert all(part["y"][1] == "name" for part in parts)


@pytest.mark.parametrize("asked", [5, ("1f1b",)])
def test_a_schedule_is_a_name(asked: Any) -> None:
    with pytest.raises(ValueError, match="is not known: want one of gpipe"):
        gt.compile(lambda: None, schedule=asked)


def test_a_limit_that_a_named_schedule_does_not_keep_is_said_in_bytes(session: Callable, caplog: Any) -> None:
    session("stage0: {workers: [0]}\nstage1: {workers: [1]}\nstage2: {workers: [0]}\nstage3: {workers: [1]}\n")
    weights = layers()

    @gt.compile(schedule="gpipe:10B")
    def step(x: torch.Tensor) -> None:
        for part in gt.microbatches(x, 4):
            forward(weights, part).square().mean().backward()

    for _ in range(4):
        step(torch.ones(8, WIDE))
    assert "schedule gpipe is not used: gpipe needs" in caplog.text
    assert "KiB of activations on worker 0, and the limit is 10 B: try auto" in caplog.text
