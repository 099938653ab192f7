"""Executes instructions in order: definitions become bound steps, and a stream names them by number.

A step that fails is reported as OpError and leaves placeholders of the right shape. So the instructions after it still run, and
no peer waits for a collective that never begins. Knows neither torch nor sockets.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Condition, get_ident
from typing import Any

from gt.errors import ProtocolError
from gt.ir.instr import BASE_BITS, COMMUNICATION, END, FIRST, FORGET, FREE, KINDS, PROGRAMS, Define
from gt.wire.messages import TraceRows
from gt.worker.arenas import WorkerArenas
from gt.worker.context import Binder, ExecutionContext, FirstLaunch, Rebindable
from gt.worker.downloads import Downloads
from gt.worker.engine.base import Engine
from gt.worker.instructions import communicate, compute
from gt.worker.instructions.numbers import announcing
from gt.worker.instructions.step import Step, Steps
from gt.worker.offload.spaces import Spaces
from gt.worker.offload.tensors import OffloadedTensors
from gt.worker.placeholders import placeholders
from gt.worker.plane.base import Plane
from gt.worker.process import op_errors
from gt.worker.process.memory_budget import NOBODY, PLANNED_BYTES, Budget, CheckedSteps, check_room, result_bytes
from gt.worker.process.profiler import ActionTimes, TimedSteps
from gt.worker.process.tracer import Sample, Tracer
from gt.worker.program.compiled import ISSUING, CompiledProgram
from gt.worker.program.program import ProgramBackend, bind_program
from gt.worker.program.python_codegen import CodeGenerator, current_instruction
from gt.worker.program.runner import BoundDefinition, ProgramRunner
from gt.worker.uploads import UploadBuffers

Send = Callable[..., None]  # (message, frames=())
PAUSED = -1  # in place of a seq: the session is interrupted, and the seq from which nothing begins is not known yet
WAITING = ("compile", "load", "device")  # kinds by `where` of a thread that may wait for the device


class Executor:
    """One worker's tensors and definitions; `run` is called by one thread, `stats` and `where` by any."""

    def __init__(self, engine: Engine, plane: Plane, send: Send, budget: Budget | None = None) -> None:
        self.budget = budget or Budget()
        self.tensors = OffloadedTensors(Spaces(engine, self.budget.need).evict)
        # Bytes of a session: storages count once, however many views they have; evicted tensors count as host memory.
        self.budget.held = lambda session: (
            sum(n for _, n in op_errors.held(self.tensors, session, engine.storage).values()) + self.tensors.host_bytes(session)
        )
        self.uploads = UploadBuffers(admit=self.budget.admit)
        self.downloads = Downloads(send)
        self.arenas = WorkerArenas(send, engine, self.uploads, self.budget)
        bytes_by = self.uploads, self.downloads, self.arenas
        self.worker = ExecutionContext(engine, plane, send, self.tensors, *bytes_by, self.budget)
        self.runner = ProgramRunner(self.worker)
        self.times: dict[int, float] = {}  # number -> least seconds that it took in timed Runs, until a Done reports it
        self._engine = engine
        self._table = self.runner.table
        self._compiled: dict[int, CompiledProgram] = {}  # by definition
        self._first_launch = FirstLaunch(self._table.steps)
        self._action_times = ActionTimes()
        self.session = NOBODY  # the session of the streams that follow
        self.traces: dict[int, Tracer] = {}  # by session
        self._busy = False
        self._thread = self._peak_bytes = 0
        # session -> the seq from which on nothing is begun, or PAUSED; the thread that receives messages enters them
        self.interrupted: dict[int, int] = {}
        self._reached: dict[int, int] = {}  # session -> the last seq of its newest stream that has ended
        self.pauses: Counter[int] = Counter()  # session -> interrupts so far, as the receiving thread counts
        self._resumed = Condition()

    @property
    def instructions(self) -> int:
        """Instructions that were executed."""
        return self.runner.executed

    def cancel_fetch(self, key: int) -> None:
        """Nobody waits for this fetched piece any more. By the thread that runs."""
        self.downloads.widen_window(key, -1)
        self.arenas.forget_write(key)

    # ---- definitions

    def define(self, rows: Sequence[list]) -> None:
        """Bind definitions from their wire form. A definition that cannot be bound fails when it is run."""
        table = self._table
        for row in rows:
            define = Define.from_wire(row)
            # Computed now: a failure at run time must not depend on anything that can fail.
            outputs = placeholders(define)
            try:
                step = self._bind_program(define) if define.kind in PROGRAMS else self._bind(define)
            except Exception as error:
                step = _failing(error)
            # The size includes number and seq, so that `run` advances by it.
            table.steps[define.number] = (step, 2 + define.operands)
            table.definitions[define.number] = BoundDefinition(
                define.kind, outputs, define if define.kind not in PROGRAMS else None
            )

    def _bind(self, define: Define) -> Step:
        step = self._check_room(define, BIND[define.kind](self.worker, define.payload))
        step = announcing(self.worker, define, step)
        # Three kinds of step. On a GPU (no clock here) an op's first launch loads kernels, which must not look like a hang. A
        # transfer by the device alone can be recorded in a graph. One that goes by host memory now may be rebound later.
        if self._engine.clock is None and (define.kind == "op" or define.kind in ISSUING):
            step = self._first_launch.wrap(define.number, step)
        elif self._by_device_alone(define):
            self._table.device_only.add(define.number)
        elif define.kind in COMMUNICATION and self._engine.direct is not None:
            step = self._table.rebindable[define.number] = Rebindable(step)
        return step

    def _check_room(self, define: Define, step: Step) -> Step:
        if not self.budget.bounded:
            return step
        nbytes = result_bytes(define)
        # Small results are checked only while room is short (`checks_small_results`): a comparison for each would slow every
        # op.
        if 0 < nbytes < PLANNED_BYTES:
            self._table.small_results[define.number] = nbytes
        return check_room(step, nbytes, self.budget)

    def _bind_program(self, define: Define) -> Step:
        backend: ProgramBackend
        if define.payload["backend"] == "eager":
            backend = CodeGenerator(define.payload["randoms"], self.runner, define.payload.get("values", ()))
        else:
            backend = self._compiled[define.number] = CompiledProgram(define.payload, self.runner)
        with self.runner.compiling():
            return bind_program(define, backend, self.runner, partial(self._action_times.put, define.number))

    def _by_device_alone(self, define: Define) -> bool:
        """True for a transfer that goes between devices of one host, or within one device, with no host memory."""
        if define.kind not in COMMUNICATION:
            return False
        peers = communicate.peers(define.payload)
        engine, plane = self.worker.route(peers)
        return engine is self._engine.direct and (not peers or plane.recordable)

    def rebind_transfers(self) -> None:
        """The plane has formed its world: from here on members move data by their devices, by definitions from before too."""
        for number, step in self._table.rebindable.items():
            define = self.runner.definition(number)
            assert define is not None, "a program moves nothing itself"
            try:
                if self._by_device_alone(define):
                    step.step = announcing(self.worker, define, BIND[define.kind](self.worker, define.payload))
                    self._table.device_only.add(number)
            except Exception as error:
                step.step = _failing(error)

    # ---- streams

    def run(self, code: list[int], base: int, epoch: int = 0, timed: bool = False) -> None:
        """Carry out a stream, seqs counting from base. ProtocolError for a number that was never defined."""
        # Locals and one flat loop: this is executed for each instruction, and costs as much as a small op on the device.
        runner, pending = self.runner, self.runner.pending_outputs
        at, end, executed, last = 0, len(code), 0, -1
        self.worker.epoch, self.worker.base, self._thread = epoch, base, get_ident()
        runner.begin(code, base)
        steps, interrupted, skipped = self._steps(timed), self.interrupted, dict[int, None]()
        self._busy = True
        with self._engine.guard():
            while at < end:
                number = code[at]
                # Numbers below FIRST (FREE, FORGET, END) have a count of ids, not a definition.
                if number < FIRST:
                    at = self._free(code, at)
                    continue
                try:
                    step, size = steps[number]
                except KeyError:
                    raise ProtocolError(f"instruction {number} was never defined") from None
                runner.place = last = at  # before the look at `interrupted`: see `pause`
                if interrupted and self._skips(number, base + code[at + 1]):
                    skipped[base + code[at + 1]] = None
                    at += size
                    continue
                # Outputs of a CUDA graph replay are in memory that the next replay overwrites: readers must be tracked.
                if pending.exist:
                    self._track_pending(number, code[at + 2 : at + size])
                try:
                    step(code, at + 2)
                except Exception as error:
                    runner.fail(number, code, at, base, error)
                at += size
                executed += 1
        if last >= 0:
            # `pause` may come after the stream's end, when `place` no longer says how far the session got.
            self._reached[self.session] = base + code[last + 1]
        runner.errors.end_run()

        # Few reports for all skipped seqs: the list lets the dispatcher mark each output as never made.
        for report in op_errors.parts("interrupted", "", [*skipped]):
            self.worker.send(report)
        runner.executed += executed
        self._busy = False
        if self._engine.progress is not None:
            self._engine.progress.note()

    # ---- interrupts

    def pause(self, session: int) -> int:
        """Begin nothing more of a session until `skip`; the last seq that was begun, -1 for none.

        By the thread that receives. The executing thread names its place first, then looks here: either this sees the
        instruction, or that thread waits before it.
        """
        with self._resumed:
            self.pauses[session] += 1
            self.interrupted[session] = PAUSED
        # The race: the executing thread writes `place` and then reads `interrupted`; this thread writes `interrupted` above
        # and then reads `place`. So at least one of them sees the other's write.
        begun = -1
        if self.session == session:
            with contextlib.suppress(IndexError):  # another stream begins, whose first instruction will wait
                begun = self.runner.base + self.runner.code[self.runner.place + 1]
        return max(begun, self._reached.get(session, -1))

    def skip(self, session: int, since: int) -> None:
        """Go on with a session, and skip its instructions from this seq on. By the thread that receives."""
        with self._resumed:
            self.interrupted[session] = since
            self._resumed.notify_all()

    def resume(self, session: int, pauses: int) -> None:
        """Carry out what follows of a session, unless another interrupt has begun since. By the thread that runs.

        pauses: interrupts of the session that had begun when the end of one was received.
        """
        with self._resumed:
            # A second Ctrl-C may have paused the session anew while this Skip was queued: its entry has to stay.
            if self.pauses[session] == pauses:
                self.interrupted.pop(session, None)

    def end_pauses(self) -> None:
        """The link has ended: nobody will say where to go on."""
        for session in list(self.interrupted):
            self.skip(session, 0)

    def _skips(self, number: int, seq: int) -> bool:
        """True if an instruction is not begun, for an interrupt. Uploads are: their bytes have come. Waits during a pause."""
        since = self.interrupted.get(self.session)
        # A skipped upload would leave its bytes in the buffers, and no later instruction takes them.
        if since is None or self._table.definitions[number].kind == "upload":
            return False
        if since == PAUSED:
            with self._resumed:
                self._resumed.wait_for(lambda: self.interrupted[self.session] != PAUSED)
            since = self.interrupted[self.session]
        return seq >= since

    def _steps(self, timed: bool) -> Steps:
        """The table of steps for one stream."""
        steps: Steps = self._table.steps
        if self.runner.checks_small_results:
            steps = CheckedSteps(self._table.steps, self._table.small_results, self.budget.need)
        if timed and self._engine.clock is not None:
            steps = TimedSteps(steps, self._engine.clock, self.times)
        tracer = self.runner.tracer = self.traces.get(self.session) if self.traces else None
        return steps if tracer is None else tracer.steps(steps)

    def _track_pending(self, number: int, operands: list) -> None:
        """An instruction follows a replay whose outputs are in graph memory."""
        if self._table.definitions[number].kind not in PROGRAMS:
            self.runner.pending_outputs.track(operands)
        elif number not in self._compiled or not self._compiled[number].recorded:
            self.runner.pending_outputs.copy_out()

    def _free(self, code: list[int], at: int) -> int:
        """Carry out FREE, FORGET or END; the place after it."""
        if code[at] not in (FREE, FORGET, END):
            raise ProtocolError(f"instruction {code[at]} was never defined")
        first = at + 3
        last = first + code[at + 2]
        ids = code[first:last]
        if code[at] == END:
            # END names the session's range of ids. A list first, because the loop deletes from the table.
            for i in [i for i in self.tensors if ids[0] <= i < ids[1]]:
                del self.tensors[i]
            self.tensors.drop_range(ids[0], ids[1])
            self._reached.pop(ids[0] >> BASE_BITS, None)
            self.pauses.pop(ids[0] >> BASE_BITS, None)
        # FORGET names definitions. Graphs of their programs hold device memory, which is given back at once.
        elif code[at] == FORGET:
            self._close_programs([program for program in map(self._compiled.get, ids) if program is not None])
            self._table.forget(ids)
            for number in ids:
                self._compiled.pop(number, None)
        else:
            self.tensors.free(ids)
        return last

    def _close_programs(self, programs: Sequence[CompiledProgram]) -> None:
        if programs:
            self.runner.pending_outputs.copy_out()  # they are in memory of such a program
        with self.runner.compiling():
            for program in programs:
                program.close()

    # ---- traces: by any thread

    def begin_trace(self, session: int) -> None:
        """Record the times of a session's instructions from its next stream on."""
        if session not in self.traces:
            sample = partial(self._sample, session)
            self.traces[session] = Tracer(lambda: self.runner.base, sample, self._table.definitions, self._engine.times)

    def end_trace(self, session: int, request: int) -> Iterator[TraceRows]:
        """Record no more; what was recorded, as answers to `request`."""
        tracer = self.traces.pop(session, None)
        return iter(()) if tracer is None else tracer.parts(request, not self._waits())

    def _sample(self, session: int) -> Sample:
        live = sum(nbytes for _, nbytes in op_errors.held(self.tensors, session, self._engine.storage).values())
        moved = self.worker.plane.counters()
        return Sample(live, *(sum(moved[way].values()) for way in ("bytes_sent", "bytes_received")))

    # ---- questions of the dispatcher

    def where(self) -> tuple[int, int, str, int] | None:
        """The instruction under way: place in its Run, seq, kind; and how many Runs the device has completed. By any thread."""
        runner = self.runner
        # Read without a lock while the executing thread goes on. A torn read gives an odd place, which the checks below drop.
        code, base, at = runner.code, runner.base, current_instruction(self._thread) or runner.place
        definition = self._table.definitions.get(code[at]) if at + 1 < len(code) else None
        if definition is None or type(code[at + 1]) is not int:  # read while the other thread goes on
            return None
        progress, kind = self._engine.progress, definition.kind
        if runner.is_compiling or self._first_launch.under_way:
            kind = "compile" if runner.is_compiling else "load"
        elif kind == "fetch" and progress is not None:
            kind = "device"
        return (at, base + code[at + 1], kind, progress.completed() if progress is not None else 0)

    def _waits(self) -> bool:
        """True if the executing thread may wait within the device's driver: a thread that asks the driver would wait too."""
        where = self.where() if self._busy and self._engine.progress is not None else None
        return where is not None and where[2] in WAITING

    def stats(self, programs: Sequence[int] = (), holders: int = NOBODY) -> dict[str, Any]:
        """The worker's part of gt.stats(), without its name. programs: definitions whose last replay is reported.

        holders: a session whose largest tensors are reported.
        """
        held, free = list(self.tensors.items()), not self._waits()
        if free:
            # Asking the driver blocks while it loads kernels: then the last known peak is reported.
            self._peak_bytes = self._engine.peak()
        # By address: views of one storage count once, for the session of the last id.
        memory = {address: (i, nbytes) for i, tensor in held for address, nbytes in (self._engine.storage(tensor),)}
        by_session: Counter[str] = Counter()
        for i, nbytes in memory.values():
            by_session[str(i >> BASE_BITS)] += nbytes
        compiled = [program for program in map(self._compiled.get, programs) if program is not None]
        return {
            "device": self._engine.kind,
            "instructions": self.instructions,
            "collectives": dict(self.worker.collectives),
            "live_tensors": len(held),
            "live_bytes": by_session.total(),
            "session_bytes": dict(by_session),
            "peak_bytes": self._peak_bytes,
            "memory_used": self.budget.used(),
            "memory_limit": self.budget.limit,
            "definitions": len(self._table.steps),
            "file_bytes_read": self.arenas.files.bytes_read,
            "file_bytes_written": self.arenas.files.bytes_written,
            "actions": self._action_times.actions(programs, self._compiled) if free else [],
            "transfers": [transfer for program in compiled for transfer in program.transfers()] if free else [],
            "plans": [program.report() for program in compiled],
            "transport": self.worker.plane.transport,
            **({} if holders < 0 else {"holders": op_errors.largest(dict(held), holders, self._engine.storage)}),
            **self.tensors.stats(),
            **self.worker.plane.counters(),
            **({"ways": ways} if (ways := self.worker.plane.ways()) else {}),
            **self.worker.plane.facts(),
        }


def _failing(error: Exception) -> Step:
    def step(code: list[int], at: int) -> None:
        raise error

    return step


BIND: dict[str, Binder] = {
    **{kind: getattr(compute, kind) for kind in KINDS if hasattr(compute, kind)},
    **{kind: getattr(communicate, kind) for kind in KINDS if hasattr(communicate, kind)},
}
