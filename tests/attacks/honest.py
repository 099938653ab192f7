"""Honest programs beside an attack: trainers whose every loss is compared with the loss of the same program alone.

`python -m tests.attacks.honest` reads one order, a JSON line {"folder", "pipes": {mode: [descriptor to read, to write]}}, and
forks one child a mode. A child does one round for each line {"address", "token"} that it reads, and answers with a line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gt.launch.process import fork
from tests.attacks.record import Recorder

CALLS, PARTS, AGAIN = 6, 2, 4  # steps a round, micro-batches of a step, rounds of one session
CONFIGS = {
    "eager": (
        "tp: {shard: {axis: 0, workers: [0, 1]}}\ntp_colpar: {shard: {axis: 1, workers: [0, 1]}}\n"
        "tp_rowpar: {shard: {axis: 0, workers: [0, 1]}}\n"
    ),
    "captured": "",
    "pipelined": "pp_stage0: {shard: {axis: 0, workers: [0]}}\npp_stage1: {shard: {axis: 0, workers: [1]}}\n",
}
GROUPS = {"eager": ("tp_colpar", "tp_rowpar"), "captured": ("", ""), "pipelined": ("pp_stage0", "pp_stage1")}


def train(mode: str, device: str) -> list[float]:
    """The losses of one round: a perceptron of two layers, its step executed as the mode says."""
    import torch

    import gt

    torch.manual_seed(0)
    first, second = (torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)) if device == "cpu" else _remote_layers()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    generator = torch.Generator().manual_seed(1)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if device == "cpu":
            return torch.nn.functional.cross_entropy(second(torch.relu(first(x))), y)
        one, two = GROUPS[mode]
        with gt.signal.context(one or "none"):
            hidden = torch.relu(first(x))
        with gt.signal.context(two or "none"):
            return torch.nn.functional.cross_entropy(second(hidden), y)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        if device == "cpu" or mode != "pipelined":
            total = loss_of(x, y)
            total.backward()
        else:
            total = torch.zeros((), device="remote")
            for a, b in gt.microbatches((x, y), PARTS):
                loss = loss_of(a, b) / PARTS
                loss.backward()
                total = total + loss.detach()
        optimizer.step()
        return total

    if device != "cpu" and mode != "eager":
        run: Callable = gt.compile(step, schedule="1f1b") if mode == "pipelined" else gt.compile(step)
    else:
        run = step
    losses = []
    for _ in range(CALLS):
        x, y = torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)
        losses.append(run(x.to(device), y.to(device)).item())
    return losses


def _remote_layers() -> tuple[Any, Any]:
    import torch

    return torch.nn.Linear(16, 32).to("remote"), torch.nn.Linear(32, 4).to("remote")


class Trainer:
    """One mode's rounds. The losses of the first, which is alone, are those that all others have to have."""

    def __init__(self, mode: str, folder: Path) -> None:
        self.mode, self.folder = mode, folder
        self.local = train(mode, "cpu")
        self.want: list[float] = []
        self.number = 0
        self.server = ""  # the one it is connected to
        self.config = folder / f"{mode}.yaml"
        self.config.write_text(CONFIGS[mode])

    def round(self, address: str, token: str) -> dict[str, Any]:
        """Train once: {} if every loss was right, else what was wrong."""
        import gt

        recorder = None if self.number else Recorder()
        self.number += 1
        try:
            if self.server != address:
                gt.shutdown()
                gt.connect(address, config=str(self.config) if CONFIGS[self.mode] else "", token=token)
                self.server = address
            losses = train(self.mode, "remote")
            if recorder is not None:
                _ask_everything()
                recorder.save(self.folder / f"{self.mode}.traffic")
            if self.number % AGAIN == 0:
                self.leave()
        except gt.GTError as error:
            self.leave()
            return {"error": f"{type(error).__name__}: {error}"[:600]}
        except Exception as error:  # an error of torch's or Python's, which no honest program should see
            self.leave()
            return {"error": f"not an error of GT: {type(error).__name__}: {error}"[:600]}
        return self.compared(losses)

    def leave(self) -> None:
        import gt

        self.server = ""
        gt.shutdown()

    def compared(self, losses: list[float]) -> dict[str, Any]:
        if not self.want:
            self.want = losses
            far = max(abs(a - b) for a, b in zip(losses, self.local, strict=True)) > 1e-4
            return {"wrong": f"{losses}, one process {self.local}"} if far else {}
        return {} if losses == self.want else {"wrong": f"{losses}, alone {self.want}"}


def work(mode: str, folder: Path, orders: int, answers: int) -> None:
    """A child: one round a line, until there are no more."""
    trainer = Trainer(mode, folder)
    for line in os.fdopen(orders):
        begin = time.monotonic()
        answer = trainer.round(**json.loads(line))
        answer = {"mode": mode, "losses": CALLS, "seconds": round(time.monotonic() - begin, 3), **answer}
        os.write(answers, json.dumps(answer).encode() + b"\n")


def _ask_everything() -> None:
    """The rest of the protocol, for the recording: host copies, questions, a large value."""
    import torch

    import gt

    large = torch.arange(1 << 19, dtype=torch.float32).to("remote")
    (large * 2).sum().item()
    kept = torch.ones(64, 64).to("remote")
    gt.inspect(kept)
    gt.stats()
    kept.nonzero().shape
    (large + 1).cpu()
    reads = gt.compile(lambda x: x + 1 if (x * 2).sum().item() > 0 else x)
    for _ in range(4):
        reads(kept)
    reads.explain()
    del large, kept
    torch.ones(3, device="remote").sum().item()


def main() -> int:
    order = json.loads(sys.stdin.readline())
    import torch  # once, for all of them

    import gt  # noqa: F401

    torch.set_num_threads(1)
    children = []
    for mode, (orders, answers) in order["pipes"].items():
        body = partial(work, mode, Path(order["folder"]), orders, answers)
        children.append(fork(f"honest {mode}", body))
    sys.stdin.read()  # until whoever started this ends it
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
