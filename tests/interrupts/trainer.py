"""A small training program that runs alike on the CPU and on remote workers, and the values of its tensors after each op.

All is float64: so sums in another order differ by far less than the values of two neighbouring ops. Random numbers of remote
workers are not torch's: the program on the CPU takes those that workers draw alone, from the same seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gt

WIDTH, HIDDEN, OUT, ROWS = 24, 32, 8, 16
TOLERANCE = {"rtol": 1e-8, "atol": 1e-11}
TASKS = ("train",) * 5 + ("save", "fetch", "upload", "load")


@dataclass(frozen=True)
class Kind:
    """A kind of training.

    workers, config: of the server. mode: eager, captured, fragments, branches. micro: micro-batches of a step. draws: the step
    draws random numbers. beside: other programs train on the same workers. tasks: one of them is done when Ctrl-C is pressed.
    """

    name: str
    workers: int = 1
    config: str | None = None
    mode: str = "eager"
    optimizer: str = "sgd"
    micro: int = 1
    groups: tuple[str, str] = ("", "")
    schedule: str = ""
    backend: str = ""
    draws: bool = False
    beside: bool = False
    tasks: tuple[str, ...] = TASKS


class Noise:
    """The random numbers of a program: a dropout and a generator's, for each micro-batch."""

    def __init__(self, micro: int, device: str) -> None:
        self.rows, self.device = ROWS // micro, device
        self._generator = torch.Generator(device)
        self._drawn: Iterator[tuple[torch.Tensor, torch.Tensor]] = iter(())

    def seed(self, seed: int, count: int = 0) -> None:
        """Begin with this seed. count: micro-batches, whose numbers a program on the CPU takes from workers."""
        if self.device == "cpu":
            self._drawn = iter(_drawn(seed, count, self.rows))
        else:
            torch.manual_seed(seed)
            self._generator.manual_seed(seed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.device == "cpu":
            mask, noise = next(self._drawn)
            return x * mask + noise
        return _drop(x) + _draw(x.shape[0], self._generator)


def _drop(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.25)


def _draw(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64, device="remote") * 0.1


def _drawn(seed: int, count: int, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Masks of dropout and noise, as workers draw them."""
    torch.manual_seed(seed)
    generator = torch.Generator("remote").manual_seed(seed)
    ones = torch.ones(rows, HIDDEN, dtype=torch.float64, device="remote")
    pairs = [(_drop(ones), _draw(rows, generator)) for _ in range(count)]
    return list(zip(*(torch.stack(part).cpu() for part in zip(*pairs)))) if pairs else []


class Moments(torch.optim.Optimizer):
    """Adam without its correction of the first steps, whose numbers depend on the device."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 0.1)
                state["square"].mul_(0.95).addcmul_(p.grad, p.grad, value=0.05)
                p.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-3), value=-group["lr"])


class Trainer:
    """One program. device: "cpu" or "remote"."""

    def __init__(self, kind: Kind, seed: int, device: str, ballast: int = 0) -> None:
        self.kind, self.device = kind, device
        source = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=source, dtype=torch.float64) * 0.3

        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Linear(HIDDEN, OUT)]).double()
        with torch.no_grad():
            for parameter in self.layers.parameters():
                parameter.copy_(drawn(*parameter.shape))
        self.layers.to(device)
        self.batches = [drawn(ROWS, WIDTH) for _ in range(4)]
        self.counter = torch.zeros((), dtype=torch.float64).to(device)
        self.mean = torch.zeros(OUT, dtype=torch.float64).to(device)
        self.weight = torch.eye(max(ballast, 1), dtype=torch.float64).to(device) if ballast else None
        self.remote_batches = [batch.to(device) for batch in self.batches]
        parameters = list(self.layers.parameters())
        if kind.optimizer == "sgd":
            self.optimizer: Any = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=True)
        elif kind.optimizer == "plain":
            self.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False)
        else:
            self.optimizer = Moments(parameters, {"lr": 0.01})
        self.noise = Noise(kind.micro, device) if kind.draws else None
        self.steps = 0
        self.history: list[str] = []  # of what it has begun
        self.kept: dict[str, torch.Tensor] = {}
        self.run = self._capture() if device == "remote" and kind.mode != "eager" else self.step

    def _capture(self) -> Any:
        kind = self.kind
        return gt.compile(self.step, schedule=kind.schedule or None, backend=kind.backend or None)

    def _group(self, index: int) -> Any:
        group = self.kind.groups[index]
        return gt.signal.context(group) if group and self.device == "remote" else contextlib.nullcontext()

    def _parts(self, batch: torch.Tensor) -> Iterator[torch.Tensor]:
        if self.kind.micro == 1:
            return iter([batch])
        return gt.microbatches(batch, self.kind.micro) if self.device == "remote" else iter(batch.chunk(self.kind.micro))

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        for part in self._parts(batch):
            with self._group(0):
                x = self.layers[0](part).tanh()
                x = x if self.noise is None else self.noise(x)
            with self._group(1):
                x = self.layers[1](x)
                loss = x.square().mean()
            if self.weight is not None and self.device == "remote":
                self.weight @ self.weight
            loss.backward()
        if self.kind.mode == "fragments":
            loss.item()
        elif self.kind.mode == "branches":
            self._branch()
        self.optimizer.step()
        self.counter.add_(1)
        with torch.no_grad():
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return loss.detach()

    @torch.no_grad()
    def _branch(self) -> None:
        """What is computed depends on values that are read."""
        norm = sum(p.grad.square().sum() for p in self.layers.parameters() if p.grad is not None).item()
        if norm > 0.01:
            for parameter in self.layers.parameters():
                parameter.grad.mul_(0.1 / norm**0.5)  # type: ignore[union-attr]
        if int(self.counter.item()) % 3 == 1:
            self.mean.mul_(0.5)

    def seed(self, seed: int, steps: int) -> None:
        """Draw the numbers of this seed from now on. steps: how many of them will be drawn."""
        if self.noise is not None:
            self.noise.seed(seed, steps * self.kind.micro)

    def train(self, count: int) -> torch.Tensor:
        """So many steps more; the last one's loss."""
        for _ in range(count):
            batch = self.remote_batches[self.steps % 4]
            self.steps += 1
            self.history.append("step")
            loss = self.run(batch)
        return loss

    def keep(self, path: Path) -> None:
        """Save the state: on the CPU in this object."""
        self.history.append("keep")
        if self.device == "remote":
            gt.save(self.tensors(), path)
            self.kept = self.tensors()
        else:
            self.kept = {name: tensor.clone() for name, tensor in self.tensors().items()}

    def restore(self, path: Path) -> None:
        """Go back to the state that was kept."""
        self.history.append("restore")
        if self.device == "remote":
            gt.load(path, self.kept)
            return
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                if name in self.kept:
                    tensor.copy_(self.kept[name])

    def repeat(self, history: list[str], path: Path) -> None:
        """Do what another has begun."""
        for what in history:
            if what == "step":
                self.train(1)
            else:
                getattr(self, what)(path)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Lasting tensors: weights, the optimizer's state, a counter and a running mean."""
        named = {f"weight {n}": p.detach() for n, p in enumerate(self.layers.parameters())}
        for n, parameter in enumerate(self.layers.parameters()):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    named[f"{key} {n}"] = value
        return {**named, "counter": self.counter, "mean": self.mean}


class Versions(TorchDispatchMode):
    """The values of some tensors after each op of a program on the CPU: name -> [(number of the op, value)]."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.trainer, self.now = trainer, 0
        self.seen: dict[str, list[tuple[int, torch.Tensor]]] = {}
        self.marks: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.now += 1
        if func._schema.is_mutable:
            self.note()
        return result

    def note(self) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            for name, tensor in self.trainer.tensors().items():
                rows = self.seen.setdefault(name, [])
                if not rows or not torch.equal(rows[-1][1], tensor):
                    rows.append((self.now, tensor.clone()))

    def intervals(self, name: str, value: torch.Tensor) -> list[tuple[int, int]]:
        """Intervals of ops after which the tensor had this value; for one that the optimizer had not made yet: until then."""
        rows = self.seen.get(name, [])
        ends = [*(start for start, _ in rows[1:]), self.now + 1]
        return [
            (start, end)
            for (start, expected), end in zip(rows, ends)
            if expected.shape == value.shape and torch.allclose(expected, value, **TOLERANCE)
        ]


def common(choices: list[list[tuple[int, int]]]) -> int | None:
    """A number of an op that is in one interval of each list."""
    starts = sorted({start for intervals in choices for start, _ in intervals}, reverse=True)
    return next((at for at in starts if all(any(a <= at < b for a, b in intervals) for intervals in choices)), None)
