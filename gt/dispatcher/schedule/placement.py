"""Which worker has which stages, and what of that a schedule needs: distinct workers, taking turns, or a V.

Stages that follow one another on one worker are one block, which schedules take as one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gt.dispatcher.schedule.actions import Action, Rows
from gt.dispatcher.schedule.costs import Costs
from gt.errors import ConfigError

Placement = Sequence[int]  # the worker of each stage, or block; workers are numbered from 0, and each has one
Members = tuple[int, ...]  # the workers of a stage


def spread(meshes: Sequence[Members]) -> list[Members]:
    """The workers of each stage as rows of a schedule: a row for each mesh, a stage over several of them being in all of these.

    meshes: the processes of each stage.
    """
    different = list(dict.fromkeys(meshes))
    rows = [mesh for mesh in different if not any(set(other) < set(mesh) for other in different)]
    found = [tuple(n for n, row in enumerate(rows) if set(row) <= set(mesh)) for mesh in meshes]
    apart = sum(map(len, rows)) == len({process for row in rows for process in row})
    if apart and all(sum(len(rows[n]) for n in some) == len(mesh) for some, mesh in zip(found, meshes)):
        return found
    return [(different.index(mesh),) for mesh in meshes]


def checked(workers: Sequence[int | Members]) -> tuple[Members, ...]:
    """Workers of each stage; ConfigError unless there is a stage, and workers 0 to the largest all have one."""
    found = tuple((some,) if isinstance(some, int) else tuple(some) for some in workers)
    known = {worker for some in found for worker in some}
    if not known or min(known) < 0 or len(known) <= max(known) or not all(found):
        raise ConfigError(f"stages on workers {list(workers)}: want workers numbered from 0, each with a stage")
    return found


def blocks(workers: Placement) -> list[list[int]]:
    """Stages in runs that have one worker."""
    found: list[list[int]] = []
    for stage, worker in enumerate(workers):
        if stage and worker == workers[stage - 1]:
            found[-1].append(stage)
        else:
            found.append([stage])
    return found


def expand(rows: Rows, found: Sequence[Sequence[int]]) -> list[list[Action]]:
    """Rows of blocks as rows of their stages: forwards up, all else down."""
    return [
        [
            Action(stage, action.kind, action.micro)
            for action in row
            for stage in (found[action.stage] if action.kind == "F" else reversed(found[action.stage]))
        ]
        for row in rows
    ]


def mates(workers: Placement) -> list[list[int]]:
    """The stages of each worker."""
    found: list[list[int]] = [[] for _ in range(max(workers) + 1)]
    for stage, worker in enumerate(workers):
        found[worker].append(stage)
    return found


def lags(workers: Sequence, costs: Costs) -> list[float]:
    """Transfer into each stage going forward, and out of it going back: 0 for the first, within a worker, and past the last."""
    return [0.0, *(time if a != b else 0.0 for time, (a, b) in zip(costs.transfer, pairwise(workers))), 0.0]


def turns(workers: Placement) -> int:
    """How often workers take turns: 2 for 0 1 2 0 1 2; 0 where they do not."""
    count = len(set(workers))
    whole = len(workers) % count == 0 and all(worker == workers[i % count] for i, worker in enumerate(workers))
    return len(workers) // count if whole else 0


def want_distinct(name: str, workers: Placement) -> None:
    """ConfigError where a worker has two blocks."""
    for worker, own in enumerate(mates(workers)):
        if len(own) > 1:
            raise ConfigError(
                f"{name} wants the stages of a worker to follow one another; worker {worker} comes {len(own)} times in "
                f"{list(workers)}: try interleaved, zb-v, gpipe or auto"
            )


def want_turns(name: str, workers: Placement, least: int = 1) -> int:
    """How often workers take turns; ConfigError where they do not, or less often than `least`."""
    found = turns(workers)
    if found < least:
        order = list(dict.fromkeys(workers)) * max(2, least)
        raise ConfigError(
            f"{name} wants workers to take turns{' more than once' if least > 1 else ''}, as {order}; stages, those that "
            f"follow on one worker taken as one, are on workers {list(workers)}: try {'1f1b' if found else 'gpipe'} or auto"
        )
    return found


def want_v(name: str, workers: Placement) -> int:
    """Workers p of 2p stages, where i and 2p - 1 - i are on one worker; ConfigError that names the first pair that is not."""
    count = len(set(workers))
    if len(workers) != 2 * count:
        raise ConfigError(f"{name} wants two stages a worker: {2 * count} on {count} workers, and there are {len(workers)}")
    for stage in range(count):
        other = 2 * count - 1 - stage
        if workers[stage] != workers[other]:
            raise ConfigError(
                f"{name} wants stages {stage} and {other} on one worker; they are on workers {workers[stage]} and "
                f"{workers[other]}: try 1f1b, interleaved or auto"
            )
    return count
