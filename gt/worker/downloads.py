"""Downloads: pieces for a client, sent within the window that the client grants.

Unsent bytes are read from the tensor itself. Before an instruction may write there they are copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gt.wire.messages import AHEAD, CHUNK, Piece


@dataclass
class _UnsentPiece:
    """A fetched piece of which the client has not been sent all bytes. granted: the byte up to which it may be sent."""

    source: memoryview
    own: bool  # nobody writes to the source
    sent: int = 0
    granted: int = AHEAD


@dataclass
class Downloads:
    """`begin` and `copy_unsent` are called by the executing thread, `grant` by the thread that receives a message."""

    send: Callable[..., None]
    unsent: dict[int, _UnsentPiece] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)  # sending may bring a WindowUpdate

    def begin(self, key: int, data: memoryview, own: bool) -> None:
        """Send a piece. own: nobody writes this memory."""
        if data.nbytes == 0:
            self.send(Piece(key, 0, 0))
            return
        with self._lock:
            piece = self.unsent[key] = _UnsentPiece(data, own)
            self._advance(key, piece)

    def widen_window(self, key: int, upto: int) -> None:
        """Bytes up to `upto` may be sent; an `upto` below 0 cancels the rest."""
        with self._lock:
            piece = self.unsent.get(key)
            if upto < 0:
                self.unsent.pop(key, None)
            elif piece is not None:
                piece.granted = max(piece.granted, upto)
                self._advance(key, piece)

    def copy_unsent(self) -> None:
        """Instructions follow: copy unsent bytes, so that they do not change with the tensors."""
        if self.unsent:
            with self._lock:
                for piece in self.unsent.values():
                    if not piece.own:
                        # Offsets stay those of the whole piece; bytes that were sent are not copied.
                        rest = np.frombuffer(piece.source, np.uint8)[piece.sent :]
                        whole = np.empty(piece.source.nbytes, np.uint8)
                        whole[piece.sent :] = rest
                        piece.source, piece.own = whole.data, True

    def _advance(self, key: int, piece: _UnsentPiece) -> None:
        total = piece.source.nbytes
        while piece.sent < total:
            offset, end = piece.sent, min(piece.sent + CHUNK, total)
            # Whole chunks only: the client's window counts in them.
            if end > piece.granted:
                return
            piece.sent = end
            frame = piece.source[offset:end]
            self.send(Piece(key, offset, total), (frame if piece.own else bytes(frame),))  # the link reads frames later
        self.unsent.pop(key, None)
