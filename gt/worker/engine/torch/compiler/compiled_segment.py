"""Compiled code of a segment: checks inputs, mends the layout of results, and changes all or nothing on its first call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import sub
from time import monotonic

import torch

from gt.ir.spec import Spec
from gt.worker.engine.base import CompilationSeconds, Misfit
from gt.worker.engine.torch.compiler.memory_overlap import disjoint
from gt.worker.engine.torch.dtypes import DTYPE, NAME, conform
from gt.worker.engine.torch.memory import laid_out

MAX_SNAPSHOT_BYTES = 64 << 20  # copied on the device for the first call; more is copied to the host


@dataclass(frozen=True, slots=True)
class InputSignature:
    """Shape, strides and dtype of each input, and which inputs share memory."""

    specs: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    # By input: the first one in the same memory, and its offset if they share it; from that of the first if they are `apart`
    alike: tuple[tuple[int, int], ...]

    def reduced(self, written: frozenset[int]) -> InputSignature:
        """The same without that sharing of memory which does not matter."""
        # Aliasing among inputs that nobody writes changes no result; without it equal layers have equal signatures. So have
        # steps of a loop that writes its results into one buffer, if offsets count from one of these.
        firsts = {self.alike[n][0] for n in written}
        apart = {first for first in firsts if self.apart(first)}
        rows = []
        for n, (first, offset) in enumerate(self.alike):
            rows.append((n, 0) if first not in firsts else (first, offset - (first in apart and self.alike[first][1])))
        return InputSignature(self.specs, tuple(rows))

    def sharing(self, first: int) -> list[int]:
        """The inputs in the memory of one, which is the first of them."""
        return [n for n, (other, _) in enumerate(self.alike) if other == first]

    def apart(self, first: int) -> bool:
        """True if several inputs share memory, and no two of them an element: to a graph they are tensors as any others."""
        members = self.sharing(first)
        places = tuple((*self.specs[n][:2], self.alike[n][1]) for n in members)
        return len(members) > 1 and len({self.specs[n][2] for n in members}) == 1 and disjoint(places)


@dataclass(slots=True)
class Traced:
    """A segment's graph, and how outputs follow from its results.

    given: places of the inputs that the graph takes. changed: inputs that it writes to.
    outs: by output (True for a view of an input, number of the result or input, None or shape, strides and offset there).
    """

    graph: torch.fx.GraphModule
    fakes: list[torch.Tensor]
    given: list[int]
    outs: list[tuple[bool, int, tuple | None]]
    specs: list[Spec]
    changed: set[int]


class Code:
    """An engine.base.CompiledSegment."""

    def __init__(
        self, traced: Traced, run: Callable, signature: InputSignature, written: frozenset[int], key: Hashable
    ) -> None:
        self.key = key
        self.specs: Sequence[Spec] = traced.specs
        self.seconds = CompilationSeconds()
        # Only inputs that the traced graph really writes have to be restored after a failed first call.
        self._written = [place for place, n in enumerate(traced.given) if n in traced.changed]
        self.run, self.given, self.outs = run, traced.given, traced.outs
        self._shapes = [torch.Size(shape) for shape, _, _ in signature.specs]
        self._strides = [stride for _, stride, _ in signature.specs]
        self._dtypes = [dtype for _, _, dtype in signature.specs]
        self._alike = _Alike(signature, written) if written else None
        self._all = self.given == list(range(len(signature.specs)))
        self._mends: dict[int, Callable] | None = None  # by result that needs one; None before the first call
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
        # Called for each replay: the first call finds out which results need mending, later ones look only at those.
        results = self.run(*given) if self._mends is not None else self._first(given, inputs)
        if self._mends:
            results = list(results)
            for n, mend in self._mends.items():
                results[n] = mend(results[n])
        return self.named(inputs, results)

    @property
    def writes(self) -> bool:
        """True if a call that fails may leave inputs changed. The first call undoes its changes."""
        return bool(self._written) and self._mends is not None

    def _first(self, given: list[torch.Tensor], inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The first call, which finds kernels that do not load and results that do not fit. It changes all or nothing."""
        written = [given[place] for place in self._written]
        # Inductor finds some errors only when kernels load. After those the instructions must see the inputs from before.
        saved = _snapshot(written)
        start = monotonic()
        try:
            results = self.run(*given)
            self._mends = self._mend(results, inputs)
        except Exception:
            for tensor, before in zip(written, saved, strict=True):
                tensor.copy_(before)
            raise
        self.seconds.first_call = monotonic() - start
        return results

    def named(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs, as views of inputs and of results of the graph."""
        tensors = []
        for of_input, n, place in self.outs:
            base = inputs[n] if of_input else results[n]
            if place is not None:
                base = base.as_strided(place[0], place[1], base.storage_offset() + place[2])
            tensors.append(base)
        return tensors

    def _mend(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> dict[int, Callable]:
        """Functions that mend results, by place: those that share memory, as the ops' own would not, or have other strides."""
        # Memory that is taken already: a result in it would alias an input, or another result, where the ops made new memory.
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
    """Checks that written inputs share memory with the same inputs as in the signature."""

    def __init__(self, signature: InputSignature, written: frozenset[int]) -> None:
        self._sizes = [dtype.itemsize for _, _, dtype in signature.specs]
        apart = {signature.alike[n][0] for n in written}
        self._labels = [  # by input with elements: a label of its memory if that is written, else -1
            (n, first if first in apart else -1) for n, (first, _) in enumerate(signature.alike) if all(signature.specs[n][0])
        ]
        several = {first for first, _ in signature.alike if len(signature.sharing(first)) > 1}
        starts = {first: first if signature.apart(first) else None for first in several}  # the input from which offsets count
        rows = [(n, *row) for n, row in enumerate(signature.alike) if row[0] in several]
        self._several = [(n, first, starts[first], offset * self._sizes[n]) for n, first, offset in rows]

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        offsets = [offset * size for offset, size in zip(map(_OFFSET, inputs), self._sizes, strict=True)]
        # Storage addresses from data_ptr and offset: `untyped_storage()` would make an object for each input.
        bases = list(map(sub, map(_ADDRESS, inputs), offsets))
        owner: dict[int, int] = {}
        if any(owner.setdefault(bases[n], label) != label for n, label in self._labels):
            raise Misfit("which share memory")
        for n, first, start, offset in self._several:
            if bases[n] != bases[first] or offsets[n] != offset + (0 if start is None else offsets[start]):
                raise Misfit("offsets in shared memory")


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
    """Copies: on the tensors' own device if they are small, else on the host, so that they do not raise the device's peak."""
    small = sum(tensor.nbytes for tensor in tensors) <= MAX_SNAPSHOT_BYTES
    return [tensor.clone() if small else tensor.to("cpu", copy=True) for tensor in tensors]


def _conformed(spec: Spec) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda result: conform(result, spec)
