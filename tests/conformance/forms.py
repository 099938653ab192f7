"""Forms of calling one sample of an op, on any device: each is a function from placed inputs to the tensors to compare.

Nothing here knows of GT: `Inputs` is a sample on the CPU, and the same sample placed elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

Tensors = list[Any]  # tensors, and numbers that an op gave instead


@dataclass
class Inputs:
    """A sample's arguments, and how they come to a device."""

    entry: Any  # an OpInfo, or a ModuleInfo
    args: tuple
    kwargs: dict
    sample: Any
    put: Callable[[torch.Tensor], torch.Tensor] = field(default=lambda t: t)  # what makes a tensor of the device
    module: torch.nn.Module | None = None
    around: Callable[[], AbstractContextManager] = nullcontext  # what it is called within


def leaves(inputs: Inputs) -> list[torch.Tensor]:
    found = [t for t in pytree.tree_leaves((inputs.args, inputs.kwargs)) if isinstance(t, torch.Tensor)]
    return [t for i, t in enumerate(found) if all(t is not u for u in found[:i])]


def flat(found: Any) -> Tensors:
    return [x for x in pytree.tree_leaves(found) if x is not None]


def function(inputs: Inputs) -> Tensors:
    """The op itself."""
    return flat(inputs.entry.op(*inputs.args, **inputs.kwargs))


def backward(inputs: Inputs) -> Tensors:
    """Gradients of everything that asks for one, for fixed gradients of the results."""
    wanted = [t for t in leaves(inputs) if t.requires_grad]
    made = inputs.entry.op(*inputs.args, **inputs.kwargs)
    process = inputs.sample.output_process_fn_grad
    outs = [o for o in flat(process(made) if process else made) if isinstance(o, torch.Tensor) and o.requires_grad]
    if not outs:
        return []
    generator = torch.Generator().manual_seed(7)
    given = [inputs.put(torch.randn(o.shape, dtype=o.dtype, generator=generator)) for o in outs]
    return list(torch.autograd.grad(outs, wanted, given, allow_unused=True))


def in_place(inputs: Inputs) -> Tensors:
    """The in-place variant, written through one view, its base and another view read afterwards."""
    with torch.no_grad():
        base = inputs.args[0].clone()
        other = base.unsqueeze(0)
        made = inputs.entry.inplace_variant(base.view_as(base), *inputs.args[1:], **inputs.kwargs)
        return [*flat(made), base, other]


def write(inputs: Inputs) -> Tensors:
    """Write to the op's result, then to its base: each write is visible through the base and through all views."""
    with torch.no_grad():
        base = inputs.args[0].clone()
        other = base.unsqueeze(0)
        made = [t for t in flat(inputs.entry.op(base, *inputs.args[1:], **inputs.kwargs)) if isinstance(t, torch.Tensor)]
        for t in (*made[:1], *made[1:][-1:]):
            t.copy_(counted(inputs, t, 1))
        seen = [base.clone(), other.clone(), *(t.clone() for t in made)]
        base.copy_(counted(inputs, base, 5))
        return [*seen, other, *made]


def counted(inputs: Inputs, t: torch.Tensor, first: int) -> torch.Tensor:
    """Values of t's shape and dtype that tell the places apart."""
    return inputs.put((torch.arange(first, first + t.numel()) % 89).reshape(t.shape).to(t.dtype))


FORMS: dict[str, Callable[[Inputs], Tensors]] = {
    "function": function, "backward": backward, "in place": in_place, "write": write, "refusal": function,
}  # fmt: skip


def forms_of(entry: Any, inputs: Inputs, dtype: torch.dtype) -> Iterator[str]:
    """The forms of a sample."""
    yield "function"
    if entry.supports_autograd and any(t.requires_grad for t in leaves(inputs)):
        yield "backward"
    first = inputs.args[0] if inputs.args else None
    if isinstance(first, torch.Tensor) and first.layout == torch.strided:
        if entry.inplace_variant is not None and not inputs.sample.broadcasts_input:
            yield "in place"
        if _views(entry, inputs):
            yield "write"


def _views(entry: Any, inputs: Inputs) -> bool:
    """True if the op returns writable views of its first argument on the CPU."""
    try:
        with torch.no_grad():
            base = inputs.args[0].clone()
            made = [t for t in flat(entry.op(base, *inputs.args[1:], **inputs.kwargs)) if isinstance(t, torch.Tensor)]
            if not made or not base.numel() or not all(t is base or (t._is_view() and t._base is base) for t in made):
                return False
            for t in made:
                t.fill_(1)
            return True
    except Exception:  # whatever an op of the database says of what it cannot do
        return False
