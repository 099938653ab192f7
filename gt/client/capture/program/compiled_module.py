"""The module that `gt.compile(module)` returns: of the module's own class, with the same state, and its calls are captured."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def captured_module(module: nn.Module, call: Any, again: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """A module that has the attributes of another one, the very dictionary, and whose calls are `call`.

    So both have the same parameters, buffers, hooks and mode at any time, and each method works. A pickle of it is one of the
    module. again: captures a copy. Raises TypeError for a class that has no plain subclasses.
    """
    kind: Any = type(module)
    twin: Any = object.__new__(_captured_class(kind))
    object.__setattr__(twin, "__dict__", module.__dict__)
    object.__setattr__(twin, "_gt_captured", (call, again))
    return twin


@functools.lru_cache(maxsize=1024)
def _captured_class(kind: type) -> type:
    def captured(twin: Any) -> Any:
        """The captured call, and what captures a copy; None for another module of the class."""
        return _slot(vars(CapturedModule)["_gt_captured"], twin)

    def like(twin: Any, module: nn.Module) -> nn.Module:
        found = captured(twin)
        return found[1](module) if found else module

    class CapturedModule(kind):  # type: ignore[misc,valid-type]
        __slots__ = ("_gt_captured",)  # not in the dictionary, which is the module's

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            # Methods may make other modules of this class, as a slice of a Sequential, or change the class, as weight_norm
            if type(self) is CapturedModule and (found := captured(self)):
                return found[0](*args, **kwargs)
            return super().__call__(*args, **kwargs)

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
            return like(self, copy.deepcopy(_plain(self, kind), memo))

        def __copy__(self) -> nn.Module:
            return like(self, copy.copy(_plain(self, kind)))

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _itself, (_plain(self, kind),)

    CapturedModule.__name__, CapturedModule.__qualname__ = kind.__name__, kind.__qualname__
    CapturedModule.__module__, CapturedModule.__doc__ = kind.__module__, kind.__doc__
    if not hasattr(kind, "explain"):
        CapturedModule.explain = lambda twin: captured(twin)[0].explain()
    return CapturedModule


def _slot(slot: Any, twin: Any) -> Any:
    """The content of a twin's slot; None for another module of the class."""
    try:
        return slot.__get__(twin, type(twin))
    except AttributeError:
        return None


def _plain(module: nn.Module, kind: type) -> nn.Module:
    """A module of a class with the attributes of another one."""
    plain: Any = object.__new__(kind)
    object.__setattr__(plain, "__dict__", module.__dict__)
    return plain


def _itself(module: nn.Module) -> nn.Module:
    return module
