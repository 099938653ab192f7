"""Casts of parameters, by the config's `precision` or by torch.autocast, in a session with groups.

By `precision` a module's parameters are cast as it is called, outside of the groups that are entered inside. So a cast is no
use of its parameter: it is the parameter in another dtype, and its first use decides where both are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gt.dispatcher.planning.redistributor import Redistributor
from gt.dispatcher.sharding import zero
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.sharding.partial import casts_gradient
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.records import Origin
from gt.dispatcher.state.tensors import Storage, Tensor

HALVES = ("bfloat16", "float16")


class ParameterCasts:
    """The casts of one session. `active` is false where the config has no group but that of all ops."""

    def __init__(self, context: SessionContext, redistributor: Redistributor) -> None:
        self._context, self._emitter, self._redistributor = context, context.emitter, redistributor
        self.active, self._any = context.groups.partial, context.config.precision.compute != "fp32"
        self._outside: dict[Origin, Origin] = {}

    def casts(self, known: OpSchema, ins: Sequence[Tensor]) -> bool:
        """True for an op that casts a whole parameter."""
        if known.name != "_to_copy" or not ins[0].storage.param or ins[0].base is not None:
            return False
        out = known.template.outs[0].spec
        return self._any or (out is not None and out.dtype in HALVES)  # with fp16, one that keeps its dtype is copied

    def origin(self, known: OpSchema, origin: Origin, ins: Sequence[Tensor]) -> Origin:
        """An op's origin. That of a cast, and of its gradient's, is outside of all groups: it is made where its operand is."""
        if origin.meaning is None:
            return origin
        if not (self._any and casts_gradient(known) if origin.backward else self.casts(known, ins)):
            return origin
        outside = self._outside.get(origin)
        if outside is None:
            outside = self._outside[origin] = replace(origin, meaning=None)
        self._emitter.origin = outside
        return outside

    def follow(self, ins: Sequence[Tensor]) -> None:
        """A parameter goes where the first use of its cast has put that, and rests there."""
        for t in ins:
            parameter = t.storage.cast_of
            while parameter is not None:
                if _waits(t.storage) or not _waits(parameter) or not parameter.tensors or self._context.failures.troubled:
                    break
                layout = next(row for row in t.storage.tensors.values() if row.base is None).layout
                assert layout is not None
                self._redistributor.move_home(parameter, zero.used(layout))
                parameter.default = parameter.undecided = False
                parameter = parameter.cast_of


def _waits(storage: Storage) -> bool:
    """True for a parameter, or a cast of one, whose first use in a group is yet to come."""
    return storage.recipe is not None or storage.default or storage.undecided
