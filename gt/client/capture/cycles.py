"""Reference cycles that a call makes: their tensors would seem to outlive it. Knows nothing of calls or tensors."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def cycles_collected() -> Iterator[None]:
    """Free the reference cycles that are made inside, unless it raises.

    A full collection visits all objects of the process: 0.1 s and more beside torch and a few libraries. So the objects from
    before are frozen meanwhile. Those that the program itself has frozen stay so, and others are visited then.
    """
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.collect(1)  # or young cycles from before would become old ones, which wait long for a collection
        gc.freeze()
    try:
        yield
        gc.collect()
    finally:
        if freezes:
            gc.unfreeze()
