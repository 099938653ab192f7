"""Objectives and updates of many kinds, whose last batch has fewer rows: captured steps, see test_captured_programs.py."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.programs.program import Program, mlp, train

STEPS, ROWS, LAST = 8, 6, 5
Draw = Callable[[torch.Generator, int], torch.Tensor]


def normal(*shape: int) -> Draw:
    return lambda g, rows: torch.randn(rows, *shape, generator=g)


def uniform(*shape: int) -> Draw:
    return lambda g, rows: torch.rand(rows, *shape, generator=g)


def below(limit: int, *shape: int) -> Draw:
    return lambda g, rows: torch.randint(limit, (rows, *shape), generator=g)


def drawn(*draws: Draw) -> list[tuple]:
    """Batches of new values, the last of which is smaller."""
    generator = torch.Generator().manual_seed(3)
    return [tuple(draw(generator, ROWS if n < STEPS - 1 else LAST) for draw in draws) for n in range(STEPS)]


def variance_and_covariance(device: str) -> Program:
    """VICReg: variances and covariances of two views, and gradients scaled by norms of a list."""
    encoder = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)).to(device)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    def off_diagonal(square: torch.Tensor) -> torch.Tensor:
        n = square.shape[0]
        return square.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        views = encoder(a), encoder(b)
        loss = 25 * F.mse_loss(*views)
        for view in views:
            z = view - view.mean(0)
            loss = loss + 25 * F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()
            loss = loss + off_diagonal(z.T @ z / (len(z) - 1)).square().sum() / z.shape[1]
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in encoder.parameters()]
        for gradient, norm in zip(gradients, torch._foreach_norm(gradients), strict=True):
            gradient.mul_(torch.where(norm > 1.0, 1.0 / norm, torch.ones_like(norm)))
        optimizer.step()
        return loss.detach()

    return Program(step, drawn(normal(12), normal(12)), [encoder])


class TwoTowers(nn.Module):
    """Encoders of pictures and texts with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.EmbeddingBag(30, 16, mode="mean")
        self.picture = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 16)
        )  # fmt: skip
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.register_buffer("right", torch.zeros((), dtype=torch.long))

    def forward(self, picture: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        a, b = F.normalize(self.picture(picture), dim=-1), F.normalize(self.text(text), dim=-1)
        logits = self.scale.exp() * a @ b.T
        pairs = torch.arange(len(a), device=a.device)
        self.right += (logits.argmax(1) == pairs).sum()
        return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def pictures_and_texts(device: str) -> Program:
    """CLIP: the temperature is clamped after the step, and right pairs are counted in a buffer."""
    model = TwoTowers().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2, amsgrad=True)

    def step(picture: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        loss = train(model(picture, text), optimizer)
        with torch.no_grad():
            model.scale.clamp_(0, math.log(10))
        return loss

    return Program(step, drawn(normal(3, 8, 8), below(30, 7)), [model])


class Segmenter(nn.Module):
    """A U-Net of one level."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low, self.up = self.block(2, 4), self.block(4, 8), nn.ConvTranspose2d(8, 4, 2, 2)
        self.join, self.head = self.block(8, 4), nn.Conv2d(4, 3, 1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.LeakyReLU(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.down(x)
        low = self.up(self.low(F.max_pool2d(high, 2)))
        low = F.interpolate(low, size=high.shape[-2:], mode="bilinear", align_corners=False)
        return self.head(self.join(torch.cat([high, low], 1)))


def segmentation(device: str) -> Program:
    """Dice beside cross entropy, with a class that is ignored, and centred RMSprop."""
    model = Segmenter().to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3, momentum=0.9, centered=True)

    def step(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logits, known = model(x), (label != 3).unsqueeze(1)
        entropy = F.cross_entropy(logits, torch.where(label == 3, -100, label), label_smoothing=0.1)
        p, target = logits.softmax(1), F.one_hot(label.clamp(max=2), 3).permute(0, 3, 1, 2).to(logits.dtype)
        overlap = (2 * (p * target * known).sum((0, 2, 3)) + 1) / (((p + target) * known).sum((0, 2, 3)) + 1)
        return train(entropy + (1 - overlap).mean(), optimizer)

    return Program(step, drawn(normal(2, 9, 9), below(4, 9, 9)), [model])


def overlap_of_boxes(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Generalised intersection over union."""
    inner = (torch.minimum(p[..., 2:], t[..., 2:]) - torch.maximum(p[..., :2], t[..., :2])).clamp_min(0).prod(-1)
    outer = (torch.maximum(p[..., 2:], t[..., 2:]) - torch.minimum(p[..., :2], t[..., :2])).clamp_min(0).prod(-1)
    union = (p[..., 2:] - p[..., :2]).prod(-1) + (t[..., 2:] - t[..., :2]).prod(-1) - inner
    return inner / (union + 1e-6) - (outer - union) / (outer + 1e-6)


def detection(device: str) -> Program:
    """Boxes on a grid: a focal loss of all cells, and the overlap of those that have a box."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 7, 1)
    ).to(device)  # fmt: skip
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, label: torch.Tensor, box: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        y = model(x).permute(0, 2, 3, 1)
        side = torch.arange(4, device=x.device)
        cell = torch.stack(torch.meshgrid(side, side, indexing="ij"), -1)
        centre, size = y[..., :2].sigmoid() + cell, y[..., 2:4].exp()
        boxes = torch.cat([centre - size / 2, centre + size / 2], -1)
        wanted = torch.cat([box[..., :2] + cell - box[..., 2:], box[..., :2] + cell + box[..., 2:]], -1)
        mask = (there > 0.6).to(y.dtype)
        target = F.one_hot(label, 3).to(y.dtype) * mask[..., None]
        p = y[..., 4:].sigmoid()
        entropy = F.binary_cross_entropy_with_logits(y[..., 4:], target, reduction="none")
        focal = (entropy * (1 - p * target - (1 - p) * (1 - target)) ** 2).sum()
        return train((focal + ((1 - overlap_of_boxes(boxes, wanted)) * mask).sum()) / mask.sum().clamp(min=1), optimizer)

    return Program(step, drawn(normal(3, 8, 8), below(3, 4, 4), uniform(4, 4, 4), uniform(4, 4)), [model])


class Equilibrium(nn.Module):
    """A layer whose output is a fixed point: a hook solves for the gradient of that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(6, 6), nn.Linear(4, 6), nn.Linear(6, 2)

    def once(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(0.4 * self.inner(z) + self.outer(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            z = torch.zeros(len(x), 6, device=x.device)
            for _ in range(6):
                z = self.once(z, x)
        z = self.once(z, x)
        start = z.detach().requires_grad_()
        end = self.once(start, x)

        def solve(gradient: torch.Tensor) -> torch.Tensor:
            h = gradient
            for _ in range(5):
                h = torch.autograd.grad(end, start, h, retain_graph=True)[0] + gradient
            return h

        z.register_hook(solve)
        return self.head(z)


def equilibrium(device: str) -> Program:
    """A deep equilibrium model."""
    model = Equilibrium().to(device)
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)
    return Program(lambda x, y: train(F.huber_loss(model(x), y, delta=0.5), optimizer), drawn(normal(4), normal(2)), [model])


def gradient_surgery(device: str) -> Program:
    """PCGrad: the gradients of two tasks, each without what conflicts with the other, become .grad."""
    body, heads = mlp(5, 8, 8, activation=nn.Softplus).to(device), nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 3)]).to(device)
    groups: list[dict[str, Any]] = [{"params": body.parameters()}, {"params": heads.parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=1e-2, dampening=0.1, momentum=0.5)
    shared = list(body.parameters())

    def step(x: torch.Tensor, y: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        h = body(x)
        losses = F.mse_loss(heads[0](h), y), F.cross_entropy(heads[1](h), label)
        optimizer.zero_grad()
        gradients = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses]
        a, b = (torch.cat([part.flatten() for part in row]) for row in gradients)
        conflict = (a @ b).clamp(max=0)
        both = a - conflict * b / b.square().sum() + b - conflict * a / a.square().sum()
        sum(losses).backward(inputs=list(heads.parameters()))  # type: ignore[union-attr]
        for p, part in zip(shared, both.split([p.numel() for p in shared]), strict=True):
            p.grad = part.view_as(p).clone()
        optimizer.step()
        return sum(losses).detach()  # type: ignore[union-attr]

    return Program(step, drawn(normal(5), normal(1), below(3)), [body, heads])


class Mixed(nn.Module):
    """Layers that are a weighted sum of candidates."""

    def __init__(self) -> None:
        super().__init__()
        self.candidates = nn.ModuleList([nn.Linear(6, 6), mlp(6, 6, 6), nn.Identity()])
        self.choice, self.head = nn.Parameter(torch.zeros(2, 3)), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        weights = ((self.choice - (-noise.clamp(1e-4, 0.9999).log()).log()) / 0.7).softmax(-1)
        for layer in weights:
            x = sum(weight * candidate(x) for weight, candidate in zip(layer, self.candidates, strict=True))
        hard = F.one_hot(weights.argmax(-1), 3).to(x.dtype) + weights - weights.detach()
        return self.head(x) + hard.sum() * 0.01


def architecture_search(device: str) -> Program:
    """DARTS: choices by a Gumbel softmax on one batch, weights on another, each with an optimizer."""
    model = Mixed().to(device)
    weights = [p for name, p in model.named_parameters() if name != "choice"]
    by_weights = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    by_choice = torch.optim.Adam([model.choice], lr=0.05, betas=(0.5, 0.999))

    def step(x: torch.Tensor, y: torch.Tensor, other: torch.Tensor, label: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        train(F.cross_entropy(model(other, noise[0]), label), by_choice)
        return train(F.cross_entropy(model(x, noise[0]), y), by_weights)

    return Program(step, drawn(normal(6), below(3), normal(6), below(3), uniform(2, 3)), [model])


def made_weights(device: str) -> Program:
    """A hypernetwork: it makes the weights of another network for each task, which run under vmap."""
    target = mlp(3, 5, 1).to(device)
    shapes = {name: p.shape for name, p in target.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]
    maker = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Mish(), nn.Linear(16, sum(sizes))).to(device)
    optimizer = torch.optim.RAdam(maker.parameters(), lr=1e-2)

    def run(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        parts = zip(shapes.items(), weights.split(sizes), strict=True)
        return torch.func.functional_call(target, {name: part.view(shape) for (name, shape), part in parts}, (x,))

    def step(task: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return train(F.l1_loss(torch.func.vmap(run)(maker(task) * 0.3, x), y), optimizer)

    return Program(step, drawn(normal(4), normal(7, 3), normal(7, 1)), [maker])


def transport(device: str) -> Program:
    """Optimal transport by Sinkhorn's steps in log space, and an average of the weights by _foreach_lerp_."""
    model = mlp(4, 16, 2, activation=nn.ELU).to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)

    def step(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = model(z)
        cost = torch.cdist(y, x).square()
        f, g = torch.zeros(len(y), device=y.device), torch.zeros(len(x), device=y.device)
        for _ in range(5):
            f = -0.5 * torch.logsumexp((g - cost) / 0.5 - math.log(len(x)), 1)
            g = -0.5 * torch.logsumexp((f[:, None] - cost) / 0.5 - math.log(len(y)), 0)
        loss = train(f.mean() + g.mean() + 0.01 * y.square().mean(), optimizer)
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)
        return loss

    return Program(step, drawn(normal(4), normal(2)), [model, average])


class Centres(nn.Module):
    """A margin on the sphere, and the mean of each class in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight = nn.Sequential(nn.Linear(6, 8), nn.PReLU(8), nn.Linear(8, 4)), nn.Parameter(torch.randn(3, 4))
        self.register_buffer("centres", torch.zeros(3, 4))

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        cosine = F.linear(F.normalize(h), F.normalize(self.weight)).clamp(-1 + 1e-6, 1 - 1e-6)
        with_margin = torch.where(F.one_hot(label, 3).bool(), (cosine.acos() + 0.3).cos(), cosine)
        loss = F.cross_entropy(8 * with_margin, label) + 0.1 * (h - self.centres[label]).square().sum(1).mean()
        with torch.no_grad():
            count = torch.zeros(3, device=x.device).index_add_(0, label, torch.ones(len(label), device=x.device))
            shift = torch.zeros(3, 4, device=x.device).index_add_(0, label, h - self.centres[label])
            self.centres.add_(shift / (1 + count)[:, None], alpha=0.5)
        return loss


def margins_and_centres(device: str) -> Program:
    """ArcFace with a centre loss, whose centres index_add_ moves."""
    model = Centres().to(device)
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.05)
    return Program(lambda x, label: train(model(x, label), optimizer), drawn(normal(6), below(3)), [model])


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow at every third step, which it counts in Python."""

    def __init__(self, parameters: list, inner: torch.optim.Optimizer) -> None:
        super().__init__(parameters, {})
        self.inner, self.steps = inner, 0
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.steps += 1
        if self.steps % 3 == 0:
            for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)


def lookahead(device: str) -> Program:
    """An optimizer of the user's around one of torch's, whose count decides what a step does."""
    model = mlp(4, 6, 2).to(device)
    optimizer = Lookahead(list(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return Program(lambda x, y: train(F.mse_loss(model(x), y), optimizer), drawn(normal(4), normal(2)), [model])


def automaton(device: str) -> Program:
    """A neural cellular automaton: cells that a draw chooses change, and gradients are normalised in place."""
    kernel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]) / 8
    kernels = torch.stack([kernel, kernel.T]).repeat(4, 1, 1)[:, None].to(device)
    model = nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU(), nn.Conv2d(16, 4, 1, bias=False)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)

    def step(x: torch.Tensor, fire: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        for chosen in fire.unbind(1):
            alive = F.max_pool2d(x[:, 3:4], 3, 1, 1) > 0.1
            change = model(F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), kernels, groups=4))
            x = (x + change * (chosen > 0.5).unsqueeze(1)) * alive
        loss = F.mse_loss(x[:, :3], y)
        loss.backward()
        for p in model.parameters():
            p.grad /= p.grad.norm() + 1e-8
        optimizer.step()
        return loss.detach()

    return Program(step, drawn(uniform(4, 6, 6), uniform(3, 6, 6), uniform(3, 6, 6)), [model])


def slow_teacher(device: str) -> Program:
    """Consistency with a teacher that follows by .data, where a hook of an autograd node halves a gradient."""
    student = mlp(6, 8, 3, activation=nn.GELU).to(device)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
    node = torch.autograd.graph.get_gradient_edge(student[0].weight).node
    node.register_prehook(lambda gradients: (gradients[0] / 2,))

    def step(x: torch.Tensor, label: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        distance = F.kl_div(student(other).log_softmax(-1), teacher(other).softmax(-1), reduction="batchmean")
        loss = train(F.cross_entropy(student(x), label) + distance, optimizer)
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        return loss

    return Program(
        step, drawn(normal(6), below(3), normal(6)), [student, teacher], evaluate=lambda: [node.name() and student[0].bias]
    )


PROGRAMS = (
    variance_and_covariance, pictures_and_texts, segmentation, detection, equilibrium, gradient_surgery, architecture_search,
    made_weights, transport, margins_and_centres, lookahead, automaton, slow_teacher,
)  # fmt: skip
