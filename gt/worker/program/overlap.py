"""Overlap of communication and compute: moves transfers of a recording to a side stream, and inserts joins.

Sends and collectives keep the order of the program; only a row that touches the same memory waits for them. Receives stay on
the main stream, since their readers follow at once. Pure; knows neither torch nor devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Protocol

from gt.ir.dataflow import AliasSets, Definition, instruction, makes, reads, writes
from gt.ir.instr import COMMUNICATION, FREE, RECEIVES
from gt.worker.instructions.step import Row, Step
from gt.worker.program.runner import ProgramRunner

ON_SIDE_STREAM = COMMUNICATION - RECEIVES


class SideStream(Protocol):
    """A stream for transfers."""

    def on_side_stream(self, step: Step, ids: Sequence[int], name: str) -> Step:
        """The step, done there. Tensors of these ids stay alive until the transfer is joined."""

    def join(self, count: int) -> Step:
        """A step after which rows wait for the first `count` transfers."""


@dataclass(frozen=True, slots=True)
class RecordedProgram:
    """A program that is about to be recorded, and what is known of it."""

    code: Sequence
    definition: Definition
    lives: AliasSets
    device_only: Container[int]  # definitions that move data by the device alone
    within: Callable[[Row], Sequence[Row]]  # instructions that a row stands for, none for a mark


def evicted_places(rows: Sequence[Row], program: RecordedProgram) -> set[int]:
    """Places of rows that use memory which the program evicts. It comes back elsewhere, where no recording would find it."""
    root, used = program.lives.root, defaultdict[int, set[int]](set)
    evicted: set[int] = set()
    for row in rows:
        for at, _ in program.within(row):
            define, operands = instruction(program.code, at, program.definition)
            if define is not None:
                # `root` takes an id to the tensor whose memory it shares, so views of evicted tensors are found too.
                used[row[0]].update(map(root, (*reads(define, operands), *makes(define, operands))))
                evicted.update(map(root, reads(define, operands) if define.kind == "evict" else ()))
    return {place for place, memory in used.items() if not evicted.isdisjoint(memory)}


def group_collectives(rows: Sequence[Row], code: Sequence, runner: ProgramRunner) -> tuple[list[Row], dict[int, list[Row]]]:
    """Rows in which each batch of collectives is one row, and the rows that it stands for, by its place.

    A batch is the same in all replays and on all members, or its members would not meet.
    """
    grouped: list[Row] = []
    groups: dict[int, list[Row]] = {}
    batch: list[Row] = []
    ended: list[Row] = []  # frees within a batch: its tensors are needed until all of it is done
    missing = 0
    for at, step in rows:
        define = None if code[at] == FREE else runner.definition(code[at])
        # `together count` announces a batch: the next `count` instructions belong to it, with frees in between.
        if define is not None and define.kind == "together":
            missing, batch, ended = define.payload["count"], [], []
        elif missing and define is not None:
            batch.append((at, step))
            missing -= 1
            if not missing:
                groups[batch[0][0]] = batch
                grouped += [(batch[0][0], _batch_step(batch, runner)), *ended]
        else:
            (ended if missing else grouped).append((at, step))
    assert not missing, f"{missing} collectives of a batch are in another definition"
    return grouped, groups


def _batch_step(rows: Sequence[Row], runner: ProgramRunner) -> Step:
    def step(code: list, at: int) -> None:
        with runner.context.plane.batch() as failures:
            runner.run_rows(rows)  # all of them, even if one fails: the other members do not know of that
        for number, error in failures:
            at, _ = rows[number]
            runner.fail(code[at], code, at, runner.base, error)

    return step


def overlap_transfers(rows: Sequence[Row], program: RecordedProgram, stream: SideStream) -> list[Row]:
    """Rows of one recording, with transfers on the side stream and a join before each row that needs one."""
    code, definition, lives, within = program.code, program.definition, program.lives, program.within
    scheduled: list[Row] = []
    reading: dict[int, int] = {}  # memory that the side stream reads -> the last transfer that does, counted from 1
    writing: dict[int, int] = {}  # the same of memory that it writes
    count = 0

    # Transfers run in order on the side stream, so a join with one is a join with all before it: one number for each memory is
    # enough. A row waits for transfers that write what it touches, and for those that read what it changes.
    def join(number: int, at: int, place: int) -> None:
        scheduled.insert(place, (at, stream.join(number)))
        for under_way in (reading, writing):
            for memory in [memory for memory, last in under_way.items() if last <= number]:
                del under_way[memory]

    for row in rows:
        inside = within(row)
        # Hazards as in a processor's scoreboard: read after write, write after read, write after write.
        touched, change = _touched(inside, code, definition, lives)
        moves = _moves(inside, code, definition, program.device_only)
        if moves is not None:
            scheduled.append((row[0], stream.on_side_stream(row[1], [*moves[0], *moves[1]], moves[2])))
            count += 1
            reading.update(dict.fromkeys(map(lives.memory, moves[0]), count))
            writing.update(dict.fromkeys([*map(lives.memory, moves[1]), *change], count))
            continue
        # Whatever the row touches must not be under way in a write; whatever it changes must not be under way in a read.
        last = max([writing.get(i, 0) for i in touched] + [reading.get(i, 0) for i in change], default=0)
        if last:
            join(last, row[0], len(scheduled))
        scheduled.append(row)

    # A recording has to end with its side stream joined: CUDA refuses to end a capture with unjoined work.
    if reading or writing:
        end = len(scheduled)
        while end > 1 and not within(scheduled[end - 1]):  # the mark at the end
            end -= 1
        join(count, rows[-1][0], end)
    return scheduled


def _moves(
    rows: Sequence[Row], code: Sequence, definition: Definition, direct: Container[int]
) -> tuple[list[int], list[int], str] | None:
    """Ids that transfers read, ids that they make, and their kind; None if a row is no transfer for the side stream."""
    used: list[int] = []
    outputs: list[int] = []
    kind = ""
    for at, _ in rows:
        define, operands = instruction(code, at, definition)
        if define is None or define.kind not in ON_SIDE_STREAM or define.number not in direct:
            return None
        kind = define.kind
        used += reads(define, operands)
        outputs += makes(define, operands)
    return (used, outputs, kind) if rows else None


def _touched(rows: Sequence[Row], code: Sequence, definition: Definition, lives: AliasSets) -> tuple[set[int], set[int]]:
    """Memory that rows read or make, and the part of it that they may change."""
    touched: set[int] = set()
    change: set[int] = set()
    for at, _ in rows:
        define, operands = instruction(code, at, definition)
        if define is not None:
            touched.update(map(lives.memory, (*reads(define, operands), *makes(define, operands))))
            change.update(map(lives.memory, writes(define, operands)))
    return touched, change
