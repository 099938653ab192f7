"""Ops of other libraries: recorded where all workers of the session have them, else executed on this process's CPU.

On the CPU an op waits for its inputs, and its results are uploaded. It runs below autograd, so that the formulas which its
library registered hold for it. Tensors that it writes are copied back.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gt.client import current_session
from gt.client.current_session import Current
from gt.client.device import meta as metas
from gt.client.device.random import draw
from gt.client.device.remote_tensor import RemoteTensor, Shown, rebind
from gt.client.trace.dispatch import call, empty
from gt.client.trace.host_ops import fetch
from gt.client.trace.op_info import OpInfo
from gt.client.trace.uploads import upload
from gt.errors import UnsupportedOp
from gt.ir.schema import OWN, TABLE

_warned: set[str] = set()  # kinds of ops: namespaces of libraries, and "random"


def foreign(info: OpInfo) -> bool:
    """True for an op that is not torch's own."""
    return info.func.namespace not in OWN


def run(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """Record an op of another library, or execute it on the CPU if a worker lacks it."""
    schema = current_session.current().library_ops.get(info.name)
    same = schema is not None and [argument.name for argument in schema.arguments] == info.names  # else of another version
    if same or info.name in TABLE:
        return call(info, args, kwargs)
    every = f"every op of {info.func.namespace} that the workers lack"
    _warn_once(info.func.namespace, f"{info.name} runs on this process's CPU, as {every}", _advice(info))
    return _on_host(info, args, kwargs)


def sample(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    """A random op whose elements take numbers of draws that only their values tell, as gamma's do: torch draws them on the CPU.

    Its generator is seeded as a worker's is for a draw, so that the program's seed alone decides the values.
    """
    _warn_once("random", f"{info.name} draws on this process's CPU", "samples of normal draws stay on the workers")
    named = {**dict(zip(info.names, args)), **kwargs}
    seed, counter = draw(named.get("generator"))
    # Mixed by the multiplier of Knuth's 64-bit generator (MMIX): draws of one seed have seeds that are far apart
    named["generator"] = torch.Generator().manual_seed((seed * 6364136223846793005 + counter) % (1 << 63))
    return _on_host(info, (), named)


def _on_host(info: OpInfo, args: tuple, kwargs: dict) -> Any:
    copies: dict[int, tuple[RemoteTensor, torch.Tensor]] = {}  # by identity of the remote tensor

    def down(leaf: Any) -> Any:
        if isinstance(leaf, RemoteTensor):
            if id(leaf) not in copies:
                copies[id(leaf)] = leaf, fetch(leaf)
            return copies[id(leaf)][1]
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type in Shown.types else leaf

    # Execute on copies, each fetched once: an op that gets one tensor twice also gets one copy twice
    host_args, host_kwargs = tree_map(down, (args, kwargs))
    try:
        result = info.func(*host_args, **host_kwargs)
    except NotImplementedError as error:
        raise UnsupportedOp(
            f"{info.name} has no kernel for the CPU of this process, and the workers lack it: {_advice(info)}"
        ) from error

    # Copy written operands back, then upload results. A result that is an operand stays that very remote tensor
    named = dict(zip(info.names, args, strict=False)) | kwargs
    for target in tree_leaves([named[name] for name in info.writes if name in named]):
        if isinstance(target, RemoteTensor):
            _write_back(target, copies[id(target)][1])
    remotes = {id(host): remote for remote, host in copies.values()}
    elsewhere = any(isinstance(leaf, torch.device) and leaf.type not in Shown.types for leaf in tree_leaves((args, kwargs)))

    def up(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, RemoteTensor) or elsewhere:
            return leaf
        return remotes[id(leaf)] if id(leaf) in remotes else _uploaded(leaf)

    return tree_map(up, result)


def _write_back(target: RemoteTensor, host: torch.Tensor) -> None:
    if tuple(host.shape) == target._ref.meta.shape:
        torch.ops.aten.copy_.default(target, host)
    else:  # the op has resized it
        rebind(target, _uploaded(host))


def _uploaded(host: torch.Tensor) -> torch.Tensor:
    """A remote copy with the strides that torch gives a copy."""
    meta = metas.of(torch.empty_like(host, device="meta"))
    if meta is metas.contiguous(meta.shape, meta.dtype):
        return upload(host)
    return torch.ops.aten.copy_.default(empty(meta), host)


def _warn_once(kind: str, what: str, advice: str) -> None:
    """Warn of the first op of a kind that runs here: a program waits at each. kind: its library, or "random"."""
    if kind in _warned:
        return
    _warned.add(kind)
    where = Current.origins.where(Current.origins.here())
    warnings.warn(f"{where}: {what}: it waits for its inputs and uploads its results; {advice}", stacklevel=2)


def _advice(info: OpInfo) -> str:
    space = info.func.namespace
    if any(name.startswith(f"{space}.") for name in current_session.current().library_ops):
        return "they have imported its library, and a worker executes ops between tensors alone, with a kernel for its device"
    module = space if space in sys.modules else "MODULE"
    return (
        f"to have the workers execute it, name the module that registers it: `gt worker --library {module}`, or "
        f"gt.cpu_workers(n, libraries=[{module!r}])"
    )
