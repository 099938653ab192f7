"""The op stream: a flat list of numbers that ops are appended to, and its hand-over to the session in batches.

An append is one `list.extend`, atomic under the GIL, so recording takes no lock and may be interrupted anywhere. Only the
hand-over takes the lock; in the main thread it also holds back Ctrl-C, or a batch could be lost half way.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from gt.client.device.remote_tensor import LiveTensors
from gt.ir.instr import FIRST, FREE
from gt.ir.template import Template
from gt.wire.signals import uninterrupted

MIN_BATCH_NUMBERS, MAX_BATCH_NUMBERS = 80, 1400  # numbers in the buffer: about 15 and 256 ops
MAX_BATCH_UPLOAD_BYTES = 16 << 20  # bytes of uploads in a batch, after which it is handed over
MAX_HELD_BATCHES = (
    8  # batches in one of a call that is held back until it is over: nobody waits for the first, and credit lasts longer
)
MAX_FREED_PER_BATCH = 1 << 15  # tensors that one batch frees
MAX_TEMPLATES = 16384  # beyond so many, the table starts again

_ids = itertools.count(1)  # never starts again, so that ids of an ended session name nothing in the next


class Recorder:
    """Buffers of one session. `on_clear` is called when template numbers become invalid."""

    def __init__(self, session: Any, on_clear: Callable[[], None]) -> None:
        self.session, self.on_clear = session, on_clear
        self.first = self.new_id()  # tensors of sessions before this one have lower ids
        self.code: list = []
        self.batch = MIN_BATCH_NUMBERS  # what the buffer may hold: little while workers have nothing to do, or they would wait for all of it
        self.live_tensors = LiveTensors()
        self.ops = 0
        self.fetches = 0
        self._templates: list[list] = []
        self._origins: list[list] = []
        self._frames: list[bytes] = []
        self._inline = 0  # their bytes
        self._next_template, self._next_origin = FIRST, 1
        self.templates: dict[int, Template] = {}  # those of the table
        self.tape: Any = None  # takes what is handed over, while a call is recorded
        self._lock = threading.Lock()
        session.on_idle = self.flush_stale

    def new_id(self) -> int:
        return next(_ids)

    def define(self, template: Template) -> int:
        """Number of a new template, valid until the table is cleared."""
        if self._next_template - FIRST >= MAX_TEMPLATES:
            self.flush()
            self.on_clear()
            self._next_template = FIRST
            self.templates.clear()
        number = self._next_template
        self._templates.append([number, template.wire()])
        self.templates[number] = template
        self._next_template = number + 1
        return number

    def origin(self, file: str, line: int, group: str, backward: bool, micro: int) -> int:
        number = self._next_origin
        self._origins.append([number, file, line, group, backward, micro])
        self._next_origin = number + 1
        return number

    def emit_with_frame(self, row: list, data: bytes, at: int) -> None:
        """Append a row whose `at`-th number is the index of a frame of the same batch."""
        if self._inline + len(data) > MAX_BATCH_UPLOAD_BYTES:
            self.flush()
        with self._lock:
            row[at] = len(self._frames)
            self._frames.append(data)
            self._inline += len(data)
            self.code.extend(row)

    def flush(self) -> None:
        """Hand everything recorded so far to the session; raises if its link is dead."""
        wait = getattr(self.session, "wait_credit", None)
        if wait is not None:
            wait()  # may take long, and Ctrl-C has to work meanwhile: nothing is taken from the buffers yet
        with uninterrupted(), self._lock:
            self._hand_over()

    def end_batch(self) -> None:
        """There is a batch in the buffer: hand it over, unless more of them had better go together."""
        self.batch = min(2 * self.batch, MAX_BATCH_NUMBERS)
        if self.tape is None or not self.tape.deferred or len(self.code) > MAX_HELD_BATCHES * MAX_BATCH_NUMBERS:
            self.flush()

    def note_wait(self) -> None:
        """A value is waited for, and then workers have done all that was handed over."""
        self.fetches += 1
        self.batch = MIN_BATCH_NUMBERS

    def flush_ops(self) -> None:
        """Have all ops handed over; what has ended can wait for the next batch."""
        if self.code or self._lock.locked():  # in this order: the I/O thread takes the code before it has handed it over
            self.flush()

    def free_ended(self) -> None:
        """Have what has ended freed before the next op, which makes a large value, not when this batch is over."""
        with uninterrupted(), self._lock:
            freed = self.live_tensors.take_ended()
            if self.tape is not None:
                freed = self.tape.defer(freed)
            for first in range(0, len(freed), MAX_FREED_PER_BATCH):
                some = freed[first : first + MAX_FREED_PER_BATCH]
                self.code.extend((FREE, len(some), *some))
                if len(some) == MAX_FREED_PER_BATCH:
                    self._hand_over()

    def flush_stale(self) -> None:
        """From the session's I/O thread: hand over what has been lying here; never waits."""
        tape = self.tape
        if tape is not None and tape.deferred:
            return  # nobody begins with it: whole batches are fewer to hold back
        ended = self.live_tensors.ended and not self.session.waiting
        if not (self.code or ended) or not self._lock.acquire(blocking=False):
            return
        try:
            ready = getattr(self.session, "has_credit", None)
            if self.session.failure is None and (ready is None or ready()):
                self._hand_over()
        finally:
            self._lock.release()

    def _hand_over(self) -> None:
        freed = self.live_tensors.take_ended()  # before the code: whatever used these is already in it
        code = self.code[:]
        del self.code[: len(code)]
        templates, origins, frames = self._templates[:], self._origins[:], self._frames[:]
        if self.tape is not None:
            freed = self.tape.append(code, frames, freed)
        if freed:
            code += [FREE, len(freed[:MAX_FREED_PER_BATCH]), *freed[:MAX_FREED_PER_BATCH]]
        if not code:
            return
        del self._templates[: len(templates)], self._origins[: len(origins)], self._frames[: len(frames)]
        self._inline = 0
        self.session.submit(templates, origins, code, frames)
        for first in range(MAX_FREED_PER_BATCH, len(freed), MAX_FREED_PER_BATCH):  # more than fit a batch
            some = freed[first : first + MAX_FREED_PER_BATCH]
            self.session.submit([], [], [FREE, len(some), *some], [])
