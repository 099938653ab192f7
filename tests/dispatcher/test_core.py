"""The dispatcher's core, event by event: failures spread as far as values flow, sessions leave nothing, peers are checked."""

from __future__ import annotations

import pytest
import torch

import gt
from gt.client import current_session
from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.core import Core
from gt.dispatcher.events import Malformed, PeerLost, Received, Send, Tick
from gt.ir.instr import END, Define
from gt.wire.link import hello
from gt.wire.messages import (
    THROUGH,
    Abort,
    Done,
    Failed,
    Fetch,
    LinkFailed,
    LinkMade,
    Notice,
    OpError,
    Ops,
    Piece,
    Reject,
    Run,
    Stats,
    Value,
    Welcome,
    World,
)
from tests.helpers.planned import planned

TWO = """
a: {shard: {axis: 0, workers: [0]}}
b: {shard: {axis: 0, workers: [1]}}
"""


INFO = {"name": "", "pid": 1, "heap_bytes": 1 << 40, "backend": "torch"}


def worker(name: str = "") -> object:
    return hello("worker", info={**INFO, "name": name})


class Asking:
    """Fetches from a planned session's core, with workers that answer by hand."""

    def __init__(self, plan) -> None:
        self.plan, self.number = plan, 0

    def fetch(self, remote) -> list:
        """Messages to the client for a fetch, once every worker is done and has sent its piece."""
        return self.ask(remote._ref.id)

    def ask(self, tensor: int) -> list:
        current_session.current().flush()
        core, self.number = self.plan.core, self.number + 1
        answers: list = []
        pending = [Received(w.peer, Done(w.runs)) for w in core.cluster.workers if not w.lost]
        pending.append(Received(b"client", Fetch(self.number, tensor)))
        while pending:
            for action in core.handle(pending.pop(0)):
                if not isinstance(action, Send):
                    continue
                if isinstance(action.message, Run):
                    run = action.message
                    fetches = [d[0] for d in run.defines if d[1] == "fetch"]
                    number = fetches[0] if fetches else self._fetch_number(core)
                    for at, word in enumerate(run.code[:-1]):
                        if word == number and run.code[at + 1] == 0:
                            key = run.code[at + 3]
                            size = core.sessions[b"client"].fetches.by_key[key].sizes[key]
                            pending.append(Received(action.peer, Piece(key, 0, size), (b"\0" * size,)))
                            break
                    pending.append(Received(action.peer, Done(run.seq)))
                elif action.peer == b"client" and isinstance(action.message, (Value, Failed, Piece)):
                    answers.append(action.message)
        return answers

    @staticmethod
    def _fetch_number(core) -> int:
        return core.sessions[b"client"].emitter.common("fetch").number

    def failed(self, remote) -> str:
        """The error that a fetch is answered with, "" for a value."""
        answers = self.fetch(remote)
        return answers[0].error["message"] if isinstance(answers[0], Failed) else ""


def seq_of(plan, remote) -> int:
    """Number of the op that made a tensor."""
    current_session.current().flush()
    session = plan.core.sessions[b"client"]
    storage = session.table.rows[remote._ref.id].storage
    return next(row.seq for row in session.journal.rows if storage in row.makes)


@pytest.fixture
def plan():
    with planned(TWO, 2) as made:
        made.slow = True
        yield made


def on(group: str, function, *args):
    with gt.signal.context(group):
        return function(*args)


def test_a_failure_spreads_over_workers_and_no_further(plan):
    x = torch.ones(3, device="remote")
    bad, good = on("a", torch.neg, x), on("a", torch.abs, x)
    far, view = on("b", torch.exp, bad), bad[1:]
    plan.text()
    plan.handle(Received(b"w0", OpError(seq_of(plan, bad), "op", "no memory left")))
    later = on("b", torch.sin, far)
    ask = Asking(plan)
    for remote in (bad, far, view, later):
        message = ask.failed(remote)
        assert "aten.neg.default f32[3] failed on worker w0, group a: no memory left" in message
        assert "test_core.py:" in message.partition(" ")[0]
    assert ask.failed(good) == ""
    assert ask.failed(x) == ""


def test_a_failure_from_a_placeholder_is_not_reported_again(plan):
    x = torch.ones(3, device="remote")
    bad = on("a", torch.neg, x)
    far, good = on("a", torch.exp, bad), on("b", torch.abs, x)
    plan.text()
    plan.handle(Received(b"w0", OpError(seq_of(plan, bad), "op", "no memory left")))
    plan.handle(Received(b"w0", OpError(seq_of(plan, far), "missing", "no tensor has the id 2")))
    plan.handle(Received(b"w1", OpError(seq_of(plan, good), "op", "neither has this")))
    ask = Asking(plan)
    assert "no memory left" in ask.failed(far) and "neither has this" in ask.failed(good)
    assert ask.failed(x) == ask.failed(x) == ""


def test_an_op_that_lacks_a_tensor_for_a_lost_worker_is_no_error_of_its_own(plan):
    x = torch.ones(3, device="remote")
    own, other = on("a", torch.neg, x), on("b", torch.abs, x)
    after = on("a", torch.exp, own)
    plan.text()
    plan.handle(PeerLost(b"w1", "its process ended"))
    plan.handle(Received(b"w0", OpError(seq_of(plan, after), "missing", "no tensor has the id 2")))
    (error,) = plan.core.observers.recent.errors
    assert "worker w1 is lost" in error.text
    ask = Asking(plan)
    assert "w1 is lost" in ask.failed(after) and "w1 is lost" in ask.failed(other)


def test_what_failed_before_another_failure_came_to_what_it_read_is_no_value(plan):
    """It read something good, which only later was written with what had failed."""
    x = torch.ones(3, device="remote")
    bad = on("a", torch.neg, x)
    good = on("a", torch.abs, x)
    out = on("a", torch.exp, good)
    on("a", good.add_, bad)
    plan.text()
    plan.handle(Received(b"w0", OpError(seq_of(plan, bad), "op", "no memory left")))
    plan.handle(Received(b"w0", OpError(seq_of(plan, out), "op", "nor for this")))
    ask = Asking(plan)
    assert "no memory left" in ask.failed(x) and ask.failed(x) == ""  # told at the next wait, and once
    assert ask.failed(out) and "no memory left" in ask.failed(good)


def test_a_program_is_through_once_every_workers_device_is(plan):
    x = torch.ones(3, device="remote")
    ask = Asking(plan)
    assert [type(answer) for answer in ask.ask(THROUGH)] == [Value]  # no worker was given anything: none is asked
    made = on("a", torch.neg, x), on("b", torch.exp, x)
    current_session.current().flush()
    handle, told = plan.core.handle, []
    plan.core.handle = lambda event: told.extend(found := handle(event)) or found
    value, *pieces = ask.ask(THROUGH)
    plan.core.handle = handle
    runs = [action.message for action in told if isinstance(action, Send) and isinstance(action.message, Run)]
    for run in runs:  # each is to make a byte, and then to send it
        kinds = {number: kind for number, kind, _ in run.defines}
        fill, _, byte, fetch, _, source, *_ = run.code
        assert (kinds[fill], kinds[fetch], source) == ("fill", "fetch", byte)
    assert len(runs) == 2
    assert value.shape == [2] and [key for key, _ in value.pieces] == [piece.key for piece in pieces]
    bad = on("b", torch.exp, made[1])
    plan.text()
    plan.handle(Received(b"w1", OpError(seq_of(plan, bad), "op", "no memory left")))
    assert "no memory left" in ask.ask(THROUGH)[0].error["message"]
    core = plan.core
    core.handle(Received(b"client", Fetch(100, THROUGH)))
    (told,) = [a.message for a in core.handle(PeerLost(b"w0", "it fell over")) if a.peer == b"client"]
    assert told.request == 100 and "worker w0 is lost" in told.error["message"]


def test_a_fetch_that_a_worker_cannot_carry_out_is_answered(plan):
    good = on("a", torch.abs, torch.ones(3, device="remote"))
    plan.text()
    core = plan.core
    core.handle(Received(b"client", Fetch(1, good._ref.id)))
    (request,) = core.sessions[b"client"].fetches.open.values()
    sent = [a.message for a in core.handle(Received(b"w0", OpError(request.seq, "op", "no bytes"))) if isinstance(a, Send)]
    assert [type(m) for m in sent] == [Failed] and "cannot be read on worker w0: no bytes" in sent[0].error["message"]
    assert Asking(plan).failed(good) == ""  # the tensor itself is well


def test_the_next_wait_is_told_once_of_a_failure_that_nothing_depends_on(plan):
    x = torch.ones(3, device="remote")
    bad, good = on("a", torch.neg, x), on("a", torch.abs, x)
    plan.text()
    plan.handle(Received(b"w0", OpError(seq_of(plan, bad), "op", "broken")))
    ask = Asking(plan)
    assert "broken" in ask.failed(good)
    assert ask.failed(good) == ""


def test_the_output_of_a_failed_op_fails_until_it_is_written_anew(plan):
    x, y = torch.ones(3, device="remote"), torch.ones(3, device="remote")
    a = on("a", torch.mul, x, 2)
    base = on("a", torch.mul, x, 3)
    view = base[:2]
    on("a", a.add_, on("a", torch.neg, y))
    plan.text()
    session = plan.core.sessions[b"client"]
    row = next(r for r in session.journal.rows if r.known.name == "add_")
    plan.handle(Received(b"w0", OpError(row.seq, "op", "broken")))
    ask = Asking(plan)
    assert "broken" in ask.failed(a)
    on("a", a.fill_, 0.0)
    assert ask.failed(a) == ""
    assert ask.failed(view) == ""


def test_a_failed_tensor_that_is_written_in_part_stays_failed(plan):
    """The rest of it is a placeholder's."""
    x = torch.ones(4, device="remote")
    made, later = (on("a", torch.mul, x, n).view(2, 2) for n in (2, 3))
    good = on("a", torch.abs, x)
    plan.text()
    seqs = [row.seq for row in plan.core.sessions[b"client"].journal.rows if row.known.name == "mul"]
    plan.handle(Received(b"w0", OpError(seqs[0], "op", "broken")))
    on("a", made[0].zero_)  # planned after the report, and before it
    on("a", later[0].zero_)
    plan.text()
    plan.handle(Received(b"w0", OpError(seqs[1], "op", "broken too")))
    ask = Asking(plan)
    assert "broken" in ask.failed(good) and "broken too" in ask.failed(good) and ask.failed(good) == ""  # both are told
    assert "broken" in ask.failed(made) and "broken too" in ask.failed(later)
    on("a", made.t().zero_)
    on("a", later.view(4).zero_)
    assert ask.failed(made) == "" and ask.failed(later) == ""


def test_a_report_that_comes_after_an_overwrite_harms_nothing_and_is_no_news_of_what_failed_before(plan):
    x = torch.ones(4, device="remote")
    made, good = on("a", torch.mul, x, 2), on("a", torch.abs, x)
    used = on("a", torch.neg, made)
    plan.text()
    first, second = seq_of(plan, made), seq_of(plan, used)
    on("a", made.zero_)
    plan.text()
    plan.handle(Received(b"w0", OpError(first, "op", "broken")))
    ask = Asking(plan)
    assert "broken" in ask.failed(good) and ask.failed(made) == ""
    plan.handle(Received(b"w0", OpError(second, "missing", "no tensor has the id")))
    assert ask.failed(good) == "" and "broken" in ask.failed(used)


def test_a_tensor_for_which_no_room_was_found_is_not_healed_by_an_overwrite(plan):
    """The worker has nothing that could be written: the error is the lack of memory, not the tensor that is missing."""
    x = torch.ones(3, device="remote")
    made = on("a", torch.mul, x, 2)
    plan.text()
    plan.handle(Received(b"w0", OpError(seq_of(plan, made), "memory", "out of memory: it needs 3 GiB")))
    on("a", made.fill_, 1.0)  # planned after the report
    plan.text()
    plan.handle(Received(b"w0", OpError(seq_of(plan, made), "missing", "no tensor has the id 2")))
    assert "it needs 3 GiB" in Asking(plan).failed(made)


def test_both_workers_of_a_mesh_may_report_one_failure():
    with planned("a: {shard: {axis: 0, workers: [0, 1]}}\n", 2) as plan:
        plan.slow = True
        x = torch.ones(4, device="remote")
        bad, good = on("a", torch.neg, x), on("a", torch.abs, x)
        plan.text()
        seq = seq_of(plan, bad)
        plan.handle(Received(b"w0", OpError(seq, "op", "first")))
        plan.handle(Received(b"w1", OpError(seq, "op", "second")))
        ask = Asking(plan)
        assert "first" in ask.failed(bad)
        assert ask.failed(good) == ""


def test_a_lost_worker_takes_what_it_held_and_waits_end(plan):
    x = torch.ones(3, device="remote")
    a, b = on("a", torch.neg, x), on("b", torch.exp, x)
    plan.text()
    actions = plan.core.handle(PeerLost(b"w1", "its process ended"))
    assert [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Abort)] == [
        Abort(1, "its process ended")
    ]
    ask = Asking(plan)
    assert "worker w1 is lost: its process ended" in ask.failed(b)
    assert "worker w1 is lost" in ask.failed(on("b", torch.neg, a))
    assert "worker w1 is lost" in ask.failed(on("a", torch.add, a, b))
    assert ask.failed(a) == ""
    assert ask.failed(on("a", torch.add, a, a)) == ""


def test_the_same_work_goes_to_another_worker_once_one_is_lost(plan):
    def work():
        return torch.mm(torch.ones(3, 3, device="remote"), torch.ones(3, 3, device="remote"))

    before = work()
    plan.text()
    plan.handle(PeerLost(b"w0", "its process ended"))
    ask = Asking(plan)
    assert "worker w0 is lost" in ask.failed(before)
    assert ask.failed(work()) == "" and ask.failed(torch.neg(work())) == ""


def test_a_list_with_a_lost_tensor_is_lost_and_sent_to_nobody(plan):
    x = torch.ones(3, device="remote")
    lost, kept = on("a", torch.neg, x), on("b", torch.exp, x)
    plan.text()
    plan.handle(PeerLost(b"w0", "its process ended"))
    plan.text()
    torch._foreach_add_([kept], [lost])
    assert "_foreach" not in plan.text()
    assert "worker w0 is lost" in Asking(plan).failed(kept)


def test_work_for_a_lost_worker_is_lost_even_if_its_successor_came_first(plan):
    x = torch.ones(3, device="remote")
    good, far = on("a", torch.abs, x), on("b", torch.exp, x)
    a = on("a", torch.neg, far)
    plan.text()
    seq = seq_of(plan, a)
    plan.handle(PeerLost(b"w1", "its process ended"))
    plan.handle(Received(b"again", worker("w1")))
    assert not any(w.lost for w in plan.core.cluster.workers)
    plan.handle(Received(b"w0", OpError(seq, "peer", "")))
    ask = Asking(plan)
    assert "worker w1 is lost: its process ended" in ask.failed(a)
    assert ask.failed(good) == ""


def test_a_lost_tensor_that_is_overwritten_whole_gets_new_memory_once_the_worker_is_back(plan):
    x = torch.ones(4, device="remote")
    lost, other = (on("b", torch.mul, x, n).view(2, 2) for n in (2, 3))
    view = lost[0]
    plan.text()
    ask = Asking(plan)
    plan.handle(PeerLost(b"w1", "its process ended"))
    on("b", lost.zero_)  # there is nobody who could have it
    assert "worker w1 is lost" in ask.failed(lost)
    plan.handle(Received(b"w1", worker("w1")))
    plan.text()
    on("b", lost[1].zero_)
    on("b", lost.copy_, other)
    assert "empty_strided" not in plan.text() and "worker w1 is lost" in ask.failed(lost)
    on("b", lost[:1].expand(2, 2).zero_)
    assert "worker w1 is lost" in ask.failed(lost)
    on("b", lost.zero_)
    assert ask.failed(lost) == ask.failed(view) == ""
    assert "worker w1 is lost" in ask.failed(other)


def test_a_client_that_leaves_leaves_nothing(plan):
    x = torch.ones(3, device="remote")
    kept = [on("a", torch.neg, x), on("b", torch.exp, x)]
    plan.text()
    actions = plan.core.handle(PeerLost(b"client", "gone"))
    freed = [a.peer for a in actions if isinstance(a, Send) and isinstance(a.message, Run) and a.message.code[0] == END]
    assert set(freed) == {b"w0", b"w1"}
    assert not plan.core.sessions
    del kept


def test_a_message_out_of_place_ends_that_session_only(plan):
    x = torch.ones(3, device="remote")
    a = on("a", torch.neg, x)
    plan.text()
    core = plan.core
    core.handle(Received(b"other", hello("client", switches={"workers": 2})))
    assert b"other" in core.sessions
    actions = core.handle(Received(b"other", Fetch(1, a._ref.id)))  # a tensor of another session
    assert any(
        isinstance(s, Send) and s.peer == b"other" and "not of this session" in s.message.error["message"] for s in actions
    )
    for bad in (Ops(0, [[17, ["os.system.default", [], {}, [], 0, [], [], False, False]]], [], []), Ops(0, [], [], [999, 0])):
        core.handle(Received(b"evil", hello("client", switches={"workers": 2})))
        answers = core.handle(Received(b"evil", bad))
        assert any(isinstance(s, Send) and isinstance(s.message, Failed) for s in answers)
        assert b"evil" not in core.sessions
    core.handle(Malformed(b"nobody", "not msgpack"))
    assert Asking(plan).failed(a) == ""


@pytest.mark.parametrize("numbers, gpus", [((0, 1), True), ((0, -1), False), ((-1, -1), False)])
def test_a_client_is_told_whether_all_its_workers_have_gpus(numbers, gpus):
    core = Core()
    for peer, number in zip((b"v", b"w"), numbers):
        core.handle(Received(peer, hello("worker", info={**INFO, "gpu": number})))
    sent = [a.message for a in core.handle(Received(b"c", hello("client"))) if isinstance(a, Send)]
    assert [message.gpus for message in sent if isinstance(message, Welcome)] == [gpus]


def test_a_worker_cannot_take_a_name_in_use():
    core = Core()
    assert any(isinstance(a.message, Welcome) for a in core.handle(Received(b"x", worker("a"))) if isinstance(a, Send))
    again = core.handle(Received(b"y", worker("a")))
    assert any(
        isinstance(a, Send) and isinstance(a.message, Reject) and "'a' is here already" in a.message.error["message"]
        for a in again
    )


def of_two_hosts():
    """A core with a worker on each of two hosts that share two subnets, and a client whose group spans both."""
    core = Core()
    for n, peer in enumerate((b"v", b"w")):
        links = [[f"10.0.{subnet}.{n + 1}", 24, f"eth{subnet}", 1000, False] for subnet in range(2)]
        about = {**INFO, "home": f"home{n}", "host": f"h{n}", "port": 7, "links": links}
        core.handle(Received(peer, hello("worker", info=about)))
    text = "all: {shard: {axis: 0, workers: [0, 1]}}"
    core.handle(Received(b"c", hello("client", config=text), at=1.0))
    return core


def said_to(peer, actions):
    return [a.message for a in actions if isinstance(a, Send) and a.peer == peer]


def test_a_client_is_welcomed_once_its_workers_have_connected_and_is_told_of_a_way_that_failed():
    core = of_two_hosts()
    (notice,) = said_to(b"c", core.handle(Received(b"v", LinkFailed(1, 1, "10.0.0.1", "10.0.0.2", "timed out"), at=2.0)))
    assert "10.0.0.1 to 10.0.0.2 failed: timed out" in notice.text and "10.0.1.1 to 10.0.1.2 is tried now" in notice.text
    assert not said_to(b"c", core.handle(Received(b"v", LinkMade(1, 1, "10.0.0.1", "10.0.0.2"), at=2.0))), "of the way before"
    welcome, *notices = said_to(b"c", core.handle(Received(b"v", LinkMade(1, 2, "10.0.1.1", "10.0.1.2"), at=2.0)))
    assert isinstance(welcome, Welcome) and [type(one) for one in notices] == [Notice]

    # The first way works again: the World that says so is sent at once, since nothing is under way.
    actions = core.handle(Received(b"v", LinkMade(1, 0, "10.0.0.1", "10.0.0.2"), at=3.0))
    assert [one.text for one in said_to(b"c", actions)] == ["hosts h0 and h1 have their connection 10.0.0.1 to 10.0.0.2 again"]
    (world,) = said_to(b"v", actions)
    assert world.ways == [[0, 1, 3, "tcp", "10.0.0.1", "10.0.0.2", []]] and world.broken == []


def test_a_client_whose_group_nothing_joins_any_more_is_refused_in_place_of_a_welcome():
    core = of_two_hosts()
    core.handle(Received(b"v", LinkFailed(1, 1, "10.0.0.1", "10.0.0.2", "timed out"), at=2.0))
    said = said_to(b"c", core.handle(Received(b"v", LinkFailed(1, 2, "10.0.1.1", "10.0.1.2", "timed out"), at=2.0)))
    assert [type(one) for one in said] == [Notice, Reject] and "which no link joins" in said[1].error["message"]
    assert b"c" not in core.sessions and b"w" in core.workers


def test_a_client_whose_workers_do_not_connect_in_time_is_welcomed_all_the_same():
    core = of_two_hosts()
    assert not said_to(b"c", core.handle(Tick(at=20.0)))
    assert isinstance(said_to(b"c", core.handle(Tick(at=40.0)))[0], Welcome)


@pytest.mark.parametrize("ends", ["Done", "Tick"])
def test_a_connection_that_works_again_while_a_worker_is_busy_is_used_afterwards(ends):
    core = of_two_hosts()
    core.handle(Received(b"v", LinkFailed(1, 1, "10.0.0.1", "10.0.0.2", "timed out"), at=2.0))
    worker = core.workers[b"w"]
    worker.runs = 1
    assert not said_to(b"v", core.handle(Received(b"v", LinkMade(1, 0, "10.0.0.1", "10.0.0.2"), at=2.0)))
    if ends == "Tick":
        worker.done = 1
    actions = core.handle(Received(b"w", Done(1, [], []), at=3.0) if ends == "Done" else Tick(at=3.0))
    assert [one.ways[0][4] for one in said_to(b"v", actions) if isinstance(one, World)] == ["10.0.0.1"]


def test_no_client_waits_for_the_connections_of_a_lost_worker():
    core = of_two_hosts()
    assert [type(one) for one in said_to(b"c", core.handle(PeerLost(b"w", "killed", at=2.0)))][-1] is Welcome
    assert isinstance(said_to(b"d", core.handle(Received(b"d", hello("client", config=""), at=3.0)))[0], Welcome)


def test_a_client_waits_for_its_workers_and_is_told_when_they_do_not_come():
    core = Core()
    text = "a: {shard: {axis: 0, workers: [0, 1]}}"
    for peer, first, has in ((b"c", hello("client", config=text, config_path="s.yaml"), 0), (b"w0", worker(), 1)):
        told = [a.message for a in core.handle(Received(peer, first)) if isinstance(a, Send) and a.peer == b"c"]
        assert told == [Notice(f"it has {has} of the 2 workers that the program wants")]
        assert not [a for a in core.handle(Tick(at=1.0)) if isinstance(a, Send) and a.peer == b"c"]  # it is told once
    assert b"c" not in core.sessions
    core.handle(Received(b"w1", worker()))
    assert b"c" in core.sessions
    late = Core()
    late.handle(Received(b"w0", worker()))
    late.handle(Received(b"c", hello("client", config=text, config_path="s.yaml")))
    actions = late.handle(Tick(at=100.0))
    (reject,) = [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Reject)]
    assert "s.yaml:1" in reject.error["message"] and "worker 1" in reject.error["message"]


def test_stats_wait_for_living_workers_only(plan):
    core = plan.core
    actions = core.handle(Received(b"client", Stats(7)))
    assert sum(isinstance(a, Send) for a in actions) == 2
    core.handle(PeerLost(b"w0", "gone"))
    actions = core.handle(PeerLost(b"w1", "gone"))
    assert any(isinstance(a, Send) and getattr(a.message, "request", None) == 7 for a in actions)


def test_what_a_worker_is_told_of_outlives_what_is_refused_and_not_its_process() -> None:
    """A program of one session names it; it goes with what is sent next, also when what was written meanwhile is refused."""
    worker = Worker(0, "w0", b"peer", {})
    told, others = (Define(100 + n, "together", {"count": 2 + n}) for n in range(2))
    worker.announce(told)
    assert worker.known == {100}
    worker.define(others)
    worker.code += (101, 0)
    worker.discard()
    assert worker.known == {100}
    worker.code += (100, 0)
    assert worker.take() == [([told.wire()], [100, 0])]
    worker.announce(Define(102, "together", {"count": 4}))
    worker.lost = "killed"
    worker.discard()
    worker.revive(b"new", {})
    worker.code += (1, 0, 0)
    assert worker.take() == [([], [1, 0, 0])] and not worker.known
