"""Random numbers that a captured function draws on the CPU: to decide what it does, as in layer drop, or to upload them.

Python does not run in a replay. So a tape records the CPU ops from each draw to the values that Python reads or uploads. A
replay executes the tape first. Each value that Python has read is a guard: where one differs, the function itself runs. Each
value that it has uploaded is an input of the program, which a recorded call finds uploaded before it begins.

CPU tensors from before the call are followed like draws: small ones that it changes in place, such as a count of averaged
models, and those that it uploads.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gt.client.device.remote_tensor import RemoteTensor, make

DRAWN = "random numbers drawn on the CPU"
CHANGED = "values of CPU tensors from before the call"
OR_CHANGED = f"{DRAWN} or CPU tensors from before the call"
LEADS_ELSEWHERE = f"{OR_CHANGED} decide otherwise than in the recorded call"
UPLOADED = f"the function uploads {OR_CHANGED}: the next calls have them as inputs"
_COPY = torch.ops.aten._to_copy.default
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MAX_COMPARED = 1024  # elements of a CPU tensor that two recorded calls compare by value
_WITHOUT_CONTENT = (torch.Tensor, bool, str, torch.Size, torch.dtype, torch.device, torch.layout, tuple, type(None))


@dataclass(frozen=True, slots=True)
class _Result:
    """An operand: a result of an earlier op of the tape."""

    row: int
    output: int


@dataclass(slots=True)
class _Row:
    """One CPU op of the tape. reads, writes: addresses of the storages that it reads, and of those that it makes or writes."""

    op: Any
    args: tuple  # tensors of the tape are _Result, others are themselves
    kwargs: dict
    draws: bool
    reads: set[int]
    writes: set[int]
    value: Any  # the number that it gives, or None

    def operands(self) -> list:
        return tree_leaves((self.args, self.kwargs))

    def identity(self) -> tuple:
        """Return a value that is equal for two recorded calls whose rows agree."""
        return self.op, [(type(x), _content(x)) for x in self.operands()], repr(self.value)


def _content(operand: Any) -> Any:
    if not isinstance(operand, torch.Tensor):
        return operand
    return (operand.dtype, operand.tolist()) if operand.numel() <= _MAX_COMPARED else id(operand)


@dataclass
class HostDraws:
    """The tape of one recorded call, a context manager around it.

    inputs: remote tensors that have the values of its uploads, in order, as the call before predicts them. obstacle: why no
    replay can execute the tape, or "". values: what the last replay uploads.
    """

    inputs: list[RemoteTensor] = field(default_factory=list)
    predicted: list[torch.Tensor] = field(default_factory=list)  # values of `inputs`
    obstacle: str = ""
    rows: list[_Row] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    state: Sequence[torch.Tensor] = ()  # CPU tensors from before the call, which it changes in place or uploads

    def __post_init__(self) -> None:
        self._uploads: list[_Result] = []
        self._operands: list[torch.Tensor] = []  # of the op under way: they depend on a draw and are not uploaded yet
        self._made: dict[int, tuple[weakref.ref, _Result]] = {}  # id of a tensor -> itself, and its name on the tape
        self._storages: dict[int, StorageWeakRef] = {}  # made in the call: an address is not used again while this is held
        self._filled = 0  # uploads that were found among the inputs
        self._lasting = frozenset(map(_address, self.state))
        self._drawn: set[int] = set(self._lasting)  # addresses of storages whose content depends on a draw or on `state`
        self._modes = _Ops(self), _Functions(self)

    # ---- during the call

    def __enter__(self) -> HostDraws:
        self._before = self._now()
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        self._release()

    def refuse(self, what: str) -> None:
        """Note a reason for which the tape cannot stand for the function's own draws. The first one counts."""
        self.obstacle = self.obstacle or what

    @property
    def _followed(self) -> str:
        """The values that the tape follows, in words."""
        return DRAWN if any(row.draws for row in self.rows) or not self.state else CHANGED

    def depends(self, tensor: Any) -> bool:
        """Return whether the content of a tensor depends on a draw of this call."""
        return type(tensor) in _PLAIN and tensor.layout is torch.strided and _address(tensor) in self._drawn

    def begin(self, args: tuple, kwargs: dict | None) -> None:
        """An op is next. Its operands may be uploaded."""
        self._operands = [x for x in tree_leaves((args, kwargs)) if self.depends(x)]

    def upload(self, host: torch.Tensor) -> RemoteTensor | None:
        """Return the input that has the values of a tensor which the op under way uploads; None if it has to be uploaded."""
        operand = next((x for x in self._operands if _is_same_view(x, host)), None)
        if operand is None and len(self._operands) == 1 and self._operands[0].dtype != host.dtype:
            operand = self._operands[0]  # uploaded in another dtype
        name = self._name(operand)
        # Not on the tape: a value from before the call, or computed by other means. The caller uploads it as any other
        known = type(name) is _Result or any(name is tensor for tensor in self.state)
        if operand is None or not known or operand.shape != host.shape:
            if self.state and self._operands:
                self.refuse("the function uploads a part of a CPU tensor from before the call: keep it on the device")
            return None
        self._operands = [x for x in self._operands if x is not operand]
        # A copy on the tape, since the function may write to its tensor afterwards.
        self.rows.append(_Row(_COPY, (name,), {"dtype": host.dtype}, False, {_address(operand)}, set(), None))
        number = len(self._uploads)
        self._uploads.append(_Result(len(self.rows) - 1, 0))
        # The call before had fewer uploads: nothing is predicted for this one, so the call is no program, but the next may be
        if number >= len(self.inputs):
            return None
        predicted, tensor = self.predicted[number], self.inputs[number]
        if predicted.dtype != host.dtype or not torch.equal(predicted, host):
            return None
        self._filled += 1
        return make(tensor._ref.meta, tensor._ref)

    def note(self, op: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Append an op that was executed, if all its tensors are plain tensors of the CPU."""
        leaves = tree_leaves((args, kwargs))
        operands = [x for x in leaves if isinstance(x, torch.Tensor)]
        results = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        depends = any(map(self.depends, operands))
        if not all(type(t) in _PLAIN and t.is_cpu and t.layout is torch.strided for t in (*operands, *results)):
            if depends and self._operands:
                self.refuse(f"{op} reads {OR_CHANGED}: make them with device='remote', or pass them as an argument")
            return

        # The row: tensors that earlier rows made by their names, others themselves. A draw from a
        # generator of the user is no draw here: the generator is state, which the guard compares
        draws = torch.Tag.nondeterministic_seeded in op.tags and not any(isinstance(x, torch.Generator) for x in leaves)
        reads, writes = set(map(_address, operands)), set(map(_address, results))
        if op._schema.is_mutable:
            writes |= set(map(_address, _written(op, args, kwargs)))
        number = len(self.rows)
        value = None if results or result is None else result
        names, options = tree_map(self._name, (args, kwargs))
        self.rows.append(_Row(op, names, options, draws, reads, writes, value))

        # Names for the results. A result in the memory of an operand is a view, or was written in place
        before = set(reads)
        for output, tensor in enumerate(results):
            if isinstance(self._name(tensor), torch.Tensor):
                self._made[id(tensor)] = weakref.ref(tensor), _Result(number, output)
                if _address(tensor) not in before | self._lasting:
                    self._storages[_address(tensor)] = StorageWeakRef(tensor.untyped_storage())

        # Values that depend on a draw may be written only to memory that the call has made: the tape writes nothing else
        if draws or depends:
            if not writes <= self._storages.keys() | self._lasting:
                self.refuse(f"{op} writes {self._followed} into a tensor from before the call")
            self._drawn |= writes

    def _name(self, operand: Any) -> Any:
        """The operand's name on the tape, or the operand."""
        known = self._made.get(id(operand))
        return known[1] if known is not None and known[0]() is operand else operand

    def follows(self, host: torch.Tensor) -> bool:
        """Return whether this is memory from before the call that the tape changes as the function does."""
        return _address(host) in self._lasting

    # ---- after the call

    def _release(self) -> None:
        """Let go of operands of rows that do not count: temporary tensors of the call end, as they do without a tape."""
        self._operands = []
        counting = self._counting()
        for number, row in enumerate(self.rows):
            if number not in counting:
                row.args, row.kwargs = (), {}

    def _counting(self) -> set[int]:
        """Numbers of the rows that a replay needs."""
        # Backward from the rows that count: draws, values that Python has read, uploads. A
        # row stays if it writes memory that a later row needs, or makes an operand of one
        needed, makers = set(self._drawn), {name.row for name in self._uploads}
        for number, row in reversed(list(enumerate(self.rows))):
            row.value = row.value if row.reads & self._drawn else None
            if row.draws or row.writes & needed or row.value is not None or number in makers:
                makers |= {number, *[x.row for x in row.operands() if type(x) is _Result]}
                needed |= row.reads
        return makers

    def finish(self) -> None:
        """End the tape once the call's tensors are freed. It keeps draws, and what leads to values that Python has read."""
        self._operands = []
        uploaded = self._filled < len(self._uploads)  # the session may keep the memory of an upload, and the call is no program
        if not uploaded and any(
            not self._storages[address].expired() for address in self._drawn & self._storages.keys() - self._lasting
        ):
            self.refuse(f"the function keeps {self._followed}")

        # Number the rows that stay anew, in the results that they name too
        places = {number: place for place, number in enumerate(sorted(self._counting()))}
        self.rows = [self.rows[number] for number in places]
        for row in self.rows:
            row.args, row.kwargs = tree_map(
                lambda x: _Result(places[x.row], x.output) if type(x) is _Result else x, (row.args, row.kwargs)
            )
        self._uploads = [_Result(places[name.row], 0) for name in self._uploads]
        self.predicted = []
        self._made.clear()
        self._storages.clear()

        # A draw of which torch saw no op would be missing on the tape, and the generator would show it
        if not self.obstacle and not self._draws_all():
            self.refuse(f"the function draws {DRAWN}, or changes CPU tensors, by other means than ops of torch")

    def _draws_all(self) -> bool:
        """Return whether the tape, from the state before the call, leaves generator and tensors as the call has left them."""
        after = self._now()
        self._restore(self._before)
        try:
            return self._agrees() and all(map(_same_bits, self._now(), after))
        finally:
            self._restore(after)

    def _now(self) -> list[torch.Tensor]:
        """Copies of the generator's state and of the tensors that the call changes."""
        return [torch.get_rng_state(), *(tensor.detach().clone() for tensor in self.state)]

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Inside, `violation` may draw; afterwards nothing is drawn."""
        before = self._now()
        try:
            yield
        finally:
            self._restore(before)

    @torch.no_grad()
    def _restore(self, then: list[torch.Tensor]) -> None:
        torch.set_rng_state(then[0])
        for tensor, value in zip(self.state, then[1:], strict=True):
            if not _same_bits(tensor, value):
                tensor.copy_(value)

    @property
    def fills_inputs(self) -> bool:
        """True if each upload of the call was one of the inputs, in order, so that a replay can fill them."""
        return self._filled == len(self._uploads) == len(self.inputs)

    @property
    def uploads(self) -> int:
        """Number of uploads of drawn values."""
        return len(self._uploads)

    def identity(self) -> tuple:
        """Return a value that is equal for two recorded calls whose tapes agree."""
        return [row.identity() for row in self.rows], self._uploads

    def prediction(self) -> list[torch.Tensor]:
        """Return the values that the next call would upload, as far as it does the same. Draws nothing."""
        before = self._now()
        try:
            return self.values if self._agrees() else []
        finally:
            self._restore(before)

    # ---- before a replay

    def violation(self) -> str:
        """Draw as the function would. Returns "", or why a replay would do something else; nothing is drawn then."""
        before = self._now()
        if self._agrees():
            return ""
        self._restore(before)
        return LEADS_ELSEWHERE

    @torch.no_grad()
    def _agrees(self) -> bool:
        """Execute the tape. Returns False at the first value that is not the recorded call's."""
        results: list[Any] = []

        def resolved(x: Any) -> Any:
            return results[x.row][x.output] if type(x) is _Result else x

        for row in self.rows:
            args = [tree_map(resolved, x) if type(x) is list else resolved(x) for x in row.args]
            kwargs = {key: resolved(x) for key, x in row.kwargs.items()} if row.kwargs else {}
            result = row.op(*args, **kwargs)
            # A value that is not equal to itself is NaN, and one NaN is like another
            if row.value is not None and result != row.value and (result == result or row.value == row.value):
                return False
            results.append(result if isinstance(result, (tuple, list)) else (result,))
        self.values = [results[name.row][0] for name in self._uploads]
        return True


def _written(op: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors among an op's arguments that it writes."""
    rows = op._schema.arguments
    given = [*zip(rows, args), *((row, kwargs[row.name]) for row in rows[len(args) :] if row.name in kwargs)]
    values = [value for row, value in given if row.alias_info is not None and row.alias_info.is_write]
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def _is_same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True for equal content. One NaN is like another."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a.detach(), b, rtol=0, atol=0, equal_nan=True)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Ops(TorchDispatchMode):
    """Hands each op of the call to the tape."""

    def __init__(self, tape: HostDraws) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._tape.begin(args, kwargs)
        result = func(*args, **(kwargs or {}))
        self._tape.note(func, args, kwargs or {}, result)
        return result


class _Functions(TorchFunctionMode):
    """Refuses functions that hand out the content of drawn tensors with no op, such as tolist and numpy."""

    def __init__(self, tape: HostDraws) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        noted = len(self._tape.rows)
        result = func(*args, **(kwargs or {}))
        # Python then has values of which the tape knows no guard
        if any(map(self._tape.depends, args)) and _hands_out(func, result, len(self._tape.rows) > noted):
            self._tape.refuse(f"{resolve_name(func) or func} reads {self._tape._followed}")
        return result


def _hands_out(func: Any, result: Any, noted: bool) -> bool:
    """Return whether a function's result has the content of its tensors. noted: the tape has an op of it."""
    if isinstance(result, _WITHOUT_CONTENT):
        return False
    if isinstance(result, list):
        return not all(isinstance(x, torch.Tensor) for x in result)
    if isinstance(result, (int, float, complex)):  # item() has an op, numel() has no content
        return not noted and (not isinstance(result, int) or func is torch.Tensor.data_ptr)
    return True
