"""Numbers that a program reads while a GPU is still at work: the right ones, and before that work is done."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.helpers.processes import run_program

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PRELUDE = """
import sys
sys.path.insert(0, {root!r})
import time
import torch, gt
from torch import nn
from tests.helpers import ROOT

torch.backends.cuda.matmul.allow_tf32 = False
"""
run = partial(run_program, PRELUDE, seconds=300)

SAME = """
CLOSE = dict(rtol=2e-4, atol=2e-5)

def training(device, way, cell):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    xs, ys = torch.randn(12, 8, 16).to(device), torch.randn(12, 8, 1).to(device)
    total = torch.zeros((), device=device)

    def step(x, y):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        total.add_(loss.detach())
        return (loss.detach(), loss.detach().view(1), loss.detach() * 2) if cell == "aliases" else loss.detach()

    def double(t):
        return t.mul_(2)

    if way == "compiled":
        step, double = gt.compile(step, backend="cudagraphs"), gt.compile(double, backend="cudagraphs")
    read, before = [], None
    for n in range(12):
        loss = step(xs[n], ys[n])
        if cell == "aliases":
            one, view, twice = loss
            one.add_(1)
            read += [view.item(), one.item(), twice.item()]
        elif cell == "changed":
            loss.add_(1)
            read.append(loss.item())
        elif cell == "doubled":
            double(loss)
            read.append(loss.item())
        elif cell == "twice":
            read += [loss.item(), loss.view(1).tolist()[0], loss.neg().item(), (-loss).detach().item(), total.item()]
        elif cell == "later":
            if before is not None:
                read.append(before.item())
            before = loss
        elif cell == "filled":
            first = loss.item()
            loss.zero_()
            read += [first, loss.item()]
        else:
            read.append(loss.item())
    return torch.tensor(read)

gt.gpu_workers(1)
for cell in ("plain", "aliases", "changed", "doubled", "twice", "later", "filled"):
    want = training("cpu", "eager", cell)
    for way in ("eager", "compiled"):
        torch.testing.assert_close(training("remote", way, cell), want, msg=lambda text: f"{cell}, {way}: {text}", **CLOSE)
gt.shutdown()
"""


def test_numbers_are_those_of_the_cpu_however_they_are_changed_and_read() -> None:
    run(SAME)


EARLY = """
gt.gpu_workers(1)
torch.manual_seed(0)
wide = torch.randn(8192, 8192, device="remote")

def work(x):
    loss = x.mean()
    y = wide
    for _ in range(40):
        y = torch.tanh(wide @ y)
    return loss, y.sum()

def seconds(call, x):
    loss, end = call(x)
    began = time.perf_counter()
    value = loss.item()
    first = time.perf_counter() - began
    end.item()
    return value, first, time.perf_counter() - began

for call in (work, gt.compile(work, backend="cudagraphs")):
    firsts, wholes = [], []
    for n in range(8):
        x = torch.full((64,), float(n), device="remote")
        value, first, whole = seconds(call, x)
        assert value == n, (value, n)
        firsts.append(first)
        wholes.append(whole)
    print(firsts, wholes)
    assert min(firsts[3:]) < 0.5 * min(wholes[3:]), (firsts, wholes)
gt.shutdown()
"""


def test_a_number_is_read_before_later_work_is_done() -> None:
    print(run(EARLY))
