"""Random models with rare parameters, optimizers of papers, averages, and checkpoints between steps, beside plain torch.

Each seed draws a model, a mesh, a strategy, an optimizer; trains eagerly or captured; saves in this layout, loads in another,
and goes on. Losses of all steps are those of one process.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gt
from tests.helpers import longer
from tests.system.parity.strategies.test_zero_random import strategy

WIDTH, STEPS, CLOSE = 12, 10, 1e-5
KINDS = ("empty", "counts", "complex", "list", "lora", "non-contiguous", "scalar", "batch norm", "mlp", "shared", "half frozen")


class Odd(nn.Module):
    """A layer around a residual, with parameters or buffers of one rare kind."""

    def __init__(self, kind: str, draw: random.Random) -> None:
        super().__init__()
        self.kind, inner = kind, draw.choice([9, 16])
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        if kind == "empty":
            self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        elif kind == "counts":
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.int32))
        elif kind == "complex":
            self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64) * 0.1)
        elif kind == "list":
            self.gains = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.tensor(0.5))])
            self.named = nn.ParameterDict({"a": nn.Parameter(torch.zeros(WIDTH, 1))})
        elif kind == "lora":
            self.up.requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, WIDTH) * 0.1), nn.Parameter(torch.zeros(inner, 2))
        elif kind == "non-contiguous":
            self.mix = nn.Parameter((torch.randn(WIDTH, WIDTH) * 0.1).t())
            self.every = nn.Parameter(torch.ones(2 * WIDTH)[::2])
        elif kind == "scalar":
            self.scale, self.one = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.ones(1))
        elif kind == "batch norm":
            self.norm = nn.BatchNorm1d(WIDTH)
        elif kind == "shared":
            self.down.weight = nn.Parameter(torch.randn(WIDTH, inner) * 0.1)
            self.twin = nn.Linear(inner, WIDTH)
            self.twin.weight = self.down.weight
        elif kind == "half frozen":
            self.down.weight.requires_grad_(False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        inner = self.up(h)
        if self.kind == "lora":
            inner = inner + F.linear(h, self.b @ self.a)
        out = h + self.down(torch.tanh(inner))
        if self.kind == "empty":
            return out + self.empty.sum()
        if self.kind == "counts":
            self.calls += 1
            self.seen += (h.detach() > 0).sum(0).to(torch.int32)
            return out + 0.001 * torch.tanh(self.seen / self.calls).to(out.dtype)
        if self.kind == "complex":
            return out + torch.fft.irfft(torch.fft.rfft(h.float()) * self.filter, n=WIDTH).to(h.dtype)
        if self.kind == "list":
            return out * self.gains[0] * self.gains[1] + self.named["a"][:, 0]
        if self.kind == "non-contiguous":
            return out @ self.mix * self.every + out
        if self.kind == "scalar":
            return out * self.scale + self.one
        if self.kind == "batch norm":
            return self.norm(out)
        return out + self.twin(torch.tanh(inner)) if self.kind == "shared" else out


class OddModel(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Odd(draw.choice(KINDS), draw) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


# ---- optimizers


class Handwritten(torch.optim.Optimizer):
    """An optimizer whose rule is a function of (group, parameter, gradient, state)."""

    def __init__(self, parameters: Any, rule: Callable, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.rule(group["lr"], p, p.grad, self.state[p])


def lion(lr: float, p: torch.Tensor, grad: torch.Tensor, state: dict) -> None:
    """With tanh for the sign, which would amplify roundings."""
    if not state:
        state["exp_avg"] = torch.zeros_like(p)
    update = state["exp_avg"] * 0.9 + grad * 0.1
    p.mul_(1 - lr * 0.01).add_(update if p.is_complex() else torch.tanh(update * 10), alpha=-lr)
    state["exp_avg"].mul_(0.99).add_(grad, alpha=0.01)


def lamb(lr: float, p: torch.Tensor, grad: torch.Tensor, state: dict) -> None:
    if not state:
        state.update(m=torch.zeros_like(p), v=torch.zeros_like(p.abs()))
    state["m"].mul_(0.9).add_(grad, alpha=0.1)
    state["v"].mul_(0.99).add_(grad.abs().square(), alpha=0.01)
    update = state["m"] / (state["v"].sqrt() + 0.01) + 0.01 * p
    weight, size = p.abs().square().sum().sqrt(), update.abs().square().sum().sqrt()
    trust = torch.where((weight > 0) & (size > 0), weight / (size + 1e-3), torch.ones_like(weight))
    p.sub_(lr * trust * update)


def muon(lr: float, p: torch.Tensor, grad: torch.Tensor, state: dict) -> None:
    """Momentum that is made orthogonal by Newton and Schulz's iteration, in fp32, once it has two dims."""
    if not state:
        state["momentum"] = torch.zeros_like(p)
    momentum = state["momentum"].mul_(0.9).add_(grad)
    if p.dim() != 2 or not p.numel():
        p.sub_(momentum, alpha=lr)
        return
    x = momentum / (momentum.norm() + 0.1)
    for _ in range(3):
        x = 1.5 * x - 0.5 * (x @ x.mT) @ x
    p.sub_(x, alpha=lr)


OPTIMIZERS: dict[str, Callable[[list], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-2, momentum=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, eps=(1e-3, 1e-3)),
    "lion": lambda p: Handwritten(p, lion, 1e-2),
    "lamb": lambda p: Handwritten(p, lamb, 1e-2),
    "muon": lambda p: Handwritten(p, muon, 1e-2),
}
REAL = {"adafactor"}  # takes no complex parameters, and no empty ones


# ---- a program


class Program:
    """A model, its optimizer and the average of its weights."""

    def __init__(self, seed: int, device: str, apply: Callable[[nn.Module], None]) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.model = OddModel(draw).to(device)
        apply(self.model)
        self.device, kind = device, draw.choice([*OPTIMIZERS])
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if kind in REAL:
            trained = [p for p in trained if p.numel() and not p.is_complex()]
        self.optimizer, self.trained = OPTIMIZERS[kind](trained), trained
        self.average = [p.detach().clone() for p in trained]
        self.micro, self.clip, self.averages = draw.choice([1, 2]), draw.random() < 0.5, draw.random() < 0.5
        self.captured = draw.random() < 0.5
        self.batch = draw.choice([16, 13])
        self.kinds = [block.kind for block in self.model.blocks]
        self.about = f"{self.kinds}, {kind}, {'captured' if self.captured else 'eager'}"

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for part in batch.chunk(self.micro):
            loss = (self.model(part) - part[:, :5]).square().mean() / self.micro
            loss.backward()
            total = total + loss.detach()
        if self.clip:
            torch.nn.utils.clip_grad_norm_([p for p in self.trained if not p.is_complex()], 0.5)
        self.optimizer.step()
        if self.averages:
            with torch.no_grad():
                for average, p in zip(self.average, self.trained, strict=True):
                    average.mul_(0.9).add_(p, alpha=0.1)
        return total

    def losses(self, steps: range) -> list[float]:
        call = gt.compile(self.step) if self.captured and self.device != "cpu" else self.step
        data = torch.randn(STEPS, self.batch, WIDTH, generator=torch.Generator().manual_seed(7))
        return [float(call(data[n].to(self.device))) for n in steps]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "average": self.average}


def layout(draw: random.Random, folder: str) -> tuple[str, Callable[[nn.Module], None]]:
    """A config, and what places a model by it."""
    settings, mesh = strategy(draw, folder, False), draw.choice(["dp2", "dp4", "tp", "pp"])
    if mesh.startswith("dp"):
        return f"gt: {{data_parallel: {[*range(int(mesh[2:]))]}, {settings}}}", lambda model: None
    if mesh == "tp":
        groups = "".join(f"s{end}: {{workers: [[0, 1], [2, 3]]}}\n" for end in ("", "_colpar", "_rowpar"))
        return groups + f"gt: {{{settings}}}", lambda model: gt.signal.apply(model, {"head": "s_colpar", "": "s"})
    stages = {"blocks.[01]": "pp_stage0", "blocks.[23]": "pp_stage1", "head": "pp_stage1"}
    groups = "pp_stage0: {workers: [0, 1]}\npp_stage1: {workers: [2, 3]}\n"
    return groups + f"gt: {{{settings}}}", lambda model: gt.signal.apply(model, stages)


def without_checkpointing(text: str, kinds: list[str]) -> str:
    """A config; where buffers are written in forward, backward would write them again."""
    return re.sub(r", activation_checkpoint: \{[^}]*\}", "", text) if {"counts", "batch norm"} & {*kinds} else text


def saved(one: Program, folder: Path, pickled: bool) -> None:
    """Save by gt.save, or by torch.save, as complex tensors are no entries of safetensors."""
    if pickled:
        torch.save({key: value if key == "average" else value.state_dict() for key, value in one.state.items()}, folder / "t")
    else:
        gt.save(one.state, folder / "c")


def load(two: Program, folder: Path, pickled: bool) -> None:
    if not pickled:
        gt.load(folder / "c", into=two.state)
        return
    state = torch.load(folder / "t")
    two.model.load_state_dict(state["model"])
    two.optimizer.load_state_dict(state["optimizer"])
    two.average = state["average"]


def is_pickled(one: Program, draw: random.Random) -> bool:
    return any(p.is_complex() for p in one.model.parameters()) or draw.random() < 0.4


def compare(seed: int, folder: Path, session: Callable[[str], Any]) -> None:
    draw = random.Random(seed + 1000)
    (first, place), (second, again) = layout(draw, str(folder)), layout(draw, str(folder))
    plain = Program(seed, "cpu", lambda model: None)
    want = plain.losses(range(STEPS))
    first, second = (without_checkpointing(text, plain.kinds) for text in (first, second))
    session(first)
    one, about = Program(seed, "remote", place), f"{plain.about}\n{first}\n{second}"
    got = one.losses(range(6))
    pickled = is_pickled(one, draw)
    saved(one, folder, pickled)
    session(second)
    two = Program(seed, "remote", again)
    load(two, folder, pickled)
    got += two.losses(range(6, STEPS))
    assert got == pytest.approx(want, abs=CLOSE, rel=CLOSE), about
    for a, b in zip(two.average, plain.average, strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=3e-5, rtol=1e-4, msg=lambda text: f"{text}\n{about}")
    for (name, a), (_, b) in zip(two.model.state_dict().items(), plain.model.state_dict().items(), strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=3e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}\n{about}")


def resume(seed: int, folder: Path, session: Callable[[str], Any], precision: str) -> None:
    """AssertionError unless training in a precision goes on with the same bits after a load in the same layout."""
    draw = random.Random(seed + 2000)
    kinds = Program(seed, "cpu", lambda model: None).kinds
    text = f"gt: {{data_parallel: [0, 1], {strategy(draw, str(folder), False)}, precision: {precision}}}"
    text = without_checkpointing(text, kinds)
    session(text)
    one = Program(seed, "remote", lambda model: None)
    pickled = is_pickled(one, draw)
    one.losses(range(6))
    saved(one, folder, pickled)
    want = one.losses(range(6, STEPS))
    session(text)
    two = Program(seed, "remote", lambda model: None)
    load(two, folder, pickled)
    assert two.losses(range(6, STEPS)) == want, f"{one.about}, pickled {pickled}\n{text}"


@pytest.mark.parametrize("seed", longer([1, 4, 7, 9, 17], [17]))
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_goes_on_bit_for_bit(session: Callable, seed: int, precision: str, tmp_path: Path) -> None:
    resume(seed, tmp_path, session, precision)


@pytest.mark.parametrize("seed", longer(range(8), [2, 5]))
def test_a_program_of_rare_parameters_has_the_numbers_of_one_process(session: Callable, seed: int, tmp_path: Path) -> None:
    compare(seed, tmp_path, session)


def test_the_gradient_of_a_complex_parameter_is_not_scaled(session: Callable) -> None:
    """It keeps its dtype under fp16, and the loss scale is no factor of it."""
    gradients = []
    for precision in ("fp32", "fp16"):
        session(f"gt: {{data_parallel: [0, 1], precision: {precision}}}")
        torch.manual_seed(0)
        model = Odd("complex", random.Random(0)).to("remote")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(4, WIDTH).to("remote")).float().square().mean().backward()
        optimizer.step()
        gradients.append(model.filter.grad.cpu())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0.01, atol=0.01)
