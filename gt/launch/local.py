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
from typing import IO, Any

from gt import env
from gt.errors import SystemFailure
from gt.launch.process import how_ended
from gt.wire.access import auth
from gt.wire.liveness import Vigil, home

log = logging.getLogger("gt.launch")

START_SECONDS = 120.0  # until all processes have to be up: an import of torch from a cold disk is slow
STOP_SECONDS = 6.0
REPORT_SECONDS = 15.0  # between reports of missing workers
MAX_NAMES = 8  # workers that a report names
WORD_SECONDS = 1.0  # seconds that a supervisor has for its last report
LOOK_SECONDS = 1.0  # between looks at the supervisor
MAX_STOPPED_LOOKS = 5  # looks in a row that may find it stopped; then that is an error


@dataclass
class Local:
    """The supervisor process and its children. `stop` ends them; so does the end of this process, however it ends."""

    address: str
    token: str
    workers: int
    gpus: int
    job: bool  # True in a job of several processes or hosts
    _process: subprocess.Popen = field(repr=False)
    _pid: int = field(default_factory=os.getpid, repr=False)

    def stop(self) -> None:
        """End dispatcher and workers, and wait for their ends. Safe to call twice, and in a forked child."""
        if self._pid == os.getpid():
            atexit.unregister(self.stop)
            _end(self._process)

    def why_ended(self, seconds: float = WORD_SECONDS) -> str:
        """The dispatcher's end in words, if its supervisor reports it within so many seconds; else "", and in a child."""
        if self._pid != os.getpid() or self._process.stdout is None or self._process.stdout.closed:
            return ""
        with contextlib.suppress(ValueError):  # `stop`, in another thread, has closed it meanwhile
            return self._read_why(self._process.stdout, seconds)
        return ""

    def _read_why(self, stdout: IO[bytes], seconds: float) -> str:
        deadline, text = time.monotonic() + seconds, b""
        while select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            data = os.read(stdout.fileno(), 1 << 16)
            # It has ended, or was killed and its children with it.
            if not data:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(seconds)
                return _last_report(text, self._process)
            text += data
            if b'"ended"' in text:
                return _last_report(text, self._process)
        return ""


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
    local = launch(order, Start(meanwhile=meanwhile))
    if gpu and local.gpus < workers:
        log.warning("asked for %d GPU workers, this machine has %d GPUs: the rest run on the CPU", workers, local.gpus)
    return local


@dataclass(frozen=True)
class Start:
    """The start of a supervisor. seconds: until all of its workers have to be up.

    meanwhile: called while they start. on_port: called with the dispatcher's port. spoken: report missing workers on stderr.
    """

    seconds: float = START_SECONDS
    meanwhile: Callable[[], None] | None = None
    on_port: Callable[[int], None] | None = None
    spoken: bool = False


def launch(order: dict[str, Any], start: Start) -> Local:
    """Start a supervisor, and return when its workers and, of a job, all others are up. order: see gt.launch.supervisor."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gt.launch"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env.child(PYTHONPATH=env.python_path(str(Path(__file__).parents[2]))),
        start_new_session=True,  # a Ctrl-C in the terminal is for the user's program alone
    )
    total = order.get("total") or order["workers"]

    # By stdin, because the token must not show in `ps`, nor in the environment that children inherit.
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: `_wait` learns how
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
        if start.meanwhile is not None:
            start.meanwhile()
        port, gpus = _wait(process, total, start)
    except BaseException:
        _end(process)
        raise

    usable = min(gpus, order["workers"]) if order["gpu"] else 0
    local = Local(f"127.0.0.1:{port}", order["token"], total, usable, "total" in order, process)
    atexit.register(local.stop)
    stdin = process.stdin
    # The supervisor stops at the end of this pipe, so a forked DataLoader worker that outlives us must not hold it open.
    os.register_at_fork(after_in_child=lambda: _close_inherited(stdin))
    return local


def _wait(process: subprocess.Popen, total: int, start: Start) -> tuple[int, int]:
    """(port, GPUs found) once the supervisor has reported that all workers are up."""
    assert process.stdout is not None
    known: dict[str, Any] = {}
    now = time.monotonic()
    # Reports are JSON lines; `rest` is the beginning of one that is not whole yet.
    deadline, next_report, rest, published = now + start.seconds, now + REPORT_SECONDS, b"", False
    vigil = Vigil(process.pid, home(), MAX_STOPPED_LOOKS)
    while "port" not in known or (total and "ready" not in known):
        now = time.monotonic()
        if now >= deadline:
            raise SystemFailure(_late(known, total, start.seconds))
        if start.spoken and now >= next_report:
            next_report = now + REPORT_SECONDS
            sys.stderr.write(f"gt: {_missing(known, total)}; waiting\n")
        # Silence may mean that the supervisor is stopped (Ctrl-Z of its job, a debugger), which no end of its pipe tells.
        if not select.select([process.stdout], [], [], min(deadline - now, LOOK_SECONDS))[0]:
            if vigil.poll():
                how = f"process {process.pid}, which starts dispatcher and workers, is stopped by a signal or a debugger"
                raise SystemFailure(f"{how}; start again")
            continue
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            died = f"the process that starts dispatcher and workers died{how_ended(process.wait())}"
            raise SystemFailure(f"{died}: run with GT_VERBOSE=1 to see why")
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            known.update(json.loads(line))
        if "failed" in known:
            raise SystemFailure(known["failed"])
        if "port" in known and start.on_port is not None and not published:
            published = True
            start.on_port(known["port"])
    return known["port"], known["gpus"]


def _last_report(text: bytes, process: subprocess.Popen) -> str:
    for line in text.split(b"\n")[:-1]:
        if why := json.loads(line).get("ended"):
            return why
    return f"process {process.pid}, which started dispatcher and workers, died{how_ended(process.returncode or 0)}"


def _missing(known: dict[str, Any], total: int) -> str:
    here = known.get("connected", [])
    missing = [name for name in (f"w{n}" for n in range(total)) if name not in here]
    names = ", ".join(missing[:MAX_NAMES]) + ", ..." * (len(missing) > MAX_NAMES)
    return f"{len(here)} of {total} workers are connected, {names} missing"


def _late(known: dict[str, Any], total: int, seconds: float) -> str:
    if known.get("connected"):
        todo = "see the output of these ranks; a firewall, another token or a rank with fewer workers (GT_WORKERS) are usual"
        return f"{_missing(known, total)} after {seconds:g} s: {todo}"
    return f"{total} workers did not start within {seconds:g} s: run with GT_VERBOSE=1 to see why"


def _end(process: subprocess.Popen) -> None:
    # The end of its stdin tells the supervisor to end its children in order.
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError, ValueError):
        process.stdin.close()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # its children die with it
        process.wait()
    process.stdout.close()


def _close_inherited(stdin: Any) -> None:
    with contextlib.suppress(OSError, ValueError):
        stdin.close()
