"""Answers that a session waits for: requests by number, and fetched values whose pieces are still on their way.

The thread that asks waits on a latch; the thread that receives sets it. Nothing here sends.
"""

from __future__ import annotations

import itertools
from typing import Any

from gt.client.exchange.host_buffers import Assembly, Into
from gt.errors import ProtocolError
from gt.ir.spec import DTYPES
from gt.wire.messages import Piece, Value
from gt.wire.signals import Latch


class PendingAnswer:
    """One request and its answer: a value or an error, once `done` is set. into: makes the assembly of a fetched value."""

    def __init__(self, into: Into = Assembly) -> None:
        self.into = into
        self.done = Latch()
        self.value: Any = None
        self.error: Exception | None = None
        self.assembly: Assembly | None = None

    def finish(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.error = value, error
        self.done.set()


class AwaitedAnswers:
    """`pending`: answers that are awaited, by the number of the request."""

    def __init__(self) -> None:
        self.pending: dict[int, PendingAnswer] = {}
        self._by_key: dict[int, PendingAnswer] = {}  # key of an incomplete piece -> its fetch
        self._numbers = itertools.count()

    def expect(self, into: Into = Assembly) -> int:
        """The number of a new request. into: see PendingAnswer."""
        request = next(self._numbers)
        self.pending[request] = PendingAnswer(into)
        return request

    def forget(self, request: int) -> None:
        """Nobody waits for this answer any more: it is dropped when it comes."""
        pending = self.pending.pop(request, None)
        if pending is not None and pending.assembly is not None:
            for key in pending.assembly.keys:
                self._by_key.pop(key, None)

    def end_waits(self) -> None:
        """End all waits; the session says why."""
        for pending in list(self.pending.values()):
            pending.done.set()

    # ---- in the thread that receives

    def finish(self, request: int, value: Any = None, error: Exception | None = None) -> None:
        """Take in an answer that is no tensor's value, or an error."""
        pending = self.pending.get(request)  # None: the caller was interrupted
        if pending is not None:
            pending.finish(value, error)

    def value(self, message: Value, frames: tuple[Any, ...]) -> None:
        """Take in the head of a tensor's value, with its only piece if it is small. ProtocolError for an unknown dtype."""
        pending = self.pending.get(message.request)
        if pending is None:
            return
        if message.dtype not in DTYPES:
            raise ProtocolError(f"Value.dtype is {message.dtype!r}, want one of {', '.join(DTYPES)}")
        shape = tuple(message.shape)
        if not message.pieces:
            pending.finish((shape, message.dtype, None))
            return
        try:
            pending.assembly = pending.into(shape, DTYPES[message.dtype][0], message.pieces)
        except (OSError, MemoryError) as error:  # no descriptor or memory for it: its pieces are dropped
            pending.finish(error=error)
            return
        pending.value = (shape, message.dtype, pending.assembly.data)
        if not frames:
            self._by_key.update(dict.fromkeys(pending.assembly.keys, pending))
        _add(pending, (message.pieces[0][0], 0, len(frames[0]), frames[0]) if frames else None)

    def piece(self, message: Piece, frames: tuple[Any, ...]) -> None:
        """Take in a frame of a piece. It is dropped if its fetch was interrupted."""
        pending = self._by_key.get(message.key)
        if pending is not None:
            _add(pending, (message.key, message.offset, message.total, frames[0] if frames else None))


def _add(pending: PendingAnswer, frame: tuple[int, int, int, Any] | None) -> None:
    """Add a frame, if there is one, to a value that is fetched."""
    try:
        if frame is not None and pending.assembly is not None and pending.error is None:
            pending.assembly.add(*frame)
        if pending.assembly is not None and pending.assembly.complete:
            pending.done.set()
    except OSError as error:  # raised by the file that the value is written into
        pending.finish(error=error)
