"""Host memory that a program shares with GPU workers: pinned there, and copied beside the work of the step before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gt
from gt.ir.spec import contiguous
from gt.worker.engine.torch import TorchEngine
from gt.worker.engine.torch.gpu.pinned import PinnedCopies
from tests.helpers.processes import started, wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def gpu():
    gt.gpu_workers(1)
    yield
    gt.shutdown()
    # Processes of Inductor that are still starting see the end of the worker only then.
    assert wait_until(lambda: not any("compile_worker" in line for line in started().values()), 60)


def pages(nbytes: int) -> np.ndarray:
    """Bytes at the start of a page."""
    raw = np.zeros(nbytes + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + nbytes]


def test_pinned_bytes_are_copied_beside_the_work_that_was_issued_before():
    copies, device = PinnedCopies(torch.device("cuda:0")), torch.device("cuda:0")
    memory = pages(64 << 20)
    unpin = copies.pin(memory)
    spec = contiguous((16 << 20,), "float32")
    copies.upload(memory, spec)[1]()  # the first allocation on a stream waits for the device
    memory.view(np.float32)[:] = 3
    a = torch.randn(8192, 8192, device=device)
    for _ in range(3):
        a @ a
    torch.cuda.synchronize()
    before = torch.cuda.Event()
    for _ in range(40):  # some 100 ms of work
        a = a @ a
    before.record()
    made, wait = copies.upload(memory, spec)
    wait()
    assert not before.query(), "the copy was over before the work that was issued before it"
    memory.view(np.float32)[:] = 4
    assert made.sum().item() == 3 * (16 << 20)
    back = memory[: 16 << 20]
    copies.download(made[: 4 << 20], back)
    assert (back.view(np.float32) == 3).all()
    unpin()


def test_memory_that_cannot_be_pinned_is_an_error_that_harms_no_later_op():
    copies = PinnedCopies(torch.device("cuda:0"))
    memory = pages(1 << 20)
    unpin = copies.pin(memory)
    with pytest.raises(RuntimeError, match="cudaHostRegister"):
        copies.pin(memory)
    assert torch.ones(4, device="cuda").sum().item() == 4
    unpin()
    assert isinstance(TorchEngine("cuda:0").copies, PinnedCopies) and TorchEngine("cpu").copies is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool])
def test_large_tensors_survive_both_ways_in_pinned_memory(gpu, dtype):
    host = (torch.arange(3000 * 1000) % 2).reshape(3000, 1000).to(dtype)
    before = gt.stats()["dispatcher"]["tensor_bytes_shared"]
    for layout in (host, host.t(), host[::2, 1::3], host[:0]):
        remote = layout.to("remote")
        assert torch.equal((remote[:1].clone(), remote.cpu())[1], layout)
    assert gt.stats()["dispatcher"]["tensor_bytes_shared"] - before >= 2 * 2 * host.nbytes


@pytest.mark.parametrize("captured", [False, True])
def test_batches_from_the_host_are_each_their_own(gpu, captured):
    """The program changes its one buffer as soon as the call returns, while the GPU is steps behind."""
    weight = torch.eye(2048, device="remote")

    def step(x):
        y = x
        for _ in range(20):
            y = y @ weight
        return y.sum()

    run = gt.compile(step, backend="cudagraphs") if captured else step
    host, sums = torch.zeros(2048, 2048), []
    for n in range(50):
        host.fill_(n)
        sums.append(run(host if captured else host.to("remote", non_blocking=True)))
        host.fill_(-1)
    assert [total.item() for total in sums] == [float(n * 2048 * 2048) for n in range(50)]
    assert gt.stats()["dispatcher"]["tensor_bytes_shared"] >= 50 * host.nbytes
