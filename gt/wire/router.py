"""The dispatcher's end of all links: bound to a port, polled by its loop. Peers without a key cannot send a message."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass

import zmq

from gt.errors import Refused
from gt.logs import Sparse
from gt.wire import codec, tcp
from gt.wire.access import auth, server_files
from gt.wire.access.auth import Access
from gt.wire.connections import MAX_SILENT_CONNECTIONS, SENT_BYTES, Connection, Connections, on_wire
from gt.wire.liveness import Cable
from gt.wire.messages import CHUNK, Exit, Message
from gt.wire.process_settings import available_bytes, plenty_of_cores
from gt.wire.socket import (
    BURST_MESSAGES,
    GONE,
    LINGER_SECONDS,
    NOW,
    QUEUE_MESSAGES,
    Frames,
    ask,
    descriptor_of,
    endpoint,
    events_of,
    frames_of,
    monitored,
    options,
    public,
    put,
    resolve,
    terminate,
    written,
)

log = logging.getLogger("gt.wire")

ACCEPTED = int(zmq.EVENT_ACCEPTED)
_IN = int(zmq.POLLIN)
SPIN_SECONDS = 0.005  # seconds after a message in which this end polls rather than sleeps, on a host of many cores
WARY_SECONDS, CALM_SECONDS = 0.01, 0.05  # seconds between looks at connections: while one is suspicious, and otherwise
MAX_LOGGED_ENDS = 5  # ends and refusals logged in a second, at most
MAX_GONE_PEERS = 1000  # gone peers that are remembered
WAITING_BYTES = QUEUE_MESSAGES * SENT_BYTES  # bytes of whole messages that one peer may have in libzmq's queue
MAX_AHEAD_BYTES = 1 << 30  # bytes of all that wait there, or are of unfinished messages; an eighth of the memory if less
MAX_UNREAD_BYTES = 8 << 30  # bytes that peers have not read, of all together; a quarter of the memory if that is less
ENDED = "its connection ended: the process exited, was killed, or stopped answering"
OUT = "the server took this connection for ended: connect again"


def milliseconds(seconds: float) -> int:
    """A timeout of a poller, rounded up: one that is rounded down would be polled again and again."""
    return int(seconds * 1000 + 0.999)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message from a peer, not yet unpacked. fault: the reason against it, "" so far."""

    peer: bytes
    body: bytes
    frames: tuple
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Gone:
    """A peer's connection ended."""

    peer: bytes
    reason: str


class Router:
    """The dispatcher's end: bound to a port, polled by one thread, which also sends.

    Refused if the port cannot be bound, or the rules of access forbid a server on this address.
    """

    def __init__(self, host: str, port: int, heartbeat: float = 10.0, access: Access | None = None) -> None:
        access = access or Access()
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        silent = MAX_SILENT_CONNECTIONS if descriptors < 0 else min(MAX_SILENT_CONNECTIONS, descriptors // 4)
        self._connections = Connections(heartbeat, silent)
        self._heartbeat = heartbeat
        self._cables: dict[bytes, Cable] = {}
        self._dead: dict[bytes, bool] = {}  # the last gone peers -> True if told
        self._packed: tuple[Message | None, bytes] = (None, b"")
        self._sparse = Sparse(log, MAX_LOGGED_ENDS)
        self._next_poll = 0.0
        self._most_ahead = max(2 * WAITING_BYTES, min(MAX_AHEAD_BYTES, available_bytes() // 8))
        self._most_unread = min(MAX_UNREAD_BYTES, available_bytes() // 4)
        self._again = False  # the porter may have further requests
        self._context = zmq.Context(io_threads=1)
        self._sock = self._context.socket(zmq.ROUTER)
        self._porter = self._context.socket(zmq.ROUTER)  # answers libzmq's requests for admission (ZAP)
        self._monitor = self._sock.get_monitor_socket(ACCEPTED | GONE)
        self._published: list[server_files.Published] = []
        try:
            self.port = self._open(host, port, heartbeat, access)
        except BaseException:
            self._shut(0)
            raise
        self._poller = zmq.Poller()
        self._spin = SPIN_SECONDS if plenty_of_cores() else 0.0
        self._hot = 0.0  # time until which this end polls rather than sleeps
        self._poller.register(self._sock, zmq.POLLIN)
        # Polled by descriptor, which is cheaper. Each socket is then read until it is empty.
        self._asked, self._seen = descriptor_of(self._porter), descriptor_of(self._monitor)
        for descriptor in (self._asked, self._seen):
            self._poller.register(descriptor, zmq.POLLIN)

    def _ready(self, timeout: float) -> dict:
        """Sockets and descriptors that can be read within `timeout` seconds."""
        if not self._spin:
            return dict(self._poller.poll(milliseconds(timeout)))
        ready = dict(self._poller.poll(0))
        # Soon after a message the next one is likely. A core that sleeps wakes slowly, so this thread polls for a moment.
        now = time.monotonic()
        end, hot = now + timeout, min(now + timeout, self._hot)
        while not ready and (now := time.monotonic()) < hot:
            os.sched_yield()
            ready = dict(self._poller.poll(0))
        if not ready and now < end:
            ready = dict(self._poller.poll(milliseconds(end - now)))
        if self._sock in ready:
            self._hot = time.monotonic() + self._spin
        return ready

    def watch(self, fd: int) -> None:
        """Let poll return when this descriptor is readable. Its owner reads it."""
        self._poller.register(fd, zmq.POLLIN)

    def poll(self, timeout: float, most: int = BURST_MESSAGES) -> list[Arrived | Gone]:
        """Messages and ends within `timeout` seconds. A peer's messages always precede its end.

        most: messages that are received; more if connections have ended.
        """
        if self._connections:
            timeout = min(timeout, max(0.0, self._next_poll - time.monotonic()))
        if self._connections.unsettled or self._again:
            timeout = 0.0
        ready = self._ready(timeout)
        events: list[Arrived | Gone] = []
        # In this order: a connection's start is known before its admission, and its end after all of its messages are queued.
        # Bytes that were read before messages are received belong to these messages, or to an unfinished one.

        # 1. Accepts and ends, then admissions.
        requests = self._requests() if self._again or self._asked in ready else []
        if requests or self._seen in ready:
            self._follow()
        for request in requests:
            self._let_in(request)
        self._again = bool(requests)  # an answer consumes the signal of newer requests

        # 2. Messages. If connections have ended, all that is queued, since some of it may be theirs.
        now = time.monotonic()
        due = self._connections and now >= self._next_poll
        sent = {connection: tcp.traffic(connection.fd) for connection in self._connections} if due else {}
        burst = 1 << 16 if self._connections.unsettled else most if due or self._sock in ready else 0
        drained = self._receive(events, burst)

        # 3. Ends, behind the peers' last messages; then a look at suspicious connections.
        if self._connections.unsettled:
            for peer in self._connections.collect_ended():
                self._report_end(peer, events)
        if due:
            self._poll(now, sent, drained)
        return events

    def cut_off(self) -> list[Gone]:
        """Peers whose host has acknowledged nothing for a heartbeat."""
        silent = [(peer, how) for peer, cable in self._cables.items() if (how := cable.poll())]
        for peer, _ in silent:
            self.disconnect(peer)
        return [Gone(peer, f"its connection ended: {how}") for peer, how in silent]

    def descriptors(self, peers: Iterable[bytes]) -> set[int]:
        """Descriptors of these peers' connections."""
        return {connection.fd for peer in peers if (connection := self._connections.of(peer)) is not None}

    def watch_host(self, peer: bytes) -> None:
        """Have a peer's connection end soon after its host is gone, unless that is this host."""
        if (connection := self._connections.of(peer)) is not None:
            tcp.watch_descriptor(connection.fd)

    def send(self, peer: bytes, message: Message, frames: Frames = ()) -> None:
        """Queue a message. A message to a gone peer is dropped."""
        # The same message to many peers is packed once.
        if self._packed[0] is not message:
            self._packed = (message, codec.pack(message))
        try:
            put(self._sock, (peer, self._packed[1], *frames))
        except zmq.ZMQError as error:
            # The peer is gone, which the monitor reports too, or its queue is full while it leaves.
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            return
        # Counted as on the wire, to be compared with the bytes that the peer's host has taken.
        if (connection := self._connections.of(peer)) is not None:
            connection.queued += on_wire(len(self._packed[1]), self._sealed)
            for frame in frames:
                connection.queued += on_wire(memoryview(frame).nbytes, self._sealed)

    def disconnect(self, peer: bytes) -> None:
        """Drop further messages of this peer, and end its connection soon. The end is still reported."""
        self._bury(peer, True)
        self._cables.pop(peer, None)
        self._connections.disconnect(peer, time.monotonic())

    def close(self) -> None:
        """Send queued messages, for at most LINGER_SECONDS, and free the port."""
        self._shut(int(LINGER_SECONDS * 1000))

    # ---- opening and closing

    def _open(self, host: str, port: int, heartbeat: float, access: Access) -> int:
        """Bind the socket to each address of `host`, which commas divide; the port."""
        names = host.split(",")
        ips = ["0.0.0.0" if name == "*" else resolve(name.strip()) for name in names]  # once: access is by the bound address
        strictest = next((place for place, ip in enumerate(ips) if not auth.loopback(ip)), 0)  # its rules hold for all
        entry = auth.entry(access, ips[strictest], names[strictest])

        # PLAIN opens to processes of this host alone, and a server waits for them while Ctrl-Z or a debugger stops them. If one
        # dies, the kernel closes its connection.
        here = bool(access.secret) or entry.mechanism == auth.PLAIN
        options(self._sock, 0.0 if here else heartbeat, CHUNK)

        # Credit bounds the messages in flight, and a full queue would make ROUTER drop messages silently.
        self._sock.setsockopt(zmq.SNDHWM, 0)
        self._sock.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        self._sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        ask(self._sock, auth.lock(entry, access.token, ips[0], port))
        self._porter.bind("inproc://zeromq.zap.01")
        for name, ip in zip(names, ips):
            port = self._listen(name, ip, port)
        self._locks = [auth.lock(entry, access.token, ip, port) for ip in ips]  # passwords hold for one address each

        self._sealed = entry.mechanism == auth.CURVE
        self._client = public(self._locks[0].client) if self._locks[0].client else b""
        try:
            for ip in ips:
                self._published.append(server_files.publish(ip, port, entry.text()))
        except Refused as refusal:
            # No file is needed where peers have the secret or the token.
            if not access.secret and not (entry.given and entry.mechanism == auth.CURVE):
                raise
            log.info("%s", refusal)
        return port

    def _listen(self, host: str, ip: str, port: int) -> int:
        try:
            self._sock.bind(endpoint(self._sock, ip, port or "*"))
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                hint = "is in use: stop what listens there, or choose another with -p (0 picks a free one)"
                raise Refused(f"port {port} on {host} {hint}") from None
            raise Refused(f"cannot listen on {written(host, port)}: {error}") from None
        return int(self._sock.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])

    def _shut(self, linger: int) -> None:
        for published in self._published:
            published.remove()  # first, while the port is ours
        self._sock.disable_monitor()
        self._monitor.close(0)
        self._porter.close(0)
        self._sock.close(linger)
        terminate(self._context)

    # ---- admission

    def _requests(self) -> list[list[bytes]]:
        """Requests of libzmq, one for each connection that has shown a key."""
        requests: list[list[bytes]] = []
        with contextlib.suppress(zmq.Again):
            while len(requests) < BURST_MESSAGES:
                requests.append(self._porter.recv_multipart(zmq.NOBLOCK))
        return requests

    def _follow(self) -> None:
        now = time.monotonic()
        for event, fd in monitored(self._monitor):
            if event == ACCEPTED:
                self._connections.accepted(fd, now)
            else:
                self._connections.ended(fd)

    def _let_in(self, request: list[bytes]) -> None:
        """Answer [asker, "", version, id, domain, address, routing id, mechanism, credentials...] of ZAP 1.0."""
        # A name in the answer becomes the "User-Id" of the connection's messages: here the ticket, which `_meet` reads.
        asker, empty, version, number, _, address, _, mechanism, *credentials = request
        spoken = mechanism.decode("ascii", "replace")
        good = any(auth.opens(lock, spoken, credentials, self._client) for lock in self._locks)
        code, name = (b"200", self._connections.ticket(time.monotonic()).encode()) if good else (b"400", b"")
        if not good and self._sparse.allows(time.monotonic()):
            log.warning("a connection from %s was refused: it has another token", address.decode("ascii", "replace"))
        with contextlib.suppress(zmq.ZMQError):  # the connection may be gone
            self._porter.send_multipart([asker, empty, version, number, code, b"", name, b""], zmq.NOBLOCK)

    def _receive(self, found: list[Arrived | Gone], burst: int) -> bool:
        """Receive up to `burst` messages. True if the socket is empty then."""
        sock = self._sock
        for count in range(burst):
            # To ask costs less than zmq.Again, and most turns have one message.
            if count == 1 and not events_of(sock) & _IN:
                return True
            try:
                peer = sock.recv(NOW)
            except zmq.Again:
                return True
            # A message without a body, which no peer of GT sends.
            if not sock.getsockopt(zmq.RCVMORE):
                continue

            # A new peer's first message is read as a frame object, which has the connection's descriptor and ticket.
            connection = self._connections.of(peer)
            if connection is not None and (connection.faulty or connection.leaving):
                self._pass_over(peer, connection)
                continue
            if connection is not None:
                body = sock.recv()
            else:
                first = sock.recv(copy=False)
                body = first.bytes
                if peer not in self._dead:
                    connection = self._meet(peer, first)
            frames = frames_of(sock)

            if connection is None or peer in self._dead:
                self._turn_away(peer)
                continue
            # Counted as on the wire, to be compared with the bytes that the kernel has received.
            connection.taken += on_wire(len(body), self._sealed)
            for frame in frames:
                connection.taken += on_wire(len(frame), self._sealed)
            whole = connection.assemble(body, frames)
            if isinstance(whole, str):
                found.append(Arrived(peer, b"", (), whole))
            elif whole is not None:
                found.append(Arrived(peer, *whole))
        return False

    def _pass_over(self, peer: bytes, connection: Connection) -> None:
        """Receive a message of a refused peer without a copy: those that it sent ahead may be many megabytes."""
        for frame in frames_of(self._sock):
            connection.taken += on_wire(len(frame), self._sealed)
        if peer in self._dead:
            self._turn_away(peer)

    def _meet(self, peer: bytes, frame: zmq.Frame) -> Connection | None:
        """The connection of a new peer; None if it has ended, or has chosen its own name, as no peer of GT does."""
        # ROUTER makes identities of five bytes that begin with 0. A name that a stranger chose could be another peer's.
        if len(peer) != 5 or peer[0]:
            return None
        try:
            fd, ticket = int(frame.get(zmq.SRCFD)), str(frame.get("User-Id"))  # type: ignore[call-overload]
        except zmq.ZMQError:  # ZMTP 1 or 2, which has no such properties, and which no peer of GT speaks
            return None
        connection = self._connections.meet(peer, fd, ticket)
        if connection is not None:
            self._cables[peer] = Cable(connection.fd, self._heartbeat)
        return connection

    def _turn_away(self, peer: bytes) -> None:
        """Tell a peer, once, that it counts as gone: otherwise it would wait for ever."""
        if not self._dead.get(peer):
            self.send(peer, Exit(OUT))
            self._bury(peer, True)

    # ---- ends of connections

    def _report_end(self, peer: bytes, found: list[Arrived | Gone]) -> None:
        self._cables.pop(peer, None)
        self._bury(peer, self._dead.get(peer, False))
        self._cables.pop(peer, None)
        found.append(Gone(peer, ENDED))

    def _bury(self, peer: bytes, told: bool) -> None:
        # Messages of a peer that is gone may still be in the queue. The oldest are forgotten: theirs have long been read.
        self._dead[peer] = told
        if len(self._dead) > MAX_GONE_PEERS:
            del self._dead[next(iter(self._dead))]

    def _poll(self, now: float, sent: dict[Connection, tcp.Traffic], drained: bool) -> None:
        """End the connections of peers that send no message, or bytes that cannot be a message, or that read nothing."""
        connections = self._connections
        late = connections.overdue(now, {connection: row.received for connection, row in sent.items()})
        late.update(connections.unread({connection: row.acked for connection, row in sent.items()}, self._most_unread))
        # While somebody floods the socket, it is never empty: then a full queue of each peer is allowed for.
        read = {connection: row.received - row.unread for connection, row in sent.items()}
        waiting = 0 if drained else WAITING_BYTES
        late.update(connections.unfinished(now, read, waiting, self._most_ahead))
        for connection, reason in late.items():
            self._end(connection, reason)
        # Looks take a twentieth of the time at most, however many connections there are.
        took = time.monotonic() - now
        self._next_poll = now + max(WARY_SECONDS if connections.silent or connections.growing else CALM_SECONDS, 20 * took)

    def _end(self, connection: Connection, reason: str) -> None:
        """End a connection, unless it has just ended, when another may have its descriptor."""
        # libzmq may close the descriptor at any time, and the kernel give its number to another connection. A duplicate holds
        # one connection; if our books say afterwards that it is still open, it is the one that is meant.
        copy = tcp.duplicate(connection.fd)
        self._follow()
        if self._connections.holds(connection):
            if self._sparse.allows(time.monotonic()):
                log.warning("a connection is ended: %s", reason)
            # Without a free descriptor for a copy it is almost certainly the same one.
            tcp.end(copy if copy >= 0 else connection.fd)
        if copy >= 0:
            os.close(copy)
