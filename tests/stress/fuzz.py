"""`python -m tests.stress.fuzz [--seconds N] [--cases N] [--seed N] [--parts codec core sockets]`: liars for so long.

Each part says how many cases it ran; whatever must not happen ends it with an AssertionError and the seed to see it again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import random
import resource
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

from gt.errors import GTError, ProtocolError
from gt.wire import codec
from gt.wire.dealer import Dealer
from gt.wire.link import hello
from tests.helpers import zmtp
from tests.helpers.hostile import WILD, Field, Liar, mutated, rounds
from tests.helpers.limits import limit
from tests.helpers.serving import serving
from tests.helpers.streams import Stream

GROUPS = "a: {shard: {axis: 0, workers: [0]}}\nb: {shard: {axis: 0, workers: [1]}}\n"


def memory() -> int:
    """Bytes this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


# ---- bytes into the codec


def bodies(seed: int) -> Iterator[bytes]:
    """Random bytes, messages with bytes changed, cut short or claiming to be long."""
    rng = random.Random(seed)
    field = Field(seed)
    liar = Liar(field, b"evil", "client")
    while True:
        message = liar.anything()[0] if rng.random() < 0.7 else liar.hello()
        with contextlib.suppress(ProtocolError):
            whole = codec.pack(message)
            yield whole
            for _ in range(20):
                body = bytearray(whole)
                for _ in range(rng.randrange(1, 4)):
                    body[rng.randrange(len(body))] = rng.choice((0xC1, 0xDF, 0xDD, 0xC6, 0xDB, 0xC9, 0x9F, rng.randrange(256)))
                yield bytes(body[: rng.randrange(len(body)) + 1]) if rng.random() < 0.3 else bytes(body)
        yield rng.randbytes(rng.randrange(64))
        yield codec._local.packer.pack(mutated(rng, [rng.randrange(30), *rng.sample([w for w in WILD if w == w], 3)]))


def fuzz_codec(seed: int, cases: int, until: float = math.inf) -> dict[str, Any]:
    refused = done = 0
    for body in bodies(seed):
        try:
            codec.unpack(body)
        except ProtocolError:
            refused += 1
        done += 1
        if done >= cases or time.monotonic() > until:
            break
    return {"cases": done, "refused": refused}


# ---- messages into the core


def fuzz_core(seed: int, cases: int, until: float = math.inf, each: int = 5000) -> dict[str, Any]:
    """Fields of `each` cases: a fresh server now and then finds more than an old one."""
    total = {"cases": 0, "refused": 0, "internal_errors": 0, "peers": 0, "slowest_event_s": 0.0}
    while total["cases"] < cases and time.monotonic() < until:
        try:
            field = rounds(seed, min(each, cases - total["cases"]), until)
        except Exception:
            sys.stderr.write(f"seed {seed}\n")
            raise
        total["cases"] += field.cases
        total["refused"] += field.refused
        total["internal_errors"] += field.internal
        total["peers"] += field.peers
        total["slowest_event_s"] = max(total["slowest_event_s"], round(field.slowest, 3))
        seed += 1
    return total


# ---- bytes into the socket


class Socket:
    """Speaks ZMTP by hand, so that it can stop in the middle of anything."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self.rng = rng
        self.raw = socket.create_connection(("127.0.0.1", port))
        self.raw.settimeout(limit(5))

    def handshake(self) -> None:
        """With the key that this user's processes have."""
        self.raw.sendall(zmtp.greeting())
        zmtp.read(self.raw, 64)
        self.raw.sendall(zmtp.plain_hello(zmtp.password(self.raw.getpeername()[1])))
        zmtp.command(self.raw)
        self.frame(b"\x08INITIATE" + zmtp.READY[6:], 4)
        zmtp.command(self.raw)

    def frame(self, body: bytes, flags: int = 0, claim: int | None = None) -> None:
        """One frame; flags: 1 more follow, 4 a command. claim: the length it says it has."""
        size = len(body) if claim is None else claim
        head = struct.pack(">BQ", flags | 2, size) if size > 255 else bytes([flags, size])
        self.raw.sendall(head + body)

    def misbehave(self, some: Iterator[bytes]) -> None:
        rng = self.rng
        how = rng.randrange(6)
        with contextlib.suppress(OSError), self.raw:
            if how == 0:  # not ZeroMQ at all
                strange = (b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(200), zmtp.greeting()[: rng.randrange(64)])
                self.raw.sendall(rng.choice(strange))
                return
            self.handshake()
            if how == 1:  # a length that no memory has, and little of it
                self.frame(b"abc", rng.choice((0, 1)), rng.choice((10 << 30, (1 << 63) - 1, (1 << 64) - 1)))
            elif how == 2:  # a message whose last frame never comes
                self.frame(codec.pack(hello("client")))
                for _ in range(rng.randrange(1, 30)):
                    self.frame(rng.randbytes(100), 1)
            elif how == 3:  # half a frame
                self.frame(rng.randbytes(50), 0, 500)
            else:
                for _ in range(rng.randrange(1, 20)):
                    for _ in range(rng.randrange(3)):
                        self.frame(next(some), 1)
                    self.frame(next(some))


def fuzz_sockets(seed: int, cases: int, until: float = math.inf) -> dict[str, Any]:
    """Raw connections and links that send anything, beside a program whose values are compared."""
    rng, done = random.Random(seed), 0
    with serving() as server:
        honest = Stream(server.address, GROUPS, ("a", "b"), seed)
        some, field = bodies(seed), Field(seed)
        while done < cases and time.monotonic() < until:
            if rng.random() < 0.5:
                Socket(server.port, rng).misbehave(some)
                done += 10
            else:
                done += link_of_liar(server.address, field, rng, some)
            honest.random_ops(10)
            honest.check(2)
        honest.session.close()
    return {"cases": done, "values_compared": honest.checked}


def link_of_liar(address: str, field: Field, rng: random.Random, some: Iterator[bytes]) -> int:
    """A link that says hello and then what nobody should; how many messages."""
    liar = Liar(field, b"evil", rng.choice(("client", "client", "worker")))
    link, count = Dealer(address, lambda *_: None, lambda reason: None), rng.randrange(1, 40)
    with contextlib.suppress(GTError):
        link.send(hello("client", config=GROUPS) if liar.role == "client" else liar.hello())
    for _ in range(count):
        with contextlib.suppress(ProtocolError):
            message, frames = liar.say()
            link.send(message, frames)
            link._queue.append([next(some), *([rng.randbytes(50)] * rng.randrange(3))])
    link.close()
    return count


PARTS = {"codec": fuzz_codec, "core": fuzz_core, "sockets": fuzz_sockets}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.stress.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of all parts together, at most")
    parser.add_argument("--cases", type=int, default=1_000_000, help="of each part, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args(argv)
    logging.getLogger("gt").setLevel(logging.CRITICAL)
    before = memory()
    for part in args.parts:
        start = time.monotonic()
        found = PARTS[part](args.seed, args.cases, start + args.seconds / len(args.parts))
        found.update(part=part, seconds=round(time.monotonic() - start, 1), grown_mib=(memory() - before) >> 20)
        sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
