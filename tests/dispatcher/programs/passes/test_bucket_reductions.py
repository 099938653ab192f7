"""Gradients reduced early: the same values, all workers meet, sums side by side are the same ones for all members."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gt.dispatcher.programs import codegen as writing
from gt.dispatcher.programs.pass_manager import run_passes
from gt.dispatcher.programs.passes import bucket_reductions as module
from gt.dispatcher.programs.passes.batch_collectives import batch_collectives
from gt.dispatcher.programs.passes.bucket_reductions import bucket_reductions
from gt.dispatcher.programs.passes.context import PassContext
from gt.dispatcher.programs.recording import Instruction, Recording
from gt.dispatcher.programs.reorder_check import check_no_deadlock
from gt.ir.instr import FREE, Define
from gt.ir.spec import contiguous
from gt.wire.messages import FinishCapture
from tests.dispatcher.programs.passes import context
from tests.helpers.limits import calls_of

SPEC = contiguous((8,), "float32").wire()  # 32 bytes


def op(number: int, name: str, tensors: int, out: list | None, writes: int = 0) -> Define:
    """writes: how many of its first tensors it changes in place."""
    outs = [] if out is None else [out]
    payload = {"op": name, "args": [], "kwargs": {}, "tensors": tensors, "values": 0, "outs": outs, "random": None}
    return Define(number, "op", {**payload, "writes": list(range(writes))})


ADD = op(10, "aten.add.Tensor", 2, ["new", SPEC, 0])
ADD_ = op(11, "aten.add_.Tensor", 2, ["same", SPEC, 0], 1)
VIEW = op(12, "aten.t.default", 1, ["view", SPEC, 0])
HALVES = [[[[0, 4]]], [[[4, 8]]]]
TEAM = {"id": 1, "workers": [0, 1], "rank": 0}
SCATTER = Define(51, "reduce_scatter", {"team": TEAM, "op": "sum", "shape": [8], "dtype": "float32", "boxes": HALVES})
ALIAS = Define(52, "alias", {})
MARK, PART = 98, 99


def listed(number: int, count: int) -> Define:
    """In place on each of so many tensors."""
    made = op(number, "aten._foreach_add_.Scalar", count, None, count)
    made.payload["args"] = [[{"t": n} for n in range(count)], 1]
    return made


LISTED = {count: listed(12 + count, count) for count in (2, 3)}


def reduce(number: int, workers: tuple[int, ...], rank: int) -> Define:
    return Define(number, "all_reduce", {"team": {"id": number, "workers": list(workers), "rank": rank}, "op": "sum"})


def define(kind: str, payload: dict) -> Define:
    return Define(MARK if kind == "together" else PART, kind, payload)


def bucketed(tape: Recording, **chosen: Any) -> tuple[Recording, PassContext]:
    """The recording with its reductions in buckets that workers reduce as one, and the reports of both passes."""
    about = context(define=define, **chosen)
    return run_passes(tape, about, (bucket_reductions, batch_collectives)), about


def _team(row: Instruction) -> tuple[int, ...]:
    return tuple(row.define.payload["team"]["workers"]) if row.kind == "all_reduce" else ()


def programs(rng: random.Random, workers: int, length: int, own: float) -> dict[int, list[Instruction]]:
    """The same on all workers, whose tensors have other values; sums over all of them, or over pairs. own: the part of it
    that is one worker's alone.
    """
    rows: dict[int, list[Instruction]] = {worker: [] for worker in range(workers)}
    alive, fresh = list(range(3)), 10
    for seq in range(length):
        kind = rng.choice(("add", "add", "add", "add_", "view", "sum", "sum", "pair", "list"))
        some = rng.sample(alive, rng.choice((2, 3)))
        a, b = rng.choice(alive), rng.choice(alive)
        fresh += 1
        if rng.random() < own:
            rows[rng.randrange(workers)].append(Instruction(seq, ADD, [a, b, fresh]))
            continue
        for worker in range(workers):
            if kind in ("sum", "pair"):
                pair = tuple(range(workers)) if kind == "sum" or workers < 4 else (worker // 2 * 2, worker // 2 * 2 + 1)
                row = Instruction(seq, reduce(20 if kind == "sum" else 21, pair, pair.index(worker)), [a])
            elif kind == "list":
                row = Instruction(seq, LISTED[len(some)], some)
            else:
                define = {"add": ADD, "add_": ADD_, "view": VIEW}[kind]
                row = Instruction(seq, define, [*([a] if kind == "view" else [a, b]), *([] if kind == "add_" else [fresh])])
            rows[worker].append(row)
        if kind in ("add", "view"):
            alive.append(fresh)
    return rows


def values(code: dict[int, list[Instruction]]) -> dict[tuple[int, int], int]:
    """Values of every tensor of every worker at the end; workers execute in turns, and views share a cell."""
    cells: dict[tuple[int, int], list[int]] = {(w, i): [w * 1000 + i * 7 + 1] for w in code for i in range(3)}
    places = dict.fromkeys(code, 0)
    while any(places[w] < len(code[w]) for w in code):
        before = dict(places)
        for worker, rows in code.items():
            while places[worker] < len(rows):
                row = rows[places[worker]]
                if row.define.kind == "all_reduce":
                    team = row.define.payload["team"]["workers"]
                    there = [next(iter(code[m][places[m] : places[m] + 1]), None) for m in team]
                    if any(r is None or _team(r) != tuple(team) for r in there):
                        break
                    found = [cells[m, r.operands[0]] for m, r in zip(team, there, strict=True) if r is not None]
                    result = sum(cell[0] for cell in found) % 1000003
                    for cell in found:
                        cell[0] = result
                    for m in team:
                        places[m] += 1
                    continue
                _carry_out(cells, worker, row)
                places[worker] += 1
        assert places != before, "they wait for one another"
    return {key: cell[0] for key, cell in cells.items()}


def _carry_out(cells: dict, worker: int, row: Instruction) -> None:
    of: Any = [cells.get((worker, i)) for i in row.operands]
    if row.define is ADD:
        cells[worker, row.operands[2]] = [(of[0][0] * 3 + of[1][0]) % 1000003]
    elif row.define is ADD_:
        of[0][0] = (of[0][0] * 5 + of[1][0]) % 1000003
    elif row.define in LISTED.values() or row.define.number == PART:
        assert len(row.define.payload["args"][0]) == len(of)
        for cell in of:
            cell[0] = (cell[0] * 11 + 1) % 1000003
    elif row.define is VIEW:
        cells[worker, row.operands[1]] = of[0]


@pytest.mark.parametrize("own", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(100))
def test_values_are_the_same_and_all_meet(seed: int, own: float) -> None:
    rng = random.Random(seed)
    room = rng.choice((1, 64, 1 << 20))
    workers = rng.choice((2, 3, 4))
    code = programs(rng, workers, 40, own)
    before = {worker: list(rows) for worker, rows in code.items()}
    tape = Recording(0, [], {})
    tape.code.update(code)
    tape, about = bucketed(tape, bucket=room)
    plain = unmarked(tape)
    assert not about.rejected or (own and plain == before)
    for worker, rows in plain.items():
        parts = [row for row in rows if row.define.number == PART]
        whole = [row for row in before[worker] if all(row is not other for other in rows)]
        assert len(parts) == 2 * len(whole) <= 2 and len(rows) == len(before[worker]) + len(whole)
        assert sorted(i for row in parts for i in row.operands) == sorted(i for row in whole for i in row.operands)
    check_no_deadlock(plain)
    assert values(plain) == values(before)
    done = {worker: together(rows) for worker, rows in tape.code.items()}
    for found in done.values():
        assert all(done[member][team] == some for team, some in found.items() for member in team)


def unmarked(tape: Recording) -> dict[int, list[Instruction]]:
    return {worker: [row for row in rows if row.define.number != MARK] for worker, rows in tape.code.items()}


def together(rows: list[Instruction]) -> dict[tuple[int, ...], list[list[int]]]:
    """By team, the tensors that are summed together."""
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for n, row in enumerate(rows):
        if row.define.number == MARK:
            some = rows[n + 1 : n + 1 + row.define.payload["count"]]
            (team,) = {tuple(r.define.payload["team"]["workers"]) for r in some}
            found.setdefault(team, []).append([r.operands[0] for r in some])
            assert len(some) > 1
    return found


def test_sums_move_up_behind_what_made_their_data_in_groups_of_enough_bytes() -> None:
    makes = [Instruction(n, ADD, [0, 1, 10 + n]) for n in range(5)]
    sums = [Instruction(10 + n, reduce(20, (0, 1), 0), [10 + n]) for n in (4, 0, 3, 1, 2)]
    last = Instruction(20, op(13, "aten._foreach_add_.List", 5, None, 5), [10, 11, 12, 13, 14])
    tape = Recording(0, [], {})
    for worker in (0, 1):
        tape.code[worker] = [*makes, *sums, last]
    tape, about = bucketed(tape, bucket=64)
    assert not about.rejected
    by = {row.operands[0] - 10: row for row in sums}
    order = [f"make {makes.index(r)}" if r in makes else "last" if r is last else r.define.kind for r in tape.code[0]]
    assert order == [
        *("make 0", "make 1", "together", "all_reduce", "all_reduce"),
        *("make 2", "make 3", "together", "all_reduce", "all_reduce"),
        *("make 4", "all_reduce", "last"),
    ]
    assert [r for r in tape.code[0] if r.define.kind == "all_reduce"] == [by[n] for n in range(5)]


def test_the_optimizer_hides_the_last_sums_with_what_does_not_need_them() -> None:
    makes = [Instruction(n, ADD, [0, 1, 10 + n]) for n in range(3)]
    sums = [Instruction(10 + n, reduce(20, (0, 1), 0), [10 + n]) for n in range(3)]
    optimizer = op(13, "aten._fused_sgd_.default", 7, None, 3)
    lists = [[{"t": n} for n in range(3)], [{"t": n} for n in range(3, 6)], []]
    optimizer.payload.update(args=lists, kwargs={"lr": {"v": 1}, "momentum": {"v": 0}, "found_inf": {"t": 6}}, values=2)
    tape = Recording(0, [], {})
    for worker in (0, 1):
        tape.code[worker] = [*makes, *sums, Instruction(20, optimizer, [1, 2, 3, 12, 10, 11, 9, 0.5, 0.25])]
    tape, about = bucketed(tape, bucket=32)
    assert not about.rejected
    *_, last, first, second = tape.code[0]
    assert (last.operands, first.operands, second.operands) == ([12], [2, 3, 10, 11, 9, 0.25, 0.5], [1, 12, 9, 0.25, 0.5])
    assert first.define.payload["args"] == [[{"t": 0}, {"t": 1}], [{"t": 2}, {"t": 3}], []]
    for part, tensors in ((first, 5), (second, 3)):
        assert part.define.payload["kwargs"] == {"lr": {"v": 0}, "momentum": {"v": 1}, "found_inf": {"t": tensors - 1}}
        assert (part.define.payload["tensors"], part.define.payload["values"]) == (tensors, 2)


def test_an_op_whose_indices_depend_on_each_other_stays_one() -> None:
    """w1 += a; w1 += b; w2 += w1, where b is summed last."""
    optimizer = op(13, "aten._foreach_add_.List", 6, None, 3)
    optimizer.payload["args"] = [[{"t": n} for n in range(3)], [{"t": n} for n in range(3, 6)]]
    makes = [Instruction(n, ADD, [0, 1, 10 + n]) for n in range(2)]
    last = Instruction(20, optimizer, [1, 1, 2, 10, 11, 1])
    tape = Recording(0, [], {})
    for worker in (0, 1):
        tape.code[worker] = [*makes, Instruction(11, reduce(20, (0, 1), 0), [11]), last]
    tape, about = bucketed(tape)
    assert not about.rejected
    assert tape.code[0][-1] is last


def test_sums_that_members_do_not_share_are_not_bucketed() -> None:
    """One has work between two sums that another has not."""
    extra = Instruction(5, ADD, [0, 1, 30])
    after = Instruction(6, ADD_, [0, 1])
    tape = Recording(0, [], {})
    for worker in (0, 1):
        first, second = (Instruction(n, reduce(20, (0, 1), worker), [0 if n == 2 else 1]) for n in (2, 3))
        tape.code[worker] = [first, *([extra] if worker else []), second, after]
    kinds = {w: [r.define.kind for r in rows] for w, rows in tape.code.items()}
    tape, about = bucketed(tape)
    assert not about.rejected
    assert {w: [r.define.kind for r in rows] for w, rows in tape.code.items()} == kinds


def test_nothing_is_moved_if_members_would_sum_different_tensors() -> None:
    """One uses the first gradient once more, so there the other is complete before it."""
    makes = [Instruction(n, ADD, [0, 1, 10 + n]) for n in range(2)]
    tape = Recording(0, [], {})
    for worker in (0, 1):
        sums = [Instruction(5 + n, reduce(20, (0, 1), worker), [10 + n]) for n in range(2)]
        tape.code[worker] = [*makes, *([Instruction(4, ADD, [10, 10, 30])] if worker else []), *sums]
    before = {worker: list(rows) for worker, rows in tape.code.items()}
    tape, about = bucketed(tape)
    assert about.rejected and unmarked(tape) == before


@pytest.fixture(autouse=True)
def share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of all terms are allowed: steps here have few."""
    monkeypatch.setattr(module, "SCATTERED_SHARE", 1)


def test_few_of_all_scattered_terms_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCATTERED_SHARE", 2)
    rows = [
        *((ADD, [1, 2, 30 + n]) for n in range(4)),
        *(row for n in range(4) for row in ((SCATTER, [30 + n, 50 + n]), (ALIAS, [50 + n, 30 + n]))),
        *((ADD_, [5, 30 + n]) for n in range(4)),
    ]
    order = scatters(*rows, room=1 << 20)
    assert order.index([30, 50]) < order.index([1, 2, 32]) < order.index([32, 52])


def scatters(*rows: tuple[Define, list[int]], room: int = 1) -> list[list[int]]:
    """Operands of the rows in the order of the passes, and the counts of batches."""
    code = {w: [Instruction(n, define, list(ids)) for n, (define, ids) in enumerate(rows)] for w in (0, 1)}
    tape, about = bucketed(Recording(0, [], {}, code=code), bucket=room, sharded=True)
    assert not about.rejected
    return [[row.define.payload["count"]] if row.kind == "together" else row.operands for row in tape.code[0]]


def test_terms_are_scattered_as_soon_as_they_are_complete() -> None:
    rows = [
        (ADD, [1, 2, 30]), (VIEW, [30, 31]), (ADD_, [30, 1]), (ADD, [1, 2, 40]), (ADD, [40, 2, 41]),
        (SCATTER, [30, 50]), (ALIAS, [50, 30]), (VIEW, [30, 31]), (ADD_, [5, 31]),
    ]  # fmt: skip
    assert scatters(*rows) == [
        *([1, 2, 30], [30, 31], [30, 1], [30, 50], [50, 30], [30, 31], [1, 2, 40], [40, 2, 41], [5, 31]),
    ]


def test_scattered_terms_wait_for_one_another_until_there_are_enough_bytes() -> None:
    """The names of all pieces follow the reductions, which workers then do as one."""
    rows = [
        *((ADD, [1, 2, 30 + n]) for n in range(3)),
        *(row for n in (0, 1, 2) for row in ((SCATTER, [30 + n, 50 + n]), (ALIAS, [50 + n, 30 + n]))),
        *((ADD_, [5, 30 + n]) for n in range(3)),
    ]
    assert scatters(*rows, room=64) == [
        *([1, 2, 30], [1, 2, 31], [2], [30, 50], [31, 51], [50, 30], [51, 31]),
        *([1, 2, 32], [5, 30], [5, 31], [32, 52], [52, 32], [5, 32]),
    ]
    late = [*rows[:2], (ADD, [5, 6, 60]), *rows[2:]]
    assert scatters(*late, room=1 << 20)[3:6] == [[1, 2, 32], [3], [30, 50]]  # as many as there are


def test_a_row_that_needs_a_piece_ends_the_bucket() -> None:
    rows = [
        (ADD, [1, 2, 30]), (SCATTER, [30, 50]), (ALIAS, [50, 30]), (ADD, [1, 2, 31]), (ADD_, [5, 30]),
        (SCATTER, [31, 51]), (ALIAS, [51, 31]), (ADD_, [5, 31]),
    ]  # fmt: skip
    assert scatters(*rows, room=1 << 20) == [
        *([1, 2, 30], [1, 2, 31], [2], [30, 50], [31, 51], [50, 30], [51, 31], [5, 30], [5, 31]),
    ]


def test_a_bucket_is_in_one_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each definition of a long program is read by itself."""
    monkeypatch.setattr(writing, "MAX_NUMBERS_PER_DEFINITION", 1)
    sums = [Instruction(n, reduce(20, (0, 1), 0), [n]) for n in range(6)]
    mark = Instruction(0, define("together", {"count": 4}), [])
    rows = [Instruction(0, ADD, [0, 1, 9]), mark, *sums, *(Instruction(7, ADD, [0, n, 10 + n]) for n in range(3))]
    writer = writing.ProgramWriter({}, set(), FinishCapture(0, 0, "", "eager", [], 0, 0, False))
    writer.write(rows)
    kinds = {row.define.number: row.define for row in rows}
    found = []
    for part in writer.parts:
        code, at, names = part["code"], 0, []
        while at < len(code):
            free = code[at] == FREE
            names += [] if free else [kinds[code[at]].kind]
            at += 3 + code[at + 2] if free else 2 + kinds[code[at]].operands
        found.append(names)
    assert found == [["op"], ["together", *["all_reduce"] * 6, "op"], ["op"], ["op"], []]


def test_a_view_from_before_is_read_behind_the_reduction_of_its_base() -> None:
    code = {
        worker: [
            Instruction(0, ADD, [5, 5, 10]),
            Instruction(1, reduce(20, (0, 1), worker), [2]),
            Instruction(2, ADD, [3, 3, 11]),
        ]
        for worker in (0, 1)
    }
    storage = object()
    new, _ = bucketed(Recording(0, [], {}, code=code), homes={2: storage, 3: storage})
    assert [row.seq for row in new.code[0]] == [0, 1, 2]
    apart, _ = bucketed(Recording(0, [], {}, code=code))
    assert [row.seq for row in apart.code[0]] == [0, 2, 1]


def waiting(count: int) -> tuple[Recording, int]:
    """Rows of which so many reductions wait for one another; calls of the pass."""
    sums = [reduce(40 + worker, (0, 1), worker) for worker in (0, 1)]
    rows = [(ADD, [1, 2, 100 + n]) for n in range(count)] + [(ADD, [1, 2, 5000 + n]) for n in range(count)]
    code = {
        worker: [Instruction(n, define, list(ids)) for n, (define, ids) in enumerate(rows)]
        + [Instruction(len(rows) + n, sums[worker], [100 + n]) for n in range(count)]
        for worker in (0, 1)
    }
    results: list[Recording] = []
    calls = calls_of(lambda: results.append(bucket_reductions(Recording(0, [], {}, code=code), context(bucket=1 << 20))))
    return results[0], calls


def test_reductions_that_wait_cost_the_same_each():
    (_, few), (result, many) = waiting(150), waiting(300)
    assert many < 3 * few
    assert [row.kind for row in result.code[0]].index("all_reduce") == 600  # a bucket's room is not used up
