"""Random interrupts of training programs: afterwards values are those of a prefix of the program, or fail with a reason.

An interrupt comes at a random time, or at a random line of the client's own code, where the interpreter could deliver it.
"""

from __future__ import annotations

import _thread
import gc
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import gt
from gt import api
from gt.client.groups.group_context import stack
from gt.errors import GTError, OpFailed
from tests.attacks.beside import START, Trainers
from tests.helpers.limits import limit
from tests.interrupts.trainer import TOLERANCE, Kind, Trainer, Versions, common

TP = "s: {workers: [0, 1]}\ns_colpar: {workers: [0, 1]}\ns_rowpar: {workers: [0, 1]}\n"
PP = "stage0: {workers: [0]}\nstage1: {workers: [1]}\n"
PPDP = "stage0: {workers: [0, 1]}\nstage1: {workers: [2, 3]}\ngt: {zero: 1}\n"
STAGES, SHARDS = ("stage0", "stage1"), ("s_colpar", "s_rowpar")


def zero(stage: int, workers: int = 2, more: str = "") -> str:
    return f"gt: {{data_parallel: {[*range(workers)]}, zero: {stage}{more}}}"


LAYOUTS: list[dict[str, Any]] = [
    {"name": "one"},
    {"name": "dp", "workers": 2, "config": "gt: {data_parallel: [0, 1]}"},
    {"name": "zero1", "workers": 2, "config": zero(1)},
    {"name": "zero2", "workers": 2, "config": zero(2)},
    {"name": "zero3", "workers": 2, "config": zero(3)},
    {"name": "zero3 on four", "workers": 4, "config": zero(3, 4)},
    {"name": "offload", "workers": 2, "config": zero(2, 2, ", offload: {optimizer: cpu}")},
    {"name": "tp", "workers": 2, "config": TP, "groups": SHARDS},
    {"name": "pp", "workers": 2, "config": PP, "groups": STAGES, "micro": 4},
    {"name": "pp with zero", "workers": 4, "config": PPDP, "groups": STAGES, "micro": 2},
    {"name": "draws", "workers": 2, "config": "gt: {data_parallel: [0, 1]}", "draws": True},
    {"name": "draws in tp", "workers": 2, "config": TP, "groups": SHARDS, "draws": True},
    {"name": "draws in pp", "workers": 2, "config": PP, "groups": STAGES, "micro": 4, "draws": True},
    {"name": "branches", "workers": 2, "config": "gt: {data_parallel: [0, 1]}", "mode": "branches"},
    {"name": "branches in zero3", "workers": 2, "config": zero(3), "mode": "branches"},
    {"name": "inductor", "mode": "captured", "backend": "inductor"},
    {"name": "inductor in zero1", "workers": 2, "config": zero(1), "mode": "captured", "backend": "inductor"},
    {"name": "files", "workers": 2, "config": zero(3), "tasks": ("save", "save twice", "load", "restore")},
    {"name": "sessions", "workers": 2, "config": "gt: {data_parallel: [0, 1]}", "beside": True},
    {"name": "sessions in pp", "workers": 2, "config": PP, "groups": STAGES, "micro": 4, "beside": True},
]
MODES: list[dict[str, Any]] = [
    {"mode": "eager"},
    {"mode": "eager", "optimizer": "plain"},
    {"mode": "eager", "optimizer": "adam", "micro": 2},
    {"mode": "captured"},
    {"mode": "captured", "optimizer": "adam"},
    {"mode": "fragments"},
    {"mode": "fragments", "optimizer": "adam", "micro": 2},
    {"mode": "branches", "optimizer": "plain"},
]


class Wrong(AssertionError):
    """The claim does not hold."""


@dataclass
class Case:
    """One case: its settings, as drawn from the seed, and its outcome."""

    kind: Kind
    seed: int
    warm: int
    steps: int
    line: int  # of the client's code, at which Ctrl-C is pressed; 0: at a time
    delay: float
    presses: int
    ballast: int
    task: str
    interrupted: bool = False
    where: str = ""
    failed: list[str] = field(default_factory=list)
    dropped: bool = False  # ops of the program were

    def __str__(self) -> str:
        kind = self.kind
        way = f"line {self.line}" if self.line else f"{self.delay:.4f} s"
        return (
            f"seed {self.seed}: {kind.name}, {kind.mode} {kind.backend} {kind.schedule} {kind.optimizer}, micro {kind.micro}, "
            f"warm {self.warm}, steps {self.steps}, ballast {self.ballast}, {self.task}, {self.presses} at {way} {self.where}"
        )


def draw(layout: dict[str, Any], seed: int) -> Case:
    rng = random.Random(seed)
    kind = Kind(**{**rng.choice(MODES), **layout})
    if kind.groups == STAGES and kind.mode == "captured" and not kind.backend:
        kind = Kind(**{**kind.__dict__, "schedule": rng.choice(["1f1b", "gpipe", ""])})
    line = rng.choice([0, 0, rng.randrange(1, 400), rng.randrange(1, 6000)])
    delay = rng.choice([0.002, 0.02, 0.1, 0.3]) * rng.random()
    return Case(
        kind, seed, rng.choice([0, 1, 2, 4, 6]), rng.choice([1, 3, 8, 20]), line, delay,
        rng.choice([1, 1, 1, 2, 4]), rng.choice([0, 200, 400]), rng.choice(kind.tasks),
    )  # fmt: skip


class Presser:
    """Presses Ctrl-C in the main thread: at a line of gt's code that the main thread comes to, or after a time."""

    def __init__(self, case: Case) -> None:
        self.case, self.left, self.lines = case, case.presses, case.line
        self.done = threading.Event()
        self.rng = random.Random(case.seed)
        self.thread: threading.Thread | None = None

    def __enter__(self) -> Presser:
        if self.lines:
            sys.settrace(self._call)
        else:
            self.thread = threading.Thread(target=self._press)
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self.left = 0
        self.done.set()
        if self.thread is not None:
            self.thread.join()

    def _press(self) -> None:
        wait = self.case.delay
        while self.left > 0 and not self.done.wait(wait):
            self.left -= 1
            _thread.interrupt_main()
            wait = self.rng.choice([0.0, 0.001, 0.01])

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if "/gt/" not in frame.f_code.co_filename or self.left <= 0:
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "line" or self.left <= 0:
            return self._line
        self.lines -= 1
        if self.lines <= 0:
            self.left -= 1
            self.lines = self.rng.choice([1, 5, 50])
            name = frame.f_code.co_filename.rpartition("/gt/")[2]
            self.case.where += f"[{name}:{frame.f_lineno} {frame.f_code.co_name}]"
            sys.settrace(None)
            _thread.interrupt_main()
        return self._line


def patiently(call: Callable[[], Any]) -> Any:
    """Call until no Ctrl-C is left that comes late."""
    for _ in range(20):
        try:
            return call()
        except KeyboardInterrupt:
            continue
    raise Wrong("Ctrl-C has no end")


class Engine:
    """Cases on one server."""

    def __init__(self, layout: dict[str, Any]) -> None:
        self.layout = layout
        self.counts: Counter[str] = Counter()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "state"
        self.beside = Trainers(Path(self.folder.name)) if layout.get("beside") else None

    def __enter__(self) -> Engine:
        gt.cpu_workers(self.layout.get("workers", 1), self.layout.get("config"))
        (torch.ones(3).to("remote") + 1).sum().item()
        if self.beside is not None:
            self.beside.start()
            self._look_beside(START)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.beside is not None:
                self._look_beside(START)
                self.counts["losses beside"] = self.beside.losses
        finally:
            if self.beside is not None:
                self.beside.stop()
            gt.shutdown()
            self.folder.cleanup()

    def _look_beside(self, seconds: float = 0.0) -> None:
        """What other sessions on this server have trained is right to the bit, whatever is interrupted here."""
        assert self.beside is not None and api._Started.local is not None
        self.beside.ask(api._Started.local)
        signs = self.beside.collect(seconds, limit=limit(START))
        if signs:
            raise Wrong("; ".join(f"{sign.kind}: {sign.text}" for sign in signs))

    def run(self, seed: int) -> Case:
        case = draw(self.layout, seed)
        try:
            patiently(lambda: None)
            self._run(case)
            if self.beside is not None:
                self._look_beside()
        except Exception as error:
            raise Wrong(f"{case}: {type(error).__name__}: {error}") from error
        self.counts["cases"] += 1
        self.counts["interrupted"] += case.interrupted
        self.counts["with dropped ops"] += case.dropped
        self.counts["with failed tensors"] += bool(case.failed)
        gc.collect()
        return case

    # ---- one case

    def _run(self, case: Case) -> None:
        remote = Trainer(case.kind, case.seed, "remote", case.ballast)
        remote.seed(case.seed, 0)
        if case.warm:
            remote.train(case.warm).item()
        if case.task in ("save", "save twice", "load", "restore"):
            remote.keep(self.path)
        saved: Any = None
        saves = [remote.steps]  # steps before each save that may be in the folder
        try:
            with Presser(case):
                remote.train(case.steps)
                if case.task.startswith("save"):
                    saves.append(remote.steps)
                    saved = gt.save(remote.tensors(), self.path, wait=False)
                    remote.train(case.steps)
                self._do(case, remote, saves)
                remote.train(1).item()
        except KeyboardInterrupt:
            case.interrupted = True
        patiently(lambda: None)
        if stack.scope().changes:
            raise Wrong(f"group {stack.scope().group!r} is still entered, micro-batch {stack.scope().micro}")
        # Ctrl-C in torch.no_grad().__enter__ leaves this off, on every device
        self.counts["grad mode off"] += not torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        versions, plain = patiently(lambda: self._plain(case, remote))
        at = patiently(lambda: self._check(case, remote, versions))
        if "keep" in remote.history:
            self._check_saved(case, saved, versions, saves)
        self._go_on(case, remote, plain, versions, at)

    def _do(self, case: Case, remote: Trainer, saves: list[int]) -> None:
        """The task of a case that is more than training."""
        if case.task == "save twice":
            saves.append(remote.steps)
            gt.save(remote.tensors(), self.path)
        elif case.task == "load":
            gt.load(self.path)
        elif case.task == "restore":
            remote.restore(self.path)
        elif case.task == "fetch":
            for tensor in remote.tensors().values():
                tensor.cpu()
        elif case.task == "upload":
            rows = [torch.full((3000, 50), float(n)).to("remote") for n in range(6)]
            [row.sum().item() for row in rows]

    def _plain(self, case: Case, remote: Trainer) -> tuple[Versions, Trainer]:
        plain = Trainer(case.kind, case.seed, "cpu")
        plain.seed(case.seed, remote.steps)
        with Versions(plain) as versions:
            versions.note()
            plain.repeat(remote.history, self.path)
            versions.note()
        return versions, plain

    def _check(self, case: Case, remote: Trainer, versions: Versions) -> int:
        """Number of an op of the program of which all values are the state."""
        choices, names = [], []
        case.failed = []
        for name, tensor in remote.tensors().items():
            if name not in versions.seen:
                continue
            try:
                value = tensor.cpu()
            except OpFailed as error:
                if "interrupt" not in str(error):
                    raise
                case.failed.append(f"{name}: {error}")
                continue
            intervals = versions.intervals(name, value)
            if not intervals:
                rows = versions.seen[name]
                near = min((float((value - row).abs().max()), at) for at, row in rows if row.shape == value.shape)
                raise Wrong(f"{name} has a value that it never had: nearest {near} of {len(rows)}, {value.flatten()[:3]}")
            choices.append(intervals)
            names.append(name)
        at = common(choices)
        if at is None:
            shown = "; ".join(f"{name} {intervals}" for name, intervals in zip(names, choices))
            raise Wrong(f"values are of no common prefix of {versions.now} ops: {shown}; failed {case.failed}")
        case.dropped = at < max(rows[-1][0] for rows in versions.seen.values())
        if (case.failed or case.dropped) and not case.interrupted:
            raise Wrong(f"without an interrupt ops were dropped: {case.failed}")
        return at

    def _check_saved(self, case: Case, saved: Any, versions: Versions, saves: list[int]) -> None:
        """The folder has one whole checkpoint with values of the place of its save. A save that succeeded is not lost."""
        if saved is not None:
            try:
                patiently(saved.wait)
                saves = saves[1:]
            except (GTError, RuntimeError) as error:
                if not case.interrupted:
                    raise
                case.failed.append(f"save: {error}")
        if not case.interrupted:
            saves = saves[-1:]
        loaded = patiently(lambda: {name: t.cpu() for name, t in gt.load(self.path, device="cpu").items()})
        marks = [versions.intervals(name, value) for name, value in loaded.items()]
        if not all(marks) or common(marks) is None:
            raise Wrong(f"a checkpoint has values of no prefix: {[bool(m) for m in marks]}, {saves}")
        if int(loaded["counter"]) not in saves:
            raise Wrong(f"a checkpoint has values of step {int(loaded['counter'])}, want one of {saves}")
        beside = [path.name for path in self.path.parent.iterdir() if path.name.startswith(".state")]
        if beside:
            raise Wrong(f"saves have left {beside}")

    def _go_on(self, case: Case, remote: Trainer, plain: Trainer, versions: Versions, at: int) -> None:
        """Two steps more, from the state that there is, on workers and by plain torch."""

        def state_at(name: str) -> torch.Tensor:
            return next(value for start, value in reversed(versions.seen[name]) if start <= at)

        def restore() -> None:
            with torch.no_grad():
                for name, tensor in remote.tensors().items():
                    if name in versions.seen and any(line.startswith(f"{name}:") for line in case.failed):
                        tensor.copy_(state_at(name))
                for parameter in remote.layers.parameters():
                    parameter.grad = None
                    for key in [k for k in remote.optimizer.state.get(parameter, {}) if not _held(remote, parameter, k)]:
                        del remote.optimizer.state[parameter][key]

        patiently(restore)
        plain.steps = remote.steps
        current = patiently(lambda: {name: tensor.cpu().clone() for name, tensor in remote.tensors().items()})
        with torch.no_grad():
            for parameter in plain.layers.parameters():
                parameter.grad = None
            for n, (mine, theirs) in enumerate(zip(plain.layers.parameters(), remote.layers.parameters())):
                state = remote.optimizer.state.get(theirs)
                if not state:
                    plain.optimizer.state.pop(mine, None)
                else:
                    plain.optimizer.state[mine] = {
                        key: current[f"{key} {n}"] if isinstance(value, torch.Tensor) else value for key, value in state.items()
                    }
            for name, tensor in plain.tensors().items():
                if name in current and (name.startswith("weight") or name in ("counter", "mean")):
                    tensor.copy_(current[name])
        patiently(lambda: plain.seed(case.seed + 1, 2))
        remote.seed(case.seed + 1, 2)
        wanted = plain.train(2)
        got = remote.train(2).cpu()
        if not torch.allclose(got, wanted, **TOLERANCE):
            raise Wrong(f"steps that follow give a loss of {got}, plain torch {wanted}")
        for name, tensor in remote.tensors().items():
            expected, value = plain.tensors()[name], tensor.cpu()
            if not torch.allclose(value, expected, **TOLERANCE):
                raise Wrong(f"after two more steps {name} differs by {float((value - expected).abs().max())}")


def _held(trainer: Trainer, parameter: torch.Tensor, key: str) -> bool:
    """True if a tensor of the optimizer's state can be read."""
    value = trainer.optimizer.state[parameter][key]
    if not isinstance(value, torch.Tensor):
        return True
    try:
        value.cpu()
    except OpFailed:
        return False
    return True


def layouts(names: list[str]) -> Iterator[dict[str, Any]]:
    return (layout for layout in LAYOUTS if not names or layout["name"] in names)
