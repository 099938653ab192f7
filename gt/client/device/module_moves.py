"""Module.to between the remote device and others: the parameters stay the same objects, so that tied weights stay tied.

An alive graph saves parameters, and libraries keep weak references. torch's own exchange of two tensors refuses both, and
takes gradients and hooks away. So nothing else is exchanged: a module that loads a state copies it, as without GT.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from gt.client.device.remote_tensor import RemoteTensor

_OF_VALUE = frozenset({"_ref", "_is_param", "parts", "merged"})  # attributes of remote tensors that belong to their memory


def prepare() -> None:
    """Have Module.to exchange parameters between devices; once."""
    asked_for, original = torch.__future__.get_swap_module_params_on_conversion, torch.utils.swap_tensors
    conversion = torch.nn.Module._apply.__code__

    @functools.wraps(asked_for)
    def exchanges() -> bool:
        # Module._apply asks before each parameter. load_state_dict asks too, and is to copy
        return asked_for() or sys._getframe(1).f_code is conversion

    @functools.wraps(original)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        if isinstance(t1, RemoteTensor) != isinstance(t2, RemoteTensor):
            _exchange(t1, t2)
        elif asked_for() or sys._getframe(1).f_code is not conversion or not torch._has_compatible_shallow_copy_type(t1, t2):
            original(t1, t2)
        else:
            t1.data = t2.data  # within one device, as torch does it where nobody asks for exchanges

    torch.__future__.get_swap_module_params_on_conversion = exchanges
    torch.utils.swap_tensors = swap_tensors


def _exchange(module_tensor: torch.Tensor, moved: torch.Tensor) -> None:
    """Give the first object the second one's value. A graph that was made with the old value keeps it, and has no backward."""
    if module_tensor.is_leaf and module_tensor.requires_grad and not module_tensor.is_inference():  # these are in no graph
        with torch.inference_mode(False):
            torch.autograd.graph.get_gradient_edge(module_tensor).node.register_prehook(_refuse_backward)
    with torch._C.DisableTorchFunctionSubclass():
        hooks = module_tensor._backward_hooks, module_tensor._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    # Exchange classes, attributes and C++ tensors, as torch.utils.swap_tensors
    # does, which refuses tensors with weak references
    module_tensor.__class__, moved.__class__ = moved.__class__, module_tensor.__class__
    names = {k: v for k, v in module_tensor.__dict__.items() if k not in _OF_VALUE}  # which the program or a library set
    module_tensor.__dict__, moved.__dict__ = {**moved.__dict__, **names}, module_tensor.__dict__
    torch._C._swap_tensor_impl(module_tensor, moved)
    with torch._C.DisableTorchFunctionSubclass():  # autograd calls those that the new memory knows
        for name, those in zip(("_backward_hooks", "_post_accumulate_grad_hooks"), hooks, strict=True):
            if those is not None:
                setattr(module_tensor, name, those)


def _refuse_backward(grads: Any) -> None:
    raise RuntimeError(
        "backward reached a parameter that has moved to another device since the forward pass: "
        "run the forward pass again after .to()"
    )
