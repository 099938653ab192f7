"""What is kept while a step is recorded: every instruction that a worker was sent, and the ops they belong to."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from gt.dispatcher.state.failures import Planned
from gt.dispatcher.state.tensors import Tensor
from gt.ir.instr import KINDS, Define
from gt.ir.layout import Layout


@dataclass(slots=True)
class Instruction:
    """One instruction of a worker: the op it belongs to, its definition and its operands."""

    seq: int
    define: Define
    operands: list

    def ids(self) -> tuple[list[int], list[int]]:
        """Tensors it reads (and may write in place), and those it makes."""
        payload, operands = self.define.payload, self.operands
        if self.define.kind == "op":
            count = payload["tensors"]
            return operands[:count], operands[count + payload["values"] :]
        names = KINDS[self.define.kind][0]
        made = [i for name, i in zip(names, operands, strict=True) if name == "dst"]
        return [i for name, i in zip(names, operands, strict=True) if name in ("src", "tensor")], made


@dataclass(slots=True)
class Recording:
    """What has been planned and sent since RECORD."""

    slot: int
    inputs: list[Tensor]
    before: dict[int, Layout | None]  # layout of every tensor there was
    first: bool = False  # nothing is known yet of how its inputs come to lie
    journal: list[Planned] = field(default_factory=list)
    code: dict[int, list[Instruction]] = field(default_factory=lambda: defaultdict(list))
    size: int = 0  # instructions
    names: dict[int, str] = field(default_factory=dict)  # row (by identity) -> the action of a schedule that it belongs to
    constants: list[tuple[list[int], int]] = field(default_factory=list)  # uploads kept for it: workers and name
    defines: dict[int, Define] = field(default_factory=dict)

    found: dict[int, Layout] = field(default_factory=dict)  # input -> where ops on it were done that is nowhere itself

    sources: dict[int, int] = field(default_factory=dict)  # data of an upload, by identity -> the input
    late: bool = False  # an op on what there was before was put off: a replay would not do it

    def __post_init__(self) -> None:
        uploads = ((n, tensor.storage.recipe) for n, tensor in enumerate(self.inputs))
        self.sources.update({id(recipe[0].data): n for n, recipe in uploads if recipe and recipe[0].data is not None})

    def defers(self, tensors: list[Tensor]) -> bool:
        """Whether an op may be put off: not if it reads or writes what there was before. But the first time shows where to."""
        older = any(i in self.before for t in tensors for i in t.storage.tensors)
        self.late = self.late or (older and self.first)
        return self.first or not older

    def met(self, data: Any, layout: Layout) -> None:
        """An upload's bytes are sent: those of an input lie so where an op on it is done."""
        if id(data) in self.sources:
            self.found.setdefault(self.sources[id(data)], layout)

    def keep(self, workers: list[int], name: int) -> None:
        self.constants.append((workers, name))
