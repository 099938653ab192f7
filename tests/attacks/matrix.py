"""Signals, targets and moments: what a client is told when a process is killed or stopped, what is left, and who can go on."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gt
from gt import env
from gt.launch.supervisor import MAX_RESTARTS
from tests.attacks.beside import ROOT, Holder
from tests.attacks.ground import Ground, alive, born, children
from tests.attacks.victim import VIEWS
from tests.helpers.limits import limit

SIGNALS = ("KILL", "STOP", "TERM", "SEGV")
OBSERVER = "observer"
TARGETS = ("client", "dispatcher", "worker", "all workers", "supervisor", OBSERVER)
OF_SERVER = ("dispatcher", "supervisor")  # the server ends with these
MOMENTS = (
    "starting",
    "idle",
    "eager",
    "fetch",
    "upload",
    "batches",
    "capture",
    "replay",
    "schedule",
    "all-reduce",
    "saving",
    "saving beside",
    "loading",
    "observed",
    "offload",
    "zero replay",
)
LIMIT = limit(20)  # seconds until a cell is a hang
SEEN = limit(10)  # seconds until an observer has another view, or an error
ARRIVAL = limit(100)  # seconds in which a client comes to the moment: a loaded machine uploads 1 GB twice
CAUSES = (
    "worker w", "server at", "is stopped", "dispatcher", "the process that starts", "is alive and", "signal SIG", "died",
    "exit code",
)  # fmt: skip
COLUMNS = ("signal", "target", "moment", "seconds", "error", "names the cause", "goes on after", "a new one after", "left")


@dataclass
class Cell:
    signal: str
    target: str
    moment: str
    seconds: float = -1.0  # until the error, -1 for none
    error: str = ""
    text: str = ""
    cause: str = "-"  # whether the error names it
    on: float = -1.0  # seconds until the same client's new work succeeded
    why: str = ""
    again: float = -1.0  # seconds until a new client's did
    left: list[str] = field(default_factory=list)
    hang: bool = False

    @property
    def name(self) -> str:
        return f"{self.signal} {self.target} {self.moment}"

    def row(self) -> list[str]:
        cells = [self.signal, self.target, self.moment, _seconds(self.seconds), self.error or "none", self.cause]
        left = self.text[:60] if self.hang and self.text else "hangs" if self.hang else ", ".join(self.left) or "nothing"
        return [*cells, _seconds(self.on), _seconds(self.again), left]

    @property
    def good(self) -> bool:
        goes_on = self.on >= 0 or not self.error or "worker" not in self.target or self.moment == "starting"
        return not self.hang and not self.left and self.cause != "no" and self.again >= 0 and goes_on


def _seconds(value: float) -> str:
    return "-" if value < 0 else f"{value:.2f}"


def footprint(runtime: Path) -> set[str]:
    """Files of ours in shared memory and in the user's runtime directory."""
    found = {str(path) for path in Path("/dev/shm").iterdir() if "gt" in path.name}
    return found | {str(path) for path in runtime.rglob("*") if not path.is_dir()}


def at_work(pid: int) -> int:
    """Nanoseconds of CPU that a process's main thread has had."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    return 0


class Victims:
    """The process that forks a client for each cell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        errors = (folder / "victims.stderr").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.victim"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            text=True,
            env=env.child(PYTHONPATH=env.python_path(str(ROOT))),
        )
        errors.close()

    def begin(self, **order: Any) -> Victim:
        paths = [self.folder / "orders", self.folder / "answers"]
        for path in paths:
            path.unlink(missing_ok=True)
            os.mkfifo(path)
        self._write(json.dumps({**order, "folder": str(self.folder), "orders": str(paths[0]), "answers": str(paths[1])}))
        assert self.process.stdout is not None
        return Victim(int(self.process.stdout.readline()), *paths)

    def end(self, victim: Victim) -> None:
        self._write("over")
        victim.close()

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(LIMIT)  # a loaded machine takes its time to end a process with torch
        self.process.stdout.close()


class Victim:
    """One cell's client: its pid, what it says, and a line to it."""

    def __init__(self, pid: int, orders: Path, answers: Path) -> None:
        self.pid = pid
        self._text = b""
        self._rows: list[dict[str, Any]] = []
        self._out = os.open(orders, os.O_RDWR)
        self._in = os.open(answers, os.O_RDONLY | os.O_NONBLOCK)

    def tell(self, line: str) -> None:
        os.write(self._out, line.encode() + b"\n")

    def wait(self, key: str, seconds: float, least: int = 0) -> dict[str, Any] | None:
        """The next answer with this key, and at least this value; None after so long, or when it is gone."""
        deadline = time.monotonic() + seconds
        while True:
            while self._rows:
                row = self._rows.pop(0)
                if key in row and (not least or row[key] >= least):
                    return row
                if key == "mark" and "error" in row:
                    self._rows.insert(0, row)
                    return None
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], min(left, 0.2))[0]:
                if left <= 0 or not alive(self.pid):
                    return None
                continue
            try:
                data = os.read(self._in, 1 << 16)
            except BlockingIOError:
                continue
            if not data and not alive(self.pid):
                return None
            *lines, self._text = (self._text + data).split(b"\n")
            self._rows += map(json.loads, lines)

    def close(self) -> None:
        os.close(self._in)
        os.close(self._out)


class Matrix:
    """Cells one after the other, on one server as long as it lives."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.runtime = folder / "run"  # of these servers alone
        self.runtime.mkdir(mode=0o700, exist_ok=True)
        self.usual = os.environ.get("XDG_RUNTIME_DIR", "")
        os.environ["XDG_RUNTIME_DIR"] = str(self.runtime)
        self.ground = Ground(folder, log=False)
        self.victims = Victims(folder)
        self.pause = threading.Event()
        self.harmed = 0

    def run(self, cell: Cell) -> Cell:
        before = footprint(self.runtime)
        if cell.moment == "starting":
            self._starting(cell)
        else:
            if self.harmed >= MAX_RESTARTS:  # workers that keep dying are not started again
                self.ground.stop()
            if self.ground.local is None:
                self.ground.start()
                self.harmed = 0
            self.ground.heal()
            self.harmed += "worker" in cell.target and cell.signal != "STOP"
            self._working(cell)
        self._left(cell, before)
        return cell

    def _working(self, cell: Cell) -> None:
        ground = self.ground
        before = {pid: at_work(pid) for pid in ground.processes()}
        (self.folder / VIEWS).unlink(missing_ok=True)
        victim = self.victims.begin(moment=cell.moment, address=ground.address, token=ground.token, size=self.size)
        observer = victim.wait(OBSERVER, ARRIVAL) if cell.moment == "observed" else {}
        if observer is None or victim.wait("mark", ARRIVAL, 2) is None:
            error = victim.wait("error", 0.0)
            cell.hang, cell.text = True, f"before the moment: {error['text']}" if error else "it did not come to the moment"
            self.victims.end(victim)
            return
        if cell.moment in ("eager", "replay", "schedule", "all-reduce"):
            victim.wait("mark", LIMIT, 5)
        pids = [observer[OBSERVER]] if observer and cell.target == OBSERVER else self._targets(cell.target, victim.pid, before)
        seen = len(self._views())
        self.pause.wait({"upload": 0.05, "fetch": 0.02}.get(cell.moment, 0.0))
        self._harm(cell, victim, pids)
        if cell.target in OF_SERVER or (not ground.whole and cell.signal != "STOP" and cell.target == "all workers"):
            self._resume(pids)
        cell.again = self._newcomer(cell)
        self._resume(pids)
        if observer and cell.target != "client" and (cell.target != OBSERVER or cell.signal == "STOP"):
            cell.left += self._fault_of_views(seen)
        if cell.target in OF_SERVER:
            victim.tell(json.dumps([ground.address, ground.token]))
            answer = victim.wait("again", LIMIT)
            cell.again = answer["again"] if answer else cell.again
        self.victims.end(victim)

    def _views(self) -> list[str]:
        path = self.folder / VIEWS
        return path.read_text().splitlines() if path.exists() else []

    def _fault_of_views(self, seen: int) -> list[str]:
        """An observer goes on, or is told why not."""
        deadline = time.monotonic() + SEEN
        while len(views := self._views()) <= seen and time.monotonic() < deadline:
            self.pause.wait(0.05)
        bad = [line for line in views if line != "view" and not any(word in line for word in CAUSES)]
        return [f"observer: {line[:80]}" for line in bad] if len(views) > seen else ["the observer hears nothing more"]

    def _targets(self, target: str, client: int, before: dict[int, int]) -> list[int]:
        """Pids. The one worker is that which did most for the client: others may not be its concern."""
        if target == "client":
            return [client]
        if target == "supervisor":
            assert self.ground.local is not None
            return [self.ground.local._process.pid]
        role = "gt.server" if target == "dispatcher" else "gt.worker"
        found = [pid for pid, name in self.ground.processes().items() if name.startswith(role)]
        return [max(found, key=lambda pid: at_work(pid) - before.get(pid, 0))] if target == "worker" else found

    def _harm(self, cell: Cell, victim: Victim, pids: list[int]) -> None:
        """Send the signal and wait for what the client says."""
        start = time.monotonic()
        for pid in pids:
            os.kill(pid, getattr(signal, f"SIG{cell.signal}"))
        if cell.moment == "idle" and cell.target != "client":
            victim.tell("go on")
        if cell.target == "client":
            return
        quiet = limit(1) if cell.signal == "TERM" or cell.target == OBSERVER else LIMIT
        answer = victim.wait("error", quiet)
        if answer is None and not self._works_on(victim):
            answer = victim.wait("error", 0.0)  # told late, on a loaded machine
            cell.hang = answer is None
        if answer is not None:
            cell.seconds = time.monotonic() - start
            cell.error, cell.text = answer["error"], answer["text"]
            cell.cause = "yes" if any(word in cell.text for word in CAUSES) else "no"
            if cell.signal == "STOP":
                self._resume(pids)
            on = victim.wait("on", LIMIT)
            cell.on, cell.why = (on["on"], on.get("why", "")) if on else (-1.0, "says nothing")

    def _works_on(self, victim: Victim) -> bool:
        """It was told of no error: whether it goes on."""
        return victim.wait("mark", LIMIT / 2) is not None and victim.wait("mark", LIMIT / 2) is not None

    def _newcomer(self, cell: Cell) -> float:
        """Seconds until a new client's work succeeds."""
        if cell.target in OF_SERVER or not self.ground.processes():
            self.ground.stop()
            self.ground.start()
        holder, start = Holder(), time.monotonic()
        try:
            while time.monotonic() - start < LIMIT:
                if not holder.turn(self.ground, most=LIMIT):
                    return time.monotonic() - start
            return -1.0
        finally:
            holder.stop()

    @staticmethod
    def _resume(pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _starting(self, cell: Cell) -> None:
        """The client starts a server and workers of its own, of which one is harmed at once."""
        victim = self.victims.begin(moment="starting", address="", token="", size=self.size)
        victim.wait("mark", LIMIT)
        pids = self._appeared(victim.pid, cell.target)
        start = time.monotonic()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, getattr(signal, f"SIG{cell.signal}"))
        if cell.target != "client":
            answer = victim.wait("mark", LIMIT, 2)
            if answer is None and (answer := victim.wait("error", ARRIVAL)) is not None:
                cell.error, cell.text, cell.seconds = answer["error"], answer["text"], time.monotonic() - start
                cell.cause = "yes" if any(word in cell.text for word in CAUSES) else "no"
            cell.hang = answer is None
        self._resume(pids)
        own = {pid: born(pid) for pid in self._family(victim.pid)}
        if cell.error:
            victim.wait("on", LIMIT)
        else:
            victim.tell("go on")
        if cell.target == "client" or cell.hang:
            cell.again = self._newcomer(cell) if self.ground.local else self._fresh(cell)
        else:
            victim.tell(json.dumps(["", ""]))
            if not cell.error:
                cell.on = 0.0 if victim.wait("mark", LIMIT, 4) else -1.0
                cell.again = self._newcomer(cell) if self.ground.local else self._fresh(cell)
            else:
                answer = victim.wait("again", LIMIT)
                cell.again = answer["again"] if answer else -1.0
                own.update((pid, born(pid)) for pid in self._family(victim.pid))
        self.victims.end(victim)
        deadline = time.monotonic() + LIMIT
        while (left := [pid for pid, when in own.items() if alive(pid) and born(pid) == when]) and time.monotonic() < deadline:
            self.pause.wait(0.05)
        cell.left += [f"process {pid}" for pid in left]
        for pid in left:
            os.kill(pid, signal.SIGKILL)

    def _fresh(self, cell: Cell) -> float:
        self.ground.start()
        return self._newcomer(cell)

    def _family(self, client: int) -> set[int]:
        nurseries = children(client)
        return {*nurseries, *(pid for nursery in nurseries for pid in children(nursery))}

    def _appeared(self, client: int, target: str) -> list[int]:
        """Pids of the target as soon as there are any."""
        if target == "client":
            return [client]
        role = {"dispatcher": "gt.server", "worker": "gt.worker 0"}.get(target, "gt.worker")
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline and alive(client):
            if target == "supervisor" and (found := children(client)):
                return found
            found = []
            for pid in self._family(client):
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").startswith(role):
                        found.append(pid)
            if len(found) >= (2 if target == "all workers" else 1):
                return found
            self.pause.wait(0.005)
        return []

    def _left(self, cell: Cell, before: set[str]) -> None:
        if cell.moment in ("saving", "saving beside", "loading"):
            cell.left += self._checkpoint()
        for sign in self.ground.look() if self.ground.local and cell.target in ("client", OBSERVER) else []:
            # A worker may hold a large tensor of a client that is alive, and has to give it back
            if sign.kind == "memory" and self.ground.gives_back(SEEN):
                continue
            cell.left.append(f"{sign.kind}: {sign.text[:80]}")
        if cell.target in OF_SERVER and self.ground.local:
            self.ground.stop()  # so that what is left afterwards is of the one that was harmed
        cell.left += sorted(footprint(self.runtime) - before) if not self.ground.local else []

    def _checkpoint(self) -> list[str]:
        """Faults of the checkpoint that clients save to. It is whole whatever ended them, and the next save cleans up."""
        where = self.folder / "checkpoint"
        try:
            whole = where.exists() and all(file.stat().st_size for file in where.iterdir())
            read = gt.load(where, device="cpu")["model"] if whole else {}
            bad = [] if whole and bool((read["small"] == 1).all()) else [f"{where} is not whole"]
        except gt.CheckpointError as error:
            bad = [str(error)]
        beside = [path.name for path in self.folder.iterdir() if path.name.startswith(".checkpoint.")]
        return bad + ([f"{len(beside)} folders of saves: {beside}"] if len(beside) > 1 else [])

    def stop(self) -> None:
        self.victims.stop()
        self.ground.stop()
        os.environ.pop("XDG_RUNTIME_DIR")
        if self.usual:
            self.usual = os.environ.get("XDG_RUNTIME_DIR", "")
        os.environ["XDG_RUNTIME_DIR"] = self.usual


def cells(only: list[str]) -> list[Cell]:
    made = [Cell(s, target, moment) for target in TARGETS for s in SIGNALS for moment in MOMENTS]
    made = [cell for cell in made if cell.target != OBSERVER or cell.moment == "observed"]
    return [cell for cell in made if not only or any(word in cell.name for word in only)]


def run(folder: Path, wanted: list[Cell], size: int) -> list[Cell]:
    """Carry these cells out; every one is there again, filled in."""
    matrix = Matrix(folder, size)
    try:
        for cell in wanted:
            matrix.run(cell)
            (folder / "matrix.json").write_text(json.dumps([asdict(c) for c in wanted], indent=1))
            sys.stderr.write(f"{cell.name}: {' | '.join(cell.row()[3:])}\n")
    finally:
        matrix.stop()
    return wanted


def table(done: list[Cell]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([*lines, *("| " + " | ".join(cell.row()) + " |" for cell in done)])


def main(folder: Path, only: list[str], size: int) -> int:
    done = run(folder, cells(only), size)
    sys.stdout.write(table(done) + f"\n\n{folder / 'matrix.json'}\n")
    return int(not all(cell.good for cell in done))
