"""Exclusive servers with real processes: nothing of a session is left for the next, and nothing of it touches another."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gt import errors
from gt.client.session import Session
from gt.server import main as server_main
from tests.helpers.limits import limit
from tests.helpers.processes import of_the_server, started, wait_until

SECRET = "a token of this test's own"
CLIENT = """
import sys
from gt.client.session import Session
session = Session(sys.argv[1], token=sys.argv[2], switches={"workers": 1})
print("welcome", flush=True)
sys.stdin.read()
"""
VICTIM = """
import sys
import gt
gt.connect(sys.argv[1], token=sys.argv[2], config="", workers=1)
x = gt.ones(4)
print(int(x.sum().item()), gt.stats()["workers"][0]["name"], flush=True)
sys.stdin.readline()
try:
    (x + 1).sum().item()
except gt.WorkerLost as error:
    print("lost", error, flush=True)
sys.stdin.readline()
while not gt.stats()["workers"]:
    pass  # each is a round trip
print(len(gt.stats()["workers"]), int(gt.ones(5).sum().item()), flush=True)
"""


class Site:
    """A server and workers by hand: `workers` are their processes by name."""

    def __init__(self, address: str, token_file: Path, server: subprocess.Popen) -> None:
        self.address, self.server, self.token_file = address, server, token_file
        self.secret_file = token_file.with_name("secret")
        self.workers: dict[str, subprocess.Popen] = {}

    def start(self, name: str) -> None:
        line = [sys.executable, "-m", "gt.worker", "--backend", "numpy", "-p", self.address.rpartition(":")[2]]
        line += ["--name", name, *(("--token-file", str(self.token_file)) if self.token_file.exists() else ())]
        line += ["--worker-token-file", str(self.secret_file)]
        environment = {**os.environ, "GT_HEAP_SIZE": "4MiB", **({} if self.token_file.exists() else {"GT_TOKEN": SECRET})}
        self.workers[name] = subprocess.Popen(line, stderr=subprocess.DEVNULL, env=environment)
        of_the_server.add(self.workers[name].pid)  # it ends with the site, not with the test that started it

    def session(self, workers: int = 0) -> Session:
        return Session(self.address, token=SECRET, switches={"workers": workers})

    def client(self, program: str = CLIENT) -> subprocess.Popen:
        """A client process that wants one worker, and says when it has it."""
        line = [sys.executable, "-c", program, self.address, SECRET]
        return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def site(tmp_path: Path, *names: str, options: tuple[str, ...] = ()) -> Iterator[Site]:
    token = tmp_path / "token"
    token.write_text(SECRET)
    token.chmod(0o600)
    secret = tmp_path / "secret"
    secret.write_text("what clients do not know")
    secret.chmod(0o600)
    line = [sys.executable, "-m", "gt.server", "-p", "0", "--sharing", "exclusive", "--token-file", str(token), *options]
    line += ["--worker-token-file", str(secret)]
    server = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    here = Site(server.stdout.readline().split()[-1], token, server)
    try:
        for name in names:
            here.start(name)
        here.session(len(names)).close()  # all are there, and have started afresh once
        yield here
    finally:
        server.terminate()
        server.communicate(timeout=limit(20))
        for worker in here.workers.values():
            worker.terminate()
            worker.wait(limit(20))


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Site]:
    """An exclusive server with two workers, a and b, whose token file is gone once they have read it."""
    before = set(started())
    with site(tmp_path_factory.mktemp("site"), "a", "b") as here:
        of_the_server.update(set(started()) - before)
        here.token_file.unlink()
        yield here


def memory(pid: int) -> bytes:
    """All that a process can write."""
    found = []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as mem:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, flags = line.split()[:2]
            if flags.startswith("rw"):
                begin, end = (int(part, 16) for part in span.split("-"))
                mem.seek(begin)
                try:
                    found.append(mem.read(end - begin))
                except OSError:  # a page of the kernel's
                    continue
    return b"".join(found)


def test_nothing_of_a_session_is_in_the_processes_that_the_next_one_gets(pair):
    import torch

    import gt

    secret = os.urandom(24)
    gt.connect(pair.address, token=SECRET, config="", workers=1)
    x = torch.from_numpy(np.frombuffer(secret * 512, np.uint8).copy()).to("remote")
    assert (x + 0).cpu().numpy().tobytes() == secret * 512
    (name,) = (row["name"] for row in gt.stats()["workers"])
    pid = pair.workers[name].pid
    assert secret in memory(pid)
    maps = Path(f"/proc/{pid}/maps").read_text()
    del x
    gt.shutdown()
    gt.connect(pair.address, token=SECRET, config="")
    assert sorted(row["name"] for row in gt.stats()["workers"]) == ["a", "b"]
    assert gt.ones(4).sum().item() == 4
    assert pair.workers[name].poll() is None and secret not in memory(pid)
    stacks = [re.search(r"(\S+) .*\[stack\]", text)[1] for text in (maps, Path(f"/proc/{pid}/maps").read_text())]
    assert stacks[0] != stacks[1], "it is another address space"
    gt.shutdown()
    for process in pair.workers.values():
        assert SECRET.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()


def test_two_programs_at_once_have_disjoint_workers_and_a_crash_is_ones_own(pair, tmp_path):
    import gt

    config = tmp_path / "one.yaml"
    config.write_text("all: {shard: {axis: 0, workers: [0]}}\n")
    other = pair.client(VICTIM)
    try:
        gt.connect(pair.address, token=SECRET, config=str(config), workers=1)
        (mine,) = (row["name"] for row in gt.stats()["workers"])
        with gt.signal.context("all"):
            x = gt.ones(8) + 1
        number, theirs = other.stdout.readline().split()
        assert number == "4" and {mine, theirs} == {"a", "b"}
        crashed = pair.workers[theirs]
        os.kill(crashed.pid, signal.SIGSEGV)
        crashed.wait(limit(10))
        assert say(other).startswith(f"lost worker {theirs} is lost")
        assert (x * 2).sum().item() == 32
        pair.start(theirs)
        assert say(other) == "1 5\n", "another in its place is the session's"
        assert (x * 3).sum().item() == 48
    finally:
        other.kill()
        other.communicate()
        gt.shutdown()


def say(client: subprocess.Popen) -> str:
    """A client's answer to a line."""
    client.stdin.write("\n")
    client.stdin.flush()
    return client.stdout.readline()


def test_the_queue_tells_places_and_who_is_killed_in_it_or_served_leaves_nothing(pair, caplog):
    caplog.set_level(logging.WARNING, "gt.client")
    first = pair.session()
    served, queued = pair.client(), None
    try:
        assert re.search("place 1 in its queue, for 1 worker of", served.stderr.readline())
        queued = pair.client()
        assert "place 2" in queued.stderr.readline()
        got: list[Session] = []
        last = threading.Thread(target=lambda: got.append(pair.session(2)))
        last.start()
        assert wait_until(lambda: "place 3" in caplog.text)
        queued.kill()
        assert wait_until(lambda: "place 2 in its queue, for 2 workers" in caplog.text)
        first.close()
        assert served.stdout.readline() == "welcome\n"
        served.kill()
        last.join(limit(30))
        assert sorted(got[0].workers) == ["a", "b"], "those of the killed one came back"
        got[0].close()
    finally:
        first.close()
        for process in (served, queued):
            if process is not None:
                process.kill()
                process.communicate()


def test_ctrl_c_leaves_the_queue(pair, caplog):
    import gt

    holder = pair.session()
    caplog.clear()  # of its own wait, if workers of the session before are not back yet
    main = threading.main_thread().ident
    press = threading.Thread(
        target=lambda: wait_until(lambda: "place 1 in its queue" in caplog.text) and signal.pthread_kill(main, signal.SIGINT)
    )
    press.start()
    with pytest.raises(KeyboardInterrupt):
        gt.connect(pair.address, token=SECRET, config="", workers=1)
    press.join()
    caplog.clear()
    waiting = threading.Thread(target=lambda: pair.session(1).close())
    waiting.start()
    assert wait_until(lambda: "place 1" in caplog.text) and "place 2" not in caplog.text
    holder.close()
    waiting.join(limit(30))
    assert not waiting.is_alive()


def test_a_session_that_has_had_its_time_is_ended_in_the_middle_of_an_op(tmp_path):
    import torch

    import gt

    with site(tmp_path, "solo", options=("--max-session-time", "2", "--max-workers", "1")) as here:
        with pytest.raises(errors.Refused, match="workers=2, and a session may have 1"):
            here.session(2)
        x = None
        with pytest.raises(errors.SessionExpired, match=r"has had its 2 s \(the server's --max-session-time\)"):
            gt.connect(here.address, token=SECRET, config="", workers=1)
            x = torch.ones(700, 700).to("remote")
            while True:
                for _ in range(20):
                    x = x @ x
                x.sum().item()
        del x
        gt.shutdown()
        again = here.session(1)  # at once, whatever the worker was at
        assert again.workers == ["solo"]
        again.close()


def test_a_worker_that_is_told_to_end_in_the_middle_of_an_op_does_not_start_afresh(pair):
    """The signal has come, and its handler has not: the process that would come after it could not know."""
    import torch

    import gt

    gt.connect(pair.address, token=SECRET, config="", workers=1)
    (name,) = (row["name"] for row in gt.stats()["workers"])
    x = torch.ones(2500, 2500).to("remote")
    assert x.sum().item() == 2500**2
    y = x @ x
    gt.stats()  # it has been told
    pair.workers[name].send_signal(signal.SIGTERM)
    del x, y
    gt.shutdown()
    assert pair.workers[name].wait(limit(20)) in (0, 128 + signal.SIGTERM, -signal.SIGTERM)
    pair.start(name)
    both = pair.session(2)
    assert sorted(both.workers) == ["a", "b"]
    both.close()


def test_a_limit_without_exclusive_and_a_wrong_number_of_workers_are_one_sentence(capsys, tmp_path):
    import gt

    assert server_main(["--max-workers", "2"]) == 2
    assert "--max-workers is for --sharing exclusive" in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.write_text("")
    assert server_main(["-p", "0", "--sharing", "exclusive", "--worker-token-file", str(empty)]) == 2
    assert "--worker-token-file" in (told := capsys.readouterr().err) and "it is empty" in told
    with pytest.raises(SystemExit):
        server_main(["--sharing", "exclusive", "--max-workers", "0"])
    assert "got '0', want a whole number above 0" in capsys.readouterr().err
    for workers in (-1, 1.5, True, 1 << 20):
        with pytest.raises(ValueError, match="want the number of workers as a whole number"):
            gt.connect("localhost:1", workers=workers)
