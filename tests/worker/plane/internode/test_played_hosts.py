"""A program on workers of two hosts whose tensors are in a device's memory, over a real server: placements, capture, a loss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import gt
from gt import env
from gt.dispatcher.server import Server
from gt.errors import GTError
from gt.wire import liveness
from tests.helpers.limits import limit

CONFIG = """
dp: {shard: {axis: 0, workers: [0, 1, 2, 3]}}
tp_colpar: {shard: {axis: 1, workers: [1, 2]}}
tp_rowpar: {shard: {axis: 0, workers: [1, 2]}}
one3: {workers: [3]}
"""


@pytest.fixture
def played() -> Iterator[tuple[str, list[int]]]:
    """The address of a server with workers 0 and 1 on one host, 2 and 3 on another; their pids."""
    server = Server(heartbeat=10.0)
    thread = threading.Thread(target=server.run, name="gt-test-server")
    thread.start()
    line = [sys.executable, "-m", "tests.worker.plane.internode.played_worker", str(server.port), "aabb"]
    workers = subprocess.Popen(line, env=env.child(GT_IFNAME="lo"), stdout=subprocess.PIPE, text=True)
    try:
        assert workers.stdout is not None
        yield f"{server.host}:{server.port}", list(map(int, workers.stdout.readline().split()))
    finally:
        gt.shutdown()
        server.stop("the test is over")
        thread.join()
        workers.communicate(timeout=limit(30))


def alive(pid: int) -> bool:
    return liveness.sight(pid, liveness.home()).state not in ("", "Z")


def step(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return loss.detach()


def losses(device: str, context: str, captured: bool) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64))
    data = [torch.randn(32, 64, generator=torch.Generator().manual_seed(n)) for n in range(5)]
    if device == "cpu":
        return [step(model, x).item() for x in data]
    with gt.signal.context(context):
        model = model.to("remote")
        run = gt.compile(step, backend="eager") if captured else step
        return [run(model, x.to("remote")).item() for x in data]


@pytest.mark.parametrize("captured", [False, True])
def test_hosts_of_devices_train_as_one_process(played, captured: bool) -> None:
    address, workers = played
    gt.connect(address, CONFIG, workers=4)
    want = losses("cpu", "", False)
    torch.testing.assert_close(torch.tensor(losses("remote", "dp", captured)), torch.tensor(want))
    rows = gt.stats()["workers"]
    far = "host memory, tcp 127.0.0.1 to 127.0.0.1"
    assert rows[0]["ways"] == {"w1": "shm", "w2": far, "w3": far} and {row["transport"] for row in rows} == {"net"}
    assert rows[0]["bytes_sent"]["w2"] > 0 and rows[0]["collectives"]["all_reduce"] > 0
    with gt.signal.context("tp_colpar"):
        a = torch.arange(12.0, device="remote").view(3, 4) * 1
    with gt.signal.context("one3"):
        moved = a * 2
    assert moved.cpu().tolist() == (torch.arange(12.0).view(3, 4) * 2).tolist()
    if not captured:
        os.kill(workers[3], signal.SIGKILL)
        with pytest.raises(GTError, match="w3"):
            moved.sum().item()
        with gt.signal.context("tp_colpar"):
            assert (a + 1).cpu().tolist() == (torch.arange(12.0).view(3, 4) + 1).tolist()
        assert all(map(alive, workers[:3])), "processes of a lost host's peers live on"
