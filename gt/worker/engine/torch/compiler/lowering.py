"""Processes that lower segments beside the worker's own thread, which then finds the code in Inductor's folder on disk.

Lowering is Python, and takes most of the time of a first replay. A process is given plain data and lowers as the worker would.
A segment that it fails to lower, or whose code does not fit, is lowered by the worker itself: that costs time only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any

import torch

from gt import env
from gt.wire.process_settings import available_bytes, die_with_parent

log = logging.getLogger("gt.worker")
MAX_PROCESSES = 3  # of one worker
CORES_EACH = 4  # of the host, for each of them and for the worker: kernels are built beside
HOST_BYTES_EACH = 4 << 30  # free memory of the host for each; it takes some 1 GiB
MIN_FREE_BYTES = 4 << 30  # of a GPU's memory: each process takes some 0.5 GiB of it while it lowers
MAX_WAIT_SECONDS = 180.0  # for one segment that a process lowers
MAX_IDLE_SECONDS = 600.0  # for the first one: the step may turn out to be none that can be captured
_ROOT = str(Path(__file__).parents[5])
MIN_FREE_SHARE = 0.5  # of a GPU's memory, for a process to open the device before it has anything to lower
_DONE = b"\n"  # what a process writes when it has started, and after each request
_WARM_UP = b"\n"  # a request for no segment


def processes_beside(device: torch.device) -> int:
    """Processes for a worker of this device. On CPUs the C++ compiler takes most of the time, and builds in threads already."""
    if device.type != "cuda":
        return 0
    from torch._inductor import config

    cached = config.fx_graph_cache and not config.force_disable_caches
    if not cached or config.compile_threads == 1:
        return 0
    return max(0, min(MAX_PROCESSES, len(os.sched_getaffinity(0)) // CORES_EACH - 1, available_bytes() // HOST_BYTES_EACH))


def gains_from_warm_up(device: torch.device) -> bool:
    """True for a GPU with much free memory: the first graph that a process lowers for it takes seconds more than later ones."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free >= MIN_FREE_SHARE * total


class LoweringProcesses:
    """They start at once, and import what they need meanwhile. `end` ends them; so does the end of this process.

    Those that get nothing to do for MAX_IDLE_SECONDS end by themselves.

    Each opens an engine for the device. A request makes text of one line, which that engine's compiler reads.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._processes: list[subprocess.Popen[bytes]] = []
        self._free: SimpleQueue[subprocess.Popen[bytes] | None] = SimpleQueue()  # None in place of one that has died
        self._threads: ThreadPoolExecutor | None = None
        self._starts: list[Future] = []
        if not count:
            return
        opened = f"lambda: open_engine('torch', {str(device)!r})"
        code = f"from gt.worker.engine.registry import open_engine; import {__name__} as processes\n"
        code += f"processes.serve({os.getpid()}, {opened}, {MAX_IDLE_SECONDS})"
        # They build no kernels: of one thread Inductor starts no processes, and neither do they.
        surroundings = env.child(PYTHONPATH=env.python_path(_ROOT), TORCHINDUCTOR_COMPILE_THREADS="1")
        try:
            for _ in range(count):
                process = subprocess.Popen(
                    [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=surroundings
                )
                self._processes.append(process)
            self._threads = ThreadPoolExecutor(count, "gt lowering")
            self._starts = [self._threads.submit(self._started, process) for process in self._processes]
        except (OSError, RuntimeError) as error:  # no memory, no descriptors or no threads for them
            log.info("segments are lowered by this process alone", exc_info=error)
            self.end()

    def __str__(self) -> str:
        ready = sum(start.done() for start in self._starts) if self._threads is not None else 0
        return f"{len(self._processes)} processes, {ready} of them ready"

    def order(self, requests: Mapping[Hashable, Callable[[], str]]) -> Iterator[Hashable]:
        """Keys of all requests, in the order in which the caller should lower them. requests: the one that takes longest first.

        Processes take requests in that order, once they have started. A key comes when its process has ended with it; the
        caller itself takes those at the end.
        """
        waiting, taken = list(requests), dict[Hashable, Future]()
        while waiting:
            if not taken and len(waiting) > 1 and self._ready():
                assert self._threads is not None
                taken = {key: self._threads.submit(self._lowered, requests[key]) for key in waiting[:-1]}
            key = next((key for key in waiting if key in taken and taken[key].done()), None)
            if key is None:
                own = reversed(waiting) if taken else waiting
                key = next((key for key in own if key not in taken or taken[key].cancel()), None)
            if key is None:
                if not wait([taken[key] for key in waiting], MAX_WAIT_SECONDS, FIRST_COMPLETED).done:
                    self.end()
                continue
            waiting.remove(key)
            yield key

    def _ready(self) -> bool:
        if self._threads is None or not all(start.done() for start in self._starts):
            return False
        return self._device.type != "cuda" or torch.cuda.mem_get_info(self._device)[0] >= MIN_FREE_BYTES

    def _started(self, process: subprocess.Popen[bytes]) -> None:
        started, threads = process.stdout.read(1) == _DONE, self._threads  # type: ignore[union-attr]
        if started and threads is not None and gains_from_warm_up(self._device):
            threads.submit(self._exchange, process, _WARM_UP)
        else:
            self._free.put(process if started else None)

    def _lowered(self, request: Callable[[], str]) -> None:
        """Have a free process lower a request. If it has died, the caller finds nothing on disk."""
        line = request().encode() + b"\n"  # before a process is taken: a request that fails keeps none
        self._exchange(self._free.get(), line)

    def _exchange(self, process: subprocess.Popen[bytes] | None, line: bytes) -> None:
        """Wait for a process's answer to a request; then it is free."""
        start, answer = monotonic(), b""
        if process is not None:
            with contextlib.suppress(OSError):  # it has died
                process.stdin.write(line)  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
                answer = process.stdout.read(1)  # type: ignore[union-attr]
            log.debug("process %d took %.1f s%s", process.pid, monotonic() - start, " to warm up" * (line == _WARM_UP))
        self._free.put(process if answer == _DONE else None)

    def end(self) -> None:
        """End them, also one that is at work."""
        processes, self._processes = self._processes, []
        threads, self._threads = self._threads, None
        for process in processes:
            process.kill()
        if threads is not None:
            threads.shutdown(cancel_futures=True)
        for process in processes:
            with contextlib.suppress(OSError), process:  # closes its pipes, of which one may be broken, and waits for its end
                pass


def serve(parent: int, open_engine: Callable[[], Any], idle: float) -> None:
    """Such a process: it lowers what its parent hands to it, and ends with its parent.

    idle: seconds for which it waits for the first segment.
    """
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    requests, answers = sys.stdin.buffer, os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    import torch._inductor.compile_fx
    import torch._meta_registrations  # noqa: F401

    compiler: Any = None
    wait: float | None = idle
    os.write(answers, _DONE)
    while select.select([requests], [], [], wait)[0] and (request := requests.readline()):
        try:
            compiler = compiler or open_engine().compiler("inductor")[0]
            if request == _WARM_UP:
                compiler.warm_up()
            else:
                wait = None
                compiler.lower_on_disk(request)
        except Exception as error:
            log.info("a segment is left to the worker", exc_info=error)
        os.write(answers, _DONE)
