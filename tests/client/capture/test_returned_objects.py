"""Arguments that require grad, and results that are objects of the caller or of state: captured calls do as eager ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import gt

CALLS = 6


@dataclass
class Output:
    loss: torch.Tensor


class Holder:
    def __init__(self) -> None:
        self.out: dict = {}


def layer(device: str) -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[0.5, -0.25], [1.0, 0.75]]))
        module.bias.fill_(0.125)
    return module.to(device)


def batch(device: str, n: int) -> torch.Tensor:
    return torch.arange(4.0).reshape(2, 2).sub(n).div(8).to(device)


def adversarial(device: str, wrap: Callable) -> Any:
    """FGSM: the gradient of a new leaf, read in the step and by the caller later."""
    model = layer(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        model(x).tanh().square().sum().backward()
        return x.grad

    compiled = wrap(step)
    xs = [batch(device, n).clone().requires_grad_() for n in range(CALLS)]
    return [compiled(x) for x in xs], [x.grad for x in xs], model.weight.grad


def collocation(device: str, wrap: Callable) -> Any:
    """PINN: second derivatives by points in a dictionary."""
    model = layer(device)

    def step(points: dict) -> torch.Tensor:
        x = points["x"]
        (first,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        loss = (second - 1).square().mean()
        loss.backward()
        return loss

    compiled = wrap(step)
    points = [{"x": batch(device, n).requires_grad_(), "ids": [n]} for n in range(CALLS)]
    return [compiled(p) for p in points], [p["x"].grad for p in points], model.weight.grad


def gradient_penalty(device: str, wrap: Callable) -> Any:
    """WGAN-GP: the caller's backward pass uses the graph of a gradient."""
    model = layer(device)

    def penalty(x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    compiled, seen = wrap(penalty), []
    for n in range(CALLS):
        loss = compiled(batch(device, n).requires_grad_())
        loss.backward()
        seen.append((loss, model.weight.grad.clone()))
    return seen


def graph_of_the_caller(device: str, wrap: Callable) -> Any:
    """Arguments that are no leaves: the caller's backward pass reaches the weight that made them."""
    weight, model, seen = torch.ones(2, device=device, requires_grad=True), layer(device), []
    compiled = wrap(lambda x, scale: model(x).tanh().sum() * scale)
    for n in range(CALLS):
        compiled(batch(device, n) * weight, torch.tensor(2.0).to(device)).backward()
        seen.append(weight.grad.clone())
    return seen, model.weight.grad


def new_parameter(device: str, wrap: Callable) -> Any:
    """A parameter that is another one at each call, as of an ensemble whose members take turns."""
    weight, seen = batch(device, 0), []

    def step(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        loss = (x * weight * scale).square().sum()
        loss.backward()
        return loss.detach()

    compiled = wrap(step)
    for n in range(CALLS):
        scale = torch.nn.Parameter(batch(device, n))
        seen += [compiled(scale, batch(device, n)), scale.grad]
    return seen


def one_leaf_again(device: str, wrap: Callable) -> Any:
    x, model, seen = batch(device, 0).requires_grad_(), layer(device), []
    compiled = wrap(lambda x: model(x).tanh().sum())
    for _ in range(CALLS):
        compiled(x).backward()
        seen.append(x.grad.clone())
    return seen


def returned_state(device: str, wrap: Callable) -> Any:
    holder, seen = Holder(), []

    def step(x: torch.Tensor) -> tuple:
        holder.out["loss"] = x * 2
        return holder.out, x + 1

    compiled = wrap(step)
    for n in range(CALLS):
        out, other = compiled(batch(device, n))
        seen.append((out["loss"], other, torch.tensor(out is holder.out)))
    return seen


def returned_new_state(device: str, wrap: Callable) -> Any:
    holder = Holder()

    def step(x: torch.Tensor) -> dict:
        holder.out = {"loss": x * 2}
        return holder.out

    compiled = wrap(step)
    outs = [(compiled(batch(device, n)), holder.out) for n in range(CALLS)]
    return [out["loss"] for out, _ in outs], torch.tensor([out is held for out, held in outs])


def returned_arguments(device: str, wrap: Callable) -> Any:
    def step(given: dict) -> tuple:
        given["x"].add_(1)
        return given, given["ids"], given["x"].sum()

    compiled, seen = wrap(step), []
    for n in range(CALLS):
        given = {"x": batch(device, n), "ids": [1]}
        out, ids, total = compiled(given)
        seen.append((given["x"], total, torch.tensor([out is given, ids is given["ids"], out["x"] is given["x"]])))
    return seen


def returned_changed_argument(device: str, wrap: Callable) -> Any:
    def step(given: dict) -> dict:
        given["y"] = given["x"] * 2
        return given

    compiled, seen = wrap(step), []
    for n in range(CALLS):
        given = {"x": batch(device, n)}
        seen.append((compiled(given) is given, given["y"]))
    return [(torch.tensor(same), y) for same, y in seen]


def returned_object_of_a_class(device: str, wrap: Callable) -> Any:
    compiled = wrap(lambda x: Output(x * 2))
    return [compiled(batch(device, n)).loss for n in range(CALLS)]


def returned_object_that_is_kept(device: str, wrap: Callable) -> Any:
    kept: list[Output] = []

    def step(x: torch.Tensor) -> Output:
        kept[:] = [Output(x * 2)]
        return kept[0]

    compiled = wrap(step)
    results = [compiled(batch(device, n)) for n in range(CALLS)]
    assert results[-1] is kept[0]
    return [result.loss for result in results]


def leaf_in_an_object(device: str, wrap: Callable) -> Any:
    """A dataclass whose tensor requires grad: the caller's backward pass reaches it."""
    model, seen = layer(device), []
    compiled = wrap(lambda given: model(given.loss).tanh().sum())
    for n in range(CALLS):
        given = Output(batch(device, n).requires_grad_())
        compiled(given).backward()
        seen.append(given.loss.grad)
    return seen, model.weight.grad


def graph_used_in_and_out(device: str, wrap: Callable) -> Any:
    """A gradient in the step, and the caller's backward pass through it, of one leaf."""
    x, model, seen = batch(device, 0).requires_grad_(), layer(device), []

    def penalty(x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        return slope.square().sum()

    compiled = wrap(penalty)
    for _ in range(CALLS):
        compiled(x).backward()
        seen.append(x.grad.clone())
    return seen, model.weight.grad


def graph_freed_in_the_step(device: str, wrap: Callable) -> Any:
    x, model, seen = batch(device, 0).requires_grad_(), layer(device), []

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).tanh().sum()
        loss.backward()
        return loss

    compiled = wrap(step)
    for _ in range(CALLS):
        seen += [compiled(x), x.grad.clone()]
    return seen, model.weight.grad


def leaf_on_the_host(device: str, wrap: Callable) -> Any:
    model, seen = layer(device), []
    compiled = wrap(lambda x: model(x.to(device)).tanh().sum())
    for n in range(CALLS):
        x = batch("cpu", n).requires_grad_()
        compiled(x).backward()
        seen.append(x.grad)
    return seen, model.weight.grad


def returned_gradients(device: str, wrap: Callable) -> Any:
    """The step returns gradients, and the caller scales them in place: the parameters' own are scaled."""
    model, seen = layer(device), []

    def step(x: torch.Tensor) -> list:
        model.zero_grad()
        model(x).tanh().sum().backward()
        return [model.weight.grad, model.bias.grad]

    compiled = wrap(step)
    for n in range(CALLS):
        grads = compiled(batch(device, n))
        grads[0].mul_(2)
        seen += [grads, torch.tensor(grads[0] is model.weight.grad), model.weight.grad.clone()]
    return seen


def returned_attribute(device: str, wrap: Callable) -> Any:
    holder, seen = Holder(), []

    def step(x: torch.Tensor) -> torch.Tensor:
        holder.last = x * 2  # type: ignore[attr-defined]
        return holder.last  # type: ignore[attr-defined]

    compiled = wrap(step)
    for n in range(CALLS):
        out = compiled(batch(device, n))
        seen += [out, torch.tensor(out is holder.last)]  # type: ignore[attr-defined]
    return seen


PROGRAMS = [
    adversarial, collocation, gradient_penalty, graph_of_the_caller, new_parameter, one_leaf_again, returned_state,
    returned_new_state, returned_arguments, returned_changed_argument, returned_object_of_a_class, returned_object_that_is_kept,
    leaf_in_an_object, graph_used_in_and_out, graph_freed_in_the_step, leaf_on_the_host, returned_gradients, returned_attribute,
]  # fmt: skip


def _values(program: Callable, device: str, wrap: Callable) -> list[torch.Tensor]:
    return [leaf.detach().cpu() for leaf in tree_leaves(program(device, wrap))]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_captured_call_has_the_gradients_and_objects_of_an_eager_one(program: Callable, one: None) -> None:
    got, wanted = _values(program, "remote", gt.compile), _values(program, "cpu", lambda step: step)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (adversarial, "argument 0 requires grad and is a new tensor"),
        (returned_new_state, "returns a dict that it has made and keeps"),
        (returned_object_that_is_kept, "returns an object of Output that it has made"),
        (leaf_on_the_host, "argument 0 is a CPU tensor that requires grad"),
    ],
)
def test_what_no_program_can_do_is_done_in_parts(program: Callable, text: str, one: None) -> None:
    steps = []
    program("remote", lambda step: steps.append(gt.compile(step)) or steps[-1])
    report = str(steps[0].explain())
    assert text in report and "programs carry 100%" in report, report


@pytest.mark.parametrize(
    "program",
    [returned_state, returned_arguments, graph_freed_in_the_step, returned_gradients, returned_attribute],
    ids=lambda program: program.__name__,
)
def test_objects_that_are_in_python_after_a_call_are_returned_by_programs(program: Callable, one: None) -> None:
    steps = []
    program("remote", lambda step: steps.append(gt.compile(step)) or steps[-1])
    assert steps[0]._programs[0].replays >= 3, steps[0].explain()


def _one(x: torch.Tensor, _: dict) -> torch.Tensor:
    return x.square().sum()


def _new_list(x: torch.Tensor, _: dict) -> list[torch.Tensor]:
    return [x + 1, x * 2]


def _given_dictionary(x: torch.Tensor, given: dict) -> tuple[dict, torch.Tensor]:
    return given, x * given["x"]


def _read_in_the_middle(x: torch.Tensor, given: dict) -> list[torch.Tensor]:
    return [x * x.sum().item(), given["x"] + 1]


@pytest.mark.parametrize("step", [_one, _new_list, _given_dictionary, _read_in_the_middle], ids=lambda step: step.__name__)
def test_results_and_arguments_end_with_their_last_reference(step: Callable, one: None) -> None:
    compiled = gt.compile(step)
    gc.collect()
    gc.disable()  # a tensor in a reference cycle would wait for a collection, and its memory on the workers too
    try:
        for n in range(CALLS):
            given = {"x": batch("remote", n)}
            x = batch("remote", n)
            results = compiled(x, given)
            del given["x"]
            alive = [weakref.ref(thing) for thing in tree_leaves((results, given)) if isinstance(thing, torch.Tensor)]
            alive.append(weakref.ref(x))
            del given, x, results
            assert not [place for place, ref in enumerate(alive) if ref() is not None], f"kept by call {n}"
    finally:
        gc.enable()


def test_objects_among_arguments_end_with_their_last_reference(one: None) -> None:
    """The next call is compared with a recorded one, and an object of another call may get the identity of an ended one."""
    compiled = gt.compile(lambda given: given.loss + 1)
    gc.disable()
    try:
        for n in range(CALLS):
            given = Output(batch("remote", n))
            alive = weakref.ref(given), weakref.ref(given.loss)
            torch.testing.assert_close(compiled(given).cpu(), batch("cpu", n) + 1)
            del given
            assert [ref() for ref in alive] == [None, None], f"kept by call {n}"
    finally:
        gc.enable()


def test_the_reason_is_shown_if_no_two_calls_have_the_same_kind_of_arguments(one: None) -> None:
    compiled = gt.compile(lambda given, **more: given.loss + 1)
    given = Output(batch("remote", 0))
    for n in range(3):
        compiled(given, **{f"name{n}": 1})
    assert "differed in arguments in another structure" in str(compiled.explain())
    assert str(compiled.explain()).count("no earlier call that was recorded had") == 1


def test_the_reason_names_what_differs_in_tensors_of_one_shape(one: None) -> None:
    cases = {
        " f32[4,4] whose stride was [4, 1] and is [1, 4]: pass a clone": lambda n: batch_of(4).T if n % 2 else batch_of(4),
        "f32[4,4] whose requires_grad was False and is True": lambda n: batch_of(4).requires_grad_(n % 2 == 1),
        "float32[4, 4] whose stride was [4, 1] and is [1, 4]: pass a clone": lambda n: (
            torch.ones(4, 4).T if n % 2 else torch.ones(4, 4)
        ),
    }
    for words, argument in cases.items():
        compiled = gt.compile(lambda x: (x * 2).sum().detach())
        for n in range(3):
            compiled(argument(n))
        assert words in str(compiled.explain()), compiled.explain()


def batch_of(size: int) -> torch.Tensor:
    return torch.ones(size, size, device="remote")


def of_replaced_state(device: str, what: str) -> tuple[list, list, Any]:
    """What calls return that leave a new tensor in state, as it is then and in the end; and the function."""
    state = {"h": torch.arange(4.0, device=device)}
    weight = torch.nn.Parameter(torch.ones(4, device=device), requires_grad=False)
    leaf = torch.nn.Parameter(torch.ones(4, device=device))
    leaf.grad = torch.zeros(4, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        old, memory, gradient = state["h"], weight.data, leaf.grad
        state["h"] = x.sum(0) if what == "not read" else state["h"] * 0.9 + x.sum(0)
        weight.data = weight.data * 0.9 + x.sum(0)
        leaf.grad = None
        (leaf * x.sum(0)).square().sum().backward()
        return {
            "not read": old, "state": old, "a view of it": old[1:], "a copy": old * 1, "the new state": state["h"],
            "the parameter": weight, "its memory": memory, "a view of the memory": memory[1:], "its new memory": weight.data,
            "a gradient": gradient,
        }[what]  # fmt: skip

    compiled = gt.compile(step) if device == "remote" else step
    values, kept = [], []
    for n in range(9):
        kept.append(compiled(torch.full((2, 4), float(n))))
        values.append(kept[-1].tolist())
    return values, [tensor.tolist() for tensor in kept], compiled


@pytest.mark.parametrize("what", ["not read", "state", "a view of it", "a copy", "the new state", "the parameter", "its memory",
                                  "a view of the memory", "its new memory", "a gradient"])  # fmt: skip
def test_state_that_a_call_replaces_is_returned_as_torch_has_it(one: None, what: str) -> None:
    values, kept, step = of_replaced_state("remote", what)
    assert (values, kept) == of_replaced_state("cpu", what)[:2]
    if what in ("a copy", "the new state", "the parameter"):
        assert any(program.replays for program in step._programs), step.explain()


class WithoutRate(torch.optim.Optimizer):
    """An optimizer of a user's whose groups have no rate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad


def test_an_optimizer_without_a_rate_is_captured(one: None) -> None:
    weight = torch.ones(4, device="remote", requires_grad=True)
    optimizer = WithoutRate([weight])

    @gt.compile
    def step() -> None:
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()

    for _ in range(6):
        step()
    torch.testing.assert_close(weight.detach().cpu(), torch.full((4,), 0.8**6))
    assert step._programs[0].replays, step.explain()


@pytest.mark.parametrize("reads", [False, True], ids=["one program", "in parts"])
def test_a_shape_stays_a_shape_among_arguments_and_results(reads: bool, one: None) -> None:
    @gt.compile
    def step(x: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, torch.Size]:
        if reads:
            x.sum().item()
        return x * shape.numel(), x.t().shape

    for n in range(5):
        x = torch.full((2, 3), float(n), device="remote")
        result, shape = step(x, x.shape)
        assert type(shape) is torch.Size and shape.numel() == 6 and shape == (3, 2)
        assert result.sum().item() == 36 * n
    assert len(step._programs) == (0 if reads else 1), step.explain()
