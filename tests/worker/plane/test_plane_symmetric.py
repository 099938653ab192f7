"""Transfers between devices: the arena of plane nvshmem over a library that is played by threads and host memory."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import queue
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from gt.errors import SystemFailure
from gt.ir.heap import LANES, channel_bytes, channel_class, sizes, team_bytes
from gt.worker.engine.torch import COMBINE, TorchEngine
from gt.worker.engine.torch.gpu.direct import DirectEngine
from gt.worker.plane import nccl_bindings, nvshmem, symmetric
from gt.worker.plane.base import ALL, Unrecoverable
from gt.worker.plane.kernels import split_message
from gt.worker.plane.nccl import NcclTransport
from gt.worker.plane.nvshmem import NvshmemPlane
from gt.worker.plane.symmetric import DIRECT_BYTES, Arena, ArenaMemory
from tests.helpers import ROOT
from tests.worker.plane import planes

sys.path.append(str(ROOT / "benchmarks" / "gpu"))
from played import Messages

from tests.helpers.limits import limit

BYTES = 4 << 20
TEAM = 2 << 20  # offset of the first team


class World:
    """Symmetric memory of some members; waits are the thread's own, and fail when a member has."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.memory = [(ctypes.c_char * (BYTES + 64))() for _ in range(count)]
        self.bases = [ctypes.addressof(memory) + -ctypes.addressof(memory) % 64 for memory in self.memory]
        self.told = threading.Condition()
        self.failed = False
        self.meeting = threading.Barrier(count)


class Library(Messages):
    """The interface of plane.nvshmem.Library for one member."""

    def __init__(self, world: World, rank: int, rng: random.Random) -> None:
        self.world, self.rank, self.rng = world, rank, rng

    def barrier(self) -> None:
        self.world.meeting.wait(limit(20))

    def peer(self, address: int, rank: int) -> int:
        return address - self.world.bases[self.rank] + self.world.bases[rank]

    def signal(self, flag: int, value: int, rank: int, stream: int) -> None:
        self.tell_flag(self.peer(flag, rank), value)

    def tell_flag(self, flag: int, value: int) -> None:
        with self.world.told:
            self._word(flag).value = value
            self.world.told.notify_all()

    def wait(self, flag: int, value: int, stream: int) -> None:
        self.await_flag(flag, value)

    def await_flag(self, flag: int, value: int) -> None:
        if self.rng.random() < 0.2:
            threading.Event().wait(0.001)  # others get ahead
        with self.world.told:
            met = self.world.told.wait_for(lambda: self.world.failed or self._word(flag).value == value, limit(20))
            assert met and not self.world.failed, "it waits for ever"

    @staticmethod
    def _word(address: int) -> ctypes.c_int64:
        return ctypes.c_int64.from_address(address)


class Plane:
    def __init__(self) -> None:
        self.moved: dict[int, list[int]] = {}

    def count_bytes(self, index: int, sent: int, received: int) -> None:
        there = self.moved.setdefault(index, [0, 0])
        there[0] += sent
        there[1] += received


class Ring:
    """The interface of plane.nccl.Nccl for all members. A communicator is (its members, rank)."""

    def __init__(self) -> None:
        self.lock, self.made, self.calls = threading.Lock(), {}, []
        self.ids = itertools.count(1)
        self.grouping = threading.local()
        self.wires: dict[Any, queue.Queue] = {}

    def unique_id(self) -> bytes:
        return next(self.ids).to_bytes(nccl_bindings.ID_BYTES, "little")

    def join(self, unique_id: bytes, rank: int, count: int) -> Any:
        assert not vars(self.grouping), "within a group nobody meets before its end"
        with self.lock:
            comm = self.made.setdefault(unique_id, (threading.Barrier(count), [b""] * count))
        comm[0].wait(limit(20))
        return (*comm, rank)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        self.calls.append(("group", 0))
        self.grouping.inside = True
        try:
            yield
        finally:
            del self.grouping.inside

    def send(self, comm: Any, data: int, nbytes: int, rank: int, stream: int) -> None:
        self._wire(comm, comm[2], rank).put(ctypes.string_at(data, nbytes))

    def recv(self, comm: Any, into: int, nbytes: int, rank: int, stream: int) -> None:
        data = self._wire(comm, rank, comm[2]).get(timeout=limit(20))
        assert len(data) == nbytes
        ctypes.memmove(into, data, nbytes)

    def _wire(self, comm: Any, source: int, target: int) -> queue.Queue:
        with self.lock:
            return self.wires.setdefault((id(comm[0]), source, target), queue.Queue())

    def _all(self, comm: Any, data: int, nbytes: int) -> list[torch.Tensor]:
        meeting, brought, rank = comm
        brought[rank] = ctypes.string_at(data, nbytes)
        meeting.wait(limit(20))
        found = [torch.frombuffer(bytearray(part), dtype=torch.float32) for part in brought]
        meeting.wait(limit(20))
        return found

    def all_reduce(self, comm: Any, data: int, nbytes: int, combine: Any, stream: int) -> None:
        self._put(data, total(self._all(comm, data, nbytes)), ("all_reduce", nbytes))

    def all_gather(self, comm: Any, data: int, out: int, nbytes: int, stream: int) -> None:
        self._put(out, torch.cat(self._all(comm, data, nbytes)), ("all_gather", nbytes))

    def reduce_scatter(self, comm: Any, data: int, out: int, nbytes: int, combine: Any, stream: int) -> None:
        size, rank = len(comm[1]), comm[2]
        parts = [part.view(size, -1)[rank] for part in self._all(comm, data, nbytes * size)]
        self._put(out, total(parts), ("reduce_scatter", nbytes))

    def _put(self, target: int, values: torch.Tensor, call: tuple[str, int]) -> None:
        self.calls.append(call)
        ctypes.memmove(target, values.contiguous().data_ptr(), values.nbytes)


def members_of(count: int, member: Callable[[int], Any], failed: Callable[[], None] = lambda: None) -> list[Any]:
    """Results of `member(rank)`, each in a thread. Raises the first error after `failed` told the others, or if one hangs."""
    found: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = member(rank)
        except BaseException as error:
            errors.append(error)
            failed()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit(40))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a member waits for ever"
    return found


def together(count: int, run: Callable[[int, Arena], Any], seed: int = 0, ring: Any = None) -> list[Any]:
    """Results of `run(rank, arena)` for each member, all at the same time."""
    world, engine = World(count), DirectEngine(TorchEngine("cpu"), COMBINE)

    def member(rank: int) -> Any:
        library = Library(world, rank, random.Random(seed * 100 + rank))
        return run(rank, Arena(Plane(), library, engine, ArenaMemory(range(count), rank, world.bases[rank], BYTES), ring))

    def failed() -> None:
        with world.told:
            world.failed = True
            world.told.notify_all()

    return members_of(count, member, failed)


class UploadChunk:
    """Plane shm between threads, as far as ids need it."""

    def __init__(self) -> None:
        self.lock, self.wires, self.meetings = threading.Lock(), {}, {}

    def of(self, rank: int) -> Any:
        """The host's functions for one member."""
        host = types.SimpleNamespace()
        host.send = lambda channel, data: self._wire(rank, channel["peer"]).put(bytes(data))
        wait = limit(20)
        host.recv = lambda channel, into: into.__setitem__(slice(None), self._wire(channel["peer"], rank).get(timeout=wait))
        host.all_gather = self._gather
        return host

    def _wire(self, source: int, target: int) -> queue.Queue:
        with self.lock:
            return self.wires.setdefault((source, target), queue.Queue())

    def _gather(self, form: Any, data: Any, outs: Any) -> None:
        with self.lock:
            count = len(form["workers"])
            meeting, brought = self.meetings.setdefault(tuple(form["workers"]), (threading.Barrier(count), [b""] * count))
        brought[form["rank"]] = bytes(data)
        meeting.wait(limit(20))
        for out, part in zip(outs, brought, strict=True):
            out[:] = part
        meeting.wait(limit(20))


def by_nccl(count: int, run: Callable[[int, Any], Any]) -> list[Any]:
    """As `together`, with plane nccl's way."""
    ring, host, engine = Ring(), UploadChunk(), DirectEngine(TorchEngine("cpu"), COMBINE)

    def member(rank: int) -> Any:
        rings = NcclTransport(ring, engine, host.of(rank), Plane().count_bytes)
        rings.plane = rings._count.__self__  # type: ignore[attr-defined]
        return run(rank, rings)

    return members_of(count, member)


def team(members: Sequence[int], rank: int, nbytes: int = 4096, at: int = TEAM, number: int = 0) -> Any:
    return {"id": number, "workers": list(members), "rank": members.index(rank), "offset": at, "bytes": nbytes}


def channel(own: int, peer: int, nbytes: int = 256, slots: int = 2) -> Any:
    return {"peer": peer, "offset": channel_class(own, peer) * 65536, "bytes": nbytes, "slots": slots}


def data(rank: int, size: int, number: int = 0) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(rank * 1000 + number)) - 0.5


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


COMBINED = DirectEngine(TorchEngine("cpu"), COMBINE).combine("sum", "float32")


def total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """In rank order."""
    return list(itertools.accumulate(parts))[-1]


@pytest.mark.parametrize("way", [together, by_nccl])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_messages_arrive_in_order_whatever_their_sizes(count: int, way: Callable) -> None:
    lengths = [3, 0, 64, 65, 1000, 1, 300, 0, 500]

    def run(rank: int, arena: Arena) -> list[torch.Tensor]:
        nxt, before, got = (rank + 1) % count, (rank - 1) % count, []
        for number, size in enumerate(lengths):
            into = torch.empty(size)
            steps = [
                lambda number=number, size=size: arena.send(channel(rank, nxt), flat(data(rank, size, number))),
                lambda into=into: arena.recv(channel(rank, before), flat(into)),
            ]
            for step in steps if rank else steps[::-1]:  # one receives first, so that nobody waits in a circle
                step()
            got.append(into)
        assert sum(sent for sent, _ in arena.plane.moved.values()) == 4 * sum(lengths)
        return got

    for rank, got in enumerate(way(count, run)):
        for number, (into, size) in enumerate(zip(got, lengths, strict=True)):
            assert torch.equal(into, data((rank - 1) % count, size, number))


def test_a_sender_ahead_overwrites_nothing() -> None:
    """More messages than slots, sent before any is taken; then both go back to the first slot, as programs do."""

    def run(rank: int, arena: Arena) -> list[torch.Tensor]:
        got = []
        for _ in range(3):
            arena.reset_cursors([[1 - rank, channel(rank, 1 - rank)["offset"], rank == 0]])
            for number in range(5):
                if rank == 0:
                    arena.send(channel(0, 1), flat(data(0, 32, number)))
                else:
                    got.append(torch.empty(32))
                    arena.recv(channel(1, 0), flat(got[-1]))
        return got

    for number, into in enumerate(together(2, run)[1]):
        assert torch.equal(into, data(0, 32, number % 5))


@pytest.mark.parametrize("way", [together, by_nccl])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_collectives(count: int, way: Callable) -> None:
    """Each twice in a row and in a mixed order, in rounds of a small buffer."""
    sizes_ = [7, 1024, 5000]

    def run(rank: int, arena: Arena) -> list[Any]:
        form, found = team(range(count), rank), []
        for number, size in enumerate(sizes_ * 2):
            mine = data(rank, size, number)
            reduced = mine.clone()
            arena.all_reduce(form, flat(reduced), COMBINED)
            outs = [torch.empty(size + r) for r in range(count)]
            arena.all_gather(form, flat(data(rank, size + rank, number)), [flat(out) for out in outs])
            sections = [data(rank, size + r, number + 50 + r) for r in range(count)]
            part = torch.empty(size + rank)
            arena.reduce_scatter(form, [flat(section) for section in sections], flat(part), COMBINED)
            swapped = [torch.empty(size + rank) for _ in range(count)]
            longest = 4 * (size + count)
            arena.all_to_all(form, [flat(section) for section in sections], [flat(into) for into in swapped], longest)
            found.append((reduced, outs, part, swapped))
        return found

    results = way(count, run)
    for rank, found in enumerate(results):
        for number, (size, (reduced, outs, part, swapped)) in enumerate(zip(sizes_ * 2, found, strict=True)):
            assert torch.equal(reduced, total([data(r, size, number) for r in range(count)]))
            assert all(torch.equal(out, data(r, size + r, number)) for r, out in enumerate(outs))
            assert torch.equal(part, total([data(r, size + rank, number + 50 + rank) for r in range(count)]))
            assert all(torch.equal(into, data(r, size + rank, number + 50 + rank)) for r, into in enumerate(swapped))


def test_dtypes_that_nccl_cannot_add_are_added_in_rank_order() -> None:
    norms = DirectEngine(TorchEngine("cpu"), COMBINE).combine("norm2", "float32")

    def run(rank: int, arena: Any) -> torch.Tensor:
        value = data(rank, 100)
        arena.all_reduce(team(range(3), rank), flat(value), norms)
        assert arena.plane.moved == {r: [400, 400] for r in range(3) if r != rank}
        return value

    want = torch.stack([data(r, 100) for r in range(3)]).norm(dim=0)
    for value in by_nccl(3, run):
        torch.testing.assert_close(value, want)


def test_nccl_takes_memory_alike_in_graphs_and_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """One member may replay a graph while another, whose tensors have moved, does the same as instructions."""
    for name in ("NCCL_GRAPH_REGISTER", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(nccl_bindings.ctypes, "CDLL", mock.MagicMock())
    nccl_bindings.Nccl()
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"


def test_worlds_of_two_kinds_do_not_mix() -> None:
    """One worker lacks what the others have."""
    plane = NvshmemPlane(None, 1 << 20, library=object())
    with pytest.raises(SystemFailure, match="moves data by nvshmem, others by nccl: set GT_TRANSPORT"):
        plane.form([0, 1], 0, "nccl:there")


class Apart(Library):
    """A library whose members cannot map one another's memory, by the driver's word or once they meet, or cannot join."""

    def gpu(self) -> str:
        return str(self.rank)

    def obstacle(self, other: str) -> str:
        assert other != self.gpu()
        return "GPU not supported" if (self.rank, other) in self.world.refused else ""

    def unique_id(self) -> str:
        return "id"

    def join(self, unique_id: str, rank: int, count: int, nbytes: int) -> int:
        assert not {(a, str(b)) for a in range(3) for b in range(3)} & {*self.world.refused}, "this ends the process"
        if (self.rank, "joins") in self.world.refused:
            raise RuntimeError("no transport found")
        if (self.rank, "waits") in self.world.refused:
            self.world.ended.wait(limit(20))
        return self.world.bases[rank]

    def peer(self, address: int, rank: int) -> int:
        return 0 if (self.rank, rank) in self.world.refused else super().peer(address, rank)


def reached(refused: Sequence[Any], ring: Any, host: str = "", **more: Any) -> list[Any]:
    """The means of transfer that three members choose, tried by a message of the first to the last."""
    world, engine = World(3), types.SimpleNamespace(direct=DirectEngine(TorchEngine("cpu"), COMBINE))
    world.refused, world.ended = refused, threading.Event()
    made = [NvshmemPlane(engine, BYTES, Apart(world, n, random.Random(n)), ring, **more) for n in range(3)]
    rows = [planes.row(n, plane.open()) for n, plane in enumerate(made)]
    rows = [[*row[:3], host or row[3], *row[4:]] for row in rows]

    def member(rank: int) -> Any:
        plane = made[rank]
        plane.world(rows)
        plane.form([0, 1, 2], rank, "nvshmem:id")
        found, data = plane.device_transport([0, 2]), torch.full((64,), 7, dtype=torch.uint8)
        into = torch.zeros(64, dtype=torch.uint8)
        if found is not None and rank != 1:
            found.send(channel(0, 2), data) if rank == 0 else found.recv(channel(2, 0), into)
        return plane.transport, type(found), int(into[0])

    try:
        return members_of(3, member, lambda: [world.ended.set(), *(plane.abort(ALL, "another failed") for plane in made)])
    finally:
        for plane in made:
            plane.close()


@pytest.mark.parametrize("refused", [[(0, 1)], [(2, 0), (0, 2)], [(1, "joins")], [(1, "2")], [(0, "1"), (1, "0")]])
def test_gpus_that_cannot_reach_each_other_use_nccl(refused: list, caplog: pytest.LogCaptureFixture) -> None:
    """Those too that reach all others."""
    assert reached(refused, Ring()) == [("nccl", NcclTransport, 0), ("nccl", NcclTransport, 0), ("nccl", NcclTransport, 7)]
    said = [record.message for record in caplog.records if "go by nccl" in record.message]
    own, other = refused[0]
    why = f"the GPU of worker {own} cannot map worker {other}'s memory: GPU not supported"
    if not isinstance(other, str):
        why = f"NVSHMEM cannot map the memory of workers [{other}] on the GPU of worker {own}"
    elif other == "joins":
        why = "no transport found"
    assert len(said) == 3 and all(why in text for text in said)


@pytest.mark.parametrize(
    "said, disabled, want",
    [
        (["ok", "ok"], "0", ""),
        (["ok", "ok"], "1", "NVSHMEM_DISABLE_P2P is set"),
        (["GPU not supported", "ok"], "", "GPU not supported"),
        (["chipset not supported"] * 2, "", "chipset not supported"),
        (["unknown", "ok"], "", ""),
        (RuntimeError("that GPU is hidden"), "", ""),
    ],
)
def test_what_the_driver_says_of_two_gpus(said: Any, disabled: str, want: str, monkeypatch: pytest.MonkeyPatch) -> None:
    status = mock.Mock(side_effect=said)
    system = types.SimpleNamespace(Device=lambda uuid: uuid, get_p2p_status=status)
    for name, module in {"cuda": types.ModuleType("cuda"), "cuda.core": types.SimpleNamespace(system=system)}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("NVSHMEM_DISABLE_P2P", disabled)
    library = object.__new__(nvshmem.Library)
    library._device = lambda number: types.SimpleNamespace(uuid="6b")
    assert library.obstacle("GPU-a1") == want
    assert all(call.args[:2] == ("GPU-6b", "GPU-a1") for call in status.call_args_list)


def test_the_plane_where_gpus_reach_each_other_or_nccl_is_missing_or_nvshmem_is_forced() -> None:
    assert reached([], Ring()) == [("nvshmem", Arena, 0), ("nvshmem", Arena, 0), ("nvshmem", Arena, 7)]
    assert reached([(0, 1)], None) == [("shm", type(None), 0)] * 3
    assert reached([], Ring(), "elsewhere") == [("nvshmem", Arena, 0), ("nvshmem", Arena, 0), ("nvshmem", Arena, 7)]
    with pytest.raises(SystemFailure, match=r"cannot map the memory of workers \[1\] .* leave GT_TRANSPORT empty, or"):
        reached([(0, 1)], Ring(), forced=True)
    with pytest.raises(SystemFailure, match="cannot map worker 1's memory: GPU not supported: leave GT_TRANSPORT empty, or"):
        reached([(0, "1")], Ring(), forced=True)


def test_a_member_that_waits_within_nvshmem_for_one_that_failed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed one ends, and with it the others do."""
    monkeypatch.setattr(nvshmem, "JOIN_SECONDS", 0.2)
    with pytest.raises(SystemFailure, match="worker 0 cannot join NVSHMEM: no transport found"):
        reached([(0, "joins"), (1, "waits"), (2, "waits")], Ring())


def test_a_large_all_reduce_goes_by_shares() -> None:
    size = (DIRECT_BYTES + 4096) // 4

    def run(rank: int, arena: Arena) -> list[torch.Tensor]:
        form, found = team(range(3), rank, 512 << 10), []
        for number in range(3):
            found.append(data(rank, size, number))
            arena.all_reduce(form, flat(found[-1]), COMBINED)
        assert all(sent == received for sent, received in arena.plane.moved.values())
        return found

    for found in together(3, run):
        assert all(torch.equal(out, total([data(r, size, n) for r in range(3)])) for n, out in enumerate(found))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_large_collectives_are_nccls(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their size alone, which all members know; uneven parts and reductions that it lacks are not. Both kinds in turn."""
    monkeypatch.setattr(symmetric, "NCCL_MIN_BYTES", {1: 1 << 12})
    ring = Ring()
    norms = DirectEngine(TorchEngine("cpu"), COMBINE).combine("norm2", "float32")

    def run(rank: int, arena: Arena) -> list[Any]:
        form, found = team(range(count), rank, 64 << 10), []
        for number, size in enumerate((16, 4096, 240, 1024)):
            reduced, normed = data(rank, size, number), data(rank, size, number).abs()
            arena.all_reduce(form, flat(reduced), COMBINED)
            arena.all_reduce(form, flat(normed), norms)
            lined, apart = torch.empty(count, size), [torch.empty(size) for _ in range(count)]
            for outs in (list(lined), apart):
                arena.all_gather(form, flat(data(rank, size, number)), [flat(out) for out in outs])
            uneven = [torch.empty(size + r) for r in range(count)]
            arena.all_gather(form, flat(data(rank, size + rank, number)), [flat(out) for out in uneven])
            sections = [data(rank, size, number + 50 + r) for r in range(count)]
            parts = [torch.empty(size), torch.empty(size)]
            for given, part in zip((sections, list(torch.stack(sections))), parts, strict=True):
                arena.reduce_scatter(form, [flat(section) for section in given], flat(part), COMBINED)
            found.append((reduced, normed, list(lined), apart, uneven, parts))
        return found

    for rank, found in enumerate(together(count, run, count, ring)):
        for number, (size, got) in enumerate(zip((16, 4096, 240, 1024), found, strict=True)):
            reduced, normed, lined, apart, uneven, parts = got
            mine = [data(r, size, number) for r in range(count)]
            assert torch.equal(reduced, total(mine))
            torch.testing.assert_close(normed, torch.stack(mine).norm(dim=0))
            for outs in (lined, apart):
                assert all(map(torch.equal, outs, mine))
            assert all(torch.equal(out, data(r, size + r, number)) for r, out in enumerate(uneven))
            for part in parts:
                assert torch.equal(part, total([data(r, size, number + 50 + rank) for r in range(count)]))
    assert len(ring.made) == 1  # one communicator a team
    least = min(nbytes for name, nbytes in ring.calls if name == "all_reduce")
    assert least >= 1 << 12 and {name for name, _ in ring.calls} == {"all_reduce", "all_gather", "reduce_scatter"}


@pytest.mark.parametrize("nccls", [True, False])
def test_all_reduces_of_a_batch(nccls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one where all of it is large, of two teams each by itself; what has to be done afterwards is."""
    monkeypatch.setattr(symmetric, "NCCL_MIN_BYTES", {1: 1 << 12})
    ring = Ring() if nccls else None
    lengths = (3, 900, 200, 300)

    def run(rank: int, arena: Arena) -> list[torch.Tensor]:
        found = []
        with arena.batch():
            for number, size in enumerate(lengths):
                found.append(data(rank, size, number))
                members = range(3) if number < 3 else (0, 2)
                if rank in members:
                    form = team(tuple(members), rank, 4096, TEAM + 65536 * (number == 3), int(number == 3))
                    arena.all_reduce(form, flat(found[-1]), COMBINED, lambda tensor=found[-1]: tensor.mul_(2))
            assert torch.equal(found[0], data(rank, 3, 0))  # nothing is done yet
        return found

    for rank, found in enumerate(together(3, run, ring=ring)):
        for number, value in enumerate(found):
            members = range(3) if number < 3 else (0, 2)
            want = total([data(r, lengths[number], number) for r in members]) * 2 if rank in members else data(1, 300, 3)
            assert torch.equal(value, want)
    if ring is not None:
        assert [call for call in ring.calls if call[0] == "group"] == [("group", 0)] * 3
        assert sorted(nbytes for call, nbytes in ring.calls if call != "group") == sorted(4 * n for n in lengths[:3] * 3)


@pytest.mark.parametrize("nccls", [True, False])
def test_a_member_that_fails_after_its_part_of_a_batch_has_taken_part_in_all(nccls: bool) -> None:
    ring = Ring() if nccls else None

    def run(rank: int, arena: Arena) -> list[torch.Tensor]:
        found, forms = [data(rank, 30, n) for n in range(3)], [team((0, 1), rank, 4096, TEAM + 65536 * n, n) for n in (0, 0, 1)]

        def then() -> None:
            if rank:
                raise MemoryError("no room")

        with pytest.raises(MemoryError) if rank else contextlib.nullcontext(), arena.batch():
            for form, value in zip(forms, found, strict=True):
                arena.all_reduce(form, flat(value), COMBINED, then)
        return found

    for found in together(2, run, ring=ring):
        assert all(torch.equal(value, total([data(r, 30, n) for r in range(2)])) for n, value in enumerate(found))


@pytest.mark.parametrize("way", [together, by_nccl])
def test_teams_and_channels_do_not_disturb_one_another(way: Callable) -> None:
    def run(rank: int, arena: Arena) -> list[torch.Tensor]:
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        column = (rank % 2, rank % 2 + 2)
        found = []
        for number in range(20):
            for members, at in ((pair, 1), (column, 2), (range(4), 3)):
                value = data(rank, 40, number)
                form = team(tuple(members), rank, 1024, TEAM + at * 65536, at)
                arena.all_reduce(form, flat(value), COMBINED)
                found.append(value)
        return found

    for rank, found in enumerate(way(4, run)):
        sets = [(rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2), range(4)]
        for n, value in enumerate(found):
            assert torch.equal(value, total([data(r, 40, n // 3) for r in sets[n % 3]]))


@pytest.mark.parametrize("way", [together, by_nccl])
def test_a_member_that_cannot_take_part_ends(way: Callable) -> None:
    def run(rank: int, arena: Arena) -> None:
        with pytest.raises(Unrecoverable, match="others are waiting"):
            arena.send(channel(rank, 1 - rank), memoryview(b""))
        with pytest.raises(Unrecoverable):
            arena.all_reduce(team(range(2), rank), memoryview(b""), COMBINED)

    way(2, run)


def test_a_larger_heap_has_larger_slots_and_buffers_and_room_for_many() -> None:
    slot, slots, buffer = sizes(2 << 30)
    assert slot * slots >= 60 << 20 and buffer >= 12 << 20 and slot % 64 == buffer % 64 == 0
    assert 8 * channel_bytes(slot, slots) + 40 * team_bytes(buffer, 8) < 2 << 30
    assert sizes(256 << 20) == (256 << 10, 4, 1 << 20)


def test_messages_of_many_lanes_and_steps_pass_few_slots() -> None:
    """Larger than all slots together, in slots that have lanes, between sizes that take one lane."""
    region, rng = {"bytes": 32 << 10, "slots": 3}, random.Random(5)
    lengths = [rng.choice([1, 100, 4097, 20_000, 32_768, 70_001, 200_003]) for _ in range(25)]

    def run(rank: int, arena: Arena) -> list[torch.Tensor]:
        got = []
        for number, size in enumerate(lengths):
            if rank == 0:
                arena.send({**channel(0, 1), **region}, data(0, size, number).view(torch.uint8)[:size])
            else:
                got.append(torch.empty(size, dtype=torch.uint8))
                arena.recv({**channel(1, 0), **region}, got[-1])
        return got

    for number, (into, size) in enumerate(zip(together(2, run)[1], lengths, strict=True)):
        assert torch.equal(into, data(0, size, number).view(torch.uint8)[:size])


def test_the_parts_of_a_message_cover_it_within_its_slots() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        slot = 64 * rng.randrange(1, 1 << rng.randrange(1, 16))
        nbytes = rng.choice([0, 1, 8, rng.randrange(1 << rng.randrange(1, 29))])
        how = split_message(nbytes, slot)
        assert 1 <= how.lanes <= LANES and how.chunk <= how.wide and how.lanes * how.wide <= slot and how.chunk % 16 == 0
        assert how.lanes * how.chunk * (how.steps - 1) < max(1, nbytes) <= max(1, how.lanes * how.chunk * how.steps)
