"""`auto`: the fastest schedule within a memory limit, by simulation of named tables and of orders filled by costs.

The named schedules are candidates too, so the choice is never slower than the best of them. Less memory breaks ties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from gt.dispatcher.schedule.actions import Action, Rows, forwards
from gt.dispatcher.schedule.costs import Costs
from gt.dispatcher.schedule.fill import fill
from gt.dispatcher.schedule.greedy import greedy
from gt.dispatcher.schedule.insert_epilogue import insert_epilogue
from gt.dispatcher.schedule.one_f_one_b import depths, loops
from gt.dispatcher.schedule.placement import Placement, blocks, expand, mates, turns
from gt.dispatcher.schedule.simulate import simulate
from gt.errors import ConfigError

Table = Callable[[Placement, int], Rows]
Judged = tuple[float, float, str, Rows]  # makespan, largest peak, name, rows
LATE = (0.0, 0.5, 1.0)  # part of its time by which a weight gradient may exceed its gap
AHEAD = (1.0, 1.5, 2.0, 3.0)  # forwards that a stage runs ahead of each later stage: 2 hides transfers as long as a stage
CLOSE = 1 + 1e-9


class NoRoom(ConfigError):
    """No schedule fits the memory limit. text: a message with `{}` for each amount, which is in the unit of the costs."""

    def __init__(self, text: str, *amounts: float) -> None:
        self.text, self.amounts = text, amounts
        super().__init__(self.said(lambda amount: f"{amount:g}"))

    def said(self, size: Callable[[float], str]) -> str:
        """The message. size: formats an amount."""
        return self.text.format(*map(size, self.amounts))


def choose(
    tables: Mapping[str, Table],
    workers: Placement,
    micro_batches: int,
    costs: Costs,
    limits: Sequence[float],
    backward: bool = True,
) -> tuple[str, Rows]:
    """Name and rows of the best candidate. One that is no table is named `auto`, with the source of its order."""
    return best(candidates(tables, workers, micro_batches, costs, limits), micro_batches, costs, limits, backward)


def best(
    made: Iterable[tuple[str, Rows]], micro_batches: int, costs: Costs, limits: Sequence[float], backward: bool = True
) -> tuple[str, Rows]:
    """The fastest of named rows within the limits, with L, R and O. NoRoom if none fits."""
    shortest: Judged | None = None
    least = float("inf")  # the smallest peak of all candidates, for the error
    for name, made_so in made:
        rows = made_so if backward else forwards(made_so)
        line = simulate(rows, costs)
        least = min(least, max(line.peak))
        # The cheap tests come first: a placement of L, R and O costs several simulations.
        if any(peak > limit * CLOSE for peak, limit in zip(line.peak, limits)):
            continue
        if shortest is not None and line.makespan > shortest[0] * CLOSE:
            continue  # L, R and O never make a step shorter
        rows = insert_epilogue(rows, costs)
        judged = (simulate(rows, costs).makespan, max(line.peak), name, rows)
        if (
            shortest is None
            or judged[0] * CLOSE < shortest[0]
            or (judged[0] <= shortest[0] * CLOSE and judged[1] * CLOSE < shortest[1])
        ):
            shortest = judged
    if shortest is None:
        raise NoRoom(
            f"no schedule of {micro_batches} micro-batches fits {{}} of activations a worker, the smallest needs {{}}: "
            "try smaller micro-batches, or other stages",
            min(limits),
            least,
        )
    return shortest[2], shortest[3]


def candidates(
    tables: Mapping[str, Table], workers: Placement, micro_batches: int, costs: Costs, limits: Sequence[float]
) -> Iterator[tuple[str, Rows]]:
    """Named schedules that permit the placement, then their orders filled by costs, then orders that only `auto` has."""
    for name in tables:
        with suppress(ConfigError):  # it does not permit the placement
            yield name, named(tables, name, workers, micro_batches, costs)
    # Orders are made with blocks as stages, and with all stages apart: other actions may then come within a block. Each order
    # is filled once, whichever table it is from.
    known: set[tuple] = set()
    runs = blocks(workers)
    for grouping in (runs, single(workers)):
        merged = costs.merged(grouping)
        for name, rows in orders(tables, [workers[run[0]] for run in grouping], micro_batches, merged, limits):
            # (stage, micro-batch) without the letter: in a row the first of a pair is its F, the second its B or I.
            order = tuple(tuple(action[::2] for action in row if action.kind != "W") for row in rows)
            if order in known:
                continue
            known.add(order)
            for late in LATE:
                filled = fill(rows, merged, limits, late)
                if filled is not None:
                    yield f"auto, {name}", expand(filled, grouping)
        if len(runs) == len(workers):
            break  # no block has two stages, so the second grouping is the first
    # The order with least memory: each micro-batch goes forward and comes back before the next one begins.
    if min(limits) < float("inf"):
        yield (
            "auto, one by one",
            [
                [
                    Action(stage, kind, i)
                    for i in range(micro_batches)
                    for kind, order in (("F", own), ("B", own[::-1]))
                    for stage in order
                ]
                for own in mates(workers)
            ],
        )


def single(workers: Placement) -> list[list[int]]:
    return [[stage] for stage in range(len(workers))]


def named(tables: Mapping[str, Table], name: str, workers: Placement, micro_batches: int, costs: Costs | None) -> Rows:
    """Rows of a named schedule. With costs, W of zero-bubble schedules is placed by these.

    Consecutive stages of one worker count as one stage, except the two at the tip of a V.
    """
    grouping = single(workers) if name == "zb-v" else blocks(workers)
    rows = tables[name]([workers[run[0]] for run in grouping], micro_batches)
    if costs is not None and any(action.kind == "W" for row in rows for action in row):
        rows = by_costs(rows, costs.merged(grouping))
    return expand(rows, grouping)


def orders(
    tables: Mapping[str, Table], workers: Placement, micro_batches: int, costs: Costs, limits: Sequence[float]
) -> Iterator[tuple[str, Rows]]:
    """Orders of F and I that `fill` completes, each with the name of its source."""
    for name, table in tables.items():
        with suppress(ConfigError):
            yield f"from {name}", table(workers, micro_batches)
    taken = turns(workers)
    if taken == 1:
        for ahead in AHEAD:
            yield "1f1b ahead", depths(workers, micro_batches, within(workers, costs, limits, ahead))
    elif taken > 1:
        yield "interleaved ahead", loops(workers, micro_batches, 2)
        yield "interleaved ahead", loops(workers, micro_batches, 3)
    # A limit of memory decides how far list scheduling runs ahead, so it is tried with several, in parts of 1F1B's memory.
    for part in (0.5, 1.0, 1.5, 2.0):
        greedy_rows = greedy(
            workers, micro_batches, costs, [min(limit, part * most) for limit, most in zip(limits, whole(workers, costs))]
        )
        if greedy_rows is not None:
            yield "greedy", greedy_rows


def whole(workers: Placement, costs: Costs) -> list[float]:
    """Activation memory of 1F1B: each worker's stages hold as many micro-batches as there are workers."""
    own = mates(workers)
    return [len(own) * sum(costs.activation[stage] for stage in stages) for stages in own]


def within(workers: Placement, costs: Costs, limits: Sequence[float], ahead: float) -> list[int]:
    """Limit of micro-batches in flight for each stage, by memory; never more than for the stage before."""
    fitting: list[int] = []
    for stage, worker in enumerate(workers):
        most = 1 + int(ahead * (len(workers) - 1 - stage))
        room = limits[worker] / costs.activation[stage] if costs.activation[stage] else most
        # More than the stage before has in flight would never arrive.
        fitting.append(int(max(1, min([most, room * CLOSE, *fitting[-1:]]))))
    return fitting


def by_costs(rows: Rows, costs: Costs) -> Rows:
    """A zero-bubble table, or its order filled by costs where this is faster in no more memory."""
    line = simulate(rows, costs)
    filled = (fill(rows, costs, line.peak, late) for late in LATE)
    tables = [rows, *(table for table in filled if table is not None)]
    return min(tables, key=lambda table: simulate(table, costs).makespan)
