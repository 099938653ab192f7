"""Recordings of honest traffic: each message a client sent, in order, as bytes. Mutations start from these."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from gt.wire import codec
from gt.wire.dealer import Dealer
from gt.wire.messages import Hello, Message, OfferArena

MOST = 160  # messages of one recording
LONGEST = 1 << 16  # bytes of a frame that are kept


class Recorder:
    """Writes down what any link of this process sends from now on."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        send = Dealer.send

        def recording(dealer: Dealer, message: Message, frames: Any = (), wake: bool = True) -> None:
            send(dealer, message, frames, wake)
            if isinstance(message, OfferArena):
                message = replace(message, nonce="0" * len(message.nonce))  # no attacker knows an honest program's
            if len(self._rows) < MOST and not isinstance(message, Hello):
                parts = [base64.b64encode(bytes(memoryview(frame).cast("B")[:LONGEST])).decode() for frame in frames]
                self._rows.append({"body": base64.b64encode(codec.pack(message)).decode(), "frames": parts})

        self._send = send
        Dealer.send = recording  # type: ignore[method-assign]

    def save(self, path: Path) -> None:
        """Stop, and write what was sent to a file, whole at once."""
        Dealer.send = self._send  # type: ignore[method-assign]
        beside = path.with_suffix(".part")
        beside.write_text("\n".join(map(json.dumps, self._rows)))
        beside.rename(path)


def load(path: Path) -> list[tuple[Message, tuple[bytes, ...]]]:
    """The messages of a recording, with their frames."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(codec.unpack(base64.b64decode(row["body"])), tuple(base64.b64decode(f) for f in row["frames"])) for row in rows]
