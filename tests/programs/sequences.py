"""Attention in other forms, state spaces, graphs, audio and complex numbers, as people write them by hand."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.programs.program import Program, batches, tokens, train


def rotary_decoder(device: str) -> Program:
    """A Llama block: rotation by complex numbers, shared keys, RMS norm, and generation with a cache of keys and values."""
    width, heads, shared, length, words = 16, 4, 2, 12, 40
    size = width // heads
    embed, head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
    head.weight = embed.weight
    layers = nn.ModuleDict(
        {"q": nn.Linear(width, width), "k": nn.Linear(width, shared * size), "v": nn.Linear(width, shared * size),
         "gate": nn.Linear(width, 32), "up": nn.Linear(width, 32), "down": nn.Linear(32, width), "norm": nn.RMSNorm(width)}
    )  # fmt: skip
    modules = [embed.to(device), head.to(device), layers.to(device)]
    optimizer = torch.optim.AdamW({id(p): p for m in modules for p in m.parameters()}.values(), lr=1e-2)
    angles = torch.outer(torch.arange(length).float(), 10000.0 ** -(torch.arange(0, size, 2) / size))
    turns = torch.polar(torch.ones_like(angles), angles).to(device)

    def rotate(x, start):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[start : start + x.shape[1], None]).flatten(3)

    def block(x, cache, start):
        rows, steps, _ = x.shape
        h = layers["norm"](x)
        q, k, v = (layers[name](h).view(rows, steps, -1, size) for name in "qkv")
        q, k = rotate(q, start), rotate(k, start)
        if cache is not None:
            cache[0][:, start : start + steps], cache[1][:, start : start + steps] = k, v
            k, v = cache[0][:, : start + steps], cache[1][:, : start + steps]
        k = k[:, :, :, None].expand(-1, -1, -1, heads // shared, -1).flatten(2, 3)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(size)
        ahead = torch.ones(steps, k.shape[1], dtype=torch.bool, device=x.device).triu(1 + start)
        weights = scores.masked_fill(ahead, float("-inf")).float().softmax(-1)
        x = x + (weights @ v.repeat_interleave(heads // shared, 2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        return x + layers["down"](F.silu(layers["gate"](x)) * layers["up"](x))

    def step(words_):
        logits = head(block(embed(words_[:, :-1]), None, 0))
        return train(F.cross_entropy(logits.flatten(0, 1), words_[:, 1:].flatten()), optimizer)

    @torch.no_grad()
    def generate():
        cache = [torch.zeros(1, length, shared, size, device=device) for _ in range(2)]
        found, word = [], torch.tensor([[3]], device=device)
        for position in range(length - 2):
            logits = head(block(embed(word), cache, position))[:, -1] / 0.8
            least = logits.topk(8).values[:, [-1]]
            logits[logits < least] = float("-inf")
            ordered, places = logits.softmax(-1).sort(descending=True)
            unlikely = ordered.cumsum(-1) - ordered > 0.9
            logits = logits.masked_fill(unlikely.scatter(1, places, unlikely), float("-inf"))
            word = logits.argmax(-1, keepdim=True)
            found.append(word.item())
        return torch.tensor(found)

    return Program(step, tokens(3), modules[::2], generate)


def graph_attention(device: str) -> Program:
    """Messages along edges: softmax over a node's edges by scatter_reduce, means, maxima, and index_put that accumulates."""
    generator = torch.Generator().manual_seed(3)
    source, target = torch.randint(20, (2, 60), generator=generator).to(device)
    inner, score, outer = nn.Linear(6, 12).to(device), nn.Linear(24, 1).to(device), nn.Linear(12, 3).to(device)
    optimizer = torch.optim.Adam([*inner.parameters(), *score.parameters(), *outer.parameters()], lr=1e-2)

    def step(x, label):
        h = inner(x)
        raw = F.leaky_relu(score(torch.cat([h[source], h[target]], -1)).squeeze(-1), 0.2)
        most = torch.full((20,), -1e9, device=x.device).scatter_reduce(0, target, raw, "amax")
        share = (raw - most[target]).exp()
        share = share / torch.zeros(20, device=x.device).index_add(0, target, share)[target]
        messages, zeros = h[source] * share[:, None], torch.zeros_like(h)
        column = target[:, None].expand_as(messages)
        summed = zeros.index_add(0, target, messages) + zeros.index_put((target,), h[source], accumulate=True)
        mean = torch.zeros_like(h).scatter_reduce_(0, column, h[source], "mean", include_self=False)
        largest = torch.full_like(h, -9.0).scatter_reduce(0, column, h[source], "amax")
        return train(F.cross_entropy(outer(F.elu(summed + mean + largest)), label), optimizer)

    def draw(g):
        return torch.randn(20, 6, generator=g), torch.randint(3, (20,), generator=g)

    return Program(step, batches(3, draw), [inner, score, outer])


def spectral_mask(device: str) -> Program:
    """Speech enhancement: a complex mask of a spectrogram, back to samples, and a loss at two resolutions."""
    net = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.PReLU(), nn.Conv2d(6, 2, 3, padding=1)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def transform(x, size, make=torch.hann_window):
        return torch.stft(x, size, size // 4, window=make(size, device=x.device), return_complex=True)

    def step(noisy, clean):
        spectrum = transform(noisy, 32, torch.kaiser_window)
        parts = net(torch.view_as_real(spectrum).permute(0, 3, 1, 2).contiguous()).tanh()
        masked = spectrum * torch.complex(parts[:, 0], parts[:, 1])
        turn = torch.exp(-2j * math.pi * torch.fft.rfftfreq(32, device=noisy.device))
        loss = (masked * turn[:, None] - transform(clean, 32)).abs().mean()
        sound = torch.fft.irfft(masked, dim=1).flatten(1)[:, : clean.shape[1]]
        for size in (16, 32):
            a, b = transform(sound, size).abs(), transform(clean, size).abs()
            loss = loss + (a - b).norm() / b.norm() + F.l1_loss((a + 0.1).log(), (b + 0.1).log())
        return train(loss, optimizer)

    def draw(g):
        return torch.randn(2, 96, generator=g), torch.randn(2, 96, generator=g)

    return Program(step, batches(3, draw), [net])


def selective_scan(device: str) -> Program:
    """A state space layer whose steps depend on its input, time by time, and linear attention with sums of outer products."""
    width, states = 8, 4
    inner, choose, outer = nn.Linear(width, 2 * width), nn.Linear(width, 2 * states + width), nn.Linear(width, width)
    conv = nn.Conv1d(width, width, 3, padding=2, groups=width)
    modules = [m.to(device) for m in (inner, choose, outer, conv)]
    rates = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1).to(device))
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=1e-2)
    optimizer.add_param_group({"params": [rates], "lr": 1e-3, "weight_decay": 0.0})

    def step(x, y):
        u, gate = inner(x).chunk(2, -1)
        u = F.silu(conv(u.mT)[..., : x.shape[1]].mT)
        size, into, out = choose(u).split([width, states, states], -1)
        size = F.softplus(size)
        keep, add = torch.exp(size[..., None] * -rates.exp()), (size * u)[..., None] * into[:, :, None]
        state, rows = torch.zeros(len(x), width, states, device=x.device), []
        for n in range(x.shape[1]):
            state = keep[:, n] * state + add[:, n]
            rows.append((state * out[:, n, None]).sum(-1))
        mixed = torch.stack(rows, 1) * F.silu(gate)
        sums = torch.einsum("btd,bte->btde", F.elu(into) + 1, u).cumsum(1)
        return train(F.mse_loss(outer(mixed) + torch.einsum("btd,btde->bte", F.elu(out) + 1, sums) * 0.1, y), optimizer)

    def draw(g):
        return torch.randn(2, 6, width, generator=g), torch.randn(2, 6, width, generator=g)

    return Program(step, batches(3, draw), modules)


def radiance_field(device: str) -> Program:
    """NeRF: encoded points on rays, densities, and colours by cumulative products."""
    net = nn.Sequential(nn.Linear(39, 24), nn.ReLU(), nn.Linear(24, 4)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def step(start, way, colour):
        depth = torch.linspace(2.0, 6.0, 6, device=start.device)
        points = start[:, None] + way[:, None] * depth[:, None]
        raw = net(torch.cat([points] + [f(2.0**n * points) for n in range(6) for f in (torch.sin, torch.cos)], -1))
        gaps = torch.cat([depth.diff(), torch.tensor([1e10], device=depth.device)])
        opaque = 1 - torch.exp(-F.relu(raw[..., 3]) * gaps)
        through = torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque + 1e-10], -1).cumprod(-1)[:, :-1]
        return train(F.mse_loss(((opaque * through)[..., None] * raw[..., :3].sigmoid()).sum(1), colour.sigmoid()), optimizer)

    return Program(step, batches(3, lambda g: tuple(torch.randn(6, 3, generator=g) for _ in range(3))), [net])


PROGRAMS = (rotary_decoder, graph_attention, spectral_mask, selective_scan, radiance_field)
