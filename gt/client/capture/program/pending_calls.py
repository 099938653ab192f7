"""Calls of a captured function that wait for their backward pass: what they have saved, and how they can be computed again."""

from __future__ import annotations

import operator
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from gt.client import current_session
from gt.client.capture.boundary import modes
from gt.client.capture.program.call_graph import Cut, Graph, once
from gt.client.capture.program.captured_program import CapturedProgram
from gt.client.capture.program.recomputation import RecomputationPlan
from gt.client.device.remote_tensor import RemoteTensor, Shown
from gt.client.values.lent_results import LentResult


@dataclass(eq=False)
class Saved:
    """Tensors that a forward program leaves for the backward pass. tensors: those in the memory that the program writes.

    backward: the compiled function that reads them. idle: calls in a row that nobody differentiated. graphs: calls to come that
    run their Python for their graph. plan: how the backward pass has what is not left. lent: results of the last replay that
    share memory with these tensors.
    """

    backward: Any
    tensors: list[RemoteTensor]
    program: weakref.ref[CapturedProgram] | None = None
    idle: int = 0
    graphs: int = 0
    plan: RecomputationPlan | None = None
    lent: LentResult | None = None

    def let_go(self) -> None:
        """Put a stand-in for each tensor that no program has left, so that its memory may end before the next call.

        Each place has a tensor, so that the next recording adds none.
        """
        if self.program is None and self.tensors and self.tensors[0].numel():
            self.tensors[:] = [torch.empty(0, device=self.tensors[0].device)] * len(self.tensors)

    def differentiable(self) -> bool:
        """True if a program seems to have the backward pass of the next call."""
        return any(not program.guard.violation() for program in self.backward.programs())

    def load(self, tensors: list[RemoteTensor]) -> str:
        """Give the memory the values of one call; the reason why it cannot have them, or ""."""
        if len(tensors) == len(self.tensors) and all(map(operator.is_, tensors, self.tensors)):
            return ""
        program = self.program() if self.program is not None else None
        if program is None:
            self.tensors[:] = tensors
            return ""
        if why := next((why for made in program.made if (why := made.mismatch())), ""):
            return why
        if self.lent is not None and current_session.current().has_live(self.lent.ids):
            return "the caller holds results in this memory"
        for made in program.made:
            made.leave()  # to a call that has not been differentiated yet
        with torch.no_grad():
            for into, tensor in zip(self.tensors, tensors, strict=True):
                once(into, into).copy_(once(tensor, into))
        return ""


@dataclass(eq=False)
class Given:
    """The facts by which a call's forward pass can be computed again. random: seed and counter before it; modes: as modes()."""

    leaves: list
    tree: Any
    random: tuple[int, int]
    modes: tuple
    versions: list[tuple[torch.Tensor, int, Any]]
    program: CapturedProgram | None = None

    def keep(self, program: CapturedProgram) -> None:
        """Note the state that the program of this call has read."""
        self.program = program
        self.versions += versions_of([kept for kept in program.keep if isinstance(kept, torch.Tensor)])

    def autocast(self) -> Any:
        """The call's own autocast."""
        return torch.autocast(Shown.device.type, dtype=self.modes[3], enabled=bool(self.modes[2]))

    def changed(self) -> str:
        """A change since the call by which its forward pass would be another one, or ""."""
        if self.program is not None and (self.program.host_draws is not None or self.program.guard.counts):
            return "it draws numbers on the CPU, or counts"
        same = [n for n, _ in enumerate(self.modes) if n not in (0, 2, 3)]  # grad mode, autocast
        now = modes()
        if any(now[n] != self.modes[n] for n in same):
            return "a mode of torch is another one"
        if any(t._version != version or getattr(t, "_ref", None) is not ref for t, version, ref in self.versions):
            return "a tensor that it reads has been changed"
        return ""

    def doubt(self) -> str:
        """A change of Python state since the call, which may or may not matter to its forward pass; or ""."""
        return "" if self.program is None else self.program.guard.violation()


def versions_of(tensors: list) -> list[tuple[torch.Tensor, int, Any]]:
    """Tensors with their versions and references, to find out later what has been changed."""
    found = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and not tensor.is_inference()]
    return [(tensor, tensor._version, getattr(tensor, "_ref", None)) for tensor in found]


@dataclass(eq=False)
class Call:
    """One call, until its backward pass. tensors: the saved ones; versions: of what it reads from before the call."""

    saved: Saved
    cut: Cut
    tensors: list[RemoteTensor]
    graph: Graph | None
    given: Given | None
    versions: list[tuple[torch.Tensor, int]]
    results: tuple = ()
    values: list[torch.Tensor] = field(default_factory=list)  # of the results of a replay
    outputs: list[tuple[weakref.ref, int]] = field(default_factory=list)  # results that are saved, with their versions
    lent: LentResult | None = None  # results that share memory with saved tensors
    parted: bool = False  # whether a backward pass of other results has been
    over: bool = False  # whether its backward pass has been, and nothing is kept for another

    def changed_since(self) -> str:
        """The reason why the forward pass cannot be computed again, or ""."""
        if self.cut.writes:
            return "it changes state"
        assert self.given is not None
        return self.given.changed()

    def result_written(self) -> bool:
        """True if the caller has written to a result, and by that to a saved tensor."""
        return self.lent is not None and current_session.current().lent_written(self.lent)

    def changed(self) -> str:
        """A tensor that the backward pass reads and that has been changed since, or ""."""
        results = [(tensor, version) for found, version in self.outputs if (tensor := found()) is not None]
        for tensor, version in (*self.versions, *results):
            if tensor._version != version:
                return f"a tensor of shape {list(tensor.shape)}"
        return ""
