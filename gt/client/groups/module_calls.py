"""Calls of modules in a session whose config says `precision` or `activation_checkpoint`: the program's text says neither.

An outermost module is one that is called by no other. Precision is that of its whole call; modules to be checkpointed are those
inside whose names match.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from gt.client.current_session import Current, on_connect
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.groups.mixed_precision import Casts, MixedPrecision, substitutions, undone
from gt.config.match import around, matches
from gt.errors import ConfigError

Call = Callable[..., Any]


class _Within(threading.local):
    """The settings of the outermost module that this thread is in; None outside."""

    checkpointed: frozenset[int] | None = None  # identities of modules
    casts: Casts | None = None


class ModuleCalls:
    """Stands in for torch.nn.Module.__call__ during one session."""

    def __init__(self, recorder: Any) -> None:
        self._recorder, self._within = recorder, _Within()
        self._precision = MixedPrecision(Current.precision) if Current.precision.compute != "fp32" else None
        self._patterns = Current.checkpointed
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[int]] = weakref.WeakKeyDictionary()
        self._unmatched = {*self._patterns}
        self._seen: list[str] = []  # names of a module's children, for an error
        self._hook = register_optimizer_step_pre_hook(self._check_patterns) if self._patterns else None
        self._original: Call = torch.nn.Module.__call__
        torch.nn.Module.__call__ = self._wrapper()  # type: ignore[method-assign]

    def close(self) -> None:
        torch.nn.Module.__call__ = self._original  # type: ignore[method-assign]
        if self._precision is not None:
            self._precision.close()
        if self._hook is not None:
            self._hook.remove()

    def _check_patterns(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """ConfigError at the first step for a pattern that has matched no module: it would save no memory."""
        if self._unmatched and self._seen and Current.recorder is self._recorder:
            raise ConfigError(
                f"activation_checkpoint: pattern {sorted(self._unmatched)[0]!r:.80} matches no module that was called; "
                f"their names are such as {self._seen[:3]}"
            )

    def _wrapper(self) -> Call:
        def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if Current.recorder is not self._recorder:
                return self._original(module, *args, **kwargs)
            checkpointed = self._within.checkpointed
            # None: no module is around this one. An empty set: inside of an outermost module, with nothing to checkpoint
            if checkpointed is None:
                return self._outermost(module, args, kwargs)
            if id(module) in checkpointed and torch.is_grad_enabled():
                return self._checkpointed(module, args, kwargs)
            return self._original(module, *args, **kwargs)

        return __call__

    def _outermost(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
        """Call a module that no other calls. One without parameters on workers, as of a loss, is called as it is."""
        if not any(isinstance(p, RemoteTensor) for p in module.parameters()):
            return self._original(module, *args, **kwargs)
        again = torch._C._current_autograd_node() is not None  # inside of a module that backward computes again
        precision = self._precision
        casts = precision.casts(module) if precision is not None else Casts()
        if precision is not None and casts:
            args, kwargs = precision.inputs(args), precision.inputs(kwargs)
        # backward computes a part again for what it saves, which is not to be left out once more
        found = self._inside(module, casts, frozenset() if again else self._names(module), args, kwargs)
        return precision.outputs(found) if precision is not None and casts and not again else found

    def _inside(self, module: torch.nn.Module, casts: Casts, checkpointed: frozenset[int], args: tuple, kwargs: dict) -> Any:
        """Call a module with casts in the place of its parameters."""
        within = self._within
        before = within.checkpointed, within.casts
        rows = substitutions(module, casts)
        undo = undone(rows)
        try:
            for row in rows:
                row.place[row.key] = row.within
            within.checkpointed, within.casts = checkpointed, casts
            if id(module) in checkpointed and torch.is_grad_enabled():
                return self._checkpointed(module, args, kwargs)
            return self._original(module, *args, **kwargs)
        finally:
            # Without a call of Python, before whose first statement Ctrl-C would leave the casts in the module for good
            within.checkpointed, within.casts = before
            deque(undo, 0)

    def _checkpointed(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
        """Call a module whose activations backward computes again, with the same casts."""
        # Kept for the second forward in backward, which is outside of the outermost call
        casts = self._within.casts or Casts()

        def run(*args: Any, **kwargs: Any) -> Any:
            return self._inside(module, casts, frozenset(), args, kwargs)

        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    def _names(self, module: torch.nn.Module) -> frozenset[int]:
        """Identities of the modules inside that match a pattern, and are in no other that does."""
        if not self._patterns:
            return frozenset()
        parameters = self._known.get(module)
        if parameters is None:
            names = {name: inner for name, inner in module.named_modules()}
            matched = {name for name in names if any(matches(name, pattern) for pattern in self._patterns)}
            self._unmatched -= {pattern for pattern in self._patterns if any(matches(name, pattern) for name in names)}
            self._seen = self._seen or [name for name in names if name]
            outer = [name for name in matched if not any(name != other and other in matched for other in around(name))]
            parameters = self._known[module] = frozenset(id(names[name]) for name in outer)
        return parameters


def begin(recorder: Any) -> Callable[[], None]:
    """Begin with a session; the function that ends it."""
    if Current.precision.compute == "fp32" and not Current.checkpointed:
        return lambda: None
    return ModuleCalls(recorder).close


def prepare() -> None:
    """Have sessions begin with it. Runs once, on import."""
    on_connect.append(begin)
