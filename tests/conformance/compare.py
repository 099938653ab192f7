"""Comparison of two results by shape, dtype and values, and the origin of an error by its text."""

from __future__ import annotations

import re
from typing import Any

import torch

from gt.errors import GTError, OpFailed, SystemFailure, UnsupportedOp

EQUAL, UNSUPPORTED, WRONG = "equal", "unsupported", "wrong"


def host(found: list[Any]) -> list[Any]:
    """Results on the CPU, apart from what made them."""
    return [t.detach().cpu().clone() if isinstance(t, torch.Tensor) else t for t in found]


def difference(got: list[Any], want: list[Any], values: bool, slack: float = 1) -> str:
    """The difference, in words that do not depend on the sample; "" if nothing does. values: or only shapes and dtypes.

    slack: how many times torch's tolerances are allowed; above 1 relative to the largest element too.
    """
    if len(got) != len(want):
        return f"{len(got)} results, want {len(want)}"
    for a, b in zip(got, want, strict=True):
        if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
            return f"a {type(a).__name__}, want a {type(b).__name__}"
        if not isinstance(a, torch.Tensor):
            if values and a != b and not (a != a and b != b):
                return "another number"
        elif a.shape != b.shape:
            return f"shape: {list(a.shape)}, want {list(b.shape)}"
        elif a.dtype != b.dtype:
            return f"dtype: {a.dtype}, want {b.dtype}"
        elif values and (text := _values(a, b, slack)):
            return text
    return ""


def _values(a: torch.Tensor, b: torch.Tensor, slack: float) -> str:
    if a.layout != b.layout:
        return f"layout: {a.layout}, want {b.layout}"
    if b.layout is not torch.strided:  # few ops compare or reduce such tensors
        a, b = a.to_dense(), b.to_dense()
    exact, own = not b.is_floating_point() and not b.is_complex(), torch.testing._comparison.default_tolerances(b.dtype)
    rtol, atol = (0.0, 0.0) if exact else (own[0] * slack, own[1] * slack)
    if slack > 1 and not exact and b.numel():  # what is small is often the difference of what is large
        atol = max(atol, rtol * float(b.to(torch.complex128).abs().nan_to_num(0, 0, 0).max()))
    try:
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        found = re.search(r"Greatest absolute difference: (\S+)", str(error))
        return f"values, by {float(found[1]):.1g}" if found else "values"
    except Exception as error:  # dtypes that cannot be compared: their bytes can
        same = torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        return "" if same else f"values ({type(error).__name__})"
    return ""


def outcome(error: BaseException, refused: bool) -> tuple[str, str]:
    """(outcome, reason) of an error on the remote device. refused: plain torch raises as well."""
    text = str(error).strip().split("\n")[0]
    clear = isinstance(error, UnsupportedOp) or (isinstance(error, OpFailed) and "UnsupportedOp" in str(error))
    if isinstance(error, SystemFailure):
        return WRONG, f"{type(error).__name__}: {text}"
    if refused:
        return EQUAL, ""
    if clear:
        return UNSUPPORTED, text
    return WRONG, f"{type(error).__name__}{'' if isinstance(error, GTError) else ' (not GT)'}: {text}"
