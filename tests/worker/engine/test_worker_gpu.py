"""The torch engine on a GPU: the same numbers as on the CPU, fused attention kernels, transfers through host memory."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from gt.ir.template import T
from gt.wire.messages import Data
from gt.worker.engine.philox import Words
from gt.worker.engine.torch import TorchEngine
from gt.worker.engine.torch.gpu.cuda import Cuda
from gt.worker.engine.torch.gpu.fused_attention import MATH
from gt.worker.engine.torch.layers.attention import bind, choice
from gt.worker.engine.torch.layers.attention_call import AttentionCall
from gt.worker.instructions.pieces import as_boxes, local
from tests.helpers.limits import limit
from tests.helpers.worker_parts import Bench, new, op

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.local_cuda,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # the thread of torch's backward may be new to CUDA
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DRAW = {"seed": 1, "counter": 2}


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")  # in autograd's thread, on a fresh process
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
    kernel = choice(AttentionCall(q, k, v, mask, *args)).kernel
    assert kernel == MATH if p else kernel != MATH


def seeds_of_a_gpu():
    from gt.worker.engine.torch.gpu.attention_seeds import AttentionSeeds  # wants Triton
    from gt.worker.engine.torch.gpu.philox_kernel import PhiloxKey

    return AttentionSeeds(PhiloxKey(torch.device("cuda:0")))


def attend(seeds, args: tuple, counter: int, place: list | None = None, strides: bool = True) -> tuple[torch.Tensor, ...]:
    """out, and gradients of q, k and v for a gradient of ones. strides: backward gets out with those of forward's kernel."""
    q, k, v, mask, *rest = args
    draw = {"seed": 5, "counter": counter}
    with torch.no_grad():
        out, lse = bind("gt.sdpa.default", place, seeds)(q, k, v, mask, *rest, **draw)
        backward = bind("gt.sdpa_backward.default", place, seeds)
        out = out if strides else out.contiguous()
        return out, *backward(torch.ones_like(out), q, k, v, mask, out, lse, *rest, **draw)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [64, 60])
@pytest.mark.parametrize("kind", ["causal", "grouped", "masked"])
def test_dropout_of_attention_is_drawn_by_its_seed_forward_and_backward(kind, size, exact):
    """out is linear in v, by the matrix of weights that dropout left: so the sum of out is v times its gradient."""
    torch.manual_seed(0)
    seeds = seeds_of_a_gpu()
    seeds.exact = exact
    groups = 2 if kind == "grouped" else 8
    q, k, v = (torch.randn(4, n, 128, size, device="cuda", dtype=torch.bfloat16) for n in (8, groups, groups))
    mask = torch.rand(4, 1, 128, 128, device="cuda") > 0.3 if kind == "masked" else None
    args = (q, k, torch.ones_like(v), mask, 0.25, kind == "causal", None, kind == "grouped")
    call = AttentionCall(*args)
    assert (choice(call, seeds).kernel == MATH) is exact
    out, of_q, of_k, of_v = attend(seeds, args, 7)
    assert abs(out.float().mean().item() - 1) < 0.02 and out.float().std() > 0.02  # as much as without, and not everywhere
    again = attend(seeds, args, 7, strides=False)
    assert torch.equal(out, again[0])
    for ours, theirs in zip((of_q, of_k, of_v), again[1:], strict=True):  # sums of atomic adds may differ in their last bits
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)
    assert not torch.equal(out, attend(seeds, args, 8)[0])
    shape, there = [8, *q.shape[1:3], 128], [[[4, 8], [0, 8], [0, 128], [0, 128]]]
    assert not torch.equal(out, attend(seeds, args, 7, [shape, there])[0])  # another piece of a batch
    random = (q, k, v, *args[3:])
    out, *_, of_v = attend(seeds, random, 7)
    assert abs(out.double().sum() - (v.double() * of_v.double()).sum()) < 1e-2 * out.double().abs().sum()


def test_a_graph_draws_dropout_of_attention_anew_with_the_seeds_of_single_calls():
    torch.manual_seed(0)
    device = torch.device("cuda:0")
    seeds = seeds_of_a_gpu()
    cuda = Cuda(device, seeds)
    q, k, v = (torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = torch.rand(2, 1, 64, 64, device="cuda") > 0.3
    for case in ((q, k, v, None, 0.25, True, None, False), (q, k, v, mask, 0.25, False, None, False)):
        seeds.key.set(5, 100)
        seeds.program_draws = 6  # forward and backward, twice, and once more as checkpointing computes it
        made: list[tuple] = []
        attend(seeds, case, 100)  # loads the kernels
        replay = cuda.record(lambda case=case, made=made: made.extend(attend(seeds, case, at) for at in (100, 101, 100)))
        drawn = set()
        for counter in (100, 240, 100):
            seeds.key.set(5, counter)
            replay()
            got = [tuple(t.clone() for t in row) for row in made]
            for row, at in zip(got, (counter, counter + 1, counter), strict=True):
                want = attend(seeds, case, at)
                assert torch.equal(row[0], want[0])
                for ours, theirs in zip(row[1:], want[1:], strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)
            seeds.key.set(5, counter)
            drawn.add(got[0][0].double().sum().item())
        assert len(drawn) == 2


def test_the_device_mixes_seeds_as_the_host():
    from gt.worker.engine.torch.gpu.attention_seeds import mixed_seed

    seeds = seeds_of_a_gpu()
    whole = [8, 4, 16, 16]
    for seed, counter, box in ((0, 0, None), (2**63 + 5, 2**62, None), (7, 123, [[2, 4], [0, 4], [0, 16], [0, 16]])):
        words = Words(seed, counter, None if box is None else [whole, [box]])
        want = mixed_seed(seed, counter, 0 if box is None else 2 * 4 * 16 * 16)
        assert seeds.device_state(words).tolist() == [want, 0]
        assert seeds.state(words)[0].item() == want


BATCH, HEADS, LONG = 2, 8, 48
MASKS = {
    "none": lambda keys: None,
    "bool, one for all": lambda keys: torch.rand(LONG, keys) > 0.3,
    "bool, one a batch": lambda keys: torch.rand(BATCH, 1, LONG, keys) > 0.3,
    "bool, of padding": lambda keys: torch.arange(keys) < torch.tensor([keys, keys - 5]).view(BATCH, 1, 1, 1),
    "float, one a head": lambda keys: torch.randn(1, HEADS, LONG, keys),
    "float, whole": lambda keys: torch.randn(BATCH, HEADS, LONG, keys),
    "float, one a query": lambda keys: torch.randn(BATCH, 1, LONG, 1),
}
HEADS_AND_SIZES = {  # heads of keys, head size, that of values, keys
    "plain": (HEADS, 64, 64, LONG),
    "grouped": (2, 64, 64, LONG),
    "one for all": (1, 64, 64, LONG),
    "odd size": (HEADS, 60, 60, LONG),
    "grouped, odd size": (2, 60, 60, LONG),
    "other values": (HEADS, 64, 32, LONG),
    "odd number of keys": (HEADS, 64, 64, 37),
    "large heads": (HEADS, 192, 192, LONG),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", HEADS_AND_SIZES)
def test_attention_of_any_kind_is_that_of_the_maths(sizes, mask, causal):
    """Forward and backward, against float64 maths of torch's own, with the kernel that torch would use or a better one."""
    if causal and mask != "none":
        pytest.skip("torch takes a mask or causal, not both")
    torch.manual_seed(0)
    groups, size, values, keys = HEADS_AND_SIZES[sizes]
    shapes = (BATCH, LONG, HEADS, size), (BATCH, keys, groups, size), (BATCH, keys, groups, values)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for shape in shapes)
    given = MASKS[mask](keys)
    given = given if given is None else given.cuda() if given.dtype == torch.bool else given.to("cuda", torch.bfloat16)
    grad = torch.randn(BATCH, HEADS, LONG, values, device="cuda", dtype=torch.bfloat16)
    args = (0.0, causal, None, groups != HEADS)
    with torch.no_grad():
        out, lse = bind("gt.sdpa.default", None)(q, k, v, given, *args, **DRAW)
        got = [out, *bind("gt.sdpa_backward.default", None)(grad, q, k, v, given, out, lse, *args, **DRAW)]
    live = [t.double().requires_grad_() for t in (q, k, v)]
    exact = given if given is None or given.dtype == torch.bool else given.double()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = torch.nn.functional.scaled_dot_product_attention(*live, exact, 0.0, causal, enable_gqa=groups != HEADS)
    want = [want, *torch.autograd.grad(want, live, grad.double())]
    for name, ours, theirs in zip(("out", "of q", "of k", "of v"), got, want, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), theirs, rtol=4e-2, atol=4e-2, msg=lambda text, name=name: f"{name}: {text}")
    assert choice(AttentionCall(q, k, v, given, *args)).kernel != MATH


LEARNED = {
    **{name: mask for name, mask in MASKS.items() if name.startswith("float")},
    "float, of a window": lambda keys: torch.randn(HEADS, LONG, keys),
    "float, one a key": lambda keys: torch.randn(keys),
}


@pytest.mark.parametrize("mask", LEARNED)
@pytest.mark.parametrize("sizes", HEADS_AND_SIZES)
def test_a_learned_bias_has_its_gradient_by_a_fused_kernel(sizes, mask):
    """Forward and backward, against float64 maths of torch's own."""
    torch.manual_seed(0)
    groups, size, values, keys = HEADS_AND_SIZES[sizes]
    shapes = (BATCH, LONG, HEADS, size), (BATCH, keys, groups, size), (BATCH, keys, groups, values)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for shape in shapes)
    bias = LEARNED[mask](keys).to("cuda", torch.bfloat16)
    grad = torch.randn(BATCH, HEADS, LONG, values, device="cuda", dtype=torch.bfloat16)
    args = (0.0, False, None, groups != HEADS)
    with torch.no_grad():
        out, lse = bind("gt.sdpa_biased.default", None)(q, k, v, bias, *args, **DRAW)
        got = [out, *bind("gt.sdpa_biased_backward.default", None)(grad, q, k, v, bias, out, lse, *args, **DRAW)]
    live = [t.double().requires_grad_() for t in (q, k, v, bias)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = torch.nn.functional.scaled_dot_product_attention(*live, 0.0, False, enable_gqa=groups != HEADS)
    want = [want, *torch.autograd.grad(want, live, grad.double())]
    summed = BATCH * HEADS * LONG * keys / bias.numel()  # terms of an element of the bias's gradient, each rounded
    for name, ours, theirs in zip(("out", "of q", "of k", "of v", "of the bias"), got, want, strict=True):
        assert ours.shape == theirs.shape
        loose = {"rtol": 4e-2, "atol": 4e-2 * (1 + summed**0.5 / 8 if name == "of the bias" else 1)}
        torch.testing.assert_close(ours.double(), theirs, **loose, msg=lambda text, name=name: f"{name}: {text}")
    assert choice(AttentionCall(q, k, v, bias, *args, learns=True)).kernel != MATH


BOXES = {  # global shape, boxes that the worker holds
    "whole": None,
    "rows": [[6, 10, 8], [[[2, 5], [0, 10], [0, 8]]]],
    "columns": [[6, 10, 8], [[[0, 6], [0, 10], [3, 7]]]],
    "middle": [[6, 10, 8], [[[1, 6], [2, 9], [3, 7]]]],
    "middle of four dims": [[4, 6, 5, 8], [[[1, 3], [2, 5], [1, 4], [3, 7]]]],
    "two": [[6, 10, 8], [[[0, 2], [0, 10], [0, 8]], [[4, 6], [0, 10], [0, 8]]]],
}
DRAWN = {
    "uniform_.default": (1.5, 4.0), "normal_.default": (1.0, 2.0), "bernoulli_.float": (0.3,), "random_.to": (7,),
    "exponential_.default": (), "native_dropout.default": (0.3, True),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("boxes", BOXES)
@pytest.mark.parametrize("name", DRAWN)
def test_random_values_are_those_of_the_cpu(name, boxes, dtype):
    """Drawn by kernels or on the host; a GPU's logarithm and cosine may differ in the last digits."""
    place = BOXES[boxes]
    shape = (6, 10, 8) if place is None else local(as_boxes(place[1]))[0]
    found = []
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype)
    for device in ("cpu", "cuda:0"):
        held = x.to(device).clone()
        if name.startswith("native"):
            strides = list(torch.empty(shape).stride())
            specs = [["new", [list(shape), strides, 0, str(kind)[6:]], -1] for kind in (dtype, torch.bool)]
            payload = op(f"aten.{name}", [T(0), *DRAWN[name]], 1, specs, values=2)
        else:
            payload = op(f"aten.{name}", [T(0), *DRAWN[name]], 1, [["same", None, 0]], values=2)
        made = TorchEngine(device).bind({**payload, "random": place})(held, 2**63 + 5, 2**40 + 6)
        found.append([t.cpu() for t in (made if made is not None and name.startswith("native") else [held])])
    for ours, theirs in zip(*found, strict=True):
        if name == "normal_.default":
            torch.testing.assert_close(ours, theirs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
        else:
            assert torch.equal(ours, theirs)


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


def test_progress_within_the_work_given():
    engine = TorchEngine()
    x = torch.zeros(8192, 8192, device="cuda")
    x @ x
    torch.cuda.synchronize()
    for _ in range(100):  # some 20 ms each
        x @ x
    for _ in range(3):
        engine.progress.note()
    assert engine.progress.completed() == 0
    torch.cuda.synchronize()
    end = time.monotonic() + limit(30)
    while engine.progress.completed() < 3:
        assert time.monotonic() < end
    assert engine.progress.completed() == 3


@pytest.mark.parametrize("waits", [False, True])
def test_progress_while_a_value_is_fetched(waits):
    """Progress is answered at once, even while the driver is busy with a blocking copy (waits=True)."""
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
        engine.progress.completed()
        longest = max(longest, time.monotonic() - asked)
        fetching.join(0.01)
    assert longest < (time.monotonic() - start) / 4
