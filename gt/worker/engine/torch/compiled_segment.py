"""The compiled code of a segment: its inputs, what its results have to be, a first call that changes all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import sub

import torch

from gt.ir.spec import Spec
from gt.worker.engine.base import Misfit
from gt.worker.engine.torch.dtypes import DTYPE, NAME, conform
from gt.worker.engine.torch.memory import laid_out

SNAPSHOT = 64 << 20  # bytes on the device that may be copied there while code is tried


@dataclass(frozen=True, slots=True)
class InputPattern:
    """Inputs: shape, strides and dtype of each, and which share memory."""

    specs: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    alike: tuple[tuple[int, int], ...]  # of each: the first input in the same memory, and its offset if there are several

    def where(self, written: frozenset[int]) -> InputPattern:
        """Without what does not matter: only of memory that is written it does who shares it."""
        firsts = {self.alike[n][0] for n in written}
        return InputPattern(self.specs, tuple(row if row[0] in firsts else (n, 0) for n, row in enumerate(self.alike)))


@dataclass(slots=True)
class Traced:
    """A segment's graph and what to do around it. given: places of the inputs that it takes.

    outs: of each output (whether of an input, which result or input, None or its shape, strides and offset there).
    changed: inputs that it writes to.
    """

    graph: torch.fx.GraphModule
    fakes: list[torch.Tensor]
    given: list[int]
    outs: list[tuple[bool, int, tuple | None]]
    specs: list[Spec]
    changed: set[int]


class Code:
    """An engine.base.Compiled."""

    def __init__(self, traced: Traced, run: Callable, seen: InputPattern, written: frozenset[int], key: Hashable) -> None:
        self.key = key
        self.specs: Sequence[Spec] = traced.specs
        self._written = [place for place, n in enumerate(traced.given) if n in traced.changed]
        self.run, self.given, self.outs = run, traced.given, traced.outs
        self._shapes = [torch.Size(shape) for shape, _, _ in seen.specs]
        self._strides = [stride for _, stride, _ in seen.specs]
        self._dtypes = [dtype for _, _, dtype in seen.specs]
        self._alike = _Alike(seen, written) if written else None
        self._all = self.given == list(range(len(seen.specs)))
        self._mends: dict[int, Callable] | None = None  # of results that are not as they have to be; None before the first
        self._wanted = [(torch.Size(meta.shape), meta.stride(), meta.dtype) for meta in _metas(traced.graph)]

    def check(self, inputs: list[torch.Tensor]) -> None:
        if list(map(_SHAPE, inputs)) != self._shapes or list(map(_STRIDE, inputs)) != self._strides:
            raise Misfit("shapes or strides")
        if [t.dtype for t in inputs] != self._dtypes:
            raise Misfit("dtypes")
        if self._alike is not None:
            self._alike.check(inputs)

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.check(inputs)
        given = inputs if self._all else [inputs[i] for i in self.given]
        results = self.run(*given) if self._mends is not None else self._first(given, inputs)
        if self._mends:
            results = list(results)
            for n, mend in self._mends.items():
                results[n] = mend(results[n])
        return self.named(inputs, results)

    @property
    def writes(self) -> bool:
        """True if a call that fails may leave behind what it has changed: the first one undoes that."""
        return bool(self._written) and self._mends is not None

    def _first(self, given: list[torch.Tensor], inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The first call. Kernels that do not load and results that do not fit show here, so it changes all or nothing."""
        written = [given[place] for place in self._written]
        saved = _snapshot(written)
        try:
            results = self.run(*given)
            self._mends = self._mend(results, inputs)
        except Exception:
            for tensor, before in zip(written, saved, strict=True):
                tensor.copy_(before)
            raise
        return results

    def named(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs, of inputs and what the graph returned."""
        made = []
        for of_input, n, place in self.outs:
            base = inputs[n] if of_input else results[n]
            if place is not None:
                base = base.as_strided(place[0], place[1], base.storage_offset() + place[2])
            made.append(base)
        return made

    def _mend(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> dict[int, Callable]:
        """Functions that mend results, by place: those that share memory, which the ops' own would not, or lie otherwise."""
        held = {t.untyped_storage().data_ptr() for t in inputs if t.numel()}
        mends: dict[int, Callable] = {}
        for n, (result, (shape, stride, dtype)) in enumerate(zip(results, self._wanted, strict=True)):
            alike = result.shape == shape
            # Inductor returns the sums of a mix-order reduction (torch 2.11) without their dims of size one.
            if result.dtype != dtype or not (alike or (result.numel() == shape.numel() and result.is_contiguous())):
                raise ValueError(f"the result is {NAME[result.dtype]}{list(result.shape)}, want {NAME[dtype]}{list(shape)}")
            memory = result.untyped_storage().data_ptr()
            spec = Spec(tuple(shape), tuple(stride), 0, NAME[dtype])
            if not alike:
                mends[n] = _viewed(shape, _copied(spec) if memory in held or result.storage_offset() else _conformed(spec))
            elif result.numel() and (memory in held or result.storage_offset()):
                mends[n] = _copied(spec)
            elif conform(result, spec) is not result:
                mends[n] = _conformed(spec)
            held.add(memory)
        return mends


_SHAPE, _STRIDE, _OFFSET, _ADDRESS = torch.Tensor.size, torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.data_ptr


class _Alike:
    """True for inputs that share memory as those did that were seen: what is written lies apart, or with the same as then."""

    def __init__(self, seen: InputPattern, written: frozenset[int]) -> None:
        self._sizes = [dtype.itemsize for _, _, dtype in seen.specs]
        apart = {seen.alike[n][0] for n in written}
        self._labels = [  # of inputs that have elements: the memory if it is written, else -1
            (n, first if first in apart else -1) for n, (first, _) in enumerate(seen.alike) if all(seen.specs[n][0])
        ]
        firsts = [first for first, _ in seen.alike]
        self._several = [
            (n, first, offset * self._sizes[n]) for n, (first, offset) in enumerate(seen.alike) if firsts.count(first) > 1
        ]

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        offsets = [offset * size for offset, size in zip(map(_OFFSET, inputs), self._sizes, strict=True)]
        bases = list(map(sub, map(_ADDRESS, inputs), offsets))
        owner: dict[int, int] = {}
        if any(owner.setdefault(bases[n], label) != label for n, label in self._labels):
            raise Misfit("which share memory")
        if any(bases[n] != bases[first] or offsets[n] != offset for n, first, offset in self._several):
            raise Misfit("where in shared memory they lie")


def _metas(graph: torch.fx.GraphModule) -> list[torch.Tensor]:
    (returned,) = next(node for node in graph.graph.nodes if node.op == "output").args
    return [node.meta["val"] for node in returned]


def _copied(spec: Spec) -> Callable[[torch.Tensor], torch.Tensor]:
    def copy(result: torch.Tensor) -> torch.Tensor:
        return laid_out(spec.shape, spec.stride, DTYPE[spec.dtype], result.device).copy_(result)

    return copy


def _viewed(shape: torch.Size, mend: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda result: mend(result.view(shape))


def _snapshot(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies: on the tensors' own device where they are small, else on the host, so that they raise no peak of its memory."""
    small = sum(tensor.nbytes for tensor in tensors) <= SNAPSHOT
    return [tensor.clone() if small else tensor.to("cpu", copy=True) for tensor in tensors]


def _conformed(spec: Spec) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda result: conform(result, spec)
