"""Several ops as one entry: the rows of a function of remote tensors, found once for each kind of operands.

The function runs once, under a mode that infers shapes and records nothing. From then on its rows are appended together, and no
Python object is made for a tensor between two of its ops.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gt.client import current_session
from gt.client.current_session import Current
from gt.client.device.meta import Meta
from gt.client.device.remote_tensor import Ref, RemoteTensor, Temporary, make, new_tensor
from gt.client.trace.dispatch import collect, new_entry
from gt.client.trace.op_info import CONST, ONE, Entry, info_of


class _NoSequence(Exception):
    """An op of the function does not give one new tensor, or is no plain row."""


class _Operand:
    """The place of a tensor in a sequence, in place of a reference: nothing on workers has its id."""

    __slots__ = ("home", "id", "meta", "pending", "slot")

    def __init__(self, meta: Meta, slot: int, valid: int) -> None:
        self.meta, self.slot, self.id = meta, slot, valid
        self.pending = self.home = 0


class _Inference(TorchDispatchMode):
    """Infers shapes of ops and notes their rows."""

    def __init__(self, valid: int) -> None:
        super().__init__()
        self.valid = valid  # an id that passes for one of this session
        self.rows: list[tuple[Entry, list[int]]] = []  # with the slots of operands
        self.operands = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports torch._dynamo at the first op, to exclude this method from compilation

    def operand(self, meta: Meta) -> RemoteTensor:
        self.operands += 1
        return make(meta, _Operand(meta, self.operands - 1, self.valid))  # type: ignore[arg-type]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        info, named = info_of(func), kwargs or {}
        if info.composite:
            with self:
                return func.decompose(*args, **named)
        if info.handler is not None:
            raise _NoSequence
        key: list = []  # as dispatch.call makes it
        ids: list = []
        values: list = []
        for kind, a in zip(info.kinds, args):
            self._collect(kind, a, key, ids, values)
        for name, a in named.items():
            key.append(name)
            self._collect(info.named[name], a, key, ids, values)
        refs: list[Any] = [a._ref for a in (*args, *named.values()) if type(a) is RemoteTensor]
        slots = [ref.slot for ref in refs]
        if values or len(ids) != len(slots):  # a scalar, or tensors in a list
            raise _NoSequence
        signature = tuple(key)
        entry = info.cache.get(signature) or new_entry(info, signature, args, named)
        if entry.mode != ONE:
            raise _NoSequence
        self.rows.append((entry, slots))
        return self.operand(entry.metas[0])

    @staticmethod
    def _collect(kind: int, a: Any, key: list, ids: list, values: list) -> None:
        if kind == CONST:
            key.append(a)
        else:
            collect(kind, a, key, ids, values)


class RowSequence:
    """The rows of a function: `record` appends them for other tensors of the same metas.

    A function's result is a tensor, or a tuple of tensors and None.
    """

    def __init__(self, rows: list[tuple[Entry, list[int]]], operands: int, results: list[int | None]) -> None:
        """results: slots. Slots are those of operands, then one for each row."""
        self._count = len(rows)
        self._numbers = tuple(entry.number for entry, _ in rows)
        self._made = sum(entry.made for entry, _ in rows)
        # Places in the table that `record` makes: (origin, operands, new ids, numbers of templates). Example: of the
        # function mm(t(w), x) with operands w, x the table is (origin, w, x, new0, new1, t, mm), and the rows t w,
        # mm new0 x are picked as [5, 0, 1, 3, 6, 0, 3, 2, 4]. One itemgetter copies them without a loop in Python
        picked: list[int] = []
        for row, (_, slots) in enumerate(rows):
            picked += [1 + operands + self._count + row, 0, *(1 + slot for slot in slots), 1 + operands + row]
        self._pick = itemgetter(*picked)
        made = {slot: rows[slot - operands][0] for slot in results if slot is not None}
        self._results = [None if slot is None else (slot - operands, made[slot]) for slot in results]
        kept = {slot - operands for slot in made}
        self._temporaries = [row for row in range(self._count) if row not in kept]

    def record(self, ids: tuple[int, ...]) -> list[RemoteTensor | None]:
        """Record the ops on tensors with these ids. Returns the results."""
        recorder = Current.recorder or current_session.current()
        origin, live, new_id = Current.origins.here(), recorder.live_tensors, recorder.new_id
        live.made += self._made
        if live.made > live.most and live.ended:
            recorder.free_ended(self._made)
        new = [new_id() for _ in self._numbers]
        recorder.ops += self._count
        code = recorder.code
        code.extend(self._pick((origin, *ids, *new, *self._numbers)))
        results: list[RemoteTensor | None] = []
        for result in self._results:
            if result is None:
                results.append(None)
                continue
            number, entry = result
            tensor = new_tensor(*entry.wrapper)
            tensor._ref = Ref(new[number], entry.metas[0], origin, live)
            results.append(tensor)
        live.ended.extend([Temporary(new[number]) for number in self._temporaries])  # after the rows that use them
        if len(code) > recorder.batch:
            recorder.end_batch()
        return results


def sequence_of(function: Callable[..., Any], metas: tuple[Meta | None, ...]) -> RowSequence | None:
    """The rows of a function of tensors, None where an operand is left out; None if one of its ops is no plain row.

    Raises errors of shapes and dtypes as those ops do.
    """
    recorder = current_session.current()
    # Twice at most: a table of templates that has just been cleared has room for one function
    for _ in range(2):
        mode, before = _Inference(recorder.first), recorder.cleared
        operands = [None if meta is None else mode.operand(meta) for meta in metas]
        count = mode.operands
        try:
            with mode, torch.no_grad():
                results = function(*operands)
        except _NoSequence:
            return None
        if recorder.cleared == before:  # else numbers of the first rows are those of other templates now
            break
    results = results if isinstance(results, tuple) else (results,)
    slots = [None if result is None else result._ref.slot for result in results]
    # A result that is an operand: there is no new id to give it
    if any(slot is not None and slot < count for slot in slots):
        return None
    return RowSequence(mode.rows, count, slots)
