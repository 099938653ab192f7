"""The text that asks for a schedule: a name, and after a colon a limit of a worker's activations, as `auto:2GiB`."""

from __future__ import annotations

from gt.ir.text import in_bytes

NAMES = ("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v", "auto")


def asked(text: str) -> tuple[str, float | None]:
    """Name, and limit in bytes or None; ValueError for another text."""
    name, colon, size = text.partition(":") if isinstance(text, str) else (text, "", "")
    if name not in NAMES:
        raise ValueError(f"schedule {name!r} is not known: want one of {', '.join(NAMES)}")
    limit = in_bytes(size)
    if colon and not limit:
        raise ValueError(f"schedule {text!r}: {size!r} is no size, want bytes of activations of a worker, as {name}:2GiB")
    return name, limit
