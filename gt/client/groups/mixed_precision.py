"""Mixed precision of a module by the config: it computes in bf16 or fp16 with casts of its fp32 parameters.

During a call the casts stand in for the parameters, and floating inputs are cast too, as FSDP2's MixedPrecisionPolicy does it.
The casts are ordinary ops. Parameters, gradients and optimizer state stay fp32 for the program.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import RNNBase
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from gt.client.current_session import Current
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.groups.loss_scale import LossScale, ScaledCast, ScaledGradient
from gt.client.trace.dispatch import declare_frozen
from gt.config.schema import DTYPES, Precision

FULL = torch.float32  # dtype of the parameters that are cast


class Substitution(NamedTuple):
    """An assignment place[key] = within, and the value before."""

    place: dict[str, Any]
    key: str
    before: Any
    within: Any


class Casts(dict[int, tuple[torch.Tensor, torch.Tensor]]):
    """Identity of a parameter -> the parameter and its cast."""


class MixedPrecision:
    """The dtypes of one session."""

    def __init__(self, precision: Precision) -> None:
        self.compute: torch.dtype = getattr(torch, DTYPES[precision.compute])
        output = precision.output or ("fp32" if precision.compute == "fp16" else None)  # a loss in fp16 would lose its gradient
        self.output: torch.dtype | None = getattr(torch, DTYPES[output]) if output else None
        self.scale = LossScale() if precision.compute == "fp16" else None

    def close(self) -> None:
        if self.scale is not None:
            self.scale.close()

    def casts(self, module: torch.nn.Module) -> Casts:
        """Casts of all fp32 parameters of a module and its children, each cast once. {} where there is none on workers.

        Where gradients are scaled, parameters that keep their dtype are there too.
        """
        casts, kept = Casts(), []
        for owner, name in _owners(module):
            parameter = owner._parameters[name]
            if isinstance(parameter, RemoteTensor) and parameter.dtype == FULL and not isinstance(owner, _BatchNorm):
                if id(parameter) not in casts:
                    casts[id(parameter)] = parameter, self._cast_of(parameter)
            # Gradients inside of the module are scaled, also those that reach such
            # a parameter: a cast to its own dtype divides its gradient by the scale
            elif isinstance(parameter, RemoteTensor) and self.scale is not None:
                kept.append(parameter)
        for parameter in kept if casts else ():
            if id(parameter) not in casts:
                casts[id(parameter)] = parameter, self.cast(parameter, parameter.dtype)
        return casts

    def _cast_of(self, parameter: RemoteTensor) -> torch.Tensor:
        """A parameter's cast. A frozen parameter is declared as itself: its module shows the cast of this call alone."""
        if parameter.requires_grad or not Current.declares_modules:
            return self.cast(parameter)
        declare_frozen(parameter)
        cast = self.cast(parameter)
        cast._ref.home = -1  # type: ignore[attr-defined]  # nothing is to be declared of it
        return cast

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor in another dtype, by default that of computation. Its gradient is of its own dtype, and not scaled."""
        dtype = dtype or self.compute
        if not tensor.is_floating_point() and dtype != tensor.dtype:
            return tensor
        if self.scale is not None and tensor.requires_grad and torch.is_grad_enabled():
            return ScaledCast.apply(tensor, dtype, self.scale.value(), self.scale.inverse())
        return tensor.to(dtype)

    def inputs(self, tree: Any) -> Any:
        return tree_map_only(torch.Tensor, self.cast, tree)

    def outputs(self, tree: Any) -> Any:
        """Results of an outermost module, in the dtype of outputs. The gradients that enter there are scaled."""
        return tree if self.output is None and self.scale is None else tree_map_only(RemoteTensor, self._output, tree)

    def _output(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        if self.output is not None:
            tensor = tensor.to(self.output)
        if self.scale is not None and tensor.requires_grad and torch.is_grad_enabled():
            tensor = ScaledGradient.apply(tensor, self.scale.value())
        return tensor


def substitutions(module: torch.nn.Module, casts: Casts) -> list[Substitution]:
    """The assignments that let casts stand in for the parameters of a module and its children."""
    # Written into _parameters by hand: setattr() of a module takes nn.Parameters only
    rows: list[Substitution] = []
    owners: dict[int, torch.nn.Module] = {}
    for owner, name in _owners(module):
        row = casts.get(id(owner._parameters[name]))
        if row is not None and (row[1].dtype == row[0].dtype or not isinstance(owner, _BatchNorm)):
            rows.append(Substitution(owner._parameters, name, *row))
            owners[id(owner)] = owner
    return rows + [row for owner in owners.values() if isinstance(owner, RNNBase) for row in _lists(owner, casts)]


def undone(rows: list[Substitution]) -> Iterator[None]:
    """An iterator that undoes assignments. All is C, where Ctrl-C ends nothing halfway."""
    return map(operator.setitem, [row.place for row in rows], [row.key for row in rows], [row.before for row in rows])


def _lists(owner: RNNBase, casts: Casts) -> list[Substitution]:
    """Lists of a recurrent layer's weights, which it has beside its parameters, that name the casts.

    A layer whose references do not fit its parameters makes new lists, which no capture would take for unchanged.
    """
    own = [owner._parameters.get(name) for name in owner._flat_weights_names]
    weights = [weight if weight is None else casts.get(id(weight), (weight, weight))[1] for weight in own]
    references = [None if weight is None else weakref.ref(weight) for weight in weights]
    lists = {"_flat_weights": weights, "_flat_weight_refs": references}
    return [Substitution(vars(owner), name, vars(owner)[name], within) for name, within in lists.items()]


def _owners(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    """(module, name) of all own parameters. Those of batch norms keep their dtype, as these compute with fp32 statistics."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, name
