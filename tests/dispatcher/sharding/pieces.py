"""Pieces of a tensor in one process: the tensor is cut, redistributed by the planner's orders, and joined."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
import torch

from gt.dispatcher.sharding.redistribution_steps import RedistributionStep
from gt.ir.instr import Define
from gt.ir.layout import Layout, Partial, boxes, read_boxes, write_boxes
from gt.worker.engine.base import IDENTITY

COMBINE = {
    "sum": lambda terms: terms.sum(0, dtype=terms.dtype),
    "avg": lambda terms: terms.mean(0),
    "max": lambda terms: terms.amax(0),
    "min": lambda terms: terms.amin(0),
}


def scattered(whole: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The piece of each worker; of a partial layout the first has the value, the others the reduction's identity."""
    pieces = []
    for rank in range(len(layout.mesh.workers)):
        piece = torch.from_numpy(read_boxes(numbers(whole), boxes(layout, tuple(whole.shape), rank)).copy())
        pieces.append(piece.view(torch.bfloat16) if whole.dtype is torch.bfloat16 else piece)
        for place, placement in zip(layout.mesh.coordinates(rank), layout.placements, strict=True):
            if isinstance(placement, Partial) and place:
                pieces[-1].fill_(IDENTITY[placement.op])
    return pieces


def joined(pieces: list[torch.Tensor], layout: Layout, shape: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor of its pieces, whose copies on several workers must be equal; terms are combined."""
    terms: dict[tuple, torch.Tensor] = {}
    copies: dict[tuple, torch.Tensor] = {}
    for rank, piece in enumerate(pieces):
        places = zip(layout.mesh.coordinates(rank), layout.placements, strict=True)
        term, region = tuple(place for place, p in places if isinstance(p, Partial)), boxes(layout, shape, rank)
        first = copies.setdefault((term, repr(region)), piece)
        torch.testing.assert_close(piece, first, rtol=0, atol=0, equal_nan=True)
        write_boxes(numbers(terms.setdefault(term, torch.zeros(shape, dtype=piece.dtype))), region, numbers(piece))
    (op,) = {p.op for p in layout.placements if isinstance(p, Partial)} or {""}
    return COMBINE[op](torch.stack(list(terms.values()))) if op else terms[()]


def numbers(value: torch.Tensor) -> np.ndarray:
    """The same memory as an array; numpy has no bfloat16."""
    return (value.view(torch.int16) if value.dtype is torch.bfloat16 else value).numpy()


def split(whole: np.ndarray, layout: Layout) -> dict[int, np.ndarray]:
    """The piece of each worker, by the worker's number."""
    pieces = scattered(torch.from_numpy(whole), layout)
    return {worker: piece.numpy() for worker, piece in zip(layout.mesh.workers, pieces, strict=True)}


def carry_out(step: RedistributionStep, pieces: dict[int, np.ndarray]) -> tuple[dict[int, np.ndarray], int]:
    """Pieces after the step, and the elements that crossed between workers."""
    after: dict[int, np.ndarray] = {}
    posted: dict[tuple[int, int], deque] = defaultdict(deque)
    moved = 0
    for order in step.orders:
        mine, p = pieces.get(order.worker), order.payload
        if order.kind == "shard":
            after[order.worker] = read_boxes(mine, p["boxes"])
        elif order.kind == "partial":
            after[order.worker] = mine if p["keep"] else np.zeros_like(mine)
        elif order.kind in ("all_gather", "all_to_all"):
            whole = np.full(p["shape"], -1, mine.dtype)
            for worker, part in zip(p["team"]["workers"], p["boxes" if order.kind == "all_gather" else "have"], strict=True):
                write_boxes(whole, part, pieces[worker])
            after[order.worker] = whole if order.kind == "all_gather" else read_boxes(whole, p["want"][p["team"]["rank"]])
        elif order.kind == "send":
            for box in p["boxes"]:
                posted[(order.worker, p["channel"]["peer"])].append(read_boxes(mine, [box]))
        elif order.kind in ("recv", "merge"):
            out = np.full(p["shape"], -1, next(iter(pieces.values())).dtype)
            for source, target in p.get("local", []):
                out[_slices(target)] = mine[_slices(source)]
            for channel, parts in p["parts"]:
                for box in parts:
                    data = posted[(channel["peer"], order.worker)].popleft()
                    moved += data.size
                    out[_slices(box)] = data
            after[order.worker] = out
        if order.kind != "send":
            shape = Define(0, order.kind, p).result_shape
            assert after[order.worker].shape == (mine.shape if shape is None else shape)
    assert not any(posted.values()), "something was sent that nobody receives"
    return after, moved


def _slices(box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)
