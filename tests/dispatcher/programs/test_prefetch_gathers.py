"""Gathers of parameters ahead of their use, and reductions as soon as terms are complete: the order of a step's rows."""

from __future__ import annotations

import random

import pytest

from gt.dispatcher.programs.passes.prefetch_gathers import prefetch_gathers
from gt.dispatcher.programs.recording import Instruction, Recording
from gt.ir.instr import Define
from tests.dispatcher.programs.test_bucket_all_reduces import ADD, ADD_, VIEW
from tests.helpers.passes import passed

TEAM = {"id": 1, "workers": [0, 1], "rank": 0}
HALVES = [[[[0, 4]]], [[[4, 8]]]]
ALIAS = Define(52, "alias", {})


def gather(elements: int = 8) -> Define:
    payload = {"team": TEAM, "shape": [elements], "dtype": "float32", "boxes": HALVES}
    return Define(50 + elements, "all_gather", payload)


SCATTER = Define(51, "reduce_scatter", {"team": TEAM, "op": "sum", "shape": [8], "dtype": "float32", "boxes": HALVES})


def ordered(*rows: tuple[Define, list[int]], **chosen: bool) -> tuple[list[list[int]], dict[str, str]]:
    """Operands of the rows in the order of the pass, and what was rejected."""
    code = {w: [Instruction(n, define, list(ids)) for n, (define, ids) in enumerate(rows)] for w in (0, 1)}
    result, about = passed(Recording(0, [], {}, code=code), prefetch_gathers, **{"sharded": True, **chosen})
    return [row.operands for row in result.code[0]], about.rejected


def test_a_weight_is_gathered_while_the_one_before_is_used():
    rows = [
        (gather(), [1, 11]),
        (ADD, [9, 11, 21]),
        (gather(), [2, 12]),
        (ADD, [21, 12, 22]),
        (gather(), [3, 13]),
        (ADD, [22, 13, 23]),
    ]
    order, rejected = ordered(*rows)
    assert not rejected
    assert order == [[1, 11], [2, 12], [9, 11, 21], [3, 13], [21, 12, 22], [22, 13, 23]]
    assert ordered(*rows, sharded=False)[0] == [ids for _, ids in rows]


def test_small_copies_are_gathered_ahead_up_to_the_bytes_of_the_largest():
    rows = [
        (gather(16), [1, 11]),
        (ADD, [9, 11, 21]),
        *[(gather(4), [n, 10 + n]) for n in (2, 3, 4, 5, 6)],
        (ADD, [21, 12, 22]),
    ]
    order, _ = ordered(*rows)
    assert order.index([9, 11, 21]) == 5  # behind the large copy and four small ones, which are 16 elements too


def test_a_weight_is_not_gathered_before_it_is_written():
    rows = [(gather(), [1, 11]), (ADD, [9, 11, 21]), (ADD_, [2, 21]), (gather(), [2, 12]), (ADD, [21, 12, 22])]
    assert ordered(*rows)[0] == [ids for _, ids in rows]


def test_terms_are_added_up_as_soon_as_they_are_complete():
    rows = [
        (ADD, [1, 2, 30]), (VIEW, [30, 31]), (ADD_, [30, 1]), (ADD, [1, 2, 40]), (ADD, [40, 2, 41]),
        (SCATTER, [30, 50]), (ALIAS, [50, 30]), (VIEW, [30, 31]), (ADD_, [5, 31]),
    ]  # fmt: skip
    order, rejected = ordered(*rows)
    assert not rejected
    assert order == [[1, 2, 30], [30, 31], [30, 1], [30, 50], [50, 30], [30, 31], [1, 2, 40], [40, 2, 41], [5, 31]]


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_keep_their_data_flow(seed):
    """The pass manager verifies each result: nothing is rejected."""
    draw, rows, fresh = random.Random(seed), [], iter(range(100, 1000))
    alive = [1, 2, 3]
    for _ in range(60):
        kind = draw.choice(["gather", "add", "write", "terms"])
        if kind == "gather":
            rows.append((gather(draw.choice([4, 8, 16])), [draw.choice([1, 2, 3]), next(fresh)]))
            alive.append(rows[-1][1][1])
        elif kind == "write":
            rows.append((ADD_, [draw.choice([1, 2, 3]), draw.choice(alive)]))
        else:
            rows.append((ADD, [draw.choice(alive), draw.choice(alive), next(fresh)]))
            made = rows[-1][1][2]
            if kind == "terms":
                piece, view = next(fresh), next(fresh)
                rows += [(ADD, [1, 2, next(fresh)]), (SCATTER, [made, piece]), (ALIAS, [piece, made]), (VIEW, [made, view])]
            alive.append(made)
    order, rejected = ordered(*rows)
    assert not rejected and sorted(order) == sorted(ids for _, ids in rows)
