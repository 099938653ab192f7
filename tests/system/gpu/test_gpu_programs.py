"""Small programs of many kinds on a GPU worker, op by op and as CUDA graphs. The CPU's losses are the reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.helpers.processes import run_program
from tests.programs.test_programs import ROOMS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PRELUDE = """
import sys, traceback
sys.path.insert(0, {root!r})
import torch, gt
from tests.helpers import ROOT

torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
CLOSE = dict(rtol=2e-3, atol=2e-4, equal_nan=True)
failed = []
"""
run = partial(run_program, PRELUDE, seconds=400)
ROOM = """
from tests.programs import {room} as room
from tests.programs.test_programs import CAPTURED

gt.gpu_workers(1)

def losses(make, device, compiled=False):
    torch.manual_seed(0)
    program = make(device)
    step = gt.compile(program.step, backend="cudagraphs") if compiled else program.step
    rows = [[p.to(device) if isinstance(p, torch.Tensor) else p for p in batch] for batch in program.batches]
    got = [float(step(*rows[n % len(rows)])) for n in range(6)]
    if compiled:
        print(make.__name__, step.explain().splitlines()[0])
    return torch.tensor(got)

for make in room.PROGRAMS:
    try:
        want = losses(make, "cpu")
        torch.testing.assert_close(losses(make, "remote"), want, **CLOSE)
        if make.__name__ in CAPTURED:
            torch.testing.assert_close(losses(make, "remote", True), want, **CLOSE)
    except Exception:
        failed.append(make.__name__)
        print(make.__name__, traceback.format_exc()[-1500:], file=sys.stderr)
gt.shutdown()
assert not failed, failed
"""


@pytest.mark.parametrize("room", [room.__name__.rpartition(".")[2] for room in ROOMS])
def test_programs_of_many_kinds_have_the_cpus_losses(room: str) -> None:
    print(run(ROOM.format(room=room)))


RATES = """
from torch import nn
import torch.nn.functional as F

gt.gpu_workers(1)
x, y = torch.randn(20, 16, 8), torch.randint(4, (20, 16))
KINDS = dict(
    sgd=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    adamw=lambda p: torch.optim.AdamW(p, lr=0.02),
    fused=lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
    loop=lambda p: torch.optim.Adam(p, lr=0.02, foreach=False),
    rmsprop=lambda p: torch.optim.RMSprop(p, lr=0.01),
    nadam=lambda p: torch.optim.NAdam(p, lr=0.02),
    adagrad=lambda p: torch.optim.Adagrad(p, lr=0.05),
    adamax=lambda p: torch.optim.Adamax(p, lr=0.02),
)

def losses(kind, device, compiled=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
    optimizer = KINDS[kind](model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()
    run = gt.compile(step, backend="cudagraphs") if compiled else step
    got = []
    for n in range(20):
        got.append(float(run(x[n].to(device), y[n].to(device))))
        schedule.step()
    if compiled:
        print(kind, run.explain().splitlines()[0], [p.replays for p in run._programs])
    return torch.tensor(got)

for kind in KINDS:
    try:
        want = losses(kind, "cpu")
        torch.testing.assert_close(losses(kind, "remote"), want, **CLOSE)
        torch.testing.assert_close(losses(kind, "remote", True), want, **CLOSE)
    except Exception:
        failed.append(kind)
        print(kind, traceback.format_exc()[-1500:], file=sys.stderr)
gt.shutdown()
assert not failed, failed
"""


def test_captured_steps_follow_a_schedule_of_learning_rates() -> None:
    print(run(RATES))
