"""Fixtures: one server with eight CPU workers for the whole run, sessions on it, checks that nothing is left behind.

Everything of GT is imported inside the fixtures, so that tests of pure parts run without the rest.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.helpers.processes import MARK, of_the_server, started, wait_until

WORKERS = 8
os.environ[MARK] = uuid.uuid4().hex  # each process of xdist has its own
# Before torch is imported: OpenMP's threads wait asleep, here and in processes that tests start. By default they spin, and
# where other processes have the cores too, a small model's step takes 20 times the CPU time. No result depends on it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has it ignored in what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
# An example that takes long is the machine's or a collection's matter
hypothesis.settings.register_profile("gt", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("gt")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the machine's GPUs, unless GPU tests are asked for: where torch sees one, the name `remote` is registered later."""
    if not any("gpu" in asked for asked in (config.option.markexpr, *map(str, config.args))):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run backward of local CUDA tensors go first: torch refuses it in a process that has named `remote`.

    Then files with slow tests: a long file that comes last keeps one process of tests, and the other waits.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.get_closest_marker("local_cuda") is None, item.path not in slow))


# ---- nothing is left behind


def ours() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith("GT_")}


def left_groups() -> list[str]:
    """Signal groups that a test has left entered. They are left here, or later tests would run in them."""
    module = sys.modules.get("gt.client.groups.group_context")
    if module is None or not module.stack.scope().group:
        return []
    names = [entry.path for entry in module.stack.entries[1:]]
    module.stack.leave(1)
    return names


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a variable of ours, a signal group, a thread or a process behind, but the shared server's."""
    variables, threads, processes = ours(), set(threading.enumerate()), set(started())
    yield
    if ours() != variables:
        pytest.fail(f"left the environment as {ours()}, it was {variables}")

    if names := left_groups():
        pytest.fail(f"left the signal groups {names} entered")

    def new_threads() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t not in threads and t.is_alive() and t.name.startswith("gt")]

    def new_processes() -> dict[int, str]:
        return {pid: line for pid, line in started().items() if pid not in processes | of_the_server}

    if not wait_until(lambda: not new_threads()):
        pytest.fail(f"left threads {[t.name for t in new_threads()]}")
    if not wait_until(lambda: not new_processes()):
        pytest.fail(f"left processes {new_processes()}")


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Leave imported objects out of garbage collections; every session and every recording runs one."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_in_the_end() -> Iterator[None]:
    """Set up before all other fixtures, so that it looks after their ends; each process of tests looks for itself."""
    yield
    if not wait_until(lambda: not started()):
        pytest.fail(f"processes left by the test run: {started()}")


# ---- the shared server


@pytest.fixture(scope="session")
def server() -> Iterator[Any]:
    """A dispatcher with eight CPU workers, shared by every test that does not harm it: .address, .token."""
    import gt.launch.local as local

    before = set(started())
    running = local.start(WORKERS, gpu=False, backend="torch")
    of_the_server.update(set(started()) - before)
    yield running
    running.stop()


@pytest.fixture
def session(server: Any, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """`session(yaml_text_or_path)` connects this process to the shared server with that config."""
    import gt

    def connect(config: str | Path = "") -> None:
        of_the_server.update(started())
        path = config
        if isinstance(config, str) and config and ("\n" in config or ":" in config):
            path = tmp_path / "sharding.yaml"
            path.write_text(config)
        gt.connect(server.address, config=str(path) if path else "", token=server.token)

    yield connect
    gc.collect()
    gt.shutdown()
    gc.freeze()


@pytest.fixture
def one(session: Callable[..., None]) -> None:
    """A session with no config: everything on one worker."""
    session()


@pytest.fixture
def plain_threads() -> Iterator[None]:
    """One torch thread on both sides, so that sums come in one order and bits can be compared."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list:
    """Traced graphs run uncompiled; the fixture's value is the list of them."""
    import torch._inductor.compile_fx as module

    made: list = []
    monkeypatch.setattr(module, "compile_fx", lambda graph, fakes: (made.append(graph), graph)[1])
    return made
