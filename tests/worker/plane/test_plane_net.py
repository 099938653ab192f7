"""Plane net over loopback: planes as threads of this process, each taken for a host of its own."""

from __future__ import annotations

import contextlib
import errno
import random
import resource
import select
import socket
import threading
import types

import numpy as np
import pytest

from gt import env
from gt.wire import liveness
from gt.worker.plane.base import PeerGone, Unreachable
from gt.worker.plane.net import chain, collectives, handshake, lane, network, peer_connection, relay, retries, strangers, stream
from gt.worker.plane.net.peer_connection import DATA, HEADER, PeerConnection
from gt.worker.plane.net.plane import NetPlane
from tests.helpers.limits import limit
from tests.helpers.processes import no_thread, wait_until
from tests.worker.plane import planes

KEY = "00ff" * 16


def ways(count, epoch=1, without=()):
    """All pairs by TCP, but those in `without`, which the workers between relay."""
    rows = []
    for a in range(count):
        for b in range(a + 1, count):
            relays = list(range(a + 1, b))
            direct = (a, b) not in without
            rows.append([a, b, epoch, "tcp" if direct else "via", "127.0.0.1", "127.0.0.1", [] if direct else relays])
    return rows


def tell(world, rows, now, only=None):
    for index, plane in enumerate(world):
        if only is None or index in only:
            plane.introduce(rows, now, KEY, index)
            plane.world(rows, now)


@contextlib.contextmanager
def hosts(count, without=()):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.environ", {**env.child(), "GT_IFNAME": "lo"})
        world = [NetPlane(planes.HEAP) for _ in range(count)]
        rows = []
        for index, plane in enumerate(world):
            info = plane.open()
            rows.append([*planes.row(index, info)[:7], f"host {index}", info["port"]])
        try:
            tell(world, rows, ways(count, without=without))
            for plane in world:
                plane.rows = rows
            yield world
        finally:
            for plane in world:
                plane.close()


def line(count):
    return {(a, b) for a in range(count) for b in range(a + 2, count)}


def channel(peer, slots=4, size=256):
    return planes.channel(peer, 4096, size, slots)


@pytest.mark.parametrize("without", [set(), {(0, 2)}], ids=["mesh", "line"])
def test_messages_of_any_size_arrive_in_order(without):
    sizes = [0, 1, 255, 256, 257, 5000, 0, 70_000, 3, 1 << 20, 8]
    messages = [random.Random(at).randbytes(size) for at, size in enumerate(sizes)]

    def work(index, plane):
        for message in messages * 3:
            if index == 0:
                plane.send(channel(2), message)
                back = bytearray(len(message))
                plane.recv(channel(2), back)
                assert back == message
            elif index == 2:
                into = bytearray(len(message))
                plane.recv(channel(0), into)
                plane.send(channel(0), into)
        return plane.counters()

    with hosts(3, without) as world:
        first, _, last = planes.together(world, work)
        between = world[1].counters()
    assert first["bytes_sent"] == first["bytes_received"] == {"w2": 3 * sum(sizes)}
    assert last["bytes_sent"] == {"w0": 3 * sum(sizes)}
    both = 3 * sum(sizes)
    assert between["bytes_relayed"] == ({"0>2": both, "2>0": both} if without else {})


def test_a_sender_is_ahead_of_its_receiver_by_some_bytes_at_most(monkeypatch):
    monkeypatch.setattr(stream, "AHEAD_BYTES", 1024)
    with hosts(2) as (first, second):
        for number in range(4):
            first.send(channel(1), bytes([number]))
        into = bytearray(1)
        sent = threading.Event()
        thread = threading.Thread(target=lambda: (first.send(channel(1), b"\x04"), sent.set()))
        thread.start()
        assert not sent.wait(0.1), "a fifth message had room"
        for number in range(5):
            second.recv(channel(0), into)
            assert into[0] == number
        thread.join()


def test_a_large_message_is_sent_and_received_while_neither_end_waits_for_it():
    """The receiver is busy until the sender has returned, and the connection takes less than a message."""
    size, messages = 5 << 20, 3
    with hosts(2) as (first, second):
        first.send(channel(1, size=1 << 18), b"first")  # connects
        connection = first.network.connection(1, 1)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        for number in range(messages):
            first.send(channel(1, size=1 << 18), bytes([number]) * size)
        into = bytearray(5)
        second.recv(channel(0, size=1 << 18), into)
        for number in range(messages):
            into = bytearray(size)
            second.recv(channel(0, size=1 << 18), into)
            assert into == bytes([number]) * size


class Frames:
    """A sink that keeps payloads."""

    def __init__(self):
        self.payloads, self.count = [], 0

    def passage(self, connection, frame):
        return None

    def begin(self, connection, frame):
        return memoryview(bytearray(frame.nbytes))

    def arrived(self, connection, count):
        self.count += count

    def end(self, connection, frame, payload):
        self.payloads.append((frame.key, len(payload), payload[:1].tobytes()))


def test_a_frame_that_nobody_waits_for_any_more_is_sent_to_its_end():
    """Another stream's frames follow it on the same connection."""

    def gone():
        raise PeerGone(1, "killed")

    def header(key, nbytes):
        return memoryview(HEADER.pack(DATA, 0, 0, nbytes, 0, 1, 1, key, nbytes, 0))

    ours, theirs = socket.socketpair()
    with ours, theirs:
        sink = Frames()
        near, far = (PeerConnection(sock, 1, 1, "here", "there", sink) for sock in (ours, theirs))
        with pytest.raises(PeerGone):
            near.send([header(1, 1 << 20), memoryview(b"a" * (1 << 20))], gone)
        reader = threading.Thread(target=lambda: [far.read() for _ in iter(lambda: len(sink.payloads) < 2, False)])
        reader.start()
        near.send([header(2, 3), memoryview(b"bbb")], lambda: None)
        reader.join(limit(20))
        assert sink.payloads == [(1, 1 << 20, b"a"), (2, 3, b"b")]


def test_more_frames_than_one_call_takes_are_sent_in_several():
    """Small messages of many streams wait for a connection that was full. Its end was taken for the network's."""
    count = peer_connection.MAX_PARTS * 3
    ours, theirs = socket.socketpair()
    with ours, theirs:
        near = PeerConnection(ours, 1, 1, "here", "there", Frames())
        near.queue(*[memoryview(b"%d" % (number % 10)) for number in range(count)])
        near.send([memoryview(b"!")], lambda: None)
        assert theirs.recv(count + 2) == b"".join(b"%d" % (number % 10) for number in range(count)) + b"!"


def test_both_directions_at_once_and_messages_of_another_size():
    big = random.Random(1).randbytes(3 << 20)

    def work(index, plane):
        other, into = 1 - index, bytearray(len(big))
        plane.send(channel(other, size=1 << 18), big[: 1 << 20])
        with pytest.raises(ValueError, match="sent 1048576 bytes, want 7"):
            plane.recv(channel(other, size=1 << 18), bytearray(7))
        if index:
            plane.recv(channel(other, size=1 << 18), into)
        plane.send(channel(other, size=1 << 18), big)
        if not index:
            plane.recv(channel(other, size=1 << 18), into)
        assert into == big

    with hosts(2) as world:
        planes.together(world, work)


@pytest.mark.parametrize("without", [set(), {(0, 2)}], ids=["mesh", "line"])
@pytest.mark.parametrize("count", [1, 500, 40_000, 1_000_003])
def test_collectives_have_the_bits_of_rank_order(without, count):
    values = [np.random.default_rng(rank).standard_normal(count).astype("f4") for rank in range(3)]
    want = (values[0] + values[1]) + values[2]

    def work(index, plane):
        team = planes.team([0, 1, 2], index)
        for _ in range(2):
            data = values[index].copy()
            plane.all_reduce(team, data, planes.adding("f4"))
            assert np.array_equal(data.view("u4"), want.view("u4"))
        outs = [np.zeros(count, "f4") for _ in range(3)]
        plane.all_gather(team, values[index], outs)
        assert all(np.array_equal(out, value) for out, value in zip(outs, values, strict=True))
        out = np.zeros(count, "f4")
        plane.reduce_scatter(team, [values[index]] * 3, out, planes.adding("f4"))
        assert np.array_equal(out.view("u4"), want.view("u4"))
        recvs = [np.zeros(count + rank, "f4") for rank in range(3)]
        plane.all_to_all(team, [np.full(count + index, 10 * index + rank, "f4") for rank in range(3)], recvs)
        assert [recv[0] for recv in recvs] == [index, 10 + index, 20 + index]
        return plane.counters()

    with hosts(3, without) as world:
        planes.together(world, work)


def test_sums_are_sent_in_frames_of_several_chunks(monkeypatch):
    """A frame costs both ends several calls, so a large sum has few, its last one of what is left."""
    frames, header = [], stream.PairStream.header

    def counted(self, kind, nbytes, *rest):
        if kind == DATA:
            frames.append(nbytes)
        return header(self, kind, nbytes, *rest)

    monkeypatch.setattr(stream.PairStream, "header", counted)
    own = 2 * collectives.FRAME_BYTES + collectives.CHUNK_BYTES + 64
    values = [np.random.default_rng(rank).standard_normal(3 * own // 4).astype("f4") for rank in range(3)]

    def work(index, plane):
        data = values[index].copy()
        plane.all_reduce(planes.team([0, 1, 2], index), data, planes.adding("f4"))
        assert np.array_equal(data.view("u4"), ((values[0] + values[1]) + values[2]).view("u4"))

    with hosts(3) as world:
        planes.together(world, work)
    results = [collectives.FRAME_BYTES, collectives.FRAME_BYTES, collectives.CHUNK_BYTES + 64]
    assert sorted(frames) == sorted(6 * [own, *results])


@pytest.mark.parametrize("without", [set(), line(4)], ids=["mesh", "line"])
@pytest.mark.parametrize("odd", [0, 1, 3])
def test_members_that_disagree_all_fail_and_the_next_collective_is_right(without, odd):
    count = 300_000

    def work(index, plane):
        team = planes.team([0, 1, 2, 3], index)
        with pytest.raises(ValueError, match="want the same of all"):
            plane.all_reduce(team, np.ones(0 if index == odd else count, "f4"), planes.adding("f4"))
        data = np.ones(count, "f4")
        plane.all_reduce(team, data, planes.adding("f4"))
        assert (data == 4).all()

    with hosts(4, without) as world:
        planes.together(world, work)


def test_a_line_of_four_relays_over_two():
    def work(index, plane):
        if index == 0:
            plane.send(channel(3, size=1 << 18), b"x" * 500_000)
        elif index == 3:
            into = bytearray(500_000)
            plane.recv(channel(0, size=1 << 18), into)
            assert into == b"x" * 500_000

    with hosts(4, line(4)) as world:
        planes.together(world, work)
        assert world[1].counters()["bytes_relayed"] == world[2].counters()["bytes_relayed"] == {"0>3": 500_000}


@contextlib.contextmanager
def connected_line():
    """Three planes, the second of which relays for the others; all connections are made, and read by background threads."""

    def work(index, plane):
        if index != 1:
            plane.send(channel(1), b"here")
            plane.send(channel(2 - index), b"here")
            plane.recv(channel(2 - index), bytearray(4))
        else:
            for peer in (0, 2):
                plane.recv(channel(peer), bytearray(4))

    with hosts(3, line(3)) as world:
        planes.together(world, work)
        for plane in world:
            plane.network.release()
        yield world


def test_a_pipe_that_the_system_has_no_descriptors_for_is_an_error_and_nothing_else(monkeypatch):
    def none_left(flags):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(relay.os, "pipe2", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        relay.Pipe()


def test_a_relay_keeps_the_bytes_of_large_frames_in_the_kernel(monkeypatch):
    """Though its connections take less than a pipe holds; both directions at once, and its own messages between."""
    copied, paused = [], []
    forward, pause = relay.Relay.forward, relay.Relay._pause
    monkeypatch.setattr(
        relay.Relay, "forward", lambda self, connection, *frame: (copied.append(frame), forward(self, connection, *frame))
    )
    monkeypatch.setattr(
        relay.Relay, "_pause", lambda self, *connections: (paused.append(connections), pause(self, *connections))
    )
    size, count = 12 << 20, 50
    data = [np.random.default_rng(index).bytes(size) for index in range(3)]

    def work(index, plane):
        if index == 1:
            for number in range(count):
                plane.send(channel(2), bytes([number]) * 100)
                plane.recv(channel(2), bytearray(100))
            return
        sender = threading.Thread(target=plane.send, args=(channel(2 - index, size=1 << 18), data[index]))
        sender.start()
        into = bytearray(100)
        for number in range(count if index == 2 else 0):
            plane.recv(channel(1), into)
            assert into == bytes([number]) * 100
            plane.send(channel(1), into)
        into = bytearray(size)
        plane.recv(channel(2 - index, size=1 << 18), into)
        sender.join()
        assert into == data[2 - index]

    with connected_line() as world:
        for peer in (0, 2):
            for connection in (world[1].network.connection(peer, 1), world[peer].network.connection(1, 1)):
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    connection.sock.setsockopt(socket.SOL_SOCKET, option, 1 << 15)
        before = world[1].counters()["bytes_relayed"]
        planes.together(world, work)
        after = world[1].counters()["bytes_relayed"]
    assert {pair: after[pair] - before[pair] for pair in after} == {"0>2": size, "2>0": size}
    assert paused and sum(frame.nbytes for frame, _ in copied) < 1 << 20


def frame_of(nbytes):
    """The header of a large frame from the first to the third, and its bytes."""
    return HEADER.pack(DATA, 0, 0, nbytes, 0, 2, 1, 4096, nbytes, 0) + b"a" * nbytes


def test_a_connection_that_ends_leaves_no_part_of_a_frame_on_the_next():
    with connected_line() as (first, between, last):
        first.network.connection(1, 1).sock.sendall(frame_of(1 << 20)[:300_000])
        assert wait_until(lambda: between.counters()["bytes_relayed"]["0>2"] > 200_000)
        first.network.connection(1, 1).sock.shutdown(socket.SHUT_RDWR)
        into = bytearray(4)
        between.send(channel(2), b"well")
        last.recv(channel(1), into)
        assert into == b"well"


def test_the_rest_of_a_frame_whose_way_is_over_is_dropped():
    """What follows it on its connection is not."""
    with connected_line() as (first, between, last):
        whole = frame_of(1 << 20)
        first.network.connection(1, 1).sock.sendall(whole[:300_000])
        assert wait_until(lambda: between.counters()["bytes_relayed"]["0>2"] > 200_000)
        out = between.network.connection(2, 1)
        last.network.connection(1, 1).sock.shutdown(socket.SHUT_RDWR)
        assert wait_until(lambda: out.ended)
        first.network.connection(1, 1).sock.sendall(whole[300_000:])
        into = bytearray(4)
        first.send(channel(1), b"well")
        between.recv(channel(0), into)
        assert into == b"well"


def test_a_broken_connection_names_both_ends_and_the_next_world_has_another():
    said = []
    with hosts(3) as world:
        world[0].on_link_failed = lambda *failure: said.append(failure)
        world[0].send(channel(1), b"first")
        into = bytearray(5)
        world[1].recv(channel(0), into)
        connection = world[0].network.connection(1, 1)
        connection.sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(Unreachable, match=r"no way from worker 'w0' on .* to worker 'w1' on .*: the connection 127"):
            world[0].recv(channel(1), into)
        with pytest.raises(Unreachable):
            world[1].recv(channel(0), into)
        assert [failure[:4] for failure in said] == [(1, 1, "127.0.0.1", "127.0.0.1")]
        again = [[0, 1, 2, "via", "", "", [2]], *ways(3)[1:]]
        tell(world, world[0].rows, again)
        world[0].send(channel(1), b"again")
        world[1].recv(channel(0), into)
        assert into == b"again"
        assert world[0].ways() == {"w1": "via worker 2", "w2": "tcp 127.0.0.1 to 127.0.0.1"}


RELAYED = [[0, 1, 2, "via", "", "", [2]], *ways(3)[1:]]
def test_each_connection_of_a_world_is_told_by_the_end_that_made_it():
    """Clients wait until all are made."""
    told, enough = [], threading.Event()
    with hosts(3) as world:
        for own, plane in enumerate(world):

            def made(index, epoch, *_, own=own):
                if epoch == 2:
                    told.append(sorted((own, index)))
                if len(told) == 3:
                    enough.set()

            plane.on_link_made = made
        tell(world, world[0].rows, ways(3, epoch=2))
        assert enough.wait(limit(20)), told
    assert sorted(told) == [[0, 1], [0, 2], [1, 2]]


BROKEN = [[0, 1, "127.0.0.1", "127.0.0.1"]]


def test_a_connection_that_failed_is_tried_beside_the_way_that_is_used(monkeypatch):
    monkeypatch.setattr(retries, "RETRY_SECONDS", 0.01)
    said, mended = [], threading.Event()
    with hosts(3) as world:
        for index, plane in enumerate(world):
            plane.on_link_failed = lambda *failure: said.append(failure)
            plane.on_link_made = lambda index, epoch, *_: None if epoch else (said.append(index), mended.set())
            plane.introduce(world[0].rows, RELAYED, KEY, index)
            plane.world(world[0].rows, RELAYED)
        for sender, receiver in ((0, 1), (1, 0)):  # the way over worker 2 is made
            world[sender].send(channel(receiver), b"first")
            world[receiver].recv(channel(sender), bytearray(5))
        world[1].introduce(world[0].rows, RELAYED, "11" * 32, 1)
        tried, probe = threading.Event(), world[0].network.probe

        def spied(*about):
            try:
                probe(*about)
            finally:
                tried.set()

        world[0]._retries._probe = spied
        world[0].introduce(world[0].rows, RELAYED, KEY, 0, BROKEN)
        assert tried.wait(limit(20)) and not mended.is_set(), "the other end has another key"
        world[1].introduce(world[0].rows, RELAYED, KEY, 1)
        assert mended.wait(limit(20))
        assert wait_until(lambda: world[0]._retries._thread is None), "one success is enough"
        into = bytearray(5)
        world[0].send(channel(1), b"still")
        world[1].recv(channel(0), into)
        assert into == b"still" and said == [1]
        assert world[0].ways()["w1"] == "via worker 2"


@pytest.mark.parametrize("over", [lambda tries: tries.end(), lambda tries: tries.want([])], ids=["ended", "unwanted"])
def test_no_other_connection_is_tried_once_that_is_over(monkeypatch, over):
    """Each of many that time out takes seconds, for which the end of a worker would wait."""
    monkeypatch.setattr(retries, "RETRY_SECONDS", 0.0)
    tried, said = [], []

    def probe(*attempt):
        tried.append(attempt)
        over(tries)

    tries = retries.Retries(probe, lambda *attempt: said.append(attempt))
    tries.want([(1, "10.0.0.1", "10.0.0.2"), (2, "10.0.0.1", "10.0.0.3")])
    assert wait_until(lambda: said)
    tries.end()
    tries.join()
    assert len(tried) == len(said) == 1


def test_an_error_of_a_relayed_way_names_the_addresses_of_its_connections():
    legs = r"via worker 2 \(worker 0 at 127.0.0.1 to worker 2 at 127.0.0.1, worker 2 at 127.0.0.1 to worker 1 at 127.0.0.1\)"
    with hosts(3) as world:
        tell(world, world[0].rows, RELAYED)
        now = [[0, 1, 3, "none", "", "", []], ways(3)[1], [1, 2, 2, "none", "", "", []]]
        for index, plane in enumerate(world):
            plane.introduce(world[0].rows, now, KEY, index)
        ended = "its connection of worker 2 at 127.0.0.1 to worker 1 at 127.0.0.1 has ended"
        with pytest.raises(Unreachable, match=f"the way {legs} is given up: {ended}"):
            world[0].send(channel(1), b"late")
    with hosts(3) as world:
        tell(world, world[0].rows, RELAYED)
        world[0].abort(2, "killed")
        with pytest.raises(Unreachable, match=f"worker 2, which relayed, is gone: the way was {legs}"):
            world[0].send(channel(1), b"late")


def test_a_host_that_is_silent_is_noticed_before_anybody_sends_to_it(monkeypatch):
    """The kernel's limit for probes of an idle connection is over with the first bytes that are sent."""
    said, over = [], threading.Event()
    with hosts(2) as (first, _):
        assert wait_until(lambda: first.network.connection(1, 1) is not None)
        fd = first.network.connection(1, 1).fd
        first.on_link_failed = lambda *failure: (said.append(failure), over.set())
        monkeypatch.setattr(liveness, "unheard", lambda of: liveness.SHORTEST_SECONDS * (of == fd))
        assert over.wait(limit(20))
        assert said[0] == (1, 1, "127.0.0.1", "127.0.0.1", "Connection timed out")
        with pytest.raises(Unreachable, match="Connection timed out"):
            first.send(channel(1), b"late")


def test_the_end_of_an_earlier_worlds_connection_breaks_no_later_one(monkeypatch):
    with hosts(2) as (first, second):
        into, over, report = bytearray(4), threading.Event(), first.network._report
        monkeypatch.setattr(first.network, "_report", lambda *about: (report(*about), over.set()))
        first.send(channel(1), b"then")
        second.recv(channel(0), into)
        tell((first, second), first.rows, ways(2, epoch=2))
        assert over.wait(limit(20))
        first.send(channel(1), b"here")
        second.recv(channel(0), into)
        assert into == b"here"


def test_a_member_that_is_cut_off_fails_the_collective_of_all():
    """The third member's own connections are whole: it has to be told."""

    def work(index, plane):
        team = planes.team([0, 1, 2], index)
        data = np.ones(100_000, "f4")
        plane.all_reduce(team, data, planes.adding("f4"))
        if index == 0:
            plane.network.connection(1, 1).sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerGone):
            for _ in range(3):
                plane.all_reduce(team, data, planes.adding("f4"))

    with hosts(3) as world:
        planes.together(world, work)
        tell(world, world[0].rows, [[0, 1, 2, "via", "", "", [2]], *ways(3)[1:]])

        def after(index, plane):
            data = np.ones(100_000, "f4")
            plane.all_reduce(planes.team([0, 1, 2], index), data, planes.adding("f4"))
            assert (data == 3).all()

        planes.together(world, after)


def test_members_that_are_cut_off_before_the_first_collective_of_a_world_fail_that_of_all():
    """Their teams were not made, so nobody told the third member, which waited for ever."""

    def work(index, plane):
        outs = np.zeros((3, 8), "u1")
        with pytest.raises(Unreachable, match="it is cut"):
            plane.all_gather(planes.team([0, 1, 2], index), np.ones(8, "u1"), list(outs))

    with hosts(3) as world:
        for one, other in ((0, 2), (2, 0)):
            world[one].network.lane(other, 1).broken = "it is cut"
        planes.together(world, work)


def test_a_world_whose_ways_are_given_up_before_it_is_reached_is_not_waited_in():
    """Its lanes were made after those of its time were broken, and a sender waited for a connection for ever."""
    with hosts(2) as (first, second):
        for index, plane in enumerate((first, second)):
            plane.introduce(first.rows, ways(2, epoch=3), KEY, index)
            plane.world(first.rows, ways(2, epoch=2))
        with pytest.raises(Unreachable, match=r"no way from worker 'w0' on .* to worker 'w1' on .*: the way is given up"):
            first.send(channel(1), b"late")
        with pytest.raises(Unreachable, match="is given up"):
            second.recv(channel(0), bytearray(4))
        tell((first, second), first.rows, ways(2, epoch=3))
        into = bytearray(4)
        first.send(channel(1), b"here")
        second.recv(channel(0), into)
        assert into == b"here"


def test_abort_ends_a_wait_at_once():
    with hosts(2) as (first, _):
        thread = threading.Timer(0.1, first.abort, (1, "killed"))
        thread.start()
        with pytest.raises(PeerGone, match="worker 1 is gone: killed"):
            first.recv(channel(1), bytearray(8))
        thread.join()


def test_strangers_and_other_keys_are_not_let_in():
    with hosts(2) as (first, second):
        with socket.create_connection(("127.0.0.1", first.network.port), limit(20)) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 200)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        rows = first.rows
        second.introduce(rows, ways(2, epoch=2), "11" * 32, 1)
        second.world(rows, ways(2, epoch=2))
        said = threading.Event()
        first.on_link_failed = lambda *failure: said.set()
        first.introduce(rows, ways(2, epoch=2), KEY, 0)
        first.world(rows, ways(2, epoch=2))
        assert said.wait(limit(20))
        with pytest.raises(Unreachable, match="the process that listens there is not a worker of this world"):
            first.recv(channel(1), bytearray(1))


def connect(plane):
    return socket.create_connection(("127.0.0.1", plane.network.port), limit(20))


def test_silent_strangers_do_not_keep_a_worker_out(monkeypatch):
    """All ask first; the worker's own handshake is not the oldest."""
    monkeypatch.setattr(strangers, "MAX_STRANGERS", 8)
    with hosts(2) as (first, second), contextlib.ExitStack() as opened:
        silent = [opened.enter_context(connect(second)) for _ in range(16)]
        assert silent[0].recv(1) == b""  # they are more than may wait
        tell((first, second), first.rows, ways(2, epoch=2))
        first.send(channel(1), b"here")
        into = bytearray(4)
        second.recv(channel(0), into)
        assert into == b"here"


def test_strangers_leave_descriptors_for_what_a_worker_opens(monkeypatch):
    """A worker with 64 descriptors had none left for a peer's heap or a program's arena while 256 strangers were silent."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    few = strangers.Strangers()
    pairs = [socket.socketpair() for _ in range(20)]
    for sock, _ in pairs:
        few.add(sock)
    assert [other.recv(1) for _, other in pairs[:4]] == [b""] * 4  # the oldest, which have ended
    assert [few.remove(sock) for sock, _ in pairs] == [False] * 4 + [True] * 16
    for pair in pairs:
        for sock in pair:
            sock.close()


def test_a_connection_that_no_thread_can_greet_is_closed_and_the_end_leaves_none_open(monkeypatch):
    with hosts(1) as (plane,):
        with monkeypatch.context() as few:
            few.setattr(threading.Thread, "start", no_thread)
            with connect(plane) as sock:
                assert sock.recv(1) == b""
        assert not plane.network._threads


def test_early_frames_are_counted_by_bytes_and_number(monkeypatch):
    """Each was added up with all before it: a worker that sent many to nowhere kept the one between busy for an hour."""

    class Nowhere:
        def onward(self, target):
            return None

        def lives(self, target):
            return True

    passed = relay.Relay(Nowhere(), lambda: None)
    frame = peer_connection.Frame(DATA, 1, 0, 0, 0, 9, 1, 1, 0, 0)
    monkeypatch.setattr(relay, "MAX_EARLY_FRAMES", 5)
    for _ in range(9):
        passed.forward(None, frame, memoryview(bytes(40)))
    assert (passed._early_frames, passed._early_bytes) == (5, 200)
    passed.forward_early()  # there is no connection yet
    assert (passed._early_frames, passed._early_bytes) == (5, 200)
    monkeypatch.setattr(relay, "MAX_EARLY_BYTES", 240)
    monkeypatch.setattr(relay, "MAX_EARLY_FRAMES", 99)
    for _ in range(9):
        passed.forward(None, frame, memoryview(bytes(40)))
    assert (passed._early_frames, passed._early_bytes) == (6, 240)


def test_a_frame_is_passed_on_behind_those_that_came_before_the_connection():
    """One thread had a connection for its frame while another was yet to pass on the frames before it."""

    class Onward:
        index, ended, relayed, relayed_bytes = 9, False, (), 0

        def __init__(self):
            self.queued = []

        def queue(self, *frame):
            self.queued += map(bytes, frame)

        def relay(self):
            return True

        def wait_outside(self):
            pass

    class Ways:
        out = None

        def onward(self, target):
            return self.out if target == 9 else None

        def lives(self, target):
            return True

    source = types.SimpleNamespace(passages={})
    for large in (False, True):
        ways = Ways()
        passed = relay.Relay(ways, lambda: None)
        frame = peer_connection.Frame(DATA, 1, 0, 0, 0, 9, 1, 1, 0, 0)
        for target in (8, 9):
            passed.forward(source, frame._replace(target=target), memoryview(b"first"))
        ways.out = Onward()
        if large:
            assert passed.passage(source, frame._replace(nbytes=relay.PASSED_BYTES)) is not None
        else:
            passed.forward(source, frame, memoryview(b"second"))
        assert ways.out.queued == [b"first", *[b"second"] * (not large)]
        assert (passed._early_frames, passed._early_bytes) == (1, 5)  # of the worker to whom there is no way yet


def test_greetings_of_worlds_to_come_wait_in_few_threads(monkeypatch):
    monkeypatch.setattr(strangers, "MAX_EARLY_GREETINGS", 2)
    with hosts(2) as (_, second), contextlib.ExitStack() as opened:
        hello = handshake._GREETING.pack(handshake.MAGIC, 0, 1, 99, 0, 0, b"0" * 32)
        early = [opened.enter_context(connect(second)) for _ in range(8)]
        for sock in early:
            sock.sendall(hello)
        ended = 0
        while ended < 6:
            ready = select.select(early, [], [], limit(10))[0]
            assert ready and all(sock.recv(1) == b"" for sock in ready)
            early = [sock for sock in early if sock not in ready]
            ended += len(ready)


@pytest.mark.parametrize(
    "frame",
    [
        (peer_connection.DATA, 255, 0, 4, 0, 2, 1, 1, 4, 0),
        (peer_connection.DATA, 0, 0, 1 << 31, 0, 1, 1, 1, 1 << 63, 0),
        (9, 0, 0, 0, 0, 1, 1, 1, 0, 0),
    ],
    ids=["hops", "size", "kind"],
)
def test_a_wrong_frame_ends_its_connection_alone(frame):
    """A worker with the key may send anything: the thread that reads it goes on for others."""
    with hosts(3) as (first, second, third):
        into = bytearray(4)
        for source, data in ((first, b"yes!"), (third, b"also")):
            source.send(channel(1), data)
            second.recv(channel(source.network.own), into)
        second.network.release()  # its background thread reads
        first.network.connection(1, 1).sock.sendall(peer_connection.HEADER.pack(*frame) + b"data")
        with pytest.raises(Unreachable, match="it sent"):
            second.recv(channel(0), into)
        third.send(channel(1), b"well")
        second.recv(channel(2), into)
        assert into == b"well"


@pytest.mark.parametrize("known", [True, False], ids=["a stream in use", "streams that nobody has used"])
def test_a_worker_that_sends_beyond_its_credit_ends_its_connection_alone(monkeypatch, known):
    """A worker with the key filled the memory of another, which kept all that came before its receive."""
    monkeypatch.setattr(stream, "AHEAD_BYTES", 1024)
    monkeypatch.setattr(lane.Early.__init__, "__defaults__", (100_000,))
    with hosts(3) as (first, second, third):
        into = bytearray(4)
        for source, data in ((first, b"yes!"), (third, b"also")):
            source.send(channel(1), data)
            second.recv(channel(source.network.own), into)
        second.network.release()  # its background thread reads
        liar = first.network.connection(1, 1).sock
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 20_000:
                key = 4096 if known else sent
                liar.sendall(HEADER.pack(DATA, 0, 0, 256, 0, 1, 1, key, 256, 0) + bytes(256))
                sent += 1
        assert sent < 20_000
        with pytest.raises(Unreachable, match=r"it sent more than (its credit of 4 slots|100000 bytes before)"):
            while True:  # what came within the credit is there
                second.recv(channel(0), bytearray(256))
        assert sum(len(each._buffered) for each in second.network.lane(0, 1)._in.values()) < 400
        third.send(channel(1), b"well")
        second.recv(channel(2), into)
        assert into == b"well"


def test_frames_that_come_early_count_until_their_stream_is_used():
    early, streams = lane.Early(3 * (lane.BESIDE_BYTES + 10)), lane.Lane(1, 1)
    frame = memoryview(bytes(10))
    for key in range(3):
        assert streams.incoming(key).begin(10, 10, 0, early) is None
        streams.incoming(key).buffer(10, 0, frame)
    with pytest.raises(ValueError, match="before this worker receives"):
        streams.incoming(3).begin(10, 10, 0, early)
    streams.incoming(0).know(10, 2)
    streams.forget(1)
    assert early.nbytes == lane.BESIDE_BYTES + 10
    assert streams.incoming(0).begin(10, 10, 0, early) is None  # the second of two slots
    streams.incoming(0).buffer(10, 0, frame)
    with pytest.raises(ValueError, match="more than its credit of 2 slots of 10 bytes"):
        streams.incoming(0).begin(1, 10, 0, early)
    streams.incoming(0).post(memoryview(bytearray(10)), 10)
    assert streams.incoming(0).begin(10, 10, 0, early) is None
    streams.close()
    assert early.nbytes == 0
    for key in range(lane.MAX_STREAMS + 9):
        streams.fail(key, "x" * 10_000)
    assert len(streams.failed) == lane.MAX_STREAMS and len(streams.failed[0]) == lane.MAX_REASON_CHARACTERS


def test_a_worker_that_is_late_to_know_the_world_is_asked_again(monkeypatch):
    refused, accept, usual = threading.Event(), handshake.accept, handshake.SECONDS

    def accept_and_say(*args):
        try:
            return accept(*args)
        except OSError:
            refused.set()
            raise

    monkeypatch.setattr(handshake, "SECONDS", 0.1)
    monkeypatch.setattr(handshake, "accept", accept_and_say)
    said = []
    with hosts(2) as (first, second):
        first.on_link_failed = lambda *failure: said.append(failure)
        first.introduce(first.rows, ways(2, epoch=2), KEY, 0)
        first.world(first.rows, ways(2, epoch=2))
        assert refused.wait(limit(20))
        monkeypatch.setattr(handshake, "SECONDS", usual)  # the next handshake may last
        second.introduce(first.rows, ways(2, epoch=2), KEY, 1)
        second.world(first.rows, ways(2, epoch=2))
        first.send(channel(1), b"late")
        into = bytearray(4)
        second.recv(channel(0), into)
        assert into == b"late" and not said


def test_a_way_that_leads_to_another_process_is_given_up_at_once(monkeypatch):
    """Two separate networks of one number: behind the address and port of worker 1 is another worker."""
    monkeypatch.setattr(network, "MEET_SECONDS", limit(1000))  # a worker that is late to know the world is asked so long
    failed = threading.Event()
    with hosts(3) as world:
        world[0].on_link_failed = lambda index, epoch, *_: failed.set() if (index, epoch) == (1, 2) else None
        rows = [list(row) for row in world[0].rows]
        rows[1][8] = rows[2][8]
        world[0].introduce(rows, ways(3, epoch=2), KEY, 0)
        assert failed.wait(limit(20))


def test_chunks_of_a_chain_divide_no_element():
    assert chain.CHUNK_BYTES % 64 == 0


def test_credit_is_that_of_the_slots_of_the_message_that_has_arrived():
    incoming = lane.Incoming()
    incoming.post(memoryview(bytearray(100)), 10)
    assert incoming.owed == 10
    for nbytes in (20, 15):  # a message of another size
        assert len(incoming.begin(nbytes, 35, 0, lane.Early())) == nbytes
        incoming.arrived(nbytes)
        incoming.end()
    assert incoming.done and incoming.owed == 4
    incoming.buffer(0, 0, memoryview(b""))
    incoming.post(memoryview(bytearray()), 10)
    assert incoming.done and incoming.owed == 5


def test_bytes_fewer_than_wake_a_reader_are_read_all_the_same():
    """A large frame is sent in parts, and each is read before the next is sent."""
    size, part = peer_connection.WAKE_BYTES + 100_000, 100_000
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        theirs, _ = listener.accept()
        sink = Frames()
        with theirs:
            far = PeerConnection(theirs, 1, 1, "here", "there", sink)
            headers = [HEADER.pack(DATA, 0, 0, nbytes, 0, 1, 1, key, nbytes, 0) for key, nbytes in ((1, size), (2, 2))]
            data = headers[0] + b"a" * size + headers[1] + b"bb"
            for start in range(0, len(data), part):
                ours.sendall(data[start : start + part])
                there = min(start + part - HEADER.size, size)  # of the large frame
                while sink.count < there or (start + part >= len(data) and len(sink.payloads) < 2):
                    with contextlib.suppress(BlockingIOError):
                        far.read()
    assert sink.payloads == [(1, size, b"a"), (2, 2, b"b")]
