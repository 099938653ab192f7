"""A compiled function never replays a stale constant: programs in which something changes between calls, against eager runs.

Each row makes a function and what is done before each call; every result, and every parameter at the end, has eager's bits.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import contextvars
import dataclasses
import decimal
import enum
import functools
import importlib
import itertools
import logging
import os
import random
import re
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import gt
from gt.client.capture import state_walk, user_code
from gt.client.capture.state_walk import snapshot

CALLS = 9
CHANGES = (4, 7)  # before these calls; a program is there from the third
ROWS: dict[str, Callable[[], tuple[Callable, Callable[[int], None]]]] = {}
RATE = 1.0
settings = types.ModuleType("settings_of_a_user")
settings.RATE = 1.0  # type: ignore[attr-defined]
settings.inner = types.ModuleType("inner_of_a_user")  # type: ignore[attr-defined]
settings.inner.RATE = 1.0  # type: ignore[attr-defined]
weight = None


def row(make: Callable) -> Callable:
    ROWS[make.__name__] = make
    return make


def value(n: int) -> float:
    return 1.0 + sum(n >= change for change in CHANGES)


class Holder:
    """An object of a user's."""

    rate = 1.0

    def __init__(self) -> None:
        self.scale = 1.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    @property
    def twice(self) -> float:
        return 2 * self.scale


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    name: str = "add"


class Rate(float):
    extra = 0.0

    def total(self) -> float:
        return float(self) + self.extra


class Mode(enum.Enum):
    ADD = 1
    MUL = 2

    def factor(self) -> float:
        return FACTORS[self]


FACTORS = {Mode.ADD: 1.0, Mode.MUL: 2.0}
Pair = collections.namedtuple("Pair", "scale rest")


class Attributes(dict):
    __getattr__ = dict.__getitem__


class Answers:
    def __init__(self) -> None:
        self.table = {"scale": 1.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["table"][name]


def simple(build: Callable[[], Any], read: Callable[[Any], float], change: Callable[[Any, float], None]) -> Callable:
    """A row in which x is multiplied by a number found in a thing."""

    def make() -> tuple[Callable, Callable]:
        thing = build()

        def step(x: torch.Tensor) -> torch.Tensor:
            return x * read(thing) + 1

        return step, lambda n: change(thing, value(n))

    return make


def at(key: Any) -> Callable:
    def change(thing: Any, v: float) -> None:
        thing[key] = v

    return change


def named(name: str) -> Callable:
    return lambda thing, v: setattr(thing, name, v)


def read_only(v: float) -> np.ndarray:
    array = np.full(100_000, v)
    array.flags.writeable = False
    return array


def in_set(thing: set, v: float) -> None:
    thing.clear()
    thing.add(v)


def reordered(thing: dict, v: float) -> None:
    if v == 2.0:
        thing["a"] = thing.pop("a")


THINGS: dict[str, tuple[Callable, Callable, Callable]] = {
    "attribute": (Holder, lambda t: t.scale, named("scale")),
    "property": (Holder, lambda t: t.twice, named("scale")),
    "attribute that hides the class's": (Holder, lambda t: t.rate, lambda t, v: setattr(t, "rate", v) if v > 1 else None),
    "nested object": (
        lambda: types.SimpleNamespace(inner=Holder()), lambda t: t.inner.scale, lambda t, v: named("scale")(t.inner, v)
    ),
    "SimpleNamespace": (lambda: types.SimpleNamespace(scale=1.0), lambda t: t.scale, named("scale")),
    "argparse": (lambda: argparse.Namespace(scale=1.0), lambda t: t.scale, named("scale")),
    "dataclass": (Config, lambda t: t.scale, named("scale")),
    "asdict": (Config, lambda t: dataclasses.asdict(t)["scale"], named("scale")),
    "string flag": (
        Config, lambda t: 2.0 if t.name == "mul" else 1.0, lambda t, v: setattr(t, "name", "mul" if v == 2 else "add")
    ),
    "namedtuple": (lambda: [Pair(1.0, 0)], lambda t: t[0].scale, lambda t, v: at(0)(t, Pair(v, 0))),
    "dict": (lambda: {"scale": 1.0}, lambda t: t["scale"], at("scale")),
    "dict in dict": (lambda: {"a": {"scale": 1.0}}, lambda t: t["a"]["scale"], lambda t, v: at("scale")(t["a"], v)),
    "dict subclass": (lambda: Attributes(scale=1.0), lambda t: t.scale, at("scale")),
    "mapping proxy": (
        lambda: (d := {"scale": 1.0}, types.MappingProxyType(d)), lambda t: t[1]["scale"], lambda t, v: at("scale")(t[0], v)
    ),
    "UserDict": (lambda: collections.UserDict(scale=1.0), lambda t: t["scale"], at("scale")),
    "ChainMap": (lambda: collections.ChainMap({}, {"scale": 1.0}), lambda t: t["scale"], at("scale")),
    "order of a dict": (lambda: {"a": 2.0, "b": 3.0}, lambda t: next(iter(t.values())), reordered),
    "list": (lambda: [1.0], lambda t: t[0], at(0)),
    "list that grows": (lambda: [1.0], sum, lambda t, v: t.append(v) if len(t) < v else None),
    "deque": (lambda: collections.deque([1.0]), lambda t: t[0], at(0)),
    "set": (lambda: {1.0}, lambda t: max(t), in_set),
    "NumPy scalar": (lambda: [np.float32(1)], lambda t: float(t[0]), lambda t, v: at(0)(t, np.float32(v))),
    "NumPy array": (lambda: np.ones(3), lambda t: float(t[0]), at(0)),
    "NumPy array of a file": (lambda: [read_only(1.0)], lambda t: float(t[0][0]), lambda t, v: at(0)(t, read_only(v))),
    "large NumPy array": (lambda: np.ones(100_000), lambda t: float(t[0]), at(0)),
    "CPU tensor read": (lambda: torch.ones(3), lambda t: t[0].item(), lambda t, v: t.data.fill_(v)),
    "CPU tensor by NumPy": (lambda: torch.ones(3), lambda t: t[0].item(), lambda t, v: at(0)(t.numpy(), v)),
    "large CPU tensor": (lambda: torch.ones(100_000), lambda t: t[0].item(), lambda t, v: at(0)(t.numpy(), v)),
    "array": (lambda: array.array("d", [1.0]), lambda t: t[0], at(0)),
    "arguments of an exception": (lambda: ValueError(1.0), lambda t: t.args[0], lambda t, v: setattr(t, "args", (v,))),
    "decimal context": (
        decimal.Context, lambda t: float(t.divide(decimal.Decimal(2), 3)), lambda t, v: setattr(t, "prec", int(v))
    ),
    "bytearray": (lambda: bytearray(b"\1"), lambda t: t[0], lambda t, v: at(0)(t, int(v))),
    "sign of zero": (lambda: [0.0], lambda t: t[0], lambda t, v: at(0)(t, -0.0 if v == 2 else 0.0)),
    "int and float": (lambda: [1], lambda t: t[0], lambda t, v: at(0)(t, 1.0 if v == 2 else 1)),
    "subclass of float": (lambda: Rate(1.0), lambda t: t.total(), named("extra")),
    "Enum": (lambda: [Mode.ADD], lambda t: t[0].factor(), lambda t, v: at(0)(t, Mode.MUL if v == 2 else Mode.ADD)),
    "what an Enum's method reads": (lambda: Mode.ADD, lambda t: t.factor(), lambda t, v: FACTORS.update({Mode.ADD: v})),
    "__getattr__": (Answers, lambda t: t.scale, lambda t, v: at("scale")(t.table, v)),
    "context variable": (lambda: contextvars.ContextVar("scale", default=1.0), lambda t: t.get(), lambda t, v: t.set(v)),
    "context variable's default": (
        lambda: contextvars.ContextVar("scale", default=1.0), lambda t: t.get(), lambda t, v: t.set(v) if v != 1 else None
    ),
    "weak dictionary": (
        lambda: weakref.WeakKeyDictionary({Mode: 1.0}), lambda t: t[Mode], lambda t, v: at(Mode)(t, v)
    ),
    "iterator": (lambda: iter([1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0]), next, lambda t, v: None),
    "counter": (lambda: itertools.cycle([1.0, 1.0, 1.0, 2.0]), next, lambda t, v: None),
    "generator": (lambda: (1.0 + (n > 4) for n in range(99)), next, lambda t, v: None),
    "generator of its own": (lambda: random.Random(3), lambda t: t.choice([1.0, 1.0, 2.0]), lambda t, v: None),
    "NumPy generator": (lambda: np.random.default_rng(3), lambda t: float(t.integers(2)), lambda t, v: None),
    "method of an object": (lambda: Holder(), lambda t: t.scaled(2.0), named("scale")),
    "class of an object": (
        Holder, lambda t: 3.0 if type(t) is Holder else 1.0, lambda t, v: setattr(t, "__class__", Other if v == 2 else Holder)
    ),
}  # fmt: skip


class Other(Holder):
    pass


for _name, _parts in THINGS.items():
    ROWS[_name] = simple(*_parts)


@row
def random_of_python() -> tuple[Callable, Callable]:
    return lambda x: x * random.choice([1.0, 1.0, 1.0, 2.0]), lambda n: random.seed(3) if n == 0 else None


@row
def random_of_torch_on_the_host() -> tuple[Callable, Callable]:
    return lambda x: x * torch.randint(2, ()).item(), lambda n: torch.manual_seed(0) if n == 0 else None


@row
def random_of_numpy() -> tuple[Callable, Callable]:
    return lambda x: x * float(np.random.randint(2)), lambda n: np.random.seed(0) if n == 0 else None


@row
def the_environment() -> tuple[Callable, Callable]:
    def change(n: int) -> None:
        os.environ.pop("SCALE_OF_A_USER", None)
        if n < CALLS - 1:
            os.environ["SCALE_OF_A_USER"] = str(value(n))

    return lambda x: x * float(os.environ.get("SCALE_OF_A_USER", 1.0)), change


@row
def a_global() -> tuple[Callable, Callable]:
    def change(n: int) -> None:
        global RATE
        RATE = value(n)

    return lambda x: x * RATE, change


@row
def a_global_tensor_that_is_rebound() -> tuple[Callable, Callable]:
    def change(n: int) -> None:
        global weight
        if n == 0 or n in CHANGES:
            weight = torch.full((4,), value(n), device="remote")

    return lambda x: x * weight, change


@row
def a_modules_constant() -> tuple[Callable, Callable]:
    return lambda x: x * settings.RATE, lambda n: setattr(settings, "RATE", value(n))


@row
def a_constant_of_a_module_in_a_module() -> tuple[Callable, Callable]:
    return lambda x: x * settings.inner.RATE, lambda n: setattr(settings.inner, "RATE", value(n))


@row
def a_module_imported_inside() -> tuple[Callable, Callable]:
    sys.modules["settings_of_a_user"] = settings

    def step(x: torch.Tensor) -> torch.Tensor:
        from settings_of_a_user import RATE as rate

        return x * rate

    return step, lambda n: setattr(settings, "RATE", value(n))


@row
def default_arguments() -> tuple[Callable, Callable]:
    def step(x: torch.Tensor, scale: float = 1.0, *, shift: float = 1.0) -> torch.Tensor:
        return x * scale + shift

    def change(n: int) -> None:
        step.__defaults__ = (value(n),)
        step.__kwdefaults__ = {"shift": 2 * value(n)}

    return step, change


@row
def an_attribute_of_the_function() -> tuple[Callable, Callable]:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * getattr(inner, "scale", 5.0)

    return inner, lambda n: setattr(inner, "scale", value(n)) if n >= CHANGES[0] else None


@row
def a_partial() -> tuple[Callable, Callable]:
    table = {"scale": 1.0}
    return functools.partial(lambda t, x: x * t["scale"], table), lambda n: at("scale")(table, value(n))


@row
def a_bound_method() -> tuple[Callable, Callable]:
    holder = Holder()
    return holder.scaled, lambda n: named("scale")(holder, value(n))


@row
def a_class_attribute() -> tuple[Callable, Callable]:
    kind = type("Kind", (Holder,), {"rate": 1.0})
    holder = kind()
    return lambda x: x * holder.rate, lambda n: setattr(kind, "rate", value(n))


@row
def a_method_that_is_replaced() -> tuple[Callable, Callable]:
    kind = type("Kind", (Holder,), {"scaled": lambda self, x: x * 1})
    holder = kind()

    def change(n: int) -> None:
        if n in CHANGES:
            kind.scaled = lambda self, x: x * value(n)

    return lambda x: holder.scaled(x), change


@row
def a_cached_function() -> tuple[Callable, Callable]:
    table = {"scale": 1.0}

    @functools.lru_cache(maxsize=1)
    def scale() -> float:
        return table["scale"]

    def change(n: int) -> None:
        table["scale"] = value(n)
        scale.cache_clear()

    return lambda x: x * scale(), change


@row
def a_compiled_function_within() -> tuple[Callable, Callable]:
    table = {"scale": 1.0}
    inner = gt.compile(lambda x: x * table["scale"])
    return lambda x: inner(x) + 1, lambda n: at("scale")(table, value(n))


@row
def an_argument_that_is_returned() -> tuple[Callable, Callable]:
    return lambda x: [x, x * 2], lambda n: None


@row
def a_class_pattern() -> tuple[Callable, Callable]:
    config = Config()

    def step(x: torch.Tensor) -> torch.Tensor:
        match config:
            case Config(scale=s):
                return x * s
        return x

    return step, lambda n: named("scale")(config, value(n))


@row
def losses_kept_in_a_list() -> tuple[Callable, Callable]:
    losses: list = []

    def step(x: torch.Tensor) -> torch.Tensor:
        losses.append((x * 2).sum())
        return torch.stack(losses)

    return step, lambda n: None


@row
def a_default_dtype() -> tuple[Callable, Callable]:
    def change(n: int) -> None:
        torch.set_default_dtype(torch.float64 if n == CHANGES[0] else torch.float32)

    return lambda x: x + torch.ones(4, device="remote"), change


# ---- names that a namespace gets, where another one answered for them


class Parent:
    rate = 1.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.rate


class OtherParent:
    rate = 5.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.rate


@row
def a_subclass_gets_an_attribute() -> tuple[Callable, Callable]:
    class Child(Parent):
        pass

    child = Child()

    def change(n: int) -> None:
        if n in CHANGES:
            Child.rate = value(n)

    return child.scaled, change


@row
def a_subclass_gets_and_loses_a_method() -> tuple[Callable, Callable]:
    class Child(Parent):
        pass

    child = Child()

    def change(n: int) -> None:
        if n == CHANGES[0]:
            Child.scaled = lambda self, x: x + 7
        elif n == CHANGES[1]:
            del Child.scaled

    return lambda x: child.scaled(x), change


@row
def a_class_gets_another_base() -> tuple[Callable, Callable]:
    class Child(Parent):
        pass

    child = Child()

    def change(n: int) -> None:
        if n == CHANGES[0]:
            Child.__bases__ = (OtherParent,)

    return lambda x: child.scaled(x), change


@row
def an_object_gets_another_dictionary() -> tuple[Callable, Callable]:
    holder = Holder()

    def change(n: int) -> None:
        if n in CHANGES:
            holder.__dict__ = {"scale": value(n)}

    return holder.scaled, change


@row
def a_global_hides_a_builtin() -> tuple[Callable, Callable]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("def step(x):\n    return sum([x, x])", namespace)

    def change(n: int) -> None:
        if n == CHANGES[0]:
            namespace["sum"] = lambda parts: parts[0] * 10
        elif n == CHANGES[1]:
            del namespace["sum"]

    return namespace["step"], change


@row
def a_module_gets_an_attribute_with_a_default() -> tuple[Callable, Callable]:
    module = types.ModuleType("settings_with_defaults")

    def change(n: int) -> None:
        if n in CHANGES:
            module.extra = value(n)  # type: ignore[attr-defined]

    return lambda x: x * getattr(module, "extra", 3.0), change


@row
def tensors_get_and_lose_a_method() -> tuple[Callable, Callable]:
    def change(n: int) -> None:
        if n == CHANGES[0]:
            torch.Tensor.relu = lambda self: self - 1  # type: ignore[assignment, method-assign]
        elif n == CHANGES[1]:
            del torch.Tensor.relu

    return lambda x: (x - 2).relu(), change


@row
def a_class_of_torch_gets_and_loses_a_call() -> tuple[Callable, Callable]:
    layer = nn.ReLU()

    def change(n: int) -> None:
        if n == CHANGES[0]:
            nn.ReLU.__call__ = lambda self, x: x * 2  # type: ignore[method-assign]
        elif n == CHANGES[1]:
            del nn.ReLU.__call__

    return lambda x: layer(x - 2), change


@row
def a_list_of_a_library_changes() -> tuple[Callable, Callable]:
    given = list(sys.argv)
    before = len(given)

    def change(n: int) -> None:
        sys.argv[:] = [*given, *["--more"] * CHANGES.count(n)]

    return lambda x: x * (len(sys.argv) - before + 1), change


@row
def a_cache_is_cleared() -> tuple[Callable, Callable]:
    table = {"rate": 1.0}

    @functools.lru_cache
    def rate() -> float:
        return table["rate"]

    def change(n: int) -> None:
        table["rate"] = value(n)
        if n == CHANGES[1]:
            rate.cache_clear()

    return lambda x: x * rate(), change


@row
def a_module_is_imported_anew_inside() -> tuple[Callable, Callable]:
    def change(n: int) -> None:
        module = types.ModuleType("module_imported_anew")
        module.RATE = value(n)  # type: ignore[attr-defined]
        if n == 0 or n in CHANGES:
            sys.modules[module.__name__] = module

    def step(x: torch.Tensor) -> torch.Tensor:
        from module_imported_anew import RATE

        return x * RATE

    return step, change


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.usefixtures("plain_threads", "one")
def test_a_change_between_calls_is_seen(name: str) -> None:
    def run(compiled: bool) -> tuple[list, Any]:
        FACTORS.update({Mode.ADD: 1.0})
        step, change = ROWS[name]()
        called = gt.compile(step) if compiled else step
        found: list = []
        for n in range(CALLS):
            change(n)
            x = torch.arange(4.0) + n
            found.append(called(x if compiled else x.to("remote")))
        return [[t.cpu() for t in (r if isinstance(r, list) else [r])] for r in found], called

    want, _ = run(False)
    got, called = run(True)
    for n, (a, b) in enumerate(zip(want, got, strict=True)):
        for one, two in zip(a, b, strict=True):
            assert one.dtype == two.dtype and torch.equal(one, two), f"call {n}\n{called.explain()}"
            assert torch.equal(torch.signbit(one), torch.signbit(two)), f"call {n}\n{called.explain()}"
    refused = "not kept: " in called.explain()
    assert refused or sum(p.replays for p in called._programs) >= 2, called.explain()


# ---- training


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        gt.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).to("remote")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.extra: Any = None
        # User code that backward() alone calls, with state that nothing else names
        self.of_hooks = factors = {"factor": 1.0}
        self.model[0].bias.register_hook(lambda g: g * factors["factor"])
        self.model[3].bias.factor = 1.0  # an attribute of a tensor
        self.handle = self.model[3].bias.register_hook(lambda g: g * 2)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean() * self.model[3].bias.factor * getattr(self.model[3].weight, "other", 1.0)
        if loss.requires_grad:
            loss.backward()
            self.optimizer.step()
        return loss


def group(key: str, new: Any) -> Callable:
    return lambda t: t.optimizer.param_groups[0].update({key: new})


def frozen(t: Training) -> None:
    t.model[0].weight.requires_grad_(False)


def replaced(t: Training) -> None:
    t.model[3].weight = nn.Parameter(torch.ones(2, 8, device="remote"))
    t.optimizer.add_param_group({"params": [t.model[3].weight]})


def doubled(p: torch.Tensor) -> None:
    p.grad.mul_(2)


def hook_replaced(t: Training) -> None:
    t.handle.remove()
    t.model[3].bias.register_hook(lambda g: g * 3)


def new_data(t: Training) -> None:
    t.model[3].weight.data = torch.ones(2, 8, device="remote")


TRAININGS: dict[str, Callable[[Training], Any]] = {
    "lr": group("lr", 0.01),
    "momentum": group("momentum", 0.5),
    "weight decay": group("weight_decay", 0.1),
    "nesterov": group("nesterov", True),
    "eval": lambda t: t.model.eval(),
    "dropout's p": lambda t: setattr(t.model[2], "p", 0.1),
    "momentum of a norm": lambda t: setattr(t.model[1], "momentum", 0.5),
    "frozen": frozen,
    "hook on a module": lambda t: t.model[0].register_forward_hook(lambda m, i, o: o * 2),
    "hook on a parameter": lambda t: t.model[0].weight.register_hook(lambda g: g * 2),
    "hook after accumulation": lambda t: t.model[0].weight.register_post_accumulate_grad_hook(doubled),
    "state of a hook": lambda t: t.of_hooks.update(factor=3.0),
    "hook replaced": hook_replaced,
    "attribute of a tensor": lambda t: setattr(t.model[3].bias, "factor", 3.0),
    "attribute of a tensor that had none": lambda t: setattr(t.model[3].weight, "other", 3.0),
    "hook on the optimizer": lambda t: t.optimizer.register_step_pre_hook(lambda o, a, k: doubled(t.model[0].weight)),
    "parameter replaced": replaced,
    "parameter's data": new_data,
    "buffer rebound": lambda t: setattr(t.model[1], "running_mean", torch.ones(8, device="remote")),
    "module replaced": lambda t: t.model.__setitem__(2, nn.ReLU()),
    "module added": lambda t: t.model.append(nn.Tanh()),
    "a global hook": lambda t: setattr(
        t, "extra", nn.modules.module.register_module_forward_hook(lambda m, i, o: o * 2 if type(m) is nn.Linear else o)
    ),
    "gradients zeroed": lambda t: [p.grad.zero_() for p in t.model.parameters()],
    "gradients none": lambda t: t.optimizer.zero_grad(),
}


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.usefixtures("plain_threads", "one")
def test_a_change_of_the_training_is_seen(name: str) -> None:
    def run(compiled: bool) -> tuple[list, list]:
        training = Training()
        step = gt.compile(training.step) if compiled else training.step
        found = []
        try:
            for n in range(CALLS):
                if n == 5:
                    TRAININGS[name](training)
                x = torch.linspace(-1, 1, 24).reshape(6, 4) * (n + 1)
                found.append(step(x if compiled else x.to("remote")).detach().cpu())
        finally:
            if hasattr(training.extra, "remove"):
                training.extra.remove()
        return found, [t.cpu() for t in training.model.state_dict().values()]

    for a, b in zip(run(False), run(True), strict=True):
        for n, (one, two) in enumerate(zip(a, b, strict=True)):
            torch.testing.assert_close(two, one, rtol=0, atol=0, msg=lambda text, n=n: f"call or parameter {n}: {text}")


@pytest.mark.usefixtures("plain_threads", "one")
def test_tensors_that_a_hook_alone_knows_are_found() -> None:
    model = nn.Linear(4, 2).to("remote")
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step() or optimizers[p].zero_grad())

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    losses = [step(torch.ones(3, 4)).item() for _ in range(CALLS)]
    assert losses == sorted(losses, reverse=True) and step.explain().splitlines()[1].startswith("  program "), step.explain()


@pytest.mark.usefixtures("plain_threads", "one")
def test_a_trace_that_another_thread_makes_ends_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.fx, and so Inductor, replaces the call of all modules until its trace is made."""

    class Doubles(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model, call = Doubles(), nn.Module.__call__
    step = gt.compile(lambda x: model(x))
    for _ in range(CALLS):
        step(torch.ones(3, 4))
    replays = step._programs[0].replays
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *args: call(self, *args))
    step(torch.ones(3, 4))
    assert step._programs[0].replays == replays + 1, step.explain()


class DoublesOps(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, kinds: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.mean.default else result


class DoublesCalls(TorchFunctionMode):
    factor = 2

    def __torch_function__(self, func: Any, kinds: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.factor if func is torch.Tensor.mean else result


@pytest.mark.parametrize(
    "watched",
    [DoublesOps, DoublesCalls, lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t)],
    ids=["dispatch mode", "function mode", "saved tensors"],
)
@pytest.mark.usefixtures("plain_threads", "one")
def test_code_around_a_call_that_gets_its_ops_gets_them_at_each_call(watched: Callable) -> None:
    def run(compiled: bool) -> list:
        training, values = Training(), []
        step = gt.compile(training.step) if compiled else training.step
        for n in range(2 * CALLS):
            if n == CALLS + 2:
                DoublesCalls.factor = 3
            with watched() if n >= CALLS else contextlib.nullcontext():
                values.append(step(torch.ones(3, 4, device="remote") * n).item())
        DoublesCalls.factor = 2
        assert not compiled or ("active, which get" in step.explain() and step._programs[0].replays >= 2)
        return values

    assert run(True) == run(False)


def squares(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """A captured step that brings the model's values to 0."""

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


class OwnSGD(torch.optim.SGD):
    """A user's optimizer: it gets its rate as it was made."""


class OwnAdamW(torch.optim.AdamW):
    """Another."""


@pytest.mark.parametrize("kind", [OwnSGD, OwnAdamW])
@pytest.mark.usefixtures("plain_threads", "one")
def test_a_learning_rate_that_a_scheduler_changes_is_offered_its_cure_and_the_cure_works(kind: type) -> None:
    def run(lr: Any, **more: Any) -> tuple[list, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to("remote")
        optimizer = kind(model.parameters(), lr=lr, **more)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        step = squares(model, optimizer)
        losses = []
        for _ in range(CALLS):
            losses.append(step(torch.ones(3, 4)).item())
            scheduler.step()
        return losses, step

    want, step = run(0.1)
    cure = re.search(r"gets (lr=torch\.tensor\([^)]*\))( and fused=True)?", step.explain())
    assert cure, step.explain()
    got, step = run(torch.tensor(0.1, device="remote"), **({"fused": True} if cure[2] else {}))
    assert len(step._programs) == 1 and step._programs[0].replays >= CALLS - 4, step.explain()
    assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.usefixtures("plain_threads", "one")
def test_what_a_scheduler_changes_beside_the_rate_is_named_too_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 2).to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1, device="remote"), fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
    step = squares(model, optimizer)
    for _ in range(30):
        step(torch.ones(3, 4))
        scheduler.step()
    wanted = r"\['betas'\]\[0\] was 0.\d+ and is .*: each value .*cycle_momentum=False; .* without fused"
    assert re.search(wanted, step.explain()), step.explain()
    said = [record.getMessage() for record in caplog.records if "runs in parts" in record.getMessage()]
    assert len(said) <= 2, said


@pytest.mark.parametrize("mode", ["no_grad", "autocast", "inference", "anomaly"])
@pytest.mark.usefixtures("plain_threads", "one")
def test_a_mode_is_seen(mode: str) -> None:
    w = nn.Parameter(torch.linspace(0, 1, 16).reshape(4, 4).to("remote"))
    entered = {
        "no_grad": torch.no_grad,
        "autocast": lambda: torch.autocast("remote", torch.bfloat16),
        "inference": torch.inference_mode,
        "anomaly": functools.partial(torch.autograd.set_detect_anomaly, False),
    }[mode]
    step = gt.compile(lambda x: (x @ w).relu() * (2.0 if torch.is_grad_enabled() else 3.0))
    for n in range(CALLS):
        x = torch.randn(2, 4)
        if n in (4, 5, 8):
            with entered():
                got, want = step(x), (x.to("remote") @ w).relu() * (2.0 if torch.is_grad_enabled() else 3.0)
        else:
            got, want = step(x), (x.to("remote") @ w).relu() * 2.0
        assert got.dtype == want.dtype and torch.equal(got.cpu(), want.detach().cpu()), n


@pytest.mark.usefixtures("plain_threads", "one")
def test_memory_assigned_inside_is_not_lost() -> None:
    w = nn.Parameter(torch.ones(4, device="remote"))

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        w.data = w.data * 0.5
        return x * w

    for n in range(6):
        assert step(torch.ones(4)).tolist() == [0.5 ** (n + 1)] * 4
    assert "changes memory, requires_grad or hooks of w" in step.explain()


@pytest.mark.usefixtures("plain_threads", "one")
def test_two_compiled_functions_share_what_one_rebinds() -> None:
    state = {"h": torch.ones(4, device="remote")}

    @gt.compile
    def grow(x: torch.Tensor) -> torch.Tensor:
        state["h"] = state["h"] * 2
        return state["h"] + x

    @gt.compile
    def add(x: torch.Tensor) -> torch.Tensor:
        state["h"] = state["h"] + x
        return state["h"] * 1

    want = torch.ones(4)
    for n in range(8):
        x = torch.full((4,), float(n))
        want = want * 2
        assert torch.equal(grow(x).cpu(), want + x), n
        want = want + x
        assert torch.equal(add(x).cpu(), want), n


@pytest.mark.usefixtures("plain_threads", "one")
def test_a_miss_says_what_was_and_is_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    table = {"scale": 1.0}
    step = gt.compile(lambda x: x * table["scale"])
    with caplog.at_level(logging.WARNING, logger="gt"):
        for n in range(16):
            table["scale"] = float(n)
            assert step(torch.ones(2)).tolist() == [float(n)] * 2
    assert "test_compile_guards.py" in step.explain() and "a number in" in step.explain()
    assert len([r for r in caplog.records if "runs in parts" in r.message]) <= 2


@pytest.mark.usefixtures("one")
def test_explain_says_that_an_object_came_in_place_of_a_number() -> None:
    @gt.compile
    def step(x: torch.Tensor, scale: Any) -> torch.Tensor:
        return x * 2

    for scale in (3.0, 3.0, gt):
        step(torch.ones(4), scale)
    assert "argument 1, which was 3.0 and is an object" in step._why


@pytest.mark.usefixtures("plain_threads", "one")
def test_explain_says_in_what_a_call_is_another(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.ones(4, device="remote")
    held = torch.ones(4, device="remote")

    @gt.compile
    def step(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x * weight * scale

    calls: list[tuple[tuple, str]] = [
        ((torch.ones(4), 1.0), "the first call"),
        ((torch.ones(2, 4), 1.0), r"argument 0, which was a CPU tensor float32\[4\] and is a CPU tensor float32\[2, 4\]"),
        ((torch.ones(4), 2.5), r"argument 0, which was a CPU tensor float32\[2, 4\] and is a CPU tensor float32\[4\]"),
        ((torch.ones(4), 3.0), r"argument 1, which was 2.5 and is 3.0: to compute with it .* pass torch.tensor\(3.0\)"),
        ((held, 3.0), r"argument 0, which was a CPU tensor float32\[4\] and is a remote tensor f32\[4\]"),
        ((held,), "arguments in another structure"),
    ]
    for args, why in calls:
        for _ in range(3):
            step(*args)
        assert re.search(f"program .* recorded for: {why}", step.explain().splitlines()[1]), step.explain()
    with torch.no_grad():
        for _ in range(3):
            step(held)
    assert "recorded for: another mode (grad" in step.explain().splitlines()[1]
    assert "programs were recorded" not in caplog.text
    for _ in range(3):
        step(held, -1.0)
    assert caplog.text.count("8 programs were recorded") == 1


LIBRARY = """
import collections
class Lazy(dict):
    def items(self):
        raise ImportError("nothing is to be loaded for it")
registry, calls = Lazy(a=1), []
class Config:
    def __init__(self):
        self.scale, self.inner = 1.0, {"shift": 0.0}
class Layer:
    def __init__(self, config, mine):
        self.config, self.mine = config, mine
    def __call__(self, x):
        calls.append(len(registry))
        return x * self.config.scale + self.config.inner["shift"] + self.mine.bias
"""


class Given:
    """A user's object, of which only a library's code names what it has."""

    def __init__(self) -> None:
        self.bias = 0


@pytest.mark.usefixtures("plain_threads", "one")
def test_of_an_installed_package_objects_are_compared_and_code_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "installed_for_a_test.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(user_code, "_SITE_FOLDERS", (f"{tmp_path}/",))
    library = importlib.import_module("installed_for_a_test")
    layer = library.Layer(library.Config(), Given())
    step = gt.compile(lambda x: layer(x))
    x = torch.ones(2)
    for n, (scale, shift, bias) in enumerate([(1, 0, 0)] * 4 + [(2, 0, 0)] * 4 + [(2, 3, 0)] * 4 + [(2, 3, 4)] * 4):
        layer.config.scale, layer.config.inner["shift"], layer.mine.bias = scale, shift, bias
        assert step(x).tolist() == [scale + shift + bias] * 2, n
    assert len(step._programs) == 4 and len(library.calls) < 16, step.explain()


def test_a_notebooks_functions_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    started = types.ModuleType("__main__")
    started.__file__ = f"{user_code._SITE_FOLDERS[0]}ipykernel_launcher.py"
    monkeypatch.setitem(sys.modules, "__main__", started)
    importlib.import_module("yaml")
    assert not user_code.is_library("__main__") and user_code.is_library("yaml.loader") and not user_code.is_library(__name__)


def test_a_package_that_pip_put_into_a_folder_of_any_name_is_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "listed_for_a_test").mkdir()
    for file in ("listed_for_a_test/__init__.py", "listed_module_of_a_test.py", "own_for_a_test.py"):
        (tmp_path / file).write_text("")
    (tmp_path / "listed-1.0.dist-info").mkdir()
    (tmp_path / "listed-1.0.dist-info" / "RECORD").write_text(
        "listed_for_a_test/__init__.py,sha256=0,0\nlisted_module_of_a_test.py,,\nlisted-1.0.dist-info/RECORD,,\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = ("listed_for_a_test", "listed_module_of_a_test", "own_for_a_test")
    for name in names:
        monkeypatch.delitem(user_code._installed, name, raising=False)
        importlib.import_module(name)
    assert [user_code.is_library(name) for name in names] == [True, True, False]


class Growing(dict):
    """Its items() makes what it has not."""

    def items(self) -> Any:
        self["more"] = 1
        return super().items()


@pytest.mark.usefixtures("plain_threads", "one")
def test_looking_at_a_dictionary_runs_none_of_its_code() -> None:
    table = Growing(scale=2.0)
    step = gt.compile(lambda x: x * table["scale"])
    assert [step(torch.ones(1)).item() for _ in range(4)] == [2.0] * 4 and dict(table) == {"scale": 2.0}
    table["scale"] = 3.0
    assert step(torch.ones(1)).item() == 3.0


class Kind(tuple):
    """A pair that refuses to be counted, as e3nn's kinds of vectors do."""

    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.usefixtures("plain_threads", "one")
def test_a_tuple_that_refuses_len_is_compared() -> None:
    held = [Kind((2.0, "even"))]
    step = gt.compile(lambda x: x * held[0][0])
    assert [step(torch.ones(1)).item() for _ in range(4)] == [2.0] * 4 and ": 1 program" in step.explain()
    held[0] = Kind((3.0, "even"))
    assert step(torch.ones(1)).item() == 3.0


projection = torch.ones(100_000)  # a large CPU tensor, by chance with the name of an attribute


def test_an_attribute_is_not_the_global_of_its_name(one):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.projection(x)

    model = Model().to("remote")
    step = gt.compile(lambda x: model(x).sum())
    x = torch.randn(3, 4).to("remote")
    for _ in range(4):
        step(x).item()
    assert "1 program" in step.explain() and "parts" not in step.explain() and "projection" not in step.explain()


def tune() -> None: ...


def step() -> Callable[[], None]:
    from settings_of_a_user import RATE

    return lambda: print(RATE, tune)


def test_a_module_counts_where_the_code_imports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that somebody has imported may have the name of any function: `train`, `step`, `model`."""
    for name in ("step", "settings_of_a_user", "tune", f"{__package__}.print"):
        module = types.ModuleType(name)
        module.RATE = 1  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    paths = {item.path for item in snapshot({"": lambda: step()}).items}
    assert {"step.__code__", "settings_of_a_user.RATE"} <= paths, paths
    assert not {"step.RATE", "tune.RATE", "print.RATE"} & paths, paths


@pytest.mark.parametrize("device", ["cpu", "remote"])
def test_attributes_of_arguments_are_seen(device: str, one: None) -> None:
    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * x.scale  # type: ignore[attr-defined]

    x = torch.ones(3, device=device)
    for scale in (1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 1.0):
        x.scale = scale  # type: ignore[attr-defined]
        assert step(x).tolist() == [scale] * 3
    assert "whose attributes was (('scale', 0.5),) and is (('scale', 1.0),)" in step._why or step._programs[0].replays


def test_a_snapshot_begins_with_the_names_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inner:
        value = 3

    class Outer:
        inner, other = Inner(), 4

    held: dict[str, Any] = {"outer": Outer()}
    root = {"": lambda: held["outer"].inner.value}
    walks: list[Any] = []
    run = state_walk.StateWalker.run
    monkeypatch.setattr(state_walk.StateWalker, "run", lambda self: walks.append(self) or run(self))

    first = snapshot(root)
    cold = len(walks)
    again = snapshot(root, first.followed)
    assert len(walks) == cold + 1 > 2
    assert [item.path for item in again.items] == [item.path for item in first.items]

    # Code that names something else: what it reaches is found, as without the names from before
    held["more"] = lambda: held["outer"].other
    paths = [{item.path for item in snapshot(root, names).items} for names in (first.followed, None)]
    assert paths[0] == paths[1] and any(path.endswith(".other") for path in paths[0]), paths
