"""Captured steps in every schedule: the bits of eager mode, actions in the schedule's order, memory as it says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gt
from tests.helpers import CONFIGS, longer
from tests.helpers.models import accumulating, mini
from tests.helpers.serving import settled

CALLS, PARTS = 5, 4


def stages(*workers: int) -> str:
    """A config with these stages."""
    return "".join(f"pp_stage{n}: {{shard: {{axis: 0, workers: [{w}]}}}}\n" for n, w in enumerate(workers))


@pytest.fixture(scope="module")
def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(64, (CALLS, 8, 17))
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]


def trained(data: list, compile: Callable[[Callable], Callable]) -> tuple[Any, list[torch.Tensor]]:
    """A plain loop over micro-batches; the step, then losses and weights."""
    torch.manual_seed(0)
    gt.manual_seed(0)
    model = mini(gt.signal.groups()).to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = accumulating(model, optimizer, PARTS)
    run = compile(step)
    losses = [run(x, y) if run is not step else step(x.to("remote"), y.to("remote")) for x, y in data]
    return run, [t.detach().cpu() for t in (*losses, *model.parameters())]


@pytest.fixture(scope="module")
def eager(data: list) -> Callable[[str], list[torch.Tensor]]:
    """Losses and weights of eager mode by config, the same for all of its schedules: trained in the first one's session."""
    return functools.cache(lambda config: trained(data, lambda step: step)[1])


WIDTHS = {"tp2pp2": 2, "dp2pp2": 2, "dp2tp2pp2": 4}  # workers of a stage
CASES = [
    *[(config, name) for config in ("pp2", "pp4", "tp2pp2", "dp2pp2") for name in ("gpipe", "1f1b", "zb-h1")],
    *[(stages(0, 1, 0, 1), name) for name in ("interleaved", "gpipe", "auto")],
    (stages(0, 1, 1, 0), "zb-v"),
    ("dp2tp2pp2", "zb-h1"),
]
# Every schedule, and stages on several workers of each kind; more stages and other pairs repeat the same code
KEPT = [
    *[("pp2", name) for name in ("gpipe", "1f1b", "zb-h1")],
    *[(stages(0, 1, 0, 1), name) for name in ("interleaved", "auto")],
    (stages(0, 1, 1, 0), "zb-v"),
    ("tp2pp2", "1f1b"),
    ("dp2pp2", "zb-h1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "name"), longer(CASES, KEPT))
@pytest.mark.usefixtures("plain_threads", "session")
def test_every_schedule_has_the_bits_of_eager_mode(
    config: str, name: str, session: Callable, data: list, eager: Callable[[str], list[torch.Tensor]]
) -> None:
    session(config if "\n" in config else CONFIGS / f"{config}.yaml")
    want = eager(config)
    run, got = trained(data, lambda step: gt.compile(step, schedule=name))
    (program,) = run._programs
    order = program.answer["schedule"]
    assert program.replays >= CALLS - 3 and not order["why"], run.explain()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    planned = [line.split(",") for line in order["rows"].split()]
    count = len(planned) * WIDTHS.get(config, 1)  # of this session
    ran = [[row[0] for row in worker["actions"]] for worker in settled()["workers"]][:count]
    assert all(ran.count(row) == count // len(planned) for row in planned), ran


@pytest.mark.slow
@pytest.mark.usefixtures("plain_threads", "session")
def test_a_step_without_stages_says_so(session: Callable, data: list, caplog: pytest.LogCaptureFixture) -> None:
    session(CONFIGS / "tp2.yaml")
    _, want = trained(data, lambda step: step)
    run, got = trained(data, lambda step: gt.compile(step, schedule="1f1b"))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert "schedule 1f1b is not used: all groups run on the same workers" in caplog.text
    assert "so there is one stage" in run.explain()


def chain(session: Callable, prepare: Callable[[torch.nn.ModuleList], Any], schedule: str) -> tuple[list, list, Any]:
    """Losses and state of two layers in two stages, trained eagerly and in a schedule. prepare: changes the layers first."""
    session(stages(0, 1))
    outcomes, run = [], None
    for compiled in (False, True):
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Conv2d(2, 2, 3, padding=1), torch.nn.BatchNorm2d(2), torch.nn.Tanh()) for _ in range(2)
        ).to("remote")
        prepare(layers)
        optimizer = torch.optim.SGD([p for p in layers.parameters() if p.requires_grad], lr=0.1)

        def step(x: torch.Tensor, layers=layers, optimizer=optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), device="remote")
            for part in gt.microbatches(x, PARTS):
                for n, layer in enumerate(layers):
                    with gt.signal.context(f"pp_stage{n}"):
                        part = layer(part)
                loss = part.square().mean()
                loss.backward()
                total += loss.detach()
            optimizer.step()
            return total

        run = gt.compile(step, schedule=schedule) if compiled else step
        losses = [run(x.to("remote")) for x in torch.randn(CALLS, 8, 2, 4, 4)]
        outcomes.append([t.detach().cpu() for t in (*losses, *layers.state_dict().values())])
    return *outcomes, run


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.usefixtures("plain_threads")
def test_batch_norms_train_in_a_schedule(schedule: str, session: Callable) -> None:
    want, got, run = chain(session, lambda layers: None, schedule)
    assert not run._programs[0].answer["schedule"]["why"], run.explain()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "auto"])
@pytest.mark.usefixtures("plain_threads")
def test_the_backward_pass_may_end_before_frozen_stages(schedule: str, session: Callable) -> None:
    want, got, run = chain(session, lambda layers: layers[0].requires_grad_(False), schedule)
    assert not run._programs[0].answer["schedule"]["why"], run.explain()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_group_that_a_pass_enters_twice_is_told_with_its_lines(session: Callable, caplog: pytest.LogCaptureFixture) -> None:
    session(stages(0, 1))
    weights = [torch.ones(4, 4).to("remote").requires_grad_() for _ in range(2)]

    @gt.compile(schedule="1f1b")
    def step(x: torch.Tensor) -> None:
        for part in gt.microbatches(x, PARTS):
            with gt.signal.context("pp_stage0"):
                hidden = part @ weights[0]
            with gt.signal.context("pp_stage1"):
                mask = (part > 0).float()
            with gt.signal.context("pp_stage0"):
                hidden = hidden * mask
            with gt.signal.context("pp_stage1"):
                loss = (hidden @ weights[1]).sum()
            loss.backward()

    for _ in range(4):
        step(torch.ones(8, 4))
    first = step.__wrapped__.__code__.co_firstlineno
    visits = [(0, "mm", 4), (1, "gt", 6), (0, "mul", 8), (1, "mm", 10)]
    entered = " -> ".join(f"pp_stage{n} ({op} at test_compile_schedules.py:{first + line})" for n, op, line in visits)
    assert f"The forward pass enters {entered}. Enter each group once in a micro-batch" in caplog.text


@pytest.mark.usefixtures("plain_threads")
def test_stage_3_of_zero_says_that_the_config_has_to_name_the_schedule(session: Callable) -> None:
    def explained(settings: str) -> str:
        session(f"pp_stage0: {{workers: [0, 1]}}\npp_stage1: {{workers: [2, 3]}}\ngt: {{{settings}}}\n")
        weights = [torch.ones(4, 4).to("remote").requires_grad_() for _ in range(4)]

        @gt.compile(schedule="1f1b")
        def step(x: torch.Tensor) -> None:
            for part in gt.microbatches(x, 2):
                for n in range(4):
                    with gt.signal.context(f"pp_stage{n // 2}"):
                        part = torch.tanh(part @ weights[n])
                part.sum().backward()
            with torch.no_grad():
                for w in weights:
                    w.sub_(w.grad)
                    w.grad = None

        for _ in range(4):
            step(torch.ones(8, 4))
        return step.explain()

    assert "write schedule: 1f1b below gt: in the config" in explained("zero: 3")
    assert "schedule 1f1b: 2 stages, 2 micro-batches" in explained("zero: 3, schedule: 1f1b")


def test_a_schedule_that_is_none_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match=r"'1f2b' is not known: want one of gpipe, 1f1b"):
        gt.compile(lambda: None, schedule="1f2b")


@pytest.mark.slow
@pytest.mark.usefixtures("plain_threads", "session")
def test_large_messages_and_unlike_stages_do_not_block_one_another(session: Callable) -> None:
    """Activations of many slots, sent both ways at once, on stages of very different cost."""
    session(stages(0, 1, 2, 3))
    torch.manual_seed(0)
    widths = [1, 4, 1, 2]
    weights = [torch.randn(64, 64) / 10 for _ in range(sum(widths))]
    batch = torch.randn(65536, 64)  # messages of 2 MiB; narrow, so that the products cost little

    def train(name: str | None) -> list[torch.Tensor]:
        held = [torch.nn.Parameter(w.to("remote")) for w in weights]

        def step(x: torch.Tensor) -> torch.Tensor:
            for w in held:
                w.grad = None
            total = torch.zeros((), device="remote")
            for part in gt.microbatches(x, 8):
                rest = iter(held)
                for n, depth in enumerate(widths):
                    with gt.signal.context(f"pp_stage{n}"):
                        for _ in range(depth):
                            part = torch.tanh(part @ next(rest))
                        if n == 3:
                            loss = part.square().mean()
                loss.backward()
                total = total + loss.detach()
            return total

        run = gt.compile(step, schedule=name) if name else step
        losses = [run(batch if name else batch.to("remote")) for _ in range(4)]
        if name:
            assert not run._programs[0].answer["schedule"]["why"]
        return [t.detach().cpu() for t in (*losses, *[w.grad for w in held])]

    want = train(None)
    for name in ("gpipe", "1f1b", "zb-h1"):
        for a, b in zip(train(name), want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.usefixtures("plain_threads", "session")
def test_a_weight_that_two_stages_share_is_sent_once_a_step(name: str, session: Callable) -> None:
    session(stages(0, 1))
    torch.manual_seed(0)
    start, between = torch.randn(24, 8), torch.randn(8, 8)
    batches = torch.randint(24, (CALLS, 8, 4))

    def train(name: str | None) -> tuple[Any, list[torch.Tensor]]:
        held = [torch.nn.Parameter(w.to("remote")) for w in (start, between)]
        tied, weight = held
        optimizer = torch.optim.SGD(held, lr=0.1)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), device="remote")
            for part in gt.microbatches(tokens, PARTS):
                with gt.signal.context("pp_stage0"):
                    x = torch.tanh(torch.nn.functional.embedding(part, tied) @ weight)
                with gt.signal.context("pp_stage1"):
                    loss = torch.nn.functional.linear(x, tied).flatten(0, 1).square().mean()
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            return total

        run = gt.compile(step, schedule=name) if name else step
        losses = [run(tokens if name else tokens.to("remote")) for tokens in batches]
        return run, [t.detach().cpu() for t in (*losses, *held)]

    def sent() -> int:
        first, second = settled()["workers"][:2]
        return first["bytes_sent"].get(second["name"], 0)

    _, want = train(None)
    run, got = train(name)
    assert not run._programs[0].answer["schedule"]["why"], run.explain()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    before = sent()
    run(batches[0]).item()
    assert sent() - before == 4 * (24 * 8 + 8 * 4 * 8)  # the weight, and the activations of the whole batch


@pytest.mark.usefixtures("plain_threads", "session")
def test_backward_may_come_after_the_loop_and_a_stage_may_begin_and_end_with_a_matmul(session: Callable) -> None:
    """Two data-parallel stages: what one gets of the other is used in views (x.t(), dy.t()) of it."""
    session("stage0: {workers: [0, 1]}\nstage1: {workers: [2, 3]}\n")
    torch.manual_seed(0)
    weights, batch = [torch.randn(8, 8) / 3 for _ in range(3)], torch.randn(16, 8)

    def train(device: str, name: str | None) -> list[torch.Tensor]:
        held = [torch.nn.Parameter(w.clone().to(device)) for w in weights]

        def step(x: torch.Tensor) -> torch.Tensor:
            losses = []
            for part in gt.microbatches(x, 4):
                with gt.signal.context("stage0"):
                    part = torch.nn.functional.linear(part @ held[0], held[1])
                with gt.signal.context("stage1"):
                    losses.append((part @ held[2]).square().mean())
            for loss in losses:
                loss.backward()
            with torch.no_grad():
                for w in held:
                    w.sub_(w.grad, alpha=0.1)
                    w.grad = None
            return torch.stack([loss.detach() for loss in losses]).sum()

        run = gt.compile(step, schedule=name) if name else step
        losses = [run(batch if name else batch.to(device)) for _ in range(5)]
        if name:
            assert run._programs[0].replays and not run._programs[0].answer["schedule"]["why"], run.explain()
        return [t.detach().cpu() for t in (*losses, *held)]

    want, exact = train("cpu", None), train("remote", None)
    torch.testing.assert_close(exact, want, rtol=1e-5, atol=1e-6)
    for name in ("1f1b", "zb-h1"):
        for a, b in zip(train("remote", name), exact, strict=True):
            assert torch.equal(a, b), name
