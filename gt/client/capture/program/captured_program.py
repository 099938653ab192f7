"""A captured program as the client has it: the guards that a call must pass, and a replay, one row of the op stream."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from gt.client import current_session
from gt.client.capture import gradients
from gt.client.capture.aliasing import CallMemory, ContainerArgument, sharing_arguments, write_back
from gt.client.capture.constants import ArgumentRead, Place, argument_value
from gt.client.capture.gradients import LeafGradients, MadeState, NamedMemory, ReboundState
from gt.client.capture.guards import Guard
from gt.client.capture.host_draws import HostDraws
from gt.client.capture.program.argument_views import ArgumentView, as_leaf
from gt.client.capture.program.host_results import CopiedResult
from gt.client.capture.program.made_objects import closed
from gt.client.capture.program.settings import Part
from gt.client.capture.program.shared_results import SharedMemory, shared_memory
from gt.client.capture.watches.scheduler_step import SchedulerStep
from gt.client.device import random
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace.custom_ops import lend, may_lend
from gt.client.trace.dispatch import call
from gt.client.trace.op_info import info_of
from gt.client.trace.recorder import Recorder
from gt.client.trace.uploads import upload
from gt.ir.instr import DROP, LAUNCH

aten = torch.ops.aten
_COPY, _CLONE = info_of(aten.copy_.default), info_of(aten.clone.default)


@dataclass(slots=True)
class ProgramResult:
    """A result whose memory the next replay writes again, so that the caller gets a copy. lasts: a view of lasting state.

    A gradient or state that a place in Python has, too, is one object: the next replay copies it if the caller still holds it.
    requires_grad, parameter: of a result that is a leaf of autograd's graph.
    """

    source: RemoteTensor | NamedMemory
    lasts: bool = False
    requires_grad: bool = False
    parameter: bool = False

    @property
    def tensor(self) -> RemoteTensor:
        return self.source.tensor if isinstance(self.source, NamedMemory) else self.source


@dataclass(eq=False)
class CapturedProgram:
    """A sealed program of one function. It is dropped on workers when this object ends."""

    number: int
    recorder: Recorder
    key: tuple  # what tells calls apart: structure, arguments, modes
    guard: Guard
    inputs: dict[int, RemoteTensor]  # argument -> the tensor that a replay fills
    same: dict[int, tuple[RemoteTensor, int]]  # argument -> the very tensor that it must be, and its id
    grads: LeafGradients
    made: list[MadeState | ReboundState]
    results: list  # leaves of the function's result
    tree: TreeSpec  # their structure
    steps: list[SchedulerStep]  # of schedulers, which its caller makes after a replay
    draws: int  # random ops
    part: Part | None  # the pass of a function that it is, of two
    host_draws: HostDraws | None  # random numbers that it draws on the CPU
    argument_reads: list[ArgumentRead]  # values that it reads of its arguments
    why: str  # reason for which the call was recorded
    answer: dict  # the dispatcher's answer to FinishCapture
    written: tuple[int, ...]  # inputs that the program changes, and the caller's tensors with them
    memory: CallMemory  # memory of the recorded call
    opens: bool  # whether its results have parts of objects, of which each replay makes new ones
    keep: list = field(default_factory=list)  # tensors whose ids the program uses
    fills: dict[int, RemoteTensor] = field(init=False)  # inputs, but one argument of each tensor alone
    spans: dict[int, SharedMemory] = field(init=False)  # tensors that share memory, by their ids
    lendable: set[int] = field(init=False)  # results whose memory nothing else names, by the ids of their tensors
    # Whether the caller gets these as they are: workers copy one that it still holds at the next replay. Of two programs for
    # the passes of one function the caller of these says so
    lends: bool = field(init=False)
    replays: int = 0

    def __post_init__(self) -> None:
        self.lends = self.part is None
        self.fills = dict({id(target): (place, target) for place, target in self.inputs.items()}.values())
        fresh = [result for result in self.results if type(result) is ProgramResult and not result.lasts]
        copied = {result.tensor._ref.id: result.tensor for result in fresh if not isinstance(result.source, NamedMemory)}
        self.spans = shared_memory(copied, self.memory)
        large = {number for number, tensor in copied.items() if may_lend(tensor._ref.meta)}
        self.lendable = large.intersection(self.memory.fresh) - self._owners()
        weakref.finalize(self, _drop, self.recorder, self.number).atexit = False

    def _owners(self) -> set[int]:
        """Memory of the call that something else than a result names."""
        gradients = [memory for row in self.grads.rows for memory in (row.read, row.left) if memory is not None]
        drawn = () if self.host_draws is None else self.host_draws.inputs
        named = [*self.inputs.values(), *drawn, *self.keep, *gradients]
        tensors = [memory.tensor if isinstance(memory, NamedMemory) else memory for memory in named]
        return {self.memory.owner(tensor) for tensor in tensors if isinstance(tensor, RemoteTensor)}

    def mismatch(self, leaves: list) -> str:
        """The reason why the program cannot serve a call with the same key, or "". What it draws on the CPU is drawn then."""
        # From cheap to dear. What is drawn on the CPU comes last: a draw moves the generator, and has to be undone if refused
        for k, (tensor, number) in self.same.items():
            if leaves[k] is not tensor or tensor._ref.id != number:
                return f"argument {k} is another tensor than in the recorded call"
        if self.inputs and not self.inputs.keys().isdisjoint(sharing_arguments(leaves, self.memory)):
            return "an argument shares memory that the function changes"
        violation = self.grads.mismatch() or gradients.mismatch(self.made) or self.guard.violation()
        for read in () if violation else self.argument_reads:
            violation = violation or read.violation(lambda place: self._value(place, leaves))
        return self.host_draws.violation() if self.host_draws is not None and not violation else violation

    def _value(self, place: Place, leaves: list) -> torch.Tensor | None:
        """The present value of an argument, or of state; for the latter this may wait."""
        if isinstance(place, int):
            return argument_value(leaves[place], self.recorder)
        return self.recorder.state_value(place.tensor)

    def replay(self, leaves: list, given: tuple) -> Any:
        """Fill the inputs, launch the program, and return copies of its results. Does not wait.

        given: args and kwargs of the call; leaves: their leaves.
        """
        # Fill the inputs of the program: arguments, random numbers of the CPU, gradients
        recorder, copy, origin = self.recorder, _COPY, current_session.Current.origins.here()  # all ops here are of one line
        for k, target in self.fills.items():
            source = leaves[k]
            call(copy, (target, source if type(source) is RemoteTensor else upload(source, origin)), origin=origin)
        if self.host_draws is not None:
            for target, drawn in zip(self.host_draws.inputs, self.host_draws.values, strict=True):
                call(copy, (target, upload(drawn, origin)), origin=origin)

        # Then leave to their holders the objects whose memory this replay writes
        self.grads.fill()
        for made in self.made:
            made.leave()

        # Launch. Random ops of the program count on from the generator's state, as eager ones would
        recorder.uploaded.clear()  # the program may write to any of them
        recorder.read.clear()
        recorder.values.launched = True
        if self.part is None or self.part.random is None:
            state, seed = random._State, random.initial_seed()
            counter = state.counter
            state.counter = counter + self.draws  # Ctrl-C comes after calls: no other one may be between these two lines
        else:
            seed, counter = self.part.random()
        recorder.code.extend((LAUNCH, self.number, seed, counter))
        self.replays += 1
        if self.replays == 1:
            recorder.session.compiles = True

        self.guard.count()

        # Hand the results to leaves, written arguments and the caller. These copies follow the launch in the op stream
        self.grads.set()
        if self.written or self.memory.required:
            write_back(leaves, self.inputs, self.written, self.memory.required)
        results = self.copy_results(leaves, given, origin)
        recorder.pass_on()
        return results

    def copy_results(self, arguments: list, given: tuple, origin: int = 0) -> Any:
        """The results: each fresh one copied out of the memory that the next replay writes, views of arguments and state.

        origin: of the copies, if it is known.
        """
        copies: dict[int, RemoteTensor] = {}  # by the identity of a result
        aliases: dict[int, RemoteTensor] = {}  # by the id of its tensor
        memories: dict[tuple, RemoteTensor] = {}
        hosts: dict[int, Any] = {}  # new CPU tensors and arrays, by the identity of a result

        def made(result: Any) -> Any:
            if type(result) is ArgumentView:
                return result.of(arguments)
            if type(result) is ContainerArgument:
                return result.of(given)
            if type(result) is CopiedResult:
                return hosts.setdefault(id(result), result.new())
            if type(result) is not ProgramResult:
                return result
            if isinstance(result.source, NamedMemory):
                return result.tensor
            # A tensor that the function returns twice is one tensor for the caller, too
            if id(result) not in copies:
                number = result.tensor._ref.id
                span = self.spans.get(number)
                if result.lasts:
                    own = result.tensor.detach()
                elif number in aliases:  # another object of the same tensor, as t.detach() beside t
                    own = aliases[number].detach()
                elif self.lends and number in self.lendable and span is None:
                    own = aliases[number] = lend(result.tensor)
                else:
                    own = call(_CLONE, (result.tensor,), origin=origin) if span is None else span.view(result.tensor, memories)
                    aliases[number] = own
                copies[id(result)] = as_leaf(own, result.requires_grad, result.parameter)
            return copies[id(result)]

        leaves = list(map(made, self.results))
        results = leaves[0] if self.tree.is_leaf() else tree_unflatten(leaves, self.tree)
        return closed(results) if self.opens else results


def _drop(recorder: Recorder, number: int) -> None:
    recorder.state.programs.pop(number, None)
    if current_session.Current.recorder is recorder:
        recorder.code.extend((DROP, number))
