"""GPU workers by hand of an exclusive server: the next program has new CUDA contexts, and the memory of GPUs is free again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

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
            done = subprocess.run(line, capture_output=True, text=True, timeout=200, env=environment)
            assert done.returncode == 0, done.stderr[-4000:]
            taken.append(int(done.stdout))
        assert all(worker.poll() is None for worker in workers), "the same processes"
        assert max(taken) - taken[0] < 512 << 20, f"memory of programs that have ended is still taken: {taken}"
    finally:
        server.terminate()
        server.communicate(timeout=30)
        for worker in workers:
            worker.terminate()
            worker.wait(30)
