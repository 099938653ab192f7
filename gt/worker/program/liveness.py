"""What becomes of the tensors of a program, read from its stream: which it takes, makes, and leaves behind. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gt.ir.instr import FREE, KINDS, Define

Definition = Callable[[int], Define | None]
OLDER = -1  # stands for memory that was there before


@dataclass(slots=True)
class ProgramLiveness:
    """made: ids that it makes, or has name something else. last: of these, those whose memory is named when it is over.
    base: what an id shared memory with; `root` is the same for all that did. older: roots of what was there before.
    """

    made: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)
    base: dict[int, int] = field(default_factory=dict)
    older: set[int] = field(default_factory=set)

    def root(self, tensor: int) -> int:
        base = self.base
        while base.setdefault(tensor, tensor) != tensor:
            tensor = base[tensor]
        return tensor

    def memory(self, tensor: int) -> int:
        """As `root`, and one for all that was there before: of what that shares the program says nothing."""
        root = self.root(tensor)
        return OLDER if root in self.older else root


def lives(code: Sequence, definition: Definition) -> ProgramLiveness:
    """Of a whole program. Ids that ever shared memory are taken to share it."""
    found, at = ProgramLiveness(), 0
    alive: set[int] = set()
    older: set[int] = set()
    root = found.root
    while at < len(code):
        if code[at] == FREE:
            end = at + 3 + code[at + 2]
            alive.difference_update(code[at + 3 : end])
            at = end
            continue
        define, operands = instruction(code, at, definition)
        older.update(i for i in read(define, operands) if i not in found.made)
        for tensor, source in made(define, operands):
            found.made.add(tensor)
            alive.add(tensor)
            if source is not None:
                found.base[root(tensor)] = root(source)
        at += 2 + define.operands
    roots = {root(tensor) for tensor in alive}
    found.last = {tensor for tensor in found.made if root(tensor) in roots}
    found.older = set(map(root, older))
    return found


def taken(places: Sequence[int], code: Sequence, definition: Definition) -> tuple[list[int], set[int]]:
    """Of instructions in a row: ids that they read before they make them, in order; and all that they make."""
    reads: dict[int, None] = {}
    makes: set[int] = set()
    for at in places:
        if code[at] == FREE:
            continue
        define, operands = instruction(code, at, definition)
        reads.update(dict.fromkeys(i for i in read(define, operands) if i not in makes))
        makes.update(i for i, _ in made(define, operands))
    return list(reads), makes


def read(define: Define, operands: Sequence) -> list[int]:
    """Ids that an instruction reads, or changes in place."""
    if define.kind == "op":
        return list(operands[: define.payload["tensors"]])
    return [i for name, i in zip(KINDS[define.kind][0], operands, strict=True) if name in ("src", "tensor")]


def changed(define: Define, operands: Sequence) -> list[int]:
    """Ids whose memory an instruction may change: of an op, all that it is given if its name says that it changes something."""
    if define.kind == "all_reduce":
        return [operands[0]]
    if define.kind != "op":
        return []
    payload = define.payload
    name, overload = payload["op"].split(".")[1:]
    if not (name.endswith("_") or name.startswith(("_fused_", "_foreach_")) or "batch_norm" in name or "out" in overload):
        return [operands[out[2]] for out in payload["outs"] if out[0] == "same"]
    return list(operands[: payload["tensors"]])


def made(define: Define, operands: Sequence) -> list[tuple[int, int | None]]:
    """Ids that an instruction makes, each with the one whose memory it shares."""
    if define.kind == "alias":
        return [(operands[1], operands[0])]
    if define.kind != "op":
        return [(i, None) for name, i in zip(KINDS[define.kind][0], operands, strict=True) if name == "dst"]
    payload = define.payload
    first = payload["tensors"] + payload["values"]
    outs = [out for out in payload["outs"] if out[0] in ("new", "view")]
    return [(i, operands[out[2]] if out[0] == "view" else None) for i, out in zip(operands[first:], outs, strict=True)]


def instruction(code: Sequence, at: int, definition: Definition) -> tuple[Define, Sequence]:
    """One that is not FREE, and its operands."""
    define = definition(code[at])
    assert define is not None, "a program names what has been defined"
    return define, code[at + 2 : at + 2 + define.operands]
