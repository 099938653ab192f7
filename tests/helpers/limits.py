"""Time limits of tests, all scaled by one factor, which grows on a loaded machine."""

from __future__ import annotations

import os

SLOWDOWN = float(os.environ.get("GT_TEST_SLOWDOWN", "1"))


def limit(seconds: float) -> float:
    """The limit in seconds, scaled for this machine."""
    return seconds * SLOWDOWN
