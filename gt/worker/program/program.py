"""Recorded programs: a stream that is bound once, whose steps are called in a row when its instruction arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Protocol

from gt.errors import ProtocolError
from gt.ir.dataflow import places
from gt.ir.instr import FREE, Define
from gt.worker.instructions.step import Row, Step, StepTable
from gt.worker.offload.tensors import OffloadedTensors
from gt.worker.program.runner import ProgramRunner

ActionTime = tuple[str, float, float]  # an action, its start and end in seconds of the monotonic clock
Actions = list[tuple[str, list[Row]]]  # rows by action, "" before the first


class ProgramBackend(Protocol):
    """A way to execute a program's rows: as generated Python (eager), or as compiled segments and graphs."""

    def group_rows(self, rows: list[Row], code: list) -> list[Row]:
        """Rows of one action, each group that is executed as a whole replaced by one row."""

    def after_replay(self, actions: Actions, code: list, randoms: Sequence[int]) -> None:
        """A replay is over. It may put other rows in place of `actions`.

        randoms: places in the code of a seed and a counter, which each replay sets.
        """


def bind_rows(code: Sequence, steps: StepTable, tensors: OffloadedTensors) -> list[Row]:
    """The instructions of a stream; ProtocolError for a number that was never defined."""
    bound: list[Row] = []
    # `places` gives the span of each instruction: its size is that of its definition, less number and seq.
    for at, end in places(code, lambda number: steps[number][1] - 2 if number in steps else 0):
        number = code[at]
        if number == FREE:
            # The ids are constants of the program: they are bound here, and not read from the code at each replay.
            bound.append((at, _free_step(tuple(code[at + 3 : end]), tensors)))
        elif number in steps:
            bound.append((at, steps[number][0]))
        else:
            raise ProtocolError(f"instruction {number} of a program was never defined")
    return bound


def _free_step(ids: tuple[int, ...], tensors: OffloadedTensors) -> Step:
    def step(code: list, at: int) -> None:
        tensors.free(ids)

    return step


def bind_program(
    define: Define, backend: ProgramBackend, runner: ProgramRunner, record_times: Callable[[list[ActionTime]], None]
) -> Step:
    """The step that executes a program, action by action.

    record_times: receives the actions of each replay in the order in which they began.
    """
    payload, plane = define.payload, runner.context.plane
    # A copy of its own: seeds, counters and a fragment's values are written into it before each replay.
    code = list(payload["code"])
    rows = bind_rows(code, runner.table.steps, runner.tensors)
    actions = [(name, backend.group_rows(part, code)) for name, part in _split_by_action(rows, payload["actions"])]
    drawn, channels = list(payload["randoms"]), payload["channels"]
    early = None if payload["backend"] == "eager" else runner.context.engine.early
    counters = [(place, code[place + 1]) for place in drawn]  # relative to the counter of the replay

    def step(stream: list, at: int) -> None:
        seed, counter = stream[at], stream[at + 1]
        # Random numbers: recorded counters are relative to the step's first, so a replay draws what eager ops would have
        # drawn.
        for place, relative in counters:
            code[place], code[place + 1] = seed, counter + relative
        # Both ends of a channel count its slots. They begin a replay from the same one, because recorded transfers name their
        # slots.
        if channels:
            plane.reset_cursors(channels)
        times: list[ActionTime] = []
        if early is not None:
            early.in_program(True)
        try:
            for name, part in actions:
                start = monotonic()
                runner.run_program(part, code, stream[at - 1])
                if name:
                    times.append((name, start, monotonic()))
        finally:
            if early is not None:
                early.in_program(False)
        record_times(times)
        # After the times are taken: the backend may record or compile here, and puts the result into `actions` in place.
        backend.after_replay(actions, code, drawn)

    keyed = _with_random_key(runner.context.engine, step, len(drawn)) if drawn else step
    return _with_parameters(payload, keyed, code, runner.tensors) if define.kind == "fragment" else keyed


def _with_parameters(payload: dict[str, Any], run: Step, code: list, tensors: OffloadedTensors) -> Step:
    """A fragment's step: tensors of the call get the names in the code, and results the names of the call."""
    ins, outs, moved, places = (list(payload[key]) for key in ("ins", "outs", "moved", "values"))
    # Operands of the call: ids of inputs, ids of results, then scalars. `moved` are inputs that the fragment frees itself. An
    # input that gets other memory, as a weight that is made whole and split again, is a result too, under the same name.
    held = [name for number, name in enumerate(ins) if number not in set(moved) and name not in set(outs)]
    first_out = 2 + len(ins)
    first_value = first_out + len(outs)
    end = first_value + len(places)

    def step(stream: list, at: int) -> None:
        forget = tensors.pop
        for name, i in zip(ins, stream[at + 2 : at + first_out]):
            with suppress(KeyError):  # it has no piece here
                tensors[name] = tensors[i]
        tensor = None
        # The caller's id of a moved input ends here. Otherwise this reference would keep its memory through the whole
        # fragment.
        for number in moved:
            forget(stream[at + 2 + number], None)
        for place, value in zip(places, stream[at + first_value : at + end]):
            code[place] = value
        try:
            run(stream, at)
        finally:
            # Also after a failure: the names are free for the next call, and the outputs (or placeholders) get the call's ids.
            for name in held:
                forget(name, None)
            for name, i in zip(outs, stream[at + first_out : at + first_value]):
                tensor = forget(name, None)
                if tensor is not None:
                    tensors[i] = tensor

    return step


def _with_random_key(engine: Any, step: Step, draws: int) -> Step:
    """A program's step before which the engine's device is given the key of its random numbers."""
    # An engine whose replays are recorded reads the key from the device's memory; others find it in the code.
    draw_from = getattr(engine, "draw_from", None)
    if draw_from is None:
        return step

    def keyed(stream: list, at: int) -> None:
        draw_from(stream[at], stream[at + 1], draws)
        step(stream, at)

    return keyed


def _split_by_action(rows: list[Row], actions: Sequence) -> Actions:
    parts: Actions = [("", [])]
    names = dict(actions)  # place of an action's first row -> its name
    for row in rows:
        if row[0] in names:
            parts.append((names[row[0]], []))
        parts[-1][1].append(row)
    return [(name, part) for name, part in parts if part]
