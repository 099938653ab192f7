"""A dispatcher and workers on this machine, for the life of this program. One supervisor process starts them all."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gt import env
from gt.errors import SystemFailure
from gt.wire.access import auth
from gt.wire.liveness import Vigil, home

log = logging.getLogger("gt.launch")

START_SECONDS = 120.0  # until all processes have to be up: an import of torch from a cold disk is slow
STOP = 6.0
LOOK, STILL = 1.0, 5  # seconds between looks at the supervisor, and looks in a row that find it stopped until that is an error


@dataclass
class Local:
    """The supervisor process and its children. `stop` ends them; so does the end of this process, however it ends."""

    address: str
    token: str
    workers: int
    gpus: int
    _process: subprocess.Popen = field(repr=False)
    _pid: int = field(default_factory=os.getpid, repr=False)

    def stop(self) -> None:
        """End dispatcher and workers, and wait for their ends. Safe to call twice, and in a forked child."""
        if self._pid == os.getpid():
            atexit.unregister(self.stop)
            _end(self._process)


def start(
    workers: int,
    gpu: bool = False,
    backend: str = "torch",
    heartbeat: float = 10.0,
    meanwhile: Callable[[], None] | None = None,
    libraries: Sequence[str] = (),
) -> Local:
    """Start a dispatcher and `workers` workers, and return when all are up. gpu: each worker gets a GPU, while there are any.

    meanwhile: called while they start. libraries: modules whose ops the workers execute; they are looked for where this program
    finds modules too.
    """
    token = auth.made()
    order = {"token": token, "workers": workers, "gpu": gpu, "backend": backend, "heartbeat": heartbeat}
    order |= {"libraries": list(libraries), "path": sys.path if libraries else []}
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-m", "gt.launch"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env.child(PYTHONPATH=env.python_path(root)),
        start_new_session=True,  # a Ctrl-C in the terminal is for the user's program alone
    )
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        if meanwhile is not None:
            meanwhile()
        port, gpus = _wait(process, workers)
    except BaseException:
        _end(process)
        raise
    if gpu and gpus < workers:
        log.warning("asked for %d GPU workers, this machine has %d GPUs: the rest run on the CPU", workers, gpus)
    local = Local(f"127.0.0.1:{port}", token, workers, min(gpus, workers) if gpu else 0, process)
    atexit.register(local.stop)
    stdin = process.stdin
    # The supervisor stops at the end of this pipe, so a forked DataLoader worker that outlives us must not hold it open.
    os.register_at_fork(after_in_child=lambda: _close_inherited(stdin))
    return local


def _wait(process: subprocess.Popen, workers: int) -> tuple[int, int]:
    """(port, GPUs found) once the supervisor has reported that all workers are up."""
    assert process.stdout is not None
    known: dict[str, Any] = {}
    deadline, rest = time.monotonic() + START_SECONDS, b""
    vigil = Vigil(process.pid, home(), STILL)
    while "port" not in known or (workers and "ready" not in known):
        left = deadline - time.monotonic()
        if left <= 0:
            raise SystemFailure(f"{workers} workers did not start within {START_SECONDS:g} s: run with GT_VERBOSE=1 to see why")
        if not select.select([process.stdout], [], [], min(left, LOOK))[0]:
            if vigil.poll():
                how = f"process {process.pid}, which starts dispatcher and workers, is stopped by a signal or a debugger"
                raise SystemFailure(f"{how}; start again")
            continue
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            died = f"the process that starts dispatcher and workers died (exit code {process.wait()})"
            raise SystemFailure(f"{died}: run with GT_VERBOSE=1 to see why")
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            known.update(json.loads(line))
        if "failed" in known:
            raise SystemFailure(known["failed"])
    return known["port"], known["gpus"]


def _end(process: subprocess.Popen) -> None:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError, ValueError):
        process.stdin.close()
    try:
        process.wait(STOP)
    except subprocess.TimeoutExpired:
        process.kill()  # its children die with it
        process.wait()
    process.stdout.close()


def _close_inherited(stdin: Any) -> None:
    with contextlib.suppress(OSError, ValueError):
        stdin.close()
