"""Random ops: every value is a function of seed, op counter and global element index; a piece draws its own elements.

Element i takes the i-th 64-bit word of numpy's Philox4x64 keyed by (seed, counter); a piece jumps to its words.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import log1p, pi, prod
from typing import Any

import numpy as np
import torch

from gt.ir.layout import Box
from gt.worker.pieces import as_boxes, extent, index, local

MASK = (1 << 64) - 1
SHORT = 1024  # words: a run of memory shorter than this is drawn together with its neighbours
DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


# ---- words


class Words:
    """The 64-bit words of one draw; `place` is [global shape, boxes held], or None where the tensor is whole."""

    def __init__(self, seed: int, counter: int, place: list | None) -> None:
        self.key = np.array([int(seed) & MASK, int(counter) & MASK], np.uint64)
        self.place = place

    def of(self, shape: tuple[int, ...]) -> np.ndarray:
        """The words of the elements that a local tensor of this shape holds, in its row-major order and shape."""
        if self.place is None:
            return self._run(0, prod(shape)).reshape(shape)
        whole, boxes = tuple(self.place[0]), as_boxes(self.place[1])
        size, places = local(boxes)
        if size != tuple(shape):
            raise ValueError(f"a random tensor of shape {tuple(shape)} was planned as {size} of {whole}")
        if len(boxes) == 1:
            return self._box(whole, boxes[0])
        words = np.empty(shape, np.uint64)
        for box, place in zip(boxes, places, strict=True):
            words[index(place)] = self._box(whole, box)
        return words

    def _run(self, start: int, count: int) -> np.ndarray:
        bits = np.random.Philox(key=self.key, counter=start // 4)
        return bits.random_raw(start % 4 + count)[start % 4 :]

    def _box(self, whole: tuple[int, ...], box: Box) -> np.ndarray:
        size = extent(box)
        if size == whole or not prod(size):
            return self._run(0, prod(size)).reshape(size)
        at = _run_dim(whole, box)
        steps = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
        first, last = box[at]
        words = np.empty(size, np.uint64)
        cut = (slice(None), *index(box[at + 1 :]))
        bits = np.random.Philox(key=self.key)
        block = 0
        for where in product(*(range(start, stop) for start, stop in box[:at])):
            start = sum(i * step for i, step in zip(where, steps, strict=False)) + first * steps[at]
            count = (last - first) * steps[at]
            bits.advance((start // 4 - block) & MASK)
            run = bits.random_raw(start % 4 + count)
            block = (start + count + 3) // 4
            rows = run[start % 4 :].reshape(last - first, *whole[at + 1 :])
            words[tuple(i - a for i, (a, _) in zip(where, box, strict=False))] = rows[cut]
        return words


def _run_dim(whole: tuple[int, ...], box: Box) -> int:
    """The dim along which the box is drawn in one go: its inner dims are whole, or too short to be drawn apart."""
    at = len(whole) - 1
    while at > 0 and box[at] == (0, whole[at]):
        at -= 1
    while at > 0 and (box[at][1] - box[at][0]) * prod(whole[at + 1 :]) < SHORT:
        at -= 1
    return at


# ---- distributions: words -> values


def uniform(words: np.ndarray, digits: int) -> np.ndarray:
    """[0, 1) with as many binary digits as the dtype has, float32 where they fit."""
    kind = np.float64 if digits > 24 else np.float32
    values = (words >> np.uint64(64 - digits)).astype(kind)
    values *= kind(2.0**-digits)
    return values


def normal(words: np.ndarray, double: bool) -> np.ndarray:
    """Standard normal by Box and Muller (1958): radius from the high half of a word, angle from the low half."""
    kind = np.float64 if double else np.float32
    halves = np.ascontiguousarray(words).reshape(-1).view(np.uint32)
    radius, angle = halves[1::2].astype(kind), halves[0::2].astype(kind)
    radius += kind(1)
    radius *= kind(2.0**-32)
    np.log(radius, out=radius)
    radius *= kind(-2)
    np.sqrt(np.maximum(radius, 0, out=radius), out=radius)
    angle *= kind(2 * pi * 2.0**-32)
    np.cos(angle, out=angle)
    radius *= angle
    return radius.reshape(words.shape)


def hits(words: np.ndarray, p: Any) -> np.ndarray:
    """True with probability p, a number or an array."""
    return (words >> np.uint64(11)) < np.ceil(np.asarray(p, np.float64) * 2.0**53).astype(np.uint64)


def poisson(words: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """By inversion; above a rate of 256 the normal approximation with Cornish and Fisher's first correction."""
    large = rate > 256
    z = normal(words, True)
    root = np.sqrt(np.maximum(rate, 0))
    result = np.maximum(np.floor(rate + root * z + (z * z - 1) / 6 + 0.5), 0)
    u = uniform(words, 53)[~large]
    small = rate[~large]
    term = np.exp(-small)
    total, count = term.copy(), np.zeros_like(small)
    step = 0
    while (more := (u >= total) & (step < small + 40 * np.sqrt(small + 1))).any():
        step += 1
        term = term * small / step
        count[more] += 1
        total = total + term
    result[~large] = count
    return result


# ---- ops


def _double(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float64, torch.complex128)


def _give(target: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """target[:] = values, cast to its dtype."""
    return target.copy_(torch.from_numpy(np.ascontiguousarray(values)))


def _float_words(words: Words, target: torch.Tensor) -> np.ndarray:
    """(0, 1] in the precision to compute in, never 0, for logarithms."""
    return 1 - uniform(words.of(tuple(target.shape)), 53 if _double(target) else 24)


def _uniform(words: Words, target: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    u = uniform(words.of(tuple(target.shape)), DIGITS.get(target.dtype, 53))
    kind = u.dtype.type
    if (low, high) != (0.0, 1.0):
        u *= kind(high) - kind(low)
        u += kind(low)
        u[u >= kind(high)] = kind(low)
    return _give(target, u)


def _normals(words: Words, target: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> np.ndarray:
    if target.is_complex():
        raise ValueError(f"normal values of {target.dtype} are not drawn")
    z = normal(words.of(tuple(target.shape)), _double(target))
    if std != 1.0:
        z *= z.dtype.type(std)
    if mean != 0.0:
        z += z.dtype.type(mean)
    return z


def _normal(words: Words, target: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    if std < 0:
        raise ValueError(f"normal expects std >= 0, got {std}")
    return _give(target, _normals(words, target, mean, std))


def _bernoulli_float(words: Words, target: torch.Tensor, p: float = 0.5) -> torch.Tensor:
    if not 0 <= p <= 1:
        raise ValueError(f"bernoulli expects a probability in [0, 1], got {p}")
    return _give(target, hits(words.of(tuple(target.shape)), p))


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    """Values as float64."""
    return tensor.detach().to("cpu", torch.float64).numpy()


def _bernoulli_tensor(words: Words, target: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return _give(target, hits(words.of(tuple(target.shape)), np.broadcast_to(_numpy(p), target.shape)))


def _bernoulli(words: Words, p: torch.Tensor) -> torch.Tensor:
    chances = _numpy(p)
    if chances.size and not ((chances >= 0) & (chances <= 1)).all():
        raise ValueError("bernoulli expects probabilities in [0, 1]")
    return _give(torch.empty_like(p), hits(words.of(tuple(p.shape)), chances))


def _integers(words: Words, target: torch.Tensor, low: int, high: int) -> torch.Tensor:
    if low >= high:
        raise ValueError(f"random_ expects from < to, got {low} and {high}")
    span = high - low
    values = words.of(tuple(target.shape))
    if span <= MASK:
        values = values % np.uint64(span)
    return _give(target, values.astype(np.int64) + np.int64(low))


def _random(words: Words, target: torch.Tensor) -> torch.Tensor:
    if target.dtype.is_floating_point:
        return _integers(words, target, 0, (1 << DIGITS[target.dtype]) + 1)
    if target.dtype == torch.bool:
        return _integers(words, target, 0, 2)
    return _integers(words, target, 0, torch.iinfo(target.dtype).max + 1)


def _random_to(words: Words, target: torch.Tensor, to: int) -> torch.Tensor:
    return _integers(words, target, 0, to)


def _random_from(words: Words, target: torch.Tensor, low: int, to: int | None = None) -> torch.Tensor:
    if to is not None:
        return _integers(words, target, low, to)
    top = (1 << DIGITS[target.dtype]) if target.dtype.is_floating_point else torch.iinfo(target.dtype).max
    return _integers(words, target, low, top + 1)


def _exponential(words: Words, target: torch.Tensor, rate: float = 1.0) -> torch.Tensor:
    return _give(target, np.log(_float_words(words, target)) * (-1.0 / rate))


def _log_normal(words: Words, target: torch.Tensor, mean: float = 1.0, std: float = 2.0) -> torch.Tensor:
    return _give(target, np.exp(_normals(words, target, mean, std)))


def _cauchy(words: Words, target: torch.Tensor, median: float = 0.0, sigma: float = 1.0) -> torch.Tensor:
    u = uniform(words.of(tuple(target.shape)), 53)
    return _give(target, median + sigma * np.tan(pi * (u - 0.5)))


def _geometric(words: Words, target: torch.Tensor, p: float) -> torch.Tensor:
    if not 0 < p <= 1:
        raise ValueError(f"geometric_ expects p in (0, 1], got {p}")
    u = 1 - uniform(words.of(tuple(target.shape)), 53)
    return _give(target, np.maximum(np.ceil(np.log(u) / log1p(-p)), 1) if p < 1 else np.ones_like(u))


def _dropout(words: Words, x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = _give(torch.empty_like(x, dtype=torch.bool), hits(words.of(tuple(x.shape)), 1 - p))
    return x.mul(mask).mul_(1.0 / (1.0 - p)), mask


def _multinomial(words: Words, p: torch.Tensor, samples: int, replacement: bool = False) -> torch.Tensor:
    """Drawn whole: the rows of a piece would need to know which rows they are."""
    chances = np.atleast_2d(_numpy(p))
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
    result = result.astype(np.int64).reshape(*p.shape[:-1], samples)
    return torch.from_numpy(np.ascontiguousarray(result)).to(p.device)


def _randperm(words: Words, n: int, **factory: Any) -> torch.Tensor:
    """Drawn whole, then cut to the piece."""
    order = np.random.Generator(np.random.Philox(key=words.key)).permutation(n)
    if words.place is not None:
        order = np.concatenate([order[index(box)] for box in as_boxes(words.place[1])])
    factory.pop("pin_memory", None)
    return torch.from_numpy(order).to(device=factory.get("device"), dtype=factory.get("dtype") or torch.int64)


def _normal_tensors(words: Words, mean: Any, std: Any) -> torch.Tensor:
    if isinstance(mean, torch.Tensor) and isinstance(std, torch.Tensor):
        shape = torch.broadcast_shapes(mean.shape, std.shape)
        like = mean
    else:
        like = mean if isinstance(mean, torch.Tensor) else std
        shape = like.shape
    out = torch.empty(shape, dtype=like.dtype, device=like.device)
    return _give(out, normal(words.of(tuple(shape)), _double(out))).mul_(std).add_(mean)


def _poisson(words: Words, rate: torch.Tensor) -> torch.Tensor:
    return _give(torch.empty_like(rate), poisson(words.of(tuple(rate.shape)), _numpy(rate)))


DRAW: dict[str, Callable[..., Any]] = {
    "aten.uniform_.default": _uniform,
    "aten.normal_.default": _normal,
    "aten.bernoulli_.float": _bernoulli_float,
    "aten.bernoulli_.Tensor": _bernoulli_tensor,
    "aten.bernoulli.default": _bernoulli,
    "aten.random_.default": _random,
    "aten.random_.to": _random_to,
    "aten.random_.from": _random_from,
    "aten.exponential_.default": _exponential,
    "aten.log_normal_.default": _log_normal,
    "aten.cauchy_.default": _cauchy,
    "aten.geometric_.default": _geometric,
    "aten.native_dropout.default": _dropout,
    "aten.multinomial.default": _multinomial,
    "aten.randperm.default": _randperm,
    "aten.normal.Tensor_Tensor": _normal_tensors,
    "aten.normal.Tensor_float": lambda words, mean, std=1.0: _normal_tensors(words, mean, std),
    "aten.normal.float_Tensor": _normal_tensors,
    "aten.poisson.default": _poisson,
}


def bind(name: str, place: list | None) -> Callable:
    """The op as a callable of its own arguments and `seed` and `counter`."""
    draw = DRAW[name]

    def run(*args: Any, seed: int, counter: int, generator: Any = None, **kwargs: Any) -> Any:
        return draw(Words(seed, counter, place), *args, **kwargs)

    run.draws = True  # type: ignore[attr-defined]
    return run
