"""Steps on offloaded state moved up to where their gradients are final: the same values, in parts, and no further."""

from __future__ import annotations

import random

import pytest

from gt.dispatcher.programs.passes.advance_host_steps import advance_host_steps
from gt.dispatcher.programs.recording import Instruction, Recording
from gt.ir.instr import Define
from tests.dispatcher.programs.passes import context, passed
from tests.dispatcher.programs.passes.test_bucket_reductions import ADD, ADD_, VIEW, op, reduce
from tests.helpers.limits import calls_of

READ = op(20, "aten.neg.default", 1, ["new", [[8], [1], 0, "float32"], -1])
RESTORE, EVICT = Define(21, "restore", {}), Define(22, "evict", {"space": "nvme", "path": "/x"})
NBYTES = 4096  # of each tensor from before, see `passes.context`


def step(count: int, beside: int = 0) -> Define:
    """A fused step on parameters, gradients and one list of state. beside: tensors that are in no list."""
    lists = [[{"t": k * count + n} for n in range(count)] for k in range(3)]
    tensors = 3 * count + beside
    payload = {"op": "aten._fused_sgd_.default", "args": lists, "kwargs": {}, "tensors": tensors, "values": 0, "outs": []}
    payload["kwargs"] = {f"other{n}": {"t": 3 * count + n} for n in range(beside)}
    writes = [*range(count), *range(2 * count, 3 * count)]
    return Define(30 + count, "host_op", {**payload, "writes": writes, "random": None, "fresh": [*range(count, 2 * count)]})


def rows_of(*rows: tuple[Define, list[int]]) -> Recording:
    return Recording(0, [], {}, code={0: [Instruction(n, define, list(ids)) for n, (define, ids) in enumerate(rows)]})


def order(recording: Recording, bucket: int = NBYTES, **chosen) -> list[tuple[str, list[int]]]:
    result, about = passed(recording, advance_host_steps, bucket=bucket, **chosen)
    assert not about.rejected
    return [(row.kind, row.operands) for row in result.code[0]]


# parameters 1 and 2, gradients 11 and 12, state 21 and 22; the backward pass makes 12 first, and reads 2 once more after that
BACKWARD = [(ADD, [5, 6, 12]), (ADD, [12, 2, 30]), (ADD, [30, 6, 11]), (READ, [30, 31])]
STEP = (step(2), [1, 2, 11, 12, 21, 22])


def test_a_part_of_the_step_follows_the_last_use_of_its_tensors():
    rows = order(rows_of(*BACKWARD, STEP))
    assert rows == [
        ("op", [5, 6, 12]),
        ("op", [12, 2, 30]),
        ("host_op", [2, 12, 22]),
        ("op", [30, 6, 11]),
        ("host_op", [1, 11, 21]),
        ("op", [30, 31]),
    ]


def test_the_copies_that_a_part_makes_anew_are_those_of_its_gradients():
    result, _ = passed(rows_of(*BACKWARD, STEP), advance_host_steps, bucket=NBYTES)
    first = next(row for row in result.code[0] if row.kind == "host_op").define.payload
    assert first["fresh"] == [1] and first["writes"] == [0, 2] and first["args"] == [[{"t": 0}], [{"t": 1}], [{"t": 2}]]


def test_a_step_of_one_bucket_moves_as_one():
    rows = order(rows_of(*BACKWARD, STEP), bucket=3 * NBYTES)
    assert [kind for kind, _ in rows] == ["op", "op", "op", "host_op", "op"]


@pytest.mark.parametrize(
    "between",
    [
        pytest.param([(READ, [11, 40]), (READ, [12, 41]), (ADD, [40, 41, 42]), (ADD_, [11, 42]), (ADD_, [12, 42])], id="clip"),
        pytest.param([(VIEW, [11, 43]), (VIEW, [12, 44]), (ADD_, [43, 5]), (ADD_, [44, 5])], id="views"),
        pytest.param([(READ, [1, 40]), (READ, [2, 41])], id="parameters that are read"),
    ],
)
def test_what_uses_all_gradients_or_parameters_is_waited_for(between):
    rows = order(rows_of(*BACKWARD, *between, (READ, [5, 50]), STEP))
    before = {"host_op": [n for n, (kind, _) in enumerate(rows) if kind == "host_op"]}["host_op"]
    assert min(before) >= len(BACKWARD) + len(between) - 1 and rows[-1] == ("op", [5, 50])


def test_an_operand_beside_the_lists_is_waited_for():
    scaled = (step(2, beside=1), [1, 2, 11, 12, 21, 22, 60])
    rows = order(rows_of(*BACKWARD, (READ, [5, 60]), scaled))
    assert [kind for kind, _ in rows] == ["op"] * 5 + ["host_op"]


def test_tensors_from_before_that_share_memory_are_one():
    """%70 names parameter 2 too: it is read last."""
    recording = rows_of(*BACKWARD, (READ, [70, 71]), STEP)
    rows = order(recording, homes={2: "weight", 70: "weight"})
    assert [ids[0] for kind, ids in rows if kind == "host_op"] == [1, 2] and rows[-1][0] == "host_op"


def test_what_precedes_a_step_on_the_host_moves_with_it_and_files_are_read_one_step_ahead():
    add = Define(23, "host_op", {**op(0, "aten._foreach_add_.Scalar", 2, None, 2).payload, "args": [], "fresh": []})
    one = step(1)
    rows = [(RESTORE, [21]), (RESTORE, [22]), (add, [21, 22]), (one, [2, 12, 22]), (RESTORE, [21]), (one, [1, 11, 21])]
    assert order(rows_of(*BACKWARD, *rows)) == [
        ("op", [5, 6, 12]),
        ("op", [12, 2, 30]),
        ("restore", [21]),
        ("restore", [22]),
        ("host_op", [21, 22]),
        ("restore", [21]),
        ("host_op", [2, 12, 22]),
        ("op", [30, 6, 11]),
        ("host_op", [1, 11, 21]),
        ("op", [30, 31]),
    ]


def test_state_that_another_row_writes_first_comes_back_as_early():
    count = Define(23, "op", {**op(0, "aten._foreach_add_.Scalar", 1, None, 1).payload, "args": []})
    assert order(rows_of(*BACKWARD, (RESTORE, [22]), (RESTORE, [21]), (count, [21]), STEP)) == [
        ("op", [5, 6, 12]),
        ("op", [12, 2, 30]),
        ("restore", [21]),
        ("restore", [22]),
        ("host_op", [2, 12, 22]),
        ("op", [30, 6, 11]),
        ("op", [21]),
        ("host_op", [1, 11, 21]),
        ("op", [30, 31]),
    ]


def test_reductions_that_are_done_as_one_are_not_parted():
    sums = [(reduce(40, (0, 1), 0), [12]), (reduce(40, (0, 1), 0), [11])]
    first, second, third, _ = BACKWARD
    rows = [first, second, third, *sums, (READ, [30, 31]), STEP]
    code = {w: rows_of(*rows).code[0] for w in (0, 1)}
    made, about = passed(Recording(0, [], {}, code=code), advance_host_steps, bucket=NBYTES)
    kinds = [row.kind for row in made.code[0]]
    assert not about.rejected and kinds[3:5] == ["all_reduce", "all_reduce"] and kinds[-1] == "op"


def on_device(define: Define) -> Define:
    return Define(define.number + 20, "op", {k: v for k, v in define.payload.items() if k != "fresh"})


def test_a_step_on_the_device_takes_what_it_evicts_along_and_the_next_state_comes_back_before_it():
    one, add = on_device(step(1)), on_device(op(3, "aten._foreach_add_.Scalar", 2, None, 2))
    rows = [(add, [51, 52]), (one, [1, 11, 21]), (RESTORE, [22]), (EVICT, [21]), (one, [2, 12, 22]), (EVICT, [22])]
    assert order(rows_of(*BACKWARD, *rows)) == [
        ("op", [5, 6, 12]),
        ("op", [12, 2, 30]),
        ("restore", [22]),
        ("op", [2, 12, 22]),
        ("evict", [22]),
        ("op", [30, 6, 11]),
        ("op", [1, 11, 21]),
        ("evict", [21]),
        ("op", [30, 31]),
        ("op", [51, 52]),
    ]


def test_a_step_on_the_device_without_evicted_state_stays():
    recording = rows_of(*BACKWARD, (on_device(step(2)), [1, 2, 11, 12, 21, 22]), (RESTORE, [40]), (EVICT, [40]))
    assert passed(recording, advance_host_steps, bucket=NBYTES)[0] is recording


def test_state_that_is_read_after_its_step_is_evicted_where_it_was():
    one = on_device(step(1))
    rows = order(rows_of(*BACKWARD, (READ, [5, 50]), (one, [2, 12, 22]), (READ, [22, 51]), (EVICT, [22])))
    assert rows[2] == ("op", [2, 12, 22]) and rows[-2:] == [("op", [22, 51]), ("evict", [22])]


def test_what_is_evicted_after_its_last_use_is_changed_behind_that():
    rows = order(rows_of(*BACKWARD[:2], (EVICT, [2]), *BACKWARD[2:], STEP))
    assert rows[2:4] == [("evict", [2]), ("host_op", [2, 12, 22])]


def test_without_steps_on_the_host_nothing_is_done():
    recording = rows_of(*BACKWARD, (RESTORE, [21]))
    assert passed(recording, advance_host_steps)[0] is recording


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_keep_their_values(seed):
    """The verifier takes each result; every instruction is there once, or in parts."""
    rng = random.Random(seed)
    count = rng.randint(1, 5)
    place = on_device if seed % 2 else lambda define: define
    params, grads, state = ([base + n for n in range(count)] for base in (1, 100, 200))
    rows: list[tuple[Define, list[int]]] = [(READ, [9, grad]) for grad in rng.sample(grads, count)]
    alive, fresh = [*params, *grads, 9], 300
    add = Define(23, "host_op", {**op(0, "aten._foreach_add_.Scalar", count, None, count).payload, "args": [], "fresh": []})
    for _ in range(rng.randint(1, 3)):
        for _ in range(rng.randint(0, 25)):
            kind = rng.choice(("add", "add", "add", "add_", "view", "restore", "evict", "state"))
            a, b = rng.choice(alive), rng.choice(alive)
            fresh += 1
            if kind in ("restore", "evict"):
                rows.append((RESTORE if kind == "restore" else EVICT, [rng.choice([*state, *params])]))
            elif kind == "state":
                rows.append((READ, [rng.choice(state), fresh]))
            else:
                define, ids = {"add": (ADD, [a, b, fresh]), "add_": (ADD_, [a, b]), "view": (VIEW, [a, fresh])}[kind]
                rows.append((define, ids))
                alive += [fresh] if kind != "add_" else []
        rows.append((place(add), [*state]))
        rows.append((place(step(count)), [*params, *grads, *state]))
        rows += [(EVICT, [i]) for i in rng.sample(state, count) if rng.random() < 0.7]
    recording = rows_of(*rows)
    result, about = passed(recording, advance_host_steps, bucket=rng.choice((1, 2 * NBYTES)))
    assert not about.rejected
    taken = [row.stands_for or row for row in result.code[0]]
    assert {row.seq for row in taken} == set(range(len(rows)))
    operands = sorted(i for row in result.code[0] for i in row.operands)
    assert operands == sorted(i for row in recording.code[0] for i in row.operands)


def _counts(many: int) -> list[tuple[Define, list[int]]]:
    """List ops on one tensor, as of a step's count."""
    payload = {**op(0, "aten._foreach_add_.Scalar", 1, None, 1).payload, "args": []}
    return [(Define(23, "op", payload), [77])] * many


def test_rows_that_each_depend_on_the_one_before_move_with_a_step():
    add = {**op(0, "aten._foreach_add_.List", 2, None, 2).payload, "args": [], "writes": [0], "fresh": []}
    many = [(Define(23, "host_op", add), [100 + n, 99 + n]) for n in range(2000)]
    rows = order(rows_of(*BACKWARD, *many, (step(1), [2, 12, 2099])))
    assert [ids for kind, ids in rows if kind == "host_op"] == [*(ids for _, ids in many), [2, 12, 2099]]
    assert [kind for kind, _ in rows[:3]] == ["op", "op", "host_op"]


def test_rows_on_one_tensor_cost_the_same_each():
    def calls(many: int, *between: tuple[Define, list[int]]) -> int:
        rows = rows_of(*BACKWARD, *[row for count in _counts(many) for row in (count, *between)], STEP)
        return calls_of(lambda: advance_host_steps(rows, context(bucket=NBYTES)))

    for between in ([], [(RESTORE, [77])], [(step(1), [1, 11, 77])]):
        assert calls(400, *between) < 3 * calls(200, *between), between
    assert len(order(rows_of(*BACKWARD, *_counts(400), STEP))) == len(BACKWARD) + 400 + 2
