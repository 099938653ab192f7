"""Transfers beside what is computed: which rows of a recording go to a stream of their own, and where the others wait for it.

What is sent, and what members reduce or gather, is done in the order of the program, but only what touches the same memory
waits. Nothing receives there: who receives needs it at once. Pure; knows neither torch nor devices.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from gt.ir.dataflow import AliasSets, Definition, instruction, makes, reads, writes
from gt.ir.instr import COMMUNICATION, FREE, RECEIVES
from gt.worker.context import Step
from gt.worker.program.partition import Row

ASIDE = COMMUNICATION - RECEIVES  # done on the other stream: who receives needs it at once

Batch = Callable[[], AbstractContextManager]
Each = Callable[[Sequence[Row]], Any]  # carries rows out, the others also where one fails; whether all went well


class Aside(Protocol):
    """What puts work on the other stream."""

    def aside(self, step: Step, ids: Sequence[int], name: str) -> Step:
        """The step, done there; what these ids stand for stays until it is joined."""

    def join(self, count: int) -> Step:
        """What follows waits for the first `count` of them."""


def together(
    rows: Sequence[Row], code: Sequence, definition: Definition, batch: Batch, each: Each
) -> tuple[list[Row], dict[int, list[Row]]]:
    """Rows with all-reduces that may be done as one as one row, in all replays or members would not meet; by its place, what
    each stands for. batch: around them.
    """
    found: list[Row] = []
    groups: dict[int, list[Row]] = {}
    some: list[Row] = []
    ended: list[Row] = []  # frees between them: all are needed until all are done
    missing = 0
    for at, step in rows:
        define = None if code[at] == FREE else definition(code[at])
        if define is not None and define.kind == "together":
            missing, some, ended = define.payload["count"], [], []
        elif missing and define is not None:
            some.append((at, step))
            missing -= 1
            if not missing:
                groups[some[0][0]] = some
                found += [(some[0][0], _batched(some, batch, each)), *ended]
        else:
            (ended if missing else found).append((at, step))
    assert not missing, f"{missing} all-reduces are in another definition than what is done with them"
    return found, groups


def _batched(rows: Sequence[Row], batch: Batch, each: Each) -> Step:
    def step(code: list, at: int) -> None:
        with batch():
            each(rows)  # all of them whatever becomes of one: the other members do not know of it

    return step


def beside(
    rows: Sequence[Row],
    code: Sequence,
    definition: Definition,
    lives: AliasSets,
    direct: Container[int],
    inside: Callable[[Row], Sequence[Row]],
    other: Aside,
) -> list[Row]:
    """Rows that are recorded as one. direct: definitions that move data by the device alone. inside: rows that one stands for,
    none for a mark.
    """
    found: list[Row] = []
    reading: dict[int, int] = {}  # memory that the other stream reads, by the last that does, counted from 1
    writing: dict[int, int] = {}  # and that it writes
    count = 0

    def join(number: int, at: int, place: int) -> None:
        found.insert(place, (at, other.join(number)))
        for under_way in (reading, writing):
            for memory in [memory for memory, last in under_way.items() if last <= number]:
                del under_way[memory]

    for row in rows:
        within = inside(row)
        touched, change = _touched(within, code, definition, lives)
        moves = _moves(within, code, definition, direct)
        if moves is not None:
            found.append((row[0], other.aside(row[1], [*moves[0], *moves[1]], moves[2])))
            count += 1
            reading.update(dict.fromkeys(map(lives.memory, moves[0]), count))
            writing.update(dict.fromkeys([*map(lives.memory, moves[1]), *change], count))
            continue
        last = max([writing.get(i, 0) for i in touched] + [reading.get(i, 0) for i in change], default=0)
        if last:
            join(last, row[0], len(found))
        found.append(row)
    if reading or writing:
        end = len(found)
        while end > 1 and not inside(found[end - 1]):  # the mark where it ends
            end -= 1
        join(count, rows[-1][0], end)
    return found


def _moves(
    rows: Sequence[Row], code: Sequence, definition: Definition, direct: Container[int]
) -> tuple[list[int], list[int], str] | None:
    """Ids that transfers read and make, and what they are; None if they are no such."""
    used: list[int] = []
    made: list[int] = []
    kind = ""
    for at, _ in rows:
        define, operands = instruction(code, at, definition)
        if define is None or define.kind not in ASIDE or define.number not in direct:
            return None
        kind = define.kind
        used += reads(define, operands)
        made += makes(define, operands)
    return (used, made, kind) if rows else None


def _touched(rows: Sequence[Row], code: Sequence, definition: Definition, lives: AliasSets) -> tuple[set[int], set[int]]:
    """Memory that rows read or make, and of it what they may change."""
    touched: set[int] = set()
    change: set[int] = set()
    for at, _ in rows:
        define, operands = instruction(code, at, definition)
        if define is not None:
            touched.update(map(lives.memory, (*reads(define, operands), *makes(define, operands))))
            change.update(map(lives.memory, writes(define, operands)))
    return touched, change
