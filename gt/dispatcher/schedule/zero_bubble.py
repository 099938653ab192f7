"""Zero-bubble schedules (Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism, ICLR 2024): W, which no action waits for,
fills gaps.

These are the tables for equal times. With costs, `fill` places W again.
"""

from __future__ import annotations

from collections.abc import Iterator

from gt.dispatcher.schedule.actions import Action
from gt.dispatcher.schedule.one_f_one_b import List, loops
from gt.dispatcher.schedule.placement import Placement, want_turns, want_v


def zb_h1(workers: Placement, m: int) -> List:
    """1F1B's order of F and I, with W delayed by r further I on the r-th worker.

    Bubble (p-1)(TF+TB-TW) where W is the shortest, at most p activations on every worker. Where workers take v turns this is
    the interleaved form: a v-th of the bubble, in the same memory if p divides m.
    """
    want_turns("zb-h1", workers)
    order = list(dict.fromkeys(workers))
    rows = loops(workers, m, 1)
    return [list(put_off(row, order.index(worker))) for worker, row in enumerate(rows)]


def put_off(row: list[Action], by: int) -> Iterator[Action]:
    """Each B as I, with its W `by` backwards later."""
    late: list[Action] = []
    for stage, kind, micro in row:
        if kind == "F":
            yield Action(stage, kind, micro)
            continue
        yield Action(stage, "I", micro)
        late.append(Action(stage, "W", micro))
        if len(late) > by:
            yield late.pop(0)
    yield from late


def zb_v(workers: Placement, m: int) -> List:
    """ZB-V: the r-th worker has stages r and 2p-1-r, so the first worker also has the last stage, and starts backward early.

    Bubble (p-1)TF/2 at equal times, with TF of a worker's two stages together; peak p activations of both.
    """
    p = want_v("zb-v", workers)
    rows: List = [[] for _ in range(p)]
    for r, worker in enumerate(workers[:p]):
        rows[worker] = [action for action in vee(r, p, max(m, 2 * p - 1)) if action.micro < m]
    return rows


def vee(r: int, p: int, m: int) -> Iterator[Action]:
    """The r-th worker's row of ZB-V for at least 2p - 1 micro-batches: its stage on the way down (a) and up again (b)."""
    # "Fb" is the next F of stage b. `gone` counts how often each was done, which is the micro-batch of its next action.
    stages = {"a": r, "b": 2 * p - 1 - r}
    gone = dict.fromkeys(("Fa", "Fb", "Ia", "Ib", "Wa", "Wb"), 0)

    def do(plan: str, times: int = 1) -> Iterator[Action]:
        for _ in range(times):
            for step in plan.split():
                yield Action(stages[step[1]], step[0], gone[step])
                gone[step] += 1

    # Warm-up: F of a until the first micro-batch is back at b; F of both until its gradient is at b; then b alone until the
    # gradient is at a.
    yield from do("Fa", 2 * (p - r) - 1)
    yield from do("Fb Fa", r)
    yield from do("Fb Ib Wb", p - r)
    # Steady state: every turn has each of the six actions once.
    while gone["Fb"] < m:
        if gone["Fa"] < m:
            yield from do("Fa")
        yield from do("Ia Wa Fb Ib Wb")
    # Cool-down. W are put off, since only I are waited for; those that are left are last.
    yield from do("Ia Ib", r)
    yield from do("Ia Wa", p - r)
    yield from do("Wb", m - gone["Wb"])
    yield from do("Wa", m - gone["Wa"])
