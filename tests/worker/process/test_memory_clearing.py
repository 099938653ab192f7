"""A session reads what it wrote, or zeros: never what another session left in memory, however a tensor is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gt
from gt.client.session import Session
from gt.ir.instr import FREE
from gt.ir.spec import contiguous
from gt.launch import local
from gt.worker.engine.torch import memory

SECRET = 0x5A
SIZES = (1, 8, 64, 100, 256, 1000, 1024, 4096, 5000, 16384, 65536, 100000, 1 << 20)
DTYPES = (torch.uint8, torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


def leave_secrets(address: str, token: str) -> None:
    """A session that has the worker compute on secrets of many sizes, frees them and leaves."""
    session = Session(address, token=token)
    try:
        specs = [contiguous((n,), "uint8").wire() for n in SIZES]
        templates, code, number = [], [], 1
        for n, spec in enumerate(specs):
            upload = ["gt.upload.default", [], {}, [], 1, [["new", spec, -1]], [], False, False]
            both = ["aten.bitwise_or.Tensor", [{"t": 0}, {"t": 1}], {}, [spec, spec], 0, [["new", spec, -1]], [], True, False]
            templates += [[100 + n, upload], [200 + n, both]]
        for _ in range(8):
            for n in range(len(SIZES)):
                code += [100 + n, 0, n, number, 200 + n, 0, number, number, number + 1]
                number += 2
        session.submit(templates, [], code, [bytes([SECRET]) * n for n in SIZES])
        assert bytes(session.fetch(number - 1)[2]) == bytes([SECRET]) * SIZES[-1]
        session.submit([], [], [FREE, number - 1, *range(1, number)], [])
        session.synchronize()
    finally:
        session.close()


def unwritten(backend: str) -> Iterator[torch.Tensor]:
    """New tensors that nothing has written, made in every way."""
    for count in SIZES:
        for dtype in DTYPES if backend == "torch" else [d for d in DTYPES if d != torch.bfloat16]:
            how = {"dtype": dtype, "device": "remote"}
            n = max(count // dtype.itemsize, 1)
            first = torch.empty(n, **how)
            yield first
            yield torch.empty_like(first)
            yield first.new_empty(n)
            yield torch.empty_strided((n, 2), (1, n), **how)
            yield first.new_empty_strided((n, 2), (2, 1))
            yield torch.empty_permuted((n, 2), (1, 0), **how)
            yield torch.empty_strided((4, 3), (n + 3, 1), **how).as_strided((n + 3,), (1,), 1)  # what lies between
    if backend == "torch":
        for n in SIZES:
            yield torch.zeros(1, device="remote").resize_(n)[1:]
            yield torch.zeros(3, device="remote").resize_as_(torch.ones(n, device="remote"))[3:]


def dirty(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that are not zero."""
    return int((tensor.cpu().contiguous().view(-1).view(torch.uint8) != 0).sum())


@pytest.fixture(params=["torch", "numpy"])
def server(request) -> Iterator[Any]:
    running = local.start(1, backend=request.param)
    running.backend = request.param
    yield running
    running.stop()


def test_nothing_of_another_session_is_in_a_new_tensor_in_eager_ops_and_in_a_program_from_before(server):
    gt.connect(server.address, token=server.token)

    @gt.compile
    def step(x):
        return torch.empty(5000, device=x.device), torch.empty_like(x), x.new_empty(64, 3), x + 1

    @gt.compile(backend="inductor")
    def compiled(x):
        y = torch.empty_like(x)
        return torch.empty(700, device=x.device), y, (x * 2 + 1).sin()

    try:
        x = torch.ones(1000, device="remote")
        for _ in range(3):
            made, also = step(x), compiled(x)
        assert gt.stats()["dispatcher"]["programs"] == 2
        leave_secrets(server.address, server.token)
        for _ in range(2):
            assert [dirty(tensor) for tensor in (*step(x)[:3], *compiled(x)[:2])] == [0] * 5
        assert step(x)[3].sum().item() == 2000
        found = [(n, tuple(t.shape), t.dtype) for n, t in enumerate(unwritten(server.backend)) if dirty(t)]
        assert not found
        del made, also
    finally:
        gt.shutdown()


@pytest.fixture
def unswitched(monkeypatch) -> None:
    """As on a GPU: the allocator cannot be told to clear what it hands out."""
    monkeypatch.setattr(memory, "switch", lambda: None)


def test_ops_clear_memory_that_the_allocator_cannot_clear(unswitched):
    from gt.ir.template import T
    from tests.helpers.worker_parts import Bench, new, op

    bench = Bench()
    poison = [torch.full((n,), 7.0) for n in (4, 50, 300, 4000) for _ in range(20)]
    del poison
    size = [[4, 50], [50, 1]]
    cases = {
        "empty.memory_format": [[200]],
        "empty_strided.default": size,
        "empty_permuted.default": [[4, 50], [1, 0]],
        "new_empty.default": [T(0), [200]],
        "new_empty_strided.default": [T(0), *size],
        "empty_like.default": [T(0)],
    }
    for name, args in cases.items():
        takes = T(0) in args
        bench.put(_1=torch.ones(4, 50))
        made = getattr(torch.ops.aten, name.split(".")[0])(*[torch.ones(4, 50) if arg == T(0) else arg for arg in args])
        bench.do("op", op(f"aten.{name}", args, int(takes), [new(made)]), *([1] if takes else []), 2)
        assert bench[2].shape == made.shape and not bench[2].any(), name
    gaps = memory.cleared("empty_strided", torch.ops.aten.empty_strided.default)([4, 3], [50, 1])
    assert gaps.stride() == (50, 1) and not gaps.as_strided((153,), (1,)).any()
    grown = memory.cleared("resize_", torch.ops.aten.resize_.default)(torch.ones(3), [4000])
    assert grown.tolist() == [1.0] * 3 + [0.0] * 3997
    assert not memory.laid_out((3, 2), (40, 1), torch.float32, torch.device("cpu")).as_strided((38,), (1,), 2).any()


def test_the_hosts_allocator_can_be_told_to_clear_what_it_hands_out():
    switch = memory.switch()
    assert switch is not None, "this torch has no such switch: ops clear by themselves"
    before = switch.value  # other tests' workers are threads of this process
    try:
        switch.value = True
        poison = [torch.full((n,), SECRET, dtype=torch.uint8) for n in SIZES for _ in range(20)]
        del poison
        assert not any(torch.empty(n, dtype=torch.uint8).any() for n in SIZES for _ in range(10))
    finally:
        switch.value = before
