"""A recorded stream bound once: its steps in a row, called one after the other when its instruction comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gt.errors import ProtocolError
from gt.ir.instr import FIRST, FREE
from gt.worker.steps import Step

Row = tuple[int, Step]  # place of an instruction in the code, and what to call with the place of its first operand
Bound = dict[int, tuple[Step, int]]  # definition -> what to call, and how many numbers it takes


def rows(code: Sequence, steps: Bound, tensors: dict[int, Any]) -> list[Row]:
    """The instructions of a stream; ProtocolError for a number that was never defined."""
    found: list[Row] = []
    at = 0
    while at < len(code):
        number = code[at]
        if number == FREE:
            count = code[at + 2]
            found.append((at, _freeing(tuple(code[at + 3 : at + 3 + count]), tensors)))
            at += 3 + count
            continue
        if number < FIRST or number not in steps:
            raise ProtocolError(f"instruction {number} of a program was never defined")
        step, size = steps[number]
        found.append((at, step))
        at += size
    return found


def _freeing(ids: tuple[int, ...], tensors: dict[int, Any]) -> Step:
    forget: Callable = tensors.pop

    def step(code: list, at: int) -> None:
        for i in ids:
            forget(i, None)

    return step


def program(
    payload: dict[str, Any], steps: Bound, tensors: dict[int, Any], play: Callable[[list[Row], list, int], None]
) -> Step:
    """The step that carries out a program: `play(rows, code, offset of its seqs)`."""
    code = list(payload["code"])
    found = rows(code, steps, tensors)
    randoms = [(place, code[place + 1]) for place in payload["randoms"]]

    def step(stream: list, at: int) -> None:
        seed, counter = stream[at], stream[at + 1]
        for place, relative in randoms:
            code[place], code[place + 1] = seed, counter + relative
        play(found, code, stream[at - 1])

    return step
