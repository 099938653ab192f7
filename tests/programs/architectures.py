"""Programs whose parts are chosen or carried on: experts, windows, paths of labels, a tape, spikes, splines, actors."""

from __future__ import annotations

import copy
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.programs.program import Program, batches, labelled, mlp, pictures, train


class CapacityExperts(nn.Module):
    """Two experts for each row; an expert drops the rows beyond its capacity."""

    def __init__(self, features: int = 12, experts: int = 4, capacity: int = 3) -> None:
        super().__init__()
        self.gate, self.capacity = nn.Linear(features, experts, bias=False), capacity
        self.up = nn.Parameter(0.2 * torch.randn(experts, features, 2 * features))
        self.down = nn.Parameter(0.2 * torch.randn(experts, 2 * features, features))

    def forward(self, x):
        chances = self.gate(x).softmax(-1)
        weights, chosen = chances.topk(2, -1)
        weights, masks = weights / weights.sum(-1, keepdim=True), F.one_hot(chosen, len(self.up))
        place = masks.transpose(0, 1).flatten(0, 1).cumsum(0).view(2, len(x), -1).transpose(0, 1) - 1
        kept = (place < self.capacity) & masks.bool()
        slots = F.one_hot((place * masks).sum(-1).clamp(max=self.capacity - 1), self.capacity).to(x.dtype)
        routes = torch.einsum("nke,nkc->nec", kept.to(x.dtype) * weights[..., None], slots)
        inputs = torch.einsum("nec,nd->ecd", (routes > 0).to(x.dtype), x)
        balance = len(self.up) * (chances.mean(0) * masks[:, 0].float().mean(0)).sum()
        return torch.einsum("nec,ecd->nd", routes, F.gelu(inputs @ self.up) @ self.down), balance


def experts_with_capacity(device: str) -> Program:
    experts, head = CapacityExperts().to(device), nn.Linear(12, 5).to(device)
    optimizer = torch.optim.AdamW([*experts.parameters(), *head.parameters()], lr=1e-2)

    def step(x, label):
        out, balance = experts(x)
        return train(F.cross_entropy(head(x + out), label) + 0.01 * balance, optimizer)

    return Program(step, labelled(), [experts, head])


class ShiftedWindows(nn.Module):
    """Attention within windows of a picture, which are rolled in the second turn, with a table of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Conv2d(3, 16, 1), nn.Linear(16, 16), nn.Linear(64, 5)
        self.qkv, self.table = nn.Linear(16, 48, bias=False), nn.Parameter(0.1 * torch.randn(49, 2))
        rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
        ahead = [at.flatten()[:, None] - at.flatten() + 3 for at in (rows, columns)]
        self.register_buffer("index", ahead[0] * 7 + ahead[1])

    def forward(self, x):
        x = self.embed(x).permute(0, 2, 3, 1)
        for shift in (0, 2):
            cells = x.roll((-shift, -shift), (1, 2)).view(-1, 2, 4, 2, 4, 16).transpose(2, 3)
            q, k, v = self.qkv(cells.reshape(-1, 16, 16)).view(-1, 16, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
            scores = q @ k.mT / math.sqrt(8) + self.table[self.index].permute(2, 0, 1)
            mixed = self.mix((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 16, 16))
            back = mixed.view(-1, 2, 2, 4, 4, 16).transpose(2, 3).reshape(-1, 8, 8, 16)
            x = x + back.roll((shift, shift), (1, 2))
        merged = torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1)
        return self.head(merged.mean((1, 2)))


def shifted_windows(device: str) -> Program:
    model = ShiftedWindows().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Program(lambda x, label: train(F.cross_entropy(model(x), label), optimizer), pictures(), [model])


def label_paths(device: str) -> Program:
    """A conditional random field over sentences of several lengths, and its best paths."""
    table, scores = nn.Embedding(40, 8), nn.Linear(8, 5)
    field = nn.ParameterDict({name: 0.1 * torch.randn(*size) for name, size in (("step", (5, 5)), ("first", (5,)))})
    model = nn.ModuleList([table, scores, field]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(words, labels, real):
        seen = scores(table(words))
        paths = field["first"] + seen[:, 0]
        known = field["first"][labels[:, 0]] + seen[:, 0].gather(1, labels[:, :1]).squeeze(1)
        for t in range(1, words.size(1)):
            gain = field["step"][labels[:, t - 1], labels[:, t]] + seen[:, t].gather(1, labels[:, t, None]).squeeze(1)
            known = known + gain * real[:, t]
            longer = (paths[:, :, None] + field["step"] + seen[:, t, None]).logsumexp(1)
            paths = torch.where(real[:, t, None], longer, paths)
        return train((paths.logsumexp(1) - known).mean(), optimizer)

    @torch.no_grad()
    def best(words):
        seen, back = scores(table(words)), []
        score = field["first"] + seen[:, 0]
        for t in range(1, words.size(1)):
            score, before = (score[:, :, None] + field["step"]).max(1)
            score, back = score + seen[:, t], [*back, before]
        path = [score.argmax(1)]
        for before in reversed(back):
            path.append(before.gather(1, path[-1][:, None]).squeeze(1))
        return torch.stack(path[::-1], 1)

    lengths = torch.tensor([[7], [3], [5], [1]])
    rows = batches(
        3,
        lambda g: (
            torch.randint(40, (4, 7), generator=g), torch.randint(5, (4, 7), generator=g), torch.arange(7) < lengths,
        ),
    )  # fmt: skip
    return Program(step, rows, [table, scores, field], lambda: best(rows[0][0].to(device)))


def soft_actor_critic(device: str) -> Program:
    """Three optimizers in a step, twin critics that are frozen for the actor, and targets that follow."""
    actor, critics = mlp(6, 16, 4).to(device), nn.ModuleList(mlp(8, 16, 1) for _ in range(2)).to(device)
    targets = copy.deepcopy(critics).requires_grad_(False)
    heat = torch.zeros(1, device=device, requires_grad=True)
    optimizers = [torch.optim.Adam(of, lr=1e-2) for of in (critics.parameters(), actor.parameters(), [heat])]

    def act(state, noise):
        mean, width = actor(state).chunk(2, -1)
        width = width.clamp(-5, 2)
        action = (mean + width.exp() * noise).tanh()
        density = -0.5 * noise**2 - width - 0.5 * math.log(2 * math.pi) - (1 - action**2 + 1e-6).log()
        return action, density.sum(-1, keepdim=True)

    def worth(networks, state, action):
        return torch.stack([network(torch.cat([state, action], -1)) for network in networks])

    def step(state, action, reward, later, noise):
        with torch.no_grad():
            following, density = act(later, noise)
            goal = reward + 0.99 * (worth(targets, later, following).amin(0) - heat.exp() * density)
        loss = train((worth(critics, state, action) - goal).square().mean(), optimizers[0])
        critics.requires_grad_(False)
        chosen, density = act(state, noise)
        train((heat.exp().detach() * density - worth(critics, state, chosen).amin(0)).mean(), optimizers[1])
        critics.requires_grad_(True)
        train(-(heat * (density.detach() - 2)).mean(), optimizers[2])
        with torch.no_grad():
            for target, p in zip(targets.parameters(), critics.parameters(), strict=True):
                target.mul_(0.95).add_(p, alpha=0.05)
        return loss

    rows = batches(3, lambda g: tuple(torch.randn(8, n, generator=g) for n in (6, 2, 1, 6, 2)))
    return Program(step, rows, [actor, critics, targets], lambda: heat)


class Spike(torch.autograd.Function):
    """A step forward, and a smooth slope backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx, slope):
        return slope / (1 + 10 * ctx.saved_tensors[0].abs()) ** 2


def spiking_network(device: str) -> Program:
    layers = nn.ModuleList([nn.Linear(12, 16), nn.Linear(16, 5)]).to(device)
    optimizer = torch.optim.Adamax(layers.parameters(), lr=1e-2)

    def step(x, label):
        charge = spikes = torch.zeros(len(x), 16, device=x.device)
        out = total = torch.zeros(len(x), 5, device=x.device)
        for turn in range(5):
            charge = 0.9 * charge * (1 - spikes) + layers[0](x * (turn % 2))
            spikes = Spike.apply(charge - 1)
            out = 0.9 * out + layers[1](spikes)
            total = total + out
        return train(F.cross_entropy(total, label) + 0.01 * spikes.mean(), optimizer)

    return Program(step, labelled(), [layers])


def spline_flow(device: str) -> Program:
    """Monotone splines whose knots are found by searchsorted, with masked weights that keep an order of features."""
    model = mlp(6, 18, 48, activation=nn.ReLU).to(device)
    degree, hidden = torch.arange(6), torch.arange(18) % 5
    masks = [(hidden[:, None] >= degree).float().to(device), (degree.repeat_interleave(8)[:, None] > hidden).float().to(device)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x):
        middle = F.linear(x, model[0].weight * masks[0], model[0].bias).relu()
        widths, heights = F.linear(middle, model[2].weight * masks[1], model[2].bias).view(-1, 6, 2, 4).softmax(-1).unbind(2)
        left, low = (F.pad(sizes.cumsum(-1), (1, 0)) for sizes in (widths, heights))
        u = x.sigmoid()
        knot = (torch.searchsorted(left.detach().contiguous(), u[..., None], right=True) - 1).clamp(0, 3)
        x0, y0, width, height = (sizes.gather(-1, knot).squeeze(-1) for sizes in (left, low, widths, heights))
        y = y0 + (u - x0) / width * height
        return train((y.logit(1e-4) ** 2 / 2 - (height / width).log()).sum(-1).mean(), optimizer)

    return Program(step, batches(3, lambda g: (torch.randn(8, 6, generator=g),)), [model])


def optimizers_in_backward(device: str) -> Program:
    """Each parameter has an optimizer, which only a hook knows, and is updated as soon as its gradient is there."""
    model = mlp(12, 16, 5).to(device)
    optimizers = {p: torch.optim.Adam([p], lr=1e-2) for p in model.parameters()}

    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return Program(lambda x, label: train(F.cross_entropy(model(x), label)), labelled(), [model])


class CachedPositions(nn.Module):
    """Attention with a bias by relative places, and rotations by absolute ones: functions keep both tables between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Linear(12, 16), nn.Linear(16, 48), nn.Linear(16, 5)
        self.bias = nn.Parameter(0.1 * torch.randn(9))
        self.distances, self.waves = functools.lru_cache(8)(self.distances_of), functools.lru_cache(8)(self.waves_of)

    @staticmethod
    def distances_of(count: int) -> torch.Tensor:
        """On the CPU, as an index may be."""
        places = torch.arange(count)
        return (places[:, None] - places + count - 1).clamp(max=8)

    @staticmethod
    def waves_of(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(count, device=device)[:, None] / 10 ** (torch.arange(16, device=device) / 16)
        return angles.cos(), angles.sin()

    def forward(self, x):
        x = self.embed(x)
        q, k, v = self.qkv(x).chunk(3, -1)
        (cos, sin), count = self.waves(x.shape[1], x.device), x.shape[1]
        q, k = (t * cos + t.roll(8, -1) * sin for t in (q, k))
        scores = q @ k.mT / 4 + self.bias[self.distances(count).view(-1)].view(count, count)
        return self.head((x + scores.softmax(-1) @ v).mean(1))


def cached_positions(device: str) -> Program:
    model = CachedPositions().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    rows = batches(4, lambda g: (torch.randn(4, 6, 12, generator=g), torch.randint(5, (4,), generator=g)))
    return Program(lambda x, label: train(F.cross_entropy(model(x), label), optimizer), rows, [model])


def filled_buffer(device: str) -> Program:
    """A recurrence that writes each state into a buffer, which is read whole at the end."""
    enter, turn, leave = nn.Linear(4, 8).to(device), nn.Linear(8, 8).to(device), nn.Linear(8, 2).to(device)
    optimizer = torch.optim.SGD([*enter.parameters(), *turn.parameters(), *leave.parameters()], lr=0.1, momentum=0.9)

    def step(x, y):
        inputs, state = enter(x), x.new_zeros(len(x), 8)
        states = x.new_empty(len(x), x.shape[1], 8)
        for n in range(x.shape[1]):
            gate = turn(state).sigmoid()
            state = gate * inputs[:, n].tanh() + (1 - gate) * state
            states[:, n] = state
        return train(F.mse_loss(leave(states), y), optimizer)

    rows = batches(4, lambda g: (torch.randn(4, 24, 4, generator=g), torch.randn(4, 24, 2, generator=g)))
    return Program(step, rows, [enter, turn, leave])


PROGRAMS = (
    experts_with_capacity, shifted_windows, label_paths, soft_actor_critic, spiking_network, spline_flow,
    optimizers_in_backward, cached_positions, filled_buffer,
)  # fmt: skip
