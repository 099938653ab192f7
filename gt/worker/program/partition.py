"""Graph partitioning: cuts a program's instructions into segments that can be compiled, and numbers their tensors.

Segments with equal graphs are compiled once, whatever the ids of their tensors: layers and micro-batches. Pure; knows neither
torch nor tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

from gt.ir.instr import FREE, Define
from gt.ir.spec import DTYPES, contiguous
from gt.worker.instructions.step import Row
from gt.worker.program.repeats import cuts

MAX_SEGMENT_OPS = 1200  # compile time grows faster than the number of ops; shorter segments fuse less across their borders
LONG_SEGMENT_OPS = 200  # from here on a segment ends where nothing is fused, as repeats.py explains
MIN_COMPUTING_OPS = 2  # ops that compute in a segment; fewer are not worth a call into compiled code
# For a program that is executed once a segment is compiled only if it saves memory:
MIN_SAVED_SHARE = 4  # 1 / MIN_SAVED_SHARE of the bytes that it makes end within it
MAX_OUTPUTS_ONCE = 64  # outputs of such a segment: compile time grows with each

LIST_OPS = "aten._foreach_"
PRODUCTS = {f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm")}
CONVOLUTIONS = "aten.convolution"

# Ops with which optimizers make their state, in their first step alone
MAKERS = {
    f"aten.{name}"
    for name in (
        *("zeros_like.default", "empty_like.default", "ones_like.default", "full_like.default", "new_zeros.default"),
        *("zeros.default", "empty.memory_format", "ones.default", "full.default", "clone.default", "zero_.default"),
    )
}

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
    """Ops on numbered tensors. Inputs have the numbers 0 to `inputs`, each op makes the next; `outputs` outlive the segment.

    A view is right before its first reader, inputs have the order of their first reads, and outputs that in which they are
    made. So recordings that differ only in the order of views have equal graphs.
    """

    inputs: int
    calls: tuple[SegmentOp, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoundSegment:
    """A segment graph at one place of a program: the ids of its tensors, and the payloads behind the graph's texts.

    places: by call, that of its instruction in the program. dropped: ids to free first, which the segment does not read.
    before: rows to execute next. inputs, outputs: ids. ended: ids to free after it, of inputs and of results of `before`.
    """

    graph: SegmentGraph
    payloads: tuple[dict[str, Any], ...]
    values: tuple[tuple, ...]
    places: tuple[int, ...]
    dropped: tuple[int, ...]
    before: tuple[Row, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ended: tuple[int, ...]


@dataclass(slots=True)
class DefinitionTraits:
    """Traits of a definition: whether it can be in a segment, its text, and whether it computes anything.

    lists: it takes lists of tensors, as steps of optimizers do. tensors: number of those that an op reads. complex_outs:
    places of its complex results, counted from the instruction's. begins: how well a segment begins with it, as repeats.py
    weighs it.
    """

    fits: bool = False
    text: str = ""
    computes: bool = False
    lists: bool = False
    tensors: int = 0
    makes: bool = False  # see MAKERS
    complex_outs: tuple[int, ...] = ()
    begins: int = 0
    convolves: bool = False


def definition_traits(define: Define | None, fits: Callable[[dict[str, Any]], bool]) -> DefinitionTraits:
    """fits: True for the payload of an op that can be compiled."""
    if define is None or define.kind == "alias":
        return DefinitionTraits(define is not None)
    if define.kind == "shard":
        one_box = len(define.payload["boxes"]) == 1
        return DefinitionTraits(one_box and all(map(fits, shard_as_ops(define.payload))), computes=True)
    if define.kind != "op":
        return DefinitionTraits()
    # A row of code is: number, seq, tensors, values, outputs. `first` is the place of the first output in it.
    tensors, first = define.payload["tensors"], 2 + define.payload["tensors"] + define.payload["values"]
    outs = enumerate(_tensor_outputs(define.payload), first)
    complex_outs = tuple(place for place, out in outs if out[1] is not None and out[1][3].startswith("complex"))
    if not fits(define.payload):
        return DefinitionTraits(tensors=tensors, complex_outs=complex_outs)
    # the layout of a view follows from its base
    texts = [out if out[0] != "view" else [out[0], None, out[2]] for out in define.payload["outs"]]
    # The text identifies equal ops of different definitions: it contains all that the compiled code depends on, and no ids.
    name = define.payload["op"]
    text, lists = repr({**define.payload, "outs": texts}), name.startswith(LIST_OPS)
    begins = 2 if "attention_backward" in name else int(name in PRODUCTS)
    flat = any(out[1] is not None and len(out[1][0]) == 4 for out in define.payload["outs"])  # others are never channels last
    computes, convolves = not makes_only_views(define.payload), flat and name.startswith(CONVOLUTIONS)
    return DefinitionTraits(True, text, computes, lists, tensors, name in MAKERS, complex_outs, begins, convolves)


def shard_as_ops(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """A `shard` of one box as ops, each on the result of the op before: slices, and a copy of the last."""

    def op(name: str, args: list, out: list, **kwargs: Any) -> dict[str, Any]:
        counts = {"tensors": 1, "values": 0, "outs": [out], "writes": [], "random": None}
        return {"op": f"aten.{name}", "args": [{"t": 0}, *args], "kwargs": kwargs, **counts}

    # The box is sliced dim by dim. The copy at the end makes the piece contiguous, and independent of the whole tensor's
    # memory.
    slices = [op("slice.Tensor", [dim, *span], ["view", None, 0]) for dim, span in enumerate(payload["boxes"][0])]
    spec = contiguous(tuple(payload["shape"]), payload["dtype"])
    return [*slices, op("clone.default", [], ["new", spec.wire(), -1], memory_format={"memory_format": "contiguous_format"})]


def saves_memory(segment: BoundSegment) -> bool:
    """True if a large part of its results ends within it, most of which compiled code never makes, and its outputs are few."""
    # Bytes that end within the segment are an upper bound of the saving: fused kernels keep most such values in registers.
    total = sum(_sizes(segment))
    return len(segment.graph.outputs) <= MAX_OUTPUTS_ONCE and MIN_SAVED_SHARE * (total - output_bytes(segment)) > total


def output_bytes(segment: BoundSegment) -> int:
    """Bytes of its ops' results that outlive it."""
    sizes = _sizes(segment)
    return sum(sizes[n - segment.graph.inputs] for n in segment.graph.outputs if n >= segment.graph.inputs)


def row_bytes(define: Define) -> list[int]:
    """Bytes of memory that an instruction makes for each of its tensors, as far as its definition says."""
    if define.kind == "op":
        return _output_sizes(define.payload)
    if define.kind == "shard":
        return [prod(define.payload["shape"]) * DTYPES[define.payload["dtype"]][0]]
    return []


def _sizes(segment: BoundSegment) -> list[int]:
    return [nbytes for payload in segment.payloads for nbytes in _output_sizes(payload)]


def _output_sizes(payload: dict[str, Any]) -> list[int]:
    # A view has no memory of its own; a result without a spec has a size that only its execution tells.
    return [_nbytes(out[1]) if out[0] == "new" and out[1] is not None else 0 for out in _tensor_outputs(payload)]


def _tensor_outputs(payload: dict[str, Any]) -> list:
    return [out for out in payload["outs"] if out[0] in ("new", "view")]


def _nbytes(spec: list) -> int:
    return prod(spec[0]) * DTYPES[spec[3]][0]


def makes_only_views(payload: dict[str, Any]) -> bool:
    """True if an op has outputs and all are views."""
    return bool(payload["outs"]) and all(out[0] == "view" for out in payload["outs"])


def partition(
    rows: Sequence[Row], code: Sequence, traits: Callable[[int], DefinitionTraits], apart: Collection[int] = ()
) -> list[tuple[bool, list[Row]]]:
    """Rows in order, as (True, rows of a segment) and (False, other rows).

    traits: of a definition, by its number. apart: places of rows that are in no segment.

    An op on lists begins a segment unless one before it did. It has hundreds of tensors, and little to fuse with a backward
    pass, which stays the same graph in calls whose optimizer does something else. So do ops at the end of a run that only make
    tensors: the first step of an optimizer makes its state so. Before a transfer they stay, as a copy of what is sent. An op
    that reads complex numbers is in no segment.
    """
    # State of the scan: the run that is being collected, and whether it began with an op on lists.
    pieces: list[tuple[bool, list[Row]]] = []
    run: list[Row] = []
    complex_ids: set[int] = set()
    lists = False

    def end(transfer: bool = False) -> None:
        nonlocal lists
        kept = len(run) if transfer else _without_makers(run, code, traits)
        for part in [*_divided(run[:kept], code, traits), *([run[kept:]] if run[kept:] else [])]:
            computing = sum(code[at] != FREE and traits(code[at]).computes for at, _ in part)
            pieces.append((computing >= MIN_COMPUTING_OPS, part))
        run.clear()
        lists = False

    for row in rows:
        at = row[0]
        # A FREE fits everywhere: where it stands in a segment, its tensors simply are no outputs.
        own = DefinitionTraits(True) if code[at] == FREE else traits(code[at])
        # The backend does not compile complex arithmetic, and an op's own definition does not show its inputs' dtypes: they
        # are followed by id.
        complex_ids.update(code[at + place] for place in own.complex_outs)
        if not own.fits or at in apart or not complex_ids.isdisjoint(code[at + 2 : at + 2 + own.tensors]):
            end(transfer=not own.tensors)
            pieces.append((False, [row]))
            continue
        if own.lists and not lists:  # the optimizer's step begins: a graph of its own, see above
            end()
            lists = True
        run.append(row)
    end()

    # Rows that are not compiled may stand in several pieces in a row: one is enough for them.
    return _joined(pieces)


def _without_makers(run: Sequence[Row], code: Sequence, traits: Callable[[int], DefinitionTraits]) -> int:
    """Number of rows before those at the end of a run that make tensors and do nothing else."""
    kept = len(run)
    for place in reversed(range(len(run))):
        number = code[run[place][0]]
        if number != FREE and traits(number).computes:
            if not traits(number).makes:
                break
            kept = place
    return kept


def _divided(run: Sequence[Row], code: Sequence, traits: Callable[[int], DefinitionTraits]) -> list[list[Row]]:
    """A run of rows that fit, as the rows of its segments: repeated stretches apart, and none of too many ops.

    Convolutions stay together: a segment's outputs have the strides of the program, and its inside may be channels last.
    """
    ops = [(place, traits(code[at])) for place, (at, _) in enumerate(run) if code[at] != FREE]
    convolutions = [n for n, (_, own) in enumerate(ops) if own.convolves] or [0]
    between = range(convolutions[0] + 1, convolutions[-1] + 1)
    weights = [0 if n in between else own.begins for n, (_, own) in enumerate(ops)]
    # Layers whose constants differ have no code in common, and many short segments take long. An alias has no text.
    begins = {0, *cuts([own.text or code[run[place][0]] for place, own in ops], weights)}
    computing = 0
    for n, (_, own) in enumerate(ops):
        if computing >= MAX_SEGMENT_OPS or (computing >= LONG_SEGMENT_OPS and weights[n]):
            begins.add(n)
        computing = own.computes + (0 if n in begins else computing)
    # From numbers of ops to places of rows: a FREE before an op belongs to the segment before.
    places = [0, *(ops[n][0] for n in sorted(begins - {0})), len(run)]
    return [list(run[low:high]) for low, high in pairwise(places) if low < high]


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
        # A FREE alone must not split a run in two: each run costs a launch, or a graph of its own.
        fit = (not groups or groups[-1][0]) if free else fits(row[0])
        if groups and groups[-1][0] == fit:
            groups[-1][1].append(row)
        else:
            groups.append((fit, [row]))
    return groups


@dataclass(slots=True)
class _Numbering:
    """Numbers of a segment's tensors while its rows are read. `inputs`: ids that it reads from before."""

    # Example: %7 is read, and `%9 = add(%7, %8)` is the first call. Then inputs = [7, 8] and names = {7: (True, 0), 8: (True,
    # 1), 9: (False, 0)}. `_numbered` makes (False, n) the number len(inputs) + n, as inputs are then complete.
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
        # A slice may move before the segment only if its base has the same meaning there: ids are reused after FREE, and an
        # alias gives an id to another tensor.
        return tensor in self.early or tensor not in self.names or self._given(tensor)

    def _given(self, tensor: int) -> bool:
        given, number = self.names[tensor]
        return given and self.inputs[number] == tensor

    def free(self, tensor: int) -> None:
        """The id is freed: it names no output, and a tensor that it named at the start ends."""
        # Inputs are still read by the compiled code, so these end after it. Other ids from before the segment can end first,
        # which lowers the peak. A value of the segment itself has nothing to free: it simply is no output.
        used = tensor in self.needed or tensor in self.inputs
        if used or tensor not in self.names:
            (self.ended if used else self.dropped).append(tensor)
        self.names.pop(tensor, None)

    def outputs(self) -> list[tuple[int, tuple[bool, int]]]:
        return [(tensor, name) for tensor, name in self.names.items() if not self._given(tensor)]


@dataclass(frozen=True, slots=True)
class _Call:
    """An op as it is recorded, at a place. ins: as in _Numbering.names; made: number of its first output."""

    at: int
    text: str
    payload: dict[str, Any]
    ins: list[tuple[bool, int]]
    values: tuple
    made: int

    @property
    def makes(self) -> range:
        return range(self.made, self.made + len(_tensor_outputs(self.payload)))


def bind_segment(
    rows: Sequence[Row], code: Sequence, definition: Callable[[int], Define | None], traits: Callable[[int], DefinitionTraits]
) -> BoundSegment:
    """A segment with its tensors numbered."""
    wiring, before = _Numbering(), []
    calls: list[_Call] = []
    for row in rows:
        at = row[0]
        if code[at] == FREE:
            for tensor in code[at + 3 : at + 3 + code[at + 2]]:
                wiring.free(tensor)
            continue
        define = definition(code[at])
        assert define is not None, "a segment has known definitions alone"
        # No code: from here on the second id is another name of the first tensor.
        if define.kind == "alias":
            wiring.names[code[at + 3]] = wiring.read(code[at + 2])
            continue
        if define.kind == "shard":
            last = wiring.read(code[at + 2])
            for payload in shard_as_ops(define.payload):
                calls.append(_Call(at, repr(payload), payload, [last], (), wiring.made))
                last = False, wiring.made
                wiring.made += 1
            wiring.names[code[at + 3]] = last
            continue
        payload = define.payload
        first = at + 2 + payload["tensors"]
        tensors, scalars = code[at + 2 : first], tuple(code[first : first + payload["values"]])
        outs = code[first + payload["values"] : at + 2 + define.operands]
        # A slice of an input is made before the segment (see SLICES), by its own row: the view becomes the segment's input.
        if payload["op"] in SLICES and makes_only_views(payload) and all(map(wiring.untouched, tensors)):
            before.append(row)
            wiring.early.update(outs)
            wiring.needed.update(outs, tensors)
            continue
        read = [wiring.read(t) for t in tensors]
        calls.append(_Call(at, traits(define.number).text, payload, read, scalars, wiring.made))
        for tensor in outs:
            wiring.names[tensor] = (False, wiring.made)
            wiring.made += 1
    # Normalize the order, so that equal work has equal graphs, then number its tensors.
    calls = _with_views_late(calls)
    graph, inputs, outputs = _numbered(calls, wiring)
    # An id that was freed and then reused for an output must not be freed after it: it names the output.
    ended = tuple(t for t in wiring.ended if t not in outputs)
    payloads, values = tuple(call.payload for call in calls), tuple(call.values for call in calls)
    places, dropped = tuple(call.at for call in calls), tuple(wiring.dropped)
    return BoundSegment(graph, payloads, values, places, dropped, tuple(before), inputs, outputs, ended)


def _with_views_late(calls: Sequence[_Call]) -> list[_Call]:
    """The calls with each view right before its first reader; those that no call reads are last."""
    late: dict[int, _Call] = {}  # views that are not placed yet, by each tensor that they make
    placed: list[_Call] = []

    def place(call: _Call) -> None:
        # Depth first: each view that `call` reads, and that has no place yet, is placed before it. A stack of (call, its other
        # inputs) in place of recursion: a chain of views may be long.
        waiting = [(call, iter(call.ins))]
        while waiting:
            last, ins = waiting[-1]
            view = next((late[number] for given, number in ins if not given and number in late), None)
            if view is not None:
                waiting.append((view, iter(view.ins)))
                continue
            waiting.pop()
            placed.append(last)
            for number in last.makes:
                late.pop(number, None)

    for call in calls:
        if makes_only_views(call.payload):
            late.update(dict.fromkeys(call.makes, call))
        else:
            place(call)
    # Views that no call reads may still be outputs.
    while late:
        place(next(iter(late.values())))
    return placed


def _numbered(calls: Sequence[_Call], wiring: _Numbering) -> tuple[SegmentGraph, tuple[int, ...], tuple[int, ...]]:
    """The graph of calls in their order, and the ids of its inputs and outputs."""
    unread = [(True, number) for number in range(len(wiring.inputs))]
    # Inputs in the order of their first reads; those that no call reads (only freed) follow, so that their ids stay bound.
    inputs = list(dict.fromkeys([*(name for call in calls for name in call.ins if name[0]), *unread]))
    made = [(False, number) for call in calls for number in call.makes]
    numbers = {name: number for number, name in enumerate([*inputs, *made])}
    ops, count = [], len(inputs)
    for call in calls:
        ins = tuple(numbers[name] for name in call.ins)
        ops.append(SegmentOp(call.text, ins, tuple(map(repr, call.values)), count))
        count += len(call.makes)
    # Sorted by number and not by id, or equal layers with other ids would have other graphs.
    outputs = sorted(((numbers[name], tensor) for tensor, name in wiring.outputs()), key=lambda output: output[0])
    graph = SegmentGraph(len(inputs), tuple(ops), tuple(number for number, _ in outputs))
    return graph, tuple(wiring.inputs[number] for _, number in inputs), tuple(tensor for _, tensor in outputs)
