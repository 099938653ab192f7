"""Pointwise ops: one row each, a NumPy function of operands in the dtype that torch computes in."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gt.worker.engine.numpy.arrays import (
    BOOL,
    DOUBLE,
    HALF,
    Array,
    cast,
    fractions,
    promoted,
    rows,
    together,
    wide,
    write,
)

Function = Callable[..., Any]

# ---- kinds of row


def _binary(f: np.ufunc) -> Function:
    """f of both operands in their common dtype; `into` writes to the first."""

    def run(self: Any, other: Any) -> Any:
        return f(*_pair(self, other))

    def into(self: Array, other: Any) -> Array:
        a, b = _pair(self, other)
        return f(a, b, out=a) if a is self else write(self, f(a, b))

    run.into = into  # type: ignore[attr-defined]
    return run


def _pair(self: Any, other: Any) -> Any:
    if type(self) is type(other) is Array and self.dtype == other.dtype and self.dtype != HALF:
        return self, other
    return together(self, other)


def _ratio(f: Function) -> Function:
    """f of both operands as floats."""
    return lambda self, other: f(*fractions(self, other))


def _unary(f: Function) -> Function:
    """f in the tensor's own dtype."""
    return lambda self: f(*together(self))


def _function(f: Function) -> Function:
    """f of the tensor as floats."""
    return lambda self: f(*fractions(self))


def _exact(f: Callable[[float], float]) -> Function:
    """A function of Python's math module, element by element: NumPy has none of these."""
    each = np.frompyfunc(f, 1, 1)

    def run(self: Array) -> Array:
        return np.asarray(each(self.astype(DOUBLE))).astype(wide(fractions(self)[0].dtype))

    return run


def _scaled(f: np.ufunc) -> Function:
    """add and sub: f of self and alpha times other."""
    plain = _binary(f)

    def run(self: Any, other: Any, alpha: Any = 1) -> Any:
        return plain(self, other if alpha == 1 else _times(self, other, alpha))

    def into(self: Array, other: Any, alpha: Any = 1) -> Array:
        return plain.into(self, other if alpha == 1 else _times(self, other, alpha))  # type: ignore[attr-defined]

    run.into = into  # type: ignore[attr-defined]
    return run


def _times(self: Any, other: Any, alpha: Any) -> Any:
    if not isinstance(other, np.ndarray):
        return other * alpha
    a, factor = cast(wide(promoted(self, other)), other, alpha)
    return np.asarray(np.multiply(a, factor))  # a product of 0-dim arrays is a scalar to NumPy


# ---- functions


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def erf(x: Array) -> Array:
    return _exact(math.erf)(x)


def _div_mode(self: Any, other: Any, *, rounding_mode: str | None) -> Any:
    if rounding_mode is None:
        return np.true_divide(*fractions(self, other))
    a, b = together(self, other)
    if a.dtype.kind not in "fc" and not np.all(b):
        raise ZeroDivisionError("ZeroDivisionError")
    if rounding_mode == "floor":
        return np.floor_divide(a, b)
    return np.trunc(np.true_divide(a, b)) if a.dtype.kind == "f" else (a - np.fmod(a, b)) // b


_POWERS: dict[Any, Function] = {2: np.square, 0.5: np.sqrt, 3: lambda x: x * x * x, 1: np.positive, -1: np.reciprocal}


def _pow(self: Any, exponent: Any) -> Any:
    if not isinstance(exponent, np.ndarray) and exponent in _POWERS:
        (x,) = cast(wide(promoted(self, exponent)), self)
        if x.dtype.kind in "fc" or exponent > 0:
            return _POWERS[exponent](x)
    x, power = together(self, exponent)
    if x.dtype.kind == "i" and np.any(power < 0):
        return np.trunc(np.power(x.astype(DOUBLE), power))
    return np.power(x, power)


def clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    given = [x for x in (min, max) if x is not None]
    x, *ends = together(self, *given)
    if min is not None:
        x = np.maximum(x, ends[0])
    return np.minimum(x, ends[-1]) if max is not None else np.positive(x) if x.dtype.kind != "b" else x.copy()


def _where(condition: Array, self: Any, other: Any) -> Array:
    return np.where(condition != 0, *together(self, other))


def _addcmul(self: Array, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
    x, a, b = together(self, tensor1, tensor2)
    return x + (a * b if value == 1 else x.dtype.type(value) * a * b)


def _addcdiv(self: Array, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
    x, a, b = together(self, tensor1, tensor2)
    return x + x.dtype.type(value) * a / b


def _lerp(self: Array, end: Any, weight: Any) -> Any:
    a, b, w = together(self, end, weight)
    near = np.abs(w) < 0.5
    if not isinstance(weight, np.ndarray):
        return a + w * (b - a) if near else b - (b - a) * (1 - w)
    return np.where(near, a + w * (b - a), b - (b - a) * (1 - w))


def _round(self: Array, *, decimals: int = 0) -> Array:
    return np.round(together(self)[0], decimals)


def _sgn(x: Array) -> Array:
    if x.dtype.kind != "c":
        return x.copy() if x.dtype == BOOL else np.sign(x)
    size = np.abs(x)
    return np.where(size == 0, 0, x / np.where(size == 0, 1, size))


def _nan_to_num(self: Array, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Array:
    return np.nan_to_num(self, copy=True, nan=nan or 0.0, posinf=posinf, neginf=neginf)


def _lgamma(x: float) -> float:
    return math.inf if x == -math.inf or (x <= 0 and x == math.floor(x)) else math.lgamma(x)


def _xlogy(x: Any, y: Any) -> Any:
    return np.where(np.isnan(y), y, np.where(x == 0, 0, x * np.log(y)))


def _logit(self: Array, eps: float | None = None) -> Array:
    (x,) = fractions(self)
    x = x if eps is None else np.clip(x, eps, 1 - eps)
    return np.log(x / (1 - x))


# ---- the table

_BOTH = {
    "mul.Tensor|Scalar": np.multiply, "maximum": np.maximum, "minimum": np.minimum, "fmax": np.fmax, "fmin": np.fmin,
    "remainder.Tensor|Scalar|Scalar_Tensor": np.remainder, "fmod.Tensor|Scalar": np.fmod, "gcd": np.gcd, "lcm": np.lcm,
    "eq.Tensor|Scalar": np.equal, "ne.Tensor|Scalar": np.not_equal, "lt.Tensor|Scalar": np.less,
    "le.Tensor|Scalar": np.less_equal, "gt.Tensor|Scalar": np.greater, "ge.Tensor|Scalar": np.greater_equal,
    "bitwise_and.Tensor|Scalar|Scalar_Tensor": np.bitwise_and, "bitwise_or.Tensor|Scalar|Scalar_Tensor": np.bitwise_or,
    "bitwise_xor.Tensor|Scalar|Scalar_Tensor": np.bitwise_xor, "logical_and": np.logical_and,
    "logical_or": np.logical_or, "logical_xor": np.logical_xor, "hypot": np.hypot,
    "bitwise_left_shift.Tensor|Tensor_Scalar|Scalar_Tensor": np.left_shift,
    "bitwise_right_shift.Tensor|Tensor_Scalar|Scalar_Tensor": np.right_shift,
    "__lshift__.Tensor|Scalar": np.left_shift, "__rshift__.Tensor|Scalar": np.right_shift,
    "clamp_min.default|Tensor": np.maximum, "clamp_max.default|Tensor": np.minimum,
    "logaddexp": np.logaddexp, "logaddexp2": np.logaddexp2,
}  # fmt: skip
_RATIOS = {
    "div.Tensor|Scalar": np.true_divide, "atan2": np.arctan2, "copysign.Tensor|Scalar": np.copysign,
    "xlogy.Tensor|Scalar_Other|Scalar_Self": _xlogy,
}  # fmt: skip
_UNARY = {
    "neg": np.negative, "abs": np.abs, "ceil": np.ceil, "floor": np.floor, "trunc": np.trunc, "sign": _sgn, "sgn": _sgn,
    "isnan": np.isnan, "isinf": np.isinf, "isposinf": np.isposinf, "isneginf": np.isneginf,
    "logical_not": np.logical_not, "bitwise_not": np.invert, "signbit": np.signbit, "_conj_physical": np.conj,
    "frac": lambda x: x - np.trunc(x),
}  # fmt: skip
_FUNCTIONS = {
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "reciprocal": np.reciprocal, "sin": np.sin, "cos": np.cos,
    "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh,
    "tanh": np.tanh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "sigmoid": sigmoid, "sinc": np.sinc,
    "angle": np.angle, "deg2rad": np.deg2rad, "rad2deg": np.rad2deg,
}  # fmt: skip
TABLE = rows({
    **{name: _binary(f) for name, f in _BOTH.items()},
    **{name: _ratio(f) for name, f in _RATIOS.items()},
    **{name: _unary(f) for name, f in _UNARY.items()},
    **{name: _function(f) for name, f in _FUNCTIONS.items()},
    "add.Tensor|Scalar": _scaled(np.add),
    "sub.Tensor|Scalar": _scaled(np.subtract),
    "rsub.Tensor|Scalar": lambda self, other, alpha=1: _scaled(np.subtract)(other, self, alpha=alpha),
    "div.Tensor_mode|Scalar_mode": _div_mode,
    "floor_divide.default|Scalar": lambda self, other: _div_mode(self, other, rounding_mode="floor"),
    "pow.Tensor_Tensor|Tensor_Scalar|Scalar": _pow,
    "clamp.default|Tensor": clamp,
    "where.self": _where,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "lerp.Tensor|Scalar": _lerp,
    "round.default|decimals": _round,
    "nan_to_num": _nan_to_num,
    "logit": _logit,
    "erf": erf,
    "erfc": _exact(math.erfc),
    "lgamma": _exact(_lgamma),
})  # fmt: skip
