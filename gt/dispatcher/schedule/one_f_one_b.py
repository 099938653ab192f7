"""The schedules GPipe, 1F1B and interleaved 1F1B: rows of F and B for each worker.

GPipe: Huang et al., 2019. 1F1B: PipeDream, Narayanan et al., 2019; with flushes, as in Megatron-LM. Interleaved 1F1B:
Narayanan et al., Efficient large-scale language model training on GPU clusters, 2021. A table follows from the worker of each
stage and the number of micro-batches alone; costs play no part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gt.dispatcher.schedule.actions import Action
from gt.dispatcher.schedule.placement import Placement, mates, want_distinct, want_turns

List = list[list[Action]]


def gpipe(workers: Placement, m: int) -> List:
    """All forwards, then all backwards. Any placement. Bubble (p-1)T, peak m activations."""
    return [
        [Action(stage, kind, i) for kind, order in (("F", own), ("B", own[::-1])) for stage in order for i in range(m)]
        for own in mates(workers)
    ]


def one_f_one_b(workers: Placement, m: int) -> List:
    """Stage s of p: p-s forwards, then backward and forward in turns. GPipe's bubble, peak min(m, p-s) activations."""
    want_distinct("1f1b", workers)
    return depths(workers, m, [len(workers) - stage for stage in range(len(workers))])


def depths(workers: Placement, m: int, most: Sequence[int]) -> List:
    """1F1B with at most most[s] micro-batches in flight in stage s. No stage may have more than the stage before it."""
    rows: List = [[] for _ in workers]
    for stage, worker in enumerate(workers):
        forwards, backwards = ([Action(stage, kind, i) for i in range(m)] for kind in "FB")
        rows[worker] = list(alternate(forwards, backwards, min(m, most[stage]) - 1))
    return rows


def interleaved(workers: Placement, m: int) -> List:
    """Each worker has v stages, and the workers take turns: bubble (p-1)T/v.

    The r-th worker's peak is [(v-1)p + 2(p-1-r) + 1]/v activations of all its stages, where p divides m.
    """
    want_turns("interleaved", workers, least=2)
    return loops(workers, m, 2)


def loops(workers: Placement, m: int, slope: int) -> List:
    """Rows in which a worker starts with the forwards of a round in all its stages but the last.

    It adds `slope` forwards for each worker behind it.

    A round has about as many micro-batches as there are workers, and passes a worker's stages one after the other. Rounds may
    differ in size; Megatron-LM wants p to divide m.
    """
    # Example, worker 0 of 2 with stages 0 and 2, and 4 micro-batches in rounds of 2. Its forwards are
    # 0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3: a round passes both of its stages before the next round begins.
    rows = []
    for own in mates(workers):
        rounds = list(parts(m, len(set(workers))))
        forwards = [Action(stage, "F", i) for batches in rounds for stage in own for i in batches]
        backwards = [Action(stage, "B", i) for batches in rounds for stage in reversed(own) for i in batches]
        # Warm-up: a full round in all stages but the last, then `slope` forwards for each worker behind. Megatron-LM's
        # interleaved schedule has slope 2; 1 is that of plain 1F1B, whose order ZB-H1 takes.
        after = len(rows_after(workers, own[0]))
        warm = (len(own) - 1) * len(rounds[0]) + slope * after
        rows.append(list(alternate(forwards, backwards, min(warm, len(forwards)))))
    return rows


def rows_after(workers: Placement, stage: int) -> Placement:
    """The workers of the later stages in the first turn."""
    return workers[stage + 1 : len(set(workers))]


def parts(m: int, p: int) -> Iterator[range]:
    """Micro-batches in m // p rounds whose sizes differ by one at most, larger rounds first."""
    count, start = max(1, m // p), 0
    for i in range(count):
        size = m // count + (i < m % count)
        yield range(start, start + size)
        start += size


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm: int) -> Iterator[Action]:
    """`warm` forwards, then forward and backward in turns, then the remaining backwards."""
    yield from forwards[:warm]
    for forward, backward in zip(forwards[warm:], backwards):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warm :]
