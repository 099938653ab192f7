"""Counters of a session's workers at a moment when nothing is under way."""

from __future__ import annotations

import gc
from typing import Any

import gt
from gt.client import current_session
from gt.client.device import torch_remote


def settled() -> dict[str, Any]:
    """gt.stats() once workers have executed everything, and have freed what the program has let go.

    A value that is read says that one worker has come so far: others may still be at ops before it, and all at later ones.
    """
    gc.collect()
    current_session.current().flush()  # ids that have ended too
    torch_remote.synchronize()
    return gt.stats()
