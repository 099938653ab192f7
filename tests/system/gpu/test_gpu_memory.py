"""A GPU's memory: zeros where another session may have left something, and a limit that is an error of an op."""

from __future__ import annotations

import os

import pytest
import torch

import gt
from gt.ir.text import size
from gt.launch import local
from tests.helpers.processes import started, wait_until
from tests.worker.process.test_memory_clearing import dirty, leave_secrets
from tests.worker.process.test_memory_limits import MIB, mib, refused

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_nothing_of_another_session_is_in_a_new_tensor_of_a_gpu_in_ops_and_in_replayed_graphs():
    running = local.start(1, gpu=True)
    try:
        gt.connect(running.address, token=running.token)

        @gt.compile(backend="cudagraphs")
        def step(x):
            return torch.empty(65536, device=x.device), torch.empty_like(x), x + 1

        x = torch.ones(100_000, device="remote")
        for _ in range(4):
            step(x)
        leave_secrets(running.address, running.token)
        for _ in range(3):
            made = step(x)
            assert [dirty(tensor) for tensor in made[:2]] == [0, 0] and made[2].sum().item() == 200_000
        for n in (64, 4096, 65536, 1 << 20):
            first = torch.empty(n, device="remote")
            assert (
                not dirty(first)
                and not dirty(first.new_empty(n))
                and not dirty(torch.empty_strided((n, 2), (1, n), device="remote"))
            )
            assert not dirty(torch.zeros(1, device="remote").resize_(n))
    finally:
        gt.shutdown()
        running.stop()
        # Processes of Inductor that are still starting see the end of the worker only then.
        assert wait_until(lambda: not any("compile_worker" in line for line in started().values()), 60)


def test_a_gpu_that_is_full_is_an_error_of_the_op_and_goes_on_when_there_is_room():
    os.environ["GT_MEMORY_LIMIT"] = "2GiB"
    try:
        running = local.start(1, gpu=True)
    finally:
        del os.environ["GT_MEMORY_LIMIT"]
    try:
        gt.connect(running.address, token=running.token)
        kept = [mib(1024)]
        assert kept[0][:2].sum().item() == 2
        refused(lambda: mib(1500)[:1].sum().item(), "out of memory", f"{size(1024 * MIB)} in 1 of")
        assert kept[0][:2].sum().item() == 2
        kept.clear()
        assert mib(512)[:2].sum().item() == 2
        assert mib(1500)[:2].sum().item() == 2
    finally:
        gt.shutdown()
        running.stop()
