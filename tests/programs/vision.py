"""Programs over pictures: classifiers, diffusion, metric learning, style transfer, quantisation."""

from __future__ import annotations

import copy

import torch
import torch.ao.quantization as quantization
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.programs.program import Program, batches, mlp, pictures, train


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.body(x) + self.short(x))


def _resnet() -> nn.Sequential:
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    return nn.Sequential(Residual(3, 8), nn.MaxPool2d(2), Residual(8, 8, 2), *head)


def residual_network(device: str) -> Program:
    """A ResNet with batch norm, evaluated under inference_mode."""
    model = _resnet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    data = pictures()

    def step(x, y):
        model.train()
        return train(F.cross_entropy(model(x), y), optimizer)

    def accuracy():
        model.eval()
        with torch.inference_mode():
            x, y = (t.to(device) for t in data[0])
            return [(model(part).argmax(-1) == label).sum() for part, label in zip(x.split(2), y.split(2))]

    return Program(step, data, [model], accuracy)


def channels_last(device: str) -> Program:
    """The same with the memory format of fast convolutions, which its results keep."""
    model = _resnet().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    strides: list[tuple] = []

    def step(x, y):
        first = model[0](x.contiguous(memory_format=torch.channels_last))
        strides.append(first.stride())
        return train(F.cross_entropy(model[1:](first), y), optimizer)

    return Program(step, pictures(), [model], lambda: [torch.tensor(strides)])


def separable_convolutions(device: str) -> Program:
    """Depthwise convolutions and squeeze-and-excitation, with an average of the weights and SWA's schedule."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.Hardswish(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.SiLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    weights, schedule, data = AveragedModel(model), SWALR(optimizer, 0.05, 2), pictures(4)

    def step(x, y):
        loss = train(F.cross_entropy(model(x), y), optimizer)
        average.update_parameters(model)
        weights.update_parameters(model)
        schedule.step()
        return loss

    def evaluate():
        update_bn([x.to(device) for x, _ in data], weights)
        return [module.eval()(data[0][0].to(device)).detach() for module in (average, weights)]

    return Program(step, data, [model, average, weights], evaluate)


class PatchClassifier(nn.Module):
    """A vision transformer with a class token."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, width, 4, 4), nn.Linear(width, 5)
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.randn(1, 5, width) / 4)
        self.attention, self.norm = nn.MultiheadAttention(width, 2, bias=False, batch_first=True), nn.LayerNorm(width)
        self.body = mlp(width, 32, width, activation=nn.GELU)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        normal = self.norm(x)
        x = x + self.attention(normal, normal, normal, need_weights=False)[0]
        return self.head((x + self.body(x))[:, 0])


def vision_transformer(device: str) -> Program:
    """Mixed labels and a warm-up."""
    model = PatchClassifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)

    def step(x, y):
        target = F.one_hot(y, 5).float().lerp(F.one_hot(y.flip(0), 5).float(), 0.3)
        loss = train(F.cross_entropy(model(x.lerp(x.flip(0), 0.3)), target), optimizer)
        schedule.step()
        return loss

    return Program(step, pictures(), [model])


class Denoiser(nn.Module):
    """A U-Net of one level that knows the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = mlp(8, 16, 8, activation=nn.SiLU)
        self.enter, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm, self.up = nn.GroupNorm(4, 16), nn.ConvTranspose2d(16, 8, 2, 2)
        self.leave = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x, time):
        rates = torch.exp(-torch.arange(4, device=x.device) / 2.0)
        angles = time[:, None] * rates
        x = self.enter(x) + self.time(torch.cat([angles.sin(), angles.cos()], -1))[:, :, None, None]
        low = F.silu(self.norm(self.down(x)))
        return self.leave(torch.cat([x, self.up(low)], 1))


def diffusion(device: str) -> Program:
    """Denoising diffusion, an average of the weights, and a deterministic sampler under inference_mode."""
    model = Denoiser().to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.05, 20), 0).to(device)

    def step(x, noise, time):
        alpha = alphas[time].view(-1, 1, 1, 1)
        loss = train(F.mse_loss(model(alpha.sqrt() * x + (1 - alpha).sqrt() * noise, time.float()), noise), optimizer)
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
        return loss

    @torch.inference_mode()
    def sample():
        x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3)).to(device)
        for now, after in ((19, 12), (12, 5), (5, 0)):
            noise = average(x, torch.full((2,), float(now), device=device))
            start = (x - (1 - alphas[now]).sqrt() * noise) / alphas[now].sqrt()
            x = alphas[after].sqrt() * start.clamp(-1, 1) + (1 - alphas[after]).sqrt() * noise
        return list(x)

    def draw(g):
        shape = (4, 1, 8, 8)
        return torch.randn(shape, generator=g), torch.randn(shape, generator=g), torch.randint(20, (4,), generator=g)

    return Program(step, batches(3, draw), [model, average], sample)


def siamese(device: str) -> Program:
    """A contrastive loss of pairs, a triplet loss with the distances' hardest negative, and a cosine loss."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(), nn.Flatten(), nn.Linear(144, 8)).to(device)
    optimizer = torch.optim.Rprop(model.parameters(), lr=1e-3)

    def step(x, y):
        states = model(x)
        distances = torch.cdist(states, states)
        same = y[:, None] == y[None]
        contrast = torch.where(same, distances.square(), (1.0 - distances).clamp(min=0).square()).mean()
        hardest = distances.masked_fill(same, torch.inf).argmin(-1)
        triplet = nn.TripletMarginLoss(margin=0.5)(states, states.roll(1, 0), states[hardest])
        return train(contrast + triplet + F.cosine_embedding_loss(states, states.flip(0), torch.ones_like(y)), optimizer)

    return Program(step, pictures(3, 6, classes=2), [model])


def two_views(device: str) -> Program:
    """SimCLR's loss over two views, with a queue of earlier keys."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ELU(), nn.Linear(16, 8)).to(device)
    optimizer = torch.optim.ASGD(model.parameters(), lr=1e-2)
    queue = F.normalize(torch.randn(6, 8, generator=torch.Generator().manual_seed(1)), dim=-1).to(device)

    def step(x, _):
        a, b = F.normalize(model(x), dim=-1), F.normalize(model(x.flip(-1)), dim=-1)
        logits = torch.cat([(a * b).sum(-1, keepdim=True), a @ queue.T], -1) / 0.2
        loss = train(F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device=x.device)), optimizer)
        queue.copy_(torch.cat([b.detach(), queue])[:6])
        return loss

    return Program(step, pictures(), [model], lambda: queue)


def style_transfer(device: str) -> Program:
    """LBFGS over a picture, whose Gram matrices follow another picture's."""
    features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(6, 6, 3))
    features.to(device).requires_grad_(False)
    picture = nn.Parameter(torch.rand(1, 3, 10, 10, generator=torch.Generator().manual_seed(2)).to(device))
    optimizer = torch.optim.LBFGS([picture], max_iter=5, line_search_fn="strong_wolfe")

    def gram(x):
        flat = features(x).flatten(2)
        return flat @ flat.transpose(1, 2) / flat.shape[-1]

    def step(style, content):
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(gram(picture), gram(style)) + F.l1_loss(features(picture), features(content))
            loss.backward()
            return loss

        loss = optimizer.step(closure).detach()
        with torch.no_grad():
            picture.clamp_(0, 1)
        return loss

    def draw(g):
        return torch.rand(1, 3, 10, 10, generator=g), torch.rand(1, 3, 10, 10, generator=g)

    return Program(step, batches(1, draw) * 2, [features], lambda: picture)


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = quantization.QuantStub(), quantization.DeQuantStub()
        self.conv, self.norm, self.relu, self.head = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Linear(216, 5)

    def forward(self, x):
        return self.leave(self.head(self.relu(self.norm(self.conv(self.enter(x)))).flatten(1)))


def quantized_training(device: str) -> Program:
    """Quantisation-aware training: fake quantisation by tensor and by channel, fused and from parts."""
    model = Quantized().train()
    fused = quantization.get_default_qat_qconfig("fbgemm")
    by_channel = quantization.default_per_channel_weight_fake_quant
    parts = quantization.QConfig(activation=quantization.default_fake_quant, weight=by_channel)
    model.qconfig, model.head.qconfig = fused, parts
    quantization.fuse_modules_qat(model, [["conv", "norm", "relu"]], inplace=True)
    model = quantization.prepare_qat(model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x, y):
        loss = train(F.cross_entropy(model(x), y), optimizer)
        return loss

    def freeze():
        model.apply(quantization.disable_observer)
        model.apply(nn.intrinsic.qat.freeze_bn_stats)
        return model(torch.ones(2, 3, 8, 8, device=device))

    return Program(step, pictures(4), [model], freeze)


PROGRAMS = (
    residual_network, channels_last, separable_convolutions, vision_transformer, diffusion, siamese, two_views,
    style_transfer, quantized_training,
)  # fmt: skip
