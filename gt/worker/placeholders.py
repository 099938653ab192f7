"""Placeholders for the outputs of a failed instruction, so that the instructions after it can run."""

from __future__ import annotations

from dataclasses import dataclass

from gt.ir.instr import KINDS, OPS, Define
from gt.ir.spec import Spec, contiguous
from gt.worker.context import ExecutionContext


@dataclass(frozen=True)
class Placeholder:
    """An output of zeros, by its spec, or by shape and dtype of operand `like`. place: of the output among the operands."""

    place: int
    spec: Spec | None = None
    like: int | None = None
    shape: tuple[int, ...] | None = None

    def make(self, worker: ExecutionContext, code: list, at: int) -> None:
        spec = self._spec(worker, code, at)
        worker.budget.need(spec.nbytes)
        worker.tensors[code[at + self.place]] = worker.engine.zeros(spec)

    def _spec(self, worker: ExecutionContext, code: list, at: int) -> Spec:
        source = None if self.like is None else worker.tensors.get(code[at + self.like])
        # Without spec and source the shape is unknown: any tensor will do, as its readers fail in their turn.
        if self.spec is not None or source is None:
            return self.spec or contiguous(self.shape or (0,), "float32")
        spec = worker.engine.spec(source)
        return spec if self.shape is None else contiguous(self.shape, spec.dtype)


def placeholders(define: Define) -> list[Placeholder]:
    """Placeholders of a definition's outputs."""
    payload, operands = define.payload, KINDS[define.kind][0]
    if define.kind in OPS:
        first = payload["tensors"] + payload["values"]
        outs = [out for out in payload["outs"] if out[0] in ("new", "view")]
        return [Placeholder(first + n, Spec.from_wire(out[1]) if out[1] else None) for n, out in enumerate(outs)]
    if "dst" not in operands:
        return []
    place, shape = operands.index("dst"), define.result_shape
    if shape is None or "dtype" not in payload:
        return [Placeholder(place, like=operands.index("src"), shape=shape)]
    spec = contiguous(shape, payload["dtype"])
    return [Placeholder(place, Spec(shape, tuple(payload.get("stride", spec.stride)), 0, spec.dtype))]
