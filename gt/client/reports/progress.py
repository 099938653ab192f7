"""Bars of long work on a terminal, by tqdm if it is installed. In a log, a pipe or a notebook nothing is shown.

No thread: whoever works says how far the work is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

DELAY_SECONDS = 1.0  # seconds until a bar is shown
Tick = Callable[[int], object]


def nothing(count: int) -> None:
    """Progress that nobody sees."""


def shown() -> bool:
    """True if standard error is a terminal."""
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except (AttributeError, ValueError):  # a replacement, or closed
        return False


def opened() -> Any:
    """tqdm's class of bars, without its thread; None where it is not installed."""
    try:
        tqdm = import_module("tqdm").tqdm
    except ImportError:
        return None
    return type("Bar", (tqdm,), {"monitor_interval": 0})


def _size() -> dict[str, Any]:
    """tqdm's options for the size of a bar: as wide as the terminal.

    Terminals of containers may have no size. tqdm would show nothing there, so a usual one is taken.
    """
    try:
        known = all(os.get_terminal_size(sys.stderr.fileno()))
    except (AttributeError, OSError, ValueError):  # a replacement without a descriptor
        known = True
    return {"dynamic_ncols": True} if known else {"ncols": 80, "nrows": 24}


@contextmanager
def bar(text: str, total: int | None = None, unit: str = "B") -> Iterator[Tick]:
    """Around long work, which calls the yielded function with each part that is done. The bar is shown after DELAY_SECONDS.

    total: of all parts; None if unknown. A call with 0 redraws the time.
    """
    kind = opened() if shown() else None
    if kind is None:
        yield nothing
        return
    with kind(
        total=total,
        desc=f"gt: {text}",
        unit=unit,
        unit_scale=True,
        delay=DELAY_SECONDS,
        leave=False,
        file=sys.stderr,
        **_size(),
    ) as drawn:

        def tick(count: int) -> None:
            drawn.update(count)
            if not count and drawn.format_dict["elapsed"] > DELAY_SECONDS:
                drawn.refresh()

        yield tick
