"""Data-flow analysis of instruction streams: decoding, def-use, alias sets, lifetimes, and legality of an order."""

from __future__ import annotations

import random

import pytest
import torch

import gt
from gt.client import current_session
from gt.dispatcher.programs.recording import Instruction
from gt.dispatcher.programs.reorder_check import CannotReorder, DataFlow, check_same_dataflow
from gt.ir import arguments, dataflow
from gt.ir.instr import COLLECTIVES, COMMUNICATION, FORGET, FREE, KINDS, OPS, TRANSFERS, Define
from gt.ir.schema import TABLE
from gt.ir.spec import contiguous
from gt.ir.template import T, V
from gt.worker.engine.codegen import fitting
from tests.helpers.planned import planned

SPEC = contiguous((4,), "float32").wire()


def op(number: int, name: str, tensors: int, outs: list, values: int = 0, writes: tuple[int, ...] = ()) -> Define:
    payload = {"op": f"aten.{name}", "args": [], "kwargs": {}, "tensors": tensors, "values": values, "outs": outs}
    return Define(number, "op", {**payload, "writes": list(writes), "random": None})


MUL = op(16, "mul.Tensor", 2, [["new", SPEC, -1]])
T_ = op(17, "t.default", 1, [["view", SPEC, 0]])
ADD_ = op(18, "add_.Tensor", 2, [["same", None, 0]], values=1, writes=(0,))
RELU = op(19, "relu.default", 1, [["new", SPEC, -1]])
PAIR = op(20, "native_layer_norm.default", 1, [["new", SPEC, -1], ["none", None, -1], ["new", SPEC, -1]])
ALIAS = Define(21, "alias", {})
DEFINES = {define.number: define for define in (MUL, T_, ADD_, RELU, PAIR, ALIAS)}

# The example of the module's docstring: %3 is a view of %2, which add_ changes
EXAMPLE = [
    Instruction(0, MUL, [0, 1, 2]), Instruction(1, T_, [2, 3]), Instruction(2, ADD_, [3, 1, 1.0]), Instruction(3, RELU, [0, 5]),
]  # fmt: skip


def test_decoding_gives_every_instruction_once() -> None:
    code = [16, 0, 0, 1, 2, FREE, 0, 2, 0, 1, 18, 1, 2, 2, 0.5, FORGET, 1, 1, 16]
    decoded = list(dataflow.decode(code, DEFINES.__getitem__))
    assert decoded == [(0, MUL, [0, 1, 2]), (5, None, [0, 1]), (10, ADD_, [2, 2, 0.5]), (15, None, [16])]
    size = lambda number: DEFINES[number].operands  # noqa: E731
    assert list(dataflow.places(code, size)) == [(0, 5), (5, 10), (10, 15), (15, 19)]
    assert [dataflow.instruction(code, at, DEFINES.__getitem__) for at, _, _ in decoded] == [row[1:] for row in decoded]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*OPS, "fragment")])
def test_effects_of_a_kind_are_those_of_its_operands(kind: str) -> None:
    names = KINDS[kind][0]
    define = Define(30, kind, dict.fromkeys(KINDS[kind][1]))
    read = [name for name in names if name in ("src", "tensor")]
    assert list(names[define.effects.reads]) == read and define.operands == len(names)
    assert list(names[define.effects.makes]) == [name for name in names if name == "dst"]
    assert define.effects.writes == ((0,) if kind in ("all_reduce", "evict", "restore", "stale") else ())


def test_effects_of_a_fragment_are_those_of_its_parameters() -> None:
    payload = {key: [] for key in KINDS["fragment"][1]} | {"ins": [1, 2], "outs": [3], "values": [0, 4, 8]}
    define = Define(30, "fragment", payload)
    assert define.operands == 2 + 2 + 1 + 3
    row = Instruction(0, define, [0, 0, 11, 12, 13, 1.0, 2.0, 3.0])
    assert (row.reads, row.makes) == ([11, 12], [13])


def test_every_kind_that_moves_values_is_in_one_set() -> None:
    moves = {kind for kind, (_, keys) in KINDS.items() if {"team", "channel", "parts"} & set(keys)}
    assert moves == COMMUNICATION and not COLLECTIVES & TRANSFERS
    assert {kind for kind in COMMUNICATION if "team" in KINDS[kind][1]} == COLLECTIVES


def test_outputs_without_an_id_are_no_operands() -> None:
    row = Instruction(0, PAIR, [1, 10, 11])
    assert (PAIR.operands, row.reads, row.makes) == (3, [1], [10, 11])


def test_an_access_names_memory_by_its_maker() -> None:
    fresh, other = ~0, ~(3 << dataflow.OUTPUT_BITS)
    assert dataflow.accesses(EXAMPLE) == [([0, 1], [fresh]), ([fresh], [fresh]), ([fresh, 1], []), ([0], [other])]


def test_a_name_that_is_defined_again_is_other_memory() -> None:
    rows = [Instruction(0, RELU, [0, 2]), Instruction(1, RELU, [0, 2]), Instruction(2, RELU, [2, 3])]
    first, second, third = dataflow.accesses(rows)
    assert first.makes != second.makes == third.reads
    assert dataflow.liveness(rows, [[16]] * 3, {3}, {}).ambiguous == {2}


def test_a_write_through_a_view_reaches_its_base() -> None:
    rows = [*EXAMPLE, Instruction(4, RELU, [2, 6])]
    assert dataflow.reaching_definitions(rows)[4] == ((0,), (~0,), (1,))


def test_lifetimes_end_with_the_last_use_of_any_view() -> None:
    found = dataflow.liveness(EXAMPLE, [[16], [16], [], [8]], {5}, {})
    assert found.alive == [16, 16, 16, 8] and found.root(3) == found.root(2)
    assert found.changed[found.root(2)] == [2] and found.kept == {found.root(5)}
    assert dataflow.last_uses(EXAMPLE) == ({2: 0, 3: 1, 5: 3}, {0: 3, 1: 2, 2: 1, 3: 2, 5: 3})


def test_memory_from_before_has_no_bytes_and_is_shared_by_its_home() -> None:
    rows = [Instruction(0, ADD_, [7, 1, 1.0]), Instruction(1, T_, [8, 9])]
    found = dataflow.liveness(rows, [[], [16]], set(), {7: "home", 8: "home"})
    assert found.root(7) == found.root(8) == found.root(9) and found.alive == [0, 0]


def test_a_stream_says_which_tensors_are_live_out_of_it() -> None:
    code = [16, 0, 0, 1, 2, 17, 0, 2, 3, FREE, 0, 1, 2, 19, 0, 0, 4, FREE, 0, 1, 4, 21, 0, 1, 5]
    summary = dataflow.summarize(code, DEFINES.__getitem__)
    assert summary.made == {2, 3, 4, 5} and summary.live_out == {2, 3, 5}  # the memory of 2 lives in its view
    assert summary.sets.memory(5) == dataflow.OLDER != summary.sets.memory(3)
    assert dataflow.exposed([0, 5, 13], code, DEFINES.__getitem__) == ([0, 1], {2, 3, 4})


def test_bytes_alive_are_those_of_a_count_row_by_row() -> None:
    rng = random.Random(0)
    for _ in range(50):
        length = rng.randrange(1, 12)
        spans = []
        for _ in range(rng.randrange(8)):
            first = rng.randrange(length)
            spans.append((first, rng.choice((None, rng.randrange(first, length))), rng.randrange(100)))
        alive = [sum(n for a, b, n in spans if a <= row and (b is None or row <= b)) for row in range(length)]
        assert dataflow.bytes_alive(length, spans) == alive


def test_a_write_to_memory_from_before_reaches_all_that_share_it() -> None:
    rows = [Instruction(0, ADD_, [7, 1, 1.0]), Instruction(1, RELU, [8, 9])]
    assert dataflow.accesses(rows, shared={8: 7})[1].reads == [7]
    assert dataflow.reaching_definitions(rows, shared={8: 7})[1] == ((None,), (7,), (1,))


# ---- legality of an order


def test_independent_rows_may_change_places_and_others_may_not() -> None:
    a, b, c, d = EXAMPLE
    check_same_dataflow(0, DataFlow.of(EXAMPLE), [d, a, b, c], {})
    late = Instruction(4, RELU, [2, 6])
    for order in ([a, b, late, c, d], [a, b, d, late], [b, a, c, d, late]):  # read too early; a write is lost; no maker
        with pytest.raises(CannotReorder, match="the order matters"):
            check_same_dataflow(0, DataFlow.of([a, b, c, d, late]), order, {})


def test_a_write_from_before_and_a_read_of_its_view_stay_in_order() -> None:
    write, read = Instruction(0, ADD_, [7, 1, 1.0]), Instruction(1, RELU, [8, 9])
    check_same_dataflow(0, DataFlow.of([write, read]), [read, write], {})  # other memory
    with pytest.raises(CannotReorder, match="the order matters"):
        check_same_dataflow(0, DataFlow.of([write, read], {8: 7}), [read, write], {})


def test_a_repeated_row_reads_what_the_first_one_read() -> None:
    a, b, c = Instruction(0, RELU, [0, 2]), Instruction(1, ADD_, [0, 1, 1.0]), Instruction(2, RELU, [2, 3])
    again = Instruction(0, RELU, [0, 70], "", a)
    last = Instruction(2, RELU, [70, 3], "", c)
    check_same_dataflow(0, DataFlow.of([a, c, b]), [a, again, last, b], {})
    with pytest.raises(CannotReorder):
        check_same_dataflow(0, DataFlow.of([a, b, c]), [a, b, again, last], {})  # add_ has changed %0


# ---- writes


def test_definitions_say_what_the_table_says() -> None:
    """Ops of a training step, whole and split, by the dispatcher's own word."""
    with planned("g: {shard: {axis: 0, workers: [0, 1]}}\n", 2) as plan:
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)).to("remote")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            with gt.signal.context("g"):
                loss = model(torch.randn(8, 4).to("remote")).squeeze().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()(torch.randn(8, 4).to("remote")).sum()
        current_session.current().flush()
    payloads = [row[2] for _, run in plan.runs for row in run.defines if row[1] == "op"]
    assert any(payload["writes"] for payload in payloads) and any(not payload["writes"] for payload in payloads)
    for payload in payloads:
        assert sorted(payload["writes"]) == sorted(arguments.written(*fitting(payload))), payload["op"]


@pytest.mark.parametrize(
    ("name", "args", "writes"),
    [
        ("aten.add_.Tensor", [T(0), T(1)], [0]),
        ("aten.mul.Tensor", [T(0), T(1)], []),
        ("aten._native_batch_norm_legit.default", [T(0), None, None, T(1), T(2), False, 0.1, 1e-5], [1, 2]),
        ("aten._foreach_add.Scalar", [[T(0), T(1)], V(0)], []),  # a new list
        ("aten._foreach_add_.List", [[T(0), T(1)], [T(2), T(3)]], [0, 1]),  # the first list alone
        ("aten.native_batch_norm.default", [T(0), T(1), T(2), T(3), T(4), True, 0.1, 1e-5], [3, 4]),
        ("aten.native_batch_norm.default", [T(0), T(1), T(2), T(3), T(4), False, 0.1, 1e-5], []),
    ],
)
def test_the_table_says_what_an_op_writes(name: str, args: list, writes: list[int]) -> None:
    schema = arguments.match(TABLE.find(name), args, {})
    assert arguments.written(schema, args, {}) == writes
