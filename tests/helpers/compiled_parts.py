"""Programs written by hand, and random ones, for tests of compiled segments: executed as instructions and compiled."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import Any

import torch

from gt.ir.instr import FREE, Define
from gt.ir.template import T, V
from gt.worker.engine.torch import NAME
from tests.helpers.worker_parts import Bench, op

SIDE = 4


class Script:
    """A program's instructions as they are appended; each op is also executed here, so that its outputs are known."""

    def __init__(self, inputs: dict[int, torch.Tensor]) -> None:
        self.held = dict(inputs)
        self.defines: list[tuple[str, dict]] = []
        self.rows: list[tuple[int, list]] = []  # place of the definition (-1 for FREE), operands
        self.next = 1000

    def op(self, name: str, args: Sequence[Any], ids: Sequence[int], values: Sequence[float] = ()) -> list[int]:
        """One op; its outputs' ids, none for an op in place."""
        space, base, overload = name.split(".")
        given = [self.held[i] for i in ids]
        before = {t.untyped_storage().data_ptr(): n for n, t in enumerate(given)}
        made = getattr(getattr(getattr(torch.ops, space), base), overload)(*_filled(args, given, values))
        flat = [] if made is None else list(made) if isinstance(made, (list, tuple)) else [made]
        outs, new = [], []
        for out in flat:
            spec = [list(out.shape), list(out.stride()), out.storage_offset(), NAME[out.dtype]]
            if base.endswith("_"):
                outs.append(["same", None, 0])
                continue
            of = before.get(out.untyped_storage().data_ptr())
            outs.append(["new", [*spec[:2], 0, spec[3]], -1] if of is None else ["view", spec, of])
            self.next += 1
            new.append(self.next)
            self.held[self.next] = out
        payload = op(name, args, len(ids), outs, len(values))
        self._write("op", payload, [*ids, *values, *new])
        return new

    def alias(self, source: int, target: int) -> None:
        self.held[target] = self.held[source]
        self._write("alias", {}, [source, target])

    def free(self, *ids: int) -> None:
        for i in ids:
            self.held.pop(i, None)
        self.rows.append((-1, [len(ids), *ids]))

    def stop(self) -> None:
        """Append an instruction that cannot be compiled, which ends a segment."""
        self._write("fill", {"shape": [1], "stride": [1], "dtype": "float32"}, [999])

    def shard(self, source: int, boxes: list) -> int:
        """A copy of the first dim's parts of a tensor."""
        self.next += 1
        made = torch.cat([self.held[source][tuple(slice(*span) for span in box)] for box in boxes])
        self.held[self.next] = made.contiguous()
        self._write("shard", {"shape": list(made.shape), "dtype": NAME[made.dtype], "boxes": boxes}, [source, self.next])
        return self.next

    def copy(self, source: int) -> int:
        """Append a `merge` whose only part is local: a copy."""
        self.next += 1
        held = self.held[source]
        self.held[self.next] = held.clone()
        box = [[0, size] for size in held.shape]
        payload = {"shape": list(held.shape), "dtype": NAME[held.dtype], "parts": [], "local": [[box, box]]}
        self._write("merge", payload, [source, self.next])
        return self.next

    def send(self, i: int, channel: dict) -> None:
        self._write("send", {"channel": channel, "boxes": [[[0, size] for size in self.held[i].shape]]}, [i])

    def _write(self, kind: str, payload: dict, operands: list) -> None:
        if (kind, payload) not in self.defines:
            self.defines.append((kind, payload))
        self.rows.append((self.defines.index((kind, payload)), operands))

    def bench(
        self,
        backend: str,
        inputs: dict[int, torch.Tensor],
        engine: Any = None,
        actions: Sequence[tuple[int, str]] = (),
        plane: Any = None,
        channels: Sequence[list] = (),
        once: bool = False,
    ) -> Bench:
        """An executor that knows the program; `replay` has it carry that out. actions: number of its first row, name."""
        bench = Bench(plane, engine)
        bench.executor.tensors.update(inputs)
        define = [Define(100 + n, kind, payload).wire() for n, (kind, payload) in enumerate(self.defines)]
        lasting = sorted(i for i in self.held if i > 1000)
        code: list = [FREE, 0, len(lasting), *lasting] if lasting else []
        starts, places = dict(actions), []
        for n, (place, operands) in enumerate(self.rows):
            if n in starts:
                places.append([len(code), starts[n]])
            code += [FREE if place < 0 else 100 + place, n, *operands]
        program = {"code": code, "randoms": [], "actions": places, "backend": backend, "channels": list(channels)}
        program["once"] = once
        bench.executor.define([*define, Define(99, "program", program).wire()])
        return bench


def replay(bench: Bench, times: int = 1) -> None:
    for _ in range(times):
        bench.executor.run([99, 0, 0, 0], 0)


def report(bench: Bench) -> dict[str, Any]:
    (found,) = bench.executor.stats([99])["plans"]
    return found


def _filled(arg: Any, given: Sequence[torch.Tensor], values: Sequence[float]) -> Any:
    if isinstance(arg, T):
        return given[arg.index]
    if isinstance(arg, V):
        return values[arg.index]
    return [_filled(a, given, values) for a in arg] if isinstance(arg, (list, tuple)) else arg


def memory(held: dict[int, torch.Tensor]) -> list[list[int]]:
    """Ids that share memory."""
    groups: dict[int, list[int]] = {}
    for i in sorted(held):
        groups.setdefault(held[i].untyped_storage().data_ptr(), []).append(i)
    return sorted(groups.values())


def same(got: Bench, want: Bench, rtol: float = 1e-5) -> None:
    """Both have the same tensors with the same strides, aliases and values; nothing was reported."""
    a, b = got.executor.tensors, want.executor.tensors
    assert sorted(a) == sorted(b) and memory(a) == memory(b)
    for i in b:
        assert a[i].stride() == b[i].stride() and a[i].storage_offset() == b[i].storage_offset(), i
        torch.testing.assert_close(a[i], b[i], rtol=rtol, atol=1e-6, msg=lambda text, i=i: f"%{i}: {text}")
    assert not got.sent and not want.sent


# ---- random programs

NEW = [
    ("aten.add.Tensor", 2), ("aten.mul.Tensor", 2), ("aten.relu.default", 1), ("aten.tanh.default", 1),
    ("aten.clone.default", 1),
]  # fmt: skip
VIEWS = [
    ("aten.t.default", ()), ("aten.slice.Tensor", (0, 1, 3)), ("aten.slice.Tensor", (1, 0, 2)), ("aten.select.int", (0, 1)),
    ("aten.unsqueeze.default", (0,)), ("aten.expand.default", ([3, SIDE, SIDE],)), ("aten.detach.default", ()),
    ("aten.split.Tensor", (2, 0)),
]  # fmt: skip
CHANGES = [
    ("aten.mul_.Scalar", 1), ("aten.add_.Tensor", 2), ("aten.copy_.default", 2), ("aten.zero_.default", 1),
    ("aten._foreach_add_.Scalar", 0),
]  # fmt: skip


def inputs(seed: int) -> dict[int, torch.Tensor]:
    """Four tensors of which some share memory."""
    torch.manual_seed(seed)
    whole = torch.randn(2, SIDE, SIDE)
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    return {1: a, 2: a.t() if seed % 3 else a[:2], 3: b, 4: whole[1] if seed % 2 else whole}


def program(seed: int, length: int = 14) -> Script:
    """A random program of ops, views, changes in place, aliases and ends."""
    return longer(Script(inputs(seed)), seed, length)


def longer(script: Script, seed: int, length: int = 14) -> Script:
    """A script with random instructions behind its own, of which it has `length` then."""
    rng = random.Random(seed)
    while len(script.rows) < length:
        with contextlib.suppress(RuntimeError):  # operands that overlap
            _step(rng, script)
        if rng.random() < 0.1:
            script.stop()
    return script


def _step(rng: random.Random, script: Script) -> None:
    held = script.held
    kind, i = rng.random(), rng.choice([n for n in sorted(held) if n != 999])
    tensor = held[i]
    alike = [n for n in sorted(held) if held[n].shape == tensor.shape]
    if kind < 0.35:
        name, count = rng.choice(NEW)
        script.op(name, [T(n) for n in range(count)], [i, *rng.choices(alike, k=count - 1)])
    elif kind < 0.6:
        name, args = rng.choice(VIEWS)
        if tensor.dim() == 2 and (tensor.shape == (SIDE, SIDE) or name in ("aten.t.default", "aten.detach.default")):
            script.op(name, [T(0), *args], [i])
    elif kind < 0.85:
        name, count = rng.choice(CHANGES)
        if 0 in tensor.stride():
            return
        if count == 0:
            script.op(name, [[T(0)], 0.25], [i])
        elif name == "aten.mul_.Scalar":
            script.op(name, [T(0), V(0)], [i], [0.5])
        else:
            script.op(name, [T(n) for n in range(count)], [i, *rng.choices(alike, k=count - 1)])
    elif kind < 0.93:
        if i > 1000:
            script.free(i)
    elif kind < 0.96 and tensor.dim() == 2 and len(tensor) > 2:
        half, rest = len(tensor) // 2, [0, tensor.shape[1]]
        script.shard(i, [[[1, half + 1], [0, 2]]] if kind < 0.945 else [[[0, 1], rest], [[half, half + 1], rest]])
    elif alike and i > 1000:
        script.alias(i, rng.choice([n for n in (1, 3) if held[n].shape == tensor.shape] or [i]))
