"""Updates of weights that no optimizer of torch makes, and states that are loaded, averaged and exchanged between steps."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from tests.programs.program import Program, batches, labelled, mlp, train


class Lion(torch.optim.Optimizer):
    """An optimizer as papers publish it: in-place ops on .data, and state that appears in the first step."""

    def __init__(self, params, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                p.data.mul_(1 - group["lr"] * 0.01)
                p.add_(state["mean"].clone().mul_(0.9).add(p.grad, alpha=0.1).sign_(), alpha=-group["lr"])
                state["mean"].lerp_(p.grad, 0.01)


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal by Newton and Schulz's iteration."""

    def __init__(self, params, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for p in self.param_groups[0]["params"]:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.05)
            x = p.grad.lerp(mean, 0.95)
            if x.ndim == 2:
                x = x / (x.norm() + 1e-7)
                for _ in range(3):
                    square = x @ x.mT
                    x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
            p.add_(x, alpha=-self.param_groups[0]["lr"])


def published_optimizers(device: str) -> Program:
    models = [mlp(12, 8, 5).to(device) for _ in range(2)]
    optimizers = [Lion(models[0].parameters()), Muon(models[1].parameters())]
    return Program(lambda x, y: train(sum(F.cross_entropy(m(x), y) for m in models), *optimizers), labelled(), models)


def reptile(device: str) -> Program:
    """Weights go back to a saved state and a part of the way on, while hooks and gradients stay."""
    model = mlp(12, 8, 5).to(device)
    model[0].weight.register_hook(lambda slope: slope.clamp(-0.1, 0.1))

    def step(x, y):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
        for rows in torch.arange(len(x), device=x.device).chunk(2):
            loss = train(F.cross_entropy(model(x[rows]), y[rows]), inner)
        after = copy.deepcopy(model.state_dict())
        model.load_state_dict({name: value + 0.5 * (after[name] - value) for name, value in before.items()})
        with torch.no_grad():  # one more step by the gradients from before the load
            for p in model.parameters():
                p -= 0.1 * p.grad
        return loss

    return Program(step, labelled(), [model])


def contrast_with_a_queue(device: str) -> Program:
    """MoCo: a slow copy of the encoder, and a queue in a buffer, written at a place that the program reads."""
    query = mlp(8, 12, 6, activation=nn.ReLU).to(device)
    slow, queue = copy.deepcopy(query).requires_grad_(False), nn.Module()
    queue.register_buffer("keys", F.normalize(torch.randn(6, 24), dim=0))
    queue.register_buffer("place", torch.zeros(1, dtype=torch.long))
    queue.to(device)
    optimizer = torch.optim.SGD(query.parameters(), lr=0.1, momentum=0.9)

    def step(a, b):
        with torch.no_grad():
            for p, q in zip(slow.parameters(), query.parameters(), strict=True):
                p.data = p.data * 0.9 + q.data * 0.1
            key = F.normalize(slow(b), dim=1)
        z = F.normalize(query(a), dim=1)
        logits = torch.cat([torch.einsum("nc,nc->n", z, key)[:, None], z @ queue.keys.clone()], 1) / 0.2
        loss = train(F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long, device=a.device)), optimizer)
        place = int(queue.place)
        queue.keys[:, place : place + len(key)] = key.T
        queue.place[0] = (place + len(key)) % 24
        return loss

    return Program(
        step, batches(4, lambda g: (torch.randn(8, 8, generator=g), torch.randn(8, 8, generator=g))), [query, slow, queue]
    )


def natural_gradient(device: str) -> Program:
    """Gradients of each sample by vmap, their Fisher matrix, and its solution as one vector of all weights."""
    model = nn.Linear(4, 3).to(device)

    def loss_of(weights, x, y):
        return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    def step(x, y):
        weights = {name: p.detach() for name, p in model.named_parameters()}
        slopes = torch.cat([s.flatten(1) for s in vmap(grad(loss_of), (None, 0, 0))(weights, x, y).values()], 1)
        fisher = slopes.mT @ slopes / len(x) + 0.1 * torch.eye(slopes.shape[1], device=x.device)
        step_ = torch.linalg.solve(fisher, slopes.mean(0))
        with torch.no_grad():
            flat = nn.utils.parameters_to_vector(model.parameters()) - 0.1 * step_
            nn.utils.vector_to_parameters(flat, model.parameters())
        return vmap(loss_of, (None, 0, 0))(weights, x, y).mean()

    return Program(step, labelled(features=4, classes=3), [model])


def adjoint(device: str) -> Program:
    """A neural ODE whose backward pass integrates back in time inside an autograd.Function."""
    field = mlp(2, 12, 2).to(device)
    optimizer, weights = torch.optim.AdamW(field.parameters(), lr=1e-2), list(field.parameters())

    class Integrate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *params):
            for _ in range(3):
                x = x + 0.1 * field(x)
            ctx.save_for_backward(x)
            return x

        @staticmethod
        def backward(ctx, slope):
            (x,) = ctx.saved_tensors
            totals = [torch.zeros_like(p) for p in weights]
            for _ in range(3):
                x = x - 0.1 * field(x)
                with torch.enable_grad():
                    y = x.detach().requires_grad_()
                    slope, *more = torch.autograd.grad(y + 0.1 * field(y), [y, *weights], slope)
                totals = [a + b for a, b in zip(totals, more, strict=True)]
            return slope, *totals

    def draw(g):
        return torch.randn(6, 2, generator=g), torch.randn(6, 2, generator=g)

    return Program(lambda x, y: train(F.mse_loss(Integrate.apply(x, *weights), y), optimizer), batches(3, draw), [field])


def counted_on_the_device(device: str) -> Program:
    """Counters and rates that are tensors of the device, which the program and ASGD read; a loss that is read twice."""
    model = mlp(12, 8, 5).to(device)
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.1, t0=2)
    steps, decay = torch.zeros((), device=device), torch.ones((), device=device)
    average = [torch.zeros_like(p) for p in model.parameters()]
    best = [float("inf")]

    def step(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = train(F.cross_entropy(model(x), label), optimizer)
        if loss.item() < best[0]:
            best[0] = loss.item()
        with torch.no_grad():
            steps.add_(1)
            decay.mul_(0.9)
            for a, p in zip(average, model.parameters(), strict=True):
                a.mul_(0.9).add_(p, alpha=0.1)
                if steps.item() % 2 == 0:
                    p.lerp_(a / (1 - decay.item()), 0.5)
        return loss

    return Program(step, labelled(5), [model], lambda: [*average, steps, decay, torch.tensor(best[0])])


PROGRAMS = (published_optimizers, reptile, contrast_with_a_queue, natural_gradient, adjoint, counted_on_the_device)
