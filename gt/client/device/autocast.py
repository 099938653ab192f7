"""torch.autocast("remote"): casts before an op, by torch's lists of ops for accelerators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gt.client.device.remote_tensor import RemoteTensor, Shown
from gt.ir.recurrent import GATES

_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
LOWER = [
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "scaled_dot_product_attention",
    *(f"{mode}.{form}" for mode in GATES for form in ("input", "data")),
]
FLOAT32 = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
]
SUMS = [
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "sum",
    "sum.dim_IntList",
]
PROMOTE = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_cache: dict[
    int, tuple[torch.Tensor, torch.Tensor]
] = {}  # id of a parameter -> the parameter and its cast, until autocast ends


def _cast(argument: Any, dtype: torch.dtype) -> Any:
    if isinstance(argument, RemoteTensor):
        return _cast_tensor(argument, dtype) if argument.dtype in _FLOATS and argument.dtype != dtype else argument
    if isinstance(argument, (list, tuple)):
        return type(argument)(_cast(x, dtype) for x in argument)
    return argument


def _cast_tensor(tensor: RemoteTensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor; a parameter once within a context, as torch does."""
    # The parameter is kept beside its cast: while it lives, no other object has its id
    keep = torch.is_autocast_cache_enabled() and tensor.requires_grad and tensor.is_leaf and tensor.dtype == torch.float32
    if not keep:
        return tensor.to(dtype)
    cached = _cache.get(id(tensor))
    if cached is None or cached[1].dtype != dtype:
        cached = _cache[id(tensor)] = (tensor, tensor.to(dtype))
    return cached[1]


def _floats(tree: Any) -> list[torch.dtype]:
    if isinstance(tree, RemoteTensor):
        return [tree.dtype] if tree.dtype in _FLOATS else []
    return [d for x in tree for d in _floats(x)] if isinstance(tree, (list, tuple)) else []


def _lower(args: tuple, kwargs: dict) -> torch.dtype:
    return torch.get_autocast_dtype(Shown.device.type)


def _float32(args: tuple, kwargs: dict) -> torch.dtype:
    return torch.float32


def _widest(args: tuple, kwargs: dict) -> torch.dtype:
    dtypes = _floats(args)
    return torch.float32 if torch.float32 in dtypes or not dtypes else dtypes[0]


def _wrapped(func: Any, policy: Callable[[tuple, dict], torch.dtype]) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        # Without the key, or the op inside would be cast again, without end
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            dtype = policy(args, kwargs)
            return func(*_cast(args, dtype), **{k: _cast(v, dtype) for k, v in kwargs.items()})

    return run


def _summed(func: Any) -> Callable:
    """Sums of low precision accumulate and return float32 unless a dtype is an argument."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            has_dtype = kwargs.get("dtype") is not None or any(isinstance(a, torch.dtype) for a in args)
            if not has_dtype and _floats(args[:1]):
                kwargs["dtype"] = torch.float32
            return func(*args[: _before_dtype(func, args)], **kwargs)

    return run


def _before_dtype(func: Any, args: tuple) -> int:
    """Number of positional arguments before a positional dtype of None; all of them without one."""
    names = [a.name for a in func._schema.arguments if not a.kwarg_only]
    place = names.index("dtype") if "dtype" in names else len(names)
    return place if len(args) > place and args[place] is None else len(args)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def register(fallbacks: torch.library.Library, aten: torch.library.Library) -> None:
    """Register the casts at the dispatch key that autocast("remote") enables; nothing else runs there."""
    key = "AutocastPrivateUse1"
    fallbacks.fallback(torch.library.fallthrough_kernel, key)
    for names, policy in ((LOWER, _lower), (FLOAT32, _float32), (PROMOTE, _widest)):
        for name in names:
            aten.impl(name, _wrapped(_overload(name), policy), key)
    for name in SUMS:
        aten.impl(name, _summed(_overload(name)), key)
    clear = torch.clear_autocast_cache

    def clear_all() -> None:
        _cache.clear()
        clear()

    torch.clear_autocast_cache = clear_all  # torch.autocast calls it by this name at the end of the outermost context
