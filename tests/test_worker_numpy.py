"""The numpy engine against torch: every ATen call of many programs once more on arrays, then training through workers."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_worker_engine import PROGRAMS, ThroughEngine
from torch import nn
from worker_parts import new, op

from gt.errors import UnsupportedOp
from gt.ir.spec import Spec
from gt.ir.template import T, V
from gt.worker.engine.numpy import NumpyEngine, arrays
from gt.worker.engine.numpy.table import TABLE, supported
from gt.worker.engine.torch import NAME

ENGINE = NumpyEngine()
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.complex64: 2e-5, torch.complex128: 1e-9}
SKIP = ("empty", "lift_fresh", "_local_scalar_dense", "is_same_size", "allclose", "equal", "set_", "resize")


class Arrays:
    """Tensors of one call as arrays; those that share a storage share it here too."""

    def __init__(self) -> None:
        self._storages: dict[int, np.ndarray] = {}

    def __getitem__(self, x: torch.Tensor) -> np.ndarray:
        storage = x.untyped_storage()
        key = storage.data_ptr() or id(storage)
        if key not in self._storages:
            whole = torch.empty(0, dtype=x.dtype).set_(storage, 0, (storage.nbytes() // x.element_size(),))  # type: ignore[call-overload]
            self._storages[key] = whole.numpy().copy()
        found = self._storages[key]
        kind = arrays.DTYPE[NAME[x.dtype]]
        return arrays.strided(
            found.view(kind), x.shape, x.stride() if x.numel() else (0,) * x.dim(), x.storage_offset() * bool(x.numel())
        )


def flat(tree: Any) -> list:
    return [x for part in tree for x in flat(part)] if isinstance(tree, (list, tuple)) else [tree]


def close(got: np.ndarray, want: torch.Tensor, what: str, strides: bool = True) -> None:
    assert got.dtype == arrays.DTYPE[NAME[want.dtype]], what
    limit = TOLERANCE.get(want.dtype, 0)
    torch.testing.assert_close(
        torch.from_numpy(np.array(got)), want, rtol=limit, atol=limit, equal_nan=True, check_stride=False,
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip
    if strides and want.numel():
        steps = [step // got.itemsize for n, step in zip(got.shape, got.strides) if n > 1]
        assert steps == [step for n, step in zip(want.shape, want.stride()) if n > 1], what


class Twice(ThroughEngine):
    """Does every ATen call once more with the numpy engine: values, strides, what is written, what is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.lacking: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = f"aten.{func._schema.name.split('::')[1]}.{func._overloadname}"
        tensors: list[torch.Tensor] = []
        values: list[Any] = []
        forms = [self.form(a, tensors, values) for a in args]
        named = {k: self.form(v, tensors, values) for k, v in kwargs.items() if v is not None}
        if (
            func.namespace != "aten"
            or torch.Tag.nondeterministic_seeded in func.tags
            or name.startswith(tuple(f"aten.{s}" for s in SKIP))
        ):
            return func(*args, **kwargs)
        memory = Arrays()
        try:
            given = [memory[t] for t in tensors]
        except KeyError:  # a dtype that NumPy lacks
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        returns = flat(result) if func._schema.returns else []
        outs = [self.out(func, r, tensors) for r in returns]
        try:
            with ENGINE.guard():
                made = ENGINE.bind(op(name, forms, len(tensors), outs, len(values), **named))(*given, *values)
        except UnsupportedOp:
            self.lacking.add(name)
            return result
        self.seen.add(name)
        self.compare(name, made, returns, outs, given, tensors)
        return result

    @staticmethod
    def out(func: Any, result: Any, tensors: list[torch.Tensor]) -> list:
        if not isinstance(result, torch.Tensor):
            return ["none", None, -1]
        if func._schema.is_mutable:
            return ["same", None, 0]
        if any(r.alias_info for r in func._schema.returns):
            return ["view", None, 0]
        return new(result)

    @staticmethod
    def compare(name: str, made: Any, returns: list, outs: list, given: list, tensors: list) -> None:
        kept = [(r, o) for r, o in zip(returns, outs, strict=True) if o[0] in ("new", "view")]
        for (want, out), got in zip(kept, flat(made) if kept else [], strict=True):
            close(got, want, name)
            if out[0] == "view" and want.numel():
                assert any(arrays.owner(got) is arrays.owner(g) for g in given), name
                if want.dtype == tensors[0].dtype:
                    assert arrays.offset(got) == want.storage_offset(), name
        for array, tensor in zip(given, tensors, strict=True):
            close(array, tensor, f"{name}, operand")


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    with torch.no_grad(), Twice() as mode:
        PROGRAMS[name]()
    print(sorted(mode.lacking))
    assert mode.seen or name == "images"
