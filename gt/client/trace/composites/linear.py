"""linear and its backward as one call each, which records the ops that torch makes of them.

torch computes linear as views, a matmul and a view. Each of these, forward and backward, would cross from C++ to Python. With a
kernel of its own on this device, linear has one autograd node. The ops are torch's own, and in its order, so that bits are the
same; views that undo one another are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.autograd import forward_ad

from gt.client import current_session
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace.composites.row_sequence import RowSequence, sequence_of
from gt.client.trace.dispatch import fallback, note_first_use
from gt.client.trace.op_info import OpInfo

aten = torch.ops.aten
_known: dict[tuple, RowSequence | None] = {}  # by metas of operands
current_session.on_clear.append(_known.clear)


def linear(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """The handler of aten.linear. weight: [out, in]; bias: [out] or None."""
    x, weight, bias = (*args, None)[:3]
    bias = kwargs.get("bias", bias)
    folds = torch.is_grad_enabled() and weight.requires_grad
    results = _recorded("linear", partial(_forward, folds), (x, weight, bias), folds)
    return _forward(folds, x, weight, bias) if results is None else results[0]


def linear_backward(x: Any, grad: Any, weight: Any, mask: list[bool]) -> tuple:
    """The gradients of x, weight and bias, None where the mask says so. They are differentiable if gradients are recorded."""
    gradients = partial(_gradients, weight.requires_grad, mask)
    if torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return gradients(x, grad, weight)
    results = _recorded("backward", gradients, (x, grad, weight), (weight.requires_grad, *mask))
    return gradients(x, grad, weight) if results is None else tuple(results)


def _recorded(what: str, function: Callable, operands: tuple, how: Any) -> list | None:
    """Record a function of operands as one sequence; None if it has none, and nothing is recorded."""
    ids, key = [], [what, how]
    for operand in operands:
        if type(operand) is RemoteTensor:
            ref = operand._ref
            ids.append(ref.id)
            key.append(ref.meta)
            if ref.pending and operand.requires_grad:
                note_first_use(operand, ref)
        elif operand is None:
            key.append(None)
        else:  # on the host, or sparse
            return None
    signature = tuple(key)
    try:
        sequence = _known[signature]
    except KeyError:
        for operand in operands:
            if operand is not None:
                current_session.check(operand)
        sequence = sequence_of(function, signature[2:])
        _known[signature] = sequence
    return None if sequence is None else sequence.record(tuple(ids))


def _forward(folds: bool, x: Any, weight: Any, bias: Any) -> Any:
    """torch's linear. folds: whether torch copies an x of more than 2 dims to [*, in] where it is no view."""
    joined = bias is not None and x.is_contiguous()  # in addmm
    if joined or x.dim() < 3 or not (folds or _flat(x)):
        return aten.linear.default.decompose(*((x, weight) if bias is None else (x, weight, bias)))
    transposed, rows = weight.t(), _as_rows(x)
    product = rows.mv(transposed) if weight.dim() == 1 else rows.mm(transposed)
    result = aten._unsafe_view.default(product, [*x.shape[:-1], *weight.shape[:-1]])
    return result if bias is None else result.add(bias)


def _flat(x: Any) -> bool:
    """True if x [..., in] is [*, in] as a view."""
    dims = [(size, step) for size, step in zip(x.shape[:-1], x.stride()[:-1]) if size != 1]
    return not x.numel() or all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(dims))


def _as_rows(x: Any) -> Any:
    """x [..., k] as [*, k]."""
    rows = x.numel() // x.shape[-1] if x.numel() else torch.Size(x.shape[:-1]).numel()
    return x if x.dim() == 2 else x.reshape(rows, x.shape[-1])


def _gradients(folds: bool, mask: list[bool], x: Any, grad: Any, weight: Any) -> tuple:
    """The gradients by the formulas of torch's matmuls, whose choice of operands by strides they follow."""
    if weight.dim() == 1:
        return _gradients_of_row(mask, x, grad, weight)
    whole = x.dim() > 2 and not folds and not _flat(x)  # one product for each matrix of x, as x is no view of rows
    rows = _as_rows(grad)
    flat: Any = None if whole or not (mask[0] or mask[1]) else _as_rows(x)
    of_x = of_weight = None

    def by_weight() -> Any:
        if weight.is_contiguous():
            return rows.t().mm(_conjugate(flat))
        return _conjugate(flat.t()).mm(rows).t()

    # Gradients in the order in which autograd would compute them: sums of gradients then have the same bits
    added = mask[2] and (x.dim() < 3 or x.is_contiguous())  # the bias is one of addmm, whose gradients have another order
    if mask[1] and not added:
        of_weight = by_weight()
    if mask[0]:
        if whole:
            batch = torch.Size(x.shape[:-2]).numel()
            repeated = _conjugate(weight).expand(batch, *weight.shape)
            product = grad.reshape(batch, x.shape[-2], weight.shape[0]).bmm(repeated)
        # torch's mm_mat1_backward: for a transposed x the gradient is transposed, too
        elif flat.stride() == (1, flat.shape[0]):
            product = _conjugate(weight.t()).mm(rows.t()).t()
        else:
            product = rows.mm(_conjugate(weight))
        of_x = product if product.shape == x.shape else product.reshape(x.shape)
    if mask[1] and added:
        of_weight = by_weight()
    of_bias = _summed(rows if added else grad) if mask[2] else None
    return of_x, of_weight, of_bias


def _gradients_of_row(mask: list[bool], x: Any, grad: Any, weight: Any) -> tuple:
    """The gradients for a weight [in], whose result lacks the last dim of x."""
    of_x = grad.unsqueeze(-1) * _conjugate(weight) if mask[0] else None
    of_weight = _conjugate(_as_rows(x).t()).mv(grad.reshape(-1)) if mask[1] else None
    return of_x, of_weight, grad.sum() if mask[2] else None


def _conjugate(x: Any) -> Any:
    return x.conj() if x.is_complex() else x


def _summed(grad: Any) -> Any:
    """The sum over all dims but the last, as autograd reduces a gradient to a bias."""
    dims = list(range(grad.dim() - 1))
    return grad.sum(dims, keepdim=True).view(grad.shape[-1]) if dims else grad


_kernels: list[torch.library.Library] = []  # live as long as these


def prepare() -> None:
    """Give linear a kernel of its own but during forward-mode differentiation, for which torch has no formula of linear."""
    if _kernels:
        return
    _register()
    enter, leave = forward_ad.enter_dual_level, forward_ad.exit_dual_level
    levels: list[int] = []

    def enter_dual_level() -> int:
        # Levels nest; the kernel is away from the first to the last
        if not levels:
            _kernels.pop()._destroy()
        levels.append(enter())
        return levels[-1]

    def exit_dual_level(*, level: int | None = None) -> None:
        leave(level=level)
        levels.pop()
        if not levels:
            _register()

    forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter_dual_level, exit_dual_level


def _register() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("linear", partial(fallback, aten.linear.default), "Lazy")
    library.impl("linear_backward", linear_backward, "AutogradLazy")
    _kernels.append(library)
