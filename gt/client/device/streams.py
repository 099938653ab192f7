"""torch.remote.Stream and Event, for libraries that order work by them: there is one order, that of the program.

Workers overlap transfers by themselves. So every stream is the same one, and an event is over once all before it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gt.client.device.remote_tensor import Shown
from gt.errors import UnsupportedOp


class Stream:
    """The order of the program's ops. A context manager, as torch.cuda.stream makes one of a stream."""

    synchronize_device: Callable[[], None]

    def __init__(self, device: Any = None, priority: int = 0, **others: Any) -> None:
        self.device, self.priority = Shown.device, priority

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return hash(Stream)

    def wait_stream(self, stream: Any) -> None:
        """Nothing is to be done: work of all streams is in one order."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: ops that are recorded from now on are executed after the event."""

    def record_event(self, event: Event | None = None) -> Event:
        return Event() if event is None else event

    def synchronize(self) -> None:
        """Wait until workers have executed all ops; raise the first error."""
        Stream.synchronize_device()

    def query(self) -> bool:
        """True, once workers have executed all ops: it waits for them."""
        self.synchronize()
        return True


class Event:
    """A moment in the order of the program's ops."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.device = Shown.device

    def record(self, stream: Any = None) -> None:
        """Nothing is to be done: `synchronize` waits for all ops."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: ops that are recorded from now on are executed after the event."""

    def synchronize(self) -> None:
        """Wait until workers have executed all ops; raise the first error."""
        Stream.synchronize_device()

    def query(self) -> bool:
        """True, once workers have executed all ops: it waits for them."""
        self.synchronize()
        return True

    def elapsed_time(self, end: Any) -> float:
        raise UnsupportedOp(
            "workers keep no time of events: use time.perf_counter() with torch.remote.synchronize() before and after"
        )
