"""Reports of failed ops to the dispatcher: kind and text, and for want of memory the tensors that occupy it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nlargest
from time import monotonic
from typing import Any

from gt.errors import UnsupportedOp
from gt.ir.instr import BASE_BITS
from gt.wire.messages import MAX_HOLDERS, MAX_OTHERS, OpError
from gt.worker.plane.base import PeerGone
from gt.worker.process.memory_budget import Budget
from gt.worker.uploads import Cancelled

MAX_TEXT_CHARS = 4000
# Failures of a Run that are reported one by one: for want of memory or of a tensor, and others
MAX_CONSEQUENCES, MAX_FAILURES = 4, 64
MEMORY_REPORT_PAUSE = 50  # times as long as a report of memory takes, until the next one
MAX_NAMED_TENSORS = 256  # tensors in a report: those with most bytes
# Texts of errors for want of memory that have no class of their own: torch's, C++'s, oneDNN's
OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "out of memory", "bad_alloc", "bad allocation", "could not create a memory")

Storage = Callable[[Any], tuple[int, int]]  # gives address and bytes of a tensor's memory


def kind(error: Exception) -> str:
    """OpError.kind."""
    if isinstance(error, UnsupportedOp):
        return "unsupported"
    if isinstance(error, (PeerGone, Cancelled)):
        return "peer"
    if isinstance(error, KeyError):
        return "missing"
    return "memory" if isinstance(error, MemoryError) or any(part in str(error) for part in OUT_OF_MEMORY_TEXTS) else "op"


def text(error: Exception) -> str:
    """OpError.message."""
    message = str(error) or type(error).__name__
    if isinstance(error, KeyError):
        message = f"no tensor has the id {message}"
    return message[:MAX_TEXT_CHARS]


def held(tensors: Mapping[int, Any], session: int, storage: Storage) -> dict[int, tuple[int, int]]:
    """Memory of a session's tensors by address: the id of one of them, and bytes."""
    blocks: dict[int, tuple[int, int]] = {}
    for i, tensor in list(tensors.items()):
        if i >> BASE_BITS == session:
            address, nbytes = storage(tensor)
            blocks.setdefault(address, (i, nbytes))
    return blocks


def parts(failure: str, text: str, seqs: Sequence[int]) -> Iterator[OpError]:
    """Reports of many ops that failed in one way, MAX_OTHERS in each."""
    for first in range(0, len(seqs), MAX_OTHERS):
        part = list(seqs[first : first + MAX_OTHERS])
        yield OpError(part[0], failure, text, {}, part)


class ErrorReports:
    """Failures of a Run: the first are reported one by one, the rest of many together at its end."""

    def __init__(self, send: Callable[..., None], tensors: Mapping[int, Any], budget: Budget, storage: Storage) -> None:
        self._send, self._tensors, self._budget, self._storage = send, tensors, budget, storage
        self._counts: Counter[str] = Counter()  # by kind
        self._rest: dict[str, list[int]] = {}  # seqs that are not reported yet, by kind
        self._next = 0.0  # when memory may be reported again, which takes time

    def report(self, seq: int, error: Exception, text: str, answers: bool = False) -> None:
        """Op `seq` failed. answers: somebody waits for its answer, so it is reported at once."""
        failure = kind(error)
        self._counts[failure] += 1
        most = MAX_CONSEQUENCES if failure in ("missing", "memory") else MAX_FAILURES
        if not answers and self._counts[failure] > most:
            self._rest.setdefault(failure, []).append(seq)
            return
        self._flush()  # the failures before this one come first
        holders, now = {}, monotonic()
        if failure == "memory" and now >= self._next:
            holders = memory(self._tensors, self._budget, self._storage)
            self._next = now + MEMORY_REPORT_PAUSE * (monotonic() - now)
        self._send(OpError(seq, failure, text, holders))

    def end_run(self) -> None:
        """The Run is over."""
        self._flush()
        if not self._counts["memory"]:
            self._next = 0.0
        self._counts.clear()

    def _flush(self) -> None:
        for failure, seqs in self._rest.items():
            for part in parts(failure, "it failed as the ops before it did", seqs):
                self._send(part)
        self._rest.clear()


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
        "top": [list(row) for row in nlargest(MAX_NAMED_TENSORS, own.values(), key=lambda row: row[1])],
    }


def largest(tensors: Mapping[int, Any], session: int, storage: Storage) -> list[list[int]]:
    """[id, bytes] of a session's largest tensors: Query.holders."""
    return [list(row) for row in nlargest(MAX_HOLDERS, held(tensors, session, storage).values(), key=lambda row: row[1])]
