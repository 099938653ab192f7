"""Hooks for what autograd saves in one call, which torch.func's transforms suspend: they refuse to run under such hooks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_own = torch._C._autograd
_refuse = torch.autograd.graph.disable_saved_tensors_hooks
_active = threading.local()


class SavingHooks:
    """Inside, autograd calls these hooks, but for tensors of torch.func's transforms.

    transforms: whether there were any, so that not all that is saved has been seen.
    """

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._hooks = pack, unpack
        self.transforms = False

    def __enter__(self) -> SavingHooks:
        torch.autograd.graph.disable_saved_tensors_hooks = _suspend
        self._outer, _active.hooks = getattr(_active, "hooks", None), self
        _own._push_saved_tensors_default_hooks(*self._hooks)
        return self

    def __exit__(self, *error: Any) -> None:
        _own._pop_saved_tensors_default_hooks()
        _active.hooks = self._outer

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, there are no hooks."""
        self.transforms, _active.hooks = True, None
        _own._pop_saved_tensors_default_hooks()
        try:
            yield
        finally:
            _own._push_saved_tensors_default_hooks(*self._hooks)
            _active.hooks = self

    def on_top(self) -> bool:
        """True if no hooks of the user are inside these."""
        top = _own._top_saved_tensors_default_hooks(True)
        return top is not None and top[0] is self._hooks[0]


@contextlib.contextmanager
def _suspend(message: str) -> Iterator[None]:
    """torch.autograd.graph.disable_saved_tensors_hooks, which raises if there are hooks, but for those of a captured call."""
    hooks = getattr(_active, "hooks", None)
    with hooks.suspended() if hooks is not None and hooks.on_top() else contextlib.nullcontext(), _refuse(message):
        yield
