"""Transfers beside what is computed: which rows of a recording go to a stream of their own, and where the others wait for it.

What is sent, and what members reduce or gather, is done in the order of the program, but only what touches the same memory
waits. Nothing receives there: who receives needs it at once. Pure; knows neither torch nor devices.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Protocol

from gt.ir.instr import FREE
from gt.worker.lives import Definition, Lives, changed, instruction, made, read
from gt.worker.segments import Row
from gt.worker.steps import Step

ASIDE = ("send", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class Aside(Protocol):
    """What puts work on the other stream."""

    def aside(self, step: Step, ids: Sequence[int]) -> Step:
        """The step, done there; what these ids stand for stays until `join`."""

    def join(self, code: list, at: int) -> None:
        """A step: what follows waits for all that was put there."""


def beside(
    rows: Sequence[Row],
    code: Sequence,
    definition: Definition,
    lives: Lives,
    direct: Container[int],
    inside: Callable[[Row], Sequence[Row]],
    other: Aside,
) -> list[Row]:
    """Rows that are recorded as one. direct: definitions that move data by the device alone. inside: rows that one stands for,
    none for a mark.
    """
    found: list[Row] = []
    reading: set[int] = set()  # memory that the other stream reads, and that it writes
    writing: set[int] = set()
    for row in rows:
        within = inside(row)
        touched, change = _touched(within, code, definition, lives)
        moves = _moves(within, code, definition, direct)
        if moves is not None:
            found.append((row[0], other.aside(row[1], [*moves[0], *moves[1]])))
            reading.update(map(lives.root, moves[0]))
            writing.update(map(lives.root, moves[1]))
            writing |= change
            continue
        if touched & writing or change & reading:
            found.append((row[0], other.join))
            reading.clear()
            writing.clear()
        found.append(row)
    if reading or writing:
        end = len(found)
        while end > 1 and not inside(found[end - 1]):  # the mark where it ends
            end -= 1
        found.insert(end, (rows[-1][0], other.join))
    return found


def _moves(
    rows: Sequence[Row], code: Sequence, definition: Definition, direct: Container[int]
) -> tuple[list[int], list[int]] | None:
    """Ids that a transfer reads and makes, None if it is no such."""
    define = definition(code[rows[0][0]]) if len(rows) == 1 and code[rows[0][0]] != FREE else None
    if define is None or define.kind not in ASIDE or define.number not in direct:
        return None
    define, operands = instruction(code, rows[0][0], definition)
    return read(define, operands), [i for i, _ in made(define, operands)]


def _touched(rows: Sequence[Row], code: Sequence, definition: Definition, lives: Lives) -> tuple[set[int], set[int]]:
    """Memory that rows read or make, and of it what they may change."""
    touched: set[int] = set()
    change: set[int] = set()
    for at, _ in rows:
        if code[at] == FREE:
            continue
        define, operands = instruction(code, at, definition)
        touched.update(map(lives.root, (*read(define, operands), *(i for i, _ in made(define, operands)))))
        change.update(map(lives.root, changed(define, operands)))
    return touched, change
