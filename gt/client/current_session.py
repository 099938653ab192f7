"""The session that this process records into, and how one comes to be when there is none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gt.client.trace.provenance import Origins
from gt.client.trace.recorder import Recorder
from gt.errors import DispatcherLost, ProgramError


class Live:
    """What the hot path needs, in one object; `recorder` is None without a session."""

    recorder: Recorder | None = None
    origins: Origins
    config: tuple[str, str] = ("", "")  # text and path of the session's YAML
    schedule = ""  # of steps that name none, as the YAML says
    backend = "eager"  # likewise
    fresh: tuple[int, int] | None = None  # id of the newest uninitialised tensor, and how many ops there were then


_starting = threading.RLock()
auto_start: Callable[[], None] | None = None  # set by gt.api
on_clear: list[Callable[[], None]] = []  # caches that hold template numbers


def clear_caches() -> None:
    for clear in on_clear:
        clear()


def current() -> Recorder:
    """The recorder; starts or connects if there is none yet."""
    if Live.recorder is not None:
        return Live.recorder
    with _starting:
        if Live.recorder is None:
            if auto_start is None:
                raise DispatcherLost("no session: call gt.connect(address) or gt.cpu_workers(n) first")
            auto_start()
    assert Live.recorder is not None
    return Live.recorder


def connect(session: Any, config_text: str = "", config_path: str = "") -> Recorder:
    """Record into this session from now on."""
    clear_caches()
    recorder = Recorder(session, clear_caches)
    Live.config = (config_text, config_path)
    Live.schedule, Live.backend = _steps(config_text, config_path)
    Live.origins = Origins(recorder)
    Live.recorder = recorder
    return recorder


def _steps(text: str, path: str) -> tuple[str, str]:
    """Schedule and backend of captured steps that name none."""
    if not text:
        return "", "eager"
    from gt.config.load import load

    config = load(text, path)
    return config.schedule or "", "inductor" if any(group.compile for group in config.groups.values()) else "eager"


def check(tensor: Any) -> None:
    """Raise for a tensor of a session that has ended. Ops ask at a cache miss only: metas, and so keys, are a session's own."""
    if Live.recorder is None or tensor._ref.id < Live.recorder.first:
        raise ProgramError(
            f"a tensor of shape {list(tensor.shape)} belongs to a session that has ended (gt.shutdown, gt.connect or new "
            "workers end it), and its data with it: make it again, and the model and optimizer it belongs to"
        )


def disconnect() -> Any:
    """Stop recording; returns the session, or None if there was none."""
    recorder, Live.recorder = Live.recorder, None
    clear_caches()
    return recorder.session if recorder else None


def set_aside() -> tuple:
    """Stop recording for a while; what `restore` takes."""
    held = Live.recorder, getattr(Live, "origins", None), Live.config, (Live.schedule, Live.backend), Live.fresh
    Live.recorder, Live.fresh = None, None
    clear_caches()
    return held


def restore(held: tuple) -> None:
    """Go on where `set_aside` stopped."""
    Live.recorder, Live.origins, Live.config, (Live.schedule, Live.backend), Live.fresh = held
    clear_caches()
