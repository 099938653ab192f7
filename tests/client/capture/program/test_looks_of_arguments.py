"""A captured function sees its arguments as they are, gives them back, and has torch's errors for what is changed too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gt

CALLS = 6

pytestmark = pytest.mark.usefixtures("one")


@pytest.fixture
def one(session: Callable[..., None]) -> None:
    session()


def plain(fn: Any) -> Any:
    return fn


LOOKS: dict[str, Callable[[torch.Tensor], bool]] = {
    "a leaf": lambda x: x.is_leaf,
    "with a node": lambda x: x.grad_fn is not None,
    "a parameter": lambda x: isinstance(x, torch.nn.Parameter),
    "that requires grad": lambda x: x.requires_grad,
    "with an attribute": lambda x: getattr(x, "scale", 0) == 1,
}


def argument(kind: str, device: str) -> torch.Tensor:
    x = torch.ones(3).to(device)
    if kind in ("parameter", "frozen"):
        return torch.nn.Parameter(x, requires_grad=kind == "parameter")
    if kind == "plain":
        return x
    x = x.requires_grad_()
    if kind == "marked":
        x.scale = 1  # type: ignore[attr-defined]
    return x * 1 if kind == "with a graph" else x


@pytest.mark.parametrize("look", LOOKS)
def test_a_branch_on_the_look_of_an_argument_goes_as_in_torch(look: str) -> None:
    def run(device: str, wrap: Callable) -> list[list[float]]:
        w, asked = torch.ones(3, device=device, requires_grad=True), LOOKS[look]
        fn, rows = wrap(lambda x: w * x * (2 if asked(x) else 3)), []
        for kind in ("leaf", "parameter", "frozen", "plain", "marked", "with a graph"):
            for _ in range(4):
                result = fn(argument(kind, device))
                result.sum().backward()
                rows.append(result.tolist())
        return rows

    assert run("remote", gt.compile) == run("cpu", plain)


def test_calls_with_and_without_a_gradient_take_turns() -> None:
    fn = gt.compile(lambda x: (x * 2).detach() if x.requires_grad else x * 3)
    for n in range(2 * CALLS):
        x = torch.ones((), device="remote", requires_grad=n % 2 == 0)
        assert fn(x).item() == (2 if x.requires_grad else 3)


@pytest.mark.parametrize("kind", ["plain", "leaf", "parameter", "with a graph"])
def test_an_argument_that_is_returned_is_the_callers(kind: str) -> None:
    w = torch.ones(3, device="remote", requires_grad=True)
    fn = gt.compile(lambda x: (x * w, x, {"again": [x]}))
    for _ in range(CALLS):
        x = argument(kind, "remote")
        product, returned, again = fn(x)
        assert returned is x and again["again"][0] is x
        product.sum().backward()
    assert w.grad is not None and w.grad.tolist() == [CALLS] * 3


@pytest.mark.parametrize("grows", [False, True])
def test_a_list_that_is_given_and_returned_is_the_callers(grows: bool) -> None:
    model = torch.nn.Linear(3, 3).to("remote")

    def cached(x: torch.Tensor, cache: dict) -> tuple[torch.Tensor, dict]:
        if grows:
            cache["all"].append(x)
        return model(x) + cache["all"][0], cache

    for fn in (gt.compile(cached), gt.compile(cached)):
        for n in range(CALLS):
            x, cache = argument("leaf" if n % 2 else "plain", "remote"), {"all": [torch.ones(3, device="remote")]}
            result, returned = fn(x, cache)
            assert returned is cache and len(cache["all"]) == 1 + grows and (not grows or cache["all"][1] is x)
            result.sum().backward()


def changes(device: str, wrap: Callable, change: Callable[..., Any], fn: Callable[..., Any]) -> list:
    """Values after a change between a call and its backward pass, and torch's refusal or the gradient of this pass."""
    w, rows = torch.full((3,), 0.5, device=device, requires_grad=True), []
    captured = wrap(lambda x: fn(w, x))
    for n in range(CALLS):
        x = torch.full((3,), 1.0 + n, device=device)
        w.grad = None
        results = captured(x)
        with torch.no_grad():
            change(x, *results)
        rows += [tensor.detach().cpu() for tensor in results]
        try:
            results[0].sum().backward()
        except RuntimeError:
            rows.append("refused")
        else:
            rows.append(w.grad.cpu())  # type: ignore[union-attr]
    return rows


def tanh(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.tanh(w * x)
    return y, y.detach()


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda x, y, d: x.add_(1), True),
        (lambda x, y, d: x[0].mul_(2), True),
        (lambda x, y, d: y.add_(1), True),
        (lambda x, y, d: d.add_(1), True),
        (lambda x, y, d: (x + 1, y + 1, d + 1), False),
    ],
    ids=["argument", "view of an argument", "result", "alias of a result", "nothing"],
)
def test_what_torch_refuses_to_differentiate_is_refused(change: Callable, refused: bool) -> None:
    rows, expected = (changes(*where, change, tanh) for where in (("remote", gt.compile), ("cpu", plain)))
    assert ("refused" in expected) is refused
    for row, other in zip(rows, expected, strict=True):
        assert row == other if isinstance(other, str) else torch.allclose(row, other)


def test_results_that_autograd_saves_share_their_memory() -> None:
    def part(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(w * x)
        return y, y.detach()[1:]

    for device, wrap in (("remote", gt.compile), ("cpu", plain)):
        w = torch.full((3,), 0.5, device=device, requires_grad=True)
        captured = wrap(lambda x, w=w: part(w, x))
        for n in range(CALLS):
            y, rest = captured(torch.full((3,), 1.0 + n, device=device))
            rest.fill_(7)
            assert y.tolist()[1:] == [7, 7]


@pytest.mark.parametrize("kind", ["plain", "leaf"])
def test_transforms_of_functions_run_in_a_captured_model(kind: str) -> None:
    def run(device: str, wrap: Callable) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, rows = torch.nn.Linear(3, 2).to(device), []

        def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return model(x).tanh(), torch.func.vmap(torch.func.jacrev(lambda row: model(row).tanh()))(torch.stack([x, x + 1]))

        captured = wrap(fn)
        for _ in range(CALLS):
            x = argument(kind, device)
            results = captured(x)
            (results[0].sum() + results[1].square().sum()).backward()
            gradients = [model.weight.grad, *([x.grad] if kind == "leaf" else [])]
            rows += [result.detach().cpu().clone() for result in (*results, *gradients)]
        return rows

    torch.testing.assert_close(run("remote", gt.compile), run("cpu", plain))


def test_results_with_a_backward_pass_each_need_no_retained_graph() -> None:
    class Heads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.left, self.right = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.left(self.norm(x).detach()), self.right(x)

    def run(device: str, wrap: Callable) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Heads()
        captured = wrap(model.to(device))
        for n in range(CALLS):
            for result in captured(torch.arange(12.0).view(4, 3).add(n).to(device)):
                result.square().mean().backward()
        return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]

    torch.testing.assert_close(run("remote", gt.compile), run("cpu", plain))


@pytest.mark.parametrize(
    "cut", [lambda x: x[:, :2], lambda x: x.t(), lambda x: x[::2, ::3], lambda x: x[1:3], lambda x: x[:, None]]
)
def test_a_function_may_decide_by_strides(cut: Callable) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.flatten() * (2 if x.is_contiguous() else 3) + x.stride(0), x[0]

    captured = gt.compile(fn)
    for n in range(CALLS):
        base = torch.arange(24.0).view(4, 6) + n
        x, there = cut(base), cut(base.to("remote"))
        result, row = captured(there)
        assert torch.equal(result.cpu(), fn(x)[0])
        row.zero_()
        x[0].zero_()
        assert torch.equal(there.cpu(), x)


@pytest.mark.parametrize("used", ["result", "entry"])
def test_a_list_that_changes_late_has_the_gradients_of_torch(used: str) -> None:
    def run(device: str, wrap: Callable) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, grow, rows = torch.nn.Linear(3, 2).to(device), [False], []

        def fn(x: torch.Tensor, kept: list) -> torch.Tensor:
            y = model(x).tanh()
            if grow[0]:
                kept.append(y * 2)
            return y

        captured = wrap(fn)
        for n in range(CALLS):
            x, kept = argument("leaf", device), [0]
            grow[0] = n == CALLS - 2
            y = captured(x, kept)
            loss = y.sum() if used == "result" or len(kept) == 1 else 0
            (loss + sum(entry.sum() for entry in kept[1:])).backward()
            rows += [x.grad.cpu(), model.weight.grad.cpu().clone()]
        return rows

    torch.testing.assert_close(run("remote", gt.compile), run("cpu", plain))
