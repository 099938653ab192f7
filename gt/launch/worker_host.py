"""A supervisor of the workers of one process of a job, whose dispatcher is elsewhere. It ends when the dispatcher does.

The first SIGTERM or Ctrl-C leaves its workers at work, since the program may want to save a checkpoint. The job's end, GT_GRACE
seconds or a second one end them. Other signals of launchers are ignored.
"""

from __future__ import annotations

import mmap
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from gt import env
from gt.errors import DispatcherLost, GTError
from gt.launch.supervisor import ENDED, LOST, MAX_RESTARTS, POLL_SECONDS, RESTARTS_SECONDS, UNREACHED, Supervisor, preload, work
from gt.wire import tcp
from gt.wire.socket import resolve

RETURN_SECONDS = 20.0  # for a lost server to be found again
RETRY_SECONDS, WAIT_SECONDS = 1.0, 5.0  # between attempts, and of each
CLOSE_SECONDS = 3.0  # after the server's Exit until its port is closed


class WorkerHost(Supervisor):
    """order: as the Supervisor's, with `server` (its host and port, "" for ssh's client), `wait` and `variables`."""

    def __init__(self, order: dict[str, Any]) -> None:
        background = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as a shell has it: Ctrl-C is for others
        super().__init__(order)
        for name, value in order.get("variables", {}).items():
            env.foreign(name, value)
        self._host, self._server_port = order["server"]
        self._host = self._host or env.ssh_client()
        self._terminated_at = 0.0  # the first SIGTERM
        self._ended_at = 0.0  # the first Exit of the server
        self._lost_at = 0.0  # the first lost link, until a worker is connected again
        self._due: dict[int, float] = {}  # worker -> time of its next start
        self._connected = False
        self._met = mmap.mmap(-1, 1)  # a byte that a worker sets once the server has taken it
        self._code = -1
        self._grace = env.seconds("GT_GRACE")  # now: in a handler of SIGTERM nobody would see that it is no number
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if not background:  # Ctrl-C in this rank's shell: the program is in another one
            signal.signal(signal.SIGINT, self._on_sigterm)

    def run(self) -> int:
        """Exit code: 0 once the dispatcher or a signal has ended the workers, 1 if they could not go on."""
        try:
            gpus = preload(self._order["backend"])
        except GTError as error:
            sys.stderr.write(f"gt: {error}\n")
            return 1
        self._select.register(0, selectors.EVENT_READ, self._on_stdin)
        self._ready = True  # a failed worker is restarted from the beginning
        try:
            self._fork_workers(self._server_port, gpus if self._order["gpu"] else [])
            while not self._stopping and self._code < 0:
                self._turn(POLL_SECONDS)
                self._follow(time.monotonic())
        finally:
            self._end()
        return max(self._code, 0)

    def _body(self, port: int, gpu: str, number: int) -> Callable[[], object]:
        wait = WAIT_SECONDS if self._connected else self._order["wait"]
        return partial(work, self._order, (self._host, port), gpu, number, wait, partial(self._met.__setitem__, 0, 1))

    def _dispatcher_ends(self) -> bool:
        return False  # it is elsewhere, so a worker's words are the only ones here

    def _ended_worker(self, number: int, code: int) -> None:
        now = time.monotonic()
        if self._stopping:
            return
        if code == UNREACHED:
            self._unreached(number, now)
            return

        # Any other end counts as that of a worker that was connected. After a SIGTERM, a lost link is the end of the server.
        self._connected = True
        self._lost_at = 0.0
        if code == LOST and self._terminated_at:
            self._finish(1)

        # Told to end: the whole job has ended, if its port closes too; else only this worker, and it is started again.
        if code == ENDED:
            self._ended_at = self._ended_at or now
            self._due[number] = now + CLOSE_SECONDS
            return

        # It died. Unlike the program's own supervisor, this one gives up if a worker keeps dying: its job waits for it in vain.
        times = self._again.get(number)
        if times is not None and len(times) == MAX_RESTARTS and now - times[0] < RESTARTS_SECONDS:
            self._finish(1, f"worker {number} died {MAX_RESTARTS + 1} times within {RESTARTS_SECONDS:g} s")
        else:
            self._due[number] = now

    def _unreached(self, number: int, now: float) -> None:
        # No server at the start, or a server that does not come back, ends this process. The job's launcher may start it again.
        self._lost_at = self._lost_at or now
        if not self._connected or now - self._lost_at > RETURN_SECONDS:
            self._finish(1)
        else:
            self._due[number] = now + RETRY_SECONDS

    def _follow(self, now: float) -> None:
        """Start workers that are due, and end with the dispatcher, or by signal."""
        if self._terminated_at and now >= self._terminated_at + self._patience():
            self._stopping = True
        if self._ended_at and not self._listens():
            self._finish(0)
        for number, due in list(self._due.items()):
            if now >= due and self._code < 0 and not self._stopping:
                del self._due[number]
                # The server still listens, so only this worker was told to end.
                self._ended_at = 0.0
                # Attempts to find a lost server again do not count as restarts.
                if self._connected and not self._lost_at:
                    self._lost_worker(number)
                else:
                    self._start(number)

    def _listens(self) -> bool:
        try:
            return tcp.listens(resolve(self._host), self._server_port)
        except DispatcherLost:
            return False

    def _finish(self, code: int, why: str = "") -> None:
        if self._code < 0:
            self._drain()  # a worker's reason may be in its pipe still
            self._code = code
            if why:
                sys.stderr.write(f"gt: {why}\n")

    def _on_sigterm(self, number: int, frame: object) -> None:
        if self._terminated_at or not self._patient:
            self._stopping = True
            return
        # The first one: the program may want to save a checkpoint, for which it needs its workers.
        self._terminated_at = time.monotonic()
        name, seconds = signal.Signals(number).name, self._patience()
        os.write(2, f"gt: {name}: workers end with the program, or in {seconds:g} s, or at a second signal\n".encode())

    def _patience(self) -> float:
        """Seconds from SIGTERM to the end of the workers."""
        # No program has workers that no server has taken; but a server may be about to take them.
        return self._grace if self._met[0] else min(self._grace, RETURN_SECONDS)
