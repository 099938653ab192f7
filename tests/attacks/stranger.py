"""Strangers: connections without a token that scan, idle, send garbage, endless parts or huge commands."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

from gt.wire import codec
from gt.wire.link import hello
from tests.helpers import zmtp
from tests.stress.fuzz import Socket

HOWS = ("scan", "scan", "misbehave", "misbehave", "endless", "command", "hello", "idle")
MOST = 320 << 20  # bytes of a message without an end: more than the server may grow by
SCAN = 400  # connections of one scan


def misbehave(port: int, rng: random.Random, how: str) -> None:
    """One stranger, from its connection to its end."""
    with contextlib.suppress(OSError):
        if how == "scan":
            _scan(port, rng)
        elif how == "misbehave":
            Socket(port, rng).misbehave(_bodies(rng))
        elif how == "idle":
            for connection in [socket.create_connection(("127.0.0.1", port), 5) for _ in range(SCAN // 8)]:
                connection.close()
        else:
            one = Socket(port, rng)
            with one.raw:
                {"endless": _endless, "command": _command, "hello": _hello}[how](one, rng)


def _scan(port: int, rng: random.Random) -> None:
    for _ in range(SCAN // 4):
        some = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(4)]
        if rng.random() < 0.3:
            some[0].sendall(zmtp.greeting()[: rng.randrange(1, 64)])
        for one in some:
            one.close()


def _endless(one: Socket, rng: random.Random) -> None:
    one.handshake()
    size = rng.choice((1 << 16, 1 << 20, 8 << 20))
    data, sent = bytes(size), 0
    while sent < MOST:
        one.frame(data, 1)
        sent += size


def _command(one: Socket, rng: random.Random) -> None:
    """A command of the handshake as long as a frame may be."""
    one.raw.sendall(zmtp.greeting("NULL"))
    body = bytes([5]) + b"READY" + bytes(rng.choice((1 << 16, 15 << 20)))
    one.frame(body, 4)


def _hello(one: Socket, rng: random.Random) -> None:
    """A Hello whose texts are long, from somebody with no token."""
    one.handshake()
    text = "x" * rng.choice((100, 4000, 1 << 20, 15 << 20))
    message = hello(text if rng.random() < 0.5 else "client", text if rng.random() < 0.5 else "")
    with contextlib.suppress(Exception):
        one.frame(codec.pack(message))
    one.raw.recv(64)


def _bodies(rng: random.Random) -> Iterator[bytes]:
    while True:
        yield rng.choice((rng.randbytes(rng.randrange(64)), codec.pack(hello("client"))))
