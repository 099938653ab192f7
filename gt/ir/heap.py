"""The symmetric heap as the dispatcher allocates it and the planes use it: constants, sizes and where each flag lies.

An offset is the same on every worker. Pure arithmetic: nothing here maps memory. Bytes a region takes:
a channel slots * (128 + aligned(slot_bytes)), a team aligned(16 * members) + 2 * (64 + aligned(buffer_bytes)).
"""

from __future__ import annotations

from dataclasses import dataclass

LINE = 64  # alignment of every region, slot and section; a multiple of every element size
HEAP_BYTES = 256 << 20  # of each worker's heap; sparse, pages are taken when first touched
DEVICE_HEAP_BYTES = 2 << 30  # of a GPU's symmetric memory
SLOT_BYTES, SLOTS = 256 << 10, 4  # a channel, unless the dispatcher says otherwise
BUFFER_BYTES = 1 << 20  # a team's buffer, of which it has two


def sizes(heap_bytes: int) -> tuple[int, int]:
    """(bytes of a channel's slot, of a team's buffer) in heaps of this size: a larger one has room for whole activations."""
    if heap_bytes <= HEAP_BYTES:
        return SLOT_BYTES, BUFFER_BYTES
    return max(SLOT_BYTES, heap_bytes // 128 // LINE * LINE), max(BUFFER_BYTES, heap_bytes // 128 // LINE * LINE)


def aligned(size: int) -> int:
    """The next multiple of LINE."""
    return -(-size // LINE) * LINE


def channel_bytes(slot_bytes: int, slots: int) -> int:
    """Bytes of the region of channel {"bytes": slot_bytes, "slots": slots}, flags included."""
    return slots * (2 * LINE + aligned(slot_bytes))


def team_bytes(buffer_bytes: int, members: int) -> int:
    """Bytes of the region of a team of so many members with {"bytes": buffer_bytes}, flags included."""
    return aligned(16 * members) + 2 * (LINE + aligned(buffer_bytes))


def channel_class(sender: int, receiver: int) -> int:
    """1, 2, ...: channels of one class never meet in a heap, so they may share one offset; n workers need n - 1 or so.

    No two pairs of a class have a worker in common but for the two directions of one pair, and these touch disjoint
    lines: of s -> r the full flags and slots lie at r and the empty flags at s, of r -> s the other way round.
    """
    return sender ^ receiver


@dataclass(frozen=True, slots=True)
class ChannelRegion:
    """Where the parts of a channel lie; each flag has a line of its own, so that the two sides do not share one."""

    offset: int
    bytes: int
    slots: int

    def full(self, slot: int) -> int:
        """At the receiver: set by the sender when the slot holds a chunk; the int64 after it is the message's bytes."""
        return self.offset + slot * 2 * LINE

    def empty(self, slot: int) -> int:
        """At the sender: set by the receiver when the slot may be written again."""
        return self.full(slot) + LINE

    def slot(self, slot: int) -> int:
        """At the receiver: the chunk."""
        return self.offset + self.slots * 2 * LINE + slot * aligned(self.bytes)


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
