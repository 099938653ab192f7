"""Instructions of a recorded step in the order of a pipeline schedule, each worker's for itself.

Stages and micro-batches are known from where ops come from. A worker's rows become actions (forward, backward, gradients
of inputs or weights of one stage and micro-batch; what is done once a step) and transfers; both are put in the order in which
a simulation of the schedule has them, which is one order for all workers, so that nobody waits in a circle. What depends on
what is checked afterwards: an order that would change a value is not taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from gt.dispatcher import schedule
from gt.dispatcher.programs.passes.epilogue import ending
from gt.dispatcher.programs.passes.report import account
from gt.dispatcher.programs.passes.stage_costs import Found, Lies, price, stage_costs
from gt.dispatcher.programs.passes.stages import EARLY, LATE, Bases, Key, Parts, ScheduledInstruction, bases, pairs, together
from gt.dispatcher.programs.recording import Instruction, Recording
from gt.dispatcher.programs.reorder_check import COLLECTIVES, Unfit, check, flow, written
from gt.dispatcher.schedule.auto import NoRoom
from gt.dispatcher.schedule.placement import spread
from gt.dispatcher.sharding.groups import stem
from gt.dispatcher.sharding.views import VIEWS
from gt.dispatcher.state.failures import Planned
from gt.errors import ConfigError
from gt.ir.schedules import asked, size

SENT = frozenset((0, 1))  # leads to another stage, which is more than one end


class NoPipeline(Unfit):
    """It is none at all, and no mistake if only the config asks for a schedule."""


@dataclass
class StageAssignment:
    """Workers of each stage, their groups, and the action of each op that lies in one."""

    meshes: list[tuple[int, ...]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    keys: dict[int, Key] = field(default_factory=dict)
    micro: int = 0

    @property
    def backward(self) -> bool:
        """Whether there is one."""
        return any(key.backward for key in self.keys.values())


@dataclass
class PricedPipeline:
    """Instructions of a step as parts of its stages' actions, and the costs of the stages. places: rows of each stage."""

    ops: dict[int, Planned]
    stages: StageAssignment
    places: list[tuple[int, ...]]
    parts: Parts
    found: Found


def price_pipeline(
    journal: Sequence[Planned],
    code: dict[int, list[Instruction]],
    times: dict[int, float],
    lies: Lies,
    compiled: bool = False,
) -> PricedPipeline:
    """Assign each instruction of a step to an action of its stages, and estimate what the stages cost.

    Arguments as of `arrange`. NoPipeline or Unfit where the step is no pipeline.
    """
    ops = {row.seq: row for row in journal}
    stages = _stages(journal)
    parts = {worker: _parts(worker, rows, ops, stages) for worker, rows in code.items()}
    memory = {worker: bases(rows) for worker, rows in parts.items()}
    _Needs(parts, stages.meshes, memory, ops).assign()
    places = spread(stages.meshes)
    _weights(parts, ops, memory, places)
    end = ending(parts, stages.meshes, memory, ops)
    if not stages.backward:
        _reports(parts, stages.meshes)
    prices = price(parts, times, lies, memory if compiled else None)
    return PricedPipeline(ops, stages, places, parts, stage_costs(parts, stages.meshes, stages.micro, prices, memory, end))


def arrange(tape: Recording, text: str, times: dict[int, float], lies: Lies, compiled: bool = False) -> dict:
    """Put the rows of a tape in the order of the schedule that is asked for; what was done, or "why" it could not be.

    times: seconds of definitions, as far as they were measured. lies: how a tensor lies that was there before. compiled:
    whether ops are made one where they can be.
    """
    try:
        name, limit = asked(text)
        pipe = price_pipeline(tape.journal, tape.code, times, lies, compiled)
        stages, places, parts, found = pipe.stages, pipe.places, pipe.parts, pipe.found
        request = schedule.ScheduleRequest(name, places, stages.micro, limit, stages.backward)
        made = schedule.make(request, found.costs)
        timeline = schedule.simulate(made.rows, found.costs)
        split = any(action.kind == "I" for row in made.rows for action in row)
        _when(parts, {worker: _times(worker, stages.meshes, places, made.rows, timeline) for worker in parts}, split)
        code = {worker: [p.row for p in sorted(mine, key=lambda p: (*p.when, p.number))] for worker, mine in parts.items()}
        for worker, mine in parts.items():
            check(worker, [p.row for p in mine], code[worker], pipe.ops)
        flow(code)
    except NoRoom as error:
        return {"name": name, "why": error.said(size), "pipeline": True}
    except (Unfit, ConfigError, ValueError) as error:
        return {"name": text.partition(":")[0], "why": str(error), "pipeline": not isinstance(error, NoPipeline)}
    tape.code.update(code)
    named = [(p.row, action) for mine in parts.values() for p in mine if not p.moves and (action := p.action(split))]
    tape.names.update((id(row), str(schedule.Action(*action))) for row, action in named)
    return account(made, timeline, found, stages.names, request)


# ---- stages


def _stages(journal: Sequence[Planned]) -> StageAssignment:
    """Stages are what a micro-batch passes, in order; backward passes them the other way. A worker may have several."""
    found = StageAssignment()
    paths: dict[tuple[bool, int], list[str]] = defaultdict(list)
    visits: dict[int, tuple[bool, int, int]] = {}
    for row in journal:
        origin = row.origin
        if origin.micro < 0 or origin.meaning is None:
            continue
        name, path = stem(origin.meaning.name), paths[origin.backward, origin.micro]
        if path and path[-1] != name and row.known.name in VIEWS:
            continue  # a view stays with what it views, in whatever group
        if not path or path[-1] != name:
            path.append(name)
            if not origin.backward and not origin.micro:
                found.meshes.append(origin.meaning.mesh.workers)
        visits[row.seq] = (origin.backward, origin.micro, len(path) - 1)
    if not found.meshes:
        raise NoPipeline("no op runs in a signal group within gt.microbatches: put the stages in groups there")
    found.micro = 1 + max(micro for _, micro in paths)
    names, count = paths[False, 0], len(found.meshes)
    found.names = names
    if len(set(found.meshes)) < 2:
        raise NoPipeline("there is one stage only: name groups on different workers for the stages")
    for (backward, micro), path in paths.items():
        if path != (names[::-1] if backward else names):
            way = "backward" if backward else "forward"
            order = f"{' -> '.join(path)}, want {' -> '.join(names[::-1] if backward else names)}"
            raise Unfit(f"micro-batch {micro} runs stages {order} in its {way} pass, as micro-batch 0 does or in reverse")
    for seq, (backward, micro, visit) in visits.items():
        found.keys[seq] = Key(count - 1 - visit if backward else visit, backward, micro)
    return found


def _parts(
    worker: int, rows: Sequence[Instruction], ops: dict[int, Planned], stages: StageAssignment
) -> list[ScheduledInstruction]:
    """The rows of one worker, with the action of those that its own stages' ops became."""
    found, op = [], next(iter(ops.values()))
    bounds = [p.seq for p in ops.values() if p.origin.micro >= 0]
    first, last = min(bounds), max(bounds)
    for number, row in enumerate(rows):
        op = ops.get(row.seq, op)
        part = ScheduledInstruction(row, number, op, moves=row.define.kind in ("send", "recv", "merge"))
        key = stages.keys.get(op.seq)
        if key is not None and not part.moves and _has(stages.meshes[key.stage], worker, row):
            part.key = key
        if op.seq < first:
            part.when = EARLY
        elif op.seq <= last:
            part.when = ()
        else:
            part.tail = True
        found.append(part)
    return found


def _has(mesh: Sequence[int], worker: int, row: Instruction) -> bool:
    """Whether a stage has all workers that do a worker's row, which may be of more than it: what a split head gives back."""
    return set(row.define.payload["team"]["workers"] if row.define.kind in COLLECTIVES else (worker,)) <= set(mesh)


class _Needs:
    """Gives rows that are no stage's own (transfers, what is outside of groups) to the action that makes or takes them."""

    def __init__(
        self, parts: Parts, meshes: Sequence[tuple[int, ...]], memory: dict[int, Bases], ops: dict[int, Planned]
    ) -> None:
        self.parts, self.meshes, self.memory, self.ops = parts, meshes, memory, ops
        self.sources: dict[
            int, list[ScheduledInstruction]
        ] = {}  # part (by identity) -> what made, and last wrote, what it reads
        self.pairs = pairs(parts)
        self.given: set[ScheduledInstruction] = set()  # parts whose action was found here
        self.together = together(parts)

    def assign(self) -> None:
        """Sends go with what made their data; everything else with the first action that needs it, or to the end."""
        for worker, rows in self.parts.items():
            self._makers(rows, self.memory[worker])
        takers: dict[int, ScheduledInstruction] = {}  # part (by identity) -> the first action's part that needs it
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

    def _give_all(self, takers: dict[int, ScheduledInstruction]) -> None:
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

    def _give(
        self, worker: int, part: ScheduledInstruction, taker: ScheduledInstruction | None, made_in: dict[int, Key]
    ) -> None:
        """Its action: that which takes it where that is this worker's own, else that which made what it reads."""
        self.given.add(part)
        if taker is None or taker.key is None:
            part.when = LATE
        elif part.row.define.kind != "send" and _has(self.meshes[taker.key.stage], worker, part.row):
            part.key = taker.key
        else:
            part.key = max((made_in[i] for i in part.row.ids()[0] if i in made_in), default=None, key=_order)
            part.when = () if part.key is not None else EARLY

    def _makers(self, rows: Sequence[ScheduledInstruction], memory: Bases) -> None:
        made: dict[int, ScheduledInstruction] = {}
        wrote: dict[
            int, ScheduledInstruction
        ] = {}  # memory -> what last changed it: terms that are added up before they are sent, say
        for part in rows:
            reads, makes = part.row.ids()
            at = [memory[id(part), i] for i in reads]
            self.sources[id(part)] = [made[i] for i in reads if i in made] + [wrote[base] for base in at if base in wrote]
            wrote.update({at[k]: part for k in written(part.row, self.ops)})
            made.update(dict.fromkeys(makes, part))

    def _backwards(self, worker: int, takers: dict[int, ScheduledInstruction]) -> None:
        """What actions of this worker need, and what that needs."""
        for part in reversed(self.parts[worker]):
            needed = part if part.key is not None else takers.get(id(part))
            if needed is not None:
                for source in self.sources[id(part)]:
                    if source.key is None:
                        known = takers.get(id(source))
                        if known is None or (known.key is not None and needed.key is not None and needed.number < known.number):
                            takers[id(source)] = needed


def _order(key: Key) -> tuple:
    """As the calls have them."""
    return key.micro, key.backward, -key.stage if key.backward else key.stage


# ---- order


def _times(
    worker: int,
    meshes: Sequence[tuple[int, ...]],
    places: Sequence[tuple[int, ...]],
    rows: Sequence[Sequence[schedule.Action]],
    timeline: schedule.Timeline,
) -> dict[tuple, tuple[float, float]]:
    """Start and end of actions by (stage, letter, micro-batch): a worker's own where it is one of several that do it.

    places: rows of each stage.
    """
    own = {some[0] for mesh, some in zip(meshes, places) if worker in mesh and len(some) == 1}
    taken = [next((n for n in some if n in own), some[0]) for some in places]
    return {
        tuple(action): (timeline.start[n][k], timeline.end[n][k])
        for n, row in enumerate(rows)
        for k, action in enumerate(row)
        if taken[action.stage] == n
    }


def _when(parts: Parts, times: dict[int, dict], split: bool) -> None:
    """Actions at their start, transfers at the end of what made their data: the same order for everybody. times: by worker."""
    _first(parts)
    ready: dict[int, float] = defaultdict(float)  # by op: its transfer between two meshes is one
    inside = _inside(parts)
    for worker, rows in parts.items():
        for part in rows:
            if part.key is not None and part.row.define.kind == "send" and part.op.seq not in inside:
                ready[part.op.seq] = max(ready[part.op.seq], times[worker][part.action(split)][1])
    for worker, rows in parts.items():
        for part in rows:
            action = part.action(split)
            if part.moves and part.when == () and part.op.seq in ready:
                part.when = (ready[part.op.seq], 0, part.op.seq)
            elif action is not None and part.when not in (LATE, EARLY):
                part.when = (times[worker][action][0], 1, *action)
            elif part.when == ():
                part.when = LATE


def _inside(parts: Parts) -> set[int]:
    """Ops whose transfers are within one action, which several workers do together."""
    keys: dict[int, set[Key | None]] = defaultdict(set)
    for rows in parts.values():
        for part in rows:
            if part.moves:
                keys[part.op.seq].add(part.key)
    return {seq for seq, found in keys.items() if len(found) == 1}


def _first(parts: Parts) -> None:
    """What is sent before all actions, a weight that a later stage shares, is received so: messages keep their order."""
    sends: dict[int, list[ScheduledInstruction]] = defaultdict(list)
    for send, receive in pairs(parts):
        sends[id(receive)].append(send)
    for rows in parts.values():
        for part in rows:
            if id(part) in sends and all(send.when == EARLY for send in sends[id(part)]):
                part.when = EARLY


def _reports(parts: Parts, meshes: Sequence[tuple[int, ...]]) -> None:
    """What comes after the forwards of a step that has no backward is a report of its worker's last stage."""
    for worker, rows in parts.items():
        last = max((stage for stage, mesh in enumerate(meshes) if worker in mesh), default=-1)
        for part in rows:
            part.once = (last, "L") if part.once is not None else None


def _weights(parts: Parts, ops: dict[int, Planned], memory: dict[int, Bases], places: Sequence[tuple[int, ...]]) -> None:
    """Mark the backward rows from which no other stage gets anything, and at most one gradient comes.

    Where a stage is in several rows its W are at no one time, so what its workers do together is none of them.
    """
    teams = (part for some in together(parts) for part in some)
    chain = {part for part in teams if part.key is not None and len(places[part.key.stage]) > 1}
    while True:
        for worker, rows in parts.items():
            _mark(rows, ops, memory[worker], chain)
        split = [some for some in together(parts) if len({part.weight for part in some}) > 1]
        if not split:
            return
        chain.update(part for some in split for part in some)


def _mark(
    rows: Sequence[ScheduledInstruction], ops: dict[int, Planned], memory: Bases, chain: set[ScheduledInstruction]
) -> None:
    """chain: rows that are none of weights, whatever comes from them."""
    leads: dict[tuple[Key, int], frozenset[int]] = {}  # memory -> where it leads within an action: SENT, or up to two ends
    stages: dict[int, set[int]] = defaultdict(set)  # memory -> stages that read it
    for part in reversed(rows):
        if part.key is None or not part.key.backward:
            continue
        reads, makes = part.row.ids()
        touched = {memory[id(part), i] for i in makes} | {memory[id(part), reads[k]] for k in written(part.row, ops)}
        found: frozenset[int] = frozenset().union(*[leads.get((part.key, base), frozenset()) for base in touched])
        if part.row.define.kind == "send" or part in chain or any(stages[base] - {part.key.stage} for base in touched):
            found = SENT
        found = found or frozenset((id(part),))
        part.weight = len(found) < 2
        for i in reads:
            stages[memory[id(part), i]].add(part.key.stage)
            key = part.key, memory[id(part), i]
            leads[key] = leads.get(key, frozenset()) | found
