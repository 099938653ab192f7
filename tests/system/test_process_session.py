"""Session and server over a real socket, the core being a toy: values, uploads, credit, loss, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import numpy as np
import pytest

from gt.client.session import Session
from gt.dispatcher.server import Server
from gt.errors import DispatcherLost, OpFailed, Refused, SystemFailure
from gt.ir.spec import contiguous
from gt.wire import link, messages
from tests.helpers.limits import limit
from tests.helpers.processes import wait_until
from tests.helpers.toy_core import ToyCore


@pytest.fixture
def toy():
    """A server with a toy core in a thread."""
    server = Server(core=(core := ToyCore()))
    server.core = core
    thread = threading.Thread(target=server.run, name="gt-test-server")
    thread.start()
    yield server
    server.stop("the test is over")
    thread.join()


@pytest.fixture
def session(toy):
    session = Session(toy.address)
    yield session
    session.close()


def test_a_session_is_welcomed(session):
    assert (session.number, session.workers, session.groups, session.failure) == (1, ["w0"], ["stage0"], None)


def test_ops_arrive_in_order_with_their_frames(session, toy):
    for i in range(100):
        session.wait_credit()
        session.submit([], [], [i, 0.5], [bytes([i])])
    assert session.stats()["dispatcher"] == {"codes": 200}
    assert toy.core.codes == [n for i in range(100) for n in (i, 0.5)]
    assert toy.core.frames == [bytes([i]) for i in range(100)]


def test_values_and_specs_come_back(session):
    shape, dtype, data = session.fetch(42)
    assert (shape, dtype, data.view("f8")[0]) == ((), "float64", 42.0)
    assert session.describe([5, 6]) == [contiguous((5,), "int64"), contiguous((6,), "int64")]


def test_an_error_is_raised_by_the_call_it_answers(session):
    with pytest.raises(OpFailed, match="it failed") as caught:
        session.fetch(-1)
    assert (caught.value.op, caught.value.origin) == ("aten.mm.default", "model.py:3")
    assert session.fetch(1)[1] == "float64"


def test_an_error_of_no_request_is_raised_at_the_next_wait(session):
    session.submit([], [], [-7])
    with pytest.raises(OpFailed, match="op 7 failed"):
        session.fetch(1)
    assert session.fetch(1)[1] == "float64"


def test_client_counters(session):
    session.fetch(1)
    session.submit([], [], [1])
    counted = session.stats()["client"]
    assert counted["fetches"] == 1 and counted["messages_sent"] == 4 and counted["bytes_sent"] > 10


def test_a_host_copy_is_sent_when_asked_for(session, toy):
    array = np.arange(3 * 400_000, dtype=np.float32).reshape(3, 400_000)
    session.keep(100, array)
    threading.Thread(target=lambda: _ignore(session.fetch, 100), name="test-fetch", daemon=True).start()
    assert wait_until(lambda: session.stats() and 100 not in session._uploads.copies)
    assert bytes(toy.core.uploads[100]) == array[:2].tobytes()


def _ignore(call, *args):
    with contextlib.suppress(SystemFailure):
        call(*args)


def test_no_server_is_one_sentence():
    with pytest.raises(DispatcherLost, match=r"no server at 127.0.0.1:1 .*python -m gt.server -p 1"):
        Session("127.0.0.1:1", wait=0.2)
    with pytest.raises(DispatcherLost, match="no host is called"):
        Session("no.such.host.invalid:5")
    with pytest.raises(DispatcherLost, match="want host:port"):
        Session("localhost")


def test_a_server_that_parts_from_a_session_has_not_stopped(toy, session):
    """The server's reason is raised unchanged."""
    session.submit([], [], [-8])
    with pytest.raises(SystemFailure, match=r"^the heap is full$") as found:
        session.inspect(1)
    assert not isinstance(found.value, DispatcherLost)
    assert wait_until(lambda: session.failure is not None)  # by the Exit that follows, which nothing announces
    with pytest.raises(SystemFailure, match=r"^the heap is full$"):
        session.submit([], [], [1])


def test_another_version_is_refused_with_both(toy, monkeypatch):
    monkeypatch.setattr(link, "VERSION", messages.VERSION)
    real = link.hello
    monkeypatch.setattr(link, "hello", lambda *a, **k: _aged(real(*a, **k)))
    with pytest.raises(Refused, match=rf"protocol 99 \(gt 0.1.0\), the server protocol {messages.VERSION}"):
        Session(toy.address)


def _aged(hello):
    import dataclasses

    return dataclasses.replace(hello, version=99)


def test_a_stopped_server_says_so(toy, session):
    waiting = _Waiter(lambda: session.inspect(1))
    toy.stop("maintenance")
    assert isinstance(waiting.error(), DispatcherLost)
    assert "has stopped: maintenance" in str(waiting.error())
    with pytest.raises(DispatcherLost, match="maintenance"):
        session.submit([], [], [1])


def test_nothing_is_sent_after_goodbye(toy):
    session = Session(toy.address)
    session.on_idle = lambda: session.submit([], [], [1])
    session.close()
    Session(toy.address).close()  # by now the first one's last words have been read
    assert [event for event in toy.core.events if type(event).__name__ == "Malformed"] == []


def test_a_closed_session_says_so(toy):
    session = Session(toy.address)
    session.close()
    session.close()
    with pytest.raises(SystemFailure, match="closed"):
        session.fetch(1)


def test_ctrl_c_ends_a_wait_at_once(session):
    asked = threading.Event()
    session.on_idle = lambda: session.waiting and asked.set()
    killer = threading.Thread(target=lambda: (asked.wait(limit(20)), os.kill(os.getpid(), signal.SIGINT)), name="test-killer")
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        session.inspect(1)
    killer.join()
    assert session.fetch(3)[1] == "float64"


def test_a_fork_does_not_touch_the_link(session):
    pid = os.fork()
    if pid == 0:
        try:
            session.submit([], [], [1])
        except SystemFailure:
            session.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert session.fetch(2)[1] == "float64"


def test_garbage_is_refused_and_the_server_goes_on(toy, session):
    from gt.wire import codec
    from gt.wire.dealer import Dealer

    heard = threading.Event()
    other = Dealer(toy.address, lambda *_: heard.set(), lambda reason: None)
    other._queue.append([b"\xc1\x00garbage"])
    other._queue.append([codec.pack(messages.Stats(1))])
    other.wake()
    reasons: list[str] = []
    for _ in range(10_000):  # another connection's: it may come later
        assert session.fetch(2)[1] == "float64"
        reasons = [event.reason for event in toy.core.events if type(event).__name__ == "Malformed"]
        if reasons:
            break
    other.close()
    assert not heard.is_set()
    assert reasons and "not msgpack" in reasons[0]


class _Waiter:
    """A call in a thread, and the error it ends with."""

    def __init__(self, call):
        self._error = None
        self._thread = threading.Thread(target=self._run, args=(call,), name="test-waiter")
        self._thread.start()

    def _run(self, call):
        try:
            call()
        except Exception as error:
            self._error = error

    def error(self):
        self._thread.join(limit(10))
        return self._error
