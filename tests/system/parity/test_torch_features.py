"""Common uses of torch around a model, on `remote` as on the CPU: each row is a small training program of a device.

A row gives tensors and numbers; they have to be those of the CPU, to the bit, and so have those of a step that is captured.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import gt
from tests.client.device.test_client_traps import plain, same

pytestmark = pytest.mark.usefixtures("plain_threads", "one")
ROWS: dict[str, Callable[[str], Any]] = {}


def row(f: Callable[[str], Any]) -> Callable[[str], Any]:
    ROWS[f.__name__] = f
    return f


def network(d: str, *more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *more, nn.Tanh(), nn.Linear(8, 3)).to(d)


def data(d: str, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, 6).to(d), torch.randint(3, (rows,)).to(d)


def gradients(model: nn.Module) -> list:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


# ---- mixed precision


@row
def autocast(d):
    model, (x, y) = network(d), data(d)
    with torch.autocast(d, dtype=torch.bfloat16):
        out = model(x)
        loss = F.cross_entropy(out.float(), y)
    loss.backward()
    with torch.autocast(device_type=d, dtype=torch.bfloat16, cache_enabled=False), torch.no_grad():
        again = model(x)
    return str(out.dtype), out, loss, gradients(model), again


@row
def autocast_as_a_decorator_within_a_module(d):
    class Low(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @torch.autocast(device_type=d, dtype=torch.bfloat16)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    torch.manual_seed(0)
    model, x = Low().to(d), torch.ones(2, 4, device=d)
    y = model(x)
    y.float().sum().backward()
    return str(y.dtype), y, gradients(model), torch.is_autocast_enabled(d)


@row
def scaling_gradients(d):
    model, (x, y) = network(d), data(d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(d, init_scale=1024.0, growth_interval=2)
    seen = []
    for n in range(6):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) * (float("inf") if n == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item() if n != 3 else 0.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    other = torch.amp.GradScaler(d)
    other.load_state_dict(scaler.state_dict())
    return seen, list(model.parameters()), other.get_scale(), scaler.is_enabled()


# ---- schedules, averages, clipping


@row
def schedulers(d):
    found = []
    lrs = torch.optim.lr_scheduler
    makers = (
        lambda o: lrs.OneCycleLR(o, 0.1, total_steps=6), lambda o: lrs.CosineAnnealingWarmRestarts(o, 2),
        lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, total_iters=2), lrs.ExponentialLR(o, 0.9)], [2]),
        lambda o: lrs.LambdaLR(o, lambda n: 1 / (n + 1)), lambda o: lrs.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    )  # fmt: skip
    for make in makers:
        model, (x, y) = network(d), data(d)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = make(optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
        found.append([scheduler.get_last_lr(), list(model.parameters())])
    plateau = lrs.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        plateau.step(F.cross_entropy(model(x), y).detach())  # a tensor: float() of it waits
    return found, optimizer.param_groups[0]["lr"]


@row
def averages_of_weights(d):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

    model, (x, y) = network(d, nn.BatchNorm1d(8)), data(d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average, plain_average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), AveragedModel(model)
    by_hand = copy.deepcopy(model).requires_grad_(False)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
        plain_average.update_parameters(model)
        with torch.no_grad():
            for mine, theirs in zip(by_hand.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
    update_bn([x], average)
    return average.state_dict(), list(plain_average.parameters()), list(by_hand.parameters())


@row
def clipping(d):
    model, (x, y) = network(d), data(d)
    found = []
    for how in ({}, {"norm_type": float("inf")}, {"foreach": False}, {"norm_type": 1.0, "error_if_nonfinite": True}):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        found += [nn.utils.clip_grad_norm_(model.parameters(), 0.1, **how), gradients(model)]
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    return found, gradients(model), total, vector, list(model.parameters())


# ---- modules


@row
def parametrized(d):
    class Symmetric(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w.triu() + w.triu(1).mT

        def right_inverse(self, w: torch.Tensor) -> torch.Tensor:
            return w.triu()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    parametrizations.weight_norm(model[1])
    parametrizations.spectral_norm(model[2])
    parametrizations.orthogonal(model[3], use_trivialization=False)
    model.to(d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 12).view(3, 4).to(d)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    model[0].weight = torch.eye(4, device=d)
    with parametrize.cached():
        twice = model[1].weight is model[1].weight
    parametrize.remove_parametrizations(model[0], "weight")
    return losses, model.state_dict(), model[0].weight, twice, [n for n, _ in model.named_parameters()]


@row
def parametrized_where_it_is(d):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(d)
    parametrizations.weight_norm(layer)
    pruned = prune.l1_unstructured(nn.Linear(4, 4).to(d), "weight", amount=3)
    layer(torch.ones(2, 4, device=d)).sum().backward()
    return gradients(layer), pruned.weight, pruned.weight_mask


@row
def weight_norm_in_low_precision(d):
    layers = []
    for dtype in (torch.float16, torch.bfloat16):
        torch.manual_seed(0)
        layers.append(parametrizations.weight_norm(nn.Linear(4, 4)).to(dtype).to(d))
        layers[-1](torch.ones(2, 4, dtype=dtype, device=d)).sum().backward()
    return [gradients(layer) for layer in layers]


@row
def hooks(d):
    seen = []
    model, (x, y) = network(d), data(d)

    def keep(name: str) -> Callable:
        tensors = lambda args: [a for a in args if isinstance(a, (tuple, torch.Tensor))]  # noqa: E731
        return lambda *args: seen.append((name, copy.deepcopy(plain(tensors(args)))))

    handles = [
        model[0].register_forward_pre_hook(keep("pre")), model[0].register_forward_hook(lambda m, a, out: out * 2),
        model[2].register_full_backward_hook(keep("backward")), model[2].register_full_backward_pre_hook(keep("before")),
        model[0].weight.register_hook(lambda g: g * 3), model[2].weight.register_post_accumulate_grad_hook(keep("done")),
        model.register_state_dict_pre_hook(lambda *a: None), nn.modules.module.register_module_forward_hook(keep("all")),
    ]  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handles.append(optimizer.register_step_post_hook(lambda *a: seen.append("stepped")))
    inner = model[0](x)
    inner.retain_grad()
    inner.register_hook(keep("tensor"))
    F.cross_entropy(model[2](model[1](inner)), y).backward()
    optimizer.step()
    for handle in handles:
        handle.remove()
    model(x)
    return seen, inner.grad, gradients(model), list(model.parameters())


@row
def copies_and_state(d):
    model, (x, y) = network(d, nn.BatchNorm1d(8)), data(d)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    twin, file = copy.deepcopy(model), io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=d, weights_only=True)
    other = network(d, nn.BatchNorm1d(8))
    missing = other.load_state_dict(loaded["model"])
    given = torch.optim.AdamW(other.parameters(), lr=0.01)
    given.load_state_dict(loaded["optimizer"])
    for m, o in ((model, optimizer), (other, given)):
        o.zero_grad()
        F.cross_entropy(m(x), y).backward()
        o.step()
    with torch.device("meta"):
        empty = nn.Linear(6, 8)
    empty.load_state_dict({k: v for k, v in model[0].state_dict().items()}, assign=True)
    whole = [k for k, p in zip(model.state_dict(), model.parameters(), strict=False) if p.device.type != torch.device(d).type]
    return model.state_dict(), other.state_dict(), twin.state_dict(), str(missing), empty(x), whole, gradients(twin)


@row
def tied_weights(d):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, t: torch.Tensor) -> torch.Tensor:
            return self.head(self.emb(t))

    torch.manual_seed(0)
    model = Tied().to(d)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    t = torch.tensor([1, 2, 3], device=d)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(t), t).backward()
        optimizer.step()
    twin = copy.deepcopy(model)
    return model.state_dict(), len(list(twin.parameters())), twin.head.weight is twin.emb.weight, gradients(model)


@row
def a_file_with_shared_memory(d):
    x = torch.arange(12.0).view(3, 4)
    parameter = nn.Parameter(torch.ones(2, 2))
    file = io.BytesIO()
    torch.save({"x": x, "row": x[1], "turned": [x.t(), (x, 7, "text")], "p": parameter, "same": parameter, "e": x[:0]}, file)
    file.seek(0)
    found = torch.load(file, map_location=d)
    found["row"].zero_()
    kinds = {str(t.device.type) == torch.device(d).type for t in (found["x"], found["turned"][1][0], found["p"])}
    parameter = isinstance(found["p"], nn.Parameter), found["p"].requires_grad, found["p"] is found["same"], found["p"].is_leaf
    file = io.BytesIO()
    torch.save(network(d), file)
    file.seek(0)
    module = torch.load(file, map_location=torch.device(d), weights_only=False)
    return found["x"], found["turned"], found["e"], kinds, parameter, module(data(d)[0]), gradients(module)


# ---- autograd


@row
def functions_of_a_user(d):
    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, low: float, high: float) -> Any:
            ctx.save_for_backward(x)
            ctx.limits = low, high
            largest = x.max()
            ctx.mark_non_differentiable(largest)
            return x.clamp(low, high), largest

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor, _: Any) -> Any:
            (x,) = ctx.saved_tensors
            return g * ((x > ctx.limits[0]) & (x < ctx.limits[1])), None, None

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x.square()

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return 2 * ctx.saved_tensors[0] * g

    class Into(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.mark_dirty(x)
            return x.mul_(3)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * 3

    x = torch.linspace(-2, 2, 9).to(d).requires_grad_()
    y, largest = Clip.apply(x, -1.0, 1.0)
    z = Double.apply(y)
    (g,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    w = Into.apply(x * 1)
    w.sum().backward()
    return y, largest, largest.requires_grad, z, g, h, w, x.grad


@row
def modes(d):
    model, (x, y) = network(d), data(d)
    with torch.inference_mode():
        inferred = model(x)
        state = inferred.is_inference(), torch.is_inference_mode_enabled(), inferred.softmax(-1), inferred.add_(1)
    with torch.no_grad():
        none = model(x)
    with torch.enable_grad(), torch.set_grad_enabled(False):
        off = model(x).requires_grad
    with torch.autograd.set_detect_anomaly(True):
        F.cross_entropy(model(x), y).backward()
    copied = inferred.clone()
    copied.requires_grad_()
    (copied * 2).sum().backward()
    return inferred, state, none, none.requires_grad, off, gradients(model), copied.grad


@row
def saved_tensors_on_the_host(d):
    model, (x, y) = network(d), data(d)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.device, t.cpu()), lambda kept: kept[1].to(kept[0])):
        F.cross_entropy(model(x), y).backward()
    return gradients(model)


@row
def jacobians(d):
    x = torch.linspace(-1, 1, 4).to(d)

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x.sum()

    jacobian = torch.autograd.functional.jacobian(f, x)
    hessian = torch.autograd.functional.hessian(lambda x: f(x).sum(), x)
    return (
        jacobian,
        hessian,
        torch.autograd.functional.vjp(f, x, torch.ones_like(x)),
        torch.autograd.functional.hvp(lambda x: f(x).sum(), x, torch.ones_like(x)),
    )


# ---- torch.func


@row
def func_grad_and_functional_call(d):
    from torch.func import functional_call, grad, grad_and_value, vjp

    model, (x, y) = network(d), data(d)
    params = {k: v.detach() for k, v in model.named_parameters()}

    def loss(params: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, params, (x,)), y)

    grads, value = grad_and_value(loss)(params, x, y)
    out, pull = vjp(lambda x: model(x), x)
    return grad(loss)(params, x, y), grads, value, out, pull(torch.ones_like(out))


@row
def func_of_second_order(d):
    from torch.func import grad, hessian, jacfwd, jacrev, jvp

    x = torch.linspace(-1, 1, 4).to(d)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x.sum()).sum()

    return (
        grad(grad(lambda t: t.sin().sum()))(x.sum()),
        jacrev(torch.sin)(x),
        jacfwd(torch.sin)(x),
        hessian(f)(x),
        jvp(f, (x,), (torch.ones_like(x),)),
    )


@row
def func_vmap(d):
    from torch.func import functional_call, grad, vmap

    model, (x, y) = network(d), data(d)
    params = {k: v.detach() for k, v in model.named_parameters()}

    def loss(params: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    return vmap(lambda a: a * 2)(x), vmap(torch.dot)(x, x), vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)


# ---- data


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, n: int) -> tuple[torch.Tensor, int]:
        return torch.arange(6) * 0.1 + n, n % 3


@row
def loaders(d):
    found = []
    pinned = {"num_workers": 1, "pin_memory": True, "persistent_workers": True, "prefetch_factor": 3}
    for how in ({}, {"num_workers": 2}, pinned):
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=5, **how)
        model = network(d)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for x, y in loader:
                x, y = x.to(d, non_blocking=True), y.to(d, non_blocking=True)
                optimizer.zero_grad(set_to_none=True)
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        found.append(list(model.parameters()))
        del loader
    return found


@pytest.mark.parametrize("name", ROWS)
def test_on_remote_as_on_the_cpu(name: str) -> None:
    same(plain(ROWS[name]("remote")), plain(ROWS[name]("cpu")))


# ---- the same in a captured step


STEPS: dict[str, Callable[[str], tuple[Callable, Any]]] = {}  # device -> a step, and what it changes


def captured(f: Callable[[str], Any]) -> Callable[[str], Any]:
    STEPS[f.__name__] = f
    return f


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def stepping(model: nn.Module, loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable:
    optimizer = fused(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@captured
def in_mixed_precision(d):
    model = network(d)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(d, dtype=torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.float(), y)

    return stepping(model, loss), model


@captured
def with_scaled_gradients(d):
    model = network(d)
    optimizer, scaler = fused(model), torch.amp.GradScaler(d, init_scale=1024.0, growth_interval=2)
    scale = torch.zeros((), device=d)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scale.copy_(scaler._scale)
        return loss.detach()

    return step, (model, scale)


@captured
def recomputing(d):
    model = network(d)
    return stepping(model, lambda x, y: F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)), model


@captured
def reparametrized(d):
    model = network("cpu")
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])
    model.to(d)
    return stepping(model, lambda x, y: F.cross_entropy(model(x), y)), model


@captured
def averaging(d):
    model = network(d)
    average, inner = copy.deepcopy(model).requires_grad_(False), stepping(model, lambda x, y: F.cross_entropy(model(x), y))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = inner(x, y)
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)
        return loss

    return step, average


@captured
def hooked(d):
    model = network(d)
    model[0].weight.register_hook(lambda g: g * 2)
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model[2].register_full_backward_hook(lambda module, into, out: (into[0] * 3,))
    return stepping(model, lambda x, y: F.cross_entropy(model(x), y)), model


@captured
def optimizers_in_backward(d):
    model = network(d)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, fused=True) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    return step, model


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-0.1, 0.1)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * (ctx.saved_tensors[0].abs() < 0.1)


@captured
def with_a_function_of_a_user(d):
    model = network(d)
    return stepping(model, lambda x, y: F.cross_entropy(Clamp.apply(model(x)), y)), model


@captured
def functional(d):
    from torch.func import functional_call, grad_and_value

    model = network(d)
    params = {k: v.detach().clone() for k, v in model.named_parameters()}

    def loss(params: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, params, (x,)), y)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        grads, value = grad_and_value(loss)(params, x, y)
        for name, param in params.items():
            param.sub_(grads[name], alpha=0.1)
        return value

    return step, params


@captured
def inferring(d):
    model = network(d)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return model(x).softmax(-1)

    return step, model


@pytest.mark.parametrize("name", STEPS)
def test_captured_on_remote_as_on_the_cpu(name: str) -> None:
    torch.manual_seed(2)
    batches = [(torch.randn(5, 6), torch.randint(3, (5,))) for _ in range(8)]
    if name == "with_scaled_gradients":
        batches[5][0][0, 0] = float("inf")  # in a replay: nothing is stepped, and the scale is halved
    found = []
    for device in ("cpu", "remote"):
        step, state = STEPS[name](device)
        run = gt.compile(step) if device == "remote" else step
        losses = [run(*batch) for batch in batches]
        parts = state if isinstance(state, tuple) else (state,)
        values = [part.state_dict() if isinstance(part, nn.Module) else part for part in parts]
        found.append(copy.deepcopy(plain([losses, values])))
    assert sum(program.replays for program in run._programs) >= 5, run.explain()
    same(found[1], found[0])
