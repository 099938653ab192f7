"""A worker that is only thought of: what its instructions would make it hold, compute and send. No values.

Memory is counted as a captured step has it: a value made in a step ends at its last use in it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from gt.dispatcher.sharding import cost
from gt.ir.dataflow import bytes_alive, decode
from gt.ir.instr import COLLECTIVES, END, FORGET, FREE, KINDS, Define
from gt.ir.spec import DTYPES
from gt.observe import comm_volume
from gt.worker.instructions.pieces import as_boxes, local

WEIGHTS, GRADIENTS, OPTIMIZER, OTHER = "weights", "gradients", "optimizer", "other"


class OpAction(NamedTuple):
    """Whose work an op is: its stage, whether it is backward, its micro-batch (-1 outside of gt.microbatches)."""

    stage: str
    backward: bool
    micro: int


NOWHERE = OpAction("", False, -1)


class Block:
    """Memory that one or several tensors view. born, last: row that made it, and that used it last; dead: freed since."""

    __slots__ = ("born", "by", "dead", "kind", "last", "last_by", "name", "nbytes", "refs")

    def __init__(self, nbytes: int, born: int, by: OpAction) -> None:
        self.nbytes, self.born, self.last, self.by, self.last_by = nbytes, born, born, by, by
        self.refs, self.dead, self.kind, self.name = 0, False, OTHER, ""


@dataclass(slots=True)
class SimulatedTensor:
    """A tensor: its memory and its look here."""

    block: Block
    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize


@dataclass(slots=True)
class SimulatedOp:
    """One op or transfer of the first micro-batch: what it takes, the memory it reads and makes."""

    by: OpAction
    seconds: float
    reads: list[int]
    makes: list[int]
    sends: bool


@dataclass
class SimulatedInterval:
    """What was done between two marks. work: of each place, operations, bytes and seconds."""

    rows: int = 0
    start: list[Block] = field(default_factory=list)  # held when it began
    made: list[Block] = field(default_factory=list)
    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    work: dict[OpAction, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))
    first: list[SimulatedOp] = field(default_factory=list)

    def peak(self, but: Sequence[str] = ()) -> int:
        """The most bytes held at once, of blocks that are of none of these kinds."""
        blocks = [block for block in (*self.start, *self.made) if block.kind not in but]
        lifetimes = ((max(block.born, 0), block.last if block.dead else None, block.nbytes) for block in blocks)
        return max(0, *bytes_alive(self.rows + 1, lifetimes))


class StandIn:
    """One worker. `places`: Place of the op with this sequence number, kept up to date by whoever runs it."""

    def __init__(self, index: int, places: dict[int, OpAction]) -> None:
        self.index, self.places = index, places
        self.tensors: dict[int, SimulatedTensor] = {}
        self.defines: dict[int, Define] = {}
        self.now = SimulatedInterval()
        self._on = {"op": self._op, "alias": self._alias, "program": None, "fetch": None, "describe": None}
        self._names: dict[int, tuple[str, str]] = {}  # kind and name of tensors that are more than values
        self._outs: dict[int, list] = {}  # of definitions: shape and itemsize of what they make, and of what it is a view

    def name(self, tensor: int, kind: str, name: str) -> None:
        """Say what a tensor is, whether it is here already or only will be."""
        self._names[tensor] = kind, name
        held = self.tensors.get(tensor)
        if held is not None:
            held.block.kind, held.block.name = kind, name

    def mark(self) -> SimulatedInterval:
        """End a stretch: what is held is what the next begins with."""
        ended, self.now = self.now, SimulatedInterval()
        self._names.clear()
        blocks = {id(held.block): held.block for held in self.tensors.values()}
        for block in blocks.values():
            if not block.dead:
                fresh = Block(block.nbytes, -1, block.by)
                fresh.kind, fresh.name, fresh.refs = block.kind, block.name, block.refs
                blocks[id(block)] = fresh
        for held in self.tensors.values():
            held.block = blocks[id(held.block)]
        self.now.start = list(blocks.values())
        return ended

    def held(self, tensors: Iterable[int]) -> dict[str, int]:
        """Bytes by kind of what these tensors view. A block of a kind that none of them views is over: it waits to be freed."""
        blocks = {id(held.block): held.block for i in tensors if (held := self.tensors.get(i)) is not None}
        for block in self.now.start:
            if block.kind != OTHER and id(block) not in blocks:
                block.dead = True
        found: Counter[str] = Counter()
        for block in blocks.values():
            found[block.kind] += block.nbytes
        return dict(found)

    def run(self, defines: Sequence[list], code: Sequence, base: int) -> None:
        self.defines.update((row[0], Define.from_wire(row)) for row in defines)
        for at, define, operands in decode(code, self.defines.__getitem__):
            if define is None:
                self._drop(code[at], operands)
                continue
            by = self.places.get(base + code[at + 1], NOWHERE)
            handler = self._on.get(define.kind, self._move)
            if handler is not None:
                handler(define, operands, by)
                self.now.rows += 1

    # ---- instructions

    def _op(self, define: Define, operands: Sequence, by: OpAction) -> None:
        payload, tensors = define.payload, self.tensors
        ins = [tensors[i] for i in operands[define.effects.reads]]
        names = operands[define.effects.makes]
        outs = self._outs.get(define.number)
        if outs is None:
            outs = self._outs[define.number] = _outs(payload["outs"])
        views, made = True, []
        for name, (shape, itemsize, of) in zip(names, outs):
            if of >= 0:
                held = self._add(name, SimulatedTensor(ins[of].block, shape, itemsize))
            else:
                held, views = self._make(name, shape, itemsize, by), False
            made.append(held)
        self._touch(ins, by)
        if made and views:
            self._note(by, 0.0, ins, made)
            return
        nbytes = sum(held.nbytes for held in (*ins, *made))
        operations = cost.flops(payload["op"], [held.shape for held in ins], [held.shape for held in made])
        self._work(by, operations, nbytes)
        self._note(by, cost.seconds(operations, nbytes), ins, made)

    def _move(self, define: Define, operands: Sequence, by: OpAction) -> None:
        """A collective, a transfer, or a local change of layout."""
        payload, kind = define.payload, define.kind
        names = dict(zip(KINDS[kind][0], operands))
        source = self.tensors.get(names.get("src", names.get("tensor", -1)))
        itemsize = DTYPES[payload["dtype"]][0] if "dtype" in payload else source.itemsize if source is not None else 1
        ins = [source] if source is not None else []
        made = []
        if "dst" in names:
            made = [self._make(names["dst"], self._shape(define, source), itemsize, by)]
        self._touch(ins, by)
        count = getattr(comm_volume, kind, None)
        if count is not None:
            size = source.nbytes if kind == "all_reduce" and source is not None else itemsize
            for peer, sent, received in count(payload, size):
                self.now.sent[peer] += sent
                self.now.received[peer] += received
        self.now.collectives[kind] += kind in COLLECTIVES
        self._note(by, 0.0, ins, made, sends=kind == "send")

    def _alias(self, define: Define, operands: Sequence, by: OpAction) -> None:
        source = self.tensors[operands[0]]
        held = self._add(operands[1], SimulatedTensor(source.block, source.shape, source.itemsize))
        self._note(by, 0.0, [source], [held])

    @staticmethod
    def _shape(define: Define, source: SimulatedTensor | None) -> tuple[int, ...]:
        payload = define.payload
        for kind, key in (("reduce_scatter", "boxes"), ("all_to_all", "want")):
            if define.kind == kind:
                return local(as_boxes(payload[key][payload["team"]["rank"]]))[0]
        if "shape" in payload:
            return tuple(payload["shape"])
        return source.shape if source is not None else ()

    # ---- memory

    def _make(self, name: int, shape: tuple[int, ...], itemsize: int, by: OpAction) -> SimulatedTensor:
        block = Block(prod(shape) * itemsize, self.now.rows, by)
        if name in self._names:
            block.kind, block.name = self._names[name]
        self.now.made.append(block)
        return self._add(name, SimulatedTensor(block, shape, itemsize))

    def _add(self, name: int, held: SimulatedTensor) -> SimulatedTensor:
        held.block.refs += 1
        self._free(name)
        self.tensors[name] = held
        return held

    def _free(self, name: int) -> None:
        held = self.tensors.pop(name, None)
        if held is not None:
            held.block.refs -= 1
            held.block.dead = not held.block.refs

    def _touch(self, held: Sequence[SimulatedTensor], by: OpAction) -> None:
        for one in held:
            one.block.last, one.block.last_by = self.now.rows, by

    def _drop(self, reserved: int, named: Sequence) -> None:
        """FREE, FORGET or END, of these ids or numbers."""
        if reserved == FREE:
            for name in named:
                self._free(name)
        elif reserved == FORGET:
            for number in named:
                self.defines.pop(number, None)
                self._outs.pop(number, None)
        elif reserved == END:
            for name in [i for i in self.tensors if named[0] <= i < named[1]]:
                self._free(name)

    # ---- work

    def _work(self, by: OpAction, operations: float, nbytes: float) -> None:
        work = self.now.work[by]
        work[0] += operations
        work[1] += nbytes
        work[2] += cost.seconds(operations, nbytes)

    def _note(
        self, by: OpAction, seconds: float, ins: Sequence[SimulatedTensor], made: Sequence[SimulatedTensor], sends: bool = False
    ) -> None:
        if by.micro == 0:
            reads, makes = [id(held.block) for held in ins], [id(held.block) for held in made]
            self.now.first.append(SimulatedOp(by, seconds, reads, makes or reads[:1], sends))


def _outs(outs: Sequence) -> list[tuple[tuple[int, ...], int, int]]:
    """Shape, itemsize and operand viewed (or -1) of what an op makes."""
    found = []
    for kind, spec, of in outs:
        if kind in ("new", "view"):
            shape, dtype = (tuple(spec[0]), spec[3]) if spec else ((), "uint8")
            found.append((shape, DTYPES[dtype][0], of if kind == "view" else -1))
    return found
