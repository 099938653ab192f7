"""The rules of a link: versions, tokens, roles, order and credit."""

import dataclasses
import threading
from types import SimpleNamespace

import pytest

from gt.errors import ProtocolError, Refused, WorkerLost, to_wire
from gt.wire import link, socket
from gt.wire.messages import CODES, VERSION, Done, Fetch, Goodbye, Hello, Ops, Reject, Run, Stats, Welcome
from tests.helpers.limits import limit


def test_every_message_has_a_sender():
    listed = {Hello}.union(*(side for pair in link.MAY_SEND.values() for side in pair))
    assert listed == set(CODES)


def test_a_context_that_does_not_end_is_left(monkeypatch):
    ends = threading.Event()
    monkeypatch.setattr(socket, "LINGER_SECONDS", 0.02)
    socket.terminate(SimpleNamespace(term=lambda: ends.wait(limit(60))))
    ends.set()


def test_a_matching_hello_passes():
    link.examine(link.hello("client"))
    link.examine(link.hello("worker", info={"pid": 1}))


def test_another_version_names_both():
    old = dataclasses.replace(link.hello("client"), version=VERSION + 1, gt="9.9.9")
    both = rf"protocol {VERSION + 1} \(gt 9.9.9\).*protocol {VERSION} \(gt {link.RELEASE}\)"
    with pytest.raises(Refused, match=both):
        link.examine(old)


def test_an_unknown_role_is_refused():
    with pytest.raises(Refused, match="unknown role 'spy'"):
        link.examine(link.hello("spy"))


def test_a_peers_words_are_cut_before_they_are_told():
    for bad in (link.hello("r" * (1 << 20)), dataclasses.replace(link.hello("client"), version=99, gt="g" * (1 << 20))):
        with pytest.raises(Refused) as refused:
            link.examine(bad)
        assert len(str(refused.value)) < 300
    gate = link.Gate()
    gate.admit(link.hello("r" * (1 << 20)))
    assert gate.role == "unknown"


def test_answer_is_the_welcome_or_the_servers_error():
    welcome = Welcome(1, "w0", [], [], 8)
    assert link.answer(welcome) is welcome
    with pytest.raises(WorkerLost, match="gone"):
        link.answer(Reject(to_wire(WorkerLost("gone"))))
    with pytest.raises(ProtocolError, match="answered Hello with Done"):
        link.answer(Done(1))


def test_hello_comes_first_and_once():
    gate = link.Gate()
    with pytest.raises(ProtocolError, match="Stats came before Hello"):
        gate.admit(Stats(1))
    gate.admit(link.hello("client"))
    with pytest.raises(ProtocolError, match="twice"):
        gate.admit(link.hello("client"))


def test_a_role_sends_only_its_own():
    gate = link.Gate()
    gate.admit(link.hello("worker"))
    gate.admit(Done(1))
    with pytest.raises(ProtocolError, match="a worker may not send Fetch"):
        gate.admit(Fetch(1, 2))
    with pytest.raises(ProtocolError, match="a worker may not send Run"):
        gate.admit(Run(1, 0, [], []))
    gate.admit(Goodbye())


def test_batches_come_in_order_and_frames_only_where_they_belong():
    gate = link.Gate()
    gate.admit(link.hello("client"))
    gate.admit(Ops(0, [], [], []), frames=2)
    with pytest.raises(ProtocolError, match=r"Ops\.seq is 2, want 1"):
        gate.admit(Ops(2, [], [], []))
    with pytest.raises(ProtocolError, match="Stats came with 1 frames"):
        gate.admit(Stats(1), frames=1)


def test_credit():
    window = link.Window(2)
    assert [window.take(), window.full, window.take(), window.full] == [0, False, 1, True]
    window.ack(0)
    assert not window.full
    with pytest.raises(ProtocolError, match=r"Ack\.seq is 7"):
        window.ack(7)


def test_the_time_that_a_batch_takes_is_that_between_acknowledgements():
    window = link.Window(64)
    for _ in range(6):
        window.take()
    window.ack(0, now=100.0)
    assert window.seconds > 50 and window.ahead == 5  # nothing is known of the first
    window.ack(3, now=101.5)
    assert (window.seconds, window.ahead) == (0.5, 2)
    window.ack(3, now=200.0)
    assert window.seconds == 0.5
