"""Constant folding in a recorded call: values that depend on the call's own constants only, such as positions and masks.

Libraries read such values to choose an algorithm (is this mask all true?), and the choice is the same at each call. They are
computed here, on the CPU; every other read inside a recording is refused. Only integers and truth values are folded, since
these are equal on every device.
"""

from __future__ import annotations

from typing import Any

import torch

from gt.client.capture.recorded_op import RecordedOp
from gt.ir.ops import RANDOM
from gt.ir.template import Const, T, V

MAX_ELEMENTS = 1 << 22  # of a folded value: larger ones take long, and no library reads them to choose
_BUILDERS: dict[str, Any] = {
    "device": lambda value: torch.device("cpu"),
    "complex": lambda value: complex(*value),
}  # kind of a template's constant -> its Python value on the CPU


def _named(name: Any) -> Any:
    """The dtype, layout or memory format of torch with this name, which this client has put into a template."""
    return getattr(torch, str(name).removeprefix("torch."))


class Constants:
    """The folded values of one recording, whose ops are followed in order."""

    def __init__(self) -> None:
        self._values: dict[int, torch.Tensor] = {}  # tensor id -> its value
        self._followed = 0

    def value(self, ops: list[RecordedOp], tensor: int) -> torch.Tensor | None:
        """A tensor's value after these ops; None if it depends on anything else, or is of floating point."""
        with torch.no_grad():
            for op in ops[self._followed :]:
                self._follow(op)
        self._followed = len(ops)
        value = self._values.get(tensor)
        return None if value is None or value.is_floating_point() or value.is_complex() else value

    def _follow(self, op: RecordedOp) -> None:
        results = self._compute(op)
        if results is None:
            for place in op.template.writes:
                self._forget_memory(op.ins[place])
            return
        kinds = [out.kind for out in op.template.outs]
        fresh = [tensor for kind, tensor in zip(kinds, results, strict=False) if kind in ("new", "view")]
        self._values.update(zip(op.outs, fresh, strict=False))

    def _compute(self, op: RecordedOp) -> list | None:
        """The outputs of an op whose operands are all folded; None for any other op."""
        template, known = op.template, self._values
        space, base, overload = template.op.split(".")
        if space != "aten" or template.op in RANDOM or template.dynamic or any(i not in known for i in op.ins):
            return None
        if sum(out.spec.numel for out in template.outs if out.spec is not None) > MAX_ELEMENTS:
            return None

        def fill(arg: Any) -> Any:
            if isinstance(arg, T):
                return known[op.ins[arg.index]]
            if isinstance(arg, V):
                return op.values[arg.index]
            if isinstance(arg, Const):
                return _BUILDERS.get(arg.kind, _named)(arg.value)
            return [fill(item) for item in arg] if isinstance(arg, (list, tuple)) else arg

        try:
            call = getattr(getattr(torch.ops.aten, base), overload)
            results = call(*map(fill, template.args), **{name: fill(value) for name, value in template.kwargs})
        except Exception:  # not a constant then; the op itself reports what is wrong with its arguments
            return None
        return list(results) if isinstance(results, (list, tuple)) else [results]

    def _forget_memory(self, tensor: int) -> None:
        """Remove a tensor, and all views of its memory, from the folded values."""
        written = self._values.get(tensor)
        if written is not None:
            self._values = {i: value for i, value in self._values.items() if not _share_memory(value, written)}


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
