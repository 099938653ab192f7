"""Casts of gradients moved up behind what makes the gradients: no further, and only where something waits for them."""

from __future__ import annotations

import random

import pytest

from gt.dispatcher.programs.passes.advance_casts import advance_casts
from gt.dispatcher.programs.recording import Instruction, Recording
from gt.ir.instr import Define
from tests.dispatcher.programs.passes import passed
from tests.dispatcher.programs.passes.test_advance_host_steps import EVICT, step
from tests.dispatcher.programs.passes.test_bucket_reductions import ADD, ADD_, VIEW, op, reduce

CAST = op(50, "aten._to_copy.default", 1, ["new", [[8], [1], 0, "float32"], -1])
SCALE = op(51, "aten.mul.Tensor", 2, ["new", [[8], [1], 0, "float32"], -1])
READ = op(52, "aten.neg.default", 1, ["new", [[8], [1], 0, "float32"], -1])


def recording(*rows: tuple[Define, list[int]], workers: int = 1) -> Recording:
    code = {w: [Instruction(n, define, list(ids)) for n, (define, ids) in enumerate(rows)] for w in range(workers)}
    return Recording(0, [], {}, code=code)


def order(*rows: tuple[Define, list[int]]) -> list[list[int]]:
    result, about = passed(recording(*rows, workers=2), advance_casts)
    assert not about.rejected
    return [row.operands for row in result.code[0]]


SUM = reduce(40, (0, 1), 0)
# gradients 12 and 11 of parameters 2 and 1; 30 is the gradient for the layer before
BACKWARD = [(ADD, [5, 6, 12]), (ADD, [12, 2, 30]), (ADD, [30, 6, 11])]


def test_a_cast_that_a_reduction_waits_for_follows_its_gradient():
    assert order(*BACKWARD, (CAST, [12, 22]), (CAST, [11, 21]), (SUM, [22]), (SUM, [21])) == [
        [5, 6, 12], [12, 22], [12, 2, 30], [30, 6, 11], [11, 21], [22], [21],
    ]  # fmt: skip


def test_a_factor_of_a_loss_scale_goes_along():
    assert order(*BACKWARD, (CAST, [12, 22]), (SCALE, [22, 60, 32]), (SUM, [32]))[:3] == [[5, 6, 12], [12, 22], [22, 60, 32]]


@pytest.mark.parametrize(
    ("between", "place"),
    [
        pytest.param([(ADD_, [12, 11])], 4, id="the gradient changes later"),
        pytest.param([(VIEW, [12, 70]), (ADD_, [70, 5])], 5, id="by a view"),
        pytest.param([(READ, [12, 71])], 1, id="it is only read"),
    ],
)
def test_a_cast_stays_behind_all_that_changes_its_gradient(between: list, place: int):
    rows = [*BACKWARD, *between, (READ, [5, 72]), (CAST, [12, 22]), (SUM, [22])]
    assert order(*rows).index([12, 22]) == place


def test_what_more_than_reductions_and_steps_read_stays():
    rows = [*BACKWARD, (CAST, [12, 22]), (READ, [22, 80]), (SUM, [22])]
    assert order(*rows) == [ids for _, ids in rows]


def test_a_sum_of_activations_has_no_step_wait_for_casts():
    """A tensor-parallel layer's sum is no gradient's: the step on the device follows the backward pass in any case."""
    device = Define(31, "op", {k: v for k, v in step(1).payload.items() if k != "fresh"})
    same = recording(*BACKWARD, (SUM, [30]), (CAST, [12, 22]), (device, [2, 22, 40]), workers=2)
    assert passed(same, advance_casts)[0] is same


def test_without_reductions_or_offloaded_state_nothing_is_done():
    device = Define(31, "op", {k: v for k, v in step(1).payload.items() if k != "fresh"})
    rows = [*BACKWARD, (CAST, [12, 22]), (device, [2, 22, 40])]
    same = recording(*rows)
    assert passed(same, advance_casts)[0] is same
    moved, _ = passed(recording(*rows, (EVICT, [40])), advance_casts)
    assert [row.operands for row in moved.code[0]][1] == [12, 22]


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_keep_their_values(seed: int):
    """The verifier takes each result; every instruction is there once."""
    rng = random.Random(seed)
    alive, rows, fresh = [5, 6], [], 100
    for _ in range(rng.randint(5, 40)):
        kind = rng.choice((ADD, ADD, ADD_, VIEW, CAST, CAST, SCALE, SUM, READ))
        count = {ADD: 2, ADD_: 2, SCALE: 2}.get(kind, 1)
        ids = [rng.choice(alive) for _ in range(count)]
        if kind not in (ADD_, SUM):
            fresh += 1
            ids.append(fresh)
            alive.append(fresh)
        rows.append((kind, ids))
    rows.append((SUM, [alive[-1]]))
    made = order(*rows)
    assert sorted(made) == sorted(ids for _, ids in rows)
