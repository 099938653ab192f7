"""What a captured step asks of libraries and of C, by whatever name: each change between calls is seen."""

from __future__ import annotations

import ctypes
import decimal
import functools
import hashlib
import locale
import logging
import os
import sys
import threading
import types
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy import geterr, loadtxt
from torch import initial_seed

import gt
from gt.client.values import settings

# A question, and a change by a number of the answer to it
ROWS: dict[str, Callable[[pytest.MonkeyPatch], tuple[Callable[[], float], Callable[[int], Any]]]] = {}
CALLS = 12

pytestmark = pytest.mark.usefixtures("plain_threads", "one")


def row(make: Callable) -> Callable:
    ROWS[make.__name__] = make
    return make


@row
def seed_by_a_name_of_its_own(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    return lambda: initial_seed() % 100, lambda n: torch.default_generator.manual_seed(n)


@row
def seed_of_the_generator(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    return lambda: torch.default_generator.initial_seed() % 100, lambda n: torch.default_generator.manual_seed(n)


@row
def state_of_numpys_generator(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    return lambda: float(np.random.get_state()[1][0] % 1000), np.random.seed  # type: ignore[index]


@row
def precision_of_decimals(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    patch.setattr(decimal.getcontext(), "prec", 28)
    return lambda: float(decimal.Decimal(1) / 3), lambda n: setattr(decimal.getcontext(), "prec", n)


@row
def level_of_a_named_log(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    log = logging.getLogger("asked.by.name")
    patch.setattr(log, "level", 0)
    return lambda: logging.getLogger("asked.by.name").level, lambda n: log.setLevel(n)


@row
def level_of_a_log_whose_name_is_made(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    log = logging.getLogger("asked.by.name2")
    patch.setattr(log, "level", 0)
    return lambda: logging.getLogger(f"asked.by.{'name'}{1 + 1}").level, lambda n: log.setLevel(n)


@row
def file_of_numbers(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    path = f"{os.environ['ASKED_FOLDER']}/numbers"
    np.savetxt(path, [1.0])
    return lambda: float(loadtxt(path)), lambda n: np.savetxt(path, [n])


@row
def cell(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    cells = [types.CellType(1.0)]
    return lambda: cells[0].cell_contents, lambda n: setattr(cells[0], "cell_contents", n)


@row
def lock(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    held = threading.Lock()
    return lambda: 2 if held.locked() else 1, lambda n: held.release() if held.locked() else held.acquire()


@row
def options_of_prints(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    options = torch._tensor_str.PRINT_OPTS
    patch.setattr(options, "precision", 4)
    return lambda: len(str(torch.tensor(1 / 3))), lambda n: setattr(options, "precision", n)


@row
def errors_of_numpy(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    return lambda: len(geterr()["divide"]), lambda n: np.seterr(divide="ignore" if n == 2 else "warn")


@row
def flag_of_a_backend(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    return lambda: 2 if torch.backends.cuda.flash_sdp_enabled() else 1, lambda n: torch.backends.cuda.enable_flash_sdp(n == 4)


@row
def environment_in_a_path(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    patch.setenv("ASKED", "1")
    return lambda: float(os.path.expandvars("$ASKED")), lambda n: os.environ.update(ASKED=str(n))


@row
def threads_that_run(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    count = threading.active_count
    names = iter(["a", "b"])
    return lambda: len(threading.current_thread().name) + 0 * count(), lambda n: patch.setattr(
        threading.current_thread(), "name", next(names)
    )


@row
def country(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    return lambda: len(locale.setlocale(locale.LC_NUMERIC)), lambda n: locale.setlocale(
        locale.LC_NUMERIC, "C.UTF-8" if n == 2 else "C"
    )


@row
def read_only_view_of_a_large_array(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    large = np.ones(1 << 17)
    view = large[:]
    view.flags.writeable = False
    return lambda: float(view[0]), lambda n: large.__setitem__(0, n)


@row
def version_of_a_tensor(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    counted = torch.zeros(2, device="remote")
    return lambda: counted._version, lambda n: counted.add_(1)


@row
def version_of_a_parameter(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    module = torch.nn.Linear(2, 2).to("remote")
    return lambda: module.weight._version, lambda n: torch.autograd.graph.increment_version(module.weight)


@row
def version_of_each_parameter(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    module = torch.nn.Linear(2, 2).to("remote")
    return lambda: sum(p._version for p in module.parameters()), lambda n: torch.autograd.graph.increment_version(module.bias)


@row
def contraction_order(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    behind = torch.backends.opt_einsum.m
    return lambda: 1 if torch.backends.opt_einsum.enabled else 2, lambda n: patch.setattr(behind, "enabled", n == 2)


@row
def fast_path_of_attention(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    patch.setattr(torch.backends.mha, "_is_fastpath_enabled", True)
    return lambda: 1 if torch.backends.mha.get_fastpath_enabled() else 2, lambda n: (
        torch.backends.mha.set_fastpath_enabled(n == 4)
    )


@row
def precision_of_one_backend(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    return lambda: 1 if torch.backends.mkldnn.matmul.fp32_precision == "ieee" else 2, lambda n: setattr(
        torch.backends.mkldnn.matmul, "fp32_precision", "ieee" if n == 2 else "none"
    )


@row
def traps_of_decimals(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    context = decimal.getcontext()
    context.traps[decimal.DivisionByZero] = False

    def divided() -> int:
        try:
            return 1 if decimal.Decimal(1) / 0 else 0
        except decimal.DivisionByZero:
            return 2

    return divided, lambda n: context.traps.__setitem__(decimal.DivisionByZero, n == 2)


@row
def flags_of_decimals(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    context = decimal.getcontext()
    return lambda: 1 + decimal.getcontext().flags[decimal.Inexact], lambda n: context.flags.__setitem__(decimal.Inexact, n == 2)


@row
def size_of_numpys_buffer(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    return lambda: np.getbufsize() // 8192, lambda n: np.setbufsize(int(n) * 8192)


@row
def attribute_of_a_cpu_tensor(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    tensor: Any = torch.zeros(2)
    tensor.weight = 1.0
    return lambda: tensor.weight, lambda n: setattr(tensor, "weight", n)


@row
def gradient_of_a_cpu_tensor(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    tensor = torch.zeros(2, requires_grad=True)
    return lambda: 1 if tensor.grad is None else 2, lambda n: setattr(tensor, "grad", torch.ones(2) if n == 2 else None)


@row
def cpu_tensor_that_is_a_key(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    table = {torch.ones(1): 1}
    return lambda: float(next(iter(table))), lambda n: next(iter(table)).fill_(n)


class Rated:
    rate = torch.ones(1)


@row
def cpu_tensor_of_a_class(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    patch.setattr(Rated, "rate", torch.ones(1))
    thing = Rated()
    return lambda: float(thing.rate), lambda n: Rated.rate.fill_(n)


@row
def pointer(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    number = ctypes.c_double(1.0)
    to = ctypes.pointer(number)
    return lambda: to.contents.value, lambda n: setattr(number, "value", n)


@row
def static_method_as_an_object(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    factor = [1.0]
    methods = [staticmethod(lambda: factor[0])]
    return lambda: methods[0](), functools.partial(factor.__setitem__, 0)


@row
def hash_and_element(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    digest, element = hashlib.sha1(), ET.Element("a", n="1")

    def change(n: int) -> None:
        digest.update(b"more")
        element.set("n", str(n))

    return lambda: digest.digest()[0] + float(element.get("n", "")), change


@row
def module_that_is_there(patch: pytest.MonkeyPatch) -> tuple[Callable, Callable]:
    patch.delitem(sys.modules, "asked_for_by_a_step", raising=False)
    return lambda: 2 if "asked_for_by_a_step" in sys.modules else 1, lambda n: patch.setitem(
        sys.modules, "asked_for_by_a_step", types.ModuleType("asked_for_by_a_step")
    )


@pytest.fixture
def restored(tmp_path: Any) -> Any:
    """The settings of the process afterwards."""
    os.environ["ASKED_FOLDER"] = str(tmp_path)
    buffer, context = np.getbufsize(), decimal.getcontext().copy()
    before = np.geterr(), torch.backends.cuda.flash_sdp_enabled(), locale.setlocale(locale.LC_NUMERIC)
    yield
    del os.environ["ASKED_FOLDER"]
    np.setbufsize(buffer)
    decimal.setcontext(context)
    np.seterr(**before[0])
    torch.backends.cuda.enable_flash_sdp(before[1])
    locale.setlocale(locale.LC_NUMERIC, before[2])


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("name", ROWS)
def test_a_change_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        ask, change = ROWS[name](patch)
        step = gt.compile(lambda x: x * ask())
        for n in range(CALLS):
            if n in (4, 8):
                change(n // 2)
            got = step(torch.full((2,), n + 1.0)).tolist()
            assert got == [float(torch.tensor(n + 1.0) * ask())] * 2, (n, step.explain())


def test_a_lock_that_a_step_only_takes_and_settings_of_others_prevent_no_program() -> None:
    held, log = threading.Lock(), logging.getLogger("asked.by.name3")

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        with held:
            log.debug("a step")
            return x * 2

    for _ in range(CALLS):
        step(torch.ones(2))
    assert step._programs[0].replays >= CALLS - 4, step.explain()


class Scaled(torch.nn.Module):
    scale, order = torch.ones(3), torch.tensor([0, 1, 2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale.to(x.device))[self.order]


def test_cpu_tensors_of_a_class_that_a_step_uploads_are_inputs_of_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scaled, "scale", torch.ones(3))
    monkeypatch.setattr(Scaled, "order", torch.tensor([0, 1, 2]))
    module, x = Scaled(), torch.arange(3.0)
    step = gt.compile(module.forward)
    for n in range(CALLS):
        if n == CALLS - 3:
            Scaled.scale.mul_(2)
            Scaled.order.copy_(torch.tensor([2, 0, 1]))
        assert step(x).tolist() == module(x).tolist(), n
    assert step._programs[0].replays >= CALLS - 5, step.explain()


class Versioned(torch.nn.Module):
    _version = "1.2"

    def __init__(self) -> None:
        super().__init__()
        self.home, self.factor = "here", 2.0

    def get_state(self) -> float:
        return self.factor if self._version and self.home else 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.get_state()


def test_names_that_the_users_own_objects_have_too_prevent_no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Versioned()
    step = gt.compile(module.forward)
    for n in range(CALLS):
        monkeypatch.setenv("ASKED", str(n))
        x = torch.randn(3)
        assert torch.equal(step(x).cpu(), 2 * x)
    assert step._programs[0].replays >= CALLS - 4, step.explain()


def test_a_pointer_to_memory_that_nobody_keeps_is_not_followed() -> None:
    kind = ctypes.POINTER(ctypes.c_int)
    handles = {"a": ctypes.cast(0x10, kind), "b": ctypes.cast(ctypes.c_void_p(0x10), kind), "factor": 2.0}
    step = gt.compile(lambda x: x * handles["factor"])
    assert [step(torch.ones(2)).tolist() for _ in range(CALLS)] == [[2.0, 2.0]] * CALLS


def test_a_precision_of_which_torch_has_no_one_answer_prevents_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> bool:
        raise RuntimeError("some ops have it")

    monkeypatch.setattr(settings, "_FLAGS", (refuses,))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuses)
    step = gt.compile(lambda x: x * 2)
    assert [step(torch.ones(2)).tolist() for _ in range(CALLS)] == [[2.0, 2.0]] * CALLS


def test_a_tensor_that_cannot_be_compared_prevents_no_call() -> None:
    parts = {"sparse": torch.eye(3).to_sparse(), "factor": 2.0}
    step = gt.compile(lambda x: x * parts["factor"])
    for n in range(CALLS):
        parts["factor"] = float(n)
        assert step(torch.ones(2)).tolist() == [n, n]
