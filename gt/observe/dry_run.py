"""A session with no workers: the real dispatcher plans what a program does, and stand-ins say what it would take.

Of workers that are told the same (the same groups name them) one is followed, the first, which has the largest pieces;
where there are few, all are. There are no values: what is fetched reads as zeros.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gt import errors
from gt.config.schema import Rule
from gt.dispatcher.cluster.health import counters
from gt.dispatcher.core import Core
from gt.dispatcher.events import Action, Received, Send
from gt.dispatcher.session import ClientSession
from gt.dispatcher.sharding.groups import stem
from gt.dispatcher.state.emitter import Emitter
from gt.dispatcher.state.failures import OpJournal, Planned
from gt.dispatcher.state.validate import Origin
from gt.errors import UnsupportedOp
from gt.ir.heap import sizes
from gt.ir.instr import Define
from gt.ir.layout import Layout
from gt.ir.spec import DTYPES, Spec
from gt.ir.text import PlanLine
from gt.observe.simulated_worker import WEIGHTS, OpAction, SimulatedInterval, StandIn
from gt.wire.link import hello
from gt.wire.messages import Done, Failed, FinishCapture, Inspect, Message, Notice, Ops, Query, Reject, Report, Run, Stats

log = logging.getLogger("gt")
FEW = 16  # workers that are all followed
CLIENT = b"client"
HEAP = 1 << 50  # bytes: what the arena would need is reported, not refused


@dataclass
class PlannedStep:
    """What was planned between two marks. moves: lines of the plan that are no ops, and how often each came."""

    stretches: dict[int, SimulatedInterval]
    moves: Counter[PlanLine]
    journal: list[OpAction]  # the places that ops had, in order, each run of them once
    held: dict[int, dict[str, int]]  # bytes by kind of each that is followed, when an optimizer had last stepped
    schedule: str = ""
    answer: dict = field(default_factory=dict)  # what sealing said


class _Emitter(Emitter):
    """Writes for the workers that are followed, and nothing for the others."""

    followed: frozenset[int]

    def write(self, worker: Any, define: Define, operands: Sequence) -> None:
        if worker.index in self.followed:
            super().write(worker, define, operands)

    def free(self, workers: Any, ids: Sequence[int]) -> None:
        super().free([index for index in workers if index in self.followed], ids)


class _Journal(OpJournal):
    """Tells where ops belong as they are planned."""

    __slots__ = ("dry",)
    dry: Dry

    def add(self, row: Planned) -> None:
        super().add(row)
        self.dry.planned(row)


class Dry:
    """What gt.client.session.Session offers the recorder. `workers` of them, or as many as the config names."""

    failure = None

    def __init__(self, config: str, path: str, workers: int) -> None:
        self.on_idle: Any = None
        self.core = Core()
        self.core.cluster._sizes = lambda members: sizes(0)  # type: ignore[method-assign]  # HEAP is no size to go by
        self.values = 0  # that were asked for
        self.steps: dict[str, PlannedStep] = {}  # the newest of each kind: captured, optimizer, all
        self.places: dict[int, OpAction] = {}
        self.weights: list[tuple[PlanLine, str, Layout]] = []  # parameters: line, name, how each lies
        self.rules: dict[str, Rule | None] = {}  # of parameters of a model that was placed by rules
        self._origins: dict[Origin, OpAction] = {}
        self._journal: list[OpAction] = []
        self._moves: Counter[PlanLine] = Counter()
        self.living: Callable[[], Sequence[tuple[int, str, str]]] = tuple  # weights, asked for at the end
        self._held: dict[int, dict[str, int]] = {}
        self.told = False  # whether an optimizer has said what its tensors are
        self._batch = 0
        self._error: dict | None = None
        self._reports: dict[int, Any] = {}
        self._tape: Any = None
        for index in range(workers):
            info = {"name": "", "pid": 1, "heap_bytes": HEAP, "backend": "torch"}
            self._handle(Received(b"w%d" % index, hello("worker", info=info)))
        self._handle(Received(CLIENT, hello("client", config=config, config_path=path, switches={"workers": workers})))
        self.state: ClientSession = self.core.sessions[CLIENT]
        self.workers = [w.name for w in self.core.cluster.workers]
        self.groups = list(self.state.config.groups)
        self.alike = _alike(self.state, workers)
        self.followed = {index: StandIn(index, self.places) for index in self.alike}
        self._prepare()

    def _prepare(self) -> None:
        """Have the dispatcher's session write for those that are followed, and upload nothing."""
        state = self.state
        emitter = _Emitter(self.core.cluster, state.number)
        emitter.followed = frozenset(self.followed)
        emitter.scribe = self  # type: ignore[assignment]
        journal = _Journal()
        journal.dry = self
        state.emitter, state.journal = emitter, journal
        state.programs.deferred.able = False
        state.uploads.begin = self._upload  # type: ignore[method-assign]
        self._release = state.mover.release
        state.mover.release = self._ending  # type: ignore[method-assign]

    def _upload(self, source: tuple, spec: Spec, parts: list, workers: list) -> int:
        self.state.uploaded += spec.nbytes
        return self.core.cluster.key()

    # ---- what the dispatcher says

    def _handle(self, event: Received) -> None:
        pending: list[Received] = [event]
        while pending:
            for action in self.core.handle(pending.pop(0)):
                done = self._act(action)
                if done is not None:
                    pending.append(done)
        if self._error is not None:
            error, self._error = self._error, None
            raise errors.from_wire(error)

    def _act(self, action: Action) -> Received | None:
        if not isinstance(action, Send):
            return None
        message: Message = action.message
        if isinstance(message, Run):
            index = int(action.peer[1:])
            if index in self.followed:
                self.followed[index].run(message.defines, message.code, message.base)
            return Received(action.peer, Done(message.seq))
        if isinstance(message, Notice):
            log.warning("%s", message.text)
        elif isinstance(message, (Failed, Reject)):
            self._error = self._error or message.error
        elif isinstance(message, Report):
            self._reports[message.request] = message.body
        return Received(action.peer, Report(message.request, {})) if isinstance(message, Query) else None

    def _ask(self) -> None:
        """What has been sent is planned to its end, as before any question of a client."""
        if self.state.batches.coming:
            self._handle(Received(CLIENT, Stats(2)))

    def step(self, line: PlanLine) -> None:
        """A line of the plan that is no op: the same one comes again for every layer and micro-batch."""
        self._moves[replace(line, id=0, ins=())] += 1

    def planned(self, row: Planned) -> None:
        origin = row.origin
        place = self._origins.get(origin)
        if place is None:
            name = stem(origin.meaning.name) if origin.meaning is not None else ""
            place = self._origins[origin] = OpAction(name, origin.backward, origin.micro)
        self.places[row.seq] = place
        if place.stage and place.micro >= 0 and (not self._journal or self._journal[-1] is not place):
            self._journal.append(place)

    # ---- what the recorder asks

    def submit(self, templates: list, origins: list, code: list, frames: Sequence[Any] = ()) -> None:
        self.places.clear()
        self._handle(Received(CLIENT, Ops(self._batch, templates, origins, code), tuple(frames)))
        self._batch += 1
        tape = self.state.programs.tape
        if self._tape is not None and tape is not self._tape:
            self._mark("optimizer")  # a recording that came to nothing
        elif tape is not None and tape is not self._tape:
            self._mark()  # a recording begins
        self._tape = tape

    def keep(self, tensor: int, array: Any) -> None:
        """Nobody will ask for it."""

    def fetch(self, tensor: int) -> tuple[tuple[int, ...], str, np.ndarray]:
        self._ask()
        spec = self.state.row(tensor).spec
        self.values += 1
        return spec.shape, spec.dtype, np.zeros(spec.numel * DTYPES[spec.dtype][0], np.uint8)

    def synchronize(self) -> None:
        self._ask()

    def describe(self, tensors: list[int]) -> list[Spec]:
        where = next((f"{o.file}:{o.line}: " for o in [self.state.origin] if o.file), "")
        raise UnsupportedOp(f"{where}a shape depends on values, and a plan has none: leave this op out while planning")

    def seal(self, program: int, schedule: str, *what: Any) -> dict[str, Any]:
        """A recording is over: it is the step. Where not all workers are followed its order is not checked."""
        every = len(self.followed) == len(self.workers)
        self._handle(Received(CLIENT, FinishCapture(0, program, schedule if every else "", *what)))
        answer = self._reports.pop(0)
        if not self.told:
            self.known(self.living())
        self._mark("captured", schedule)
        self.steps["captured"].answer = answer
        self._tape = None
        return answer

    def inspect(self, tensor: int) -> dict[str, Any]:
        self._handle(Received(CLIENT, Inspect(1, tensor)))
        return self._reports.pop(1)

    def stats(self, program: int = -1) -> dict[str, Any]:
        """Of the form that a server gives; workers have done nothing."""
        row = {"instructions": 0, "collectives": {}, "live_tensors": 0, "live_bytes": 0, "definitions": 0, "actions": []}
        workers = [{"name": name, **row, "bytes_sent": {}, "bytes_received": {}} for name in self.workers]
        core = self.core
        return {"dispatcher": counters(self.state, core.sent, core.received, 0), "workers": workers, "client": {}}

    def close(self) -> None:
        self._ask()
        self.known(self.living())
        self._mark("all")

    # ---- steps

    def known(self, tensors: Sequence[tuple[int, str, str]]) -> None:
        """(id, kind, name) of the client's tensors that are weights, gradients or an optimizer's."""
        offset, rows = self.state.emitter.offset, self.state.table.rows
        found = []
        for tensor, kind, name in tensors:
            for worker in self.followed.values():
                worker.name(offset + tensor, kind, name)
            row = rows.get(tensor)
            if kind == WEIGHTS and row is not None and row.layout is not None:
                note = f"{row.spec.nbytes} B {name}".strip()
                line = PlanLine(tensor, row.spec.text(), str(row.layout), "weight", (), row.layout.mesh.workers, note)
                found.append((line, name, row.layout))
        if len(found) >= len(self.weights):
            self.weights = found

    def _ending(self, ids: list[int]) -> None:
        """Weights that no optimizer has told of, and whose module is gone."""
        rows = self.state.table.rows
        gone = [i for i in ids if i in rows and rows[i].base is None and rows[i].storage.param]
        if gone and not self.told:
            self.known([(i, WEIGHTS, "") for i in gone])
        self._release(ids)

    def stepped(self, tensors: Sequence[tuple[int, str, str]]) -> None:
        """An optimizer, which knows these tensors, has stepped; within a recording that is no mark."""
        self._ask()
        self.told = True
        self.known(tensors)
        ids = [self.state.emitter.offset + row[0] for row in tensors]
        self._held = {index: worker.held(ids) for index, worker in self.followed.items()}
        if self.state.programs.tape is None:
            self._mark("optimizer")

    def _mark(self, kind: str = "", schedule: str = "") -> None:
        stretches = {index: worker.mark() for index, worker in self.followed.items()}
        step = PlannedStep(stretches, self._moves, self._journal, self._held, schedule)
        self._moves, self._journal = Counter(), []
        if kind:
            self.steps[kind] = step


def _alike(state: ClientSession, workers: int) -> dict[int, list[int]]:
    """The workers that are followed, and those that each stands for."""
    if workers <= FEW:
        return {index: [index] for index in range(workers)}
    named: dict[int, list[str]] = {index: [] for index in range(workers)}
    for name, group in state.config.groups.items():
        for index in group.flat:
            named[index].append(name)
    found: dict[tuple, list[int]] = {}
    for index, names in named.items():
        key = (index == 0 and not names, *names)  # what has no group runs on the first worker
        found.setdefault(key, []).append(index)
    return {members[0]: members for members in found.values()}
