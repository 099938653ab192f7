"""Programs as CUDA graphs on a GPU: random ones, and training steps, against their instructions."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import gt
from gt.worker.engine.torch import TorchEngine
from gt.worker.engine.torch.gpu.cuda import Cuda
from gt.worker.engine.torch.gpu.graphs import Graphs
from tests.helpers.compiled_parts import inputs, program, replay, report, same
from tests.helpers.models import GPT
from tests.helpers.processes import started, wait_until
from tests.worker.program.test_compile_graphs import REFUSED, Plainly

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def no_build_processes() -> Iterator[None]:
    """Compilers of this process start Inductor's build processes, which would stay until it ends."""
    yield
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()


class Engine(TorchEngine):
    """No segments: every op is an instruction; some are refused."""

    def __init__(self, refused: tuple[str, ...] = ()) -> None:
        super().__init__("cuda:0")
        self.graphs = Graphs(Plainly(self), Cuda(self.device))
        issues = self.graphs.records
        self.graphs.records = lambda payload: payload["op"] not in refused and issues(payload)  # type: ignore[method-assign]

    def compiler(self, backend: str):
        return self.graphs, ""


def given(seed: int) -> dict[int, torch.Tensor]:
    """The same on the GPU: what shares memory still does."""
    here = inputs(seed)
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in here.values()}
    there = {at: torch.tensor(list(storage), dtype=torch.uint8, device="cuda") for at, storage in memory.items()}
    return {
        i: torch.empty(0, device="cuda").set_(
            there[t.untyped_storage().data_ptr()].untyped_storage(), t.storage_offset(), t.shape, t.stride()
        )
        for i, t in here.items()
    }


@pytest.mark.parametrize("refused", REFUSED)
def test_random_programs(refused):
    recorded = 0
    engine = Engine(refused)  # graphs of all programs share its pool
    for seed in range(60):
        script = program(seed)
        got, want = script.bench("cudagraphs", given(seed), engine), script.bench("eager", given(seed), TorchEngine("cuda:0"))
        for _ in range(6):
            replay(got)
            replay(want)
            same(got, want)
        recorded += report(got)["graphs"]
        assert {why for _, why in report(got)["reasons"]} <= {f"no graph: {name}" for name in refused}, (seed, report(got))
    assert recorded >= 60


def test_graphs_that_are_given_up_do_not_end_a_recording():
    """As those of programs that refer to themselves are, when cycles are collected."""
    device = Cuda(torch.device("cuda:0"))
    x = torch.zeros(8, device="cuda")
    for _ in range(20):
        cycle = [device.record(lambda: x.add_(0))]
        cycle.append(cycle)
    del cycle

    def run():
        for _ in range(20_000):
            empty: list = []
            empty.append(empty)
        x.add_(1)

    again = device.record(run)
    again()
    assert x.tolist() == [1.0] * 8


@pytest.mark.local_cuda  # pins memory
def test_after_a_recording_that_failed_others_are_recorded():
    device = Cuda(torch.device("cuda:0"))
    x = torch.zeros(8, device="cuda")
    before = device.record(lambda: x.add_(2))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="captur"):
            device.record(lambda: x.sum().item())
        again = device.record(lambda: x.add_(1))
        again()
        torch.empty(8).pin_memory()  # its allocator asks what records where
    before()
    torch.cuda.empty_cache()
    assert x.tolist() == [5.0] * 8


def test_memory_of_recordings_that_are_gone_is_given_back():
    device = Cuda(torch.device("cuda:0"))
    x = torch.zeros(8, device="cuda")

    def reserved():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() / 2**20

    def large():
        torch.ones(2**26, device="cuda").sum()

    def broken():
        large()
        x.sum().item()

    before = reserved()
    replay = device.record(large)
    replay()
    assert reserved() >= before + 256
    del replay
    assert reserved() <= before + 32
    for _ in range(2):
        with pytest.raises(RuntimeError, match="captur"):
            device.record(broken)
        assert reserved() <= before + 32
    device.record(large)()


def step_of(model, optimizer, backend):
    def step(x, y):
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step if backend is None else gt.compile(step, backend=backend)


@pytest.mark.parametrize("fused", [True, False])
def test_training_steps(fused):
    torch.manual_seed(0)
    base = GPT(layers=3, width=128, heads=4, vocab=256, context=64)
    data = torch.randint(256, (12, 8, 65))
    found = {}
    gt.gpu_workers(1)
    try:
        for backend in (None, "eager", "inductor", "cudagraphs"):
            found[backend], said, grads = train(copy.deepcopy(base), data, fused, backend)
            if backend == "cudagraphs":
                assert "1 CUDA graph" in said and "not as asked" not in said, said
                assert all(torch.isfinite(grad).all() for grad in grads)
    finally:
        gt.shutdown()
    assert found["eager"] == found[None] or not fused  # else it counts steps on the device: another order of rounding
    for backend in ("eager", "inductor", "cudagraphs"):
        torch.testing.assert_close(torch.tensor(found[backend]), torch.tensor(found[None]), rtol=1e-4, atol=1e-5)


def test_dropout_draws_anew_in_each_replay():
    """The numbers of eager calls, from the same seed, in one graph."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8), nn.Dropout(0.5))
    data = torch.randn(10, 32, 64)
    found = {}
    gt.gpu_workers(1)
    try:
        for backend in (None, "cudagraphs"):
            torch.manual_seed(1)
            model = copy.deepcopy(base).to("remote")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = step_of(lambda x, y, model=model: model(x).square().mean() + y, optimizer, backend)
            found[backend] = [step(x.to("remote"), torch.zeros((), device="remote")).item() for x in data]
            said = "" if backend is None else step.explain()
    finally:
        gt.shutdown()
    assert "1 CUDA graph" in said, said
    # Processes of Inductor that are still starting see the end of the worker only then.
    assert wait_until(lambda: not any("compile_worker" in line for line in started().values()), 60)
    torch.testing.assert_close(torch.tensor(found["cudagraphs"]), torch.tensor(found[None]), rtol=1e-4, atol=1e-6)
    assert len(set(found[None])) == len(data)


def train(model, data, fused, backend):
    """Losses, what explain() says, and the last gradients."""
    model = model.to("remote")
    step = step_of(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused), backend)
    losses = [step(batch[:, :-1].to("remote"), batch[:, 1:].to("remote")) for batch in data]
    said = "" if backend is None else step.explain()
    return [loss.item() for loss in losses], said, [p.grad.cpu() for p in model.parameters()]
