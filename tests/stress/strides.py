"""`python -m tests.stress.strides [NAME ...]`: strides of results beside the CPU's, for torch's own operator samples.

Each sample's operands are laid out in three other ways: channels last (or transposed), with their dims in reversed order, and
with gaps between elements. The order of later sums depends on strides, and so do their last bits; whether a `view` of a result
is possible does too. Prints the ops that differ, with one call of each; with NAMEs all calls of these.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

import gt

MAX_SAMPLES = 25  # of each op
Laid = Callable[[torch.Tensor], torch.Tensor]


def last(x: torch.Tensor) -> torch.Tensor:
    """Channels last, or in as many dims as have no such format with the last two in turned order."""
    if x.dim() in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    return x.mT.contiguous().mT if x.dim() in (2, 3) else x


def reverse(x: torch.Tensor) -> torch.Tensor:
    """The first dim is innermost in memory."""
    order = list(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


def gap(x: torch.Tensor) -> torch.Tensor:
    """Every other element of a larger tensor."""
    return torch.stack([x, x], -1)[..., 0] if x.dim() and x.numel() else x


LAYOUTS: dict[str, Laid] = {"last": last, "reverse": reverse, "gap": gap}


def on_tensors(change: Laid) -> Callable[[Any], Any]:
    return lambda x: change(x) if isinstance(x, torch.Tensor) and x.layout == torch.strided else x


def moved(x: torch.Tensor) -> torch.Tensor:
    """The tensor on remote, with the same strides."""
    there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="remote")
    return there.copy_(x.detach().to("remote")) if x.numel() else there


def steps(x: torch.Tensor) -> list[int]:
    """Strides of dims with more than one element: those of others mean nothing."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def differences(want: Any, got: Any) -> list[tuple]:
    """(shape, the CPU's strides, strides on remote) of results that differ."""
    pairs = zip(tree_flatten(want)[0], tree_flatten(got)[0], strict=True)
    tensors = [pair for pair in pairs if all(isinstance(x, torch.Tensor) and x.layout == torch.strided for x in pair)]
    return [(tuple(a.shape), a.stride(), b.stride()) for a, b in tensors if a.shape != b.shape or steps(a) != steps(b)]


def samples(op: Any) -> list[Any]:
    """The op's sample inputs, none if it has none in float32 or makes uninitialised memory."""
    if "empty" in op.name or torch.float32 not in op.dtypes:
        return []
    try:
        return list(op.sample_inputs("cpu", torch.float32, requires_grad=False))[:MAX_SAMPLES]
    except Exception:  # some need packages that are not installed
        return []


def compare(op: Any, sample: Any, layout: Laid) -> list[tuple] | None:
    """Differences of one call; None if the CPU refuses it."""
    args = tree_map(on_tensors(layout), (sample.input, sample.args, sample.kwargs))
    try:
        want = op(args[0], *args[1], **args[2])
    except Exception:
        return None
    args = tree_map(on_tensors(moved), args)
    return differences(want, op(args[0], *args[1], **args[2]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of ops, as torch's op_db has them; default: all")
    names = parser.parse_args().names
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gt.cpu_workers(1)
    calls, refused, found = 0, Counter[str](), defaultdict[str, list](list)
    for op in (op for op in op_db if not names or op.name in names):
        for number, sample in enumerate(samples(op)):
            for name, layout in LAYOUTS.items():
                try:
                    rows = compare(op, sample, layout)
                except Exception as error:
                    refused[f"{op.name}: {type(error).__name__}"] += 1
                    continue
                calls += rows is not None
                found[op.formatted_name] += [(number, name, *row) for row in rows or ()]
    print(f"{calls} calls compared, {sum(refused.values())} refused on remote: {dict(refused)}")
    differing = {name: rows for name, rows in found.items() if rows}
    for name, rows in differing.items():
        for row in rows if names else rows[:1]:
            print(f"{name:45} {len(rows):3} {row}")
    print(f"{len(differing)} ops differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
