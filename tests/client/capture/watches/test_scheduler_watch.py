"""Schedulers that a captured step steps: replays step them too, and whatever else a step does with one has Python run."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

import gt

pytestmark = pytest.mark.usefixtures("one", "plain_threads")
CALLS = 12


def sequence(optimizer: torch.optim.Optimizer) -> Any:
    first, second = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 9)
    return lr_scheduler.SequentialLR(optimizer, [first, second], [3])


class History(lr_scheduler.LRScheduler):
    """A scheduler of a user, which keeps a list of rates and a flag."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.history: list[float] = []
        self.keeps = True
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        rates = [group["lr"] * 0.9 for group in self.optimizer.param_groups]
        self.history.append(rates[0])
        return rates


class Counting:
    """A factor whose calls are counted."""

    calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / (1 + epoch)


STEPPED: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "steps": lambda o: lr_scheduler.StepLR(o, 5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "warm-up": lambda o: lr_scheduler.LambdaLR(o, lambda n: min(1.0, (n + 1) / 6)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
    "sequence": sequence,
    "chain": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)]),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "a user's": History,
}
IN_PARTS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "betas": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "counts": lambda o: lr_scheduler.LambdaLR(o, Counting()),
    "reads the loss": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


class Training:
    """A model with optimizer and scheduler, and a step that does `more` with the scheduler."""

    def __init__(self, device: str, make: Callable[[Any], Any], more: Callable[[Training], Any] | None = None) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 4).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.scheduler = make(self.optimizer)
        self.more, self.device, self.rates = more, device, []
        self.generator = torch.Generator().manual_seed(1)

    def step(self, x: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), x[:, :4])
        loss.backward()
        self.optimizer.step()
        reads = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
        self.scheduler.step(loss.detach()) if reads else self.scheduler.step()
        return loss if self.more is None else loss * self.more(self)

    def call(self, step: Callable[..., Any]) -> float:
        loss = step(torch.randn(8, 8, generator=self.generator).to(self.device)).item()
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        return loss

    def state(self) -> dict[str, Any]:
        """All numbers of the scheduler, and what the optimizer holds."""
        schedulers = [self.scheduler, *getattr(self.scheduler, "_schedulers", ())]
        kinds = (int, float, list)
        left_out = ("lr_lambdas", "_schedulers", "_schedule_phases")
        numbers = [{k: v for k, v in vars(s).items() if isinstance(v, kinds) and k not in left_out} for s in schedulers]
        calls = [f.calls for f in getattr(self.scheduler, "lr_lambdas", ()) if isinstance(f, Counting)]
        state = [value.cpu() for row in self.optimizer.state.values() for value in row.values()]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.state_dict()["param_groups"]]
        return {"scheduler": numbers, "calls": calls, "state": state, "groups": groups, "rates": self.rates}


def compare(make: Callable[[Any], Any], more: Callable[[Training], Any] | None = None, between: Any = None) -> Any:
    """Train with and without gt.compile, to the bit, and return the compiled step. between: called before each call."""
    outcomes, step = [], None
    for device in ("cpu", "remote"):
        training = Training(device, make, more)
        step = training.step if device == "cpu" else gt.compile(training.step)
        losses = []
        for n in range(CALLS):
            if between is not None:
                between(training, n)
            losses.append(training.call(step))
        outcomes.append({"losses": losses, "weight": training.model.weight.detach().cpu(), **training.state()})
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=0, atol=0)
    return step


@pytest.mark.parametrize("name", STEPPED)
def test_a_replay_steps_the_scheduler(name: str) -> None:
    step = compare(STEPPED[name])
    assert ": 1 program" in step.explain() and step._programs[0].replays == CALLS - 3, step.explain()
    assert "a scheduler is stepped after each replay" in step.explain()


@pytest.mark.parametrize("name", IN_PARTS)
def test_python_runs_where_a_step_of_a_scheduler_does_more_than_set_rates(name: str) -> None:
    step = compare(IN_PARTS[name])
    assert "in parts" in step.explain() and not step._programs, step.explain()


@pytest.mark.parametrize(
    "more",
    [
        lambda t: t.scheduler.get_last_lr()[0],
        lambda t: 2.0 if t.scheduler.last_epoch > 5 else 1.0,
        lambda t: getattr(t.scheduler, "last" + "_epoch"),
        lambda t: len(vars(t.scheduler)) + vars(t.scheduler)["last_epoch"],
        lambda t: setattr(t.scheduler, "last_epoch", 3) or 1.0,
    ],
    ids=["last rate", "decides", "getattr", "vars", "sets"],
)
def test_python_runs_where_a_function_uses_more_of_a_scheduler(more: Callable[[Training], Any]) -> None:
    step = compare(STEPPED["cosine"], more)
    assert "beside its step()" in step.explain() and not step._programs, step.explain()


def test_a_list_of_a_scheduler_that_a_function_reads_has_python_run() -> None:
    rates = {"cpu": [], "remote": []}  # type: ignore[var-annotated]

    class Shared(History):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer)
            self.history = rates[optimizer.param_groups[0]["params"][0].device.type]

    step = compare(Shared, lambda t: rates[t.device][-1])
    assert not step._programs, step.explain()


def test_state_that_is_loaded_and_rates_that_are_set_between_calls() -> None:
    saved: dict[str, Any] = {}

    def between(training: Training, n: int) -> None:
        if n == 5:
            saved[training.device] = dict(training.scheduler.state_dict())
        elif n == 8:
            training.scheduler.load_state_dict(saved[training.device])
            training.optimizer.param_groups[0]["lr"] = 0.5
        elif n == 10:
            training.scheduler.step()

    step = compare(STEPPED["warm-up"], between=between)
    assert step._programs[0].replays == CALLS - 3, step.explain()


def test_an_error_of_a_scheduler_comes_from_the_call_that_has_it() -> None:
    training = Training("remote", lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8, cycle_momentum=False))
    step = gt.compile(training.step)
    for _ in range(8):
        training.call(step)
    before = training.model.weight.detach().cpu()
    with pytest.raises(ValueError, match="Tried to step 9 times"):
        training.call(step)
    assert step._programs[0].replays >= 5
    assert not torch.equal(training.model.weight.detach().cpu(), before), "the optimizer's step comes before the scheduler's"


def test_a_scheduler_keeps_its_class_and_may_be_copied_in_the_call() -> None:
    training, kinds = Training("remote", History), []
    names = "step", "__getattribute__", "__setattr__"

    def methods() -> list[Any]:
        return [vars(kind).get(name) for kind in (lr_scheduler.LRScheduler, History) for name in names]

    before = methods()

    def step(x: torch.Tensor) -> torch.Tensor:
        training.step(x)
        kinds.append(type(training.scheduler) is History)
        twin = copy.copy(training.scheduler)
        twin.step()
        kinds.append(type(pickle.loads(pickle.dumps(twin.history))) is list)
        raise KeyError("in the step")

    with pytest.raises(KeyError, match="in the step"):
        gt.compile(step)(torch.ones(8, 8))
    assert kinds == [True, True]
    assert methods() == before


def test_a_scheduler_that_the_function_makes_for_its_optimizer_sees_numbers() -> None:
    training = Training("remote", STEPPED["cosine"])
    seen = []

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = training.step(x)
        lr_scheduler.StepLR(training.optimizer, 1)
        seen.append(training.optimizer.param_groups[0]["lr"])
        return loss

    called = gt.compile(step)
    for _ in range(8):
        called(torch.ones(8, 8))
    assert all(type(rate) is float for rate in seen) and len(seen) == 8, called.explain()


def test_a_scheduler_that_the_function_makes_is_its_own() -> None:
    training = Training("remote", STEPPED["cosine"])
    seen = []

    def step(x: torch.Tensor) -> torch.Tensor:
        mine = lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 1)
        mine.optimizer.step()
        mine.step()
        seen.append(mine.get_last_lr())
        return training.step(x)

    called = gt.compile(step)
    for _ in range(8):
        called(torch.ones(8, 8))
    assert seen == [[0.1]] * 8, called.explain()


def test_several_optimizers_with_schedulers_of_their_own() -> None:
    outcomes = []
    for device in ("cpu", "remote"):
        one, other = Training(device, STEPPED["cosine"]), Training(device, STEPPED["warm-up"])

        def step(x: torch.Tensor, one: Training = one, other: Training = other) -> torch.Tensor:
            return one.step(x) + other.step(x * 2)

        called = step if device == "cpu" else gt.compile(step)
        losses = [one.call(called) for _ in range(CALLS)]
        outcomes.append({"losses": losses, "one": one.state(), "other": other.state()})
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=0, atol=0)
    assert called._programs[0].replays >= CALLS - 4, called.explain()  # type: ignore[attr-defined]


def test_a_scheduler_that_some_calls_step_is_no_guard_of_the_others() -> None:
    training = Training("remote", STEPPED["cosine"])
    plain = Training("cpu", STEPPED["cosine"])

    def step(of: Training, x: torch.Tensor, epoch_ends: bool) -> torch.Tensor:
        of.optimizer.zero_grad()
        loss = F.mse_loss(of.model(x), x[:, :4])
        loss.backward()
        of.optimizer.step()
        if type(of.scheduler) is lr_scheduler.CosineAnnealingLR and epoch_ends:
            of.scheduler.step()
        return loss

    called = gt.compile(lambda x, epoch_ends: step(training, x, epoch_ends))
    for n in range(24):
        x = torch.randn(8, 8, generator=training.generator)
        losses = called(x, n % 4 == 3).item(), step(plain, x, n % 4 == 3).item()
        assert losses[0] == losses[1], n
    assert training.state()["scheduler"] == plain.state()["scheduler"]
    assert ": 2 programs" in called.explain() and sum(p.replays for p in called._programs) >= 15, called.explain()


def test_a_captured_function_within_another_steps_the_scheduler() -> None:
    training, plain = Training("remote", STEPPED["warm-up"]), Training("cpu", STEPPED["warm-up"])
    inner = gt.compile(lambda: training.scheduler.step())

    def step(x: torch.Tensor) -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = F.mse_loss(training.model(x), x[:, :4])
        loss.backward()
        training.optimizer.step()
        inner()
        return loss

    called = gt.compile(step)
    assert [training.call(called) for _ in range(CALLS)] == [plain.call(plain.step) for _ in range(CALLS)]
    assert training.state()["scheduler"] == plain.state()["scheduler"] and called._programs, called.explain()


def test_a_bound_method_of_a_scheduler_from_before_has_python_run() -> None:
    training, plain = Training("remote", STEPPED["warm-up"]), Training("cpu", STEPPED["warm-up"])
    bound = training.scheduler.step

    def step(x: torch.Tensor) -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = F.mse_loss(training.model(x), x[:, :4])
        loss.backward()
        training.optimizer.step()
        bound()
        return loss

    called = gt.compile(step)
    assert [training.call(called) for _ in range(CALLS)] == [plain.call(plain.step) for _ in range(CALLS)]
    assert training.state()["scheduler"] == plain.state()["scheduler"] and "in parts" in called.explain(), called.explain()
