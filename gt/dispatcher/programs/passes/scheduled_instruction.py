"""A recorded step's instructions with their places in a schedule: the action of each, and the instructions that meet.

Example, worker 0 of two stages, before and after `gt.dispatcher.programs.passes.pipeline` has filled in the places:

    %5 = mm %0 %1     op of a group in micro-batch 1       key = (stage 0, forward, 1)
    send %5           a transfer: `moves`                  key = (stage 0, forward, 1), at the end of that action
    all_reduce %9     after all micro-batches: `tail`      once = (stage 0, R)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from gt.dispatcher.programs.recording import Instruction
from gt.dispatcher.state.failures import Planned
from gt.ir.dataflow import MemoryAccess
from gt.ir.instr import COLLECTIVES

LATE = (float("inf"), 0)  # after all actions
EARLY = (-1.0, 0)  # before them
Parts = dict[int, list["ScheduledInstruction"]]  # by worker, in order


class Key(NamedTuple):
    """An action: its stage, whether it is backward, its micro-batch."""

    stage: int
    backward: bool
    micro: int


@dataclass(slots=True, eq=False)
class ScheduledInstruction:
    """A row with its place: the action that it belongs to, or None; `when` orders it among all of its worker's."""

    row: Instruction
    number: int
    op: Planned
    key: Key | None = None
    moves: bool = False  # sends or receives
    when: tuple = LATE
    weight: bool = False  # True if it computes gradients of weights only
    tail: bool = False  # comes after all micro-batches
    once: tuple[int, str] | None = None  # stage and letter, if it is done once a step
    memory: MemoryAccess = field(default_factory=lambda: MemoryAccess([], []))

    def action(self, split: bool) -> tuple[int, str, int] | None:
        """Stage, letter and micro-batch, as in rows of actions."""
        if self.key is None:
            return (*self.once, -1) if self.once is not None else None
        stage, backward, micro = self.key
        return stage, ("W" if self.weight else "I") if backward and split else "B" if backward else "F", micro

    @property
    def written(self) -> list[int]:
        """Memory that it changes in place."""
        return [self.memory.reads[k] for k in self.row.define.effects.writes]


def match_transfers(parts: Parts) -> list[tuple[ScheduledInstruction, ScheduledInstruction]]:
    """Sends with their receives: the n-th on a channel with the n-th. A worker that is not in `parts` receives nothing."""
    sends: dict[tuple[int, int], list[ScheduledInstruction]] = defaultdict(list)
    receives: dict[tuple[int, int], list[ScheduledInstruction]] = defaultdict(list)
    for worker, rows in parts.items():
        for part in rows:
            payload = part.row.define.payload
            if part.row.kind == "send":
                sends[worker, payload["channel"]["peer"]].append(part)
            elif part.moves:  # one row may receive from several peers, each a part of its tensor
                for channel, _ in payload["parts"]:
                    receives[channel["peer"], worker].append(part)
    return [pair for way, rows in sends.items() for pair in zip(rows, receives[way], strict=way[1] in parts)]


def match_collectives(parts: Parts) -> list[list[ScheduledInstruction]]:
    """Rows that are one collective: of one op, by their number among the team's of that op."""
    collectives: dict[tuple, list[ScheduledInstruction]] = defaultdict(list)
    for rows in parts.values():
        count: dict[tuple, int] = defaultdict(int)
        for part in rows:
            if part.row.kind in COLLECTIVES:
                team = part.row.seq, tuple(part.row.define.payload["team"]["workers"])
                collectives[team, count[team]].append(part)
                count[team] += 1
    return list(collectives.values())
