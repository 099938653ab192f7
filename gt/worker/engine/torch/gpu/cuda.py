"""CUDA graphs in one pool of memory, recorded on a stream of their own, with a side stream for transfers."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gt.wire.signals import uncollected

if TYPE_CHECKING:
    from gt.worker.engine.torch.gpu.attention_seeds import AttentionSeeds

MAX_NOTES = 64  # notes kept; of more, every second one is dropped


class Events:
    """An engine.base.Progress. `mark` records an event, whose `synchronize()` sleeps until the device has reached it.

    A driver that loads kernels, or copies into memory that is not pinned, blocks every thread that calls it. An event's
    `query()` holds the interpreter's lock meanwhile. So one thread waits for events, and no other asks the driver. A failure of
    the device shows in the work that is issued to it, not here.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        self._mark, self._completed = mark, 0
        self._notes: deque[Any] = deque()
        self._waiting = threading.Lock()

    def note(self) -> None:
        with suppress(RuntimeError):
            self._notes.append(self._mark())
        # Thinning keeps the oldest note and an even spread: `completed` is a sign of progress, not a count of ops.
        if len(self._notes) > MAX_NOTES and self._waiting.acquire(blocking=False):
            self._notes = deque(itertools.islice(self._notes, 0, None, 2))
            self._waiting.release()

    def completed(self) -> int:
        # At most one waiting thread: it holds the lock until its notes are done, and a Query never blocks here.
        if self._notes and self._waiting.acquire(blocking=False):
            try:
                threading.Thread(target=self._wait_for_notes, name="gt-progress", daemon=True).start()
            except RuntimeError:  # the system has no thread left: the next Query tries again
                self._waiting.release()
        return self._completed

    def fence(self) -> Callable[[], None]:
        with suppress(RuntimeError):
            return partial(_wait, self._mark())
        return partial(_wait, None)

    def _wait_for_notes(self) -> None:
        try:
            with suppress(RuntimeError):
                for _ in range(len(self._notes)):
                    self._notes[0].synchronize()
                    self._notes.popleft()
                    self._completed += 1
        finally:
            self._waiting.release()


def _wait(event: Any) -> None:
    if event is not None:
        with suppress(RuntimeError):
            event.synchronize()


class Device(Protocol):
    """A device that records work: `Cuda`."""

    device: torch.device

    def finish(self) -> None:
        """Wait for all issued work, before recordings are given up and their memory with them."""

    def release_cache(self) -> None:
        """Free cached memory: while the device records it frees none."""

    def new_pool(self) -> Pool:
        """Memory for the results of recordings. It ends with the last of them."""

    def record(self, run: Callable[[], None], pool: Pool | None = None) -> Callable[[], None]:
        """Have `run` issue its work, which is not executed yet. The result carries it out, on the same memory each time.

        pool: where results are; the shared one by default.
        """

    def on_side_stream(self, run: Callable[[], None]) -> None:
        """Within a recording: work of `run` begins after all work issued so far, and later work may overtake it."""

    def join(self, count: int) -> None:
        """Later work begins after the first `count` transfers that this recording put on the side stream."""

    def mark(self) -> Any:
        """Within `run`: a position in the work that it issues, on either stream. None outside."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Times when the device last passed these marks, in seconds of the monotonic clock; [] until it has. By any thread."""


class Pool:
    """Memory that recordings share. Each keeps the pool alive; with the last of them the memory can be freed."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        # One that lives as long as the pool: a pool ends with its last graph, and may not begin again.
        self.graphs: list[Any] = []
        self.broken = False  # it takes no more recordings


class Cuda:
    """A GPU. Recordings share a pool of memory and the stream that they are made on."""

    def __init__(self, device: torch.device, seeds: AttentionSeeds | None = None) -> None:
        warnings.filterwarnings("ignore", "The CUDA Graph is empty", UserWarning)  # a run of views rightly issues nothing
        self.device, self._seeds = device, seeds
        self._pool: Callable[[], Pool | None] = lambda: None  # the shared one, while there are recordings
        self._broken: list[Any] = []
        self._stream = torch.cuda.Stream(device)
        self._side = torch.cuda.Stream(device)
        self._clock = torch.cuda.Stream(device)
        self._recording = self._apart = False  # apart: the side stream has transfers that are not joined yet
        self._ends: list[torch.cuda.Event] = []  # events behind the transfers that this recording issued there

    def finish(self) -> None:
        with suppress(RuntimeError):
            torch.cuda.synchronize(self.device)

    def release_cache(self) -> None:
        with suppress(RuntimeError):
            torch.cuda.empty_cache()

    def new_pool(self) -> Pool:
        # The pool's first graph, an empty one, keeps the pool's handle valid between recordings.
        pool = Pool()
        pool.graphs.append(self._record(lambda: torch.zeros(1, device=self.device), pool))
        return pool

    def record(self, run: Callable[[], None], pool: Pool | None = None) -> Callable[[], None]:
        pool = pool or self._pool()
        if pool is None:
            pool = self.new_pool()
            self._pool = weakref.ref(pool)
        graph, seeds = torch.cuda.CUDAGraph(), self._seeds
        draws = [] if seeds is None else seeds.register(graph)
        self._record(run, pool, graph)

        def replay(pool: Pool = pool) -> None:
            if draws:
                assert seeds is not None
                seeds.seed(draws)
            graph.replay()

        return replay

    def _record(self, run: Callable[[], Any], pool: Pool, graph: torch.cuda.CUDAGraph | None = None) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph() if graph is None else graph
        here = torch.cuda.current_stream(self.device)
        # The capture begins behind all that was issued, as the inputs' producers may still be executing.
        self._stream.wait_stream(here)
        # No pass of the collector: a graph that it destroys would end the recording under way
        with torch.cuda.stream(self._stream), uncollected:
            # thread_local: other threads may call the driver meanwhile (a copy, an event) without ending this capture.
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            self._recording = True
            try:
                run()
            except BaseException:
                with suppress(Exception):  # torch's allocator does not end a recording with unjoined work
                    if self._apart:
                        self._stream.wait_stream(self._side)
                with suppress(Exception):  # the first error says more than that nothing was recorded
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
        """Use another pool from here on, unless torch has told its allocators that the recording ended: they refuse this pool.

        The allocator of GPU memory can be told here. That of pinned memory keeps asking the graph for its state.
        """
        try:
            torch._C._cuda_endAllocateToPool(self.device.index or 0, pool.handle)
        except RuntimeError:
            return
        self._broken.append(graph)
        pool.broken = True
        if self._pool() is pool:
            self._pool = lambda: None
        torch._C._cuda_releasePool(self.device.index or 0, pool.handle)  # as the graph would have done

    def on_side_stream(self, run: Callable[[], None]) -> None:
        if not self._recording:
            run()
            return
        # A fork and join in a capture: the event waits become edges of the graph, not waits of the host.
        self._side.wait_stream(self._stream)
        self._apart = True
        with torch.cuda.stream(self._side):
            run()
        self._ends.append(self._side.record_event())

    def join(self, count: int) -> None:
        if self._recording:
            # The side stream is in order, so the count-th end implies all before it.
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
            # Events know only differences. An event now, with the host's clock beside it, ties them to monotonic seconds. A
            # stream of its own, or the event would wait behind the compute stream's queue.
            now = torch.cuda.Event(enable_timing=True)
            now.record(self._clock)
            now.synchronize()
            clock = monotonic()
            return [clock - mark.elapsed_time(now) / 1e3 for mark in marks]
        except RuntimeError:  # another replay has begun, or the new recording has not, or the device is lost
            return []
