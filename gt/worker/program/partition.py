"""Graph partitioning: cuts a program's instructions into segments that can be compiled, and numbers their tensors.

Segments with equal graphs are compiled once, whatever the ids of their tensors: layers and micro-batches. Pure; knows neither
torch nor tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from gt.ir.instr import FREE, Define
from gt.ir.spec import DTYPES, contiguous
from gt.worker.instructions.step import Row

MAX_SEGMENT_OPS = 1200  # compile time grows faster than the number of ops; shorter segments fuse less across their borders
MIN_COMPUTING_OPS = 2  # of a segment; fewer are not worth a call into compiled code
# For a program that is carried out once a segment is compiled only if it saves memory:
MIN_SAVED_SHARE = 4  # 1 / MIN_SAVED_SHARE of the bytes that it makes end within it
MAX_OUTPUTS_ONCE = 64  # of such a segment: compile time grows with each

# Views whose constants are positions within their base. Those of a segment's inputs are made before the segment: otherwise each
# part of a batch would have a graph of its own.
SLICES = {
    f"aten.{name}"
    for name in (
        *("slice.Tensor", "select.int", "narrow.default", "split.Tensor", "split_with_sizes.default", "unbind.int"),
        *("chunk.default", "as_strided.default", "diagonal.default"),
    )
}


@dataclass(frozen=True, slots=True)
class SegmentOp:
    """One op: its definition and scalars as text (1, 1.0 and True differ), its tensors and first output by number."""

    text: str
    ins: tuple[int, ...]
    values: tuple[str, ...]
    made: int


@dataclass(frozen=True, slots=True)
class SegmentGraph:
    """Ops on numbered tensors. Inputs have the numbers 0 to `inputs`, each op makes the next; `outputs` outlive the segment."""

    inputs: int
    calls: tuple[SegmentOp, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoundSegment:
    """A segment graph at one place of a program: the ids of its tensors, and the payloads behind the graph's texts.

    dropped: ids to free first, which the segment does not read. before: rows to carry out next. inputs, outputs: ids.
    ended: ids to free after it, of inputs and of results of `before`.
    """

    graph: SegmentGraph
    payloads: tuple[dict[str, Any], ...]
    values: tuple[tuple, ...]
    dropped: tuple[int, ...]
    before: tuple[Row, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ended: tuple[int, ...]


@dataclass(slots=True)
class DefinitionTraits:
    """Traits of a definition: whether it can be in a segment, its text, and whether it computes anything."""

    fits: bool = False
    text: str = ""
    computes: bool = False


def definition_traits(define: Define | None, fits: Callable[[dict[str, Any]], bool]) -> DefinitionTraits:
    """fits: True for the payload of an op that can be compiled."""
    if define is None or define.kind == "alias":
        return DefinitionTraits(define is not None)
    if define.kind == "shard":
        one_box = len(define.payload["boxes"]) == 1
        return DefinitionTraits(one_box and all(map(fits, shard_as_ops(define.payload))), computes=True)
    if define.kind != "op" or not fits(define.payload):
        return DefinitionTraits()
    # the layout of a view follows from its base
    outs = [out if out[0] != "view" else [out[0], None, out[2]] for out in define.payload["outs"]]
    return DefinitionTraits(True, repr({**define.payload, "outs": outs}), not makes_only_views(define.payload))


def shard_as_ops(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """A `shard` of one box as ops, each on the result of the op before: slices, and a copy of the last."""

    def op(name: str, args: list, out: list, **kwargs: Any) -> dict[str, Any]:
        counts = {"tensors": 1, "values": 0, "outs": [out], "writes": [], "random": None}
        return {"op": f"aten.{name}", "args": [{"t": 0}, *args], "kwargs": kwargs, **counts}

    slices = [op("slice.Tensor", [dim, *span], ["view", None, 0]) for dim, span in enumerate(payload["boxes"][0])]
    spec = contiguous(tuple(payload["shape"]), payload["dtype"])
    return [*slices, op("clone.default", [], ["new", spec.wire(), -1], memory_format={"memory_format": "contiguous_format"})]


def saves_memory(segment: BoundSegment) -> bool:
    """True if a large part of its results ends within it, most of which compiled code never makes, and its outputs are few."""
    total = sum(_sizes(segment))
    return len(segment.graph.outputs) <= MAX_OUTPUTS_ONCE and MIN_SAVED_SHARE * (total - output_bytes(segment)) > total


def output_bytes(segment: BoundSegment) -> int:
    """Bytes of its ops' results that outlive it."""
    sizes = _sizes(segment)
    return sum(sizes[n - segment.graph.inputs] for n in segment.graph.outputs if n >= segment.graph.inputs)


def _sizes(segment: BoundSegment) -> list[int]:
    return [_nbytes(out[1]) if out[0] == "new" else 0 for payload in segment.payloads for out in _tensor_outputs(payload)]


def _tensor_outputs(payload: dict[str, Any]) -> list:
    return [out for out in payload["outs"] if out[0] in ("new", "view")]


def _nbytes(spec: list) -> int:
    return prod(spec[0]) * DTYPES[spec[3]][0]


def makes_only_views(payload: dict[str, Any]) -> bool:
    """True if an op has outputs and all are views."""
    return bool(payload["outs"]) and all(out[0] == "view" for out in payload["outs"])


def partition(rows: Sequence[Row], code: Sequence, traits: Callable[[int], DefinitionTraits]) -> list[tuple[bool, list[Row]]]:
    """Rows in order, as (True, rows of a segment) and (False, other rows). traits: of a definition, by its number."""
    pieces: list[tuple[bool, list[Row]]] = []
    run: list[Row] = []
    ops = 0

    def end() -> None:
        nonlocal ops
        if run:
            pieces.append((ops >= MIN_COMPUTING_OPS, list(run)))
        run.clear()
        ops = 0

    for row in rows:
        number = code[row[0]]
        own = DefinitionTraits(True) if number == FREE else traits(number)
        if not own.fits:
            end()
            pieces.append((False, [row]))
            continue
        run.append(row)
        ops += own.computes
        if ops >= MAX_SEGMENT_OPS:
            end()
    end()
    return _joined(pieces)


def _joined(runs: list[tuple[bool, list[Row]]]) -> list[tuple[bool, list[Row]]]:
    joined: list[tuple[bool, list[Row]]] = []
    for fit, rows in runs:
        if joined and not fit and not joined[-1][0]:
            joined[-1][1].extend(rows)
        else:
            joined.append((fit, rows))
    return joined


def runs(rows: Sequence[Row], code: Sequence, fits: Callable[[int], bool]) -> list[tuple[bool, list[Row]]]:
    """Rows in order, as runs that fit and runs that do not. fits: of a row's place. A FREE joins the run before it."""
    groups: list[tuple[bool, list[Row]]] = []
    for row in rows:
        free = code[row[0]] == FREE
        fit = (not groups or groups[-1][0]) if free else fits(row[0])
        if groups and groups[-1][0] == fit:
            groups[-1][1].append(row)
        else:
            groups.append((fit, [row]))
    return groups


@dataclass(slots=True)
class _Numbering:
    """Numbers of a segment's tensors while its rows are read. `inputs`: ids that it reads from before."""

    names: dict[int, tuple[bool, int]] = field(default_factory=dict)  # id -> (True for an input, number)
    inputs: list[int] = field(default_factory=list)
    made: int = 0
    dropped: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    early: set[int] = field(default_factory=set)  # ids that rows before the segment make
    needed: set[int] = field(default_factory=set)  # early ids, and the inputs of those rows

    def read(self, tensor: int) -> tuple[bool, int]:
        if tensor not in self.names:
            self.names[tensor] = (True, len(self.inputs))
            self.inputs.append(tensor)
        return self.names[tensor]

    def untouched(self, tensor: int) -> bool:
        """True if the id still names the tensor that it named at the start."""
        return tensor in self.early or tensor not in self.names or self._given(tensor)

    def _given(self, tensor: int) -> bool:
        given, number = self.names[tensor]
        return given and self.inputs[number] == tensor

    def free(self, tensor: int) -> None:
        """The id is freed: it names no output, and a tensor that it named at the start ends."""
        used = tensor in self.needed or tensor in self.inputs
        if used or tensor not in self.names:
            (self.ended if used else self.dropped).append(tensor)
        self.names.pop(tensor, None)

    def outputs(self) -> list[tuple[int, tuple[bool, int]]]:
        return [(tensor, name) for tensor, name in self.names.items() if not self._given(tensor)]


def bind_segment(
    rows: Sequence[Row], code: Sequence, definition: Callable[[int], Define | None], traits: Callable[[int], DefinitionTraits]
) -> BoundSegment:
    """A segment with its tensors numbered."""
    wiring, before = _Numbering(), []
    calls: list[tuple[str, list, tuple, int]] = []
    payloads: list[dict[str, Any]] = []
    values: list[tuple] = []
    for row in rows:
        at = row[0]
        if code[at] == FREE:
            for tensor in code[at + 3 : at + 3 + code[at + 2]]:
                wiring.free(tensor)
            continue
        define = definition(code[at])
        assert define is not None, "a segment has known definitions alone"
        if define.kind == "alias":
            wiring.names[code[at + 3]] = wiring.read(code[at + 2])
            continue
        if define.kind == "shard":
            last = wiring.read(code[at + 2])
            for payload in shard_as_ops(define.payload):
                calls.append((repr(payload), [last], (), wiring.made))
                payloads.append(payload)
                values.append(())
                last = False, wiring.made
                wiring.made += 1
            wiring.names[code[at + 3]] = last
            continue
        payload = define.payload
        first = at + 2 + payload["tensors"]
        tensors, scalars = code[at + 2 : first], tuple(code[first : first + payload["values"]])
        outs = code[first + payload["values"] : at + 2 + define.operands]
        if payload["op"] in SLICES and makes_only_views(payload) and all(map(wiring.untouched, tensors)):
            before.append(row)
            wiring.early.update(outs)
            wiring.needed.update(outs, tensors)
            continue
        calls.append((traits(define.number).text, [wiring.read(t) for t in tensors], tuple(map(repr, scalars)), wiring.made))
        payloads.append(payload)
        values.append(scalars)
        for tensor in outs:
            wiring.names[tensor] = (False, wiring.made)
            wiring.made += 1
    count, outputs = len(wiring.inputs), wiring.outputs()

    def number(name: tuple[bool, int]) -> int:
        return name[1] if name[0] else count + name[1]

    graph = SegmentGraph(
        count,
        tuple(SegmentOp(text, tuple(map(number, ins)), scalars, count + made) for text, ins, scalars, made in calls),
        tuple(number(name) for _, name in outputs),
    )
    ids = tuple(tensor for tensor, _ in outputs)
    ended = tuple(t for t in wiring.ended if t not in ids)
    dropped, inputs = tuple(wiring.dropped), tuple(wiring.inputs)
    return BoundSegment(graph, tuple(payloads), tuple(values), dropped, tuple(before), inputs, ids, ended)
