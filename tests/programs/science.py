"""Programs of scientific computing: Gaussian processes, differential equations, state-space models, clustering, graphs."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.programs.program import Program, batches, mlp, train


def _double(count: int, *shapes: tuple[int, ...]) -> list[tuple]:
    return batches(count, lambda g: tuple(torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes))


def gaussian_process(device: str) -> Program:
    """The marginal likelihood by a Cholesky factor, and a prediction."""
    scales = nn.ParameterList([torch.zeros((), dtype=torch.float64) for _ in range(3)]).to(device)
    optimizer = torch.optim.Adam(scales.parameters(), lr=0.1)
    x = torch.linspace(0, 1, 10, dtype=torch.float64).to(device)[:, None]

    def kernel(a, b):
        return scales[0].exp() * torch.exp(-0.5 * (torch.cdist(a, b) / scales[1].exp()).square())

    def step(y):
        factor = torch.linalg.cholesky(kernel(x, x) + (scales[2].exp() + 1e-4) * torch.eye(10, device=x.device, dtype=x.dtype))
        solved = torch.cholesky_solve(y, factor)
        return train(0.5 * (y * solved).sum() + factor.diagonal().log().sum(), optimizer)

    def predict():
        with torch.no_grad():
            inner = kernel(x, x) + 0.1 * torch.eye(10, device=x.device, dtype=x.dtype)
            return torch.linalg.solve(inner, kernel(x, x[::2]))

    return Program(step, _double(1, (10, 1)) * 4, [scales], predict)


def _runge_kutta(f, y, steps: int = 4, size: float = 0.1):
    for _ in range(steps):
        a = f(y)
        b = f(y + size / 2 * a)
        c = f(y + size / 2 * b)
        y = y + size / 6 * (a + 2 * b + 2 * c + f(y + size * c))
    return y


class Adjoint(torch.autograd.Function):
    """Solves dy/dt = f(y) forward, and its adjoint backward without keeping the states between."""

    @staticmethod
    def forward(ctx, f, y, *weights):
        ctx.f, ctx.count = f, len(weights)
        with torch.no_grad():
            end = _runge_kutta(f, y)
        ctx.save_for_backward(end, *weights)
        return end

    @staticmethod
    def backward(ctx, grad):
        end, *weights = ctx.saved_tensors
        width = end.shape[-1]

        def back(state):
            y, adjoint = state[:, :width].detach().requires_grad_(True), state[:, width : 2 * width]
            with torch.enable_grad():
                value = ctx.f(y)
            slopes = torch.autograd.grad(value, (y, *weights), adjoint, allow_unused=True)
            sums[:] = [s + 0.1 * slope for s, slope in zip(sums, slopes[1:], strict=True)]
            return torch.cat([-value.detach(), slopes[0]], -1)

        sums = [torch.zeros_like(weight) for weight in weights]
        _runge_kutta(back, torch.cat([end, grad], -1))
        return None, grad, *sums


def neural_ode(device: str) -> Program:
    """A differential equation's right side, learned through the solver and by the adjoint."""
    net = mlp(3, 12, 3).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def step(start, end):
        through = _runge_kutta(net, start)
        adjoint = Adjoint.apply(net, start, *net.parameters())
        return train((through - end).abs().mean() + (adjoint - end).square().mean(), optimizer)

    return Program(step, batches(3, lambda g: tuple(torch.randn(6, 3, generator=g) for _ in range(2))), [net])


def physics_informed(device: str) -> Program:
    """Burgers' equation: first and second derivatives of the network in the loss."""
    net = mlp(2, 16, 16, 1).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def step(points):
        points = points.detach().requires_grad_(True)
        u = net(points)
        (slopes,) = torch.autograd.grad(u, points, torch.ones_like(u), create_graph=True)
        dx, dt = slopes.split(1, -1)
        (curves,) = torch.autograd.grad(dx, points, torch.ones_like(dx), create_graph=True)
        residual = dt + u * dx - 0.01 / math.pi * curves[:, :1]
        return train(residual.square().mean() + (u + torch.sin(math.pi * points[:, :1])).square().mean(), optimizer)

    return Program(step, batches(3, lambda g: (torch.rand(12, 2, generator=g),)), [net])


def fourier_operator(device: str) -> Program:
    """A Fourier neural operator in one dim, with complex weights."""
    lift, drop = nn.Conv1d(2, 6, 1).to(device), nn.Conv1d(6, 1, 1).to(device)
    modes = nn.ParameterList([torch.view_as_complex(torch.randn(6, 6, 4, 2) / 6)]).to(device)
    optimizer = torch.optim.Adam([*lift.parameters(), *drop.parameters(), *modes.parameters()], lr=1e-2)

    def step(x, y):
        place = torch.linspace(0, 1, x.size(-1), device=x.device).expand(len(x), 1, -1)
        h = lift(torch.cat([x, place], 1))
        spectrum = torch.fft.rfft(h)
        low = torch.einsum("bim,iom->bom", spectrum[..., :4], modes[0])
        h = F.gelu(h + torch.fft.irfft(F.pad(low, (0, spectrum.size(-1) - 4)), n=x.size(-1)))
        return train((drop(h) - y).flatten(1).norm(dim=1).mean(), optimizer)

    def draw(g):
        return torch.randn(4, 1, 16, generator=g), torch.randn(4, 1, 16, generator=g)

    return Program(step, batches(3, draw), [lift, drop, modes])


def kalman_filter(device: str) -> Program:
    """A filter's likelihood, maximised over the noises."""
    noises = nn.ParameterList([torch.zeros(2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]).to(device)
    optimizer = torch.optim.SGD(noises.parameters(), lr=1e-2)
    move = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=torch.float64).to(device)
    look = torch.tensor([[1.0, 0.0]], dtype=torch.float64).to(device)

    def step(path):
        mean, spread = path.new_zeros(2, 1), torch.eye(2, device=path.device, dtype=path.dtype)
        loss = 0.0
        for seen in path.unbind(0):
            mean, spread = move @ mean, move @ spread @ move.T + torch.diag(noises[0].exp())
            missing = seen.view(1, 1) - look @ mean
            gain = look @ spread @ look.T + noises[1].exp()
            loss = loss + 0.5 * (torch.logdet(gain) + missing.T @ torch.linalg.inv(gain) @ missing).squeeze()
            weight = spread @ look.T / gain
            mean, spread = mean + weight @ missing, spread - weight @ look @ spread
        return train(loss, optimizer)

    return Program(step, _double(3, (6,)), [noises])


def hidden_markov(device: str) -> Program:
    """The forward algorithm in log space, and the most likely path."""
    model = nn.ParameterList([torch.zeros(3), torch.randn(3, 3), torch.randn(3, 5)]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def tables():
        return [table.log_softmax(-1) for table in model]

    def step(seen):
        first, moves, emits = tables()
        alpha = first + emits[:, seen[:, 0]].T
        for symbol in seen[:, 1:].unbind(1):
            alpha = torch.logsumexp(alpha[:, :, None] + moves, 1) + emits[:, symbol].T
        return train(-torch.logsumexp(alpha, -1).mean(), optimizer)

    def decode():
        with torch.no_grad():
            first, moves, emits = tables()
            score, back = first + emits[:, 0], []
            for symbol in (1, 2, 3):
                score, best = (score[:, None] + moves).max(0)
                score = score + emits[:, symbol]
                back.append(best)
            path = [score.argmax()]
            for best in reversed(back):
                path.append(best[path[-1]])
        return torch.stack(path)

    return Program(step, batches(4, lambda g: (torch.randint(5, (4, 6), generator=g),)), [model], decode)


def clustering(device: str) -> Program:
    """Lloyd's algorithm and one round of expectation maximisation, without gradients."""
    centers = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).to(device)
    spreads = torch.ones(3, 4).to(device)

    @torch.no_grad()
    def step(x):
        distances = torch.cdist(x, centers)
        nearest = distances.argmin(-1)
        sums = torch.zeros_like(centers).index_add_(0, nearest, x)
        counts = torch.zeros(3, device=x.device).scatter_add_(0, nearest, torch.ones(len(x), device=x.device))
        centers.copy_(torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], centers))
        chances = (-0.5 * ((x[:, None] - centers).square() / spreads + spreads.log()).sum(-1)).softmax(-1)
        total = chances.sum(0)[:, None]
        means = chances.T @ x / total
        spreads.copy_((chances.T @ x.square() / total - means.square()).clamp(min=1e-3))
        return distances.min(-1).values.mean()

    return Program(step, batches(4, lambda g: (torch.randn(16, 4, generator=g),)), [], lambda: [centers, spreads])


class MessagePassing(nn.Module):
    """Mean of neighbours by index_add, then attention over edges by scatter_reduce."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(width, width), nn.Linear(width, width)
        self.score, self.head = nn.Linear(2 * width, 1), nn.Linear(width, 3)

    def forward(self, x, edges):
        source, target = edges
        degree = torch.zeros(len(x), device=x.device).index_add_(0, target, torch.ones(edges.size(1), device=x.device))
        mean = torch.zeros_like(x).index_add(0, target, x[source]) / degree.clamp(min=1)[:, None]
        x = F.relu(self.own(x) + self.other(mean))
        score = F.leaky_relu(self.score(torch.cat([x[source], x[target]], -1))).squeeze(-1)
        top = torch.full_like(degree, -torch.inf).scatter_reduce(0, target, score, "amax")
        weight = torch.exp(score - top.detach()[target])
        total = torch.zeros_like(degree).scatter_add(0, target, weight)
        return self.head(x + torch.zeros_like(x).index_add(0, target, x[source] * (weight / total[target])[:, None]))


def graph_network(device: str) -> Program:
    model = MessagePassing().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)

    def step(x, edges, y):
        return train(F.cross_entropy(model(x, edges)[y >= 0], y[y >= 0]), optimizer)

    def draw(g):
        edges, labels = torch.randint(10, (2, 30), generator=g), torch.randint(-1, 3, (10,), generator=g)
        return torch.randn(10, 8, generator=g), edges, labels

    return Program(step, batches(3, draw), [model])


def recommender(device: str) -> Program:
    """Bags of sparse features and their pairwise products, as DLRM has them."""
    bags = nn.ModuleList(nn.EmbeddingBag(30, 6, mode=mode) for mode in ("sum", "mean", "max")).to(device)
    dense, top = mlp(4, 6, activation=nn.ReLU).to(device), mlp(6 + 6, 8, 1, activation=nn.ReLU).to(device)
    optimizer = torch.optim.Adagrad([p for module in (bags, dense, top) for p in module.parameters()], lr=0.1)
    rows, columns = torch.triu_indices(4, 4, 1)

    def step(x, ids, offsets, clicked):
        parts = torch.stack([dense(x), *(bag(i, offsets) for bag, i in zip(bags, ids, strict=True))], 1)
        products = torch.bmm(parts, parts.transpose(1, 2))[:, rows, columns]
        logit = top(torch.cat([parts[:, 0], products], -1)).squeeze(-1)
        weight = torch.tensor(2.0, device=x.device)
        return train(F.binary_cross_entropy_with_logits(logit, clicked, pos_weight=weight), optimizer)

    def draw(g):
        ids = torch.randint(30, (3, 18), generator=g)
        return torch.randn(6, 4, generator=g), ids, torch.arange(0, 18, 3), torch.rand(6, generator=g).round()

    return Program(step, batches(3, draw), [bags, dense, top])


PROGRAMS = (
    gaussian_process, neural_ode, physics_informed, fourier_operator, kalman_filter, hidden_markov, clustering, graph_network,
    recommender,
)  # fmt: skip
