"""Remote training on GPU workers, and local CUDA beside it. Each program runs in a process of its own."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.helpers import ROOT
from tests.helpers.processes import run_program

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a CUDA device")]

PRELUDE = """
import copy, os, sys
sys.path.insert(0, {root!r})
import torch, gt
from tests.helpers.limits import limit
from tests.helpers.models import GPT
torch.backends.cuda.matmul.allow_tf32 = False
torch.manual_seed(0)
base = GPT(layers=4, width=128, heads=4, vocab=256, context=64)
data = torch.randint(256, (8, 8, 65))

def train(model, device):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in data:
        loss = model(batch[:, :-1].to(device), batch[:, 1:].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

def close(a, b):
    worst = max(abs(x - y) / abs(y) for x, y in zip(a, b))
    assert worst < 1e-3, (worst, a, b)
"""


run = partial(run_program, PRELUDE, seconds=300)


def test_local_cuda_training_works_beside_remote_where_the_name_is_left_out():
    run("""
local = train(copy.deepcopy(base).cuda(), "cuda")       # gt is imported, nothing is started
gt.gpu_workers(1, name=False)
remote = train(copy.deepcopy(base).to(gt.device), gt.device)
again = train(copy.deepcopy(base).cuda(), "cuda")
more = train(copy.deepcopy(base).to(gt.device), gt.device)
assert local == again and remote == more
close(remote, local)
""")


def test_local_cuda_training_works_until_the_first_connect():
    run("""
local = train(copy.deepcopy(base).cuda(), "cuda")
gt.gpu_workers(1)
model = copy.deepcopy(base).to("remote")
close(train(model, "remote"), local)
assert gt.stats()["workers"][0]["live_bytes"] > 0
""")


def test_a_worker_is_on_its_gpu():
    run("""
gt.gpu_workers(1)
x = torch.ones(1 << 28, device="remote")  # 1 GiB
assert x[:4].sum().item() == 4
used = torch.cuda.mem_get_info()
assert used[1] - used[0] > 1 << 30, used
""")


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_to_synchronize_is_to_wait_for_every_gpu():
    run(
        """
import time
gt.gpu_workers(2)
with gt.signal.context("pp_stage1"):
    x = torch.zeros(8192, 8192, device="remote")
    (x @ x).sum().item()
    y = x
    for _ in range(500):  # some 20 ms each: longer than a heartbeat
        y = x @ y
    torch.remote.synchronize()
    start = time.monotonic()
    y[0, 0].item()
    assert time.monotonic() - start < limit(0.5)
""",
        GT_CONFIG=str(ROOT / "configs" / "pp2.yaml"),
    )


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("config", ["tp2", "pp2", "dp2"])
def test_two_gpus_give_one_gpus_losses(config):
    run(
        """
from tests.helpers.models import demo
module = demo()
sizes = {**module.PRESETS["tiny"], "vocab_size": 256, "max_seq_len": 64}
torch.manual_seed(1)
plain = module.MiniGPT(sizes, ())
gt.gpu_workers(2)
torch.manual_seed(1)
model = module.MiniGPT(sizes, gt.signal.groups())
close(train(model.to("remote"), "remote"), train(plain, "cpu"))
assert len(gt.stats()["workers"]) == 2
""",
        GT_CONFIG=str(ROOT / "configs" / f"{config}.yaml"),
    )
