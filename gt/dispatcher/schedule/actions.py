"""A schedule as rows of actions, one row for each worker, and its text: `0F0` is stage, letter, micro-batch.

F forward, B whole backward, I gradient of a stage's inputs, W gradient of its weights (B is I and W in one). Once for a
step and stage, so without micro-batch: L report the loss, R all-reduce gradients over data-parallel workers, O optimizer.
Knows nothing of time, memory or tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gt.errors import ConfigError

EACH, ONCE = "FBIW", "LRO"  # letters of actions for each micro-batch, and once for a step
# ASCII digits (int() takes others too), and few of them: a stage of a billion would be a list of a billion.
ACTION = re.compile(rf"(?a:(\d{{1,6}})(?:([{EACH}])(\d{{1,6}})|([{ONCE}])))")


class Action(NamedTuple):
    """One entry of a row: a stage, a letter, and a micro-batch (-1 for L, R and O)."""

    stage: int
    kind: str
    micro: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}" if self.micro >= 0 else f"{self.stage}{self.kind}"


Row = Sequence[Action]
Rows = Sequence[Row]


def text(rows: Rows) -> str:
    """One line for each worker, with commas between actions."""
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def parse(written: str) -> tuple[tuple[Action, ...], ...]:
    """Inverse of `text`. Blanks, empty lines and `# ...` are ignored. ConfigError names the token and its place."""
    lines = ((number, line.partition("#")[0].strip()) for number, line in enumerate(written.splitlines(), 1))
    return tuple(_row(number, line) for number, line in lines if line)


def _row(number: int, line: str) -> tuple[Action, ...]:
    return tuple(_action(token.strip(), number, place) for place, token in enumerate(line.split(","), 1))


def _action(token: str, line: int, place: int) -> Action:
    match = ACTION.fullmatch(token)
    if match is None:
        raise ConfigError(
            f"line {line}, action {place}: {token!r} is not an action; want a stage, one of {' '.join(EACH)} and a "
            f"micro-batch, as 0F0, or a stage and one of {' '.join(ONCE)}, as 0R"
        )
    stage, kind, micro, once = match.groups()
    return Action(int(stage), once) if once else Action(int(stage), kind, int(micro))


def members(rows: Rows) -> tuple[tuple[int, ...], ...]:
    """The rows (workers) of each stage. ConfigError for a stage in no row, or with different actions in its rows."""
    workers_of: dict[int, list[int]] = {}
    for worker, row in enumerate(rows):
        for stage in {action.stage for action in row}:
            workers_of.setdefault(stage, []).append(worker)
    missing = [stage for stage in range(max(workers_of, default=-1) + 1) if stage not in workers_of]
    if missing or not workers_of:
        raise ConfigError(f"stage {missing[0] if missing else 0} is in no row; stages are numbered from 0")
    for stage, workers in workers_of.items():
        first, *others = ({action for action in rows[worker] if action.stage == stage} for worker in workers)
        for worker, other in zip(workers[1:], others):
            for action in sorted(first ^ other):
                raise ConfigError(f"stage {stage} is in rows {workers[0]} and {worker}, and {action} is in one of them only")
    return tuple(tuple(workers_of[stage]) for stage in range(len(workers_of)))


def placement(rows: Rows) -> tuple[int, ...]:
    """The worker of each stage. ConfigError for a stage in two rows, or in none."""
    rows_of_stage = members(rows)
    shared = next((stage for stage, own_rows in enumerate(rows_of_stage) if len(own_rows) > 1), None)
    if shared is not None:
        raise ConfigError(
            f"stage {shared} is in rows {rows_of_stage[shared][0]} and {rows_of_stage[shared][1]}; want a worker for each stage"
        )
    return tuple(own_rows[0] for own_rows in rows_of_stage)


def micro_batches(rows: Rows) -> int:
    """The number of micro-batches: one more than the largest."""
    return 1 + max((action.micro for row in rows for action in row), default=-1)


def check(rows: Rows, count: int | None = None) -> None:
    """ConfigError unless every stage has each micro-batch's F once in each of its rows, and its B, or its I and W, once.

    `count` is the number of micro-batches, by default that of the rows. The simulator checks the order.
    """
    count = micro_batches(rows) if count is None else count
    seen: set[Action] = set()
    for row in rows:
        own: set[Action] = set()
        for action in row:
            if action in own:
                raise ConfigError(f"{action} is in a row twice, want it once")
            if action.micro >= count:
                raise ConfigError(f"{action} has micro-batch {action.micro}, want 0 to {count - 1}")
            own.add(action)
        seen |= own
    for stage in range(len(members(rows))):
        for micro in range(count):
            _complete(seen, stage, micro)


def _complete(seen: set[Action], stage: int, micro: int) -> None:
    kinds = "".join(kind for kind in EACH if Action(stage, kind, micro) in seen)
    if kinds not in ("FB", "FIW"):
        has = " ".join(str(Action(stage, kind, micro)) for kind in kinds) or "nothing"
        raise ConfigError(f"stage {stage} has {has} of micro-batch {micro}; want F and B, or F, I and W")


def forwards(rows: Rows) -> tuple[tuple[Action, ...], ...]:
    """Rows without their backward actions."""
    return tuple(tuple(action for action in row if action.kind not in "BIW") for row in rows)


def whole(rows: Iterable[Row]) -> tuple[tuple[Action, ...], ...]:
    """Rows as tuples."""
    return tuple(map(tuple, rows))
