"""Random models, meshes, optimizers and strategies, eager and captured: the losses and first gradients of one process.

More of them: `python -m tests.stress.strategies`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from fnmatch import fnmatchcase as fnmatch
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gt
from tests.helpers import longer
from tests.helpers.serving import serving

STEPS, ROWS, CLOSE = 20, 16, 1e-5
STEPS_IN_FP32 = 5e-5  # in a captured step the device counts an Adam's steps in fp32, and so computes its bias corrections


class Block(nn.Module):
    """One of several kinds of layer, around a residual; `up` and `down` may be tensor parallel."""

    def __init__(self, kind: str, width: int, inner: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "mlp":
            self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=inner % 2 == 0)
        elif kind == "conv":
            self.conv = nn.Conv1d(1, 3, 3, padding=1)
        elif kind == "norm":
            self.norm = nn.LayerNorm(width)
        elif kind == "batch norm":
            self.norm = nn.BatchNorm1d(width)
        elif kind == "lora":
            self.base = nn.Linear(width, width).requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, width) * 0.1), nn.Parameter(torch.randn(width, 2) * 0.1)
        elif kind == "weight norm":
            self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        else:
            self.scale, self.unused = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.zeros(3))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.kind == "mlp":
            return h + self.down(F.gelu(self.up(h)))
        if self.kind == "conv":
            return h + self.conv(h[:, None]).mean(1)
        if self.kind in ("norm", "batch norm"):
            return self.norm(h)
        if self.kind == "lora":
            return h + self.base(h) + F.linear(h, self.b @ self.a)
        if self.kind == "weight norm":
            return h + self.linear(h)
        return h * self.scale


class Model(nn.Module):
    """A table, random blocks, and a head that may be tied to the table."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width, words = draw.choice([8, 12, 15]), draw.choice([11, 16, 40])
        kinds = ["mlp", "conv", "norm", "batch norm", "lora", "weight norm", "scale"]
        self.table = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*[Block(draw.choice(kinds), width, draw.choice([9, 16, 24])) for _ in range(4)])
        self.head = nn.Linear(width, words, bias=False)
        if draw.random() < 0.5:
            self.head.weight = self.table.weight
        self.words = words

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks(self.table(words))), (words * 7 + 3) % self.words)


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, eps=1e-3),
    lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, eps=1e-3),
    lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, eps=1e-3),
    lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-3),
    lambda p: torch.optim.Adagrad(p, lr=1e-2),
]  # with an eps that keeps gradients of rounding errors small

TENSOR = {"*.up": "s_colpar", "*.down": "s_rowpar", "": "s"}
PIPELINE = {"table": "pp_stage0", "blocks.[01]": "pp_stage0", "blocks.[23]": "pp_stage1", "head": "pp_stage1"}


def strategy(draw: random.Random, folder: str, offload: bool) -> str:
    """The settings of a config besides its workers. offload: always, on a side that is drawn."""
    stage = draw.choice([0, 1, 2, 3])
    parts = [f"zero: {stage}"]
    if draw.random() < 0.5:
        parts.append(f"bucket: {draw.choice(['1B', '2KiB', '25MiB'])}")
    if draw.random() < 0.4 or offload:
        spaces = [f"optimizer: {draw.choice(['cpu', 'nvme'])}"] + (
            ["params: cpu"] if stage == 3 and draw.random() < 0.5 else []
        )
        spaces += [f"step: {draw.choice(['host', 'host', 'device'])}"] if offload else []
        parts.append(f"offload: {{{', '.join(spaces)}, path: {folder}}}")
    if draw.random() < 0.4:
        parts.append('activation_checkpoint: {modules: "blocks.[02]"}')
    return ", ".join(parts)


def config(draw: random.Random, folder: str, offload: bool = False) -> tuple[str, dict[str, str]]:
    """A config, and the groups of modules by their patterns."""
    settings = strategy(draw, folder, offload)
    mesh = draw.choice(["dp", "dp", "tp", "pp"])
    if mesh == "dp":
        return f"gt: {{data_parallel: {[*range(draw.choice([2, 3, 4, 8]))]}, {settings}}}", {}
    if mesh == "tp":
        rows = draw.choice(["[[0, 1], [2, 3]]", "[[0, 1, 2], [5, 4, 3]]", "[[0, 1], [2, 3], [4, 5], [6, 7]]"])
        groups = "\n".join(f"s{suffix}: {{workers: {rows}}}" for suffix in ("", "_colpar", "_rowpar"))
        return f"{groups}\ngt: {{{settings}}}", TENSOR
    first, second = draw.choice([([0, 1], [2, 3]), ([0, 1, 2], [5, 4, 3]), ([0, 1, 2, 3], [4, 5, 6, 7])])
    groups = f"pp_stage0: {{workers: {first}}}\npp_stage1: {{workers: {second}}}"
    return f"{groups}\ngt: {{{settings}}}", PIPELINE


def train(
    draw: random.Random, device: str, groups: dict[str, str], dtype: torch.dtype = torch.float32, backend: str = ""
) -> tuple[list[float], list, bool]:
    """Losses of all steps, gradients after the first backward pass, and true if the device counts the optimizer's steps.

    backend: of a step that is captured in any case, whose optimizer is fused in most.
    """
    torch.manual_seed(0)
    model = Model(draw).to(device, dtype)
    if groups and device != "cpu":
        names = [name for name, _ in model.named_modules()]
        used = {k: g for k, g in groups.items() if not k or any(fnmatch(name, k) for name in names)}
        gt.signal.apply(model, used)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = draw.choice([OPTIMIZERS[4]] * 7 + OPTIMIZERS if backend else OPTIMIZERS)(trained)
    micro, clip, keep = draw.choice([1, 2]), draw.random() < 0.5, draw.random() < 0.5
    captured = draw.random() < 0.5 or bool(backend)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=keep)
        total = torch.zeros((), device=device, dtype=dtype)
        for part in batch.chunk(micro):
            loss = model(part) / micro
            loss.backward()
            total = total + loss.detach()
        if clip:
            torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        return total

    call = gt.compile(step, backend=backend or None) if captured and device != "cpu" else step
    losses, first = [], []
    for batch in torch.randint(0, model.words, (STEPS, ROWS)):
        losses.append(float(call(batch.to(device))))
        first = first or [None if p.grad is None else p.grad.cpu().clone() for p in trained]
    return losses, first, captured and any(group.get("capturable") for group in optimizer.param_groups)


def compare(seed: int, folder: str, session: Callable[[str], Any], backend: str = "") -> None:
    """AssertionError unless the random program of a seed has the numbers of one process.

    backend: that of its captured step, with offload.
    """
    text, groups = config(random.Random(seed), folder, bool(backend))
    session(text)
    got, want = (train(random.Random(seed), device, groups, backend=backend) for device in ("remote", "cpu"))
    exact, *_ = train(random.Random(seed), "cpu", groups, torch.float64, backend)
    rounding = max(abs(a - b) for a, b in zip(want[0], exact, strict=True))  # that one process has itself
    assert got[0] == pytest.approx(want[0], abs=max(STEPS_IN_FP32 if got[2] else CLOSE, 4 * rounding)), text
    norm = sum(float(b.square().sum()) for b in want[1] if b is not None) ** 0.5
    for a, b in zip(got[1], want[1], strict=True):
        assert (a is None) == (b is None), text
        # some are zero but for rounding (of a bias before a norm): all gradients together are the measure of those
        assert a is None or float((a - b).norm()) <= CLOSE * max(float(b.norm()), norm / 10), text


@pytest.mark.parametrize("seed", longer(range(8), range(4)))
def test_a_random_program_has_the_numbers_of_one_process(session, seed, tmp_path):
    compare(seed, str(tmp_path), session)


@pytest.mark.parametrize("seed", longer(range(20, 28), range(20, 23)))
def test_a_random_captured_program_with_offload_has_the_bits_of_that_without(session, seed, tmp_path):
    """CPU workers compute both by the same kernels."""
    text, groups = config(random.Random(seed), str(tmp_path), True)
    made = []
    for each in (text, re.sub(r", offload: \{[^}]*\}", "", text)):
        session(each)
        made.append(train(random.Random(seed), "remote", groups, backend="eager"))
    (got, first, _), (want, wanted, _) = made
    assert got == want, text
    assert all(a is b or torch.equal(a, b) for a, b in zip(first, wanted, strict=True)), text


@pytest.mark.parametrize("seed", longer(range(30, 33), [32]))
def test_a_random_compiled_program_with_offload_has_the_numbers_of_one_process(graphs, seed, tmp_path):
    with serving(8, "torch") as server:
        try:
            compare(seed, str(tmp_path), lambda text: gt.connect(server.address, config=text), "inductor")
        finally:
            gt.shutdown()
    assert graphs
