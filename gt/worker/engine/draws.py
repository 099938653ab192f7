"""Numbers of random ops, as NumPy values of a shape for a dtype's name. An engine writes them into its own tensors."""

from __future__ import annotations

from collections.abc import Callable
from math import log1p, pi
from typing import Any

import numpy as np

from gt.worker.engine.philox import MASK, Words, complex_normal, hits, normal, poisson, uniform
from gt.worker.instructions.pieces import as_boxes, index

DIGITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
BITS = {f"{sign}int{bits}": bits - (not sign) for bits in (8, 16, 32, 64) for sign in ("", "u")}
COMPLEX = ("complex32", "complex64", "complex128")
Shape = tuple[int, ...]


def double(dtype: str) -> bool:
    return dtype in ("float64", "complex128")


def _above_zero(words: Words, shape: Shape, dtype: str) -> np.ndarray:
    """(0, 1] in the precision to compute in, for logarithms."""
    return 1 - uniform(words.of(shape), 53 if double(dtype) else 24)


def _uniform(words: Words, shape: Shape, dtype: str, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    if low > high:
        raise ValueError(f"uniform expects from <= to, got {low} and {high}")
    u = uniform(words.of(shape), DIGITS.get(dtype, 53))
    kind = u.dtype.type
    if (low, high) != (0.0, 1.0):
        u *= kind(high) - kind(low)
        u += kind(low)
        u = np.asarray(u)  # arithmetic makes a number of an array without dims
        u[u >= kind(high)] = kind(low)
    return u


def normals(words: Words, shape: Shape, dtype: str, mean: float = 0.0, std: float = 1.0) -> np.ndarray:
    """Normal numbers in float32, or float64 for a wide dtype. Complex numbers have variance std squared."""
    if std < 0:
        raise ValueError(f"normal expects std >= 0, got {std}")
    z = (complex_normal if dtype in COMPLEX else normal)(words.of(shape), double(dtype))
    if std != 1.0:
        z *= z.dtype.type(std)
    if mean != 0.0:
        z += z.dtype.type(mean)
    return z


def check_deviations(std: Any) -> None:
    """ValueError for a negative deviation. std: a number, or an array or a tensor of any library."""
    if bool((std < 0).any()) if hasattr(std, "any") else std < 0:
        raise ValueError("normal expects all elements of std >= 0.0")


def _bernoulli(words: Words, shape: Shape, dtype: str, p: Any = 0.5) -> np.ndarray:
    """p: a number, or an array that broadcasts to the shape."""
    chances = np.asarray(p)
    if chances.size and not ((chances >= 0) & (chances <= 1)).all():
        raise ValueError(f"bernoulli expects a probability in [0, 1], got {p if chances.ndim == 0 else 'others'}")
    return hits(words.of(shape), np.broadcast_to(chances, shape))


def _integers(words: Words, shape: Shape, low: int, high: int) -> np.ndarray:
    if low >= high:
        raise ValueError(f"random_ expects from < to, got {low} and {high}")
    span = high - low
    values = words.of(shape)
    if span <= MASK:
        values = values % np.uint64(span)
    return values.astype(np.int64) + np.int64(low)


def _top(dtype: str) -> int:
    """One past the largest integer that random_ gives; of floats, the largest below which all are exact."""
    if dtype in DIGITS:
        return (1 << DIGITS[dtype]) + 1
    return 2 if dtype == "bool" else 1 << BITS[dtype]


def _random(words: Words, shape: Shape, dtype: str) -> np.ndarray:
    return _integers(words, shape, 0, _top(dtype))


def _random_to(words: Words, shape: Shape, dtype: str, to: int) -> np.ndarray:
    return _integers(words, shape, 0, to)


def _random_from(words: Words, shape: Shape, dtype: str, low: int, to: int | None = None) -> np.ndarray:
    return _integers(words, shape, low, _top(dtype) if to is None else to)


def _exponential(words: Words, shape: Shape, dtype: str, rate: float = 1.0) -> np.ndarray:
    if rate <= 0:
        raise ValueError(f"exponential_ expects lambda > 0, got {rate}")
    return np.log(_above_zero(words, shape, dtype)) * (-1.0 / rate)


def _log_normal(words: Words, shape: Shape, dtype: str, mean: float = 1.0, std: float = 2.0) -> np.ndarray:
    if std <= 0:
        raise ValueError(f"log_normal_ expects std > 0, got {std}")
    return np.exp(normals(words, shape, dtype, mean, std))


def _cauchy(words: Words, shape: Shape, dtype: str, median: float = 0.0, sigma: float = 1.0) -> np.ndarray:
    if sigma <= 0:
        raise ValueError(f"cauchy_ expects sigma > 0, got {sigma}")
    return median + sigma * np.tan(pi * (uniform(words.of(shape), 53) - 0.5))


def _geometric(words: Words, shape: Shape, dtype: str, p: float) -> np.ndarray:
    if not 0 < p <= 1:
        raise ValueError(f"geometric_ expects p in (0, 1], got {p}")
    u = 1 - uniform(words.of(shape), 53)
    return np.maximum(np.ceil(np.log(u) / log1p(-p)), 1) if p < 1 else np.ones_like(u)


def _poisson(words: Words, shape: Shape, dtype: str, rate: np.ndarray) -> np.ndarray:
    if (rate < 0).any():
        raise ValueError("invalid Poisson rate, expected rate to be non-negative")
    return poisson(words.of(shape), rate)


def multinomial(words: Words, p: np.ndarray, samples: int, replacement: bool = False) -> np.ndarray:
    """Each worker draws the whole result: rows of a piece would need to know their global index."""
    if samples <= 0:
        raise ValueError(f"multinomial cannot take {samples} samples")
    chances = np.atleast_2d(p)
    if not np.isfinite(chances).all() or (chances < 0).any() or not (chances.sum(-1) > 0).all():
        raise ValueError("multinomial expects finite probabilities that are not negative and not all 0")
    whole = Words(0, 0, None)
    whole.key = words.key
    if replacement:
        u = uniform(whole.of((len(chances), samples)), 53)
        edges = np.cumsum(chances, -1)
        picks = [np.searchsorted(row, at * row[-1], side="right") for row, at in zip(edges, u, strict=True)]
        last = [np.flatnonzero(row)[-1] for row in chances]
        result = np.minimum(np.array(picks).reshape(len(chances), samples), np.array(last)[:, None])
    else:
        if ((chances > 0).sum(-1) < samples).any():
            raise ValueError(f"multinomial cannot take {samples} samples without replacement from fewer categories")
        races = -np.log(1 - uniform(whole.of(chances.shape), 53))
        with np.errstate(divide="ignore", invalid="ignore"):
            races = np.where(chances > 0, races / chances, np.inf)
        result = np.argsort(races, -1, kind="stable")[:, :samples]
    return np.ascontiguousarray(result.astype(np.int64).reshape(*p.shape[:-1], samples))


def randperm(words: Words, n: int) -> np.ndarray:
    """Each worker draws the whole permutation and takes its piece."""
    order = np.random.Generator(np.random.Philox(key=words.key)).permutation(n)
    if words.place is not None:
        order = np.concatenate([order[index(box)] for box in as_boxes(words.place[1])])
    return order


# (words, shape, dtype's name, *arguments after the tensor; tensors among them as arrays of float64) -> values
IN_PLACE: dict[str, Callable[..., np.ndarray]] = {
    "aten.uniform_.default": _uniform,
    "aten.normal_.default": normals,
    "aten.bernoulli_.float": _bernoulli,
    "aten.bernoulli_.Tensor": _bernoulli,
    "aten.random_.default": _random,
    "aten.random_.to": _random_to,
    "aten.random_.from": _random_from,
    "aten.exponential_.default": _exponential,
    "aten.log_normal_.default": _log_normal,
    "aten.cauchy_.default": _cauchy,
    "aten.geometric_.default": _geometric,
}
# as above, of new memory like the tensor, which is the first argument too
LIKE: dict[str, Callable[..., np.ndarray]] = {"aten.bernoulli.default": _bernoulli, "aten.poisson.default": _poisson}
