"""The way of a client or worker to its server: attempts to connect, each with a key of its own, and why they fail.

Each attempt looks for the server's file anew, as a server makes a new secret when it starts. Nothing is sent but the key.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable

import zmq

from gt.wire import tcp
from gt.wire.access import auth, server_files
from gt.wire.access.auth import CURVE, NULL, PLAIN, Credentials
from gt.wire.messages import MAX_BODY_BYTES
from gt.wire.socket import GONE, HANDSHAKE_SECONDS, QUEUE_MESSAGES, descriptor_of, endpoint, monitored, options, show

log = logging.getLogger("gt.wire")

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.03, 0.3  # seconds between attempts
NEVER_MILLISECONDS = 24 * 3600 * 1000
MAX_FAILED_HANDSHAKES = 3  # handshakes that fail before the reason is reported; fewer may be an accident
CONNECTED, MADE, CLOSED = int(zmq.EVENT_CONNECTED), int(zmq.EVENT_HANDSHAKE_SUCCEEDED), int(zmq.EVENT_CLOSED)
DENIED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
FAILED = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
BOTH = "set GT_TOKEN to the server's on both sides"


class Approach:
    """`sock`, its `monitor` and the connection's `descriptor` are those of the last attempt."""

    def __init__(self, address: str, ip: str, port: int, token: str, heartbeat: float) -> None:
        self.address, self._ip, self._port = address, ip, port
        self._token, self._heartbeat = token, heartbeat
        self.sock: zmq.Socket | None = None
        self.monitor: zmq.Socket | None = None
        self.descriptor = -1
        self.pause = FIRST_PAUSE_SECONDS
        self._key: Credentials | None = None  # credentials of the last attempt
        self._denied = self._broken = 0  # how many attempts in a row ended so, with the same key
        self._warned = ""

    def attempt(self, context: zmq.Context, bell: int, until: float, over: Callable[[], bool]) -> bool:
        """Try once, until a moment of the monotonic clock at most, or over() when the bell rings: whether it is connected."""
        # 1. A key. With another one than last time (the server has restarted), earlier refusals mean nothing.
        self.close(0)
        entry = self._entry()
        key = auth.key(entry, self._token, self._ip, self._port)
        if key != self._key:
            self._key, self._denied, self._broken = key, 0, 0
        if key is None:
            return False

        # 2. A socket of its own: libzmq would go on trying with the old key.
        sock = self.sock = context.socket(zmq.DEALER)
        options(sock, self._heartbeat, MAX_BODY_BYTES)
        show(sock, key)
        sock.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        # Credit bounds the messages. A limit here would leave heartbeats unread too, while nobody has time to take messages in.
        sock.setsockopt(zmq.RCVHWM, 0)
        # The next attempt is ours, and a link once made is not made again. Without any, the last messages would be dropped.
        sock.setsockopt(zmq.RECONNECT_IVL, NEVER_MILLISECONDS)

        # 3. The monitor tells how the handshake ends.
        self.monitor = sock.get_monitor_socket(CONNECTED | MADE | CLOSED | GONE | FAILED)
        sock.connect(endpoint(sock, self._ip, self._port))
        outcome = self._outcome(self.monitor, bell, min(until, time.monotonic() + HANDSHAKE_SECONDS), over)
        self._denied = self._denied + 1 if outcome == DENIED else 0
        self._broken = self._broken + 1 if outcome & FAILED and outcome != DENIED else 0
        self.pause = min(1.5 * self.pause, LAST_PAUSE_SECONDS)
        if outcome == MADE and entry is not None and auth.unused(entry, self._token):
            log.warning("%s", self._without_token())
        return outcome == MADE

    def refusal(self, patient: bool) -> str:
        """The reason why no other try can succeed, or "". patient: say on the log what a server in its place would mend."""
        if self._denied > 1:
            return self._misfit()
        if self._broken < MAX_FAILED_HANDSHAKES:
            return ""

        # Handshakes break without a reason: ask the port which mechanism it speaks.
        self._broken = 0
        spoken = tcp.mechanism(self._ip, self._port)
        mine = self._key.mechanism if self._key is not None else NULL
        if spoken not in (PLAIN, CURVE, NULL) or spoken == mine != CURVE:  # only CURVE does not say that a key is wrong
            return ""
        text = self._misfit(spoken)
        if patient and text != self._warned:
            self._warned = text
            log.warning("%s; trying again", text)
        return "" if patient else text

    def why(self, seconds: float) -> str:
        """The reason why there is no connection after so long."""
        # From the outside in: no listener, no answer, no ZMTP, no key of ours, all as it should be, another mechanism.
        tried = f"(tried for {seconds:g} s)"
        start = f"start one with `python -m gt.server -p {self._port}`"
        if not tcp.listens(self._ip, self._port):
            other = server_files.serves_elsewhere(self._port)
            there = "; the one with this port is in another network namespace, such as a container's" if other else ""
            return f"no server at {self.address} {tried}{there}: {start}"
        spoken = tcp.mechanism(self._ip, self._port)
        if spoken is None:
            return f"what listens at {self.address} does not answer {tried}: it is stopped, busy, or out of descriptors"
        if spoken not in (PLAIN, CURVE, NULL):
            return f"what listens at {self.address} is not a gt server: check the port"
        if self._key is None:
            return f"the server at {self.address} is of another user: set GT_TOKEN to its token, or {start} elsewhere"
        if spoken == self._key.mechanism:
            return f"the server at {self.address} ends each connection {tried}: it has too many, or its `ulimit -n` is too low"
        return f"the server at {self.address} did not let this process in {tried}: {self._misfit(spoken)}"

    def _without_token(self) -> str:
        text = f"the server at {self.address} has no token, and this process has one: it let this process in as its user's"
        return f"{text}; if another server is meant, check the address, else set GT_TOKEN for the server too or unset it here"

    def close(self, linger: int) -> None:
        if self.monitor is not None and self.sock is not None:
            self.sock.disable_monitor()
            self.monitor.close(0)
        if self.sock is not None:
            self.sock.close(linger)
        self.sock = self.monitor = None

    def _entry(self) -> auth.AccessEntry | None:
        text = server_files.find(self._ip, self._port)
        return None if text is None else auth.read(text)

    def _outcome(self, monitor: zmq.Socket, bell: int, until: float, over: Callable[[], bool]) -> int:
        """The event that an attempt ended with, 0 if with none."""
        poll = select.poll()
        for descriptor in (descriptor_of(monitor), bell):
            poll.register(descriptor, select.POLLIN)
        while not over():
            for event, value in monitored(monitor):
                if event == CONNECTED:
                    self.descriptor = value
                if event & (MADE | CLOSED | FAILED):
                    return event
                # The server closed the connection without a word: it may have no descriptors left.
                if event == GONE:
                    return FAILED & ~DENIED
            left = until - time.monotonic()
            if left <= 0:
                break
            ready = poll.poll(left * 1000)
            # Left unread for the caller; polling it again would return at once.
            if any(descriptor == bell for descriptor, _ in ready):
                poll.unregister(bell)
        return 0

    def _misfit(self, spoken: str = "") -> str:
        """Words for what does not agree. spoken: the server's mechanism, "" for ours."""
        mine = self._key.mechanism if self._key is not None else NULL
        spoken, server = spoken or mine, f"the server at {self.address}"
        if spoken == mine == NULL:
            return f"{server} refused this process"
        if spoken == mine:
            return f"{server} has another token: {BOTH}" if self._token else f"{server} wants a token: {BOTH}"
        if spoken == CURVE:
            return f"{server} wants a token: {BOTH}" if not self._token else f"{server} encrypts, and its file says otherwise"
        if spoken == PLAIN:
            return f"{server} lets in its own user's processes only: start it with --encrypt for all who have its token"
        return f"{server} lets anybody in, so it cannot show that it has the token: unset GT_TOKEN, or give the server one"
