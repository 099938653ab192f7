"""A compiled model whose backward pass the program calls: the same bits as without gt.compile, and replays of both passes."""

from __future__ import annotations

import copy
import io
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import gt

pytestmark = pytest.mark.usefixtures("one", "plain_threads")
R = "remote"
Wrap = Callable[[Any], Any]


def mlp(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(16), nn.Linear(16, 4))


def rows(count: int = 6, width: int = 8) -> torch.Tensor:
    return torch.randn(count, width).to(R)


def train(wrap: Wrap, module: nn.Module, step: Callable, calls: int = 10, lr: float = 1e-2) -> list[torch.Tensor]:
    """Losses, weights and gradients after `calls` steps: step(number, module, wrapped module, optimizer) -> loss."""
    module = module.to(R)
    wrapped, optimizer = wrap(module), torch.optim.AdamW(module.parameters(), lr=lr, fused=True)
    losses = [step(n, module, wrapped, optimizer) for n in range(calls)]
    return [*losses, *module.state_dict().values(), *[p.grad for p in module.parameters() if p.grad is not None]]


def update(optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def plain(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
    return update(optimizer, model(rows()).square().mean())


def dropout(wrap: Wrap) -> list:
    return train(wrap, mlp(0.3), plain)


def one_batch_twice(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        a, b = model(rows()), model(rows())
        return update(optimizer, (a * b).mean() + b.sum() * 0.1)

    return train(wrap, mlp(0.3), step)


def four_calls_before_a_backward_pass(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        losses = [model(rows()).square().mean() * (k + 1) for k in range(4)]
        optimizer.zero_grad()
        for loss in losses:
            loss.backward()
        optimizer.step()
        return sum(losses)  # type: ignore[return-value]

    return train(wrap, mlp(0.3), step)


def accumulation(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        loss = model(rows()).square().mean()
        loss.backward()
        if n % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=n % 2 == 0)
        return loss

    return train(wrap, mlp(0.1), step, 15)


def adversarial(wrap: Wrap) -> list:
    maker = mlp().to(R)
    judge = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).to(R)
    make, rate = wrap(maker), wrap(judge)
    first, second = (torch.optim.Adam(module.parameters(), lr=1e-2) for module in (maker, judge))
    losses = []
    for _ in range(12):
        fake = make(rows())
        losses.append(update(second, F.softplus(-rate(rows(6, 4))).mean() + F.softplus(rate(fake.detach())).mean()))
        losses.append(update(first, F.softplus(-rate(fake)).mean()))
    return [*losses, *maker.state_dict().values(), *judge.state_dict().values()]


def no_backward_pass_at_first(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        return plain(n, module, model, optimizer) if n >= 8 else model(rows()).sum()

    return train(wrap, mlp(0.2), step, 18)


def batch_norm_and_evaluation(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        loss = plain(n, module, model, optimizer)
        if n % 3 == 2:
            model.eval()
            with torch.no_grad():
                loss = loss + model(rows()).sum()
            model.train()
        return loss

    return train(wrap, nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 4)), step, 14)


def a_graph_used_twice(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        result = model(rows())
        optimizer.zero_grad()
        (result.sum() * 0.1).backward(retain_graph=True)
        loss = result.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return train(wrap, mlp(0.2), step)


def gradients_by_autograd_grad(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        loss = model(rows()).square().mean()
        if n % 2:
            return update(optimizer, loss)
        for parameter, gradient in zip(module.parameters(), torch.autograd.grad(loss, list(module.parameters())), strict=True):
            parameter.grad = gradient
        optimizer.step()
        return loss

    return train(wrap, mlp(), step, 14)


def gradient_of_the_input(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        x = rows().requires_grad_()
        loss = update(optimizer, model(x).square().mean())
        return loss + x.grad.abs().sum()  # type: ignore[union-attr]

    return train(wrap, mlp(0.1), step)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        hidden = self.first(x).tanh()
        return {"left": self.left(hidden) * scale, "right": self.right(hidden), "n": (hidden > 0).sum(), "hidden": hidden}


def results_that_losses_use_in_turns(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        got = model(x=rows(), scale=2.0)
        loss = got["left"].square().mean() + (got["right"].sum() if n >= 6 else 0) + (got["hidden"].mean() if n % 2 else 0)
        return update(optimizer, loss) + got["n"]

    return train(wrap, Branches(), step, 30)


def a_result_changed_in_place(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        result = model(rows())
        loss = (result * 2).sum()
        result.detach().add_(1)
        return loss if n % 2 else update(optimizer, loss * 1)

    # The change is after the use of the result, and torch itself refuses a graph that needs it: a linear layer does not
    return train(wrap, nn.Linear(8, 4), step)


def layers_frozen_for_a_while(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        module[0].requires_grad_(n >= 6)
        return plain(n, module, model, optimizer)

    return train(wrap, mlp(0.1), step, 14)


class Checkpointed(nn.Module):
    def __init__(self, last: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([*[nn.Linear(8, 8) for _ in range(2)], last or nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(
                lambda v, layer=layer: F.dropout(layer(v).tanh(), 0.2), x, use_reentrant=False
            )
        return x


def checkpointing(wrap: Wrap) -> list:
    return train(wrap, Checkpointed(), plain)


class Attention(nn.Module):
    """Its backward pass repeats the draws of its forward pass, or makes them anew."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.heads, self.own = nn.Linear(8, 24), own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.heads(x).view(2, 3, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.3, is_causal=True)
        result = F.dropout(mixed.transpose(1, 2).reshape(x.shape), 0.2)
        return Noisy.apply(result) if self.own else result


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * torch.rand_like(gradient)


def an_expanded_tensor_that_is_saved(wrap: Wrap) -> list:
    layer = nn.Linear(8, 4).to(R)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return layer(x) * layer(x).mean(-1, keepdim=True).tanh().expand(6, 4)

    function, optimizer, losses = wrap(norm), torch.optim.SGD(layer.parameters(), lr=0.1), []
    for n in range(12):
        parts = [function(rows()).square().mean() for _ in range(1 + n % 2)]
        for part in parts[1:]:
            part.backward()
        losses.append(update(optimizer, parts[0]))
    return [*losses, *layer.parameters()]


def attention_dropout(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        losses = [model(rows()) for _ in range(1 + n % 3)]
        noise = torch.rand(6, 8, device=R)  # drawn between the passes
        return update(optimizer, sum((loss * noise).square().mean() for loss in losses))  # type: ignore[arg-type]

    return train(wrap, nn.Sequential(Attention(), Attention()), step, 14)


def attention_dropout_and_a_backward_pass_that_draws(wrap: Wrap) -> list:
    return train(wrap, nn.Sequential(Attention(own=True), nn.Linear(8, 4)), plain)


def dropout_in_a_checkpoint(wrap: Wrap) -> list:
    return train(wrap, Checkpointed(Attention()), plain)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor, y = factor, x.tanh()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return gradient * y * ctx.factor + x * 0, None


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(8, 4), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(self.layer(x), self.factor)


def a_function_of_the_user_and_a_changed_attribute(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        if n == 7:
            model.factor = 3.0
        return plain(n, module, model, optimizer)

    return train(wrap, WithFunction(), step, 14)


def halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)  # type: ignore[union-attr]


def hooks_of_parameters(wrap: Wrap) -> list:
    module = mlp()
    module[0].weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[index]
    module.to(R)[4].bias.register_post_accumulate_grad_hook(halve)  # type: ignore[index]
    return train(wrap, module, plain)


def autocast(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        with torch.autocast(R, dtype=torch.bfloat16):
            loss = model(rows()).float().square().mean()
        return update(optimizer, loss)

    return train(wrap, mlp(0.1), step)


def a_function_and_its_closure(wrap: Wrap) -> list:
    weight = torch.randn(8, 4).to(R).requires_grad_()
    function = wrap(lambda x, factor: (x @ weight).relu() * factor)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    return [*[update(optimizer, function(rows(), 2).square().mean()) for _ in range(10)], weight]


def backpropagation_through_time(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        state, loss = torch.zeros(6, 8).to(R), torch.zeros(()).to(R)
        for _ in range(3):
            state = model(rows(), state)
            loss = loss + state.square().mean()
        return update(optimizer, loss)

    return train(wrap, nn.GRUCell(8, 8), step)


def gradients_and_losses_that_are_kept(wrap: Wrap) -> list:
    kept: list = []

    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        kept.append(plain(n, module, model, optimizer))
        kept.extend(p.grad for p in module.parameters())
        return kept[-1]

    return train(wrap, mlp(0.1), step) + kept


def gradients_set_to_zero(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = model(rows()).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return train(wrap, mlp(0.1), step)


def batches_of_several_sizes(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        return update(optimizer, model(rows(4 + n % 2)).square().mean())

    return train(wrap, mlp(0.1), step, 16)


def two_views_of_one_result(wrap: Wrap) -> list:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(x).chunk(2, -1)

    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        a, b = model(rows())
        return update(optimizer, (a * b.exp()).sum() + b.mean())

    return train(wrap, Split(), step)


def a_parameter_among_results(wrap: Wrap) -> list:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(x), self.layer.weight

    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        result, weight = model(rows())
        return update(optimizer, result.square().mean() + weight.abs().sum() * 0.01)

    return train(wrap, Returns(), step)


def frozen_from_some_call_on(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        module.requires_grad_(n < 6)
        return plain(n, module, model, optimizer) if n < 6 else model(rows()).sum()

    return train(wrap, mlp(), step, 14)


def a_residual_around_a_layer_that_changes_its_argument(wrap: Wrap) -> list:
    first, layer = nn.Linear(8, 8).to(R), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)).to(R)
    captured = wrap(layer)
    optimizer = torch.optim.SGD([*first.parameters(), *layer.parameters()], lr=0.1)
    losses = []
    for _ in range(8):
        hidden = first(rows())
        losses.append(update(optimizer, (captured(hidden) + hidden).square().mean()))
    return [*losses, *first.parameters(), *layer.parameters()]


def a_parameter_clamped_in_the_forward_pass(wrap: Wrap) -> list:
    class Clamps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(8, 4), nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.scale.clamp_(0, 1)
            return self.layer(x) * self.scale.exp()

    return train(wrap, Clamps(), plain)


def forces(wrap: Wrap) -> list:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]

    return train(wrap, Forces(), plain)


class LayerDrop(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.layers, self.last, self.share = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4), share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) >= self.share:
                x = x + layer(x).tanh()
        return self.last(x)


@pytest.mark.parametrize("share", [0.03, 0.15, 0.5])
def test_each_call_has_a_backward_pass_whatever_the_forward_pass_draws_on_the_cpu(share: float) -> None:
    def case(wrap: Wrap) -> list:
        module = LayerDrop(share).to(R)
        model, optimizer = wrap(module), torch.optim.SGD(module.parameters(), lr=0.1)
        torch.manual_seed(5)
        return [update(optimizer, model(rows()).square().mean()) for _ in range(20)]

    compare(case)


class Penalised(nn.Module):
    """Its second result, a penalty, is an attribute, or in an object."""

    def __init__(self, kind: Any = None) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(8, 8), nn.Linear(8, 4), kind

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x).tanh()
        self.penalty = hidden.square().mean()
        if self.kind is None:
            return self.last(hidden)
        return self.last(hidden), self.kind(self.__dict__.pop("penalty"))


class Held:
    def __init__(self, penalty: torch.Tensor) -> None:
        self.penalty = penalty


def a_penalty_in_an_object(wrap: Wrap, kind: type = Held) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        result, held = model(rows())
        return update(optimizer, result.square().mean() + held.penalty)

    return train(wrap, Penalised(kind), step)


CASES: list[Callable[[Wrap], list]] = [
    dropout, one_batch_twice, four_calls_before_a_backward_pass, accumulation, adversarial, no_backward_pass_at_first,
    batch_norm_and_evaluation, a_graph_used_twice, gradients_by_autograd_grad, gradient_of_the_input,
    results_that_losses_use_in_turns, a_result_changed_in_place, attention_dropout, dropout_in_a_checkpoint,
    an_expanded_tensor_that_is_saved,
    layers_frozen_for_a_while, checkpointing,
    a_function_of_the_user_and_a_changed_attribute, autocast, a_function_and_its_closure,
    backpropagation_through_time, gradients_and_losses_that_are_kept, gradients_set_to_zero, batches_of_several_sizes,
    a_parameter_among_results, frozen_from_some_call_on, a_parameter_clamped_in_the_forward_pass,
    forces, a_penalty_in_an_object,
]  # fmt: skip


def compare(case: Callable[[Wrap], list], **settings: Any) -> list[Any]:
    """Run a case with and without gt.compile; the bits are the same. Returns what has been compiled."""

    def run(wrap: Wrap) -> list[torch.Tensor]:
        torch.manual_seed(0)
        gt.manual_seed(0)
        return [value.detach().cpu() for value in case(wrap)]

    compiled: list = []

    def captured(thing: Any) -> Any:
        compiled.append(gt.compile(thing, **settings))
        return compiled[-1]

    for n, (got, want) in enumerate(zip(run(captured), run(lambda thing: thing), strict=True)):
        # Gradients of the calls of one graph are added in another order
        same = torch.allclose if case is backpropagation_through_time else torch.equal
        assert same(got, want), (n, got, want, [str(one.explain()) for one in compiled])
    return compiled


def replays(compiled: Any, half: str) -> int:
    """Replays of the programs of a forward or backward pass."""
    count, inside = 0, False
    for line in str(compiled.explain()).splitlines():
        inside = line.startswith(f"  {half} pass") if " pass of " in line else inside
        count += int(found[1]) if inside and (found := re.search(r"(\d+) replays", line)) else 0
    return count


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_program_with_its_own_backward_pass_has_the_bits_of_eager_mode(case: Callable) -> None:
    for compiled in compare(case):
        assert replays(compiled, "forward") >= 2 and replays(compiled, "backward") >= 2, compiled.explain()


def graph_from_before(wrap: Wrap) -> list:
    layer, maker, held = nn.Linear(8, 8).to(R), nn.Linear(8, 8).to(R), {}
    function = wrap(lambda x: layer(x) * held["scale"])
    optimizer = torch.optim.SGD([*layer.parameters(), *maker.parameters()], lr=0.1)
    losses = []
    for _ in range(6):
        held["scale"] = maker(torch.ones(8).to(R))
        losses.append(update(optimizer, function(rows()).square().mean()))
    return [*losses, *layer.parameters(), *maker.parameters()]


def a_penalty_on_the_module(wrap: Wrap) -> list:
    def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
        return update(optimizer, model(rows()).square().mean() + model.penalty)

    return train(wrap, Penalised(), step)


class Known(Held):
    all: ClassVar[weakref.WeakSet[Known]] = weakref.WeakSet()

    def __init__(self, penalty: torch.Tensor) -> None:
        super().__init__(penalty)
        Known.all.add(self)


def a_penalty_in_an_object_that_is_kept(wrap: Wrap) -> list:
    return a_penalty_in_an_object(wrap, Known)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (graph_from_before, "has a graph of its own"),
        (a_penalty_on_the_module, "penalty holds a tensor with a graph"),
        (a_penalty_in_an_object_that_is_kept, "returns an object of Known"),
        (attention_dropout_and_a_backward_pass_that_draws, "draws random numbers of its own"),
        (hooks_of_parameters, "a parameter has a hook"),
        (two_views_of_one_result, "a result shares memory"),
        (a_residual_around_a_layer_that_changes_its_argument, "changes an argument that requires grad in place"),
    ],
)
def test_where_the_graph_cannot_be_cut_torchs_graph_stays_and_the_reason_is_told(case: Callable, why: str) -> None:
    (compiled,) = compare(case)
    assert why in str(compiled.explain()) and "in parts" in str(compiled.explain())


def test_second_derivatives_are_those_of_eager_mode() -> None:
    def case(wrap: Wrap) -> list:
        def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
            x = rows().requires_grad_()
            loss = model(x).square().mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            return update(optimizer, loss + slope.square().sum())

        return train(wrap, mlp(), step, 6)

    torch.manual_seed(0)
    compiled: list = []
    got = case(lambda thing: compiled.append(gt.compile(thing)) or compiled[-1])
    torch.manual_seed(0)
    for a, b in zip(got, case(lambda thing: thing), strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach().cpu())
    assert "create_graph=True" in str(compiled[0].explain())


def trained(module: nn.Module, calls: int = 5) -> tuple[Any, Any]:
    model = gt.compile(module.to(R))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(calls):
        update(optimizer, model(rows()).square().mean())
    return model, optimizer


def test_a_slice_of_a_compiled_module_is_the_slice() -> None:
    model, _ = trained(mlp())
    x = rows()
    assert torch.equal(model[:2](x).cpu(), F.gelu(model[0](x)).cpu())
    assert type(model)(nn.Linear(8, 3).to(R))(x).shape == (6, 3)


def changed_module(change: Callable[[Any], None]) -> None:
    """A loss, a change of state, and gradients that no program has."""
    model, _ = trained(nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5)), 8)
    loss = model(rows()).sum()
    change(model)
    torch.autograd.grad(loss, model.parameters())


@pytest.mark.parametrize(
    "change",
    [lambda model: model.eval(), lambda model: setattr(model[0].bias, "data", torch.ones(4).to(R))],
    ids=["a flag", "memory of a parameter"],
)
def test_a_forward_pass_is_not_computed_again_with_other_state(change: Callable) -> None:
    with pytest.raises(RuntimeError, match="cannot be computed again"):
        changed_module(change)


def test_state_that_the_forward_pass_does_not_use_may_change_before_the_backward_pass() -> None:
    class Scale(torch.autograd.Function):
        factor = 1.0

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient * Scale.factor

    def case(wrap: Wrap) -> list:
        def step(n: int, module: Any, model: Any, optimizer: Any) -> torch.Tensor:
            loss = Scale.apply(model(rows())).square().mean()
            module.train(n % 3 != 2)
            Scale.factor = 1.0 + n // 5
            update(optimizer, loss)
            module.train()
            return loss

        return train(wrap, nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), step, 14)

    compare(case)


def test_a_transform_of_torch_func_calls_the_function_itself() -> None:
    model, _ = trained(mlp())
    weights = dict(model.named_parameters())
    x = rows()

    def loss(weights: dict[str, torch.Tensor], module: Any) -> torch.Tensor:
        return torch.func.functional_call(module, weights, (x,)).square().mean()

    got, want = torch.func.grad(loss)(weights, model), torch.func.grad(loss)(weights, model.__reduce_ex__(2)[1][0])
    for name, gradient in want.items():
        assert torch.equal(got[name].cpu(), gradient.cpu())


def test_a_forward_pass_is_computed_again_in_its_own_autocast() -> None:
    def last(wrap: Wrap) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = mlp().to(R)
        model, found = wrap(module), []
        for n in range(9):
            with torch.autocast(R, dtype=torch.bfloat16):
                loss = model(rows()).float().square().mean()
            if n < 8:
                loss.backward()
            else:
                found = [g.cpu() for g in torch.autograd.grad(loss, list(module.parameters()))]
        return found

    for got, want in zip(last(gt.compile), last(lambda module: module), strict=True):
        assert torch.equal(got, want)


def test_a_change_of_what_autograd_has_saved_is_refused_in_the_function_too() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.layer(x).exp()
            hidden.mul_(2)
            return hidden + 1

    model = gt.compile(Late().to(R))
    for _ in range(5):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(rows()).sum().backward()


def test_an_interrupt_after_a_recording_leaves_a_model_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from gt.client.capture.program.two_programs import TwoPrograms

    model, optimizer = trained(mlp(), 1)
    with monkeypatch.context() as patch:
        patch.setattr(TwoPrograms, "_bound", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                model(rows())
    for _ in range(6):
        update(optimizer, model(rows()).square().mean())
    assert replays(model, "forward") >= 2 and replays(model, "backward") >= 2, model.explain()


def interrupted(*given: Any) -> None:
    raise KeyboardInterrupt


def test_what_torch_refuses_is_refused() -> None:
    model, optimizer = trained(mlp())
    loss = model(rows()).square().mean()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"a second time.*retain_graph=True"):
        loss.backward()
    loss = model(rows()).square().mean()
    optimizer.step()
    with pytest.raises(RuntimeError, match="has been changed in place between a call"):
        loss.backward()
    update(optimizer, model(rows()).square().mean())  # and it goes on


def test_a_pass_that_no_program_has_and_that_cannot_be_computed_again_is_an_error_once() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.layer(x)
            return hidden, self.norm(hidden)

    model = gt.compile(Both().to(R))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        update(optimizer, model(rows())[1].square().mean())
    with pytest.raises(RuntimeError, match=r"cannot be computed again, since it changes state.*next calls keep their graph"):
        model(rows())[0].sum().backward()
    for _ in range(3):
        update(optimizer, model(rows())[0].sum())


def test_a_compiled_module_is_a_module_of_its_class_with_one_state() -> None:
    module = mlp().to(R)
    model = gt.compile(module)
    assert isinstance(model, nn.Sequential) and type(model).__name__ == "Sequential" and len(model) == 5
    model.eval()
    assert not module.training and not module[0].training  # type: ignore[index]
    model.register_buffer("count", torch.zeros(1))
    assert list(module.state_dict()) == list(model.state_dict()) and "count" in module.state_dict()
    assert model[0] is module[0] and repr(model) == repr(module)  # type: ignore[index]


def test_a_copy_of_a_compiled_module_is_compiled_and_has_state_of_its_own() -> None:
    model, _ = trained(mlp())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    x = rows()
    assert not torch.equal(model(x).cpu(), other(x).cpu()) and other(x).abs().sum().item() == 0
    assert other.explain() and other.explain() != model.explain()


def test_a_compiled_module_is_saved_as_the_module() -> None:
    module = nn.Linear(3, 2)
    model = gt.compile(module)
    assert type(pickle.loads(pickle.dumps(model))) is nn.Linear
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False).weight, module.weight)


def test_a_steady_loop_copies_nothing_that_autograd_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    from gt.client.capture.gradients import NamedMemory

    model, optimizer = trained(mlp(0.1))
    copied = []
    leave = NamedMemory.leave
    monkeypatch.setattr(NamedMemory, "leave", lambda memory: copied.append(memory) or leave(memory))
    for _ in range(3):
        update(optimizer, model(rows()).square().mean())
    assert not copied


def test_a_parameter_that_is_replaced_between_the_passes_gets_no_gradient_of_another_one() -> None:
    layer = nn.Linear(8, 8).to(R)
    function = gt.compile(layer)
    for _ in range(5):
        function(rows()).mean().backward()
    loss = function(rows()).mean()
    layer.weight = nn.Parameter(layer.weight.detach())
    with pytest.raises(RuntimeError, match=r"no program has this backward pass of Linear.*weight is another"):
        loss.backward()
    assert layer.weight.grad is None
