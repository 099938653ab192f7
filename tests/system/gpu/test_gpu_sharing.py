"""GPU workers that programs share: one after the other on an exclusive server, each on an empty GPU, and side by side."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import pytest
import torch

import gt
from gt.launch import local
from tests.helpers.limits import limit

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a CUDA device")]

PROGRAM = """
import sys, torch, gt
gt.connect(sys.argv[1], config="", workers=int(sys.argv[2]))
(*rows,) = gt.stats()["workers"]
assert all(row["device"] == "cuda" for row in rows), rows
assert gt.ones(4).sum().item() == 4  # the worker has its context
free, total = torch.cuda.mem_get_info(0)
print(total - free)
x = torch.full((1 << 28,), 7.0, device="remote")  # 1 GiB, which is there when the program ends
assert x[-1].item() == 7.0
"""


@pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1, reason="memory of the whole GPU is compared: run it without -n"
)
def test_a_gpu_worker_starts_afresh_with_an_empty_gpu():
    count = min(GPUS, 2)
    environment = {**os.environ, "GT_TOKEN": "a token of this test's own"}
    line = [sys.executable, "-m", "gt.server", "-p", "0", "--sharing", "exclusive"]
    server = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    address = server.stdout.readline().split()[-1]
    line = [sys.executable, "-m", "gt.worker", "-p", address.rpartition(":")[2], "--device", "cuda:0"]
    workers = [
        subprocess.Popen(line, stderr=subprocess.DEVNULL, env={**environment, "CUDA_VISIBLE_DEVICES": str(number)})
        for number in range(count)
    ]
    try:
        taken = []
        for _ in range(3):
            line = [sys.executable, "-c", PROGRAM, address, str(count)]
            done = subprocess.run(line, capture_output=True, text=True, timeout=limit(200), env=environment)
            assert done.returncode == 0, done.stderr[-4000:]
            taken.append(int(done.stdout))
        assert all(worker.poll() is None for worker in workers), "the same processes"
        # of the whole GPU, where other processes come and go: what programs left behind would be taken in each later one
        assert min(taken[1:]) - taken[0] < 512 << 20, f"memory of programs that have ended is still taken: {taken}"
    finally:
        server.terminate()
        server.communicate(timeout=limit(30))
        for worker in workers:
            worker.terminate()
            worker.wait(limit(30))


QUEUE = """
import sys, time, torch, gt
gt.connect(sys.argv[1], token=sys.argv[2], config="")
x = torch.full((8192, 8192), 1 / 8192, device="remote")
for _ in range(3):  # the first loads kernels
    start = time.monotonic()
    assert (x @ x)[0, 0].item() == 1 / 8192
print(time.monotonic() - start, flush=True)
sys.stdin.readline()
start = time.monotonic()
y = x
for _ in range(400):
    y = x @ y
assert y[0, 0].item() == 1 / 8192
print(time.monotonic() - start, flush=True)
"""
MARGIN, SLACK = 2.0, 0.1  # times what is promised, and seconds: processes wait for a core


def test_a_small_step_waits_for_two_of_anothers_large_matmuls_and_not_for_four_hundred():
    running = local.start(1, gpu=True)
    line = [sys.executable, "-c", QUEUE, running.address, running.token]
    other = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdin is not None and other.stdout is not None
        longest = float(other.stdout.readline())
        gt.connect(running.address, token=running.token, config="")

        def step(n: int) -> float:
            start = time.monotonic()
            x = torch.full((64,), float(n), device="remote")
            assert (2 * x + 1).sum().item() == 64 * (2 * n + 1)
            return time.monotonic() - start

        for n in range(3):
            step(n)  # loads kernels
        share = max(step(n) for n in range(10))
        other.stdin.write("go\n")
        other.stdin.flush()
        during: list[float] = []
        while not select.select([other.stdout], [], [], 0)[0]:
            during.append(step(len(during)))
        queue = float(other.stdout.readline())
        assert queue > 100 * longest, "its matmuls were in nobody's way"
        assert max(during) < limit(MARGIN * (2 * longest + share) + SLACK), (longest, share, queue, sorted(during)[-9:])
        assert other.wait(limit(60)) == 0
    finally:
        other.kill()
        other.communicate()
        gt.shutdown()
        running.stop()
