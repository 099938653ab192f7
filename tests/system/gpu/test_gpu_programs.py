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


LENT = """
gt.gpu_workers(1)
torch.manual_seed(0)
weight, other = torch.randn(64, 4096) / 8, torch.randn(64, 4096) / 8

def results(device, wrap):
    # Results of 1 MiB and more, and views of them, are held while the programs run again, in turns
    w, o = weight.to(device), other.to(device)
    sine, cosine = wrap(lambda x: (x @ w).sin()), wrap(lambda x: (x @ o).cos())
    held = []
    for n in range(16):
        x = torch.randn(128, 64, generator=torch.Generator().manual_seed(n)).to(device)
        made = (cosine if n % 3 == 2 else sine)(x)
        if n % 4 == 1:
            made.mul_(2)
        view = made[1:3]
        if n % 4 == 3:
            made.data[:, :7].zero_()
        held.append((made if n % 5 else None, view))
    return [tensor.detach().cpu() for row in held for tensor in row if tensor is not None]

def training(device, wrap):
    # A result that autograd saves, and two calls before their backward passes
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.Tanh()).to(device)
    call, held = wrap(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for n in range(12):
        x = torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(n)).to(device)
        made = [call(part) for part in (x if n % 3 == 2 else x[:1])]
        for result in reversed(made):
            result.square().mean().backward()
        held += [*made, made[0][:, 5:9]]
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.detach().cpu() for tensor in (*held, *model.parameters())]

def logits(device, wrap):
    # Logits that the call returns are kept for the loss, and their caller changes some of them
    torch.manual_seed(2)
    model = torch.nn.Linear(64, 8192, dtype=torch.bfloat16).to(device)

    def forward(x, y):
        made = model(x)
        return torch.nn.functional.cross_entropy(made.float(), y), made

    call, held = wrap(forward), []
    for n in range(12):
        generator = torch.Generator().manual_seed(n)
        x, y = torch.randn(256, 64, generator=generator).bfloat16(), torch.randint(8192, (256,), generator=generator)
        loss, made = call(x.to(device), y.to(device))
        held += [made.detach().clone(), made]
        if n == 8:
            made.data.mul_(2)
        loss.backward()
    return [tensor.detach().cpu().float() for tensor in (*held, model.weight.grad)]

plain = lambda fn: fn
for case in (results, training, logits):
    where = "remote" if case is logits else "cpu"  # bf16 products differ between devices
    compiled = case("remote", lambda fn: gt.compile(fn, backend="cudagraphs"))
    for n, (got, want) in enumerate(zip(compiled, case(where, plain), strict=True)):
        torch.testing.assert_close(got, want, msg=lambda text: f"{case.__name__} {n}: {text}", **CLOSE)
gt.shutdown()
"""


def test_large_results_that_somebody_holds_keep_their_values() -> None:
    run(LENT)
