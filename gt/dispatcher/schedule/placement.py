"""Placement of stages on workers, and the placements that schedules permit: distinct workers, turns, or a V.

Consecutive stages of one worker are a block, which a schedule treats as one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gt.dispatcher.schedule.actions import Action, Rows
from gt.dispatcher.schedule.costs import Costs
from gt.errors import ConfigError

Placement = Sequence[int]  # the worker of each stage (or block); workers are numbered from 0 without gaps
Members = tuple[int, ...]  # the workers of a stage


def spread(meshes: Sequence[Members]) -> list[Members]:
    """The rows of each stage in a schedule. Each mesh has a row; a stage over several meshes is in all of their rows.

    meshes: the workers (processes) of each stage. A row stands for one or more processes that do the same actions. Examples:

        meshes                          rows of a schedule        rows of each stage
        (0, 1) (2, 3) (0, 1)            0: (0, 1), 1: (2, 3)      (0,) (1,) (0,)       processes 0 and 1 have two stages
        (0, 1) (2, 3) (0, 1, 2, 3)      0: (0, 1), 1: (2, 3)      (0,) (1,) (0, 1)     a head on all processes
        (0,) (1,) (1, 2)                0: (0,), 1: (1,), 2: (1, 2)   (0,) (1,) (2,)   process 2 has no row of its own
    """
    # Rows are the smallest meshes: those that contain no other one.
    different = list(dict.fromkeys(meshes))
    rows = [mesh for mesh in different if not any(set(other) < set(mesh) for other in different)]
    stages = [tuple(n for n, row in enumerate(rows) if set(row) <= set(mesh)) for mesh in meshes]

    # A stage is a meeting of rows only if it is exactly their union, and no process is in two rows. Else each mesh is a row of
    # its own, and a simulation takes rows that share a process for independent workers.
    apart = sum(map(len, rows)) == len({process for row in rows for process in row})
    if apart and all(sum(len(rows[n]) for n in own_rows) == len(mesh) for own_rows, mesh in zip(stages, meshes)):
        return stages
    return [(different.index(mesh),) for mesh in meshes]


def checked(workers: Sequence[int | Members]) -> tuple[Members, ...]:
    """Workers of each stage; ConfigError unless there is a stage, and workers 0 to the largest all have one."""
    stages = tuple((members,) if isinstance(members, int) else tuple(members) for members in workers)
    known = {worker for members in stages for worker in members}
    if not known or min(known) < 0 or len(known) <= max(known) or not all(stages):
        raise ConfigError(f"stages on workers {list(workers)}: want workers numbered from 0, each with a stage")
    return stages


def blocks(workers: Placement) -> list[list[int]]:
    """Runs of consecutive stages with one worker: [[0, 1], [2], [3]] for the stages of workers 0 0 1 0."""
    blocks_of: list[list[int]] = []
    for stage, worker in enumerate(workers):
        if stage and worker == workers[stage - 1]:
            blocks_of[-1].append(stage)
        else:
            blocks_of.append([stage])
    return blocks_of


def expand(rows: Rows, members: Sequence[Sequence[int]]) -> list[list[Action]]:
    """Rows of blocks as rows of stages: F in ascending order of stages, all else in descending order.

    members: the stages of each block. With [[0, 1], [2]] the row 0F0, 0B0 becomes 0F0, 1F0, 1B0, 0B0.
    """
    return [
        [
            Action(stage, action.kind, action.micro)
            for action in row
            for stage in (members[action.stage] if action.kind == "F" else reversed(members[action.stage]))
        ]
        for row in rows
    ]


def mates(workers: Placement) -> list[list[int]]:
    """The stages of each worker."""
    stages_of: list[list[int]] = [[] for _ in range(max(workers) + 1)]
    for stage, worker in enumerate(workers):
        stages_of[worker].append(stage)
    return stages_of


def lags(workers: Sequence, costs: Costs) -> list[float]:
    """Time of the transfer between each stage and the stage before it; 0 within a worker and at both ends.

    There is one entry more than there are stages: lag[s] is before stage s, and lag[s + 1] behind it.
    """
    return [0.0, *(time if a != b else 0.0 for time, (a, b) in zip(costs.transfer, pairwise(workers))), 0.0]


def turns(workers: Placement) -> int:
    """The number of turns that workers take: 2 for 0 1 2 0 1 2, and 0 for an order without turns."""
    # Every turn has each worker once, in the order of the first turn.
    count = len(set(workers))
    whole = len(workers) % count == 0 and all(worker == workers[i % count] for i, worker in enumerate(workers))
    return len(workers) // count if whole else 0


def want_distinct(name: str, workers: Placement) -> None:
    """ConfigError where a worker has two blocks."""
    for worker, own in enumerate(mates(workers)):
        if len(own) > 1:
            raise ConfigError(
                f"{name} wants consecutive stages for each worker, got worker {worker} in {len(own)} places of "
                f"{list(workers)}; try interleaved, zb-v, gpipe or auto"
            )


def want_turns(name: str, workers: Placement, least: int = 1) -> int:
    """The number of turns that workers take; ConfigError where it is less than `least`."""
    count = turns(workers)
    if count < least:
        order = list(dict.fromkeys(workers)) * max(2, least)
        raise ConfigError(
            f"{name} wants workers that take turns{' more than once' if least > 1 else ''}, as {order}, got stages "
            f"(consecutive ones of a worker as one) on workers {list(workers)}; try {'1f1b' if count else 'gpipe'} or auto"
        )
    return count


def want_v(name: str, workers: Placement) -> int:
    """Number p of workers of 2p stages, with i and 2p - 1 - i on one worker; ConfigError with the first pair that is not."""
    count = len(set(workers))
    if len(workers) != 2 * count:
        raise ConfigError(f"{name} wants two stages a worker: {2 * count} stages on {count} workers, got {len(workers)}")
    for stage in range(count):
        other = 2 * count - 1 - stage
        if workers[stage] != workers[other]:
            raise ConfigError(
                f"{name} wants stages {stage} and {other} on one worker, got workers {workers[stage]} and "
                f"{workers[other]}; try 1f1b, interleaved or auto"
            )
    return count
