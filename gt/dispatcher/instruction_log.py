"""The instruction log: one line an event, in columns that grep finds. Knows only how a line looks and where it goes."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from collections import Counter
from typing import Any

from gt.dispatcher.events import MARK, Lines, Log
from gt.ir.instr import COLLECTIVES
from gt.logs import OWNER_ONLY, plain

log = logging.getLogger("gt.dispatcher")

COLUMNS = ("op", "group", "layout", "bytes")  # Log.fields shown by name, in this order; "seq" and "origin" have places
MAX_FIELD_CHARACTERS, MAX_TEXT_CHARACTERS = 300, 4000  # characters of a field, and of the text
MAX_BUFFERED_BYTES = 4 << 20  # bytes that a reader may be behind
WRITE_BYTES = 1 << 16  # bytes that are written at once
# Appended, so that others may write into the file too, or empty it
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# Lines of the summary by the text that they have
COUNTED = {
    "ops": re.compile(r" RECV        client\d+ +op="),
    "placements": re.compile(r" op=place "),
    "splits": re.compile(r" sharded "),
    "transfers": re.compile(r" op=(?!aten)\w+_to_\w+ "),
    "collectives": re.compile(rf" op=(?:{'|'.join(sorted(COLLECTIVES))}) "),
    "errors": re.compile(r" ERROR "),
}
_OWN = frozenset({*COLUMNS, "seq", "origin"})


def text(entry: Log, seq: Any) -> str:
    """The line after its time: `seq kind peer op=.. group=.. layout=.. bytes=.. text @ file:line`. It is one line always."""
    fields = {name: _field(value) for name, value in entry.fields.items()}
    # Columns have fixed widths, so that `sort` and `cut` work too; all else is name=value, which grep finds.
    parts = [f" {fields.get('seq', seq):>8} {entry.kind:<11} {_field(entry.peer):<10}"]
    parts += [f"{name}={fields[name]}" for name in COLUMNS if fields.get(name) not in (None, "")]
    if "S(" in str(fields.get("layout", "")):
        parts.append("sharded")
    parts += [f"{name}={value}" for name, value in fields.items() if name not in _OWN]
    if entry.text:
        parts.append(plain(entry.text.replace("\n", " | "), MAX_TEXT_CHARACTERS))
    if fields.get("origin"):
        parts.append(f"@ {fields['origin']}")
    return " ".join(parts) + "\n"


def _field(value: Any) -> Any:
    return plain(value, MAX_FIELD_CHARACTERS) if type(value) is str else value


def line(entry: Log, elapsed: float, number: int) -> str:
    """A whole line; its number is the op's seq, else the line's."""
    return f"{elapsed:12.6f}{text(entry, number)}"


class InstructionLog:
    """Writes lines to a file, a terminal or a pipe, buffered; `flush` is called when there is time. It never waits, and a
    failure ends it with one warning: a log is not worth a server. `at`: seconds since the server started.

    Lines that are not of an op are numbered among themselves.
    """

    def __init__(self, path: str) -> None:
        """OSError where nothing can be written, or nobody reads."""
        self._path, self._number, self._last = path, 0, 0.0
        self._counts: Counter[str] = Counter()
        self._buffer = bytearray()
        self._fd = _open(path)

    def write(self, entry: Log, at: float) -> None:
        self._count(written := line(entry, at, self._number), at)
        self._put(written)
        self._number += 1

    def write_lines(self, lines: Lines, at: float) -> None:
        self._count(lines.text, at)
        self._put(lines.text.replace(MARK, f"{at:12.6f}"))

    def _count(self, lines: str, at: float) -> None:
        """Count the lines of each kind for the summary."""
        self._last = at
        for name, pattern in COUNTED.items():
            self._counts[name] += len(pattern.findall(lines))

    def summary(self) -> str:
        """The last line: the numbers of the lines before it. It has no word that a search for errors or splits finds."""
        counts = ", ".join(f"{count} {name}" for name, count in self._counts.items())
        return f"{self._last:12.6f} {self._number:>8} SUMMARY     dispatcher {counts or 'nothing was done'}\n"

    def _put(self, lines: str) -> None:
        if self._fd >= 0:
            self._buffer += lines.encode(errors="backslashreplace")
            if len(self._buffer) >= WRITE_BYTES:
                self.flush()

    def flush(self) -> None:
        """Write what there is room for."""
        try:
            while self._buffer and self._fd >= 0:
                done = os.write(self._fd, self._buffer)
                del self._buffer[:done]
        # The reader of a pipe is slow: lines wait here, up to a limit.
        except BlockingIOError:
            if len(self._buffer) > MAX_BUFFERED_BYTES:
                self._fail(f"its reader is {len(self._buffer)} bytes behind")
        except OSError as error:
            self._fail(str(error))

    def close(self) -> None:
        """Write the summary and end the log."""
        self._put(self.summary())
        self.flush()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                os.close(fd)
            except OSError as error:  # a file system may say only now that it has no room
                log.warning("instruction log %s: %s", self._path, error)

    def _fail(self, reason: str) -> None:
        log.warning("instruction log %s ends here, the server goes on: %s", self._path, reason)
        self._buffer.clear()
        fd, self._fd = self._fd, -1
        try:
            os.close(fd)
        except OSError as error:
            log.debug("instruction log %s: %s", self._path, error)


def _open(path: str) -> int:
    """A descriptor that never blocks; OSError unless the path is a file, a terminal, or a pipe with a reader."""
    try:
        fd = os.open(path, FLAGS, OWNER_ONLY)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is a pipe that nobody reads, or a socket: start the reader first") from None
        raise
    # Neither a directory nor a socket can be opened to write; a block device can, and nobody means one.
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        os.close(fd)
        raise OSError(errno.EINVAL, "want a file, a pipe or a terminal")
    return fd
