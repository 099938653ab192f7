"""Time limits of tests, all scaled by one factor, which grows on a loaded machine; work, counted in calls.

A limit ends a wait for what will never come. A test that passes on a quick machine waits for an event and never for a limit.
A test of costs counts calls, and takes no time.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

# `make test` alone loads two cores: two processes of tests, each with a dispatcher and up to eight workers
SLOWDOWN = float(os.environ.get("GT_TEST_SLOWDOWN", "4"))


def limit(seconds: float) -> float:
    """The limit in seconds, scaled for this machine."""
    return seconds * SLOWDOWN


def calls_of(run: Callable[[], Any]) -> int:
    """Calls of functions, of Python and from Python's code."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.collect()  # what ends in a collection may call functions: none comes while they are counted
    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count
