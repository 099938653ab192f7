"""A head split over its vocabulary, tied or not: torch's loss and gradients, and no scores that are gathered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gt
from tests.helpers.serving import settled

VOCABULARY, WIDTH, BATCH, LENGTH, SKIPPED = 50257, 8, 4, 64, -100  # a vocabulary that nothing divides


def stage(name: str, workers: str) -> str:
    return "".join(f"{name}{suffix}: {{workers: {workers}}}\n" for suffix in ("", "_colpar", "_rowpar"))


# signal groups, and of which the look-up, the middle and the head are
PLACES = {
    "tp2": (stage("a", "[0, 1]"), "aaa"),
    "tp4": (stage("a", "[0, 1, 2, 3]"), "aaa"),
    "dp2tp2": (stage("a", "[[0, 1], [2, 3]]"), "aaa"),
    "tp2pp2": (stage("a", "[0, 1]") + stage("b", "[2, 3]"), "abb"),
    "a head over the workers of both stages": (stage("a", "[0]") + stage("b", "[1]") + stage("c", "[0, 1]"), "abc"),
}


class Tiny(nn.Module):
    """A language model of almost nothing but its vocabulary."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.3)
        self.head = self.table if tied else nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.3)
        self.position, self.middle = (nn.Parameter(torch.randn(n, WIDTH) * 0.3) for n in (LENGTH, WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor, groups: str, smoothing: float = 0.0) -> torch.Tensor:
        first, middle, last = groups
        with gt.signal.context(f"{first}_rowpar"):
            h = F.embedding(x, self.table)
        with gt.signal.context(first):
            h = h + self.position
        with gt.signal.context(middle):
            h = h + torch.tanh(h @ self.middle)
        with gt.signal.context(f"{last}_colpar"):
            scores = F.linear(h, self.head)
        with gt.signal.context(last):
            return F.cross_entropy(scores.view(-1, VOCABULARY), y.view(-1), ignore_index=SKIPPED, label_smoothing=smoothing)


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randint(VOCABULARY, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
    y[0, :5], y[-1, :7] = SKIPPED, 0
    return x, y


def trained(device: str, groups: str, tied: bool, capture: bool = False, steps: int = 2, smoothing: float = 0.0) -> list:
    torch.manual_seed(0)
    model = Tiny(tied).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x, y, groups, smoothing)
        loss.backward()
        optimizer.step()
        return loss

    run = gt.compile(step) if capture else step
    losses = [run(*(t.to(device) for t in data(n))).detach().cpu() for n in range(steps)]
    return [*losses, *(p.grad.cpu() for p in model.parameters()), *(p.detach().cpu() for p in model.parameters())]


@pytest.fixture(scope="module")
def wanted() -> dict[bool, list]:
    return {tied: trained("cpu", "aaa", tied) for tied in (True, False)}


def gathers() -> int:
    return sum(worker["collectives"].get("all_gather", 0) for worker in settled()["workers"])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_a_split_vocabulary_trains_as_torch_does(place: str, tied: bool, session: Callable[..., None], wanted: dict) -> None:
    config, groups = PLACES[place]
    session(config)
    before = gathers()
    got = trained("remote", groups, tied)
    assert gathers() == before
    for a, b in zip(got, wanted[tied], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-7)


def test_losses_of_a_split_vocabulary_are_the_same_from_run_to_run(session: Callable[..., None]) -> None:
    session(PLACES["tp4"][0])
    first, second = (trained("remote", "aaa", True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_labels_are_smoothed_over_a_split_vocabulary(session: Callable[..., None]) -> None:
    session(PLACES["tp4"][0])
    before = gathers()
    got = trained("remote", "aaa", True, smoothing=0.1)
    assert gathers() == before
    for a, b in zip(got, trained("cpu", "aaa", True, smoothing=0.1), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("place", ["tp2pp2", "a head over the workers of both stages"])
def test_a_tied_head_of_another_stage_gets_each_workers_part_of_the_table_alone_and_once(place: str, tmp_path: Path) -> None:
    config, groups = PLACES[place]
    path = tmp_path / "sharding.yaml"
    path.write_text(config)
    rows = gt.plan(lambda: trained("remote", groups, True), config=str(path)).body["transfers"]
    tables = f"[{VOCABULARY},{WIDTH}]", f"[{WIDTH},{VOCABULARY}]"
    moved = [row["plan"] for row in rows if any(table in row["plan"] for table in tables)]
    home = "a_to_c on 0,1" if "c" in groups else "a_to_b on 2,3"
    assert len(moved) == 2 and "[S(0)]" in moved[0] and home in moved[0], moved
    assert ("[] = c_to_a on 0 " if "c" in groups else "[S(0)] = b_to_a on 0,1 ") in moved[1], moved


@pytest.mark.parametrize("place", ["dp2tp2", "tp2pp2"])
def test_a_captured_step_of_a_split_vocabulary_is_the_same(place: str, session: Callable[..., None]) -> None:
    config, groups = PLACES[place]
    session(config)
    got, want = (trained("remote", groups, True, capture, 5) for capture in (True, False))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def hooked(device: str, change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Loss, and gradient of scores, those of log-probabilities being changed on their way."""
    torch.manual_seed(1)
    h, head, y = torch.randn(256, WIDTH), torch.randn(WIDTH, VOCABULARY), torch.randint(VOCABULARY, (256,))
    head = nn.Parameter(head.to(device))
    with gt.signal.context("a_colpar"):
        scores = h.to(device) @ head
    scores.retain_grad()
    with gt.signal.context("a"):
        logs = F.log_softmax(scores, -1)
        logs.register_hook(change)
        loss = F.nll_loss(logs, y.to(device))
    loss.backward()
    return [loss.detach().cpu(), scores.grad.cpu()]


@pytest.mark.parametrize("change", [lambda g: g.mul_(2.0), lambda g: g * 3.0, lambda g: None], ids=["in place", "new", "not"])
def test_a_gradient_that_a_hook_changes_has_its_own_sums(change: Callable, session: Callable[..., None]) -> None:
    session(PLACES["tp2"][0])
    for a, b in zip(hooked("remote", change), hooked("cpu", change), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-9)


def test_nothing_is_left_of_a_step(session: Callable[..., None]) -> None:
    session(PLACES["dp2tp2"][0])

    def left() -> int:
        return max(worker["live_tensors"] for worker in settled()["workers"][:4])

    for _ in range(2):
        trained("remote", "aaa", True, steps=1)
    assert left() < 2


def in_schedule(schedule: str, groups: str) -> tuple[list[float], str]:
    """Losses of steps of two micro-batches, and what became of the schedule; "": op by op."""
    torch.manual_seed(0)
    model = Tiny(True).to("remote")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device="remote")
        for some, labels in gt.microbatches((x, y), 2):
            loss = model(some, labels, groups) / 2
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    run = gt.compile(step, schedule=schedule) if schedule else step
    losses = [run(*(t.to("remote") for t in data(n))).item() for n in range(4)]
    return losses, str(run.explain()) if schedule else ""  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_pipeline_whose_last_stage_splits_its_vocabulary_is_scheduled(schedule: str, session: Callable[..., None]) -> None:
    config, groups = PLACES["tp2pp2"]
    session(config)
    (got, said), (want, _) = in_schedule(schedule, groups), in_schedule("", groups)
    assert "is not used" not in said, said
    assert got == want


@pytest.mark.filterwarnings("ignore:.*is not used")
def test_a_head_over_the_workers_of_all_stages_is_captured_in_the_calls_order(session: Callable[..., None]) -> None:
    config, groups = PLACES["a head over the workers of both stages"]
    session(config)
    (got, _), (want, _) = in_schedule("1f1b", groups), in_schedule("", groups)
    assert got == want
