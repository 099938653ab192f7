"""Pieces on their way to a client, sent a window at a time, as it takes them in. What is left is read from the tensor itself
until something may write there: then it is copied."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gt.wire.messages import AHEAD, CHUNK, Piece


@dataclass
class _Leaving:
    source: memoryview
    own: bool  # whether nobody writes there
    sent: int = 0
    granted: int = AHEAD


@dataclass
class Outgoing:
    """`begin` and `settle` are called by the executing thread, `more` by whichever brings a message."""

    send: Callable[..., None]
    leaving: dict[int, _Leaving] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)  # sending may bring a WindowUpdate

    def begin(self, key: int, data: memoryview, own: bool) -> None:
        """Send a piece. own: nobody writes this memory."""
        if data.nbytes == 0:
            self.send(Piece(key, 0, 0))
            return
        with self._lock:
            piece = self.leaving[key] = _Leaving(data, own)
            self._advance(key, piece)

    def more(self, key: int, upto: int) -> None:
        """Bytes up to `upto` may be sent; below 0 the rest is not wanted."""
        with self._lock:
            piece = self.leaving.get(key)
            if upto < 0:
                self.leaving.pop(key, None)
            elif piece is not None:
                piece.granted = max(piece.granted, upto)
                self._advance(key, piece)

    def settle(self) -> None:
        """Instructions come: what is left must not change with the tensors."""
        if self.leaving:
            with self._lock:
                for piece in self.leaving.values():
                    if not piece.own:
                        rest = np.frombuffer(piece.source, np.uint8)[piece.sent :]
                        whole = np.empty(piece.source.nbytes, np.uint8)
                        whole[piece.sent :] = rest
                        piece.source, piece.own = whole.data, True

    def _advance(self, key: int, piece: _Leaving) -> None:
        total = piece.source.nbytes
        while piece.sent < total:
            offset, end = piece.sent, min(piece.sent + CHUNK, total)
            if end > piece.granted:
                return
            piece.sent = end
            frame = piece.source[offset:end]
            self.send(Piece(key, offset, total), (frame if piece.own else bytes(frame),))  # the link reads frames later
        self.leaving.pop(key, None)
