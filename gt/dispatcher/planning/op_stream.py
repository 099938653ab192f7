"""One session's op stream: batches as they come, executed in order, as far as it can be planned.

How an op is planned may depend on ops that follow (fused_projections.py). A batch may end by chance, because its client had
nothing to do, and that must change no plan. So such an op and those behind it wait for the next batch, or for a question of the
client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.fairness.run_queue import OPS_PER_UNIT, SHARED_DIVISOR, UNIT_SECONDS
from gt.dispatcher.planning.planner import Planner
from gt.dispatcher.planning.redistributor import Redistributor
from gt.dispatcher.programs.fragments.fragments import Fragments
from gt.dispatcher.programs.programs import Programs
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.emitter import TEMPORARY
from gt.dispatcher.state.failures import UNDROPPED
from gt.dispatcher.state.fetches import Fetches
from gt.dispatcher.state.op_queue import Batch, NeedsLookahead, NeedsPauses, QueuedBatch
from gt.dispatcher.state.outbox import Outbox
from gt.dispatcher.state.records import Origin
from gt.dispatcher.state.tensors import Tensor
from gt.dispatcher.state.validate import CREDIT, Definitions
from gt.errors import ProtocolError
from gt.ir.instr import DISCARD, DROP, END_FRAGMENT, FIRST, FRAGMENT, FREE, GRAD, LAUNCH, PARAM, RECORD, SHARDED, STATE
from gt.wire.messages import Ack, FinishCapture, Message, Ops, Skip

MAX_WAITING_BATCHES = CREDIT // 2  # batches: a client without credit could not send the next
CLOCK_INTERVAL = 128  # numbers of the stream, about 20 ops, between looks at the clock
MAX_FREED_AT_ONCE = 2048  # tensors that are freed in one go
PlanOp = Callable[[OpSchema, Origin, list[Tensor], tuple, list[int]], None]  # an op, its operands, scalars and results
NEVER = 1 << 62  # number of an op that no session reaches
# Ops and estimated seconds of a unit, where another session uses one of the workers and where none does
BESIDE, ALONE = (OPS_PER_UNIT, UNIT_SECONDS / SHARED_DIVISOR), (NEVER, UNIT_SECONDS)


class OpStream:
    """The stream of a session."""

    def __init__(
        self,
        context: SessionContext,
        outbox: Outbox,
        planner: Planner,
        redistributor: Redistributor,
        programs: Programs,
        fetches: Fetches,
    ) -> None:
        self._context, self._outbox, self._planner, self._redistributor = context, outbox, planner, redistributor
        self._programs, self._fetches = programs, fetches
        self._offload, self._sharded, self._host_copies = planner.offload, planner.sharded, planner.offload.host_copies
        self.fragments = Fragments(context, redistributor, programs)
        self._queue, self._emitter, self._pace = context.queue, context.emitter, context.pace
        self.coming, self.pending = context.queue.coming, context.queue.pending
        self.definitions = Definitions(context)
        self._work: Iterator[None] | None = None
        self._asked = False  # a fetch follows within the same event
        self.interrupted = -1  # last batch of an interrupt: workers begin nothing more up to it
        self._through = -1  # last batch that all workers have executed
        self._pausing: set[int] = set()  # workers that have not answered yet how far they have come
        self._questions: Counter[int] = Counter()  # by worker: unanswered questions, also those of interrupts that are over
        self._begun = -1  # largest op number that an answering worker has begun
        self.stale: list[tuple[Sequence[int], int]] = []  # (workers, id) of copies that an interrupt may have prevented
        self.ops = 0  # number of ops planned
        self._next_look = 0  # op count at which all tensors are looked at again
        self.in_thread = False  # work of this session goes on in a thread
        self._late = -1  # the last batch of an interrupt that came meanwhile
        self.told_stuck = False  # the client was told that workers are stuck, since batches were last acknowledged

    @property
    def long(self) -> bool:
        """True if the next row takes long: an op that needs pauses, the end of a recording held back, or of a fragment's."""
        batch = self.coming[0] if self.coming else None
        return batch is not None and batch.at < len(batch.code) and (batch.aside or self._takes_long(batch.code, batch.at))

    def _takes_long(self, code: list, at: int) -> bool:
        number = code[at]
        if number in (RECORD, DISCARD) and self._programs.holds:
            return True
        if number == RECORD and at + 3 < len(code) and type(code[at + 3]) is int:
            rows = self._context.table.rows
            ids = code[at + 4 : at + 4 + max(code[at + 3], 0)]
            return self._context.needs_pauses(0, [rows[i] for i in ids if type(i) is int and i in rows])
        if number == LAUNCH:
            return self._programs.needs_pauses(code[at + 1] if at + 1 < len(code) else None)
        return number == END_FRAGMENT and self.fragments.long

    @property
    def busy(self) -> bool:
        """True if the turn was over before all that came was planned: `go_on` goes on."""
        return self._work is not None

    def accept(self, message: Ops, frames: tuple) -> None:
        """Carry out a batch: definitions, then the stream. After an error the session has to end: half is not sent."""
        self.definitions.admit(message)
        self._work = self._plan_batch(message, frames)
        self.go_on()

    @contextmanager
    def asked(self) -> Iterator[None]:
        """A batch and a fetch follow: the batch's last instructions are sent with those of the fetch, as one Run."""
        self._asked = not (self.busy or self.in_thread)
        try:
            yield
        finally:
            self._asked = False
            if self._outbox.joined:  # the fetch was refused, or waits
                self._outbox.flush(self._emitter.base)

    def awaits(self, message: Message) -> bool:
        """True for a message behind an interrupt, until everything before it is done. Messages are asked about in order.

        Also for ops while workers write tensors into files, which ops may change.
        """
        if self._fetches.holding and type(message) in (Ops, FinishCapture):
            return True
        return 0 <= self.interrupted < self.definitions.next_batch

    def interrupt(self, upto: int) -> None:
        """Have workers begin nothing more of batches up to this one. A recording is left alone.

        They pause first and say how far they are, so that all skip the same ops: none waits in a collective for another.
        """
        if self.in_thread:  # what it writes is not sent yet: the interrupt is for its end
            self._late = max(self._late, upto)
            return
        if self._context.tape is not None or self._outbox.deferred is not None:
            return
        if not self.pending or self.pending[0].seq > upto:
            return
        # All workers have to skip the same ops. So each stops and reports the last op that it has begun. All of them stop at
        # the largest answer (`_answered`). Workers that are behind go on to there, since a collective that one has begun needs
        # all of its members.
        begins, self.interrupted = self.interrupted < 0, max(self.interrupted, upto)
        self._host_copies.forget()  # ops that make them may be skipped
        if begins:
            self._begun = self._programs.sealed - 1
            self._pausing = {worker.index for worker in self._alive()}
            self._questions.update(self._pausing)
            self._tell(Skip(self._context.number, True))
        if not self.busy:
            self.finish()

    def interrupt_late(self) -> None:
        """Deal with an interrupt that came while a thread was at work."""
        upto, self._late = self._late, -1
        if upto >= 0:
            self.interrupt(upto)

    def paused(self, worker: int, seq: int) -> None:
        """A worker begins nothing after this op. The last to say so lets all go on to the same one."""
        # An answer to an interrupt that is over by now says nothing about this one: only the last answer counts.
        self._questions[worker] -= 1
        if worker not in self._pausing or self._questions[worker] > 0:
            return
        self._begun = max(self._begun, seq)
        self._answered(worker)

    def lose(self, worker: int) -> None:
        """The others do not wait for a worker."""
        self._questions.pop(worker, None)
        self._answered(worker)

    def _answered(self, worker: int) -> None:
        if worker in self._pausing:
            self._pausing.discard(worker)
            if not self._pausing:
                self._tell(Skip(self._context.number, True, self._begun + 1))

    def regain(self, worker: Worker) -> None:
        """A new process has a lost worker's place: it skips what the others skip."""
        if self._pausing:
            self._pausing.add(worker.index)
            self._questions[worker.index] += 1
            self._context.out(worker.peer, Skip(self._context.number, True), ())
        elif self.interrupted >= 0:
            self._context.out(worker.peer, Skip(self._context.number, True, self._begun + 1), ())

    def end_interrupt(self) -> None:
        """All that came before it is through."""
        # Ops that no worker has begun did not happen. Recipes forget what such ops added to them.
        self.interrupted = -1
        failures = self._context.failures
        since, failures.first_dropped = failures.first_dropped, UNDROPPED
        if since < UNDROPPED:
            self._planner.take_back(since)
        if self._pausing:  # the session ends: no common set of ops to skip is known
            self._pausing = set()
            self._tell(Skip(self._context.number, True, NEVER))
        self._tell(Skip(self._context.number, False))

    def _make_views(self) -> None:
        """Make views that were dropped: the memory that they name is there, and may change."""
        failures = self._context.failures
        storages, failures.unviewed = failures.unviewed, set()
        if storages:
            self._outbox.begin_run()
            for storage in storages:
                self._redistributor.make_views(storage)
            self._outbox.flush(self._emitter.base)

    def _alive(self) -> list[Worker]:
        """All workers, since a batch that is still planned may be the first on one of them."""
        return [worker for worker in self._context.cluster.workers if not worker.lost]

    def _tell(self, message: Skip) -> None:
        for worker in self._alive():
            self._context.out(worker.peer, message, ())

    def _free_stale(self) -> None:
        for workers, copy in self.stale:
            self._emitter.free(workers, [copy])
        self.stale = []

    def finish(self) -> None:
        """Plan ops that wait for later ones: the client asks a question, and the answer depends on all that it has sent."""
        if self.coming:
            self._work = self._advance(True)
            self.go_on()

    def go_on(self) -> None:
        """A slice of the work under way."""
        work, self._work = self._work, None
        if work is not None and next(work, self) is not self:
            self._work = work

    def _plan_batch(self, message: Ops, frames: tuple) -> Iterator[None]:
        # 1. A number that is defined again: the client has dropped its table of templates. All that was kept by number goes.
        pace, definitions = self._pace, self.definitions
        numbers = [row[0] for row in message.templates if type(row) is list and row]
        if any(type(number) is int and number in self._context.templates for number in numbers):
            if self.coming:
                yield from self._advance(True)  # the client's table has started again: waiting batches are by the old one
            self.fragments.clear()

        # 2. Definitions, then the stream; in between others have their turns.
        for define, rows in ((definitions.define, message.templates), (definitions.define_origin, message.origins)):
            for row in rows:
                if pace.spent:
                    yield
                define(row)
        self.coming.append(QueuedBatch(message.seq, self.fragments.split(message.code), frames))
        yield from self._advance(self._asked or len(self.coming) > MAX_WAITING_BATCHES)

    def acknowledge(self) -> None:
        """Acknowledge the batches that all workers have executed, forget their journal, and answer requests that waited."""
        # Workers execute in order, so a batch is through if its last Run is through on each worker. Only then is it known which
        # of its ops have failed.
        last, pending = None, self.pending
        while pending and self._outbox.reached(pending[0].runs):
            last = pending.popleft()
        if last is not None:
            self.told_stuck = False
            self._context.failures.forget(last.end)
            self._programs.forget(last.end)
            if self._context.failures.troubled and self.ops >= self._next_look and self._context.tape is None:
                self._context.failures.recover()
                self._next_look = self.ops + len(self._context.table.rows)  # so that looks at all tensors cost little an op
            self._through = last.seq
        # Also what no batch waits for, as the Run of a question: a worker that has not come to it would take the place from
        # which the next interrupt skips for that of this one, and execute what others have skipped.
        if 0 <= self.interrupted <= self._through and self._outbox.reached(self._outbox.sent):
            self.end_interrupt()
            self._make_views()
        acked = self._fetches.answer_ready(last.seq if last is not None else -1)
        if last is not None and not acked:
            self._context.send(Ack(last.seq))

    def _advance(self, final: bool) -> Iterator[None]:
        """Plan batches in order; written instructions are sent between two slices."""
        emitter, queue, pace = self._emitter, self._queue, self._pace
        while self.coming:
            batch, queue.final = self.coming[0], final or self.interrupted >= 0
            emitter.begin_run()
            if self.stale:
                self._free_stale()
            emitter.seconds = 0.0
            queue.frames = batch.frames
            # `ended` is false where the turn is over (`spent`) or an op waits for what follows: the batch stays in `coming`.
            try:
                ended = self._stream(batch)
            finally:
                emitter.begin_op()
                queue.frames = ()
            last = self._asked and ended and len(self.coming) == 1
            runs = self._outbox.join() if last and self._outbox.joins else self._outbox.flush(emitter.base)
            if ended:
                self.coming.popleft()
                self.pending.append(Batch(batch.seq, self._context.cluster.seq, runs))
            elif not batch.spent:
                break
            if batch.spent or (self.coming and pace.spent):
                batch.spent = False
                yield
        self.acknowledge()

    # An op in the code: template, origin, operands, scalars, results. A number below FIRST is a control code.
    def _stream(self, batch: QueuedBatch) -> bool:
        """Plan a batch from where it was left; True if to its end."""
        context, queue, code = self._context, self._queue, batch.code
        templates, origins, rows = context.templates, context.origins, context.table.rows
        emitter, op = self._emitter, self._op
        grain, unit = BESIDE if context.cluster.queue.shared(context.number) else ALONE
        at, end, left = batch.at, len(code), grain
        queue.due = at + CLOCK_INTERVAL
        while at < end:
            start = at
            if at >= queue.due:
                if self._pace.spent:
                    batch.at, batch.spent = at, True
                    return False
                queue.due = at + CLOCK_INTERVAL
            number = code[at]
            if number < FIRST:
                if self._pace.background.beside and not self.in_thread and self._takes_long(code, at):
                    batch.at, batch.spent = at, True  # begins a slice, which is done aside
                    return False
                begun, at = context.cluster.seq, self._special(number, code, at)
                op, queue.due = self._op, 0
                emitter.begin_op()
                left -= context.cluster.seq - begun  # ops that a program carries out
                if at < end and (emitter.seconds > unit or left <= 0):
                    left = grain
                    self._outbox.cut()
                continue
            # The client's numbers are not trusted: a look-up that fails, or an id that is taken, ends the session. Checks are
            # written out here, since this loop runs for every op.
            try:
                known = templates[number]
                first = at + 2
                second = first + known.tensors
                third = second + known.values
                emitter.origin = origin = origins[code[at + 1]]
                ins = [rows[i] for i in code[first:second]]
                at = queue.position = third + known.results
            except (IndexError, KeyError, TypeError) as error:
                raise ProtocolError(f"Ops.code at {at} names an id that this session does not have: {error!r}") from error
            if at > end:
                raise ProtocolError(f"Ops.code ends within an op, at {end}")
            if [t.spec for t in ins] != known.specs:
                _check_operands(known, ins)
            for i in code[third:at]:
                if type(i) is not int or not 0 < i < TEMPORARY or i in rows:
                    raise ProtocolError(f"Ops.code has {i!r:.40} at {third} as the id of a new tensor")
            row = known, origin, ins, tuple(code[second:third]), code[third:at]
            try:
                op(*row)
            except (NeedsLookahead, NeedsPauses) as why:
                if not self._resolve(why, batch, start, op, row):
                    return False
            emitter.end_op()
            self.ops += 1
            left -= 1
            if emitter.seconds > unit or left <= 0:  # a session's turn is not to take long
                left = grain
                self._outbox.cut()
        return True

    def _resolve(self, why: Exception, batch: QueuedBatch, start: int, op: PlanOp, row: tuple) -> bool:
        """Plan an op that needs pauses, if a thread does it; False if it has to wait."""
        if isinstance(why, NeedsPauses) and self.in_thread:
            self._plan_with_pauses(op, *row)
            return True
        batch.at = start  # nothing was done for the op: it is planned again with the next batch, or in a thread
        batch.spent = batch.aside = isinstance(why, NeedsPauses)
        return False

    def _plan_with_pauses(self, op: PlanOp, known: OpSchema, origin: Origin, ins: list, values: tuple, outs: list) -> None:
        """Plan an op that takes long: other sessions have turns between the operands that are placed."""
        context = self._context
        lives = [(worker, worker.lives) for worker in context.cluster.workers if not worker.lost]
        with self._pauses():
            op(known, origin, ins, values, outs)
        self.coming[0].aside = False
        # A worker that was lost in a pause has nothing of what was placed before it, and its successor neither.
        rows = [*ins, *[context.table.rows[i] for i in outs if i in context.table.rows]]
        for worker in [worker for worker, life in lives if worker.lost or worker.lives != life]:
            for tensor in rows:
                if tensor.layout is not None and worker.index in tensor.layout.mesh.workers:
                    tensor.storage.failed = tensor.storage.failed or context.failures.cause_of_loss(worker)

    @contextmanager
    def _pauses(self) -> Iterator[None]:
        """Others may have turns within, if a thread does it."""
        self._context.pause = self._pause if self.in_thread else None
        try:
            yield
        finally:
            self._context.pause = None

    def _pause(self) -> None:
        """Send the instructions written so far, and let other sessions have their turns."""
        self._outbox.cut()
        with self._context.apart():
            pass
        self._emitter.begin_run()

    @property
    def _op(self) -> PlanOp:
        """The function that plans the next op."""
        return self._note_op if self.fragments.recording else self._planner.op

    def _note_op(self, known: OpSchema, origin: Origin, ins: list[Tensor], values: tuple, outs: list[int]) -> None:
        """Plan one op of a fragment that is recorded."""
        self._planner.op(known, origin, ins, values, outs)
        self.fragments.note(self._emitter.seq)

    def _special(self, number: int, code: list, at: int) -> int:
        operand = code[at + 1] if at + 1 < len(code) else None
        if number == FREE:
            if type(operand) is not int or not 0 <= operand <= len(code) - at - 2:
                raise ProtocolError(f"Ops.code frees {operand!r:.40} tensors at {at} of {len(code)}")
            ids = code[at + 2 : at + 2 + min(operand, MAX_FREED_AT_ONCE)]
            viewed = self._offload.viewed(ids)
            self._redistributor.free(ids)
            self._offload.evict(viewed)
            if len(ids) < operand:  # the rest is an instruction of its own
                at += len(ids)
                code[at : at + 2] = FREE, operand - len(ids)
                return at
            return at + 2 + operand
        if number == PARAM:
            self._context.row(operand).storage.declare_parameter()
            return at + 2
        if number == SHARDED:
            self._sharded.declare(self._context.row(operand))
            return at + 2
        if number == STATE:
            self._offload.declare(self._context.row(operand))
            return at + 2
        if number == GRAD and at + 3 <= len(code):
            self._sharded.accumulated(self._context.row(operand), self._context.row(code[at + 2]))
            return at + 3
        return self._program(number, code, at)

    def _program(self, number: int, code: list, at: int) -> int:
        """Carry out one control code of programs."""
        # Numbers behind a code are a client's: how many there are is checked here, what they name where it is used.
        programs = self._programs
        if number == FRAGMENT:
            return self.fragments.enter(code, at)
        if number == END_FRAGMENT:
            return self.fragments.leave(code, at)
        if number == LAUNCH and at + 4 <= len(code):
            with self._pauses():
                programs.launch(*code[at + 1 : at + 4])
            return at + 4
        if number == RECORD and at + 4 <= len(code) and type(code[at + 3]) is int and 0 <= code[at + 3] <= len(code) - at - 4:
            # The interrupt would wait for deferred instructions, whose end waits for the interrupt
            how = 0 if self.interrupted >= 0 and code[at + 2] in (1, 2, 3) else code[at + 2]
            with self._pauses():
                programs.record(code[at + 1], how, code[at + 4 : at + 4 + code[at + 3]])
            return at + 4 + code[at + 3]
        if number == DISCARD:
            programs.discard()
            return at + 1
        if number == DROP and at + 2 <= len(code):
            programs.drop(code[at + 1])
            return at + 2
        raise ProtocolError(f"Ops.code has {number!r:.40} at {at}, want a template or a control code")


def _check_operands(known: OpSchema, ins: Sequence[Tensor]) -> None:
    """ProtocolError unless operands have the shapes and dtypes that the template says; strides may differ."""
    for place, (tensor, want) in enumerate(zip(ins, known.specs, strict=True)):
        if tensor.spec.shape != want.shape or tensor.spec.dtype != want.dtype:
            operand = f"operand {place} of {known.template.op}"
            raise ProtocolError(f"Ops.code: {operand} is {tensor.spec.text():.80}, its template says {want.text():.80}")
