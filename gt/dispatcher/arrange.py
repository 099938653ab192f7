"""Instructions of a recorded step in the order of a pipeline schedule, each worker's for itself.

Stages and micro-batches are known from where ops come from. A worker's rows become actions (forward, backward, gradients
of inputs or weights of one stage and micro-batch) and transfers; both are put in the order in which a simulation of the
schedule has them, which is one order for all workers, so that nobody waits in a circle. What depends on what is checked
afterwards: an order that would change a value is not taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gt.dispatcher import schedule
from gt.dispatcher.depends import COLLECTIVES, Unfit, check, flow, viewed, written
from gt.dispatcher.failures import Planned
from gt.dispatcher.plan.groups import stem
from gt.dispatcher.tape import Row, Tape
from gt.errors import ConfigError

LATE = (float("inf"), 0)  # after all actions
EARLY = (-1.0, 0)  # before them
SENT = frozenset((0, 1))  # leads to another stage, which is more than one end


class Key(NamedTuple):
    """An action: its stage, whether it is backward, its micro-batch."""

    stage: int
    backward: bool
    micro: int


@dataclass(slots=True, eq=False)
class Part:
    """A row with its place: which action it belongs to, or None; `when` orders it among all of its worker's."""

    row: Row
    number: int
    op: Planned
    key: Key | None = None
    moves: bool = False  # sends or receives
    when: tuple = LATE
    weight: bool = False  # of the gradients of weights only


@dataclass
class Stages:
    """Workers of each stage, and the action of each op that lies in one."""

    meshes: list[tuple[int, ...]] = field(default_factory=list)
    keys: dict[int, Key] = field(default_factory=dict)
    micro: int = 0


def arrange(tape: Tape, name: str) -> dict:
    """Put the rows of a tape in the order of the schedule of this name; what was done, or "why" it could not be."""
    try:
        ops = {row.seq: row for row in tape.journal}
        stages = _stages(tape.journal)
        parts = {worker: _parts(worker, rows, ops, stages) for worker, rows in tape.code.items()}
        _Needs(parts, stages.meshes).assign()
        meshes = list(dict.fromkeys(stages.meshes))
        places = [meshes.index(mesh) for mesh in stages.meshes]
        costs = schedule.uniform(len(places))
        made = schedule.make(name, stages=len(places), workers=places, micro_batches=stages.micro, costs=costs)
        split = any(action.kind == "I" for row in made.rows for action in row)
        found = _times(made.rows, schedule.simulate(made.rows, costs))
        if split:
            _weights(parts, ops)
        _when(parts, found, split)
        code = {worker: [p.row for p in sorted(mine, key=lambda p: (*p.when, p.number))] for worker, mine in parts.items()}
        for worker, mine in parts.items():
            check(worker, [p.row for p in mine], code[worker], ops)
        flow(code)
    except (Unfit, ConfigError) as error:
        return {"name": name, "why": str(error)}
    tape.code.update(code)
    named = [p for mine in parts.values() for p in mine if p.key is not None and not p.moves]
    tape.names.update((id(p.row), str(schedule.Action(*_action(p, split)))) for p in named)
    timeline = schedule.simulate(made.rows, costs)
    return {
        "name": made.name, "why": "", "stages": len(places), "micro_batches": stages.micro, "rows": str(made),
        "bubble": [round(b / timeline.makespan, 4) for b in timeline.bubble], "peak": list(timeline.peak),
    }  # fmt: skip


# ---- stages


def _stages(journal: Sequence[Planned]) -> Stages:
    """Stages are what a micro-batch passes, in order; backward passes them the other way. A worker may have several."""
    found = Stages()
    paths: dict[tuple[bool, int], list[str]] = defaultdict(list)
    visits: dict[int, tuple[bool, int, int]] = {}
    for row in journal:
        origin = row.origin
        if origin.micro < 0 or origin.meaning is None:
            continue
        name, path = stem(origin.meaning.name), paths[origin.backward, origin.micro]
        if not path or path[-1] != name:
            path.append(name)
            if not origin.backward and not origin.micro:
                found.meshes.append(origin.meaning.mesh.workers)
        visits[row.seq] = (origin.backward, origin.micro, len(path) - 1)
    if not found.meshes:
        raise Unfit("no op lies in a signal group within gt.microbatches")
    found.micro = 1 + max(micro for _, micro in paths)
    names, count = paths[False, 0], len(found.meshes)
    if len(set(found.meshes)) < 2:
        raise Unfit("there is one stage only: name groups on different workers for the stages")
    for (backward, micro), path in paths.items():
        if path != (names[::-1] if backward else names):
            way = "backward" if backward else "forward"
            raise Unfit(f"micro-batch {micro} passes {' -> '.join(path)} {way}; the first passes {' -> '.join(names)} forward")
    for seq, (backward, micro, visit) in visits.items():
        found.keys[seq] = Key(count - 1 - visit if backward else visit, backward, micro)
    return found


def _parts(worker: int, rows: Sequence[Row], ops: dict[int, Planned], stages: Stages) -> list[Part]:
    """The rows of one worker, with the action of those that its own stages' ops became."""
    found, op = [], next(iter(ops.values()))
    bounds = [p.seq for p in ops.values() if p.origin.micro >= 0]
    first, last = min(bounds), max(bounds)
    for number, row in enumerate(rows):
        op = ops.get(row.seq, op)
        part = Part(row, number, op, moves=row.define.kind in ("send", "recv", "merge"))
        key = stages.keys.get(op.seq)
        if key is not None and not part.moves and worker in stages.meshes[key.stage]:
            part.key = key
        if op.seq < first:
            part.when = EARLY
        elif op.seq <= last:
            part.when = ()
        found.append(part)
    return found


class _Needs:
    """Gives rows that are no stage's own (transfers, what is outside of groups) to the action that makes or takes them."""

    def __init__(self, parts: dict[int, list[Part]], meshes: Sequence[tuple[int, ...]]) -> None:
        self.parts, self.meshes = parts, meshes
        self.maker: dict[int, dict[int, Part]] = {}  # part -> of each id that it reads, what made it; by identity
        self.pairs = _pairs(parts)
        self.given: set[Part] = set()  # parts whose action was found here
        self.together = list(_together(parts).values())

    def assign(self) -> None:
        """Sends go with what made their data; everything else with the first action that needs it, or to the end."""
        for rows in self.parts.values():
            self._makers(rows)
        takers: dict[int, Part] = {}  # part (by identity) -> the first action's part that needs it
        for worker in self.parts:
            self._backwards(worker, takers)
        changed = True
        while changed:  # across workers: a send is needed where what it carries is, and a collective by all or none
            changed = False
            for some in self.together:
                found = [t for p in some if (t := p if p.key is not None else takers.get(id(p))) is not None]
                for part in some if found else ():
                    if part.key is None and id(part) not in takers:
                        takers[id(part)], changed = found[0], True
            for send, receive in self.pairs:
                taker = receive if receive.key is not None else takers.get(id(receive))
                if taker is not None and id(send) not in takers:
                    takers[id(send)] = taker
                    changed = True
            if changed:
                for worker in self.parts:
                    self._backwards(worker, takers)
        self._give_all(takers)
        while self._agree():
            self._give_all(takers)

    def _give_all(self, takers: dict[int, Part]) -> None:
        for worker, rows in self.parts.items():
            made_in: dict[int, Key] = {}
            for part in rows:
                if (part.key is None and part.when == ()) or part in self.given:
                    self._give(worker, part, takers.get(id(part)), made_in)
                if part.key is not None:
                    made_in.update(dict.fromkeys(part.row.ids()[1], part.key))

    def _agree(self) -> bool:
        """Give the members of a collective the last of their actions; whether that changed one."""
        changed = False
        for some in self.together:
            keys = [part.key for part in some if part.key is not None]
            last = max(keys, default=None, key=_order)
            for part in some if last is not None else ():
                if part.key != last:
                    self.given.discard(part)
                    part.key, part.when, changed = last, (), True
        return changed

    def _give(self, worker: int, part: Part, taker: Part | None, made_in: dict[int, Key]) -> None:
        """Its action: that which takes it where that is this worker's own, else that which made what it reads."""
        self.given.add(part)
        if taker is None or taker.key is None:
            part.when = LATE
        elif part.row.define.kind != "send" and worker in self.meshes[taker.key.stage]:
            part.key = taker.key
        else:
            part.key = max((made_in[i] for i in part.row.ids()[0] if i in made_in), default=None, key=_order)
            part.when = () if part.key is not None else EARLY

    def _makers(self, rows: Sequence[Part]) -> None:
        made: dict[int, Part] = {}
        for part in rows:
            reads, makes = part.row.ids()
            self.maker[id(part)] = {i: made[i] for i in reads if i in made}
            made.update(dict.fromkeys(makes, part))

    def _backwards(self, worker: int, takers: dict[int, Part]) -> None:
        """What actions of this worker need, and what that needs."""
        for part in reversed(self.parts[worker]):
            needed = part if part.key is not None else takers.get(id(part))
            if needed is not None:
                for source in self.maker[id(part)].values():
                    if source.key is None:
                        known = takers.get(id(source))
                        if known is None or (known.key is not None and needed.key is not None and needed.number < known.number):
                            takers[id(source)] = needed


def _order(key: Key) -> tuple:
    """As the calls have them."""
    return key.micro, key.backward, -key.stage if key.backward else key.stage


def _pairs(parts: dict[int, list[Part]]) -> list[tuple[Part, Part]]:
    """Sends with what receives them: the n-th on a channel with the n-th."""
    sends: dict[tuple[int, int], list[Part]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Part]] = defaultdict(list)
    for worker, rows in parts.items():
        for part in rows:
            payload = part.row.define.payload
            if part.row.define.kind == "send":
                sends[worker, payload["channel"]["peer"]].append(part)
            elif part.moves:
                for channel, _ in payload["parts"]:
                    receives[channel["peer"], worker].append(part)
    return [pair for way, rows in sends.items() for pair in zip(rows, receives[way], strict=True)]


def _together(parts: dict[int, list[Part]]) -> dict[tuple, list[Part]]:
    """Rows that are one collective: of one op, by their number among the team's of that op."""
    found: dict[tuple, list[Part]] = defaultdict(list)
    for rows in parts.values():
        count: dict[tuple, int] = defaultdict(int)
        for part in rows:
            if part.row.define.kind in COLLECTIVES:
                team = part.row.seq, tuple(part.row.define.payload["team"]["workers"])
                found[team, count[team]].append(part)
                count[team] += 1
    return found


# ---- order


def _times(rows: Sequence[Sequence[schedule.Action]], timeline: schedule.Timeline) -> dict[tuple, tuple[float, float]]:
    """Start and end of each action by (stage, letter, micro-batch)."""
    return {
        (action.stage, action.kind, action.micro): (timeline.start[w][n], timeline.end[w][n])
        for w, row in enumerate(rows)
        for n, action in enumerate(row)
    }


def _when(parts: dict[int, list[Part]], times: dict, split: bool) -> None:
    """Actions at their start, transfers at the end of what made their data: the same order for everybody."""
    ready: dict[int, float] = defaultdict(float)  # by op: its transfer between two meshes is one
    for rows in parts.values():
        for part in rows:
            if part.key is not None and part.row.define.kind == "send":
                ready[part.op.seq] = max(ready[part.op.seq], times[_action(part, split)][1])
    for rows in parts.values():
        for part in rows:
            if part.moves and part.when == () and part.op.seq in ready:
                part.when = (ready[part.op.seq], 0, part.op.seq)
            elif part.key is not None:
                part.when = (times[_action(part, split)][0], 1, *_action(part, split))
            elif part.when == ():
                part.when = LATE


def _action(part: Part, split: bool) -> tuple[int, str, int]:
    assert part.key is not None
    stage, backward, micro = part.key
    return stage, ("W" if part.weight else "I") if backward and split else "B" if backward else "F", micro


def _weights(parts: dict[int, list[Part]], ops: dict[int, Planned]) -> None:
    """Mark the backward rows from which no other stage gets anything, and at most one gradient comes."""
    chain: set[Part] = set()
    while True:
        for rows in parts.values():
            _mark(rows, ops, chain)
        split = [some for some in _together(parts).values() if len({part.weight for part in some}) > 1]
        if not split:
            return
        chain.update(part for some in split for part in some)


def _mark(rows: Sequence[Part], ops: dict[int, Planned], chain: set[Part]) -> None:
    """chain: rows that are none of weights, whatever comes from them."""
    bases = _bases(rows)
    leads: dict[tuple[Key, int], frozenset[int]] = {}  # memory -> where it leads within an action: SENT, or up to two ends
    stages: dict[int, set[int]] = defaultdict(set)  # memory -> stages that read it
    for part in reversed(rows):
        if part.key is None or not part.key.backward:
            continue
        reads, makes = part.row.ids()
        touched = {bases[id(part), i] for i in makes} | {bases[id(part), reads[k]] for k in written(part.row, ops)}
        found: frozenset[int] = frozenset().union(*[leads.get((part.key, base), frozenset()) for base in touched])
        if part.row.define.kind == "send" or part in chain or any(stages[base] - {part.key.stage} for base in touched):
            found = SENT
        found = found or frozenset((id(part),))
        part.weight = len(found) < 2
        for i in reads:
            stages[bases[id(part), i]].add(part.key.stage)
            key = part.key, bases[id(part), i]
            leads[key] = leads.get(key, frozenset()) | found


def _bases(rows: Sequence[Part]) -> dict[tuple[int, int], int]:
    """(part, id that it reads or makes) -> the memory."""
    memory: dict[int, int] = {}
    found: dict[tuple[int, int], int] = {}
    for part in rows:
        reads, makes = part.row.ids()
        found.update({(id(part), i): memory.get(i, i) for i in reads})
        views = viewed(part.row)
        for n, i in enumerate(makes):
            memory[i] = memory.get(reads[views[n]], reads[views[n]]) if n in views else -id(part) * 64 - n
            found[id(part), i] = memory[i]
    return found
