"""The signal group and micro-batch that this thread works on, and the context that enters a group.

Contexts nest and the innermost wins. The config says what a name means; nothing here knows it, and nothing here records ops.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import ContextDecorator
from typing import Any, ClassVar

import torch

from gt.config.schema import MAX_FUSED_PARTS, MAX_NESTED_GROUPS, MAX_PATH_CHARACTERS, fault_of_name


class Scope:
    """One signal group in one micro-batch. Equal ones are one object.

    owner, numbers: of the session whose ops are recorded, which keeps here what it knows of positions in code.
    """

    __slots__ = ("group", "micro", "numbers", "owner")

    def __init__(self, group: str, micro: int) -> None:
        self.group, self.micro = group, micro
        self.owner: Any = None
        self.numbers: dict[int, dict[int, int]] = {}


_scopes: dict[tuple[str, int], Scope] = {}


_numbers = itertools.count(1)


class GroupStack(threading.local):
    """Signal groups that this thread has entered, and its micro-batch."""

    threads: ClassVar[int] = 0  # that have recorded ops so far

    def __init__(self) -> None:
        GroupStack.threads = self.thread = next(_numbers)
        self.names: list[str] = [""]  # paths such as "outer/inner", the innermost last
        self.contexts: list[context | None] = [None]  # the context that entered each
        self.in_backward: list[bool] = [False]  # True for each that was entered inside a backward pass
        self._micro = -1
        self.change_scope()

    @property
    def micro(self) -> int:
        """Number of the current micro-batch, -1 for none."""
        return self._micro

    @micro.setter
    def micro(self, number: int) -> None:
        self._micro = number
        self.change_scope()

    def change_scope(self) -> None:
        """Set `scope` after a change of the group or micro-batch."""
        key = self.names[-1], self._micro
        self.scope = _scopes.get(key) or _scopes.setdefault(key, Scope(*key))

    def place_of(self, entered: context) -> int:
        """The number of names outside of a context. Those inside are left with it: Ctrl-C may have kept one from its exit."""
        contexts = self.contexts
        return next((place for place in range(len(contexts) - 1, 0, -1) if contexts[place] is entered), len(contexts))

    def leave(self, depth: int) -> None:
        """Leave the groups beyond the first `depth` names. A second call, after Ctrl-C in the first, leaves no others."""
        del self.names[depth:], self.contexts[depth:], self.in_backward[depth:]
        self.change_scope()


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
        depth = len(stack.names)
        path = self._path(stack.names[-1])
        try:
            # A group that is entered in a backward pass, as checkpointing computes a module again, is of
            # the ops inside. Outside of such a group, ops of a backward pass take their forward op's origin
            stack.in_backward.append(torch._C._current_autograd_node() is not None)
            stack.contexts.append(self)
            stack.names.append(path)
            stack.change_scope()
        except BaseException:  # Ctrl-C, after which nothing would leave the group
            stack.leave(depth)
            raise
        return self

    def _path(self, outer: str) -> str:
        """The path of this group within another. A function in a group may call itself, which is the same group once."""
        if not outer or outer == self.name or outer.endswith(f"/{self.name}"):
            return outer or self.name
        path = f"{outer}/{self.name}"
        if path.count("/") >= MAX_NESTED_GROUPS or len(path) > MAX_PATH_CHARACTERS:
            got = f"{path.count('/') + 1} signal groups of {len(path)} characters are within one another"
            raise ValueError(f"{got}, at most {MAX_NESTED_GROUPS} of {MAX_PATH_CHARACTERS} are taken: enter them one by one")
        return path

    def __exit__(self, *error: Any) -> None:
        outside = 0
        try:
            outside = stack.place_of(self)
            stack.leave(outside)
        except BaseException:
            stack.leave(outside or stack.place_of(self))
            raise
