"""Compilation of several segments: lowered one after another, their kernels built beside; found on disk by the next process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from gt.ir.template import T
from gt.worker.engine.torch import TorchEngine
from gt.worker.engine.torch.compiler import lowering
from gt.worker.engine.torch.compiler.inductor import Inductor
from gt.worker.engine.torch.compiler.lowering import LoweringProcesses
from gt.worker.process.restart import children
from tests.helpers.compiled_parts import Script, replay, report, same
from tests.helpers.limits import limit

ROOT = Path(__file__).resolve().parents[3]

HAVE = any(map(shutil.which, ("g++", "clang++")))
compiler = pytest.mark.skipif(not HAVE, reason="no C++ compiler is found")


def segments(count: int) -> tuple[Script, dict[int, torch.Tensor]]:
    """Segments that all differ."""
    held = {1: torch.linspace(-1, 1, 12).view(3, 4)}
    script, x = Script(dict(held)), 1
    for n in range(count):
        (x,) = script.op("aten.mul.Scalar", [T(0), 1.25 + n], [x])
        (x,) = script.op("aten.tanh.default", [T(0)], [x])
        script.stop()
    return script, held


def compared(script: Script, held: dict[int, torch.Tensor]) -> dict[str, Any]:
    """The report of a program after replays with the values of its instructions."""
    got, want = (script.bench(backend, dict(held)) for backend in ("inductor", "eager"))
    for _ in range(2):
        replay(got)
        replay(want)
        same(got, want)
    return report(got)


def alone(function: Callable[[], None], folder: Path) -> None:
    """Call a function of this file in a process of its own, as a worker is one: torch's compiler has state of the process.

    folder: where Inductor keeps code, which is empty at first.
    """
    line = [sys.executable, "-c", f"import {__name__} as module; module.{function.__name__}()"]
    surroundings = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    done = subprocess.run(line, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=False, timeout=limit(120))
    assert done.returncode == 0, done.stderr


@compiler
def test_all_segments_are_lowered_before_a_kernel_is_waited_for(tmp_path: Path) -> None:
    alone(lower_before_waiting, tmp_path)


@compiler
def test_a_second_start_finds_all_segments_on_disk(tmp_path: Path) -> None:
    alone(start_twice, tmp_path)


def lower_before_waiting() -> None:
    import torch._inductor.compile_fx as module
    from torch._inductor.async_compile import AsyncCompile

    events: list[str] = []

    def logged(name: str, function: Callable) -> Callable:
        return lambda *args: (events.append(name), function(*args))[1]

    module.compile_fx = logged("lower", module.compile_fx)
    AsyncCompile.wait = logged("wait", AsyncCompile.wait)  # type: ignore[method-assign]
    wait, pool, uses_processes = AsyncCompile.wait, AsyncCompile.pool, AsyncCompile.use_process_pool
    torch._inductor.codecache.PyCodeCache.cache_clear()
    result = compared(*segments(3))
    assert result["compiled"] == 3, result["reasons"]
    assert events == ["lower"] * 3 + ["wait"] * 3
    assert AsyncCompile.wait is wait and AsyncCompile.pool is pool and AsyncCompile.use_process_pool == uses_processes
    assert not [t for t in threading.enumerate() if "kernel builds" in t.name]


@compiler
def test_processes_lower_segments_beside_the_worker_and_end_with_the_batch(tmp_path: Path) -> None:
    alone(lower_beside, tmp_path)


@compiler
def test_a_process_that_is_killed_while_it_lowers_costs_time_only(tmp_path: Path) -> None:
    alone(killed_beside, tmp_path)


@compiler
def test_a_program_is_lowered_by_processes_that_started_with_the_recorded_call(tmp_path: Path) -> None:
    alone(prepared_beside, tmp_path)


@compiler
def test_processes_that_have_lowered_a_small_graph_before_lower_segments(tmp_path: Path) -> None:
    alone(warmed_beside, tmp_path)


@compiler
def test_processes_with_nothing_to_do_end_by_themselves(tmp_path: Path) -> None:
    alone(idle_beside, tmp_path)


def test_requests_come_in_an_order_in_which_nobody_waits_for_a_process_that_is_not_ready() -> None:
    processes = LoweringProcesses(torch.device("cpu"), 0)
    assert list(processes.order(dict.fromkeys("abc", str))) == ["a", "b", "c"]
    processes.end()


@pytest.mark.parametrize("fault", ["lowering", "kernel"])
def test_a_segment_that_cannot_be_built_leaves_the_others_compiled(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    import torch._inductor.compile_fx as module
    from torch._inductor.async_compile import AsyncCompile

    lowered: list = []

    def compile_fx(graph: torch.fx.GraphModule, fakes: list) -> Callable:
        lowered.append(graph)
        AsyncCompile().wait({"number": len(lowered)})
        if fault == "lowering" and len(lowered) == 2:
            raise RuntimeError("no lowering")
        return graph

    def wait(self: Any, scope: dict[str, Any]) -> None:
        if fault == "kernel" and scope["number"] == 2:
            raise RuntimeError("no kernel")

    monkeypatch.setattr(module, "compile_fx", compile_fx)
    monkeypatch.setattr(AsyncCompile, "wait", wait)
    found = compared(*segments(3))
    assert found["compiled"] == 2 and found["reasons"] == [[1, f"RuntimeError: no {fault}"]], found


def prepared_beside() -> None:
    import gt.worker.engine.torch as engines

    engines.processes_beside = lambda device: 2
    engine = TorchEngine("cpu")
    engine.prepare_compilation(False)
    started = children()
    engine.prepare_compilation(True)  # of the next recorded call
    assert len(started) == 2 and children() == started
    script, held = segments(4)
    wait(engine._lowering._starts)  # type: ignore[union-attr]
    got = script.bench("inductor", dict(held), engine)
    for _ in range(2):
        replay(got)
    assert report(got)["compiled"] == 4 and not children()


def warmed_beside() -> None:
    """Each warms up once, whichever is first, and keeps no code of it."""
    warmed, exchange = list[int](), LoweringProcesses._exchange

    def noted(self: LoweringProcesses, process: Any, line: bytes) -> None:
        exchange(self, process, line)
        if line == lowering._WARM_UP:
            warmed.append(process.pid)

    lowering.gains_from_warm_up = lambda device: True
    LoweringProcesses._exchange = noted  # type: ignore[method-assign]
    engine, beside = with_processes()
    pids = {process.pid for process in beside._processes}
    beside._lowered(lambda: "no segment")  # waits for a process that is free
    script, held = segments(3)
    got, want = script.bench("inductor", dict(held), engine), script.bench("eager", dict(held))
    for _ in range(2):
        replay(got)
        replay(want)
        same(got, want)
    assert report(got)["compiled"] == 3 and not children()
    assert set(warmed) == pids and len(warmed) == 2, (warmed, pids)


def idle_beside() -> None:
    lowering.MAX_IDLE_SECONDS = 0.0
    lowering.gains_from_warm_up = lambda device: True
    beside = LoweringProcesses(torch.device("cpu"), 2)
    wait(beside._starts)
    for process in beside._processes:
        process.wait(limit(60))
    # More requests than processes: each finds one that has ended, and waits for none
    for _ in range(5):
        beside._lowered(str)
    assert list(beside.order(dict.fromkeys("ab", str)))
    beside.end()


def with_processes() -> tuple[TorchEngine, Any]:
    """An engine whose compiler has two processes that have started, and their object."""
    engine = TorchEngine("cpu")
    engine._inductor = Inductor(engine, LoweringProcesses(engine.device, 2))
    beside = engine._inductor._processes
    wait(beside._starts)
    return engine, beside


def lower_beside() -> None:
    from torch._dynamo.utils import counters

    count = 7
    script, held = segments(count)
    engine, _ = with_processes()
    got, want = script.bench("inductor", dict(held), engine), script.bench("eager", dict(held))
    counters.clear()
    for _ in range(2):
        replay(got)
        replay(want)
        same(got, want)
    result = report(got)
    assert result["compiled"] == count, result["reasons"]
    # The worker lowers the first one, and what no process has begun with by then.
    found = counters["inductor"]
    assert found["fxgraph_cache_hit"] >= 2 and found["fxgraph_cache_hit"] + found["fxgraph_cache_miss"] == count, found
    assert not children()


def killed_beside() -> None:
    script, held = segments(5)
    engine, beside = with_processes()
    lowered = engine._inductor._lower  # type: ignore[union-attr]

    def kill_first(*args: Any) -> Any:
        for process in beside._processes:
            process.kill()
        return lowered(*args)

    engine._inductor._lower = kill_first  # type: ignore[union-attr, method-assign]
    got, want = script.bench("inductor", dict(held), engine), script.bench("eager", dict(held))
    for _ in range(2):
        replay(got)
        replay(want)
        same(got, want)
    result = report(got)
    assert result["compiled"] == 5, result["reasons"]
    assert not children()


def start_twice() -> None:
    """A new engine remembers no segment, as that of a new process."""
    from torch._dynamo.utils import counters

    result = compared(*segments(3))
    assert result["compiled"] == 3, result["reasons"]
    torch._inductor.codecache.PyCodeCache.cache_clear()
    counters.clear()
    result = compared(*segments(3))
    assert result["compiled"] == 3, result["reasons"]
    found = counters["inductor"]
    assert found["fxgraph_cache_hit"] == 3 and not found["fxgraph_cache_miss"] and not found["fxgraph_cache_bypass"], found
