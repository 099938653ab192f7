"""The whole path, with real workers, when one of its processes is killed or the user presses Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.processes import wait_until

HEARTBEAT = 3600.0  # seconds: whoever waited for one would wait for ever


@pytest.fixture
def own(monkeypatch):
    """Two CPU workers of this test's own, to be harmed: name in ps -> pid."""
    import gt
    from gt import api
    from gt.launch import local

    monkeypatch.setattr(local, "start", partial(local.start, heartbeat=HEARTBEAT))
    gt.cpu_workers(2, config="")
    nursery = api._Started.local._process.pid
    pids = Path(f"/proc/{nursery}/task/{nursery}/children").read_text().split()
    yield {Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(): int(pid) for pid in pids}
    gt.shutdown()


def test_a_killed_worker_is_worker_lost_with_its_name(own):
    import gt

    x = gt.ones(4, 4)
    assert x.sum().item() == 16
    names = gt.stats()["workers"]
    for title in ("gt.worker 0", "gt.worker 1"):
        os.kill(own[title], signal.SIGKILL)
    with pytest.raises(gt.WorkerLost, match=rf"worker {names[0]['name']} is lost"):
        x.sum().item()
    with pytest.raises(gt.WorkerLost):
        x.sum().item()


def test_a_worker_that_is_killed_while_a_call_is_held_back_is_told(own):
    """Ops held back for the worker are dropped; whoever waits gets an error, and later calls are right."""
    import gt

    x, killed = gt.ones(4, 4), []
    assert x.sum().item() == 16

    def double(x):
        y = x * 2
        if not killed:
            killed.extend(own[title] for title in ("gt.worker 0", "gt.worker 1"))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        return y + 1

    step = gt.compile(double, backend="cudagraphs")
    with pytest.raises(gt.WorkerLost, match="is lost"):
        step(x).sum().item()
    found = 0.0
    while not found:  # until another worker has the place
        try:
            found = step(gt.ones(3, 3)).sum().item()
        except gt.WorkerLost:
            continue
    assert found == 27


def test_a_trace_during_which_workers_are_killed_is_written_and_names_them(own, tmp_path, caplog):
    import gt

    x = gt.ones(4, 4)
    assert x.sum().item() == 16
    names = [worker["name"] for worker in gt.stats()["workers"]]
    with gt.trace(tmp_path / "out.json") as report:
        for title in ("gt.worker 0", "gt.worker 1"):
            os.kill(own[title], signal.SIGKILL)
        with pytest.raises(gt.WorkerLost):
            x.sum().item()
    missing = "; ".join(report["missing"])
    assert all(f"worker {name} is lost: " in missing for name in names) and missing in caplog.text
    assert any(event["name"] == "Ops" for event in json.loads((tmp_path / "out.json").read_text())["traceEvents"])
    found = 0.0
    while not found:
        try:
            with gt.trace(tmp_path / "again.json") as report:
                found = gt.full((3, 3), 2.0).sum().item()
        except gt.WorkerLost:
            continue
    assert found == 18 and "missing" not in report
    assert "aten.sum.default" in (tmp_path / "again.json").read_text()


def test_killed_workers_are_started_again_and_serve_what_is_new(own):
    import gt

    kept = gt.ones(4, 4)
    assert kept.sum().item() == 16
    for title in ("gt.worker 0", "gt.worker 1"):
        os.kill(own[title], signal.SIGKILL)
    found = 0.0
    while not found:
        try:
            found = gt.full((3, 3), 2.0).sum().item()
        except gt.WorkerLost:
            continue
    assert found == 18
    with pytest.raises(gt.WorkerLost, match="is lost"):
        kept.sum().item()
    step, x = gt.compile(lambda x: x * 2), gt.ones(3)
    assert [step(x).sum().item() for _ in range(4)] == [6] * 4
    del kept
    for _ in range(2000):  # the second worker may join meanwhile, and what was recorded is recorded anew
        assert step(x).sum().item() == 6
        if step._programs and step._programs[0].replays:
            break
    else:
        raise AssertionError(step.explain())


def test_a_killed_dispatcher_is_dispatcher_lost(own):
    import gt

    x = gt.ones(4, 4)
    assert x.sum().item() == 16
    os.kill(own["gt.server"], signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(gt.DispatcherLost, match=r"was lost \(the dispatcher died \(signal SIGKILL\)\), and with it"):
            x.sum().item()


@pytest.mark.parametrize(
    ("number", "says"), [(signal.SIGKILL, r"died \(signal SIGKILL\)"), (signal.SIGTERM, "received SIGTERM")]
)
def test_a_supervisor_that_is_ended_is_named(own, number, says):
    """Its dispatcher ends with it, which is no news to the user of the program."""
    import gt
    from gt import api

    assert gt.ones(4, 4).sum().item() == 16
    supervisor = api._Started.local._process.pid
    os.kill(supervisor, number)
    with pytest.raises(gt.DispatcherLost, match=f"process {supervisor}, which started dispatcher and workers, {says}"):
        while True:
            gt.ones(3).sum().item()
    gt.shutdown()
    gt.cpu_workers(1, config="")
    assert gt.ones(3).sum().item() == 3


def test_a_new_start_after_a_loss(own):
    import gt

    os.kill(own["gt.server"], signal.SIGKILL)
    gt.shutdown()
    gt.cpu_workers(1, config="")
    assert gt.ones(3).sum().item() == 3


def test_ctrl_c_while_a_worker_is_stuck(own):
    import gt
    from gt.client import current_session

    x = gt.ones(4, 4)
    assert x.sum().item() == 16
    for title in ("gt.worker 0", "gt.worker 1"):
        os.kill(own[title], signal.SIGSTOP)
    session = current_session.current().session
    main = threading.main_thread().ident
    press = threading.Thread(
        target=lambda: wait_until(lambda: session.waiting) and signal.pthread_kill(main, signal.SIGINT), name="test-press"
    )
    press.start()
    with pytest.raises(KeyboardInterrupt):
        x.sum().item()
    press.join()
    for title in ("gt.worker 0", "gt.worker 1"):
        os.kill(own[title], signal.SIGCONT)
    assert x.sum().item() == 16


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_model_whose_worker_was_killed_goes_on_from_a_state_dict(own, captured):
    """torch's load_state_dict writes into weights in place: they, their views and captured steps have new memory then."""
    import copy

    import torch

    import gt

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    column = model[0].weight.detach()[:, 0]

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    called = gt.compile(step) if captured else step
    inputs = torch.randn(9, 6, 4)
    for x in inputs[:4]:
        called(x.to("remote")).item()
    state = copy.deepcopy([part.state_dict() for part in (model, optimizer)])
    state = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, state)
    wanted = [called(x.to("remote")).item() for x in inputs[4:]]
    for title in ("gt.worker 0", "gt.worker 1"):
        os.kill(own[title], signal.SIGKILL)
    with pytest.raises(gt.WorkerLost):
        for _ in range(2000):
            called(inputs[0].to("remote")).item()
    while True:  # until both have been started again
        try:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(copy.deepcopy(state[1]))
            found = [called(x.to("remote")).item() for x in inputs[4:]]
            break
        except gt.WorkerLost:
            continue
    assert found == wanted
    assert torch.equal(column.cpu(), model[0].weight.detach()[:, 0].cpu())


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_model_whose_worker_was_killed_goes_on_from_its_checkpoint(own, tmp_path, captured):
    import torch

    import gt

    model = torch.nn.Linear(4, 4).to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    kept, schedule = torch.zeros(4).to("remote") + 1, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "kept": kept}

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    called = gt.compile(step) if captured else step
    x = torch.arange(8.0).reshape(2, 4).to("remote")
    for _ in range(4):
        called(x).item()
        schedule.step()
    gt.save(state, tmp_path / "checkpoint")
    wanted = [(called(x).item(), schedule.step())[0] for _ in range(4)]
    for title in ("gt.worker 0", "gt.worker 1"):
        os.kill(own[title], signal.SIGKILL)
    with pytest.raises(gt.WorkerLost):
        for _ in range(2000):
            called(x).item()
    del x
    while True:  # until both have been started again
        try:
            gt.load(tmp_path / "checkpoint", into=state)
            x = torch.arange(8.0).reshape(2, 4).to("remote")
            found = [(called(x).item(), schedule.step())[0] for _ in range(4)]
            assert kept.sum().item() == 4
            break
        except gt.WorkerLost:
            continue
    assert found == pytest.approx(wanted, rel=1e-4)
