"""Weights made inside signal groups have the layouts, the communication and the memory of weights made outside of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gt
from tests.helpers.planned import PlanSession, planned

CONFIG = """
s: {workers: [0, 1]}
s_colpar: {workers: [0, 1]}
s_rowpar: {workers: [0, 1]}
d: {workers: [2, 3]}
m: {workers: [[0, 1], [2, 3]]}
m_colpar: {workers: [[0, 1], [2, 3]]}
"""
MOVES = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "_to_")
REMOTE = "remote"
context = gt.signal.context

Make = Callable[[str, Callable[[], Any]], Any]  # makes a value in a group, or outside of it
Program = Callable[[Make], tuple[list[torch.Tensor], torch.Tensor]]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (4, 16)), device=REMOTE)


@program
def leaf(make: Make):
    w = make("s_colpar", lambda: torch.randn(16, 64, device=REMOTE, requires_grad=True))
    with context("s_colpar"):
        return [w], batch() @ w


@program
def leaf_of_scaled_numbers(make: Make):
    w = make("s_rowpar", lambda: (torch.randn(16, 64, device=REMOTE) * 0.1).requires_grad_())
    with context("s_rowpar"):
        return [w], batch() @ w


@program
def parameter_made_in_the_stage(make: Make):
    w = make("s", lambda: nn.Parameter(torch.rand(16, 64, device=REMOTE).sub_(0.5)))
    with context("s_colpar"):
        return [w], batch() @ w


@program
def block(make: Make):
    up = make("s_colpar", lambda: nn.Linear(16, 64, device=REMOTE))
    down = make("s_rowpar", lambda: nn.Linear(64, 16, device=REMOTE))
    norm = make("s", lambda: nn.LayerNorm(16, device=REMOTE))
    with context("s"):
        x = norm(batch())
    with context("s_colpar"):
        h = torch.relu(up(x))
    with context("s_rowpar"):
        return [*up.parameters(), *down.parameters(), *norm.parameters()], down(h)


@program
def block_made_in_the_stage(make: Make):
    return block(lambda group, function: make("s", function))


@program
def linear_initialised_after_it_was_made(make: Make):
    def linear() -> nn.Linear:
        made = nn.Linear(16, 64, device=REMOTE)
        nn.init.normal_(made.weight, std=0.02)
        nn.init.zeros_(made.bias)
        return made

    up = make("s_colpar", linear)
    with context("s_colpar"):
        return list(up.parameters()), up(batch())


@program
def linear_with_uploaded_state(make: Make):
    def linear() -> nn.Linear:
        made = nn.Linear(16, 64, device=REMOTE)
        made.load_state_dict(nn.Linear(16, 64).state_dict())
        return made

    down = make("s_rowpar", linear)
    with context("s_rowpar"):
        return list(down.parameters()), down(batch())


@program
def linear_moved_to_remote(make: Make):
    up = make("s_colpar", lambda: nn.Linear(16, 64).to(REMOTE))
    with context("s_colpar"):
        return list(up.parameters()), up(batch())


@program
def table(make: Make):
    rows = make("s_rowpar", lambda: nn.Embedding(64, 16, device=REMOTE))
    with context("s_rowpar"):
        return list(rows.parameters()), rows(torch.randint(64, (4, 8), device=REMOTE))


@program
def bias_of_its_own(make: Make):
    b = make("s_colpar", lambda: torch.zeros(64, device=REMOTE, requires_grad=True))
    w = make("s_colpar", lambda: torch.randn(16, 64, device=REMOTE, requires_grad=True))
    with context("s_colpar"):
        return [w, b], batch() @ w + b


@program
def fused_projection(make: Make):
    w = make("s_colpar", lambda: torch.randn(16, 48, device=REMOTE, requires_grad=True))
    with context("s_colpar"):
        q, k, v = (batch() @ w).split(16, -1)
        return [w], q * k + v


@program
def data_parallel(make: Make):
    linear = make("d", lambda: nn.Linear(16, 64, device=REMOTE))
    with context("d"):
        return list(linear.parameters()), linear(batch())


@program
def over_two_axes(make: Make):
    linear = make("m_colpar", lambda: nn.Linear(16, 64, device=REMOTE))
    with context("m_colpar"):
        return list(linear.parameters()), linear(batch())


@program
def frozen(make: Make):
    up = make("s_colpar", lambda: nn.Linear(16, 64, device=REMOTE).requires_grad_(False))
    rows = make("s_rowpar", lambda: nn.Embedding(64, 16).to(REMOTE).requires_grad_(False))
    scale = torch.ones((), device=REMOTE, requires_grad=True)
    with context("s_rowpar"):
        x = rows(torch.randint(64, (4,), device=REMOTE)) * scale
    with context("s_colpar"):
        return [*up.parameters(), *rows.parameters()], up(x)


# Their first values are computed from whole tensors: made outside, they are moved to the group's workers at their first use
WHOLE: dict[str, Program] = {}


def whole(function: Program) -> Program:
    WHOLE[function.__name__] = function
    return function


@whole
def orthogonal(make: Make):
    def linear() -> nn.Linear:
        made = nn.Linear(16, 64, device=REMOTE)
        nn.init.orthogonal_(made.weight)
        return made

    up = make("s_colpar", linear)
    with context("s_colpar"):
        return list(up.parameters()), up(batch())


@whole
def concatenated(make: Make):
    w = make("s_colpar", lambda: torch.cat([torch.randn(16, 32, device=REMOTE) for _ in "ab"], 1).requires_grad_())
    with context("s_colpar"):
        return [w], batch() @ w


@whole
def concatenated_bias(make: Make):
    b = make("s_colpar", lambda: torch.cat([torch.zeros(32, device=REMOTE) for _ in "ab"]).requires_grad_())
    w = make("s_colpar", lambda: torch.randn(16, 64, device=REMOTE, requires_grad=True))
    with context("s_colpar"):
        return [w, b], batch() @ w + b


@whole
def normalised_before_its_use(make: Make):
    w = make("s_colpar", lambda: torch.randn(16, 64, device=REMOTE, requires_grad=True))
    w.detach().norm()
    with context("s_colpar"):
        return [w], batch() @ w


def in_its_group(group: str, function: Callable[[], Any]) -> Any:
    with context(group):
        return function()


def outside(group: str, function: Callable[[], Any]) -> Any:
    return function()


def step(plan: PlanSession, function: Program, make: Make) -> tuple[Any, Counter]:
    """One training step: layouts of weights, gradients and the output; how often what was moved."""
    weights, out = function(make)
    trained = [w for w in weights if w.requires_grad]
    loss = out.square().mean()
    loss.backward()
    if trained:
        torch.optim.AdamW(trained).step()
    plan.ask()
    layouts = [plan.layout(t) for t in (*weights, *(w.grad for w in trained), out)]
    return layouts, Counter(move for line in plan.lines for move in MOVES if move in line.op)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_weight_made_in_a_group_is_split_as_one_made_outside(name: str):
    with planned(CONFIG, 4) as plan:
        want = step(plan, PROGRAMS[name], outside)
    with planned(CONFIG, 4) as plan:
        assert step(plan, PROGRAMS[name], in_its_group) == want, plan.text()
    if name != "data_parallel":
        assert "S(" in want[0][0]


@pytest.mark.parametrize("name", WHOLE)
def test_a_weight_that_was_computed_whole_in_its_group_is_cut_there(name: str):
    with planned(CONFIG, 4) as plan:
        layouts, moves = step(plan, WHOLE[name], outside)
        assert moves["_to_"] == 1
    with planned(CONFIG, 4) as plan:
        assert step(plan, WHOLE[name], in_its_group) == (layouts, moves - Counter(_to_=1)), plan.text()


def test_no_worker_ever_has_more_than_its_part_of_a_weight(tmp_path: Path):
    path = tmp_path / "sharding.yaml"
    path.write_text(CONFIG)

    def memory(make: Make) -> Any:
        def run() -> None:
            weights, out = block(make)
            out.sum().backward()
            torch.optim.SGD(weights, 0.1).step()

        return gt.plan(run, workers=4, config=str(path)).body["memory"]

    assert memory(in_its_group) == memory(outside)


def test_a_tensor_made_in_a_group_is_placed_there_if_no_group_uses_it():
    with planned(CONFIG, 4) as plan:
        with context("d"):
            x = torch.randn(8, 4, device=REMOTE)
        assert plan.layout(x) == "unplaced"
        y = x.exp()
        total = y.sum()
        assert plan.layout(y) == "[S(0)] on 2,3" and plan.layout(total) == "[P] on 2,3"


def test_an_activation_that_is_declared_a_leaf_keeps_its_layout():
    """As torch.utils.checkpoint does with the inputs of a block."""
    with planned(CONFIG, 4) as plan:
        w = torch.randn(16, 16, device=REMOTE, requires_grad=True)
        with context("s"):
            h = batch() @ torch.randn(16, 16, device=REMOTE)
            again = h.detach().requires_grad_()
        with context("s_rowpar"):
            y = again @ w
        assert plan.layout(h) == plan.layout(again) == "[R] on 0,1"
        assert plan.layout(w) == "[S(0)] on 0,1" and plan.layout(y) == "[P] on 0,1"


def test_a_weight_that_stays_whole_although_its_group_splits_is_warned_of_once(monkeypatch: pytest.MonkeyPatch):
    notices: list[str] = []
    handle = PlanSession.handle

    def listen(self: PlanSession, event: Any) -> None:
        send = self.core.handle

        def heard(received: Any) -> Any:
            actions = list(send(received))
            notices.extend(a.message.text for a in actions if type(getattr(a, "message", None)).__name__ == "Notice")
            return actions

        with monkeypatch.context() as patch:
            patch.setattr(self.core, "handle", heard)
            handle(self, event)

    monkeypatch.setattr(PlanSession, "handle", listen)
    with planned(CONFIG, 4) as plan:
        table = nn.Embedding(64, 16, device=REMOTE)
        with context("s"):
            x = table(torch.randint(64, (4,), device=REMOTE))
        for _ in range(2):
            with context("s_colpar"):
                y = x @ table.weight.t()
        y.sum().backward()
        plan.ask()
    assert len(notices) == 1 and "its weight f32[16,64]" in notices[0] and "'s_colpar' splits weights over 2" in notices[0]
    assert "test_made_in_groups.py:" in notices[0]
