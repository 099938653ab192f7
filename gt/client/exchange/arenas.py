"""Blocks of a session's arenas: the client writes an uploaded tensor into one, and reads a fetched value from one.

A block is used again once the dispatcher says that no worker reads it any more. So a loop that uploads a batch at each step
uses two or three blocks in turn. Their pages are allocated already, mapped by the workers and pinned for their GPUs.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gt.wire.arena import BLOCK_BYTES, HEADER_BYTES, OwnArena, place
from gt.wire.messages import MAX_ARENAS, CloseArenas, Message, OfferFile
from gt.wire.signals import uncollected, uninterrupted

log = logging.getLogger("gt.client")

ARENA_BYTES = 64 << 20  # size of an arena, unless a larger tensor needs one of its own
KEPT_BYTES = 256 << 20  # in arenas without blocks, which the next blocks will use
IN_FLIGHT_BYTES = 256 << 20  # in blocks, or three of the largest, after which uploads wait for workers to read


@dataclass(frozen=True, slots=True)
class ArenaBlock:
    """nbytes: rounded up."""

    arena: OwnArena
    offset: int
    nbytes: int

    @property
    def place(self) -> int:
        return place(self.arena.number, self.offset)

    def bytes(self, count: int) -> np.ndarray:
        """Its first `count` bytes."""
        return self.arena.bytes[self.offset : self.offset + count]


@dataclass(slots=True)
class _ArenaSpans:
    """One arena with its free spans [offset, end], in order."""

    arena: OwnArena
    free: list[tuple[int, int]]
    blocks: int = 0
    retired: bool = False  # no new blocks: a worker may still write into an old one

    def take(self, nbytes: int) -> int:
        """Offset of a new block, -1 if there is no room."""
        for index, (offset, end) in enumerate(self.free):
            if end - offset >= nbytes:
                # First fit. The rest of the span stays free
                self.free[index : index + 1] = [(offset + nbytes, end)] if end - offset > nbytes else []
                self.blocks += 1
                return offset
        return -1

    def put(self, offset: int, nbytes: int) -> None:
        # Join the span with free neighbours, or the arena would fall into pieces that no block fits in
        insort(self.free, (offset, offset + nbytes))
        joined: list[tuple[int, int]] = []
        for start, end in self.free:
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((start, end))
        self.free = joined
        self.blocks -= 1


@dataclass
class ClientArenas:
    """Arenas of one session, for any thread. send: sends a message before any that names a block taken afterwards."""

    send: Callable[[Message], object]
    session: int = -1  # its number, once the server has told
    used: int = 0  # bytes in blocks
    _pools: dict[int, _ArenaSpans] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _numbers: int = 0
    _useless: bool = False
    _settled: int = 0  # bytes of blocks that no worker has been asked to read
    _owner: ArenaBlock | None = None  # a block of the arena that proves to workers whose files they write
    _files: set[int] = field(default_factory=set)  # numbers of files that are lent
    _returned: list[int] = field(default_factory=list)  # such numbers that may be used again

    def take(self, nbytes: int) -> ArenaBlock | None:
        """A block for so many bytes; None where arenas are of no use, or there is no memory for another."""
        rounded = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        with uninterrupted(), uncollected, self._lock:
            if self._useless:
                return None
            try:
                block = self._take(rounded)
                # Allocates the pages now: a full /dev/shm is an OSError here, and would be a SIGBUS at the first write
                block.arena.populate(block.offset + rounded)
            except OSError as error:
                log.info("no shared memory for %d bytes (%s): they are sent by the socket", nbytes, error)
                self._useless = True
                return None
            self.used += rounded
            return block

    def _take(self, nbytes: int) -> ArenaBlock:
        for pool in self._pools.values():
            if not pool.retired and (offset := pool.take(nbytes)) >= 0:
                return ArenaBlock(pool.arena, offset, nbytes)
        if len(self._pools) >= MAX_ARENAS:
            raise OSError(f"{MAX_ARENAS} arenas are in use")
        self._numbers += 1
        arena = OwnArena(self._numbers, max(nbytes, ARENA_BYTES - HEADER_BYTES), self.session)
        pool = self._pools[self._numbers] = _ArenaSpans(arena, [(HEADER_BYTES, arena.nbytes)])
        # Before any message that names a block of it: messages are sent in the order of the outbox
        self.send(arena.offer())
        return ArenaBlock(arena, pool.take(nbytes), nbytes)

    def free(self, block: ArenaBlock) -> None:
        """Nobody reads or writes this block any more."""
        with uninterrupted(), uncollected, self._lock:
            pool = self._pools.get(block.arena.number)
            if pool is None:
                return  # the session has ended
            pool.put(block.offset, block.nbytes)
            self.used -= block.nbytes
            self._settled = min(self._settled, self.used)
            # Arenas without blocks: some are kept, since their pages are allocated, mapped by workers and pinned for GPUs
            empty = [pool for pool in self._pools.values() if not pool.blocks]
            kept = 0
            for pool in empty:
                kept += pool.arena.nbytes
                if pool.retired or kept > KEPT_BYTES:
                    self._close(pool)

    def abandon(self, block: ArenaBlock) -> None:
        """As `free`, for a block that a worker may still write into: its arena gets no new blocks."""
        with uninterrupted(), uncollected, self._lock:
            if block.arena.number in self._pools:
                self._pools[block.arena.number].retired = True
        self.free(block)

    def disable(self) -> None:
        """Workers do not share this host's memory: take no more blocks."""
        self._useless = True

    # ---- files

    def lend(self, fd: int, nbytes: int, write: bool) -> int:
        """Offer an open file to workers, and return its number; 0 where they do not share this host's memory."""
        if self._owner is None:
            self._owner = self.take(1)
        with uninterrupted(), uncollected, self._lock:
            if self._useless or self._owner is None or len(self._pools) + len(self._files) >= MAX_ARENAS:
                return 0
            # A number that was given back is used again: there are at most MAX_ARENAS of them at a time
            if not self._returned:
                self._numbers += 1
                self._returned.append(self._numbers)
            number = self._returned.pop()
            self._files.add(number)
            name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
            self.send(OfferFile(number, self._owner.arena.number, fd, nbytes, write, name))
            return number

    def take_back(self, number: int) -> None:
        """No worker is to read or write this file any more."""
        with uninterrupted(), uncollected, self._lock:
            if number in self._files:
                self._files.discard(number)
                self._returned.append(number)
                self.send(CloseArenas([number]))

    # ---- bound of what is in flight

    def crowded(self, nbytes: int) -> bool:
        """True if so many bytes more are to wait for workers."""
        # Three of the largest fit: one that workers read, one that is written, one in between
        return self.used - self._settled + nbytes > max(IN_FLIGHT_BYTES, 3 * nbytes)

    def reclaim(self) -> None:
        """Workers have done all that they were sent: blocks still in use are of tensors that nothing has used yet."""
        self._settled = self.used

    # ---- the end

    def _close(self, pool: _ArenaSpans) -> None:
        del self._pools[pool.arena.number]
        self.send(CloseArenas([pool.arena.number]))
        pool.arena.close()

    def close(self) -> None:
        """The session has ended."""
        with uninterrupted(), uncollected, self._lock:
            self._useless = True
            for pool in self._pools.values():
                pool.arena.close()
            self._pools.clear()
            self._files.clear()
