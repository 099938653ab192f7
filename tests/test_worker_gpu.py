"""The torch engine on a GPU: the same numbers as on the CPU, fused attention kernels, transfers through host memory."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from worker_parts import Bench, new, op

from gt.ir.template import T
from gt.wire.messages import Data
from gt.worker.engine.torch import TorchEngine
from gt.worker.engine.torch.attention import CUDNN, EFFICIENT, FLASH, MATH, Call, bind
from tests.limits import limit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DRAW = {"seed": 1, "counter": 2}


@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(dtype, masked, p):
    torch.manual_seed(0)
    made = [torch.randn(2, 40, 4, 64).transpose(1, 2) for _ in range(3)]
    mask, grad = (torch.rand(40, 40) > 0.2) | torch.eye(40, dtype=torch.bool) if masked else None, torch.randn(2, 4, 40, 64)
    args = (p, not masked, None, False)
    out, lse = bind("gt.sdpa.default", None)(*made, mask, *args, **DRAW)
    want = [out, *bind("gt.sdpa_backward.default", None)(grad, *made, mask, out, lse, *args, **DRAW)]
    q, k, v, grad = (t.to("cuda", dtype) for t in (*made, grad))
    mask = mask.cuda() if masked else None
    with torch.no_grad():
        out, lse = bind("gt.sdpa.default", None)(q, k, v, mask, *args, **DRAW)
        got = [out, *bind("gt.sdpa_backward.default", None)(grad, q, k, v, mask, out, lse, *args, **DRAW)]
    assert lse.shape == q.shape[:-1] and lse.dtype == torch.float32
    loose = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours.float().cpu(), theirs, **loose)
    kernel = Call(q, k, v, mask, *args).kernel()
    assert kernel in ((MATH,) if p else (FLASH, CUDNN) if dtype == torch.bfloat16 and not masked else (EFFICIENT,))


@pytest.mark.parametrize("name, args", [("uniform_.default", ()), ("normal_.default", (1.0, 2.0)), ("random_.to", (7,))])
def test_random_values_are_those_of_the_cpu(name, args):
    call = [TorchEngine(d).bind(op(f"aten.{name}", [T(0), *args], 1, [["same", None, 0]], values=2)) for d in ("cpu", "cuda:0")]
    here, there = torch.empty(1000), torch.empty(1000, device="cuda")
    call[0](here, 5, 6)
    call[1](there, 5, 6)
    assert torch.equal(here, there.cpu())


def test_bytes_go_in_and_out():
    bench, engine = Bench(), TorchEngine()
    assert engine.device.type == "cuda"
    bench.executor.__init__(engine, bench.executor.worker.plane, bench._send)
    x = torch.randn(3, 4)
    bench.executor.uploads.receive(Data(9, 0, 48), x.numpy().tobytes())
    bench.do("upload", {"shape": [3, 4], "stride": [4, 1], "dtype": "float32"}, 1, 9)
    bench.do("op", op("aten.add.Tensor", [T(0), T(1)], 2, [new(x)]), 1, 1, 2)
    bench.do("fetch", {}, 2, 7)
    assert bench[2].is_cuda and b"".join(bytes(f[0]) for _, f in bench.sent) == (2 * x).numpy().tobytes()
    for reduction in ("sum", "max", "norm2"):
        bench.do("partial", {"keep": False, "op": reduction}, 2, 3)
        assert bench[3].is_cuda
    bench.do("fill", {"shape": [2], "stride": [1], "dtype": "bool"}, 4)
    assert bench[4].is_cuda


def test_how_far_it_is_in_what_it_was_given():
    engine = TorchEngine()
    x = torch.zeros(8192, 8192, device="cuda")
    x @ x
    torch.cuda.synchronize()
    for _ in range(100):  # some 20 ms each
        x @ x
    for _ in range(3):
        engine.progress.note()
    assert engine.progress.come() == 0
    torch.cuda.synchronize()
    end = time.monotonic() + limit(30)
    while engine.progress.come() < 3:
        assert time.monotonic() < end
    assert engine.progress.come() == 3


@pytest.mark.parametrize("waits", [False, True])
def test_how_far_it_is_while_a_value_is_fetched(waits):
    """What asks is answered at once, also where the driver is busy, as it is in a copy that waits (waits=True)."""
    engine = TorchEngine()
    x = torch.zeros(8192, 8192, device="cuda")
    x @ x
    torch.cuda.synchronize()
    for _ in range(100):
        y = x @ x
    engine.progress.note()
    fetching = threading.Thread(target=(lambda: y.to("cpu")) if waits else lambda: engine.packed(y))
    start = time.monotonic()
    fetching.start()
    longest = 0.0
    while fetching.is_alive():
        asked = time.monotonic()
        engine.progress.come()
        longest = max(longest, time.monotonic() - asked)
        fetching.join(0.01)
    assert longest < (time.monotonic() - start) / 4
