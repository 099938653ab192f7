"""The fragments of a session by their patterns. Beyond a limit the least recently used ones are dropped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from gt.dispatcher.fairness.time_slices import Leavings
from gt.dispatcher.programs.fragments.fragment_pattern import FragmentCall, FragmentPattern, pattern_key, text
from gt.dispatcher.programs.fragments.fragment_program import Fragment, sharing
from gt.dispatcher.programs.programs import Programs
from gt.dispatcher.state.context import SessionContext

MAX_FRAGMENTS = 512  # fragments of a session; beyond that the least recently used one is dropped
MAX_ALIKE = 8  # fragments of one length and first op


class FragmentTable:
    """Finds the fragment of a run of ops. Of those that match, the one used last comes first."""

    def __init__(self, context: SessionContext, programs: Programs) -> None:
        self._emitter, self._table, self._programs = context.emitter, context.table, programs
        self._all: OrderedDict[Fragment, None] = OrderedDict()  # least recently used first
        self._alike: dict[tuple, list[Fragment]] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, fragment: Fragment) -> bool:
        return fragment in self._all

    def with_programs(self) -> set[int]:
        """Numbers of the fragments that have a program."""
        return {fragment.number for fragment in self._all if fragment.program is not None}

    def find(self, rows: list, backend: str, seed: int, counter: int) -> tuple[Fragment | None, FragmentCall | None]:
        """The fragment that has these ops, and the call's numbers for its pattern."""
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
        """False if these tensors are no such views, or share memory otherwise, than those that its program was made for."""
        program, rows = fragment.program, self._table.rows
        if program is None or any(i not in rows for i in ins):
            return True
        tensors = [rows[i] for i in ins]
        return (
            sharing(tensors) == program.sharing
            and [t.spec.form for t in tensors] == program.forms
            and all(tensors[n].descent(steps) == descent for n, steps, descent in program.descents)
        )

    def _rests(self, ins: Iterable[int]) -> tuple[bool, ...]:
        """True for each tensor that ZeRO has rest in pieces between uses."""
        rows = self._table.rows
        return tuple([i in rows and rows[i].storage.rest is not None for i in ins])

    def remember(self, code: list, pattern: FragmentPattern, backend: str) -> Fragment:
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
            self.drop(fragment)
            alike = self._alike[fragment.key]
            alike.remove(fragment)
            if not alike:
                del self._alike[fragment.key]

    def drop(self, fragment: Fragment) -> None:
        """End a fragment's program."""
        program, fragment.program = fragment.program, None
        if program is not None:
            self._programs.kept -= program.size
            for workers, name in program.constants:
                self._emitter.free(workers, [name])

    def clear(self) -> None:
        """Remove all, with their programs."""
        for fragment in list(self._all):
            self._remove(fragment)

    def leave(self, leavings: Leavings) -> None:
        leavings.add(self._alike)
        leavings.add(self._all, large=True)
