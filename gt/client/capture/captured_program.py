"""The client's side of a captured program: the guards that a call must pass, and a replay, which is one row of the op stream."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from gt.client import current_session
from gt.client.capture.guards import Guard
from gt.client.device import random
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace.dispatch import call
from gt.client.trace.op_info import info_of
from gt.client.trace.recorder import Recorder
from gt.client.trace.uploads import upload
from gt.ir.instr import DROP, LAUNCH

aten = torch.ops.aten
_COPY, _CLONE = info_of(aten.copy_.default), info_of(aten.clone.default)


@dataclass(slots=True)
class ProgramResult:
    """A tensor that the program makes or fills anew each time."""

    tensor: RemoteTensor


@dataclass(eq=False)
class CapturedProgram:
    """What a replay needs. grads: leaf, whether it had a gradient at the start, the one that was read, the one left."""

    number: int
    recorder: Recorder
    key: tuple
    guard: Guard
    inputs: dict[int, RemoteTensor]
    same: dict[int, torch.Tensor]  # arguments that must be the very tensors
    grads: list[tuple[RemoteTensor, bool, Any, Any]]
    results: list
    tree: TreeSpec
    draws: int
    why: str
    answer: dict
    keep: list = field(default_factory=list)  # tensors whose names it uses
    replays: int = 0

    def __post_init__(self) -> None:
        weakref.finalize(self, _drop, self.recorder, self.number).atexit = False

    def misfit(self, leaves: list) -> str:
        """Why it cannot serve this call, or ""."""
        for k, tensor in self.same.items():
            if leaves[k] is not tensor:
                return f"argument {k} is another tensor than in the recorded call"
        for leaf, had, _, _ in self.grads:
            if (leaf.grad is not None) != had:
                then, now = ("a gradient", "none") if had else ("no gradient", "one")
                return f"a parameter of shape {list(leaf.shape)} had {then} when the step was recorded, and has {now} now"
        return self.guard.broken()

    def replay(self, leaves: list) -> Any:
        recorder, copy = self.recorder, _COPY
        for k, target in self.inputs.items():
            source = leaves[k]
            call(copy, (target, source if type(source) is RemoteTensor else upload(source)))
        for leaf, _, read, _ in self.grads:
            if read is not None and leaf.grad is not read:  # another program's, or the user's
                call(copy, (read, leaf.grad))
        state = random._State
        recorder.code.extend((LAUNCH, self.number, random.initial_seed(), state.counter))
        state.counter += self.draws
        self.replays += 1
        for leaf, _, _, left in self.grads:
            if leaf.grad is not left:
                leaf.grad = left
        results = self.take()
        recorder.flush()
        return results

    def take(self) -> Any:
        """The results, copied out of the program's own tensors."""
        leaves = [call(_CLONE, (r.tensor,)) if type(r) is ProgramResult else r for r in self.results]
        return leaves[0] if self.tree.is_leaf() else tree_unflatten(leaves, self.tree)


def _drop(recorder: Recorder, number: int) -> None:
    if current_session.Live.recorder is recorder:
        recorder.code.extend((DROP, number))
