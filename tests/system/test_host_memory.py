"""Tensors between a program and its workers by shared memory: right values, bounded memory, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gt
from gt import api
from gt.client import current_session
from gt.client.exchange.arenas import ARENA_BYTES
from gt.client.session import Session
from gt.errors import SystemFailure
from gt.ir.instr import FIRST
from gt.ir.spec import contiguous
from gt.ir.template import Out, T, Template
from gt.wire.arena import NAME, OwnArena, PeerArena
from gt.wire.messages import OfferArena
from tests.helpers.processes import wait_until
from tests.helpers.serving import serving
from tests.system.test_process_sharing import SECRET, site

SPLIT = "dp: {workers: [0, 1]}\ntp_colpar: {workers: [0, 1]}\n"
BIG = 600  # rows of 600 numbers: more than what is sent within a batch of ops
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128,
]  # fmt: skip


def shared() -> int:
    return gt.stats()["dispatcher"]["tensor_bytes_shared"]


def values(dtype: torch.dtype) -> torch.Tensor:
    raw = torch.arange(1100 * 1000, dtype=torch.int32).reshape(1100, 1000) % 251
    return (raw % 2).bool() if dtype is torch.bool else raw.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True for equal bits."""
    as_bytes = (x.contiguous().reshape(-1).view(torch.uint8) if x.numel() else x.reshape(-1) for x in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*as_bytes)


def placed(host: torch.Tensor) -> torch.Tensor:
    """The tensor on a worker, which has it as soon as something waits for it."""
    remote = host.to("remote")
    remote[:1].clone()
    return remote


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_survives_both_ways(one, dtype):
    host, before = values(dtype), shared()
    back = placed(host).cpu()
    assert same(back, host)
    assert shared() - before >= 2 * host.nbytes if host.nbytes > 1 << 20 else True


LAYOUTS = {
    "transposed": lambda x: x.t(),
    "every second": lambda x: x[::2, 1::3],
    "channels last": lambda x: x.reshape(10, 110, 100, 10).contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:1].expand(700, 1000),
    "offset": lambda x: x.reshape(-1)[12345:],
    "conjugate": lambda x: x.to(torch.complex64).mul(1j).conj(),
    "negative": lambda x: x.to(torch.complex64).mul(1j).conj().imag,
    "no rows": lambda x: x[:0],
    "0-dim": lambda x: x[3, 4],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_survive_both_ways(one, layout):
    host = LAYOUTS[layout](values(torch.float32))
    remote = host.to("remote")
    assert same(remote.cpu(), host.resolve_conj().resolve_neg())
    assert same((remote * 1).cpu(), (host * 1).resolve_conj())
    turned = list(reversed(range(host.dim())))
    assert same(remote.permute(turned).cpu(), host.permute(turned).resolve_conj().resolve_neg())


def test_a_tensor_larger_than_an_arena(one):
    host = torch.arange(ARENA_BYTES // 4 + 12345, dtype=torch.int32)
    before = shared()
    assert same(placed(host).cpu(), host) and shared() - before >= 2 * host.nbytes


def test_the_program_may_change_its_tensor_at_once(one):
    host = torch.zeros(BIG, BIG)
    sums = []
    for n in range(20):
        host.fill_(n)
        remote = host.to("remote", non_blocking=True)
        host.fill_(-1)
        sums.append(remote.sum())
    assert [total.item() for total in sums] == [n * BIG * BIG for n in range(20)]
    pinned = torch.ones(BIG, BIG)
    target = torch.zeros(BIG, BIG, device="remote")
    target.copy_(pinned, non_blocking=True)
    pinned.zero_()
    assert target.sum().item() == BIG * BIG


def test_a_fetched_value_is_the_programs_own(one):
    remote = placed(torch.ones(BIG, BIG))
    first, second = remote.cpu(), (remote + 1).cpu()
    first.zero_()
    assert second.sum().item() == 2 * BIG * BIG and remote.cpu().sum().item() == BIG * BIG
    array = second.numpy()
    pid = os.fork()
    if pid == 0:  # a DataLoader's worker, say
        array[:] = 0  # torch's threads are not in a forked child
        os._exit(0)
    os.waitpid(pid, 0)
    assert second.sum().item() == 2 * BIG * BIG


def test_an_upload_in_a_forked_child_is_an_error_and_harms_no_upload(one):
    host, other = torch.ones(BIG, BIG), torch.zeros(BIG, BIG)
    remote = host.to("remote")
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                other.to("remote")
            except SystemFailure:
                code = 0
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert remote.sum().item() == BIG * BIG


@pytest.mark.parametrize("group", ["dp", "tp_colpar"])
def test_each_worker_takes_its_part(session, group):
    session(SPLIT)
    x, weight = torch.randn(512, 768), torch.randn(1024, 768)
    before = gt.stats()["dispatcher"]["tensor_bytes_shared"]
    layer = torch.nn.Linear(768, 1024, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    remote = layer.to("remote")
    with gt.signal.context(group):
        y = remote(x.to("remote"))
    assert torch.allclose(y.cpu(), x @ weight.t(), atol=1e-3)
    assert same(remote.weight.cpu(), weight)
    split = len(gt.inspect(remote.weight)["pieces"]) == 2 and group == "tp_colpar"
    assert gt.inspect(remote.weight)["layout"] == ("[S(0)]" if split else "[R]")
    moved = gt.stats()["dispatcher"]["tensor_bytes_shared"] - before
    assert moved >= weight.nbytes * (1 if split else 2) + y.numel() * 4


def test_a_captured_step_with_a_batch_from_the_host_uses_bounded_memory(one):
    step = gt.compile(lambda x: x.sum())
    host = torch.zeros(512, 1024)
    sums = []
    for n in range(60):
        host.fill_(n)
        sums.append(step(host))
    assert [total.item() for total in sums] == [n * 512 * 1024 for n in range(60)]
    arenas = current_session.current().session._arenas
    assert arenas.used == 0 and len(arenas._pools) <= 5, "256 MiB are in flight at most"


def test_a_loop_that_reads_nothing_waits_for_workers_to_read(one):
    """200 batches of 4 MiB: the program is faster than its worker, and stays within the bound."""
    host, most = torch.ones(1024, 1024), 0
    arenas = current_session.current().session._arenas
    total = torch.zeros((), device="remote")
    for _ in range(200):
        total += host.to("remote").sum()
        most = max(most, arenas.used)
    assert total.item() == 200 * 1024 * 1024 and most <= 260 << 20


def test_many_tensors_that_nothing_uses_yet_do_not_block(one):
    weights = [torch.full((1024, 1024), float(n)) for n in range(80)]
    remote = [weight.to("remote") for weight in weights]
    assert [x[0, 0].item() for x in remote] == list(range(80))
    assert same(remote[79].cpu(), weights[79])


def test_uploads_wait_for_ops_that_the_dispatcher_keeps(session):
    """The last op of each batch may be the first of a fused projection: its plan depends on ops that follow."""
    session("tp_colpar: {workers: [0, 1]}\ntp_rowpar: {workers: [0, 1]}\n")
    layer, host = torch.nn.Linear(1024, 6).to("remote"), torch.ones(16384, 1024)
    expected = layer.weight.cpu().sum().item() * 16384 + layer.bias.cpu().sum().item() * 16384
    for _ in range(8):  # 64 MiB each
        with gt.signal.context("tp_colpar"):
            y = layer(host.to("remote"))
    assert y.sum().item() == pytest.approx(expected, rel=1e-3, abs=50)


def test_a_checkpoint_passes_in_shared_memory(one, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.Linear(900, 700))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    remote = model.to("remote")
    remote(torch.zeros(1, 700, device="remote")).sum().item()
    before = shared()
    torch.save({name: value.cpu() for name, value in remote.state_dict().items()}, tmp_path / "model.pt")
    assert shared() - before >= 2 * 700 * 900 * 4
    found = torch.load(tmp_path / "model.pt")
    assert all(same(found[name], expected[name]) for name in expected)


# ---- several programs


SHAPE = (700, 800)
SPEC = contiguous(SHAPE, "float32")
TEMPLATES = [
    [FIRST, Template("gt.upload.default", (), (), (), 1, (Out("new", SPEC),)).wire()],
    [FIRST + 1, Template("aten.neg.default", (T(0),), (), (SPEC,), 0, (Out("new", SPEC),), pointwise=True).wire()],
]


class Program:
    """A session that sends arrays and reads their negatives back."""

    def __init__(self, address: str, **how: Any) -> None:
        self.session = Session(address, **how)
        self.templates: list = TEMPLATES
        self.ids = itertools.count(1)

    def send(self, array: np.ndarray) -> int:
        host, negative = next(self.ids), next(self.ids)
        code = [FIRST, 1, self.session.keep(host, array), host, FIRST + 1, 1, host, negative]
        origins = [[1, "t.py", 1, "", False, -1]] if self.templates else []
        self.session.submit(self.templates, origins, code)
        self.templates = []
        return negative

    def read(self, tensor: int) -> np.ndarray:
        shape, dtype, data = self.session.fetch(tensor, SPEC.nbytes)
        return data.view(dtype).reshape(shape)

    def shared(self) -> int:
        return self.session.stats()["dispatcher"]["tensor_bytes_shared"]

    def turn(self, number: float) -> None:
        array = np.full(SHAPE, number, np.float32)
        found = self.read(self.send(array))
        assert np.array_equal(found, -array)


def test_a_worker_that_reports_what_it_was_sent_opens_no_arena_of_another_session(monkeypatch):
    """Such a worker is sent the offers of all sessions, if it says to be on their host. Another session offers the same."""
    sent, offers = [], OwnArena.offer
    opened = PeerArena.__init__

    def spy(arena: PeerArena, offer: OfferArena) -> None:
        sent.append(offer)
        opened(arena, offer)

    monkeypatch.setattr(PeerArena, "__init__", spy)
    with serving(1, "numpy") as server:
        owner, thief = Program(server.address), Program(server.address)
        owner.turn(5)
        assert owner.shared() and sent
        monkeypatch.setattr(OwnArena, "offer", lambda arena: replace(sent[0], arena=offers(arena).arena))
        thief.turn(6)
        assert not thief.shared() and len(sent) > 1
        for program in (owner, thief):
            program.session.close()


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_four_programs_at_once_read_their_own_values(backend):
    with serving(2, backend) as server:
        done: list[int] = []

        def program(seed: int) -> None:
            mine = Program(server.address)
            tensors = {mine.send(np.full(SHAPE, seed + n, np.float32)): seed + n for n in range(8)}
            for tensor, number in tensors.items():
                assert np.array_equal(mine.read(tensor), np.full(SHAPE, -number, np.float32))
            done.append(mine.shared())
            mine.session.close()

        threads = [threading.Thread(target=program, args=(1000 * seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(done) == 4 and min(done) >= 15 * SPEC.nbytes, done


# ---- without a proof


@pytest.mark.parametrize(
    "field, value", [("nonce", "0" * 32), ("pid", 1), ("fd", 0), ("home", "another boot/1"), ("nbytes", 1 << 30)]
)
def test_without_the_proof_everything_passes_in_messages(monkeypatch, field, value):
    offer = OwnArena.offer
    monkeypatch.setattr(OwnArena, "offer", lambda arena: replace(offer(arena), **{field: value}))
    with serving(1, "numpy") as server:
        mine = Program(server.address)
        for n in range(4):
            mine.turn(n)
        assert mine.shared() == 0 and not mine.session._arenas.used
        mine.session.close()


def test_a_system_without_such_memory_sends_messages(monkeypatch):
    def none(*args: Any) -> int:
        raise OSError("not in this sandbox")

    with serving(1, "numpy") as server:
        Program(server.address).session.close()  # the worker is there, with a heap
        monkeypatch.setattr(os, "memfd_create", none)
        mine = Program(server.address)
        for n in range(4):
            mine.turn(n)
        assert mine.shared() == 0
        mine.session.close()


def test_a_program_that_names_another_ones_arena_gets_messages_and_reads_nothing(monkeypatch):
    """It states the other's process and descriptor, and cannot state its nonce."""
    offer, offers = OwnArena.offer, []

    def recorded(arena: OwnArena) -> OfferArena:
        made = offer(arena)
        if offers:
            made = replace(offers[0], arena=made.arena, nonce=made.nonce)
        offers.append(made)
        return made

    monkeypatch.setattr(OwnArena, "offer", recorded)
    with serving(1, "numpy") as server:
        owner, other = Program(server.address), Program(server.address)
        owner.turn(5)
        other.turn(6)
        assert owner.shared() and not other.shared()
        for program in (owner, other):
            program.session.close()


# ---- killed processes


def mapped(pid: int) -> int:
    """Arenas that a process maps."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/maps").read_text().count(f"memfd:{NAME}")
    return 0


CLIENT = """
import sys, torch, gt
gt.connect(sys.argv[1], token=sys.argv[2], config="")
kept = [torch.full((1024, 1024), float(n)).to("remote") for n in range(20)]
print(sum(x[0, 0].item() for x in kept), kept[3].cpu().sum().item(), flush=True)
while True:  # killed at any moment of this
    y = torch.ones(2048, 1024).to("remote")
    (y + 1).cpu()
    kept[5].copy_(torch.zeros(1024, 1024))
"""


@pytest.fixture
def own() -> Iterator[dict[str, int]]:
    """Two CPU workers of this test's own, to be harmed: name in ps -> pid."""
    gt.cpu_workers(2, config="")
    nursery = api._Started.local._process.pid
    pids = Path(f"/proc/{nursery}/task/{nursery}/children").read_text().split()
    yield {Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(): int(pid) for pid in pids}
    gt.shutdown()


def test_a_killed_program_leaves_no_memory_in_workers_and_no_file(own):
    local = api._Started.local
    before = set(os.listdir("/dev/shm"))
    for _ in range(3):
        line = [sys.executable, "-c", CLIENT, local.address, local.token]
        client = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None
        assert client.stdout.readline() == f"{float(sum(range(20)))} {3.0 * (1 << 20)}\n"
        assert sum(mapped(pid) for pid in own.values())
        client.kill()
        client.wait()
        client.stdout.close()
        assert wait_until(lambda: not sum(mapped(pid) for pid in own.values()))
    assert wait_until(lambda: set(os.listdir("/dev/shm")) <= before)  # tests beside this one have files there for a moment
    assert torch.ones(600, 600).to("remote").sum().item() == 360_000


def test_a_killed_worker_and_a_killed_server_leave_no_memory(own):
    x = placed(torch.ones(1024, 1024))
    assert x.cpu().sum().item() == 1 << 20
    pool = current_session.current().session._arenas
    elsewhere = mapped(os.getpid()) - len(pool._pools)
    os.kill(own["gt.worker 0"], signal.SIGKILL)
    os.kill(own["gt.worker 1"], signal.SIGKILL)
    with pytest.raises(gt.WorkerLost):
        x.cpu()
    found = 0.0
    while not found:  # new processes take the workers' places, and share the arenas of before
        with contextlib.suppress(gt.WorkerLost):
            found = placed(torch.ones(1024, 1024)).cpu().sum().item()
    assert found == 1 << 20
    gc.collect()  # errors hold the tensors of their frames
    for _ in range(3):  # what is freed is freed with the next batch
        assert torch.ones(2, device="remote").sum().item() == 2
    assert pool.used == 0
    before, moved = shared(), torch.ones(1024, 1024)
    assert placed(moved).cpu().sum().item() == 1 << 20 and shared() - before >= 2 * moved.nbytes
    os.kill(own["gt.server"], signal.SIGKILL)
    with pytest.raises(gt.DispatcherLost):
        placed(torch.ones(1024, 1024)).cpu()
    gt.shutdown()
    gc.collect()
    assert mapped(os.getpid()) <= elsewhere, f"arenas of its own: {pool._pools}"


def test_exclusive_workers_start_afresh_without_the_memory_of_the_session_before(tmp_path):
    with site(tmp_path, "w0") as server:
        for n in range(2):
            mine = Program(server.address, token=SECRET, switches={"workers": 1})
            assert mapped(server.workers["w0"].pid) == 0
            mine.turn(n)
            mine.turn(n + 10)
            assert mine.shared() >= 3 * SPEC.nbytes and mapped(server.workers["w0"].pid) == 1
            mine.session.close()
