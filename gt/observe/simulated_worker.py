"""Simulated worker: memory, work and traffic of a worker's instructions, without values.

Memory is that of a captured step or of eager mode. A captured step frees a value that it makes after its last use in the step.
Eager mode frees it once the program drops it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from gt.dispatcher.sharding import cost
from gt.ir.dataflow import bytes_alive, decode
from gt.ir.instr import COLLECTIVES, END, FORGET, FREE, KINDS, PROGRAMS, Define
from gt.ir.ops import UNSAID_VIEWS
from gt.ir.spec import DTYPES
from gt.observe import comm_volume

WEIGHTS, GRADIENTS, OPTIMIZER, OTHER = "weights", "gradients", "optimizer", "other"
OFFLOADED = "offloaded"  # bytes of these that rest in host memory or in files


class Block:
    """Memory that one or several tensors view.

    born, last, freed: instructions that made it and that used it last, and the one before which it was freed. dead: it was.
    """

    __slots__ = ("born", "dead", "freed", "kind", "last", "name", "nbytes", "refs")

    def __init__(self, nbytes: int, born: int) -> None:
        self.nbytes, self.born, self.last, self.freed = nbytes, born, born, -1
        self.refs, self.dead, self.kind, self.name = 0, False, OTHER, ""


@dataclass(slots=True)
class SimulatedTensor:
    """A tensor on this worker: its memory, local shape and itemsize. away: it is offloaded, and its block has no bytes."""

    block: Block
    shape: tuple[int, ...]
    itemsize: int
    away: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize


@dataclass
class SimulatedInterval:
    """Work and memory between two marks. seconds: of all ops, nominal."""

    rows: int = 0
    shapes: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)  # local shape and itemsize of its tensors
    start: list[Block] = field(default_factory=list)  # alive at its start
    made: list[Block] = field(default_factory=list)
    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    flops: float = 0.0
    seconds: float = 0.0
    earlier: list[SimulatedInterval] = field(default_factory=list)  # joined to this one

    @classmethod
    def joined(cls, intervals: Sequence[SimulatedInterval]) -> SimulatedInterval:
        """Intervals that follow one another as one."""
        *earlier, last = intervals
        whole = cls(last.rows, start=last.start, made=last.made, earlier=earlier)
        for each in intervals:
            whole.shapes.update(each.shapes)
            whole.sent.update(each.sent)
            whole.received.update(each.received)
            whole.collectives.update(each.collectives)
            whole.flops += each.flops
            whole.seconds += each.seconds
        return whole

    def peak(self, but: Sequence[str] = (), eager: bool = False) -> int:
        """Peak of the bytes alive, without blocks of the kinds `but`."""
        return max(self._peak(but, eager), *(interval.peak(but, eager) for interval in self.earlier), 0)

    def _peak(self, but: Sequence[str], eager: bool) -> int:
        # A block is alive from `born` to its last use; in eager mode until the program drops it.
        blocks = [block for block in (*self.start, *self.made) if block.kind not in but]
        ends = [max(block.last, block.freed - 1) if eager else block.last for block in blocks]
        lifetimes = ((max(b.born, 0), end if b.dead else None, b.nbytes) for b, end in zip(blocks, ends, strict=True))
        return max(0, *bytes_alive(self.rows + 1, lifetimes))


class SimulatedWorker:
    """One worker."""

    def __init__(self) -> None:
        self.tensors: dict[int, SimulatedTensor] = {}
        self.defines: dict[int, Define] = {}
        self.now = SimulatedInterval()
        self._on: dict[str, Any] = {
            "op": self._op, "host_op": self._host_op, "alias": self._alias, "evict": self._evict,
            **dict.fromkeys((*PROGRAMS, "fetch", "describe", "restore", "stale")),
        }  # fmt: skip
        self._names: dict[int, tuple[str, str]] = {}  # kind and name of weights, gradients and optimizer state
        self._outs: dict[int, list] = {}  # definition -> shape, itemsize and viewed operand of each output

    def name(self, tensor: int, kind: str, name: str) -> None:
        """Set the kind and name of a tensor, which may not exist yet."""
        self._names[tensor] = kind, name
        held = self.tensors.get(tensor)
        if held is not None:
            held.block.kind, held.block.name = kind, name

    def end_interval(self) -> SimulatedInterval:
        """End an interval. Blocks that are alive are the start of the next."""
        # The ended interval keeps its blocks as they were. Those that live on get copies with numbers of the new interval.
        ended = self.now
        self._names.clear()
        self._begin_interval()
        return ended

    def replay(self, streams: Iterable[Sequence]) -> SimulatedInterval:
        """Work and memory of one execution of a program's streams after all that was run so far; nothing here changes."""
        other = SimulatedWorker()
        other._names, other.defines, other._outs = self._names, self.defines, self._outs
        other.tensors = {i: replace(held) for i, held in self.tensors.items()}
        other._begin_interval()
        for code in streams:
            other.run((), code)
        return other.now

    def _begin_interval(self) -> None:
        self.now = SimulatedInterval()
        blocks = {id(held.block): held.block for held in self.tensors.values()}
        for block in blocks.values():
            fresh = Block(block.nbytes, -1)  # what counts as freed may be used again: another optimizer's weights
            fresh.kind, fresh.name, fresh.refs, fresh.dead = block.kind, block.name, block.refs, block.dead
            blocks[id(block)] = fresh
        for held in self.tensors.values():
            held.block = blocks[id(held.block)]
        self.now.start = list(blocks.values())
        self.now.shapes = {i: (held.shape, held.itemsize) for i, held in self.tensors.items()}

    def held(self, tensors: Sequence[int]) -> dict[str, int]:
        """Bytes by kind of the memory of these tensors. Other weights, gradients and optimizer state count as freed."""
        # Views share a block, which counts once.
        blocks = {id(held.block): held.block for i in tensors if (held := self.tensors.get(i)) is not None}
        for block in self.now.start:
            if block.kind != OTHER and id(block) not in blocks:
                block.dead = True
        by_kind: Counter[str] = Counter()
        for block in blocks.values():
            by_kind[block.kind] += block.nbytes
        by_kind[OFFLOADED] = sum(held.nbytes for held in map(self.tensors.get, tensors) if held is not None and held.away)
        return dict(by_kind)

    def run(self, defines: Sequence[list], code: Sequence) -> None:
        self.defines.update((row[0], Define.from_wire(row)) for row in defines)
        for at, define, operands in decode(code, self.defines.__getitem__):
            if define is None:
                self._drop(code[at], operands)
                continue
            handler = self._on.get(define.kind, self._move)
            if handler is not None:
                handler(define, operands)
                self.now.rows += 1

    # ---- instructions

    def _op(self, define: Define, operands: Sequence) -> None:
        payload, tensors = define.payload, self.tensors
        ins = [tensors[i] for i in operands[define.effects.reads]]
        self._restore(ins)
        names = operands[define.effects.makes]
        outs = self._outs.get(define.number)
        if outs is None:
            outs = self._outs[define.number] = _outs(payload["outs"], payload["op"].startswith(UNSAID_VIEWS))

        # Views take the block of the operand that they view; other outputs get one of their own.
        views, results = True, []
        for name, (shape, itemsize, of) in zip(names, outs):
            if of >= 0:
                held = self._add(name, SimulatedTensor(ins[of].block, shape, itemsize))
            else:
                held, views = self._make(name, shape, itemsize), False
            results.append(held)
        self._touch(ins)

        # An op that makes nothing but views moves no bytes.
        if results and views:
            return
        nbytes = sum(held.nbytes for held in (*ins, *results))
        operations = cost.flops(payload["op"], [held.shape for held in ins], [held.shape for held in results])
        self.now.flops += operations
        self.now.seconds += cost.seconds(operations, nbytes)

    def _move(self, define: Define, operands: Sequence) -> None:
        """A collective, a transfer, or a local change of layout."""
        payload, kind = define.payload, define.kind
        names = dict(zip(KINDS[kind][0], operands))
        source = self.tensors.get(names.get("src", names.get("tensor", -1)))
        if source is not None and kind != "stale":
            self._restore([source])
        itemsize = DTYPES[payload["dtype"]][0] if "dtype" in payload else source.itemsize if source is not None else 1
        if "dst" in names:
            self._make(names["dst"], self._shape(define, source), itemsize)
        if source is not None:
            self._touch([source])

        # comm_volume has a function for each kind that moves bytes between workers; local changes of layout have none.
        count = getattr(comm_volume, kind, None)
        if count is not None:
            size = source.nbytes if kind == "all_reduce" and source is not None else itemsize
            for peer, sent, received in count(payload, size):
                self.now.sent[peer] += sent
                self.now.received[peer] += received
        self.now.collectives[kind] += kind in COLLECTIVES

    def _alias(self, define: Define, operands: Sequence) -> None:
        source = self.tensors[operands[0]]
        self._restore([source])
        self._add(operands[1], SimulatedTensor(source.block, source.shape, source.itemsize))

    # ---- offloaded tensors

    def _host_op(self, define: Define, operands: Sequence) -> None:
        """An op in host memory: operands that rest there stay, and so do the op's results."""
        self._touch([held for i in operands[define.effects.reads] if not (held := self.tensors[i]).away])
        for name, (shape, itemsize, _) in zip(operands[define.effects.makes], _outs(define.payload["outs"], False)):
            self._add(name, SimulatedTensor(Block(0, self.now.rows), shape, itemsize, away=True))

    def _evict(self, define: Define, operands: Sequence) -> None:
        # Memory that other tensors view stays where it is.
        held = self.tensors.get(operands[0])
        if held is not None and not held.away and held.block.refs == 1:
            held.block.dead, held.block.last = True, max(held.block.last, self.now.rows)
            self._replace(held, 0)
            held.away = True

    def _restore(self, tensors: Iterable[SimulatedTensor]) -> None:
        for held in tensors:
            if held.away:
                held.away = False
                self._replace(held, held.nbytes)
                self.now.made.append(held.block)

    def _replace(self, held: SimulatedTensor, nbytes: int) -> None:
        """Give a tensor, and no other, memory of its own."""
        # Moving it is a new lifetime: the bytes on the device end or begin at this row.
        before, held.block = held.block, Block(nbytes, self.now.rows)
        held.block.kind, held.block.name, held.block.refs = before.kind, before.name, 1

    @staticmethod
    def _shape(define: Define, source: SimulatedTensor | None) -> tuple[int, ...]:
        if define.result_shape is not None:
            return define.result_shape
        return source.shape if source is not None else ()

    # ---- memory

    def _make(self, name: int, shape: tuple[int, ...], itemsize: int) -> SimulatedTensor:
        block = Block(prod(shape) * itemsize, self.now.rows)
        if name in self._names:
            block.kind, block.name = self._names[name]
        self.now.made.append(block)
        return self._add(name, SimulatedTensor(block, shape, itemsize))

    def _add(self, name: int, held: SimulatedTensor) -> SimulatedTensor:
        # Counted before the old tensor of this name is freed, which may be of the same block.
        held.block.refs += 1
        self._free(name)
        self.tensors[name] = held
        self.now.shapes[name] = held.shape, held.itemsize
        return held

    def _free(self, name: int) -> None:
        held = self.tensors.pop(name, None)
        if held is not None:
            held.block.refs -= 1
            held.block.dead, held.block.freed = not held.block.refs, self.now.rows

    def _touch(self, tensors: Iterable[SimulatedTensor]) -> None:
        for tensor in tensors:
            tensor.block.last = self.now.rows

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


def _outs(outs: Sequence, unsaid: bool) -> list[tuple[tuple[int, ...], int, int]]:
    """Shape, itemsize and viewed operand (or -1) of each output of an op. unsaid: all are views of the first operand."""
    results = []
    for kind, spec, of in outs:
        if kind in ("new", "view"):
            shape, dtype = (tuple(spec[0]), spec[3]) if spec else ((), "uint8")
            results.append((shape, DTYPES[dtype][0], of if kind == "view" else 0 if unsaid else -1))
    return results
