"""Learning-rate schedulers that a recorded call steps. A replay steps them too, after it: their own Python runs.

So no op may depend on them but by learning rates, which are tensors within a call (values/learning_rates.py). All other uses
of a scheduler in the call prevent a program. They are seen exactly: in the call the schedulers' classes note them.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from gt.client.capture.recording import CallRecording, Difference
from gt.client.capture.state_walk import StateItem, StateSnapshot
from gt.client.capture.watches.scheduler_step import SchedulerStep
from gt.client.values.code_names import names_in
from gt.client.values.fingerprints import is_scalar_like, unchanged
from gt.client.values.learning_rates import LearningRates

AFTER = ", and Python does not run in a replay: step it after the function"
_CYCLED = (
    ", as OneCycleLR and CyclicLR do unless they get cycle_momentum=False; one program serves all values of torch's SGD, Adam "
    "and AdamW without fused and foreach"
)
_TENSOR_NEXT = ", which is a tensor in the next calls; they can become a program"
_ASKED = frozenset({"step", "__class__"})  # attributes that anybody may read
_UNKNOWN = object()


@dataclass
class SchedulerWatch:
    """The schedulers of one recorded call, a context manager around it. rates: of the function whose call it is."""

    entry: StateSnapshot
    tape: CallRecording
    rates: LearningRates
    steps: list[SchedulerStep] = field(default_factory=list)
    obstacle: str = ""
    makes: bool = False  # True once the call has made a scheduler

    def __post_init__(self) -> None:
        self._schedulers = schedulers_of(self.entry)
        self._watched = {id(scheduler) for scheduler in self._schedulers}
        self._patches: list[tuple[type, str, Any]] = []  # class, name, value that was there
        self._inside = False
        self._thread = threading.get_ident()

    def __enter__(self) -> SchedulerWatch:
        for name in ("LRScheduler", *lr_scheduler.__all__):
            kind = getattr(lr_scheduler, name)
            if "__init__" in vars(kind):
                self._patch(kind, "__init__", self._making(vars(kind)["__init__"]))
        if self._schedulers:
            self._patch(LRScheduler, "__getattribute__", self._noting(LRScheduler.__getattribute__))
            self._patch(LRScheduler, "__setattr__", self._noting(LRScheduler.__setattr__))
        for kind in dict.fromkeys(kind for scheduler in self._schedulers for kind in type(scheduler).__mro__):
            if isinstance(vars(kind).get("step"), types.FunctionType):
                self._patch(kind, "step", self._stepping(vars(kind)["step"]))
        return self

    def __exit__(self, *error: Any) -> None:
        for kind, name, original in reversed(self._patches):
            setattr(kind, name, original) if original is not _UNKNOWN else delattr(kind, name)
        self.rates.settle()
        if error[0] is not None:
            self.end()

    def _patch(self, kind: type, name: str, function: Any) -> None:
        self._patches.append((kind, name, vars(kind).get(name, _UNKNOWN)))
        setattr(kind, name, function)

    def _making(self, original: Any) -> Any:
        """A class's constructor, which computes with numbers."""

        @functools.wraps(original)
        def make(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            self.makes = True
            with self.rates.as_numbers():
                original(scheduler, *args, **kwargs)

        return make

    def _noting(self, original: Any) -> Any:
        """A method of all schedulers that gets an attribute's name."""

        def noting(scheduler: Any, name: str, *value: Any) -> Any:
            if id(scheduler) in self._watched:
                self.note_use(scheduler, name)
            return original(scheduler, name, *value)

        return noting

    def _stepping(self, original: Any) -> Any:
        """A class's method step()."""

        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if id(scheduler) not in self._watched:
                return original(scheduler, *args, **kwargs)
            return self.step(scheduler, types.MethodType(original, scheduler), args, kwargs)

        return step

    # ---- during the call

    def note_use(self, scheduler: LRScheduler, name: str) -> None:
        """Somebody reads or sets an attribute of a scheduler."""
        if not self._inside and name not in _ASKED:
            self.obstacle = self.obstacle or f"the function uses `{name}` of a {type(scheduler).__name__} beside its step()"

    def step(self, scheduler: LRScheduler, step: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Step a scheduler by its own method, and note what that changes."""
        if self._inside:  # one that another scheduler steps
            return step(*args, **kwargs)
        self._refuse_arguments((*args, *kwargs.values()))
        self.tape.recorder.flush()
        ops, counts = len(self.tape.ops), _numbers(self.entry.counters.values())
        self._inside = True
        try:
            with self.rates.as_numbers():
                groups = _settings(self.entry.optimizers)
                result = step(*args, **kwargs)
                self._note_changes(groups)
        finally:
            self._inside = False
        self.steps.append(SchedulerStep(scheduler, args, kwargs))
        self.tape.recorder.flush()
        if len(self.tape.ops) != ops:
            self.obstacle = self.obstacle or "a scheduler computes with remote tensors"
        if _numbers(self.entry.counters.values()) != counts:
            self.obstacle = self.obstacle or "a scheduler's own code counts"
        return result

    def _refuse_arguments(self, values: Iterable[Any]) -> None:
        for value in values:
            if not is_scalar_like(value):
                self.obstacle = self.obstacle or f"a scheduler gets a {type(value).__name__}"
        if threading.get_ident() != self._thread:
            self.obstacle = self.obstacle or "another thread steps a scheduler"

    def _note_changes(self, groups: list[dict[str, Any]]) -> None:
        now = [group for optimizer in self.entry.optimizers for group in optimizer.param_groups]
        for old, group in zip(groups, now, strict=True):
            for name in group:
                if name == "lr" or unchanged(old.get(name, _UNKNOWN), group[name]) or self.rates.holds(group, name):
                    continue
                what = f"a scheduler changes {name!r} of an optimizer"
                if self.rates.may_cycle(self.entry.optimizers, group, name):
                    self.tape.prevents.append(Difference("", what + _TENSOR_NEXT))
                else:
                    self.obstacle = self.obstacle or what + _CYCLED

    # ---- after the call

    def finish(self, leaving: StateSnapshot) -> bool:
        """Leave the schedulers' own numbers out of both snapshots, since a replay steps them too; or refuse a program.

        Returns whether the call has stepped any.
        """
        if self.obstacle:
            if self.steps:
                self.tape.refuse_program(self.obstacle + AFTER)
            return bool(self.steps)
        places = {(id(vars(scheduler)), name) for scheduler in self._schedulers for name in vars(scheduler)}
        for state in (self.entry, leaving):
            state.leave_out(places)
        self.tape.steps = self.steps
        return bool(self.steps)

    def end(self) -> None:
        """Let go of the snapshot: Python may keep the methods that were in the classes for a while."""
        self._schedulers, self._patches = [], []
        del self.entry


def schedulers_of(state: StateSnapshot) -> list[LRScheduler]:
    """The schedulers that a function reaches."""
    return [thing for _, thing, _ in state.kinds if isinstance(thing, LRScheduler)]


def may_make_schedulers(state: StateSnapshot) -> bool:
    """True if the code of a function names a class of schedulers. One that it makes would see tensors in place of rates."""
    values = [item.value for item in state.items if isinstance(item.value, type)]
    return not state.names.isdisjoint(lr_scheduler.__all__) or any(issubclass(value, LRScheduler) for value in values)


def names_beside(state: StateSnapshot) -> set[str]:
    """The attributes and globals that user code names, without the code of schedulers' classes: a replay runs that too."""
    schedulers = schedulers_of(state)
    if not schedulers:
        return state.names
    classes = {kind for scheduler in schedulers for kind in type(scheduler).__mro__}
    own = {f.__code__ for kind in classes for f in vars(kind).values() if isinstance(f, types.FunctionType)}
    return set().union(*(names_in(code) for code in state.codes - own))


def holds_groups(state: StateSnapshot) -> bool:
    """True if a function reaches an optimizer's groups by other means than the optimizer."""
    owners = {id(vars(optimizer)) for optimizer in state.optimizers} | {id(o.param_groups) for o in state.optimizers}
    groups = {id(part) for o in state.optimizers for part in (o.param_groups, *o.param_groups)}
    return any(id(item.value) in groups and id(item.holder) not in owners for item in state.items)


def steps_differ(a: list[SchedulerStep], b: list[SchedulerStep]) -> bool:
    """True if two calls have stepped other schedulers, or by other numbers."""
    return len(a) != len(b) or not all(map(SchedulerStep.agrees, a, b))


def _numbers(counters: Iterable[StateItem]) -> list[Any]:
    return [item.now() for item in counters]


def _settings(optimizers: list[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Copies of the param_groups."""
    return [dict(group) for optimizer in optimizers for group in optimizer.param_groups]
