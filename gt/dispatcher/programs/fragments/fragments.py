"""Fragments: runs of ops between two reads of a value, replayed as programs while the client's Python goes on.

A function whose Python has to run at each call (it reads values, prints, counts) sends the same runs of ops again and again. A
client marks where such a run begins and ends. The first time it is planned op by op, the second time recorded, and from then on
one instruction for each worker carries it out. This is the fragment cache of a dynamic optimizer (Dynamo, Bala et al., 2000).

Nothing is assumed about Python: the ops themselves are compared (fragment_pattern.py), so branches and loops need no guards.
The ops are at hand in any case. Where a program cannot serve, they are planned as if there were none.
"""

from __future__ import annotations

from typing import Any

from gt.dispatcher.fairness.time_slices import Leavings
from gt.dispatcher.planning.redistributor import Redistributor
from gt.dispatcher.programs.fragments.call_counts import CallCounts, SlotCounts
from gt.dispatcher.programs.fragments.fragment_cuts import FragmentCuts, outline
from gt.dispatcher.programs.fragments.fragment_launch import HELD, KEPT, FragmentLauncher
from gt.dispatcher.programs.fragments.fragment_pattern import count_ops, parse
from gt.dispatcher.programs.fragments.fragment_program import Fragment, FragmentRecording
from gt.dispatcher.programs.fragments.fragment_sealing import FragmentSealer
from gt.dispatcher.programs.fragments.fragment_table import FragmentTable
from gt.dispatcher.programs.programs import Programs
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.failures import Planned
from gt.dispatcher.state.records import NO_ORIGIN
from gt.dispatcher.state.tensors import Tensor
from gt.errors import ProtocolError
from gt.ir.instr import BACKENDS, END_FRAGMENT, FRAGMENT_HEADER

MAX_TRIES = 4  # recordings of a fragment that can be no program
MAX_MISFITS = 4  # calls in a row for which a program does not serve; then another is recorded
SHORT_INSTRUCTIONS = 2048  # instructions on all workers together: a shorter program is written in milliseconds
NEW, RECORDED = "they were met for the first time", "they were recorded"
DYNAMIC, UNFIT = "the shape of a result depends on values", "ZeRO reduces gradients among them, or they are too many"


class Fragments:
    """The fragments of one session."""

    def __init__(self, context: SessionContext, redistributor: Redistributor, programs: Programs) -> None:
        self._context, self._redistributor, self._programs = context, redistributor, programs
        self._table, self._failures = context.table, context.failures
        self._fragments = FragmentTable(context, programs)
        self._sealer = FragmentSealer(context, redistributor, programs, self._fragments)
        self._launcher = FragmentLauncher(context, redistributor, programs)
        self._cuts, self._counts = FragmentCuts(), SlotCounts()
        self._recording: FragmentRecording | None = None
        self._met: list[tuple[Fragment, tuple]] = []  # for the first time, and ids of the tensors that each reads

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
        counts = self._counts.at(slot)
        why, ops = self._meet(rows, BACKENDS[backend], seed, counter, freed, counts)
        counts.add(call, ops, why)
        return first if why else end + 2 + len(freed)

    def leave(self, code: list, at: int) -> int:
        """Deal with an END_FRAGMENT whose ops were planned one by one."""
        freed = self._freed(code, at)
        recording, self._recording = self._recording, None
        if recording is not None:
            self._sealer.seal(recording, freed)
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
        fragment, call = self._fragments.find(rows, backend, seed, counter)
        if fragment is None or call is None:
            return self._add(rows, backend, seed, counter)
        counts.fragments.add(fragment.number)
        ops = len(fragment.pattern.ops)
        if not self._programs.deferred.able or self._context.tape is not None:
            return "they are part of another recording", ops
        ins = [tensor for i in call.ins if (tensor := self._table.rows.get(i)) is not None]
        if len(ins) != len(call.ins):
            return "a tensor is not of this session", ops  # the op that reads it raises the error
        if self._context.needs_pauses(0, ins):
            return "many of the tensors that they read have no place yet", ops
        if harm := self._harm(fragment, ins):
            return harm, ops
        if fragment.program is not None:
            misfit = self._launcher.launch(fragment, fragment.program, call, ins, freed)
            if not misfit:
                fragment.misfits = 0
                return "", ops
            fragment.misfits += 1  # one may be chance; KEPT and HELD are not, and a new recording keeps more
            if misfit not in (KEPT, HELD) and fragment.misfits < MAX_MISFITS:
                return misfit, ops
            self._fragments.drop(fragment)
        if fragment.tries >= MAX_TRIES:
            return fragment.why, ops
        fragment.tries += 1
        if not self._programs.hinted(-fragment.number, ins):
            self._programs.hint(-fragment.number, ins)
        self._programs.record(-fragment.number, 0, call.ins)
        older = [(t.storage.rest, len(t.storage.tensors)) for t in ins]
        self._recording = FragmentRecording(fragment, call, backend, ins, older)
        return fragment.why or RECORDED, ops

    def _harm(self, fragment: Fragment, ins: list[Tensor]) -> str:
        """The reason why the fragment gives no values: a worker is lost, or it reads a failed tensor; "" if neither holds."""
        if not self._failures.troubled:
            return ""
        self._failures.recover()
        known = fragment.pattern.ops[0].known
        return self._failures.harm([Planned(0, known, NO_ORIGIN, tuple(t.storage for t in ins), (), ())])

    def _add(self, code: list, backend: str, seed: int, counter: int) -> tuple[str, int]:
        """Remember a fragment that was met for the first time: why no program carries it out, and the number of its ops."""
        pattern = parse(code, self._context.templates, seed, counter)
        if pattern is None:
            ops, dynamic = count_ops(code, self._context.templates)
            return DYNAMIC if dynamic else UNFIT, ops
        new = outline(code, pattern, seed, counter)
        self._cuts.add(new)
        parts = self._cuts.parts(new, self._context.templates)
        for part, base in parts if len(parts) > 1 else [(code, counter)]:  # as it will come from now on
            if len(parts) == 1 or self._fragments.find(part, backend, seed, base)[0] is None:
                known = pattern if len(parts) == 1 else parse(part, self._context.templates, seed, base)
                if known is not None:
                    self._met.append((self._fragments.remember(part, known, backend), known.first_in(part)))
        return NEW, len(pattern.ops)

    def clear(self) -> None:
        """Forget all: numbers of templates begin again, or a worker is lost and with it its part of the programs."""
        if self._recording is not None:
            self._programs.discard()
        self._fragments.clear()
        self._cuts.clear()
        self._recording, self._met = None, []

    def close(self, leavings: Leavings) -> None:
        """The session is over."""
        self._fragments.leave(leavings)
        self._cuts.leave(leavings)
        self._counts.leave(leavings)
        self._recording, self._met = None, []

    def report(self, slot: int) -> dict[str, Any]:
        """The body of the answer to InspectFragments."""
        return self._counts.report(slot, self._fragments.with_programs())
