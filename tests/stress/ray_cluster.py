"""Ray with two nodes and a killed actor: `python -m tests.stress.ray_cluster` prints ok if training goes on. Needs ray.

The nodes are processes of this machine. Losses are compared with the same training without an interruption.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from pathlib import Path

import torch

import gt
from tests.helpers.processes import read

CONFIG = "all: {workers: [0, 1]}\n"
STEPS, KILLED_BEFORE, SECONDS = 12, 6, 120.0


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True).sin()


def train_step(net: torch.nn.Module, step: int, device: str) -> float:
    x, y = (t.to(device) for t in batch(step))
    with gt.signal.context("all"):
        loss = torch.nn.functional.mse_loss(net(x), y)
    net.zero_grad()
    loss.backward()
    with torch.no_grad():
        for weight in net.parameters():
            weight -= 0.1 * weight.grad
    return loss.item()


def state_of(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.cpu() for key, value in net.state_dict().items()}


def train() -> tuple[list[float], list[str]]:
    """Losses, and the errors that the loss of a worker led to. A state on the CPU is the checkpoint."""
    net = model().to("remote")
    losses, errors, saved = [], [], state_of(net)
    until = time.monotonic() + SECONDS
    while len(losses) < STEPS:
        if len(losses) == KILLED_BEFORE and not errors:
            os.kill(worker_processes()[0], signal.SIGKILL)
        try:
            losses.append(train_step(net, len(losses), "remote"))
            saved = state_of(net)
        except gt.WorkerLost as error:
            errors.append(str(error))
            if time.monotonic() > until:
                raise
            net = reload(saved, until)
            del losses[KILLED_BEFORE:]
    return losses, errors


def reload(saved: dict[str, torch.Tensor], until: float) -> torch.nn.Module:
    """The model of the checkpoint on workers, once the lost one is back."""
    while True:
        net = model()
        net.load_state_dict(saved)
        try:
            net = net.to("remote")
            train_step(copy.deepcopy(net), 0, "remote")  # a trial, which changes no weight
            return net
        except gt.WorkerLost:
            if time.monotonic() > until:
                raise


def worker_processes() -> list[int]:
    """Pids of the actors of workers: both nodes are of this machine."""
    titles = ((int(path.parent.name), read(path)) for path in Path("/proc").glob("[0-9]*/cmdline"))
    return [pid for pid, title in titles if title.startswith(b"ray::WorkerActor")]


def main() -> int:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 80_000_000})
    cluster.add_node(num_cpus=2, object_store_memory=80_000_000)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        begin = time.monotonic()
        gt.ray.start(workers=2, config=CONFIG, placement="STRICT_SPREAD")
        print(f"two workers on two nodes after {time.monotonic() - begin:.1f} s", flush=True)
        losses, errors = train()
        wanted = [train_step(net, step, "cpu") for net in [model()] for step in range(STEPS)]
        worst = max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))
        print(f"{len(errors)} errors, the first: {errors[0] if errors else 'none'}", flush=True)
        good = worst < 1e-4 and bool(errors) and ("w0" in errors[0] or "w1" in errors[0])
        print(f"{'ok' if good else 'fails'}: {STEPS} steps, largest difference {worst:.1e}", flush=True)
        return int(not good)
    finally:
        gt.ray.stop()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
