"""Settings of Python, torch and NumPy that any code may ask for, a library's too: a call's key has them.

Torch keeps most of them in C, and NumPy's are context variables, so that no walk over Python state meets them.
"""

from __future__ import annotations

import decimal
import sys
from collections.abc import Callable
from typing import Any

import torch
from numpy import get_printoptions, getbufsize, geterr, geterrcall  # the functions: a call notes those named by their module

_NAMES = (
    "_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic", "_get_cudnn_allow_tf32",
    "_get_cublas_allow_tf32", "_get_mkldnn_enabled", "_get_mkldnn_deterministic", "_get_nnpack_enabled", "_get_qengine",
    "_get_deterministic_algorithms_warn_only", "_get_deterministic_fill_uninitialized_memory", "_get_math_sdp_enabled",
    "_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_cudnn_sdp_enabled", "is_anomaly_check_nan_enabled",
    "_is_multithreading_enabled", "_is_view_replay_enabled", "_is_fwd_grad_enabled",
    "_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_bf16_reduced_precision_reduction",
)  # fmt: skip
_FLAGS: tuple[Callable[[], Any], ...] = tuple(getattr(torch._C, name) for name in _NAMES if hasattr(torch._C, name))
_EINSUM: Any = getattr(torch.backends.opt_einsum, "m", torch.backends.opt_einsum)  # the module behind torch's properties
_HOOKS: Callable[[], Any] = torch._C._autograd._saved_tensors_hooks_is_enabled
_PRINTS = getattr(sys.modules.get("numpy._core.printoptions"), "format_options", None)  # a context variable of NumPy 2
# A context variable of NumPy 2, whose object is made anew by each change: the dictionary of one object stays as it is
_ERRORS = getattr(sys.modules.get("numpy._core.umath"), "_extobj_contextvar", None)


class _LastErrors:
    """The newest object of NumPy's settings of errors that was seen, and its dictionary."""

    seen: tuple[Any, dict] = object(), {}


def settings() -> tuple:
    """Comparable values of these settings."""
    own, prints = decimal.getcontext(), torch._tensor_str.PRINT_OPTS
    try:
        flags = [flag() for flag in _FLAGS]
    except RuntimeError:  # torch refuses to tell of tf32 where only some ops have it, as by cudnn.conv.fp32_precision
        flags = [_answer(flag) for flag in _FLAGS]
    return (
        *flags, _HOOKS(),
        _EINSUM.enabled, _EINSUM.strategy, torch.backends.mha.get_fastpath_enabled(),
        own.prec, own.rounding, own.Emin, own.Emax, own.capitals, own.clamp, own.traps.copy(),
        prints.precision, prints.threshold, prints.edgeitems, prints.linewidth, prints.sci_mode,
        _errors(), get_printoptions() if _PRINTS is None else _PRINTS.get(),
    )  # fmt: skip


def _errors() -> dict:
    """NumPy's settings of errors, which take as long as all flags of torch, and are asked once for each object."""
    now, seen = _ERRORS.get() if _ERRORS is not None else object(), _LastErrors.seen
    if seen[0] is not now:
        _LastErrors.seen = seen = now, {**geterr(), "call": geterrcall(), "buffer": getbufsize()}
    return seen[1]


def matmul_precision() -> str:
    """torch.get_float32_matmul_precision(), or "other" where torch has no one answer."""
    return str(_answer(torch._C._get_float32_matmul_precision))


def _answer(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except RuntimeError:
        return "other"
