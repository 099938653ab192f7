"""`gt.trace` of any program: its events keep the rules of the format, and name lines, groups, layouts and transfers."""

from __future__ import annotations

import inspect
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

import gt
from gt.client.reports import spans
from gt.observe import trace_file
from gt.wire.messages import TraceRows
from gt.worker import executor
from gt.worker.process.tracer import Tracer
from tests.helpers.limits import limit
from tests.helpers.processes import run_program
from tests.helpers.serving import serving
from tests.observe import trace_rules
from tests.observe.test_plan import CONFIGS, training

pytestmark = pytest.mark.usefixtures("plain_threads")
TWO = {"stage0": {"workers": [0]}, "stage1": {"workers": [1]}}


def two_stages(steps: int, captured: bool) -> None:
    up, down = torch.nn.Linear(16, 32).to("remote"), torch.nn.Linear(32, 4).to("remote")
    optimizer = torch.optim.SGD([*up.parameters(), *down.parameters()], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        with gt.signal.context("stage0"):
            h = torch.relu(up(x))
        with gt.signal.context("stage1"):
            loss = down(h).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = gt.compile(step) if captured else step
    for _ in range(steps):
        run(torch.randn(8, 16, device="remote")).item()


def line_of(text: str, function: Callable) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(n for n, line in enumerate(lines) if text in line)


def of(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Slices of one process, by its name."""
    pid = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == name)
    return [e for e in events if e["pid"] == pid and e["ph"] == "X"]


@pytest.mark.parametrize("captured", [False, True])
def test_slices_have_lines_and_groups_and_transfers_have_arrows(session: Callable, tmp_path: Path, captured: bool) -> None:
    session(TWO)
    path = tmp_path / "out.json"
    with gt.trace(path) as report:
        two_stages(6, captured)
    events = trace_rules.check(path)
    assert report["dropped"] == 0 and report["slices"] == sum(e["ph"] == "X" for e in events)
    first, second = of(events, "worker w0"), of(events, "worker w1")
    products = [e for e in first if e["name"] == "aten.addmm"]
    assert len(products) == 6 and all(e["args"]["group"] == "stage0" and e["cat"] == "op" for e in products)
    assert all(Path(e["args"]["line"].rpartition(":")[0]).name == Path(__file__).name for e in products)
    assert all("on workers 0" in e["args"]["layout"] and e["args"]["bytes"] == 8 * 32 * 4 for e in products)
    sends, receives = [e for e in first if e["name"] == "send to w1"], [e for e in second if e["name"] == "recv from w0"]
    assert len(sends) == len(receives) >= 6
    starts = [e for e in events if e["ph"] == "s"]
    assert len(starts) == len([e for e in first + second if e["cat"] == "send"])
    assert any(e["args"].get("backward") for e in first)
    assert {e["name"] for e in events if e["ph"] == "C"} == {"memory of tensors [bytes]", "moved [bytes]"}
    assert max(e["args"]["bytes"] for e in events if e["ph"] == "C" and "bytes" in e["args"]) >= 16 * 32 * 4
    names = {e["name"] for e in of(events, "program")}
    assert {"wait for a value", "Python"} <= names and ("replay two_stages.<locals>.step" in names) == captured
    waits = {e["args"].get("line") for e in of(events, "program") if e["name"] == "wait for a value"}
    assert waits >= {f"{__file__}:{line_of('.item()', two_stages)}"}, "the line that waits"
    assert "Ops" in {e["name"] for e in of(events, "dispatcher")}
    assert spans.current is None


def test_a_split_op_shows_its_collective_and_layout(session: Callable, tmp_path: Path) -> None:
    session({"net_colpar": {"workers": [0, 1]}, "net_rowpar": {"workers": [0, 1]}})
    up, down = torch.nn.Linear(16, 32).to("remote"), torch.nn.Linear(32, 4).to("remote")
    with gt.trace(tmp_path / "out.json"):
        x = torch.randn(8, 16, device="remote")
        with gt.signal.context("net_colpar"):
            h = up(x)
        with gt.signal.context("net_rowpar"):
            torch.relu(down(h)).sum().item()
    rows = of(trace_rules.check(tmp_path / "out.json"), "worker w1")
    reduced = [e for e in rows if e["cat"] == "all_reduce"]
    assert reduced and reduced[0]["args"]["workers"] == "w0, w1" and reduced[0]["args"]["line"]
    assert any("S(1)" in e["args"].get("layout", "") for e in rows)


def test_a_scheduled_step_has_its_schedule_and_micro_batches(session: Callable, tmp_path: Path) -> None:
    session(CONFIGS / "pp2.yaml")
    with gt.trace(tmp_path / "out.json") as report:
        training(6, "1f1b")
    events = trace_rules.check(tmp_path / "out.json")
    assert report["schedule"]["name"] == "1f1b" and of(events, "measured") and of(events, "predicted")
    assert {e["args"].get("micro-batch") for e in of(events, "worker w0")} > {0, 1}
    low, high = (f(e["ts"] for e in of(events, "measured")) for f in (min, max))
    programs = [e for e in of(events, "worker w0") if e["cat"] == "program"]
    assert programs[-1]["ts"] <= low and high <= programs[-1]["ts"] + programs[-1]["dur"] + 1, "on the same clock"


def test_a_trace_begins_before_the_session_and_outlives_it(session: Callable, tmp_path: Path) -> None:
    with gt.trace(tmp_path / "out.json") as report:
        session(TWO)
        two_stages(2, False)
        gt.shutdown()
        session(TWO)
        two_stages(1, False)
    events = trace_rules.check(tmp_path / "out.json")
    assert report["slices"] and sum(e["name"] == "process_name" and e["args"]["name"] == "program" for e in events) == 2


def test_nothing_is_recorded_before_or_after(session: Callable, tmp_path: Path) -> None:
    session(TWO)
    two_stages(1, False)
    with gt.trace(tmp_path / "out.json"):
        gt.zeros(3).add_(1).sum().item()
        with pytest.raises(gt.GTError, match="a trace is being made"), gt.trace(tmp_path / "other.json"):
            pass
    two_stages(1, False)
    names = {e["name"] for e in of(trace_rules.check(tmp_path / "out.json"), "worker w0")}
    assert "aten.add_.Tensor" in names and "aten.addmm" not in names
    with pytest.raises(FileNotFoundError, match="there is no folder"), gt.trace(tmp_path / "none" / "out.json"):
        pass


def test_the_file_is_written_where_the_program_fails(session: Callable, tmp_path: Path) -> None:
    session(TWO)
    with pytest.raises(ZeroDivisionError), gt.trace(tmp_path / "out.json"):
        gt.zeros(3).add_(1).sum().item()
        1 / 0
    assert of(trace_rules.check(tmp_path / "out.json"), "worker w0")


def test_another_sessions_instructions_are_not_in_it(server: Any, session: Callable, tmp_path: Path) -> None:
    session("")
    with gt.trace(tmp_path / "out.json"):
        connect = f"import gt; gt.connect({server.address!r}, token={server.token!r}); "
        run_program(
            "import sys; sys.path.insert(0, {root!r}); ", connect + "gt.zeros(5).cosh().sum().item(); gt.shutdown()", 60
        )
        gt.zeros(3).sin().sum().item()
    names = {e["name"] for e in trace_rules.check(tmp_path / "out.json") if e["ph"] == "X"}
    assert "aten.sin" in names and "aten.cosh" not in names


def test_perfetto_reads_it(session: Callable, tmp_path: Path) -> None:
    processor = os.environ.get("GT_TRACE_PROCESSOR", "")
    if not processor:
        pytest.skip("GT_TRACE_PROCESSOR does not name Perfetto's trace_processor_shell")
    session(TWO)
    with gt.trace(tmp_path / "out.json") as report:
        two_stages(3, False)
    query = tmp_path / "query.sql"
    query.write_text(
        "select (select count(*) from slice), (select count(*) from flow), (select value from stats where name = "
        "'json_parser_failure');"
    )
    said = subprocess.run(
        [processor, "-q", query, tmp_path / "out.json"], capture_output=True, text=True, timeout=limit(60), check=True
    )
    slices, flows, failures = said.stdout.splitlines()[-1].split(",")
    assert int(slices) == report["slices"] and int(flows) > 0 and int(failures) == 0, said


class Immediate:
    """A device that does work when it is issued, on two streams: a mark is a moment."""

    def __init__(self) -> None:
        self.listening: tuple = (None, None)

    def mark(self, spare: Any = None) -> list[float]:
        return [monotonic()]

    def listen(self, listener: Any, mark: Any) -> tuple:
        before, self.listening = self.listening, (listener, mark)
        if listener is not None:
            listener("uploads", [monotonic()], [monotonic()])
        return before

    def clocks(self) -> float:
        return monotonic()

    def seconds(self, marks: list, began: float) -> list[float]:
        return [mark[0] for mark in marks]


def test_each_stream_of_a_device_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        executor, "Tracer", lambda begin, sample, definitions, _: Tracer(begin, sample, definitions, Immediate())
    )
    with serving(2) as server:
        gt.connect(server.address, config=TWO)
        with gt.trace(tmp_path / "out.json") as report:
            two_stages(2, False)
        gt.shutdown()
    events = trace_rules.check(tmp_path / "out.json")
    pid = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "worker w0")
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid}
    assert report["dropped"] == 0 and names == {0: "instructions", 1: "GPU stream: compute", 2: "GPU stream: uploads"}
    issued, compute, uploads = (
        [(e["name"], e["args"]) for e in of(events, "worker w0") if e["tid"] == tid] for tid in sorted(names)
    )
    assert issued == compute == uploads, "with the same line, group and layout"


def rows(worker: int, events: list, names: list, **more: Any) -> TraceRows:
    body = {"device": [], "streams": [], "counters": [], "clock": 0.0, "dropped": 0, "left": 0, **more}
    return TraceRows(1, worker, events, names=names, **body)


def test_clocks_of_other_hosts_are_set_right() -> None:
    answer = {"workers": ["w0", "w1"], "ahead": [0.0, 100.0], "dispatcher": -50.0}
    parts = [
        rows(0, [16, 7, 1.0, 1.5], [[16, "send", "", 64, [1]]]),
        rows(1, [17, 7, 101.25, 101.75], [[17, "recv", "", 64, [0]]]),
        rows(
            -1,
            [0, 0, -49.0, -48.5],
            [["event", ["Ops"]], ["origin", 0, "a.py", 3, "g", False, -1], ["op", 7, "aten.mm", 0, ""]],
        ),
    ]
    recording = trace_file.SessionRecording(answer, parts, [], 0.0, 2.0, "MainThread")
    events = [e for e in trace_file.events(recording) if e["ph"] in "Xsf"]
    times = {e["name"]: (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert times["Ops"] == (1e6, 0.5e6) and times["send to w1"] == (1e6, 0.5e6) and times["recv from w0"] == (1.25e6, 0.5e6)
    assert [e["ph"] for e in events if e["ph"] in "sf"] == ["s", "f"]
    assert all(e["args"]["line"] == "a.py:3" for e in events if e["ph"] == "X" and e["cat"] in ("send", "recv"))


def test_what_began_before_the_trace_is_cut_off(tmp_path: Path) -> None:
    """Workers record before the trace begins, and a thread may wait already. Perfetto has no negative times."""
    answer = {"workers": ["w0"], "ahead": [5.0], "dispatcher": 0.0}
    parts = [
        rows(0, [16, 7, 14.0, 14.5, 16, 8, 14.8, 15.5], [[16, "op", "x", 1, []]], counters=[14.9, 1, 0, 0, 15.1, 2, 0, 0]),
        rows(-1, [0, 0, 9.0, 9.5, 0, 0, 9.75, 10.25], [["event", ["Ops"]]]),
    ]
    waits = [spans.Span("before", "loader", 9.0, 9.5, {}), spans.Span("wait", "loader", 9.5, 11.0, {})]
    recording = trace_file.SessionRecording(answer, parts, waits, 10.0, 12.0, "MainThread")
    trace_file.write(tmp_path / "out.json", [recording])
    shown = [(e["name"], e["ts"], e.get("dur")) for e in trace_rules.check(tmp_path / "out.json") if e["ph"] in "XC"]
    memory, moved = "memory of tensors [bytes]", "moved [bytes]"
    assert [row for row in shown if row[0] != "Python"] == [
        ("wait", 0.0, 1e6), ("Ops", 0.0, 0.25e6), ("x", 0.0, 0.5e6), (memory, 0.1e6, None), (moved, 0.1e6, None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "part",
    [
        rows(5, [1, 2, 3.0, 4.0], []), rows(0, [1, 2, 3.0], []), rows(0, [1, 2, float("nan"), 4.0], []),
        rows(0, [1, 2, 4.0, 3.0], []), rows(0, [], [3, [1], ["a", 1, 2, 3, 4], [16, "op", "x", 1, ["y"]]]),
        rows(0, [], [], counters=[1.0, 2.0]), rows(0, [16, 2, 1.0, 2.0], [[16, "send", "", 1, [77]]]),
        rows(0, [], [], device=[16, 2, 1.0, 2.0, 1], streams=["compute"]),
        rows(0, [], [], device=[16, 2, 1.0, 2.0, -1.0, 16, 2, 3.0, 4.0, 0, 5], streams=[["x"]]),
        rows(0, [], [], device=[16, 2, 1.0, 2.0, float("nan")], streams=["compute", 7]),
    ],
)  # fmt: skip
def test_a_worker_that_lies_spoils_no_file(part: TraceRows, tmp_path: Path) -> None:
    recording = trace_file.SessionRecording({"workers": ["w0"], "ahead": [0.0]}, [part], [], 0.0, 2.0, "MainThread")
    trace_file.write(tmp_path / "out.json", [recording])
    trace_rules.check(tmp_path / "out.json")


def test_threads_of_one_name_have_rows_of_their_own(tmp_path: Path) -> None:
    """Their waits overlap, so that in one row the slices would not nest."""
    waits = [spans.Span("wait", "loader", 0.1 * n, 0.1 * n + 0.15, {}, ident=n % 2) for n in range(1, 6)]
    recording = trace_file.SessionRecording({}, [], waits, 0.0, 2.0, "MainThread", ident=7)
    trace_file.write(tmp_path / "out.json", [recording])
    client = of(trace_rules.check(tmp_path / "out.json"), "program")
    assert {e["tid"]: e["name"] for e in client} == {0: "Python", 1: "wait", 2: "wait"} and len(client) == 6


def test_spans_of_a_program_know_their_thread() -> None:
    buffer = spans.SpanBuffer()
    spans.add_sink(buffer)
    try:
        with spans.span("wait"):
            pass
    finally:
        spans.remove_sink(buffer)
    assert [(s.thread, s.ident) for s in buffer.spans] == [(threading.current_thread().name, threading.get_ident())]


def test_a_trace_is_for_its_owner_alone(tmp_path: Path) -> None:
    """It has the program's files, lines and shapes."""
    trace_file.write(tmp_path / "trace.json", [])
    assert (tmp_path / "trace.json").stat().st_mode & 0o777 == 0o600


def test_memory_of_spans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MAX_SPANS", 4)
    buffer = spans.SpanBuffer()
    for n in range(9):
        buffer(spans.Span(str(n), "t", 0.0, 1.0, {}))
    assert [s.name for s in buffer.spans] == ["5", "6", "7", "8"] and buffer.count == 9
