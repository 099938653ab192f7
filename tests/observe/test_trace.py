"""`gt trace`: the last replay as a Chrome trace, its bubble measured from stamps beside the predicted one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gt
from gt.dispatcher import schedule
from gt.dispatcher.events import Log, Received, Send
from gt.dispatcher.schedule.measure import measured
from gt.observe import timeline
from gt.wire.messages import Report, Stats
from tests.helpers.planned import planned
from tests.helpers.serving import settled
from tests.observe.test_plan import CONFIGS, training


def stamps(made: schedule.Schedule, costs: schedule.Costs, unit: float, begin: float) -> list[list[list]]:
    """The stamps of workers if every action takes its simulated time."""
    line = schedule.simulate(made.rows, costs)
    return [
        [[str(a), begin + s * unit, begin + e * unit] for a, s, e in zip(row, line.start[n], line.end[n], strict=True)]
        for n, row in enumerate(made.rows)
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "auto"])
def test_actions_that_take_their_simulated_time_measure_as_predicted(name: str) -> None:
    made, costs = schedule.make(schedule.ScheduleRequest(name, range(4), 8)), schedule.uniform(4)
    line = schedule.simulate(made.rows, costs)
    found = measured(stamps(made, costs, 0.25, 1e4))
    assert found["makespan"] == pytest.approx(line.makespan * 0.25) and found["idle"] == pytest.approx(line.idle, abs=1e-3)
    assert found["bubble"] == pytest.approx([b / line.makespan for b in line.bubble], abs=1e-3)


def test_time_is_counted_once_where_actions_overlap() -> None:
    """Against a count of small steps, on random spans."""
    draw = random.Random(0)
    for _ in range(20):
        spans = [sorted(draw.sample(range(101), 2)) for _ in range(5)]
        rows = [[["0F0", 0, 1], ["0F1", 100, 101]], [["1F0", *span] for span in spans]]
        idle = sum(not any(a <= t < b for a, b in spans) for t in range(101)) / 101
        assert measured(rows)["bubble"][1] == pytest.approx(idle, abs=1e-3)
    assert measured([[], []]) == {}


def test_the_hidden_part_of_transfers() -> None:
    """Against a count of small steps, on random spans; workers that did nothing do not count."""
    draw = random.Random(1)
    for _ in range(20):
        actions, moves = ([["x", *sorted(draw.sample(range(101), 2))] for _ in range(5)] for _ in range(2))
        spans = [[any(a <= t < b for _, a, b in rows) for t in range(101)] for rows in (actions, moves)]
        found = measured([[], actions, actions], [moves, moves, []])
        assert found["transfers"] == [sum(spans[1]), 0.0]
        assert found["hidden"] == [pytest.approx(sum(map(all, zip(*spans, strict=True))) / sum(spans[1]), abs=1e-3), 1.0]
    assert "hidden" not in measured([actions], [[]])


def test_the_trace_has_every_action_twice_as_measured_and_as_predicted() -> None:
    made, costs = schedule.make(schedule.ScheduleRequest("1f1b", range(2), 3)), schedule.uniform(2)
    rows = stamps(made, costs, 0.5, 70.0)
    order = {"name": "1f1b", "rows": str(made), "predicted": {"idle": 0.25}, "measured": measured(rows), "costs": costs.wire()}
    body = timeline.chrome({"workers": [{"name": f"w{n}", "actions": row} for n, row in enumerate(rows)], "schedule": order})
    events = [e for e in body["traceEvents"] if e["ph"] == "X"]
    for pid in (timeline.MEASURED, timeline.PREDICTED):
        mine = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["pid"] == pid]
        want = [(n, a, (s - 70) * 1e6, (e - s) * 1e6) for n, row in enumerate(rows) for a, s, e in row]
        assert [row[:2] for row in mine] == [row[:2] for row in want]
        for got, wanted in zip(mine, want, strict=True):
            assert got[2:] == pytest.approx(wanted[2:], abs=1000)  # the bubble is rounded
    assert {e["cat"] for e in events} == {"forward", "backward"} and body["otherData"] == order


@pytest.mark.parametrize("lie", [None, 3, [3], [["0F0", 0]], [["0F0", "a", "b"]]])
def test_the_instruction_log_says_what_stats_say_unless_a_worker_lies(lie: Any) -> None:
    made, costs = schedule.make(schedule.ScheduleRequest("1f1b", range(2), 3)), schedule.uniform(2)
    rows: list = [lie, lie] if lie is not None else stamps(made, costs, 0.5, 70.0)
    with planned("", 2) as plan:
        order = {"name": "1f1b", "rows": str(made), "bubble": [0.25, 0.25], "makespan": 6.0, "costs": costs.wire()}
        plan.core.sessions[b"client"].programs.order = order
        plan.core.handle(Received(b"client", Stats(5)))
        key = next(iter(plan.core.watch.surveys))
        plan.core.handle(Received(b"w0", Report(key, {"stats": {"actions": rows[0]}})))
        actions = plan.core.handle(Received(b"w1", Report(key, {"stats": {"actions": rows[1]}})))
    logged = [a.text for a in actions if isinstance(a, Log) and a.kind == "SCHEDULE"]
    assert logged == ([] if lie is not None else ["1f1b: bubble 25.00% of 6000.000 ms measured, 25.00% predicted"])
    (body,) = [a.message.body for a in actions if isinstance(a, Send) and isinstance(a.message, Report)]
    assert ("schedule" in body) == (lie is None)


@pytest.mark.usefixtures("plain_threads")
def test_a_replays_bubble_is_in_stats_and_in_the_trace(session: Callable, tmp_path: Path) -> None:
    session(CONFIGS / "pp2.yaml")
    training(2)
    assert "schedule" not in gt.stats()
    with pytest.raises(gt.GTError, match="no replay in a schedule"):
        gt.trace_replay(tmp_path / "none.json")
    training(6, "1f1b")
    counters = settled()
    order = gt.trace_replay(tmp_path / "out.json")
    assert order == counters["schedule"]
    timeline_ = schedule.simulate(schedule.parse(order["rows"]), schedule.Costs.from_wire(order["costs"]))
    assert order["name"] == "1f1b" and order["predicted"]["idle"] == pytest.approx(timeline_.idle, abs=1e-3)
    assert len(order["measured"]["bubble"]) == 2 and all(0 < b < 1 for b in order["measured"]["bubble"])
    body = json.loads((tmp_path / "out.json").read_text())
    ran = [(e["tid"], e["name"]) for e in body["traceEvents"] if e["ph"] == "X" and e["pid"] == timeline.MEASURED]
    assert sorted(ran) == sorted((n, a) for n, row in enumerate(order["rows"].split()) for a in row.split(","))
    assert all(e["dur"] > 0 for e in body["traceEvents"] if e["ph"] == "X")


@pytest.mark.usefixtures("plain_threads")
def test_a_replay_of_another_session_is_not_in_it(session: Callable) -> None:
    """Neither one on workers that this session does not use, nor a newer one on those that it uses."""
    session(CONFIGS / "pp8.yaml")
    training(6, "gpipe")
    gt.shutdown()
    session(CONFIGS / "pp2.yaml")
    training(2)
    assert not any(worker["actions"] for worker in settled()["workers"])
    training(6, "1f1b")
    counters = settled()
    rows = [[action for action, _, _ in worker["actions"]] for worker in counters["workers"]]
    assert [",".join(row) for row in rows if row] == counters["schedule"]["rows"].split()


def test_the_command_runs_a_script_and_says_its_bubble(
    server: object, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script ends its session itself, or leaves that to the end of the program."""
    from gt.cli import main

    monkeypatch.setenv("GT_SERVER", server.address)
    monkeypatch.setenv("GT_TOKEN", server.token)
    monkeypatch.setenv("GT_CONFIG", str(CONFIGS / "pp2.yaml"))
    script = tmp_path / "program.py"
    text = "import sys, gt\nfrom tests.observe.test_plan import training\ntraining(6, 'zb-h1')\n"
    for end in ("", "gt.shutdown()\n"):
        script.write_text(text + end)
        out = tmp_path / f"out{len(end)}.json"
        assert main(["trace", "-o", str(out), str(script)]) == 0, capsys.readouterr().err
        assert f"{out}: zb-h1: " in capsys.readouterr().out and json.loads(out.read_text())["traceEvents"]
    script.write_text("import gt\nprint(gt.ones(4).sum().item())\nraise ValueError('it failed')\n")
    assert main(["trace", "-o", str(tmp_path / "failed.json"), str(script)]) == 1
    told = capsys.readouterr().err
    assert "ValueError: it failed" in told and "slices, until the program ended" in told
    assert json.loads((tmp_path / "failed.json").read_text())["traceEvents"]
    script.write_text("import gt\nprint(gt.ones(4).sum().item())\nraise KeyboardInterrupt\n")
    assert main(["trace", "-o", str(tmp_path / "stopped.json"), str(script)]) == 130
    told = capsys.readouterr().err
    assert "slices, until the program ended" in told and told.endswith("\ngt trace: interrupted\n")
    assert json.loads((tmp_path / "stopped.json").read_text())["traceEvents"]
    assert main(["trace", "-o", str(tmp_path / "none" / "out.json"), str(script)]) == 1
    assert "cannot be written: there is no folder" in capsys.readouterr().err
    script.write_text("print(1)\n")
    assert main(["trace", "-o", str(tmp_path / "none.json"), str(script)]) == 1
    assert torch.zeros(1).item() == 0 and "did nothing with remote tensors" in capsys.readouterr().err
