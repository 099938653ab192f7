"""Sealing of a recorded fragment: its instructions become a program whose tensors and scalars are parameters."""

from __future__ import annotations

from gt.dispatcher.planning.redistributor import Redistributor
from gt.dispatcher.programs.fragments.fragment_code import FragmentBounds, FragmentCode, write_fragment
from gt.dispatcher.programs.fragments.fragment_pattern import FragmentCall
from gt.dispatcher.programs.fragments.fragment_program import FragmentProgram, FragmentRecording, MadeTensor, sharing
from gt.dispatcher.programs.fragments.fragment_table import FragmentTable
from gt.dispatcher.programs.programs import Programs
from gt.dispatcher.programs.recording import Recording
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.tensors import Tensor
from gt.ir.instr import OFFLOAD, Define


def _offloads(tape: Recording) -> str:
    """The reason why a recording of offloaded tensors is no fragment's: they rest by the ids that they have."""
    uses = any(row.kind in OFFLOAD for rows in tape.code.values() for row in rows)
    return "it uses offloaded tensors" if uses else ""


class FragmentSealer:
    """Makes programs of recorded fragments, for one session."""

    def __init__(
        self, context: SessionContext, redistributor: Redistributor, programs: Programs, fragments: FragmentTable
    ) -> None:
        self._context, self._redistributor, self._programs, self._fragments = context, redistributor, programs, fragments
        self._emitter, self._table = context.emitter, context.table

    def seal(self, recording: FragmentRecording, freed: list[int]) -> None:
        """Give the recorded fragment its program, or the reason why it has none. freed: ids that end with the call."""
        fragment, call = recording.fragment, recording.call
        made = {i: number for number, i in enumerate(call.made)}
        ended = {*freed, *fragment.pattern.freed_by(call)}
        fragment.kept.update(number for i, number in made.items() if i not in ended)
        fragment.held.update(number for number, i in enumerate(call.ins) if i not in ended)
        # A tensor that was alive behind an earlier call stays alive in the program, though this call has freed it.
        self._redistributor.free([i for i in freed if i in made and made[i] not in fragment.kept])
        result = self._write(recording)
        fragment.why = result if isinstance(result, str) else ""
        if isinstance(result, FragmentProgram):
            fragment.program, fragment.tries = result, 0
            self._programs.sealed = self._context.cluster.seq

    def _write(self, recording: FragmentRecording) -> FragmentProgram | str:
        """The program of a recorded call, or why there is none."""
        programs = self._programs
        programs.place_all(set())
        tape = programs.stop()
        if tape is None:
            return "the recording was interrupted"
        try:
            return self._write_tape(recording, tape)
        finally:
            tape.leave(self._context.pace.leavings)

    def _write_tape(self, recording: FragmentRecording, tape: Recording) -> FragmentProgram | str:
        fragment, call, ins, programs = recording.fragment, recording.call, recording.ins, self._programs
        programs.deferred.end(tape)
        with self._context.apart():
            bases = self._bases(ins, tape)
            tensors = [*ins, *(ins[n].above(depth) for n, depth in bases)]
            why = programs.obstacle(tape, [], {tensor.id for tensor in tensors}) or _offloads(tape) or self._unplaced(call)
        self._emitter.begin_run()
        if len(recording.numbers) != len(fragment.pattern.ops):
            why = why or "its ops are not those that were announced"
        result: FragmentCode | str = why
        makes: list[MadeTensor] = []
        bounds = FragmentBounds([], [], [])
        added: dict[str, Define] = {}
        if not why:
            places = {i: (before, n) for before, ids in ((False, call.made), (True, call.ins)) for n, i in enumerate(ids)}
            makes = [self._made(number, call, places) for number, i in enumerate(call.made) if i in self._table.rows]
            moved = [n for n, tensor in enumerate(ins) if n not in fragment.held and not tensor.children]
            names = self._emitter.ids
            bounds = FragmentBounds(names(t.id for t in tensors), names(call.made[tensor.number] for tensor in makes), moved)
            context = programs.fragment_context(tape, recording.backend, added)
            with self._context.apart():
                result = write_fragment(tape, context, call, fragment.pattern, recording.numbers, bounds)
            self._emitter.begin_run()  # behind the ops that other sessions have planned meanwhile; all before is flushed
            if fragment not in self._fragments:
                result = "a worker was lost while it was written"
        if isinstance(result, str):
            for workers, name in tape.constants:
                self._emitter.free(workers, [name])
            return result
        defines = self._define(tape, result, added)
        programs.kept += tape.size
        fragment.pattern.constants |= result.constants
        layouts = [tape.before.get(t.id) for t in tensors]
        changed = [(n, t.layout) for n, t in enumerate(tensors) if t.layout is not None and t.layout is not layouts[n]]
        relaid = {n if n < len(ins) else bases[n - len(ins)][0] for n in (*result.rebound, *(n for n, _ in changed))}
        written = {id(storage) for row in tape.journal for storage in row.writes}
        return FragmentProgram(
            code=result.workers,
            defines=defines,
            uses=result.uses,
            journal=tape.sealed(),
            forms=[t.spec.form for t in ins],
            layouts=layouts,
            bases=bases,
            descents=[(n, steps, ins[n].descent(steps)) for n, steps in [*bases, *((n, None) for n in sorted(relaid))]],
            changed=changed,
            views=[(n, recording.older[n][1]) for n in relaid],
            rebound=result.rebound,
            sharing=sharing(ins),
            moved=tuple(bounds.moved),
            writes=tuple(n for n, t in enumerate(ins) if id(t.storage) in written),
            flags=[(t.storage.default, t.storage.undecided) for t in ins],
            rests=[(n, t.storage.rest) for n, t in enumerate(ins) if t.storage.rest is not recording.older[n][0]],
            makes=makes,
            live=frozenset(tensor.number for tensor in makes),
            constants=tape.constants,
            size=tape.size,
        )

    def _unplaced(self, call: FragmentCall) -> str:
        rows = self._table.rows
        unplaced = any(rows[i].layout is None for i in call.made if i in rows)
        return "a result has no place on workers" if unplaced else ""

    def _define(self, tape: Recording, code: FragmentCode, added: dict[str, Define]) -> dict[int, Define]:
        """Definitions of the programs, by worker, which know those that passes have added."""
        self._programs.drop_copies()
        peers = self._context.cluster.workers
        for define in added.values():
            for worker in tape.code:
                self._emitter.announce(peers[worker], define)
        defines = {worker: self._emitter.define("fragment", part.payload) for worker, part in code.workers.items()}
        for worker, define in defines.items():
            self._emitter.estimate(define, self._emitter.duration([row.define.number for row in tape.code[worker]]))
        return defines

    def _bases(self, ins: list[Tensor], tape: Recording) -> list[tuple[int, int]]:
        """Bases of tensors from before that the recorded instructions name, or that have another layout since."""
        named = {i for code in tape.code.values() for row in code for i in (*row.reads, *row.makes)}
        offset, seen = self._emitter.offset, {tensor.id for tensor in ins}
        bases: list[tuple[int, int]] = []
        for n, tensor in enumerate(ins):
            depth, base = 1, tensor.base
            while base is not None:
                changed = base.id in tape.before and tape.before[base.id] is not base.layout
                if base.id not in seen and (changed or offset + base.id in named):
                    bases.append((n, depth))
                seen.add(base.id)
                depth, base = depth + 1, base.base
        return bases

    def _made(self, number: int, call: FragmentCall, places: dict[int, tuple[bool, int]]) -> MadeTensor:
        """A tensor of the recorded call as a launch makes it again. places: of each tensor of the call by id."""
        tensor = self._table.rows[call.made[number]]
        assert tensor.layout is not None
        base = None if tensor.base is None else places[tensor.base.id]
        known, _, index = tensor.via or (None, (), 0)
        storage = tensor.storage
        return MadeTensor(
            number, tensor.spec, tensor.layout, base, known, index,
            storage.default, storage.undecided, storage.home, storage.rest,
        )  # fmt: skip
