"""Arenas that a session's client shares with workers of its host: which workers have opened them, and the blocks in them.

Knows nothing of memory. Only a worker can tell whether it shares an arena, see gt.wire.arena. Until then that is undecided.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.state.context import SessionContext
from gt.errors import ProtocolError
from gt.wire.arena import BLOCK_BYTES, HEADER_BYTES, MAX_ARENA_BYTES, NONCE_BYTES, owner_proof, parse_place
from gt.wire.messages import MAX_ARENAS, ArenaOpened, CloseArenas, Fetch, Message, OfferArena, OfferFile, Store

MAX_HOME_CHARACTERS = MAX_NAME_CHARACTERS = 255
_NONCE = re.compile(f"[0-9a-f]{{{2 * NONCE_BYTES}}}")


@dataclass(slots=True)
class SharedArena:
    """offer: as workers get it, with the dispatcher's key as its number. workers: those that have opened it.

    A file is one too. owner: the offer of the arena that proves its process. name: of a file, as its client says.
    """

    offer: OfferArena | OfferFile
    owner: OfferArena | None = None
    name: str = ""
    asked: set[int] = field(default_factory=set)  # workers that have not answered yet
    workers: set[int] = field(default_factory=set)

    @property
    def in_file(self) -> bool:
        return isinstance(self.offer, OfferFile)


class BlockPlace(NamedTuple):
    """A block in an arena, or a tensor in a file."""

    arena: SharedArena
    offset: int


class SessionArenas:
    """Arenas and files of one session."""

    def __init__(self, context: SessionContext) -> None:
        self._context, self._cluster = context, context.cluster
        self._arenas: dict[int, SharedArena] = {}  # by the client's number
        self.by_key: dict[int, SharedArena] = {}
        self.bytes_shared = 0  # bytes of uploads and fetched values that went through arenas

    def offer(self, message: OfferArena) -> None:
        """A client's new arena; ProtocolError for one that is none. Its host's workers are asked to open it."""
        self._check_number(message)
        if (
            not HEADER_BYTES < message.nbytes <= MAX_ARENA_BYTES
            or not 0 < message.pid < 1 << 31
            or not 0 <= message.fd < 1 << 31
        ):
            got = f"nbytes is {message.nbytes}, pid {message.pid}, fd {message.fd}"
            raise ProtocolError(f"OfferArena: {got}, want more than {HEADER_BYTES} bytes, a process and its descriptor")
        if not _NONCE.fullmatch(message.nonce) or len(message.home) > MAX_HOME_CHARACTERS:
            raise ProtocolError(f"OfferArena.nonce is {message.nonce!r:.40}, want {2 * NONCE_BYTES} hex digits")
        # Clients choose numbers that may be equal, so workers get the dispatcher's. The proof binds the arena to this session:
        # a worker opens only memory whose owner wrote it there, and so no client lends memory of another process.
        key = self._cluster.key()
        proved = replace(message, arena=key, nonce=owner_proof(message.nonce, self._context.number))
        self._offer(message.arena, SharedArena(proved))

    def offer_file(self, message: OfferFile) -> None:
        """A file that a client lends; ProtocolError without an arena that proves its process."""
        # A file has no proof in it: it is believed because the arena proves which process has its descriptor.
        self._check_number(message)
        owner = self._arenas.get(message.owner)
        if owner is None or not isinstance(owner.offer, OfferArena):
            raise ProtocolError(f"OfferFile.owner is {message.owner}, want an open arena")
        if not 0 < message.nbytes <= MAX_ARENA_BYTES or not 0 <= message.fd < 1 << 31:
            raise ProtocolError(f"OfferFile: nbytes is {message.nbytes}, fd {message.fd}, want a file that is not empty")
        if len(message.name) > MAX_NAME_CHARACTERS:
            raise ProtocolError(f"OfferFile.name has {len(message.name)} characters, at most {MAX_NAME_CHARACTERS} are taken")
        offer = replace(message, arena=self._cluster.key(), owner=owner.offer.arena, name="")
        self._offer(message.arena, SharedArena(offer, owner.offer, message.name))

    def _check_number(self, message: OfferArena | OfferFile) -> None:
        if message.arena in self._arenas or not 0 < message.arena < 1 << 20 or len(self._arenas) >= MAX_ARENAS:
            name = type(message).__name__
            raise ProtocolError(f"{name}.arena {message.arena} is in use, or one of more than {MAX_ARENAS}")

    def _offer(self, number: int, arena: SharedArena) -> None:
        self._arenas[number] = self.by_key[arena.offer.arena] = arena
        for worker in self._cluster.workers:
            self._ask(arena, worker)

    def _ask(self, arena: SharedArena, worker: Worker) -> None:
        # Only processes of one host can share memory. A file is opened through its owner's arena, which must be open.
        owner = arena.owner or arena.offer
        assert isinstance(owner, OfferArena)
        if not worker.lost and owner.home and worker.info.get("home") == owner.home and owner.arena in self.by_key:
            arena.asked.add(worker.index)
            self._context.out(worker.peer, arena.offer, ())

    def opened(self, index: int, message: ArenaOpened) -> None:
        """A worker's answer."""
        arena = self.by_key[message.arena]
        if index not in arena.asked:
            raise ProtocolError(f"ArenaOpened.arena is {message.arena}, of which this worker was not asked")
        arena.asked.discard(index)
        if message.opened:
            arena.workers.add(index)

    def close(self, message: CloseArenas) -> None:
        """The client names these arenas no more."""
        for number in message.arenas:
            arena = self._arenas.pop(number, None) if type(number) is int else None
            if arena is None:
                raise ProtocolError(f"CloseArenas.arenas has {number!r:.40}, want an open arena of this session")
            self._close(arena)

    def _close(self, arena: SharedArena) -> None:
        del self.by_key[arena.offer.arena]
        for index in arena.asked | arena.workers:
            self._context.out(self._cluster.workers[index].peer, CloseArenas([arena.offer.arena]), ())

    # ---- blocks

    def place(self, number: int, nbytes: int) -> BlockPlace | None:
        """The block at this place; None if its arena is not open, ProtocolError if the block is not within it."""
        if not 0 <= number < 1 << 62:
            raise ProtocolError(f"{number} is not a place in an arena")
        index, offset = parse_place(number)
        arena = self._arenas.get(index)
        if arena is None:
            return None
        # Blocks of an arena are aligned and lie behind its header; a tensor of a file begins anywhere.
        first, unit = (0, 1) if isinstance(arena.offer, OfferFile) else (HEADER_BYTES, BLOCK_BYTES)
        if offset % unit or not first <= offset <= arena.offer.nbytes - nbytes:
            raise ProtocolError(
                f"a block of {nbytes} bytes at {offset} is not within arena {index} of {arena.offer.nbytes} bytes"
            )
        return BlockPlace(arena, offset)

    def file(self, number: int, nbytes: int) -> BlockPlace:
        """The place of a tensor in a file that is lent to be written; ProtocolError for any other place."""
        place = self.place(number, nbytes)
        if place is None or not isinstance(place.arena.offer, OfferFile) or not place.arena.offer.write:
            raise ProtocolError(f"Store.rows has place {number}, which is in no file that is lent to be written")
        return place

    def readable(self, number: int, nbytes: int) -> BlockPlace | None:
        """As `place`; ProtocolError for a file that is lent to be written."""
        place = self.place(number, nbytes)
        if place is not None and isinstance(place.arena.offer, OfferFile) and place.arena.offer.write:
            raise ProtocolError(f"Ops.code uploads from place {number}, in a file that is lent to be written")
        return place

    def memory(self, number: int, nbytes: int) -> BlockPlace | None:
        """As `place`; ProtocolError for one in a file."""
        place = self.place(number, nbytes)
        if place is not None and isinstance(place.arena.offer, OfferFile):
            raise ProtocolError(f"Fetch.place is {number}, in a file; want a block of an arena")
        return place

    def shared_by_all(self, number: int) -> bool:
        """True if every worker of the session shares this arena or file."""
        arena = self._arenas.get(number)
        return arena is not None and arena.workers.issuperset(w.index for w in self._cluster.workers if not w.lost)

    def undecided(self, place: BlockPlace, workers: Iterable[int]) -> set[int]:
        """Workers among these that have not told whether they share the block's arena."""
        return place.arena.asked.intersection(workers)

    @property
    def asked(self) -> set[int]:
        """Workers that have still to tell of some arena whether they share it."""
        return {index for arena in self._arenas.values() for index in arena.asked}

    @property
    def opening(self) -> dict[str, set[int]]:
        """Names of files that workers have still to open, and these workers."""
        return {arena.name: set(arena.asked) for arena in self._arenas.values() if arena.in_file and arena.asked}

    def awaits(self, message: Message) -> bool:
        """True for a Fetch or Store into an arena of which some worker has still to tell whether it shares it."""
        # Which tensors a Store writes where is only known when it is handled, so it waits for all arenas and files.
        if type(message) is Store:
            return any(arena.asked for arena in self._arenas.values())
        if type(message) is not Fetch or message.place < 0:
            return False
        arena = self._arenas.get(parse_place(message.place)[0])
        return arena is not None and bool(arena.asked)

    def shared(self, place: BlockPlace, workers: Iterable[int]) -> bool:
        """True if all of these workers share the block's arena."""
        # The client may have closed the arena since the place was parsed.
        return self.by_key.get(place.arena.offer.arena) is place.arena and place.arena.workers.issuperset(workers)

    # ---- workers, and the end

    def lose(self, index: int) -> None:
        """A worker is gone."""
        for arena in self._arenas.values():
            arena.asked.discard(index)
            arena.workers.discard(index)

    def regain(self, worker: Worker) -> None:
        """A new process has a worker's place, or a worker has joined."""
        for arena in self._arenas.values():
            self._ask(arena, worker)

    def end(self) -> None:
        """The client is gone."""
        for arena in self._arenas.values():
            self._close(arena)
        self._arenas.clear()
