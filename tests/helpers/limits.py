"""Time limits of tests, by one factor: on a loaded machine all takes longer, and is as right."""

from __future__ import annotations

import os

SLOWDOWN = float(os.environ.get("GT_TEST_SLOWDOWN", "1"))


def limit(seconds: float) -> float:
    """Seconds that something may take here."""
    return seconds * SLOWDOWN
