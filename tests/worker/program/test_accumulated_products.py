"""Products that are accumulated by the matrix product itself: which are, and that the numbers are those of the ops."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import gt
from gt.worker.engine.torch.compiler import accumulate
from tests.helpers.serving import serving

HAVE = any(map(shutil.which, ("g++", "clang++")))
compiler = pytest.mark.skipif(not HAVE, reason="no C++ compiler is found")
ADDING = (torch.ops.aten.addmm_.default, torch.ops.aten.baddbmm_.default)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b) if a.dim() == 2 else torch.bmm(a, b)


def add(g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    g.add_(product(a, b))
    return a.exp()


def add_transposed(g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    g.add_(torch.mm(b.t(), a.t()).t())  # the sum is made in another layout
    return a + 1


def add_of_transposed(g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    g.add_(torch.mm(a.t(), b.t()))  # as a gradient of a weight is: of the transposed output's gradient
    return a + 1


def add_twice(g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    g.add_(product(a, b))
    g.add_(product(b, a))
    return a + 1


def add_scaled(g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    g.add_(product(a, b), alpha=2)
    return a + 1


def joined_before(g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    g.copy_(torch.addmm(g, a, b) if g.dim() == 2 else torch.baddbmm(g, a, b))  # as Inductor leaves it
    return a + 1


def scaled_before(g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    g.copy_(torch.addmm(g, a, b, beta=2) if g.dim() == 2 else torch.baddbmm(g, a, b, beta=2))
    return a + 1


def old_value_is_read(g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    old = g * 2
    g.add_(product(a, b))
    return old


def sum_is_read(g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    g.add_(product(a, b))
    return g.sin()


def product_is_read(g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made = product(a, b)
    g.add_(made)
    return made.cos()


def of_the_sum_itself(g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    g.add_(product(g, b))
    return a + 1


def converted(g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    g.add_(product(a.bfloat16(), b.bfloat16()))
    return a + 1


def one_row(g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    g.add_(product(a[..., :1, :], b))  # broadcast over the rows of g
    return a + 1


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize(
    ("function", "joined"),
    [
        *((add, 1), (joined_before, 1), (add_of_transposed, 1), (add_transposed, 0), (add_twice, 0), (add_scaled, 0)),
        *((scaled_before, 0), (old_value_is_read, 0), (sum_is_read, 0), (product_is_read, 0), (of_the_sum_itself, 0)),
        *((converted, 0), (one_row, 0)),
    ],
)
def test_a_product_adds_to_an_input_that_nobody_else_reads(function: Callable, joined: int, batch: tuple[int, ...]) -> None:
    if batch and "transposed" in function.__name__:
        pytest.skip("of matrices")
    given = [torch.randn(*batch, 24, 24) for _ in range(3)]
    want = [t.clone() for t in given]
    returned = function(*want)
    traced = function if function in (joined_before, scaled_before) else torch.func.functionalize(function)
    graph = make_fx(traced)(*(t.clone() for t in given))
    for node, t in zip(graph.graph.find_nodes(op="placeholder"), given, strict=True):
        node.meta["val"] = t
    for node in graph.graph.nodes:  # as Inductor's graphs have it
        if node.op == "call_function":
            node.meta["val"] = node.meta["tensor_meta"]
    accumulate.accumulate(graph.graph)
    graph.recompile()
    assert sum(node.target in ADDING for node in graph.graph.nodes) == joined
    torch.testing.assert_close([graph(*given), *given], [returned, *want], rtol=1e-5, atol=1e-5)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(x).tanh()) - y).square().mean()


@compiler
@pytest.mark.usefixtures("plain_threads")
def test_gradients_that_last_are_accumulated_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from gt.worker.engine.torch.compiler.inductor import Inductor

    made, found = Inductor.__init__, list[int]()

    def init(self: Inductor, *given: Any) -> None:
        made(self, *given)
        self.accumulates = True

    def counted(graph: torch.fx.Graph) -> None:
        real(graph)
        found.append(sum(node.target in ADDING for node in graph.nodes))

    real = accumulate.accumulate
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # code that is kept had its passes before
    monkeypatch.setattr(Inductor, "__init__", init)
    monkeypatch.setattr(accumulate, "accumulate", counted)
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(2, 8, 16, generator=generator) for _ in range(5)]

    def train(compile: Callable) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Net().to("remote")
        for p in model.parameters():
            p.grad = torch.zeros_like(p)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = model(x, y)
            loss.backward()
            return loss.detach()

        run = compile(step)
        losses = [run(*batch.to("remote")) for batch in data]
        return [t.detach().cpu() for t in (*losses, *(p.grad for p in model.parameters()))]

    with serving(1, backend="torch") as server:
        gt.connect(server.address)
        try:
            want = train(lambda step: step)
            got = train(partial(gt.compile, backend="inductor"))
        finally:
            gt.shutdown()
    assert sum(found) >= 2
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
