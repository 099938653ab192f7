"""A worker's process that executes itself anew: a signal that comes in its last moment ends the process that follows."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.helpers.limits import limit

WORKER = """
import os, signal, sys, threading
from gt.worker import __main__ as worker
from gt.worker.process import restart

real, number = os.execve, int(os.environ["TEST_SIGNAL"])

def execute(*line):
    del os.environ["TEST_SIGNAL"]
    os.kill(os.getpid(), number)  # after all that the old process can check
    real(*line)

def run(options, joined, renew, ready):
    if "--signals" in sys.argv:
        return "lived on"
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: None)
    os.execve = execute
    thread = threading.Thread(target=renew, args=("w0",))
    thread.start()
    thread.join()

worker.run = run
worker.leave(worker.main(own=True))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_just_before_the_process_executes_itself_anew_is_not_lost(number, tmp_path, monkeypatch):
    program = tmp_path / "worker.py"
    program.write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TEST_SIGNAL", str(int(number)))
    handled = "trap '' HUP; exec \"$@\""  # SIGHUP is no word to a worker that its launcher shields
    line = ["sh", "-c", handled, "-", sys.executable, str(program), "-p", "1"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=limit(60))
    if number == signal.SIGHUP:
        assert done.returncode == 1 and "lived on" in done.stderr
    else:
        assert done.returncode in (128 + number, -number) and "lived on" not in done.stderr
