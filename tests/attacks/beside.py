"""Who suffers: honest trainers in processes of their own, and a client that holds a secret and measures its round trips."""

from __future__ import annotations

import itertools
import json
import os
import queue
import secrets
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gt import env
from gt.client.session import Session
from gt.errors import GTError
from gt.ir.instr import FREE
from gt.ir.spec import contiguous
from gt.ir.template import Out, Template
from tests.attacks.ground import Ground, Sign
from tests.helpers import ROOT
from tests.helpers.limits import limit

MODES = ("eager", "captured", "pipelined")
STALL = limit(10)  # seconds a round or a round trip may take: a worker that died is there again long before
START = limit(60)  # seconds until trainers are up: they import torch
PLACES = "a: {shard: {axis: 0, workers: [0]}}\nb: {shard: {axis: 0, workers: [1]}}\n"
SIZES = (64, 1 << 12, 1 << 16, 1 << 18)  # bytes of secrets: what is freed of them lies where others allocate


@dataclass
class Trainers:
    """Processes that train when told to; every answer is looked at."""

    folder: Path
    modes: tuple[str, ...] = MODES
    rounds: int = 0
    losses: int = 0
    excused: int = 0  # errors that name a worker that an attack has just killed
    slowest: float = 0.0
    _process: subprocess.Popen | None = None
    _orders: dict[str, int] = field(default_factory=dict)
    _answers: dict[str, int] = field(default_factory=dict)
    _asked: dict[str, float] = field(default_factory=dict)
    _text: dict[str, bytes] = field(default_factory=dict)

    def start(self) -> None:
        theirs = {}
        for mode in self.modes:
            read, self._orders[mode] = os.pipe()
            self._answers[mode], write = os.pipe()
            theirs[mode] = [read, write]
        descriptors = [fd for pair in theirs.values() for fd in pair]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.honest"],
            stdin=subprocess.PIPE,
            cwd=ROOT,
            env=env.child(PYTHONPATH=env.python_path(str(ROOT))),
            pass_fds=descriptors,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"folder": str(self.folder), "pipes": theirs}).encode() + b"\n")
        self._process.stdin.flush()
        for fd in descriptors:
            os.close(fd)

    def ask(self, ground: Ground) -> None:
        """One more round of each trainer that is through with the last."""
        order = json.dumps({"address": ground.address, "token": ground.token}).encode() + b"\n"
        for mode in self.modes:
            if mode not in self._asked:
                self._asked[mode] = time.monotonic()
                os.write(self._orders[mode], order)

    def collect(self, seconds: float = 0.0, most: float = STALL, deaths: bool = False) -> list[Sign]:
        """The trainers' answers within a time. deaths: a worker died since the question, so errors that name it are right."""
        signs: list[Sign] = []
        deadline = time.monotonic() + seconds
        while self._asked:
            ready, _, _ = select.select(list(self._answers.values()), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for mode, fd in self._answers.items():
                if fd in ready:
                    signs += self._read(mode, fd, deaths)
        for mode, asked in list(self._asked.items()):
            if time.monotonic() - asked > most:
                self._asked[mode] = time.monotonic() + 3600  # said once
                signs.append(Sign("honest stall", mode, f"the {mode} trainer's round is not over after {most:g} s"))
        return signs

    def _read(self, mode: str, fd: int, deaths: bool) -> list[Sign]:
        data = os.read(fd, 1 << 16)
        if not data:
            self._asked.pop(mode, None)
            return [Sign("honest error", mode, f"the {mode} trainer died")]
        *lines, self._text[mode] = (self._text.get(mode, b"") + data).split(b"\n")
        signs = []
        for line in lines:
            answer = json.loads(line)
            self._asked.pop(mode, None)
            self.rounds += 1
            self.losses += 0 if "error" in answer else answer["losses"]
            self.slowest = max(self.slowest, answer["seconds"])
            error = answer.get("error", "")
            if "wrong" in answer:
                signs.append(Sign("honest wrong", mode, f"{mode}: losses {answer['wrong']}"))
            elif error and deaths and error.startswith(("WorkerLost", "DispatcherLost", "Refused", "ConfigError")):
                self.excused += 1
            elif error:
                signs.append(Sign("honest error", error.partition(":")[0], f"{mode}: {error}"))
        return signs

    def stop(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(limit(10))
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            for fd in (*self._orders.values(), *self._answers.values()):
                os.close(fd)
            self._process = None


class Holder:
    """A client with a secret on both workers, uploaded and freed over and over, whose values have to come back as they are."""

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(24)
        self.trips: list[float] = []
        self.newcomers: list[float] = []
        self._session: Session | None = None
        self._ids = itertools.count(1)
        self._live: list[tuple[int, bytes]] = []
        self._orders: queue.SimpleQueue = queue.SimpleQueue()
        self._answers: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = self._begin()

    def _begin(self) -> threading.Thread:
        thread = threading.Thread(target=self._work, args=(self._orders, self._answers), name="holder", daemon=True)
        thread.start()
        return thread

    def turn(self, ground: Ground, deaths: bool = False, newcomer: bool = False, most: float = STALL) -> list[Sign]:
        """Upload, fetch and free; the last time's secrets are compared. At every eighth turn, or when asked, as a newcomer."""
        self._orders.put((ground.address, ground.token, newcomer))
        try:
            answer = self._answers.get(timeout=most)
        except queue.Empty:
            self._orders, self._answers = queue.SimpleQueue(), queue.SimpleQueue()
            self._session = None
            self._thread = self._begin()
            return [Sign("honest stall", "holder", f"an upload and a fetch are not over after {most:g} s")]
        if answer is None or (deaths and answer.kind == "honest error" and "Lost" in answer.cause):
            return []
        return [answer]

    def stop(self) -> None:
        self._orders.put(None)
        self._thread.join(limit(10))

    def _work(self, orders: Any, answers: Any) -> None:
        while (order := orders.get()) is not None:
            try:
                answers.put(self._once(*order))
            except GTError as error:
                self._leave()
                answers.put(Sign("honest error", type(error).__name__, f"holder: {type(error).__name__}: {error}"))
        self._leave()

    def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _once(self, address: str, token: str, newcomer: bool) -> Sign | None:
        if self._session is not None and (newcomer or len(self.trips) % 8 == 0 or self._session.address != address):
            self._leave()
        templates, origins = [], []
        start = time.monotonic()
        if self._session is None:
            self._session = Session(address, (PLACES, "holder.yaml"), token=token, switches={"workers": 2})
            self._ids, self._live = itertools.count(1), []
            templates = [[16 + n, _upload(size)] for n, size in enumerate(SIZES)]
            name = f"{self.secret.hex()}.py"  # what others are told names no file of this program
            origins = [[1, name, 1, "a", False, -1], [2, name, 2, "b", False, -1]]
            self.newcomers.append(time.monotonic() - start)
        session, code, frames, old = self._session, [], [], self._live
        self._live = []
        for n, size in enumerate(SIZES):
            data = (self.secret * (size // 24 + 1))[:size]
            for group in (1, 2):
                made = next(self._ids)
                code += [16 + n, group, len(frames), made]
                frames.append(data)
                self._live.append((made, data))
        if old:
            code += [FREE, len(old), *(made for made, _ in old)]
        start = time.monotonic()
        session.submit(templates, origins, code, frames)
        made, data = self._live[len(self.trips) % len(self._live)]
        got = session.fetch(made)[2].tobytes()
        self.trips.append(time.monotonic() - start)
        if got != data:
            return Sign("honest wrong", "holder", f"{len(data)} bytes came back as {np.frombuffer(got, np.uint8)[:16]}")
        return None


def _upload(size: int) -> list:
    return Template("gt.upload.default", (), (), (), 1, (Out("new", contiguous((size,), "uint8")),)).wire()
