"""What a captured step reads by other means than names of its own: each change between calls is seen."""

from __future__ import annotations

import builtins
import ctypes
import enum
import functools
import importlib
import logging
import operator
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gt

ROWS: dict[str, Callable[[pytest.MonkeyPatch], tuple[Callable, Callable[[float], Any]]]] = {}

pytestmark = pytest.mark.usefixtures("plain_threads", "one")


def row(make: Callable) -> Callable:
    ROWS[make.__name__] = make
    return make


class Slow:
    _inner = None
    scale_ = 1.0
    scale = property(operator.attrgetter("scale_"))

    def factor(self) -> float:
        return self.scale_


class Pair(ctypes.Structure):
    _fields_ = [("first", ctypes.c_double), ("second", ctypes.c_double)]


class Kind(enum.Enum):
    ONE = 1


@row
def attribute_that_a_getter_names(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    thing = Slow()
    return lambda x: x * thing.scale, lambda value: setattr(thing, "scale_", value)


@row
def method_that_a_caller_names(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    thing, factor = Slow(), operator.methodcaller("factor")
    return lambda x: x * factor(thing), lambda value: setattr(thing, "scale_", value)


@row
def structure_of_c(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    pair = Pair(1.0, 2.0)
    return lambda x: x * pair.first, lambda value: setattr(pair, "first", value)


@row
def attribute_of_a_member(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    patch.setattr(Kind.ONE, "weight", 1.0, raising=False)
    kinds = [Kind.ONE]
    return lambda x: x * kinds[0].weight, lambda value: setattr(Kind.ONE, "weight", value)  # type: ignore[attr-defined]


@row
def view_of_a_dictionary(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    weights = {"a": 1.0}
    values = weights.values()
    return lambda x: x * sum(values), lambda value: weights.update({"a": value})


@row
def function_of_a_library(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    return lambda x: F.softsign(x), lambda value: patch.setattr(F, "softsign", lambda x: x * value)


@row
def method_of_a_librarys_class(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    layer = nn.Softsign()
    return lambda x: layer(x), lambda value: patch.setattr(nn.Softsign, "forward", lambda self, x: x * value)


@row
def builtin_function(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    return lambda x: x * round(1.2), lambda value: patch.setattr(builtins, "round", lambda number: value)


@row
def entry_of_globals(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    own: dict[str, Any] = {"factor": 1.0}
    exec("def step(x): return x * globals()['fact' + 'or']", own)
    return own["step"], lambda value: own.update(factor=value)


def _module(patch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("settings_of_the_step")
    module.scale = 1.0  # type: ignore[attr-defined]
    patch.setitem(sys.modules, module.__name__, module)
    return module


@row
def module_that_is_imported_by_a_text(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    module = _module(patch)
    return lambda x: x * importlib.import_module("settings_of_the_step").scale, functools.partial(setattr, module, "scale")


@row
def module_in_the_table_of_modules(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    module = _module(patch)
    return lambda x: x * sys.modules["settings_of_the_step"].scale, functools.partial(setattr, module, "scale")


@row
def level_of_a_log(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    parent, log = logging.getLogger("of_the_step"), logging.getLogger("of_the_step.part")
    parent.setLevel(logging.INFO)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if log.isEnabledFor(logging.DEBUG) else 1)

    return step, lambda value: parent.setLevel(logging.DEBUG if value == 2 else logging.INFO)


@pytest.mark.parametrize("name", ROWS)
def test_a_change_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(compiled: bool) -> tuple[list, Any]:
        with monkeypatch.context() as patch:
            step, change = ROWS[name](patch)
            called, found = gt.compile(step) if compiled else step, []
            for n in range(12):
                if n in (4, 8):
                    change(n / 2)
                found.append(called(torch.arange(3.0).to("remote") + n))
            return [value.tolist() for value in found], called

    want, got = run(False)[0], run(True)
    assert got[0] == want
    assert sum(program.replays for program in got[1]._programs) >= 3, got[1].explain()


@pytest.mark.parametrize("kind", ["logs", "warns"])
def test_what_was_hidden_and_is_shown_now_is_shown_at_each_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list = []
    log, handler = logging.getLogger("of_a_step_that_logs"), logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    monkeypatch.setattr(log, "handlers", [handler])

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        log.debug("a step") if kind == "logs" else warnings.warn("a step", stacklevel=1)
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monkeypatch.setattr(warnings, "showwarning", lambda *args: seen.append(args))
        for n in range(10):
            if n == 5:
                assert step._programs[0].replays == 3 and not seen
                warnings.simplefilter("always")
                log.setLevel(logging.DEBUG)
            assert step(torch.ones(2)).tolist() == [2, 2]
    log.setLevel(logging.NOTSET)
    assert len(seen) == 5


def test_an_attribute_of_a_result_is_there_at_each_call() -> None:
    weight = torch.ones(3, device="remote", requires_grad=True)

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        result = x * weight
        result.rows = len(x)
        return result

    assert [step(torch.ones(3)).rows for _ in range(6)] == [3] * 6  # type: ignore[attr-defined]
    assert "gives a result the attribute 'rows'" in step.explain()
