"""The module that `gt.compile(module)` returns: of the module's own class, with the same state, and its calls are captured."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn


def captured_module(module: nn.Module, call: Any, again: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """A module that has the attributes of another one, the very dictionary, and whose calls are `call`.

    So both have the same parameters, buffers, hooks and mode at any time, and each method works. A pickle of it is one of the
    module. again: captures the copy that copy.deepcopy makes.
    """
    kind = type(module)

    class CapturedModule(kind):  # type: ignore[misc,valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        def explain(self) -> Any:
            """Describe the captured programs: see gt.compile."""
            return call.explain()

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
            return again(copy.deepcopy(module, memo))

        def __copy__(self) -> nn.Module:
            return again(copy.copy(module))

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _itself, (module,)

    CapturedModule.__name__, CapturedModule.__qualname__ = kind.__name__, kind.__qualname__
    CapturedModule.__module__, CapturedModule.__doc__ = kind.__module__, kind.__doc__
    twin = CapturedModule.__new__(CapturedModule)
    object.__setattr__(twin, "__dict__", module.__dict__)
    return twin


def _itself(module: nn.Module) -> nn.Module:
    return module
