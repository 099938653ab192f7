"""A captured model of which the backward pass computes cheap values again: the same bits, and less that is kept."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gt
from gt.client.capture.program import recomputation
from gt.client.capture.program.recomputation import Chooser
from gt.client.current_session import Current
from tests.client.capture.program.test_two_programs import CASES, compare, replays

R = "remote"
pytestmark = pytest.mark.usefixtures("one")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_recomputation_changes_no_bit(case: Callable) -> None:
    for compiled in compare(case, recompute=True):
        assert replays(compiled, "forward") >= 2 and replays(compiled, "backward") >= 2, compiled.explain()


def left_out(compiled: Any) -> tuple[int, int, float]:
    """Values that are computed again, of how many, and MiB of them."""
    found = re.search(r"(\d+) of (\d+) values that autograd saves are computed again: ([\d.]+) MiB", str(compiled.explain()))
    return (int(found[1]), int(found[2]), float(found[3])) if found else (0, 0, 0.0)


class Gated(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, activation: Callable = F.silu) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(64, 64, dtype=dtype) for _ in range(3))
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))


def wide(x: torch.Tensor) -> torch.Tensor:
    """A norm in float32 of half the bits, as Llama's."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def views(x: torch.Tensor) -> torch.Tensor:
    """A rotation of halves, through views and a concatenation."""
    heads = x.view(*x.shape[:-1], 4, 16).transpose(-3, -2)
    first, second = heads.chunk(2, -1)
    turned = (heads * heads.cos() + torch.cat((-second, first), -1) * heads.sin()).transpose(-3, -2)
    return turned.reshape(x.shape).sigmoid()


def changed(x: torch.Tensor) -> torch.Tensor:
    """A value that is written after it was made is none that an op makes again."""
    y = x + 1.0
    y.mul_(0.5)
    return y.sigmoid() * x


def drawn(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x.tanh(), 0.4).sigmoid()


# activation, dtype, least number of values that are computed again
KINDS = [
    (F.silu, torch.float32, 2), (tanh_gelu, torch.float32, 5), (wide, torch.bfloat16, 2), (views, torch.float32, 3),
    (changed, torch.float32, 1), (drawn, torch.float32, 1), (F.gelu, torch.bfloat16, 2), (F.relu, torch.float32, 1),
]  # fmt: skip


@pytest.mark.parametrize(("activation", "dtype", "least"), KINDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_kind_of_chain(activation: Callable, dtype: torch.dtype, least: int) -> None:
    def case(wrap: Callable) -> list:
        torch.manual_seed(3)
        model = Gated(dtype, activation).to(R)
        call, optimizer, losses = wrap(model), torch.optim.SGD(model.parameters(), lr=0.1), []
        for n in range(6):
            generator = torch.Generator().manual_seed(n)
            x = torch.randn(4, 8, 64, generator=generator).to(dtype).to(R)
            loss = call(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        return [*losses, *model.parameters()]

    (compiled,) = compare(case, recompute=True)
    count, of, _ = left_out(compiled)
    assert least <= count < of, compiled.explain()


def test_what_is_kept_is_less_and_the_default_of_eager_programs_keeps_all() -> None:
    kept = {}
    for recompute in (None, True):
        model = gt.compile(nn.Sequential(*[Gated() for _ in range(4)]).to(R), recompute=recompute)
        for _ in range(5):
            model(torch.randn(4096, 64).to(R)).sum().backward()
        model[0].gate.bias.sum().item()
        kept[recompute] = gt.stats()["workers"][0]["live_bytes"]
        assert bool(left_out(model)[0]) is bool(recompute)
        del model
    assert kept[True] < 0.7 * kept[None], kept


def test_a_tensor_that_is_kept_and_changed_since_is_an_error_as_without() -> None:
    """The op that makes a value again reads the weight, which autograd has saved: it may not have changed."""
    scale = nn.Parameter(torch.rand(64).to(R))
    function = gt.compile(lambda x: (x * scale).sigmoid().square().sum(), recompute=True)
    for n in range(5):
        x = torch.randn(8, 64).to(R).requires_grad_()
        loss = function(x)
        if n == 4:
            with torch.no_grad():
                scale.mul_(2)
            with pytest.raises(RuntimeError, match="changed in place"):
                loss.backward()
        else:
            loss.backward()


def test_the_line_and_the_group_of_a_value_are_those_of_its_first_computation() -> None:
    model = gt.compile(Gated().to(R), recompute=True)
    for _ in range(4):
        loss = model(torch.randn(8, 64).to(R)).sum()
        loss.backward()
    back = {text for n in range(1, 400) if "in the backward pass" in (text := Current.origins.text(n))}
    line = Gated.forward.__code__.co_firstlineno + 1
    seen = [text for text in back if f"{__file__}:{line} " in text]
    assert seen and left_out(model)[0], back


def test_values_are_chosen_in_the_order_in_which_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that is longer than the bound keeps a value in its middle."""
    monkeypatch.setattr(recomputation, "MAX_CHAIN_OPS", 3)
    plans: list = []
    choose = Chooser.choose
    monkeypatch.setattr(Chooser, "choose", lambda chooser: plans.append(choose(chooser)) or plans[-1])

    def chain(x: torch.Tensor) -> torch.Tensor:
        y = x @ x.t()
        for _ in range(8):
            y = y.sin()
        return y.sum()

    def case(wrap: Callable) -> list:
        x = torch.randn(8, 8).to(R).requires_grad_()
        function, results = wrap(chain), []
        for _ in range(5):
            function(x).backward()
            results.append(x.grad.clone())
        return results

    compare(case, recompute=True)
    assert len(plans) >= 2 and all(len(plan.numbers) - len(plan.kept) == 6 for plan in plans), [p.text() for p in plans]


class InPlace(torch.autograd.Function):
    """Its backward pass writes to what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return ctx.saved_tensors[0].mul_(gradient)


class Reused(nn.Module):
    """The values that are saved beside `y` could be made of it, which the backward pass changes first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        t = torch.sigmoid(torch.tanh(y))
        return self.second(t) * t.exp() + InPlace.apply(y)


def test_what_a_function_of_the_user_may_change_in_its_backward_pass_makes_nothing_again() -> None:
    def case(wrap: Callable) -> list:
        torch.manual_seed(4)
        model = Reused().to(R)
        call, results = wrap(model), []
        for _ in range(6):
            call(torch.randn(8, 64).to(R)).square().mean().backward()
            results += [p.grad.clone() for p in model.parameters()]
        return results

    (compiled,) = compare(case, recompute=True)
    assert replays(compiled, "backward") >= 2 and left_out(compiled)[0], compiled.explain()


class Head(nn.Module):
    """Logits of half the bits, of which the loss makes a log_softmax in float32: both are results."""

    def __init__(self, classes: int = 512) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(32, 32, dtype=torch.bfloat16), nn.Linear(32, classes, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.body(x).tanh())
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), logits


def trained(wrap: Callable, change: Callable[[torch.Tensor], Any] = lambda logits: None, classes: int = 512) -> list:
    torch.manual_seed(7)
    model = Head(classes).to(R)
    call, optimizer, results = wrap(model), torch.optim.SGD(model.parameters(), lr=0.1), []
    for n in range(8):
        generator = torch.Generator().manual_seed(n)
        x = torch.randn(2, 16, 32, generator=generator).bfloat16().to(R)
        loss, logits = call(x, torch.randint(0, classes, (2, 16), generator=generator).to(R))
        results += [loss.detach(), logits.detach().clone()]
        change(logits)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *model.parameters()]


def test_logits_that_are_results_are_kept_for_the_log_softmax_of_the_loss() -> None:
    (compiled,) = compare(trained, recompute=True)
    count, _, mib = left_out(compiled)
    assert count and mib >= 2 * 16 * 512 * 4 / 2**20, compiled.explain()
    assert replays(compiled, "forward") >= 2 and replays(compiled, "backward") >= 2, compiled.explain()


def test_a_caller_may_change_a_result_that_is_kept() -> None:
    def change(logits: torch.Tensor) -> None:
        with torch.no_grad():
            logits.mul_(2)

    compare(lambda wrap: trained(wrap, change), recompute=True)


CHANGES = {
    "in place": lambda logits: logits.detach().mul_(2),
    "beside the version": lambda logits: logits.data[:, :3].mul_(0.5),
    "by a list": lambda logits: torch._foreach_mul_([logits.detach()], 2),
    "not": lambda logits: logits.detach() * 2,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_caller_may_change_logits_that_it_got_without_a_copy(change: str) -> None:
    (compiled,) = compare(lambda wrap: trained(wrap, CHANGES[change], 16384), recompute=True)
    lent = "computed again" in str(compiled.explain())
    assert lent and replays(compiled, "forward") >= 2 and replays(compiled, "backward") >= 2, compiled.explain()


def two_at_once(wrap: Callable) -> list:
    """Each call of a pair keeps its results until after both backward passes."""
    torch.manual_seed(7)
    model = Head(16384).to(R)
    call, results = wrap(model), []
    for n in range(6):
        generator = torch.Generator().manual_seed(n)
        pairs = [torch.randn(2, 16, 32, generator=generator).bfloat16().to(R) for _ in range(2)]
        labels = torch.randint(0, 16384, (2, 16), generator=generator).to(R)
        made = [call(x, labels) for x in pairs]
        views = [logits[:, 1:] for _, logits in made]
        for loss, _ in made if n % 2 else reversed(made):
            loss.backward()
        results += [logits.detach().clone() for _, logits in made] + [view.clone() for view in views]
        results += [p.grad.clone() for p in model.parameters()]
    return results


def test_results_of_calls_in_flight_keep_their_values() -> None:
    compare(two_at_once, recompute=True)
