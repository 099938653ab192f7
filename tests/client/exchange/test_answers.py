"""Answers that are awaited: small and large values, and those that nobody waits for any more."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from gt.client.exchange.answers import AwaitedAnswers
from gt.client.exchange.host_buffers import FileAssembly
from gt.errors import ProtocolError
from gt.wire.messages import Piece, Value

BYTES = np.arange(4, dtype=np.float32).tobytes()
HALVES = [[5, [[[0, 2]]]], [6, [[[2, 4]]]]]


def value(request: int, pieces: list, dtype: str = "float32") -> Value:
    return Value(request, [4], dtype, pieces)


def test_a_small_value_comes_whole() -> None:
    answers = AwaitedAnswers()
    request = answers.expect()
    pending = answers.pending[request]
    answers.value(value(request, [[5, [[[0, 4]]]]]), (BYTES,))
    shape, dtype, data = pending.value
    assert pending.done.is_set() and shape == (4,) and dtype == "float32" and data.tobytes() == BYTES


def test_a_large_value_is_complete_with_its_last_piece() -> None:
    answers = AwaitedAnswers()
    request = answers.expect()
    pending = answers.pending[request]
    answers.value(value(request, HALVES), ())
    answers.piece(Piece(6, 0, 8), (BYTES[8:],))
    assert not pending.done.is_set()
    answers.piece(Piece(5, 0, 8), (BYTES[:8],))
    assert pending.done.is_set() and pending.value[2].tobytes() == BYTES


def test_what_nobody_waits_for_is_dropped() -> None:
    answers = AwaitedAnswers()
    request = answers.expect()
    pending = answers.pending[request]
    answers.value(value(request, HALVES), ())
    answers.forget(request)
    answers.piece(Piece(5, 0, 8), (BYTES[:8],))
    answers.value(value(request, HALVES), ())
    answers.finish(request, 3)
    assert not pending.done.is_set() and not answers.pending and not answers._by_key


def test_the_end_of_all_waits_answers_none() -> None:
    answers = AwaitedAnswers()
    waits = [answers.pending[answers.expect()] for _ in range(2)]
    answers.end_waits()
    assert all(pending.done.is_set() and pending.value is None for pending in waits)


def test_an_unknown_dtype_is_a_fault_of_the_server() -> None:
    answers = AwaitedAnswers()
    with pytest.raises(ProtocolError, match=r"Value.dtype is 'f128'"):
        answers.value(value(answers.expect(), HALVES, "f128"), ())


def test_a_disk_that_does_not_take_a_value_fails_its_request() -> None:
    file = os.open(os.devnull, os.O_RDONLY)
    try:
        answers = AwaitedAnswers()

        def into(*given: Any) -> FileAssembly:
            return FileAssembly(file, 0, 16, *given)

        request = answers.expect(into)
        pending = answers.pending[request]
        answers.value(value(request, [[5, [[[0, 4]]]]]), (BYTES,))
        assert pending.done.is_set() and isinstance(pending.error, OSError)
    finally:
        os.close(file)


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError("of 4 TiB")])
def test_a_value_for_which_there_is_no_room_fails_its_request_alone(error: Exception) -> None:
    """The session ended for it, with all other requests."""
    answers = AwaitedAnswers()

    def into(*given: Any) -> FileAssembly:
        raise error

    request, other = answers.expect(into), answers.expect()
    pending = answers.pending[request]
    answers.value(value(request, HALVES), ())
    answers.piece(Piece(5, 0, 8), (BYTES[:8],))
    assert pending.done.is_set() and pending.error is error
    answers.value(value(other, [[7, [[[0, 4]]]]]), (BYTES,))
    assert answers.pending[other].value[2].tobytes() == BYTES
