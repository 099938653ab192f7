"""Meta kernels in place of torch's, where those differ from the CPU's kernels in shape or strides, or are missing.

The order of later sums depends on strides, and so do their last bits; whether a `view` is possible does too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_map_only

from gt.client.device.meta import dtype_name
from gt.client.trace.meta_kernels.missing import MISSING


def _grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
    """Shape of aten._grouped_mm, whose groups of rows, columns or inner dims end at `offs`.

    torch's own meta kernel accepts bfloat16 only; its other kernels accept more.
    """
    if offs is not None and offs.dtype != torch.int32:
        raise RuntimeError(f"aten._grouped_mm: expected offs to be int32, got {dtype_name(offs.dtype)}")
    if (a.dim() == 2 or b.dim() == 2) and offs is None:
        raise RuntimeError("aten._grouped_mm: offs is needed where a matrix has 2 dims")
    if (a.dim() == 3 or b.dim() == 3) and a.size(-1) != b.size(-2):
        raise RuntimeError(f"aten._grouped_mm: {list(a.shape)} and {list(b.shape)} do not contract")
    groups = [] if a.dim() != b.dim() else [a.size(0) if a.dim() == 3 else offs.numel()]
    return a.new_empty([*groups, a.size(-2), b.size(-1)], dtype=out_dtype)


def _as_mul(grad: torch.Tensor, x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """Strides of an elementwise kernel of two operands. torch's meta kernels are decompositions, whose strides differ."""
    return torch.mul(grad, x)


def _convolution(x: torch.Tensor, weight: torch.Tensor, bias: Any, *rest: Any) -> torch.Tensor:
    """Strides of the CPU's kernels: channels last if the input's or the weight's are; of three dims where oneDNN does it.

    torch's meta kernel compares few shapes. The CPU compares all before it computes, and has nothing to compute for no rows.
    """
    shapes = ((0, *x.shape[1:]), weight.shape, None if bias is None else bias.shape)
    stride, _, dilation, transposed, padded, _ = rest
    torch.ops.aten.convolution.default(*(None if shape is None else torch.empty(shape) for shape in shapes), *rest)
    if transposed and any(more >= max(steps) for more, *steps in zip(padded, stride, dilation, strict=False)):
        raise RuntimeError(f"output padding {padded} must be smaller than stride {stride} or dilation {dilation}")
    result = torch.ops.aten.convolution.default(x, weight, bias, *rest)
    return _laid_out(result, _convolution_format(x, weight, bias, *rest))


def _convolution_format(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.memory_format:
    """The memory format of a convolution's result.

    A convolution of one dim is executed as one of two dims, the first of size 1. Its input is made contiguous before, so the
    weight alone decides.
    """
    operands = [weight.unsqueeze(2)] if x.dim() == 3 else [x, weight]
    formats = {*map(suggest_memory_format, operands)} - {torch.contiguous_format}
    if not _by_onednn(x, weight, *rest):
        formats -= {torch.channels_last_3d}
    return formats.pop() if formats else torch.contiguous_format


def _laid_out(t: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """An empty tensor like t in this format; one of three dims as one of four, see `_convolution_format`."""
    if t.dim() == 3:
        return torch.empty_like(t.unsqueeze(2), memory_format=memory_format).squeeze(2)
    return torch.empty_like(t, memory_format=memory_format)


def _by_onednn(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> bool:
    """True if the CPU executes a convolution by oneDNN: ConvParams::use_mkldnn in torch's native/Convolution.cpp."""
    _, stride, _, dilation, transposed, output_padding, groups = rest
    padded_by_steps = transposed and any(more >= step for more, step in zip(output_padding, stride, strict=False))
    if padded_by_steps or not torch.backends.mkldnn.enabled:
        return False
    if x.dtype != torch.float32:
        return x.dtype in (torch.bfloat16, torch.float16)
    kernel = weight.shape[-2:]
    many = max(stride) > 1 or max(dilation) > 1 or len(x) >= 16 or any(n != 1 for n in kernel) or torch.get_num_threads() > 1
    return many and (groups > 1 or min(kernel) > 3 or len(x) > 1 or math.prod(x.shape[:4]) > 20480)


def _convolution_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> tuple:
    """Strides of the CPU's kernels: both gradients are laid out as the result of `_convolution` is, whatever `grad` is."""
    *gradients, bias = torch.ops.aten.convolution_backward.default(grad, x, weight, *rest)
    memory_format = _convolution_format(x, weight, *rest[:-1])
    return *(g if g is None else _laid_out(g, memory_format) for g in gradients), bias


def _as_operand(name: str, operand: int = 0) -> Callable[..., Any]:
    """A meta kernel that gives the op's first result the memory format of an operand, as the CPU's kernel does."""
    op = getattr(torch.ops.aten, name).default

    def meta(*args: Any) -> Any:
        outputs = op(*args)
        first, *rest = outputs if isinstance(outputs, tuple) else (outputs,)
        if first is not None and args[operand].dim() > 1:
            first = torch.empty_like(first, memory_format=suggest_memory_format(args[operand]))
        return (first, *rest) if rest else first

    return meta


_as_input_norm = _as_operand("native_batch_norm")


def _batch_norm(x: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rest: Any) -> tuple:
    """Strides as of the input. torch's meta kernel updates running statistics, and divides by zero for one value a channel."""
    single = training and x.dim() > 1 and x.numel() == x.shape[1]
    result: tuple = _as_input_norm(x, weight, bias, *((None, None) if single else (mean, variance)), training, *rest)
    return result


def _group_norm(x: torch.Tensor, weight: Any, bias: Any, *rest: Any) -> tuple:
    """Means and deviations have the dtype of the weights, which may be wider than the input's."""
    result, *saved = torch.ops.aten.native_group_norm.default(x, weight, bias, *rest)
    wider = next((t.dtype for t in (weight, bias) if t is not None), x.dtype)
    return result, *(t.to(wider) for t in saved)


def _contiguous(name: str) -> Callable[..., Any]:
    """A meta kernel whose results are contiguous, as those of the CPU's kernel are."""
    op = getattr(torch.ops.aten, name).default
    laid_out = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
    return lambda *args: tree_map_only(torch.Tensor, laid_out, op(*args))


def _nll_loss2d(x: torch.Tensor, target: torch.Tensor, *rest: Any) -> tuple:
    """Contiguous losses of scores [N, C, H, W] and targets [N, H, W], whose sizes torch's meta kernel does not compare."""
    if x.dim() == 4 and target.dim() == 3 and target.shape != (len(x), *x.shape[2:]):
        raise RuntimeError(f"size mismatch (got input: {list(x.shape)} , target: {list(target.shape)})")
    result: tuple = _contiguous("nll_loss2d_forward")(x, target, *rest)
    return result


def _nonzero_static(x: torch.Tensor, **named: Any) -> torch.Tensor:
    """Contiguous, as the CPU's kernel makes it. torch's meta kernel gives it the strides of nonzero."""
    return torch.ops.aten.nonzero_static.default(x, **named).clone(memory_format=torch.contiguous_format)


def _eig(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues, and eigenvectors column by column, as LAPACK writes them."""
    values, vectors = torch.ops.aten.linalg_eig.default(x)
    return values, vectors.mT.clone(memory_format=torch.contiguous_format).mT


def _svd(x: torch.Tensor, *rest: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    """Columns of both factors' matrices are contiguous, as in LAPACK. torch's meta kernel says so of the first alone."""
    u, s, vh = torch.ops.aten._linalg_svd.default(x, *rest, **named)
    return u, s, vh.mT.clone(memory_format=torch.contiguous_format).mT


def _as_product(name: str) -> Callable[..., Any]:
    """A meta kernel that has the strides of an elementwise kernel of two operands, where torch's is a decomposition."""
    packet, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    return lambda a, b, **named: torch.empty_like(torch.mul(a, b), dtype=op(a, b, **named).dtype)


def _of_first_dtype(name: str) -> Callable[..., torch.Tensor]:
    """A meta kernel whose result has the first operand's dtype, into which the CPU's kernel computes."""
    op = getattr(torch.ops.aten, name).default

    def meta(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        result = op(x, *rest)
        if not torch.can_cast(result.dtype, x.dtype):
            raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {x.dtype}")
        return torch.empty_like(result, dtype=x.dtype)

    return meta


def _roll(x: torch.Tensor, shifts: Any, dims: Any = ()) -> torch.Tensor:
    """Channels last if the input is, as of the parts that the CPU's kernel joins. Without dims the input is flat."""
    rolled = torch.ops.aten.roll.default(x, shifts, dims)
    return torch.empty_like(rolled, memory_format=suggest_memory_format(x) if dims else torch.contiguous_format)


def _elu_backward(grad: torch.Tensor, alpha: Any, scale: Any, rate: Any, is_result: bool, x: torch.Tensor) -> torch.Tensor:
    """Strides as of `_as_mul`."""
    return torch.mul(grad, x)


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight, and its norms in the CPU's dtype for them, which is wider for more dtypes than torch's meta kernel says."""
    weight, norms = torch.ops.aten._weight_norm_interface.default(v, g, dim)
    one = torch.ones(1, 1, dtype=g.dtype)
    return weight, norms.to(torch.ops.aten._weight_norm_interface.default(one, one, 0)[1].dtype)


def _ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, inputs: Any, lengths: Any, *rest: Any) -> tuple:
    """The losses, and alphas [N, T, 2 S + 1] for the backward pass, where S is the longest target."""
    steps, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * max(lengths, default=0) + 1)


def _ctc_loss_backward(grad: torch.Tensor, log_probs: torch.Tensor, *rest: Any) -> torch.Tensor:
    return log_probs.new_empty(log_probs.shape)


# Ops whose results are laid out as an input is, and those whose results are contiguous: torch's meta kernels say otherwise
_PADS = [f"{kind}_pad{dims}d" for kind in ("reflection", "replication") for dims in (2, 3)]
_AS_INPUT = ("pixel_shuffle", "channel_shuffle", "max_unpool2d", *_PADS)
_AS_SECOND = ("native_batch_norm_backward", *(f"{name}_backward" for name in _PADS))
_MADE_CONTIGUOUS = (
    "mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "glu_backward", "log_sigmoid_forward",
    "native_layer_norm_backward", "_log_softmax_backward_data",
)  # fmt: skip
_OF_FIRST_DTYPE = ("binary_cross_entropy", "huber_loss", "soft_margin_loss")
_OF_PRODUCTS = ("softplus", "hardswish", "hardtanh", "hardsigmoid", "logit", "native_dropout")  # whose backward is one
_PRODUCTS = (
    "copysign.Tensor", "floor_divide.default", "div.Tensor_mode", "heaviside.default", "logaddexp.default",
    "logical_and.default", "logical_or.default", "logical_xor.default",
)  # fmt: skip
# Ops whose meta kernels differ from their real ones, or are missing
KERNELS: dict[str, Callable] = {
    **MISSING,
    "aten._grouped_mm.default": _grouped_mm,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    **dict.fromkeys(("aten.native_batch_norm.default", "aten._native_batch_norm_legit.default"), _batch_norm),
    "aten.native_group_norm.default": _group_norm,
    "aten.nll_loss2d_forward.default": _nll_loss2d,
    "aten.nonzero_static.default": _nonzero_static,
    "aten.linalg_eig.default": _eig,
    "aten._linalg_svd.default": _svd,
    **{f"aten.{name}": _as_product(name) for name in _PRODUCTS},
    "aten.roll.default": _roll,
    "aten._ctc_loss.default": _ctc_loss,
    "aten._weight_norm_interface.default": _weight_norm,
    **dict.fromkeys(("aten._ctc_loss_backward.default", "aten._ctc_loss_backward.Tensor"), _ctc_loss_backward),
    **{f"aten.{name}.default": _as_operand(name) for name in _AS_INPUT},
    **{f"aten.{name}.default": _as_operand(name, 1) for name in _AS_SECOND},
    **{f"aten.{name}.default": _contiguous(name) for name in _MADE_CONTIGUOUS},
    **{f"aten.{name}.default": _of_first_dtype(name) for name in _OF_FIRST_DTYPE},
    "aten.elu_backward.default": _elu_backward,
    **dict.fromkeys((f"aten.{name}_backward.default" for name in _OF_PRODUCTS), _as_mul),
}
