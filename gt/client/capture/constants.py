"""Values in a recorded call that depend on nothing but the call's own constants: positions, masks made of them, their sums.

Libraries read such values to choose a way (is this mask all true?), and the choice is the same at each call. So they are worked
out here, on the CPU, while everything else that is read inside a recording is refused. Integers and truth values only: they are
the same on every device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gt.ir.ops import RANDOM
from gt.ir.template import Const, T, V

if TYPE_CHECKING:
    from gt.client.capture.recording import Op

LARGEST = 1 << 22  # elements of a value that is worked out: larger ones take long, and nobody reads them to choose
CONSTANT: dict[str, Any] = {
    "device": lambda value: torch.device("cpu"),
    "complex": lambda value: complex(*value),
}  # kind of a template's constant -> its value here


def _named(name: Any) -> Any:
    """torch's dtype, layout or memory format of a name that this client has put into a template."""
    return getattr(torch, str(name).removeprefix("torch."))


class Constants:
    """Follows the ops of one recording, in order."""

    def __init__(self) -> None:
        self._values: dict[int, torch.Tensor] = {}  # tensor id -> its value
        self._followed = 0

    def value(self, ops: list[Op], tensor: int) -> torch.Tensor | None:
        """A tensor's value after these ops; None where it depends on anything else, or is of floating point."""
        with torch.no_grad():
            for op in ops[self._followed :]:
                self._follow(op)
        self._followed = len(ops)
        found = self._values.get(tensor)
        return None if found is None or found.is_floating_point() or found.is_complex() else found

    def _follow(self, op: Op) -> None:
        made = self._made(op)
        if made is None:
            for place in op.template.writes:
                self._spoil(op.ins[place])
            return
        outs = [out.kind for out in op.template.outs]
        fresh = [tensor for kind, tensor in zip(outs, made, strict=False) if kind in ("new", "view")]
        self._values.update(zip(op.outs, fresh, strict=False))

    def _made(self, op: Op) -> list | None:
        """The outputs of an op of constants; None if it is none."""
        template, known = op.template, self._values
        space, base, overload = template.op.split(".")
        if space != "aten" or template.op in RANDOM or template.dynamic or any(i not in known for i in op.ins):
            return None
        if sum(out.spec.numel for out in template.outs if out.spec is not None) > LARGEST:
            return None

        def fill(arg: Any) -> Any:
            if isinstance(arg, T):
                return known[op.ins[arg.index]]
            if isinstance(arg, V):
                return op.values[arg.index]
            if isinstance(arg, Const):
                return CONSTANT.get(arg.kind, _named)(arg.value)
            return [fill(item) for item in arg] if isinstance(arg, (list, tuple)) else arg

        try:
            call = getattr(getattr(torch.ops.aten, base), overload)
            made = call(*map(fill, template.args), **{name: fill(value) for name, value in template.kwargs})
        except Exception:  # it is then no constant, and the op itself says what is wrong with it
            return None
        return list(made) if isinstance(made, (list, tuple)) else [made]

    def _spoil(self, tensor: int) -> None:
        """It and all views of the same memory are constants no more."""
        spoilt = self._values.get(tensor)
        if spoilt is not None:
            self._values = {i: value for i, value in self._values.items() if not _shared(value, spoilt)}


def _shared(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
