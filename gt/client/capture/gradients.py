"""Gradients of captured steps: the memory that programs read and write, and the tensor object that names it now.

A backward pass of torch makes a new gradient, and one that the program has kept stays as it is. A replay writes the same
memory each time. So whoever holds a gradient beside its parameter gets a copy before, known by reference counts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from sys import getrefcount
from types import SimpleNamespace
from weakref import WeakValueDictionary

import torch

from gt.client.device.remote_tensor import Alias, Ref, RemoteTensor, make, rebind
from gt.client.trace.dispatch import call
from gt.client.trace.op_info import info_of

_COPY, _CLONE = info_of(torch.ops.aten.copy_.default), info_of(torch.ops.aten.clone.default)
VIEWED = "the program holds a view or a detached alias of the gradient of"
FREE, OBJECT, VIEW = range(3)  # who has a gradient beside its parameter: nobody; its object; another tensor of its memory


class GradientMemory:
    """The memory of one gradient, shared by the programs that use it.

    tensor: the object that names it. Nothing else of GT holds that.
    """

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: RemoteTensor) -> None:
        self.tensor = tensor

    def holder(self, parameter: bool) -> int:
        """Who has it beside GT and a parameter's .grad. parameter: whether that is this object."""
        objects, tensors, names = _alone()[parameter]
        if self.tensor._use_count() > tensors or _names(self.tensor) > names:  # type: ignore[attr-defined]
            return VIEW
        return OBJECT if getrefcount(self.tensor) > objects else FREE

    def leave(self) -> None:
        """Leave the object to its holders, with memory of its own that has the same values."""
        old = self.tensor
        self.tensor = make(old._ref.meta, old._ref)
        rebind(old, call(_CLONE, (self.tensor,)))


_memories: WeakValueDictionary[int, GradientMemory] = WeakValueDictionary()  # by identity of its Ref


def _ref(tensor: RemoteTensor) -> Ref:
    ref = tensor._ref
    return ref.target if isinstance(ref, Alias) else ref


def _names(tensor: RemoteTensor) -> int:
    ref = tensor._ref
    if type(ref) is Alias:
        ref = ref.target
    return getrefcount(ref)


@functools.cache
def _alone() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Counts of a tensor that nobody else has: Python's and C++'s references, and names of its memory; then as a .grad."""
    names = _names(SimpleNamespace(_ref=object()))  # type: ignore[arg-type]
    memory = GradientMemory(torch.zeros(1, device="cpu"))  # type: ignore[arg-type]
    free = getrefcount(memory.tensor), memory.tensor._use_count(), names  # type: ignore[attr-defined]
    parameter = torch.zeros(1, device="cpu").requires_grad_()
    parameter.grad = memory.tensor
    return free, (getrefcount(memory.tensor), memory.tensor._use_count(), names)  # type: ignore[attr-defined]


def memory_of(gradient: RemoteTensor | None) -> GradientMemory | None:
    """The memory of a gradient, the same object for all programs; None for no gradient."""
    if gradient is None:
        return None
    found = _memories.get(id(_ref(gradient)))
    if found is None:
        found = _memories[id(_ref(gradient))] = GradientMemory(gradient)
    return found


@dataclass(slots=True)
class LeafGradient:
    """The gradient of a leaf in one program. had: whether it had one before. read, left: what was read, what is left."""

    leaf: RemoteTensor
    had: bool
    read: GradientMemory | None
    left: GradientMemory | None

    def mismatch(self) -> str:
        """Why the gradient that the leaf has now keeps the program from a replay, or ""."""
        grad, read, left = self.leaf.grad, self.read, self.left
        if (grad is not None) != self.had:
            then, now = ("a gradient", "none") if self.had else ("no gradient", "one")
            return f"a parameter of shape {list(self.leaf.shape)} had {then} when the step was recorded, and has {now} now"
        filled = read is not None and grad is not read.tensor
        here = left is not None and grad is left.tensor
        grad = None  # no reference that would be counted
        if left is not None and left is not read and left.holder(here) == VIEW:
            return self._viewed()
        if filled and (read.holder(False) == VIEW or (left is read and self._other().holder(True) == VIEW)):  # type: ignore[union-attr]
            return self._viewed()
        return ""

    def _viewed(self) -> str:
        return f"{VIEWED} a parameter of shape {list(self.leaf.shape)}, whose memory a replay writes: keep a clone() of it"

    def _other(self) -> GradientMemory:
        """The memory of the gradient that the leaf has now."""
        found = self.leaf.grad
        return _memories.get(id(_ref(found))) or GradientMemory(found)  # type: ignore[arg-type]

    def fill(self) -> bool:
        """Before a replay: give it the gradient that it reads. Returns whether the leaf gets another object after it."""
        grad, read, left = self.leaf.grad, self.read, self.left
        filled, here = read is not None and grad is not read.tensor, left is not None and grad is left.tensor
        grad = None
        if left is not None and left is not read and left.holder(here) == OBJECT:
            left.leave()
        if filled:
            assert read is not None
            if read.holder(False) == OBJECT:
                read.leave()
            call(_COPY, (read.tensor, self.leaf.grad))
            if left is read and (other := self._other()).holder(True) == OBJECT:
                _adopt(read, other)
        return left is None or self.leaf.grad is not left.tensor

    def set(self) -> None:
        """After a replay: give the leaf the gradient that it leaves."""
        self.leaf.grad = None if self.left is None else self.left.tensor


def _adopt(memory: GradientMemory, other: GradientMemory) -> None:
    """Have the object of another gradient name this memory: a replay adds to it in place, which its holders see."""
    tensor = other.tensor
    other.tensor = make(tensor._ref.meta, tensor._ref)
    rebind(tensor, memory.tensor)
    memory.tensor = tensor


def mismatch(rows: Iterable[LeafGradient]) -> str:
    """The first reason of a row, or ""."""
    return next((why for row in rows if (why := row.mismatch())), "")
