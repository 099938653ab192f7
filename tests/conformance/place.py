"""Samples on the `remote` device: whole on one worker, or one input split along one dim over several.

One server with four workers lives for the whole run; what breaks it is told, and a new one is started.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

import gt
from gt import api
from gt.launch import local

from .forms import Inputs, leaves
from .modules import parameters

WORKERS = (1, 2, 4)
DIMS = 5  # of axis in a config; samples have few more


GROUPS = ("over{}_dim0", "tp{}_colpar", "tp{}_rowpar")  # that a module is called in


class Split(NamedTuple):
    """workers 1: everything whole on one. Else tensor number `index` of the sample is split along `dim`.

    Parameters of a module are numbered after its inputs. group: nothing is split by hand, a module is called in it.
    """

    workers: int
    index: int = 0
    dim: int = 0
    group: str = ""


def config(most: int = max(WORKERS)) -> str:
    """A data parallel group for each number of workers, `most` at most, and each dim, and tensor parallel ones."""
    counts = [n for n in WORKERS if 1 < n <= most]
    names = [(f"over{n}_dim{dim}", dim, n) for n in counts for dim in range(DIMS)]
    names += [(f"tp{n}{suffix}", axis, n) for n in counts for suffix, axis in (("", 0), ("_colpar", 1), ("_rowpar", 0))]
    return "".join(f"{name}: {{shard: {{axis: {axis}, workers: {list(range(n))}}}}}\n" for name, axis, n in names)


def splits(inputs: Inputs, workers: int) -> Iterator[Split]:
    """Every dim of every input that can be split, evenly or not."""
    shared = storages(leaves(inputs))
    for index, t in enumerate(leaves(inputs)):
        if t.layout == torch.strided and not shared[index]:
            yield from (Split(workers, index, dim) for dim, n in enumerate(t.shape[:DIMS]) if n > 1)
    if inputs.module is not None:
        yield from (Split(workers, group=group.format(workers)) for group in GROUPS)
        for index, (_, p) in enumerate(parameters(inputs), len(shared)):
            yield from (Split(workers, index, dim) for dim, n in enumerate(p.shape[:DIMS]) if n > 1)


def storages(tensors: list[torch.Tensor]) -> list[bool]:
    """For each tensor, True if it is a view of another's memory or of a larger storage."""
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
    whole = memory[storage.data_ptr()]
    return (whole if whole.dtype == t.dtype else whole.view(t.dtype)).as_strided(t.shape, t.stride(), t.storage_offset())


def cut(t: torch.Tensor, split: Split) -> torch.Tensor:
    """A remote tensor split along a dim; the copy is of its pieces: nobody has it whole."""
    with gt.signal.context(f"over{split.workers}_dim{split.dim}"):
        return gt.signal.move(t).clone()


def module_placed(inputs: Inputs, split: Split, first: int) -> torch.nn.Module | None:
    """A copy of the sample's module on the remote device; `first`: the number of its first parameter."""
    if inputs.module is None:
        return None
    module = copy.deepcopy(inputs.module).to("remote")
    for index, (name, _) in enumerate(parameters(inputs), first):
        if split.workers > 1 and not split.group and index == split.index:
            owner, _, own = name.rpartition(".")
            whole = module.get_parameter(name)
            setattr(module.get_submodule(owner), own, torch.nn.Parameter(cut(whole.detach(), split), whole.requires_grad))
    return module


def placed(inputs: Inputs, split: Split) -> Inputs:
    """The sample on the remote device."""
    order = leaves(inputs)
    module = module_placed(inputs, split, len(order))
    shared, memory = storages(order), {}
    known: dict[int, torch.Tensor] = {}
    for index, t in enumerate(order):
        made = viewed(t.detach(), memory) if shared[index] else t.detach().to("remote")
        if split.workers > 1 and not split.group and index == split.index:
            made = cut(made, split)
        known[id(t)] = made.detach().requires_grad_(t.requires_grad)

    def there(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return known[id(x)]
        if isinstance(x, torch.device) or x in ("cpu", "cpu:0"):
            return torch.device("remote")
        return x

    def moved(tree: Any) -> Any:
        return pytree.tree_map(lambda x: there(x) if isinstance(x, (torch.Tensor, torch.device, str)) else x, tree)

    around = partial(gt.signal.context, split.group) if split.group else inputs.around
    args, kwargs = moved(inputs.args), moved(inputs.kwargs)
    return dataclasses.replace(inputs, args=args, kwargs=kwargs, put=lambda t: t.to("remote"), module=module, around=around)


def collectives() -> dict[str, int]:
    """The number of collectives of each kind that worker 0 has taken part in."""
    return dict(gt.stats()["workers"][0]["collectives"])


class Cluster:
    """A server with four CPU workers; `connect` gives a fresh session on it, on a new one if it has been `broken`."""

    def __init__(self, server: Any = None, gpus: int = 0) -> None:
        """server: one that another keeps, with at least four workers. gpus: so many GPU workers instead, 0 for CPU workers."""
        self._given = self._server = server
        self._gpus = gpus
        self._folder = tempfile.TemporaryDirectory()
        self._config = Path(self._folder.name) / "splits.yaml"
        self._config.write_text(config(gpus or max(WORKERS)))
        self.restarts = 0

    def connect(self) -> None:
        api.disconnect()
        if self._server is None:
            self._server = local.start(self._gpus or max(WORKERS), gpu=bool(self._gpus))
        gt.connect(self._server.address, config=str(self._config) if self._gpus != 1 else None, token=self._server.token)

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
