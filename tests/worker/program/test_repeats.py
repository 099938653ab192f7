"""Division of long runs of ops: layers that repeat become equal segments, and segments begin where nothing is fused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from gt.ir.instr import FREE, Define
from gt.ir.spec import contiguous
from gt.ir.template import T
from gt.worker.program.partition import LONG_SEGMENT_OPS, DefinitionTraits, bind_segment, definition_traits, partition
from gt.worker.program.repeats import MIN_OPS, MIN_PERIOD, cuts
from tests.helpers.worker_parts import op

PRODUCT = "aten.mm.default"


def layers(count: int, ops: int, products: tuple[int, ...], name: str = "x") -> tuple[list[str], list[int]]:
    labels = [f"{name}{n}" for _ in range(count) for n in range(ops)]
    return labels, [int(n in products) for _ in range(count) for n in range(ops)]


def test_layers_are_cut_at_the_same_op_of_each() -> None:
    labels, weights = layers(6, 40, (7, 20))
    labels, weights = ["first", *labels, "last"], [0, *weights, 0]
    assert cuts(labels, weights) == [1 + 7 + 40 * n for n in range(6)]


def test_attention_is_preferred_to_products() -> None:
    labels, weights = layers(6, 40, (7,))
    weights = [2 if n % 40 == 30 else weight for n, weight in enumerate(weights)]
    assert cuts(labels, weights) == [30 + 40 * n for n in range(6)]


def test_two_stretches_are_both_found() -> None:
    wide, narrow = layers(5, 60, (9,), "w"), layers(8, 30, (4,), "n")
    places = cuts([*wide[0], "between", *narrow[0]], [*wide[1], 0, *narrow[1]])
    assert {9 + 60 * n for n in range(5)} | {301 + 4 + 30 * n for n in range(8)} <= set(places)


@pytest.mark.parametrize(
    ("labels", "weights"),
    [
        layers(2, MIN_OPS, (3,)),  # two are too few
        layers(3, MIN_OPS // 3 - 1, (3,)),  # short
        layers(1, 4 * MIN_OPS, (3,)),  # nothing repeats
        layers(6, 40, ()),  # no place to cut
        ([], []),
    ],
)
def test_other_runs_stay_whole(labels: list[str], weights: list[int]) -> None:
    assert cuts(labels, weights) == []


def test_a_cell_of_few_ops_is_cut_at_multiples() -> None:
    labels, weights = layers(60, 7, (2,))
    lengths = {high - low for low, high in pairwise(cuts(labels, weights))}
    assert len(lengths) == 1 and lengths.pop() in range(MIN_PERIOD, MIN_PERIOD + 7)


class Chain:
    """A program whose ops each read the result of the one before."""

    def __init__(self) -> None:
        self.defines: dict[int, Define] = {}
        self.code: list[Any] = []
        self.rows: list[Any] = []
        self.last = 1

    def add(self, name: str, tensors: int = 1, shape: Sequence[int] = (4, 4)) -> None:
        payload = op(name, [T(n) for n in range(tensors)], tensors, [["new", contiguous(tuple(shape), "float32").wire(), -1]])
        number = next((n for n, d in self.defines.items() if d.payload == payload), 100 + len(self.defines))
        self.defines.setdefault(number, Define(number, "op", payload))
        self._row([number, len(self.rows), *[self.last] * tensors, self.last + 1])
        self._row([FREE, 0, 1, self.last])
        self.last += 1

    def _row(self, row: list[Any]) -> None:
        self.rows.append((len(self.code), None))
        self.code += row

    def traits(self, number: int) -> DefinitionTraits:
        return definition_traits(self.defines.get(number), lambda payload: True)

    def parts(self) -> list[list]:
        pieces = partition(self.rows, self.code, self.traits)
        assert all(fits for fits, _ in pieces) and [row for _, part in pieces for row in part] == self.rows
        return [part for _, part in pieces]


def test_equal_layers_have_one_graph() -> None:
    chain = Chain()
    for _ in range(8):
        for n in range(30):
            chain.add(
                "aten.mm.default" if n == 4 else f"aten.{('sin', 'cos', 'tanh', 'exp', 'abs')[n % 5]}.default", 1 + (n == 4)
            )
    graphs = [bind_segment(part, chain.code, chain.defines.get, chain.traits).graph for part in chain.parts()]
    assert len(graphs) == 9 and len(set(graphs[1:-1])) == 1


def test_a_long_run_ends_before_a_product_but_never_between_convolutions() -> None:
    for convolve, dims in ((False, 0), (True, 3), (True, 4)):
        chain = Chain()
        for n in range(3 * LONG_SEGMENT_OPS + 20):
            chain.add(PRODUCT if n % 50 == 49 else f"aten.add{n}.default", 1 + (n % 50 == 49))
            if convolve and n in (0, 2 * LONG_SEGMENT_OPS + 60):
                chain.add("aten.convolution.default", 3, [4] * dims)
        parts = chain.parts()
        begins = [chain.defines[chain.code[part[0][0]]].payload["op"] for part in parts[1:]]
        assert begins and set(begins) == {PRODUCT}
        names = [[chain.defines[chain.code[at]].payload["op"] for at, _ in part if chain.code[at] != FREE] for part in parts]
        assert sum("aten.convolution.default" in part for part in names) == {0: 0, 3: 2, 4: 1}[dims]
