"""Random ops on torch tensors. The numbers are those of engine/draws.py, which all engines share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gt.worker.engine import draws
from gt.worker.engine.philox import Words, hits, normal
from gt.worker.engine.torch.dtypes import NAME


def _give(target: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """target[:] = values, cast to its dtype."""
    return target.copy_(torch.from_numpy(np.ascontiguousarray(values)).view(values.shape))  # NumPy turns no dim into one


def _plain(arg: Any) -> Any:
    """Values of a tensor as float64."""
    return arg.detach().to("cpu", torch.float64).numpy() if isinstance(arg, torch.Tensor) else arg


def _in_place(draw: Callable[..., np.ndarray]) -> Callable:
    def run(words: Words, target: torch.Tensor, *args: Any) -> torch.Tensor:
        return _give(target, draw(words, tuple(target.shape), NAME[target.dtype], *map(_plain, args)))

    return run


def _like(draw: Callable[..., np.ndarray]) -> Callable:
    def run(words: Words, x: torch.Tensor) -> torch.Tensor:
        return _give(torch.empty_like(x), draw(words, tuple(x.shape), NAME[x.dtype], _plain(x)))

    return run


def _dropout(words: Words, x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    # As torch's native_dropout: the mask is a result, and the scale is applied after it.
    mask = _give(torch.empty_like(x, dtype=torch.bool), hits(words.of(tuple(x.shape)), 1 - p))
    return x.mul(mask).mul_(1.0 / (1.0 - p)), mask


def _multinomial(words: Words, p: torch.Tensor, samples: int, replacement: bool = False) -> torch.Tensor:
    if not p.is_floating_point():
        raise ValueError(f"multinomial expects probabilities of a floating dtype, got {NAME[p.dtype]}")
    return torch.from_numpy(draws.multinomial(words, _plain(p), samples, replacement)).to(p.device)


def _randperm(words: Words, n: int, **factory: Any) -> torch.Tensor:
    order = torch.from_numpy(draws.randperm(words, n))
    return order.to(device=factory.get("device"), dtype=factory.get("dtype") or torch.int64)


def _normal_tensors(words: Words, mean: Any, std: Any = 1.0) -> torch.Tensor:
    if not isinstance(std, torch.Tensor) or std.device.type == "cpu":  # a GPU's would be waited for
        draws.check_deviations(std)
    if isinstance(mean, torch.Tensor) and isinstance(std, torch.Tensor):
        shape = torch.broadcast_shapes(mean.shape, std.shape)
        like = mean
    else:
        like = mean if isinstance(mean, torch.Tensor) else std
        shape = like.shape
    out = torch.empty(shape, dtype=like.dtype, device=like.device)
    return _give(out, normal(words.of(tuple(shape)), draws.double(NAME[out.dtype]))).mul_(std).add_(mean)


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


def bind(name: str, place: list | None, key: Any = None) -> Callable:
    """The op as a callable of its own arguments and `seed` and `counter`. key: of a GPU that draws by itself."""
    draw, here = DRAW[name], None
    if key is not None:
        from gt.worker.engine.torch.gpu import device_random

        here = device_random.DRAW.get(name)

    def run(*args: Any, seed: int, counter: int, generator: Any = None, **kwargs: Any) -> Any:
        words = Words(seed, counter, place)
        if here is not None and device_random.draws_here(args[0]):
            return here(key, words, *args, **kwargs)
        return draw(words, *args, **kwargs)

    run.draws = True  # type: ignore[attr-defined]
    return run
