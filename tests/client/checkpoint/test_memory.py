"""Memory of saves and loads: a process has no more of a large state at once than a bounded part, beside the state itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import gt
from gt.client.checkpoint import saving
from gt.client.exchange.arenas import ClientArenas
from tests.helpers.processes import started

TENSORS, ROWS = 12, 4096  # of 16 MiB each
STATE_BYTES = TENSORS * ROWS * 1024 * 4
EXTRA_BYTES = 80 << 20  # of a process; a part of 32 MiB, the tensor before it and the one that follows, and slack


def peaks() -> dict[int, int]:
    """Most bytes that the processes of the session had since `forget_peaks`, by process."""
    return {pid: value("VmHWM", pid) for pid in (os.getpid(), *started())}


def value(name: str, pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


@contextmanager
def bounded() -> Iterator[None]:
    """No process has EXTRA_BYTES more within the block than at its begin."""
    torch.remote.synchronize()
    before = {}
    for pid in (os.getpid(), *started()):
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is what it has now
        before[pid] = value("VmRSS", pid)
    yield
    torch.remote.synchronize()
    more = {pid: peak - before[pid] for pid, peak in peaks().items() if pid in before}
    more = {started().get(pid, "this")[:40]: nbytes for pid, nbytes in more.items() if nbytes > EXTRA_BYTES}
    assert not more, f"{ {pid: f'{n >> 20} MiB' for pid, n in more.items()} } of a state of {STATE_BYTES >> 20} MiB"


@pytest.fixture
def model(session: Callable[..., None]) -> nn.Module:
    session()
    with torch.device("meta"):
        large = nn.ModuleList(nn.Linear(1024, ROWS, bias=False) for _ in range(TENSORS))
    large.to_empty(device="remote")
    for number, layer in enumerate(large):
        nn.init.constant_(layer.weight, number)
    return large


def save_and_load(model: nn.Module, folder: Path) -> None:
    """Both in bounded memory; the values are from the folder."""
    with bounded():
        gt.save({"model": model}, folder)
    with torch.no_grad():
        for layer in model:
            layer.weight.zero_()
    with bounded():
        gt.load(folder, into={"model": model})


def test_a_large_state_is_saved_and_loaded_in_bounded_memory(model, tmp_path):
    save_and_load(model, tmp_path / "c")
    with bounded():
        gt.load(tmp_path / "c", into={"model": dict(model.state_dict())})
    assert [layer.weight[-1, -1].item() for layer in model] == [*range(TENSORS)]


def test_it_is_saved_and_loaded_in_bounded_memory_where_workers_share_no_disk(model, tmp_path, monkeypatch):
    """Workers receive values ahead of the ops that copy them, of one part at most."""
    monkeypatch.setattr(ClientArenas, "take", lambda self, nbytes: None)
    save_and_load(model, tmp_path / "c")
    assert [layer.weight[-1, -1].item() for layer in model] == [*range(TENSORS)]


@pytest.mark.parametrize("copied", [0, 64 << 20])
def test_a_streamed_save_that_training_does_not_wait_for_copies_a_part_at_most(model, tmp_path, monkeypatch, copied):
    monkeypatch.setattr(ClientArenas, "take", lambda self, nbytes: None)
    monkeypatch.setattr(saving, "COPIED_BYTES", copied)
    with bounded():
        save = gt.save({"model": model}, tmp_path / "c", wait=False)
        with torch.no_grad():
            for layer in model:
                layer.weight.add_(100)
        save.wait()
    loaded = gt.load(tmp_path / "c", device="cpu")["model"]
    assert [loaded[f"{n}.weight"][-1, -1].item() for n in range(TENSORS)] == [*range(TENSORS)]
