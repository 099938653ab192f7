"""The agents of a job's processes, for `gt doctor --hosts env`: those of ranks above 0 answer rank 0's orders by TCP.

Each end proves that it has the job's token, which is never sent.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

from gt.errors import SystemFailure
from gt.launch import host_agent
from gt.wire import tcp
from gt.worker.plane.net.strangers import Strangers

MEET_SECONDS = 120.0  # until all processes are there
SECONDS = 5.0  # for a proof, however slowly its bytes arrive
AGAIN_SECONDS = 0.2
NONCE_BYTES = PROOF_BYTES = 32
_OFFER = struct.Struct("!I32s32s")  # rank, nonce, proof


class Meeting:
    """Rank 0's end: a port at which the other ranks offer themselves."""

    def __init__(self, host: str, port: int, token: str) -> None:
        six = ":" in host
        self._sock = socket.create_server((host, port), family=socket.AF_INET6 if six else socket.AF_INET, dualstack_ipv6=six)
        self.port: int = self._sock.getsockname()[1]
        self._token = token.encode()
        self._socks: dict[int, socket.socket] = {}  # by rank
        self._strangers = Strangers()  # whoever reaches the port can connect

    def members(self, size: int, seconds: float = MEET_SECONDS) -> dict[int, socket.socket]:
        """The connections of ranks 1 to size - 1, by rank; after so many seconds those that there are."""
        until = time.monotonic() + seconds
        threads: list[threading.Thread] = []
        # A thread for each connection: one that says nothing holds up nobody.
        while len(self._socks) < size - 1 and (left := until - time.monotonic()) > 0:
            self._sock.settimeout(min(left, AGAIN_SECONDS))
            try:
                sock = self._sock.accept()[0]
            except TimeoutError:
                continue
            except OSError:  # such as too few descriptors: it stays to be accepted
                time.sleep(host_agent.FULL_SECONDS)
                continue
            self._strangers.add(sock)
            threads = [thread for thread in threads if thread.is_alive()]
            threads.append(threading.Thread(target=self._admit, args=(sock, size), daemon=True))
            threads[-1].start()
        self._sock.close()
        self._strangers.end()
        for thread in threads:
            thread.join()
        return dict(sorted(self._socks.items()))

    def _admit(self, sock: socket.socket, size: int) -> None:
        until = time.monotonic() + SECONDS
        try:
            sock.settimeout(SECONDS)
            # Both prove by HMAC over both nonces that they know the token: neither sends it, and no old proof can be replayed.
            nonce = os.urandom(NONCE_BYTES)
            sock.sendall(nonce)
            rank, theirs, proof = _OFFER.unpack(host_agent.exactly(sock, _OFFER.size, until))
            if not 0 < rank < size or not hmac.compare_digest(proof, _proof(self._token, rank, nonce, theirs)):
                raise PermissionError("its token is not the one of this job")
            # The list of strangers is bounded: this one may have had to make room meanwhile.
            if not self._strangers.remove(sock):
                raise ConnectionAbortedError("too many connections wait for their proof, or all ranks are here")
            sock.sendall(_proof(self._token, 0, theirs, nonce))
            sock.settimeout(None)
            tcp.watch(sock)
            # A process that has tried again: its newest connection counts.
            older, self._socks[rank] = self._socks.get(rank), sock
            if older is not None:
                older.close()
        except OSError:
            self._strangers.remove(sock)
            sock.close()


def answer(host: str, port: Callable[[], int], rank: int, token: str, seconds: float = MEET_SECONDS) -> bool:
    """Another rank's end: answer rank 0's orders until it ends. True if this process is to be a worker of the job then.

    SystemFailure if rank 0 is not there in time, has another token, or if the connection to it is cut.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            sock = _offer(host, port(), rank, token.encode())
            break
        # Another token never becomes the right one; a rank 0 that is not there yet may come.
        except PermissionError as error:
            raise SystemFailure(f"{host}: {error}; all processes of a job need the same GT_TOKEN or GT_TOKEN_FILE") from None
        except OSError as error:
            if time.monotonic() >= until:
                why = f"{error.strerror or error}; start it on that host too"
                raise SystemFailure(f"`gt doctor` of rank 0 does not answer at {host}: {why}") from None
            time.sleep(AGAIN_SECONDS)
    try:
        with sock, sock.makefile("r") as orders, sock.makefile("w") as answers:
            return host_agent.serve(orders, answers)
    # Rank 0 ends in order by closing a connection of which it has read all: that is no error here.
    except OSError as error:
        why = f"{error.strerror or error}; look at its output, and at the network between"
        raise SystemFailure(f"the connection to `gt doctor` of rank 0 at {host} was cut: {why}") from None


def _offer(host: str, port: int, rank: int, token: bytes) -> socket.socket:
    """A connection to rank 0, which has proved itself. PermissionError if it cannot, OSError if it is not there."""
    # Rank 0 speaks first. Its proof has the nonces the other way round, so ours cannot be sent back to us as its own.
    sock = socket.create_connection((host, port), SECONDS)
    until = time.monotonic() + 2 * SECONDS
    try:
        theirs, nonce = host_agent.exactly(sock, NONCE_BYTES, until), os.urandom(NONCE_BYTES)
        sock.sendall(_OFFER.pack(rank, nonce, _proof(token, rank, theirs, nonce)))
        try:
            proof = host_agent.exactly(sock, PROOF_BYTES, until)
        except ConnectionError:
            raise PermissionError("rank 0 closed the connection: its token or number of processes is another") from None
        if not hmac.compare_digest(proof, _proof(token, 0, nonce, theirs)):
            raise PermissionError("rank 0 has another token than this process")
        sock.settimeout(None)
        tcp.watch(sock)
        return sock
    except BaseException:
        sock.close()
        raise


def _proof(token: bytes, rank: int, theirs: bytes, own: bytes) -> bytes:
    return hmac.new(token, rank.to_bytes(4, "big") + theirs + own, "sha256").digest()
