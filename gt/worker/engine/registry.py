"""Engines by the name of their backend. An engine's module is imported when the engine is opened, and not before."""

from __future__ import annotations

import inspect
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from gt.errors import ConfigError, SystemFailure
from gt.wire.deferred_imports import REACHED, UNUSED, deferred, execute_when_reached
from gt.wire.process_settings import uncollected
from gt.worker.engine.base import Engine


def import_torch_engine() -> None:
    """Import torch and its engine, without the modules that workers do not use. SystemFailure if torch is not to be had."""
    if "gt.worker.engine.torch" in sys.modules:  # to suspend the collector walks all frozen objects, 0.03 s of a million
        return
    first = "torch" not in sys.modules
    # A process with torch may have other threads, and what follows changes `inspect` for all of them
    try:
        with uncollected(), without_source_lines() if first else nullcontext(), deferred(*UNUSED):
            import gt.worker.engine.torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a library of torch's cannot be loaded
        todo = f"install torch for {sys.executable}, or set GT_BACKEND=numpy"
        raise SystemFailure(f"torch cannot be imported on {socket.gethostname()}: {error}: {todo}") from error
    if first:
        execute_when_reached(sys.modules["torch"], REACHED, UNUSED)


@contextmanager
def without_source_lines() -> Iterator[None]:
    """Inside, frames are described without their lines of source: torch's registrations of ops keep file and number alone.

    The first search for a line compares the paths of all modules, a tenth of the time of torch's import.
    """
    original = inspect.getframeinfo
    inspect.getframeinfo = lambda frame, context=0: original(frame, 0)  # inspect.stack() passes a context
    try:
        yield
    finally:
        inspect.getframeinfo = original


def _torch(device: str) -> Engine:
    import_torch_engine()
    from gt.worker.engine.torch import TorchEngine

    return TorchEngine(device)


def _numpy(device: str) -> Engine:
    from gt.worker.engine.numpy import NumpyEngine

    return NumpyEngine(device)


# GT_BACKEND -> its engine on a device
ENGINES: dict[str, Callable[[str], Engine]] = {"torch": _torch, "numpy": _numpy}


def open_engine(backend: str, device: str) -> Engine:
    """The engine of a backend's name."""
    if backend not in ENGINES:
        raise ConfigError(f"no engine is named {backend!r}: GT_BACKEND and --backend may be {' or '.join(ENGINES)}")
    return ENGINES[backend](device)
