"""The pass that puts each worker's instructions in the order of a pipeline schedule.

Stages and micro-batches are known from the signal groups of ops. A worker's rows become transfers and actions: forward,
backward, gradients of inputs or weights of one stage and micro-batch, the epilogue. A simulation of the schedule gives them
one order for all workers. The tables (`gt.dispatcher.schedule`) are those of GPipe (Huang 2019), 1F1B (PipeDream,
Narayanan 2019), interleaved 1F1B (Megatron-LM, Narayanan 2021) and zero bubble (Qi 2024). Example, worker 0 of two stages:

    before:  0F0 send | recv 0B0 | 0F1 send | recv 0B1 | adamw
    after:   0F0 send | 0F1 send | recv 0B0 | recv 0B1 | 0O
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gt.dispatcher import schedule
from gt.dispatcher.programs.passes.context import PassContext
from gt.dispatcher.programs.passes.epilogue import place_epilogue
from gt.dispatcher.programs.passes.report import schedule_report
from gt.dispatcher.programs.passes.scheduled_instruction import (
    EARLY,
    LATE,
    Key,
    Parts,
    ScheduledInstruction,
    match_collectives,
    match_transfers,
)
from gt.dispatcher.programs.passes.stage_costs import OlderShapes, StageCosts, stage_costs, time_instructions
from gt.dispatcher.programs.recording import Code, Instruction, Recording
from gt.dispatcher.programs.reorder_check import CannotReorder
from gt.dispatcher.schedule.auto import NoRoom
from gt.dispatcher.schedule.placement import spread
from gt.dispatcher.sharding.groups import stem
from gt.dispatcher.sharding.views import VIEWS
from gt.dispatcher.state.failures import Planned
from gt.errors import ConfigError
from gt.ir.dataflow import NONE, accesses
from gt.ir.instr import COLLECTIVES, RECEIVES, TRANSFERS
from gt.ir.schedules import asked
from gt.ir.text import size

SENT = frozenset((0, 1))  # leads to another stage, which is more than one end
ENTER_ONCE = (
    "Enter each group once in a micro-batch: ops between two stages belong to one of them or to no group, and two backward "
    "passes, as a GAN has, to two functions"
)


class NoPipeline(CannotReorder):
    """A step without stages: no mistake if only the config asks for a schedule."""


@dataclass
class StageAssignment:
    """Workers of each stage, their groups, the first op of each with its line, and the action of each op in one."""

    meshes: list[tuple[int, ...]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    keys: dict[int, Key] = field(default_factory=dict)
    micro: int = 0

    @property
    def backward(self) -> bool:
        """True if the step has a backward pass."""
        return any(key.backward for key in self.keys.values())

    def revisited(self) -> str:
        """The advice for a forward pass that enters a group more than once, with the ops at which it does; else ""."""
        if len(set(self.names)) == len(self.names):
            return ""
        return f". The forward pass enters {_path(self.names, self.starts)}. {ENTER_ONCE}"


@dataclass
class PricedPipeline:
    """Instructions of a step as parts of its stages' actions, and the costs of the stages. places: rows of each stage."""

    stages: StageAssignment
    places: list[tuple[int, ...]]
    parts: Parts
    priced: StageCosts


def price_pipeline(
    journal: Sequence[Planned],
    code: Code,
    times: dict[int, float],
    older: OlderShapes,
    compiled: bool = False,
    shared: Mapping[int, int] = NONE,
) -> PricedPipeline:
    """Assign each instruction of a step to an action of its stages, and estimate the costs of the stages.

    times: measured seconds by definition. older, shared: shapes and memory of tensors from before, as of PassContext.
    compiled: whether a compiler fuses ops.
    NoPipeline or CannotReorder where the step is no pipeline.
    """
    stages = _stages(journal)
    places = spread(stages.meshes)
    parts = _scheduled(journal, code, stages, places, shared)
    end = place_epilogue(parts, stages.meshes)
    if not stages.backward:
        _reports(parts, stages.meshes)
    seconds = time_instructions(parts, times, older, fuses=compiled)
    return PricedPipeline(stages, places, parts, stage_costs(parts, stages.meshes, stages.micro, seconds, end))


def apply_schedule(recording: Recording, context: PassContext) -> Recording:
    """The rows of a recording in the order of the schedule that is asked for; context.schedule says which, or why not."""
    text = context.asked
    if not text:
        return recording
    try:
        # Rows become parts of actions with costs; costs give a schedule; its simulation gives each part its time.
        name, limit = asked(text)
        pipe = price_pipeline(recording.journal, recording.code, context.times, context.older, context.compiled, context.shared)
        stages, places, parts, priced = pipe.stages, pipe.places, pipe.parts, pipe.priced
        request = schedule.ScheduleRequest(name, places, stages.micro, limit, stages.backward)
        chosen = schedule.make(request, priced.costs)
        timeline = schedule.simulate(chosen.rows, priced.costs)
        split = any(action.kind == "I" for row in chosen.rows for action in row)
        _when(parts, {worker: _times(worker, stages.meshes, places, chosen.rows, timeline) for worker in parts}, split)
    except NoRoom as error:
        context.schedule = {"name": name, "why": error.said(size), "pipeline": True}
        return recording
    except ConfigError as error:  # a placement that the schedule does not permit
        context.reject_schedule(f"{error}{stages.revisited()}", pipeline=True)
        return recording
    except (CannotReorder, ValueError) as error:
        context.reject_schedule(str(error), pipeline=not isinstance(error, NoPipeline))
        return recording
    context.schedule = schedule_report(chosen, timeline, priced, stages.names, request)
    # Rows of one action have one time, and stay in the order of the calls.
    code = {worker: [_row(p, split) for p in sorted(rows, key=lambda p: (*p.when, p.number))] for worker, rows in parts.items()}
    return replace(recording, code={**recording.code, **code})


def _row(part: ScheduledInstruction, split: bool) -> Instruction:
    """The row with its action, if it belongs to one."""
    row, action = part.row, None if part.moves else part.action(split)
    if action is None:
        return row
    return Instruction(row.seq, row.define, row.operands, str(schedule.Action(*action)), row)


# ---- stages


def _stages(journal: Sequence[Planned]) -> StageAssignment:
    """Stages in the order of a micro-batch's forward pass; backward passes them the other way. A worker may have several."""
    # 1. The path of each pass of each micro-batch: the groups that its ops run in, one entry for a run of ops of one group. The
    #    first forward pass says what the stages are: paths[False, 0] = ["embed", "block0", "head"] are stages 0, 1 and 2.
    stages = StageAssignment()
    paths: dict[tuple[bool, int], list[str]] = defaultdict(list)  # by (backward, micro-batch)
    starts: dict[tuple[bool, int], list[str]] = defaultdict(list)  # op and line at each entry of a path
    visits: dict[int, tuple[bool, int, int]] = {}  # by op: backward, micro-batch, and place in the path
    for row in journal:
        origin = row.origin
        if origin.micro < 0 or origin.meaning is None:
            continue
        name, path = stem(origin.meaning.name), paths[origin.backward, origin.micro]
        if path and path[-1] != name and row.known.name in VIEWS:
            continue  # a view stays with what it views, in whatever group
        if not path or path[-1] != name:
            path.append(name)
            starts[origin.backward, origin.micro].append(f"{row.known.name} at {origin.note().partition(' ')[0]}")
            if not origin.backward and not origin.micro:
                stages.meshes.append(origin.meaning.mesh.workers)
        visits[row.seq] = (origin.backward, origin.micro, len(path) - 1)
    # 2. Validation: there are two stages or more, and every path is the first one, or the first one backwards. A backward pass
    #    ends early where the stages before have nothing to train.
    if not stages.meshes:
        raise NoPipeline("no op runs in a signal group within gt.microbatches: put the stages in groups there")
    stages.micro = 1 + max(micro for _, micro in paths)
    stages.names, stages.starts = paths[False, 0], starts[False, 0]
    names, count = stages.names, len(stages.meshes)
    if len(set(stages.meshes)) < 2:
        raise NoPipeline("all groups run on the same workers, so there is one stage: give each stage workers of its own")
    for (backward, micro), path in paths.items():
        want = names[::-1][: len(path)] if backward else names
        if path != want:
            way = "backward" if backward else "forward"
            raise CannotReorder(
                f"micro-batch {micro} runs its {way} pass in the stages {_path(path, starts[backward, micro])}, want "
                f"{' -> '.join(names[::-1] if backward else names)}: enter the groups in the same order in every "
                f"micro-batch{stages.revisited()}"
            )
    # 3. The place in the path is the stage, counted from the end in backward.
    for seq, (backward, micro, visit) in visits.items():
        stages.keys[seq] = Key(count - 1 - visit if backward else visit, backward, micro)
    return stages


def _path(names: Sequence[str], starts: Sequence[str]) -> str:
    """Groups of a pass with the op at which each is entered: `stage0 (aten.mm at model.py:5) -> stage1 (...)`."""
    return " -> ".join(f"{name} ({start})" for name, start in zip(names, starts))


def _scheduled(
    journal: Sequence[Planned],
    code: Code,
    stages: StageAssignment,
    places: Sequence[tuple[int, ...]],
    shared: Mapping[int, int],
) -> Parts:
    """The rows of each worker, each with its action if that is one of a stage. places: rows of each stage."""
    for name, mesh in zip(stages.names, stages.meshes):
        if code.keys().isdisjoint(mesh):  # an op in place runs where its tensor is
            raise CannotReorder(
                f"nothing runs on workers {list(mesh)} of stage {name}: its ops only write to tensors of other stages, or view "
                "them. Move these ops to the stages of their tensors"
            )
    ops = {row.seq: row for row in journal}
    parts = {worker: _parts(worker, rows, ops, stages, shared) for worker, rows in code.items()}
    _Needs(parts, stages.meshes).assign()
    _flag_weights(parts, places)
    return parts


def _parts(
    worker: int, rows: Sequence[Instruction], ops: dict[int, Planned], stages: StageAssignment, shared: Mapping[int, int]
) -> list[ScheduledInstruction]:
    """The rows of one worker, with the action of those that its own stages' ops became."""
    parts, op = [], next(iter(ops.values()))
    memory = accesses(rows, shared=shared)
    bounds = [planned.seq for planned in ops.values() if planned.origin.micro >= 0]
    first, last = min(bounds), max(bounds)  # the micro-batches are between these ops
    for number, row in enumerate(rows):
        op = ops.get(row.seq, op)
        part = ScheduledInstruction(row, number, op, moves=row.kind in TRANSFERS, memory=memory[number])
        key = stages.keys.get(op.seq)
        if key is not None and not part.moves and _has(stages.meshes[key.stage], worker, row):
            part.key = key
        # Before the micro-batches, among them (no time yet), or behind them, where `place_epilogue` decides.
        if op.seq < first:
            part.when = EARLY
        elif op.seq <= last:
            part.when = ()
        else:
            part.tail = True
        parts.append(part)
    return parts


def _has(mesh: Sequence[int], worker: int, row: Instruction) -> bool:
    """True if a stage has all workers that execute a worker's row: the gradient of a split head is of more than one."""
    return set(row.define.payload["team"]["workers"] if row.kind in COLLECTIVES else (worker,)) <= set(mesh)


Takers = dict[ScheduledInstruction, ScheduledInstruction]


class _Needs:
    """Gives rows that are no stage's own (transfers, ops outside of groups) to the action that makes or takes them."""

    def __init__(self, parts: Parts, meshes: Sequence[tuple[int, ...]]) -> None:
        self.parts, self.meshes = parts, meshes
        self.sources: dict[ScheduledInstruction, list[ScheduledInstruction]] = {}  # makers and last writers of its inputs
        self.transfers = match_transfers(parts)
        self.collectives = match_collectives(parts)
        self.given: set[ScheduledInstruction] = set()  # parts whose action was found here

    def assign(self) -> None:
        """Sends go with the maker of their data; everything else with the first action that needs it, or to the end."""
        # 1. Within each worker, from the uses to the sources.
        for rows in self.parts.values():
            self._find_sources(rows)
        takers: Takers = {}  # the first action's part that needs a part
        for worker in self.parts:
            self._backwards(worker, takers)

        # 2. Across workers, until nothing changes. A send is needed where the data that it carries is needed, and a collective
        #    by all of its members or by none.
        changed = True
        while changed:
            changed = False
            for members in self.collectives:
                readers = [t for p in members if (t := p if p.key is not None else takers.get(p)) is not None]
                for part in members if readers else ():
                    if part.key is None and part not in takers:
                        takers[part], changed = readers[0], True
            for send, receive in self.transfers:
                taker = receive if receive.key is not None else takers.get(receive)
                if taker is not None and send not in takers:
                    takers[send] = taker
                    changed = True
            if changed:
                for worker in self.parts:
                    self._backwards(worker, takers)

        # 3. Actions, of which the members of a collective have one. A change for one member may change what reads its result.
        self._give_all(takers)
        while self._agree():
            self._give_all(takers)

    def _give_all(self, takers: Takers) -> None:
        for worker, rows in self.parts.items():
            made_in: dict[int, Key] = {}  # tensor -> the action that has made it, so far
            for part in rows:
                if (part.key is None and part.when == ()) or part in self.given:
                    self._give(worker, part, takers.get(part), made_in)
                if part.key is not None:
                    made_in.update(dict.fromkeys(part.row.makes, part.key))

    def _agree(self) -> bool:
        """Give the members of a collective the last of their actions; True if that changed one."""
        changed = False
        for members in self.collectives:
            keys = [part.key for part in members if part.key is not None]
            last = max(keys, default=None, key=_order)
            for part in members if last is not None else ():
                if part.key != last:
                    self.given.discard(part)
                    part.key, part.when, changed = last, (), True
        return changed

    def _give(
        self, worker: int, part: ScheduledInstruction, taker: ScheduledInstruction | None, made_in: dict[int, Key]
    ) -> None:
        """Its action: its taker's where that is of this worker, else that of the makers of its inputs."""
        self.given.add(part)
        # Nobody needs it: last. Else a send leaves as soon as its data is there, which is not when another worker wants it.
        if taker is None or taker.key is None:
            part.when = LATE
        elif part.row.kind != "send" and _has(self.meshes[taker.key.stage], worker, part.row):
            part.key = taker.key
        else:
            # A receive has no makers here: `_when` puts it where its sends are, or messages would change places.
            part.key = max((made_in[i] for i in part.row.reads if i in made_in), default=None, key=_order)
            part.when = () if part.key is not None or part.row.kind in RECEIVES else EARLY

    def _find_sources(self, rows: Sequence[ScheduledInstruction]) -> None:
        """Note the sources of each part: makers of its inputs, and last writers of their memory, as a sum before a send."""
        maker_of: dict[int, ScheduledInstruction] = {}
        wrote: dict[int, ScheduledInstruction] = {}  # by memory
        for part in rows:
            makers = [maker_of[i] for i in part.row.reads if i in maker_of]
            self.sources[part] = makers + [wrote[base] for base in part.memory.reads if base in wrote]
            wrote.update(dict.fromkeys(part.written, part))
            maker_of.update(dict.fromkeys(part.row.makes, part))

    def _backwards(self, worker: int, takers: Takers) -> None:
        """Pass the need of this worker's actions on to the sources of their parts, transitively."""
        # In reverse order each part has all its takers before its own sources are looked at. Of several takers the first in the
        # order of the calls counts: the part has to be there for it.
        for part in reversed(self.parts[worker]):
            needed = part if part.key is not None else takers.get(part)
            if needed is not None:
                for source in self.sources[part]:
                    if source.key is None:
                        known = takers.get(source)
                        if known is None or (known.key is not None and needed.key is not None and needed.number < known.number):
                            takers[source] = needed


def _order(key: Key) -> tuple:
    """Its place in the order of the calls."""
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
    # A stage in several rows has an entry in each of them: the times of F and I are the same, those of W are not.
    own = {rows_of[0] for mesh, rows_of in zip(meshes, places) if worker in mesh and len(rows_of) == 1}
    taken = [next((n for n in rows_of if n in own), rows_of[0]) for rows_of in places]
    return {
        tuple(action): (timeline.start[n][k], timeline.end[n][k])
        for n, row in enumerate(rows)
        for k, action in enumerate(row)
        if taken[action.stage] == n
    }


def _when(parts: Parts, times: dict[int, dict], split: bool) -> None:
    """Actions at their start, transfers behind the maker of their data: the same order on all workers. times: by worker."""
    # Both ends of a transfer are sorted by the same number: the end of the action of its last sender. So all workers have their
    # transfers in one order, and none waits for a message that its peer sends after another one.
    _first(parts)
    ready: dict[int, float] = defaultdict(float)  # by op: its transfer between two meshes is one
    inside = _inside(parts)
    for worker, rows in parts.items():
        for part in rows:
            if part.key is not None and part.row.kind == "send" and part.op.seq not in inside:
                ready[part.op.seq] = max(ready[part.op.seq], times[worker][part.action(split)][1])
    # At equal times transfers (0) come before actions (1): data leaves before the next action begins.
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
    return {seq for seq, actions in keys.items() if len(actions) == 1}


def _first(parts: Parts) -> None:
    """Receive before all actions the tensors sent so, as a weight that a later stage shares: messages keep their order."""
    sends: dict[ScheduledInstruction, list[ScheduledInstruction]] = defaultdict(list)
    for send, receive in match_transfers(parts):
        sends[receive].append(send)
    for rows in parts.values():
        for part in rows:
            if part in sends and all(send.when == EARLY for send in sends[part]):
                part.when = EARLY


def _reports(parts: Parts, meshes: Sequence[tuple[int, ...]]) -> None:
    """Rows after the forwards of a step without a backward pass are reports of their worker's last stage."""
    for worker, rows in parts.items():
        last = max((stage for stage, mesh in enumerate(meshes) if worker in mesh), default=-1)
        for part in rows:
            part.once = (last, "L") if part.once is not None else None


def _flag_weights(parts: Parts, places: Sequence[tuple[int, ...]]) -> None:
    """Flag the rows of W: backward rows that no other stage depends on, and that lead to one gradient at most.

    Where a stage is in several rows its W are at no one time, so the collectives of its workers are none of them.
    """
    # The members of a collective are all in W or all in I. Where they disagree they are in I, and all that leads to them too,
    # so the flags are found again.
    collectives = match_collectives(parts)
    members = (part for team in collectives for part in team)
    chain = {part for part in members if part.key is not None and len(places[part.key.stage]) > 1}
    while True:
        for rows in parts.values():
            _flag(rows, chain)
        split = [team for team in collectives if len({part.weight for part in team}) > 1]
        if not split:
            return
        chain.update(part for team in split for part in team)


def _flag(rows: Sequence[ScheduledInstruction], chain: set[ScheduledInstruction]) -> None:
    """Set `weight` of one worker's backward rows. chain: rows that count as I, whatever depends on them."""
    # An end is a row whose result no row of the action reads: a gradient of a weight. The gradient of a stage's inputs leads to
    # the next stage, or to several weights. So a row with one end is of that weight alone, and nothing else waits for it:
    #
    #     gw2 = mm(x1.T, gy)         ends {gw2}: W
    #     gx1 = mm(gy, w2.T)         ends {gw1, SENT}: I
    #     gw1 = mm(x0.T, gx1)        ends {gw1}: W
    #     gx0 = mm(gx1, w1.T), send  ends SENT: I
    leads: dict[tuple[Key, int], frozenset] = {}  # memory -> where it leads within an action: SENT, or its ends
    stages: dict[int, set[int]] = defaultdict(set)  # memory -> stages whose later rows read it
    for part in reversed(rows):
        if part.key is None or not part.key.backward:
            continue
        touched = {*part.memory.makes, *part.written}
        ends: frozenset = frozenset().union(*[leads.get((part.key, base), frozenset()) for base in touched])
        if part.row.kind == "send" or part in chain or any(stages[base] - {part.key.stage} for base in touched):
            ends = SENT
        ends = ends or frozenset((part,))
        part.weight = len(ends) < 2
        for base in part.memory.reads:
            stages[base].add(part.key.stage)
            key = part.key, base
            leads[key] = leads.get(key, frozenset()) | ends
