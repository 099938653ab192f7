"""Repeated stretches of a run of ops, as the layers of a model: each becomes a segment, and equal segments are compiled once.

A run is divided where nothing is lost: before a product of matrices, or the kernel of attention's backward pass. Their operands
are in memory anyway, since such kernels fuse with nothing. Pure; knows labels of ops alone.

Example, with a product P: labels `a P b c P b c P b c d` are divided into `a`, `P b c`, `P b c`, and `P b c d`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

MIN_OPS = 160  # of a run that is divided; a shorter one compiles within seconds
MAX_OPS = 20_000  # of such a run: the search compares all pairs of ops
MIN_PERIOD = 24  # ops; shorter segments cost more calls than they save
MIN_REPEATS = 3


def cuts(labels: Sequence[Hashable], weights: Sequence[int]) -> list[int]:
    """Places in a run of ops at which segments begin, in order, without the run's own begin.

    labels: equal for ops that do the same. weights: by op, how well a segment may begin with it; 0 where it should not.
    """
    numbers: dict[Hashable, int] = {}
    ids = np.array([numbers.setdefault(label, len(numbers)) for label in labels], np.int64)
    found: list[int] = []
    # What stands before and after a repeated stretch may repeat too: encoder and decoder, or stages of other widths.
    waiting = [(0, len(ids))]
    while waiting:
        low, high = waiting.pop()
        if MIN_OPS <= high - low <= MAX_OPS and (places := _cuts(ids[low:high], weights[low:high])):
            found += [low + place for place in places]
            waiting += [(low, low + places[0]), (low + places[-1], high)]
    return sorted(set(found) - {0})


def _cuts(ids: np.ndarray, weights: Sequence[int]) -> list[int]:
    """The same for the longest stretch that repeats."""
    start, period, length = _longest(ids)
    if not period:
        return []
    first = max(range(start, start + period), key=lambda place: (weights[place], -place))
    if not weights[first]:
        return []
    return list(range(first, min(start + length + 1, len(ids)), period))


def _longest(ids: np.ndarray) -> tuple[int, int, int]:
    """(start, period, length) of the longest stretch of at least MIN_REPEATS equal parts, with period 0 if there is none."""
    best = 0, 0, 0
    for period in range(MIN_PERIOD, len(ids) // MIN_REPEATS + 1):
        ends = np.concatenate(([-1], np.flatnonzero(ids[period:] != ids[:-period]), [len(ids) - period]))
        gaps = np.diff(ends) - 1  # numbers of ops in a row that equal those a period later
        longest = int(gaps.argmax())
        length = int(gaps[longest]) + period
        # A multiple of a period repeats as well: of these the shortest counts, unless another is longer by a part of its own.
        if length >= MIN_REPEATS * period and length > best[2] + (best[1] and period):
            best = int(ends[longest]) + 1, period, length
    return best
