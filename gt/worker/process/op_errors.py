"""An op's failure as the dispatcher is told of it: its kind, its text, and of one for want of memory who has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from heapq import nlargest
from time import monotonic
from typing import Any

from gt.errors import UnsupportedOp
from gt.ir.instr import BASE_BITS
from gt.wire.messages import OpError
from gt.worker.plane.base import PeerGone
from gt.worker.process.memory_budget import Budget
from gt.worker.uploads import Cancelled

LONGEST = 4000  # characters of an error's text
FEW, MANY = 4, 64  # failures of a Run that are each told by themselves: for want of memory or of a tensor, and others
SELDOM = 50  # times as long as it takes passes until it is told again who has the memory
NAMED = 256  # tensors that are named, those with most bytes
# Texts of errors for want of memory, which are of no class of their own: torch's, C++'s, oneDNN's
WANTS = ("can't allocate memory", "out of memory", "bad_alloc", "bad allocation", "could not create a memory")

Storage = Callable[[Any], tuple[int, int]]  # of a tensor: address and bytes of its memory


def kind(error: Exception) -> str:
    """OpError.kind."""
    if isinstance(error, UnsupportedOp):
        return "unsupported"
    if isinstance(error, (PeerGone, Cancelled)):
        return "peer"
    return "memory" if isinstance(error, MemoryError) or any(part in str(error) for part in WANTS) else "op"


def text(error: Exception) -> str:
    """OpError.message."""
    said = str(error) or type(error).__name__
    if isinstance(error, KeyError):
        said = f"no tensor has the id {said}"
    return said[:LONGEST]


def held(tensors: Mapping[int, Any], session: int, storage: Storage) -> dict[int, tuple[int, int]]:
    """Memory of a session's tensors by address: the id of one of them, and bytes."""
    found: dict[int, tuple[int, int]] = {}
    for i, tensor in list(tensors.items()):
        if i >> BASE_BITS == session:
            address, nbytes = storage(tensor)
            found.setdefault(address, (i, nbytes))
    return found


class Troubles:
    """Failures of a Run as they are told: the first by themselves, the rest of many at its end, together."""

    def __init__(self, send: Callable[..., None], tensors: Mapping[int, Any], budget: Budget, storage: Storage) -> None:
        self._send, self._tensors, self._budget, self._storage = send, tensors, budget, storage
        self._counts: Counter[tuple[str, bool]] = Counter()  # by kind, and whether a tensor was missing
        self._rest: list[int] = []  # seqs that are not told yet
        self._rest_kind = ""
        self._next = 0.0  # when it may be told again who has the memory: that takes time

    def tell(self, seq: int, error: Exception, said: str, asked: bool = False) -> None:
        """Op `seq` failed. asked: somebody waits for what it answers."""
        found, missing = kind(error), isinstance(error, KeyError)
        self._counts[found, missing] += 1
        if not asked and self._counts[found, missing] > (FEW if missing or found == "memory" else MANY):
            self._rest.append(seq)
            self._rest_kind = "memory" if found == "memory" else self._rest_kind or found
            return
        self._flush()  # what it may be a consequence of
        holders, now = {}, monotonic()
        if found == "memory" and now >= self._next:
            holders = memory(self._tensors, self._budget, self._storage)
            self._next = now + SELDOM * (monotonic() - now)
        self._send(OpError(seq, found, said, holders))

    def end(self) -> None:
        """The Run is over."""
        self._flush()
        if not self._counts["memory", False]:
            self._next = 0.0
        self._counts.clear()

    def _flush(self) -> None:
        if self._rest:
            self._send(OpError(self._rest[0], self._rest_kind, "it failed as the ops before it did", {}, self._rest))
        self._rest, self._rest_kind = [], ""


def memory(tensors: Mapping[int, Any], budget: Budget, storage: Storage) -> dict[str, Any]:
    """OpError.memory."""
    own = held(tensors, budget.session, storage)
    everything = dict(map(storage, list(tensors.values())))
    mine = sum(nbytes for _, nbytes in own.values())
    return {
        "limit": budget.limit,
        "session_limit": budget.session_limit,
        "used": budget.used(),
        "session": mine,
        "others": sum(everything.values()) - mine,
        "top": [list(row) for row in nlargest(NAMED, own.values(), key=lambda row: row[1])],
    }
