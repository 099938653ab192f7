"""Samples on the `remote` device: whole on one worker, or one input split along one dim over several.

One server with four workers lives for the whole run; what breaks it is told, and a new one is started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

import gt
from gt import api
from gt.launch import local

from .forms import Inputs, leaves

WORKERS = (1, 2, 4)
DIMS = 6  # samples have few more


class Split(NamedTuple):
    """workers 1: everything whole on one. Else tensor number `index` of the sample is split along `dim`."""

    workers: int
    index: int = 0
    dim: int = 0


def config() -> str:
    """A data parallel group for each number of workers and each dim."""
    return "".join(
        f"over{workers}_dim{dim}: {{shard: {{axis: {dim}, workers: {list(range(workers))}}}}}\n"
        for workers in WORKERS[1:]
        for dim in range(DIMS)
    )


def splits(inputs: Inputs, workers: int) -> Iterator[Split]:
    """Every dim of every input that can be split, evenly or not."""
    shared = storages(leaves(inputs))
    for index, t in enumerate(leaves(inputs)):
        if t.layout == torch.strided and not shared[index]:
            yield from (Split(workers, index, dim) for dim, n in enumerate(t.shape[:DIMS]) if n > 1)


def storages(tensors: list[torch.Tensor]) -> list[bool]:
    """Which tensors are parts of memory: of another's, or of more than they show."""
    held = [t.untyped_storage() if t.layout == torch.strided else None for t in tensors]
    places = [s.data_ptr() if s else 0 for s in held]
    return [
        bool(s) and (places.count(s.data_ptr()) > 1 or s.nbytes() != t.numel() * t.itemsize)
        for s, t in zip(held, tensors, strict=True)
    ]


def viewed(t: torch.Tensor, memory: dict[int, torch.Tensor]) -> torch.Tensor:
    """A view of a remote copy of the memory that `t` is part of."""
    storage = t.untyped_storage()
    if storage.data_ptr() not in memory:
        whole = torch.empty(0, dtype=t.dtype).set_(storage, 0, (storage.nbytes() // t.itemsize,), (1,))
        memory[storage.data_ptr()] = whole.to("remote")
    return memory[storage.data_ptr()].view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset())


def placed(inputs: Inputs, split: Split) -> Inputs:
    """The sample on the remote device."""
    order = leaves(inputs)
    shared, memory = storages(order), {}
    known: dict[int, torch.Tensor] = {}
    for index, t in enumerate(order):
        made = viewed(t.detach(), memory) if shared[index] else t.detach().to("remote")
        if split.workers > 1 and index == split.index:
            with gt.signal.context(f"over{split.workers}_dim{split.dim}"):
                made = gt.signal.move(made).clone()  # the copy is of its pieces: nobody has it whole
        known[id(t)] = made.detach().requires_grad_(t.requires_grad)

    def there(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return known[id(x)]
        if isinstance(x, torch.device) or x in ("cpu", "cpu:0"):
            return torch.device("remote")
        return x

    def moved(tree: Any) -> Any:
        return pytree.tree_map(lambda x: there(x) if isinstance(x, (torch.Tensor, torch.device, str)) else x, tree)

    return dataclasses.replace(inputs, args=moved(inputs.args), kwargs=moved(inputs.kwargs), put=lambda t: t.to("remote"))


def collectives() -> dict[str, int]:
    """How many of each kind worker 0 has taken part in."""
    return dict(gt.stats()["workers"][0]["collectives"])


class Cluster:
    """A server with four CPU workers; `connect` gives a fresh session on it, on a new one if it has been `broken`."""

    def __init__(self, server: Any = None) -> None:
        """server: one that another keeps, with at least four workers."""
        self._given = self._server = server
        self._folder = tempfile.TemporaryDirectory()
        self._config = Path(self._folder.name) / "splits.yaml"
        self._config.write_text(config())
        self.restarts = 0

    def connect(self) -> None:
        api.disconnect()
        if self._server is None:
            self._server = local.start(max(WORKERS))
        gt.connect(self._server.address, config=str(self._config), token=self._server.token)

    def broken(self) -> None:
        self.restarts += 1
        with contextlib.suppress(Exception):
            api.disconnect()
        if self._server is not self._given:
            self._server.stop()
        self._server = None

    def close(self) -> None:
        with contextlib.suppress(gt.GTError):
            api.disconnect()
        if self._server is not None and self._server is not self._given:
            self._server.stop()
        self._folder.cleanup()


