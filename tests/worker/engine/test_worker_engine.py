"""The torch engine has the bits of torch: every ATen call of a list of programs is done once more from a definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gt.errors import UnsupportedOp
from gt.ir.schema import TABLE
from gt.ir.template import Const, T, V
from gt.worker.engine.torch import NAME, TorchEngine
from tests.helpers.worker_parts import new, op

ENGINE = TorchEngine("cpu")
CONSTANTS = {torch.dtype: "dtype", torch.memory_format: "memory_format", torch.layout: "layout"}


class ThroughEngine(TorchDispatchMode):
    """Does every ATen call once more from a definition and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = f"aten.{func._schema.name.split('::')[1]}.{func._overloadname}"
        if name not in TABLE or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        values: list[Any] = []
        forms = [self.form(a, tensors, values) for a in args]
        named = {k: self.form(v, tensors, values) for k, v in kwargs.items() if v is not None}
        result = func(*args, **kwargs)
        flat = list(result) if isinstance(result, (tuple, list)) else [result]
        if func._schema.is_mutable or not all(isinstance(r, torch.Tensor) for r in flat):
            return result
        fresh = not any(r.alias_info for r in func._schema.returns)
        outs = [new(r) if fresh else ["view", None, 0] for r in flat]
        call = ENGINE.bind(op(name, forms, len(tensors), outs, len(values), **named))
        made = call(*tensors, *values)
        made = [made] if len(flat) == 1 else list(made)
        self.seen.add(name)
        if "empty" not in name:
            for ours, theirs in zip(made, flat, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, check_stride=ours.numel() > 0)
        return result

    def form(self, arg: Any, tensors: list, values: list) -> Any:
        if isinstance(arg, torch.Tensor):
            tensors.append(arg)
            return T(len(tensors) - 1)
        if type(arg) is float:
            values.append(arg)
            return V(len(values) - 1)
        if isinstance(arg, complex):
            return Const("complex", (arg.real, arg.imag))
        if isinstance(arg, torch.device):
            return Const("device", 0)
        if isinstance(arg, (list, tuple)):
            return [self.form(a, tensors, values) for a in arg]
        kind = CONSTANTS.get(type(arg))
        return Const(kind, NAME.get(arg, str(arg).removeprefix("torch."))) if kind else arg


X, Y, IDS = torch.randn(4, 6), torch.rand(4, 6) + 0.1, torch.tensor([[0, 2], [1, 1]])
IMAGE = torch.randn(2, 3, 8, 8)
PROGRAMS = {
    "arithmetic": lambda: (
        X + Y,
        X - 2.5 * Y,
        X * 3,
        X / Y,
        X**2,
        Y**0.5,
        X % 3,
        X // 2,
        -X,
        X.abs(),
        torch.addcmul(X, X, Y, value=0.3),
    ),
    "functions": lambda: [
        f(Y)
        for f in (torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.sin, torch.tanh, torch.sigmoid, torch.erf, torch.sign)
    ],
    "activations": lambda: (
        F.gelu(X),
        F.gelu(X, approximate="tanh"),
        F.silu(X),
        F.leaky_relu(X, 0.1),
        F.softplus(X),
        F.hardtanh(X, -0.5, 0.5),
    ),
    "reductions": lambda: (
        X.sum(),
        X.mean(1),
        X.var(0),
        X.amax(1, keepdim=True),
        X.max(1),
        X.argmin(0),
        X.prod(1),
        X.cumsum(1),
        X.norm(),
        (X > 0).any(1),
    ),
    "comparisons": lambda: (
        X > Y,
        X == 1,
        torch.where(X > 0, X, Y),
        X.clamp(-0.5, 0.5),
        torch.maximum(X, Y),
        X.isnan(),
        (X > 0) & (Y > 0.5),
    ),
    "views": lambda: (
        X.t(),
        X[1],
        X[:, 1:4],
        X[..., None],
        X.view(2, 12),
        X.expand(3, 4, 6),
        X.unflatten(1, (2, 3)),
        X.diagonal(),
        X.unbind(0),
        X.chunk(2, 1),
    ),
    "joining": lambda: (
        torch.cat([X, Y]),
        torch.stack([X, Y], 1),
        X.repeat(2, 1),
        X.flip(0),
        X.roll(1, 1),
        F.pad(X, (1, 2)),
        X.tril(),
        torch.outer(X[0], Y[1]),
    ),
    "indexing": lambda: (
        X[IDS],
        X[:, IDS],
        X[[True, False, True, False]],
        X.gather(1, IDS),
        X.index_select(0, IDS[0]),
        X.masked_fill(X > 0, -1.0),
        X.index_add(0, IDS[1], Y[:2]),
    ),
    "sorting": lambda: (
        X.sort(1),
        X.topk(2),
        X.argsort(0),
        torch.unique(IDS),
        X.nonzero(),
        torch.bincount(IDS.view(-1)),
        torch.searchsorted(Y[0].sort()[0], X),
    ),
    "products": lambda: (
        X @ Y.t(),
        torch.bmm(IMAGE[:, 0], IMAGE[:, 1]),
        torch.einsum("ij,kj->ik", X, Y),
        torch.addmm(X[:, :4], X, Y.t(), beta=0.5, alpha=2),
    ),
    "layers": lambda: (
        F.linear(X, Y),
        F.layer_norm(X, (6,)),
        F.softmax(X, 1),
        F.log_softmax(X, 0),
        F.embedding(IDS, X),
        F.group_norm(IMAGE, 3),
        F.rms_norm(X, (6,)),
    ),
    "images": lambda: (
        F.conv2d(IMAGE, torch.ones(5, 3, 3, 3), padding=1),
        F.max_pool2d(IMAGE, 2),
        F.avg_pool2d(IMAGE, 2),
        F.interpolate(IMAGE, scale_factor=2.0),
        F.batch_norm(IMAGE, None, None, training=True),
    ),
    "losses": lambda: (
        F.cross_entropy(X, IDS.view(-1)),
        F.mse_loss(X, Y),
        F.binary_cross_entropy_with_logits(X, Y),
        F.nll_loss(X, IDS.view(-1)),
        F.smooth_l1_loss(X, Y),
    ),
    "factories": lambda: (
        torch.zeros(2, 3),
        torch.ones(2, dtype=torch.bool),
        torch.full((2,), 1.5),
        torch.arange(5),
        torch.arange(1, 2, 0.25),
        torch.eye(3),
        torch.linspace(0, 1, 5),
        torch.zeros_like(X),
        X.new_full((2,), 3.0),
    ),
    "dtypes": lambda: (
        X.double(),
        X.to(torch.bfloat16),
        X.long(),
        (X > 0).float(),
        X.to(torch.complex64),
        torch.complex(X, Y).abs(),
        X.half() + 1,
    ),
    "layouts": lambda: (
        X.t().contiguous(),
        X.t() + 1,
        IMAGE.to(memory_format=torch.channels_last),
        IMAGE.transpose(1, 3) * 2,
        torch.empty_like(X),
        X.t().clone(),
    ),
    "lists": lambda: (
        torch._foreach_add([X, Y], [Y, X], alpha=0.5),
        torch._foreach_mul([X, Y], 2.0),
        torch._foreach_norm([X, Y]),
        torch._foreach_sqrt([Y, Y]),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_bits_of_torch(name):
    with torch.no_grad(), ThroughEngine() as mode:
        PROGRAMS[name]()
    assert len(mode.seen) >= 4


def test_a_training_step():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    with ThroughEngine():
        layer(x).square().mean().backward()
        torch.optim.AdamW(layer.parameters(), foreach=True).step()
    assert all(p.grad is not None for p in layer.parameters())


def test_autograd_records_nothing():
    x = torch.ones(2, requires_grad=True)
    with ENGINE.guard():
        y = ENGINE.bind(op("aten.mul.Tensor", [T(0), T(0)], 1, [new(x)]))(x)
    assert not y.requires_grad and not y.is_inference()


def test_switches():
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        ENGINE.switch({"threads": 1, "matmul_precision": "high", "deterministic": True})
        assert torch.get_num_threads() == 1 and torch.get_float32_matmul_precision() == "high"
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        ENGINE.switch({"threads": threads, "matmul_precision": precision, "deterministic": False})


def test_an_op_beyond_the_closed_set_is_unsupported():
    with pytest.raises(UnsupportedOp, match=r"prims\.add\.default"):
        ENGINE.bind(op("prims.add.default", [], 0, []))
