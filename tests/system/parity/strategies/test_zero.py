"""Training with sharded weights, gradients and optimizer state: the numbers of one process, and the memory of theory."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gt
from tests.helpers import longer
from tests.helpers.serving import settled

STEPS, ROWS, WORDS, WIDTH = 5, 16, 33, 16  # a captured step replays in the last two
CLOSE = 1e-5


class Model(nn.Module):
    """A small model with what sharding has to get right: tied and frozen weights, buffers, odd and tiny shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(1, 8, WIDTH) * 0.1)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 51), nn.Linear(51, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.small = nn.Linear(WIDTH, 5)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = self.table(words) + self.places[:, : words.shape[1]]
        q, k, v = (part[:, None] for part in self.qkv(self.norm(h)).chunk(3, -1))
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        h = self.batch_norm(h.transpose(1, 2)).transpose(1, 2)
        h = h + self.down(F.gelu(self.up(h))) * self.scale + self.frozen(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), words.flatten()) + self.small(h).square().mean()


# name -> optimizer, micro-batches, norm to clip to
KINDS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.05), 1, None),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, foreach=True), 2, 1.0),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False, weight_decay=0.1), 1, 1.0),
    "fused": (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), 4, None),
    "foreach": (lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True), 2, 1.0),
}


def train(kind, device="cpu", captured=False):
    """Losses of all steps, the gradients of the first, and an average of the weights, all on the CPU."""
    make, micro, clip = KINDS[kind]
    torch.manual_seed(0)
    model = Model().to(device)
    average = copy.deepcopy(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make(trained)
    batches = torch.randint(0, WORDS, (STEPS, ROWS, 6))
    first = []

    def step(batch):
        total = 0.0
        for part in batch.chunk(micro):
            loss = model(part) / micro
            loss.backward()
            total = total + loss.detach()
        if clip:
            torch.nn.utils.clip_grad_norm_(trained, clip)
        if not first and not captured:
            first.extend(p.grad.cpu().clone() for p in trained)
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(average.parameters(), model.parameters(), strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)
        optimizer.zero_grad()
        return total

    call = gt.compile(step) if captured else step
    losses = [float(call(batch.to(device))) for batch in batches]
    return losses, first, [p.detach().cpu() for p in average.parameters()]


@pytest.fixture(scope="module")
def reference():
    """The same in one process, by kind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # ops this small are slower in several
    trained = {kind: train(kind) for kind in KINDS}
    torch.set_num_threads(threads)
    return trained


CASES = [
    *[(workers, stage, kind, False) for workers in (2, 4, 8) for stage in (0, 1, 2, 3) for kind in ("foreach",)],
    *[(2, stage, kind, False) for stage in (1, 3) for kind in ("sgd", "momentum", "adamw", "fused")],
    *[(4, stage, "fused", True) for stage in (1, 2, 3)],
    (2, 3, "momentum", True),
    (1, 1, "foreach", False), (1, 3, "fused", False), (1, 3, "fused", True),
]  # fmt: skip


# Stages 0 to 2 on four and eight workers have the code of two; stage 3 there has parts of which some are empty
LONG = {*[(workers, stage, "foreach", False) for workers in (4, 8) for stage in (0, 1, 2)]}
LONG |= {(4, stage, "fused", True) for stage in (1, 2)}


@pytest.mark.parametrize(("workers", "stage", "kind", "captured"), longer(CASES, [case for case in CASES if case not in LONG]))
def test_losses_and_gradients_are_those_of_one_process(session, reference, workers, stage, kind, captured):
    session(f"gt: {{data_parallel: {[*range(workers)]}, zero: {stage}}}")
    losses, first, _ = train(kind, "remote", captured)
    want, gradients, _ = reference[kind]
    assert losses == pytest.approx(want, abs=CLOSE)
    for got, expected in zip(first, gradients, strict=not captured):
        # a gradient that is zero but for rounding (of a bias before a norm) has no norm to compare with
        assert float((got - expected).norm()) <= max(CLOSE * float(expected.norm()), 1e-8)


# ---- memory, as workers count it

WIDE, LAYERS = 256, 4
NUMBERS = LAYERS * WIDE * (WIDE + 1)  # elements of the weights below, of 4 bytes each


def held(workers):
    """Bytes of tensors on each worker, once everything that has ended is freed."""
    return [row["live_bytes"] for row in settled()["workers"][:workers]]


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_is_that_of_theory(session, workers, stage):
    """After a step and before the next, with gradients: weights, gradients and two moments of AdamW."""
    session(f"gt: {{data_parallel: {[*range(workers)]}, zero: {stage}}}")
    model = nn.Sequential(*[nn.Linear(WIDE, WIDE) for _ in range(LAYERS)]).to("remote")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(8, WIDE).to("remote")).square().mean().backward()
        before_the_step = held(workers)
        optimizer.step()
    psi, part = 4 * NUMBERS, 1 if stage == 0 else workers
    # whole copies of weights for the last two of four layers in stage 3, of all in 1 and 2; terms of gradients in 1
    copies = {0: 0, 1: psi, 2: psi, 3: psi // 2}[stage]
    terms = psi if stage < 2 else psi // part
    for nbytes in before_the_step:
        assert nbytes <= 1.05 * (3 * psi / part + terms + copies)
    for nbytes in held(workers):
        assert nbytes == pytest.approx(4 * psi / part, rel=0.05)
    sharding = gt.stats().get("sharding", {})
    assert len(sharding.get("workers", ())) == (workers if stage else 0)
    for row in sharding.get("workers", ()):
        assert [row[kind] for kind in ("weights", "gradients")] == [psi / part] * 2
        assert row["optimizer"] == 2 * psi / part == row["theory"]["optimizer"] and row["theory"]["weights"] == psi / part
        assert row["theory"]["gradients"] == (psi if stage < 2 else psi / part)


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_in_mixed_precision_is_that_of_theory(session, workers, stage):
    """Only fp32 pieces are left: the bf16 casts end with the graph that uses them."""
    session(f"gt: {{data_parallel: {[*range(workers)]}, zero: {stage}, precision: bf16}}")
    model = nn.Sequential(*[nn.Linear(WIDE, WIDE) for _ in range(LAYERS)]).to("remote")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(8, WIDE).to("remote")).float().square().mean().backward()
        optimizer.step()
    for nbytes in held(workers):
        assert nbytes == pytest.approx(4 * 4 * NUMBERS / workers, rel=0.05)
