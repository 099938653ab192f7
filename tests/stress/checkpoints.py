"""`python -m tests.stress.checkpoints [--rounds N] [--seed N] [--stream]`: processes killed at random moments of saving.

A program saves one checkpoint after the other under one name. In each round the program, a worker or the server is killed at a
random moment of a save. Then the checkpoint at that name has to load, with all values of one save, no older than the last one
that was reported complete; the program has to get an error within seconds; and the next program's saves remove what the killed
one left. N rounds of each of the three. With --stream workers share no disk with the program, and all pieces stream to it.
Every other save has wait=False, and every other round kills in such a save.

All processes are stopped when one is killed. The files of the new folder then tell how far the save was: `moments` of the
result counts them by victim and kind of save.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gt
from gt.client import current_session
from gt.client.checkpoint.folder import MANIFEST
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
ERROR_SECONDS = limit(10)  # from the kill of a worker or the server to the end of the program's error
CAUSES = {"worker": ("WorkerLost", "CheckpointError"), "server": ("DispatcherLost", "CheckpointError")}  # errors by victim
KINDS = ("asynchronous", "synchronous")  # of saves with odd and with even numbers
ROWS, COLUMNS, ELEMENTS = 2048, 512, 1_000_000  # so many values are written for longer than a process takes to start a write


def save_all(port: int, path: str, first: int, stream: bool, say: Callable[..., None]) -> None:
    """The program: saves `number` everywhere, then the next number, every other one beside further work."""
    if stream:  # neither memory nor files are lent
        ClientArenas.take = lambda self, nbytes: None  # type: ignore[method-assign]
    try:
        gt.connect(f"127.0.0.1:{port}", config=CONFIG, token="", wait=ROUND_SECONDS)
        number = first
        with gt.signal.context("rows_colpar"):
            weight = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS, device="remote"))
            torch.nn.functional.linear(torch.zeros(2, COLUMNS, device="remote"), weight)
        with gt.signal.context("both"):
            whole = [torch.zeros(ELEMENTS, device="remote") + 0 for _ in range(3)]
        while True:
            with torch.no_grad():
                for tensor in (weight, *whole):
                    tensor.fill_(number)
            state = {"model": {"w": weight}, "rest": whole, "here": torch.tensor([number]), "number": number}
            current_session.current().session.synchronize()  # else a save would begin with a wait for the values
            say(mark=number)
            begin = time.monotonic()
            save = gt.save(state, path, wait=number % 2 == 0)
            if number % 2:
                with torch.no_grad():
                    whole[0].add_(1)
                save.wait()
            say(mark=number, saved=number, seconds=time.monotonic() - begin)
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
    seconds = 0.0  # of the slowest save

    def read(self) -> None:
        data = os.read(self.fd, 1 << 16)
        *lines, self.text = (self.text + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            self.begun, self.saved = max(self.begun, said.get("mark", -1)), max(self.saved, said.get("saved", -1))
            self.seconds = max(self.seconds, said.get("seconds", 0.0))
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
    numbers = {float(n) for tensor in (state["model"]["w"], *state["rest"], state["here"]) for n in tensor.unique().tolist()}
    assert numbers == {float(state["number"])}, f"{path} has values of several saves: {numbers}, {state['number']}"
    return state["number"]


@dataclass
class Ground:
    """The processes of a round."""

    path: Path
    stream: bool
    server: Child
    workers: list[Child]
    program: Program

    @classmethod
    def of(cls, path: Path, first: int, stream: bool) -> Ground:
        server = start("gt.server saves", dispatch)
        wait(server, lambda: server.over is not None, "the server started")
        assert server.over is not None
        port, workers = server.over["port"], []
        for n in range(WORKERS):
            options = WorkerOptions("127.0.0.1", port, "", f"w{n}", "numpy", "cpu", ROUND_SECONDS)
            workers.append(start(f"gt.worker saves {n}", lambda say, options=options: say(ended=work(options))))
        begun = start("gt.client saves", lambda say: save_all(port, str(path), first, stream, say))
        return cls(path, stream, server, workers, Program(begun.pid, begun.fd))

    @property
    def children(self) -> list[Child]:
        return [child for child in (self.program, *self.workers, self.server) if child.fd >= 0]

    def wait_for_moment(self, kind: str, first: int, rng: random.Random) -> None:
        """Wait until a random moment of a save of this kind. The first two saves, one of each kind, tell how long one takes."""
        program = self.program

        def saves() -> bool:
            amid = program.begun > max(program.saved, first + 1)
            return program.over is not None or (amid and kind_of(program.begun) == kind)

        wait(program, saves, f"an {kind} save")
        assert program.over is None, program.over
        # Not all of it: a save whose files are written waits for the disk, for a time that differs much
        until = time.monotonic() + rng.uniform(0, program.seconds)
        while (left := until - time.monotonic()) > 0:
            if select.select([program.fd], [], [], left)[0]:
                program.read()

    def kill(self, target: Child) -> str:
        """Kill one process while all are stopped. Returns how far the save was then."""
        for child in self.children:
            os.kill(child.pid, signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
        while select.select([self.program.fd], [], [], 0)[0]:
            self.program.read()
        begun, saved = self.program.begun, self.program.saved
        moment = f"{kind_of(begun)}: {_moment(self.path, begun)}" if begun > saved else "between saves"
        os.kill(target.pid, signal.SIGKILL)
        for child in self.children:
            os.kill(child.pid, signal.SIGCONT)
        return moment

    def end(self) -> None:
        for child in self.children:
            kill(child)


def kind_of(number: int) -> str:
    return KINDS[number % 2 == 0]


def _moment(path: Path, number: int) -> str:
    """How far the save of a number is, by its folder, while nobody writes."""
    folder = next((p for p in path.parent.iterdir() if ".gt-saving-" in p.name), None)
    if folder is None:
        return "no folder yet, or in place"
    if (folder / MANIFEST).exists():
        return "manifest"
    files = [data for name in ("model", "rest") for data in folder.glob(f"{name}-*.safetensors")]
    values = np.concatenate([_values(file) for file in files] or [np.zeros(0, np.float32)])
    written = int((values == number).sum())
    if written == ROWS * COLUMNS + 3 * ELEMENTS:
        return "all values written"
    return "some values written" if written else "no value written"


def _values(file: Path) -> np.ndarray:
    """The values of a safetensors file whose tensors are all float32."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    return np.frombuffer(data[begin:], np.float32)


def round_of(victim: str, kind: str, rng: random.Random, ground: Ground, first: int) -> tuple[int, str, float]:
    """Kill one process during a save.

    Returns the number that the checkpoint has afterwards, the moment of the save, and the seconds until the program's error.
    """
    program, took = ground.program, 0.0
    target = {"program": program, "worker": rng.choice(ground.workers), "server": ground.server}[victim]
    ground.wait_for_moment(kind, first, rng)
    moment, begin = ground.kill(target), time.monotonic()
    if target is not program:
        wait(program, lambda: program.over is not None and ("closed" in program.over or "silent" in program.over), "an error")
        assert program.over is not None and "error" in program.over, f"{victim}, {moment}: {program.over}"
        assert program.over["error"] in CAUSES[victim], program.over
        took = time.monotonic() - begin
        assert took < ERROR_SECONDS, f"{victim}, {moment}: the program ended after {took:.1f} s with {program.over}"
    else:
        wait(program, lambda: program.over, "the end of the pipe")  # what it had said is read first
    os.waitpid(target.pid, 0)
    target.close()
    number = number_of(ground.path)
    assert program.saved <= number <= program.begun, f"{victim}: {number} is not in {program.saved} to {program.begun}"
    return number, moment, took


def run(rounds: int, seed: int, stream: bool = False) -> dict[str, Any]:
    """Rounds of each victim. stream: workers share no disk with the program. AssertionError for a checkpoint that is lost."""
    rng, counts, number = random.Random(seed), Counter[str](), 0
    moments: dict[str, Counter[str]] = {victim: Counter() for victim in VICTIMS}
    folder = Path(tempfile.mkdtemp(prefix="gt-saves-"))
    left, slowest = 0, 0.0
    try:
        for victim, n in [(victim, n) for victim in VICTIMS for n in range(rounds)]:
            ground = Ground.of(folder / "checkpoint", number + 1, stream)
            try:
                number, moment, took = round_of(victim, KINDS[n % 2], rng, ground, number + 1)
            finally:
                ground.end()
            leftovers = len(os.listdir(folder)) - 1
            assert leftovers <= 1, f"{os.listdir(folder)}: leftovers of earlier rounds stay"
            left += leftovers
            counts[victim] += 1
            moments[victim][moment] += 1
            slowest = max(slowest, took)
        return {
            "seed": seed, "stream": stream, **counts, "saves": number, "interrupted_with_leftovers": left, "moments": moments,
            "slowest_error": round(slowest, 2),
        }  # fmt: skip
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
