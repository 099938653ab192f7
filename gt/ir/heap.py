"""The symmetric heap as the dispatcher allocates it and the planes use it: constants, sizes and where each flag lies.

An offset is the same on every worker. Pure arithmetic: nothing here maps memory. Bytes a region takes:
a channel slots * (2048 + aligned(slot_bytes)), a team aligned(16 * members) + 2 * (64 + aligned(buffer_bytes)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LINE = 64  # alignment of every region, slot and section; a multiple of every element size
LANES = 128  # parts of a slot, side by side, each with flags of its own; where nobody divides a slot it is one
FLAGS = 8 * LANES  # bytes of the flags of a slot, of one kind: lines of their own, so that the two sides do not share one
HEAP_BYTES = 256 << 20  # of each worker's heap; sparse, pages are taken when first touched
DEVICE_HEAP_BYTES = 2 << 30  # of a GPU's symmetric memory
SLOT_BYTES, SLOTS = 256 << 10, 4  # a channel's, in host memory
DEVICE_SLOTS = 8  # in larger heaps: whole activations have room in them, and what arrived is taken while the rest comes
BUFFER_BYTES = 1 << 20  # a team's buffer, of which it has two
SHARE_BYTES = 64 << 20  # of a channel, at most: from there on a larger heap has room for more of them
MEETING_BYTES = 8192  # at the beginning of each heap: a team in which members of a world agree on how they move data
LEAST_BYTES = 4 << 20  # of a heap: a channel and a team


class Sizes(NamedTuple):
    """Of a channel: bytes of a slot, and how many it has; bytes of a team's buffer."""

    slot: int
    slots: int
    buffer: int


def sizes(heap_bytes: int) -> Sizes:
    """In heaps of this size. A channel takes a 32nd of a large one, up to SHARE_BYTES, a team's two buffers half of that."""
    if heap_bytes <= HEAP_BYTES:
        return Sizes(SLOT_BYTES, SLOTS, BUFFER_BYTES)
    share = min(heap_bytes // 32, SHARE_BYTES) // LINE * LINE
    return Sizes(max(SLOT_BYTES, aligned(share // DEVICE_SLOTS)), DEVICE_SLOTS, max(BUFFER_BYTES, aligned(share // 4)))


def aligned(size: int) -> int:
    """The next multiple of LINE."""
    return -(-size // LINE) * LINE


def channel_bytes(slot_bytes: int, slots: int) -> int:
    """Bytes of the region of channel {"bytes": slot_bytes, "slots": slots}, flags included."""
    return slots * (2 * FLAGS + aligned(slot_bytes))


def team_bytes(buffer_bytes: int, members: int) -> int:
    """Bytes of the region of a team of so many members with {"bytes": buffer_bytes}, flags included."""
    return aligned(16 * members) + 2 * (LINE + aligned(buffer_bytes))


def enough(heap_bytes: int, taken: int) -> int:
    """The next larger heap in which regions fit that take so much in one of heap_bytes, or would."""
    now, size = sizes(heap_bytes), max(2 * heap_bytes, HEAP_BYTES)
    while taken * sizes(size).slot * sizes(size).slots > size * now.slot * now.slots:
        size *= 2
    return size


def channel_class(sender: int, receiver: int) -> int:
    """1, 2, ...: channels of one class never meet in a heap, so they may share one offset; n workers need n - 1 or so.

    No two pairs of a class have a worker in common but for the two directions of one pair, and these touch disjoint
    lines: of s -> r the full flags and slots lie at r and the empty flags at s, of r -> s the other way round.
    """
    return sender ^ receiver


@dataclass(frozen=True, slots=True)
class ChannelRegion:
    """Where the parts of a channel lie. A flag is an int64; those of a slot's lanes follow one another."""

    offset: int
    bytes: int
    slots: int

    def full(self, slot: int) -> int:
        """At the receiver: set by the sender when the slot holds a chunk; the int64 after it is the message's bytes."""
        return self.offset + slot * 2 * FLAGS

    def empty(self, slot: int) -> int:
        """At the sender: set by the receiver when the slot may be written again."""
        return self.full(slot) + FLAGS

    def slot(self, slot: int) -> int:
        """At the receiver: the chunk."""
        return self.offset + self.slots * 2 * FLAGS + slot * aligned(self.bytes)


@dataclass(frozen=True, slots=True)
class TeamRegion:
    """Where the parts of a team lie in each member's heap: two arrival flags a member, then two buffers with a header."""

    offset: int
    bytes: int
    members: int

    def flag(self, rank: int, half: int = 0) -> int:
        """An int64 that the rank-th member sets here when its buffer can be read, or has been."""
        return self.offset + 8 * (half * self.members + rank)

    def header(self, half: int) -> int:
        """An int64 before the buffer: rounds its owner needs in all (all_to_all)."""
        return self.offset + aligned(16 * self.members) + half * (LINE + aligned(self.bytes))

    def buffer(self, half: int) -> int:
        return self.header(half) + LINE
