"""Transfers of GPU workers between hosts: staged through host memory, and by NCCL, whose waits end with a lost peer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from gt.worker.plane.base import PeerGone, Unreachable, Unrecoverable
from gt.worker.plane.internode.communicators import InternodeNccl
from gt.worker.plane.internode.staging import StagedTransport
from gt.worker.plane.internode.transport import joined
from tests.helpers.limits import limit
from tests.worker.plane import planes
from tests.worker.plane.internode.hosts import CPU, AbortableRing, Device, hosts
from tests.worker.plane.test_plane_symmetric import data, flat, total

RINGS = pytest.mark.parametrize("ring", [lambda: None, AbortableRing], ids=["staged", "nccl"])
SUM = Device().combine("sum", "float32")


def channel(own: int, peer: int, nbytes: int = 4096, slots: int = 4) -> Any:
    return planes.channel(peer, 4096 * (1 + 16 * min(own, peer) + max(own, peer)), nbytes, slots)


def team(members: Any, rank: int, number: int = 0) -> Any:
    return planes.team(list(members), rank, number, (1 << 20) + 65536 * number)


@RINGS
@pytest.mark.parametrize("homes, without", [("aab", ()), ("abc", ()), ("abc", ("ac",))], ids=["two", "mesh", "line"])
def test_messages_of_any_size_arrive_in_order(homes: str, without: Any, ring: Any) -> None:
    lengths = [3, 0, 1024, 1025, 70_000, 1, 4096, 0, 200_000]

    def run(rank: int, transport: Any) -> list[torch.Tensor]:
        got = []
        for number, size in enumerate(lengths):
            before, after, into = (rank - 1) % 3, (rank + 1) % 3, torch.empty(size)
            steps = [
                lambda size=size, number=number, after=after: transport.send(
                    channel(rank, after), flat(data(rank, size, number))
                ),
                lambda into=into, before=before: transport.recv(channel(rank, before), flat(into)),
            ]
            for step in steps if rank else steps[::-1]:  # one receives first, so that nobody waits in a circle
                step()
            got.append(into)
        return got

    with hosts(homes, ring(), without) as world:
        for rank, got in enumerate(world.run(run)):
            for number, (into, size) in enumerate(zip(got, lengths, strict=True)):
                assert torch.equal(into, data((rank - 1) % 3, size, number))
        sent = [plane.counters()["bytes_sent"] for plane in world.planes]
        assert all(counts[f"w{(rank + 1) % 3}"] >= 4 * sum(lengths) for rank, counts in enumerate(sent))


@RINGS
def test_a_sender_is_ahead_by_its_slots(ring: Any) -> None:
    """Both send before they receive, as stages of a pipeline do, though NCCL buffers nothing."""

    def run(rank: int, transport: Any) -> list[torch.Tensor]:
        got = [torch.empty(100) for _ in range(4)]
        for number in range(4):
            sent = data(rank, 100, number)
            transport.send(channel(rank, 1 - rank), flat(sent))
            sent.zero_()  # in the order of the stream
        for into in got:
            transport.recv(channel(rank, 1 - rank), flat(into))
        return got

    with hosts("ab", ring()) as world:
        for rank, got in enumerate(world.run(run)):
            assert all(torch.equal(into, data(1 - rank, 100, number)) for number, into in enumerate(got))


@RINGS
@pytest.mark.parametrize("homes, without", [("aabb", ()), ("abc", ()), ("abc", ("ac",))], ids=["two", "mesh", "line"])
def test_collectives_add_in_rank_order(homes: str, without: Any, ring: Any) -> None:
    count, sizes = len(homes), [7, 1024, 20_000]

    def run(rank: int, transport: Any) -> list[Any]:
        form, found = team(range(count), rank), []
        for number, size in enumerate(sizes * 2):
            reduced = data(rank, size, number)
            transport.all_reduce(form, flat(reduced), SUM)
            outs = [torch.empty(size + r) for r in range(count)]
            transport.all_gather(form, flat(data(rank, size + rank, number)), [flat(out) for out in outs])
            sections = [data(rank, size + r, number + 50 + r) for r in range(count)]
            part, swapped = torch.empty(size + rank), [torch.empty(size + rank) for _ in range(count)]
            transport.reduce_scatter(form, [flat(section) for section in sections], flat(part), SUM)
            transport.all_to_all(form, [flat(section) for section in sections], [flat(into) for into in swapped])
            found.append((reduced, outs, part, swapped))
        return found

    with hosts(homes, ring(), without) as world:
        for rank, found in enumerate(world.run(run)):
            for number, (size, (reduced, outs, part, swapped)) in enumerate(zip(sizes * 2, found, strict=True)):
                assert torch.equal(reduced, total([data(r, size, number) for r in range(count)]))
                assert all(torch.equal(out, data(r, size + r, number)) for r, out in enumerate(outs))
                assert torch.equal(part, total([data(r, size + rank, number + 50 + rank) for r in range(count)]))
                assert all(torch.equal(into, data(r, size + rank, number + 50 + rank)) for r, into in enumerate(swapped))


def test_a_worker_of_another_kind_takes_staged_bytes() -> None:
    """A CPU worker uses the host's plane itself."""

    def run(rank: int, transport: Any) -> torch.Tensor:
        value = data(rank, 5000)
        if rank:
            transport.send(channel(1, 0), flat(value))
            transport.all_reduce(team(range(2), 1), flat(value), SUM)
            return value
        into, plane = torch.empty(5000), world.planes[0]
        plane.recv(channel(0, 1), CPU.view(into))
        assert torch.equal(into, data(1, 5000))
        plane.all_reduce(team(range(2), 0), CPU.view(value), CPU.combine("sum", "float32"))
        return value

    with hosts("ab") as world:
        first, second = world.run(run)
    assert torch.equal(first, second) and torch.equal(first, total([data(0, 5000), data(1, 5000)]))


def test_a_member_without_its_part_fails_the_others_and_nothing_else() -> None:
    def run(rank: int, transport: Any) -> torch.Tensor:
        form, none = team(range(2), rank), memoryview(b"")
        with pytest.raises(ValueError, match="the same of all"):
            transport.all_reduce(form, none if rank else flat(data(0, 100)), SUM)
        if rank:
            transport.send(channel(1, 0), none)
        else:
            with pytest.raises(ValueError, match="sent 0 bytes, want 400"):
                transport.recv(channel(0, 1), flat(torch.empty(100)))
        value = data(rank, 100)
        transport.all_reduce(form, flat(value), SUM)
        return value

    with hosts("ab") as world:
        for value in world.run(run):
            assert torch.equal(value, total([data(0, 100), data(1, 100)]))


WAITS = {
    "receives": lambda rank, transport: transport.recv(channel(rank, 2), flat(torch.empty(10))),
    "reduces": lambda rank, transport: transport.all_reduce(team(range(3), rank), flat(data(rank, 10)), SUM),
    "sends": lambda rank, transport: [transport.send(channel(rank, 2), flat(data(rank, 10))) for _ in range(10_000)],
}


@RINGS
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
@pytest.mark.parametrize("met", [False, True], ids=["first", "later"])
def test_a_lost_worker_fails_a_wait_and_the_others_go_on(ring: Any, wait: Any, met: bool) -> None:
    """Although an aborted call of NCCL says nothing. The next World has other communicators."""
    begun = threading.Barrier(3)

    def run(rank: int, transport: Any) -> torch.Tensor | None:
        if met:
            for other in (0, 1) if rank == 2 else ():
                transport.send(channel(2, other), flat(data(2, 10)))
                transport.recv(channel(2, other), flat(torch.empty(10)))
            if rank != 2:
                transport.send(channel(rank, 2), flat(data(rank, 10)))
                transport.recv(channel(rank, 2), flat(torch.empty(10)))
            transport.all_reduce(team(range(3), rank), flat(data(rank, 10)), SUM)
        begun.wait(limit(10))
        if rank == 2:
            for other in (0, 1):
                world.planes[other].abort(2, "its host is lost")
            return None
        with pytest.raises(PeerGone, match=r"worker \d is gone"):
            wait(rank, transport)
        begun_again.wait(limit(10))
        if rank == 0:
            world.epochs += 1
            world.tell([0, 1])
        begun_again.wait(limit(10))
        value = data(rank, 1000)
        transport.all_reduce(team(range(2), rank, 1), flat(value), SUM)
        transport.send(channel(rank, 1 - rank), flat(value))
        into = torch.empty(1000)
        transport.recv(channel(rank, 1 - rank), flat(into))
        world.devices[rank].settle()
        return into

    begun_again = threading.Barrier(2)
    with hosts("abc", ring()) as world:
        first, second, _ = world.run(run)
        assert torch.equal(first, second) and torch.equal(first, total([data(0, 1000), data(1, 1000)]))


@pytest.mark.parametrize("homes", ["abc", "aab"])
def test_a_member_that_fails_before_its_part_tells_the_others(homes: str) -> None:
    """Here for lack of memory: the others wait for it on their devices."""

    done = threading.Barrier(3)

    def run(rank: int, transport: Any) -> None:
        norms = Device().combine("norm2", "float32")  # which NCCL lacks, so that parts are allocated
        transport.all_reduce(team(range(3), rank), flat(data(rank, 10)), norms)
        done.wait(limit(10))
        if rank == 2:
            world.devices[2].full = True
        with pytest.raises(Unreachable, match=r"the device is full|remote process exited"):
            transport.all_reduce(team(range(3), rank), flat(data(rank, 10)), norms)

    with hosts(homes, AbortableRing()) as world:
        world.run(run)


def test_a_sender_that_fails_tells_its_receiver() -> None:
    def run(rank: int, transport: Any) -> None:
        if rank:
            world.devices[1].full = True
            with pytest.raises(MemoryError):
                transport.send(channel(1, 0), flat(data(1, 10)))
        else:
            with pytest.raises(Unreachable, match="the device is full"):
                transport.recv(channel(0, 1), flat(torch.empty(10)))

    with hosts("ab", AbortableRing()) as world:
        world.run(run)


def test_a_failure_that_nccl_reports_ends_the_wait() -> None:
    ring = AbortableRing()

    def run(rank: int, transport: Any) -> None:
        value = data(rank, 10)
        transport.all_reduce(team(range(2), rank), flat(value), SUM)
        if rank:
            comm = world.planes[1]._nccl._teams[0].handle
            ring.failures[id(comm[0]), comm[2]] = "NCCL: remote process exited or there was a network error"
            with pytest.raises(Unreachable, match=r"network error, with workers \[0\]: NCCL_DEBUG=INFO says more"):
                transport.all_reduce(team(range(2), 1), flat(value), SUM)
            world.planes[0].abort(1, "the test is over")

    with hosts("ab", ring) as world:
        done: list[Any] = []

        def only_one(rank: int, transport: Any) -> None:
            run(rank, transport)
            done.append(rank)

        world.run(only_one)


def test_a_member_that_cannot_take_part_by_nccl_ends() -> None:
    def run(rank: int, transport: Any) -> None:
        with pytest.raises(Unrecoverable, match="others are waiting"):
            transport.send(channel(rank, 1 - rank), memoryview(b""))

    with hosts("ab", AbortableRing()) as world:
        world.run(run)


def test_the_carrier_is_chosen_from_the_pairs_that_nccl_joins() -> None:
    pairs = frozenset({(0, 1), (1, 2)})
    assert joined(pairs, (1, 0)) and joined(pairs, (2, 1)) and not joined(pairs, (0, 1, 2)) and not joined(pairs, (0, 2))
    with hosts("abc", AbortableRing(), ("ac",)) as world:
        transport = world.planes[0].device_transport((0, 1))
        assert isinstance(transport.carrier((0, 1)), InternodeNccl)
        assert isinstance(transport.carrier((0, 2)), StagedTransport)
        assert isinstance(transport.carrier((0, 1, 2)), StagedTransport)
        assert not transport.recordable
        ways = world.planes[0].ways()
    assert ways == {"w1": "nccl, tcp 127.0.0.1 to 127.0.0.1", "w2": "host memory, via worker 1"}
