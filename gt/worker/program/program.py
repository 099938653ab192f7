"""A recorded stream bound once: its steps in a row, called one after the other when its instruction comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from gt.errors import ProtocolError
from gt.ir.dataflow import places
from gt.ir.instr import FREE
from gt.worker.context import Step
from gt.worker.program.partition import Row

Bound = dict[int, tuple[Step, int]]  # definition -> what to call, and how many numbers it takes


def rows(code: Sequence, steps: Bound, tensors: dict[int, Any]) -> list[Row]:
    """The instructions of a stream; ProtocolError for a number that was never defined."""
    found: list[Row] = []
    for at, end in places(code, lambda number: steps[number][1] - 2 if number in steps else 0):
        number = code[at]
        if number == FREE:
            found.append((at, _freeing(tuple(code[at + 3 : end]), tensors)))
        elif number in steps:
            found.append((at, steps[number][0]))
        else:
            raise ProtocolError(f"instruction {number} of a program was never defined")
    return found


def _freeing(ids: tuple[int, ...], tensors: dict[int, Any]) -> Step:
    forget: Callable = tensors.pop

    def step(code: list, at: int) -> None:
        for i in ids:
            forget(i, None)

    return step


Stamp = tuple[str, float, float]  # an action, its start and end in seconds of the monotonic clock


def program(
    payload: dict[str, Any],
    steps: Bound,
    tensors: dict[int, Any],
    play: Callable[[list[Row], list, int], None],
    stamp: Callable[[list[Stamp]], None],
    fold: Callable[[list[Row], list], list[Row]],
    rewind: Callable[[list], None],
    prepare: Callable[[list[tuple[str, list[Row]]], list, list[int]], None],
) -> Step:
    """The step that carries out a program: `play(rows, code, offset of its seqs)`, action by action.

    stamp: is told when the actions of a replay were, in the order in which they began. fold: rows with what is compiled as
    one. rewind: is told the channels at the start. prepare: called after a replay with the actions, the code and its places
    for random numbers; it may put other actions in their place.
    """
    code = list(payload["code"])
    parts = [(name, fold(part, code)) for name, part in _cut(rows(code, steps, tensors), payload["actions"])]
    drawn, channels = list(payload["randoms"]), payload["channels"]
    randoms = [(place, code[place + 1]) for place in drawn]

    def step(stream: list, at: int) -> None:
        seed, counter = stream[at], stream[at + 1]
        for place, relative in randoms:
            code[place], code[place + 1] = seed, counter + relative
        if channels:
            rewind(channels)
        found: list[Stamp] = []
        for name, part in parts:
            start = monotonic()
            play(part, code, stream[at - 1])
            if name:
                found.append((name, start, monotonic()))
        stamp(found)
        prepare(parts, code, drawn)

    return step


def drawing(engine: Any, step: Step) -> Step:
    """A program's step where the engine's device is told first what it draws from."""
    draw_from = getattr(engine, "draw_from", None)
    if draw_from is None:
        return step

    def keyed(stream: list, at: int) -> None:
        draw_from(stream[at], stream[at + 1])
        step(stream, at)

    return keyed


def _cut(found: list[Row], actions: Sequence) -> list[tuple[str, list[Row]]]:
    """Rows by action."""
    parts: list[tuple[str, list[Row]]] = [("", [])]
    begins = dict(actions)
    for row in found:
        if row[0] in begins:
            parts.append((begins[row[0]], []))
        parts[-1][1].append(row)
    return [(name, part) for name, part in parts if part]
