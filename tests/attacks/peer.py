"""An attacker's link: says any bytes at all, and looks at every byte that comes back for a secret of somebody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from gt.errors import GTError
from gt.wire.dealer import Dealer, LinkTimeouts
from gt.wire.messages import Exit, Failed, Message, Reject, UploadRequest, Welcome

INTERNAL = "internal error of the server"
KEPT = 512  # messages of one link that are remembered


class Leaks:
    """The secrets of honest sessions; `look` is given whatever an attacker receives."""

    def __init__(self, *secrets: bytes) -> None:
        self.secrets = secrets
        self.seen = 0
        self.texts: list[str] = []  # internal errors that attackers were told of

    def look(self, message: Message, frames: Sequence[Any]) -> None:
        for frame in frames:
            data = bytes(memoryview(frame).cast("B"))
            self.seen += any(secret in data for secret in self.secrets)
        if isinstance(message, (Failed, Reject, Exit)) or not frames:
            text = repr(message)
            self.seen += any(secret.decode("latin-1") in text for secret in self.secrets)
            if INTERNAL in text and len(self.texts) < 1000:
                self.texts.append(text[:600])


class Peer:
    """A connection to the server, whatever it says. `answers` is what has come, newest last."""

    def __init__(self, address: str, token: str, leaks: Leaks, react: Callable[[Message, tuple], None] | None = None) -> None:
        self.answers: list[tuple[Message, tuple]] = []
        self.needs: list[UploadRequest] = []
        self.lost = ""
        self._leaks, self._react = leaks, react
        self._changed = threading.Condition()
        self._link = Dealer(address, self._receive, self._end, timeouts=LinkTimeouts(connect=20.0), token=token)

    def send(self, body: bytes, frames: Sequence[bytes] = ()) -> None:
        """Queue these bytes as they are."""
        self._link._queue.append([body, *frames])
        self._link.wake()

    def say(self, message: Message, frames: Sequence[bytes] = ()) -> None:
        self._link.send(message, frames)

    def wait(self, done: Callable[[Message], bool], seconds: float) -> Message | None:
        """The newest answer that is the one; None once the link has ended or the time is over."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                for message, _ in reversed(self.answers):
                    if done(message):
                        return message
                left = deadline - time.monotonic()
                if left <= 0 or self.lost:
                    return None
                self._changed.wait(left)

    def welcome(self, seconds: float = 20.0) -> Welcome | None:
        answer = self.wait(lambda m: isinstance(m, (Welcome, Reject, Exit)), seconds)
        return answer if isinstance(answer, Welcome) else None

    def heard(self, kind: type[Message]) -> list[Any]:
        with self._changed:
            return [message for message, _ in self.answers if isinstance(message, kind)]

    def bytes_of(self, keys: set[int]) -> bytes:
        """The bytes of the fetched pieces, and those of the values themselves."""
        with self._changed:
            return b"".join(
                bytes(memoryview(f).cast("B"))
                for message, frames in self.answers
                if getattr(message, "key", None) in keys or getattr(message, "pieces", None)
                for f in frames
            )

    def close(self) -> None:
        self._link.close()

    def _receive(self, message: Message, frames: tuple) -> None:
        self._leaks.look(message, frames)
        with self._changed:
            self.answers.append((message, frames))
            if len(self.answers) > KEPT:
                del self.answers[: KEPT // 2]
            if isinstance(message, UploadRequest):
                self.needs.append(message)
            if isinstance(message, (Exit, Reject)):
                self.lost = self.lost or repr(message)
            self._changed.notify_all()
        if self._react is not None:
            try:
                self._react(message, frames)
            except GTError:
                return  # what was made of the answer fits no message

    def _end(self, reason: str) -> None:
        with self._changed:
            self.lost = self.lost or reason
            self._changed.notify_all()
