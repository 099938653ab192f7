"""The verifier of passes over a captured step: the same values on every worker, and no deadlock between workers.

The result of a pass is checked, not trusted. Two conditions suffice:

- Data flow. Every instruction is reached by the same definitions as before: the tensors that it reads were made by the same
  instructions, and their memory was written as often. This is the compilers' criterion of a legal reordering.
- Progress. All messages and collectives come about even if no worker goes on before its message is taken. These are
  rendezvous semantics, the weakest assumption about buffers. A receive takes the message that it took before: a channel has
  messages in the order of its sends, so two of one shape that change places would be no deadlock, but wrong values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType

from gt.dispatcher.programs.recording import Code, Instruction
from gt.dispatcher.state.failures import Planned
from gt.ir.dataflow import NONE, Definitions, reaching_definitions
from gt.ir.instr import COLLECTIVES, TRANSFERS

USED_ELSEWHERE = "a tensor that another micro-batch or stage writes"
Messages = Mapping[tuple[Instruction, int], int]  # by a send or receive and its part, the place on its channel
NO_MESSAGES: Messages = MappingProxyType({})


class CannotReorder(Exception):
    """The reason why a step's instructions stay in their order; for a schedule, why the step is no pipeline."""


@dataclass(slots=True)
class DataFlow:
    """The definitions that reach each row of one worker. numbers: of the rows as makers; no two rows have the same.

    shared: as of `gt.ir.dataflow.accesses`.
    """

    rows: Sequence[Instruction]
    numbers: Sequence[int]
    definitions: list[Definitions]
    shared: Mapping[int, int]

    @classmethod
    def of(cls, rows: Sequence[Instruction], shared: Mapping[int, int] = NONE) -> DataFlow:
        return cls(rows, range(len(rows)), reaching_definitions(rows, shared=shared), shared)


class Verifier:
    """Verifies the results of passes, one after the other: the data flow of one is what the next is compared with.

    shared: memory from before, as of `gt.ir.dataflow.accesses`.
    """

    def __init__(self, ops: Mapping[int, Planned], shared: Mapping[int, int]) -> None:
        self._ops, self._shared = ops, shared
        self._flows: dict[int, DataFlow] = {}  # by worker

    def verify(self, old: Code, new: Code) -> None:
        """CannotReorder unless `new` gives the values of `old` on every worker, and no worker waits for ever."""
        flows: dict[int, DataFlow | None] = {}
        for worker, rows in old.items():
            if new[worker] is not rows:
                known = self._flows.get(worker)
                if known is None or known.rows is not rows:
                    known = self._flows[worker] = DataFlow.of(rows, self._shared)
                flows[worker] = check_same_dataflow(worker, known, new[worker], self._ops)
        check_no_deadlock(new, number_messages(old))
        self._flows.update((worker, flow) for worker, flow in flows.items() if flow is not None)


def check_same_dataflow(worker: int, old: DataFlow, new: Sequence[Instruction], ops: Mapping[int, Planned]) -> DataFlow | None:
    """CannotReorder unless every old row is reached by the same definitions, each time that it is executed.

    A new row is an old one, or stands for one: it replaces or repeats that row, or does a part of it on some of its tensors. A
    row that stands for none reads and makes nothing. Returns the data flow of the new rows. None: two of them stand for the
    same row, and a data flow does not tell their results apart.
    """
    # Each new row is counted under the old row that it stands for, so the definitions of both are in the same names.
    numbers = dict(zip(old.rows, old.numbers))
    stands = [numbers[row] if row in numbers else _original(row, numbers) for row in new]
    reached = reaching_definitions(new, stands, old.shared)
    after: dict[int, list[Definitions]] = {number: [] for number in old.numbers}
    for number, definitions in zip(stands, reached):
        if number >= 0:
            after[number].append(definitions)
    for row, want, times in zip(old.rows, old.definitions, after.values()):
        # A row that was left out has no `times`: that is refused too, since something outside of the step may read its tensors.
        if times and all(definitions == want for definitions in times):
            continue
        # An op on lists that is done in parts: together the parts read all that it read, each from the same definitions.
        if len(times) > 1 and set(zip(*want)) == {one for definitions in times for one in zip(*definitions)}:
            continue
        op = ops.get(row.seq)
        where = f"{op.origin.file}:{op.origin.line} {op.known.name}" if op is not None else row.kind
        raise CannotReorder(f"{where} on worker {worker} uses {USED_ELSEWHERE}: the order matters")
    if len(after) < len(new) - stands.count(-1):
        return None
    fresh = count(max(old.numbers, default=-1) + 1)  # for rows that replace no old one and make nothing
    return DataFlow(new, [number if number >= 0 else next(fresh) for number in stands], reached, old.shared)


def _original(row: Instruction, numbers: dict[Instruction, int]) -> int:
    """The number of the old row that a new one stands for, -1 for none."""
    return numbers[row.stands_for] if row.stands_for is not None else -1


def number_messages(code: Mapping[int, Sequence[Instruction]]) -> Messages:
    """The place of each message on its channel, by its send, or by its receive and the part that it brings."""
    messages: dict[tuple[Instruction, int], int] = {}
    counts: dict[tuple, int] = defaultdict(int)  # by channel and end
    for worker, rows in code.items():
        for row in rows:
            for part, (members, *_) in enumerate(_meetings(worker, row, messages) if row.kind in TRANSFERS else ()):
                end = (*members, row.kind == "send")
                messages[row, part] = counts[end]
                counts[end] += 1
    return messages


def check_no_deadlock(code: Mapping[int, Sequence[Instruction]], messages: Messages = NO_MESSAGES) -> None:
    """CannotReorder unless all messages and collectives meet, even if nobody goes on before its message is taken.

    messages: those of the code before a pass, which its sends and receives have to meet for.
    """
    todo = {
        worker: [step for row in reversed(rows) for step in reversed(_meetings(worker, row, messages))]
        for worker, rows in code.items()
    }
    # Simulate rendezvous: a step is done once all its members have come to it. The order in which steps are done makes no
    # difference, since each worker has one next step. So what is left at the end is a deadlock, and nothing else is.
    able = list(todo)
    while able:
        worker = able.pop()
        while todo[worker]:
            members = todo[worker][-1][0]
            if any(m not in todo or not todo[m] or todo[m][-1] != todo[worker][-1] for m in members):
                break
            for m in members:
                todo[m].pop()
            able += [m for m in members if m != worker]
    stuck = [(worker, steps[-1]) for worker, steps in todo.items() if steps]
    if stuck:
        waits = "; ".join(f"worker {worker} waits in {_said(step)} of workers {list(step[0])}" for worker, step in stuck)
        raise CannotReorder(f"workers would wait for each other for ever: {waits}")


def _said(step: tuple) -> str:
    """`message 3`, or the kind of a collective."""
    return f"message {step[2]}" if step[1] == "message" else f"a {step[1]}"


def _meetings(worker: int, row: Instruction, messages: Messages) -> list[tuple]:
    """The meetings of workers that a row takes part in, one after the other: members, and what they meet for."""
    payload, kind = row.define.payload, row.define.kind
    if kind in TRANSFERS:
        source = row if (row, 0) in messages or row.stands_for is None else row.stands_for
        if kind == "send":
            return [((worker, payload["channel"]["peer"]), "message", messages.get((source, 0), 0))]
        channels = [channel for channel, _ in payload["parts"]]
        return [((c["peer"], worker), "message", messages.get((source, part), 0)) for part, c in enumerate(channels)]
    if kind in COLLECTIVES:  # into the same tensors, or members would add up what does not belong together
        return [(tuple(payload["team"]["workers"]), kind, row.seq, *(row.makes or row.operands))]
    return []
