"""Admission: what each worker is told of a program's switches costs as little for many workers as for few."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gt.config.load import load
from gt.dispatcher.cluster import admission
from gt.dispatcher.cluster.admission import SharedThreads
from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.core import Core
from gt.dispatcher.events import PeerLost, Received, Send
from gt.dispatcher.fairness.background import Inline
from gt.dispatcher.fairness.time_slices import Pace
from gt.wire.link import hello
from gt.wire.messages import Reject, Welcome


def cluster(hosts: list[str]) -> Any:
    return SimpleNamespace(workers=[Worker(n, b"w%d" % n, f"w{n}", {"host": host}) for n, host in enumerate(hosts)])


def test_threads_are_shared_among_the_workers_of_a_host_that_a_program_uses():
    some = cluster(["a", "a", "b", "a"])
    shares = SharedThreads({"threads": 8, "deterministic": True}, load("g: {workers: [0, 1, 2]}\n", "t.yaml"), some)
    assert [shares(worker)["threads"] for worker in some.workers] == [4, 4, 8, 4]
    some.workers[1].revive(b"x", {"host": "b"})
    assert [shares(some.workers[n])["threads"] for n in (1, 0, 2)] == [4, 8, 4]
    assert SharedThreads({}, load("", "t.yaml"), some)(some.workers[0]) == {}


def test_a_run_to_each_of_many_workers_looks_at_each_once(monkeypatch: pytest.MonkeyPatch):
    looks: list[int] = []
    real = admission.home
    monkeypatch.setattr(admission, "home", lambda info: looks.append(1) or real(info))
    many = cluster(["a"] * 256)
    shares = SharedThreads({"threads": 256}, load(f"g: {{workers: {list(range(256))}}}\n", "t.yaml"), many)
    for _ in range(4):
        assert all(shares(worker)["threads"] == 1 for worker in many.workers)
    assert len(looks) <= 5 * 256


class Later(Inline):
    """Calls are done when a test says so."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin(self, call: Any) -> None:
        self.calls.append(call)


def test_a_long_config_is_read_beside_the_loop():
    later = Later()
    core = Core(pace=Pace(background=later))
    core.handle(Received(b"w", hello("worker", info={"name": "w0", "heap_bytes": 1 << 30})))
    long = "".join(f"g{n}: {{workers: [0]}}\n" for n in range(1000))
    for peer, config in ((b"a", long), (b"b", long), (b"c", long.replace("0", "x")), (b"d", "g: {workers: [0]}")):
        sent = core.handle(Received(peer, hello("client", config)))
        assert any(isinstance(a, Send) and isinstance(a.message, Welcome) for a in sent) == (peer == b"d")
    core.handle(PeerLost(b"a", "gone"))
    core._actions = []
    for call in later.calls:
        call()
    answers = {a.peer: type(a.message) for a in core._actions if isinstance(a, Send) and a.peer != b"w"}
    assert answers == {b"b": Welcome, b"c": Reject} and [*core.sessions] == [b"d", b"b"]
    assert not core.admission.reading and not core.admission.waiting
