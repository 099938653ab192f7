"""`python -m tests.interrupts.simulation [--cases N] [--seed N]`: a dispatcher's core, two simulated workers, interleavings.

Both workers hold every tensor, so each op is one instruction on both. Interrupts arrive at any moment, several in a row, among
errors of ops and lost workers. Afterwards workers have skipped the same ops, which are ends of the queue at an interrupt, and a
tensor that has not failed has the value of the ops that were executed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from gt.dispatcher.events import PeerLost, Turn
from gt.ir.dataflow import decode
from gt.ir.instr import COLLECTIVES, FREE, Define
from gt.wire.messages import Ack, Done, Exit, Failed, Fetch, Interrupt, OpError, Ops, Paused, Piece, Run, Skip, Value
from tests.helpers.core_bench import CoreBench
from tests.helpers.hostile import TEMPLATES

PRIME, BAD = (1 << 31) - 1, 1000.0
UPLOAD, NEG, ADD_, FILL, ADD, VIEW, MUL = 16, 17, 18, 19, 20, 21, 22
ROWS = {UPLOAD: 0, NEG: 3, ADD_: 13, FILL: 14, ADD: 4, VIEW: 8, MUL: 5}
ORIGINS = [[1, "m.py", 3, "s", False, -1]]
START = 4  # tensors
CREDIT = 6  # batches


def compute(op: str, cells: list[list[int]], values: list[float]) -> list[int]:
    """The cell of an op's result, in place or new."""
    if "neg" in op:
        return [-cells[0][0] % PRIME]
    if "add_" in op:
        cells[0][0] = (31 * cells[0][0] + 17 * cells[1][0] + 1) % PRIME
    elif "fill_" in op:
        cells[0][0] = int(values[0])
    elif "add." in op:
        return [(cells[0][0] + 7 * cells[1][0] + 3) % PRIME]
    elif "mul" in op:
        return [int(cells[0][0] * values[0]) % PRIME]
    return cells[0]


class Worker:
    """Instructions in order, as a worker's executor: messages are received at once, whatever the executing thread does."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.begin_anew()

    def begin_anew(self) -> None:
        self.received: deque[Any] = deque()  # by its link, to be handled
        self.inbox: deque[Any] = deque()  # to be executed
        self.out: deque[Any] = deque()  # on its way to the dispatcher
        self.defines: dict[int, Define] = {}
        self.cells: dict[int, list[int]] = {}
        self.skipped: set[int] = set()
        self.met: list[tuple[str, int]] = []  # collectives, in order
        self.executed: set[int] = set()
        self.since: int | None = None  # from which on nothing is begun; -1 while it is paused
        self.pauses, self.reached, self.run = 0, -1, None
        self.place: deque[Any] = deque()

    @property
    def idle(self) -> bool:
        return not (self.received or self.inbox or self.out or self.place or self.run)

    def receive(self) -> None:
        message = self.received.popleft()
        if isinstance(message, Skip) and message.on:
            if message.since >= 0:
                self.since = message.since
            else:
                self.pauses, self.since = self.pauses + 1, -1
                self.out.append((Paused(message.session, self.reached), ()))
        elif isinstance(message, (Run, Skip)):
            self.inbox.append((message, self.pauses))

    def execute(self, rng: random.Random) -> None:
        """One instruction, or the beginning or the end of a Run."""
        if self.run is None:
            message, pauses = self.inbox.popleft()
            if isinstance(message, Skip):
                self.since = None if pauses == self.pauses else self.since
                return
            self.run, self.told = message, []
            self.defines.update({row[0]: Define.from_wire(row) for row in message.defines})
            self.place = deque(decode(message.code, self.defines.__getitem__))
            return
        if not self.place:
            if self.told:
                self.out.append((OpError(self.told[0], "interrupted", "", {}, list(self.told)), ()))
            self.out.append((Done(self.run.seq), ()))
            self.run = None
            return
        at, define, operands = self.place[0]
        if define is None:
            self.place.popleft()
            for i in operands if self.run.code[at] == FREE else ():
                self.cells.pop(i, None)
            return
        seq = self.run.base + self.run.code[at + 1]
        if define.kind != "upload" and self.since is not None:
            if self.since == -1:
                return  # it waits
            if seq >= self.since:
                self.skipped |= {seq} if define.kind == "op" else set()
                self.told.append(seq)
                self.place.popleft()
                return
        self.place.popleft()
        self.reached = max(self.reached, seq)
        self.step(define, operands, seq, rng)

    def step(self, define: Define, operands: list, seq: int, rng: random.Random) -> None:
        if define.kind == "upload":
            self.cells[operands[0]] = [operands[1]]
            return
        if define.kind == "fetch":
            missing = operands[0] not in self.cells
            answer = OpError(seq, "missing", f"no tensor has the id {operands[0]}") if missing else Piece(operands[1], 0, 64)
            self.out.append((answer, () if missing else (bytes(64),)))
        if define.kind not in ("op", "fetch"):  # all pieces of a tensor have one value here
            self.met += [(define.kind, seq)] if define.kind in COLLECTIVES else []
            for source, made in zip(operands[define.effects.reads], operands[define.effects.makes]):
                if source not in self.cells:
                    self.out.append((OpError(seq, "missing", f"no tensor has the id {source}"), ()))
                cell = self.cells.get(source, [rng.randrange(PRIME)])
                self.cells[made] = cell if define.kind == "alias" else [*cell]
        if define.kind != "op":
            return
        self.executed.add(seq)
        tensors, values = define.payload["tensors"], define.payload["values"]
        inputs, numbers = operands[:tensors], operands[tensors : tensors + values]
        try:
            if numbers and numbers[0] >= BAD:
                raise KeyError("a bad number")
            result = compute(define.payload["op"], [self.cells[i] for i in inputs], numbers)
        except KeyError as error:
            self.out.append((OpError(seq, "op", str(error)), ()))
            result = [rng.randrange(PRIME)]
        for out in operands[tensors + values :]:
            self.cells[out] = result


@dataclass
class Op:
    """An op of the client's program, with its number once it is planned."""

    number: int
    ins: list[int]
    values: list[float]
    outs: list[int]
    batch: int
    seq: int = -1


@dataclass
class Simulation:
    """One case."""

    seed: int
    lost: str = ""
    ops: list[Op] = field(default_factory=list)
    interrupts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.bench = CoreBench("s: {workers: [0, 1]}\n")
        self.workers = [Worker(b"w0"), Worker(b"w1")]
        self.alive = list(self.workers)
        self.session = self.bench.core.sessions[b"c"]
        self.acked, self.batches, self.next_id, self.answers, self.asked = -1, 0, 1, 0, 0
        self.to_core: deque[Any] = deque()  # of the client, in order; an interrupt overtakes
        self._watch()
        self.tensors: list[int] = []
        self._begin()

    def _watch(self) -> None:
        planner, emitter = self.session.planner, self.session.emitter
        plan = planner.op
        self.planned = 0

        def op(known: Any, origin: Any, ins: list, values: tuple, outs: list) -> None:
            plan(known, origin, ins, values, outs)
            self.ops[self.planned].seq = emitter.seq
            self.planned += 1

        planner.op = op

    def _begin(self) -> None:
        """Tensors that are placed, of which nothing is dropped."""
        code: list = []
        for _ in range(START):
            self._record(code, UPLOAD, [], [0], 1, 0)
        for i in list(self.tensors):
            self._record(code, FILL, [i], [float(i)], 0, 0)
            self._record(code, ADD_, [i, i], [], 0, 0)
        templates = [[number, TEMPLATES[row]] for number, row in ROWS.items()]
        self.deliver(self.bench.give(b"c", Ops(0, templates, ORIGINS, code), (bytes(64),)))
        self.batches = 1
        while not all(worker.idle for worker in self.workers):
            self.turn(self.workers)

    def _record(self, code: list, number: int, ins: list[int], values: list, results: int, batch: int) -> None:
        outs = [self.next_id + n for n in range(results)]
        self.next_id += results
        self.tensors += outs
        self.ops.append(Op(number, ins, values, outs, batch))
        code += [number, 1, *ins, *values, *outs]

    # ---- moves

    def deliver(self, sent: list) -> None:
        for peer, message in sent:
            for worker in self.alive:
                if peer == worker.name:
                    worker.received.append(message)
            if peer == b"c":
                if isinstance(message, Ack) or (isinstance(message, Value) and message.acked >= 0):
                    self.acked = message.seq if isinstance(message, Ack) else message.acked
                assert not isinstance(message, Exit), message
                self.answers += isinstance(message, (Value, Failed)) and message.request >= 0

    def turn(self, workers: list[Worker]) -> None:
        """One move of a worker."""
        worker = self.rng.choice(workers)
        moves = [
            name
            for name, able in (("receive", worker.received), ("execute", worker.inbox or worker.run), ("send", worker.out))
            if able
        ]
        move = self.rng.choice(moves) if moves else ""
        if move == "receive":
            worker.receive()
        elif move == "execute":
            worker.execute(self.rng)
        elif move == "send":
            self.deliver(self.bench.give(worker.name, *worker.out.popleft()))

    def batch(self) -> None:
        """The client records ops."""
        rng, code = self.rng, []
        for _ in range(rng.randrange(1, 5)):
            number = rng.choice([NEG, ADD_, ADD_, ADD_, FILL, ADD, VIEW, MUL])
            ins = [rng.choice(self.tensors[-8:] + self.tensors[:START]) for _ in range({ADD_: 2, ADD: 2}.get(number, 1))]
            value = BAD if rng.random() < 0.1 else float(rng.randrange(2, 900))
            if len(set(ins)) < len(ins) and number == ADD_:
                number, ins = NEG, ins[:1]
            values = [value] if number in (FILL, MUL) else []
            self._record(code, number, ins, values, number not in (ADD_, FILL), self.batches)
        self.to_core.append((Ops(self.batches, [], [], code), ()))
        self.batches += 1

    def move(self) -> None:
        rng = self.rng
        roll = rng.random()
        if roll < 0.06 and self.batches - self.acked <= CREDIT:
            self.batch()
        elif roll < 0.08:
            self.asked += 1
            self.to_core.append((Fetch(self.asked, rng.choice(self.tensors)), ()))
        elif roll < 0.095:
            self.interrupts.append(self.batches - 1)
            self.deliver(self.bench.give(b"c", Interrupt(self.batches - 1)))
        elif roll < 0.25 and self.to_core:
            message, frames = self.to_core.popleft()
            self.deliver(self.bench.give(b"c", message, frames))
        elif roll < 0.3:
            self.deliver(self.bench.feed(Turn(0.0)))
        elif roll < 0.301 and self.lost == "some" and len(self.alive) > 1:
            worker = self.alive.pop()
            self.deliver(self.bench.feed(PeerLost(worker.name, "it was killed", 0.0)))
        else:
            self.turn(self.alive)

    def run(self, moves: int) -> None:
        for _ in range(moves):
            self.move()
        for _ in range(20_000):
            if self.to_core:
                self.deliver(self.bench.give(b"c", *self.to_core.popleft()))
            self.deliver(self.bench.feed(Turn(0.0)))
            self.turn(self.alive)
            if not self.to_core and all(worker.idle for worker in self.alive) and not self.bench.core.round_robin.pending:
                break
        else:
            raise AssertionError("it has no end")
        self.check()

    # ---- what must hold

    def check(self) -> None:
        stream = self.session.op_stream
        assert not self.session.inbox and stream.interrupted < 0 and not stream.coming and not self.session.fetches.open
        assert self.answers == self.asked, f"{self.answers} of {self.asked} questions were answered"
        if len(self.alive) < 2:
            return  # what both held is gone
        first, second = self.workers
        assert first.skipped == second.skipped, first.skipped ^ second.skipped
        assert first.met == second.met, "one worker would wait for the other in a collective"
        assert first.since is None and second.since is None
        self._check_ends(first.skipped)
        model = self._model(first.skipped)
        for i in self.tensors:
            tensor = self.session.table.rows[i]
            if tensor.storage.failed is not None:
                continue
            want = model[i]
            for worker in self.workers:
                have = worker.cells.get(i)
                if have is None:
                    assert want is None, f"%{i} is good, and {worker.name!r} does not have it"
                else:
                    assert want is not None and want[0] == have[0], f"%{i} is {have} on {worker.name!r}, want {want}"

    def _check_ends(self, skipped: set[int]) -> None:
        """Dropped ops are the end of the queue at an interrupt."""
        for before, op in zip(self.ops, self.ops[1:]):
            if before.seq in skipped and op.seq not in skipped:
                assert before.batch in self.interrupts and op.batch > before.batch, (before, op, self.interrupts)

    def _model(self, skipped: set[int]) -> dict[int, list | None]:
        """Values of the ops that were executed; [None] for worthless ones, None for those that no op made."""
        cells: dict[int, Any] = {}
        names = {number: TEMPLATES[row][0] for number, row in ROWS.items()}
        for op in self.ops:
            if op.seq in skipped:
                # A view that was dropped is made later: its base is there
                cells.update(dict.fromkeys(op.outs, cells[op.ins[0]] if op.number == VIEW else None))
                continue
            ins = [cells.get(i) for i in op.ins]
            if op.number == UPLOAD:
                result: Any = [0]
            elif any(cell is None for cell in ins) or (op.values and op.values[0] >= BAD):
                result = [None]
                if op.number in (ADD_, FILL) and ins[0] is not None:
                    ins[0][0] = None
            elif op.number == FILL:
                ins[0][0] = int(op.values[0])
                result = ins[0]
            elif any(cell[0] is None for cell in ins):
                result = ins[0] if op.number == VIEW else [None]
                if op.number == ADD_:
                    ins[0][0] = None
            else:
                result = compute(names[op.number], ins, op.values)
            cells.update(dict.fromkeys(op.outs, result))
        return cells


def simulate(seed: int, cases: int) -> Counter[str]:
    """So many cases; an AssertionError names the seed of one that fails."""
    counts: Counter[str] = Counter()
    for n in range(seed, seed + cases):
        case = Simulation(n, "some" if n % 4 == 0 else "")
        try:
            case.run(400)
        except Exception as error:
            raise AssertionError(f"case {n}: {type(error).__name__}: {error}") from error
        counts["cases"] += 1
        counts["interrupts"] += len(case.interrupts)
        counts["ops"] += len(case.ops)
        counts["dropped"] += len(case.workers[0].skipped)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.interrupts.simulation")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    counts = simulate(options.seed, options.cases)
    print({**counts, "seconds": round(time.monotonic() - began, 1)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
