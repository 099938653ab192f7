"""explain() says in plain words in what two calls differ, and what a function did that no replay would do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import gt

NOW: dict[str, Any] = {}
CONFIG = "a: {workers: [0]}\nb: {workers: [1]}\n"


def sized(x: torch.Tensor) -> torch.Tensor:
    return x[: NOW["value"]] + 1


def reduced(x: torch.Tensor) -> torch.Tensor:
    return x.sum(NOW["value"])


def typed(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(2, dtype=NOW["value"], device="remote").zero_()


def grouped(x: torch.Tensor) -> torch.Tensor:
    with gt.signal.context(NOW["value"]):
        return x + 1


def named(x: torch.Tensor) -> torch.Tensor:
    return x.exp() if NOW["value"] else x.sin()


def longer(x: torch.Tensor) -> torch.Tensor:
    for _ in range(NOW["value"]):
        x = x + 1
    return x


DIFFERENCES: dict[str, tuple[Callable, tuple[Any, Any], str]] = {
    "a slice": (sized, (2, 3), "the constant arguments of aten.slice.Tensor were (0, 0, 2), and are (0, 0, 3)"),
    "a dim": (reduced, (0, 1), "the constant arguments of aten.sum.dim_IntList were ([0]), and are ([1])"),
    "a dtype": (typed, (torch.float32, torch.int64), "float32"),
    "a group": (grouped, ("a", "b"), "in group a, and is called at "),
    "an op": (named, (0, 1), "it was aten.sin, and is aten.exp"),
    "more ops": (longer, (1, 2), "this call has 2 ops, the call before had 1; aten.add.Tensor is the first that only one has"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_explain_says_in_what_an_op_differs(name: str, session: Callable) -> None:
    session(CONFIG)
    fn, values, text = DIFFERENCES[name]
    x = torch.ones(4, 4, device="remote")
    step = gt.compile(fn)
    for value in values:
        NOW["value"] = value
        step(x)
    assert text in step.explain(), step.explain()
    assert __file__ in step.explain() and "a call was not kept" in step.explain()


def test_explain_names_the_operand_that_is_another(session: Callable) -> None:
    session()
    x, held = torch.ones(4, device="remote"), [torch.ones(4, device="remote"), torch.zeros(4, device="remote")]

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + held[NOW["value"]]

    for NOW["value"] in (0, 1):
        step(x)
    assert "operand 1 of aten.add.Tensor is held[1], and was held[0] in the call before" in step.explain()


def test_a_list_that_grows_is_told_as_the_append_it_is(session: Callable) -> None:
    session()
    losses: list[torch.Tensor] = []

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        losses.append(x * 2)
        return x + 1

    for _ in range(3):
        step(torch.ones(2))
    assert "the function appends to `losses`, and Python does not run in a replay: do it outside" in step.explain()


def trained(optimizer: str, inside: Callable[[Any], None] = lambda scheduler: None) -> Any:
    """A captured step that was called some times, with a scheduler."""
    w = torch.ones(4, 4, device="remote", requires_grad=True)
    o = getattr(torch.optim, optimizer)([w], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(o)

    @gt.compile
    def step() -> None:
        o.zero_grad()
        w.exp().sum().backward()
        o.step()
        inside(scheduler)

    for _ in range(3):
        step()
    return step


def test_readers_of_values_are_named_with_what_to_do(session: Callable) -> None:
    session()
    assert "is read by torch.optim's Adafactor, which decides by it in each step: AdamW" in trained("Adafactor").explain()
    reads = trained("SGD", lambda scheduler: scheduler.step(torch.rand((), device="remote")))
    assert "is read by a learning-rate scheduler: call its step() after the function" in reads.explain()

    @gt.compile
    def mine(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.exp().sum() > 1 else x

    mine(torch.ones(2))
    assert "is read: return the tensor, and read it after the function" in mine.explain()


@pytest.mark.parametrize("scheduled", [False, True])
def test_the_loss_scale_is_named_as_the_reader(session: Callable, scheduled: bool) -> None:
    """Also where a scheduler has wrapped the optimizer's step."""
    session("gt: {data_parallel: [0, 1], precision: fp16}")
    layer = torch.nn.Linear(4, 4).to("remote")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if scheduled else None

    @gt.compile
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step(torch.ones(4, 4))
        if scheduler:
            scheduler.step()
    assert "is read by precision fp16, to leave out a step that overflowed: give the optimizer fused=True" in step.explain()


def test_a_scheduler_that_is_stepped_inside_is_named(session: Callable) -> None:
    session()
    text = trained("SGD", lambda scheduler: scheduler.step(1.0)).explain()
    assert "a scheduler is stepped after each replay" in text, text
    assert "last_epoch" not in text and "_opt_called" not in text, text


def test_shapes_that_depend_on_values_are_named_where_no_zero_is_used(session: Callable) -> None:
    session()

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum()

    for _ in range(6):
        step(torch.ones(3))
    text = step.explain()
    assert "ops: the shape of a result depends on values" in text and "ZeRO" not in text, text


def test_an_entry_and_an_attribute_that_a_call_adds_are_named(session: Callable) -> None:
    session()
    cache: dict[str, float] = {}
    model = torch.nn.Linear(2, 2).to("remote").requires_grad_(False)

    @gt.compile
    def keeps(x: torch.Tensor) -> torch.Tensor:
        cache[str(len(cache))] = 1.0
        return model(x)

    @gt.compile
    def sets(x: torch.Tensor) -> torch.Tensor:
        model.seen = model.__dict__.get("seen", 0) + 1
        return model(x)

    for _ in range(2):
        keeps(torch.ones(2))
    sets(torch.ones(2))
    assert "the function adds the entry ['0'] of `cache`" in keeps.explain()
    assert "the function sets model.seen" in sets.explain()


def test_the_state_that_an_optimizer_makes_first_is_no_alarm(session: Callable) -> None:
    session()
    model = torch.nn.Linear(2, 2).to("remote")
    optimizer = torch.optim.AdamW(model.parameters())

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(6):
        step(torch.ones(2))
    text = step.explain()
    assert "1 program" in text and "do it outside" not in text and "have the function" not in text
    assert "an earlier call was not kept: the optimizer makes its state in this call" in text


CURES = {
    "distributions": (lambda x: torch.distributions.Normal(x, x.exp()).log_prob(x), "validate_args=False"),
    "bincount": (lambda x: torch.bincount(x.long(), minlength=4), "index_add"),
    "a mask": (lambda x: x[x > 0].sum(), "torch.where"),
    "repeat_interleave": (lambda x: torch.repeat_interleave(x, x.long()), "output_size=n"),
}


@pytest.mark.parametrize("name", CURES)
def test_a_reason_says_what_to_write(name: str, session: Callable) -> None:
    session()
    function, cure = CURES[name]
    step = gt.compile(lambda x: function(x * 1.0))
    for _ in range(3):
        step(torch.arange(4.0))
    assert cure in step.explain()


def test_an_object_argument_that_is_new_at_each_call_has_its_cure_named(session: Callable) -> None:
    session()

    @dataclass
    class Batch:
        x: torch.Tensor

    step = gt.compile(lambda batch: batch.x.sum())
    for _ in range(5):
        step(Batch(torch.ones(2, device="remote")))
    assert "register_dataclass" in step.explain()
