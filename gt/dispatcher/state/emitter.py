"""Writing to workers' streams: ids get the session's base, definitions their numbers, plan lines their place in the log."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from gt.dispatcher.cluster.workers import MAX_NUMBERS_PER_RUN, Cluster, Worker
from gt.dispatcher.sharding.redistribution_steps import Order, RedistributionStep
from gt.dispatcher.state.log_lines import Scribe
from gt.dispatcher.state.records import NO_ORIGIN, Bound
from gt.ir.instr import BASE_BITS, END, FORGET, FREE, PROGRAMS, Define
from gt.ir.layout import Layout, Mesh
from gt.ir.text import PlanLine

TEMPORARY = 1 << 39  # ids of tensors that only the dispatcher names start here, below the session's base
LONG_SECONDS = 1e-4  # seconds that an instruction is estimated to take, to be counted
# A program of many short instructions takes long too: each so many seconds, at least
MANY_INSTRUCTIONS, INSTRUCTION_SECONDS = 256, 2e-6
COMPILE_SECONDS = 0.1  # estimated seconds until a worker has compiled a program


# Plans, programs and `_shared` hold definitions; a worker knows them by number only. When the last holder is gone, the callback
# of this reference puts the number into `_ended`, and `forget` has workers drop it too. No plan has to be closed by hand.
class _Life(weakref.ref):
    """Tells, on its callback, which definition has ended with the plan that held it."""

    __slots__ = ("number",)
    number: int


class Emitter:
    """One session's pen. `seq` is the number of the op being planned, `base` the first of the Run that is being written.

    Numbers count the ops of all sessions, and only the methods here assign them. A number left over from another session's op
    would blame the wrong program for a failure.
    """

    def __init__(self, cluster: Cluster, session: int, page: list[str] | None = None) -> None:
        self.cluster = cluster
        self.origin = NO_ORIGIN  # origin of the op being planned
        self.scribe: Scribe | None = None
        self.number, self.offset = session, session << BASE_BITS
        self.write_log(page)
        self.seq = self.base = 0
        self.next_temporary = TEMPORARY
        self.used: set[int] = set()  # workers this session has sent anything
        self.joined = False  # True once any value has crossed between workers
        self.sent = 0
        self.costs: dict[int, float] = {}  # seconds that a definition takes, of long ones
        self.seconds = 0.0  # estimated seconds of the instructions written since the last send, on one worker
        self.kept: dict[int, Define] | None = None  # while a program is recorded, what it names
        self._shared: dict[str, Define] = {}
        self.defined: dict[int, _Life] = {}
        self._ended: list[_Life] = []

    def write_log(self, page: list[str] | None) -> None:
        """Write the lines of the instruction log to a page from here on, or None: no longer."""
        self.scribe = Scribe(self, self.number, page) if page is not None else None

    # ---- numbers of ops

    def begin_run(self) -> None:
        """Begin a Run: its ops get numbers behind all that any session has planned."""
        self.base = self.seq = self.cluster.seq

    def resume_run(self, base: int) -> None:
        """Write more for ops that are planned already, the first of them `base`."""
        self.base = self.seq = base

    def begin_op(self) -> None:
        """Give the next op a number that no session has used."""
        self.seq = self.cluster.seq

    def end_op(self) -> None:
        """The op in hand keeps its number for good; the next op gets another."""
        self.seq = self.cluster.seq = self.cluster.seq + 1

    @contextmanager
    def op(self, count: int = 1) -> Iterator[None]:
        """Write one op, or a program of `count`, under its own numbers. What is freed afterwards still belongs to it."""
        self.begin_op()
        yield
        self.cluster.seq += count

    # ---- definitions and instructions

    def temporary(self) -> int:
        self.next_temporary += 1
        return self.next_temporary

    def define(self, kind: str, payload: dict) -> Define:
        define = Define(self.cluster.number(), kind, payload)
        life = self.defined[define.number] = _Life(define, self._ended.append)
        life.number = define.number
        return define

    def common(self, kind: str) -> Define:
        """The one definition of a kind that has no payload."""
        if kind not in self._shared:
            self._shared[kind] = self.define(kind, {})
        return self._shared[kind]

    def bind(self, orders: Iterable[Order]) -> list[Bound]:
        """Definitions for orders; workers with equal orders share one."""
        # Payloads are dicts, which cannot be keys. There are few different ones among the orders of a step.
        bound: list[Bound] = []
        seen: list[tuple[str, dict, Define]] = []
        for order in orders:
            define = next((d for kind, payload, d in seen if kind == order.kind and payload == order.payload), None)
            if define is None:
                define = self.define(order.kind, order.payload)
                seen.append((order.kind, order.payload, define))
            bound.append((self.cluster.workers[order.worker], define))
        return bound

    def write(self, worker: Worker, define: Define, operands: Sequence) -> None:
        """Append one instruction; ids among the operands must have been mapped."""
        self.write_all([(worker, define)], operands)

    def write_all(self, bound: Sequence[Bound], operands: Sequence) -> None:
        """Append one instruction for each of several workers, with the same operands."""
        # An instruction is [number of the definition, seq relative to the Run's base, operands ...].
        relative_seq, costs, kept = self.seq - self.base, self.costs, self.kept
        for worker, define in bound:
            number = define.number
            # A Run that would not fit a message goes on in another one.
            if len(worker.code) > MAX_NUMBERS_PER_RUN or worker.weight > MAX_NUMBERS_PER_RUN:
                worker.cut()
            if number not in worker.known:
                worker.define(define)
                self.used.add(worker.index)
                # Its first launch compiles it.
                if define.kind in PROGRAMS and define.payload["backend"] != "eager":
                    self._count(worker, COMPILE_SECONDS)
            worker.code += (number, relative_seq, *operands)
            if number in costs:
                self._count(worker, costs[number])
            if kept is not None:
                kept[number] = define
        self.sent += len(bound)

    def _count(self, worker: Worker, seconds: float) -> None:
        worker.seconds += seconds
        self.seconds = max(self.seconds, worker.seconds)

    def estimate(self, define: Define, seconds: float) -> None:
        """Note the estimated seconds of a definition, which count towards a worker's time from now on."""
        if seconds > max(LONG_SECONDS, self.costs.get(define.number, 0.0)):
            self.costs[define.number] = seconds

    def duration(self, numbers: Sequence[int]) -> float:
        """Estimated seconds of a program, from the definitions of its instructions. Few short ones count as none."""
        known = sum(self.costs.get(number, 0.0) for number in numbers)
        return known + INSTRUCTION_SECONDS * len(numbers) * (len(numbers) >= MANY_INSTRUCTIONS)

    def announce(self, worker: Worker, define: Define) -> None:
        """Send a worker a definition that a program will name."""
        worker.announce(define)
        self.used.add(worker.index)

    def ids(self, ids: Iterable[int]) -> list[int]:
        offset = self.offset
        return [offset + i for i in ids]

    def step(self, step: RedistributionStep, bound: list[Bound], src: int, dst: int) -> None:
        """One step of a redistribution from tensor src to tensor dst."""
        offset = self.offset
        operands = {"send": (offset + src,), "recv": (offset + dst,)}
        both = (offset + src, offset + dst)
        for worker, define in bound:
            if not worker.lost:
                self.write(worker, define, operands.get(define.kind, both))
        self.joined = self.joined or len(bound) > 1

    def free(self, workers: Iterable[int], ids: Sequence[int]) -> None:
        for index in workers:
            worker = self.cluster.workers[index]
            for first in () if worker.lost else range(0, len(ids), MAX_NUMBERS_PER_RUN):
                freed = self.ids(ids[first : first + MAX_NUMBERS_PER_RUN])
                worker.code += (FREE, self.seq - self.base, len(freed), *freed)
                if len(worker.code) > MAX_NUMBERS_PER_RUN:
                    worker.cut()

    def end(self) -> None:
        """Have workers drop all that is this session's, whatever else was written and not sent."""
        self.begin_run()
        # END frees the session's whole range of ids, so also temporaries that no table names.
        for worker in self.cluster.workers:
            if worker.index in self.used and not worker.lost:
                worker.code += (END, 0, 2, self.offset, self.offset + (1 << BASE_BITS))
        self.forget(everything=True)

    def forget(self, everything: bool = False) -> None:
        """Have workers drop the definitions that no plan names any more, or all of this session's. What this writes has to be
        sent: it is not written again."""
        # Numbers are never used again, so it is safe to forget one that instructions under way still name: a worker executes
        # its stream in order, and FORGET is behind them.
        ended = {life.number for life in self._ended}
        self._ended.clear()
        gone = set(self.defined) if everything else ended

        for number in gone:
            self.defined.pop(number, None)
            self.costs.pop(number, None)
        for worker in self.cluster.workers if gone else ():
            numbers = worker.known & gone
            if numbers and not worker.lost:
                worker.known -= numbers
                worker.code += (FORGET, self.seq - self.base, len(numbers), *numbers)

    def line(self, tensor: int, spec: str, layout: Layout, op: str, ins: Sequence[int], note: str) -> None:
        """A line of the plan, if anyone reads them."""
        if self.scribe is not None:
            self.scribe.step(PlanLine(tensor, spec, str(layout), op, tuple(ins), layout.mesh.workers, note))


def lost_in(cluster: Cluster, mesh: Mesh) -> Worker | None:
    return next((cluster.workers[i] for i in mesh.workers if cluster.workers[i].lost), None)
