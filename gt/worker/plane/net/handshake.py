"""The first bytes of a connection between two workers: each end proves that it has the key of their world, and who it is.

The key itself is never sent. Both proofs are HMACs of all that was said, so neither end can repeat what another has said.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

MAGIC = b"gt-net-1"
PROBE = 0  # in place of an epoch: the connection ends with the handshake
SECONDS = 5.0  # that a handshake may take at its accepting end
PATIENCE_SECONDS = 2 * SECONDS  # at its offering end, which is never the first to give up
PROOF_BYTES = NONCE_BYTES = 32
_GREETING = struct.Struct("<8sIIIQQ32s")


class Refusal(OSError):
    """The other end is no worker of this world, or does not take this one for one."""


class Later(OSError):
    """The other end is busy, or does not know this world yet."""


class Greeting(NamedTuple):
    """Indices, epoch of the pair, and marks of their heaps, which no other process has."""

    source: int
    target: int
    epoch: int
    source_mark: int
    target_mark: int


def offer(sock: socket.socket, greeting: Greeting, key: bytes) -> None:
    """The connecting end. Refusal; Later, or the connection's end, where it may be repeated; OSError where nothing answers."""
    until = time.monotonic() + PATIENCE_SECONDS
    hello = _GREETING.pack(MAGIC, *greeting, os.urandom(NONCE_BYTES))
    sock.settimeout(PATIENCE_SECONDS)
    sock.sendall(hello)
    nonce = _read(sock, NONCE_BYTES, until)
    # The accepting end proves itself first: this end tells a stranger nothing but a greeting and a nonce.
    if not hmac.compare_digest(_read(sock, PROOF_BYTES, until), _proof(key, b"accepts", hello, nonce)):
        raise Refusal("the process that listens there is not a worker of this world")
    sock.sendall(_proof(key, b"offers", hello, nonce))
    _read(sock, 1, until)
    sock.settimeout(None)


def accept(sock: socket.socket, key_of: Callable[[Greeting], bytes | None], mark: int) -> Greeting:
    """The accepting end, up to `welcome`. key_of: the key for a greeting, None for one that fits no worker here. mark: its own.

    A greeting that is meant for another process is answered by a false proof. Two hosts of separate networks may have one
    address; a false proof makes the other end give up at once, instead of asking again. Raises Refusal or Later.
    """
    until = time.monotonic() + SECONDS
    hello, nonce = _read(sock, _GREETING.size, until), os.urandom(NONCE_BYTES)
    magic, *fields, _ = _GREETING.unpack(hello)
    greeting = Greeting(*fields)
    # 0: the offering end does not know the mark yet.
    if magic == MAGIC and greeting.target_mark not in (mark, 0):
        sock.sendall(nonce + bytes(PROOF_BYTES))
        raise Refusal("it looks for another process, which has the same address in another network")
    key = key_of(greeting) if magic == MAGIC else None
    if key is None:
        raise Refusal("it is not a worker of this world")
    # Both proofs cover both nonces, so a recorded handshake is of no use in another. The side's name in them keeps one end's
    # proof from being sent back as the other's.
    sock.sendall(nonce + _proof(key, b"accepts", hello, nonce))
    if not hmac.compare_digest(_read(sock, PROOF_BYTES, until), _proof(key, b"offers", hello, nonce)):
        raise Refusal("it lacks the key of this world")
    return greeting


def welcome(sock: socket.socket) -> None:
    """Take the other end, which has proved who it is."""
    sock.sendall(b"\1")
    sock.settimeout(None)


def _proof(key: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.new(key, side + hello + nonce, hashlib.sha256).digest()


def _read(sock: socket.socket, count: int, until: float) -> bytes:
    data = b""
    while len(data) < count:
        left = until - time.monotonic()
        if left <= 0:
            raise Later("the handshake took too long")
        sock.settimeout(left)
        try:
            part = sock.recv(count - len(data))
        except TimeoutError as error:
            if error.errno == errno.ETIMEDOUT:  # the kernel's word: the other host answers nothing
                raise
            raise Later("the handshake took too long") from None
        if not part:
            raise Later("it ended the connection in the handshake")
        data += part
    return data
