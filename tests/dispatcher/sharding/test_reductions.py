"""Reductions of pieces to one number give torch's number, wherever the odd element is and however the tensor is split."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gt
from tests.helpers.planned import planned

GROUPS = """
rows2: {shard: {axis: 0, workers: [0, 1]}}
rows3: {shard: {axis: 0, workers: [1, 2, 3]}}
rows4: {shard: {axis: 0, workers: [0, 1, 2, 3]}}
columns2: {shard: {axis: 1, workers: [2, 3]}}
columns3: {shard: {axis: 1, workers: [0, 1, 2]}}
grid: {shard: {axis: 0, workers: [[0, 1], [2, 3]]}}
one: {workers: [5]}
pp_stage0: {shard: {axis: 0, workers: [0, 1]}}
pp_stage0_colpar: {shard: {axis: 1, workers: [0, 1]}}
pp_stage0_rowpar: {shard: {axis: 0, workers: [0, 1]}}
pp_stage1: {shard: {axis: 0, workers: [[2, 3], [4, 5]]}}
pp_stage1_colpar: {shard: {axis: 1, workers: [[2, 3], [4, 5]]}}
pp_stage1_rowpar: {shard: {axis: 0, workers: [[2, 3], [4, 5]]}}
"""
Place = Callable[[torch.Tensor], torch.Tensor]


# ---- layouts


def moved(group: str, t: torch.Tensor) -> torch.Tensor:
    """A copy as the group splits what enters it."""
    with gt.signal.context(group):
        return gt.signal.move(t.to("remote")).clone()


def in_terms(kind: str, t: torch.Tensor) -> torch.Tensor:
    """Terms over two workers, of which the second has what changes nothing."""
    other = {"sum": torch.zeros_like(t), "avg": t, "max": t - 1, "min": t + 1}[kind]
    pair = moved("rows2", torch.stack([t, other]))
    return {"sum": pair.sum, "avg": pair.mean, "max": pair.amax, "min": pair.amin}[kind](0)


def on_a_grid(t: torch.Tensor) -> torch.Tensor:
    """[S(0),S(1)]: rows over the one axis, columns over the other."""
    weight = nn.Parameter(torch.ones(1, t.shape[1]).to("remote"))
    with gt.signal.context("pp_stage1_colpar"):
        torch.ones(1, 1).to("remote") @ weight
    with gt.signal.context("pp_stage1_rowpar"):  # stage 1's mesh; the rows come split over its data parallel axis
        rows = gt.signal.move(t.to("remote")).clone()
    return torch.where(weight.detach() == 1, rows, rows)


LAYOUTS: dict[str, Place] = {
    "whole": lambda t: t.to("remote"),
    **{group: functools.partial(moved, group) for group in ("rows2", "rows3", "rows4", "columns2", "grid", "pp_stage0", "one")},
    **{f"P({kind})": functools.partial(in_terms, kind) for kind in ("sum", "avg", "max", "min")},
    "transposed": lambda t: moved("rows2", t.t().contiguous()).t(),
    "view": lambda t: moved("rows2", torch.cat([t, t], 1))[:, : t.shape[1]],
    "on a grid": on_a_grid,
    "nested": lambda t: on_a_grid(t.reshape(2, -1)).reshape(t.shape),  # [S(0),S(0)]
}
FEW = ("rows4", "columns2", "grid", "P(sum)", "P(max)", "transposed", "view", "on a grid", "nested")
SHAPES = ((4, 6), (5, 2))  # the second is split unevenly, and over four workers the last has nothing
ODD = ((math.inf, -1), (math.nan, 0), (50.0, -1))  # values, and where they stand


def sample(shape: tuple[int, ...], odd: float, place: int) -> torch.Tensor:
    t = torch.linspace(-1.5, 2.5, math.prod(shape)).reshape(shape)
    t.view(-1)[place] = odd
    return t


def samples() -> Iterator[torch.Tensor]:
    for shape, (odd, place) in itertools.product(SHAPES, ODD):
        yield sample(shape, odd, place)


def leaves(found: Any) -> list[torch.Tensor]:
    if isinstance(found, (list, tuple)):
        return [t for item in found for t in leaves(item)]
    return [found.detach().cpu() if isinstance(found, torch.Tensor) else torch.tensor(found)]


def check(name: str, got: Any, want: Any) -> None:
    for a, b in zip(leaves(got), leaves(want), strict=True):
        exact = not b.is_floating_point()
        kwargs: dict[str, Any] = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(a, b, equal_nan=True, msg=lambda m: f"{name}: {m}", **kwargs)


# ---- one tensor


def unscaled(t: torch.Tensor) -> Any:
    grad, found, inverse = t.clone(), torch.zeros((), device=t.device), torch.full((), 0.5, device=t.device)
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, inverse)
    return grad, found, found.clone(), found + 1


def clipped(t: torch.Tensor, order: float) -> Any:
    weights = [nn.Parameter(torch.zeros_like(t)) for _ in range(2)]
    for n, weight in enumerate(weights, 1):
        weight.grad = t * n
    return torch.nn.utils.clip_grad_norm_(weights, 1.0, order), [w.grad for w in weights]


def by_key(t: torch.Tensor) -> torch.Tensor:
    return t.nan_to_num(0.5, 9.0, -9.0)


REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "unscale": unscaled,
    "numbers": lambda t: [t.max(), t.min(), t.amax(), t.amin(), *t.aminmax(), t.argmax(), t.argmin(), t.median(), t.mode(0)[0]],
    "flags": lambda t: [(t > 9).any(), (t < 9).all(), t.isfinite().all(), t.isnan().any(), t.isinf().sum(), t.count_nonzero()],
    "flags of columns": lambda t: [(t > 9).any(0), (t < 9).all(1), t.count_nonzero(0), torch.any(t > 9, (0, 1))],
    "sums": lambda t: [t.sum(), t.mean(), t.prod(), t.nansum(), t.var(), t.std(), torch.var_mean(t), t.logsumexp((0, 1))],
    "columns": lambda t: [f(0) for f in (t.sum, t.mean, t.amax, t.amin, t.prod, t.var, t.std, t.logsumexp, t.argmax)],
    "rows": lambda t: [f(1) for f in (t.sum, t.mean, t.amax, t.amin, t.prod, t.var, t.std, t.logsumexp, t.argmin)],
    "pairs": lambda t: [*t.max(0), *t.min(1), t.kthvalue(2, 0)[0], t.median(1)[0], *t.aminmax(dim=0)],
    "norms": lambda t: [t.norm(order) for order in (0, 0.5, 1, 2, 3, math.inf, -math.inf)],
    "norms of columns": lambda t: [torch.linalg.vector_norm(t, order, 0) for order in (0, 1, 2, 3, math.inf, -math.inf)],
    "plain norms": lambda t: [torch.ops.aten.norm.Scalar(t, 2), torch.ops.aten.norm.ScalarOpt_dim(t, 2, [0])],
    "list norms": lambda t: [torch._foreach_norm([t, t * 2], o) for o in (0, 0.5, 1, 2, 3, math.inf, -math.inf)],
    "list maxima": lambda t: torch._foreach_max([t, -t]),
    "list broadcasts": lambda t: [torch._foreach_mul([t], [t[:, :1].clone()]), torch._foreach_add([t[:1].clone()], [t])],
    "clip": lambda t: [clipped(t, order) for order in (1.0, 2.0, math.inf)],
    "total": lambda t: [torch.nn.utils.get_total_norm([t, t * 3], order) for order in (1.0, 2.0, math.inf)],
    "running": lambda t: [t.cumsum(0), t.cumprod(1), *t.cummax(0), *t.cummin(1), t.logcumsumexp(0), t.flip(0)],
    "sorted": lambda t: [*torch.sort(t, dim=0, stable=True), *by_key(t).topk(2, 0), by_key(t).flatten().sort()[0]],
    "same": lambda t: [torch.equal(t, t.clone()), torch.allclose(t, t), torch.isclose(t, t + 1e-9), torch.equal(t, by_key(t))],
    "buckets": lambda t: [torch.histc(by_key(t), 5, -3, 3), torch.bucketize(by_key(t), torch.arange(3.0, device=t.device))],
    "distinct": lambda t: [torch.unique(by_key(t)), torch.unique(by_key(t), dim=0), by_key(t).flatten().quantile(0.3)],
    "losses": lambda t: [F.mse_loss(t, t * 2), F.l1_loss(t, t * 2), F.log_softmax(t, 0), F.softmax(t, 1)],
}  # fmt: skip


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name in FEW])
@pytest.mark.filterwarnings("ignore")
def test_a_reduction_over_pieces_is_the_reduction(layout, session):
    session(GROUPS)
    for t in samples():
        if layout == "nested" and t.shape[0] % 2:
            continue
        for name, reduce in REDUCTIONS.items():
            placed = LAYOUTS[layout](t)
            check(f"{name} of {layout} {t.tolist()}", reduce(placed), reduce(t))


@pytest.mark.parametrize("layout", ["whole", "rows3", "rows4", "columns2", "on a grid", "P(max)"])
def test_whole_numbers_and_flags_are_reduced_bit_for_bit(layout, session):
    session(GROUPS)
    for shape, dtype in itertools.product(SHAPES, (torch.int64, torch.int8, torch.bool)):
        for place in (0, math.prod(shape) - 1):
            t = torch.zeros(shape, dtype=dtype)
            t.view(-1)[place] = 1
            if layout == "P(max)" and dtype == torch.bool:
                continue
            found = []
            for x in (LAYOUTS[layout](t), t):
                found.append([x.any(), x.all(), (x != 0).any(0), x.sum(), x.sum(1), x.count_nonzero(), x.amax(), x.amin(0)])
                found[-1] += [x.max(), x.argmax() if dtype != torch.bool else x.any(), torch._foreach_max([x]), x.cumsum(0)]
            check(f"{layout} {t.tolist()}", *found)


# ---- lists that lie on several meshes


def lists(odd: int, device: str) -> list[torch.Tensor]:
    """One tensor for each layout; the odd-th has an infinity at its end."""
    made = []
    for n, layout in enumerate(LAYOUTS):
        t = sample((4, 6), math.inf if n == odd else 0.25, 23)
        made.append(LAYOUTS[layout](t) if device == "remote" else t)
    return made


@pytest.mark.parametrize("where", ["nowhere", "rows2", "rows3", "one", "view", "terms"])
def test_an_infinity_on_any_mesh_is_found_wherever_the_flag_lies(where, session):
    session(GROUPS)
    for odd in range(-1, len(LAYOUTS), 2):
        found = []
        for device in ("remote", "cpu"):
            flags = torch.zeros(4)
            if device == "remote":
                flags = flags.to("remote") if where in ("nowhere", "view", "terms") else moved(where, flags)
            flag = flags.sum() if where != "view" else flags[2]
            if where == "terms" and device == "remote":
                flag = moved("rows2", torch.zeros(2)).amax(0)
            inverse, grads = torch.full((), 0.5, device=device), lists(odd, device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inverse)
            scale, growth = torch.full((), 8.0, device=device), torch.full((), 2, dtype=torch.int32, device=device)
            torch._amp_update_scale_(scale, growth, flag, 2.0, 0.5, 3)
            found.append([flag, flag.clone(), flag + 1, float(flag), scale, growth, *grads, flags if where == "view" else 0])
        check(f"odd {odd}", *found)


def test_norms_of_a_list_on_several_meshes_are_each_tensors_norm(session):
    session(GROUPS)
    for order in (0, 1, 2, 3, math.inf, -math.inf, 2.0):
        got = torch._foreach_norm(lists(-1, "remote"), order)
        check(f"order {order}", got, torch._foreach_norm(lists(-1, "cpu"), order))
    check("maxima", torch._foreach_max(lists(3, "remote")), torch._foreach_max(lists(3, "cpu")))


def test_one_order_after_another_is_not_the_first_ones_plan(session):
    session(GROUPS)
    t = sample((4, 6), 50.0, 23)
    placed = moved("rows2", t)
    for order in (2, math.inf, 1, 2, math.inf):
        check(f"order {order}", torch._foreach_norm([placed], order), torch._foreach_norm([t], order))


def test_a_list_whose_tensors_broadcast_is_written_where_it_lies(session):
    session(GROUPS)
    found = []
    for device in ("remote", "cpu"):
        firsts, factors = [torch.ones(4, 6), torch.ones(4, 6)], [torch.arange(6.0), torch.arange(4.0).reshape(4, 1)]
        if device == "remote":
            firsts = [moved("rows2", firsts[0]), moved("columns3", firsts[1])]
            factors = [moved("rows3", factors[0]), moved("rows2", factors[1])]
        torch._foreach_mul_(firsts, factors)
        found.append(firsts)
        if device == "remote":
            assert [gt.inspect(t)["layout"] for t in firsts] == ["[S(0)]", "[S(1)]"]
    check("products", *found)


def test_a_flag_is_added_up_once_a_mesh():
    with planned(GROUPS, 8) as plan:
        grads = [moved(group, torch.ones(rows, 6)) for group, rows in (("pp_stage0", 4), ("rows2", 4), ("rows2", 5))]
        flag, inverse = torch.zeros((), device="remote"), torch.ones((), device="remote")
        torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inverse)
        (flag + 1).clone()
        assert plan.count("all_reduce (max)") == 1, plan.text()


# ---- several results


@pytest.mark.parametrize("homes", [("rows2", "rows3"), ("rows2", "columns2"), ("pp_stage0", "one"), ("columns3", "rows2")])
def test_results_given_on_several_meshes_are_written_there(homes, session):
    session(GROUPS)
    t = sample((4, 6), 50.0, 23)

    def written(put: Callable[[str, torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
        values, places = put(homes[0], torch.zeros(4, 6)), put(homes[1], torch.zeros(4, 6, dtype=torch.int64))
        torch.sort(x, 0, out=(values, places))
        mantissa, exponent = put(homes[0], torch.zeros(4, 6)), put(homes[1], torch.zeros(4, 6, dtype=torch.int32))
        torch.frexp(x, out=(mantissa, exponent))
        low, high = put(homes[0], torch.zeros(1, 6)), put(homes[1], torch.zeros(1, 6))
        torch.aminmax(x, dim=0, keepdim=True, out=(low, high))
        return values, places, mantissa, exponent, low, high, values * mantissa

    check(str(homes), written(moved, moved("rows2", t)), written(lambda _, x: x, t))


# ---- training


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 6)
        self.unused = nn.Linear(2, 2)  # its gradients are None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with gt.signal.context("pp_stage0_colpar"):
            x = torch.tanh(self.up(x))
        with gt.signal.context("pp_stage0_rowpar"):
            x = torch.tanh(self.down(x))
        with gt.signal.context("pp_stage1_colpar"):
            return self.last(x)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "one by one": (torch.optim.AdamW, {"foreach": False}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "fused sgd": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "capturable": (torch.optim.Adam, {"capturable": True, "foreach": True}),
    "default": (torch.optim.SGD, {}),
}
WEIGHTS = ("up.weight", "up.bias", "down.weight", "down.bias", "last.weight", "last.bias")


def scaled_training(device: str, kind: str, odd: tuple[str, int], split: bool, wrap: Callable = lambda f: f) -> list[Any]:
    """Weights and scales of three steps; in the second, a gradient's odd element is infinite. split: two optimizers."""
    make, options = KINDS[kind]
    torch.manual_seed(0)
    net = Net().to(device)
    if device == "cpu":
        options = {k: v for k, v in options.items() if k != "capturable"}
    sets = [[*net.up.parameters(), *net.last.parameters()], [*net.down.parameters(), *net.unused.parameters()]]
    makers = [make(some, lr=0.05, **options) for some in (sets if split else [sets[0] + sets[1]])]
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
    scale = torch.zeros((), device=device)
    name, place = odd
    fault = torch.zeros_like(net.get_parameter(name), device="cpu")
    fault.view(-1)[place] = math.inf

    def step(x: torch.Tensor, fault: torch.Tensor) -> torch.Tensor:
        for optimizer in makers:
            optimizer.zero_grad()
        loss = net(x).square().mean() + (net.get_parameter(name) * fault).sum()
        scaler.scale(loss).backward()
        for optimizer in makers:
            scaler.step(optimizer)
        scaler.update()
        scale.copy_(scaler._scale)
        return scale.clone()

    x, scales, run = torch.linspace(-1, 1, 24).reshape(6, 4), [], wrap(step)
    for n in range(4):
        scales.append(run(x.to(device), (fault if n == 1 else torch.zeros_like(fault)).to(device)).detach().cpu())
    return [*scales, *[p.detach().cpu() for p in net.parameters()]]


@pytest.mark.parametrize("kind", KINDS)
def test_an_infinite_gradient_skips_the_step_wherever_its_piece_lies(kind, session):
    session(GROUPS)
    for name, split in zip(WEIGHTS, itertools.cycle((False, True))):
        odd = (name, -1)
        want, got = scaled_training("cpu", kind, odd, split), scaled_training("remote", kind, odd, split)
        assert [float(s) for s in got[:4]] == [float(s) for s in want[:4]], (odd, split)
        check(f"{odd} {split}", got, want)


@pytest.mark.parametrize("kind", ["fused", "fused sgd"])
def test_a_captured_step_is_skipped_too(kind, session):
    session(GROUPS)
    for odd in (("up.weight", 0), ("up.weight", -1), ("last.weight", -1)):
        want = scaled_training("cpu", kind, odd, False)
        check(str(odd), scaled_training("remote", kind, odd, False, gt.compile), want)
