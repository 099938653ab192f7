"""The context of a pass, for tests that run one over a recording by hand."""

from __future__ import annotations

from typing import Any

from gt.dispatcher.programs.pass_manager import Pass, run_passes
from gt.dispatcher.programs.passes.context import PassContext
from gt.dispatcher.programs.recording import Recording
from gt.ir.instr import Define


def context(**chosen: Any) -> PassContext:
    """Nothing is asked for but what is chosen. Every tensor from before has 1024 floats."""
    fresh = iter(range(1 << 20, 1 << 30))
    values: dict[str, Any] = {
        "asked": "", "compiled": False, "graphs": False, "recompute": 0, "times": {},
        "older": lambda worker, name: ((1024,), 4),
        "lasting": set(), "homes": {}, "fresh": lambda: next(fresh), "define": lambda kind, payload: Define(99, kind, payload),
    }  # fmt: skip
    return PassContext(**{**values, **chosen})


def passed(recording: Recording, one: Pass, **chosen: Any) -> tuple[Recording, PassContext]:
    """The recording that one verified pass makes, and its reports."""
    about = context(**chosen)
    return run_passes(recording, about, (one,)), about
