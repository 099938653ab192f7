"""Results of compiled code that are known before it ends: a loss, of which the backward pass follows in the same graph.

A traced graph names such a number to the op `gt_worker::tap`. Inductor calls it where the number is made, at the place that
its order of kernels gives it. That order aims at a low peak of memory, and puts kernels of small results late: here they, and
the tap, come as early as what they read. Knows no segments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

log = logging.getLogger("gt.worker")
MAX_EARLY_BYTES = 1 << 20  # results of a kernel that may come earlier than Inductor has placed it

_library = torch.library.Library("gt_worker", "DEF")
_library.define("tap(Tensor number) -> Tensor")
_receivers: list[Callable[[torch.Tensor], None]] = []


def _mark(number: torch.Tensor) -> torch.Tensor:
    return number.new_empty(1, dtype=torch.uint8)


def _tap(number: torch.Tensor) -> torch.Tensor:
    for receive in _receivers:
        receive(number)
    return _mark(number)


_library.impl("tap", _tap, "CompositeExplicitAutograd")
torch.library.register_fake("gt_worker::tap", _mark, lib=_library)


def receive_by(receiver: Callable[[torch.Tensor], None]) -> None:
    """From here on compiled code calls `receiver` with each tapped number, once it has issued the work that makes it."""
    _receivers[:] = [receiver]


def tap(number: torch.Tensor) -> torch.Tensor:
    """A tensor that the traced graph has to return: without it, Inductor would drop the call."""
    return torch.ops.gt_worker.tap.default(number)


@contextmanager
def early_taps() -> Iterator[None]:
    """Within it Inductor places taps early. The caller holds a lock: the patch is global."""
    import torch._inductor.memory as memory

    patched: Any = memory
    reorder = patched.reorder_for_peak_memory

    def early(*args: Any, **kwargs: Any) -> list:
        return with_taps_early(reorder(*args, **kwargs))

    patched.reorder_for_peak_memory = early
    try:
        yield
    finally:
        patched.reorder_for_peak_memory = reorder


def with_taps_early(order: list) -> list:
    """Inductor's kernels in their order, but small ones that a tap waits for as early as what they read."""
    try:
        return _with_taps_early(order)
    except Exception as error:  # the order is Inductor's own matter, and any order that it made is right
        log.info("compiled code has its taps where Inductor has put them", exc_info=error)
        return order


def _with_taps_early(order: list) -> list:
    makers = {name: node for node in order for name in node.get_buffer_names()}
    reads = {node: {makers[dep.name] for dep in node.unmet_dependencies if dep.name in makers} - {node} for node in order}
    waiting = [node for node in order if getattr(node.node, "op_overload", None) is torch.ops.gt_worker.tap.default]
    needed = set(waiting)
    while waiting:
        fresh = reads[waiting.pop()] - needed
        needed |= fresh
        waiting += fresh
    hoisted = [node for node in order if node in needed and _small(node)]

    placed: dict[Any, None] = {}
    for node in order:
        placed[node] = None
        ready = [early for early in hoisted if early not in placed and reads[early] <= placed.keys()]
        while ready:
            placed.update(dict.fromkeys(ready))
            ready = [early for early in hoisted if early not in placed and reads[early] <= placed.keys()]
        hoisted = [early for early in hoisted if early not in placed]
    return list(placed)


def _small(node: Any) -> bool:
    outputs: Sequence[Any] = node.get_outputs()
    return sum(output.mpi_buffer.size_alloc for output in outputs) <= MAX_EARLY_BYTES
