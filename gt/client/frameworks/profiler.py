"""torch.profiler on a remote program: it sees this process only, so it says once where the time on workers is to be found."""

from __future__ import annotations

import functools
import logging
from typing import Any

from gt.client.current_session import Current

log = logging.getLogger("gt")


class _Told:
    """True once the program has been told."""

    told = False


def extend(module: Any) -> None:
    """Extend torch.profiler's start. module: torch.profiler.profiler."""
    kind = module._KinetoProfile
    original = kind.start_trace

    @functools.wraps(original)
    def start_trace(self: Any) -> None:
        if Current.recorder is not None and not _Told.told:
            _Told.told = True
            log.warning("torch.profiler shows this process only: for the time on workers use `with gt.trace(path):`")
        original(self)

    kind.start_trace = start_trace
