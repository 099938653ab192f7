"""Processes that a program starts for itself: up with one call, and gone with the program, however it ends."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gt.client.session import Session
from gt.errors import SystemFailure
from gt.launch import local

PROGRAM = """
import json, os, sys, gt.launch.local as local
from gt.launch.local import start
started = start(int(sys.argv[1]))
children = [p for p in os.listdir("/proc") if p.isdigit()]
print(json.dumps({"nursery": started._process.pid}), flush=True)
sys.stdin.readline()
if sys.argv[2] == "raise": raise ValueError("a user's error")
"""


def family(pid: int) -> dict[int, str]:
    """A process and its children, with their names in ps."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        pids += map(int, (task / "children").read_text().split())
    return {p: Path(f"/proc/{p}/cmdline").read_bytes().rstrip(b"\0").decode() for p in pids}


def gone(pids, seconds: float = 5.0) -> bool:
    """Whether all of these end in time; waited for, not polled."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready = select.select([fd], [], [], seconds)[0]
        os.close(fd)
        if not ready:
            return False
    return True


def program(workers: int, how: str) -> tuple[subprocess.Popen, dict[int, str]]:
    user = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(workers), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return user, family(json.loads(user.stdout.readline())["nursery"])


def test_workers_come_and_go():
    started = local.start(2)
    try:
        processes = family(started._process.pid)
        assert sorted(processes.values())[1:] == ["gt.server", "gt.worker 0", "gt.worker 1"]
        session = Session(started.address, token=started.token)
        assert session.workers == ["w0", "w1"]
        session.close()
    finally:
        started.stop()
        started.stop()
    assert gone(processes)


@pytest.mark.parametrize("how", ["return", "raise", "SIGTERM", "SIGKILL"])
def test_nothing_outlives_the_program(how):
    user, processes = program(0, how)
    assert len(processes) == 2
    if how.startswith("SIG"):
        user.send_signal(signal.Signals[how])
    user.communicate(b"\n")
    assert gone(processes)


def test_no_worker_outlives_a_killed_program():
    user, processes = program(2, "SIGKILL")
    assert len(processes) == 4
    user.kill()
    user.communicate()
    assert gone(processes)


def test_no_worker_outlives_a_killed_nursery():
    started = local.start(1)
    processes = family(started._process.pid)
    os.kill(started._process.pid, signal.SIGKILL)
    assert gone(processes)
    started.stop()


def test_ctrl_c_in_the_terminal_is_the_programs_alone():
    started = local.start(0)
    assert os.getsid(started._process.pid) == started._process.pid != os.getsid(0)
    started.stop()


def test_a_worker_that_dies_at_start_is_reported_with_its_last_words():
    with pytest.raises(SystemFailure, match=r"worker \d died while starting.*nonsense"):
        local.start(2, backend="nonsense")
