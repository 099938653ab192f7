"""Gathers of parameters ahead of their use, and reductions as soon as terms are complete: the order of a step's rows."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gt.dispatcher.programs.pass_manager import run_passes
from gt.dispatcher.programs.passes import prefetch_gathers as module
from gt.dispatcher.programs.passes.bucket_reductions import bucket_reductions
from gt.dispatcher.programs.passes.prefetch_gathers import prefetch_gathers
from gt.dispatcher.programs.recording import Instruction, Recording
from gt.ir.instr import Define
from tests.dispatcher.programs.passes import context
from tests.dispatcher.programs.passes.test_bucket_reductions import ADD, ADD_, ALIAS, HALVES, SCATTER, TEAM, VIEW


def gather(elements: int = 8) -> Define:
    payload = {"team": TEAM, "shape": [elements], "dtype": "float32", "boxes": HALVES}
    return Define(50 + elements, "all_gather", payload)


@pytest.fixture(autouse=True)
def no_least(monkeypatch):
    """The largest weight alone says how many bytes are gathered ahead."""
    monkeypatch.setattr(module, "LEAST_AHEAD", 0)


def ordered(*rows: tuple[Define, list[int]], **chosen: Any) -> tuple[list[list[int]], dict[str, str]]:
    """Operands of the rows in the order of the passes, and what was rejected."""
    code = {w: [Instruction(n, define, list(ids)) for n, (define, ids) in enumerate(rows)] for w in (0, 1)}
    about = context(**{"sharded": True, **chosen})
    result = run_passes(Recording(0, [], {}, code=code), about, (prefetch_gathers, bucket_reductions))
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


def test_a_layers_weights_are_gathered_at_one_place():
    """Each place with a transfer ends what workers compile as one."""
    weights = {n: 16 if n == 1 else 8 for n in range(1, 8)}
    rows = [row for n, size in weights.items() for row in ((gather(size), [n, 10 + n]), (ADD, [9, 10 + n, 20 + n]))]
    uses = {n: [9, 10 + n, 20 + n] for n in weights}
    groups = [[[n, 10 + n] for n in group] for group in ((2, 3), (4, 5), (6, 7))]
    order = [[1, 11], *groups[0], uses[1], *groups[1], uses[2], uses[3], *groups[2], *(uses[n] for n in (4, 5, 6, 7))]
    assert ordered(*rows)[0] == order


def test_a_weight_is_not_gathered_before_it_is_written():
    rows = [(gather(), [1, 11]), (ADD, [9, 11, 21]), (ADD_, [2, 21]), (gather(), [2, 12]), (ADD, [21, 12, 22])]
    assert ordered(*rows)[0] == [ids for _, ids in rows]


def test_small_weights_are_gathered_ahead_together(monkeypatch):
    monkeypatch.setattr(module, "LEAST_AHEAD", 3 * 32)
    monkeypatch.setattr(module, "AHEAD_SHARE", 1)
    rows = [row for n in range(4) for row in ((gather(), [1 + n, 11 + n]), (ADD, [9, 11 + n, 21 + n]))]
    assert ordered(*rows)[0] == [[1, 11], [2, 12], [3, 13], [4, 14], *([9, 11 + n, 21 + n] for n in range(4))]


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
    order, rejected = ordered(*rows, bucket=draw.choice([1, 64, 1 << 20]))
    assert not rejected and sorted(order) == sorted(ids for _, ids in rows)
