"""Fixtures: one server with eight CPU workers for the whole run, sessions on it, checks that nothing is left behind.

Everything of GT is imported inside the fixtures, so that tests of pure parts run without the rest.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.limits import limit

WORKERS = 8
MARK = f"GT_TEST_RUN={uuid.uuid4().hex}"  # inherited by every process that this run starts
os.environ.update([MARK.split("=")])


# ---- nothing is left behind


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process is gone, or another user's
        return b""


def started() -> dict[int, str]:
    """Living processes that this run started, however deep, by pid; zombies are dead."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        stat = read(entry / "stat").rpartition(b")")[2].split()
        if stat and stat[0] != b"Z" and MARK.encode() in read(entry / "environ"):
            found[int(entry.name)] = read(entry / "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def wait_until(done: Callable[[], Any], seconds: float = 5.0) -> bool:
    """Poll a condition that no message announces; the test that needs this says why."""
    pause, end = threading.Event(), time.monotonic() + limit(seconds)
    while not done():
        if time.monotonic() > end:
            return False
        pause.wait(0.02)
    return True


_ours: set[int] = set()  # processes of the shared server: they live as long as the run


def ours() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith("GT_")}


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a variable of ours, a thread or a process behind, other than the shared server's."""
    variables, threads, processes = ours(), set(threading.enumerate()), set(started())
    yield
    if ours() != variables:
        pytest.fail(f"left the environment as {ours()}, it was {variables}")

    def new_threads() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t not in threads and t.is_alive() and t.name.startswith("gt")]

    def new_processes() -> dict[int, str]:
        return {pid: line for pid, line in started().items() if pid not in processes | _ours}

    if not wait_until(lambda: not new_threads()):
        pytest.fail(f"left threads {[t.name for t in new_threads()]}")
    if not wait_until(lambda: not new_processes()):
        pytest.fail(f"left processes {new_processes()}")


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """What has been imported is left out of collections, of which every session and every recording has one."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_in_the_end() -> Iterator[None]:
    """Set up before all others, so that it looks when they are over; of each process that runs tests, by itself."""
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
    _ours.update(set(started()) - before)
    yield running
    running.stop()


@pytest.fixture
def session(server: Any, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """`session(yaml_text_or_path)` connects this process to the shared server with that config."""
    import gt

    def connect(config: str | Path = "") -> None:
        _ours.update(started())
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
