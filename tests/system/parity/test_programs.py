"""Random programs: whatever the groups, every tensor ends as in plain torch, written through views or not.

A program is made while it runs on the CPU; the same calls run on `remote` under random groups.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gt

CONFIG = """
rows: {shard: {axis: 0, workers: [0, 1, 2]}}
columns: {shard: {axis: 1, workers: [2, 3]}}
stage: {shard: {axis: 0, workers: [1, 2]}}
stage_colpar: {shard: {axis: 1, workers: [1, 2]}}
stage_rowpar: {shard: {axis: 0, workers: [1, 2]}}
both: {shard: {axis: 0, workers: [[0, 1], [2, 3]]}}
both_colpar: {shard: {axis: 1, workers: [[0, 1], [2, 3]]}}
both_rowpar: {shard: {axis: 0, workers: [[0, 1], [2, 3]]}}
single: {workers: [3]}
"""
GROUPS = [
    None,
    None,
    "rows",
    "columns",
    "stage",
    "stage_colpar",
    "stage_rowpar",
    "both",
    "both_colpar",
    "both_rowpar",
    "single",
]
DTYPES = [torch.float32] * 8 + [
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.bool,
]
MOST = 12  # tensors alive


class Program:
    """Pairs of tensors, one on the CPU and one remote, and random calls on both."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.calls: list[str] = []

    def run(self, length: int) -> None:
        steps = [self.create, self.unary, self.binary, self.inplace, self.view, self.view, self.write, self.matmul]
        steps += [self.reduce, self.index, self.join, self.drop, self.move, self.layer]
        for _ in range(4):
            self.create()
        for _ in range(length):
            self.rng.choice(steps)()
            if len(self.pairs) > MOST:
                self.drop()

    def check(self) -> None:
        for number, (plain, remote) in enumerate(self.pairs):
            got = remote.cpu()
            assert got.shape == plain.shape and got.dtype == plain.dtype, f"{number}: {self.story()}"
            near = 3e-2 if plain.dtype in (torch.bfloat16, torch.float16) else 1e-3  # sums of parts are rounded part by part

            def message(text: str, number: int = number) -> str:
                return f"tensor {number}: {text}\n{self.story()}"

            torch.testing.assert_close(got, plain, rtol=near, atol=near, equal_nan=True, msg=message)

    def story(self) -> str:
        return "\n".join(self.calls)

    # ---- making calls

    def pick(self, count: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [self.rng.choice(self.pairs) for _ in range(count)]

    def both(self, text: str, function: Callable, *pairs: tuple[torch.Tensor, torch.Tensor], keep: bool = True) -> None:
        """Call on both sides, in a random group; what torch refuses is refused by both."""
        group = self.rng.choice(GROUPS)
        try:
            plain = function(*[p for p, _ in pairs])
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return
        self.calls.append(f"{group}: {text} {[tuple(p.shape) for p, _ in pairs]}")
        with gt.signal.context(group) if group else contextlib.nullcontext():
            remote = function(*[r for _, r in pairs])
        if keep:
            made = zip(plain, remote) if isinstance(plain, tuple) else [(plain, remote)]
            self.pairs += [(p, r) for p, r in made if isinstance(p, torch.Tensor)][:3]

    def create(self) -> None:
        shape = tuple(self.rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 8]) for _ in range(self.rng.choice([0, 1, 2, 2, 2, 3, 3, 4])))
        dtype = self.rng.choice(DTYPES)
        made = torch.randint(-3, 4, shape).to(dtype) if not dtype.is_floating_point else torch.randn(shape).to(dtype)
        if self.rng.random() < 0.5 and made.dim() == 4:
            made = made.to(memory_format=torch.channels_last)
        if self.rng.random() < 0.3 and made.dim() >= 2:
            made = made.transpose(0, 1)  # not contiguous
        self.calls.append(f"create {tuple(shape)} {dtype}")
        remote = made.to("remote")
        if dtype == torch.float32 and self.rng.random() < 0.3:
            remote = nn.Parameter(remote)
        self.pairs.append((made.clone(memory_format=torch.preserve_format), remote))

    def unary(self) -> None:
        name = self.rng.choice(["abs", "neg", "clone", "relu", "exp", "sign", "square", "contiguous", "float", "isnan"])
        self.both(name, lambda a: getattr(a, name)() if hasattr(a, name) else getattr(torch, name)(a), *self.pick())

    def binary(self) -> None:
        name = self.rng.choice(["add", "sub", "mul", "maximum", "where", "eq"])
        function = {"where": lambda a, b: torch.where(a > 0, a, b) if a.dtype != torch.complex64 else a + b}
        self.both(name, function.get(name, lambda a, b: getattr(torch, name)(a, b)), *self.pick(2))

    def inplace(self) -> None:
        kind = self.rng.randrange(5)
        a, b = self.pick(2)
        calls: list[tuple[str, Callable]] = [
            ("add_ scalar", lambda x, y: x.add_(1)),
            ("mul_ scalar", lambda x, y: x.mul_(2)),
            ("add_", lambda x, y: x.add_(y)),
            ("copy_", lambda x, y: x.copy_(y)),
            ("zero_", lambda x, y: x.zero_()),
        ]
        name, function = calls[kind]
        self.both(name, function, a, b, keep=False)

    def view(self) -> None:
        (pair,) = self.pick()
        shape = pair[0].shape
        dims = len(shape)
        i, j = (self.rng.randrange(dims) if dims else 0 for _ in range(2))
        start = self.rng.randrange(shape[i] + 1) if dims else 0
        factor = next((f for f in (2, 3, 4) if dims and shape[i] and shape[i] % f == 0), 1)
        split = [*shape[:i], factor, shape[i] // factor, *shape[i + 1 :]] if dims else []
        calls: list[tuple[str, Callable]] = [
            (f"transpose {i} {j}", lambda a: a.transpose(i, j)),
            (f"slice {i} {start}:", lambda a: a.narrow(i, start, a.shape[i] - start)),
            ("flatten", lambda a: a.view(-1)),
            (f"view {split}", lambda a: a.view(split)),
            (f"select {i}", lambda a: a.select(i, 0)),
            (f"unsqueeze {i}", lambda a: a.unsqueeze(i)),
            ("squeeze", lambda a: a.squeeze()),
            (f"chunk {i}", lambda a: a.chunk(2, i)),
            (f"unbind {i}", lambda a: a.unbind(i)),
            ("step", lambda a: a[::2]),
            ("diagonal", lambda a: a.diagonal()),
            ("reshape", lambda a: a.reshape(-1)),
            ("expand", lambda a: a.unsqueeze(0).expand(2, *a.shape)),
        ]
        name, function = self.rng.choice(calls)
        self.both(name, function, pair)

    def write(self) -> None:
        a, b = self.pick(2)
        calls: list[tuple[str, Callable]] = [
            ("a[0] = 1", lambda x, y: x.__setitem__(0, 1)),
            ("a[:, 1:] = 2", lambda x, y: x.__setitem__((slice(None), slice(1, None)), 2)),
            ("a.t()[0] += 1", lambda x, y: x.t()[0].add_(1)),
            ("a[...] = b", lambda x, y: x.__setitem__(..., y.clone())),
            ("a[a > 0] = 0", lambda x, y: x.__setitem__(x > 0, 0)),
            ("a.view(-1)[1] = 3", lambda x, y: x.view(-1).__setitem__(1, 3)),
        ]
        name, function = self.rng.choice(calls)
        self.both(name, function, a, b, keep=False)

    def matmul(self) -> None:
        a, b = self.pick(2)
        if a[0].dtype == b[0].dtype:  # where one is empty the CPU does not look
            self.both("matmul", lambda x, y: x @ y, a, b)
        self.both("x @ x.t()", lambda x: x @ x.t() * 0.1, a)

    def reduce(self) -> None:
        (pair,) = self.pick()
        dim = self.rng.randrange(max(1, pair[0].dim()))
        name = self.rng.choice(["sum", "mean", "amax", "sum all", "softmax", "cumsum", "argmax", "var", "any", "norm"])
        calls: dict[str, Callable] = {
            "sum": lambda a: a.sum(dim, keepdim=True),
            "mean": lambda a: a.mean(dim),
            "amax": lambda a: a.amax(dim),
            "sum all": lambda a: a.sum(),
            "softmax": lambda a: a.softmax(dim),
            "cumsum": lambda a: a.cumsum(dim),
            "argmax": lambda a: a.argmax(dim),
            "var": lambda a: a.var(dim, correction=0),
            "any": lambda a: (a != 0).any(dim),
            "norm": lambda a: a.norm(),
        }
        self.both(f"{name} {dim}", calls[name], pair)

    def index(self) -> None:
        (pair,) = self.pick()
        rows = pair[0].shape[0] if pair[0].dim() else 0
        if not rows:
            return
        where = torch.randint(0, rows, (3,))
        calls: list[tuple[str, Callable]] = [
            ("a[[i, j, k]]", lambda a: a[where.to(a.device)]),
            ("index_select", lambda a: a.index_select(0, where.to(a.device))),
            ("a[0]", lambda a: a[0]),
            ("nonzero", lambda a: a.nonzero()),
            ("sort", lambda a: a.sort(0, stable=True).values),
            ("flip", lambda a: a.flip(0)),
            ("pad", lambda a: torch.nn.functional.pad(a, (1, 1))),
        ]
        name, function = self.rng.choice(calls)
        self.both(name, function, pair)

    def join(self) -> None:
        a, b = self.pick(2)
        dim = self.rng.randrange(max(1, a[0].dim()))
        name = self.rng.choice(["cat", "stack"])
        self.both(f"{name} {dim}", lambda x, y: getattr(torch, name)([x, y, x], dim), a, b)

    def move(self) -> None:
        (pair,) = self.pick()
        self.both("gt.signal.move", lambda a: gt.signal.move(a) if a.device.type == "remote" else a.clone(), pair)

    def layer(self) -> None:
        """Ops of layers, on whatever fits them; their weights come from the values at hand."""
        (pair,) = self.pick()
        shape = pair[0].shape
        if not pair[0].is_floating_point() or pair[0].dtype != torch.float32 or not shape or 0 in shape:
            return
        f = torch.nn.functional
        width = torch.ones(shape[-1])
        kernel = torch.ones(3, shape[1] if len(shape) == 4 else 1, 2, 2)
        calls: list[tuple[str, Callable]] = [
            ("layer_norm", lambda a: f.layer_norm(a, a.shape[-1:], width.to(a.device))),
            ("rms_norm", lambda a: f.rms_norm(a, a.shape[-1:])),
            ("gelu", f.gelu),
            ("linear", lambda a: f.linear(a, torch.ones(4, a.shape[-1], device=a.device))),
            ("attention", lambda a: f.scaled_dot_product_attention(a, a, a, is_causal=True)),
            ("log_softmax", lambda a: f.log_softmax(a, -1)),
        ]
        if len(shape) == 4:
            calls += [
                ("conv2d", lambda a: f.conv2d(a, kernel.to(a.device), padding=1)),
                ("max_pool2d", lambda a: f.max_pool2d(a, 2, ceil_mode=True)),
                ("interpolate", lambda a: f.interpolate(a, scale_factor=2)),
                ("group_norm", lambda a: f.group_norm(a, 1)),
                ("channels_last", lambda a: a.contiguous(memory_format=torch.channels_last)),
                ("batch_norm", lambda a: f.batch_norm(a, None, None, training=True)),
            ]
        name, function = self.rng.choice(calls)
        self.both(name, function, pair)

    def drop(self) -> None:
        if len(self.pairs) > 4:
            self.pairs.pop(self.rng.randrange(len(self.pairs)))


@pytest.mark.filterwarnings("ignore")  # torch's own, about programs nobody would write
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_programs_end_as_in_torch(first, session):
    session(CONFIG)
    for seed in range(first, first + 10):
        with torch.no_grad():
            program = Program(seed)
            program.run(30)
            program.check()
