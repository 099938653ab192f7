"""Origin of an op: the user's file and line, its signal group and micro-batch. A backward op has its forward op's.

A forward op's origin belongs to the autograd node of its output. It is kept when the output is first used as an input. During
backward it is that of the node that torch executes. Frames of torch and of this package are skipped.

The origin is kept by the node's sequence number, which torch counts in each thread: a node's own dictionary takes as long to
make as the op to record. It is used where several threads record, whose nodes have equal numbers.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch

from gt.client.groups.group_context import GroupStack, Scope, groups_of, stack

if TYPE_CHECKING:
    from gt.client.trace.recorder import Recorder

_OURS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    *(module.__file__ for module in (sys.modules.get("gt_autoload"),) if module is not None and module.__file__),
)
MAX_CODE_POSITIONS = 1 << 16  # with a known origin; then the table starts again
_node = torch._C._current_autograd_node
TAG = "gt.origin"  # key in a node's metadata
MAX_TAGGED_NODES = 1 << 18  # that are kept by their numbers; the oldest give way
ORIGIN_BITS = 22  # of a kept number, behind the node's
SEQUENCE_BITS = 63 - ORIGIN_BITS


def _inputs(node: Any) -> list:
    return [f for f, _ in node.next_functions if f is not None]


def _accumulates(node: Any) -> bool:
    """True for a node that accumulates a parameter's gradient. Its home has the micro-batch of the first use."""
    return hasattr(node, "variable")


class Origins:
    """Interned origins of one session."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._skipped: dict[int, bool] = {}
        self._codes: list[CodeType] = []  # kept alive, so that identities stay unique
        self._scopes: list[Scope] = []  # that hold positions in code whose origins are known
        self._positions = 0
        self._rows: dict[tuple[str, int, str, bool, int], int] = {}
        self._backward: dict[tuple[int, int | None], int] = {}
        self._same: dict[int, int] = {}  # of `_backward`, those of the same micro-batch
        self._micros: dict[int, int] = {}  # micro-batch of backward origins
        self._last = 0  # origin of the last backward op of another node than an AccumulateGrad
        self._forward: dict[int, tuple[str, int, str, int]] = {}  # number of a forward origin -> file, line, group, micro-batch
        self._places: dict[int, str] = {}
        self._tags = array("q", bytes(8 * MAX_TAGGED_NODES))  # by the node's sequence number, which is in front of the origin
        self._thread = 0  # whose nodes are in `_tags`
        self._in_nodes = False  # whether nodes have tags in their own dictionaries
        self._stands_for = 0  # a forward origin, whose ops are called again in a backward pass

    def here(self) -> int:
        """Origin of the op that the caller's caller records now."""
        return self.of_frame(sys._getframe(2))

    def of_frame(self, frame: FrameType) -> int:
        """Origin of the op that is recorded now. frame: the innermost frame that may be the user's."""
        # In a backward pass: the origin of the forward op whose node autograd executes
        node = _node()
        if node is not None and not stack.in_backward:
            number = self._back(self._stands_for, None) if self._stands_for else self._of_node(node)
            if number:
                return number
        scope = stack.scope() if (last := stack.recorded).changes else last
        if scope.owner is not self:
            self._own(scope)

        # Outward to the first frame of the user's. It is asked once per code object whether this is GT's or torch's. Each op
        # of a module passes five frames of torch's: the loop has no call but id
        user: Any = frame
        skipped = self._skipped
        while True:
            try:
                while skipped[id(code := user.f_code)]:
                    user = user.f_back
                break
            except KeyError:
                self._classify(code)
            except AttributeError:  # beyond the outermost frame
                return self._intern("<unknown>", 0, scope.group, scope.micro, False)

        # A position in code (f_lasti) has one line, whose search costs more than an op: the number is kept by position
        numbers = scope.numbers.setdefault(id(code), {})
        number = numbers.get(user.f_lasti, 0)
        if not number:
            number = numbers[user.f_lasti] = self._intern(code.co_filename, user.f_lineno, scope.group, scope.micro, False)
            self._positions += 1
            if self._positions > MAX_CODE_POSITIONS:
                self._forget_positions()
        return number

    @contextmanager
    def standing_for(self, number: int) -> Iterator[None]:
        """Ops that a backward pass calls meanwhile belong to this forward origin, not to that of the node."""
        before, self._stands_for = self._stands_for, number
        try:
            yield
        finally:
            self._stands_for = before

    def _own(self, scope: Scope) -> None:
        scope.numbers = {}  # first: another thread that sees the owner uses them
        scope.owner = self
        self._scopes.append(scope)

    def _forget_positions(self) -> None:
        self._positions = 0
        scopes, self._scopes = self._scopes, []
        for scope in scopes:
            # The next op of the scope finds no owner, and its table begins anew
            if scope.owner is self:
                scope.owner = None

    def where(self, number: int) -> str:
        """`file:line` of an origin; "" for an unknown one."""
        return self._places.get(number, "")

    def is_backward(self, number: int) -> bool:
        """True for the origin of an op of a backward pass."""
        return number in self._micros

    def text(self, number: int) -> str:
        """Line, group and micro-batch of an origin, for an error that compares two."""
        rows = list(self._rows.items())  # other threads add some meanwhile
        file, line, group, backward, micro = next((row for row, n in rows if n == number), ("", 0, "", False, -1))
        parts = [f"at {file}:{line}", f"in group {groups_of(group, backward)}" if group else "in no group"]
        parts += ["in the backward pass"] * backward + [f"in micro-batch {micro}"] * (micro >= 0)
        return " ".join(parts)

    def tag(self, node: Any, number: int) -> None:
        """Keep the origin of a forward op for its autograd node; this place if the number is not positive."""
        if number <= 0:
            number = self.here()
        sequence = node._sequence_nr()  # the largest of 64 bits for a node that raises, as of an op without a derivative
        if GroupStack.threads > 1 or number >> ORIGIN_BITS or sequence >> SEQUENCE_BITS:
            self._in_nodes = True
            node.metadata[TAG] = number
        else:
            self._tags[sequence % MAX_TAGGED_NODES] = sequence << ORIGIN_BITS | number
            self._thread = stack.thread

    def _tag(self, node: Any) -> int:
        """Origin that is kept for a node, 0 for none."""
        number = node.metadata.get(TAG, 0) if self._in_nodes else 0
        # Another thread's nodes have the numbers of those that were tagged while one thread recorded
        if not number and (GroupStack.threads == 1 or stack.thread == self._thread):
            sequence = node._sequence_nr()
            kept = self._tags[sequence % MAX_TAGGED_NODES]
            if kept >> ORIGIN_BITS == sequence:
                number = kept & (1 << ORIGIN_BITS) - 1
        return number

    def _tag_of(self, node: Any) -> int:
        """Origin of a node, or the home of an AccumulateGrad node's parameter; 0 for none."""
        ref = getattr(getattr(node, "variable", None), "_ref", None)
        return self._tag(node) if ref is None else max(ref.home, 0)

    def _of_node(self, node: Any) -> int:
        """Origin of a backward op, 0 if its node is not marked."""
        number = self._tag(node)
        if number:  # so it accumulates no gradient: those nodes are not marked
            self._last = self._same.get(number) or self._back(number, None)
            return self._last
        number = self._tag_of(node)
        if not number:  # a root of this backward pass, whose output no op used: it takes the origin of its inputs
            # Nodes of ops before parameters: a parameter's home has the micro-batch of its first use alone
            number = next((n for n in map(self._tag_of, sorted(_inputs(node), key=_accumulates)) if n), 0)
            if not number:
                return 0
            self.tag(node, number)
        if _accumulates(node):  # its parameter's home has one micro-batch of many
            return self._back(number, stack.micro if stack.micro >= 0 else self._micros.get(self._last, -1))
        self._last = self._back(number, None)
        return self._last

    def _back(self, number: int, micro: int | None) -> int:
        """Backward origin of a forward origin. micro: another micro-batch; None for the same."""
        key = (number, micro)
        back = self._backward.get(key)
        if back is None:
            where = self._forward.get(number)
            if where is None:  # already a backward origin
                return number
            back = self._intern(*where[:3], where[3] if micro is None else micro, True)
            self._micros[back] = where[3] if micro is None else micro
            if micro is None:
                self._same[number] = back
            self._backward[key] = back  # last: another thread that finds it here needs the others
        return back

    def _classify(self, code: CodeType) -> None:
        skip = code.co_filename.startswith(_OURS) or code.co_filename.startswith("<frozen")
        self._skipped[id(code)] = skip
        self._codes.append(code)

    def _intern(self, file: str, line: int, group: str, micro: int, backward: bool) -> int:
        key = (file, line, group, backward, micro)
        number = self._rows.get(key)
        if number is None:
            number = self._recorder.new_origin(file, line, groups_of(group, backward), backward, micro)
            self._places[number] = f"{file}:{line}" if line else ""
            if not backward:
                self._forward[number] = (file, line, group, micro)
            self._rows[key] = number  # last: another thread that finds it here needs the others
        return number
