"""`python -m tests.stress.chaos [--rounds N] [--seed N]`: processes killed and stopped at random moments of work.

A round harms one process of a dispatcher, three workers and two clients while the clients compute, and then asks: has every
call of those left ended in a value or in an error that names the cause, does new work go on once the lost has been replaced,
and is nothing left of what died? Everything is forked from here, where no thread runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gt.dispatcher.server import Server
from gt.errors import GTError, WorkerStuck
from gt.launch.process import fork
from gt.worker.loop import WorkerOptions
from gt.worker.loop import run as work
from tests.helpers.limits import limit
from tests.helpers.streams import CONFIGS, Stream

HEARTBEAT = 1.0  # seconds
LIMIT = limit(4 * HEARTBEAT + 2)  # seconds within which every call has to end: a loaded machine takes its time
WORKERS = 3
CAUSES = ("worker w", "server at", "is alive and has been at")


@dataclass
class Child:
    """A forked process and the lines it writes."""

    pid: int
    fd: int
    text: bytes = b""
    marks: int = 0
    over: dict | None = None  # what it said last

    def close(self) -> None:
        os.close(self.fd)
        self.fd = -1

    def read(self) -> None:
        data = os.read(self.fd, 1 << 16)
        *lines, self.text = (self.text + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            self.marks += "mark" in said
            if "mark" not in said:
                self.over = {**(self.over or {}), **said}
        if not data and self.over is None:
            self.over = {"silent": True}


def start(title: str, body: Callable[[Callable[..., None]], Any]) -> Child:
    """Fork; body(say) runs there."""
    end, begin = os.pipe()

    def child() -> None:
        os.close(end)
        logging.getLogger("gt").setLevel(logging.CRITICAL)
        body(lambda **what: os.write(begin, json.dumps(what).encode() + b"\n"))

    pid = fork(title, child)
    os.close(begin)
    return Child(pid, end)


def dispatch(say: Callable) -> None:
    server = Server(heartbeat=HEARTBEAT)
    say(port=server.port)
    server.run()


def compute(port: int, number: int, seed: int, say: Callable) -> None:
    """A client: works until something fails, and says what; a stuck worker is waited for once more."""
    try:
        stream = Stream(f"127.0.0.1:{port}", *CONFIGS[number], seed=seed, heartbeat=HEARTBEAT, wait=LIMIT)
        while True:
            stream.random_ops(20)
            with contextlib.suppress(WorkerStuck):
                stream.check(2)
                say(mark=1)
    except GTError as error:
        say(error=type(error).__name__, text=str(error))
        begin = time.monotonic()
        stream.session.close()
        say(closed=time.monotonic() - begin)
    except AssertionError as error:
        say(wrong=str(error))


@dataclass
class Ground:
    seed: int
    rng: random.Random = field(init=False)
    counts: Counter = field(default_factory=Counter)
    slowest: float = 0.0
    dispatcher: Child | None = None
    port: int = 0
    workers: dict[int, Child] = field(default_factory=dict)
    clients: list[Child] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    # ---- processes

    def heal(self) -> None:
        """Start what is missing."""
        if self.dispatcher is None:
            for child in self.workers.values():
                self.gone(child, "a worker whose dispatcher is gone")
            self.workers.clear()
            self.dispatcher = start("gt.server chaos", dispatch)
            self.until(lambda: self.dispatcher.over is not None, "the dispatcher started")
            self.port = self.dispatcher.over["port"]
        for number in range(WORKERS):
            if number not in self.workers:
                how = WorkerOptions("127.0.0.1", self.port, "", f"w{number}", "numpy", "cpu", LIMIT)
                self.workers[number] = start(f"gt.worker chaos {number}", lambda say, how=how: say(ended=work(how)))

    def client(self) -> Child:
        rng = self.rng
        number, seed = rng.randrange(len(CONFIGS)), rng.randrange(1 << 30)
        child = start("gt.client chaos", lambda say: compute(self.port, number, seed, say))
        self.clients.append(child)
        return child

    def until(self, done: Callable[[], Any], what: str, seconds: float = LIMIT) -> float:
        """Read what children say until done; AssertionError if that takes too long."""
        begin = time.monotonic()
        while not done():
            left = begin + seconds - time.monotonic()
            assert left > 0, f"seed {self.seed}: not within {seconds:g} s: {what}"
            children = [
                c
                for c in (self.dispatcher, *self.workers.values(), *self.clients)
                if c and c.fd >= 0 and c.over != {"silent": True}
            ]
            ready, _, _ = select.select([c.fd for c in children], [], [], min(left, 0.05))
            for child in children:
                if child.fd in ready:
                    child.read()
        return time.monotonic() - begin

    def gone(self, child: Child, what: str) -> None:
        """Wait until a process has ended."""
        ended: list = []
        self.until(lambda: ended or ended.append(os.waitpid(child.pid, os.WNOHANG)[0]) or ended.pop() or False, what)
        child.close()

    def end(self, child: Child) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        child.close()

    # ---- a round

    def round(self) -> None:
        rng = self.rng
        self.heal()
        pair = [self.client(), self.client()]
        marks = [rng.randrange(1, 12) for _ in pair]
        self.until(lambda: all(c.marks >= m for c, m in zip(pair, marks, strict=True)), "clients work", 3 * LIMIT)
        assert all(c.over is None for c in pair), f"seed {self.seed}: {[c.over for c in pair]} before anything happened"
        victim = rng.choice(["worker"] * 3 + ["client"] * 2 + ["dispatcher"])
        how = rng.choice([signal.SIGKILL, signal.SIGSTOP])
        name = {"worker": "worker", "client": "client", "dispatcher": "dispatcher"}[victim]
        self.counts[f"{name} {how.name}"] += 1
        getattr(self, f"harm_{victim}")(pair, how)
        self.heal()
        fresh = self.client()
        self.slowest = max(self.slowest, self.until(lambda: fresh.marks >= 3 or fresh.over, "a new client works", 3 * LIMIT))
        assert fresh.over is None, f"seed {self.seed}: a new client after {name} {how.name}: {fresh.over}"
        for child in self.clients:
            self.end(child)
        self.clients.clear()

    def settled(self, clients: list[Child], cause: str) -> None:
        """Each of these has ended with an error that names the cause, or goes on."""
        before = [c.marks for c in clients]

        def done() -> bool:
            ended = [c.over is not None and ("closed" in c.over or "wrong" in c.over) for c in clients]
            return all(over or c.marks > m + 1 for over, c, m in zip(ended, clients, before, strict=True))

        self.slowest = max(self.slowest, self.until(done, f"every call ends after {cause}"))
        for child in clients:
            over = child.over or {}
            assert "wrong" not in over and "silent" not in over, f"seed {self.seed}: {over}"
            if "error" in over:
                self.counts[over["error"]] += 1
                assert any(word in over["text"] for word in CAUSES), f"seed {self.seed}: names no cause: {over}"

    def harm_worker(self, pair: list[Child], how: int) -> None:
        number = self.rng.randrange(WORKERS)
        child = self.workers[number]
        os.kill(child.pid, how)
        if how == signal.SIGSTOP and self.rng.random() < 0.3:  # for less than a heartbeat: nothing has happened
            os.kill(child.pid, signal.SIGCONT)
            self.settled(pair, f"w{number} slept for a moment")
            assert all(c.over is None for c in pair), f"seed {self.seed}: {[c.over for c in pair]} after a moment's sleep"
            return
        del self.workers[number]
        if how == signal.SIGSTOP:  # until it has been given up
            awake = time.monotonic() + 2 * HEARTBEAT
            self.until(lambda: time.monotonic() > awake, "time passes")
        self.settled(pair, f"w{number} got {how}")
        if how == signal.SIGSTOP:
            os.kill(child.pid, signal.SIGCONT)
        self.gone(child, f"w{number} ends")

    def harm_client(self, pair: list[Child], how: int) -> None:
        child = pair.pop(self.rng.randrange(2))
        os.kill(child.pid, how)
        self.settled(pair, "another client was harmed")
        assert pair[0].over is None, f"seed {self.seed}: one client harmed another: {pair[0].over}"

    def harm_dispatcher(self, pair: list[Child], how: int) -> None:
        child, self.dispatcher = self.dispatcher, None
        assert child is not None
        os.kill(child.pid, how)
        self.settled(pair, "the dispatcher was harmed")
        assert all(c.over and c.over["error"] == "DispatcherLost" for c in pair), f"seed {self.seed}: {[c.over for c in pair]}"
        self.end(child)

    # ---- the end

    def finish(self) -> dict[str, Any]:
        """Stop everything; what is left is a failure. The dispatcher has forgotten every client by then."""
        begin = sum(len(os.listdir(f"/proc/{c.pid}/fd")) for c in (self.dispatcher, *self.workers.values()) if c)
        if self.dispatcher is not None:
            os.kill(self.dispatcher.pid, signal.SIGTERM)
            self.end(self.dispatcher)
            self.dispatcher = None
        for child in self.workers.values():
            self.gone(child, "workers end with their dispatcher")
        self.workers.clear()
        left: list[int] = []
        with contextlib.suppress(ChildProcessError):
            while True:
                left.append(os.waitpid(-1, os.WNOHANG)[0])
                assert not left[-1] and len(left) < 2, f"processes are left: {left}"
        return {"seed": self.seed, "slowest_s": round(self.slowest, 2), "open_files": begin, **self.counts}


def chaos(seed: int, rounds: int, seconds: float = float("inf")) -> dict[str, Any]:
    ground, until, done = Ground(seed), time.monotonic() + seconds, 0
    try:
        while done < rounds and time.monotonic() < until:
            ground.round()
            done += 1
        return {"rounds": done, **ground.finish()}
    finally:
        for child in (*ground.clients, *ground.workers.values(), ground.dispatcher):
            if child is not None:
                with contextlib.suppress(OSError):
                    os.kill(child.pid, signal.SIGKILL)
                    os.waitpid(child.pid, 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.stress.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.stdout.write(json.dumps(chaos(args.seed, args.rounds, args.seconds)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
