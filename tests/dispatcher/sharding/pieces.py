"""Carries out redistribution orders on NumPy arrays, all workers in one process: what the pieces must be afterwards."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from gt.dispatcher.sharding.redistribute import RedistributionStep
from gt.ir.boxes import take
from gt.ir.layout import Layout, Partial, boxes


def split(whole: np.ndarray, layout: Layout) -> dict[int, np.ndarray]:
    """Each worker's piece; terms of a Partial are the value at the first and zeros elsewhere."""
    pieces = {}
    for rank, worker in enumerate(layout.mesh.workers):
        piece = take(whole, boxes(layout, whole.shape, rank))
        for place, placement in zip(layout.mesh.coordinates(rank), layout.placements, strict=True):
            if isinstance(placement, Partial) and place:
                piece = np.zeros_like(piece)
        pieces[worker] = piece
    return pieces


def carry_out(step: RedistributionStep, pieces: dict[int, np.ndarray]) -> tuple[dict[int, np.ndarray], int]:
    """Pieces after the step, and the elements that crossed between workers."""
    after: dict[int, np.ndarray] = {}
    posted: dict[tuple[int, int], deque] = defaultdict(deque)
    moved = 0
    for order in step.orders:
        mine, p = pieces.get(order.worker), order.payload
        if order.kind == "shard":
            after[order.worker] = take(mine, p["boxes"])
            assert after[order.worker].shape == tuple(p["shape"])
        elif order.kind == "partial":
            after[order.worker] = mine if p["keep"] else np.zeros_like(mine)
        elif order.kind in ("all_gather", "all_to_all"):
            whole = np.full(p["shape"], -1, mine.dtype)
            for worker, part in zip(p["team"]["workers"], p["boxes" if order.kind == "all_gather" else "have"], strict=True):
                at = 0
                source = pieces[worker]
                whole[_index(part)] = source.reshape(whole[_index(part)].shape)
                at += source.size
            after[order.worker] = whole if order.kind == "all_gather" else take(whole, p["want"][p["team"]["rank"]])
        elif order.kind == "send":
            for box in p["boxes"]:
                posted[(order.worker, p["channel"]["peer"])].append(take(mine, [box]))
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
    assert not any(posted.values()), "something was sent that nobody receives"
    return after, moved


def _slices(box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)


def _index(part):
    from gt.ir.boxes import _index

    return _index(part)
