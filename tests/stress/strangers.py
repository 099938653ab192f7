"""`python -m tests.stress.strangers [--seconds 60] [--strangers 100]`: a server among strangers, as JSON.

They connect, idle, scan, send endless parts, long commands of a handshake, Hellos and garbage, and come again when they are put
out; they are threads of one other process. Beside them a client asks its worker for values, and another comes and goes. Told
are the server's memory and logs, the client's round trips, and how long newcomers took.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from gt.client.session import Session
from gt.wire import codec
from gt.wire.link import hello
from gt.wire.messages import CHUNK
from tests.helpers import ROOT, zmtp
from tests.helpers.limits import limit
from tests.helpers.processes import resident
from tests.helpers.streams import Stream
from tests.stress.starve import at

LONG = 15 << 20
LEAST_TRIPS, LEAST_CONNECTIONS = 50, 4  # of the client; of each stranger: a loaded machine takes its time


def idle(sock: socket.socket, rng: random.Random, over: threading.Event) -> None:
    over.wait(rng.random() * 20)


def greeted(sock: socket.socket, rng: random.Random, over: threading.Event) -> None:
    sock.sendall(zmtp.greeting(rng.choice(("PLAIN", "NULL", "CURVE"))))
    over.wait(rng.random() * 20)


def scan(sock: socket.socket, rng: random.Random, over: threading.Event) -> None:
    over.wait(0.01)


def parts(sock: socket.socket, rng: random.Random, over: threading.Event) -> None:
    """Endless parts of one message, after a handshake without a key."""
    sock.sendall(zmtp.greeting("NULL") + zmtp.frame(zmtp.READY, command=True))
    block = zmtp.frame(bytes(rng.choice((0, 1000, CHUNK))), more=True)
    while not over.is_set():
        sock.sendall(block)


def command(sock: socket.socket, rng: random.Random, over: threading.Event) -> None:
    """A command of a handshake, as long as may be or longer, whose end does not come."""
    claim = rng.choice((LONG, CHUNK, CHUNK // 2))
    sock.sendall(zmtp.greeting() + zmtp.frame(b"\x05HELLO", command=True, claim=claim))
    sent = 0
    while sent < claim - 1000 and not over.is_set():
        sent += sock.send(bytes(min(1 << 16, claim - 1000 - sent)))
    over.wait(rng.random() * 20)


def long_hello(sock: socket.socket, rng: random.Random, over: threading.Event) -> None:
    sock.sendall(zmtp.greeting("NULL") + zmtp.frame(zmtp.READY, command=True))
    sock.sendall(zmtp.frame(codec.pack(hello("r" * LONG))))
    over.wait(1)


def guess(sock: socket.socket, rng: random.Random, over: threading.Event) -> None:
    sock.sendall(zmtp.greeting() + zmtp.plain_hello(rng.randbytes(64)))
    over.wait(0.05)


def garbage(sock: socket.socket, rng: random.Random, over: threading.Event) -> None:
    with contextlib.suppress(TimeoutError):
        for _ in range(100):
            sock.sendall(rng.randbytes(1000))


WAYS = (idle, greeted, scan, parts, command, long_hello, guess, garbage)


def bother(port: int, count: int, seconds: float) -> int:
    """Be so many strangers for so long, and until they have made some connections; how many they made."""
    over, made = threading.Event(), [0] * count

    def one(number: int) -> None:
        rng = random.Random(number)
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as sock:
                sock.settimeout(limit(5))
                made[number] += 1
                WAYS[number % len(WAYS)](sock, rng, over)
            over.wait(0.01)  # put out or refused: again, but not in a circle that is the CPU's alone

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end or sum(made) < LEAST_CONNECTIONS * count:
        over.wait(0.05)
    over.set()
    for thread in threads:
        thread.join(limit(10))
    return sum(made)


def measure(seconds: float, count: int, nice: int = 0) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        said, written = Path(folder, "stderr"), Path(folder, "log")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GT_INSTRUCTION_LOG": str(written)}

        def start(*command: str, **pipes: Any) -> subprocess.Popen:
            process = subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, env=environment, text=True, **pipes)
            stack.callback(lambda: (process.kill(), process.communicate()))
            return process

        server = start("gt.server", "-p", "0", stdout=subprocess.PIPE, stderr=stack.enter_context(said.open("w")))
        assert server.stdout is not None
        address = server.stdout.readline().strip().rpartition(" ")[2]
        port = address.rpartition(":")[2]
        start("gt.worker", "--host", "127.0.0.1", "-p", port, "--backend", "numpy", stderr=subprocess.DEVNULL)
        client = Stream(address)
        alone = trips(client, time.monotonic() + min(5.0, seconds))
        before, logged = resident(server.pid) >> 20, said.stat().st_size
        lines = written.stat().st_size
        options = ("--bother", port, "--strangers", str(count), "--seconds", str(seconds))
        many = start("tests.stress.strangers", *options, stdout=subprocess.PIPE)
        if nice:
            os.setpriority(os.PRIO_PROCESS, many.pid, nice)
        peak: list[int] = []
        arrivals: list[float] = []
        during = trips(client, time.monotonic() + seconds, lambda: look(server.pid, address, peak, arrivals))
        assert many.stdout is not None
        connections = int(many.stdout.readline() or 0)
        client.check()
        client.session.close()
        return {
            "strangers": count,
            "seconds": seconds,
            "connections": connections,
            "server_mib_before": before,
            "server_mib_grown": max(peak) - before,
            "stderr_bytes": said.stat().st_size - logged,
            "instruction_log_bytes": written.stat().st_size - lines,
            "newcomers": len(arrivals),
            "newcomer_max_s": round(max(arrivals), 3),
            "round_trips": len(during),
            "alone_p50_ms": at(alone, 0.5),
            "alone_p99_ms": at(alone, 0.99),
            "during_p50_ms": at(during, 0.5),
            "during_p99_ms": at(during, 0.99),
            "during_max_ms": at(during, 1.0),
        }


def look(pid: int, address: str, peak: list[int], arrivals: list[float]) -> None:
    """Now and then: the server's memory, and a client that comes and goes."""
    peak.append(resident(pid) >> 20)
    if len(peak) % 50 == 1:
        start = time.monotonic()
        Session(address).close()
        arrivals.append(time.monotonic() - start)


def trips(client: Stream, end: float, between: Any = lambda: None) -> list[float]:
    """Seconds of each round trip, sorted: a hundred a second at most, as the client is no attacker."""
    times: list[float] = []
    pause = threading.Event()
    while time.monotonic() < end or len(times) < LEAST_TRIPS:
        start = time.perf_counter()
        client.session.synchronize()
        times.append(time.perf_counter() - start)
        between()
        pause.wait(0.01)
    return sorted(times)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.stress.strangers", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--strangers", type=int, default=100)
    parser.add_argument("--nice", type=int, default=0, help="of the strangers: elsewhere they take no CPU of this machine")
    parser.add_argument("--bother", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bother:
        sys.stdout.write(f"{bother(args.bother, args.strangers, args.seconds)}\n")
        return 0
    sys.stdout.write(json.dumps(measure(args.seconds, args.strangers, args.nice), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
