"""Lengths of a client's rows, as far as they can be read before they are checked."""

from __future__ import annotations

from typing import Any

import pytest

from gt.ir.instr import DROP, FIRST, FREE, GRAD, LAUNCH, LENGTHS, PARAM, client_length, unchecked_length


@pytest.mark.parametrize("number", LENGTHS)
def test_a_row_in_order_has_the_length_that_it_has_once_it_is_checked(number: int) -> None:
    code = [number, 2, 7, 8]
    assert unchecked_length(code, 0) == client_length(code, 0)


@pytest.mark.parametrize(
    "code",
    [
        [FIRST, 0], [LAUNCH, 1, 2, 3], [PARAM], [FREE, -3, 1], [FREE, "2", 1], [FREE, None], [FREE, 1.0, 1], [True, 1],
        [1.0, 1], ["x", 1], [[], 1], [None, 1], [-1, 1],
    ],
)  # fmt: skip
def test_what_cannot_be_read_has_no_length(code: list[Any]) -> None:
    assert unchecked_length(code, 0) == 0


def test_a_row_may_be_cut_off_behind_its_first_number() -> None:
    assert [unchecked_length(code, 0) for code in ([GRAD, 1], [FREE, 9], [DROP, 1])] == [3, 11, 2]
