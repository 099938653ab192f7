"""Sessions take turns at workers: what one has queued keeps another waiting for two of its ops at most."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from gt.dispatcher.events import PeerLost
from gt.dispatcher.fairness.run_queue import AHEAD_SECONDS, MAX_UNITS, MIN_UNITS, SHARED_DIVISOR, UNIT_SECONDS, RunQueue, Unit
from gt.dispatcher.state.emitter import INSTRUCTION_SECONDS, MANY_INSTRUCTIONS
from gt.ir.instr import BACKENDS, END, END_FRAGMENT, FRAGMENT, PARAM
from gt.ir.spec import contiguous
from gt.ir.template import Out, T, Template
from gt.wire.link import hello
from gt.wire.messages import Ack, Data, Done, Fetch, Ops, Piece, Run, TorchSettings, Value
from tests.helpers.core_bench import CoreBench
from tests.helpers.hostile import TEMPLATES, row, spec
from tests.helpers.processes import wait_until
from tests.helpers.serving import serving
from tests.helpers.streams import NEG, Stream


class Players:
    """Workers that execute what a queue sends, each in order."""

    def __init__(self, workers: int, sessions: int) -> None:
        self.queue = RunQueue()
        self.order: dict[int, list[tuple[int, int]]] = {n: [] for n in range(workers)}  # (session, its unit)
        self.sent = dict.fromkeys(range(workers), 0)
        self.told = dict.fromkeys(range(workers), 0)
        self.units = dict.fromkeys(range(sessions), 0)
        for owner in range(sessions):
            self.queue.enter(owner)

    def offer(self, owner: int, **costs: float) -> None:
        """A unit for workers w0=seconds, w1=seconds ..."""
        number, self.units[owner] = self.units[owner], self.units[owner] + 1
        seconds = {int(name[1:]): cost for name, cost in costs.items()}

        for worker in seconds:
            self.queue.use(owner, worker)

        def send() -> None:
            for worker, cost in seconds.items():
                self.sent[worker] += 1
                self.order[worker].append((owner, number))
                self.queue.sent(owner, worker, self.sent[worker], cost)

        unit = Unit(owner, seconds, send)
        if self.queue.offer(unit):
            send()
        self.queue.check()

    def done(self, worker: int, count: int = 1) -> None:
        self.told[worker] = min(self.told[worker] + count, self.sent[worker])
        self.queue.done(worker, self.told[worker])
        for unit in self.queue.due():
            unit.send()
        self.queue.check()

    def finish(self) -> None:
        while any(self.told[worker] < self.sent[worker] for worker in self.sent):
            for worker in self.sent:
                self.done(worker)


def test_short_work_of_one_session_alone_is_never_held_back():
    players = Players(1, 2)
    for _ in range(1000):
        players.offer(0, w0=0.0)
    assert len(players.order[0]) == 1000


def test_less_is_under_way_on_a_worker_that_another_session_uses():
    for sessions, under_way in ((1, MAX_UNITS + 1), (2, MIN_UNITS)):
        players = Players(1, sessions)
        for owner in range(1, sessions):
            players.offer(owner, w0=0.0)
        for _ in range(MAX_UNITS + 1):
            players.offer(0, w0=AHEAD_SECONDS / SHARED_DIVISOR * 0.9)
        assert sum(owner == 0 for owner, _ in players.order[0]) == under_way


def test_long_work_is_under_way_by_twos_and_more_comes_as_it_is_done():
    players = Players(1, 1)
    for _ in range(10):
        players.offer(0, w0=1.0)
    assert len(players.order[0]) == MIN_UNITS
    for n in range(1, 9):
        players.done(0)
        assert len(players.order[0]) == n + MIN_UNITS
    players.finish()
    assert players.order[0] == [(0, n) for n in range(10)]


def test_a_newcomers_step_waits_for_what_is_under_way_and_for_nothing_else():
    players = Players(1, 2)
    for _ in range(400):
        players.offer(0, w0=0.1)
    players.offer(1, w0=0.0)
    assert players.order[0] == [(0, 0), (0, 1), (1, 0)]
    players.finish()
    assert len(players.order[0]) == 401


def test_sessions_take_turns():
    players = Players(1, 3)
    for _ in range(30):
        for owner in range(3):
            players.offer(owner, w0=1.0)
    players.finish()
    for start in range(3 * MIN_UNITS, 90, 3):
        assert {owner for owner, _ in players.order[0][start : start + 3]} == {0, 1, 2}
    for owner in range(3):
        assert [n for who, n in players.order[0] if who == owner] == list(range(30))


def test_neither_of_two_sessions_is_far_ahead_with_short_work():
    players = Players(1, 2)
    players.offer(1, w0=0.0)
    for _ in range(64):
        players.offer(0, w0=0.0)
    assert sum(owner == 0 for owner, _ in players.order[0]) == MAX_UNITS


def test_a_session_on_other_workers_holds_nobody_back():
    players = Players(2, 2)
    players.offer(1, w1=0.0)
    for _ in range(64):
        players.offer(0, w0=0.0)
    assert len(players.order[0]) == 64


def test_all_workers_see_what_sessions_exchange_in_one_order_and_all_of_it():
    for seed in range(50):
        rng = random.Random(seed)
        players, last = Players(3, 3), {}
        for n in range(200):
            workers = rng.sample(range(3), rng.randrange(1, 4))
            owner = rng.randrange(3)
            last[owner, players.units[owner]] = n
            players.offer(owner, **{f"w{w}": rng.choice((0.0, UNIT_SECONDS, AHEAD_SECONDS, 1.0)) for w in workers})
            if rng.random() < 0.4:
                players.done(rng.randrange(3), rng.randrange(1, 4))
        players.finish()
        assert {unit for order in players.order.values() for unit in order} == set(last)
        for a in range(3):
            for b in range(a):
                common = set(players.order[a]) & set(players.order[b])
                assert [u for u in players.order[a] if u in common] == [u for u in players.order[b] if u in common]


def test_waiting_units_of_an_ended_session_are_handed_back_and_others_go_on():
    players = Players(1, 2)
    for _ in range(5):
        players.offer(0, w0=1.0)
    for _ in range(5):
        players.offer(1, w0=1.0)
    assert len(players.queue.leave(0)) == 5 - MIN_UNITS
    players.finish()
    assert [n for owner, n in players.order[0] if owner == 1] == list(range(5))


def test_a_lost_workers_share_is_not_waited_for():
    players = Players(2, 1)
    for _ in range(4):
        players.offer(0, w0=1.0, w1=1.0)
    players.queue.lose(1)
    players.done(0, 2)
    assert len(players.order[0]) == 4


# ---- in the core

LARGE = contiguous((2048, 2048), "float32")
MATMUL = Template("aten.mm.default", (T(0), T(1)), (), (LARGE, LARGE), 0, (Out("new", LARGE),))
ONES = Template("aten.ones.default", ([2048, 2048],), (), (), 0, (Out("new", LARGE),))


def queued(bench: CoreBench, count: int) -> None:
    """A client's matmuls in one batch: 1 is what they read."""
    code: list = [16, 0, 1]
    for n in range(count):
        code += [17, 0, 1, 1, 2 + n]
    bench.give(b"c", Ops(0, [[16, ONES.wire()], [17, MATMUL.wire()]], [], code))


def carried_out(bench: CoreBench, worker: bytes = b"w0") -> list:
    """The worker says that it is through with all it has; what it is sent then."""
    return bench.give(worker, Done(bench.core.workers[worker].runs))


def test_a_batch_of_long_ops_goes_out_as_they_are_done():
    bench = CoreBench("")
    queued(bench, 40)
    runs = len(bench.to(b"w0", Run))
    assert runs == MIN_UNITS
    while carried_out(bench):
        runs += len(bench.to(b"w0", Run))
        if bench.to(b"c", Ack):
            break
    assert runs == 40 and [m.seq for m in bench.to(b"c", Ack)] == [0]


def test_anothers_value_is_answered_before_a_long_queue_is_done():
    bench = CoreBench("")
    queued(bench, 200)
    bench.client(b"d", "")
    bench.give(b"d", Ops(0, [[16, TEMPLATES[0]], [17, TEMPLATES[3]]], [], [16, 0, 0, 1, 17, 0, 1, 2]), (bytes(64),))
    bench.give(b"d", Fetch(1, 2))
    key = next(iter(bench.core.sessions[b"d"].fetches.by_key))
    size = bench.core.sessions[b"d"].fetches.by_key[key].sizes[key]
    bench.give(b"w0", Piece(key, 0, size), (bytes(size),))
    carried_out(bench)
    assert bench.to(b"d", Value)
    assert len(bench.core.sessions[b"c"].op_stream.pending) == 1  # 200 ops, of which few were sent
    assert bench.core.workers[b"w0"].runs < 10


def test_a_worker_is_told_when_it_is_shared_and_when_it_is_no_longer():
    bench = CoreBench("")

    def said(peer: bytes, batch: int) -> list[bool]:
        templates = [[16, TEMPLATES[0]], [17, TEMPLATES[3]]] if batch == 0 else []
        first = 2 * batch + 1
        bench.give(peer, Ops(batch, templates, [], [16, 0, 0, first, 17, 0, first, first + 1]), (bytes(64),))
        assert len(bench.to(b"w0", Run)) == 1
        return [m.shared for m in bench.to(b"w0", TorchSettings)]

    assert [said(b"c", 0), said(b"c", 1)] == [[False], []]
    bench.client(b"d", "")
    assert said(b"c", 2) == [], "it has not used the worker yet"
    assert [said(b"d", 0), said(b"d", 1), said(b"c", 3), said(b"c", 4)] == [[True], [], [True], []]
    carried_out(bench)
    bench.feed(PeerLost(b"d", "gone"))
    carried_out(bench)
    assert [said(b"c", 5), said(b"c", 6)] == [[False], []]


def test_ops_go_out_in_smaller_units_where_another_session_uses_the_worker():
    some = contiguous((512, 512), "float32")  # 1.3 ms by estimate
    ones = Template("aten.ones.default", ([512, 512],), (), (), 0, (Out("new", some),))
    matmul = Template("aten.mm.default", (T(0), T(1)), (), (some, some), 0, (Out("new", some),))
    for sharers, ops in (((b"c",), 3), ((b"c", b"d"), 1)):
        bench = CoreBench("")
        for peer in sharers:
            if peer != b"c":
                bench.client(peer, "")
            bench.give(peer, Ops(0, [[16, ones.wire()], [17, matmul.wire()]], [], [16, 0, 1]))
            carried_out(bench)
        code = [number for n in range(12) for number in (17, 0, 1, 1, 2 + n)]
        bench.give(b"c", Ops(1, [], [], code))
        assert len(bench.to(b"w0", Run)[0].code) == 5 * ops


RNN = row(
    "gt.rnn.default", [{"t": 0}, [{"t": 1}], [{"t": 2}, {"t": 3}], "gru", False, 1, True, False, [], [True] * 4, True],
    [spec(512, 8, 64), spec(1, 8, 64), spec(192, 64), spec(192, 64)], [spec(512, 8, 64), spec(1, 8, 64), spec(0)],
)  # fmt: skip


def test_layers_that_two_workers_share_are_estimated_at_half_their_time():
    times = []
    for workers in ("[0]", "[0, 1]"):
        bench = CoreBench(f"a: {{shard: {{axis: 1, workers: {workers}}}}}\n")
        makes = [[16 + n, row("aten.ones.default", [form[0]], [], [form])] for n, form in enumerate(RNN[3])]
        code = [number for n in range(len(makes)) for number in (16 + n, 1, 1 + n)]
        code += [PARAM, 3, PARAM, 4, 30, 1, 1, 2, 3, 4, 5, 6, 7]
        bench.give(b"c", Ops(0, [*makes, [30, RNN]], [[1, "f", 1, "a", False, -1]], code))
        costs = bench.core.sessions[b"c"].emitter.costs
        times.append(max(costs.values()))
    assert times[0] == pytest.approx(2 * times[1])


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_launches_of_programs_go_out_in_units_where_another_session_uses_the_worker(backend):
    bench = CoreBench("")
    bench.client(b"d", "")
    for peer in (b"c", b"d"):
        templates = [[16, TEMPLATES[0]], *([17 + n, TEMPLATES[3]] for n in range(8))]
        bench.give(peer, Ops(0, templates, [], [16, 0, 0, 1, 17, 0, 1, 2]), (bytes(64),))
        carried_out(bench)
    made = itertools.count(3)

    def calls(call: int, length: int) -> list:
        """One batch with eight functions, each a run of negations that begins with a template of its own."""
        code: list = []
        for function in range(8):
            ids = [1, *itertools.islice(made, length)]
            ops = [number for ins, out in itertools.pairwise(ids) for number in (17 + function, 0, ins, out)]
            header = [FRAGMENT, function, call, BACKENDS.index(backend), 0, 0, len(ops)]
            code += [*header, *ops, END_FRAGMENT, length, *ids[1:]]
        return code

    length = 24 if backend == "eager" else 3  # 64 ops are a unit, and so is a compilation
    for call in range(2):
        bench.give(b"c", Ops(1 + call, [], [], calls(call, length)))
        while not bench.to(b"c", Ack):
            carried_out(bench)
    bench.give(b"c", Ops(3, [], [], calls(2, length)))
    launches = [[define for define in run.defines if define[1] == "fragment"] for run in bench.to(b"w0", Run)]
    most = 3 if backend == "eager" else 1  # launches of one Run
    assert sum(map(len, launches)) > most and max(map(len, launches)) == most, launches
    seen = sum(map(len, launches))
    while seen < 8:
        carried_out(bench)
        runs = bench.to(b"w0", Run)
        assert runs and all(len(run.defines) <= most for run in runs)
        seen += sum(define[1] == "fragment" for run in runs for define in run.defines)
    assert seen == 8


def test_a_program_of_many_short_ops_is_long_work():
    """It was none, and all calls that a client has credit for went to the worker: a newcomer waited for each of them."""
    bench = CoreBench("")
    templates = [[16, TEMPLATES[0]], [17, TEMPLATES[3]]]
    bench.give(b"c", Ops(0, templates, [], [16, 0, 0, 1]), (bytes(64),))
    carried_out(bench)
    made, length = itertools.count(3), 4 * MANY_INSTRUCTIONS

    def call(number: int) -> list:
        ids = [1, *itertools.islice(made, length)]
        ops = [number for ins, out in itertools.pairwise(ids) for number in (17, 0, ins, out)]
        return [FRAGMENT, 0, number, 0, 0, 0, len(ops), *ops, END_FRAGMENT, length, *ids[1:]]

    sent = 0
    for number in range(24):
        bench.give(b"c", Ops(1 + number, [], [], call(number)))
        sent += len(bench.to(b"w0", Run))
        while number < 3 and not bench.to(b"c", Ack):
            carried_out(bench)
            sent = 0
    ahead = AHEAD_SECONDS / (length * INSTRUCTION_SECONDS)
    assert MIN_UNITS <= sent <= ahead + MIN_UNITS < 20


def test_a_session_that_ends_leaves_nothing_of_what_waited_for_its_turn():
    bench = CoreBench("")
    queued(bench, 50)
    bench.give(b"c", Ops(1, [[18, TEMPLATES[0]]], [], [18, 0, 0, 90, 17, 0, 1, 1, 91]), (bytes(64),))
    bench.feed(PeerLost(b"c", "gone"))
    (last,) = bench.to(b"w0", Run)
    assert END in last.code
    carried_out(bench)
    assert not bench.to(b"w0", Run)


def test_waiting_units_are_sent_before_a_lost_workers_successor_is_met():
    bench = CoreBench("")
    queued(bench, 50)
    bench.feed(PeerLost(b"w1", "killed"))
    before = bench.core.workers[b"w0"].runs
    assert before == 50 - 1 + 1
    bench.give(b"new", hello("worker", info={"name": "w1", "heap_bytes": 1 << 30}))
    assert bench.core.workers[b"w0"].runs == before


def test_uploads_of_what_never_has_its_turn_are_dropped():
    bench = CoreBench("")
    queued(bench, 50)
    bench.give(b"c", Ops(1, [[18, TEMPLATES[0]], [19, TEMPLATES[3]]], [], [18, 0, 0, 90, 19, 0, 90, 91]), (bytes(64),))
    (data,) = bench.to(b"w0", Data)
    bench.feed(PeerLost(b"c", "gone"))
    assert [(m.key, m.total) for m in bench.to(b"w0", Data)] == [(data.key, -1)]


# ---- with real clients


def test_a_second_clients_value_comes_before_the_firsts_four_hundred_matmuls():
    look = contiguous((1024, 1024), "float32")
    matmul = Template("aten.mm.default", (T(0), T(1)), (), (look, look), 0, (Out("new", look),))
    ones = Template("aten.ones.default", ([1024, 1024],), (), (), 0, (Out("new", look),))
    with serving(1, "torch") as server:
        first, second = Stream(server.address, seed=1), Stream(server.address, seed=2)
        owner, queue = next(iter(server._core.sessions.values())), server._core.cluster.queue
        array = np.ones((8, 6), np.float32)
        first.session.submit([[90, ones.wire()], [91, matmul.wire()]], [[1, "first.py", 1, "", False, -1]], [90, 1, 1], [])
        for batch in range(8):
            code = [number for n in range(50) for number in (91, 1, 1, 1, 2 + 50 * batch + n)]
            first.session.submit([], [], code, [])
        assert wait_until(lambda: owner.op_stream.definitions.next_batch == 9)
        left = len(queue._lines[owner.number])
        assert left > 300, "the first client's work went to the worker at once"
        for _ in range(5):
            value = second.fetch(second.op(NEG, second.upload(array), value=-array))
            np.testing.assert_array_equal(value, -array)
        done = left - len(queue._lines[owner.number])
        assert done < 60, f"{done} of another's matmuls were done in five round trips"
        first.session.close()
        second.session.close()
