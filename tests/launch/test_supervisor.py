"""Processes that a program starts for itself: up with one call, and gone with the program, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from gt.client.session import Session
from gt.errors import SystemFailure
from gt.launch import local, process, worker_host
from gt.launch import supervisor as nursery
from gt.launch.worker_host import WorkerHost
from gt.wire.liveness import home, sight
from tests.helpers.limits import limit
from tests.helpers.processes import children, wait_until

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


def gone(pids) -> bool:
    """True if all of these processes end in time; waited for, not polled."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready = select.select([fd], [], [], limit(20))[0]
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


@pytest.mark.parametrize("stopped", ["the nursery", "all of them"])
def test_what_is_stopped_does_not_outlive_a_killed_program(stopped):
    """Nobody is there to continue the nursery: the kernel does, since it is asked to when the program ends."""
    user, processes = program(1, "SIGKILL")
    nursery, *others = processes
    try:
        for pid in [nursery, *(others if stopped == "all of them" else [])]:
            os.kill(pid, signal.SIGSTOP)
            assert wait_until(lambda pid=pid: sight(pid, home()).stopped)
        user.kill()
        user.communicate()
        assert gone(processes)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(nursery, signal.SIGKILL)


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


STARTING = """
import os, signal, sys
from gt.launch import supervisor
setattr(supervisor, sys.argv[1], lambda *_: os.kill(os.getpid(), getattr(signal, sys.argv[2])))
supervisor.Supervisor(supervisor.read_order()).run()
"""


def starting(what: str, how: str, heartbeat: float) -> subprocess.Popen:
    """A nursery whose dispatcher, or workers, are sent a signal at once."""
    command = [sys.executable, "-c", STARTING, what, how]
    made = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    order = {"token": "secret", "workers": 2, "gpu": False, "backend": "numpy", "heartbeat": heartbeat}
    made.stdin.write(json.dumps(order).encode() + b"\n")
    made.stdin.flush()
    return made


@pytest.mark.parametrize(("what", "how", "says"), [
    ("_dispatch", "SIGSTOP", r"^the dispatcher does not start: its process \d+ is stopped .*\(state T\)"),
    ("_dispatch", "SIGKILL", r"^the dispatcher died while starting \(signal SIGKILL\)"),
    ("work", "SIGSTOP", r"^worker [01] does not start: its process \d+ is stopped .*\(state T\)"),
    ("work", "SIGKILL", r"^worker [01] died while starting \(signal SIGKILL\)"),
])  # fmt: skip
def test_a_process_that_does_not_start_is_named_with_the_cause(what, how, says):
    nursery = starting(what, how, heartbeat=0.5)
    said: dict = {}
    while "failed" not in said and select.select([nursery.stdout], [], [], limit(60))[0]:
        said = json.loads(nursery.stdout.readline())
    nursery.communicate(timeout=limit(60))
    assert re.search(says, said["failed"])


@pytest.mark.parametrize("what", ["_dispatch", "work"])
def test_a_nursery_ends_with_its_program_also_while_what_it_starts_is_stopped(what):
    nursery = starting(what, "SIGSTOP", heartbeat=1000.0)
    nursery.communicate(timeout=limit(60))  # its stdin ends
    assert nursery.returncode == 0


def test_a_nursery_that_is_stopped_is_named(monkeypatch):
    monkeypatch.setattr(local, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(local, "STOP_SECONDS", 0.1)
    me = os.getpid()
    before = children(me)
    with pytest.raises(SystemFailure, match=r"process \d+, which starts dispatcher and workers, is stopped"):
        local.start(1, backend="numpy", meanwhile=lambda: os.kill((set(children(me)) - set(before)).pop(), signal.SIGSTOP))


def test_a_nursery_that_is_killed_before_its_order_is_named_with_its_signal(monkeypatch):
    class Killed(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.kill()
            self.wait()

    monkeypatch.setattr(subprocess, "Popen", Killed)
    with pytest.raises(SystemFailure, match=r"the process that starts dispatcher and workers died \(signal SIGKILL\)"):
        local.start(1, backend="numpy")


def test_a_nursery_that_is_killed_at_the_start_is_named_with_its_signal():
    me = os.getpid()
    before = children(me)
    with pytest.raises(SystemFailure, match=r"the process that starts dispatcher and workers died \(signal SIGKILL\)"):
        local.start(1, backend="numpy", meanwhile=lambda: os.kill((set(children(me)) - set(before)).pop(), signal.SIGKILL))


def test_workers_of_a_dispatcher_that_is_ending_have_nothing_to_say(monkeypatch, capfd):
    """They lose their links before it can be waited for."""
    monkeypatch.setattr(nursery, "_ended", lambda: iter(()))  # not yet
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    one = nursery.Supervisor({"workers": 1})
    said, say = os.pipe()
    one._select.register(said, selectors.EVENT_READ, partial(one._on_stderr, number=0))
    one._words[0] = deque()
    heard, alive = os.pipe()
    one._dispatcher = process.fork("gt.server", lambda: os.read(heard, 1))
    try:
        os.write(say, b"while it lives\n")
        one._turn(1.0)
        os.write(alive, b".")
        os.waitid(os.P_PID, one._dispatcher, os.WEXITED | os.WNOWAIT)
        os.write(say, b"once it does not\n")
        one._turn(1.0)
        assert list(one._words[0]) == ["while it lives", "once it does not"]
        assert capfd.readouterr().err == "while it lives\n"
    finally:
        one._select.close()
        os.waitpid(one._dispatcher, 0)
        for end in (said, say, heard, alive):
            os.close(end)


def test_workers_of_a_dispatcher_elsewhere_say_why_they_end(monkeypatch, capfd):
    """Nobody else does on their host: they were taken for those of a dispatcher that has ended."""
    monkeypatch.setattr(nursery, "_ended", lambda: iter(()))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    one = WorkerHost({"workers": 1, "server": ["h0", 1]})
    heard, say = os.pipe()
    one._select.register(heard, selectors.EVENT_READ, partial(one._on_stderr, number=0))
    one._words[0] = deque()
    try:
        os.write(say, b"first\n")
        one._turn(1.0)
        os.write(say, b"last\n")
        one._finish(1)
        assert capfd.readouterr().err == "first\nlast\n"
    finally:
        one._select.close()
        for end in (heard, say):
            os.close(end)


def test_ctrl_c_in_the_shell_of_another_rank_ends_it_as_sigterm_does(monkeypatch, capfd):
    """It was ignored, as a program's own processes ignore it; but that rank has no program."""
    handlers = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    one = WorkerHost({"workers": 1, "server": ["h0", 1], "patient": True})
    one._select.close()
    handlers[signal.SIGINT](signal.SIGINT, None)
    assert one._terminated_at and not one._stopping and "SIGINT: workers end with the program" in capfd.readouterr().err
    handlers[signal.SIGINT](signal.SIGINT, None)
    assert one._stopping


def test_sigterm_to_a_rank_that_has_found_no_server_does_not_wait_for_its_programs_checkpoint(monkeypatch, capfd):
    """It waited for GT_GRACE, though no program had its workers."""
    handlers = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    late = time.monotonic() + worker_host.RETURN_SECONDS + 1
    for met, seconds in ((False, "20 s"), (True, "120 s")):
        one = WorkerHost({"workers": 1, "server": ["h0", 1], "patient": True, "wait": 600.0})
        one._select.close()
        if met:
            one._body(1, "", 0).args[-1]()
        handlers[signal.SIGTERM](signal.SIGTERM, None)
        assert f"or in {seconds}, or at a second signal" in capfd.readouterr().err
        one._follow(time.monotonic())
        assert not one._stopping, "a server may be about to take it"
        one._follow(late)
        assert one._stopping is not met


@pytest.mark.parametrize(("listens", "says"), [(False, "nothing answers there"), (True, "it does not take this one yet")])
def test_a_rank_that_waits_for_its_server_says_where(listens, says, monkeypatch):
    """A wrong address was ten minutes without a word."""
    words, heard = [], threading.Event()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=lambda text: (words.append(text), heard.set())))
    monkeypatch.setattr(nursery, "WAITS_SECONDS", 0.01)
    monkeypatch.setattr(nursery.tcp, "listens", lambda address, port: listens)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("gt.worker.loop.run", lambda options, joined: "" if heard.wait(limit(20)) else "it said nothing")
    order = {"workers": 1, "first": 3, "path": [], "token": "", "backend": "numpy", "libraries": []}
    assert nursery.work(order, ("127.0.0.1", 7), "", 0, wait=600.0) == nursery.ENDED, words
    assert words[0].startswith(f"gt: worker 3 waits for the server at 127.0.0.1:7: {says}"), words


def test_a_program_that_ends_while_it_reads_why_its_server_has_ended_has_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ValueError of the link's thread was printed as the program ended."""
    end, other = os.pipe()
    stdout = os.fdopen(end, "rb", buffering=0)

    def closed_meanwhile(*descriptors: object) -> tuple:
        stdout.close()
        return [stdout], [], []

    monkeypatch.setattr(local.select, "select", closed_meanwhile)
    try:
        started = local.Local("127.0.0.1:1", "", 1, 0, False, SimpleNamespace(stdout=stdout))  # type: ignore[arg-type]
        assert started.why_ended() == ""
    finally:
        os.close(other)
