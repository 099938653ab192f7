"""A worker that is gone fails what waits on it at once, and its successor starts afresh."""

from __future__ import annotations

import os
import threading
import types

import numpy as np
import pytest

from gt.errors import ConfigError
from gt.worker.plane.base import ALL, PeerGone, Unreachable
from gt.worker.plane.registry import open_plane
from gt.worker.plane.shm import ShmPlane
from tests.worker.plane import planes

CPU = types.SimpleNamespace(direct=None)  # the engine of a worker without a GPU
FLOATS = planes.adding(np.float32)
WAITS = {
    "recv": lambda plane: plane.recv(planes.channel(1), bytearray(1)),
    "send": lambda plane: plane.send(planes.channel(1), bytes(10_000)),
    "all_reduce": lambda plane: plane.all_reduce(planes.team([0, 1], 0), np.zeros(9, np.float32), FLOATS),
    "all_to_all": lambda plane: plane.all_to_all(planes.team([0, 1], 0), [b"", b"1"], [b"", bytearray(1)]),
}


def asleep(plane: ShmPlane) -> bool:
    heap = plane._heap()
    return heap.words[heap.asleep] == 1


def blocked(plane: ShmPlane, wait, failures: list[PeerGone]) -> threading.Thread:
    """A thread that is asleep in the plane."""

    def run() -> None:
        with pytest.raises(PeerGone) as caught:
            wait(plane)
        failures.append(caught.value)

    thread = threading.Thread(target=run)
    thread.start()
    while not asleep(plane):
        os.sched_yield()
    return thread


@pytest.mark.parametrize("kind", WAITS)
@pytest.mark.parametrize("index", [1, ALL])
def test_abort_from_another_thread_ends_a_wait(kind, index):
    failures: list[PeerGone] = []
    with planes.world(2) as (plane, _):
        thread = blocked(plane, WAITS[kind], failures)
        plane.abort(7, "nobody here")  # wakes, but concerns nothing that waits
        plane.abort(index, "killed by signal 9")
        thread.join()
        assert (failures[0].index, failures[0].reason) == (1, "killed by signal 9")
        assert str(failures[0]) == "worker 1 is gone: killed by signal 9"
        for wait in WAITS.values():  # and so from now on
            with pytest.raises(PeerGone):
                wait(plane)


def test_a_wait_on_a_living_peer_outlasts_the_death_of_another():
    def work(index, plane):
        data = bytearray(5)
        if index == 0:
            plane.recv(planes.channel(1), data)
        elif index == 1:
            while not asleep(world[0]):
                os.sched_yield()
            world[0].abort(2, "gone")
            plane.send(planes.channel(0), b"alive")
        return bytes(data)

    with planes.world(3) as world:
        assert planes.together(world, work)[0] == b"alive"


def test_a_successor_of_a_worker_that_left_in_the_middle_starts_afresh():
    """Half-received messages, full slots and team counts of the old pair are not the new pair's."""
    with planes.world(2) as (old, plane):
        rows = [peer.row for peer in plane._peers.values()]

        def exchange(index, which):
            for _ in range(3):
                which.all_reduce(planes.team([0, 1], index), np.zeros(9, np.float32), FLOATS)
            if index == 0:
                which.send(planes.channel(1, slots=3), b"a" * 300)  # two slots, one of which stays full
                which.send(planes.channel(1, slots=3), b"b")
            else:
                into = bytearray(300)
                which.recv(planes.channel(0, slots=3), into)

        planes.together([old, plane], exchange)
        new = ShmPlane(planes.HEAP)
        rows[0] = planes.row(0, new.open())
        plane.abort(0, "killed")
        with pytest.raises(PeerGone, match="worker 0 is gone: killed"):
            plane.recv(planes.channel(0, slots=3), bytearray(1))
        new.world(rows)
        new.send(planes.channel(1, slots=3), b"c")  # before the other has heard of it
        plane.world(rows)

        def again(index, which):
            data = np.full(50, index + 1, np.float32)
            which.all_reduce(planes.team([0, 1], index), data, FLOATS)
            assert (data == 3).all()
            into = bytearray(1)
            if index == 1:
                which.recv(planes.channel(0, slots=3), into)
            return bytes(into)

        assert planes.together([new, plane], again)[1] == b"c"
        new.close()


def test_a_killed_process_fails_those_who_wait_for_it_and_only_those():
    def work(index, plane, say):
        team, data = planes.team([0, 1, 2], index), np.ones(5000, np.float32)
        if index == 2:
            plane.all_reduce(team, data, FLOATS)
            say("killed me")
            threading.Event().wait()
        plane.all_reduce(team, data, FLOATS)
        say("waiting")
        failures = []
        for call in (plane.all_reduce, plane.all_reduce):
            try:
                call(team, data, FLOATS)
            except PeerGone as gone:
                failures.append([gone.index, gone.reason])
        pair = np.ones(1000, np.float32)
        plane.all_reduce(planes.team([0, 1], index, id=5, offset=2 << 20), pair, FLOATS)
        return [failures, float(pair.sum())]

    with planes.forked(3, work) as workers:
        assert workers[2].hear() == "killed me"
        assert [worker.hear() for worker in workers[:2]] == ["waiting", "waiting"]
        workers[2].kill()
        for worker in workers[:2]:
            worker.tell(abort=[2, "killed by signal 9"])
        for worker in workers[:2]:
            assert worker.hear() == [[[2, "killed by signal 9"]] * 2, 2000.0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({3: "elsewhere", 7: "another"}, "is on host 'elsewhere', plane shm on .* reaches only this host"),
        ({2: 2**22 + 1}, r"the heap of worker 'w1' \(pid 4194305\) cannot be opened: .*; it has exited, or"),
        ({5: planes.HEAP // 2}, "its owner says 4198400"),
        ({6: "9-123"}, "is another worker's heap"),
        ({6: "tcp://x"}, "is not a doorbell of this plane"),
    ],
)
def test_an_unreachable_peer_says_why(change, text):
    with planes.world(2) as (plane, _):
        row = [change.get(at, value) for at, value in enumerate(plane._peers[1].row)]
        plane.world([])
        with pytest.raises(PeerGone, match="worker 1 is gone: it is not in the world"):
            plane.send(planes.channel(1), b"x")
        plane.world([row])
        with pytest.raises(Unreachable, match=text):
            plane.send(planes.channel(1), b"x")


def test_a_closed_plane_raises_and_a_ring_of_a_closed_peer_is_nothing():
    with planes.world(2) as (plane, other):
        other.send(planes.channel(0), b"x")
        into = bytearray(1)
        plane.recv(planes.channel(1), into)
        other.close()
        plane.abort(1, "left")
        plane.close()
        with pytest.raises(PeerGone):
            plane.send(planes.channel(1), b"x")
    with pytest.raises(ValueError, match="heap of 100 bytes, want a multiple of 4096"):
        ShmPlane(100).open()


@pytest.mark.parametrize(
    "text, why",
    [
        ("0", "GT_HEAP_SIZE is '0', want .*, at least 4MiB"),
        ("1KiB", "GT_HEAP_SIZE is '1KiB', want .*, at least 4MiB"),
        ("abc", "GT_HEAP_SIZE is 'abc'"),
    ],
)
def test_a_heap_that_is_too_small_is_refused_by_name(text, why, monkeypatch):
    monkeypatch.setenv("GT_HEAP_SIZE", text)
    with pytest.raises(ConfigError, match=why):
        open_plane("shm", CPU)


def test_a_heap_of_any_size_is_whole_pages_and_one_that_is_not_to_be_had_says_so(monkeypatch):
    monkeypatch.setenv("GT_HEAP_SIZE", "100000001")
    plane = open_plane("shm", CPU)
    assert plane.open()["heap_bytes"] == 100003840
    plane.close()
    monkeypatch.setenv("GT_HEAP_SIZE", "8000000000GiB")
    with pytest.raises(ConfigError, match=r"a heap of 8589934592000000000 bytes cannot be made: .*GT_HEAP_SIZE says how large"):
        open_plane("shm", CPU).open()
