"""A captured training step whose module and optimizer are changed between calls at random: its numbers are plain torch's.

Each change is made to a model on the CPU too. A call may be replayed, recorded anew or run eagerly: that is not asked here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import gt

pytestmark = pytest.mark.usefixtures("plain_threads")

CALLS = 14
CHANGES: list[Callable[[Training, random.Random], None]] = []


class Net(nn.Module):
    """Layers of one size, so that their weights can be tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x)) * self.scale))


class Training:
    """One side: a model on its device, its optimizer, and what changes have left to be taken back."""

    def __init__(self, device: str, clears: bool, adam: bool) -> None:
        torch.manual_seed(0)
        self.device, self.clears = device, clears
        self.model = Net().to(device)
        self.optimizer: torch.optim.Optimizer
        if adam:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, foreach=False)
        self.hooks: list[Any] = []
        self.saved = self.state()

    def state(self) -> dict[str, torch.Tensor]:
        return deepcopy({name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()})

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: None if p.grad is None else p.grad.cpu() for name, p in self.model.named_parameters()}

    def parameter(self, rng: random.Random) -> nn.Parameter:
        return rng.choice(list(self.model.parameters()))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.clears:
            self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def change(make: Callable[[Training, random.Random], None]) -> Callable[[Training, random.Random], None]:
    CHANGES.append(make)
    return make


@change
def other_data(it: Training, rng: random.Random) -> None:
    p = it.parameter(rng)
    p.data = p.data * 0.5


@change
def requires_grad(it: Training, rng: random.Random) -> None:
    p = it.parameter(rng)
    p.requires_grad_(not p.requires_grad)


@change
def a_layer_is_frozen(it: Training, rng: random.Random) -> None:
    it.model.first.requires_grad_(False)


@change
def nothing_is_frozen(it: Training, rng: random.Random) -> None:
    it.model.requires_grad_(True)


@change
def another_buffer(it: Training, rng: random.Random) -> None:
    it.model.scale = torch.full((4,), rng.choice([0.25, 1.0])).to(it.device)


@change
def a_hook_of_a_parameter(it: Training, rng: random.Random) -> None:
    p = it.parameter(rng)
    if p.requires_grad:
        it.hooks.append(p.register_hook(lambda grad: grad * 2))


@change
def a_hook_of_a_module(it: Training, rng: random.Random) -> None:
    it.hooks.append(it.model.first.register_forward_hook(lambda module, args, out: out + 1))


@change
def no_hooks(it: Training, rng: random.Random) -> None:
    while it.hooks:
        it.hooks.pop().remove()


@change
def the_learning_rate(it: Training, rng: random.Random) -> None:
    it.optimizer.param_groups[0]["lr"] = rng.choice([0.01, 0.05])


@change
def another_submodule(it: Training, rng: random.Random) -> None:
    torch.manual_seed(rng.randrange(9))
    it.model.second = nn.Linear(4, 4).to(it.device)


@change
def the_mode(it: Training, rng: random.Random) -> None:
    it.model.train(not it.model.training)


@change
def a_gradient_is_deleted(it: Training, rng: random.Random) -> None:
    del it.parameter(rng).grad


@change
def no_gradients(it: Training, rng: random.Random) -> None:
    it.optimizer.zero_grad(set_to_none=True)


@change
def gradients_of_zero(it: Training, rng: random.Random) -> None:
    it.optimizer.zero_grad(set_to_none=False)


@change
def a_gradient_by_hand(it: Training, rng: random.Random) -> None:
    p = it.parameter(rng)
    if p.requires_grad:
        p.grad = torch.full(p.shape, 0.125).to(it.device)


@change
def saved_state_is_loaded(it: Training, rng: random.Random) -> None:
    if it.model.first.weight is not it.model.second.weight:
        it.model.load_state_dict(it.saved)


@change
def a_parameter_in_place(it: Training, rng: random.Random) -> None:
    with torch.no_grad():
        it.parameter(rng).mul_(0.75)


@change
def to_the_cpu_and_back(it: Training, rng: random.Random) -> None:
    it.model.to("cpu")
    it.model.to(it.device)


@change
def tied_weights(it: Training, rng: random.Random) -> None:
    it.model.second.weight = it.model.first.weight


@change
def untied_weights(it: Training, rng: random.Random) -> None:
    it.model.second.weight = nn.Parameter(it.model.second.weight.detach().clone())


@change
def state_of_the_optimizer_is_gone(it: Training, rng: random.Random) -> None:
    it.optimizer.state.clear()


def same(ours: dict[str, torch.Tensor | None], theirs: dict[str, torch.Tensor | None]) -> list[str]:
    """Names of what differs."""
    assert ours.keys() == theirs.keys()
    pairs = {name: (tensor, theirs[name]) for name, tensor in ours.items()}
    return [n for n, (a, b) in pairs.items() if (a is None) is not (b is None) or (a is not None and not torch.equal(a, b))]  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_changes_between_calls_have_the_effect_that_they_have_in_torch(session: Callable, seed: int) -> None:
    session()
    clears, adam = bool(seed & 1), bool(seed & 2)
    ours, native = Training("remote", clears, adam), Training("cpu", clears, adam)
    step, rng = gt.compile(ours.__call__), random.Random(seed)
    done: list[str] = []
    for n in range(CALLS):
        for make in rng.sample(CHANGES, rng.choice([0, 0, 1, 1, 2]) if n else 0):
            done.append(f"{n} {make.__name__}")
            chosen = rng.random()
            make(ours, random.Random(chosen))
            make(native, random.Random(chosen))
        if not any(p.requires_grad for p in native.model.parameters()):
            continue
        x = torch.rand(3, 4, generator=torch.Generator().manual_seed(n))
        assert step(x).item() == native(x).item(), done
        assert not same(ours.state(), native.state()), done  # type: ignore[arg-type]
        assert not same(ours.gradients(), native.gradients()), done


@pytest.mark.parametrize("name", ["trained", "frozen", "buffer"])
def test_a_step_that_assigns_data_keeps_the_tensor(one: None, name: str) -> None:
    """As clipped weights of a critic, or a target network: the optimizer, and who else holds the tensor, hold what is used."""

    def trained(device: str) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        model, target = Net().to(device), Net().to(device).requires_grad_(False)
        held = [model.second.weight, target.first.weight, target.scale]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - target(x)).square().mean()
            loss.backward()
            optimizer.step()
            assigned = {"trained": model.second.weight, "frozen": target.first.weight, "buffer": target.scale}[name]
            assigned.data = assigned.data.clamp(-0.2, 0.2) * 0.9
            return loss.detach()

        call = gt.compile(step) if device == "remote" else step
        losses = [call(torch.rand(3, 4, generator=torch.Generator().manual_seed(n)).to(device)).item() for n in range(5)]
        return losses, [tensor.detach().cpu() for tensor in held]

    losses, held = trained("remote")
    want, values = trained("cpu")
    assert losses == want
    assert all(map(torch.equal, held, values))


def momentum_encoder(device: str, change: str) -> tuple[list[float], list[torch.Tensor], Any]:
    """Losses, then weights and what the caller keeps, of training beside a copy that follows by `.data`; and the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).to(device)
    slow = deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        for fast, follower in zip(model.parameters(), slow.parameters(), strict=True):
            follower.data = follower.data * 0.9 + fast.data * 0.1
        loss = nn.functional.mse_loss(model(x), slow(x)) + model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    changes: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "an alias": lambda: kept.append(slow[0].weight.data),
        "a view": lambda: kept.append(slow[0].weight[1:]),
        "state_dict": lambda: kept.append(slow.state_dict()["3.weight"]),
        "load_state_dict": lambda: slow.load_state_dict(model.state_dict()),
        "another parameter": lambda: setattr(slow[0], "weight", nn.Parameter(model[0].weight.detach().clone(), False)),
        "requires_grad": lambda: slow[0].weight.requires_grad_(),
        "an eager step": lambda: step(torch.ones(3, 4, device=device)),
        "a write": lambda: slow[0].weight.mul_(2),
        "other memory": lambda: setattr(slow[0].weight, "data", torch.zeros(6, 4, device=device)),
    }
    kept: list[torch.Tensor] = []
    compiled = gt.compile(step) if device == "remote" else step
    losses, generator = [], torch.Generator().manual_seed(1)
    for n in range(CALLS):
        losses.append(compiled(torch.randn(5 if n in (6, 10, 11, 12) else 8, 4, generator=generator)).item())
        if n in (5, 8):
            changes[change]()
        elif n == 9:
            kept[:1] = []
    return losses, [p.detach().cpu() for p in (*model.parameters(), *slow.parameters(), *kept)], compiled


MOMENTUM_ENCODERS = ["nothing", "an alias", "a view", "state_dict", "load_state_dict", "another parameter", "requires_grad",
                     "an eager step", "a write", "other memory"]  # fmt: skip


@pytest.mark.parametrize("change", MOMENTUM_ENCODERS)
def test_a_copy_that_follows_by_data_is_that_of_torch_and_replayed(one: None, change: str) -> None:
    losses, tensors, step = momentum_encoder("remote", change)
    want = momentum_encoder("cpu", change)
    torch.testing.assert_close((losses, tensors), want[:2], rtol=1e-6, atol=1e-6)
    assert any(program.replays for program in step._programs), step.explain()
    if change == "nothing":
        assert [program.replays >= 1 for program in step._programs] == [True, True], step.explain()


def test_a_copy_that_follows_by_data_on_two_workers(session: Callable) -> None:
    session("data: {workers: [0, 1]}\n")
    with gt.signal.context("data"):
        losses, tensors, step = momentum_encoder("remote", "nothing")
    torch.testing.assert_close((losses, tensors), momentum_encoder("cpu", "nothing")[:2], rtol=1e-5, atol=1e-5)
    assert step._programs[0].replays, step.explain()
