"""Dry run of a program without workers: the real dispatcher plans it, and simulated workers count memory and traffic.

Up to 16 workers are all simulated. Of more, workers in the same groups receive the same instructions: only the first, which
has the largest pieces, is simulated ('followed'). There are no values: a fetch reads zeros.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import or_
from typing import Any

import numpy as np

from gt import errors
from gt.config.schema import Rule
from gt.dispatcher.cluster.health import counters
from gt.dispatcher.core import Core
from gt.dispatcher.events import Action, Received, Send
from gt.dispatcher.programs.recording import Instruction
from gt.dispatcher.session import ClientSession
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.emitter import Emitter
from gt.dispatcher.state.failures import Failures, OpJournal, Planned
from gt.dispatcher.state.records import Bound
from gt.errors import UnsupportedOp
from gt.ir.heap import sizes
from gt.ir.layout import Layout
from gt.ir.spec import DTYPES, Spec
from gt.ir.text import PlanLine
from gt.observe.simulated_worker import WEIGHTS, SimulatedInterval, SimulatedWorker
from gt.wire.link import hello
from gt.wire.messages import (
    Done,
    Failed,
    FinishCapture,
    Inspect,
    InspectFragments,
    Message,
    Notice,
    Ops,
    Query,
    Reject,
    Report,
    Run,
    Stats,
)

log = logging.getLogger("gt")
ALL_FOLLOWED = 16  # workers, at most, that are all followed
MOST_TURNS = 32  # steps of optimizers, at most, that are one training step
CLIENT = b"client"
HEAP_BYTES = 1 << 50  # the arena's size is reported and never refused
QUESTIONS = ("fetch", "describe")  # instructions that compute nothing


@dataclass
class PlannedStep:
    """Plan of an interval between two marks. moves: collectives and transfers as plan lines, with the number of each."""

    intervals: dict[int, SimulatedInterval]
    moves: Counter[PlanLine]
    journal: list[Planned]
    code: dict[int, list[Instruction]]  # of each followed worker
    held: dict[int, dict[str, int]]  # bytes by kind on each followed worker, after the last optimizer step
    schedule: str = ""
    answer: dict = field(default_factory=dict)  # the dispatcher's answer to FinishCapture
    optimizers: list[int] = field(default_factory=list)  # those that stepped, in order, by the client's numbers
    replay: dict[int, SimulatedInterval] = field(default_factory=dict)  # of a captured step, as the passes have left it

    @classmethod
    def joined(cls, steps: Sequence[PlannedStep]) -> PlannedStep:
        """Steps of several optimizers as one, in their order."""
        if len(steps) == 1:
            return steps[0]
        last, code = steps[-1], defaultdict(list)
        for worker, rows in (row for step in steps for row in step.code.items()):
            code[worker].extend(rows)
        intervals = {i: SimulatedInterval.joined([step.intervals[i] for step in steps]) for i in last.intervals}
        moves: Counter[PlanLine] = sum((step.moves for step in steps), Counter())
        journal = [row for step in steps for row in step.journal]
        stepped = [number for step in steps for number in step.optimizers]
        held = {i: dict(reduce(or_, (Counter(step.held.get(i)) for step in steps))) for i in last.held}  # the most of each kind
        return cls(intervals, moves, journal, dict(code), held, last.schedule, optimizers=stepped)

    @property
    def scheduled(self) -> bool:
        """True if the dispatcher has applied a schedule to this captured step."""
        return bool((self.answer.get("schedule") or {}).get("rows"))

    def shape_of(self, worker: int, tensor: int) -> tuple[tuple[int, ...], int] | None:
        """Local shape and itemsize of a tensor."""
        return self.intervals[worker].shapes.get(tensor)


# Four places of the real dispatcher are replaced: the emitter (it writes for followed workers only), the upload of bytes, the
# release of tensors (it notes weights before they are freed), and warnings. All decisions are the dispatcher's own.
class _Emitter(Emitter):
    """Writes instructions of followed workers only; counts lines of the plan."""

    dry: Dry
    followed: frozenset[int] = frozenset()

    def write_all(self, bound: Sequence[Bound], operands: Sequence) -> None:
        followed = [row for row in bound if row[0].index in self.followed]
        super().write_all(followed, operands)
        for worker, define in followed:
            if define.kind not in QUESTIONS:
                self.dry.code[worker.index].append(Instruction(self.seq, define, list(operands)))

    def free(self, workers: Any, ids: Sequence[int]) -> None:
        super().free([index for index in workers if index in self.followed], ids)

    def line(self, tensor: int, spec: str, layout: Layout, op: str, ins: Sequence[int], note: str) -> None:
        self.dry.step(PlanLine(tensor, spec, str(layout), op, tuple(ins), layout.mesh.workers, note))


class _Core(Core):
    """A dispatcher in its client's process: the client raises the errors, and a log would say them twice."""

    def warn(self, peer: bytes, what: object) -> None:
        pass


class _Context(SessionContext):
    """A session's state, of which a dry run learns."""

    def __init__(self, dry: Dry, *args: Any) -> None:
        super().__init__(*args)
        self.emitter, self.journal = _Emitter(self.cluster, self.number), OpJournal()
        self.emitter.dry = dry
        self.journal.trace(lambda row: dry.journal.append(row))
        self.failures = Failures(self.cluster, self.table, self.journal)


class Dry:
    """A session without workers, with the methods of gt.client.session.Session that the recorder calls."""

    failure = None

    def __init__(self, config: str, path: str, workers: int, about: Sequence[dict[str, Any]] = ()) -> None:
        """about: of each worker what Hello.info says of its host, or nothing: then all are on one."""
        self.on_idle: Any = None
        self.core = _Core(context=partial(_Context, self))
        self.core.cluster._sizes = lambda members: sizes(0)  # type: ignore[method-assign]  # HEAP_BYTES is no size to divide
        self.values = 0  # fetched so far
        self.tick: Callable[[int], object] = lambda count: None  # called with the number of ops that are planned
        self._ops = 0
        self.steps: dict[str, PlannedStep] = {}  # the newest of each kind: captured, optimizer, all
        self.captured = 0  # recordings that became programs
        self.weights: list[tuple[PlanLine, str, Layout]] = []  # parameters: line, name, layout
        self.frozen: set[int] = set()  # ids of parameters that need no gradient
        self.rules: dict[str, Rule | None] = {}  # of parameters of a model that was placed by rules
        self.journal: list[Planned] = []  # ops since the last mark, and their instructions by worker
        self.code: dict[int, list[Instruction]] = defaultdict(list)
        self._moves: Counter[PlanLine] = Counter()
        self.living: Callable[[], Sequence[tuple[int, str, str]]] = tuple  # the client's weights, read at the end
        self._held: dict[int, dict[str, int]] = {}
        self.told = False  # True once an optimizer has named its tensors
        self._turns: deque[PlannedStep] = deque(maxlen=MOST_TURNS)  # each ends with one optimizer's step
        self._batch = 0
        self._error: dict | None = None
        self._reports: dict[int, Any] = {}
        self._tape: Any = None
        # The handshakes of real peers, with events instead of sockets: workers first, so that the client need not wait.
        for index in range(workers):
            info = {"name": "", "pid": 1, "heap_bytes": HEAP_BYTES, "backend": "torch", **(about[index] if about else {})}
            self._handle(Received(b"w%d" % index, hello("worker", info=info)))
        self._handle(Received(CLIENT, hello("client", config=config, config_path=path, switches={"workers": workers})))
        self.state: ClientSession = self.core.sessions[CLIENT]
        self.workers = [w.name for w in self.core.cluster.workers]
        self.groups = list(self.state.config.groups)
        self.alike = _alike(self.state, workers)
        self.followed = {index: SimulatedWorker() for index in self.alike}
        self._prepare()

    def _prepare(self) -> None:
        """Make the dispatcher's session write for followed workers only, and upload nothing."""
        state = self.state
        assert isinstance(state.emitter, _Emitter)
        state.emitter.followed = frozenset(self.followed)
        # A deferred call would be sent as one program; here each instruction is to be counted as it is written.
        state.programs.deferred.able = False
        state.uploads.begin = self._upload  # type: ignore[method-assign]
        self._free = state.redistributor.free
        state.redistributor.free = self._ending  # type: ignore[method-assign]

    def _upload(self, source: tuple, spec: Spec, parts: list, workers: list) -> int:
        self.state.context.uploaded += spec.nbytes
        return self.core.cluster.key()

    # ---- messages of the dispatcher

    def _handle(self, event: Received) -> None:
        # Each Run is executed and acknowledged at once: the core never waits, and never has more than one batch under way.
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
                self.followed[index].run(message.defines, message.code)
            return Received(action.peer, Done(message.seq))
        if isinstance(message, Notice):
            log.warning("%s", message.text)
        elif isinstance(message, (Failed, Reject)):
            self._error = self._error or message.error
        elif isinstance(message, Report):
            self._reports[message.request] = message.body
        return Received(action.peer, Report(message.request, {})) if isinstance(message, Query) else None

    def _ask(self) -> None:
        """Plan everything that has been sent, as before any request of a client."""
        # Ops may be held back for a decision that depends on later ones; any question ends that.
        if self.state.op_stream.coming:
            self._handle(Received(CLIENT, Stats(2)))

    def step(self, line: PlanLine) -> None:
        """Count a plan line that is no op. Layers and micro-batches repeat the same line."""
        self._moves[replace(line, id=0, ins=())] += 1

    # ---- calls of the recorder

    def submit(self, templates: list, origins: list, code: list, frames: Sequence[Any] = (), asks: bool = False) -> None:
        self._handle(Received(CLIENT, Ops(self._batch, templates, origins, code), tuple(frames)))
        self._batch += 1

        # The tape is a new object for each recording: its change marks the begin or the end of one.
        self.tick(self.state.op_stream.ops - self._ops)
        self._ops = self.state.op_stream.ops
        tape = self.state.context.tape
        if self._tape is not None and tape is not self._tape:
            self._end_interval("optimizer")  # a recording was discarded
        elif tape is not None and tape is not self._tape:
            self._end_interval()  # a recording begins
        self._tape = tape

    def keep(self, tensor: int, array: Any) -> int:
        """The value of an upload whose bytes are not in shared memory. Nothing is kept: a fetch reads zeros."""
        return -1

    def keep_in_file(self, tensor: int, source: Any) -> int:
        """As `keep`, for a tensor of a checkpoint."""
        return -1

    def crowded(self, nbytes: int) -> bool:
        return False

    def lend_file(self, fd: int, nbytes: int, write: bool) -> int:
        """0, as where no worker shares the client's files."""
        return 0

    def fetch(self, tensor: int, nbytes: int = 0) -> tuple[tuple[int, ...], str, np.ndarray]:
        self._ask()
        spec = self.state.context.row(tensor).spec
        self.values += 1
        return spec.shape, spec.dtype, np.zeros(spec.numel * DTYPES[spec.dtype][0], np.uint8)

    def synchronize(self) -> None:
        self._ask()

    def describe(self, tensors: list[int]) -> list[Spec]:
        where = next((f"{o.file}:{o.line}: " for o in [self.state.context.origin] if o.file), "")
        raise UnsupportedOp(f"{where}a shape depends on values, and a plan has none; try the plan without this op")

    def seal(self, program: int, schedule: str, *what: Any) -> dict[str, Any]:
        """Seal a recording, which becomes the captured step. Its schedule is applied only where all workers are followed."""
        # A schedule orders the instructions of all workers. Where only some are written, the pass would find half a pipeline.
        every = len(self.followed) == len(self.workers)
        self._handle(Received(CLIENT, FinishCapture(0, program, schedule if every else "", *what)))
        answer = self._reports.pop(0)
        if not self.told:
            self.known(self.living())
        replay = self._replayed(program)
        self._end_interval("captured", schedule)
        self.steps["captured"].answer, self.steps["captured"].replay = answer, replay
        self.captured += 1
        self._tape = None
        return answer

    def _replayed(self, number: int) -> dict[int, SimulatedInterval]:
        """A replay of a program on each followed worker; {} if the recording became none."""
        program = self.state.programs.all.get(number)
        code = program.code if program is not None else {}
        streams = {index: [define.payload["code"] for define in code.get(index, ())] for index in self.followed}
        return {index: self.followed[index].replay(parts) for index, parts in streams.items() if code}

    def inspect(self, tensor: int) -> dict[str, Any]:
        self._handle(Received(CLIENT, Inspect(1, tensor)))
        return self._reports.pop(1)

    def inspect_fragments(self, slot: int) -> dict[str, Any]:
        self._handle(Received(CLIENT, InspectFragments(1, slot)))
        return self._reports.pop(1)

    def stats(self, program: int = -1) -> dict[str, Any]:
        """Statistics in a server's form, with zeros for workers."""
        row = {"instructions": 0, "collectives": {}, "live_tensors": 0, "live_bytes": 0, "definitions": 0, "actions": []}
        workers = [{"name": name, **row, "bytes_sent": {}, "bytes_received": {}} for name in self.workers]
        core = self.core
        return {"dispatcher": counters(self.state, core.sent, core.received, 0), "workers": workers, "client": {}}

    def close(self) -> None:
        self._ask()
        self.known(self.living())
        self._end_interval("all")

    # ---- steps

    def known(self, tensors: Sequence[tuple[int, str, str]]) -> None:
        """Note (id, kind, name) of the client's weights, gradients and optimizer state."""
        offset, rows = self.state.emitter.offset, self.state.table.rows
        weights = []
        for tensor, kind, name in tensors:
            for worker in self.followed.values():
                worker.name(offset + tensor, kind, name)
            row = rows.get(tensor)
            if kind == WEIGHTS and row is not None and row.layout is not None:
                note = f"{row.spec.nbytes} B {name}".strip()
                line = PlanLine(tensor, row.spec.text(), str(row.layout), "weight", (), row.layout.mesh.workers, note)
                weights.append((line, name, row.layout))
        # An optimizer names its own weights, and the client all that are alive: the longest list is kept.
        if len(weights) >= len(self.weights):
            self.weights = weights

    def _ending(self, ids: list[int]) -> None:
        """Note weights that no optimizer has named, before their module is freed."""
        rows = self.state.table.rows
        gone = [i for i in ids if i in rows and rows[i].base is None and rows[i].storage.param]
        if gone and not self.told:
            self.known([(i, WEIGHTS, "") for i in gone])
        self._free(ids)

    def stepped(self, tensors: Sequence[tuple[int, str, str]], optimizer: int = 0) -> None:
        """An optimizer has stepped, which ends the interval, unless a recording is in progress.

        tensors: of all optimizers that have stepped so far and are alive. optimizer: the client's number of this one.
        """
        self._ask()
        self.told = True
        self.known(tensors)
        ids = [self.state.emitter.offset + row[0] for row in tensors]
        self._held = {index: worker.held(ids) for index, worker in self.followed.items()}
        if self.state.context.tape is None:
            self._end_interval("optimizer", stepped=[optimizer])

    def _end_interval(self, kind: str = "", schedule: str = "", stepped: Sequence[int] = ()) -> None:
        intervals = {index: worker.end_interval() for index, worker in self.followed.items()}
        step = PlannedStep(intervals, self._moves, self.journal, dict(self.code), self._held, schedule, optimizers=[*stepped])
        self._moves, self.journal = Counter(), []
        self.code.clear()
        if stepped:
            self._turns.append(step)
            if len({turn.optimizers[0] for turn in self._turns}) == 1:
                self._turns = deque([step], MOST_TURNS)
            turns = [turn.optimizers[0] for turn in self._turns]
            step = PlannedStep.joined([*self._turns][-_cycle(turns) :])
        else:
            self._turns.clear()
        if kind:
            self.steps[kind] = step


def _cycle(turns: Sequence[int]) -> int:
    """Number of the last optimizer steps that make one training step. turns: the optimizer of each step.

    Each optimizer that still takes its turn has stepped in it: a GAN's discriminator and generator, or twice the one and once
    the other.
    """
    backwards = [*turns][::-1]
    periods = [0]
    for number in set(turns):
        last = backwards.index(number)
        before = backwards.index(number, last + 1) if number in backwards[last + 1 :] else 0
        if last < before - last:  # it has not paused for longer than a period
            periods.append(before - last)
    if max(periods):
        return max(periods)
    # No optimizer has stepped twice: one step of each.
    return next((n for n in range(1, len(turns)) if backwards[n] in backwards[:n]), len(turns))


def _alike(state: ClientSession, workers: int) -> dict[int, list[int]]:
    """The followed workers, each with the workers that it represents."""
    if workers <= ALL_FOLLOWED:
        return {index: [index] for index in range(workers)}
    # Workers are alike if exactly the same groups name them. What a group
    # does depends on a worker's rank only in sizes of pieces.
    named: dict[int, list[str]] = {index: [] for index in range(workers)}
    for name, group in state.config.groups.items():
        for index in group.flat:
            named[index].append(name)
    alike: dict[tuple, list[int]] = {}
    for index, names in named.items():
        key = (index == 0 and not names, *names)  # ops outside of groups run on the first worker
        alike.setdefault(key, []).append(index)
    return {members[0]: members for members in alike.values()}
