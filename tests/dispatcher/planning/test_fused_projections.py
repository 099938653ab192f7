"""The walk behind a projection, over ops that have not been planned, to the split of its result."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gt.dispatcher.planning.fused_projections import count_split_parts
from gt.dispatcher.state.op_queue import NeedsLookahead
from gt.ir.instr import FREE, LENGTHS, RECORD


def walk(code: list[Any]) -> int:
    def lookahead() -> Iterator[tuple[list[Any], int]]:
        yield code, 0
        raise NeedsLookahead

    context: Any = SimpleNamespace(queue=SimpleNamespace(lookahead=lookahead), templates={})
    return count_split_parts(context, [5])


@pytest.mark.parametrize("number", LENGTHS)
def test_frees_and_declarations_do_not_end_it(number: int) -> None:
    with pytest.raises(NeedsLookahead):
        walk([number, 2, 7, 8][: LENGTHS[number] + 2 * (number == FREE)])


@pytest.mark.parametrize("code", [[RECORD, 1, 2, 0], [FREE, -3], [FREE, "2"], [99, 1], ["x", 1]])
def test_what_cannot_be_read_ends_it(code: list[Any]) -> None:
    assert walk(code) == 1
