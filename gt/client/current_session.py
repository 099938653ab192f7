"""The session that this process records into, and how the first op opens one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from gt.client.trace.provenance import Origins
from gt.client.trace.recorder import Recorder
from gt.config.schema import DATA_PARALLEL, Config, Precision
from gt.errors import DispatcherLost, ProgramError


class Current:
    """State that the hot path reads, in one object. `recorder` is None without a session."""

    recorder: Recorder | None = None
    origins: Origins
    config: tuple[str, str] = ("", "")  # text and path of the session's YAML
    schedule = ""  # the YAML's, for captured steps that name none
    backend = "eager"  # the YAML's, for captured steps that name none
    zero = 0  # the YAML's stage of ZeRO
    precision = Precision()  # the YAML's
    checkpointed: tuple[str, ...] = ()  # the YAML's patterns of modules
    offloads = False  # True if the YAML offloads optimizer state or parameters
    declares_modules = False  # True if modules' buffers and frozen parameters are declared at their first call
    loss_scale: dict[str, torch.Tensor] = {}  # noqa: RUF012 - that of `precision: fp16`, which steps carry over
    # id of the newest uninitialised tensor, and the number of ops at its creation
    fresh: tuple[int, int] | None = None


SETTINGS = ("schedule", "backend", "zero", "precision", "checkpointed", "offloads", "declares_modules")  # set by the YAML
_starting = threading.RLock()
auto_start: Callable[[], None] | None = None  # set by gt.api
on_clear: list[Callable[[], None]] = []  # caches that hold template numbers
on_connect: list[Callable[[Recorder], Callable[[], None]]] = []  # parts that begin with a session; they return their end
on_disconnect: list[Callable[[], None]] = []  # called once, at the end of the session


def clear_caches() -> None:
    """Forget all template numbers, which are no longer valid."""
    for clear in on_clear:
        clear()


def current() -> Recorder:
    """The recorder of the open session. Without one it connects or starts workers; DispatcherLost if that is not set up."""
    if Current.recorder is not None:
        return Current.recorder
    with _starting:
        if Current.recorder is None:
            # Another thread may have started it while this one waited for the lock
            if auto_start is None:
                raise DispatcherLost("no session: call gt.connect(address) or gt.cpu_workers(n) first")
            auto_start()
    assert Current.recorder is not None
    return Current.recorder


def connect(session: Any, config_text: str = "", config_path: str = "") -> Recorder:
    """Record into this session from now on. config_text, config_path: of its YAML."""
    clear_caches()
    recorder = Recorder(session, clear_caches)
    Current.config = (config_text, config_path)
    _apply(config_text, config_path)
    Current.origins = Origins(recorder)
    Current.recorder = recorder
    on_disconnect.extend(begin(recorder) for begin in on_connect)
    return recorder


def _apply(text: str, path: str) -> None:
    """Take the YAML's settings."""
    config = Config()
    if text:
        from gt.config.load import load

        config = load(text, path)
    Current.schedule = config.schedule or ""
    Current.backend = "inductor" if any(group.compile for group in config.groups.values()) else "eager"
    Current.zero = config.zero
    Current.precision, Current.checkpointed = config.precision, config.checkpointed
    Current.offloads = bool(config.offload.optimizer or config.offload.params)
    Current.declares_modules = config.zero > 0 or DATA_PARALLEL in config.groups


def check(tensor: Any) -> None:
    """ProgramError for a tensor of an ended session. Ops check at a cache miss only: metas, and so keys, are per session."""
    if Current.recorder is None or tensor._ref.id < Current.recorder.first:
        raise ProgramError(
            f"a tensor of shape {list(tensor.shape)} belongs to a session that has ended (gt.shutdown, gt.connect or new "
            "workers end it), and its data with it: make it again, and the model and optimizer it belongs to"
        )


def disconnect() -> Any:
    """Stop recording. Returns the session, or None if there was none."""
    # First, so that the parts that end record nothing more
    recorder, Current.recorder = Current.recorder, None
    clear_caches()
    while on_disconnect:
        on_disconnect.pop()()
    return recorder.session if recorder else None


def set_aside() -> tuple:
    """Stop recording for a while. Returns the state that `restore` takes."""
    state = (
        Current.recorder,
        getattr(Current, "origins", None),
        Current.config,
        {name: getattr(Current, name) for name in SETTINGS},
        Current.fresh,
        on_disconnect[:],  # the ends of this session's parts, which another session's end must not call
    )
    Current.recorder, Current.fresh = None, None
    on_disconnect.clear()
    clear_caches()
    return state


def restore(state: tuple) -> None:
    """Resume the session that `set_aside` has interrupted."""
    Current.recorder, Current.origins, Current.config, settings, Current.fresh, on_disconnect[:] = state
    for name, value in settings.items():
        setattr(Current, name, value)
    clear_caches()
