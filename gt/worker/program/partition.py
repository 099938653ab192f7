"""A program's instructions cut into segments that can be compiled, and what a segment does with its tensors numbered.

Two segments of the same form are compiled once, whatever their tensors are called: layers and micro-batches. Pure; knows
neither torch nor tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from gt.ir.instr import FREE, Define
from gt.ir.spec import DTYPES, contiguous
from gt.worker.context import Step

Row = tuple[int, Step]  # place of an instruction in the code, and what to call with the place of its first operand
LONGEST = 1200  # ops of one segment: compiling takes longer than in proportion, and code for parts lacks what borders hide
LIGHTER = 4  # this part of what a segment makes ends within it, or it is not compiled for one replay
LEFT = 64  # results of such a one at most: compiling takes longer for each
SHORTEST = 2  # ops that compute; less is not worth a call into compiled code

# Views whose constants say where in a tensor they lie. On what a segment is given they are made before it, so that the parts of
# a batch do not make as many forms.
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
class Form:
    """Tensors 0 to `inputs` are given, each op makes the next ones; `outputs` are those that are there afterwards."""

    inputs: int
    calls: tuple[SegmentOp, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wired:
    """A form with the names that its tensors have in one place of a program, and what the form's texts stand for.

    dropped: ids to forget first, which it has no use for. before: rows to carry out then. inputs, outputs: ids. ended: ids to
    forget after it, of inputs and of what `before` makes.
    """

    form: Form
    payloads: tuple[dict[str, Any], ...]
    values: tuple[tuple, ...]
    dropped: tuple[int, ...]
    before: tuple[Row, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ended: tuple[int, ...]


@dataclass(slots=True)
class DefinitionTraits:
    """What is asked of a definition once: whether it can be in a segment, its text, whether it computes anything."""

    fits: bool = False
    text: str = ""
    computes: bool = False


def known(define: Define | None, fits: Callable[[dict[str, Any]], bool]) -> DefinitionTraits:
    """fits: of the payload of an op, whether it can be compiled."""
    if define is None or define.kind == "alias":
        return DefinitionTraits(define is not None)
    if define.kind == "shard":
        return DefinitionTraits(len(define.payload["boxes"]) == 1 and all(map(fits, cutting(define.payload))), computes=True)
    if define.kind != "op" or not fits(define.payload):
        return DefinitionTraits()
    # a view lies as its base makes it lie
    outs = [out if out[0] != "view" else [out[0], None, out[2]] for out in define.payload["outs"]]
    return DefinitionTraits(True, repr({**define.payload, "outs": outs}), not views(define.payload))


def cutting(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """A `shard` of one box as ops, each on what the one before makes: slices, and a copy of the last."""

    def op(name: str, args: list, out: list, **kwargs: Any) -> dict[str, Any]:
        one = {"tensors": 1, "values": 0, "outs": [out], "writes": [], "random": None}
        return {"op": f"aten.{name}", "args": [{"t": 0}, *args], "kwargs": kwargs, **one}

    slices = [op("slice.Tensor", [dim, *span], ["view", None, 0]) for dim, span in enumerate(payload["boxes"][0])]
    spec = contiguous(tuple(payload["shape"]), payload["dtype"])
    return [*slices, op("clone.default", [], ["new", spec.wire(), -1], memory_format={"memory_format": "contiguous_format"})]


def lightens(wired: Wired) -> bool:
    """Whether much of what its ops make ends within it, compiled, most of which is never made; and not too much is left."""
    total = sum(_sizes(wired))
    return len(wired.form.outputs) <= LEFT and LIGHTER * (total - left(wired)) > total


def left(wired: Wired) -> int:
    """Bytes that its ops make and that are there when it is over."""
    sizes = _sizes(wired)
    return sum(sizes[n - wired.form.inputs] for n in wired.form.outputs if n >= wired.form.inputs)


def _sizes(wired: Wired) -> list[int]:
    return [_nbytes(out[1]) if out[0] == "new" else 0 for payload in wired.payloads for out in _made(payload)]


def _made(payload: dict[str, Any]) -> list:
    return [out for out in payload["outs"] if out[0] in ("new", "view")]


def _nbytes(spec: list) -> int:
    return prod(spec[0]) * DTYPES[spec[3]][0]


def views(payload: dict[str, Any]) -> bool:
    """Whether an op makes nothing but views."""
    return bool(payload["outs"]) and all(out[0] == "view" for out in payload["outs"])


def cut(rows: Sequence[Row], code: Sequence, ask: Callable[[int], DefinitionTraits]) -> list[tuple[bool, list[Row]]]:
    """Runs of rows in order, each with whether it is a segment. ask: of a definition's number."""
    found: list[tuple[bool, list[Row]]] = []
    run: list[Row] = []
    ops = 0

    def end() -> None:
        nonlocal ops
        if run:
            found.append((ops >= SHORTEST, list(run)))
        run.clear()
        ops = 0

    for row in rows:
        number = code[row[0]]
        about = DefinitionTraits(True) if number == FREE else ask(number)
        if not about.fits:
            end()
            found.append((False, [row]))
            continue
        run.append(row)
        ops += about.computes
        if ops >= LONGEST:
            end()
    end()
    return _joined(found)


def _joined(runs: list[tuple[bool, list[Row]]]) -> list[tuple[bool, list[Row]]]:
    found: list[tuple[bool, list[Row]]] = []
    for fit, rows in runs:
        if found and not fit and not found[-1][0]:
            found[-1][1].extend(rows)
        else:
            found.append((fit, rows))
    return found


def runs(rows: Sequence[Row], code: Sequence, fits: Callable[[int], bool]) -> list[tuple[bool, list[Row]]]:
    """Rows in order, as runs of those that fit and of others. fits: of a place. A FREE goes with what is before it."""
    found: list[tuple[bool, list[Row]]] = []
    for row in rows:
        free = code[row[0]] == FREE
        fit = (not found or found[-1][0]) if free else fits(row[0])
        if found and found[-1][0] == fit:
            found[-1][1].append(row)
        else:
            found.append((fit, [row]))
    return found


@dataclass(slots=True)
class _Wiring:
    """Ids to numbers while a segment is read: `names` what an id stands for now, `inputs` the ids that it is given."""

    names: dict[int, tuple[bool, int]] = field(default_factory=dict)  # id -> (whether given, number)
    inputs: list[int] = field(default_factory=list)
    made: int = 0
    dropped: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    early: set[int] = field(default_factory=set)  # ids that are made before the segment
    needed: set[int] = field(default_factory=set)  # for that, and they

    def read(self, tensor: int) -> tuple[bool, int]:
        if tensor not in self.names:
            self.names[tensor] = (True, len(self.inputs))
            self.inputs.append(tensor)
        return self.names[tensor]

    def untouched(self, tensor: int) -> bool:
        """Whether the id stands for what it stood for at the start."""
        return tensor in self.early or tensor not in self.names or self._given(tensor)

    def _given(self, tensor: int) -> bool:
        given, number = self.names[tensor]
        return given and self.inputs[number] == tensor

    def free(self, tensor: int) -> None:
        """It is no output, and what the id stood for at the start ends."""
        used = tensor in self.needed or tensor in self.inputs
        if used or tensor not in self.names:
            (self.ended if used else self.dropped).append(tensor)
        self.names.pop(tensor, None)

    def outputs(self) -> list[tuple[int, tuple[bool, int]]]:
        return [(tensor, name) for tensor, name in self.names.items() if not self._given(tensor)]


def wire(
    rows: Sequence[Row], code: Sequence, definition: Callable[[int], Define | None], ask: Callable[[int], DefinitionTraits]
) -> Wired:
    """A segment with its tensors numbered."""
    wiring, before = _Wiring(), []
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
        assert define is not None, "a run has what is known"
        if define.kind == "alias":
            wiring.names[code[at + 3]] = wiring.read(code[at + 2])
            continue
        if define.kind == "shard":
            last = wiring.read(code[at + 2])
            for payload in cutting(define.payload):
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
        if payload["op"] in SLICES and views(payload) and all(map(wiring.untouched, tensors)):
            before.append(row)
            wiring.early.update(outs)
            wiring.needed.update(outs, tensors)
            continue
        calls.append((ask(define.number).text, [wiring.read(t) for t in tensors], tuple(map(repr, scalars)), wiring.made))
        payloads.append(payload)
        values.append(scalars)
        for tensor in outs:
            wiring.names[tensor] = (False, wiring.made)
            wiring.made += 1
    count, outputs = len(wiring.inputs), wiring.outputs()

    def number(name: tuple[bool, int]) -> int:
        return name[1] if name[0] else count + name[1]

    form = Form(
        count,
        tuple(SegmentOp(text, tuple(map(number, ins)), scalars, count + made) for text, ins, scalars, made in calls),
        tuple(number(name) for _, name in outputs),
    )
    ids = tuple(tensor for tensor, _ in outputs)
    ended = tuple(t for t in wiring.ended if t not in ids)
    return Wired(form, tuple(payloads), tuple(values), tuple(wiring.dropped), tuple(before), tuple(wiring.inputs), ids, ended)
