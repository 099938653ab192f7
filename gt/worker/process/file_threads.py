"""Threads in which a worker opens, reads, writes and closes a session's files: a file system might never answer.

A session has one thread for the files that it lends to be read, and one for those to be written. No other thread waits for
them. The thread of an ended session closes its files and ends. One that never comes back holds what it was at, and is counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic

log = logging.getLogger("gt.worker")

MAX_ABANDONED = 16  # threads of ended sessions that have not come back, before no more files are opened
STACK_BYTES = 512 << 10  # it counts as the worker's memory, of which the default takes 8 MiB a thread
IDLE_SECONDS = 600.0  # without a job, after which memory that is kept for the next one is freed
# Added to the thread's, for copies that nobody waits for: steps matter more. Not the most: a thread that waits for a core may
# hold the interpreter's lock
WRITER_NICENESS = 5
END_SECONDS = 1.0  # that the worker's end waits for its threads


@dataclass(frozen=True, slots=True)
class Job:
    """run: what the thread is to do. drop: undoes what was done for it, if it is never run."""

    run: Callable[[], None]
    drop: Callable[[], None] = lambda: None


Closing = tuple[int, ...]  # descriptors of one file


class FileThread(threading.Thread):
    """One thread of one session. It starts with its first job. idle: called after a time without one."""

    def __init__(self, name: str, idle: Callable[[], object] = lambda: None) -> None:
        super().__init__(name=name, daemon=True)
        self.files = 0  # that are open, or about to be
        self.steps = 0  # reads and writes that the system has answered
        self._ended = False
        self._nice = False
        self._idle = idle
        self._jobs: queue.SimpleQueue[Job | Closing | None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def start(self) -> None:
        before = threading.stack_size(STACK_BYTES)
        try:
            super().start()
        finally:
            threading.stack_size(before)

    def put(self, run: Callable[[], None], drop: Callable[[], None] = lambda: None) -> None:
        """Have it do something after all that it was given before. By any thread. OSError if the system has no thread left."""
        with self._lock:
            if not self.is_alive() and not self._ended:
                try:
                    self.start()
                except RuntimeError as error:
                    raise OSError(f"a thread for files: {error}") from error
        self._jobs.put(Job(run, drop))
        if self._ended:
            self._drop()

    def add_file(self) -> None:
        """It is about to open a file, of which `close` or `no_file` follows."""
        with self._lock:
            self.files += 1

    def no_file(self) -> None:
        """One file less."""
        with self._lock:
            self.files -= 1

    def close(self, descriptors: Iterable[int]) -> None:
        """Close a file: its last write may wait for the file system too. By any thread, also while memory is collected."""
        self._jobs.put(tuple(descriptors))

    def be_nice(self) -> None:
        """Let others have the cores first. In this thread."""
        if not self._nice:
            self._nice = True
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + WRITER_NICENESS)

    def call(self, run: Callable[[], object], seconds: float) -> None:
        """Have it do something, and wait as long as it gets on. OSError if it does not for so many seconds, or failed."""
        done, errors = threading.Event(), list[Exception]()

        def executed() -> None:
            try:
                run()
            except Exception as error:
                errors.append(error)
            done.set()

        self.put(executed, done.set)
        steps = -1
        while not done.wait(seconds):
            if steps == self.steps:
                raise TimeoutError(f"its file system has not answered for {seconds:g} s")
            steps = self.steps
        if errors:
            raise errors[0]

    def end(self) -> None:
        """Do nothing more but close files. What is under way ends when it does; nobody waits for it."""
        with self._lock:
            self._ended = True
        self._drop()
        self._jobs.put(None)

    def _drop(self) -> None:
        kept: list[Closing] = []
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if isinstance(job, Job):
                    job.drop()
                elif job is not None:
                    kept.append(job)
        for closing in kept:
            self._jobs.put(closing)
        self._jobs.put(None)

    def run(self) -> None:
        while not (self._ended and self.files <= 0):
            try:
                job = self._jobs.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                self._idle()
                job = self._jobs.get()
            if isinstance(job, tuple):
                for descriptor in job:
                    _close(descriptor)
                self.no_file()
            elif job is not None:
                self._execute(job)
            del job  # before the next one is awaited: a file may be closed with it

    def _execute(self, job: Job) -> None:
        try:
            (job.drop if self._ended else job.run)()
        except Exception:  # its session waits in vain, and its other files go on
            log.exception("a file of a client")


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # whatever is wrong with it, the descriptor is free
        os.close(descriptor)


def moved() -> None:
    """The system has answered a read or a write of this thread."""
    thread = threading.current_thread()
    if isinstance(thread, FileThread):
        thread.steps += 1


class FileThreads:
    """The threads of a worker's sessions. An owner is the arena that proves a session's files. `of` is for the I/O thread."""

    def __init__(self, idle: Callable[[], object]) -> None:
        self._idle = idle
        self._by_owner: dict[tuple[int, bool], FileThread] = {}
        self._ended: list[FileThread] = []  # those that have not come back
        self._lock = threading.Lock()

    @property
    def files(self) -> int:
        """Files that are open, or about to be."""
        with self._lock:
            return sum(thread.files for thread in (*self._by_owner.values(), *self._ended))

    @property
    def abandoned(self) -> int:
        """Threads of ended sessions that have not come back."""
        with self._lock:
            self._ended = [thread for thread in self._ended if thread.is_alive()]
            return len(self._ended)

    def of(self, owner: int, writes: bool) -> FileThread:
        """The thread of a session's files. OSError if too many of ended sessions have not come back."""
        thread = self._by_owner.get((owner, writes))
        if thread is None:
            if (abandoned := self.abandoned) >= MAX_ABANDONED:
                raise OSError(f"files of ended sessions keep {abandoned} threads waiting")
            name = f"gt-worker-files-{'write' if writes else 'read'}"
            with self._lock:
                thread = self._by_owner[owner, writes] = FileThread(name, self._idle)
        return thread

    def leave(self, owner: int) -> list[FileThread]:
        """The session has ended; its threads."""
        with self._lock:
            both = [self._by_owner.pop((owner, writes), None) for writes in (False, True)]
            threads = [thread for thread in both if thread is not None]
            self._ended += threads
        for thread in threads:
            thread.end()
        return threads

    def end(self) -> None:
        """The worker ends. It does not wait long for threads that are at something."""
        for owner, _ in list(self._by_owner):
            self.leave(owner)
        until = monotonic() + END_SECONDS  # for all of them: most are at their last file, which closes at once
        for thread in self._ended:
            if thread.is_alive():
                thread.join(max(0.0, until - monotonic()))
        if left := self.abandoned:
            log.warning("%d threads wait for files that do not answer", left)
