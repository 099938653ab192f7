"""A GPU that records what it is given to do: CUDA graphs in one pool of memory, with a stream beside for transfers."""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic
from typing import Any, Protocol

import torch

NOTED = 64  # notes that are kept; of more every second one


class Events:
    """An engine.base.Progress. `mark` records an event: who calls its `synchronize()` sleeps until the device has come there.

    A driver that loads kernels, or copies into memory that is not pinned, keeps every thread waiting that asks it something,
    and an event's `query()` holds the interpreter's lock meanwhile: so a thread waits for events, and no other asks. That the
    device has failed is for what is done with it to find.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        self._mark, self._come = mark, 0
        self._ahead: deque[Any] = deque()
        self._looking = threading.Lock()

    def note(self) -> None:
        with suppress(RuntimeError):
            self._ahead.append(self._mark())
        if len(self._ahead) > NOTED and self._looking.acquire(blocking=False):
            self._ahead = deque(itertools.islice(self._ahead, 0, None, 2))
            self._looking.release()

    def come(self) -> int:
        if self._ahead and self._looking.acquire(blocking=False):
            threading.Thread(target=self._look, name="gt-progress", daemon=True).start()
        return self._come

    def fence(self) -> Callable[[], None]:
        with suppress(RuntimeError):
            return partial(_wait, self._mark())
        return partial(_wait, None)

    def _look(self) -> None:
        try:
            with suppress(RuntimeError):
                for _ in range(len(self._ahead)):
                    self._ahead[0].synchronize()
                    self._ahead.popleft()
                    self._come += 1
        finally:
            self._looking.release()


def _wait(event: Any) -> None:
    if event is not None:
        with suppress(RuntimeError):
            event.synchronize()


@contextmanager
def _uncollected() -> Iterator[None]:
    """No cycles are collected: a graph that is given up ends the recording in which it is."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Device(Protocol):
    """What records: `Cuda`."""

    device: torch.device

    def finish(self) -> None:
        """Wait for all that was issued: before recordings, and with them their memory, are given up."""

    def room(self) -> None:
        """Give back memory that is kept for what is not recorded: while it records it gives none back."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Have `run` issue its work, which is not done yet; what does that work on the same memory."""

    def aside(self, run: Callable[[], None]) -> None:
        """Within a recording: what `run` issues begins after what was issued so far, and what is issued later may pass it."""

    def join(self, count: int) -> None:
        """What is issued from now on begins after the first `count` of what this recording put aside."""

    def mark(self) -> Any:
        """Within `run`: a place in what it issues, there or aside. None outside."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """When the device was last there, in seconds of the monotonic clock; [] while it is not through. By any thread."""


class Pool:
    """Memory that recordings share; each keeps it, so that with the last of them it can be given back."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.graphs: list[Any] = []  # one that is always there: a pool ends with its last graph, and may not begin again


class Cuda:
    """A GPU. Recordings share a pool of memory and the stream that they are made on."""

    def __init__(self, device: torch.device) -> None:
        warnings.filterwarnings("ignore", "The CUDA Graph is empty", UserWarning)  # a run of views issues nothing, rightly
        self.device = device
        self._pool: Callable[[], Pool | None] = lambda: None  # while there are recordings
        self._broken: list[Any] = []
        self._stream = torch.cuda.Stream(device)
        self._side = torch.cuda.Stream(device)
        self._clock = torch.cuda.Stream(device)
        self._recording = self._apart = False  # apart: whether the side stream has what is not joined yet
        self._ends: list[torch.cuda.Event] = []  # of what this recording put there

    def finish(self) -> None:
        with suppress(RuntimeError):
            torch.cuda.synchronize(self.device)

    def room(self) -> None:
        with suppress(RuntimeError):
            torch.cuda.empty_cache()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        pool = self._pool()
        if pool is None:
            pool = Pool()
            pool.graphs.append(self._record(lambda: torch.zeros(1, device=self.device), pool))
            self._pool = weakref.ref(pool)
        graph = self._record(run, pool)

        def replay(pool: Pool = pool) -> None:
            graph.replay()

        return replay

    def _record(self, run: Callable[[], Any], pool: Pool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream), _uncollected():
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            self._recording = True
            try:
                run()
            except BaseException:
                with suppress(Exception):  # with work apart it would not end for torch's allocator
                    if self._apart:
                        self._stream.wait_stream(self._side)
                with suppress(Exception):  # that nothing came of it says less than why
                    self._end(graph, pool)
                raise
            else:
                self._end(graph, pool)
            finally:
                self._recording = self._apart = False
                self._ends.clear()
        here.wait_stream(self._stream)
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph, pool: Pool) -> None:
        try:
            graph.capture_end()
        except BaseException:
            self._leave(graph, pool)
            raise

    def _leave(self, graph: torch.cuda.CUDAGraph, pool: Pool) -> None:
        """Go on with another pool, unless torch has told its allocators that the recording ended: else they refuse this one.

        The one of the GPU's memory can be told. The one of pinned memory asks the graph from now on what it records.
        """
        try:
            torch._C._cuda_endAllocateToPool(self.device.index or 0, pool.handle)
        except RuntimeError:
            return
        self._broken.append(graph)
        self._pool = lambda: None
        torch._C._cuda_releasePool(self.device.index or 0, pool.handle)  # which the graph would have done

    def aside(self, run: Callable[[], None]) -> None:
        if not self._recording:
            run()
            return
        self._side.wait_stream(self._stream)
        self._apart = True
        with torch.cuda.stream(self._side):
            run()
        self._ends.append(self._side.record_event())

    def join(self, count: int) -> None:
        if self._recording:
            self._stream.wait_event(self._ends[count - 1])
            self._apart = count < len(self._ends)

    def mark(self) -> Any:
        if not self._recording:
            return None
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        try:
            if not all(mark.query() for mark in marks):
                return []
            now = torch.cuda.Event(enable_timing=True)
            now.record(self._clock)
            now.synchronize()
            clock = monotonic()
            return [clock - mark.elapsed_time(now) / 1e3 for mark in marks]
        except RuntimeError:  # another replay has begun meanwhile, or what was just recorded has not, or the device is lost
            return []
