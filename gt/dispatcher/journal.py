"""The instruction log: one line an event, in columns that grep finds. Knows only how a line looks and where it goes."""

from __future__ import annotations

from typing import IO, Any

from gt.dispatcher.events import MARK, Lines, Log

COLUMNS = ("op", "group", "layout", "bytes")  # Log.fields shown by name, in this order; "seq" and "origin" have places
_OWN = frozenset({*COLUMNS, "seq", "origin"})


def text(entry: Log, seq: Any) -> str:
    """What follows the time: `seq kind peer op=.. group=.. layout=.. bytes=.. text @ file:line`."""
    fields: dict[str, Any] = entry.fields
    parts = [f" {fields.get('seq', seq):>8} {entry.kind:<11} {entry.peer:<10}"]
    parts += [f"{name}={fields[name]}" for name in COLUMNS if fields.get(name) not in (None, "")]
    if "S(" in str(fields.get("layout", "")):
        parts.append("sharded")
    parts += [f"{name}={value}" for name, value in fields.items() if name not in _OWN]
    if entry.text:
        parts.append(entry.text.replace("\n", " | "))
    if fields.get("origin"):
        parts.append(f"@ {fields['origin']}")
    return " ".join(parts) + "\n"


def line(entry: Log, elapsed: float, number: int) -> str:
    """A whole line; its number is the op's seq, else the line's."""
    return f"{elapsed:12.6f}{text(entry, number)}"


class Journal:
    """Writes lines to a file, buffered; `flush` is called when there is time. `at`: seconds since the server started.

    Lines that are not of an op are numbered among themselves.
    """

    def __init__(self, path: str) -> None:
        self._file: IO[bytes] = open(path, "wb", buffering=1 << 16)  # noqa: SIM115
        self._number = 0

    def write(self, entry: Log, at: float) -> None:
        self._file.write(line(entry, at, self._number).encode(errors="backslashreplace"))
        self._number += 1

    def write_lines(self, lines: Lines, at: float) -> None:
        self._file.write(lines.text.replace(MARK, f"{at:12.6f}").encode(errors="backslashreplace"))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
