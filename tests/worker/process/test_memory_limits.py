"""Limits of memory: what exceeds one fails with op, line and who holds it; the worker and other sessions go on."""

from __future__ import annotations

import gc
import os
import re
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gt
from gt.client.session import Session
from gt.errors import ConfigError, OpFailed
from gt.ir.instr import BASE_BITS, Define
from gt.ir.spec import contiguous
from gt.ir.template import T
from gt.launch import local
from gt.wire import process_settings
from gt.wire.messages import Data, OpError
from gt.wire.process_settings import available_bytes
from gt.worker.engine.numpy import NumpyEngine
from gt.worker.engine.torch import TorchEngine
from gt.worker.executor import Executor
from gt.worker.process import memory_budget
from gt.worker.process.memory_budget import Budget, OutOfMemory
from tests.helpers.processes import wait_until
from tests.helpers.worker_parts import DeadPlane, new, op

MIB = 1 << 20


def mib(count: float) -> torch.Tensor:
    return torch.ones(int(count * MIB) // 4, device="remote")


@pytest.fixture(scope="module", params=["torch", "numpy"])
def server(request) -> Iterator[Any]:
    """One worker of 200 MiB."""
    os.environ["GT_MEMORY_LIMIT"] = "200MiB"
    try:
        running = local.start(1, backend=request.param, heartbeat=60.0)
    finally:
        del os.environ["GT_MEMORY_LIMIT"]
    running.backend = request.param
    yield running
    running.stop()


@pytest.fixture
def worker(server) -> Iterator[Callable[[], dict]]:
    gt.connect(server.address, token=server.token)
    yield lambda: gt.stats()["workers"][0]
    gt.shutdown()


def refused(call: Callable[[], Any], *texts: str) -> OpFailed:
    with pytest.raises(OpFailed) as caught:
        call()
    for text in texts:
        assert text in str(caught.value), str(caught.value)
    error = caught.value.with_traceback(None)  # whose frames would keep tensors
    del caught
    return error


def goes_on(worker: Callable[[], dict]) -> None:
    """The same process, with room for what the limit allows."""
    gc.collect()
    assert mib(100)[:3].sum().item() == 3
    assert worker()["name"] == "w0" and worker()["memory_limit"] == 200 * MIB


def test_an_op_that_finds_no_room_names_its_line_and_who_holds_the_memory(server, worker):
    kept = mib(100)
    assert kept[:2].sum().item() == 2
    error = refused(lambda: mib(150)[:2].sum().item(), "out of memory: it needs 150.0 MiB", "most is held by 100.0 MiB in 1 ")
    assert re.search(r"test_memory_limits.py:\d+: aten.empty", str(error)) and error.worker == "w0"
    assert kept[:2].sum().item() == 2  # unharmed
    del kept, error
    goes_on(worker)


def test_a_tensor_larger_than_any_memory_is_an_error_of_its_op(server, worker):
    refused(lambda: torch.ones([2147483647, 1], device="remote")[:2].sum().item(), "it needs 8.0 GiB")
    goes_on(worker)


def test_many_small_results_stop_at_the_limit(server, worker):
    def many() -> float:
        kept = [torch.full((2000,), 1.0, device="remote") for _ in range(30_000)]
        return kept[-1].sum().item()

    refused(many, "out of memory: it needs 7.8 KiB", "test_memory_limits.py")
    goes_on(worker)


def test_an_upload_that_finds_no_room_is_an_error_of_its_line(server, worker):
    kept, data = mib(130), torch.zeros(80 * MIB // 4)
    held = [kept[:1].clone()]
    refused(lambda: (held[0] + data.to("remote")[:1]).sum().item(), "out of memory: it needs 80.0 MiB")
    del kept
    goes_on(worker)  # an upload comes before what frees memory in the same batch
    assert data.to("remote").sum().item() == 0
    goes_on(worker)


def test_a_programs_replay_stops_at_the_limit_and_goes_on_when_there_is_room(server, worker):
    @gt.compile
    def step(x):
        parts = [x + n for n in range(20)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.sum()

    x = mib(4)
    wanted = sum(x.shape[0] * (1 + n) for n in range(20))
    assert [step(x).item() for _ in range(3)] == [pytest.approx(wanted)] * 3
    kept = mib(120)
    assert kept[:1].sum().item() == 1
    error = refused(lambda: step(x).item(), "it needs 4.0 MiB", "replay", "124.0 MiB in 2 of", "aten.add.Tensor in a program")
    assert "aten.add" in error.op
    del kept, error
    goes_on(worker)  # a replay comes before what the same batch frees
    assert step(x).item() == pytest.approx(wanted)
    goes_on(worker)


def hold(session: Session, nbytes: int) -> None:
    """Have a session hold a tensor of so many bytes on the first worker."""
    few, many, one = (contiguous((n,), "uint8").wire() for n in (16, nbytes, 1))
    session.submit(
        [
            [16, ["gt.upload.default", [], {}, [], 1, [["new", few, -1]], [], False, False]],
            [17, ["aten.repeat.default", [{"t": 0}, [nbytes // 16]], {}, [few], 0, [["new", many, -1]], [], False, False]],
            [18, ["aten.slice.Tensor", [{"t": 0}, 0, 0, 1], {}, [many], 0, [["view", one, 0]], [], False, False]],
        ],
        [[1, "stream.py", 7, "", False, -1]],
        [16, 1, 0, 1, 17, 1, 1, 2, 18, 1, 2, 3],
        [bytes(range(16))],
    )
    assert bytes(session.fetch(3)[2]) == b"\0"


def test_memory_of_another_session_is_reported_without_its_lines(server, worker):
    other = Session(server.address, token=server.token, heartbeat=60.0)
    try:
        hold(other, 120 * MIB)
        error = refused(lambda: mib(100)[:1].sum().item(), "120.0 MiB in those of others", "0 B in tensors of this session")
        assert "stream.py" not in str(error)
    finally:
        other.close()
    assert wait_until(lambda: worker()["live_bytes"] < MIB)  # the worker has heard of its end
    goes_on(worker)


def test_memory_that_torch_takes_within_an_op_is_bounded(server, worker):
    if server.backend != "torch":
        pytest.skip("the numpy engine takes little besides its results")
    held = [torch.ones(40, 512, 512, device="remote")]  # 40 MiB, and a result of as many
    assert held[0][0, 0, :2].sum().item() == 2
    refused(lambda: torch.logsumexp(held[0].expand(12, 40, 512, 512), 0)[0, 0, 0].item(), "memory", "logsumexp")
    held.clear()
    goes_on(worker)


# ---- the parts by themselves


@pytest.fixture
def steady() -> Iterator[None]:
    """Nothing that other tests left is freed meanwhile: budgets measure all memory of this process."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def budget(steady: None) -> Iterator[Budget]:
    made = Budget()
    made.open(64 * MIB)
    made.share(1)
    yield made
    made.close()


def test_a_budget_has_room_for_its_limit_and_no_more(budget):
    budget.need(60 * MIB)
    with pytest.raises(OutOfMemory, match=r"it needs 80.0 MiB, and 6\d"):
        budget.need(80 * MIB)
    assert budget.fits(50 * MIB) and not budget.fits(70 * MIB)
    kept = bytearray(40 * MIB)
    with pytest.raises(OutOfMemory, match=r"it needs 50.0 MiB, and 2\d"):
        budget.admit(50 * MIB)
    assert budget.used() > 39 * MIB  # what others free meanwhile is counted too
    del kept
    budget.admit(50 * MIB)


def test_stacks_of_threads_are_not_taken_for_tensors(budget):
    end = threading.Event()
    others = [threading.Thread(target=end.wait) for _ in range(6)]
    for thread in others:
        thread.start()
    try:
        budget.need(56 * MIB)
        with pytest.raises(OutOfMemory):
            budget.need(72 * MIB)
    finally:
        end.set()
        for thread in others:
            thread.join()
    # join() returns before the kernel's thread has ended, which frees its stack
    while any(Path(f"/proc/self/task/{thread.native_id}").exists() for thread in others):
        os.sched_yield()
    budget._leave_out_stacks()  # some of them are unmapped now, which a look that finds room does not see
    with pytest.raises(OutOfMemory):
        budget.need(72 * MIB)


def test_unplanned_memory_is_bounded_and_the_bound_ends_with_the_budget(budget):
    beyond = 64 * MIB + 3 * memory_budget.RESERVE_BYTES + (1 + (os.cpu_count() or 1)) * memory_budget.STACK_BYTES
    with pytest.raises(MemoryError):
        bytearray(beyond + memory_budget._freed())  # freed memory that the C library keeps is within the bound
    before = budget._before
    budget.close()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.usefixtures("steady")
def test_a_session_has_its_own_limit_on_a_worker():
    budget = Budget()
    budget.open(512 * MIB)
    executor = Executor(TorchEngine("cpu"), DeadPlane(), lambda *message: sent.append(message[0]), budget)
    sent: list[Any] = []
    try:
        budget.share(1)
        for session in (0, 1):
            made = torch.empty(5 * MIB)
            ones = Define(16 + session, "op", op("aten.add.Tensor", [T(0), T(0)], 1, [new(made)])).wire()
            executor.define([ones])
            first = session << BASE_BITS
            executor.tensors[first + 1] = torch.ones(5 * MIB)  # 20 MiB of 32
            budget.serve(session, 32 * MIB)
            executor.run([], 0)  # nothing fails in it: the next failure tells again who has the memory
            executor.run([16 + session, 0, first + 1, first + 2], 100)
            (trouble,) = sent
            sent.clear()
            assert isinstance(trouble, OpError) and (trouble.seq, trouble.kind) == (100, "memory")
            assert "it needs 20.0 MiB, and 12.0 MiB are left" in trouble.message
            assert trouble.memory["session_limit"] == 32 * MIB and trouble.memory["others"] == session * 20 * MIB
            assert trouble.memory["top"] == [[first + 1, 20 * MIB]]
        budget.serve(0, 0)
        executor.run([16, 0, 1, 2], 100)
        assert not sent and executor.tensors[2][0] == 2
    finally:
        budget.close()


@pytest.mark.usefixtures("steady")
def test_an_upload_that_exceeds_its_sessions_limit_leaves_nothing():
    budget, sent = Budget(), []
    budget.open(512 * MIB)
    executor = Executor(NumpyEngine(), DeadPlane(), lambda *message: sent.append(message[0]), budget)
    try:
        budget.share(1)
        budget.serve(0, 16 * MIB)
        rows = contiguous((20 * MIB,), "uint8")
        executor.define([Define(16, "upload", {"shape": [20 * MIB], "stride": [1], "dtype": "uint8"}).wire()])
        for offset in range(0, 20 * MIB, MIB):
            executor.uploads.receive(Data(5, offset, rows.nbytes), bytes(MIB))
        executor.run([16, 0, 1, 5], 100)
        assert [message.kind for message in sent] == ["memory"] and not executor.tensors
    finally:
        budget.close()


def test_cpu_workers_share_the_hosts_memory_and_one_by_hand_has_its_own():
    for own, wanted in ((0, int(available_bytes() * memory_budget.HOST_SHARE) // 4), (128 * MIB, 128 * MIB)):
        budget = Budget()
        budget.open(own)
        budget.share(4)
        assert budget.limit == wanted
        budget.close()
    with pytest.raises(ConfigError, match=r"the memory limit is 1\.0 MiB, want at least 16\.0 MiB"):
        Budget().open(MIB)


@pytest.mark.usefixtures("steady")
def test_ops_before_a_worker_knows_its_share_have_the_whole_limit():
    budget = Budget()
    budget.open(64 * MIB)
    try:
        budget.admit(1 * MIB)
        assert budget.fits(1 * MIB) and not budget.fits(1 << 40)
        budget.share(2)
        budget.admit(1 * MIB)
    finally:
        budget.close()


def test_a_control_groups_limit_counts_and_so_does_one_above_it(tmp_path: Path):
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    (root / "a/b").mkdir(parents=True)
    (root / "memory/c").mkdir(parents=True)
    own.write_text("3:cpu:/x\n2:cpuset,memory:/c\n0::/a/b\n")
    (root / "a/memory.max").write_text("5000\n")
    (root / "a/b/memory.max").write_text("max\n")
    (root / "memory/c/memory.limit_in_bytes").write_text("7000\n")
    assert sorted(process_settings._groups(own, root)) == [5000, 7000]


def test_memory_that_another_thread_is_about_to_free_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    budget = Budget(lambda session: 0)
    budget.open(128 * MIB)
    try:
        budget.share(1)
        real, high = budget._data, [128 * MIB] * 4
        monkeypatch.setattr(Budget, "_data", lambda self: real() + (high.pop() if high else 0))
        budget.unsure()
        budget.need(1 * MIB)
        assert not high
        high += [128 * MIB] * 9
        budget.unsure()
        with pytest.raises(OutOfMemory):  # not twice in a row: each op that finds no room would keep the others waiting
            budget.need(1 * MIB)
    finally:
        budget.close()
