"""Programs: the instructions of a captured step, recorded once and replayed with one instruction for each worker.

A recording keeps every instruction that is sent. Sealing runs the passes over it and writes one stream for each worker. There
dead values are freed at their last use, and other frees are left out. Loop-carried tensors are aliases of the call's results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from gt.dispatcher.fairness.time_slices import Leavings
from gt.dispatcher.planning.host_copies import SessionHostCopies
from gt.dispatcher.planning.materializer import root_layout
from gt.dispatcher.planning.redistributor import Redistributor
from gt.dispatcher.programs.codegen import ProgramWriter
from gt.dispatcher.programs.deferred import DeferredRuns
from gt.dispatcher.programs.launch import ProgramLauncher
from gt.dispatcher.programs.pass_manager import PASSES, run_passes
from gt.dispatcher.programs.passes.context import PassContext
from gt.dispatcher.programs.passes.rematerialize import BOUNDS, rematerialize
from gt.dispatcher.programs.program import Program, RecordedLayouts
from gt.dispatcher.programs.recording import MAX_INSTRUCTIONS_PER_SESSION, Instruction, Recording
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.outbox import Outbox
from gt.dispatcher.state.records import Cause
from gt.dispatcher.state.tensors import Storage, Tensor
from gt.errors import ProtocolError
from gt.ir.instr import BACKENDS, Define
from gt.ir.layout import Layout, local_shape, replicated
from gt.wire.codec import packed_payload
from gt.wire.messages import FinishCapture, PrepareCompilation

MAX_PROGRAMS_PER_SESSION = 256  # a recording beyond that stays an eager call; their instructions have a limit of their own
MOVE_STEPS = 4  # instructions of a worker for a tensor that gets another layout, about
STEP = 1024  # tensors that are placed, or aliases that are written, before other sessions have a turn
MAX_HINTED_KINDS = 4096  # of calls whose inputs' layouts are remembered


class Programs:
    """The programs of one session, and its recording if one is under way."""

    def __init__(
        self, context: SessionContext, outbox: Outbox, redistributor: Redistributor, host_copies: SessionHostCopies
    ) -> None:
        self._context, self._outbox, self._redistributor = context, outbox, redistributor
        self._host_copies = host_copies
        self._launcher = ProgramLauncher(context, redistributor, host_copies)
        self._emitter, self._cluster, self._table = context.emitter, context.cluster, context.table
        self._failures, self._journal = context.failures, context.journal
        self.deferred = DeferredRuns(context, outbox, self)
        self.all: dict[int, Program] = {}
        self.order: dict = {}  # schedule report of the program launched last, and its definitions by worker
        self.newest: dict[int, list[int]] = {}
        self.times: dict[int, float] = {}  # definition number -> fewest seconds that it took while something was recorded
        self._dropped: deque[tuple[int, Program]] = deque()  # with the op number behind its last launch
        self.launches = self.kept = 0  # number of replays; instructions held by all programs
        self.sealed = -1  # op number behind the newest program: ops before it may have made constants of a program
        self._hints: dict[tuple, list[Layout | None]] = {}  # by `_kind`: the layouts that the last call gave its inputs
        self._prepared: tuple[tuple, bool] = (), False  # when workers were told to prepare, and whether they were idle

    @property
    def holds(self) -> bool:
        """True while a recording's instructions are buffered."""
        return self._outbox.deferred is not None

    # ---- recording

    def record(self, slot: int, how: int, ids: Sequence[int]) -> None:
        """Keep the instructions that follow. Unplaced inputs get the layouts of the last call. how: see DeferredRuns.begin."""
        # 1. Inputs that have no place yet get one before the recording: placing them is no part of each replay.
        self.discard()
        self._failures.recover()
        self.times = {number: took for number, took in self.times.items() if number in self._emitter.defined}
        inputs = [self._context.row(i) for i in ids]
        hints = self._hints.get(_kind(slot, inputs))
        for tensor, layout in zip(inputs, hints or (), strict=False):
            if tensor.layout is None and not self._failures.missing:
                wanted = layout if layout is not None else replicated(self._context.default_mesh())
                self._redistributor.place(tensor.storage, root_layout(tensor, wanted))
        # 2. Copies end, since a kept one would be of the value that there was. What is written so far is sent: the recording
        #    takes what is sent from here on.
        self.drop_copies()
        self._outbox.cut()
        before = {i: t.layout for i, t in self._table.rows.items()}
        tape = self._context.tape = Recording(slot, inputs, before, hints is None)
        tape.room = MAX_INSTRUCTIONS_PER_SESSION - self.kept
        self._journal.record(tape.journal, tape.op_layouts)
        self._emitter.kept = tape.defines
        self.deferred.begin(how)
        if how:
            self._prepare_compilation()

    def _prepare_compilation(self) -> None:
        """Have workers start their compilers beside the recorded call, which takes them seconds."""
        # A stream may begin thousands of recordings without an op, and each worker would get as many messages.
        living = [worker.peer for worker in self._cluster.workers if not worker.lost]
        moment, idle = (self._cluster.seq, *living), self.holds
        if self._prepared in ((moment, idle), (moment, True)):
            return
        self._prepared = moment, idle
        for peer in living:
            self._context.out(peer, PrepareCompilation(idle), ())

    def drop_copies(self) -> None:
        for tensor in self._with_copies():
            self._redistributor.drop_copies(tensor)

    def _with_copies(self) -> list[Tensor]:
        return [tensor for tensor in self._table.rows.values() if tensor.copies or tensor.sums]

    def _pause(self) -> None:
        """Send the written instructions, and let other sessions have a turn."""
        self._outbox.cut()
        with self._context.apart():
            pass
        self._emitter.begin_run()

    def discard(self) -> None:
        """Stop recording, and make no program of it."""
        holds = self.holds
        if holds:
            self._outbox.cut()
        tape = self.stop()
        if tape is not None:
            self.deferred.end(tape)
            self._free(tape.constants)
            tape.leave(self._context.pace.leavings)
        if holds:  # all of its ops are one instruction now, under the number of the first
            self.sealed = self._cluster.seq

    def stop(self) -> Recording | None:
        context = self._context
        tape, context.tape, self._emitter.kept = context.tape, None, None
        self._journal.record(None)
        if tape is not None:
            self._hint(tape.slot, tape.inputs, [t.layout or tape.used_layouts.get(n) for n, t in enumerate(tape.inputs)])
        return tape

    def hint(self, slot: int, inputs: Sequence[Tensor]) -> None:
        """Remember the layouts that inputs have now, for the next recording of this kind."""
        self._hint(slot, inputs, [t.layout for t in inputs])

    def hinted(self, slot: int, inputs: Sequence[Tensor]) -> bool:
        """True if layouts of such inputs of a slot are known."""
        return _kind(slot, inputs) in self._hints

    def _hint(self, slot: int, inputs: Sequence[Tensor], layouts: list[Layout | None]) -> None:
        if len(self._hints) >= MAX_HINTED_KINDS:
            self._hints.clear()
        self._hints[_kind(slot, inputs)] = layouts

    def _free(self, constants: Iterable[tuple[list[int], int]]) -> None:
        for workers, name in constants:
            self._emitter.free(workers, [name])

    # ---- sealing

    def seal(self, message: FinishCapture) -> dict:
        """Make a program of the recording; the body of the answer."""
        number = message.program
        with self._context.apart():
            pairs = _pairs(message.carried, self._table.rows)
        self._emitter.begin_run()
        self.place_all({made for _, made in pairs})
        tape = self.stop()
        if tape is None:
            raise ProtocolError(f"FinishCapture.program is {number}, and nothing was recorded")
        try:
            return self._sealed(tape, pairs, message)
        finally:
            tape.leave(self._context.pace.leavings)

    def _sealed(self, tape: Recording, pairs: list[tuple[int, int]], message: FinishCapture) -> dict:
        number = message.program
        if number in self.all:
            raise ProtocolError(f"FinishCapture.program is {number}, want a number that is not in use")
        if message.backend not in BACKENDS:
            raise ProtocolError(f"FinishCapture.backend is {message.backend!r:.40}, want one of {', '.join(BACKENDS)}")
        if message.recompute not in (0, *BOUNDS):
            raise ProtocolError(f"FinishCapture.recompute is {message.recompute!r:.40}, want 0, 1 or 2")
        # 1. Apart from other sessions, whose turns come meanwhile: passes and code. Nothing is written for workers here.
        self.deferred.end(tape)
        added: dict[str, Define] = {}
        program: Program | None = None
        with self._context.apart():
            why = self._too_many() or self.obstacle(tape, pairs)
            context, parts = self._pass_context(tape, message, added), {}
            if not why:
                tape = run_passes(tape, context, PASSES)
                parts, copied = self._write(tape, pairs, message), self._with_copies()
                parts = {worker: [packed_payload(part) for part in rows] for worker, rows in parts.items()}
                program = self._program(tape, pairs)
                program.order = context.schedule
        # 2. Either definitions for workers, or all is taken back: storages know the program already.
        self._emitter.begin_run()
        why = why or self._failures.harm(tape.journal)  # one may be reported since
        if why or program is None:
            self._free(tape.constants)
            if program is not None:
                self._host_copies.forget()
                program.leave(self._context.pace.leavings, forget=True)
        else:
            for define in added.values():
                for worker in tape.code:
                    self._emitter.announce(self._cluster.workers[worker], define)
            for tensor in copied:  # a replay makes them, and ends them
                self._redistributor.drop_copies(tensor)
            if pairs:
                program.uses.append(self._emitter.common("alias"))
            self._make(program, pairs, message, parts)
        self._outbox.cut()
        self.sealed = self._cluster.seq

        # 3. The report, in which workers have their names.
        counts = {self._cluster.workers[w].name: len(rows) for w, rows in tape.code.items()}
        recomputed = {self._cluster.workers[worker].name: row for worker, row in context.recomputed.items()}
        batched = {self._cluster.workers[worker].name: row for worker, row in context.batched.items()}
        advanced = {self._cluster.workers[worker].name: row for worker, row in context.advanced.items()}
        return {
            "why": why, "ops": len(tape.journal), "instructions": counts, "schedule": context.schedule,
            "recomputed": recomputed, "batched": batched, **({"advanced": advanced} if advanced else {}),
        }  # fmt: skip

    def _pass_context(self, tape: Recording, message: FinishCapture, added: dict[str, Define]) -> PassContext:
        """The context of passes for a request. added: takes the definitions that passes add."""
        # Instructions name a tensor by its id in the session plus the session's offset.
        emitter, rows, offset = self._emitter, self._table.rows, self._emitter.offset
        return PassContext(
            asked=message.schedule,
            compiled=message.backend != "eager",
            graphs=message.backend == "cudagraphs",
            recompute=2 if message.recompute and self._context.config.zero == 3 else message.recompute,
            times=self.times.copy(),  # workers report others meanwhile
            older=self._local_shape,
            lasting={offset + i for i in rows},
            homes={offset + i: rows[i].storage for i in tape.before if i in rows},
            fresh=lambda: offset + emitter.temporary(),
            define=partial(self._define, added),
            bucket=self._context.config.bucket,
            sharded=self._context.config.zero > 0,
            ends_copies=self._context.config.zero == 3 and self._context.config.schedule is None,
        )

    def _write(self, tape: Recording, pairs: list[tuple[int, int]], message: FinishCapture) -> dict[int, list[dict]]:
        """The parts of each worker's program."""
        offset = self._emitter.offset
        lasting = {offset + i for i in self._table.rows}
        index = {row.seq: n for n, row in enumerate(tape.journal)}
        carried = [(offset + read, offset + made) for read, made in pairs]
        parts: dict[int, list[dict]] = {}
        for worker, rows in tape.code.items():
            writer = ProgramWriter(index, lasting, message)
            writer.write([row for row in rows if row.kind != "upload"])
            held = {i for row in rows for i in row.makes}
            writer.alias(self._emitter.common("alias"), [(made, read) for read, made in carried if made in held])
            parts[worker] = writer.parts
        return parts

    def rematerialized(self, tape: Recording, lasting: set[int], recompute: int) -> Recording:
        """A recording that becomes a program of its first call, with cheap values recomputed."""
        message = FinishCapture(0, 0, "", "cudagraphs", [], -1, 0, recompute)
        context = self._pass_context(tape, message, {})
        context.lasting = lasting
        return run_passes(tape, context, (rematerialize,))

    def once(self, rows: Sequence[Instruction], base: int, lasting: set[int]) -> list[dict]:
        """A worker's rows as definitions that are executed once, with no random numbers but those they have."""
        index = {row.seq: row.seq - base for row in rows}
        writer = ProgramWriter(index, lasting, FinishCapture(0, 0, "", "cudagraphs", [], -1, 0, False))
        writer.write(rows)
        return [packed_payload({**part, "once": True}) for part in writer.parts]

    def fragment_context(self, tape: Recording, backend: str, added: dict[str, Define]) -> PassContext:
        """The context of passes for a recorded fragment. added: takes the definitions that passes add."""
        return self._pass_context(tape, FinishCapture(0, 0, "", backend, [], -1, 0, 0), added)

    def _define(self, known: dict[str, Define], kind: str, payload: dict) -> Define:
        """A definition that a pass adds, which all workers of the recording will know. known: those added so far."""
        key = f"{kind} {payload}"
        if key not in known:
            known[key] = self._emitter.define(kind, payload)
        return known[key]

    def place_all(self, carried: set[int]) -> None:
        """Place all tensors that the recording made, so that a replay makes them too.

        A scalar's terms are added up, since a loss is read after most replays. Gradients may go on being accumulated.
        """
        # Recipes would not run in a replay: tensors that the call has only described are placed at its end.
        tape = self._context.tape
        if tape is None or self._failures.missing:
            return
        if len(self._table.rows) > STEP:  # they are looked at apart
            self._pause()
        with self._context.apart() if len(self._table.rows) > STEP else nullcontext():
            storages = [storage for storage in self._made_by(tape) if _unfinished(storage, carried)]
        if len(self._table.rows) > STEP:
            self._emitter.begin_run()
        for n, storage in enumerate(storages):
            if n % STEP == STEP - 1 or self._context.pace.half_spent:
                self._pause()
            if self._failures.missing:
                break
            if storage.recipe is not None:
                home = storage.home.mesh if storage.home is not None else self._context.default_mesh()
                self._redistributor.place(storage, replicated(home))
                storage.note_placed(False)
            else:
                self._redistributor.reduce_partial(storage)
        self._outbox.cut()

    def _made_by(self, tape: Recording) -> Iterator[Storage]:
        """Storages of tensors that the recording made."""
        for storage in dict.fromkeys(t.storage for i, t in self._table.rows.items() if i not in tape.before):
            if tape.before.keys().isdisjoint(storage.tensors):
                yield storage

    def _too_many(self) -> str:
        """The reason why this session can have no other program, or "" if it can."""
        if len(self.all) < MAX_PROGRAMS_PER_SESSION:
            return ""
        cure = "let functions end that are no longer called"
        return f"the session has {len(self.all)} programs, and may have {MAX_PROGRAMS_PER_SESSION}: {cure}"

    def obstacle(self, tape: Recording, pairs: list[tuple[int, int]], inputs: Collection[int] = ()) -> str:
        """The reason why this recording cannot be a program, or "" if it can. inputs: tensors that may change their layout."""
        # 1. Limits. 2. Ops that a replay would not do, or that failed. 3. Layouts that differ before and after the call: a
        # replay starts from those that the recording started from, and has to leave the same for the next one.
        if tape.size > tape.room:
            most = MAX_INSTRUCTIONS_PER_SESSION
            return f"it has too many instructions: {tape.size}, and {most - tape.room} of at most {most} are in other programs"
        if tape.late:
            return (
                "an op on a tensor that is not placed yet was deferred, and a replay would leave it out: use the tensor before "
                "the call"
            )
        if tape.renewed:
            return "a tensor that was lost with a worker got new memory in the call; the next calls can become a program"
        if not tape.journal:
            return "the function did no op"
        if harm := self._failures.harm(tape.journal):
            return harm
        for tensor_id, layout in tape.before.items():
            tensor = self._table.rows.get(tensor_id)
            if tensor is not None and tensor.layout != layout and not (tensor_id in inputs and _same_workers(layout, tensor)):
                return (
                    f"tensor %{tensor_id} changed its layout in the call: it was {layout or 'not placed'}, now {tensor.layout}"
                )
        for pair in pairs:
            read, made = (self._table.rows[i].spec for i in pair)
            if (read.shape, read.dtype) != (made.shape, made.dtype):
                return f"the call replaces a tensor {read.text():.80} by {made.text():.80}, which the next call reads"
            have, want = (self._table.rows[i].layout for i in pair)
            if have is None or have != want:
                return f"the call replaces a tensor with layout {have} by one with {want}, which the next call reads"
        for rows in tape.code.values():
            bad = next((row.kind for row in rows if row.kind in ("fetch", "describe")), None)
            if bad is not None:
                return "the function reads a value of a remote tensor: return the tensor and read it outside"
        return ""

    def _make(
        self, program: Program, pairs: list[tuple[int, int]], message: FinishCapture, parts: dict[int, list[dict]]
    ) -> None:
        """Define the program, and have workers go on from the recorded call's results."""
        program.define({worker: [self._emitter.define("program", part) for part in rows] for worker, rows in parts.items()})
        for worker, seconds in program.seconds.items():
            if defines := program.code[worker]:  # none for a worker that only freed tensors, or got uploads
                self._emitter.estimate(defines[0], seconds)
        self.kept += program.size
        self.all[message.program] = program  # before others have a turn: a worker may be lost
        for n, (read, made) in enumerate(pairs):
            if n % STEP == STEP - 1:
                self._pause()
            self._alias(made, read)

    def _program(self, tape: Recording, pairs: list[tuple[int, int]]) -> Program:
        """The program of a recording, not defined yet; its storages know of it already."""
        # Storages by their part in a launch, for the journal: a failure spreads from reads to writes and makes. Only those that
        # are alive now count, and each is named once however many ops touch it.
        rows = self._table.rows
        carried = [rows[read].storage for read, _ in pairs]
        older = [tensor for i in tape.before if (tensor := rows.get(i)) is not None]
        storages = dict.fromkeys(t.storage for t in older)
        reads = dict.fromkeys(r for row in tape.journal for r in row.reads if r in storages)
        writes = dict.fromkeys([w for row in tape.journal for w in row.writes if w in storages] + carried)
        new = [t for i, t in rows.items() if i not in tape.before]
        makes = dict.fromkeys(t.storage for t in new)
        inputs = RecordedLayouts(t for t in older if (t.storage in reads or t.storage in writes) and t.layout is not None)
        results = RecordedLayouts(t for t in new if t.layout is not None and t.base is None)
        uses = dict.fromkeys(row.define for part in tape.code.values() for row in part)
        journal, copies = tape.sealed(), self._host_copies.of_program(tape)
        touched = [*reads], [*writes], [*makes]
        program = Program([*uses], journal, inputs, results, *touched, tape.constants, tape.size, copies)
        duration = self._emitter.duration
        program.seconds = {worker: duration([row.define.number for row in part]) for worker, part in tape.code.items()}
        for storage in program.changes():
            storage.written_by(program.count)
        return program

    def _local_shape(self, worker: int, name: int) -> tuple[tuple[int, ...], int] | None:
        """Local shape and itemsize of a tensor of the table."""
        tensor = self._table.rows.get(name - self._emitter.offset)
        if tensor is None or tensor.layout is None or worker not in tensor.layout.mesh.workers:
            return None
        rank = tensor.layout.mesh.workers.index(worker)
        return local_shape(tensor.layout, tensor.spec.shape, rank), tensor.spec.itemsize

    def _alias(self, source: int, target: int) -> None:
        """Alias them now too, so that the first replay reads the results of the recorded call."""
        tensor, define = self._table.rows[target], self._emitter.common("alias")
        assert tensor.layout is not None
        for index in tensor.layout.mesh.workers:
            self._emitter.write(self._cluster.workers[index], define, self._emitter.ids([source, target]))

    # ---- replaying

    def launch(self, number: int, seed: Any, counter: Any) -> None:
        """Replay a program. ProtocolError if there is none of this number."""
        program = self.all.get(number) if type(number) is int else None
        if program is None or type(seed) is not int or type(counter) is not int:
            raise ProtocolError(f"Ops.code launches {number!r:.40}, which is no program")
        self.order, self.newest = program.order, program.numbers
        self.launches += 1
        self._launcher.launch(program, seed, counter)

    def needs_pauses(self, number: Any) -> bool:
        """True if a launch takes longer than a turn, since many tensors have to be brought to their recorded layouts."""
        program = self.all.get(number) if type(number) is int else None
        if program is None or program.compared == self._table.relaid:
            return False
        moves = sum(1 for tensors in (program.inputs, program.results) for _ in tensors.changed())
        return self._context.needs_pauses(MOVE_STEPS * moves, ())

    def lose(self, worker: int, cause: Cause) -> None:
        """A worker is gone, and so is its part of programs."""
        for program in self.all.values():
            if worker in program.code:
                program.failed = program.failed or cause

    def leave(self, leavings: Leavings) -> None:
        """The session is over."""
        for program in (*self.all.values(), *[program for _, program in self._dropped]):
            program.leave(leavings)
        self.all.clear()
        self._dropped.clear()

    def drop(self, number: Any) -> None:
        program = self.all.pop(number, None) if type(number) is int else None
        if program is None:
            raise ProtocolError(f"Ops.code drops {number!r:.40}, which is no program")
        self.kept -= program.size
        self._free(program.constants)
        self._dropped.append((self._cluster.seq, program))
        self.forget(self._journal.first(self._cluster.seq))

    def forget(self, upto: int) -> None:
        """Ops before `upto` are known to have succeeded or failed: programs that were dropped before it are in no journal."""
        while self._dropped and self._dropped[0][0] <= upto:
            self._dropped.popleft()[1].leave(self._context.pace.leavings, forget=True)

    def check(self) -> None:
        """Assert the invariants between events."""
        for program in self.all.values():
            if program.compared == self._table.relaid:
                assert program.inputs.hold() and program.results.hold(), "a layout has changed, and Table.relaid has not"
            assert all(program.count in storage.programs for storage in program.changes())


def _kind(slot: int, inputs: Sequence[Tensor]) -> tuple:
    """The function, and the number of dims of each input: recordings of one kind place their inputs alike."""
    return slot, *[len(tensor.spec.shape) for tensor in inputs]


def _same_workers(before: Layout | None, tensor: Tensor) -> bool:
    return before is not None and tensor.layout is not None and before.mesh.workers == tensor.layout.mesh.workers


def _unfinished(storage: Storage, carried: set[int]) -> bool:
    """True for a result of a recorded call that is not placed, or is a scalar's terms."""
    if storage.recipe is not None:
        return True
    root = next(t for t in storage.tensors.values() if t.base is None)
    return bool(not root.spec.shape and root.layout and root.layout.partial and carried.isdisjoint(storage.tensors))


def _pairs(rows: Sequence, table: dict) -> list[tuple[int, int]]:
    """FinishCapture.carried, unmapped; ProtocolError unless it names tensors of this session."""
    for row in rows:
        if type(row) is not list or len(row) != 2 or any(type(i) is not int or i not in table for i in row):
            raise ProtocolError(f"FinishCapture.carried has {row!r:.80}, want [read, made], tensors of this session")
    return [(read, made) for read, made in rows]
