"""torch.Generator(device="remote"): a generator whose numbers seed random ops, each with a number of its own.

Its state is a CPU generator's, since torch makes generators of other devices in C++ alone. Functions of the CPU take it too.
"""

from __future__ import annotations

from typing import Any

import torch

from gt.client.device.remote_tensor import Shown

_Plain: Any = torch._C.Generator


class _GeneratorType(type(_Plain)):  # type: ignore[misc]
    """Makes generators of every device, and counts those that torch made as instances."""

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        wanted = torch.device(device)
        if wanted.type not in Shown.types:
            return _Plain(wanted)
        if wanted.index:
            raise RuntimeError(f"there is no {wanted}: all workers are one device; try torch.Generator({Shown.device.type!r})")
        return _Plain.__new__(RemoteGenerator)

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, _Plain)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, _Plain)


class RemoteGenerator(torch._C.Generator):
    """A generator that says that it is on the remote device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override,misc]
        return Shown.device

    def clone_state(self) -> torch.Generator:
        return _with_state(_Plain.get_state(self))

    def __reduce__(self) -> Any:
        return _with_state, (self.get_state(),)


def _with_state(state: torch.Tensor) -> RemoteGenerator:
    generator: RemoteGenerator = _Plain.__new__(RemoteGenerator)
    generator.set_state(state)
    return generator


def prepare() -> None:
    """Replace torch.Generator by a class that knows the remote device; once."""
    torch.Generator = _GeneratorType("Generator", (_Plain,), {"__module__": "torch", "__doc__": _Plain.__doc__})  # type: ignore[misc]
