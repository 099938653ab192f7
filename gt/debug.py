"""`gt.debug`: the counters of workers as a table, for a look in the middle of a program."""

from __future__ import annotations

import sys
from typing import Any


def get_worker_stats() -> dict[str, dict[str, Any]]:
    """Counters of each worker by its name: the workers of gt.stats(). Waits for their answers, not for ops under way."""
    from gt.api import stats

    return {worker.get("name", str(index)): worker for index, worker in enumerate(stats()["workers"])}


def print_worker_stats() -> None:
    """Write the counters of each worker to standard output, one line for each counter."""
    for name, counters in get_worker_stats().items():
        sys.stdout.write(f"{name}\n")
        for key, value in counters.items():
            if key != "name":
                sys.stdout.write(f"  {key:24} {value}\n")
