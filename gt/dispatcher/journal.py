"""The instruction log: one line an event, in columns that grep finds. Knows only how a line looks and where it goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO, Any

from gt.dispatcher.events import Log

COLUMNS = ("op", "group", "layout", "bytes")  # Log.fields shown by name, in this order; "seq" and "origin" have places
_OWN = frozenset({*COLUMNS, "seq", "origin"})


def line(entry: Log, elapsed: float, number: int) -> str:
    """`elapsed seq kind peer op=.. group=.. layout=.. bytes=.. text @ file:line`; seq is the op's, else the line's."""
    fields: dict[str, Any] = entry.fields
    parts = [f"{elapsed:12.6f} {fields.get('seq', number):>8} {entry.kind:<11} {entry.peer:<10}"]
    parts += [f"{name}={fields[name]}" for name in COLUMNS if fields.get(name) not in (None, "")]
    if "S(" in str(fields.get("layout", "")):
        parts.append("sharded")
    parts += [f"{name}={value}" for name, value in fields.items() if name not in _OWN]
    if entry.text:
        parts.append(entry.text.replace("\n", " | "))
    if fields.get("origin"):
        parts.append(f"@ {fields['origin']}")
    return " ".join(parts) + "\n"


class Journal:
    """Writes lines to a file, buffered; `flush` is called when there is time."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._file: IO[str] = open(path, "w", buffering=1 << 16, encoding="utf-8")  # noqa: SIM115
        self._clock, self._start, self._number = clock, clock(), 0

    def write(self, entry: Log) -> None:
        self._file.write(line(entry, self._clock() - self._start, self._number))
        self._number += 1

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
