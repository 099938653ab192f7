"""Attributes that change between calls cost no program where the calls do not use them, and are compared where they do."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import gt
from gt.client.capture.watches.unread_state import AttributeWatch

pytestmark = pytest.mark.usefixtures("plain_threads", "one")
CALLS = 12


class Trained(nn.Module):
    """A model that keeps a record of its training, as people write them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.scale, self.shift, self.shifts = 1.0, 0.0, False
        self.steps, self.history, self.best, self.log = 0, [], 1e9, {}  # type: ignore[var-annotated]

    def train_on(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layer(x).square().mean() * self.scale
        loss = loss + self.shift if self.shifts else loss
        loss.backward()
        with torch.no_grad():
            self.layer.weight -= 0.1 * self.layer.weight.grad
        self.layer.weight.grad = None
        return loss.detach()

    def note(self, loss: float) -> None:
        self.steps += 1
        self.history.append(loss)
        self.best = min(self.best, loss)
        self.log[self.steps] = {"loss": loss}


def losses(device: str, change: Callable[[Trained, int], Any] = lambda model, n: None) -> tuple[list[float], Any]:
    """Losses of calls, each after a change, and the compiled function on `remote`."""
    model = Trained().to(device)
    step: Any = gt.compile(model.train_on) if device == "remote" else model.train_on
    found = []
    generator = torch.Generator().manual_seed(1)
    for n in range(CALLS):
        change(model, n)
        found.append(step(torch.randn(3, 4, generator=generator)).item())
        model.note(found[-1])
    assert not any(isinstance(value, AttributeWatch) for cls in Trained.__mro__ for value in vars(cls).values())
    return found, step


def test_a_record_of_the_training_costs_no_program() -> None:
    found, step = losses("remote")
    assert found == losses("cpu")[0]
    text = step.explain()
    assert text.splitlines()[0].endswith(": 1 program") and "9 replays" in text, text
    assert "not compared, since the calls do not use it: best, history, log, steps" in text, text


class Listening(nn.Module):
    """A model with callbacks, as a trainer has them. One is called in each call from the seventh on."""

    def __init__(self, *callbacks: Any) -> None:
        super().__init__()
        self.callbacks, self.calls_them = callbacks, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for callback in self.callbacks if self.calls_them else ():
            x = x * callback.rate()
        return x


@pytest.mark.parametrize("late", [False, True])
def test_a_variable_in_the_closure_of_a_callback(late: bool) -> None:
    times: list[int] = []
    count = 0

    class Callback(nn.Module):
        def note(self) -> None:
            nonlocal count
            times.append(len(times))
            count += 1

        def rate(self) -> int:
            return count + len(times)

    model = Listening(Callback())
    step = gt.compile(model.forward)
    x = torch.ones(1).to("remote")
    with torch.no_grad():
        for n in range(CALLS):
            model.calls_them = late and n >= 6
            assert step(x).item() == (2 * n if model.calls_them else 1), (n, step.explain())
            model.callbacks[0].note()
    text = step.explain()
    assert late or ("8 replays" in text and "count" in text and "times" in text and "parts" not in text), text


def double(model: Trained, n: int) -> None:
    model.scale = 2.0 if n >= 6 else 1.0


def double_again(model: Trained, n: int) -> None:
    model.scale = 1.0 + (n >= 5) + (n >= 8)


def shift_from_the_eighth_on(model: Trained, n: int) -> None:
    model.shift = float(n)  # unread at first, and changes before each call
    model.shifts = n >= 8


def replace_the_history(model: Trained, n: int) -> None:
    if n == 8:
        model.history = [0.0]


@pytest.mark.parametrize("change", [double, double_again, shift_from_the_eighth_on, replace_the_history])
def test_what_a_call_uses_is_compared(change: Callable[[Trained, int], Any]) -> None:
    assert losses("remote", change)[0] == losses("cpu", change)[0]


@dataclasses.dataclass
class Settings:
    rate: float = 1.0
    seen: int = 0

    @property
    def doubled(self) -> float:
        return 2 * self.rate


WAYS: dict[str, Callable[[Any], float]] = {
    "by its name": lambda held: held.rate,
    "by a text": lambda held: getattr(held, "ra" + "te"),
    "by its dictionary": lambda held: vars(held)["rate"],
    "by a copy": lambda held: copy.copy(held).rate,
    "by all fields": lambda held: dataclasses.asdict(held)["rate"],
    "by a property": lambda held: held.doubled,
}


class Holder(nn.Module):
    def __init__(self, way: Callable[[Any], float]) -> None:
        super().__init__()
        self.settings, self.way, self.calls = Settings(), way, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.way(self.settings)


@pytest.mark.parametrize("way", WAYS)
def test_an_attribute_is_used_in_any_way(way: str) -> None:
    model = Holder(WAYS[way])
    step = gt.compile(model.forward)
    x = torch.ones(2).to("remote")
    with torch.no_grad():
        for n in range(CALLS):
            model.settings.rate, model.settings.seen = 1.0 + n // 3, n
            model.calls = n
            want = WAYS[way](model.settings)
            assert step(x).tolist() == [want, want], (n, step.explain())


class Counted:
    total = 0

    def __init__(self) -> None:
        self.rate = 1.0


def write_to_the_class(held: Any) -> float:
    type(held).total += 1
    return float(type(held).total)


SHARED: dict[str, Any] = {"rate": 1.0}


class Sharing:
    """Objects that share one dictionary of attributes, with objects of its subclass too."""

    def __init__(self) -> None:
        self.__dict__ = SHARED


class AlsoSharing(Sharing):
    pass


class Above:
    rate = 1.0


class Below(Above):
    def read(self) -> float:
        return float(super().rate)


class Rows:
    """A list that a library's object has too, of which no walk knows."""

    def __init__(self) -> None:
        self.rows = [0]
        self.data = torch.utils.data.Subset([1.0] * 100, self.rows)  # type: ignore[arg-type]


HIDDEN: dict[str, tuple[Callable[[], list], Callable[[list, int], Any], Callable[[list], float]]] = {
    "a class that the call writes to": (
        lambda: [Counted()],
        lambda held, n: setattr(held[0], "rate", float(n)),
        lambda held: write_to_the_class(held[0]),
    ),
    "one dictionary of two objects": (
        lambda: [AlsoSharing(), Sharing()],
        lambda held, n: setattr(held[0], "rate", 1.0 + n // 4),
        lambda held: held[1].rate,
    ),
    "a class's value behind an object's": (
        lambda: [Above(), Below()],
        lambda held, n: [setattr(each, "rate", float(n)) for each in held],
        lambda held: held[1].read(),
    ),
    "a list that a library has": (
        lambda: [Rows()],
        lambda held, n: held[0].rows.append(n),
        lambda held: float(len(held[0].data)),
    ),
    "a configuration as a dictionary": (
        lambda: [transformers.LlamaConfig(initializer_range=1.0)],
        lambda held, n: setattr(held[0], "initializer_range", 1 / (1 + n // 4)),
        lambda held: held[0].to_dict()["initializer_range"],
    ),
    "the text of an object": (
        lambda: [argparse.Namespace(rate=1)],
        lambda held, n: setattr(held[0], "rate", 1 + n // 4),
        lambda held: float(repr(held[0])[-2]),
    ),
    "a pickle": (
        lambda: [Settings()],
        lambda held, n: setattr(held[0], "seen", n),
        lambda held: float(pickle.loads(pickle.dumps(held[0])).seen),
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_use_that_no_attribute_shows(name: str) -> None:
    make, change, read = HIDDEN[name]

    def losses(device: str) -> list[float]:
        Counted.total = 0
        model = Holder(read)
        model.settings = make()  # type: ignore[assignment]
        step = gt.compile(model.forward) if device == "remote" else model.forward
        found = []
        with torch.no_grad():
            for n in range(CALLS):
                change(model.settings, n)  # type: ignore[arg-type]
                found.append(step(torch.ones(1, device=device)).item())
        return found

    assert losses("remote") == losses("cpu")


class Wide(Settings):
    """A subclass, of which a watch on its base notes the uses."""


class Own(Settings):
    """One with an attribute of its own, behind which the base's is not seen."""

    rate = 5.0


@pytest.mark.parametrize("kind", [Wide, Own])
def test_objects_of_a_class_and_of_its_subclass(kind: type[Settings]) -> None:
    model = Holder(lambda held: held[0].rate * held[1].rate)
    model.settings = [Settings(), kind()]  # type: ignore[assignment]
    step = gt.compile(model.forward)
    x = torch.ones(1).to("remote")
    with torch.no_grad():
        for n in range(CALLS):
            first, second = 1.0 + (n >= 4), 1.0 + n // 4  # both change before the fifth call, one before the ninth
            model.settings[0].rate, model.settings[1].rate = first, second  # type: ignore[index]
            assert step(x).item() == first * second, (n, step.explain())


def test_what_a_call_has_left_is_not_kept() -> None:
    model = Holder(lambda held: held.rate)
    step = gt.compile(model.forward)
    model.seen = Settings()  # type: ignore[assignment]
    with torch.no_grad():
        step(torch.ones(1))
    old = weakref.ref(model.seen)  # type: ignore[arg-type]
    model.seen = Settings()  # type: ignore[assignment]
    gc.collect()
    assert old() is None


def test_a_class_is_as_before_after_an_error() -> None:
    model = Trained().to("remote")

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        if model.steps == 3:
            raise KeyError(model.steps)
        return model.layer(x).sum()

    with torch.no_grad():
        for _ in range(3):
            step(torch.ones(1, 4))
            model.note(0.0)
        with pytest.raises(KeyError, match="3"):
            step(torch.ones(1, 4))
    assert not any(isinstance(value, AttributeWatch) for value in vars(Trained).values())


@dataclasses.dataclass
class Leaf:
    rate: float = 1.0

    @property
    def doubled(self) -> float:
        return 2 * self.rate


def test_a_watch_leaves_an_attribute_as_it_is() -> None:
    held, other = Leaf(), Leaf()
    watch = AttributeWatch(Leaf, "rate")
    try:
        assert held.rate == 1.0 and Leaf.rate == 1.0 and watch.used == {id(vars(held))}
        other.rate = 3.0
        del other.rate
        assert other.rate == 1.0 and "rate" not in vars(other)  # the class's own
        with pytest.raises(AttributeError):
            del other.rate
    finally:
        watch.remove()
    assert vars(Leaf)["rate"] == 1.0
    with pytest.raises(TypeError, match="descriptor"):
        AttributeWatch(Leaf, "doubled")
    with pytest.raises(TypeError, match="super"):
        AttributeWatch(Settings, "rate")
    missing = AttributeWatch(Leaf, "unknown")
    try:
        assert not hasattr(held, "unknown")
        held.unknown = 1  # type: ignore[attr-defined]
        assert vars(held)["unknown"] == 1
    finally:
        missing.remove()
    assert "unknown" not in vars(Leaf)
