"""Checks of tensors' values for ops of the CPU whose kernels trust them: as an index into memory, or as a number of steps.

On GPUs such a check would wait for the device. There the table's flag `trusts_values` names these ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch

from gt.ir.schema import Schema

Bound = tuple[str, int, int]  # name of an index tensor, the least and the largest value that it may have
Given = dict[str, Any]
MAX_DEGREE = 1 << 16  # largest degree of a polynomial: a kernel takes as many steps for each element, and cannot be interrupted
_CHEBYSHEV = (f"{kind}chebyshev_polynomial_{letter}" for kind in ("", "shifted_") for letter in "tuvw")
POLYNOMIALS = frozenset(
    f"special_{name}"
    for name in (*_CHEBYSHEV, "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p")
)


def _bags(given: Given) -> Iterator[Bound]:
    grad = given["grad"]
    yield "indices", 0, (given["num_weights"] if "num_weights" in given else given["weight"].shape[0]) - 1
    yield "offset2bag", 0, grad.shape[0] - 1


def _labels(given: Given) -> Iterator[Bound]:
    log_probs, targets, lengths = given["log_probs"], given["targets"], given["target_lengths"]
    yield "targets", 0, log_probs.shape[-1] - 1
    longest = targets.shape[1] if targets.dim() == 2 else targets.numel()
    total = sum(lengths) if isinstance(lengths, list) else int(lengths.sum())
    if targets.dim() == 1 and total > targets.numel():
        raise ValueError(f"target_lengths add up to {total}, beyond the {targets.numel()} of targets")
    for name, most in (("input_lengths", log_probs.shape[0]), ("target_lengths", longest)):
        if isinstance(given[name], torch.Tensor):
            yield name, 0, most
    if given.get("log_alpha") is not None and isinstance(given["target_lengths"], torch.Tensor):
        yield "target_lengths", 0, (given["log_alpha"].shape[-1] - 1) // 2


def _places(dims: int) -> Callable[[Given], Iterator[Bound]]:
    def bounds(given: Given) -> Iterator[Bound]:
        yield "indices", 0, prod(given["self"].shape[-dims:]) - 1

    return bounds


def _counted(given: Given) -> Iterator[Bound]:
    if given["scale_grad_by_freq"]:
        yield "indices", 0, given["num_weights"] - 1


def _classes(given: Given) -> Iterator[Bound]:
    target = given["target"]
    # Ignored labels are often -100: only the others index the scores.
    given["target"] = target[target != given["ignore_index"]]
    yield "target", 0, given["self"].shape[-3] - 1


def _pivots(given: Given) -> Iterator[Bound]:
    yield "LU_pivots", 1, given["LU_data"].shape[-2]


def _segments(given: Given) -> Iterator[Bound]:
    data = given["data"]
    size = data.shape[given.get("axis", 0)]
    yield "lengths", 0, size
    yield "offsets", 0, size
    lengths, offsets = given.get("lengths"), given.get("offsets")
    if lengths is not None and lengths.numel() and int(lengths.sum(-1).max()) > size:
        raise ValueError(f"lengths add up to {int(lengths.sum(-1).max())}, beyond the {size} of the data")
    if offsets is not None and offsets.numel() and bool((offsets.diff(dim=-1) < 0).any()):
        raise ValueError("offsets do not ascend")


def _repeats(given: Given) -> Iterator[Bound]:
    repeats, total = given["repeats"], given.get("output_size")
    if not repeats.numel():
        return
    # Torch adds these up modulo 2**64, so that large ones would pass for a small sum.
    most = torch.iinfo(torch.int64).max // repeats.numel()
    yield "repeats", 0, most if total is None else min(total, most)
    if total is not None and int(repeats.sum()) != total:
        raise ValueError(f"repeats add up to {int(repeats.sum())}, want output_size, which is {total}")


BOUNDS: dict[str, Callable[[Given], Iterator[Bound]]] = {
    **dict.fromkeys(
        ("_embedding_bag_backward", "_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward"), _bags
    ),
    **dict.fromkeys(("_ctc_loss", "_ctc_loss_backward"), _labels),
    **dict.fromkeys(
        ("adaptive_max_pool2d_backward", "max_pool2d_with_indices_backward", "fractional_max_pool2d_backward"), _places(2)
    ),
    **dict.fromkeys(
        ("adaptive_max_pool3d_backward", "max_pool3d_with_indices_backward", "fractional_max_pool3d_backward"), _places(3)
    ),
    "embedding_dense_backward": _counted,
    "lu_unpack": _pivots,
    "nll_loss2d_backward": _classes,
    "repeat_interleave": _repeats,
    **dict.fromkeys(("segment_reduce", "_segment_reduce_backward"), _segments),
}


def bounded(op: Callable, schema: Schema) -> Callable:
    """The op, which raises ValueError for an index outside of what it indexes."""
    bounds, names = BOUNDS[schema.op.split(".")[1]], [argument.name for argument in schema.positional]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args)), **kwargs}
        for name, low, high in bounds(given):
            index = given.get(name)
            if index is not None and index.numel():
                # One pass over the index for both limits.
                limits = [int(value) for value in index.aminmax()]
                if limits[0] < low or limits[1] > high:
                    raise ValueError(f"{name} of {schema.op} has values from {limits[0]} to {limits[1]}, want {low} to {high}")
        return op(*args, **kwargs)

    return call


def of_low_degree(op: Callable, schema: Schema) -> Callable:
    """The op of x and n, which raises ValueError for a degree n above DEGREE."""

    def call(x: Any, n: Any) -> Any:
        if isinstance(n, torch.Tensor):
            highest = float(n.double().max()) if n.numel() else 0.0
        else:
            highest = float(n)
        if highest > MAX_DEGREE:
            raise ValueError(f"n of {schema.op} is up to {highest:g}, want {MAX_DEGREE} at most")
        return op(x, n)

    return call


def of_whole_steps(op: Callable, schema: Schema) -> Callable:
    """The op of start, end and step, which raises ValueError for a step that is 0 as an integer: the kernel divides by it."""

    def call(start: Any, end: Any, step: Any = 1, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype")
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex) and -1 < step < 1:
            raise ValueError(f"step of {schema.op} is {step!r}, which is 0 as {dtype}: want a step of 1 or -1 at least")
        return op(start, end, step, **kwargs)

    return call


CHECKS: dict[str, Callable[[Callable, Schema], Callable]] = {
    **dict.fromkeys(BOUNDS, bounded),
    **dict.fromkeys(POLYNOMIALS, of_low_degree),
    "range": of_whole_steps,
}
