"""Numbers that the program logs with gt.log, for observers of the server. Nothing is sent while nobody observes."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from gt.client import current_session
from gt.logs import sendable
from gt.wire.messages import MAX_VALUES

PAUSE_SECONDS = 0.5  # seconds between two messages: reading a remote value waits for it
MAX_NAME_CHARACTERS = 64


class _Log:
    """State of gt.log in this process: of which session, calls so far, when the next message may be sent."""

    session: Any = None
    steps = 0
    next = 0.0


def log(**values: Any) -> None:
    """Show numbers to observers of the server: `gt top`, the metrics and the dashboard. One call is one step.

    values: numbers, or tensors of one element. While somebody observes, a call at most each half second reads the tensors,
    which waits for them; other calls read nothing. Does nothing without a session, or within a captured function: its replays
    would not call it. TypeError for another value. An int beyond all floats counts as infinite.
    """
    for name, value in values.items():
        real = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
        if not isinstance(value, (int, float)) and not real:
            raise TypeError(f"gt.log({name}=...) takes a number or a tensor of one element, got {_shown(value)}")
    if len(values) > MAX_VALUES or any(not 0 < len(name) <= MAX_NAME_CHARACTERS for name in values):
        raise ValueError(f"gt.log takes up to {MAX_VALUES} values, with names of 1 to {MAX_NAME_CHARACTERS} characters")
    recorder = current_session.Current.recorder
    session = recorder.session if recorder is not None else None
    if recorder is None or session is None or recorder.tape is not None:
        return
    if session is not _Log.session:
        _Log.session, _Log.steps, _Log.next = session, 0, 0.0
    _Log.steps += 1
    if getattr(session, "watched", False) and time.monotonic() >= _Log.next:
        session.log(_Log.steps, {sendable(name)[:MAX_NAME_CHARACTERS]: _number(value) for name, value in values.items()})
        _Log.next = time.monotonic() + PAUSE_SECONDS


def _number(value: float | torch.Tensor) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)  # torch warns of a value that has a gradient
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} of shape {list(value.shape)}"
    return f"{type(value).__name__} {value!r:.60}"
