"""A server that runs out of file descriptors says so, goes on with those it has, and recovers."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import subprocess
import sys

import pytest

from gt.client.session import Session
from gt.dispatcher.fairness.descriptors import KEPT, Reserve
from gt.errors import Refused
from gt.wire.dealer import Dealer
from gt.wire.link import hello
from gt.wire.messages import Query, Report, Welcome
from gt.wire.process_settings import more_descriptors
from tests.helpers.limits import limit

LIMIT = 64


@contextlib.contextmanager
def few():
    """A server with 64 descriptors at most: its address, and what it has said in the end."""
    said: list[str] = []
    process = subprocess.Popen(
        ["bash", "-c", f'ulimit -n {LIMIT}; exec "$@"', "-", sys.executable, "-m", "gt.server", "-p", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield re.search(r"on (\S+)\n", process.stdout.readline())[1], said
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
    with few() as (address, said), contextlib.ExitStack() as stack:
        stack.callback(worker(address).close)
        first = Session(address)
        stack.callback(first.close)
        host, _, port = address.rpartition(":")
        for _ in range(2 * LIMIT):
            stack.enter_context(socket.create_connection((host, int(port)), 5))
        first.stats()  # those who are connected notice nothing
        for _ in range(20):  # who comes before room is made is told so, and comes again
            with contextlib.suppress(Refused):
                Session(address, wait=60).close()
                break
        else:
            pytest.fail("no room was made")
    assert f"a connection is ended: more than {LIMIT // 4} connections have said nothing" in said[0]
    assert said[0].count("no file descriptors left, of 64") <= 1  # it may not come to that


def test_a_late_connection_is_told():
    with few() as (address, said), contextlib.ExitStack() as stack:
        stack.callback(worker(address).close)
        welcome: list = []
        for _ in range(LIMIT):  # as many as come in
            link = Dealer(address, lambda message, frames: welcome.append(message), lambda reason: None)
            stack.callback(link.close)
            link.send(hello("client"))
        with pytest.raises(Refused, match=r"no file descriptors left, of 64: start it with more \(`ulimit -n`\)"):
            for _ in range(8):
                stack.callback(Session(address, wait=60).close)
        assert sum(isinstance(message, Welcome) for message in welcome) > 20
    assert said[0].count("no file descriptors left") == 1


def test_the_reserve_is_there_again_once_there_is_room(caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reserve, taken = Reserve(1, set, set), []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
        assert not reserve.poll(0.0)
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        assert reserve.poll(0.25) and reserve.poll(0.5) and not reserve._kept
        for descriptor in taken:
            os.close(descriptor)
        taken.clear()
        assert not reserve.poll(0.75) and len(reserve._kept) == KEPT
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
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
