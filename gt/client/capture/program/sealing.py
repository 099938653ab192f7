"""Sealing of a recorded call: the reasons why it can be no program, and the client's side of the program otherwise.

A call alone may do something that a replay would not do or could not see; two calls may disagree. Knows nothing of when a
function is recorded or replayed (compiled_function.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.nn import Parameter
from torch.utils._pytree import tree_flatten

from gt.client.capture.aliasing import one_of, sharing_arguments, written_inputs
from gt.client.capture.boundary import OUTSIDE, TORCH_GENERATOR, RecordedCall, gradients, hint, modes, side_effect
from gt.client.capture.gradients import LeafGradients, find_memory, named_memory, rebound, take_made, take_rebound
from gt.client.capture.guards import Guard
from gt.client.capture.host_draws import LEADS_ELSEWHERE
from gt.client.capture.program.argument_views import argument_view
from gt.client.capture.program.captured_program import CapturedProgram, ProgramResult
from gt.client.capture.program.host_results import HostMemory
from gt.client.capture.program.made_objects import makes_objects
from gt.client.capture.program.settings import Part
from gt.client.capture.program.state_writes import register_writes
from gt.client.capture.recording import Difference, difference, reads_differ
from gt.client.capture.state_walk import StateSnapshot
from gt.client.capture.watches.scheduler_watch import steps_differ
from gt.client.device.remote_tensor import RemoteTensor, make, memory_id

ARGUMENTS_DIFFER = "the function reads a value of its arguments, which differs from the call before"
STATE_DIFFERS = "the function reads a value of its state, which differs from the call before"
REBOUND = "the function changes memory, shape, requires_grad, hooks or .grad of argument"


def own_obstacle(now: RecordedCall, entry: StateSnapshot, leaving: StateSnapshot, drawn: str) -> Difference | None:
    """The reason why this call alone can be no program: it did something that a replay would not do, or could not see.

    entry, leaving: Python state before and after the call. drawn: the host's generator from which it drew, or "".
    """
    tape = now.tape
    if tape.prevents:
        return tape.prevents[0]
    if now.key[1 + len(now.leaves) :] != modes():
        return Difference("", f"the function changes a mode of torch, such as grad mode or the default dtype{OUTSIDE}")
    for argument in sorted(now.memory.rebound):
        return Difference("", f"{REBOUND} {argument}{OUTSIDE}")
    if entry.overflow or leaving.overflow:
        return Difference("", "the function reaches too many Python objects to compare at each call; have it use fewer")
    if entry.opaque or leaving.opaque:
        return Difference("", f"{(entry.opaque or leaving.opaque)[0]}; pass the part that is needed as an argument")
    if drawn:
        if drawn != TORCH_GENERATOR or now.draws is None:
            return Difference("", f"the function draws random numbers from {drawn}{OUTSIDE}")
        if now.draws.obstacle:
            return Difference("", now.draws.obstacle)
    for tensor, first_use in tape.reads().items():
        if tensor not in now.names:
            op = tape.ops[first_use]
            text = f"{op.name} uses a tensor that is not in arguments, closure or globals; pass it as an argument"
            return Difference(tape.origins.where(op.origin), text)
    return side_effect(entry, leaving, tape.first, now.draws)


def disagreement(last: RecordedCall, now: RecordedCall) -> Difference | None:
    """The reason why this call and the one before cannot be one program. It may have the next recording be strict."""
    if reads_differ(last.tape, now.tape):
        now.tape.strict_next = any(len(read.state()) < len(read.arguments) for read in now.tape.argument_reads)
        return Difference("", ARGUMENTS_DIFFER if now.tape.strict_next else STATE_DIFFERS)
    differs = difference(last.tape, now.tape, last.names, now.names) or _varying_argument(last, now)
    if differs is None and steps_differ(last.tape.steps, now.tape.steps):
        return Difference("", "the function steps other schedulers than in the call before, or by other numbers")
    if differs is not None:
        differs.what += hint(last, now)
    elif (last.draws and last.draws.identity()) != (now.draws and now.draws.identity()):
        return Difference("", LEADS_ELSEWHERE)
    return differs


def _varying_argument(last: RecordedCall, now: RecordedCall) -> Difference | None:
    """The reason why no program can serve the next call: an argument differs at each call, and no copy can replace it."""
    for place in sorted(now.memory.required - now.inputs.keys()):
        return Difference("", f"{REBOUND} {place}{OUTSIDE}")
    for place in sorted(sharing_arguments(now.leaves, now.memory) - now.inputs.keys()):
        if not last.had(place, now.leaves[place]):
            what = "shares memory that the function changes, and is another tensor at each call"
            return Difference("", f"argument {place} {what}; pass a clone()")
    return None


@dataclass(frozen=True, slots=True)
class SealedCall:
    """A call of which the dispatcher has made a program. why: the reason for which it was recorded.

    part: the half that it is, if it is one. To a forward pass it does not matter which gradients there are.
    """

    number: int
    answer: dict  # of the dispatcher
    carried: list  # ids of loop-carried tensors: (read, made)
    why: str
    part: Part | None = None

    @property
    def forward(self) -> bool:
        return self.part is not None and self.part.forward


def captured_program(
    sealed: SealedCall, now: RecordedCall, entry: StateSnapshot, leaving: StateSnapshot, results: Any
) -> CapturedProgram:
    """The client's side of a sealed call. results: those of the function. `leaving` gives up its gradients."""
    tape = now.tape
    reads, first = tape.reads(), tape.first
    (leaves, tree), hosts = tree_flatten(results, is_leaf=one_of(now.whole)), HostMemory((entry, leaving), now.leaves)
    inputs = {tensor._ref.id for tensor in [*now.inputs.values(), *(now.draws.inputs if now.draws else ())]}
    same = {k: t for k, t in enumerate(now.leaves) if isinstance(t, RemoteTensor) and k not in now.inputs}  # read in place
    lasting = {memory_id(tensor) for _, tensor in entry.tensors()} - {old for old, _ in sealed.carried}
    lasting |= set(map(memory_id, same.values()))
    copied: dict[int, ProgramResult] = {}  # by identity: an object that is returned twice is one object
    replaced = rebound(entry, first)

    def result(leaf: Any) -> Any:
        if id(leaf) in replaced or id(leaf) in now.whole:
            return now.whole.get(id(leaf), leaf)
        if view := argument_view(leaf, now.leaves, now.inputs, now.memory):
            return view
        if own := hosts.result(leaf):
            return own
        if not isinstance(leaf, RemoteTensor) or (leaf._ref.id < first and leaf._ref.id not in inputs):
            return leaf
        lasts = now.memory.owner(leaf) in lasting
        # A gradient and another object of it are one object: an alias that the caller holds would prevent replays
        source = find_memory(leaf) or (leaf if lasts else make(leaf._ref.meta, leaf._ref))
        new = ProgramResult(source, lasts, leaf.requires_grad, isinstance(leaf, Parameter))
        return copied.setdefault(id(named_memory(leaf) or leaf), new)

    keep = [t for state in (entry, leaving) for _, t in state.tensors() if t._ref.id in reads or t._ref.id >= first]
    grads, made = gradients(entry, leaving, reads, first), take_made(leaving, first, replaced)
    if sealed.forward and all(row.untouched or (row.read is None and row.left is None) for row in grads):
        grads = []
    others = take_rebound(entry, leaving, first)
    register_writes(sealed.number, now, sealed.carried)
    leaving.grads.clear()  # nothing else of GT holds the objects of such memory
    return CapturedProgram(
        number=sealed.number,
        recorder=tape.recorder,
        key=now.key,
        guard=Guard(leaving, entry, tape.counts, now.draws.state if now.draws else ()),
        inputs=now.inputs,
        same={k: (t, t._ref.id) for k, t in same.items()},
        grads=LeafGradients(grads),
        made=[*made, *others],
        results=list(map(result, leaves)),
        steps=tape.steps,
        tree=tree,
        draws=tape.draws(),
        part=sealed.part,
        host_draws=now.draws if now.draws and now.draws.rows else None,
        argument_reads=tape.argument_reads,
        why=sealed.why,
        answer=sealed.answer,
        written=written_inputs(now.inputs, now.memory),
        memory=now.memory,
        opens=sealed.part is None and makes_objects(results),
        keep=[*(find_memory(t) or t for t in keep), *(entry.rebindable[key] for key in replaced)],
    )
