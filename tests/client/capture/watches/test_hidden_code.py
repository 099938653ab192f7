"""User code that only torch or a library knows has its effects at each call of a captured step, as in an eager one."""

from __future__ import annotations

import gc
import itertools
import os
import pathlib
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gt
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace.op_info import info_of

pytestmark = pytest.mark.usefixtures("plain_threads", "one")
CALLS, CHANGE = 9, 5
NAMES = itertools.count()
calls = 0
library = torch.library.Library("hidden_code", "DEF")


class Training:
    """A model of two layers, with code of the user's between them and behind the update."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).to("remote")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.between: Callable[[torch.Tensor], Any] = lambda h: None
        self.behind: Callable[[], Any] = lambda: None
        self.before: Callable[[int], Any] = lambda n: None

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        h = self.model[0](x)
        other = self.between(h)
        loss = self.model[1](h if other is None else other).square().mean()
        loss.backward()
        self.optimizer.step()
        self.behind()
        return loss.detach()

    def accumulate(self) -> Any:
        """The node that accumulates the gradient of the first weight."""
        weight = self.model[0].weight
        return weight.view_as(weight).grad_fn.next_functions[0][0]


Row = Callable[[Training], Callable[[], Any]]
ROWS: dict[str, Row] = {}


def row(make: Row) -> Row:
    ROWS[make.__name__] = make
    return make


def outcome(make: Row, compiled: bool) -> tuple[list[float], Any]:
    """The losses, and what the row reads in the end."""
    global calls
    calls = 0
    training = Training()
    read = make(training)
    step = gt.compile(training.step) if compiled else training.step
    losses = []
    for n in range(CALLS):
        training.before(n)
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(n))
        losses.append(step(x if compiled else x.to("remote")).item())
    return losses, read()


def counts(*_: Any) -> None:
    global calls
    calls += 1


@row
def hook_of_a_node(training: Training) -> Callable:
    node = training.accumulate()
    node.register_hook(lambda inputs, outputs: counts())
    return lambda: (calls, node.name())


@row
def hook_before_a_node_that_fills_a_dictionary(training: Training) -> Callable:
    node, seen = training.accumulate(), {"calls": 0}

    def hook(gradients: Any) -> None:
        seen["calls"] += 1

    node.register_prehook(hook)
    return lambda: (seen, node.name())


@row
def hook_of_a_node_that_is_added_later(training: Training) -> Callable:
    node = training.accumulate()
    training.before = lambda n: node.register_prehook(lambda g: (g[0] * 2,)) if n == CHANGE else None
    return lambda: None


@row
def hook_of_a_node_that_is_removed(training: Training) -> Callable:
    node = training.accumulate()
    handle = node.register_prehook(lambda g: (g[0] * 2,))
    training.before = lambda n: handle.remove() if n == CHANGE else None
    return lambda: node.name()


@row
def hook_of_a_node_that_ends(training: Training) -> Callable:
    nodes = [training.accumulate()]
    nodes[0].register_prehook(lambda g: (g[0] * 2,))
    training.before = lambda n: nodes.clear() if n == CHANGE else None
    return lambda: None


@row
def hook_of_a_node_that_uses_a_number(training: Training) -> Callable:
    node, factor = training.accumulate(), [2.0]
    node.register_prehook(lambda g: (g[0] * factor[0],))
    training.before = lambda n: factor.append(factor.pop() + 1) if n == CHANGE else None
    return lambda: node.name()


@row
def hook_of_a_node_that_is_there_once(training: Training) -> Callable:
    node, handles = training.accumulate(), []

    def hook(gradients: Any) -> Any:
        handles.pop().remove()
        return (gradients[0] * 2,)

    training.before = lambda n: handles.append(node.register_prehook(hook)) if n > 2 else None
    return lambda: node.name()


@row
def hooks_of_nodes_of_the_step(training: Training) -> Callable:
    def between(h: torch.Tensor) -> None:
        h.grad_fn.register_hook(lambda inputs, outputs: counts())  # type: ignore[union-attr]

    training.between = between
    return lambda: calls


@row
def kernel_of_an_op(training: Training) -> Callable:
    name = f"twice{next(NAMES)}"
    library.define(f"{name}(Tensor x) -> Tensor")

    def kernel(x: torch.Tensor) -> torch.Tensor:
        counts()
        return x * 2

    library.impl(name, kernel, "CompositeImplicitAutograd")
    training.between = lambda h: getattr(torch.ops.hidden_code, name)(h)
    return lambda: calls


@row
def kernel_of_an_op_that_uses_a_number(training: Training) -> Callable:
    name, factor = f"times{next(NAMES)}", [2.0]
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x * factor[0], "CompositeImplicitAutograd")
    training.between = lambda h: getattr(torch.ops.hidden_code, name)(h)
    training.before = lambda n: factor.append(factor.pop() + 1) if n == CHANGE else None
    return lambda: None


class Counting(type):
    def __call__(cls) -> Any:
        counts()
        return super().__call__()


class Made(metaclass=Counting): ...


@row
def class_of_a_class(training: Training) -> Callable:
    training.between = lambda h: Made() and None
    return lambda: calls


@row
def code_of_exec(training: Training) -> Callable:
    space: dict[str, Any] = {"counts": counts, "factor": 1.0}
    exec("def between(h):\n    counts()\n    return h * factor", space)
    training.between = space["between"]
    training.before = lambda n: space.update(factor=2.0) if n == CHANGE else None
    return lambda: calls


@row
def method_in_c(training: Training) -> Callable:
    weight = training.model[0].weight
    weight.register_post_accumulate_grad_hook([].append)
    return lambda: len(next(iter(weight._post_accumulate_grad_hooks.values())).__self__)


@row
def event_of_threads(training: Training) -> Callable:
    event = threading.Event()
    training.between = lambda h: h * 2 if event.is_set() else None
    training.before = lambda n: event.set() if n == CHANGE else None
    return lambda: None


@row
def event_that_is_set(training: Training) -> Callable:
    event, seen = threading.Event(), []

    def before(n: int) -> None:
        seen.append(event.is_set())
        event.clear()

    training.behind, training.before = event.set, before
    return lambda: seen


@row
def queue_in_c(training: Training) -> Callable:
    values: queue.SimpleQueue = queue.SimpleQueue()
    training.behind = lambda: values.put(1)
    return values.qsize


@row
def array_of_objects(training: Training) -> Callable:
    array = np.empty(1, dtype=object)
    array[0] = [1.0]
    training.between = lambda h: h * array[0][0]
    training.before = lambda n: array[0].append(array[0].pop() + 1) if n == CHANGE else None
    return lambda: None


@row
def view_of_bytes(training: Training) -> Callable:
    view = memoryview(bytearray(b"\1"))

    def before(n: int) -> None:
        view[0] = 1 + (n >= CHANGE)

    training.between, training.before = lambda h: h * view[0], before
    return lambda: None


@row
def default_dtype(training: Training) -> Callable:
    seen = []

    def before(n: int) -> None:
        seen.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)

    training.before, training.behind = before, lambda: torch.set_default_dtype(torch.float64)
    return lambda: (seen, torch.set_default_dtype(torch.float32))


@row
def write_to_a_pipe(training: Training) -> Callable:
    reader, writer = os.pipe()
    training.behind = lambda: os.write(writer, b"a")

    def read() -> bytes:
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            return file.read()

    return read


@row
def process(training: Training) -> Callable:
    codes: list[int] = []
    training.before = lambda n: codes.append(0)

    def behind() -> None:
        codes[-1] = subprocess.run([sys.executable, "-S", "-c", "raise SystemExit(3)"], check=False).returncode

    training.behind = behind
    return lambda: codes


@pytest.mark.parametrize("name", ROWS)
def test_code_that_a_library_calls_has_its_effects_at_each_call(name: str) -> None:
    assert outcome(ROWS[name], True) == outcome(ROWS[name], False)


def test_a_file_that_pathlib_opens_is_output(tmp_path: pathlib.Path) -> None:
    def file(training: Training) -> Callable:
        path, seen = tmp_path / "file", []
        path.unlink(missing_ok=True)

        def before(n: int) -> None:
            seen.append(path.exists())
            path.unlink(missing_ok=True)

        training.behind, training.before = lambda: path.write_text("a"), before
        return lambda: seen

    assert outcome(file, True) == outcome(file, False)


def test_a_counter_in_a_hook_of_a_node_counts_in_replays() -> None:
    training = Training()
    hook_of_a_node(training)
    step = gt.compile(training.step)
    read = hook_of_a_node(training)
    before = calls
    for _ in range(CALLS):
        step(torch.ones(5, 4))
    assert read()[0] == before + CALLS and step._programs[0].replays >= CALLS - 4, step.explain()


def test_code_of_a_program_that_has_frozen_its_objects_is_found() -> None:
    training = Training()
    kernel_of_an_op_that_uses_a_number(training)
    gc.freeze()  # as some programs do once everything is made; the fixture `frozen` takes it back
    step = gt.compile(training.step)
    for _ in range(CALLS):
        step(torch.ones(5, 4))
    assert step._programs[0].replays, step.explain()


def test_explain_names_code_that_cannot_be_compared() -> None:
    """A function that ends with each call has no object to look for."""
    training = Training()

    def between(h: torch.Tensor) -> torch.Tensor:
        space: dict[str, Any] = {"counts": counts}
        exec("def made_in_the_call(h):\n    counts()\n    return h * 1.0", space)
        return space["made_in_the_call"](h)

    training.between = between
    step, before = gt.compile(training.step), calls
    for _ in range(CALLS):
        step(torch.ones(5, 4))
    assert calls == before + CALLS
    assert "<module> runs in each call, and GT finds no function of it" in step.explain(), step.explain()


def test_a_profiler_of_the_program_stays() -> None:
    seen: set[str] = set()
    sys.setprofile(profiler := lambda frame, event, _: seen.add(frame.f_code.co_name))
    try:
        training = Training()
        step = gt.compile(training.step)
        for _ in range(4):
            step(torch.ones(5, 4))
        assert sys.getprofile() is profiler and "step" in seen
    finally:
        sys.setprofile(None)
    assert step._programs[0].replays


class OfAnotherModule:
    """Its `__module__` is a descriptor, as that of typing.TypeAliasType in Python 3.12."""

    __module__ = property(lambda self: "somewhere")  # type: ignore[assignment]


def test_a_class_whose_module_is_a_descriptor_can_be_reached() -> None:
    held = {"kind": OfAnotherModule, "object": OfAnotherModule()}

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * len(held)

    for n in range(4):
        assert step(torch.full((2,), float(n)).to("remote")).tolist() == [2.0 * n] * 2


def test_a_recorded_call_is_watched_outside_of_gts_own_code_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler within each op costs as much as the op."""
    training, seen = Training(), []
    original = RemoteTensor.__torch_dispatch__
    training.between = lambda h: seen.append(RemoteTensor.__torch_dispatch__)
    handler = info_of(torch.ops.aten.detach.default).handler

    def noting(*call: Any) -> Any:
        seen.append(sys.getprofile())
        return handler(*call)

    monkeypatch.setattr(info_of(torch.ops.aten.detach.default), "handler", noting)
    gt.compile(training.step)(torch.ones(5, 4))
    inside, *profilers = seen
    assert RemoteTensor.__torch_dispatch__ is original and sys.getprofile() is None
    if sys.version_info < (3, 12):
        assert inside is not original and profilers and not any(profilers)
    assert all(p.grad is not None and p.grad.grad_fn is None for p in training.model.parameters())


def test_another_threads_ops_are_not_watched() -> None:
    training, seen = Training(), []

    def between(h: torch.Tensor) -> None:
        thread = threading.Thread(target=lambda: seen.append((torch.ones(2, device="remote") * 2, sys.getprofile())))
        thread.start()
        thread.join()

    training.between = between
    gt.compile(training.step)(torch.ones(5, 4))
    assert seen[0][0].tolist() == [2.0, 2.0] and seen[0][1] is None


def test_a_line_of_a_librarys_traceback_is_no_code_of_the_users() -> None:
    """Cython's modules for any version of Python evaluate such code where they raise an error, also one that they catch."""
    training = Training()
    line = compile("getframe()", "library/module.pyx", "eval").replace(co_name="library.module.check")

    def between(h: torch.Tensor) -> torch.Tensor:
        eval(line, {"getframe": sys._getframe})
        return h * 1.0

    training.between = between
    step = gt.compile(training.step)
    for _ in range(CALLS):
        step(torch.ones(5, 4))
    assert step._programs[0].replays, step.explain()
    assert "library.module.check" not in step.explain()
