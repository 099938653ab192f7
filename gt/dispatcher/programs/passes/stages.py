"""A recorded step's instructions with their places in a schedule: whose action each is, what belongs together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gt.dispatcher.programs.recording import Instruction
from gt.dispatcher.programs.reorder_check import COLLECTIVES, viewed
from gt.dispatcher.state.failures import Planned

LATE = (float("inf"), 0)  # after all actions
EARLY = (-1.0, 0)  # before them
Parts = dict[int, list["ScheduledInstruction"]]  # of each worker
Bases = dict[tuple[int, int], int]  # (a part's identity, id that it reads or makes) -> the memory


class Key(NamedTuple):
    """An action: its stage, whether it is backward, its micro-batch."""

    stage: int
    backward: bool
    micro: int


@dataclass(slots=True, eq=False)
class ScheduledInstruction:
    """A row with its place: which action it belongs to, or None; `when` orders it among all of its worker's."""

    row: Instruction
    number: int
    op: Planned
    key: Key | None = None
    moves: bool = False  # sends or receives
    when: tuple = LATE
    weight: bool = False  # of the gradients of weights only
    tail: bool = False  # comes after all micro-batches
    once: tuple[int, str] | None = None  # stage and letter, if it is done once a step

    def action(self, split: bool) -> tuple[int, str, int] | None:
        """Stage, letter and micro-batch, as in rows of actions."""
        if self.key is None:
            return (*self.once, -1) if self.once is not None else None
        stage, backward, micro = self.key
        return stage, ("W" if self.weight else "I") if backward and split else "B" if backward else "F", micro


def pairs(parts: Parts) -> list[tuple[ScheduledInstruction, ScheduledInstruction]]:
    """Sends with what receives them: the n-th on a channel with the n-th. A worker that is not in `parts` receives nothing."""
    sends: dict[tuple[int, int], list[ScheduledInstruction]] = defaultdict(list)
    receives: dict[tuple[int, int], list[ScheduledInstruction]] = defaultdict(list)
    for worker, rows in parts.items():
        for part in rows:
            payload = part.row.define.payload
            if part.row.define.kind == "send":
                sends[worker, payload["channel"]["peer"]].append(part)
            elif part.moves:
                for channel, _ in payload["parts"]:
                    receives[channel["peer"], worker].append(part)
    return [pair for way, rows in sends.items() for pair in zip(rows, receives[way], strict=way[1] in parts)]


def together(parts: Parts) -> list[list[ScheduledInstruction]]:
    """Rows that are one collective: of one op, by their number among the team's of that op."""
    found: dict[tuple, list[ScheduledInstruction]] = defaultdict(list)
    for rows in parts.values():
        count: dict[tuple, int] = defaultdict(int)
        for part in rows:
            if part.row.define.kind in COLLECTIVES:
                team = part.row.seq, tuple(part.row.define.payload["team"]["workers"])
                found[team, count[team]].append(part)
                count[team] += 1
    return list(found.values())


def bases(rows: Sequence[ScheduledInstruction]) -> Bases:
    """The memory of what each part reads or makes."""
    memory: dict[int, int] = {}
    found: Bases = {}
    for part in rows:
        reads, makes = part.row.ids()
        found.update({(id(part), i): memory.get(i, i) for i in reads})
        views = viewed(part.row)
        for n, i in enumerate(makes):
            memory[i] = memory.get(reads[views[n]], reads[views[n]]) if n in views else -id(part) * 64 - n
            found[id(part), i] = memory[i]
    return found
