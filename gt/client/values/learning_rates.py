"""Learning rates, momentum and betas that change between calls of a captured step. Within a call its program reads tensors.

Outside of the calls the optimizer's param_groups hold the user's own numbers, with which schedulers compute. So one program
serves all rates. Optimizers on GPUs take fp32 rates alone; CPU workers get fp64 ones, which are as exact as the numbers.

Torch takes momentum and betas as numbers alone. Within a call a group holds NaN in their place, and its step is fused. The op
of a fused step that gets NaN looks for the tensors here (trace/composites/fused_steps.py).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gt.client import current_session
from gt.client.device.remote_tensor import RemoteTensor

# Optimizers whose steps take a rate as a tensor, and read no value of it. The first do so where they keep all their state on
# the device, the second where they are fused. Their subclasses may read it
_IF_CAPTURABLE = frozenset(
    getattr(torch.optim, name) for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "ASGD")
)
_IF_FUSED = frozenset({torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW})
_READERS = frozenset({"param_groups", "get_last_lr", "state_dict"})  # names with which user code reaches a rate


_NAN = float("nan")
# Settings that a fused step reads as tensors -> what a group holds in a call, and the optimizers that have them
_HELD: dict[str, Any] = {"momentum": _NAN, "betas": (_NAN, _NAN)}
_BESIDE = {name: f"{name} on the device" for name in _HELD}  # the key of such a setting's tensors in a group
_KINDS = {"momentum": (torch.optim.SGD,), "betas": (torch.optim.Adam, torch.optim.AdamW)}


@dataclass(slots=True)
class Setting:
    """One setting of a group on the device, and the numbers that it holds: one for a rate, two for betas.

    fuse: the group's step has to be asked to be fused. versions: the tensors' counts of writes when they were placed.
    """

    name: str
    tensors: tuple[torch.Tensor, ...]
    values: tuple[float, ...]
    fuse: bool
    versions: tuple[int, ...] = ()

    @property
    def held(self) -> Any:
        """The object that a group holds within a call."""
        return self.tensors[0] if self.name == "lr" else _HELD[self.name]

    def fill(self, values: tuple[float, ...]) -> None:
        """Give the tensors these numbers."""
        for tensor, old, new in zip(self.tensors, self.values, values, strict=True):
            if old != new:
                with torch.no_grad():
                    tensor.fill_(new)
        self.values = values


class LearningRates:
    """The rates of one compiled function's optimizers, and what else of their settings changes."""

    in_groups: ClassVar[list[tuple[dict, Setting]]] = []  # groups that hold NaN now, of all functions

    def __init__(self) -> None:
        self.active = False  # True once there is a tensor
        self.cycled: set[tuple[int, str]] = set()  # groups, and settings of theirs that schedulers have changed within calls
        # Settings in the last recorded call, of each group; and those that are tensors within calls, by number of their group
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]] = weakref.WeakKeyDictionary()
        self._settings: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[tuple[int, str], Setting]] = (
            weakref.WeakKeyDictionary()
        )
        self._recorder: Any = None  # whose tensors these are
        self._losses = 0  # of workers, as they were made
        self._stepped: list[tuple[dict, Setting]] = []  # groups whose numbers the call has changed, as numbers since then
        self._placed: list[tuple[dict, Setting, Any, Any]] = []  # groups that hold tensors now, and what they held
        self._outside: list[tuple[dict, Setting]] = []  # groups whose numbers are back for a scheduler

    def changed(
        self, optimizers: list[torch.optim.Optimizer], names: set[str], every: bool = False, held: bool = False
    ) -> bool:
        """Note the rates of a call that will be recorded; True if some have become tensors, since they have changed.

        names: attributes and globals that the function's code uses. every: each rate will change. held: the function reaches
        groups beside their optimizers, and may read NaN there.
        """
        moved = [row for row in self._changes(optimizers, every) if row[2] == "lr" or not held]
        if not moved or names & _READERS or current_session.Current.offloads:  # a step on the host takes numbers
            return False
        self._recorder, self.active = current_session.current(), True
        self._losses = _losses(self._recorder)
        dtype = torch.float32 if self._recorder.gpus else torch.float64
        for optimizer, number, name, values, fuse in moved:
            device = optimizer.param_groups[number]["params"][0].device
            tensors = tuple([torch.tensor(value, dtype=dtype, device=device) for value in values])
            self._settings.setdefault(optimizer, {})[number, name] = Setting(name, tensors, values, fuse)
        self.place()
        return True

    def _changes(
        self, optimizers: list[torch.optim.Optimizer], every: bool
    ) -> Iterator[tuple[torch.optim.Optimizer, int, str, tuple[float, ...], bool]]:
        """Settings that are others than in the last recorded call, and may be tensors.

        Yields optimizer, group, name, numbers, Setting.fuse.
        """
        for optimizer in optimizers:
            now = [{name: group.get(name) for name in ("lr", *_HELD)} for group in optimizer.param_groups]
            before = self._seen.get(optimizer, now)
            self._seen[optimizer] = now
            for number, (old, new) in enumerate(zip(before, now, strict=False)):
                group = optimizer.param_groups[number]
                for name, value in new.items():
                    then, values = _numbers(name, old[name]), _numbers(name, value)
                    moves = then != values or (id(group), name) in self.cycled or (every and name == "lr")
                    fuse = self._fuses(optimizer, group, name) if then and values and moves else None
                    if fuse is not None:
                        yield optimizer, number, name, values, fuse

    def _fuses(self, optimizer: torch.optim.Optimizer, group: dict, name: str, later: bool = False) -> bool | None:
        """True if a group's step has to be asked to be fused, so that the setting is a tensor; None if it cannot be one.

        later: in the next recorded call, before which the optimizer is made capturable.
        """
        if name == "lr":
            return False if _takes_tensor(optimizer, group) else True if _may_fuse(optimizer, group) else None
        if type(optimizer) not in _KINDS[name]:
            return None
        if any(own is group and setting.fuse for own, setting, *_ in self._placed):
            return True
        # A step that its user has fused keeps its bits
        if name == "momentum" or group["fused"] is not None or group["foreach"] is not None:
            return True if name == "momentum" and _may_fuse(optimizer, group) else None
        floating = all(parameter.is_floating_point() for parameter in group["params"])
        takes = (later or group["capturable"]) and floating and _is_remote(group)
        return True if takes and not current_session.current().made_sparse else None

    def place(self) -> None:
        """Put the tensors in their groups, with the values of the numbers that are there. `remove` follows."""
        recorder = current_session.Current.recorder
        if recorder is None or recorder.tape is not None:  # within another recorded call
            return
        if self._recorder is not recorder or self._losses != _losses(recorder):  # ended, or lost with a worker
            self._settings.clear()
            self.active = False
        for optimizer, settings in self._settings.items():
            for (number, name), setting in settings.items():
                group = optimizer.param_groups[number] if number < len(optimizer.param_groups) else {}
                if values := _numbers(name, group.get(name)):
                    setting.fill(values)
                    self._put(group, setting)

    def remove(self) -> None:
        """Put the numbers back into the groups whose tensors are still there. One that the function has written to stays."""
        self._stepped.clear()
        while self._placed:
            self._take_out(*self._placed.pop())

    def may_cycle(self, optimizers: list[torch.optim.Optimizer], group: dict, name: str) -> bool:
        """True if a setting that a scheduler changes in this call may be a tensor in the next ones, which it then is."""
        owner = next((o for o in optimizers if any(own is group for own in o.param_groups)), None)
        moves = owner is not None and name in _HELD and bool(_numbers(name, group[name]))
        # One that was asked for before, and is no tensor all the same, cannot be one
        if owner is None or not moves or (id(group), name) in self.cycled or self._fuses(owner, group, name, True) is None:
            return False
        self.cycled.add((id(group), name))
        return True

    def holds(self, group: dict, name: str) -> bool:
        """True if this setting of a group is a tensor within the present call."""
        rows = [(own, setting) for own, setting, *_ in self._placed] + self._stepped + self._outside
        return any(own is group and setting.name == name for own, setting in rows)

    @contextlib.contextmanager
    def as_numbers(self) -> Iterator[None]:
        """Numbers are in the groups inside, with which a scheduler computes. Those that it changes stay until `settle`."""
        placed, self._placed = self._placed, []
        self._outside = [(group, setting) for group, setting, *_ in placed]
        for row in reversed(placed):
            self._take_out(*row)
        try:
            yield
        finally:
            self._outside = []
            for group, setting, value, _ in placed:
                if group.get(setting.name) == value:
                    self._put(group, setting)
                else:
                    self._stepped.append((group, setting))

    def settle(self) -> None:
        """The recorded function is over: its groups hold tensors, as before it, in place of numbers that schedulers left."""
        while self._stepped:
            group, setting = self._stepped.pop()
            if _numbers(setting.name, group.get(setting.name)):
                self._put(group, setting)

    def _put(self, group: dict, setting: Setting) -> None:
        """Put a tensor in the place of the number that a group has."""
        setting.versions = tuple([tensor._version for tensor in setting.tensors])
        self._placed.append((group, setting, group[setting.name], group.get("fused")))
        group[setting.name] = setting.held
        if setting.name in _HELD:
            group[_BESIDE[setting.name]] = setting.tensors  # where the walk over Python state finds them
            self.in_groups.append((group, setting))
        if setting.fuse:
            group["fused"] = True

    def _take_out(self, group: dict, setting: Setting, value: Any, fused: Any) -> None:
        """Put the number back, if the tensor is still there as it was."""
        if setting.name in _HELD:
            group.pop(_BESIDE[setting.name], None)
            self.in_groups[:] = [row for row in self.in_groups if row[0] is not group or row[1] is not setting]
        still_there = group.get(setting.name) is setting.held
        if still_there and tuple([tensor._version for tensor in setting.tensors]) == setting.versions:
            group[setting.name] = value
            if setting.fuse:
                group["fused"] = fused


def _losses(recorder: Any) -> int:
    return getattr(recorder.session, "losses", 0)


def setting_of(parameter: torch.Tensor, name: str) -> tuple[tuple[torch.Tensor, ...], tuple[float, ...]] | None:
    """The tensors, and their numbers, of the setting for which a parameter's group holds NaN now; None if it holds its own."""
    for group, setting in LearningRates.in_groups:
        if setting.name == name and any(own is parameter for own in group["params"]):
            return setting.tensors, setting.values
    return None


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    """The numbers of a setting that may be tensors; () if there are none. Without momentum SGD's step has other ops."""
    if value is _HELD.get(name, _HELD):
        return ()
    if name == "betas":
        return value if type(value) is tuple and len(value) == 2 and all(type(beta) is float for beta in value) else ()
    return (value,) if type(value) is float and (name == "lr" or value > 0) else ()


def _takes_tensor(optimizer: torch.optim.Optimizer, group: dict) -> bool:
    """True if a group's step reads no value of its rate, as it is."""
    kind = type(optimizer)
    known = (kind in _IF_CAPTURABLE and group.get("capturable")) or (kind in _IF_FUSED and group.get("fused"))
    return bool(known) and _is_remote(group)


def _may_fuse(optimizer: torch.optim.Optimizer, group: dict) -> bool:
    """True if a group's step may be fused from now on: SGD's, which counts no steps, where its user left that to torch."""
    if type(optimizer) is not torch.optim.SGD or group["fused"] is not None or group["foreach"] is not None:
        return False
    # A fused step takes no sparse gradients. It begins the momentum of all parameters at once: none may follow later
    begun = [p for p in group["params"] if p in optimizer.state and optimizer.state[p].get("momentum_buffer") is not None]
    dense = _is_remote(group) and not current_session.current().made_sparse
    return dense and (group["momentum"] == 0 or len(begun) == len(group["params"]))


def _is_remote(group: dict) -> bool:
    """True if a group has parameters, and all are remote and updated without a graph."""
    parameters = group["params"]
    return bool(parameters) and all(isinstance(p, RemoteTensor) for p in parameters) and not group.get("differentiable")
