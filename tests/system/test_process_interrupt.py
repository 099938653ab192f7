"""Ctrl-C while much is queued: what no worker has begun is dropped, and the session goes on with what there was."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gt
from gt.client import current_session
from gt.errors import OpFailed
from tests.helpers.limits import limit

SIZE, MANY = 700, 4000


@pytest.fixture
def one() -> Iterator[None]:
    gt.cpu_workers(1)
    yield
    gt.shutdown()


def interrupted(wait) -> None:
    """Call `wait`, which takes long; Ctrl-C once it has begun."""
    session = current_session.current().session
    begun = threading.Event()

    def press() -> None:
        while not session.waiting and session.has_credit():
            begun.wait(0.01)
        begun.wait(0.2)
        _thread.interrupt_main()

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        wait()
    thread.join()


def queue(x: torch.Tensor, counter: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
    """Products that take minutes, each counted in place."""
    made = []
    for _ in range(MANY):
        x = (x @ scale).clamp(-1, 1)
        counter.add_(1)
        made.append(x)
    return made


def test_what_was_queued_is_dropped_and_the_session_goes_on(one: None) -> None:
    x, scale, counter = torch.ones(SIZE, SIZE).remote(), torch.eye(SIZE).remote(), torch.zeros(()).remote()
    assert (x @ scale).sum().item() == SIZE * SIZE and counter.item() == 0
    made = queue(x, counter, scale)
    interrupted(lambda: made[-1].sum().item())
    done = int(counter.item())  # soon: the rest is not waited for
    assert 0 < done < MANY
    assert made[done - 1].sum().item() == SIZE * SIZE  # the last that was begun
    with pytest.raises(OpFailed, match=r"test_process_interrupt\.py:\d+: .* was not begun, since an interrupt \(Ctrl-C\)"):
        made[-1].sum().item()
    with pytest.raises(OpFailed, match="was not begun"):
        (made[-1] + 1).sum().item()
    assert (x @ scale).sum().item() == SIZE * SIZE  # what there was has its value
    counter.add_(1)
    assert counter.item() == done + 1
    made[-1] = torch.ones(2).remote()
    assert made[-1].sum().item() == 2


def test_ops_after_the_interrupt_are_carried_out(one: None) -> None:
    """They are sent while earlier ones are still being dropped."""
    x, scale, counter = torch.ones(SIZE, SIZE).remote(), torch.eye(SIZE).remote(), torch.zeros(()).remote()
    made = queue(x, counter, scale)
    interrupted(torch.remote.synchronize)
    later = [torch.full((3,), float(n)).remote() * 2 for n in range(50)]
    assert [t.sum().item() for t in later] == [6.0 * n for n in range(50)]
    view = made[0].t() if counter.item() else x.t()
    assert view.sum().item() == SIZE * SIZE
    torch.remote.synchronize()


def test_an_interrupt_of_what_is_nearly_done_harms_nothing(one: None) -> None:
    x = torch.ones(4).remote()
    for n in range(30):
        y = x * n
        current_session.current().flush_ops()
        current_session.current().session.interrupt()
        z = x + n
        assert z.sum().item() == 4 + 4 * n
        try:
            assert y.sum().item() == 4 * n
        except OpFailed as error:
            assert "was not begun" in str(error)


TWO = "gt: {data_parallel: null}"
STEPS = 3000


def grind(capture: bool, workers: int) -> tuple:
    """Train with thousands of steps queued, and press Ctrl-C: the steps that were counted, the weight before and after."""
    x = torch.randn(256, 256).remote()
    weight = torch.nn.Parameter((torch.eye(256) * 0.5).remote())
    counter = torch.zeros(()).remote()
    before = weight.detach().cpu().clone()
    optimizer = torch.optim.SGD([weight], lr=1e-3)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        y = x
        for _ in range(6):
            y = (y @ weight).clamp(-2, 2)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        counter.add_(1)
        return loss

    run = gt.compile(step) if capture else step
    for _ in range(4):
        loss = run(x)
    assert loss.isfinite().item()

    def queue_and_wait() -> None:
        for _ in range(STEPS):
            loss = run(x)
        loss.item()

    interrupted(queue_and_wait)
    return int(counter.item()), before, weight.detach().cpu(), x, run, counter, weight


def plain(weight: torch.Tensor, x: torch.Tensor, steps: int) -> torch.Tensor:
    weight = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        y = x
        for _ in range(6):
            y = (y @ weight).clamp(-2, 2)
        y.square().mean().backward()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_of_a_session_drop_the_same_steps(workers: int, capture: bool) -> None:
    torch.manual_seed(0)
    gt.cpu_workers(workers, TWO if workers > 1 else None)
    try:
        done, before, after, x, run, counter, weight = grind(capture, workers)
        assert 4 <= done < STEPS
        if capture:  # a replay is dropped whole
            torch.testing.assert_close(after, plain(before, x.cpu(), done), rtol=1e-3, atol=1e-4)
        # the workers' copies of the weight are the same, and so are what they do next
        torch.testing.assert_close((x @ weight).cpu(), x.cpu() @ after, rtol=1e-4, atol=1e-4)
        run(x).item()
        assert counter.item() == done + 1
        torch.testing.assert_close(weight.detach().cpu(), plain(after, x.cpu(), 1), rtol=1e-3, atol=1e-4)
    finally:
        gt.shutdown()


IMPORT = """
import signal, sys
import torch

class Press:  # Ctrl-C in the middle of a library's import
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

def again(work):
    while True:
        try:
            return work()
        except KeyboardInterrupt:
            pressed.append(work)

def value():
    import gt
    return torch.ones(3, device="remote").sum().item()

pressed = []
sys.meta_path.insert(0, Press())
print(again(value), len(pressed))
"""


@pytest.mark.parametrize("module", ["zmq.sugar.attrsettr", "gt.client.device.register"])
def test_a_notebook_goes_on_after_ctrl_c_in_an_import(module: str, tmp_path: Path) -> None:
    """A half of ZeroMQ's package stayed, with which no later connection could be made."""
    program = tmp_path / "program.py"
    program.write_text(IMPORT)
    done = subprocess.run([sys.executable, program, module], capture_output=True, text=True, timeout=limit(120), check=False)
    assert done.stdout == "3.0 1\n", done.stderr
