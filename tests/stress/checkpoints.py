"""`python -m tests.stress.checkpoints [--rounds N] [--seed N] [--stream]`: processes killed at random moments of saving.

A program saves one checkpoint after the other under one name. In each round the program, a worker or the server is killed at a
random moment of a save. Then the checkpoint at that name has to load, with all values of one save, no older than the last one
that was reported complete; and the next program's saves remove what the killed one left. N rounds of each of the three. With
--stream workers share no disk with the program, and all pieces stream to it. Every other save has wait=False.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gt
from gt.client.exchange.arenas import ClientArenas
from gt.errors import GTError
from gt.worker.loop import WorkerOptions
from gt.worker.loop import run as work
from tests.helpers.limits import limit
from tests.stress.chaos import Child, dispatch, start

VICTIMS = ("program", "worker", "server")
WORKERS = 2
CONFIG = "both: {workers: [0, 1]}\nrows_colpar: {workers: [0, 1]}\n"
ROUND_SECONDS = limit(30)
SAVE_SECONDS = 0.12  # a save of this size on two cores takes about so long; the kill is at a random moment of three of them


def save_all(port: int, path: str, first: int, stream: bool, say: Callable[..., None]) -> None:
    """The program: saves `number` everywhere, then the next number, every other one beside further work."""
    if stream:  # neither memory nor files are lent
        ClientArenas.take = lambda self, nbytes: None  # type: ignore[method-assign]
    try:
        gt.connect(f"127.0.0.1:{port}", config=CONFIG, token="", wait=ROUND_SECONDS)
        number = first
        with gt.signal.context("rows_colpar"):
            weight = torch.nn.Parameter(torch.zeros(512, 256, device="remote"))
            torch.nn.functional.linear(torch.zeros(2, 256, device="remote"), weight)
        with gt.signal.context("both"):
            whole = [torch.zeros(100_000, device="remote") + 0 for _ in range(3)]
        while True:
            with torch.no_grad():
                for tensor in (weight, *whole):
                    tensor.fill_(number)
            state = {"model": {"w": weight}, "rest": whole, "here": torch.tensor([number]), "number": number}
            say(mark=number)
            save = gt.save(state, path, wait=number % 2 == 0)
            if number % 2:
                with torch.no_grad():
                    whole[0].add_(1)
                save.wait()
            say(mark=number, saved=number)
            number += 1
    except GTError as error:
        say(error=type(error).__name__, text=str(error))
        with contextlib.suppress(GTError):
            gt.shutdown()
        say(closed=True)


class Program(Child):
    """The program's process, and the newest number that it has saved."""

    saved = -1
    begun = -1

    def read(self) -> None:
        data = os.read(self.fd, 1 << 16)
        *lines, self.text = (self.text + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            self.begun, self.saved = max(self.begun, said.get("mark", -1)), max(self.saved, said.get("saved", -1))
            if "mark" not in said:
                self.over = {**(self.over or {}), **said}
        if not data and self.over is None:
            self.over = {"silent": True}


def wait(child: Child, done: Callable[[], Any], what: str) -> None:
    """Read what a child says until done."""
    deadline = time.monotonic() + ROUND_SECONDS
    while not done():
        left = deadline - time.monotonic()
        assert left > 0, f"not within {ROUND_SECONDS:g} s: {what}"
        if select.select([child.fd], [], [], min(left, 0.2))[0]:
            child.read()


def kill(child: Child) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    child.close()


def number_of(path: Path) -> int:
    """The one number that all values of a checkpoint are; read without workers."""
    state = gt.load(path, device="cpu")
    numbers = {
        float(n) for tensor in (state["model"]["w"], *state["rest"], state["here"]) for n in set(tensor.flatten().tolist())
    }
    assert numbers == {float(state["number"])}, f"{path} has values of several saves: {numbers}, {state['number']}"
    return state["number"]


def round_of(victim: str, rng: random.Random, path: Path, first: int, stream: bool) -> int:
    """Kill one process while a program saves; the number that the checkpoint has afterwards."""
    server = start("gt.server saves", dispatch)
    children = [server]
    try:
        wait(server, lambda: server.over is not None, "the server started")
        assert server.over is not None
        port = server.over["port"]
        for n in range(WORKERS):
            options = WorkerOptions("127.0.0.1", port, "", f"w{n}", "numpy", "cpu", ROUND_SECONDS)
            children.append(start(f"gt.worker saves {n}", lambda say, options=options: say(ended=work(options))))
        begun = start("gt.client saves", lambda say: save_all(port, str(path), first, stream, say))
        program = Program(begun.pid, begun.fd)
        children.append(program)
        wait(program, lambda: program.saved >= first or program.over, "the first save")
        assert program.over is None, program.over
        until = time.monotonic() + rng.uniform(0, 3 * SAVE_SECONDS)
        while (left := until - time.monotonic()) > 0:
            if select.select([program.fd], [], [], left)[0]:
                program.read()
        target = {"program": program, "worker": children[rng.randrange(1, 1 + WORKERS)], "server": server}[victim]
        children.remove(target)
        os.kill(target.pid, signal.SIGKILL)
        if target is not program:
            wait(
                program, lambda: program.over is not None and ("closed" in program.over or "silent" in program.over), "an error"
            )
            assert program.over is not None and "error" in program.over, f"{victim}: {program.over}"
            assert program.over["error"] in ("WorkerLost", "DispatcherLost", "CheckpointError"), program.over
        else:
            wait(program, lambda: program.over, "the end of the pipe")  # what it had said is read first
        os.waitpid(target.pid, 0)
        target.close()
        number = number_of(path)
        assert program.saved <= number <= program.begun, f"{victim}: {number} is not in {program.saved} to {program.begun}"
        return number
    finally:
        for child in reversed(children):
            kill(child)


def run(rounds: int, seed: int, stream: bool = False) -> dict[str, Any]:
    """Rounds of each victim. stream: workers share no disk with the program. AssertionError for a checkpoint that is lost."""
    rng, counts, number = random.Random(seed), Counter[str](), 0
    folder = Path(tempfile.mkdtemp(prefix="gt-saves-"))
    left = 0
    try:
        for victim in [victim for victim in VICTIMS for _ in range(rounds)]:
            number = round_of(victim, rng, folder / "checkpoint", number + 1, stream)
            leftovers = len(os.listdir(folder)) - 1
            assert leftovers <= 1, f"{os.listdir(folder)}: leftovers of earlier rounds stay"
            left += leftovers
            counts[victim] += 1
        return {"seed": seed, "stream": stream, **counts, "saves": number, "interrupted_with_leftovers": left}
    finally:
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.stress.checkpoints", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stream", action="store_true", help="workers share no disk with the program")
    args = parser.parse_args()
    sys.stdout.write(json.dumps(run(args.rounds, args.seed, args.stream)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
