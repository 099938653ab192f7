"""Launch of a fragment's program: one instruction for each worker, and its results in the table of tensors."""

from __future__ import annotations

from gt.dispatcher.planning.materializer import root_layout
from gt.dispatcher.planning.redistributor import Redistributor
from gt.dispatcher.programs.fragments.fragment_pattern import FragmentCall
from gt.dispatcher.programs.fragments.fragment_program import Fragment, FragmentProgram
from gt.dispatcher.programs.programs import Programs
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.emitter import TEMPORARY
from gt.dispatcher.state.failures import Launched
from gt.dispatcher.state.tensors import Storage, Tensor
from gt.errors import ProtocolError

KEPT, HELD = "more results were kept than in the calls before", "more inputs were kept than in the calls before"


class FragmentLauncher:
    """Executes calls of fragments by their programs, for one session."""

    def __init__(self, context: SessionContext, redistributor: Redistributor, programs: Programs) -> None:
        self._context, self._redistributor, self._programs = context, redistributor, programs
        self._emitter, self._table = context.emitter, context.table

    def launch(
        self, fragment: Fragment, program: FragmentProgram, call: FragmentCall, ins: list[Tensor], freed: list[int]
    ) -> str:
        """Carry out a call by its program. Where that does not serve: why, and nothing is done but moves of inputs."""
        rows = self._table.rows
        freed = [*freed, *fragment.pattern.freed_by(call)]
        ended = set(freed)
        alive = {number for number, i in enumerate(call.made) if i not in ended}
        if not alive <= program.live:
            fragment.kept |= alive
            return KEPT
        held = {n for n in program.moved if call.ins[n] not in ended or ins[n].children or ins[n].released}
        if held:
            fragment.held |= held
            return HELD
        new_ids = [call.made[tensor.number] for tensor in program.makes]
        if any(type(i) is not int or not 0 < i < TEMPORARY or i in rows for i in new_ids):
            raise ProtocolError("Ops.code has a fragment that makes tensors under ids that are no new ones")
        tensors = [*ins, *(ins[n].above(depth) for n, depth in program.bases)] if program.bases else ins
        for tensor, layout in zip(tensors, program.layouts, strict=True):
            if tensor.layout is not layout and layout is not None:
                if tensor.storage.rest is not None:  # moved for this call, a parameter would be whole from then on
                    return "inputs rested in other layouts"
                self._redistributor.relayout(tensor.storage, root_layout(tensor, layout))
        placed = zip(tensors, program.layouts, strict=True)
        if any(tensor.layout is not layout for tensor, layout in placed if layout is not None):
            return "inputs could not get the layouts of the recorded call"
        if any(len(ins[n].storage.tensors) != count for n, count in program.views):
            return "inputs had other views"
        # Nothing is refused from here on, so the table of tensors and the workers' stream may be changed.
        program.launches += 1
        self._programs.launches += 1
        with self._emitter.op(len(program.journal)):
            self._enter_results(fragment, program, call, ins, new_ids)
            ids = self._emitter.ids([*(t.id for t in tensors), *new_ids, *(tensors[n].id for n in program.rebound)])
            for worker, define in program.defines.items():
                values = program.code[worker].values(call.code)
                self._emitter.write(self._context.cluster.workers[worker], define, (call.seed, call.counter, *ids, *values))
            for n, layout in program.changed:
                tensors[n].layout, tensors[n].storage.moved = layout, self._emitter.seq
        for before, number in fragment.pattern.params:
            declared = ins[number] if before else rows.get(call.made[number])
            if declared is not None and not declared.storage.param:
                declared.storage.declare_parameter()
        self._redistributor.free(freed)
        return ""

    def _enter_results(
        self, fragment: Fragment, program: FragmentProgram, call: FragmentCall, ins: list[Tensor], made: list[int]
    ) -> None:
        """Enter the results into the table of tensors, and the launch into the journal."""
        table, makers, ops = self._table, fragment.pattern.makers, fragment.pattern.ops
        writes: dict[Storage, None] = {}
        for n in program.writes:
            writes[ins[n].storage] = None
        for before, (default, undecided) in zip(ins, program.flags, strict=True):
            storage = before.storage
            storage.default, storage.undecided = storage.default and default, storage.undecided and undecided
        for n, rest in program.rests:
            ins[n].storage.rest = rest
        makes: dict[Storage, None] = {}
        for row, i in zip(program.makes, made, strict=True):
            if row.base is None:
                tensor = table.new(i, row.spec, row.layout, self._context.origin)
                tensor.storage.default, tensor.storage.undecided, tensor.storage.home = row.default, row.undecided, row.home
                tensor.storage.rest = row.rest
            else:
                older, number = row.base
                base = ins[number] if older else table.rows[call.made[number]]
                values = tuple(call.code[place] for place in ops[makers[row.number]].values)
                tensor = table.view(i, row.spec, base, row.layout, (row.known, values, row.index))
            makes[tensor.storage] = None
        reads = tuple(dict.fromkeys(t.storage for t in ins))
        launched = Launched(
            self._emitter.seq, program.journal[0].known, program.journal[0].origin, reads, tuple(writes), tuple(makes),
            program.journal, program.launches,
        )  # fmt: skip
        self._context.journal.add(launched)
        for storage in (*writes, *makes):
            storage.writes += 1
