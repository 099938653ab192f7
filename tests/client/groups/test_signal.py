"""Signal groups by calls, and another group for the ops that differentiate."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import gt
from gt.client.groups import group_context
from gt.client.groups.group_context import stack
from tests.helpers.planned import planned
from tests.helpers.serving import serving
from tests.interrupts.presses import interrupted

CONFIG = "a: {workers: [0, 1]}\nb: {workers: [2, 3]}\nc: {workers: [4, 5]}\n"


def batch() -> torch.Tensor:
    """No leaf that requires grad, which would be a parameter: whole in a data-parallel group."""
    return torch.randn(8, 4, device="remote")


def test_enter_and_exit_are_a_context() -> None:
    with planned(CONFIG) as plan:
        gt.signal.enter("a")
        gt.signal.enter("b")
        x = batch() * batch()
        gt.signal.exit("b")
        y = batch() * batch()
        gt.signal.exit("a")
        z = torch.ones(2, device="remote").sum()
        assert [plan.layout(t) for t in (x, y, z)] == ["[S(0)] on 2,3", "[S(0)] on 0,1", "[] on 0"]


def test_exit_refuses_another_group_than_the_last() -> None:
    with pytest.raises(ValueError, match=r"no group is open: gt\.signal\.enter opens one"):
        gt.signal.exit("a")
    gt.signal.enter("a")
    try:
        with pytest.raises(ValueError, match="the group entered last is 'a'"):
            gt.signal.exit("b")
        errors: list[BaseException] = []

        def elsewhere() -> None:
            try:
                gt.signal.exit("a")
            except ValueError as error:
                errors.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "no group is open" in str(errors[0])
    finally:
        gt.signal.exit("a")


def test_a_tensor_enters_a_group_and_its_gradient_comes_back() -> None:
    with planned(CONFIG) as plan:
        w = torch.randn(4, 4, device="remote", requires_grad=True)
        with gt.signal.context("a"):
            x = batch() @ w
        y = gt.signal.tensor(x, "b")
        y.sum().backward()
        assert plan.layout(x) == "[S(0)] on 0,1" and plan.layout(y) == "[S(0)] on 2,3"
        assert plan.layout(w.grad) == "[P] on 0,1"
    with pytest.raises(TypeError, match="remote"):
        gt.signal.tensor(torch.ones(2), "b")


@pytest.mark.parametrize("outer", [None, "c"])
def test_the_ops_that_differentiate_run_in_the_backward_group(outer: str | None) -> None:
    with planned(CONFIG) as plan:
        w = torch.randn(4, 4, device="remote", requires_grad=True)
        if outer:
            gt.signal.enter(outer)
        with gt.signal.context("a", backward="b"):
            x = torch.exp(batch() @ w)
        with gt.signal.context("a"):
            y = torch.exp(batch() @ w)
        if outer:
            gt.signal.exit(outer)
        (x.sum() + y.sum()).backward()
        plan.ask()
        backward = [line for line in plan.lines if "aten.mm" in line.op and line.note.endswith("backward")]
        assert [line.workers for line in backward] == [(0, 1), (2, 3)]
        assert {line.note.split()[-2] for line in backward} == {"a", "b"}


@pytest.mark.parametrize(
    "name",
    [
        "",
        3,
        "x/y",
        "x#2",
        "x\x1fy",
        "x\0",
        "x\ny",
        "x\u202ey",
        "x\u200b",
        "\ufeffx",
        "g\ud800",
        " ",
        "x" * 256,
        "x" * 5_000_000,
    ],
)
def test_a_group_and_a_backward_group_are_names(name: object) -> None:
    """One of 5000 characters ended the session, and one with a separator in it was two groups."""
    for given in ({"name": name}, {"name": "a", "backward": name}):
        with pytest.raises((TypeError, ValueError), match="signal group") as info:
            gt.signal.context(**given)  # type: ignore[arg-type]
        assert str(info.value).isprintable() and len(str(info.value)) < 400


@pytest.mark.parametrize("parts", [0, -1, 1000, True, 2.0, "3"])
def test_fused_parts_are_a_number(parts: object) -> None:
    with pytest.raises(ValueError, match=r"parts is .*, want a whole number from 1 to 999"):
        gt.signal.context("a", parts)  # type: ignore[arg-type]


def test_a_function_in_a_group_may_call_itself_and_other_groups_nest_in_bounds() -> None:
    """The 33rd call within another ended the session."""

    @gt.signal.context("a")
    def power(x: torch.Tensor, n: int) -> torch.Tensor:
        return power(x * x, n - 1) if n else x * x

    with planned(CONFIG) as plan:
        assert plan.layout(power(torch.ones(8, 4, device="remote"), 100)) == "[S(0)] on 0,1"
        for most, name in ((32, "g{}"), (16, "g{:0254}")):  # as many as are taken, and 4096 characters
            with (
                contextlib.ExitStack() as entered,
                pytest.raises(ValueError, match=r"signal groups of .* are within one another"),
            ):
                for number in range(40):
                    entered.enter_context(gt.signal.context(name.format(number)))
                    batch()
            assert number == most and stack.scope().group == ""
            plan.ask()  # the session goes on


def test_ctrl_c_at_any_instruction_leaves_groups_and_micro_batches() -> None:
    """Before the first statement of the outermost group's exit it left the group entered: all later ops ran in it."""

    @gt.signal.context("decorated")
    def decorated(depth: int) -> None:
        if depth:
            decorated(depth - 1)

    def program() -> None:
        with gt.signal.context("outer") as outer, gt.signal.context("inner"), outer:
            assert stack.scope().group == "outer/inner/outer"
        for _ in gt.microbatches([torch.ones(2)], 2):
            assert stack.scope().micro >= 0
        decorated(2)
        gt.signal.enter("a")
        gt.signal.exit("a")

    program()
    presses = 0
    while interrupted(program, presses, [group_context, gt.signal]):
        presses += 1
        if gt.signal._entered.open:  # between the program's two calls
            gt.signal.exit("a")
        now = stack.scope()
        assert (now.group, now.micro, len(stack.entries)) == ("", -1, 1), presses
    assert presses > 50


def test_a_group_that_was_left_takes_along_those_that_suspended_generators_entered() -> None:
    def entering() -> Iterator[None]:
        with gt.signal.context("inner"):
            yield

    with gt.signal.context("outer"):
        suspended = entering()
        next(suspended)
        assert stack.scope().group == "outer/inner"
    assert stack.scope().group == "" and not stack.in_backward
    suspended.close()
    again = gt.signal.context("again")
    with contextlib.ExitStack() as opened:
        assert opened.enter_context(again) is again and stack.scope().group == "again"
        assert hasattr(again, "__exit__") and stack.scope().group == "again"
    assert stack.scope().group == ""


def test_ctrl_c_before_the_first_statement_of_a_groups_exit_keeps_the_groups_around_it_from_nothing() -> None:
    """The group around it left the inner one in its own place, and was itself entered for ever."""
    with pytest.raises(KeyboardInterrupt), gt.signal.context("outer"):
        gt.signal.context("inner").__enter__()
        raise KeyboardInterrupt
    assert stack.scope().group == "" and len(stack.entries) == 1


def test_a_folder_whose_name_is_no_utf_8_costs_no_session(tmp_path: Path) -> None:
    """It was a ProtocolError."""
    folder = tmp_path / os.fsdecode(b"b\xff")
    folder.mkdir()
    (folder / "c.yaml").write_text("a: {workers: [0]}\n")
    with serving(1) as server:
        gt.connect(server.address, config=str(folder / "c.yaml"))
        try:
            x = torch.ones(3, device="remote")
            assert x.sum().item() == 3
        finally:
            gt.shutdown()


@pytest.mark.parametrize(
    ("config", "said"), [("a: {workers: [0]}\n", True), ("gt: {data_parallel: [0, 1]}\n", False), ("", False)]
)
def test_apply_tells_of_a_config_with_groups_and_no_rules(
    config: str, said: bool, session: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    session(config)
    assert gt.signal.apply(torch.nn.Linear(2, 2)) == {}
    assert ("places no module" in caplog.text) is said
