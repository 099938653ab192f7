"""Processes that a run of the tests starts: programs, a list of all from /proc, and waiting for what no message announces."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers import ROOT
from tests.helpers.limits import limit

MARK = "GT_TEST_RUN"  # conftest sets this variable, and every process that the run starts inherits it
# What GT's processes say of a machine that is slow, a line each
SLOW = re.compile(r"^(waiting for the server at|slow:|the dispatcher was busy for|gt: \d+ of \d+ workers are) .*\n", re.M)
of_the_server: set[int] = set()  # processes of the shared server: they live as long as the run


def read(path: Path | str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall()
    except OSError:  # the process is gone, or another user's
        return b""


def started() -> dict[int, str]:
    """Living processes that this run started, however deep, by pid; zombies are dead."""
    found, mark, mine = {}, f"{MARK}={os.environ[MARK]}".encode(), str(os.getpid())
    for pid in os.listdir("/proc"):  # each test looks twice: names, not paths, and of most processes one file
        if not pid.isdigit() or pid == mine or mark not in read(f"/proc/{pid}/environ"):
            continue
        stat = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        if stat and stat[0] != b"Z":
            found[int(pid)] = read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def wait_until(done: Callable[[], Any], seconds: float = 20.0) -> bool:
    """Poll a condition that no message announces; the test that needs this says why."""
    pause, end = threading.Event(), time.monotonic() + limit(seconds)
    while not done():
        if time.monotonic() > end:
            return False
        pause.wait(0.02)
    return True


def no_thread(thread: threading.Thread) -> None:
    """In place of Thread.start: the system has no thread left."""
    raise RuntimeError("can't start new thread")


def children(pid: int) -> list[int]:
    """Children of a process, whichever of its threads forked them; [] if the process is gone."""
    return sorted(int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in read(file).split())


def free_ports(count: int = 1) -> list[int]:
    """Ports for processes that bind them later, below those that the kernel gives to whoever connects meanwhile."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    draw, ports = random.SystemRandom(), set[int]()
    while len(ports) < count:
        port = draw.randrange(end // 2, end)
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            ports.add(port)
    return list(ports)


def resident(pid: int) -> int:
    """Bytes of memory that a process holds, 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def unhurried(stderr: str) -> str:
    """Standard error of processes without what they say of a machine that is slow."""
    return SLOW.sub("", stderr)


def run_program(prelude: str, program: str, seconds: float, **variables: str) -> str:
    """Standard output of a prelude, whose `{root!r}` is this repository, and a program. variables: of its environment."""
    done = subprocess.run(
        [sys.executable, "-c", prelude.format(root=str(ROOT)) + program],
        capture_output=True,
        text=True,
        timeout=limit(seconds),
        env={**os.environ, **variables},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
