"""Programs that learn a distribution: autoencoders, adversarial networks, flows, energies; and speech."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.programs.program import Program, batches, mlp, train


def _points(count: int, *widths: int, rows: int = 8) -> list[tuple]:
    return batches(count, lambda g: tuple(torch.randn(rows, width, generator=g) for width in widths))


def variational_autoencoder(device: str) -> Program:
    encoder, decoder = mlp(12, 16, 8).to(device), mlp(4, 16, 12).to(device)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-2)

    def step(x, noise):
        mean, log_variance = encoder(x).chunk(2, -1)
        decoded = decoder(mean + noise * torch.exp(log_variance / 2))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)
        seen = F.binary_cross_entropy_with_logits(decoded, x.sigmoid(), reduction="none").sum(-1)
        return train((seen + divergence).mean(), optimizer)

    return Program(step, _points(4, 12, 4), [encoder, decoder])


def vector_quantized(device: str) -> Program:
    """A codebook with straight-through gradients; codes that few rows chose are replaced."""
    encoder, decoder, book = mlp(12, 16, 4).to(device), mlp(4, 16, 12).to(device), nn.Embedding(6, 4).to(device)
    optimizer = torch.optim.Adam([p for module in (encoder, decoder, book) for p in module.parameters()], lr=1e-2)

    def step(x):
        state = encoder(x)
        chosen = torch.cdist(state, book.weight).argmin(-1)
        code = book(chosen)
        loss = F.mse_loss(code, state.detach()) + 0.25 * F.mse_loss(state, code.detach())
        loss = loss + F.mse_loss(decoder(state + (code - state).detach()), x)
        train(loss, optimizer)
        with torch.no_grad():
            rare = torch.bincount(chosen, minlength=6) < 1
            book.weight[rare] = state[: int(rare.sum())]
        return loss.detach()

    return Program(step, _points(4, 12), [encoder, decoder, book])


def adversarial(device: str) -> Program:
    """A generator and a discriminator with spectral and weight norm, in turns."""
    generator = mlp(4, 16, 6, activation=nn.ReLU).to(device)
    judge = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 16)), nn.LeakyReLU(0.2), parametrizations.weight_norm(nn.Linear(16, 1))
    ).to(device)
    optimizers = [torch.optim.Adam(module.parameters(), lr=1e-2, betas=(0.5, 0.9)) for module in (generator, judge)]

    def step(real, noise):
        fake = generator(noise)
        loss = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(real)).mean()
        train(loss, optimizers[1])
        train(F.softplus(-judge(fake)).mean(), optimizers[0])
        return loss.detach()

    return Program(step, _points(4, 6, 4), [generator, judge])


def gradient_penalty(device: str) -> Program:
    """A critic whose gradient's norm is part of its loss."""
    generator, critic = mlp(4, 16, 6).to(device), mlp(6, 16, 1).to(device)
    optimizers = [torch.optim.RMSprop(module.parameters(), lr=1e-2) for module in (generator, critic)]

    def step(real, noise):
        fake = generator(noise)
        between = torch.lerp(real, fake.detach(), 0.3).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * (slope.norm(2, 1) - 1).square().mean()
        train(loss, optimizers[1])
        train(-critic(fake).mean(), optimizers[0])
        return loss.detach()

    return Program(step, _points(4, 6, 4), [generator, critic])


class Coupling(nn.Module):
    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.flip, self.net = flip, mlp(2, 12, 4)

    def forward(self, x):
        a, b = x.chunk(2, -1)
        if self.flip:
            a, b = b, a
        scale, shift = self.net(a).chunk(2, -1)
        b = b * scale.tanh().exp() + shift
        return torch.cat([b, a] if self.flip else [a, b], -1), scale.tanh().sum(-1)

    def inverse(self, y):
        a, b = y.chunk(2, -1)
        if self.flip:
            a, b = b, a
        scale, shift = self.net(a).chunk(2, -1)
        b = (b - shift) * (-scale.tanh()).exp()
        return torch.cat([b, a] if self.flip else [a, b], -1)


def normalizing_flow(device: str) -> Program:
    """Affine couplings with a base distribution of torch's, and samples by the inverse."""
    flow = nn.ModuleList(Coupling(flip) for flip in (False, True, False)).to(device)
    optimizer = torch.optim.RAdam(flow.parameters(), lr=1e-2, decoupled_weight_decay=True, weight_decay=1e-2)

    def step(x):
        base = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(4, device=x.device), 1.0), 1)
        volume = 0.0
        for layer in flow:
            x, more = layer(x)
            volume = volume + more
        return train(-(base.log_prob(x) + volume).mean(), optimizer)

    @torch.inference_mode()
    def sample():
        x = torch.ones(2, 4, device=device)
        for layer in reversed(flow):
            x = layer.inverse(x)
        return x

    return Program(step, _points(4, 4), [flow], sample)


def energy(device: str) -> Program:
    """An energy, whose negative samples follow its gradient."""
    model = mlp(4, 16, 1, activation=nn.SiLU).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x, start):
        sample = start
        for _ in range(3):
            sample = sample.detach().requires_grad_(True)
            sample = sample - 0.1 * torch.autograd.grad(model(sample).sum(), sample)[0]
        sample = sample.detach()
        low, high = model(x), model(sample)
        return train(low.mean() - high.mean() + 0.1 * (low.square() + high.square()).mean(), optimizer)

    return Program(step, _points(4, 4, 4), [model])


def mixture_density(device: str) -> Program:
    """A mixture of Gaussians as output."""
    model = mlp(3, 16, 9).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x, y):
        weights, means, scales = model(x).chunk(3, -1)
        terms = -0.5 * ((y - means) / scales.exp()).square() - scales - 0.5 * math.log(2 * math.pi)
        return train(-torch.logsumexp(weights.log_softmax(-1) + terms, -1).mean(), optimizer)

    return Program(step, _points(4, 3, 1), [model])


def speech_recognition(device: str) -> Program:
    """CTC over a convolution and a recurrent layer; lengths as CPU tensors, as lists and on the device."""
    recurrent = nn.GRU(8, 8, batch_first=True, bidirectional=True)
    model = nn.ModuleList([nn.Conv1d(5, 8, 3, padding=1), recurrent, nn.Linear(16, 6)]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x, labels):
        states = model[1](F.relu(model[0](x)).transpose(1, 2))[0]
        chances = model[2](states).log_softmax(-1).transpose(0, 1)
        inputs, targets = torch.tensor([12, 10, 11]), torch.tensor([4, 2, 3])
        loss = F.ctc_loss(chances, labels, inputs, targets, zero_infinity=True)
        loss = loss + F.ctc_loss(chances, labels, inputs.tolist(), targets.tolist())
        loss = loss + nn.CTCLoss(reduction="sum")(chances, labels, inputs.to(x.device), targets.to(x.device))
        return train(loss, optimizer)

    def draw(g):
        return torch.randn(3, 5, 12, generator=g), torch.randint(1, 6, (3, 4), generator=g)

    return Program(step, batches(3, draw), [model])


def transducer(device: str) -> Program:
    """The loss of a recurrent transducer by its forward algorithm, over diagonals of the lattice."""
    encoder, predictor, joint = nn.Linear(5, 8).to(device), nn.Embedding(6, 8).to(device), nn.Linear(8, 6).to(device)
    optimizer = torch.optim.Adam([p for module in (encoder, predictor, joint) for p in module.parameters()], lr=1e-2)

    def step(x, labels):
        states = torch.tanh(encoder(x)[:, :, None] + predictor(F.pad(labels, (1, 0)))[:, None])
        chances = joint(states).log_softmax(-1)
        stay = chances[..., 0]
        emit = chances[:, :, :-1].gather(-1, labels[:, None, :, None].expand(-1, x.size(1), -1, 1))[..., 0]
        row = torch.cat([torch.zeros_like(emit[:, 0, :1]), emit[:, 0].cumsum(-1)], -1)
        for time in range(1, x.size(1)):
            above, cells = row + stay[:, time - 1], []
            for u in range(above.size(1)):
                left = [] if u == 0 else [cells[-1] + emit[:, time, u - 1]]
                cells.append(torch.logsumexp(torch.stack([above[:, u], *left]), 0))
            row = torch.stack(cells, -1)
        return train(-(row[:, -1] + stay[:, -1, -1]).mean(), optimizer)

    def draw(g):
        return torch.randn(3, 5, 5, generator=g), torch.randint(1, 6, (3, 3), generator=g)

    return Program(step, batches(3, draw), [encoder, predictor, joint])


PROGRAMS = (
    variational_autoencoder, vector_quantized, adversarial, gradient_penalty, normalizing_flow, energy, mixture_density,
    speech_recognition, transducer,
)  # fmt: skip
