"""The data plane: how workers move tensor bytes among themselves, never through the dispatcher.

One interface for shm, NVSHMEM and NCCL. The dispatcher assigns channels and teams (regions of the symmetric heap, see
gt.ir.heap); a plane knows bytes and workers, not tensors: what adding means is the engine's (`combine`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypedDict

from gt import env
from gt.errors import ConfigError, SystemFailure
from gt.ir.heap import DEVICE_HEAP_BYTES, HEAP_BYTES, LEAST_BYTES
from gt.worker.plane.heap import PAGE

log = logging.getLogger("gt.worker")
ALL = -1  # abort: every peer

# combine(dst, src): dst = dst + src (or the team's other reduction), both of the same whole number of elements, dst
# writable. Called in rank order, so that every member gets the same bits at any timing.
Combine = Callable[[memoryview, memoryview], None]
Turns = dict[tuple[int, int, bool], int]  # (peer, offset, whether it sends) -> the slot that comes next
Then = Callable[[], None]
Buffer = Any  # C-contiguous bytes-like: memoryview, numpy array, bytearray


def nothing() -> None:
    pass


class Channel(TypedDict):
    """One direction of a pair. `bytes` of one slot, a multiple of 64; the region has gt.ir.heap.channel_bytes.

    The offset is this pair's for as long as both workers live. Channels of one gt.ir.heap.channel_class may share one.
    """

    peer: int
    offset: int
    bytes: int
    slots: int


class TeamForm(TypedDict):
    """Workers in rank order, this worker's rank. `bytes` of the buffer, a multiple of 64 and at least 64 a member; the
    region has gt.ir.heap.team_bytes(bytes, members). Teams without a worker in common may share an offset.
    """

    id: int
    workers: Sequence[int]
    rank: int
    offset: int
    bytes: int


class PeerGone(SystemFailure):
    """Worker `index` is gone: raised by what waits on it, and by every later use, until World names a new process."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"worker {index} is gone: {reason}")
        self.index, self.reason = index, reason


class Doomed(BaseException):
    """This process has to end: others wait for it in a way that cannot be taken back."""


class Unmet(SystemFailure):
    """What was to be sent, received or added up failed before all of this member's part was given to its device."""


@contextmanager
def issuing() -> Iterator[None]:
    """Around what the other members' devices wait for; a decorator too."""
    try:
        yield
    except (Unmet, PeerGone):
        raise
    except Exception as error:
        raise Unmet(f"{type(error).__name__}: {error}") from error


class Unreachable(PeerGone):
    """Worker `index` cannot be reached by this plane, although it may be alive."""


class Plane(ABC):
    """Transfers and collectives are called by one thread, in the dispatcher's order; the rest by any thread.

    Byte counters count payload that moves between two workers, on both sides: a transfer its bytes; all_gather each piece
    to every other member; reduce_scatter and all_to_all each section to its rank; all_reduce of n bytes over m members
    n to each other member if direct, twice its share (about n / m) to each if in two phases. Two members: n either way.
    """

    transport = ""  # what moves its bytes, as GT_TRANSPORT would name it

    @abstractmethod
    def open(self, index: int = -1) -> dict[str, Any]:
        """Makes the heap; {"heap_fd", "heap_bytes", "doorbell"} for Hello.info. The index need not be known yet."""

    @abstractmethod
    def world(self, rows: Sequence[Sequence[Any]]) -> None:
        """World.workers: [index, name, pid, host, heap_fd, heap_bytes, doorbell]. A new doorbell is a new worker: what
        waits on its predecessor raises PeerGone, channels and teams with it start afresh.
        """

    def form(self, members: Sequence[int], own: int, unique_id: str) -> None:
        """World.members: meet them, for as long as all of these processes live."""
        raise SystemFailure("this plane has no world that is formed")

    def reach(self, workers: Sequence[int]) -> Any:
        """What has the methods below for memory of the engine's device (Engine.direct), between these workers; or None."""
        return None

    def batch(self) -> AbstractContextManager:
        """All-reduces of one team within it may be done as one."""
        return nullcontext()

    def rewind(self, channels: Iterable[Sequence[int]]) -> None:  # noqa: B027  where nothing is recorded there is nothing to do
        """A program that uses these [peer, offset, whether it sends] begins, at their other ends too."""

    def turns(self) -> Turns:
        """How far channels have got that recordings may use, as `resume` takes it: a replay does not move them on."""
        return {}

    def resume(self, turns: Turns) -> None:  # noqa: B027  where nothing is recorded there is nothing to do
        """These channels go on there."""

    @abstractmethod
    def send(self, channel: Channel, data: Buffer) -> None:
        """Returns when data may be changed again; waits only while all slots are full. Zero bytes are a message too."""

    @abstractmethod
    def recv(self, channel: Channel, into: Buffer) -> None:
        """The next message of the pair, which has exactly len(into) bytes."""

    @abstractmethod
    def all_reduce(self, team: TeamForm, data: Buffer, combine: Combine, then: Then = nothing) -> None:
        """In place, in rank order; elements of at most 64 bytes, of a size that divides 64. then: called once it is issued."""

    @abstractmethod
    def all_gather(self, team: TeamForm, data: Buffer, outs: Sequence[Buffer]) -> None:
        """outs[r] gets the r-th member's data, of any sizes known to all; outs[rank] may be data itself."""

    @abstractmethod
    def reduce_scatter(self, team: TeamForm, sections: Sequence[Buffer], out: Buffer, combine: Combine) -> None:
        """out gets the sum of every member's sections[rank]; may not overlap the sections. Sizes are the same on all."""

    @abstractmethod
    def all_to_all(self, team: TeamForm, sends: Sequence[Buffer], recvs: Sequence[Buffer], longest: int = 0) -> None:
        """recvs[r] gets the r-th member's sends[rank]; each pair agrees on its size. longest: of all pairs, where known."""

    @abstractmethod
    def abort(self, index: int, reason: str) -> None:
        """Fails waits on this worker (ALL: on any) at once, and later uses. Never blocks."""

    @abstractmethod
    def counters(self) -> dict[str, dict[str, int]]:
        """{"bytes_sent", "bytes_received"}, each by peer name, since open."""

    @abstractmethod
    def tally(self, name: str, sent: int, received: int) -> None:
        """Bytes to and from a peer that were moved without these calls: by a device that did again what was recorded."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back; peers that still use this heap keep their mapping. May be called twice."""


def _shm(engine: Any) -> Plane:
    from gt.worker.plane.shm import ShmPlane

    return ShmPlane(heap_size(HEAP_BYTES))


def _nvshmem(engine: Any) -> Plane:
    from gt.worker.plane.nvshmem import NvshmemPlane

    _on_gpu("nvshmem", engine)
    return NvshmemPlane(engine, heap_size(DEVICE_HEAP_BYTES), forced=env.get("GT_TRANSPORT") == "nvshmem")


def _nccl(engine: Any) -> Plane:
    from gt.worker.plane.nccl import NcclPlane

    _on_gpu("nccl", engine)
    return NcclPlane(engine, heap_size(HEAP_BYTES))


def heap_size(default: int) -> int:
    """GT_HEAP_SIZE, in whole pages."""
    found = env.size("GT_HEAP_SIZE", default)
    if found < LEAST_BYTES:
        raise ConfigError(f"GT_HEAP_SIZE is {found} bytes, want at least {LEAST_BYTES >> 20}MiB")
    return -(-found // PAGE) * PAGE


def _on_gpu(name: str, engine: Any) -> None:
    if engine.direct is None:
        raise ConfigError(f"plane {name} moves memory of GPUs, and this worker has none: leave GT_TRANSPORT empty, or use shm")


# GT_TRANSPORT -> its plane; for GPUs the first that there is
PLANES: dict[str, Callable[[Any], Plane]] = {"nvshmem": _nvshmem, "nccl": _nccl, "shm": _shm}


def open_plane(name: str, engine: Any) -> Plane:
    """The plane of a transport's name for an engine; "" is the best one there is."""
    if name and name not in PLANES:
        raise ConfigError(f"no data plane is named {name!r}: GT_TRANSPORT may be {', '.join(PLANES)}, or empty")
    if name or engine.direct is None:
        return PLANES[name or "shm"](engine)
    for name in ("nvshmem", "nccl"):
        try:
            return PLANES[name](engine)
        except ConfigError as error:
            log.warning("transfers between GPUs do not go by %s: %s", name, error)
    log.warning("transfers between GPUs go through host memory")
    return _shm(engine)
