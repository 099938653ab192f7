"""`python -m gt.server` as a process: starting, stopping, refusing, dying."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from gt.client.session import Session
from gt.dispatcher.events import Log, PeerLost
from gt.dispatcher.instruction_log import line
from gt.dispatcher.server import Server
from gt.errors import DispatcherLost, Refused
from gt.wire.access.auth import Access, made
from gt.wire.dealer import Dealer
from gt.wire.link import hello
from gt.wire.messages import Query, Report
from tests.helpers.limits import limit
from tests.helpers.toy_core import ToyCore


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "gt.server", *args]


@contextmanager
def running(*args: str, token: str = "", **environment: str):
    """A server on a free port: (process, address)."""
    process = subprocess.Popen(command("-p", "0", *args), stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    worker = None
    try:
        said = process.stdout.readline()
        address = re.fullmatch(r"gt server: listening on (.*:\d+)\n", said)[1]
        worker = idle_worker(address, token)
        yield process, address
    finally:
        process.kill()
        process.communicate()
        if worker is not None:
            worker.close()


def idle_worker(address: str, token: str) -> Dealer:
    """A worker that is there and does nothing, since no client is welcome without one."""

    def answer(message, frames):
        if isinstance(message, Query):
            worker.send(Report(message.request, {"done": 0, "stats": {"name": "idle"}}))

    worker = Dealer(address, answer, lambda reason: None, token=token)
    worker.send(hello("worker", info={"name": "", "pid": os.getpid(), "host": "here", "heap_bytes": 1 << 20}))
    return worker


def refused(*args: str) -> str:
    """The error of a server that cannot start: one line, and the exit code is 2."""
    done = subprocess.run(command(*args), capture_output=True, text=True, timeout=limit(30))
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    return done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly_and_clients_are_told(number):
    with running() as (process, address):
        session = Session(address)
        process.send_signal(number)
        assert process.wait(limit(20)) == 0
        with pytest.raises(DispatcherLost, match=f"has stopped: it got {number.name}"):
            for _ in range(1000):
                session.stats()
        session.close()


def test_it_may_be_told_to_stop_while_it_ends():
    server = Server(core=ToyCore())
    thread = threading.Thread(target=server.run)

    class Bell(int):
        """A descriptor whose comparison starts the server, which ends meanwhile unless stop() holds it."""

        def __ge__(self, other):
            thread.start()
            thread.join(0.2)
            return True

    server._bell = Bell(server._bell)
    server.stop()
    thread.join()
    server.stop()


def test_a_port_in_use_is_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in refused("-p", str(port))


def test_off_loopback_it_wants_a_token():
    assert "a server on 0.0.0.0 needs a token" in refused("-p", "0", "--host", "0.0.0.0")
    assert "No such file" in refused("-p", "0", "--token-file", "/nonexistent")


def test_the_token_is_compared(tmp_path):
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    with running("--token-file", str(secret), token="s3cret") as (_, address):
        with pytest.raises(Refused, match="token"):
            Session(address, token="guess")
        with pytest.raises(Refused, match="token"):
            Session(address)
        Session(address, token="s3cret").close()


@pytest.mark.parametrize(("number", "heartbeat"), [(signal.SIGKILL, 3600.0), (signal.SIGSTOP, 1.0)])
def test_a_killed_or_stopped_server_ends_waiting_and_later_calls(number, heartbeat):
    """A killed one is known by its connection's end, which waits for no heartbeat."""
    with running() as (process, address):
        session = Session(address, heartbeat=heartbeat)
        process.send_signal(number)
        with pytest.raises(DispatcherLost, match="was lost"):
            session.inspect(1)
        with pytest.raises(DispatcherLost, match="was lost"):
            session.submit([], [], [])
        session.close()


CLIENT = "import sys; from gt.client.session import Session; s = Session(sys.argv[1]); print('up', flush=True); s.inspect(1)"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_client_is_noticed(number):
    core, lost = ToyCore(), threading.Event()
    handle = core.handle
    core.handle = lambda event: (isinstance(event, PeerLost) and lost.set(), handle(event))[1]
    # nobody looks at a client's process, which may be another host's
    server = Server(core=core, heartbeat=3600.0 if number == signal.SIGKILL else 0.25, access=Access(encrypt=True))
    thread = threading.Thread(target=server.run, name="gt-test-server")
    thread.start()
    client = subprocess.Popen([sys.executable, "-c", CLIENT, server.address], stdout=subprocess.PIPE, stderr=-3)
    try:
        assert client.stdout.readline() == b"up\n"
        client.send_signal(number)
        assert lost.wait(limit(20))
    finally:
        client.kill()
        client.communicate()
        server.stop()
        thread.join()


@contextmanager
def stopped_client(access: Access, heartbeat: float):
    """A server with a client whose process is stopped: the client, and an event that is set when the server has lost it."""
    core, lost = ToyCore(), threading.Event()
    handle = core.handle
    core.handle = lambda event: (isinstance(event, PeerLost) and lost.set(), handle(event))[1]
    server = Server(core=core, heartbeat=heartbeat, access=access)
    thread = threading.Thread(target=server.run, name="gt-test-server")
    thread.start()
    client = subprocess.Popen([sys.executable, "-c", CLIENT, server.address], stdout=subprocess.PIPE, stderr=-3)
    try:
        assert client.stdout.readline() == b"up\n"
        client.send_signal(signal.SIGSTOP)
        yield client, lost
    finally:
        client.kill()
        client.communicate()
        server.stop()
        thread.join()


@pytest.mark.parametrize("access", [Access(secret=made()), Access()], ids=["own server", "started by hand"])
def test_a_program_that_is_stopped_for_long_keeps_its_tensors_on_a_server_of_its_host(access):
    """Ctrl-Z, or a debugger that looks at it. A server that lets in other hosts has to take silence for an end."""
    with stopped_client(access, 0.05) as (client, lost), stopped_client(Access(encrypt=True), 0.3) as (_, other_lost):
        assert other_lost.wait(limit(20))  # later than the first server would lose its client
        assert not lost.is_set()
        client.kill()
        assert lost.wait(limit(20))


def test_a_fault_in_the_core_ends_one_session_and_not_the_server():
    core = ToyCore()
    server = Server(core=core)
    thread = threading.Thread(target=server.run, name="gt-test-server")
    thread.start()
    try:
        first, second = Session(server.address), Session(server.address)
        answers = core.answers
        core.answers = lambda *a: 1 / 0 if type(a[1]).__name__ == "Inspect" else answers(*a)
        with pytest.raises(DispatcherLost, match="internal error of the server: ZeroDivisionError"):
            first.inspect(1)
        assert second.fetch(1)[1] == "float64"
        first.close()
        second.close()
    finally:
        server.stop()
        thread.join()


def test_the_instruction_log_has_columns(tmp_path):
    path = tmp_path / "log"
    with running(GT_INSTRUCTION_LOG=str(path)) as (process, address):
        Session(address).close()
        Session(address).close()  # once this one is welcome, the first one's end has been seen
        process.terminate()
        process.wait(limit(20))
    kinds = [row.split()[2] for row in path.read_text().splitlines()]
    assert "CONNECT" in kinds and "DISCONNECT" in kinds


def test_a_line_of_the_instruction_log():
    fields = {"seq": 12, "op": "aten.mm", "group": "stage0", "layout": "[S(1)]", "bytes": 512, "origin": "model.py:3"}
    entry = Log("WORKER_SEND", "w1", "%3 = mm %1 %2", fields)
    assert line(entry, 1.5, 0) == (
        "    1.500000       12 WORKER_SEND w1         op=aten.mm group=stage0 layout=[S(1)] bytes=512 sharded "
        "%3 = mm %1 %2 @ model.py:3\n"
    )
