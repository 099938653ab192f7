"""A captured program as the client has it: the guards that a call must pass, and a replay, one row of the op stream."""

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
    """A result whose memory the next replay writes again, so that the caller gets a copy."""

    tensor: RemoteTensor


@dataclass(eq=False)
class CapturedProgram:
    """A sealed program of one function. It is dropped on workers when this object ends."""

    number: int
    recorder: Recorder
    key: tuple  # of a call: structure, arguments, modes
    guard: Guard
    inputs: dict[int, RemoteTensor]  # argument -> the tensor that a replay fills
    same: dict[int, torch.Tensor]  # argument -> the very tensor that it must be
    grads: list[tuple[RemoteTensor, bool, Any, Any]]  # leaf, whether it had a gradient, the one read, the one left
    results: list  # leaves of what the function returned
    tree: TreeSpec  # their structure
    draws: int  # random ops
    why: str  # reason for which the call was recorded
    answer: dict  # of the dispatcher, to FinishCapture
    keep: list = field(default_factory=list)  # tensors whose ids the program uses
    replays: int = 0

    def __post_init__(self) -> None:
        weakref.finalize(self, _drop, self.recorder, self.number).atexit = False

    def mismatch(self, leaves: list) -> str:
        """Why the program cannot serve a call with the same key, or ""."""
        for k, tensor in self.same.items():
            if leaves[k] is not tensor:
                return f"argument {k} is another tensor than in the recorded call"
        for leaf, had, _, _ in self.grads:
            if (leaf.grad is not None) != had:
                then, now = ("a gradient", "none") if had else ("no gradient", "one")
                return f"a parameter of shape {list(leaf.shape)} had {then} when the step was recorded, and has {now} now"
        return self.guard.violation()

    def replay(self, leaves: list) -> Any:
        """Fill the inputs, launch the program, and return copies of its results. Does not wait."""
        recorder, copy = self.recorder, _COPY
        for k, target in self.inputs.items():
            source = leaves[k]
            call(copy, (target, source if type(source) is RemoteTensor else upload(source)))
        for leaf, _, read, _ in self.grads:
            if read is not None and leaf.grad is not read:  # another program or the user has replaced it
                call(copy, (read, leaf.grad))
        state = random._State
        recorder.code.extend((LAUNCH, self.number, random.initial_seed(), state.counter))
        state.counter += self.draws
        self.replays += 1
        if self.replays == 1:
            recorder.session.compiles = True
        for leaf, _, _, left in self.grads:
            if leaf.grad is not left:
                leaf.grad = left
        results = self.copy_results()
        recorder.flush()
        return results

    def copy_results(self) -> Any:
        """The results, each fresh one copied out of the memory that the next replay writes."""
        leaves = [call(_CLONE, (r.tensor,)) if type(r) is ProgramResult else r for r in self.results]
        return leaves[0] if self.tree.is_leaf() else tree_unflatten(leaves, self.tree)


def _drop(recorder: Recorder, number: int) -> None:
    if current_session.Current.recorder is recorder:
        recorder.code.extend((DROP, number))
