"""One session's op stream: batches as they come, carried out in order, as far as it can be planned.

How an op is planned may depend on ops that follow (fused_projections.py). Where a batch ends by chance, because its client had
nothing to do, must not change that: such an op and what is behind it wait for the next batch, or for a question of the client.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gt.dispatcher.fairness.run_queue import CLOSER, GRAIN, UNIT
from gt.dispatcher.planning.fused_projections import Unseen
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.state import validate
from gt.dispatcher.state.emitter import TEMPORARY
from gt.dispatcher.state.tensors import Tensor
from gt.errors import ProtocolError
from gt.ir.instr import DISCARD, DROP, FIRST, FREE, LAUNCH, PARAM, RECORD
from gt.wire.messages import Ops

if TYPE_CHECKING:
    from gt.dispatcher.session import ClientSession

MOST_WAITING = validate.CREDIT // 2  # batches: a client without credit could not send the next
LOOK = 128  # numbers of the stream, about 20 ops, between looks at the clock
MOST_FREED = 2048  # tensors that are freed in one go


@dataclass(slots=True)
class Batch:
    """A batch that workers are carrying out: acknowledged when each has come to its `runs`."""

    seq: int
    end: int
    runs: dict[int, int]


@dataclass(slots=True)
class Coming:
    """A batch that is not planned to its end."""

    seq: int
    code: list
    frames: tuple
    at: int = 0
    spent: bool = False  # the turn was over before its end


class Batches:
    """The stream of a session. final: nothing follows that a decision could wait for."""

    def __init__(self, session: ClientSession) -> None:
        self.s = session
        self.coming: deque[Coming] = deque()
        self.pending: deque[Batch] = deque()
        self.frames: tuple = ()  # of the batch that is being planned
        self._at = 0  # behind the op that is being planned
        self._final = False
        self._work: Iterator[None] | None = None
        self.due = 0  # where in the stream the clock is looked at next; 0: after this op, which takes long

    @property
    def long(self) -> bool:
        """True if the next message ends a recording that was held back, which takes long."""
        batch = self.coming[0] if self.coming else None
        ends = batch is not None and batch.at < len(batch.code) and batch.code[batch.at] in (RECORD, DISCARD)
        return ends and self.s.programs.deferred.holds

    @property
    def busy(self) -> bool:
        """True if the turn was over before all that came was planned: `go_on` goes on."""
        return self._work is not None

    def take(self, message: Ops, frames: tuple) -> None:
        """Carry out a batch: definitions, then the stream. After an error the session has to end: half is not sent."""
        validate.admit(self.s, message)
        self._work = self._taken(message, frames)
        self.go_on()

    def finish(self) -> None:
        """Plan what waits for more: the client asks something, and what it asks is of all that it has sent."""
        if self.coming:
            self._work = self._advance(True)
            self.go_on()

    def go_on(self) -> None:
        """A slice of the work under way."""
        work, self._work = self._work, None
        if work is not None and next(work, self) is not self:
            self._work = work

    def _taken(self, message: Ops, frames: tuple) -> Iterator[None]:
        s, pace = self.s, self.s.pace
        numbers = [row[0] for row in message.templates if type(row) is list and row] if self.coming else []
        if any(type(number) is int and number in s.templates for number in numbers):
            yield from self._advance(True)  # the client's table has started again: what waits is by the old one
        for define, rows in ((validate.define, message.templates), (validate.origin, message.origins)):
            for row in rows:
                if pace.spent:
                    yield
                define(s, row)
        self.coming.append(Coming(message.seq, message.code, frames))
        yield from self._advance(len(self.coming) > MOST_WAITING)

    def ahead(self) -> Iterator[tuple[list, int]]:
        """Code behind the op that is being planned, and where it begins; Unseen at its end if more may come."""
        for n, batch in enumerate(self.coming):
            yield batch.code, batch.at if n else self._at
        if not self._final:
            raise Unseen

    def _advance(self, final: bool) -> Iterator[None]:
        """Plan batches in order; between two slices what is written is sent."""
        s, pace = self.s, self.s.pace
        while self.coming:
            batch, self._final = self.coming[0], final
            s.emitter.base, s.emitter.seconds = s.cluster.seq, 0.0
            self.frames = batch.frames
            try:
                ended = self._stream(batch)
            finally:
                s.emitter.seq = s.cluster.seq
                self.frames = ()
            runs = s.flush(s.emitter.base)
            if ended:
                self.coming.popleft()
                self.pending.append(Batch(batch.seq, s.cluster.seq, runs))
            elif not batch.spent:
                break
            if batch.spent or (self.coming and pace.spent):
                batch.spent = False
                yield
        s.settle_batches()

    def _stream(self, batch: Coming) -> bool:
        """Plan a batch from where it stands; whether to its end."""
        s, code = self.s, batch.code
        templates, origins, rows = s.templates, s.origins, s.table.rows
        emitter, cluster, op = s.emitter, s.cluster, s.planner.op
        at, end = batch.at, len(code)
        shared = s.cluster.queue.shared(s.number)
        grain = left = GRAIN if shared else end
        unit = UNIT / CLOSER if shared else UNIT
        self.due = at + LOOK
        while at < end:
            start = at
            if at >= self.due:
                if s.pace.spent:
                    batch.at, batch.spent = at, True
                    return False
                self.due = at + LOOK
            number, emitter.seq = code[at], cluster.seq  # what is written gets a number that no session has used
            if number < FIRST:
                if number in (RECORD, DISCARD) and s.programs.deferred.holds and s.pace.background.beside and not s.aside:
                    batch.at, batch.spent = at, True  # begins a slice, which is done aside
                    return False
                at = self._special(number, code, at)
                self.due = 0
                continue
            try:
                known = templates[number]
                first = at + 2
                second = first + known.tensors
                third = second + known.values
                s.origin = origin = origins[code[at + 1]]
                ins = [rows[i] for i in code[first:second]]
                at = self._at = third + known.results
            except (IndexError, KeyError, TypeError) as error:
                raise ProtocolError(f"Ops.code at {at} names what this session does not have: {error!r}") from error
            if at > end:
                raise ProtocolError(f"Ops.code ends within an op, at {end}")
            if [t.spec for t in ins] != known.specs:
                _alike(known, ins)
            for i in code[third:at]:
                if type(i) is not int or not 0 < i < TEMPORARY or i in rows:
                    raise ProtocolError(f"Ops.code has {i!r:.40} at {third} as the id of a new tensor")
            try:
                op(known, origin, ins, tuple(code[second:third]), code[third:at])
            except Unseen:
                batch.at = start
                return False
            cluster.seq += 1
            s.ops += 1
            left -= 1
            if emitter.seconds > unit or not left:  # a session's turn is not to take long
                left = grain
                s.cut()
        return True

    def _special(self, number: int, code: list, at: int) -> int:
        operand = code[at + 1] if at + 1 < len(code) else None
        if number == FREE:
            if type(operand) is not int or not 0 <= operand <= len(code) - at - 2:
                raise ProtocolError(f"Ops.code frees {operand!r:.40} tensors at {at} of {len(code)}")
            ids = code[at + 2 : at + 2 + min(operand, MOST_FREED)]
            self.s.mover.release(ids)
            if len(ids) < operand:  # the rest is an instruction of its own
                at += len(ids)
                code[at : at + 2] = FREE, operand - len(ids)
                return at
            return at + 2 + operand
        if number == PARAM:
            self.s.row(operand).storage.param = True
            return at + 2
        return self._program(number, code, at)

    def _program(self, number: int, code: list, at: int) -> int:
        """What has to do with programs."""
        programs = self.s.programs
        if number == LAUNCH and at + 4 <= len(code):
            programs.launch(*code[at + 1 : at + 4])
            return at + 4
        if number == RECORD and at + 4 <= len(code) and type(code[at + 3]) is int and 0 <= code[at + 3] <= len(code) - at - 4:
            programs.record(code[at + 1], code[at + 2], code[at + 4 : at + 4 + code[at + 3]])
            return at + 4 + code[at + 3]
        if number == DISCARD:
            programs.discard()
            return at + 1
        if number == DROP and at + 2 <= len(code):
            programs.drop(code[at + 1])
            return at + 2
        raise ProtocolError(f"Ops.code has {number!r:.40} at {at}, which is no template and no control code")


def _alike(known: OpSchema, ins: Sequence[Tensor]) -> None:
    """ProtocolError unless operands have the shapes and dtypes that the template says; strides may differ."""
    for place, (tensor, want) in enumerate(zip(ins, known.specs, strict=True)):
        if tensor.spec.shape != want.shape or tensor.spec.dtype != want.dtype:
            what = f"operand {place} of {known.template.op}"
            raise ProtocolError(f"Ops.code: {what} is {tensor.spec.text():.80}, its template says {want.text():.80}")
