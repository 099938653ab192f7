"""One op of a recorded call: its template and origin, and the tensors and scalars in the template's holes."""

from __future__ import annotations

from dataclasses import dataclass

from gt.ir.template import Template


@dataclass(slots=True)
class RecordedOp:
    template: Template
    origin: int
    ins: list[int]  # ids of the operands
    values: list  # scalars, seeds and counters; the bytes of a small upload
    outs: list[int]  # ids of the results

    @property
    def name(self) -> str:
        return self.template.op.removesuffix(".default")
