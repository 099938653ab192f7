"""Observers of a running server: the role, its records, and their agreement with gt.stats()."""

from __future__ import annotations

import gc
import threading
from dataclasses import fields

import pytest
import torch

import gt
from gt.client.groups.role_reports import RoleReports, fitting, roles
from gt.client.trace.recorder import Recorder
from gt.dispatcher.cluster import observers
from gt.dispatcher.cluster.health import stamps
from gt.dispatcher.cluster.look_budget import MAX_PAUSE_SECONDS
from gt.dispatcher.cluster.observers import MAX_OBSERVERS, MAX_UNREAD_RECORDS
from gt.dispatcher.cluster.recent_records import MAX_SENT_LINES, RecentRecords
from gt.dispatcher.core import Core
from gt.dispatcher.events import MARK, Close, PeerLost, Received, Send, Tick
from gt.dispatcher.server import Server
from gt.errors import DispatcherLost, ProtocolError, Refused
from gt.observe.live_view import LiveView
from gt.observe.record_stream import RecordStream
from gt.wire import codec, records
from gt.wire.access.auth import Access
from gt.wire.link import Gate, hello
from gt.wire.messages import (
    CODES,
    Exit,
    Fetch,
    Goodbye,
    Metrics,
    Observe,
    Query,
    Records,
    Reject,
    Report,
    TensorRoles,
    Watched,
)
from tests.helpers.limits import limit
from tests.helpers.serving import serving, settled

STATS = {"instructions": 7, "live_bytes": 64, "session_bytes": {"0": 64}, "bytes_sent": {"w1": 5}, "busy_seconds": 0.5}


class Observed:
    """A core with two workers and one session; every message that it sends, by peer."""

    def __init__(self) -> None:
        self.core, self.now = Core(), 0.0
        self.sent: dict[bytes, list] = {}
        self.closed: list[bytes] = []
        for name in (b"w0", b"w1"):
            self.give(name, hello("worker", info={"host": "h", "heap_bytes": 1 << 20, "device": "cpu"}))
        self.give(b"c", hello("client", info={"user": "ada", "program": "train.py", "host": "h", "pid": 3}))

    def give(self, peer: bytes, message) -> None:
        self.take(self.core.handle(Received(peer, message, (), self.now)))

    def take(self, actions) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.sent.setdefault(action.peer, []).append(action.message)
            elif isinstance(action, Close):
                self.closed.append(action.peer)
        self.core.check()

    def tick(self, seconds: float = 0.25) -> None:
        self.now += seconds
        self.take(self.core.handle(Tick(self.now)))

    def answer(self, peer: bytes, **body) -> None:
        query = next(m for m in reversed(self.sent[peer]) if isinstance(m, Query))
        self.give(peer, Report(query.request, {"stats": STATS, "at": None, "took": 1e-4, **body}))

    def observe(self, peer: bytes = b"o", seen: int = 0, interval: int = 0) -> None:
        if peer not in self.core.observers.peers:
            self.give(peer, hello("observer"))
        self.give(peer, Observe(seen, interval))

    def told(self, kind: type, peer: bytes = b"o") -> list:
        return [message for message in self.sent.get(peer, []) if isinstance(message, kind)]

    def records(self, kind: type, peer: bytes = b"o") -> list:
        return [r for r in records.records(self.told(Records, peer)[-1].rows) if isinstance(r, kind)]


def test_nobody_is_asked_anything_while_nobody_observes() -> None:
    field = Observed()
    for _ in range(20):
        field.tick()
    field.give(b"o", hello("observer"))  # connected, and not subscribed
    field.tick()
    assert not any(field.told(Query, name) for name in (b"w0", b"w1")) and not field.told(Watched, b"c")


def test_an_observer_gets_workers_sessions_and_links() -> None:
    field = Observed()
    field.observe()
    assert field.told(Watched, b"c") == [Watched(True)]
    field.give(b"c", Metrics(3, {"loss": 0.5}))
    field.tick()
    field.answer(b"w0")
    assert not field.told(Records)
    field.answer(b"w1")
    (first, second), (session,) = field.records(records.WorkerRecord), field.records(records.SessionRecord)
    assert (first.name, first.state, first.instructions, first.memory["sessions"]) == ("w0", "idle", 7, {"0": 64})
    assert second.memory["arena"] == 1 << 20 and "peak" not in second.memory
    assert (session.user, session.program, session.steps, session.values) == ("ada", "train.py", 3, {"loss": 0.5})
    assert records.LinkRecord("w0", "w1", 5) in field.records(records.LinkRecord)
    assert field.records(records.HostRecord) == [records.HostRecord("h", ["w0", "w1"])]
    field.take(field.core.handle(PeerLost(b"o", "gone", field.now)))
    assert field.told(Watched, b"c")[-1] == Watched(False) and not field.core.observers.peers


def test_the_rate_is_bounded_by_the_time_that_counting_takes() -> None:
    field = Observed()
    field.observe()
    field.tick()
    asked = len(field.told(Query, b"w0"))
    for name in (b"w0", b"w1"):
        field.answer(name, took=0.02)  # 200 times of which are 4 s
    field.tick()  # the first interval began before the cost was known
    field.tick()
    for name in (b"w0", b"w1"):
        field.answer(name, took=0.02)
    for _ in range(15):
        field.tick()
        assert len(field.told(Query, b"w0")) == asked + 1
    field.tick()
    assert len(field.told(Query, b"w0")) == asked + 2


def test_many_tensors_make_looks_rare_and_no_observer_wait() -> None:
    """45,000 tensors took 0.17 s to count: `gt top --once` heard nothing for 30 s, and gave up."""
    field = Observed()

    def look(seconds: float, **numbers: int) -> None:
        field.tick(seconds)
        for name in (b"w0", b"w1"):
            field.answer(name, took=0.17)
        for peer, seen in numbers.items():
            field.observe(peer.encode(), seen)

    field.observe()
    for n in range(4):
        look(MAX_PAUSE_SECONDS + 0.1, o=n + 1)
    assert len(field.told(Records)) == 4  # each 10 s at least
    field.observe(b"new")
    look(0.5)
    look(0.5, new=2)
    assert len(field.told(Records, b"new")) == 2
    asked = len(field.told(Query, b"w0"))
    for _ in range(8):
        field.tick(1.0)
    assert len(field.told(Query, b"w0")) == asked


def test_a_worker_that_does_not_answer_holds_up_nobody() -> None:
    field = Observed()
    field.observe()
    field.tick()
    field.answer(b"w0")
    for _ in range(4):
        field.tick()
    assert [(r.name, r.age >= 0) for r in field.records(records.WorkerRecord)] == [("w0", True), ("w1", False)]
    field.take(field.core.handle(PeerLost(b"w1", "it was killed", field.now)))
    field.observe(seen=1)
    field.tick()
    field.answer(b"w0")
    assert [(r.name, r.state, r.reason) for r in field.records(records.WorkerRecord)][1] == ("w1", "lost", "it was killed")


def test_a_lost_worker_has_no_tensors_and_keeps_its_counters() -> None:
    """gt.stats() counts no tensors of it either."""
    field = Observed()
    field.observe()
    field.tick()
    for name in (b"w0", b"w1"):
        field.answer(name)
    assert [(r.live_bytes, r.instructions) for r in field.records(records.WorkerRecord)] == [(64, 7)] * 2
    field.take(field.core.handle(PeerLost(b"w1", "it was killed", field.now)))
    field.observe(seen=1)
    for _ in range(2):
        field.tick()
    field.answer(b"w0")
    kept, lost = field.records(records.WorkerRecord)
    assert (kept.live_bytes, lost.state, lost.live_bytes, lost.memory) == (64, "lost", 0, {"arena": 0})
    assert kept.instructions == lost.instructions == 7


def test_a_replay_that_was_met_before_its_end_is_told_again() -> None:
    """One worker had answered before its last actions: the page kept such a replay where no other followed."""
    field = Observed()
    field.observe()
    observers_, observer = field.core.observers, field.core.observers.peers[b"o"]
    for idle, told in ((0.9, 1), (0.9, 0), (0.25, 1), (0.25, 0)):
        measured = {"makespan": 1.0, "idle": idle, "bubble": [idle, idle]}
        observers_._schedules = {0: records.ScheduleRecord(0, 4, "1f1b", {}, measured, {}, "", {})}
        assert len(observers_._new_records(observer)) == told


def test_a_slow_observer_is_dropped_and_the_others_go_on() -> None:
    field = Observed()
    field.observe(b"slow")
    field.observe(b"o")
    for n in range(MAX_UNREAD_RECORDS + 1):
        field.tick(MAX_PAUSE_SECONDS)
        for name in (b"w0", b"w1"):
            field.answer(name)
        field.observe(b"o", seen=n + 1)
    assert field.closed == [b"slow"] and field.told(Exit, b"slow") and len(field.told(Records, b"slow")) == MAX_UNREAD_RECORDS
    assert len(field.told(Records)) == MAX_UNREAD_RECORDS + 1


@pytest.mark.parametrize("message", [Observe(1), Observe(-1), Fetch(1, 1), Metrics(1, {})])
def test_an_observer_may_only_subscribe(message) -> None:
    gate = Gate()
    gate.admit(hello("observer"))
    if isinstance(message, Observe):
        field = Observed()
        field.give(b"o", hello("observer"))
        field.give(b"o", message)
        assert field.closed == [b"o"] and field.told(Exit)
        return
    with pytest.raises(ProtocolError, match="an observer may not send"):
        gate.admit(message)


def test_there_are_only_so_many_observers() -> None:
    field = Observed()
    for n in range(MAX_OBSERVERS):
        field.observe(b"o%d" % n)
    field.give(b"more", hello("observer"))
    (reject,) = field.told(Reject, b"more")
    assert f"{MAX_OBSERVERS} observers are connected" in reject.error["message"]


@pytest.mark.parametrize("values", [{"x": "y"}, {"": 1.0}, {"a" * 65: 1.0}, {"x": None}, {str(n): 1 for n in range(65)}])
def test_numbers_of_a_program_are_checked(values) -> None:
    field = Observed()
    field.give(b"c", Metrics(1, values))
    assert field.closed == [b"c"]


@pytest.mark.parametrize(
    "stats",
    [3, {"instructions": "x", "bytes_sent": {"w1": "y", 3: 4}}, {"session_bytes": [1], "busy_seconds": float("nan")}],
)
def test_what_a_worker_says_is_not_trusted(stats) -> None:
    field = Observed()
    field.observe()
    field.tick()
    for name in (b"w0", b"w1"):
        field.answer(name, stats=stats, at=[1, 2, "x"], took="long")
    for _ in range(4):
        field.tick()
    assert all(r.instructions == 0 for r in field.records(records.WorkerRecord)) and not field.records(records.LinkRecord)


def test_records_stay_small_whatever_peers_say() -> None:
    """64 observers are sent them, and each may leave 16 unread."""
    field = Observed()
    config = "".join(f"{'g' * 250}{n}: {{workers: [0]}}\n" for n in range(60))
    field.give(b"large", hello("client", config=config))
    field.observe()
    field.tick()
    long = "x" * (1 << 20)
    stats = {"transport": long, "bytes_sent": {long: 1}, "session_bytes": {long: 1}, "actions": [[long, 0.0, 1.0]]}
    for name in (b"w0", b"w1"):
        field.answer(name, stats=stats, at=[0, 0, 0, long, 0])
    field.give(b"w1", Goodbye(long))
    field.tick(1.0)
    field.answer(b"w0", stats=stats)
    assert len(field.told(Records)) == 2 and len(field.records(records.SessionRecord)) == 2
    assert max(len(codec.pack(message)) for message in field.told(Records)) < 1 << 16


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_moments_that_are_no_numbers_are_no_actions(number) -> None:
    """JSON has no word for them, so nobody could read such a report."""
    assert stamps([["0F0", 0.0, 1.0]]) and not stamps([["0F0", 0.0, number]]) and not stamps([["0F0", number, 1.0]])


def test_records_keep_their_types() -> None:
    row = records.rows([records.LinkRecord("w0", "w1", 5)])
    assert records.records(row) == [records.LinkRecord("w0", "w1", 5)]
    for bad in ([[6, "w0", "w1", "5"]], [[99]], [[6]], [3], [["x"]]):
        with pytest.raises(ProtocolError):
            records.records(bad)


def test_every_message_of_observers_is_a_message() -> None:
    assert {Observe, Records, Metrics, Watched} <= set(CODES)


# ---- a running server


def test_a_server_of_these_tests_has_all_its_workers() -> None:
    """A program could begin with the first: its gt.stats() would have fewer workers than an observer sees a moment later."""
    with serving(6) as server, RecordStream(server.address) as stream:
        assert sum(isinstance(record, records.WorkerRecord) for record in stream.next()) == 6


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records wait for every worker's answer: on a busy machine one may take longer than a second."""
    monkeypatch.setattr(observers, "PATIENCE_SECONDS", limit(60))


@pytest.mark.usefixtures("patient")
def test_records_equal_stats_of_the_same_moment() -> None:
    with serving(2) as server:
        gt.connect(server.address, name=False, config="")
        x = torch.ones(64, 64, device=gt.device)
        y = x @ x
        gt.log(loss=y[0, 0], lr=1)
        float(y.sum())
        gc.collect()
        with RecordStream(server.address) as stream:
            view = LiveView()
            first = view.update(stream.next())
            gt.log(loss=y[0, 0], lr=1)  # somebody observes by now
            float(y.sum())
            view.update(stream.next())
            stats = settled()
            for _ in range(2):  # the first may be of a look from before
                state = view.update(stream.next())
        assert first["sessions"][0]["ops_per_second"] is None and state["sessions"][0]["ops_per_second"] is not None
        for worker, told in zip(state["workers"], stats["workers"], strict=True):
            for name in ("name", "instructions", "live_tensors", "live_bytes", "transport", "device"):
                assert worker[name] == told[name]
            assert worker["memory"]["sessions"] == told["session_bytes"]
        (session,) = state["sessions"]
        for name, told in {"ops": "ops_planned", "instructions": "instructions_sent", "replays": "replays"}.items():
            assert session[name] == stats["dispatcher"][told]
        assert session["fetched"] == stats["dispatcher"]["tensor_bytes_fetched"]
        assert session["values"] == {"loss": 64.0, "lr": 1.0} and session["steps"] == 2
        gt.shutdown()


# Field of a record -> figure of gt.stats(). Those that count on while nobody works are between two of its moments.
SAME = {
    records.WorkerRecord: {"device": "device", "transport": "transport", "instructions": "instructions",
                           "busy_seconds": "busy_seconds", "live_tensors": "live_tensors", "live_bytes": "live_bytes",
                           "limit": "memory_limit"},
    records.SessionRecord: {"ops": "ops_planned", "instructions": "instructions_sent", "replays": "replays",
                            "uploaded": "tensor_bytes_uploaded", "fetched": "tensor_bytes_fetched"},
}  # fmt: skip
BETWEEN = {
    records.WorkerRecord: {"cpu_seconds": "cpu_seconds", "clock": "clock"},
    records.ServerRecord: {"messages_sent": "messages_sent", "messages_received": "messages_received"},
}
# Fields that gt.stats() does not have: names and states, what the program said, times, and what the test compares by itself
OTHERS = {
    records.WorkerRecord: "name host pid backend state reason sessions age memory current",
    records.SessionRecord: "number user program host pid workers groups seconds steps values current waits pending",
    records.ServerRecord: "at sharing interval observers loop_lag life",
}


def test_every_field_of_a_record_has_its_place_beside_stats() -> None:
    """A figure that is added to a record has to be compared too."""
    for kind, others in OTHERS.items():
        placed = [*SAME.get(kind, {}), *BETWEEN.get(kind, {}), *others.split()]
        assert sorted(placed) == sorted(f.name for f in fields(kind))


@pytest.mark.usefixtures("patient")
def test_all_figures_of_records_are_those_of_stats() -> None:
    with serving(2) as server:
        gt.connect(server.address, name=False, config="first: {workers: [0]}\nsecond: {workers: [1]}\n")
        with gt.signal.context("first"):
            x = torch.ones(16, 16).to(gt.device) @ torch.ones(16, 16, device=gt.device)
        with gt.signal.context("second"):
            y = x + 1
        float(y.sum())
        before = settled()
        with RecordStream(server.address) as stream:  # the first look of all: every answer comes after `before`
            listed = stream.next()
        after = gt.stats()
        (about,) = (r for r in listed if isinstance(r, records.ServerRecord))
        rows = [(about, before["dispatcher"], after["dispatcher"])]
        rows += [(r, before["dispatcher"], after["dispatcher"]) for r in listed if isinstance(r, records.SessionRecord)]
        workers = [r for r in listed if isinstance(r, records.WorkerRecord)]
        rows += [(r, *told) for r, *told in zip(workers, before["workers"], after["workers"], strict=True)]
        for record, first, last in rows:
            for name, figure in SAME.get(type(record), {}).items():
                assert getattr(record, name) == first[figure] == last[figure], (record, name)
            for name, figure in BETWEEN.get(type(record), {}).items():
                assert first[figure] <= getattr(record, name) <= last[figure], (record, name)
        for record, told in zip(workers, before["workers"], strict=True):
            assert record.name == told["name"] and record.memory["process"] == told["memory_used"]
            assert record.memory["sessions"] == told["session_bytes"]
        links = {(r.source, r.target): r.bytes for r in listed if isinstance(r, records.LinkRecord)}
        sent = {(w["name"], peer): nbytes for w in before["workers"] for peer, nbytes in w["bytes_sent"].items()}
        assert links == sent and sum(sent.values()) == 16 * 16 * 4
        gt.shutdown()


def test_a_stream_ends_with_the_server() -> None:
    with serving(1) as server:
        stream = RecordStream(server.address)
        assert stream.next()
    with pytest.raises(DispatcherLost):
        stream.next()
    stream.close()


def test_another_token_is_refused() -> None:
    server = Server(access=Access("a-token-that-is-long-enough"))
    thread = threading.Thread(target=server.run, name="gt-test-server")
    thread.start()
    try:
        with (
            RecordStream(server.address, "another-token-of-some-length", wait=20.0) as stream,
            pytest.raises((Refused, DispatcherLost)),
        ):
            stream.next()
    finally:
        server.stop()
        thread.join()


def test_errors_are_told_to_those_who_look_later() -> None:
    field = Observed()
    field.core.handle(PeerLost(b"w1", "killed by signal 9", field.now))
    field.observe()
    field.tick()
    field.answer(b"w0")
    (error,) = field.records(records.ErrorRecord)
    assert (error.peer, error.session) == ("w1", -1) and "killed by signal 9" in error.text
    field.give(b"c", Fetch(0, 99))  # a tensor that is not there: the client is refused
    field.now += 1
    field.tick()
    field.answer(b"w0")
    (error,) = field.records(records.ErrorRecord)  # the first was told already
    assert error.session == 0 and error.number == 2 and "%99" in error.text


def test_the_log_is_written_while_an_observer_wants_it() -> None:
    field = Observed()
    session = next(iter(field.core.sessions.values()))
    field.give(b"o", hello("observer"))
    field.give(b"o", Observe(0, 0))
    field.give(b"p", hello("observer"))
    field.give(b"p", Observe(0, 0, True))
    assert session.emitter.scribe is not None and not field.core.logging
    field.core.log_line("ERROR", "w0", "a\nline")
    field.tick()
    for name in (b"w0", b"w1"):
        field.answer(name)
    assert not field.records(records.LogRecord)
    (lines,) = field.records(records.LogRecord, b"p")
    assert any("ERROR" in line and "a | line" in line for line in lines.lines) and lines.missed == 0
    field.give(b"d", hello("client", info={"user": "bob", "program": "late.py", "host": "h", "pid": 4}))
    late = [s for s in field.core.sessions.values() if s is not session]
    assert late[0].emitter.scribe is not None  # a session that begins while somebody follows
    field.take(field.core.handle(PeerLost(b"p", "gone", field.now)))
    assert all(s.emitter.scribe is None for s in field.core.sessions.values()) and not field.core.observers.recent.wanted


def test_the_first_lines_of_the_log_do_not_wait_for_a_pause() -> None:
    """Looks of a run that does little are 10 s apart, and an observer with a long interval is sent Records seldom."""
    field = Observed()
    field.observe(interval=60_000)
    for _ in range(2):
        field.tick(60.0)
        for name in (b"w0", b"w1"):
            field.answer(name)
        field.observe(seen=len(field.told(Records)), interval=60_000)
    count = len(field.told(Records))
    field.tick(1.0)
    field.give(b"o", Observe(count, 60_000, True))
    field.core.log_line("ERROR", "w0", "a line")
    field.tick(0.5)
    for name in (b"w0", b"w1"):
        field.answer(name)
    (lines,) = field.records(records.LogRecord)
    assert len(field.told(Records)) == count + 1 and "a line" in lines.lines[0]


def test_a_server_is_told_at_once_that_its_log_is_wanted() -> None:
    """Records may be a minute apart."""
    with serving(1) as server, RecordStream(server.address, interval=60.0) as stream:
        stream.next()
        stream.next()
        stream.log = True
        gt.connect(server.address, config="")
        gt.ones(3).sum().item()
        assert any(isinstance(record, records.LogRecord) for record in stream.next())
        gt.shutdown()


def test_lines_that_are_too_many_are_counted() -> None:
    recent = RecentRecords()
    recent.add_lines("".join(f"{MARK} line {n}\n" for n in range(MAX_SENT_LINES + 7)), 1.5)
    told = recent.lines_from(0)
    assert told is not None and (told.missed, len(told.lines)) == (7, MAX_SENT_LINES)
    assert told.lines[-1].split() == ["1.500000", "line", str(MAX_SENT_LINES + 6)]
    assert recent.lines_from(told.number) is None


def test_roles_are_checked_and_give_bytes_and_layouts() -> None:
    with serving(2) as server:
        config = "tp_colpar:\n  shard: {axis: 1, workers: [0, 1]}\n"
        gt.connect(server.address, name=False, config=config)
        with RecordStream(server.address, interval=0.5) as stream:
            view = LiveView()
            view.update(stream.next())
            model = torch.nn.Linear(32, 64, bias=False).to(gt.device)
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(40):
                with gt.signal.context("tp_colpar"):
                    loss = model(torch.ones(4, 32, device=gt.device)).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss.item()
                (session,) = view.update(stream.next())["sessions"]
                memory, layouts = session["memory"], session["layouts"]
                if memory is not None and memory["optimizer"] >= 2 * 32 * 64 * 4 and layouts is not None:
                    break
            where = gt.inspect(model.weight)
            (weight,) = layouts["splits"]
            assert layouts["tensors"] == [["weight", 0]] and (weight["spec"], weight["bytes"]) == ("f32[64,32]", 32 * 64 * 4)
            assert (
                memory["weights"] == sum(piece["bytes"] for piece in where["pieces"]) and memory["gradients"] <= 2 * 32 * 64 * 4
            )
            assert set(weight["boxes"]) == {piece["worker"] for piece in where["pieces"]}
            stats = {w["name"]: w["live_bytes"] for w in settled()["workers"]}
            state = view.update(stream.next())
            for worker in state["workers"]:
                assert sum(worker["memory"]["uses"]["0"].values()) == worker["live_bytes"] == stats[worker["name"]]
        gt.shutdown()


@pytest.mark.parametrize("row", [[1, "weights"], [1, "others", ""], ["1", "weights", ""], [1, "weights", "n" * 201], 7])
def test_bad_roles_are_refused(row) -> None:
    field = Observed()
    field.give(b"c", TensorRoles([row]))
    assert any(isinstance(message, Exit) for message in field.sent[b"c"]) and b"c" not in field.core.sessions


def test_roles_of_many_tensors_are_as_many_as_the_server_takes() -> None:
    rows = [[1 << 30, "gradients", "n" * 200]] * (1 << 15)
    with pytest.raises(ProtocolError, match="body has"):
        codec.weigh(codec.pack(TensorRoles(rows)))
    codec.weigh(codec.pack(TensorRoles(fitting(rows))))
    assert len(fitting(rows)) > 3000 and fitting(rows[:100]) == rows[:100]


def test_records_that_are_sent_once_are_not_lost_with_a_moment_that_nobody_took() -> None:
    with serving(1) as server:
        with RecordStream(server.address, interval=0.5) as stream:
            stream.next()
            once = records.rows([records.ErrorRecord(9, 0.0, -1, "w0", "", "", 0, "", "an error")])
            server_row = records.rows([records.ServerRecord(1.0, "shared", 0.5, 1, 1, 1, 0.0, "life")])
            stream._receive(Records(1000, once + server_row), ())
            stream._receive(Records(1001, server_row), ())
            taken = stream.next()
            assert [type(r) for r in taken] == [records.ErrorRecord, records.ServerRecord]


def test_a_program_does_not_notice_that_its_objects_are_looked_at() -> None:
    class HalfMade(torch.nn.Module):
        """Its __init__ has not begun: it has no fields of torch.nn.Module."""

    class FakeSession:
        on_idle, watched, told = None, True, 0

        def tell_roles(self, rows: list) -> None:
            self.told += 1

    session = FakeSession()
    reports = RoleReports(Recorder(session, lambda: None))
    half = HalfMade.__new__(HalfMade)
    with pytest.raises(AttributeError):
        roles(0)
    reports.after_batch()
    assert session.told == 0 and half is not None
    del half
    reports.after_batch()  # too soon for another report
    assert session.told == 0
