"""The cost of a tensor-parallel block and of a stage boundary, counted in the plan: Megatron's count, and no gather."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import gt
from gt.client import current_session
from gt.dispatcher.planning import op_binder
from gt.dispatcher.state.validate import CREDIT
from tests.helpers.planned import planned

B, T, C, H = 2, 6, 16, 4


def stages(count: int, width: int) -> str:
    """YAML of `count` tensor-parallel stages of `width` workers."""
    rows = []
    for i in range(count):
        workers = list(range(i * width, (i + 1) * width))
        for suffix, axis in (("", 0), ("_colpar", 1), ("_rowpar", 0)):
            rows.append(f"pp_stage{i}{suffix}: {{shard: {{axis: {axis}, workers: {workers}}}}}")
    return "\n".join(rows)


class Block(nn.Module):
    """A transformer block in groups; `attention` makes q, k and v out of its input."""

    def __init__(self, attention: nn.Module, stage: str) -> None:
        super().__init__()
        self.stage, self.attention = stage, attention
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.proj, self.fc, self.fc2 = nn.Linear(C, C), nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        column, row = gt.signal.context(self.stage + "_colpar"), gt.signal.context(self.stage + "_rowpar")
        with gt.signal.context(self.stage):
            h = self.ln1(x)
            with column:
                q, k, v = self.attention(h)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
            with row:
                x = x + self.proj(y)
            h = self.ln2(x)
            with column:
                h = F.gelu(self.fc(h))
            with row:
                h = self.fc2(h)
            return x + h


def heads(t: torch.Tensor) -> torch.Tensor:
    return t.view(B, T, H, C // H).transpose(1, 2)


class Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [heads(m(x)) for m in (self.q, self.k, self.v)]


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [heads(t) for t in self.qkv(x).split(C, 2)]


class FusedView(Fused):
    """q, k and v by a view of five dims, as many models have it."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(self.qkv(x).view(B, T, 3, H, C // H).permute(2, 0, 3, 1, 4).unbind(0))


class FusedStored(nn.Module):
    """The weight stored [in, out], as in GPT-2's first release."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(C, 3 * C)), nn.Parameter(torch.zeros(3 * C))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = torch.addmm(self.bias, x.view(-1, C), self.weight).view(B, T, 3 * C)
        return [heads(t) for t in y.split(C, 2)]


class FusedSum(FusedStored):
    """The bias added by an op of its own."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [heads(t) for t in (x @ self.weight + self.bias).split(C, 2)]


class Chunked(Fused):
    """split after a question: the planner could not look ahead."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.qkv(x)
        current_session.current().session.ask()
        return [heads(t) for t in y.split(C, 2)]


class ChunkedSum(FusedStored):
    """The same, the bias added by an op of its own."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = x @ self.weight + self.bias
        current_session.current().session.ask()
        return [heads(t) for t in y.split(C, 2)]


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None, x: torch.Tensor) -> None:
    model(x).sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


MOVES = ("all_gather", "all_to_all", "shard over")


@pytest.mark.parametrize("attention", [Separate, Fused, FusedView, FusedStored, FusedSum, Chunked, ChunkedSum])
def test_a_block_costs_two_all_reduces_forward_and_two_backward(attention):
    with planned(stages(1, 2), 2) as plan:
        block = Block(attention(), "pp_stage0").to("remote")
        x = torch.randn(B, T, C).to("remote").requires_grad_()
        optimizer = torch.optim.AdamW(block.parameters())
        step(block, optimizer, x)  # what is laid out again is laid out again once
        plan.text()
        plan.lines.clear()
        y = block(x)
        assert plan.count("all_reduce") == 2, plan.text()
        y.sum().backward()
        assert plan.count("all_reduce") == 4, plan.text()
        optimizer.step()
        assert plan.count("all_reduce") == 4, plan.text()
        assert [plan.count(word) for word in MOVES] == [0, 0, 0], plan.text()


@pytest.mark.parametrize("attention", [Separate, Fused, FusedView, FusedStored, FusedSum])
def test_nothing_is_gathered_from_the_first_step_on(attention):
    with planned(stages(1, 2), 2) as plan:
        block = Block(attention(), "pp_stage0").to("remote")
        step(block, torch.optim.SGD(block.parameters(), 0.1), torch.randn(B, T, C).to("remote"))
        assert [plan.count(word) for word in MOVES] == [0, 0, 0], plan.text()


def test_a_fused_projection_met_too_late_is_laid_out_again_once():
    with planned(stages(1, 2), 2) as plan:
        block = Block(Chunked(), "pp_stage0").to("remote")
        optimizer = torch.optim.AdamW(block.parameters())
        for expected in (True, False, False):
            plan.lines.clear()
            step(block, optimizer, torch.randn(B, T, C).to("remote"))
            assert bool(plan.count("all_gather") + plan.count("all_to_all")) == expected, plan.text()
        assert plan.layout(block.attention.qkv.weight) == "[S(0,3)] on 0,1"
        state = optimizer.state[block.attention.qkv.weight]
        assert plan.layout(state["exp_avg"]) == "[S(0,3)] on 0,1"


class Flushing(TorchDispatchMode):
    """A batch ends after every op."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        current_session.current().flush()
        return result


def test_the_ends_of_batches_change_no_layout():
    """They end by chance where a program pauses: what is planned by what follows waits for that."""

    def planned_with(flush: bool) -> list[str]:
        with planned(stages(1, 2), 2) as plan:
            block = Block(Fused(), "pp_stage0").to("remote")
            with Flushing() if flush else nullcontext():
                step(block, torch.optim.AdamW(block.parameters()), torch.ones(B, T, C).to("remote"))
            plan.ask()
            assert not plan.core.sessions[b"client"].op_stream.coming
            return [re.sub(r"%\d+|\S+\.py:\d+", "", str(line)) for line in plan.lines]

    assert planned_with(True) == planned_with(False)


def test_nothing_waits_longer_than_a_client_has_credit():
    """Batches of no ops bring no decision nearer."""
    with planned(stages(1, 2), 2) as plan:
        linear = nn.Linear(C, 3 * C).to("remote")
        spare = [torch.ones(3).to("remote") for _ in range(CREDIT)]
        coming = plan.core.sessions[b"client"].op_stream.coming
        with gt.signal.context("pp_stage0_colpar"):
            y = linear(torch.ones(B, C).to("remote"))
        current_session.current().flush()
        assert len(coming) == 1
        while coming and spare:
            spare.pop()
            current_session.current().flush()
        assert spare and plan.layout(y).startswith("[S(1)]"), plan.text()


@pytest.mark.parametrize("move", [False, True], ids=["x = x", "gt.signal.move"])
def test_each_piece_crosses_a_stage_boundary_once(move):
    with planned(stages(4, 2), 8) as plan:
        blocks = [Block(Fused(), f"pp_stage{i}").to("remote") for i in range(4)]
        x = torch.randn(B, T, C).to("remote").requires_grad_()
        for i, block in enumerate(blocks):
            x = block(x)
            with gt.signal.context(f"stage{i}_to_stage{i + 1}") if i < 3 else nullcontext():
                x = gt.signal.move(x) if move and i < 3 else x
        x.sum().backward()
        plan.text()
        crossings = [line for line in plan.lines if "_to_stage" in line.op]
        forward = [line.op for line in crossings if "backward" not in line.note]
        backward = [line.op for line in crossings if "backward" in line.note]
        assert forward == ["stage0_to_stage1", "stage1_to_stage2", "stage2_to_stage3"], plan.text()
        assert backward == ["stage3_to_stage2", "stage2_to_stage1", "stage1_to_stage0"], plan.text()
        size = B * T * C * 4 * 2  # both workers of a stage get the whole activation
        assert all(line.note.startswith(f"{size} B") for line in crossings)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Stored(nn.Module):
    """A weight stored [in, out]: its gradient is that of x.t() @ dy."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(C, C))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@pytest.mark.parametrize("shape", [(2 * B, C), (2 * B, T, C)], ids=["2 dims", "3 dims"])
@pytest.mark.parametrize("made", [lambda: nn.Linear(C, C), Stored, Residual], ids=["Linear", "Stored", "Residual"])
def test_data_parallel_stages_exchange_an_activation_and_its_gradient_once(made, shape):
    """Views of what comes from another stage (x.view, dy.t()) are views of its copy, split as that is."""
    config = "".join(f"stage{i}: {{workers: [{2 * i}, {2 * i + 1}]}}\n" for i in range(3))
    with planned(config, 6) as plan:
        parts = [made().to("remote") for _ in range(3)]
        x = torch.randn(*shape).to("remote")
        for i, part in enumerate(parts):
            with gt.signal.context(f"stage{i}"):
                x = part(x)
        with gt.signal.context("stage2"):
            loss = x.square().mean()
        loss.backward()
        plan.text()
        lines = [line for line in plan.lines if "_to_stage" in line.op]
        ways = ["stage0_to_stage1", "stage1_to_stage2", "stage2_to_stage1", "stage1_to_stage0"]
        assert [line.op for line in lines] == ways, plan.text()
        assert all(line.note.startswith(f"{torch.Size(shape).numel() * 4} B") for line in lines), plan.text()
        assert [plan.count(word) for word in MOVES[:2]] == [0, 0], plan.text()
        for part in parts:
            for parameter in part.parameters():
                assert plan.layout(parameter.grad).startswith(("[P]", "[R]")), plan.text()


def test_operands_of_a_long_list_that_lie_alike_are_measured_once(monkeypatch):
    calls = []
    measured = op_binder.local_shape
    monkeypatch.setattr(op_binder, "local_shape", lambda *args: calls.append(args) or measured(*args))
    with planned("", 2):
        tensors = [torch.zeros(4, device="remote") for _ in range(100)]
        calls.clear()
        torch.stack(tensors)
        current_session.current().flush()
    assert 0 < len(calls) <= 4
