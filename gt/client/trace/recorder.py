"""The op stream: a flat list of numbers that ops are appended to, and its hand-over to the session in batches.

An append is one `list.extend`, atomic under the GIL: recording takes no lock and may be interrupted anywhere. Only the
hand-over takes the lock. In the main thread it also holds back Ctrl-C, which could otherwise lose a batch half way.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from gt.client.device.remote_tensor import LiveTensors, memory_id
from gt.client.reports import spans
from gt.client.values.foldable_ops import FLOATS, MAX_FLOAT_BYTES
from gt.client.values.known_values import KnownValues
from gt.client.values.lent_results import LentResult, LentResults
from gt.client.values.read_values import MAX_BYTES as MAX_READ_BYTES
from gt.client.values.read_values import ReadValues
from gt.client.values.state_values import MAX_STATE_BYTES, StateValues
from gt.client.values.uploaded_values import DTYPES, MAX_BYTES, UploadedValues
from gt.ir import check, shapes
from gt.ir.instr import FIRST, FREE, client_length
from gt.ir.schema import Schemas
from gt.ir.template import Template, weight
from gt.logs import sendable
from gt.wire.signals import uncollected, uninterrupted

MIN_BATCH_NUMBERS, MAX_BATCH_NUMBERS = 80, 1400  # in the buffer: about 15 and 256 ops
# On few cores a hand-over takes the core of the thread that records. Ops on few bytes are soon done and leave small results, so
# the first batch waits for about 120 of them. It is handed over earlier once its ops read and make so many bytes.
SHARED_BATCH_NUMBERS, SHARED_BATCH_BYTES = 640, 256 << 10
MAX_BATCH_UPLOAD_BYTES = 16 << 20  # in a batch, which is then handed over
MAX_RECORDED_BYTES = 16 << 20  # that ops of a recorded call make before values that have ended are freed
MAX_HELD_BATCHES = 8  # joined in one while execution of a call is deferred: no worker waits, and credit lasts longer
MAX_HELD_CALLS = 8  # calls whose ends wait in the buffers while workers are busy
MAX_BUSY_LOOKS = 8  # of the I/O thread, each 10 ms after the one before at the latest
MAX_FREED_PER_BATCH = 1 << 15  # tensors
MAX_PATH_CHARACTERS = 4096  # longest path of a source file
MAX_TEMPLATES = 16384  # in the table; then it starts again
MAX_MISSES = 4  # reads of floats on a line that workers alone decide, as of a loss: the next ones are not looked up
# Such reads of other values, as of the end of a loop: the next ones are looked up once in so many
MAX_WHOLE_MISSES, READS_PER_LOOK = 16, 8

_ids = itertools.count(1)  # never restarts, so that ids of an ended session are invalid in the next


class Recorder:
    """The buffers of one session. on_clear: called when template numbers become invalid."""

    def __init__(self, session: Any, on_clear: Callable[[], None]) -> None:
        self.session, self.on_clear = session, on_clear
        self.new_id: Callable[[], int] = _ids.__next__
        self.library_ops: Schemas = getattr(session, "library_ops", {})  # that the workers have
        self.gpus: bool = getattr(session, "gpus", False)  # each worker has one
        self.first = self.new_id()  # tensors of sessions before this one have lower ids
        # The flat op stream. A row: template, origin, ids of operands, scalars, ids of results, such as 1034 7
        # 12 15 0.5 31 for %31 = op %12 %15 0.5. Numbers below FIRST begin a control row, such as FREE 2 12 15
        self.code: list = []
        self._ready: list = []  # what precedes the buffer, in the form in which it is handed over: calls that have ended
        self._held_calls = 0  # calls whose end is in `_ready`
        self._looks = 0  # times that what is here was left to busy workers
        self._holds_large = False  # whether a large upload is among what is not handed over
        self.batch = MIN_BATCH_NUMBERS  # numbers before the hand-over; few while workers are idle and would wait for all
        self.live_tensors = LiveTensors()
        self.ops = 0
        self.uploaded = UploadedValues()
        self.fetches = 0
        self._templates: list[list] = []
        self._origins: list[list] = []
        self._frames: list[bytes] = []
        self._inline_bytes = 0  # bytes of small tensors in the batch's frames
        self._numbers, self._origin_numbers = itertools.count(FIRST), itertools.count(1)  # of templates, of origins
        self._defining = threading.RLock()  # held for a few lines, also within `_lock`: never the other way round
        self.templates: dict[int, Template] = {}  # by number
        self._weights: dict[int, tuple[int, int]] = {}  # by template: numbers of a row, bytes that it reads and makes
        self._parts = 0  # of all templates in the table
        self._shares_cores = getattr(session, "shares_cores", False)
        self.values = KnownValues(self.templates)
        self.read = ReadValues(self.templates)
        self.lent = LentResults(self.templates)
        self.state = StateValues(self.templates, self.live_tensors.all)
        # line (origin) -> its reads of floats that only workers decided, if none other; -line: those of other values
        self._misses: dict[int, int] = {}
        self.cleared = 0  # times that the table was
        self.made_sparse = False  # whether the program has made a sparse tensor
        # A CallRecording or FragmentTape while a compiled function runs: it gets every batch, and says when one is long enough
        self.tape: Any = None
        self.ended_tape: Any = None  # of a call that Ctrl-C has ended: the next hand-over has its last ops
        self.capturing = threading.RLock()  # held by the thread whose call has the tape; Ctrl-C may leave it held
        # Held in a replay, and where a recording begins: another thread would fill the same inputs, or record the replay
        self.turns = threading.RLock()
        self.when_watched: Callable[[], None] | None = None  # called after a batch while somebody observes the server
        self._lock = threading.Lock()
        session.on_idle = self.flush_stale

    def define(self, template: Template) -> int:
        """Number of a new template, valid until the table is cleared.

        RuntimeError for shapes that no worker takes: the dispatcher would end the session for them.
        """
        try:
            shapes.check_template(template)
        except ValueError as error:
            raise RuntimeError(str(error)) from None
        # Before the lock, since a wire form takes a while to make
        form = template.wire()
        parts = weight(form)
        length = 2 + len(template.ins) + template.values + template.results
        made = [out.spec for out in template.outs if out.kind == "new" and out.spec]
        nbytes = sum(spec.nbytes for spec in (*template.ins, *made))
        while True:
            # In the order of their numbers: with the first number the dispatcher forgets the templates before it
            with uninterrupted(), uncollected, self._defining:
                numbers = self._numbers
                number = next(numbers)
                fits = self._parts + parts <= check.MAX_ALL_TEMPLATE_PARTS or number == FIRST
                if number - FIRST < MAX_TEMPLATES and fits:
                    self._parts += parts
                    self._templates.append([number, form])
                    self.templates[number] = template
                    self._weights[number] = length, nbytes
                    return number
            # A program with ever new shapes would grow the table for ever
            self._clear_table(numbers)

    def _clear_table(self, numbers: Iterator[int]) -> None:
        """Begin the table of templates again, unless another thread has. numbers: those of the full table."""
        self.flush()  # everything recorded by the old numbers goes first
        self.on_clear()
        with uninterrupted(), uncollected, self._lock:
            if self._numbers is not numbers:
                return
            self._hand_over()  # ops that another thread has recorded meanwhile
            self.values.clear()
            self.read.clear()
            self.state.clear()
            with self._defining:
                self.cleared += 1
                self.templates.clear()
                self._weights.clear()
                self._parts = 0
                self._numbers = itertools.count(FIRST)

    def new_origin(self, file: str, line: int, group: str, backward: bool, micro: int) -> int:
        number = next(self._origin_numbers)  # in one step: other threads take numbers too
        self._origins.append([number, sendable(file, MAX_PATH_CHARACTERS), line, group, backward, micro])
        return number

    def emit_with_frame(
        self, row: list, data: bytes, position: int, values: np.ndarray | None = None, is_float: bool = False
    ) -> None:
        """Append a row with a frame of the same batch. position: index in the row of the frame's number.

        values, is_float: see note_upload, of a row whose last number is the tensor's id.
        """
        if self._inline_bytes + len(data) > MAX_BATCH_UPLOAD_BYTES:
            self.flush()
        with uninterrupted(), uncollected, self._lock:
            if values is not None:
                self._note_upload(row[-1], values, is_float)
            row[position] = len(self._frames)
            self._frames.append(data)
            self._inline_bytes += len(data)
            self._emit_upload(row)

    def emit_large_upload(self, row: list) -> None:
        """Append the row of an upload whose data stays in this process, or in an arena, until workers have it."""
        with uninterrupted(), uncollected, self._lock:
            self._holds_large = True  # workers make room for the next one
            self._emit_upload(row)

    def _emit_upload(self, row: list) -> None:
        (self.code if self.tape is None else self.tape.uploads(self.code)).extend(row)

    def flush(self, asks: bool = False) -> None:
        """Hand everything recorded so far to the session; raises if its link is dead. asks: see Session.submit."""
        wait = getattr(self.session, "wait_credit", None)
        if wait is not None:
            try:
                wait()  # may take long, and Ctrl-C must work: nothing has left the buffers yet
            except KeyboardInterrupt:
                with uninterrupted(), uncollected, self._lock:
                    self._hand_over()  # what the rest of a step would write must not read what its first part did not make
                self.session.interrupt()
                raise
        with uninterrupted(), uncollected, self._lock:
            self._hand_over(asks)
        if self.when_watched is not None and getattr(self.session, "watched", False):
            self.when_watched()

    def pass_on(self) -> None:
        """Hand over the ops of a call: at once, unless workers are busy with calls that take little time.

        Then several calls go in one batch, or what is there goes as soon as workers have less to do (`flush_stale`).
        """
        numbers = len(self._ready) + len(self.code) + len(self.live_tensors.ended)
        many = numbers > MAX_BATCH_NUMBERS or self._held_calls >= MAX_HELD_CALLS
        if not getattr(self.session, "busy", False) or many or self._holds_large or spans.current is not None:
            self.flush()
            return
        with uninterrupted(), uncollected:  # once for both: each sets the handlers of signals, by calls of the system
            with self._lock:
                self._hold()
                self._held_calls += 1
            self.session.take_turn()  # which sees that workers have less to do

    def own_tape(self) -> Any:
        """The tape, if this thread's call has it. That of another thread's call notes that this one is at work."""
        tape = self.tape
        if tape is None or tape.thread == threading.get_ident():
            return tape
        tape.shared = True
        return None

    def end_tape(self) -> None:
        """End the call, also if Ctrl-C has ended its last flush: the rest of its ops is kept in the tape's form."""
        with uninterrupted(), uncollected, self._lock:
            try:
                if self.tape is not None and not self.session.failure:
                    self._hold()
            finally:
                self.tape = None

    def end_batch(self) -> None:
        """Hand the buffer's batch over, unless it is a light one, or execution is deferred and more batches can be joined."""
        if self.batch < SHARED_BATCH_NUMBERS and self._shares_cores and self.tape is None and self._light():
            self.batch *= 2
            return
        # Small batches start idle workers soon; larger ones later cost less each
        self.batch = min(2 * self.batch, MAX_BATCH_NUMBERS)
        if self.tape is None or len(self.code) > self.tape.most_held:
            self.flush()

    def _light(self) -> bool:
        """True if the ops in the buffer read and make few bytes."""
        code, weights, at, nbytes = self.code[:], self._weights, 0, self._inline_bytes
        while at < len(code) and nbytes <= SHARED_BATCH_BYTES:
            number = code[at]
            if number < FIRST:
                at += client_length(code, at)
            elif (row := weights.get(number)) is not None:
                at += row[0]
                nbytes += row[1]
            else:  # another thread has cleared the table
                return False
        return nbytes <= SHARED_BATCH_BYTES

    def uploaded_value(self, tensor: Any) -> Any:
        """The value of a small integer tensor that was uploaded and not changed since, on the CPU; None if it is not known."""
        if not self.uploaded:
            return None
        with uninterrupted(), uncollected, self._lock:
            return self.uploaded.of(tensor, self.code[:], self.templates)

    def note_upload(self, number: int, values: np.ndarray, is_float: bool) -> None:
        """A small tensor of DTYPES or FLOATS is uploaded. values: an array that nobody changes."""
        with uninterrupted(), uncollected, self._lock:
            self._note_upload(number, values, is_float)

    def _note_upload(self, number: int, values: np.ndarray, is_float: bool) -> None:
        if not is_float:
            self.uploaded.note(number, values)
        self.values.upload(number, values)

    def known_value(self, tensor: Any, origin: int) -> torch.Tensor | None:
        """A copy of a small tensor's value, on the CPU; None if a worker has to be asked.

        It is known if constants and uploads alone decide it, or if it was read before. origin: of the read.
        """
        meta, number = tensor._ref.meta, tensor._ref.id
        nbytes = meta.numel * meta.dtype.itemsize
        if nbytes > MAX_BYTES or self.session.failure is not None:
            return None
        interrupts = getattr(self.session, "interrupts", 0)
        with uninterrupted(), uncollected, self._lock:
            value = self.read.of(number, self.code, interrupts) if self.read else None
            if value is None:
                if meta.dtype in FLOATS:
                    value = self._known_float(number, nbytes, origin, interrupts)
                elif meta.dtype in DTYPES:
                    value = self._known_whole(number, origin, interrupts)
            if value is None or value.dtype != meta.dtype or tuple(value.shape) != meta.shape:
                return None
            if value.stride() == meta.stride:
                return value.clone(memory_format=torch.preserve_format)
            return torch.empty_like(meta.stand_in(), device="cpu").copy_(value)

    def _known_float(self, number: int, nbytes: int, origin: int, interrupts: int) -> torch.Tensor | None:
        """As KnownValues.of, for lines where it is of use: most floats that a program reads are results, such as losses."""
        if nbytes > MAX_FLOAT_BYTES or self._misses.get(origin, 0) >= MAX_MISSES:
            return None
        return self._decided(number, origin, interrupts)

    def _known_whole(self, number: int, origin: int, interrupts: int) -> torch.Tensor | None:
        """As KnownValues.of, seldom on a line where no value was known for long. A recorded call reads no other values."""
        line = -origin  # beside those of floats
        misses = self._misses.get(line, 0)
        if misses >= MAX_WHOLE_MISSES and misses % READS_PER_LOOK and self.tape is None:
            self._misses[line] = misses + 1
            return None
        return self._decided(number, line, interrupts)

    def _decided(self, number: int, line: int, interrupts: int) -> torch.Tensor | None:
        value = self.values.of(number, self.code[:], interrupts)
        misses = self._misses.get(line, 0)
        if value is not None:
            self._misses[line] = -(1 << 30)
        elif misses >= 0:
            self._misses[line] = misses + 1
        return value

    def ask_value(self, tensor: Any) -> None:
        """The value of a tensor is about to be fetched: it will be known until something is written."""
        meta = tensor._ref.meta
        if meta.numel * meta.dtype.itemsize <= MAX_READ_BYTES:
            with uninterrupted(), uncollected, self._lock:
                self.read.ask(tensor._ref.id, self.code, getattr(self.session, "interrupts", 0))

    def note_read(self, tensor: Any, value: torch.Tensor) -> None:
        """The value of ask_value's tensor has come."""
        if self.read:
            with uninterrupted(), uncollected, self._lock:
                self.read.note(tensor._ref.id, value.clone())

    def state_value(self, tensor: Any) -> torch.Tensor | None:
        """The value of a small tensor of state, on the CPU, which the caller does not change; None for a larger one.

        Waits if something may have written its memory since the value was fetched last.
        """
        meta, number = tensor._ref.meta, tensor._ref.id
        if meta.numel * meta.dtype.itemsize > MAX_STATE_BYTES:
            return None
        doubts = getattr(self.session, "interrupts", 0), getattr(self.session, "failures", 0)
        with uninterrupted(), uncollected, self._lock:
            value = self.state.of(number, self.code[:], doubts)
            if value is not None:
                return value
            self.state.ask(number, memory_id(tensor), self.new_id(), self.code[:])
        with torch.inference_mode(False), torch.no_grad():
            value = tensor.fetched(tensor).clone()
        with uninterrupted(), uncollected, self._lock:
            self.state.note(number, value)
        return value

    def follow_lent(self, numbers: list[int]) -> LentResult:
        """Follow results that a program has lent to its caller, by ids, as long as somebody holds the answer."""
        with uninterrupted(), uncollected, self._lock:
            return self.lent.add(numbers, self.code[:])

    def has_live(self, numbers: set[int]) -> bool:
        """True if a tensor of one of these ids is alive."""
        return not numbers.isdisjoint(self.live_tensors.all)

    def lent_written(self, lent: LentResult) -> bool:
        """True if an op has written to one of these results."""
        with uninterrupted(), uncollected, self._lock:
            return self.lent.written(lent, self.code[:])

    def note_wait(self) -> None:
        """Count a wait for a value. Workers are idle after it, so batches begin small again."""
        self.fetches += 1
        self.batch = MIN_BATCH_NUMBERS

    def flush_ops(self, asks: bool = False) -> None:
        """Hand over all recorded ops. Ids that have ended are freed with the next batch. asks: see Session.submit."""
        # In this order: the I/O thread empties the code before the hand-over
        if self.code or self._ready or self._lock.locked() or self.tape is not None or self.ended_tape is not None:
            self.flush(asks)

    def free_ended(self, made: int = 0) -> None:
        """Free ended ids before the next op, and not at the end of this batch. made: bytes of memory that the op makes."""
        # A recording keeps what its call has made; its program frees each value after its last use
        if self.tape is not None and 0 < self.live_tensors.made < MAX_RECORDED_BYTES:
            return
        with uninterrupted(), uncollected, self._lock:
            freed = self.live_tensors.forget(self.live_tensors.take_ended())
            self.live_tensors.made = made
            if self.tape is not None:
                freed = self.tape.defer(freed)
            for start in range(0, len(freed), MAX_FREED_PER_BATCH):
                ids = freed[start : start + MAX_FREED_PER_BATCH]
                self.code.extend((FREE, len(ids), *ids))
                if len(ids) == MAX_FREED_PER_BATCH:
                    self._hand_over()

    def flush_stale(self) -> None:
        """In the session's I/O thread: hand over ops that nothing else does, unless workers are busy. Never waits."""
        tape = self.tape
        if tape is not None and tape.most_held:
            return  # workers do not start before the call ends, or a fragment: whole batches are fewer
        ended = self.live_tensors.ended and not self.session.waiting
        # Without a wait for the lock: this thread serves the link, and another hand-over does the same
        if not (self.code or self._ready or ended):
            return
        # Not for long: the dispatcher may wait for later ops
        if getattr(self.session, "busy", False) and self._looks < MAX_BUSY_LOOKS:
            self._looks += 1
            return
        with uninterrupted(), uncollected:
            if not self._lock.acquire(blocking=False):
                return
            try:
                ready = getattr(self.session, "has_credit", None)
                if self.session.failure is None and (ready is None or ready()):
                    self._hand_over()
            finally:
                self._lock.release()

    def _seal(self) -> list[int]:
        """Move the buffer into `_ready`, in its final form. Returns the ids that have ended, to be freed behind it."""
        # References first: the code has every op that used them. The code at once, since `forget` takes long: ops that other
        # threads record meanwhile may need the memory that these ids hold, and come behind. Exactly the copied numbers go
        ended, code = self.live_tensors.take_ended(), self.code[:]
        del self.code[: len(code)]
        freed = self.live_tensors.forget(ended)
        if self.uploaded:
            self.uploaded.handed_over(code, self.templates)
        self.values.handed_over(code, freed)
        self.read.handed_over(code)
        self.lent.handed_over(code)
        self.state.handed_over(code)

        # A tape of a compiled call rewrites the batch: a fragment, or a recording that holds back frees
        tape, self.ended_tape = self.ended_tape or self.tape, None
        if tape is not None:
            code, freed = tape.take_batch(code, self._frames[:], freed)
        self._ready += code
        return freed

    def _hold(self) -> None:
        """Seal the buffer, and leave it to later ops."""
        freed = self._seal()
        for start in range(0, len(freed), MAX_FREED_PER_BATCH):
            ids = freed[start : start + MAX_FREED_PER_BATCH]
            self._ready += (FREE, len(ids), *ids)

    def _hand_over(self, asks: bool = False) -> None:
        freed = self._seal()
        code, self._ready = self._ready, []
        self._held_calls, self._looks, self._holds_large = 0, 0, False
        # After the code: every template and origin that it names is among these
        templates, origins, frames = self._templates[:], self._origins[:], self._frames[:]
        if freed:
            code += [FREE, len(freed[:MAX_FREED_PER_BATCH]), *freed[:MAX_FREED_PER_BATCH]]
        if not code:
            return

        # A batch frees a limited number of ids, since the dispatcher works on one batch at a time; the rest follow
        del self._templates[: len(templates)], self._origins[: len(origins)], self._frames[: len(frames)]
        self._inline_bytes = 0
        last = len(freed) <= MAX_FREED_PER_BATCH
        self.session.submit(templates, origins, code, frames, asks=asks and last)
        for start in range(MAX_FREED_PER_BATCH, len(freed), MAX_FREED_PER_BATCH):  # the rest, in batches of their own
            ids = freed[start : start + MAX_FREED_PER_BATCH]
            self.session.submit([], [], [FREE, len(ids), *ids], [])
