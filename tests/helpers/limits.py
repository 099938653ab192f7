"""Time limits of tests, all scaled by one factor, which grows on a loaded machine.

A limit ends a wait for what will never come. A test that passes on a quick machine waits for an event and never for a limit.
"""

from __future__ import annotations

import os

# `make test` alone loads two cores: two processes of tests, each with a dispatcher and up to eight workers
SLOWDOWN = float(os.environ.get("GT_TEST_SLOWDOWN", "4"))


def limit(seconds: float) -> float:
    """The limit in seconds, scaled for this machine."""
    return seconds * SLOWDOWN
