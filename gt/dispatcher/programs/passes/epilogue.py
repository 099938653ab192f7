"""What a step does once, after its micro-batches: whose report of the loss (L), reduction of gradients (R) or optimizer (O) a
row is.

It is a stage's if all that it depends on is: what it reads was written there, what it writes was used there. What depends on
no action comes before all of them; what depends on other workers' stages (a norm of all gradients) comes after.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gt.dispatcher.programs.passes.stages import LATE, Bases, Parts, ScheduledInstruction, pairs, together
from gt.dispatcher.programs.reorder_check import COLLECTIVES, written
from gt.dispatcher.state.failures import Planned

Uses = frozenset[tuple[int, bool]]  # stages that something depends on, and whether on their backward
NONE: Uses = frozenset()
LATER = (-1, True)  # depends on more than its worker's stages
BEFORE = (-1.0, 1)  # after what is before all actions anyway


@dataclass(frozen=True)
class Epilogue:
    """joint: an optimizer waits for all stages. own: for those of its worker, several of which it is of."""

    joint: bool
    own: bool


@dataclass(slots=True)
class Touch:
    """Memory that a part, or several, read and write."""

    reads: set
    writes: set

    def meets(self, later: Touch) -> bool:
        """Whether its order with what comes later matters."""
        free = self.writes.isdisjoint(later.writes) and self.writes.isdisjoint(later.reads)
        return not (free and self.reads.isdisjoint(later.writes))

    def add(self, other: Touch) -> None:
        self.reads |= other.reads
        self.writes |= other.writes


def ending(parts: Parts, meshes: Sequence[tuple[int, ...]], memory: dict[int, Bases], ops: dict[int, Planned]) -> Epilogue:
    """Give the parts after the micro-batches their place: a stage and letter, or before or after all actions."""
    stages = {worker: {stage for stage, mesh in enumerate(meshes) if worker in mesh} for worker in parts}
    touches = {key: touch for worker, rows in parts.items() for key, touch in _touches(rows, memory[worker], ops)}
    uses = _uses(parts, stages, touches)
    joint = any(LATER in found for found in uses.values())
    own = False
    for worker, rows in parts.items():
        _letters(rows, uses, touches)
        for part in rows:
            if part.once is not None and part.once[1] == "O":
                several = len({stage for stage, _ in uses[id(part)]}) > 1
                own = own or (several and not joint)
                if several or joint:
                    part.once = (min(stages[worker]), "O") if stages[worker] and not part.moves else None
                part.when = LATE if joint else ()
    return Epilogue(joint, own)


def _touches(rows: Sequence[ScheduledInstruction], memory: Bases, ops: dict[int, Planned]) -> Iterable[tuple[int, Touch]]:
    """What each part touches. A name that comes to be another tensor's counts as memory that is written then."""
    known: set[int] = set()
    again: set[int] = set()
    for part in rows:
        reads, makes = part.row.ids()
        again.update(known.intersection(makes))
        known.update(reads, makes)
    for part in rows:
        reads, makes = part.row.ids()
        seen = {memory[id(part), i] for i in reads}
        changed = {memory[id(part), reads[k]] for k in written(part.row, ops)}
        made = {memory[id(part), i] for i in makes} - seen
        named = {(i,) for i in again.intersection(makes)}
        yield id(part), Touch(seen | {(i,) for i in again.intersection(reads)}, changed | made | named)


def _uses(parts: Parts, stages: dict[int, set[int]], touches: dict[int, Touch]) -> dict[int, Uses]:
    """Of each part after the micro-batches what it depends on, messages and collectives included."""
    links = [(send, receive) for send, receive in pairs(parts) if receive.tail]
    teams = [team for team in together(parts) if any(part.tail for part in team)]
    given: dict[int, Uses] = {}  # from other workers
    while True:
        uses: dict[int, Uses] = {}
        for worker, rows in parts.items():
            uses.update(_along(rows, stages[worker], touches, given))
        now = dict(given)
        for send, receive in links:
            now[id(receive)] = now.get(id(receive), NONE) | uses.get(id(send), NONE)
        for team in teams:
            every = NONE.union(*[uses.get(id(part), NONE) for part in team])
            now.update((id(part), every) for part in team)
        if now == given:
            return uses
        given = now


def _along(
    rows: Sequence[ScheduledInstruction], own: set[int], touches: dict[int, Touch], given: dict[int, Uses]
) -> Iterable[tuple[int, Uses]]:
    """One worker's, in the order of the calls."""
    wrote: dict[object, Uses] = defaultdict(frozenset)
    read: dict[object, Uses] = defaultdict(frozenset)
    for part in rows:
        touch, found = touches[id(part)], NONE
        if part.tail:
            before = [wrote[base] for base in touch.reads | touch.writes] + [read[base] for base in touch.writes]
            found = given.get(id(part), NONE).union(*before)
            if found and (part.moves or not {stage for stage, _ in found} <= own):
                found |= {LATER}
            yield id(part), found
        elif part.key is not None:
            found = frozenset(((part.key.stage, part.key.backward),))
        elif part.when == LATE:
            found = frozenset((LATER,))
        for base in touch.writes if found else ():
            wrote[base] |= found
        for base in touch.reads if found else ():
            read[base] |= found


def _letters(rows: Sequence[ScheduledInstruction], uses: dict[int, Uses], touches: dict[int, Touch]) -> None:
    """R is what a collective needs, L what only forwards lead to and nothing else needs, O the rest."""
    reduced, other = Touch(set(), set()), Touch(set(), set())
    for part in reversed(rows):
        if not part.tail:
            continue
        found, touch = uses[id(part)], touches[id(part)]
        if not found:
            part.when = BEFORE
            continue
        stage, single = min(found)[0], len({stage for stage, _ in found}) == 1
        if single and LATER not in found and (part.row.define.kind in COLLECTIVES or touch.meets(reduced)):
            part.once, part.when = (stage, "R"), ()
            reduced.add(touch)
        elif single and not any(backward for _, backward in found) and not touch.meets(other):
            part.once, part.when = (stage, "L"), ()
            continue
        else:
            part.once = stage, "O"
        other.add(touch)
