"""Stages that several workers do together: whole rows in any placement, what a split head gains, and a step of such a model."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import gt
from gt.dispatcher.programs import programs
from gt.dispatcher.programs.pass_manager import run_passes
from gt.dispatcher.programs.passes.context import PassContext
from gt.dispatcher.programs.passes.pipeline import apply_schedule
from gt.dispatcher.programs.recording import Recording
from gt.dispatcher.schedule import Costs, ScheduleRequest, check, make, parse, simulate
from gt.dispatcher.schedule.placement import spread
from gt.errors import ConfigError
from tests.dispatcher.schedule.schedules import in_order, random_costs
from tests.helpers import longer
from tests.helpers.serving import serving, settled

NAMES = ("gpipe", "1f1b", "zb-h1", "auto")


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.sampled_from(NAMES), st.booleans(), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_rows_are_whole_and_end(p: int, more: int, m: int, name: str, backward: bool, seed: int) -> None:
    rng = random.Random(seed)
    where = [(w,) for w in range(p)] + [tuple(sorted(rng.sample(range(p), rng.randint(1, p)))) for _ in range(more)]
    where.append(tuple(range(p)))
    rng.shuffle(where)
    if all(len(some) == 1 for some in where):
        return
    costs = random_costs(rng, len(where), once=rng.random() < 0.5)
    made = make(ScheduleRequest(name, where, m, backward=backward), costs)
    assert made.name == name and made.workers == tuple(where)
    assert simulate(made.rows, costs).makespan > 0 or not sum(costs.forward + costs.input + costs.weight)
    plain = [[action for action in row if action.micro >= 0] for row in made.rows]
    assert in_order(replace(made, rows=plain)) and parse(str(made)) == made.rows
    if backward:
        check(made.rows, m)
    for kind, values in zip("LRO", (costs.loss, costs.reduce, costs.optimizer), strict=True):
        has = {(w, stage) for stage, value in enumerate(values) if value is not None for w in where[stage]}
        assert {(w, a.stage) for w, row in enumerate(made.rows) for a in row if a.kind == kind} == has


@given(st.integers(2, 4), st.integers(2, 8), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_a_limit_of_memory_is_kept_or_said(p: int, m: int, seed: int) -> None:
    rng = random.Random(seed)
    where = [*range(p), tuple(range(p))]
    costs = replace(random_costs(rng, p + 1), activation=(1.0,) * (p + 1), kept=(0.5,) * (p + 1))
    limit = rng.choice((2.0, 3.0, 5.0))
    try:
        made = make(ScheduleRequest("auto", where, m, limit=limit), costs)
    except ConfigError as error:
        assert "no schedule of" in str(error)
        return
    assert max(simulate(made.rows, costs).peak) <= limit * (1 + 1e-9)


def gpt2(layers: tuple[float, ...], head: float, split: bool, m: int) -> float:
    """The makespan of a step in units of one layer's forward; F, I and W take the same time."""
    p = len(layers)
    each = (*layers, head / p) if split else (*layers[:-1], layers[-1] + head)
    costs = Costs(each, each, each, (0.05,) * (len(each) - 1), (1.0,) * len(each), (1.0,) * len(each))
    where = [*range(p), *([tuple(range(p))] if split else [])]
    made = make(ScheduleRequest("zb-h1", where, m), costs)
    return simulate(made.rows, costs).makespan


def test_a_split_head_gains_what_docs_say() -> None:
    """docs/schedules.md: a head of 5.4 layers weighs more than a quarter of GPT-2 124M."""
    least = 8 * 3 * (12 + 5.4) / 4
    assert round(gpt2((4, 4, 4, 0), 5.4, False, 8) / least, 2) == 1.36
    assert round(gpt2((3, 3, 3, 3), 5.4, True, 8) / least, 2) == 1.09


@pytest.mark.parametrize(
    ("meshes", "rows"),
    [
        ([(0,), (1,), (0, 1)], [(0,), (1,), (0, 1)]),
        ([(0, 1), (2, 3), (0, 1, 2, 3)], [(0,), (1,), (0, 1)]),
        ([(2,), (0,), (2,)], [(0,), (1,), (0,)]),
        ([(0,), (1,), (1, 2)], [(0,), (1,), (2,)]),  # not all of its workers have a stage of their own
        ([(0, 1), (1, 2), (0, 1, 2)], [(0,), (1,), (2,)]),
    ],
)
def test_rows_that_a_stage_is_in(meshes: list, rows: list) -> None:
    assert spread(meshes) == rows


def test_schedules_that_want_one_worker_for_a_stage_say_so() -> None:
    with pytest.raises(ConfigError, match=r"zb-v wants .* stage 2 is on workers \[0, 1\] together: try gpipe or 1f1b or zb-h1"):
        make(ScheduleRequest("zb-v", [0, 1, (0, 1)], 4))


def test_a_missing_member_is_named() -> None:
    costs = Costs((1, 1), (1, 1), (1, 1), (0,), (1, 1), (1, 1))
    with pytest.raises(ConfigError, match=r"worker 0 is at 1F0 and waits for 1F0 of worker 1, worker 1 is at 1F1"):
        simulate(parse("0F0,1F0,0F1,1F1\n1F1,1F0"), costs)


# ---- a step


class Net(nn.Module):
    """A layer in each of these groups; the first has an embedding too, the last a head."""

    def __init__(self, groups: list[str], places: bool) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(64, 16), nn.LayerNorm(16), nn.Linear(16, 64, bias=False)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in groups)
        self.groups, self.places = groups, places

    def within(self, group: str) -> contextlib.AbstractContextManager:
        return gt.signal.context(group) if self.places else contextlib.nullcontext()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for n, (layer, group) in enumerate(zip(self.layers, self.groups, strict=True)):
            with self.within(group):
                x = self.embed(x) if n == 0 else x
                x = x + layer(x).tanh()
        with self.within(self.groups[-1]):
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), y.flatten())


def losses(groups: list[str], schedule: str | None, places: bool = True, clip: bool = False) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    model = Net(groups, places).to("remote" if places else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=x.device)
        for part in gt.microbatches((x, y), 4):
            loss = model(*part) / 4
            loss.backward()
            total = total + loss.detach()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return total

    run = gt.compile(step, schedule=schedule) if places else step
    torch.manual_seed(1)
    data = torch.randint(64, (6, 8, 9))
    return [run(x[:, :-1].contiguous(), x[:, 1:].contiguous()).item() for x in data], run


@pytest.fixture
def connected(tmp_path: Any) -> Iterator[Callable[[int], None]]:
    """Connects to so many workers in threads of this process; groups: stageN on one, the others on all of them."""
    with contextlib.ExitStack() as stack:

        def connect(p: int) -> None:
            rows = [f"stage{n}: {{workers: [{n}]}}" for n in range(p)]
            for name, axis in (("head_colpar", 1), ("embed", 0), ("all", 0)):
                rows.append(f"{name}: {{shard: {{axis: {axis}, workers: {[*range(p)]}}}}}")
            (tmp_path / "groups.yaml").write_text("\n".join(rows))
            gt.connect(stack.enter_context(serving(p, backend="torch")).address, config=str(tmp_path / "groups.yaml"))

        yield connect
        gt.shutdown()


def stages(p: int) -> list[str]:
    return [f"stage{n // 2}" for n in range(2 * p)]


@pytest.mark.parametrize(
    ("p", "groups", "clip"),
    longer(
        [
            (2, [*stages(2), "head_colpar"], False), (2, [*stages(2), "head_colpar"], True),
            (3, [*stages(3), "head_colpar"], False), (2, ["embed", *stages(2), "all"], False),
        ],
        [(2, [*stages(2), "head_colpar"], True), (2, ["embed", *stages(2), "all"], False)],
    ),
)  # fmt: skip
def test_a_step_with_shared_stages_is_plain_torchs(p: int, groups: list[str], clip: bool, connected: Callable) -> None:
    want, _ = losses(groups, None, places=False, clip=clip)
    connected(p)
    found = {}
    for name in (None, *NAMES):
        found[name], run = losses(groups, name, clip=clip)
        count = len(dict.fromkeys(groups))
        assert name is None or f"schedule {name}: {count} stages, 4 micro-batches; bubble" in run.explain(), run.explain()
        assert run._programs[0].replays >= 3, run.explain()
    assert all(one == found[None] for one in found.values())
    assert max(abs(a - b) / b for a, b in zip(found[None], want, strict=True)) < 1e-5
    said = settled()["schedule"]
    assert len(said["measured"]["bubble"]) == len(said["predicted"]["bubble"]) == p


@pytest.mark.parametrize(
    ("p", "groups"),
    [
        (2, ["stage0", "stage1", "head_colpar"]), (3, ["stage0", "stage1", "stage2", "head_colpar"]),
        (2, ["stage0", "stage1", "embed", "all"]), (2, ["embed", "stage0", "stage1", "head_colpar"]),
    ],
)  # fmt: skip
def test_whatever_stages_cost_their_workers_meet(
    p: int, groups: list[str], connected: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collectives of what several workers do are at one time on all of them, with a message before or behind it."""
    rng, said = random.Random(0), []

    def often(tape: Recording, context: PassContext) -> Recording:
        numbers = sorted({row.define.number for rows in tape.code.values() for row in rows})
        for n in range(24):
            drawn = {number: context.times.get(number, 1e-5) * 10 ** rng.uniform(-0.5, 0.5) for number in numbers}
            other = replace(context, asked=NAMES[n % len(NAMES)], times=drawn)
            run_passes(tape, other, (apply_schedule,))
            said.append(other.schedule["why"])
        return apply_schedule(tape, context)

    connected(p)
    monkeypatch.setattr(programs, "PASSES", (often,))
    losses(groups, "auto")
    assert len(said) >= 24 and not any(said), said
