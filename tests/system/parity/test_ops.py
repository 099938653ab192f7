"""Ops that were not torch's once, whole or split: each is found by torch's own operator tests and is wrong without its mend."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gt
from gt.errors import OpFailed, UnsupportedOp

CONFIG = "".join(f"dim{dim}: {{shard: {{axis: {dim}, workers: [0, 1]}}}}\n" for dim in range(4))


def split(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x in parts along dim, if it is remote: nobody has it whole."""
    if x.device.type == "cpu":
        return x.clone()
    with gt.signal.context(f"dim{dim}"):
        return gt.signal.move(x).clone()


def gradient(function: Callable, x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(function(leaf).sum(), leaf)
    return found


def bags(w: torch.Tensor) -> list:
    index, made = torch.arange(20, device=w.device) % 7, []
    for mode in ("sum", "mean", "max"):
        for ends in ([0, 3, 3, 10], [0, 3, 3, 10, 20]):
            offsets = torch.tensor(ends, device=w.device)
            made += [F.embedding_bag(index, w, offsets, mode=mode, include_last_offset=len(ends) == 5)]
            made += [gradient(lambda w, o=offsets, m=mode: F.embedding_bag(index, w, o, mode=m).square(), w)]
    return made


def evaluated(x: torch.Tensor) -> tuple:
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    rest = (None, None, mean, var, False, 0.1, 1e-5)
    return (*torch.native_batch_norm(x, *rest), *torch._native_batch_norm_legit(x, *rest))


def conjugated(x: torch.Tensor) -> tuple:
    z = torch.complex(x, x + 1)
    turned = z.conj()
    turned[0] = 1 + 2j
    turned.mH.mul_(2j)
    return z, turned, turned.real, turned.imag, torch.view_as_real(z), z @ turned.mT


def bytes_of(x: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """x seen as other dtypes, and written to through that."""
    made = []
    for dtype in (torch.int32, torch.int16, torch.float64, torch.uint8):
        base = split(x, dim)
        seen = base.view(dtype)
        made.append(seen.clone())
        seen[2:] = 0
        made.append(base)
    return made


def running(x: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """Statistics that lie elsewhere than the batch: they are written though the op's schema does not say so."""
    mean, var = torch.zeros(3, device=x.device), torch.ones(3, device=x.device)
    mean, var = mean + 0, var + 0  # now they lie somewhere
    return [F.batch_norm(split(x, dim), mean, var, training=True), mean, var]


X = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1))
SAME: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], Any]]] = {
    "to, its copy by place": (X, lambda x: x.to(torch.float64, False, True)),
    "to another's dtype, by place": (X, lambda x: x.to(x.double(), False, True)),
    "tensor_split by a tensor": (X, lambda x: x.tensor_split(torch.tensor([1, 4]), 1)),
    "gather of nothing": (X[0], lambda x: x.gather(0, torch.empty(0, dtype=torch.uint8, device=x.device))),
    "gradient of a step": (X, lambda x: gradient(torch.sign, x)),
    "rrelu, evaluated": (X, lambda x: F.rrelu(x)),
    "attention, keys with more batch dims": (
        IMAGE, lambda x: F.scaled_dot_product_attention(x[0], x, x, is_causal=True)),
    "embedding_bag": (X, bags),
    "batch norm, evaluated": (IMAGE, evaluated),
    "stable sort along the split": (X, lambda x: split(x, 0).sort(dim=0, stable=True)),
    "slice of everything": (X, lambda x: torch.ops.aten.slice.Tensor(split(x, 0))),
    "loss of one row": (X[0], lambda x: F.nll_loss(split(x, 0), torch.tensor(2, device=x.device))),
    "gradient of the loss of one row": (
        X[0], lambda x: gradient(lambda x: F.nll_loss(x, torch.tensor(2, device=x.device)), split(x, 0))),
    "writes through a conjugate": (X, lambda x: conjugated(split(x, 0))),
    "complex numbers of a split pair": (X[:, :2].clone(), lambda x: torch.view_as_complex(split(x, 1))),
    "an identity matrix, split": (X, lambda x: split(torch.eye(5, device=x.device), 1)),
    "attention on heads, keys with more batch dims": (
        IMAGE, lambda x: F.scaled_dot_product_attention(split(x[0], 0), x, x)),
    "cat into a given tensor, split": (X, lambda x: torch.cat([x, x], out=split(torch.cat([x, x]), 1))),
    "addmv of one element, fewer rows than workers": (
        X, lambda x: [torch.addmv(b, split(x[:1], 0), x[1]) for b in (x[0, :1], x[0, 0])]),
    "baddbmm of integers, summed along a split": (
        X[None].int(), lambda x: torch.baddbmm(x, split(x[..., :1], 2), x[:, :1], beta=0.2, alpha=0.6)),
    "baddbmm of integers, fewer batches than workers": (
        X[None].int(), lambda x: torch.baddbmm(x, split(x[..., :7], 0), x.mT[:, :6].mT[:, :6], beta=0.2, alpha=0.6)),
    "other dtypes of the same bytes, split": (X, lambda x: [*bytes_of(x, 0), *bytes_of(x, 1)]),
    "running statistics, the batch split": (IMAGE, lambda x: [*running(x, 0), *running(x, 1)]),
    "loss of several labels, of one row": (
        X[0], lambda x: F.multilabel_margin_loss(x, torch.tensor([1, 3, 0, -1, 2, 4], device=x.device), reduction="none")),
    "a range, split": (X, lambda x: split(torch.arange(7, device=x.device), 0)),
}  # fmt: skip


def flat(found: Any) -> list[torch.Tensor]:
    return [t for part in found for t in flat(part)] if isinstance(found, (list, tuple)) else [found]


@pytest.mark.parametrize("name", SAME)
def test_it_is_torch(name: str, session: Callable) -> None:
    session(CONFIG)
    x, function = SAME[name]
    for got, want in zip(flat(function(x.to("remote"))), flat(function(x.clone())), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        torch.testing.assert_close(got.detach().cpu(), want.detach(), equal_nan=True)


def test_large_data_with_fewer_rows_than_workers_comes_from_the_host(session: Callable) -> None:
    """A piece without elements was asked for and never sent."""
    session("rows: {shard: {axis: 0, workers: [0, 1, 2, 3]}}\n")
    x = torch.ones(2, 100_000)
    with gt.signal.context("rows"):
        assert gt.signal.move(x.to("remote")).sum().item() == x.numel()


def test_complex_normals_have_unit_variance(one: None) -> None:
    z = torch.randn(100, 1000, dtype=torch.complex64, device="remote").cpu()
    assert abs(z.real.std() ** 2 - 0.5) < 0.01 and abs(z.imag.std() ** 2 - 0.5) < 0.01
    assert abs(z.mean()) < 0.01 and abs((z.real * z.imag).mean()) < 0.01


DRAWN: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal_ of a scalar": lambda x: torch.randn((), device=x.device),
    "bernoulli of a scalar": lambda x: torch.bernoulli(torch.full((), 0.5, device=x.device)),
    "normal of two scalars": lambda x: torch.normal(x[0, 0], x[0, 0].abs()),
    "dropout of a scalar": lambda x: F.dropout(x[0, 0]),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_scalar_is_drawn(name: str, one: None) -> None:
    assert torch.isfinite(DRAWN[name](X.to("remote")).cpu()).all()


def test_rrelu_draws_a_slope_for_each_negative_element(one: None) -> None:
    x = X.to("remote").requires_grad_()
    y = F.rrelu(x, 0.25, 0.5, training=True)
    slopes = (y / x).detach().cpu()
    assert (slopes[X > 0] == 1).all()
    assert ((slopes[X < 0] >= 0.25) & (slopes[X < 0] <= 0.5)).all() and slopes[X < 0].unique().numel() > 10
    y.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), slopes)
    target = X.to("remote")
    assert F.rrelu_(target, training=True) is target and not torch.equal(target.cpu(), X)


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "exponential_": lambda x: x.exponential_(0.0),
    "log_normal_": lambda x: x.log_normal_(0, 0),
    "cauchy_": lambda x: x.cauchy_(0, 0),
    "uniform_": lambda x: x.uniform_(3, -1),
    "an out of repeated memory, of another shape": lambda x: torch.index_select(
        x, 1, torch.tensor([0, 1], device=x.device), out=x[0].expand(2, 6)
    ),
    "multinomial": lambda x: torch.multinomial(x.long().abs() + 1, 2),
    "multinomial of none": lambda x: torch.multinomial(x.abs(), 0),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_torch_refuses_are_refused(name: str, one: None) -> None:
    with pytest.raises((RuntimeError, UnsupportedOp, IndexError)):
        REFUSED[name](X.clone())
    with pytest.raises((OpFailed, UnsupportedOp, RuntimeError, IndexError)):
        REFUSED[name](X.to("remote")).cpu()


def test_more_dims_than_a_message_has_are_refused_and_the_session_goes_on(one: None) -> None:
    x = X.to("remote")
    with pytest.raises(UnsupportedOp, match="65 dims"):
        x[(None,) * 63]
    assert torch.equal((x + 1).cpu(), X + 1)


@pytest.mark.parametrize("layout", [torch.sparse_csc, torch.sparse_bsr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_other_sparse_layouts_are_refused_with_those_that_there_are(layout: torch.layout, one: None) -> None:
    blocks = {"blocksize": (1, 2)} if layout is torch.sparse_bsr else {}
    with pytest.raises(UnsupportedOp, match=r"torch\.sparse_.* want COO, or CSR"):
        X.to_sparse(layout=layout, **blocks).to("remote")
    with pytest.raises(UnsupportedOp, match=r"remote has sparse_coo and sparse_csr"):
        X.to("remote").to_sparse(layout=layout, **blocks)


def test_an_op_that_is_not_torchs_own_is_executed_by_the_client_with_a_warning(one: None) -> None:
    with torch.library._scoped_library("gt_tests", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        with pytest.warns(UserWarning, match=r"gt_tests\.twice.* runs on this process's CPU"):
            twice = torch.ops.gt_tests.twice(X.to("remote"))
        assert torch.equal(twice.cpu(), 2 * X) and twice.device.type == "remote"
    assert torch.equal((X.to("remote") + 1).cpu(), X + 1)


MASKED: dict[str, tuple[Callable, list[tuple[int, ...]]]] = {
    "convolution": (F.conv2d, [(2, 3, 6, 6), (4, 3, 3, 3), (4,)]),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(4, 3, 5), (3,), (3,)]),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(4, 4, 5), (4,), (4,)]),
    "rms norm": (lambda x, w: F.rms_norm(x, (5,), w), [(4, 5), (5,)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (5,), w, b), [(4, 5), (5,), (5,)]),
    "grid sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), [(2, 3, 6, 6), (2, 4, 4, 2)]),
    "linear": (F.linear, [(4, 5), (3, 5), (3,)]),
}


@pytest.mark.parametrize("name", MASKED)
def test_only_what_asks_for_a_gradient_gets_one(name: str, one: None) -> None:
    """Kernels give nothing for the others: of a model's first norm, whose input is data."""
    function, shapes = MASKED[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(*shape, generator=generator) for shape in shapes]
    for mask in itertools.product([False, True], repeat=len(shapes)):
        here, there = ([x.clone().to(d).requires_grad_(m) for x, m in zip(inputs, mask)] for d in ("cpu", "remote"))
        for given in (here, there):
            if any(mask):
                function(*given).square().sum().backward()
        for a, b in zip(here, there):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(b.grad.cpu(), a.grad)


LAZY: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "convolution": (lambda: torch.nn.LazyConv2d(4, 3), (2, 3, 8, 8)),
    "norm": (lambda: torch.nn.LazyBatchNorm1d(), (5, 3)),
    "two within a model": (
        lambda: torch.nn.Sequential(torch.nn.LazyLinear(7), torch.nn.ReLU(), torch.nn.LazyLinear(2)), (5, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_module_has_its_weights_where_it_was_sent(name: str, one: None) -> None:
    """They are drawn as on the CPU, and an optimizer made before has them."""
    make, shape = LAZY[name]
    x, found = torch.randn(*shape), []
    for device in ("cpu", "remote"):
        module = make().to(device)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        torch.manual_seed(0)
        module(x.to(device)).square().sum().backward()
        optimizer.step()
        state = module.state_dict()
        assert {t.device.type for t in state.values()} == {device}
        found.append({key: t.cpu() for key, t in state.items()})
    torch.testing.assert_close(found[1], found[0])


def test_a_lazy_module_changes_its_dtype_as_in_plain_torch(one: None) -> None:
    module = torch.nn.LazyLinear(4).to(torch.float64)
    assert module.weight.data.dtype == torch.float64 and module(torch.ones(2, 3).double()).dtype == torch.float64
    module = torch.nn.LazyLinear(4).to("remote").half()
    assert module(torch.ones(2, 3, device="remote").half()).dtype == module.weight.dtype == torch.float16
