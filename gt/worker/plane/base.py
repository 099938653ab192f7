"""The data plane: workers move tensor bytes among themselves, never through the dispatcher.

One interface for shm, NVSHMEM and NCCL. The dispatcher assigns channels and teams (regions of the symmetric heap, see
gt.ir.heap). A plane knows bytes and workers, not tensors: reductions are the engine's (`combine`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypedDict

from gt.errors import SystemFailure

ALL = -1  # abort: every peer

# combine(dst, src): dst = dst + src (or the team's other reduction), both of the same whole number of elements, dst
# writable. Called in rank order, so that every member gets the same bits at any timing.
Combine = Callable[[memoryview, memoryview], None]
SlotCursors = dict[tuple[int, int, bool], int]  # (peer, offset, True for the sender's end) -> the next slot
OnIssued = Callable[[], None]  # called once the work of a collective is issued
Buffer = Any  # C-contiguous bytes-like: memoryview, numpy array, bytearray
Rows = Sequence[Sequence[Any]]  # of World.workers, World.ways or World.broken


def nothing() -> None:
    pass


class Channel(TypedDict):
    """One direction between two workers. `bytes` of one slot, a multiple of 64; the region has gt.ir.heap.channel_bytes.

    The offset belongs to this pair for as long as both workers live. Channels of one gt.ir.heap.channel_class may share one.
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
    """Worker `index` is gone. Every wait on it and every later use raises this, until World names a new process."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"worker {index} is gone: {reason}")
        self.index, self.reason = index, reason


class Unrecoverable(BaseException):
    """This process has to end: other members wait for it on their devices, and such a wait cannot be cancelled."""


class NotIssued(SystemFailure):
    """A transfer or collective failed before all of this member's part was issued to its device."""


@contextmanager
def issuing() -> Iterator[None]:
    """Around work that the other members' devices wait for: a failure becomes NotIssued. A decorator too."""
    try:
        yield
    # PeerGone passes: the dispatcher knows of the loss, and ends the others' waits itself.
    except (NotIssued, PeerGone):
        raise
    except Exception as error:
        raise NotIssued(f"{type(error).__name__}: {error}") from error


class Unreachable(PeerGone):
    """Worker `index` cannot be reached by this plane, although it may be alive."""


class Plane(ABC):
    """Transfers and collectives are called by one thread, in the dispatcher's order; the other methods by any thread.

    Byte counters count payload between two workers, on both sides:
    - a transfer: its bytes; all_gather: each piece to every other member;
    - reduce_scatter and all_to_all: each section to its rank;
    - all_reduce of n bytes over m members: n to each other member if direct, twice the share (about n / m) if in two phases.
      With two members both are n.
    """

    transport = ""  # the name of its transport, a value of GT_TRANSPORT
    on_link_failed: Callable[[int, int, str, str, str], None] | None = None  # (worker, epoch, own address, its, reason)
    on_link_made: Callable[[int, int, str, str], None] | None = None  # (worker, epoch, own address, its), see LinkMade

    @abstractmethod
    def open(self, index: int = -1) -> dict[str, Any]:
        """Make the heap; {"heap_fd", "heap_bytes", "doorbell"} for Hello.info. The index may be unknown yet."""

    @abstractmethod
    def world(self, rows: Sequence[Sequence[Any]], ways: Sequence[Sequence[Any]] = ()) -> None:
        """Set the workers and ways between hosts: rows of World.workers and World.ways.

        A new doorbell is a new worker: waits on its predecessor raise PeerGone, its channels and teams start afresh. So does
        a new epoch of a pair.
        """

    def introduce(  # noqa: B027  a plane of one host connects nothing
        self, rows: Rows, ways: Rows, key: str, own: int, broken: Rows = ()
    ) -> None:
        """A World is here, which the transferring thread has not reached yet: connections may be made.

        broken: World.broken, connections that are tried now and then.
        """

    def join_by_nccl(self, pairs: Sequence[Sequence[int]]) -> None:  # noqa: B027  a plane of one host needs no such pairs
        """Set the pairs of workers that NCCL joins, World.nccl. Precedes `world`."""

    def form(self, members: Sequence[int], own: int, unique_id: str) -> None:
        """Form a world with the workers of World.members, for as long as all of these processes live."""
        raise SystemFailure(f"plane {type(self).__name__} forms no world of GPUs")

    def device_transport(self, workers: Sequence[int]) -> Any:
        """The methods below for memory of the engine's device (Engine.direct) between these workers, or None."""
        return None

    def batch(self) -> AbstractContextManager:
        """Around collectives of one team and kind, which may be done as one. Gives a list: of the number of each that failed
        in there, counted from the first call, and why.
        """
        return nullcontext(())

    def reset_cursors(self, channels: Iterable[Sequence[int]]) -> None:  # noqa: B027  a plane without recordings has no cursors
        """A program begins that uses these channels, [peer, offset, True for the sender's end], at their other ends too."""

    def cursors(self) -> SlotCursors:
        """Next slots of the channels that recordings use: a replay does not advance them, `restore_cursors` does."""
        return {}

    def restore_cursors(self, cursors: SlotCursors) -> None:  # noqa: B027  a plane without recordings has no cursors
        """Set the next slots of these channels."""

    @abstractmethod
    def send(self, channel: Channel, data: Buffer) -> None:
        """Send a message, even of zero bytes. Returns when data may be changed again; waits only while all slots are full."""

    @abstractmethod
    def recv(self, channel: Channel, into: Buffer) -> None:
        """Receive the next message of the channel, which has exactly len(into) bytes."""

    @abstractmethod
    def all_reduce(self, team: TeamForm, data: Buffer, combine: Combine, on_issued: OnIssued = nothing) -> None:
        """Reduce in place, in rank order; elements of at most 64 bytes, of a size that divides 64."""

    @abstractmethod
    def all_gather(self, team: TeamForm, data: Buffer, outs: Sequence[Buffer], on_issued: OnIssued = nothing) -> None:
        """outs[r] gets the r-th member's data, of any sizes known to all; outs[rank] may be data itself."""

    @abstractmethod
    def reduce_scatter(
        self, team: TeamForm, sections: Sequence[Buffer], out: Buffer, combine: Combine, on_issued: OnIssued = nothing
    ) -> None:
        """out gets the sum of every member's sections[rank]; may not overlap the sections. Sizes are the same on all."""

    @abstractmethod
    def all_to_all(self, team: TeamForm, sends: Sequence[Buffer], recvs: Sequence[Buffer], longest: int = 0) -> None:
        """recvs[r] gets the r-th member's sends[rank]; each pair agrees on its size. longest: of all pairs, where known."""

    @abstractmethod
    def abort(self, index: int, reason: str) -> None:
        """Fail waits on this worker (ALL: on any) at once, and later uses of it. Never blocks."""

    @abstractmethod
    def counters(self) -> dict[str, dict[str, int]]:
        """{"bytes_sent", "bytes_received"}, each by peer name, since open."""

    def ways(self) -> dict[str, str]:
        """By name of each worker, the way to it, where some are on other hosts."""
        return {}

    def facts(self) -> dict[str, Any]:
        """More about the plane, for gt.stats()."""
        return {}

    @abstractmethod
    def tally(self, name: str, sent: int, received: int) -> None:
        """Count bytes to and from a peer that a replay of a device has moved, without these calls."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory; peers that still use this heap keep their mapping. May be called twice."""
