"""Objects that a captured function makes and returns: programs make such objects at each replay, as the function would."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import gt

CALLS = 5
registered: weakref.WeakSet = weakref.WeakSet()
kept: list = []


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    steps: int = 3


@dataclass(frozen=True, slots=True)
class Frozen:
    value: torch.Tensor
    names: tuple[str, ...] = ("a", "b")


class Layer:
    def __init__(self, keys: torch.Tensor, dtype: torch.dtype) -> None:
        self.keys, self.dtype, self.__private = keys, dtype, 7

    def length(self) -> int:
        return self.keys.shape[0] + self.__private


class Slots:
    __slots__ = ("__hidden", "absent", "value")

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.__hidden = value, 5

    def hidden(self) -> int:
        return self.__hidden


@dataclass
class Cache:
    layers: list[Layer] = field(default_factory=list)
    kind: type = Layer
    updated: dict[int, bool] = field(default_factory=dict)


class Counted:
    """Its property has the name of an entry, and counts who asks."""

    asked = 0

    def __init__(self, value: torch.Tensor) -> None:
        self.__dict__["value"] = value

    @property
    def value(self) -> torch.Tensor:
        Counted.asked += 1
        return self.__dict__["value"]


def output(x: torch.Tensor) -> Any:
    return Output(x * 2, [x.sum(), x + 1])


def within(x: torch.Tensor) -> Any:
    return {"loss": x.square().mean(), "cache": Cache([Layer(x[:1] * 3, x.dtype), Layer(x.exp(), x.dtype)], Layer, {0: True})}


def frozen(x: torch.Tensor) -> Any:
    return Frozen(x.tanh()), [Slots(x - 1), (Slots(x + 1),)]


def distribution(x: torch.Tensor) -> Any:
    return torch.distributions.Normal(x, x.exp(), validate_args=False)


def twice_one_tensor(x: torch.Tensor) -> Any:
    y = x * 2
    return Output(y, [y, y.detach()])


def numbers(result: Any) -> Any:
    """What a program can see of such results, as plain lists."""
    if isinstance(result, torch.Tensor):
        return result.tolist(), result.requires_grad
    if isinstance(result, (list, tuple)):
        return [numbers(part) for part in result]
    if isinstance(result, dict):
        return [(key, numbers(part)) for key, part in result.items()]
    if isinstance(result, (int, str, type, torch.dtype, torch.Size)) or result is None:
        return result
    calls = [getattr(result, name)() for name in ("length", "hidden") if callable(getattr(result, name, None))]
    names = [*getattr(result, "__slots__", ()), *getattr(result, "__dict__", ())]
    return type(result), calls, [(name, numbers(getattr(result, name, None))) for name in names if not name.startswith("__")]


@pytest.fixture
def one() -> Any:
    gt.cpu_workers(1)
    yield
    gt.shutdown()


def batch(n: int, device: str = "cpu") -> torch.Tensor:
    return torch.arange(6.0).reshape(3, 2).sub(n).div(8).to(device)


@pytest.mark.parametrize("function", [output, within, frozen, distribution, twice_one_tensor])
def test_each_replay_makes_new_objects_with_the_results_of_its_call(function: Callable, one: None) -> None:
    run = gt.compile(function)
    results = [run(batch(n, "remote")) for n in range(CALLS)]
    assert [numbers(result) for result in results] == [numbers(function(batch(n))) for n in range(CALLS)]
    assert "in parts" not in str(run.explain()) and run.newest.replays == CALLS - 2
    assert len({id(result) for result in results}) == CALLS


def test_objects_are_filled_without_a_call_of_their_class(one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list = []
    monkeypatch.setattr(Output, "__post_init__", lambda self: made.append(1), raising=False)
    run = gt.compile(lambda x: Output(x * 2, []))
    results = [run(batch(n, "remote")) for n in range(CALLS)]
    assert type(results[-1]) is Output and results[-1].logits.tolist() == (batch(CALLS - 1) * 2).tolist()


def test_no_property_is_asked(one: None) -> None:
    run = gt.compile(lambda x: Counted(x * 2))
    results = [run(batch(n, "remote")) for n in range(CALLS)]
    assert run.newest.replays == CALLS - 2 and Counted.asked == 0
    assert results[-1].value.tolist() == (batch(CALLS - 1) * 2).tolist()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.a(x).tanh()
        return {"out": Output(self.b(hidden), [hidden * 1.5]), "cache": Cache([Layer(torch.cat([x, x]), x.dtype)])}


def trained(device: str, wrap: Callable) -> Any:
    torch.manual_seed(3)
    model = Net().to(device)
    call, seen = wrap(model), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for n in range(CALLS):
        results = call(batch(n, device))
        loss = results["out"].logits.square().mean() + results["out"].hidden[0].sum() + results["cache"].layers[0].keys.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), numbers(results)))
    return seen


def test_graphs_go_on_through_the_objects_of_a_captured_model(one: None) -> None:
    calls: list = []

    def wrap(model: torch.nn.Module) -> Any:
        calls.append(gt.compile(model))
        return calls[0]

    torch.testing.assert_close(
        [loss for loss, _ in trained("remote", wrap)], [loss for loss, _ in trained("cpu", lambda model: model)]
    )
    eager, captured = trained("remote", lambda model: model), trained("remote", gt.compile)
    assert captured == eager
    text = str(calls[0].explain())
    assert "in parts" not in text and "2 replays" in text


def kept_by_a_list(x: torch.Tensor) -> Any:
    kept.append(Output(x * 2, []))
    return kept[-1]


def registers_itself(x: torch.Tensor) -> Any:
    made = Layer(x * 2, x.dtype)
    registered.add(made)
    return [made]


def shared(x: torch.Tensor) -> Any:
    layer = Layer(x * 2, x.dtype)
    return [layer, layer]


def circle(x: torch.Tensor) -> Any:
    cache = Cache([Layer(x * 2, x.dtype)])
    cache.updated = {0: cache}  # type: ignore[dict-item]
    return cache


def closes_over(x: torch.Tensor) -> Any:
    y = x * 2
    made = Cache([])
    made.kind = lambda: y  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("function", [kept_by_a_list, registers_itself, shared, circle, closes_over])
def test_objects_that_somebody_else_has_are_made_by_the_function_itself(function: Callable, one: None) -> None:
    run = gt.compile(function)
    for n in range(CALLS):
        kept.clear()
        registered.clear()
        result, wanted = run(batch(n, "remote")), (batch(n) * 2).tolist()
        if function is kept_by_a_list:
            assert result is kept[-1] and result.logits.tolist() == wanted
        elif function is registers_itself:
            assert result[0] in registered and result[0].keys.tolist() == wanted
        elif function is shared:
            assert result[0] is result[1] and result[0].keys.tolist() == wanted
        elif function is circle:
            assert result.updated[0] is result and result.layers[0].keys.tolist() == wanted
        else:
            assert result.kind().tolist() == wanted


def test_an_object_that_the_function_gets_is_returned_as_it_is(one: None) -> None:
    given = Layer(torch.ones(2), torch.float32)
    run = gt.compile(lambda x, layer: (x * 2, layer))
    for n in range(CALLS):
        value, layer = run(batch(n, "remote"), given)
        assert layer is given and value.tolist() == (batch(n) * 2).tolist()
