"""Tensors that functools' caches hold. The function hands them out again, and no walk over Python state reaches them.

For equal arguments a cache gives the same tensor, so a replay may read it where it is.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

from gt.client.capture.recording import CallRecording
from gt.client.capture.state_walk import CACHED_FUNCTION, StateSnapshot
from gt.client.device.remote_tensor import RemoteTensor

_CONTAINERS = (tuple, list, dict)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def name_cached(tape: CallRecording, names: dict[int, Any], *states: StateSnapshot) -> None:
    """Give the remote tensors that a call has read of such caches a name, and a place in its states.

    names: id of a tensor from before the call -> its path.
    """
    unknown = tape.reads().keys() - names.keys()
    for function, tensor in cached_tensors() if unknown else ():
        if isinstance(tensor, RemoteTensor) and tensor._ref.id in unknown and not tensor.requires_grad:
            names[tensor._ref.id] = path = f"result {tensor._ref.id} that {function} has cached"
            for state in states:
                state.add_lasting(path, tensor)


def held_on_cpu(tape: CallRecording, entry: StateSnapshot) -> list[torch.Tensor]:
    """The CPU tensors that a call has uploaded, as far as Python state from before the call or such caches hold them.

    State that is large is not among them, since each replay would compare it.
    """
    if not tape.outlived:
        return []
    state = [thing for thing, _ in entry.fingerprints.values()]
    held = [*state, *(tensor for _, tensor in cached_tensors())]
    plain = [t for t in held if type(t) in _PLAIN and t.is_contiguous() and not t.is_inference()]
    return [t for t in plain if t.untyped_storage()._cdata in tape.outlived]


def cached_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """Name of a function with a cache, and a tensor that the cache holds. Looks at each object of the process: some 0.2 s."""
    for function in gc.get_objects():
        if type(function) is not CACHED_FUNCTION:
            continue
        seen: set[int] = set()
        waiting = gc.get_referents(function)
        while waiting:
            thing = waiting.pop()
            if isinstance(thing, torch.Tensor):
                yield getattr(function, "__qualname__", "a function"), thing
            # The cache itself, its links, and results of several tensors
            elif (isinstance(thing, _CONTAINERS) or type(thing).__name__ == "_lru_list_elem") and id(thing) not in seen:
                seen.add(id(thing))
                waiting += gc.get_referents(thing)
