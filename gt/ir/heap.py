"""Memory map of the symmetric heap, which the dispatcher allocates and planes use: constants, sizes, offsets of flags.

An offset is the same on every worker. Pure arithmetic: nothing here maps memory. Bytes of a channel's region:
slots * (2048 + aligned(slot_bytes)); of a team's: aligned(16 * members) + 2 * (64 + aligned(buffer_bytes)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LINE = 64  # alignment of every region, slot and section; a multiple of every element size
LANES = 128  # parts of a slot, at most, each with its own flags; an undivided slot has one
FLAG_BYTES = 8 * LANES  # bytes of a slot's flags of one kind; they have lines of their own, so that the two sides share none
HEAP_BYTES = 256 << 20  # size of a CPU worker's heap; sparse: a page is allocated at its first use
DEVICE_HEAP_BYTES = 2 << 30  # size of a GPU's symmetric memory
SLOT_BYTES, SLOTS = 256 << 10, 4  # slots of a channel in host memory
DEVICE_SLOTS = 8  # in larger heaps: they hold whole activations, and the receiver reads slots while others arrive
BUFFER_BYTES = 1 << 20  # a team's buffer, of which it has two
SHARE_BYTES = 64 << 20  # largest channel; larger heaps have room for more channels instead
MEETING_BYTES = 8192  # at the start of each heap: a team through which a world's members agree on their plane
MIN_BYTES = 4 << 20  # smallest heap: one channel and one team


class Sizes(NamedTuple):
    """Bytes of a channel's slot, number of its slots, bytes of a team's buffer."""

    slot: int
    slots: int
    buffer: int


def sizes(heap_bytes: int) -> Sizes:
    """Sizes in a heap. A channel takes a 32nd of a large heap, up to SHARE_BYTES; a team's two buffers take half of that."""
    if heap_bytes <= HEAP_BYTES:
        return Sizes(SLOT_BYTES, SLOTS, BUFFER_BYTES)
    share = min(heap_bytes // 32, SHARE_BYTES) // LINE * LINE
    return Sizes(max(SLOT_BYTES, aligned(share // DEVICE_SLOTS)), DEVICE_SLOTS, max(BUFFER_BYTES, aligned(share // 4)))


def aligned(size: int) -> int:
    """The next multiple of LINE."""
    return -(-size // LINE) * LINE


def channel_bytes(slot_bytes: int, slots: int) -> int:
    """Bytes of the region of channel {"bytes": slot_bytes, "slots": slots}, flags included."""
    return slots * (2 * FLAG_BYTES + aligned(slot_bytes))


def team_bytes(buffer_bytes: int, members: int) -> int:
    """Bytes of the region of a team of `members` with {"bytes": buffer_bytes}, flags included."""
    return aligned(16 * members) + 2 * (LINE + aligned(buffer_bytes))


def enough(heap_bytes: int, taken: int) -> int:
    """The next larger size of a heap for regions that take `taken` bytes in one of heap_bytes."""
    # Regions grow with the heap, as their slots do: `taken` is scaled by the bytes of a channel's slots in the larger heap.
    now, size = sizes(heap_bytes), max(2 * heap_bytes, HEAP_BYTES)
    while taken * sizes(size).slot * sizes(size).slots > size * now.slot * now.slots:
        size *= 2
    return size


def channel_class(sender: int, receiver: int) -> int:
    """Class of a channel, from 1. Channels of one class share an offset in every heap; n workers need about n - 1 classes.

    This is safe because two pairs of one class have no worker in common, except the two directions of one pair. Those use
    disjoint lines: s -> r has its full flags and slots at r, and its empty flags at s; r -> s has them the other way round.
    """
    return sender ^ receiver


# A channel's region, of two slots:  [full 0 | empty 0 | full 1 | empty 1 | slot 0 | slot 1]
# A sender polls `empty` in its own memory and writes `full` and the slot at the receiver; the receiver does the reverse. So
# nobody polls memory of another process.
@dataclass(frozen=True, slots=True)
class ChannelRegion:
    """Offsets in a channel's region. A flag is an int64; the flags of a slot's lanes are consecutive."""

    offset: int
    bytes: int
    slots: int

    def full(self, slot: int) -> int:
        """At the receiver: the sender sets it when the slot holds a chunk. The next int64 is the message's size in bytes."""
        return self.offset + slot * 2 * FLAG_BYTES

    def empty(self, slot: int) -> int:
        """At the sender: the receiver sets it when the slot may be written again."""
        return self.full(slot) + FLAG_BYTES

    def slot(self, slot: int) -> int:
        """At the receiver: the chunk."""
        return self.offset + self.slots * 2 * FLAG_BYTES + slot * aligned(self.bytes)


# A team's region in each member's heap, of three members:
#   [flags: 3 of half 0, 3 of half 1 | header 0 | buffer 0 | header 1 | buffer 1]
# Rounds use the two halves in turn: a member may write the next round while others still read the last one.
@dataclass(frozen=True, slots=True)
class TeamRegion:
    """Offsets in a team's region of each member's heap: two arrival flags for each member, then two buffers with headers."""

    offset: int
    bytes: int
    members: int

    def flag(self, rank: int, half: int = 0) -> int:
        """An int64 that the rank-th member sets when its buffer may be read, or when it has read."""
        return self.offset + 8 * (half * self.members + rank)

    def header(self, half: int) -> int:
        """An int64 before the buffer: the number of rounds that its owner needs (all_to_all)."""
        return self.offset + aligned(16 * self.members) + half * (LINE + aligned(self.bytes))

    def buffer(self, half: int) -> int:
        return self.header(half) + LINE
