"""Memory that the replays of a program write, as far as values of small state are concerned that Python reads.

A value that a replay makes by ops on small state is computed by this process, too (gt/client/values/state_values.py).
"""

from __future__ import annotations

from typing import Any

import torch

from gt.client.capture.boundary import OUTSIDE, RecordedCall
from gt.client.capture.constants import ArgumentRead, StatePlace
from gt.client.capture.recording import Difference
from gt.client.capture.state_walk import StateSnapshot
from gt.client.values.state_values import ProgramWrites

CHANGES_STATE = "reads values of its state, and changes state: capture the whole step, backward() included"
REBOUND_STATE = "which the function replaces by another tensor: write to it in place, as by copy_()"


def unguarded_state(now: RecordedCall, carried: list, leaving: StateSnapshot, half: bool) -> Difference | None:
    """The reason why values of state that a call has read cannot be guards: another tensor is in its place after the call.

    half: whether the call is a forward or backward pass alone. Then it must not change state either: a forward pass that does
    cannot be computed again, for a backward pass that no program has.
    """
    if half and now.memory.state and any(read.state() for read in now.tape.argument_reads):
        now.tape.cut = True
        return Difference("", f"the function {CHANGES_STATE}")
    after = {path: tensor for path, tensor in leaving.tensors()}
    replaced = {read for read, _ in carried}
    for place in {place for read in now.tape.argument_reads for place in read.state()}:
        tensor = after.get(place.path)
        if place.number in replaced or place.tensor._ref.id != place.number or tensor is not place.tensor:
            now.tape.cut = True
            return Difference("", f"the function reads a value of {place}, {REBOUND_STATE}{OUTSIDE}")
    return None


def register_writes(number: int, now: RecordedCall, carried: list) -> None:
    """Tell the recorder which memory the replays of a program write, and how they count."""
    tape, recorder = now.tape, now.tape.recorder
    memories = now.memory.written | {now.memory.of.get(read, read) for read, _ in carried}
    advances = {}
    for known, (place, _) in tape.known.items():
        if isinstance(place, StatePlace) and now.memory.of.get(known, known) in memories:
            after = tape.computed(known)
            if after is not None and len(after.state()) == len(after.arguments):
                advances[known] = _advance(after)
    behind = 1 + max((made for op in tape.ops for made in op.outs), default=tape.first)
    recorder.state.programs[number] = ProgramWrites(memories, range(tape.first, behind), advances)


def _advance(after: ArgumentRead) -> Any:
    def value(of: Any) -> torch.Tensor | None:
        result = after.compute(lambda place: of(place.number))  # type: ignore[union-attr]
        return None if isinstance(result, str) else result.clone()

    return value
