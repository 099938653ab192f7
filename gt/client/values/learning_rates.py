"""Learning rates that change between calls of a captured step. Within a call each is a tensor, which the program reads.

Outside of the calls the optimizer's param_groups hold the user's own numbers, with which schedulers compute. So one program
serves all rates. Optimizers on GPUs take fp32 rates alone; CPU workers get fp64 ones, which are as exact as the numbers.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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


@dataclass(slots=True)
class _Rate:
    """One group's rate on the device, and the number that it holds.

    fuse: the group's step has to be asked to be fused. version: the tensor's count of writes when it was placed.
    """

    tensor: torch.Tensor
    value: float
    fuse: bool
    version: int = 0


class LearningRates:
    """The rates of one compiled function's optimizers."""

    def __init__(self) -> None:
        self.active = False  # True once there is a tensor
        # Rates in the last recorded call, of each group; and those that are tensors within calls, by number of their group
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Any]] = weakref.WeakKeyDictionary()
        self._rates: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, _Rate]] = weakref.WeakKeyDictionary()
        self._recorder: Any = None  # whose tensors these are
        self._stepped: list[tuple[dict, _Rate]] = []  # groups whose rate the call has changed, as numbers since then
        self._placed: list[tuple[dict, _Rate, float, Any]] = []  # groups that hold a tensor now, and the number that they held

    def changed(self, optimizers: list[torch.optim.Optimizer], names: set[str], every: bool = False) -> bool:
        """Note the rates of a call that will be recorded; True if some have become tensors, since they have changed.

        names: attributes and globals that the function's code uses. every: each rate will change.
        """
        moved = list(self._changes(optimizers, every))
        if not moved or names & _READERS or current_session.Current.offloads:  # a step on the host takes numbers
            return False
        self._recorder, self.active = current_session.current(), True
        dtype = torch.float32 if self._recorder.gpus else torch.float64
        for optimizer, number, value, fuse in moved:
            tensor = torch.tensor(value, dtype=dtype, device=optimizer.param_groups[number]["params"][0].device)
            self._rates.setdefault(optimizer, {})[number] = _Rate(tensor, value, fuse)
        self.place()
        return True

    def _changes(
        self, optimizers: list[torch.optim.Optimizer], every: bool
    ) -> Iterator[tuple[torch.optim.Optimizer, int, float, bool]]:
        """Rates that are others than in the last recorded call, and may be tensors: optimizer, group, rate, _Rate.fuse."""
        for optimizer in optimizers:
            rates = [group.get("lr") for group in optimizer.param_groups]
            before = self._seen.get(optimizer, rates)
            self._seen[optimizer] = rates
            for number, (old, new) in enumerate(zip(before, rates, strict=False)):
                if type(old) is not float or type(new) is not float or (old == new and not every):
                    continue
                group = optimizer.param_groups[number]
                if _takes_tensor(optimizer, group):
                    yield optimizer, number, new, False
                elif _may_fuse(optimizer, group):
                    yield optimizer, number, new, True

    def place(self) -> None:
        """Put the tensors in their groups, with the values of the numbers that are there. `remove` follows."""
        recorder = current_session.Current.recorder
        if recorder is None or recorder.tape is not None:  # within another recorded call
            return
        if self._recorder is not recorder:  # of a session that has ended
            self._rates.clear()
            self.active = False
        for optimizer, rates in self._rates.items():
            for number, rate in rates.items():
                group = optimizer.param_groups[number] if number < len(optimizer.param_groups) else {}
                value = group.get("lr")
                if type(value) is not float:
                    continue
                if value != rate.value:
                    with torch.no_grad():
                        rate.tensor.fill_(value)
                    rate.value = value
                self._put(group, rate)

    def remove(self) -> None:
        """Put the numbers back into the groups whose tensors are still there. One that the function has written to stays."""
        self._stepped.clear()
        while self._placed:
            _take_out(*self._placed.pop())

    @contextlib.contextmanager
    def as_numbers(self) -> Iterator[None]:
        """Numbers are in the groups inside, with which a scheduler computes. Those that it changes stay until `settle`."""
        placed, self._placed = self._placed, []
        for row in placed:
            _take_out(*row)
        try:
            yield
        finally:
            for group, rate, value, _ in placed:
                if group.get("lr") == value:
                    self._put(group, rate)
                else:
                    self._stepped.append((group, rate))

    def settle(self) -> None:
        """The recorded function is over: its groups hold tensors, as before it, in place of numbers that schedulers left."""
        while self._stepped:
            group, rate = self._stepped.pop()
            if type(group.get("lr")) is float:
                self._put(group, rate)

    def _put(self, group: dict, rate: _Rate) -> None:
        """Put a tensor in the place of the number that a group has."""
        rate.version = rate.tensor._version
        self._placed.append((group, rate, group["lr"], group.get("fused")))
        group["lr"] = rate.tensor
        if rate.fuse:
            group["fused"] = True


def _take_out(group: dict, rate: _Rate, value: float, fused: Any) -> None:
    """Put the number back, if the tensor is still there as it was."""
    still_there = group.get("lr") is rate.tensor
    if still_there and rate.tensor._version == rate.version:
        group["lr"] = value
        if rate.fuse:
            group["fused"] = fused


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
