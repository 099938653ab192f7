"""Bytes of sharded weights, gradients and optimizer state on each worker, beside the table of the ZeRO paper.

The table (Rajbhandari et al., 2020, figure 1) is that of AdamW in the dtypes of the weights. Weights and gradients count once,
state twice, each whole or divided by the N workers as the stage says. A weight of which autograd has made no gradient, as a
frozen one, has neither. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from gt.dispatcher.sharding import zero
from gt.dispatcher.state.tensors import Storage, Tensor
from gt.ir.layout import Layout, local_shape

MOMENTS = 2  # AdamW's state, each with the bytes of its weight
KINDS = ("weights", "gradients", "optimizer")


def sharded_memory(stage: int, tensors: Iterable[Tensor]) -> dict[str, Any]:
    """By worker, bytes of each kind as planned now, those of whole copies, and theory; {} where nothing is sharded."""
    # By worker: {"weights": .., "gradients": .., "optimizer": .., "copies": ..}. Views share their root's memory, so roots
    # alone count; each kept copy is memory of its own.
    held: dict[int, Counter[str]] = {}
    theory: dict[int, Counter[str]] = {}
    for root in (t for t in tensors if t.base is None and t.layout is not None):
        storage, layout = root.storage, root.layout
        kind = _kind(storage)
        if kind is None or layout is None:
            continue
        for index, nbytes in _bytes(root, layout):
            held.setdefault(index, Counter())[kind] += nbytes
        for copy in (copy for view in storage.tensors.values() for copy in view.copies or ()):
            for index, nbytes in _bytes(root, copy):
                held.setdefault(index, Counter())["copies"] += nbytes
        if kind == "weights":
            for index, nbytes in _bytes(root, zero.used(layout)):
                theory.setdefault(index, Counter()).update(table(stage, nbytes, parts(layout), storage.trained))
    if not theory:
        return {}
    rows = [
        {"worker": index, **{k: held[index][k] for k in (*KINDS, "copies")}, "theory": {k: theory[index][k] for k in KINDS}}
        for index in sorted(theory)
    ]
    return {"stage": stage, "workers": rows}


def _kind(storage: Storage) -> str | None:
    if storage.sharded:
        return "weights"
    if storage.gradient:
        return "gradients"
    return "optimizer" if storage.rest is not None or storage.space is not None else None


def parts(layout: Layout) -> int:
    """Workers over which ZeRO shards a weight of this layout."""
    axis = zero.axis_of(layout)
    return 1 if axis is None else layout.mesh.axes[axis][1]


def table(stage: int, nbytes: int, parts: int, trained: bool) -> dict[str, int]:
    """Bytes for one weight between backward and the optimizer's step, rounded up. trained: false for a frozen weight."""
    part = -(-nbytes // parts)
    return {
        "weights": part if stage else nbytes,  # whole copies of stages 1 and 2 are counted apart
        "gradients": trained * (part if stage > 1 else nbytes),
        "optimizer": trained * MOMENTS * (part if stage else nbytes),
    }


def _bytes(root: Tensor, layout: Layout) -> Iterable[tuple[int, int]]:
    """(worker, bytes) of a tensor in a layout."""
    itemsize = root.spec.nbytes // max(root.spec.numel, 1)
    for rank, index in enumerate(layout.mesh.workers):
        elements = 1
        for extent in local_shape(layout, root.spec.shape, rank):
            elements *= extent
        yield index, elements * itemsize
