"""`gt top`: text of 80 columns without colour, JSON for scripts, keys; beside a running server."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import gt
from gt.cli import observing
from gt.cli.dashboard import main as dashboard_main
from gt.cli.metrics import main as metrics_main
from gt.cli.top import Following, _live, _screen, _show, after_key, main
from gt.dispatcher.cluster import observers
from gt.errors import DispatcherLost
from gt.ir.text import columns
from gt.observe import top_view
from gt.observe.live_view import LiveView
from gt.observe.record_stream import ANSWER_SECONDS, RecordStream
from gt.wire.dealer import Dealer
from gt.wire.records import (
    ErrorRecord,
    HostRecord,
    LinkRecord,
    QueueRecord,
    Record,
    ScheduleRecord,
    ServerRecord,
    SessionRecord,
    WorkerRecord,
)
from tests.helpers.limits import limit
from tests.helpers.serving import serving, settled


def moment(at: float, more: int = 0, life: str = "life") -> list[Record]:
    """Records of two workers, a session with a schedule, a link and a client that waits."""
    where = [3, "aten.mm.default", "/home/ada/a_file_with_a_long_name.py", 12, "stage0", "op"]
    uses = {"3": {"weights": 1 << 18, "gradients": 0, "optimizer": 1 << 19, "activations": 1 << 18}}
    memory = {"sessions": {"3": 1 << 20}, "uses": uses, "arena": 1 << 20, "process": 3 << 20}
    workers = [
        WorkerRecord(
            name, "a-host-with-a-name", 5, "torch", "cpu", "shm", state, "", [3] if busy else [], 0.0, at, 10 + more,
            busy + more / 40, 1.0, 3, nbytes, memory, 0, where if busy else [],
        )
        for name, state, busy, nbytes in (("w0", "busy", 1.0, 1 << 20), ("w1", "idle", 0.0, 2 << 20))
    ]  # fmt: skip
    values = {"loss": 0.5, "bad": float("nan")}
    session = SessionRecord(
        3, "ada", "train.py", "h", 9, ["w0", "w1"], ["stage0"], at, 100 + more, 7, 2 + more, 4, values, where, "workers", 1, 5,
        6,
    )  # fmt: skip
    stamps = {"w0": [["0F0", 1.0, 2.0], ["0B0", 3.0, 4.0]], "w1": [["1F0", 2.0, 3.0]]}
    measured = {"makespan": 3.0, "bubble": [0.3, 0.6], "idle": 0.45}
    schedule = ScheduleRecord(3, 2 + more, "1f1b", {"idle": 0.4, "bubble": [0.4, 0.4], "makespan": 4}, measured, stamps, "", {})
    error = ErrorRecord(1, 0.5, 3, "w1", "aten.mm.default", "/home/ada/train.py", 12, "stage0", "train.py:12: it failed")
    server = ServerRecord(at, "shared", 0.5, 1, 1, 1, 0.0, life)
    return [server, *workers, session, schedule, error, QueueRecord(1, "bob", "wait.py", 2), HostRecord("h", ["w0", "w1"]),
            LinkRecord("w0", "w1", 1 << 20)]  # fmt: skip


def state() -> dict[str, Any]:
    view = LiveView()
    view.update(moment(1.0))
    return view.update(moment(2.0, more=20))


@pytest.mark.parametrize("height", [10, 22, 24, 27])
def test_each_table_is_seen_in_a_few_rows(height: int) -> None:
    shown = state()
    shown["workers"] = [dict(shown["workers"][0], name=f"w{n}") for n in range(16)]
    shown["links"] = [dict(shown["links"][0], source=f"w{n}") for n in range(16)]
    whole, text = top_view.lines(shown), top_view.lines(shown, height=height)
    assert len(text) == max(height, 22) < len(whole)
    assert [row for row in text if row in heads(whole)] == heads(whole)
    assert any(row.startswith("and ") and row.endswith(" rows more") for row in text)
    assert top_view.lines(shown, height=len(whole)) == whole


@pytest.mark.parametrize("gone", ["lost", "silent"])
def test_a_worker_that_tells_nothing_any_more_has_no_rates(gone: str) -> None:
    """Its age is rounded, so that by the server's clock some microseconds had passed since its last count: 0% busy."""
    view = LiveView()
    view.update(moment(1.0))
    view.update(moment(2.0, more=20))
    late = [
        replace(r, clock=2.0, age=1.0004, state=gone if r.name == "w0" else "idle") if isinstance(r, WorkerRecord) else r
        for r in moment(3.0, more=20)
    ]
    now = view.update(late)
    mute, slow = now["workers"]
    assert [mute[rate] for rate in ("busy_share", "ops_per_second", "cpu_share")] == [None] * 3
    assert slow["busy_share"] == 0.5 and slow["ops_per_second"] == 20  # it has not answered in time: its last figures
    assert now["links"][0]["bytes_per_second"] is None
    row = next(row for row in top_view.lines(now) if row.startswith("w0"))
    assert row.split()[:4] == ["w0", gone, "-", "-"]


@pytest.mark.parametrize("width", [60, 80])
def test_figures_of_a_worker_that_has_not_answered_are_unknown(width: int) -> None:
    """It had 0 B of tensors and no limit. A lost one has no tensors, as is known."""
    blank = {"age": -1.0, "live_bytes": 0, "limit": 0, "memory": {}}
    rows = moment(1.0)
    rows[1:3] = [replace(rows[1], **blank), replace(rows[2], **blank, state="lost")]
    shown = top_view.lines(LiveView().update(rows), width=width)
    new, lost = [row.split() for row in shown if row.startswith(("w0 ", "w1 "))][:2]  # a pipeline's bars follow
    assert new[2:7] == ["-"] * (5 if width == 80 else 2)
    assert lost[2:8] == (["-", "-", "0", "B", "-", "-"] if width == 80 else ["-", "0", "B"])


def test_shares_are_by_the_clock_of_the_worker_and_never_more_than_whole() -> None:
    """The server takes an answer late, and the next one in time: by its clock a busy worker was busy for longer."""
    view = LiveView()
    for at, clock in ((1.0, 10.0), (1.5, 10.9)):
        rows = [replace(r, clock=clock, busy_seconds=clock) if isinstance(r, WorkerRecord) else r for r in moment(at)]
        shown = view.update(rows)
    assert [worker["busy_share"] for worker in shown["workers"]] == [1.0, 1.0]


def heads(rows: list[str]) -> list[str]:
    """The first row of each table."""
    return [row for before, row in pairwise(rows) if not before]


def test_rows_of_a_short_table_go_to_the_long_ones() -> None:
    long, short = [str(n) for n in range(9)], ["a", "b"]
    assert top_view.fit([long, short], 7) == [["0", "1", "2", "3", "and 5 rows more"], short]
    assert top_view.fit([long, short], 11) == [long, short]
    assert top_view.fit([long, long], 0) == [["0", "and 8 rows more"]] * 2


@pytest.mark.parametrize("width", [39, 60])
def test_a_phone_shows_all_that_is_known(width: int) -> None:
    now = state()
    now["workers"][0]["host"] = "host-b"
    now["workers"].append(dict(now["workers"][1], name="w2", state="lost", current={}, reason="its connection ended, so " * 3))
    rows = top_view.lines(now, width=width)
    text = " ".join(" ".join(rows).split())
    assert max(map(len, rows)) <= width
    words = (
        "on host-b",
        "ended, so its connection",
        "50%",
        "loss=0.5",
        "steps/s 20",
        "a second",
        "45.0% measured",
        "40.0% predicted",
    )
    for word in (*words, "optimizer 1.0 MiB", "it failed"):
        assert word in text
    for height in (24, 30):
        assert len(top_view.lines(now, width=width, height=height)) <= height


def test_a_lost_worker_says_why_in_full() -> None:
    now, why = state(), "its connection ended: the process exited, was killed, or stopped answering"
    now["workers"][1].update(state="lost", current={}, reason=why)
    assert why in " ".join(" ".join(top_view.lines(now)).split())


def test_rates_are_differences_and_unknown_at_first() -> None:
    first = LiveView().update(moment(1.0))
    assert first["workers"][0]["ops_per_second"] is None and first["sessions"][0]["steps_per_second"] is None
    now = state()
    assert now["workers"][0]["ops_per_second"] == 20 and now["workers"][0]["busy_share"] == 0.5
    assert now["sessions"][0]["steps_per_second"] == 20 and now["links"][0]["bytes_per_second"] == 0
    (line,) = now["lines"]
    assert (line["session"], line["line"], line["op"], line["samples"], line["share"]) == (3, 12, "aten.mm.default", 2, 1.0)
    json.dumps(now, allow_nan=False)


def test_the_text_has_80_columns_and_all_that_is_known() -> None:
    rows = top_view.lines(state())
    text = "\n".join(rows)
    assert max(map(len, rows)) <= 80 and text.isprintable() is False and "\x1b" not in text
    words = ("shared server", "w0", "busy", "50%", "train.py", "loss=0.5", "bob", "w0 -> w1", "1f1b", "45.0%", "40.0%")
    for word in (*words, "optimizer 1.0 MiB", "train.py:12: it failed"):
        assert word in text
    bars = [row.split()[1] for row in rows[-2:]]
    assert bars[0].startswith("F") and bars[0].endswith("B") and "." in bars[0]
    assert bars[1].strip(".") == "F" * bars[1].count("F")


def test_columns_stay_apart_and_hosts_are_named() -> None:
    now = state()
    first, second = now["workers"]
    first["host"], first["limit"], first["live_bytes"], first["memory"]["process"] = "b", 1023 << 20, 1023 << 10, (1 << 40) - 1
    head, row = top_view.lines(now)[2:4]
    assert head.split() == ["worker", "host", "state", "busy", "ops/s", "tensors", "taken", "limit", "now"]
    assert row.split()[:11] == ["w0", "b", "busy", "50%", "20", "1023", "KiB", "1024", "GiB", "1023", "MiB"]
    second["host"] = "b"
    assert "host" not in "\n".join(top_view.lines(now)[:3]) and top_view.lines(now)[0].startswith("shared server on b, up 2 s")
    assert "a_file_with" in top_view.lines(now)[3]


@pytest.mark.parametrize("width", [39, 80])
def test_names_of_wide_characters_keep_their_columns(width: int) -> None:
    """A terminal draws a character of East Asia in two columns, and a mark on a letter in none."""
    now, wide = state(), "\u8a13\u7df4\u7528\u30b9\u30af\u30ea\u30d7\u30c8" * 3
    now["sessions"][0].update(program=wide, user="re\u0301ne\u0301")
    now["workers"][0].update(host=wide, name=wide)
    now["errors"][0]["text"] = now["workers"][1]["reason"] = wide * 9
    rows = top_view.lines(now, width=width)
    assert max(map(columns, rows)) <= width and columns("\u8a13a\u0301") == 3
    head, row = next(pair for pair in pairwise(rows) if pair[0].startswith("session "))
    assert columns(row[: row.index(wide[:8])]) == head.index("program") and row.startswith("3       re\u0301ne\u0301     ")
    head, row = (next(row for row in rows if row.startswith(start)) for start in ("worker ", wide[:3]))
    assert columns(row[: row.index("busy")]) == head.index("state")


def test_the_line_that_a_worker_is_at_is_not_cut_for_a_long_op() -> None:
    now = state()
    first, second = now["workers"]
    first["host"] = second["host"] = "a"
    first["current"].update(op="aten.native_layer_norm_backward.default", file="/home/ada/train.py")
    assert "train.py:12" in top_view.lines(now)[3]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_one_view_is_as_wide_as_its_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((width, 24)))
    given = argparse.Namespace(once=True, json=False, sort="name", session=-1, interval=0.5, token_file=None)
    assert _show(Scripted(moment(1.0), moment(2.0)), given) == 0  # type: ignore[arg-type]
    assert max(map(len, screen.getvalue().splitlines())) <= width


def test_a_long_error_is_on_several_rows() -> None:
    now = state()
    now["errors"][0]["text"] = "word " * 100
    rows = [row for row in top_view.lines(now) if "word" in row]
    assert len(rows) == top_view.ERROR_ROWS and max(map(len, rows)) <= 80 and rows[-1].endswith("...")


def test_a_session_is_shown_alone_and_workers_are_sorted() -> None:
    assert [row[:2] for row in top_view.lines(state(), "memory") if row.startswith("w")][1:3] == ["w1", "w0"]
    text = "\n".join(top_view.lines(state(), session=3))
    assert "w1      idle" not in text and "w0      busy" in text
    text = "\n".join(top_view.lines(state(), session=9))
    assert "tensors to another" in text and "at an op of session 9 yet" in text and "no worker of session 9 has sent" in text
    assert "no workers of session 9" in text and "no session 9; sessions: 3" in text


def test_nothing_is_said_of_what_is_not_known() -> None:
    empty = LiveView().update([ServerRecord(1.0, "shared", 0.5, 1, 1, 1, 0.0, "life")])
    text = "\n".join(top_view.lines(empty))
    assert "no workers" in text and "no sessions" in text and "no worker was seen" in text


def test_keys() -> None:
    assert after_key("s", "name", 3) == ("busy", 3) and after_key("s", "ops", -1) == ("name", -1)
    assert after_key("4", "busy", -1) == ("busy", 4) and after_key("a", "busy", 4) == ("busy", -1)
    shown = [-1]
    for _ in range(4):
        shown.append(after_key("n", "name", shown[-1], [2, 11, 30])[1])
    assert shown == [-1, 2, 11, 30, -1] and after_key("n", "name", 4, []) == ("name", -1)
    assert after_key("x", "busy", 4) == after_key("²", "busy", 4) == ("busy", 4)


class Scripted:
    """A stream of a server: lists of records are news, None is none, errors are raised. After them `waits` has it wait."""

    address = "here:1"

    def __init__(self, *answers: Any, waits: bool = False) -> None:
        self.answers, self.closed, self.waits = list(answers), False, waits
        self.nudged = threading.Event()

    def nudge(self) -> None:
        self.nudged.set()

    def take(self, seconds: float) -> Any:
        if self.waits and not self.answers:
            assert self.nudged.wait(limit(60))
            self.nudged.clear()
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def next(self) -> Any:
        return self.take(1.0)

    def close(self) -> None:
        self.closed = True


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_that_cannot_place_text_gets_one_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of an editor."""
    pytest.importorskip("rich")
    screen = Screen()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdin", Screen())
    monkeypatch.setattr(sys, "stdout", screen)
    given = argparse.Namespace(once=False, json=False, sort="name", session=-1, interval=0.5, token_file=None)
    assert _show(Scripted(moment(1.0), moment(2.0)), given) == 0  # type: ignore[arg-type]
    assert "\x1b" not in screen.getvalue() and screen.getvalue().count("shared server") == 1


def following(monkeypatch: pytest.MonkeyPatch, first: Scripted, *others: Scripted) -> Following:
    left = list(others)
    monkeypatch.setitem(_live.__globals__, "RecordStream", lambda address, token, interval: left.pop(0))
    return Following(first, LiveView(), argparse.Namespace(token_file=None, interval=0.5))  # type: ignore[arg-type]


def test_a_link_that_ends_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a terminal which was stopped has ended."""
    first, second = (
        Scripted(moment(1.0), DispatcherLost("it was dropped")),
        Scripted(None, moment(9.0), DispatcherLost("again")),
    )
    third = Scripted(DispatcherLost("no server"))
    with following(monkeypatch, first, second, third) as follower:
        assert follower.state(0.2) is not None and follower.problem == ""
        assert follower.state(0.2) is None and follower.problem == "it was dropped" and first.closed
        assert follower.state(0.2) is None and follower.problem == "it was dropped"
        again = follower.state(0.2)
        assert again is not None and follower.problem == "" and again["workers"][0]["ops_per_second"] is None
        assert follower.state(0.2) is None
        with pytest.raises(DispatcherLost, match="again; no server"):
            follower.state(0.2)
    assert third.closed


def test_a_silent_server_is_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with following(monkeypatch, Scripted(), Scripted(moment(1.0))) as follower:
        for _ in range(int(ANSWER_SECONDS / 10) + 1):  # and the interval between two Records
            assert follower.problem == "" and follower.state(10.0) is None
        assert "no records for 30.5 s" in follower.problem and follower.state(10.0) is not None and not follower.problem


@pytest.mark.parametrize("size", [(40, 12), (40, 30), (80, 24), (120, 50)])
@pytest.mark.parametrize("problem", ["", "the server has ended the connection: it got SIGTERM"])
def test_the_screen_has_as_many_rows_as_the_terminal(size: tuple[int, int], problem: str) -> None:
    for now in (None, state()):
        rows = _screen(now, "name", -1, problem, *size)
        assert len(rows) <= size[1] and max(map(len, rows)) <= size[0] and "q end" in rows[-1]
        assert (problem[:20] in rows[0]) and ("waiting for" in "".join(rows)) == (now is None)


def test_keys_act_while_the_server_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read from a real terminal: `q` ends the view though records come each ten seconds."""
    pytest.importorskip("rich")
    controller, terminal = os.openpty()
    with os.fdopen(terminal, "r+b", buffering=0) as end, io.TextIOWrapper(end) as screen:
        monkeypatch.setattr(sys, "stdin", screen)
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        stream = Scripted(moment(1.0), waits=True)
        take = stream.take

        def typed(seconds: float) -> Any:
            os.write(controller, b"s" if stream.answers else b"q")
            return take(seconds)

        monkeypatch.setattr(stream, "take", typed)
        given = argparse.Namespace(token_file=None, interval=0.5, sort="name", session=-1)
        assert _live(stream, LiveView(), given) == 0 and stream.closed  # type: ignore[arg-type]
    os.close(controller)


def test_a_key_ends_a_wait_for_records() -> None:
    """Of a thread that polls for keys the CPU time would be most of what the view costs."""
    with serving(1) as server, RecordStream(server.address, interval=600.0) as stream:
        stream.next()
        stream.next()  # a new observer gets two at once
        waiting = threading.Timer(0.0, stream.nudge)
        waiting.start()
        assert stream.take(limit(60)) is None
        waiting.join()


def test_the_session_of_a_server_before_is_not_chosen_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sessions have the same numbers. The same server goes on with it."""
    pytest.importorskip("rich")
    controller, terminal = os.openpty()
    with os.fdopen(terminal, "r+b", buffering=0) as end, io.TextIOWrapper(end) as screen:
        monkeypatch.setattr(sys, "stdin", screen)
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        stream = Scripted(moment(1.0), moment(2.0), moment(3.0, life="second"), waits=True)
        drawn: list[tuple] = []

        def noted(state: Any, order: str, session: int, *more: Any) -> list[str]:
            drawn.append((state["server"]["at"], session))
            if not stream.answers:
                os.write(controller, b"q")
            return []

        monkeypatch.setitem(_live.__globals__, "_screen", noted)
        given = argparse.Namespace(token_file=None, interval=0.5, sort="name", session=3)
        assert _live(stream, LiveView(), given) == 0  # type: ignore[arg-type]
        assert drawn == [(1.0, 3), (2.0, 3), (3.0, -1)]
    os.close(controller)


def test_once_prints_json_without_rich_and_its_figures_are_those_of_stats(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(observers, "PATIENCE_SECONDS", limit(60))  # on a busy machine a worker may answer late
    with serving(2) as server:
        gt.connect(server.address, name=False, config="")
        float((torch.ones(8, 8, device=gt.device) @ torch.ones(8, 8, device=gt.device)).sum())
        stats = settled()
        assert main([server.address, "--once", "--json"], "") == 0
        shown = json.loads(capsys.readouterr().out)
        assert {"workers", "sessions", "links"} <= set(shown)
        for worker, told in zip(shown["workers"], stats["workers"], strict=True):
            assert (worker["name"], worker["instructions"], worker["live_bytes"]) == (
                told["name"],
                told["instructions"],
                told["live_bytes"],
            )
        assert shown["sessions"][0]["ops"] == stats["dispatcher"]["ops_planned"]
        assert main([server.address], "") == 0  # piped: once, as text
        text = capsys.readouterr().out
        assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80 and "w1" in text
        gt.shutdown()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--interval", "nan"), "got 'nan', want 0.5 to 60 seconds"),
        (("--interval", "inf"), "got 'inf', want 0.5 to 60 seconds"),
        (("--interval", "0"), "got '0', want 0.5 to 60 seconds"),
        (("--interval", "soon"), "got 'soon', want 0.5 to 60 seconds"),
        (("--session", "-5"), "'-5' is not a session"),
        (("--session", "3", "--json"), "JSON has all sessions"),
    ],
)
def test_an_option_without_sense_is_refused_before_a_server_is_asked(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["127.0.0.1:1", *options], "")
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("command", [dashboard_main, metrics_main])
@pytest.mark.parametrize("number", ["99999", "-1", "http"])
def test_a_page_and_metrics_refuse_what_is_no_port(
    command: Callable[[list[str], str], int], number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["127.0.0.1:1", f"--port={number}"], "")
    assert ended.value.code == 2 and f"'{number}' is not a port: want 0 to 65535" in capsys.readouterr().err


def test_the_shortest_and_longest_interval_are_those_that_a_server_grants() -> None:
    assert (observing.SHORTEST_SECONDS, observing.LONGEST_SECONDS) == (
        observers.MIN_INTERVAL_SECONDS,
        observers.MAX_INTERVAL_SECONDS,
    )


def test_records_are_waited_for_longer_than_the_interval_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    with serving(1) as server, RecordStream(server.address, interval=60.0) as stream:
        monkeypatch.setattr(stream, "take", waits.append)
        with pytest.raises(DispatcherLost, match="no records for 90 s"):
            stream.next()
    assert sum(waits) == 90.0


def test_a_server_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["nowhere", "--once"], "") == 1
    assert "'nowhere' is not an address" in capsys.readouterr().err


@pytest.mark.parametrize("command", [main, dashboard_main])
@pytest.mark.parametrize("there", [False, True])
def test_a_command_says_what_it_waits_for(
    command: Callable[[list[str], str], int], there: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was silent for 10 s, or 30 s beside a server that was stopped."""
    monkeypatch.setattr(observing, "NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(RecordStream, "next", interrupted)
    if there:
        monkeypatch.setattr(Dealer, "connected", True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        said = f"the server at {address} has sent no records yet" if there else f"no server at {address} has answered yet"
        assert command([address], "") == 0
        assert said in capsys.readouterr().err


def interrupted(stream: RecordStream) -> list[Record]:
    raise KeyboardInterrupt
