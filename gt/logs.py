"""Logging: silent by default. GT_VERBOSE and GT_DEBUG_* make a process log its actions to stderr.

Logged texts often come from other peers: `plain` makes them one line without control characters.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import stat
import sys
from pathlib import Path

from gt import env

PARTS = {"client": "GT_DEBUG_CLIENT", "dispatcher": "GT_DEBUG_DISPATCHER", "worker": "GT_DEBUG_WORKER"}

OWNER_ONLY = 0o600  # mode of files that GT writes about programs
MAX_TEXT_CHARACTERS = 2000  # of one logged text
# Control characters, line ends of Unicode, and marks that reverse the direction of text
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069\ufeff]")


def plain(text: str, most: int = MAX_TEXT_CHARACTERS) -> str:
    """The text on one line, of at most `most` characters: line ends and other control characters are shown as escapes."""
    cut = f"{text[:most]}... ({len(text)} characters)" if len(text) > most else text
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), cut)


def sendable(text: str, most: int = MAX_TEXT_CHARACTERS) -> str:
    """A plain text that has a form in UTF-8: bytes of a file's name that have none are escapes."""
    return plain(text, most).encode("utf-8", "backslashreplace").decode()


def private_file(path: str | Path) -> int:
    """A descriptor of a file to write, emptied: a new one is readable by its owner alone, from its first byte on.

    It tells of a program's lines, shapes and values. A file that exists keeps the rights that its owner gave it.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOCTTY | os.O_CLOEXEC, OWNER_ONLY)


class Sparse:
    """Passes at most `limit` lines a second, and counts the others. Knows no clock."""

    def __init__(self, logger: logging.Logger, limit: int) -> None:
        self._logger, self._limit = logger, limit
        self._second, self._said, self._more = 0.0, 0, 0

    def allows(self, now: float) -> bool:
        if now - self._second >= 1:
            if self._more:
                self._logger.warning("%d more of the last second's refusals are not shown", self._more)
            self._second, self._said, self._more = now, 0, 0
        self._said += 1
        self._more += self._said > self._limit
        return self._said <= self._limit


def asked(part: str) -> bool:
    """True if the environment asks for the log of this part of GT."""
    return env.flag("GT_VERBOSE") or env.flag(PARTS[part])


class Plain(logging.Formatter):
    """Formats an event as one line that begins with the time. Lines of a traceback are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = plain(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        return "\n".join(f"  {plain(line)}" for line in super().formatException(ei).split("\n"))  # type: ignore[arg-type]


class Unblocked(logging.StreamHandler):
    """Writes to stderr. Drops a line rather than wait for a reader of a pipe that has stopped reading."""

    def emit(self, record: logging.LogRecord) -> None:
        if self._has_room():
            super().emit(record)

    def _has_room(self) -> bool:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            descriptor = self.stream.fileno()
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                poll = select.poll()
                poll.register(descriptor, select.POLLOUT)
                return bool(poll.poll(0))
        return True


def setup(part: str, name: str = "") -> None:
    """Set up the logger "gt" of this process. part: client, dispatcher or worker. name: printed before each line."""
    logger = logging.getLogger("gt")
    level = logging.DEBUG if env.flag(PARTS[part]) else logging.INFO if env.flag("GT_VERBOSE") else logging.WARNING
    logger.setLevel(level)
    if not logger.handlers:
        handler = Unblocked(sys.stderr)
        logger.addHandler(handler)
        logger.propagate = False
    shown = name or f"gt.{part}"
    logger.handlers[0].setFormatter(Plain(f"%(asctime)s {shown} %(levelname)s %(message)s"))
