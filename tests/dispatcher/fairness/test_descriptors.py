"""A server that runs out of file descriptors says so, goes on with those it has, and recovers."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import subprocess
import sys
import threading

import pytest

from gt.client.session import Session
from gt.dispatcher.fairness.descriptors import KEPT_DESCRIPTORS, PATIENCE_SECONDS, Reserve
from gt.errors import Refused
from gt.wire.dealer import Dealer
from gt.wire.link import hello
from gt.wire.messages import Query, Report, Welcome
from gt.wire.process_settings import more_descriptors
from tests.helpers.limits import limit

LIMIT = 64


@contextlib.contextmanager
def few():
    """A server with 64 descriptors at most: its address, and what it has said in the end; its process."""
    said: list[str] = []
    process = subprocess.Popen(
        ["bash", "-c", f'ulimit -n {LIMIT}; exec "$@"', "-", sys.executable, "-m", "gt.server", "-p", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield re.search(r"on (\S+)\n", process.stdout.readline())[1], said, process
    finally:
        process.terminate()
        said.append(process.communicate(timeout=limit(20))[1])


def worker(address: str) -> Dealer:
    def answer(message, frames):
        if isinstance(message, Query):
            link.send(Report(message.request, {"done": 0, "stats": {}}))

    link = Dealer(address, answer, lambda reason: None)
    link.send(hello("worker", info={"name": "", "pid": 1, "host": "here", "heap_bytes": 1 << 20}))
    return link


def test_idle_strangers_make_room_for_who_comes():
    with few() as (address, said, _), contextlib.ExitStack() as stack:
        stack.callback(worker(address).close)
        first = Session(address)
        stack.callback(first.close)
        host, _, port = address.rpartition(":")
        for _ in range(2 * LIMIT):
            stack.enter_context(socket.create_connection((host, int(port)), 5))
        first.stats()  # those who are connected notice nothing
        Session(address, wait=60).close()
    assert f"a connection is ended: more than {LIMIT // 4} connections have said nothing" in said[0]
    assert said[0].count("no file descriptors left, of 64") <= 1  # it may not come to that


def test_who_comes_while_descriptors_are_short_waits_until_strangers_have_left():
    with few() as (address, _, process), contextlib.ExitStack() as stack:
        stack.callback(worker(address).close)
        folder = f"/proc/{process.pid}/fd"
        stack.callback(Session(address).close)
        # honest peers leave so few that strangers take the reserve itself
        while len(os.listdir(folder)) < LIMIT - KEPT_DESCRIPTORS // 2:
            stack.callback(Session(address).close)
        host, _, port = address.rpartition(":")
        for _ in range(KEPT_DESCRIPTORS):
            stack.enter_context(socket.create_connection((host, int(port)), 5))
        assert "no file descriptors left, of 64" in process.stderr.readline()
        Session(address, wait=60).close()


def test_room_is_made_for_newcomers_only_while_strangers_are_left():
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(2)]
        accepted = [stack.enter_context(listener.accept()[0]) for _ in range(2)]
        reserve, taken = Reserve(port, set, set), []
        stack.callback(reserve.close)
        with all_taken(taken):
            assert reserve.poll(0.0) and not reserve.admits() and reserve.hopeful
            assert reserve.poll(PATIENCE_SECONDS) and reserve.hopeful
            assert [stranger.recv(1) for stranger in strangers] == [b"", b""]
            assert [reserve.admits() for _ in range(3)] == [True, True, False]
            for connection in accepted:
                taken.append(connection.detach())
                os.dup2(0, taken[-1])  # closed, and something else in its place
            assert reserve.poll(PATIENCE_SECONDS + 0.25) and not reserve.hopeful and not reserve.admits()


def test_a_late_connection_is_told():
    with few() as (address, said, _), contextlib.ExitStack() as stack:
        stack.callback(worker(address).close)
        welcomes = threading.Semaphore(0)
        for _ in range(LIMIT):  # as many as come in
            link = Dealer(address, lambda message, _: isinstance(message, Welcome) and welcomes.release(), lambda reason: None)
            stack.callback(link.close)
            link.send(hello("client"))
        assert all(welcomes.acquire(timeout=limit(20)) for _ in range(20))
        with pytest.raises(Refused, match=r"no file descriptors left, of 64: start it with more \(`ulimit -n`\)"):
            for _ in range(8):
                stack.callback(Session(address, wait=60).close)
    assert said[0].count("no file descriptors left") == 1


@contextlib.contextmanager
def all_taken(taken: list):
    """No descriptor of this process is free. taken: those to be closed at the end, or before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_reserve_is_there_again_once_there_is_room(caplog):
    reserve, taken = Reserve(1, set, set), []
    try:
        assert not reserve.poll(0.0)
        with all_taken(taken):
            assert reserve.poll(0.25) and reserve.poll(0.5) and not reserve._kept
            for descriptor in taken:
                os.close(descriptor)
            taken.clear()
            assert not reserve.poll(0.75) and len(reserve._kept) == KEPT_DESCRIPTORS
    finally:
        reserve.close()
    assert [record.getMessage().count("left") for record in caplog.records] == [1, 0]


def test_a_process_takes_the_descriptors_it_may_have():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limits[1]), limits[1]))
        more_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limits[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
