"""A schedule drawn as text: a line for each worker, time from left to right, and the bubble."""

from __future__ import annotations

from gt.dispatcher.schedule.actions import Row, Rows
from gt.dispatcher.schedule.costs import Costs
from gt.dispatcher.schedule.simulate import Timeline, simulate


def show(rows: Rows, costs: Costs, width: int = 160) -> str:
    """One cell for each unit of time, which is the shortest action; one letter for each column where that exceeds `width`.

    An all-reduce that overlaps compute is not drawn, nor an action shorter than half a column.
    """
    # size: columns of a cell, so that every action's name has room; a blank parts it from the next.
    line = simulate(rows, costs)
    size = 1 + max((len(str(action)) for row in rows for action in row), default=0)
    times = [b - a for start, end in zip(line.start, line.end) for a, b in zip(start, end) if b > a]
    unit = min(times, default=1.0)
    if line.makespan / unit * size > width:
        size, unit = 1, line.makespan / width
    drawn = [_draw(worker, row, line, costs, unit, size) for worker, row in enumerate(rows)]
    longest = len(f"worker {len(rows) - 1}")
    parts = [bubble / line.makespan if line.makespan else 0.0 for bubble in line.bubble]
    return "".join(f"{f'worker {w}':{longest}} |{cells}| {parts[w]:6.2%}\n" for w, cells in enumerate(drawn))


def _draw(worker: int, row: Row, line: Timeline, costs: Costs, unit: float, size: int) -> str:
    """Cells of one worker: an action's name at its start, then dashes to its end."""
    cells = ["."] * round(line.makespan / unit * size)
    for action, start, end in zip(row, line.start[worker], line.end[worker]):
        if action.kind == "R" and costs.overlap:
            continue
        first, last = round(start / unit * size), round(end / unit * size)
        name = str(action) if size > 1 else action.kind
        fill = "-" if size > 1 else action.kind
        span = f"{name}{fill * (last - first)}"[: last - first]
        if size > 1 and span:
            span = span[:-1] + " "
        cells[first:last] = span
    return "".join(cells)
