"""What is kept while a step is recorded: every instruction that a worker was sent, and the ops they belong to."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gt.ir.instr import KINDS, Define
from gt.ir.layout import Layout

if TYPE_CHECKING:
    from gt.dispatcher.failures import Planned
    from gt.dispatcher.tensors import Tensor


@dataclass(slots=True)
class Row:
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
class Tape:
    """What has been planned and sent since RECORD."""

    slot: int
    inputs: list[Tensor]
    before: dict[int, Layout | None]  # layout of every tensor there was
    journal: list[Planned] = field(default_factory=list)
    code: dict[int, list[Row]] = field(default_factory=lambda: defaultdict(list))
    size: int = 0  # instructions
    names: dict[int, str] = field(default_factory=dict)  # row (by identity) -> the action of a schedule that it belongs to
    constants: list[tuple[list[int], int]] = field(default_factory=list)  # uploads kept for it: workers and name
    defines: dict[int, Define] = field(default_factory=dict)

    def keep(self, workers: list[int], name: int) -> None:
        self.constants.append((workers, name))
