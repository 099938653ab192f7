"""A turn of the dispatcher's loop is short: what takes long is done in slices, and comes to the same."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from typing import ClassVar

import pytest

import gt
from gt.client import current_session
from gt.client.session import Session
from gt.dispatcher.core import Core
from gt.dispatcher.events import PeerLost, Received, Send, Turn, TurnWanted
from gt.dispatcher.fairness.background import Inline
from gt.dispatcher.fairness.time_slices import Leavings, Pace
from gt.dispatcher.server import Server
from gt.errors import ProtocolError
from gt.ir.instr import DISCARD, DROP, FREE, LAUNCH, RECORD
from gt.wire.link import hello
from gt.wire.messages import Done, Fetch, FinishCapture, Inspect, Interrupt, OpError, Ops, Report, Run
from tests.dispatcher.test_instruction_log import YAML, program
from tests.helpers.hostile import TEMPLATES
from tests.helpers.planned import planned
from tests.helpers.toy_core import ToyCore

UPLOAD, NEG = TEMPLATES[0], TEMPLATES[3]
GROUP = "a: {workers: [0]}"


def hurried() -> Pace:
    """Every look at the clock finds the turn over."""
    return Pace(itertools.count().__next__, 0)


def core_of(pace: Pace, config: str = "") -> Core:
    core = Core(pace=pace)
    core.handle(Received(b"w0", hello("worker", info={"name": "w0", "heap_bytes": 1 << 30})))
    for peer in (b"c", b"d"):
        core.handle(Received(peer, hello("client", config, switches={"workers": 1})))
    return core


def turns(core: Core, actions: list) -> list[list]:
    """The actions of an event, and of the turns that it asks for."""
    rounds = [actions]
    while any(isinstance(action, TurnWanted) for action in rounds[-1]):
        core.check()
        rounds.append(core.handle(Turn(0.0)))
    core.check()
    return rounds


def sent(rounds: list[list], kind: type) -> list:
    return [a.message for actions in rounds for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def stream(count: int) -> Ops:
    code = itertools.chain.from_iterable((17, 0, 1, n) for n in range(2, count))
    return Ops(
        0,
        [[16, UPLOAD], [17, NEG]],
        [[1, "f.py", 3, "", False, -1]],
        [16, 0, 0, 1, *code, FREE, count - 2, *range(1, count - 1)],
    )


def told(runs: list[Run]) -> list:
    """Instructions to workers, with absolute sequence numbers, however they are divided into Runs."""
    rows: list = []
    for run in runs:
        at = 0
        while at < len(run.code):
            number = run.code[at]
            end = at + 3 + run.code[at + 2] if number in (0, 2, 7) else at + 4
            if number == FREE:
                rows += [(FREE, i) for i in run.code[at + 3 : end]]
            else:
                rows.append((number, run.base + run.code[at + 1], *run.code[at + 2 : end]))
            at = end
    return rows


def test_a_batch_in_slices_is_the_batch():
    whole, cut = core_of(Pace()), core_of(hurried())
    frames = (bytes(64),)
    first = turns(whole, whole.handle(Received(b"c", stream(4000), frames)))
    second = turns(cut, cut.handle(Received(b"c", stream(4000), frames)))
    assert len(first) == 1 and len(second) > 100
    assert told(sent(second, Run)) == told(sent(first, Run))


def test_others_are_heard_between_two_slices():
    core = core_of(hurried())
    actions = core.handle(Received(b"c", stream(4000), (bytes(64),)))
    assert any(isinstance(action, TurnWanted) for action in actions)
    core.handle(Received(b"c", Inspect(1, 5)))  # waits for what was sent before
    others = core.handle(Received(b"d", Ops(0, [[16, NEG], [17, UPLOAD]], [], [17, 0, 0, 1]), (bytes(64),)))
    answer = core.handle(Received(b"d", Inspect(1, 1)))
    assert not sent([others], Report) and sent(turns_until(core, answer, Report), Report)
    assert core.sessions[b"c"].op_stream.busy


def turns_until(core: Core, actions: list, kind: type) -> list[list]:
    """The turns until somebody is sent a message of a kind, at most 20."""
    rounds = [actions]
    while not sent(rounds, kind) and len(rounds) < 20:
        rounds.append(core.handle(Turn(0.0)))
    return rounds


def test_questions_are_answered_after_what_came_before_them():
    core = core_of(hurried())
    first = core.handle(Received(b"c", stream(5000), (bytes(64),)))
    asked = [core.handle(Received(b"c", message)) for message in (Inspect(7, 4999), Fetch(8, 4999), Inspect(9, 4999))]
    assert not sent([first, *asked], Report)
    assert [report.request for report in sent(turns(core, asked[-1]), Report)] == [7, 9]


def test_a_client_that_leaves_between_two_slices_leaves_nothing():
    core = core_of(hurried())
    core.handle(Received(b"c", stream(4000), (bytes(64),)))
    core.handle(Received(b"c", Inspect(1, 5)))
    turns(core, core.handle(PeerLost(b"c", "gone")))
    assert b"c" not in core.sessions and not core.round_robin.pending


def test_an_error_in_a_later_slice_ends_the_session_alone():
    core, batch = core_of(hurried()), stream(5000)
    batch.code.extend((17, 0, 77_777, 99_999))
    turns(core, core.handle(Received(b"c", batch, (bytes(64),))))
    assert b"c" not in core.sessions and b"d" in core.sessions


def test_tensors_of_an_ended_session_are_freed_in_slices():
    freed: list[int] = []
    pace = hurried()
    pace.begin()
    left = Leavings(pace)
    left.add(dict.fromkeys(range(1000), 3), freed.append)
    left.add(list(range(500)))
    left.add({})
    rounds = 0
    while left:
        left.clear()
        assert rounds < 100
        rounds += 1
    assert rounds > 10 and len(freed) == 1000


def test_things_that_hold_thousands_of_others_are_freed_one_in_a_slice():
    pace = hurried()
    pace.begin()
    things = [[n] for n in range(10)]
    pace.leavings.add(things, large=True)
    for left in range(9, -1, -1):
        pace.leavings.clear()
        assert len(things) == left


def recorded(core: Core, count: int) -> int:
    """Record a call of so many ops, on tensor 2; the number of the next batch."""
    code = itertools.chain.from_iterable((17, 1, 2, n) for n in range(3, count + 3))
    begin = [16, 1, 0, 1, 17, 1, 1, 2, RECORD, 1, 0, 1, 2]
    batch = Ops(0, [[16, UPLOAD], [17, NEG]], [[1, "f.py", 3, "a", False, -1]], [*begin, *code])
    turns(core, core.handle(Received(b"c", batch, (bytes(64),))))
    return 1


def test_a_recording_that_is_dropped_is_freed_in_slices():
    core = core_of(hurried(), GROUP)
    batch = recorded(core, 4000)
    assert len(turns(core, core.handle(Received(b"c", Ops(batch, [], [], [DISCARD]))))) > 60


def test_a_program_that_is_dropped_is_freed_in_slices_once_its_launches_are_through():
    core = core_of(hurried(), GROUP)
    batch = recorded(core, 4000)
    rounds = turns(core, core.handle(Received(b"c", FinishCapture(1, 0, "", "eager", [], -1, 0, 0))))
    assert sent(rounds, Report)[0].body["why"] == "" and len(rounds) > 60
    session = core.sessions[b"c"]
    program = session.programs.all[0]
    rounds = turns(core, core.handle(Received(b"c", Ops(batch, [], [], [LAUNCH, 0, -1, 0, DROP, 0]))))
    assert len(rounds) < 10 and len(program.makes) == len(program.journal) == 4000  # an error would be told by them
    last = core.workers[b"w0"].runs
    assert len(turns(core, core.handle(Received(b"w0", Done(last))))) > 60
    storages = {tensor.storage for tensor in session.table.rows.values()}
    assert not program.makes and all(storage.programs == () for storage in storages)
    assert session.table.rows[3].storage.version > 0


def test_a_program_of_many_tensors_is_sealed_with_turns_of_others_between():
    class Counted(Inline):
        """Notes how much has been written for workers whenever others may have a turn."""

        marks: ClassVar[list[int]] = []
        sessions: ClassVar[dict] = {}

        def apart(self, over):
            self.marks += [session.emitter.sent for session in self.sessions.values()][:1]
            return super().apart(over)

    core = core_of(Pace(background=Counted()), GROUP)
    Counted.sessions = core.sessions
    recorded(core, 4000)
    carried = [[2, n] for n in range(3, 4003)]
    Counted.marks.clear()
    rounds = turns(core, core.handle(Received(b"c", FinishCapture(1, 0, "", "eager", carried, -1, 0, 0))))
    assert sent(rounds, Report)[0].body["why"] == ""
    written = [after - before for before, after in itertools.pairwise([*Counted.marks, core.sessions[b"c"].emitter.sent])]
    assert sum(written) >= 4000 and max(written) <= 1024


@pytest.mark.parametrize("seed", range(3))
def test_plans_in_slices_are_the_plans(monkeypatch, seed):
    """Groups, views, lists, backward; fused projections, which look ahead; the instruction log's every line."""
    texts = []
    for pace in (Pace, hurried):
        monkeypatch.setattr("tests.helpers.planned.Pace", pace)
        with planned(YAML, 4) as plan:
            program(seed)
            current_session.current().flush()
            plan.ask()
            names: dict[str, int] = {}
            rows = [re.sub(r"%\d+", lambda i, names=names: f"%{names.setdefault(i[0], len(names))}", row) for row in plan.rows]
            texts.append([row for row in rows if "WORKER_SEND" in row])
    assert texts[0] == texts[1] and len(texts[0]) > 100


def test_a_long_turn_is_measured_and_told_with_its_message_and_session(caplog):
    core = ToyCore()
    answers = core.answers

    def slow(*args):
        if isinstance(args[1], Fetch):
            end = time.monotonic() + 1.1
            while time.monotonic() < end:
                pass
        return answers(*args)

    core.answers = slow
    server = Server(core=core)
    thread = threading.Thread(target=server.run, name="gt-test-server")
    thread.start()
    try:
        client = Session(server.address)
        client.fetch(1)
        client.close()
    finally:
        server.stop()
        thread.join()
    said = [record.getMessage() for record in caplog.records if "nobody was heard" in record.getMessage()]
    (told,) = [text for text in said if " with Fetch of " in text]  # a machine that is stopped makes other turns long too
    assert re.search(r"busy for [1-9]\d*\.\d s, .* with Fetch of \w+", told)
    assert server._pace.lag.counters()["loop_lag_max"] > 1


def test_a_call_of_two_threads_that_one_look_answers_ends_no_server():
    """Each rings and then says so; a look between the two takes both rings, and the next finds none."""
    server = Server(core=ToyCore())
    thread = threading.Thread(target=server.run, name="gt-test-server")
    for _ in range(3):
        server._wake()
    os.eventfd_read(server._call)
    thread.start()
    try:
        client = Session(server.address)
        client.close()
        assert thread.is_alive()
    finally:
        server.stop()
        thread.join()


def test_the_lag_is_in_the_statistics(one):
    counters = gt.stats()["dispatcher"]
    assert 0 < counters["loop_lag_recent"] <= counters["loop_lag_max"]


def test_ops_that_a_worker_skipped_are_of_the_interrupted_program_alone():
    core = core_of(Pace())
    for peer in (b"c", b"d"):
        core.handle(Received(peer, stream(5), (bytes(64),)))
    core.handle(Received(b"c", Interrupt(0)))
    seq = core.sessions[b"c"].journal.rows[-1].seq
    core.handle(Received(b"w0", OpError(seq, "interrupted", "", {}, [seq])))
    assert core.sessions[b"c"].failures.dropped
    assert not core.sessions[b"d"].failures.dropped and not core.sessions[b"d"].failures.troubled


def test_nothing_of_a_session_is_handled_once_its_waiting_ops_have_ended_it(monkeypatch):
    core = core_of(Pace())
    session = core.sessions[b"c"]

    def fault():
        raise ProtocolError("late fault")

    monkeypatch.setattr(session.op_stream, "finish", fault)
    session.inbox += [(Fetch(1, 5), ()), (Fetch(2, 5), ())]
    core.round_robin.resume(b"c")
    assert b"c" not in core.sessions and len(session.inbox) == 2
