"""Fragments: runs of ops between two reads of a value, replayed as programs while the client's Python goes on.

A function whose Python has to run at each call (it reads values, prints, counts) sends the same runs of ops again and again. A
client marks where such a run begins and ends. The first time it is planned op by op, the second time recorded, and from then on
one instruction for each worker carries it out. This is the fragment cache of a dynamic optimizer (Dynamo, Bala et al., 2000).

Nothing is assumed about Python: the ops themselves are compared (fragment_pattern.py), so branches and loops need no guards.
The ops are at hand in any case. Where a program cannot serve, they are planned as if there were none.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gt.dispatcher.fairness.time_slices import Leavings
from gt.dispatcher.planning.materializer import root_layout
from gt.dispatcher.planning.redistributor import Redistributor
from gt.dispatcher.programs.fragment_code import FragmentBounds, FragmentCode, WorkerCode, write_fragment
from gt.dispatcher.programs.fragment_cuts import FragmentCuts, outline
from gt.dispatcher.programs.fragment_pattern import FragmentCall, FragmentPattern, count_ops, parse, pattern_key, text
from gt.dispatcher.programs.programs import Programs
from gt.dispatcher.programs.recording import Recording
from gt.dispatcher.sharding.groups import Meaning
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.emitter import TEMPORARY
from gt.dispatcher.state.failures import Launched, Planned
from gt.dispatcher.state.records import NO_ORIGIN
from gt.dispatcher.state.tensors import Storage, Tensor
from gt.errors import ProtocolError
from gt.ir.instr import BACKENDS, END_FRAGMENT, FRAGMENT_HEADER, OFFLOAD, Define
from gt.ir.layout import Layout
from gt.ir.spec import Spec

MAX_FRAGMENTS = 512  # fragments of a session; beyond that the least recently used one is dropped
MAX_ALIKE = 8  # fragments of one length and first op
MAX_TRIES = 4  # recordings of a fragment that can be no program
MAX_MISFITS = 4  # calls in a row for which a program does not serve; then another is recorded
MAX_SLOTS = 1024  # functions with counters
MAX_REASONS = 16  # reasons kept for one function
SHORT_INSTRUCTIONS = 2048  # instructions on all workers together: a shorter program is written in milliseconds
NEW, RECORDED = "they were met for the first time", "they were recorded"
UNFIT = "ZeRO reduces gradients among them, or a shape depends on values"
KEPT, HELD = "more results were kept than in the calls before", "more inputs were kept than in the calls before"


@dataclass(slots=True)
class MadeTensor:
    """A tensor that is alive behind a fragment. base: of a view: whether from before, and its number."""

    number: int
    spec: Spec
    layout: Layout
    base: tuple[bool, int] | None
    known: OpSchema | None  # for a view: the op that made it, and which output it is
    index: int
    default: bool  # this and the next three describe its storage, see state/tensors.py
    undecided: bool
    home: Meaning | None
    rest: Layout | None


@dataclass(slots=True)
class FragmentProgram:
    """The sealed program of one fragment. Tensors are numbers of its pattern."""

    code: dict[int, WorkerCode]
    defines: dict[int, Define]  # by worker
    uses: list[Define]  # definitions that its code names
    journal: list[Planned]
    forms: list[tuple]  # of each tensor from before: Spec.form
    bases: list[tuple[int, int]]  # further tensors that the code names: (number, steps) is that tensor's base, so many views up
    layouts: list[Layout | None]  # of each tensor from before, then of each of `bases`
    changed: list[tuple[int, Layout]]  # (number, layout) of each that has another layout afterwards
    views: list[tuple[int, int]]  # (number, count) of each that is changed or rebound: tensors of its storage before the call
    rebound: list[int]  # numbers of tensors whose memory is replaced
    sharing: tuple[int, ...]  # by tensor from before: the first one that shares its memory
    moved: tuple[int, ...]  # numbers of tensors from before that the program frees
    writes: tuple[int, ...]  # numbers of tensors from before whose memory it writes
    flags: list[tuple[bool, bool]]  # by tensor from before: `default` and `undecided` of its storage afterwards
    rests: list[tuple[int, Layout | None]]  # (number, layout) of tensors whose storage rests in another layout afterwards
    makes: list[MadeTensor]
    live: frozenset[int]  # numbers of tensors that may be alive afterwards
    constants: list[tuple[list[int], int]]
    size: int
    launches: int = 0


@dataclass(eq=False, slots=True)
class Fragment:
    number: int
    key: tuple
    pattern: FragmentPattern
    rests: tuple[bool, ...]  # by tensor from before: True if it is at rest, which changes how ops on it are planned
    program: FragmentProgram | None = None
    tries: int = 0
    misfits: int = 0  # calls in a row for which its program did not serve
    why: str = ""  # the reason why it has no program
    kept: set[int] = field(default_factory=set)  # numbers of tensors that were alive behind some call
    held: set[int] = field(default_factory=set)  # numbers of tensors from before that were alive behind some call


@dataclass(slots=True)
class CallCounts:
    """Ops of a function's calls, and how many of them programs executed."""

    call: int = -1
    ops: int = 0
    carried: int = 0
    last_ops: int = 0
    last_carried: int = 0
    fragments: set[int] = field(default_factory=set)
    why: Counter[str] = field(default_factory=Counter)

    def add(self, call: int, ops: int, why: str) -> None:
        if call != self.call:
            self.call, self.last_ops, self.last_carried = call, 0, 0
        carried = 0 if why else ops
        self.ops += ops
        self.last_ops += ops
        self.carried += carried
        self.last_carried += carried
        if why and (why in self.why or len(self.why) < MAX_REASONS):
            self.why[why] += ops


@dataclass(slots=True)
class _Recording:
    """A fragment's call while it is recorded."""

    fragment: Fragment
    call: FragmentCall
    backend: str
    ins: list[Tensor]
    older: list[tuple[Layout | None, int]]  # by entry of `ins`: the layout in which its storage rested before, and its tensors
    numbers: list[int] = field(default_factory=list)  # op numbers, as its instructions carry them


def _offloads(tape: Recording) -> str:
    """The reason why a recording of offloaded tensors is no fragment's: they rest by the ids that they have."""
    uses = any(row.kind in OFFLOAD for rows in tape.code.values() for row in rows)
    return "it uses offloaded tensors" if uses else ""


def _base(tensor: Tensor, depth: int) -> Tensor:
    """The tensor that a view is a view of, so many steps up."""
    for _ in range(depth):
        assert tensor.base is not None
        tensor = tensor.base
    return tensor


def _sharing(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """For each tensor, the first that shares its memory."""
    homes: dict[int, int] = {}
    return tuple([homes.setdefault(id(t.storage), n) for n, t in enumerate(tensors)])


class Fragments:
    """The fragments of one session."""

    def __init__(self, context: SessionContext, redistributor: Redistributor, programs: Programs) -> None:
        self._context, self._redistributor, self._programs = context, redistributor, programs
        self._emitter, self._table, self._failures = context.emitter, context.table, context.failures
        self._all: OrderedDict[Fragment, None] = OrderedDict()  # least recently used first
        self._alike: dict[tuple, list[Fragment]] = {}
        self._cuts = FragmentCuts()
        self._numbers = 0
        self._counts: OrderedDict[int, CallCounts] = OrderedDict()
        self._recording: _Recording | None = None
        self._met: list[tuple[Fragment, tuple]] = []  # for the first time, and ids of the tensors that each reads

    @property
    def any(self) -> bool:
        """True once a fragment was met."""
        return bool(self._all) or self._recording is not None or bool(self._met)

    @property
    def recording(self) -> bool:
        """True while a fragment's ops are recorded; `note` gets the number of each."""
        return self._recording is not None

    @property
    def long(self) -> bool:
        """True if the end of the recorded fragment takes long."""
        recording = self._recording
        return recording is not None and len(recording.numbers) * len(self._context.cluster.workers) > SHORT_INSTRUCTIONS

    def note(self, number: int) -> None:
        """The next op of the recorded fragment has this number."""
        assert self._recording is not None
        self._recording.numbers.append(number)

    # ---- in the op stream

    def split(self, code: list) -> list:
        """A batch as it came, with its fragment in parts where earlier ones have parted or met again."""
        return self._cuts.split(code, self._context.templates)

    def enter(self, code: list, at: int) -> int:
        """Deal with a FRAGMENT: the place behind the whole of it if a program has carried it out, else behind its header."""
        numbers = code[at + 1 : at + FRAGMENT_HEADER]
        first = at + FRAGMENT_HEADER
        integers = len(numbers) == FRAGMENT_HEADER - 1 and all(type(n) is int for n in numbers)
        if not integers or not 0 <= numbers[2] < len(BACKENDS) or not 0 < numbers[5] < len(code) - first - 1:
            raise ProtocolError(f"Ops.code at {at} has a fragment {numbers!r:.80}, want integers and its end in this batch")
        slot, call, backend, seed, counter, count = numbers
        end = first + count
        freed = self._freed(code, end)
        rows = code[first:end]
        counts = self._count(slot)
        why, ops = self._meet(rows, BACKENDS[backend], seed, counter, freed, counts)
        counts.add(call, ops, why)
        return first if why else end + 2 + len(freed)

    def leave(self, code: list, at: int) -> int:
        """Deal with an END_FRAGMENT whose ops were planned one by one."""
        freed = self._freed(code, at)
        recording, self._recording = self._recording, None
        if recording is not None:
            self._seal(recording, freed)
        met, self._met = self._met, []
        for fragment, ins in met:
            self._programs.hint(-fragment.number, [self._table.rows[i] for i in ins if i in self._table.rows])
        self._redistributor.free(freed)
        return at + 2 + len(freed)

    def _freed(self, code: list, at: int) -> list[int]:
        """Ids of the END_FRAGMENT at a place."""
        count = code[at + 1] if at + 1 < len(code) else None
        if code[at] != END_FRAGMENT or type(count) is not int or not 0 <= count <= len(code) - at - 2:
            raise ProtocolError(f"Ops.code at {at} has {code[at]!r:.40}, want the end of a fragment and the ids that it frees")
        return code[at + 2 : at + 2 + count]

    def _meet(self, rows: list, backend: str, seed: int, counter: int, freed: list[int], counts: CallCounts) -> tuple[str, int]:
        """Launch the program of these ops, or begin to record them: why no program carries them out, and their number."""
        fragment, call = self._find(rows, backend, seed, counter)
        if fragment is None or call is None:
            return self._add(rows, backend, seed, counter)
        counts.fragments.add(fragment.number)
        ops = len(fragment.pattern.ops)
        if not self._programs.deferred.able or self._context.tape is not None:
            return "they are part of another recording", ops
        ins = [self._table.rows.get(i) for i in call.ins]
        if any(tensor is None for tensor in ins):
            return "a tensor is not of this session", ops  # the op that reads it raises the error
        if harm := self._harm(fragment, ins):  # type: ignore[arg-type]
            return harm, ops
        if fragment.program is not None:
            misfit = self._launch(fragment, fragment.program, call, ins, freed)  # type: ignore[arg-type]
            if not misfit:
                fragment.misfits = 0
                return "", ops
            fragment.misfits += 1  # one may be chance; KEPT and HELD are not, and a new recording keeps more
            if misfit not in (KEPT, HELD) and fragment.misfits < MAX_MISFITS:
                return misfit, ops
            self._drop(fragment)
        if fragment.tries >= MAX_TRIES:
            return fragment.why, ops
        fragment.tries += 1
        if not self._programs.hinted(-fragment.number):
            self._programs.hint(-fragment.number, ins)  # type: ignore[arg-type]
        self._programs.record(-fragment.number, 0, call.ins)
        older = [(t.storage.rest, len(t.storage.tensors)) for t in ins]  # type: ignore[union-attr]
        self._recording = _Recording(fragment, call, backend, ins, older)  # type: ignore[arg-type]
        return fragment.why or RECORDED, ops

    def _harm(self, fragment: Fragment, ins: list[Tensor]) -> str:
        """The reason why the fragment gives no values: a worker is lost, or it reads a failed tensor; "" if neither holds."""
        if not self._failures.troubled:
            return ""
        self._failures.recover()
        known = fragment.pattern.ops[0].known
        return self._failures.harm([Planned(0, known, NO_ORIGIN, tuple(t.storage for t in ins), (), ())])

    def _find(self, rows: list, backend: str, seed: int, counter: int) -> tuple[Fragment | None, FragmentCall | None]:
        alike = self._alike.get(pattern_key(backend, rows), [])
        for n, fragment in enumerate(alike):
            call = fragment.pattern.match(rows, seed, counter)
            if call is not None and fragment.rests == self._rests(call.ins) and self._fits(fragment, call.ins):
                self._all.move_to_end(fragment)
                if n:
                    alike.insert(0, alike.pop(n))
                return fragment, call
        return None, None

    def _fits(self, fragment: Fragment, ins: Sequence[int]) -> bool:
        """False if these tensors have other strides, or share memory otherwise, than those that its program was made for."""
        program, rows = fragment.program, self._table.rows
        if program is None or any(i not in rows for i in ins):
            return True
        tensors = [rows[i] for i in ins]
        return _sharing(tensors) == program.sharing and [t.spec.form for t in tensors] == program.forms

    def _rests(self, ins: Iterable[int]) -> tuple[bool, ...]:
        """True for each tensor that ZeRO has rest in pieces between uses."""
        rows = self._table.rows
        return tuple([i in rows and rows[i].storage.rest is not None for i in ins])

    def _add(self, code: list, backend: str, seed: int, counter: int) -> tuple[str, int]:
        """Remember a fragment that was met for the first time: why no program carries it out, and the number of its ops."""
        pattern = parse(code, self._context.templates, seed, counter)
        if pattern is None:
            return UNFIT, count_ops(code, self._context.templates)
        new = outline(code, pattern, seed, counter)
        self._cuts.add(new)
        parts = self._cuts.parts(new, self._context.templates)
        for part, base in parts if len(parts) > 1 else [(code, counter)]:  # as it will come from now on
            if len(parts) == 1 or self._find(part, backend, seed, base)[0] is None:
                known = pattern if len(parts) == 1 else parse(part, self._context.templates, seed, base)
                if known is not None:
                    self._met.append((self._remember(part, known, backend), known.first_in(part)))
        return NEW, len(pattern.ops)

    def _remember(self, code: list, pattern: FragmentPattern, backend: str) -> Fragment:
        """A new fragment."""
        self._numbers += 1
        key = pattern_key(backend, code)
        fragment = Fragment(self._numbers, key, pattern, self._rests(pattern.first_in(code)))
        if backend != "eager":  # compiled code has scalars in it
            pattern.constants = {place: text(code[place]) for op in pattern.ops for place in op.values}
        alike = self._alike.setdefault(key, [])
        alike.insert(0, fragment)
        self._all[fragment] = None
        for old in [*alike[MAX_ALIKE:], *list(self._all)[: max(0, len(self._all) - MAX_FRAGMENTS)]]:
            self._remove(old)
        return fragment

    def _remove(self, fragment: Fragment) -> None:
        if fragment in self._all:
            del self._all[fragment]
            self._drop(fragment)
            alike = self._alike[fragment.key]
            alike.remove(fragment)
            if not alike:
                del self._alike[fragment.key]

    def _drop(self, fragment: Fragment) -> None:
        """End a fragment's program."""
        program, fragment.program = fragment.program, None
        if program is not None:
            self._programs.kept -= program.size
            for workers, name in program.constants:
                self._emitter.free(workers, [name])

    def clear(self) -> None:
        """Forget all: numbers of templates begin again, or a worker is lost and with it its part of the programs."""
        if self._recording is not None:
            self._programs.discard()
        for fragment in list(self._all):
            self._remove(fragment)
        self._cuts.clear()
        self._recording, self._met = None, []

    def close(self, leavings: Leavings) -> None:
        """The session is over."""
        leavings.add(self._alike)
        leavings.add(self._all, large=True)
        self._cuts.leave(leavings)
        leavings.add(self._counts)
        self._recording, self._met = None, []

    def _count(self, slot: int) -> CallCounts:
        counts = self._counts.setdefault(slot, CallCounts())
        if len(self._counts) > MAX_SLOTS:
            self._counts.popitem(last=False)
        return counts

    def report(self, slot: int) -> dict[str, Any]:
        """The body of the answer to InspectFragments."""
        counts = self._counts.get(slot, CallCounts())
        programs = {fragment.number for fragment in self._all if fragment.program is not None}
        return {
            "programs": len(programs & counts.fragments), "ops": counts.ops, "carried": counts.carried,
            "last_ops": counts.last_ops, "last_carried": counts.last_carried,
            "why": [[count, why] for why, count in counts.why.most_common()],
        }  # fmt: skip

    # ---- sealing

    def _seal(self, recording: _Recording, freed: list[int]) -> None:
        fragment, call = recording.fragment, recording.call
        made = {i: number for number, i in enumerate(call.made)}
        ended = {*freed, *self._freed_within(fragment.pattern, call)}
        fragment.kept.update(number for i, number in made.items() if i not in ended)
        fragment.held.update(number for number, i in enumerate(call.ins) if i not in ended)
        # A tensor that was alive behind an earlier call stays alive in the program, though this call has freed it.
        self._redistributor.free([i for i in freed if i in made and made[i] not in fragment.kept])
        result = self._write(recording)
        fragment.why = result if isinstance(result, str) else ""
        if isinstance(result, FragmentProgram):
            fragment.program, fragment.tries = result, 0
            self._programs.sealed = self._context.cluster.seq

    def _write(self, recording: _Recording) -> FragmentProgram | str:
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

    def _write_tape(self, recording: _Recording, tape: Recording) -> FragmentProgram | str:
        fragment, call, ins, programs = recording.fragment, recording.call, recording.ins, self._programs
        programs.deferred.end(tape)
        with self._context.apart():
            bases = self._bases(ins, tape)
            tensors = [*ins, *(_base(ins[n], depth) for n, depth in bases)]
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
            self._emitter.begin_run()  # behind what other sessions have planned meanwhile; all before is flushed
            if fragment not in self._all:
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
            changed=changed,
            views=[(n, recording.older[n][1]) for n in relaid],
            rebound=result.rebound,
            sharing=_sharing(ins),
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

    # ---- replaying

    def _launch(
        self, fragment: Fragment, program: FragmentProgram, call: FragmentCall, ins: list[Tensor], freed: list[int]
    ) -> str:
        """Carry out a call by its program. Where that does not serve: why, and nothing is done but moves of inputs."""
        rows = self._table.rows
        freed = [*freed, *self._freed_within(fragment.pattern, call)]
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
        tensors = [*ins, *(_base(ins[n], depth) for n, depth in program.bases)] if program.bases else ins
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

    @staticmethod
    def _freed_within(pattern: FragmentPattern, call: FragmentCall) -> list[int]:
        """Ids that the code itself frees."""
        return [(call.ins if before else call.made)[number] for before, number in pattern.freed]

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
