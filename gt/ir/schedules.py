"""The text that asks for a schedule: a name, and after a colon a limit of a worker's activations, as `auto:2GiB`."""

from __future__ import annotations

import re

NAMES = ("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v", "auto")
UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = re.compile(rf"(?a:(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)}))")


def asked(text: str) -> tuple[str, float | None]:
    """Name, and limit in bytes or None; ValueError for another text."""
    name, colon, size = text.partition(":") if isinstance(text, str) else (text, "", "")
    if name not in NAMES:
        raise ValueError(f"schedule {name!r} is not known: want one of {', '.join(NAMES)}")
    limit = in_bytes(size)
    if colon and not limit:
        raise ValueError(f"schedule {text!r}: {size!r} is no size, want bytes of activations of a worker, as {name}:2GiB")
    return name, limit


def in_bytes(text: str) -> float | None:
    """The bytes that a size such as 2GiB or 512 B names, None for another text."""
    found = _SIZE.fullmatch(text.strip())
    return float(found[1]) * UNITS[found[2]] if found else None


def size(count: float) -> str:
    """A number of bytes for a reader: 512 B, 16.2 KiB."""
    unit, by = next(((u, b) for u, b in reversed(UNITS.items()) if count >= b and u), ("B", 1))
    return f"{count:.0f} B" if by == 1 else f"{count / by:.1f} {unit}"
