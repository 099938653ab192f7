"""The signal group and micro-batch that this thread works on, and the context that enters a group.

Contexts nest and the innermost wins. The config says what a name means; nothing here knows it, and nothing here records ops.
"""

from __future__ import annotations

import itertools
import threading
from _thread import LockType, allocate_lock
from collections.abc import Callable
from contextlib import ContextDecorator
from copy import copy
from typing import Any, ClassVar, overload

import torch

from gt.config.schema import MAX_FUSED_PARTS, MAX_NESTED_GROUPS, MAX_PATH_CHARACTERS, fault_of_name


class Scope:
    """One signal group in one micro-batch. Equal ones are one object.

    changes: another one may hold by the next op, without a call; false outside of all groups and micro-batches. owner,
    numbers: of the session whose ops are recorded, which keeps here what it knows of positions in code.
    """

    __slots__ = ("changes", "group", "micro", "numbers", "owner")

    def __init__(self, group: str, micro: int) -> None:
        self.group, self.micro = group, micro
        self.changes = bool(group) or micro >= 0
        self.owner: Any = None
        self.numbers: dict[int, dict[int, int]] = {}


_scopes: dict[tuple[str, int], Scope] = {}


_numbers = itertools.count(1)


class EnteredGroup:
    """A group that a thread has entered. It has been left once its lock is released, whether or not it is off the stack yet.

    path: such as "outer/inner". in_backward: it was entered inside a backward pass.
    """

    __slots__ = ("context", "in_backward", "lock", "path")

    def __init__(self, context: context | None, path: str, in_backward: bool, lock: LockType) -> None:
        self.context, self.path, self.in_backward, self.lock = context, path, in_backward, lock


class GroupStack(threading.local):
    """Signal groups that this thread has entered, and its micro-batch, -1 for none."""

    threads: ClassVar[int] = 0  # that have recorded ops so far

    def __init__(self) -> None:
        GroupStack.threads = self.thread = next(_numbers)
        self.entries = [EnteredGroup(None, "", False, _held())]  # the innermost last
        self.micro = -1
        self.offered: tuple[context | None, LockType] = None, self.entries[0].lock  # see `_Exit`
        self.recorded = self.scope()

    @property
    def in_backward(self) -> bool:
        """True if the innermost group was entered inside a backward pass."""
        self.scope()
        return self.entries[-1].in_backward

    def scope(self) -> Scope:
        """The scope of the next op. `recorded` is the last one, which holds unless it `changes`."""
        entries = self.entries
        # Groups inside of one that was left end with it, as one that a suspended generator has entered
        for place, entry in enumerate(entries):
            if not entry.lock.locked():
                del entries[place:]
                break
        key = entries[-1].path, self.micro
        self.recorded = _scopes.get(key) or _scopes.setdefault(key, Scope(*key))
        return self.recorded

    def place_of(self, entered: context) -> int:
        """The number of entries outside of a context's last one, 0 if it is not entered."""
        for place in range(len(self.entries) - 1, 0, -1):
            if self.entries[place].context is entered:
                return place
        return 0

    def leave(self, depth: int) -> None:
        """Leave the groups beyond the first `depth` entries."""
        del self.entries[depth:]
        self.scope()


def _held() -> LockType:
    lock = allocate_lock()
    lock.acquire()
    return lock


class _Exit:
    """`__exit__` of contexts. For a `with` it is the `__exit__` of a lock, which the statement looks up before it enters.

    That is C, where no signal is handled. A function in Python may raise KeyboardInterrupt before its first statement, and
    the group would stay entered for good.
    """

    @overload
    def __get__(self, entered: None, owner: type) -> Callable[..., None]: ...
    @overload
    def __get__(self, entered: context, owner: type) -> Callable[..., None]: ...
    def __get__(self, entered: context | None, owner: type) -> Callable[..., None]:
        if entered is None:  # contextlib.ExitStack looks it up so
            return context.leave
        # Called by name, or by a `with` of a context that is within itself: the outer one has a lock
        if stack.place_of(entered):
            return entered.leave
        lock = _held()
        stack.offered = entered, lock  # for the __enter__ that follows
        return lock.__exit__


stack = GroupStack()
MAX_SHOWN_CHARACTERS = 80  # characters of a name in an error
# Example: context("a", backward="b") inside of context("outer") has the path
# "outer/a\x1fb": forward ops are in "outer/a", the backward ops in "outer/b"
BACKWARD = "\x1f"  # in a path, between a group's name and that of the group of its backward ops


def groups_of(path: str, backward: bool) -> str:
    """The path as the dispatcher reads it, of forward or of backward ops."""
    if BACKWARD not in path:
        return path
    return "/".join(step.partition(BACKWARD)[2 if backward and BACKWARD in step else 0] for step in path.split("/"))


class context(ContextDecorator):
    """Ops inside run in a signal group: `with gt.signal.context("pp_stage0"):`, or the same as a decorator of a function.

    name: the group's name in the config. parts: number of weights that are fused in one there, such as 3 for q, k and v; with
    1 the planner finds it from their split. backward: name of the group of the ops that differentiate the ops inside; by
    default the config's. Contexts nest, and the innermost decides. TypeError for a name that is no non-empty string,
    ValueError for one that no group can have, and for too many contexts within one another.
    """

    def __init__(self, name: str, parts: int = 1, backward: str | None = None) -> None:
        for given in (name,) if backward is None else (name, backward):
            if not isinstance(given, str) or not given:
                raise TypeError(f"a signal group is a non-empty string, got {given!r}")
            if fault := fault_of_name(given):
                raise ValueError(f"the signal group {given[:MAX_SHOWN_CHARACTERS]!a} {fault}")
        if type(parts) is not int or not 1 <= parts <= MAX_FUSED_PARTS:
            raise ValueError(f"parts is {parts!r:.40}, want a whole number from 1 to {MAX_FUSED_PARTS}")
        forward = f"{name}#{parts}" if parts > 1 else name  # as the dispatcher reads it
        self.name = forward if backward is None else forward + BACKWARD + backward

    def __enter__(self) -> context:
        path = self._path(stack.scope().group)
        whose, lock = stack.offered
        stack.offered = None, lock
        # A group that is entered in a backward pass, as checkpointing computes a module again, is of
        # the ops inside. Outside of such a group, ops of a backward pass take their forward op's origin
        entry = EnteredGroup(self, path, torch._C._current_autograd_node() is not None, lock if whose is self else _held())
        try:
            stack.entries.append(entry)
            stack.scope()
        except BaseException:  # Ctrl-C, after which nothing would leave the group
            entry.lock.release()
            raise
        return self

    __exit__ = _Exit()

    def leave(self, *error: Any) -> None:
        """Leave the group, and those inside. Does nothing where it is not entered, or was left with another."""
        stack.leave(stack.place_of(self) or len(stack.entries))

    def _recreate_cm(self) -> context:
        """The context of one call of a decorated function, which may call itself."""
        return copy(self)

    def _path(self, outer: str) -> str:
        """The path of this group within another. A function in a group may call itself, which is the same group once."""
        if not outer or outer == self.name or outer.endswith(f"/{self.name}"):
            return outer or self.name
        path = f"{outer}/{self.name}"
        if path.count("/") >= MAX_NESTED_GROUPS or len(path) > MAX_PATH_CHARACTERS:
            got = f"{path.count('/') + 1} signal groups of {len(path)} characters are within one another"
            raise ValueError(f"{got}, at most {MAX_NESTED_GROUPS} of {MAX_PATH_CHARACTERS} are taken: enter them one by one")
        return path
