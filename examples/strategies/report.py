"""Output of finetune.py: lines of batches, a summary of each epoch, and the comparison of strategies as table and picture."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import Theory

import gt

WARM = 3  # steps before speed is measured: the first ones plan, and make the optimizer's state


def size(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


# ---- memory


@dataclass
class WorkerMemory:
    """Bytes of one worker. allocated: tensors; reserved: of the process or GPU; peak: most at once; away: offloaded."""

    name: str
    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    away: int = 0


class MemoryWatch:
    """Memory of the first `workers` workers. GPUs count their peak; of CPU workers the largest of several looks is taken."""

    def __init__(self, workers: int) -> None:
        self.rows = [WorkerMemory(f"w{index}") for index in range(workers)]

    def look(self) -> list[WorkerMemory]:
        """Waits for all ops before."""
        torch.remote.synchronize()
        for row, worker in zip(self.rows, gt.stats()["workers"], strict=False):
            row.name, row.allocated = worker["name"], worker.get("live_bytes", 0)
            row.reserved = max(worker.get("memory_used", 0), row.allocated)
            row.peak = max(row.peak, worker.get("peak_bytes", 0), row.allocated)
            row.away = sum(worker.get("offloaded", {}).values())
        return self.rows


# ---- lines and summaries


@dataclass
class Progress:
    """Losses of all steps, and the line every few steps. Losses are fetched together, so that steps need not wait."""

    every: int
    tokens: int  # of a batch
    losses: list[float] = field(default_factory=list)
    waiting: list[torch.Tensor] = field(default_factory=list)
    begun: float = 0.0  # when the first step began
    since: float = 0.0  # when the steps of the next line began
    warm: tuple[int, float] | None = None  # number of steps before speed is measured, and when they ended
    ended: float = 0.0

    def begin(self) -> None:
        self.since = time.perf_counter()
        self.begun = self.begun or self.since

    def step(self, epoch: int, batch: int, count: int, loss: torch.Tensor, rate: float) -> None:
        """A step is issued. Prints a line for every `every`-th and for the last batch."""
        self.waiting.append(loss)
        steps = len(self.losses) + len(self.waiting)
        if batch % self.every and batch != count - 1 and steps != WARM:
            return
        waited = len(self.waiting)
        self.fetch()
        took, self.since = self.ended - self.since, self.ended
        if batch % self.every == 0 or batch == count - 1:
            speed = f"{waited * self.tokens / took:.0f} tokens/s"
            loss_text = f"Loss: {self.losses[-1]:.4f}"
            print(f"Epoch {epoch + 1} | Batch {batch}/{count} | {loss_text} | LR: {rate:.2e} | {speed}", flush=True)

    def fetch(self) -> None:
        """All losses so far; waits for their steps."""
        if self.waiting:
            self.losses += torch.stack(self.waiting).tolist()
            self.waiting.clear()
        self.ended = time.perf_counter()
        if self.warm is None and len(self.losses) >= WARM:
            self.warm = len(self.losses), self.ended

    def speed(self) -> float:
        """Steps a second, without the first ones if there are more."""
        steps, since = self.warm if self.warm and self.warm[0] < len(self.losses) else (0, self.begun)
        return (len(self.losses) - steps) / (self.ended - since) if self.losses else 0.0


def summary(epoch: int, losses: list[float], seconds: float, samples: int, length: int, memory: list[WorkerMemory]) -> None:
    """The end of an epoch: loss, time, samples/s, and the memory of each worker."""
    rate = samples / seconds
    print(f"\nEpoch {epoch + 1} summary")
    print(f"   Average loss: {sum(losses) / max(len(losses), 1):.4f}")
    print(f"   Time: {seconds:.2f} s, {rate:.2f} samples/s, {rate * length:.0f} tokens/s")
    for row in memory:
        away = f" | {size(row.away)} offloaded" if row.away else ""
        used = f"{size(row.allocated)} allocated | {size(row.reserved)} reserved | {size(row.peak)} peak"
        print(f"   Memory of {row.name}: {used}{away}")
    print(flush=True)


# ---- comparison


@dataclass
class Outcome:
    """One strategy's run. memory: of the worker with the highest peak. error: why there are no figures, "" if there are."""

    strategy: str
    theory: Theory | None = None
    memory: WorkerMemory | None = None
    samples_a_second: float = 0.0
    losses: list[float] = field(default_factory=list)
    error: str = ""


HEAD = ("strategy", "kept, theory", "kept", "backward, theory", "peak", "offloaded", "samples/s", "last loss")


def table(outcomes: list[Outcome]) -> str:
    """Memory of a worker and speed, a line a strategy."""
    rows = [HEAD]
    for outcome in outcomes:
        if outcome.error or outcome.theory is None or outcome.memory is None:
            rows.append((outcome.strategy, outcome.error, *[""] * (len(HEAD) - 2)))
            continue
        theory, memory = outcome.theory, outcome.memory
        figures = (theory.kept, memory.allocated, theory.backward, memory.peak, memory.away)
        speed, loss = f"{outcome.samples_a_second:.2f}", f"{outcome.losses[-1]:.4f}"
        rows.append((outcome.strategy, *map(size, figures), speed, loss))
    complete = [row for row in rows if row[-1]]
    widths = [max(len(row[column]) for row in complete) for column in range(len(HEAD))]
    widths[0] = max(len(row[0]) for row in rows)
    lines = ([text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(outcomes: list[Outcome], path: Path, title: str) -> str:
    """Write memory and speed as bars. A sentence for people: the path, or why there is no picture."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return "matplotlib is not installed, so there is no picture: pip install matplotlib"
    good: list[Any] = [outcome for outcome in outcomes if not outcome.error]
    names, places = [outcome.strategy for outcome in good], range(len(good))
    figure = Figure(figsize=(11, 4), layout="constrained")
    memory, speed = figure.subplots(1, 2)
    bars = (
        ("kept after a step", [outcome.memory.allocated for outcome in good]),
        ("peak of a step", [outcome.memory.peak for outcome in good]),
        ("offloaded", [outcome.memory.away for outcome in good]),
    )
    for number, (label, heights) in enumerate(bars):
        memory.bar([place + 0.27 * (number - 1) for place in places], [n / 2**20 for n in heights], 0.27, label=label)
    memory.set(title="memory of a worker", ylabel="MiB", xticks=list(places), xticklabels=names)
    memory.legend()
    speed.bar(list(places), [outcome.samples_a_second for outcome in good], color="tab:green")
    speed.set(title="speed", ylabel="samples/s", xticks=list(places), xticklabels=names)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        return f"the picture {path} could not be written: {error}"
    return f"picture: {path}"
