"""Random ops on arrays. The numbers are those of engine/draws.py, which all engines share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gt.worker.engine import draws
from gt.worker.engine.numpy.arrays import BOOL, DOUBLE, Array, fractions, name_of, write
from gt.worker.engine.philox import Words, hits, normal


def _plain(arg: Any) -> Any:
    return arg.astype(DOUBLE) if isinstance(arg, np.ndarray) else arg


def _in_place(draw: Callable[..., Array]) -> Callable:
    def run(words: Words, target: Array, *args: Any) -> Array:
        return write(target, draw(words, target.shape, name_of(target.dtype), *map(_plain, args)))

    return run


def _like(draw: Callable[..., Array]) -> Callable:
    def run(words: Words, x: Array) -> Array:
        return draw(words, x.shape, name_of(x.dtype), _plain(x)).astype(x.dtype)

    return run


def _dropout(words: Words, x: Array, p: float, train: bool | None) -> tuple[Array, Array]:
    if train is False:
        return x.copy(), np.ones(x.shape, BOOL)
    if p == 1:
        return np.zeros_like(x), np.zeros(x.shape, BOOL)
    mask = hits(words.of(x.shape), 1 - p)
    (wide,) = fractions(x)
    return wide * mask * wide.dtype.type(1.0 / (1.0 - p)), mask


def _multinomial(words: Words, p: Array, samples: int, replacement: bool = False) -> Array:
    return draws.multinomial(words, _plain(p), samples, replacement)


def _randperm(words: Words, n: int, *, dtype: np.dtype | None = None, **_: Any) -> Array:
    return draws.randperm(words, n)


def _normal_tensors(words: Words, mean: Any, std: Any = 1.0) -> Array:
    draws.check_deviations(std)
    given = [a for a in (mean, std) if isinstance(a, np.ndarray)]
    shape, dtype = np.broadcast_shapes(*(a.shape for a in given)), given[0].dtype
    z = normal(words.of(shape), draws.double(name_of(dtype)))
    return z * (std if isinstance(std, np.ndarray) else z.dtype.type(std)) + (
        mean if isinstance(mean, np.ndarray) else z.dtype.type(mean)
    )


DRAW: dict[str, Callable[..., Any]] = {
    **{name: _in_place(draw) for name, draw in draws.IN_PLACE.items()},
    **{name: _like(draw) for name, draw in draws.LIKE.items()},
    "aten.native_dropout.default": _dropout,
    "aten.multinomial.default": _multinomial,
    "aten.randperm.default": _randperm,
    "aten.normal.Tensor_Tensor": _normal_tensors,
    "aten.normal.Tensor_float": _normal_tensors,
    "aten.normal.float_Tensor": _normal_tensors,
}


def bind(name: str, place: list | None) -> Callable:
    """The op as a callable of its own arguments and `seed` and `counter`."""
    draw = DRAW[name]

    def run(*args: Any, seed: int, counter: int, generator: Any = None, **kwargs: Any) -> Any:
        return draw(Words(seed, counter, place), *args, **kwargs)

    run.draws = True  # type: ignore[attr-defined]
    return run
