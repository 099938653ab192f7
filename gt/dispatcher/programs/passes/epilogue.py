"""The pass that assigns the instructions after the last micro-batch to stages.

Each gets an action: L, a report of the loss; R, a reduction of gradients; O, an optimizer's step.

An instruction belongs to a stage if all instructions that it depends on do. One that depends on no action comes before all
actions. One that depends on other workers' stages (a norm of all gradients) comes after them. The dependences are those of
compilers: read after write, write after read, write after write.

Example, two stages, each with its optimizer:

    before:  F0 F1 B1 B0 | all_reduce g0, adamw 0                  (worker 0, after all micro-batches)
    after:   F0 F1 B1 B0 0R 0O                                     (actions of stage 0, which a schedule may place)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gt.dispatcher.programs.passes.scheduled_instruction import (
    LATE,
    Parts,
    ScheduledInstruction,
    match_collectives,
    match_transfers,
)
from gt.ir.instr import COLLECTIVES

Uses = frozenset[tuple[int, bool]]  # stages that something depends on, and whether on their backward
NONE: Uses = frozenset()
LATER = (-1, True)  # depends on more than its worker's stages
BEFORE = (-1.0, 1)  # after the instructions that precede all actions anyway


@dataclass(frozen=True)
class Epilogue:
    """joint: an optimizer waits for all stages. own: an optimizer is of several stages of its worker, and waits for these."""

    joint: bool
    own: bool


@dataclass(slots=True)
class Footprint:
    """Memory that a part, or several, read and write."""

    reads: set
    writes: set

    def meets(self, later: Footprint) -> bool:
        """True if its order with a later footprint matters."""
        free = self.writes.isdisjoint(later.writes) and self.writes.isdisjoint(later.reads)
        return not (free and self.reads.isdisjoint(later.writes))

    def add(self, other: Footprint) -> None:
        self.reads |= other.reads
        self.writes |= other.writes


Footprints = dict[ScheduledInstruction, Footprint]
Dependences = dict[ScheduledInstruction, Uses]


def place_epilogue(parts: Parts, meshes: Sequence[tuple[int, ...]]) -> Epilogue:
    """Give the parts after the micro-batches their place: a stage and letter, or before or after all actions."""
    # 1. The stages that each part depends on, over all workers. 2. A letter for each, worker by worker. 3. An optimizer that is
    #    of several stages (one fused op over all parameters) or waits for all (clipping) counts for its worker's first stage.
    stages = {worker: {stage for stage, mesh in enumerate(meshes) if worker in mesh} for worker in parts}
    footprints = {part: footprint for rows in parts.values() for part, footprint in _footprints(rows)}
    uses = _uses(parts, stages, footprints)
    joint = any(LATER in found for found in uses.values())
    own = False
    for worker, rows in parts.items():
        _classify(rows, uses, footprints)
        for part in rows:
            if part.once is not None and part.once[1] == "O":
                several = len({stage for stage, _ in uses[part]}) > 1
                own = own or (several and not joint)
                if several or joint:
                    part.once = (min(stages[worker]), "O") if stages[worker] and not part.moves else None
                part.when = LATE if joint else ()
    return Epilogue(joint, own)


def _footprints(rows: Sequence[ScheduledInstruction]) -> Iterable[tuple[ScheduledInstruction, Footprint]]:
    """The footprint of each part. A name that is defined again, for another tensor, counts as memory that is written then."""
    known: set[int] = set()
    again: set[int] = set()  # names that are defined a second time; (i,) below stands for such a name, beside memory i
    for part in rows:
        again.update(known.intersection(part.row.makes))
        known.update(part.row.reads, part.row.makes)
    for part in rows:
        seen = set(part.memory.reads)
        fresh = set(part.memory.makes) - seen
        named = {(i,) for i in again.intersection(part.row.makes)}
        yield part, Footprint(seen | {(i,) for i in again.intersection(part.row.reads)}, {*part.written, *fresh, *named})


def _uses(parts: Parts, stages: dict[int, set[int]], footprints: Footprints) -> Dependences:
    """The dependences of each part after the micro-batches, messages and collectives included."""
    links = [(send, receive) for send, receive in match_transfers(parts) if receive.tail]
    teams = [team for team in match_collectives(parts) if any(part.tail for part in team)]
    # A fixed point: dependences along each worker's rows, then those that messages and collectives carry to other workers. Sets
    # only grow, so it ends.
    from_others: Dependences = {}  # from other workers
    while True:
        uses: Dependences = {}
        for worker, rows in parts.items():
            uses.update(_along(rows, stages[worker], footprints, from_others))
        now = dict(from_others)
        for send, receive in links:
            now[receive] = now.get(receive, NONE) | uses.get(send, NONE)
        for team in teams:
            every = NONE.union(*[uses.get(part, NONE) for part in team])
            now.update((part, every) for part in team)
        if now == from_others:
            return uses
        from_others = now


def _along(
    rows: Sequence[ScheduledInstruction], own: set[int], footprints: Footprints, from_others: Dependences
) -> Iterable[tuple[ScheduledInstruction, Uses]]:
    """One worker's, in the order of the calls."""
    # By memory: the stages that its writers, or its readers, so far depend on. An action depends on its own stage alone here:
    # the schedule keeps the order among actions.
    wrote: dict[object, Uses] = defaultdict(frozenset)
    read: dict[object, Uses] = defaultdict(frozenset)
    for part in rows:
        footprint, uses = footprints[part], NONE
        if part.tail:
            before = [wrote[base] for base in footprint.reads | footprint.writes] + [read[base] for base in footprint.writes]
            uses = from_others.get(part, NONE).union(*before)
            if uses and (part.moves or not {stage for stage, _ in uses} <= own):
                uses |= {LATER}
            yield part, uses
        elif part.key is not None:
            uses = frozenset(((part.key.stage, part.key.backward),))
        elif part.when == LATE:
            uses = frozenset((LATER,))
        for base in footprint.writes if uses else ():
            wrote[base] |= uses
        for base in footprint.reads if uses else ():
            read[base] |= uses


def _classify(rows: Sequence[ScheduledInstruction], uses: Dependences, footprints: Footprints) -> None:
    """R: rows that a collective needs. L: rows that only forwards lead to and nothing else needs. O: the rest."""
    # From the last part to the first. `reduced`: tensors that later R touch; `other`: those that later R and O touch. A part
    # that a later R needs is R too, as a division of the terms. A part that a later O needs is no report.
    reduced, other = Footprint(set(), set()), Footprint(set(), set())
    for part in reversed(rows):
        if not part.tail:
            continue
        found, footprint = uses[part], footprints[part]
        if not found:
            part.when = BEFORE
            continue
        stage, single = min(found)[0], len({stage for stage, _ in found}) == 1
        if single and LATER not in found and (part.row.kind in COLLECTIVES or footprint.meets(reduced)):
            part.once, part.when = (stage, "R"), ()
            reduced.add(footprint)
        elif single and not any(backward for _, backward in found) and not footprint.meets(other):
            part.once, part.when = (stage, "L"), ()
            continue
        else:
            part.once = stage, "O"
        other.add(footprint)
