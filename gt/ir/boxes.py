"""Copies of boxes between a whole array and a worker's piece. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Boxes = Sequence[Sequence[Sequence[int]]]


def _spans(boxes: Boxes) -> list[list[tuple[int, int]]]:
    """The intervals of each dim whose product the boxes are."""
    return [list(dict.fromkeys((box[d][0], box[d][1]) for box in boxes)) for d in range(len(boxes[0]))]


def _index(boxes: Boxes) -> tuple:
    if len(boxes) == 1:
        return tuple(slice(start, stop) for start, stop in boxes[0])
    return np.ix_(*(np.concatenate([np.arange(a, b) for a, b in spans]) for spans in _spans(boxes)))


def take(whole: np.ndarray, boxes: Boxes) -> np.ndarray:
    """The row-major piece with these boxes of `whole`."""
    return np.ascontiguousarray(whole[_index(boxes)]).reshape(shape(boxes))


def put(whole: np.ndarray, boxes: Boxes, piece: np.ndarray) -> None:
    """Inverse of take: write a piece into the boxes of `whole`."""
    whole[_index(boxes)] = piece.reshape(shape(boxes))


def shape(boxes: Boxes) -> tuple[int, ...]:
    return tuple(sum(b - a for a, b in spans) for spans in _spans(boxes))
