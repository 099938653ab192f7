"""torch's list of modules (its ModuleInfo database) as samples: a module, called in both modes, and its gradients."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.utils import _pytree as pytree

from .forms import Inputs, Tensors, flat, leaves

FEW_PARAMETERS = 4  # of a module each of whose parameters is split too


def entries() -> dict[str, ModuleInfo]:
    return {entry.name: entry for entry in module_db}


def samples(entry: ModuleInfo, dtype: torch.dtype, most: int, seed: int) -> Iterator[tuple[str, Inputs]]:
    """(form, inputs) of one module with one dtype, in both modes; at most so many of its inputs, drawn by seed (0: all)."""
    for training in (True, False):
        torch.manual_seed(seed)
        found = list(entry.module_inputs_func(entry, "cpu", dtype, True, training=training))
        if most and len(found) > most:
            found = random.Random(f"{seed} {entry.name}").sample(found, most)
        for sample in found:
            inputs = given(entry, sample, dtype, training)
            if inputs is not None:
                mode = "train" if training else "eval"
                yield f"{mode} forward", inputs
                yield f"{mode} backward", inputs
                if training and any(True for _ in inputs.module.parameters()):
                    yield "weights", inputs


def given(entry: ModuleInfo, sample: Any, dtype: torch.dtype, training: bool) -> Inputs | None:
    """A module of its own weights and what it is called with; None where plain torch cannot make it."""
    made, called = sample.constructor_input, sample.forward_input
    torch.manual_seed(0)
    try:
        module = entry.module_cls(*made.args, **made.kwargs).to(dtype).train(training)
        args, kwargs = called.args, called.kwargs
        if entry.is_lazy:  # it draws its weights when it is first called
            module(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError):
        return None
    args, kwargs = pytree.tree_map_only(torch.Tensor, leaf, (args, kwargs))
    return Inputs(entry, args, kwargs, sample, module=module)


def leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().requires_grad_(t.requires_grad)


def forward(inputs: Inputs) -> Tensors:
    """The results of a call, and the buffers after it."""
    module, out = called(inputs)
    return [*flat(out), *module.buffers()]


def backward(inputs: Inputs) -> Tensors:
    """Gradients of inputs and parameters, for fixed gradients of the results."""
    module, out = called(inputs)
    wanted = [t for t in (*leaves(inputs), *module.parameters()) if t.requires_grad]
    outs = [o for o in flat(out) if isinstance(o, torch.Tensor) and o.requires_grad]
    if not outs or not wanted:
        return []
    generator = torch.Generator().manual_seed(7)
    grads = [inputs.put(torch.randn(o.shape, dtype=o.dtype, generator=generator)) for o in outs]
    return list(torch.autograd.grad(outs, wanted, grads, allow_unused=True))


def weights(inputs: Inputs) -> Tensors:
    """The same where the inputs are data, of which nobody wants the gradient: the first module of a model."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (inputs.args, inputs.kwargs))
    return backward(dataclasses.replace(inputs, args=args, kwargs=kwargs))


def called(inputs: Inputs) -> tuple[torch.nn.Module, Any]:
    """A copy, for a call may change the module, and its result."""
    module = copy.deepcopy(inputs.module)
    with inputs.around():
        return module, module(*inputs.args, **inputs.kwargs)


FORMS = {
    "train forward": forward, "train backward": backward, "eval forward": forward, "eval backward": backward,
    "weights": weights,
}  # fmt: skip


def parameters(inputs: Inputs) -> list[tuple[str, torch.nn.Parameter]]:
    """Those that are split in turn."""
    found = list(inputs.module.named_parameters()) if inputs.module is not None else []
    return found if len(found) <= FEW_PARAMETERS else []
