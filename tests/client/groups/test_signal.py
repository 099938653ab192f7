"""Signal groups by calls, and another group for the ops that differentiate."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gt
from gt.client.groups.group_context import GroupStack, stack
from tests.helpers.planned import planned
from tests.helpers.serving import serving

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


@pytest.mark.parametrize("name", ["", 3, "x/y", "x#2"])
def test_a_backward_group_is_a_name(name: object) -> None:
    with pytest.raises((TypeError, ValueError), match="signal group"):
        gt.signal.context("a", backward=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [0, 1])
def test_ctrl_c_while_a_group_is_entered_or_left_leaves_it(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Or all later cells of a notebook would run in it."""
    change, calls = GroupStack.change_scope, []

    def interrupted(stack: GroupStack) -> None:
        calls.append(1)
        if len(calls) == number + 1:
            raise KeyboardInterrupt
        change(stack)

    with gt.signal.context("outer"):
        monkeypatch.setattr(GroupStack, "change_scope", interrupted)
        with pytest.raises(KeyboardInterrupt), gt.signal.context("a"):
            assert number, "it was entered"
        assert stack.names == ["", "outer"] and stack.in_backward == [False] * 2 and stack.scope.group == "outer"


def test_a_group_or_a_folder_whose_name_is_no_utf_8_costs_no_session(tmp_path: Path) -> None:
    """Such a name of a group ended the session, with all its tensors; such a folder of a config was a ProtocolError."""
    folder = tmp_path / os.fsdecode(b"b\xff")
    folder.mkdir()
    (folder / "c.yaml").write_text("a: {workers: [0]}\n")
    with serving(1) as server:
        gt.connect(server.address, config=str(folder / "c.yaml"))
        try:
            x = torch.ones(3, device="remote")
            with gt.signal.context("g\ud800"):
                assert (x + 1).sum().item() == 6
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
