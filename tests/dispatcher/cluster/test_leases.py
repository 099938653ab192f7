"""Exclusive servers, event by event: who gets which workers, the queue, limits, and workers that start afresh."""

from __future__ import annotations

import random

import pytest

from gt import errors
from gt.dispatcher.cluster import leases
from gt.dispatcher.cluster.leases import Terms
from gt.dispatcher.core import Core
from gt.dispatcher.events import PeerLost, Received, Send, Tick
from gt.wire.access.proof import proof
from gt.wire.link import hello
from gt.wire.messages import (
    Abort,
    Data,
    Described,
    Done,
    Exit,
    Failed,
    Goodbye,
    LinkMade,
    Notice,
    OpError,
    Ops,
    Piece,
    Reject,
    Renew,
    Report,
    Run,
    Stats,
    UploadProgress,
    Welcome,
    World,
)
from gt.worker.process.restart import command
from tests.helpers.core_bench import CorePeers
from tests.helpers.hostile import Field, HonestWorker


class Shop(CorePeers):
    """A core of an exclusive server, with workers and clients that do only what a test says."""

    def __init__(self, count: int = 3, **terms) -> None:
        super().__init__(Core(terms=Terms(exclusive=True, **terms)))
        for number in range(count):
            self.worker(b"w%d" % number)

    def worker(self, peer: bytes, name: str = "", **info) -> str:
        self.give(peer, hello("worker", info={"name": name, "heap_bytes": 1 << 30, "pid": 1, **info}))
        welcomes = self.to(peer, Welcome)
        return welcomes[0].name if welcomes else ""

    def client(self, peer: bytes, workers: int = 0, config: str = "") -> list[str]:
        """Names of the workers that it gets, [] while it waits."""
        self.give(peer, hello("client", config=config, config_path="t.yaml", switches={"workers": workers}))
        return self.has(peer)

    def has(self, peer: bytes) -> list[str]:
        session = self.core.sessions.get(peer)
        return [w.name for w in session.cluster.workers] if session else []

    def leave(self, peer: bytes) -> list[bytes]:
        """A client goes; the workers that are told to start afresh."""
        self.give(peer, Goodbye())
        return sorted(p for p, m in self.sent if isinstance(m, Renew))

    def back(self, old: bytes, new: bytes, name: str) -> None:
        self.feed(PeerLost(old, "its connection ended", self.now))
        assert self.worker(new, name) == name

    def tick(self, later: float = 0.25) -> list:
        self.now += later
        return self.feed(Tick(self.now))

    def refusal(self, peer: bytes) -> errors.GTError:
        (reject,) = self.to(peer, Reject)
        assert peer in self.closed and not self.core.admission.waiting
        return errors.from_wire(reject.error)


# ---- workers of its own


def test_two_clients_have_disjoint_workers_that_each_counts_from_zero():
    shop = Shop(4)
    config = "a: {shard: {axis: 0, workers: [0, 1]}}"
    assert shop.client(b"c", 2, config) == ["w0", "w1"]
    (world,) = shop.to(b"w1", World)
    assert [row[:2] for row in world.workers] == [[0, "w0"], [1, "w1"]] and not shop.to(b"w2", World)
    assert shop.to(b"c", Welcome)[0].workers == ["w0", "w1"]
    assert shop.client(b"d", 2, config) == ["w2", "w3"]
    (world,) = shop.to(b"w3", World)
    assert [row[:2] for row in world.workers] == [[0, "w2"], [1, "w3"]] and not shop.to(b"w0", World)


def test_a_client_that_says_nothing_gets_all_or_as_many_as_are_allowed():
    assert Shop(3).client(b"c") == ["w0", "w1", "w2"]
    shop = Shop(3, workers=2)
    assert shop.client(b"c") == ["w0", "w1"] and shop.client(b"d") == []
    assert shop.client(b"e", 1) == [], "an earlier one waits"


def test_a_worker_is_asked_only_by_its_own_session():
    shop = Shop(2)
    shop.client(b"c", 1), shop.client(b"d", 1)
    shop.give(b"c", Stats(5))
    assert {peer for peer, _ in shop.sent} == {b"w0"}
    (query,) = (m for _, m in shop.sent)
    shop.give(b"w1", Report(query.request, {"done": 0, "at": None, "stats": {"lie": 1}}))
    assert not shop.to(b"c", Report)
    shop.give(b"w0", Report(query.request, {"done": 0, "at": None, "stats": {}}))
    (report,) = shop.to(b"c", Report)
    assert [row["name"] for row in report.body["workers"]] == ["w0"]


@pytest.mark.parametrize(
    "lie", [Done(99), OpError(0, "op", "x"), Piece(1, 0, 0), Described(1, []), UploadProgress(1, 0), Report(1, {})]
)
def test_messages_of_another_sessions_worker_touch_nobody_else(lie):
    shop = Shop(2)
    shop.client(b"c", 1), shop.client(b"d", 1)
    shop.give(b"w1", lie)
    assert not [m for p, m in shop.sent if p in (b"c", b"w0")], shop.sent
    assert b"c" in shop.core.sessions


@pytest.mark.parametrize("lie", [Done(0), OpError(0, "op", "x"), Piece(1, 0, 0), Report(1, {}), hello("worker")])
def test_a_free_worker_that_speaks_is_parted_from(lie):
    shop = Shop(2)
    shop.give(b"w1", lie)
    assert shop.closed == [b"w1"] and shop.to(b"w1", Exit)
    assert shop.client(b"c") == ["w0"]


def test_workers_of_a_session_share_memory_among_themselves_alone():
    shop = Shop(0)
    for number in range(4):
        shop.worker(b"w%d" % number, unique_id=f"id{number}", host="h")
    shop.client(b"c", 2)
    (first,) = shop.to(b"w0", World)
    shop.client(b"d", 2)
    (second,) = shop.to(b"w3", World)
    assert (first.members, first.unique_id) == ([0, 1], "id0")
    assert (second.members, second.unique_id) == ([0, 1], "id2")


def test_the_token_alone_does_not_admit_a_worker():
    shop = Shop(0, secret="the operator's")
    info = {"name": "a", "pid": 7, "host": "h", "doorbell": "5-00ff"}
    assert shop.worker(b"x", **info) == "" and "--worker-token-file" in str(shop.refusal(b"x"))
    assert shop.worker(b"y", **info, proof=proof("another", info)) == ""
    good = proof("the operator's", info)
    assert "operator" not in good
    assert shop.worker(b"z", **{**info, "doorbell": "5-00fe"}, proof=good) == "", "it is of another process"
    assert shop.worker(b"v", **info, proof=good) == "a"


# ---- one after the other


def test_workers_start_afresh_before_another_session_has_them():
    shop = Shop(2)
    shop.client(b"c")
    assert shop.client(b"d") == []
    assert shop.leave(b"c") == [b"w0", b"w1"] and not shop.closed[1:]
    assert not shop.tick() or shop.has(b"d") == []
    shop.back(b"w0", b"x0", "w0")
    assert shop.has(b"d") == []
    shop.back(b"w1", b"x1", "w1")
    assert shop.has(b"d") == ["w0", "w1"]
    assert shop.to(b"x0", World) and not shop.to(b"w0", World)


def test_a_worker_that_comes_before_its_old_connection_ends_is_the_new_one():
    shop = Shop(1)
    shop.client(b"c")
    shop.leave(b"c")
    assert shop.worker(b"x0", "w0") == "w0"
    assert shop.client(b"d") == ["w0"]
    shop.feed(PeerLost(b"w0", "its connection ended", shop.now))
    assert not shop.core.sessions[b"d"].cluster.workers[0].lost


def test_messages_of_a_worker_after_its_session_mean_nothing():
    shop = Shop(1)
    shop.client(b"c")
    shop.leave(b"c")
    for message in (Done(77), OpError(0, "op", "x"), Piece(1, 0, 0), Goodbye("")):
        assert shop.give(b"w0", message) == [] and not shop.closed


def test_a_worker_that_does_not_come_back_is_lost_and_the_queue_is_told():
    shop = Shop(2)
    shop.client(b"c")
    shop.client(b"d", 2)
    shop.client(b"e")
    shop.leave(b"c")
    shop.back(b"w0", b"x0", "w0")
    shop.tick(leases.RENEWAL_SECONDS - 1)
    assert not shop.has(b"d")
    shop.tick(2)
    assert shop.to(b"w1", Exit) and shop.closed == [b"w1"], "it is still connected, and hangs"
    assert "1 of the 2 workers" in shop.to(b"d", Notice)[0].text
    assert shop.has(b"e") == ["w0"], "who wants more than there is holds up nobody"
    shop.tick(leases.PATIENCE_SECONDS)
    refused = shop.refusal(b"d")
    assert isinstance(refused, errors.Refused) and "1 workers are connected, the program wants 2" in str(refused)
    assert shop.worker(b"x1", "w1") == "w1", "late is better than never"
    assert shop.client(b"f") == []
    assert shop.client(b"g", 1) == []


def test_a_worker_that_joins_goes_to_who_waits():
    shop = Shop(1)
    shop.client(b"c")
    assert shop.client(b"d", 1) == []
    assert shop.worker(b"new") == "w1"
    assert shop.has(b"d") == ["w1"] and shop.has(b"c") == ["w0"]


# ---- the queue


def test_first_come_first_served_and_no_small_request_passes_a_large_one():
    shop = Shop(3)
    shop.client(b"a", 1)
    assert shop.client(b"big", 3) == []
    assert shop.client(b"small", 1) == [], "two are free, and the earlier one waits for them"
    (told,) = shop.to(b"small", Notice)
    assert told.place == 2 and "place 2" in told.text and "1 worker of its own" in told.text
    shop.leave(b"a")
    shop.back(b"w0", b"x0", "w0")
    assert len(shop.has(b"big")) == 3
    (told,) = shop.to(b"small", Notice)
    assert told.place == 1


def test_a_change_of_place_is_told_and_nothing_else_but_now_and_then():
    shop = Shop(1)
    for peer in (b"a", b"b", b"c", b"d"):
        shop.client(peer)
    assert shop.to(b"d", Notice)[0].place == 3
    assert shop.tick() == []
    shop.feed(PeerLost(b"b", "killed", shop.now))
    shop.tick()
    assert [(p, m.place) for p, m in shop.sent] == [(b"c", 1), (b"d", 2)]
    assert shop.tick() == []
    shop.tick(leases.REMINDER_SECONDS)
    assert [(p, m.place) for p, m in shop.sent] == [(b"c", 1), (b"d", 2)], "or they would think that nobody is there"


def test_a_client_that_left_the_queue_gets_nothing():
    shop = Shop(1)
    shop.client(b"a"), shop.client(b"b"), shop.client(b"c")
    shop.give(b"b", Goodbye())
    shop.leave(b"a")
    shop.back(b"w0", b"x0", "w0")
    assert shop.has(b"c") == ["w0"] and set(shop.core.sessions) == {b"c"}


def test_a_client_is_never_refused_for_waiting_in_the_queue():
    shop = Shop(1)
    shop.client(b"a"), shop.client(b"b")
    for _ in range(20):
        shop.tick(leases.PATIENCE_SECONDS)
    assert not shop.closed and shop.core.admission.knows(b"b")


# ---- limits


def test_more_workers_than_a_session_may_have_are_refused_at_once():
    shop = Shop(3, workers=2)
    shop.client(b"c", 3)
    assert "workers=3, and a session may have 2 (the server's --max-workers)" in str(shop.refusal(b"c"))


@pytest.mark.parametrize(
    ("workers", "most", "words"),
    [(2, 0, "the session has 2 of its own, 0 to 1"), (0, 2, "session has 2 of its own"), (1, 3, "has 1 of its own, 0 to 0")],
)
def test_a_config_that_names_more_than_the_session_has_is_refused_at_once(workers, most, words):
    shop = Shop(4, workers=most)
    shop.client(b"c", workers, "a: {shard: {axis: 0, workers: [0, 3]}}")
    refused = shop.refusal(b"c")
    assert isinstance(refused, errors.ConfigError) and words in str(refused) and "t.yaml:1" in str(refused)
    assert "worker 3" in str(refused)


def test_more_workers_than_the_server_has_are_told_and_then_refused():
    shop = Shop(2)
    assert shop.client(b"c", 3) == []
    assert "it has 2 of the 3 workers" in shop.to(b"c", Notice)[0].text
    assert shop.client(b"d", 1) == ["w0"], "nobody waits behind one that cannot be served"
    shop.tick(leases.PATIENCE_SECONDS)
    assert "2 workers are connected, the program wants 3" in str(shop.refusal(b"c"))


def test_a_session_is_warned_and_then_ended_and_its_workers_go_on():
    shop = Shop(1, seconds=100.0)
    shop.tick(50)
    shop.client(b"c"), shop.client(b"d")
    shop.tick(89)
    assert not shop.to(b"c", Notice)
    shop.tick(2)
    assert "the session ends in 9 s" in shop.to(b"c", Notice)[0].text
    shop.tick(1)
    assert not shop.to(b"c", Notice), "once is enough"
    shop.tick(8)
    (failed,) = shop.to(b"c", Failed)
    error = errors.from_wire(failed.error)
    assert isinstance(error, errors.SessionExpired) and "100 s" in str(error) and "--max-session-time" in str(error)
    assert shop.to(b"w0", Renew) and b"c" in shop.closed and b"w0" not in shop.closed
    shop.back(b"w0", b"x0", "w0")
    assert shop.has(b"d") == ["w0"]
    shop.tick(99)
    assert b"d" in shop.core.sessions, "its time began with its welcome"


def test_a_shared_session_has_a_time_too():
    core = Core(terms=Terms(seconds=10.0))
    core.handle(Received(b"w0", hello("worker", info={"name": "w0"})))
    core.handle(Received(b"c", hello("client"), at=1.0))
    core.handle(Tick(10.5))
    assert b"c" in core.sessions
    core.handle(Tick(11.5))
    assert not core.sessions and b"w0" in core.workers


# ---- losses


def test_a_lost_worker_is_its_own_sessions_loss_alone():
    shop = Shop(3)
    shop.client(b"c", 2), shop.client(b"d", 1)
    shop.feed(PeerLost(b"w1", "killed", shop.now))
    assert [p for p, m in shop.sent if isinstance(m, Abort)] == [b"w0"]
    assert not [m for p, m in shop.sent if p in (b"d", b"w2")]
    assert shop.worker(b"x1", "w1") == "w1"
    assert {p for p, m in shop.sent if isinstance(m, World)} == {b"w0", b"x1"}, "its successor is the session's"
    assert shop.leave(b"c") == [b"w0", b"x1"]


def test_a_worker_without_a_name_takes_the_place_of_a_sessions_lost_one_first():
    shop = Shop(3)
    shop.feed(PeerLost(b"w0", "killed"))
    shop.client(b"c", 2)
    shop.feed(PeerLost(b"w2", "killed"))
    assert shop.worker(b"x") == "w2" and shop.worker(b"y") == "w0" and shop.worker(b"z") == "w3"


def test_workers_that_come_and_go_leave_nothing():
    shop = Shop(1)
    for number in range(50):
        assert shop.worker(b"x%d" % number, f"name{number}")
        shop.feed(PeerLost(b"x%d" % number, "killed"))
    assert list(shop.core.lending.slots) == ["w0"]


def test_a_name_in_use_is_refused_whoever_has_it():
    shop = Shop(2)
    shop.client(b"c", 1)
    for name in ("w0", "w1"):
        assert shop.worker(b"x" + name.encode(), name) == ""
        assert "is here already" in str(shop.refusal(b"x" + name.encode()))


def test_a_rank_that_is_taken_or_not_of_the_job_is_refused_by_number():
    job = CorePeers(Core(terms=Terms(most=2)))
    for peer, rank, says in ((b"a", 1, ""), (b"b", 1, "w1 on h1 has rank 1 already"), (b"c", 2, "this job has 2 workers")):
        job.give(peer, hello("worker", info={"name": f"w{rank}", "rank": rank, "heap_bytes": 1 << 30, "pid": 1, "host": "h1"}))
        (reject,) = job.to(peer, Reject) or [None]
        assert says in str(reject and errors.from_wire(reject.error)) and (reject is None) == (not says)


def test_a_session_ends_while_one_of_its_workers_is_lost():
    shop = Shop(2)
    shop.client(b"c")
    shop.feed(PeerLost(b"w1", "killed"))
    assert shop.leave(b"c") == [b"w0"]
    assert shop.worker(b"x1", "w1") == "w1"
    assert shop.client(b"d", 1) == ["w1"]


def test_a_session_that_is_refused_for_what_it_sends_gives_its_workers_back():
    shop = Shop(1)
    shop.client(b"c")
    shop.give(b"c", Ops(0, ["no template"], [], []))
    assert shop.closed == [b"c"] and shop.to(b"w0", Renew)
    assert not [m for p, m in shop.sent if isinstance(m, (Run, Data)) and p != b"w0"]


def test_a_client_whose_welcome_fails_gives_its_workers_back(monkeypatch):
    shop = Shop(1)
    monkeypatch.setattr("gt.dispatcher.cluster.membership.ClientSession", lambda *_: 1 / 0)
    shop.client(b"c")
    assert shop.to(b"c", Reject) and shop.to(b"w0", Renew)


# ---- anything at all


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_events_keeps_workers_apart_and_serves_everybody(seed):
    rng = random.Random(seed)
    shop = Shop(0, workers=rng.choice([0, 3]))
    fresh = iter(range(10**6))
    living: dict[bytes, str] = {}  # connected processes
    clients: set[bytes] = set()
    served: dict[bytes, bytes] = {}  # process -> the session that had it
    for _ in range(600):
        move = rng.choice(["worker", "client", "client", "leave", "kill", "back", "tick"])
        peer = b"%d" % next(fresh)
        if move == "worker" and len(living) < 6:
            if name := shop.worker(peer):
                living[peer] = name
        elif move == "client" and len(clients) < 6:
            clients.add(peer)
            shop.client(peer, rng.randrange(4))
        elif move == "leave" and clients:
            gone = rng.choice(sorted(clients))
            clients.discard(gone)
            shop.feed(PeerLost(gone, "killed", shop.now))
        elif move == "kill" and living:
            gone = rng.choice(sorted(living))
            living.pop(gone)
            shop.feed(PeerLost(gone, "killed", shop.now))
        elif move == "back" and shop.core.lending.renewing:
            old = rng.choice(sorted(shop.core.lending.renewing))
            name = living.pop(old)
            shop.feed(PeerLost(old, "executes itself", shop.now))
            assert shop.worker(peer, name) == name
            living[peer] = name
        else:
            shop.tick(rng.choice([0.25, 1.0, 20.0]))
        clients -= {p for p in shop.closed}
        for gone in shop.closed:
            living.pop(gone, None)
        for client, session in shop.core.sessions.items():
            for worker in session.cluster.workers:
                if not worker.lost:
                    assert served.setdefault(worker.peer, client) == client, "a process served two sessions"
    for peer in sorted(clients):
        shop.feed(PeerLost(peer, "killed", shop.now))
    shop.tick(1000)
    assert not shop.core.sessions and not shop.core.admission.waiting and not shop.core.lending.leases


class HonestCore(Core):
    """Its cluster is the honest session's."""

    @property
    def cluster(self):
        return self.sessions[b"honest"].cluster


class ExclusiveField(Field):
    """An honest session with two workers of its own; everybody else has the lying workers and spare ones that do nothing."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.core = HonestCore(terms=Terms(exclusive=True))
        self.values, self.spares = {}, 0
        for n, peer in enumerate(self.workers):
            self.workers[peer] = HonestWorker(self, peer)
            self.join(peer, f"w{n}")
        config = "a: {shard: {axis: 0, workers: [0]}}\nb: {shard: {axis: 0, workers: [1]}}\n"
        self.feed(Received(b"honest", hello("client", config=config, config_path="h.yaml", switches={"workers": 2})))
        self.honest_number = self.core.sessions[b"honest"].number
        for name in ("s0", "s1", "s2"):
            self.join(b"spare" + name.encode(), name)

    def join(self, peer: bytes, name: str) -> None:
        self.feed(Received(peer, hello("worker", info={"name": name, "host": "h", "heap_bytes": 1 << 30}), (), self.now))

    def carry_out(self, action) -> list:
        if isinstance(action, Send) and isinstance(action.message, Renew):
            assert action.peer not in self.workers, "the honest session has not ended"
            self.liars.pop(action.peer, None)
            if action.peer.startswith(b"spare"):
                self.spares += 1
                name, peer = action.peer[5:7].decode(), action.peer[:7] + b"-%d" % self.spares
                again = hello("worker", info={"name": name, "host": "h", "heap_bytes": 1 << 30})
                return [PeerLost(action.peer, "", self.now), Received(peer, again, (), self.now)]
        return super().carry_out(action)


@pytest.mark.parametrize("seed", [1, 2])
def test_thousands_of_lies_about_others_workers_harm_nobody(seed):
    field = ExclusiveField(seed)
    while field.cases < 3000:
        field.hostile_step()
        if field.cases % 20 == 0:
            field.honest_step()
    field.honest_step()
    assert field.refused > 200 and field.slowest < 2 and field.spares > 50
    assert field.internal < 20  # what nobody thought of is refused too, but is rare
    for peer in list(field.liars):
        field.feed(PeerLost(peer, "gone", field.now))
    assert set(field.core.sessions) == {b"honest"} and not field.core.admission.waiting
    for worker in field.workers.values():
        assert all(worker.honest(tensor) for tensor in worker.tensors) and not worker.data


# ---- a process that starts afresh


def test_the_command_line_of_a_worker_that_starts_afresh_does_not_grow():
    first, files = ["python", "-m", "gt.worker", "--token-file", "secret", "-p", "1"], {"--token-file": "/proc/self/fd/9"}
    second = command(first, "w0", files)
    assert second == [*first, "--wait", "120", "--name", "w0", "--token-file", "/proc/self/fd/9"]
    assert command(second, "w0", files) == second
    assert command(["python", "-p", "1", "--name", "w7"], "w7", {}) == ["python", "-p", "1", "--wait", "120", "--name", "w7"]


def test_a_client_whose_hosts_nothing_joins_is_refused_and_all_of_its_workers_start_afresh():
    core = Core(terms=Terms(exclusive=True))
    for n in range(2):
        info = {"name": f"w{n}", "heap_bytes": 1 << 30, "host": f"h{n}", "home": f"home{n}"}
        core.handle(Received(b"w%d" % n, hello("worker", info=info)))
    client = hello("client", config="a: {workers: [0, 1]}\n", config_path="t.yaml", switches={"workers": 2})
    sent = [(a.peer, type(a.message)) for a in core.handle(Received(b"c", client)) if isinstance(a, Send)]
    assert (b"c", Reject) in sent and {(b"w0", Renew), (b"w1", Renew)} <= {*sent}
    core.check()


def test_a_client_waits_until_its_own_workers_have_connected_and_may_leave_meanwhile():
    shop = Shop(0)
    for n in range(2):
        about = {"home": f"home{n}", "host": f"h{n}", "port": 7, "links": [[f"10.0.0.{n + 1}", 24, "eth0", 1000, False]]}
        shop.worker(b"w%d" % n, **about)
    assert shop.client(b"a", 2) == ["w0", "w1"] and not shop.to(b"a", Welcome)
    assert shop.leave(b"a") == [b"w0", b"w1"]
    for n in range(2):
        shop.feed(PeerLost(b"w%d" % n, "its connection ended", shop.now))
        about = {"home": f"home{n}", "host": f"h{n}", "port": 7, "links": [[f"10.0.0.{n + 1}", 24, "eth0", 1000, False]]}
        assert shop.worker(b"v%d" % n, f"w{n}", **about) == f"w{n}"
    shop.client(b"b", 2)
    assert not shop.to(b"b", Welcome) and shop.to(b"v0", World)[0].ways[0][:4] == [0, 1, 1, "tcp"]
    shop.give(b"v0", LinkMade(1, 1, "10.0.0.1", "10.0.0.2"))
    assert shop.to(b"b", Welcome) and not shop.to(b"a", Welcome)
