"""Ctrl-C at one place after the other of a call: wherever the interpreter handles signals in some files."""

from __future__ import annotations

import _thread
import dis
import functools
import itertools
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType, ModuleType


def interrupted(program: Callable[[], object], after: int, modules: Iterable[ModuleType]) -> bool:
    """Call a program, with Ctrl-C when the interpreter has looked for signals so often in its file or in these modules.

    False if the program ends before that.
    """
    looks = itertools.count()
    files = {module.__file__ for module in modules} | {getattr(getattr(program, "__code__", None), "co_filename", "")}

    def trace(frame: FrameType, event: str, argument: object) -> object:
        if frame.f_code.co_filename not in files:
            return None
        if (event, frame.f_lasti) in looks_of(frame.f_code) and next(looks) == after:
            sys.settrace(None)
            _thread.interrupt_main()  # handled as this function goes on
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return trace

    sys.settrace(trace)
    try:
        program()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@functools.cache
def looks_of(code: CodeType) -> frozenset[tuple[str, int]]:
    """Events, and positions in code, where the interpreter looks for signals: as a call begins, and after calls.

    A generator that is closed goes on at its yield, without a look.
    """
    rows, entries = [*dis.get_instructions(code)], getattr(dis.Bytecode(code), "exception_entries", [])

    def guards(offset: int) -> list[object]:
        return [entry for entry in entries if entry.start <= offset < entry.end]

    begins = {("call", row.offset) for row in rows if row.opname != "YIELD_VALUE"} | {("call", -1)}
    # What it raises after a call is raised by the call: not beyond the `try` that the call is the last one of
    after = {
        ("opcode", row.offset)
        for call, row in itertools.pairwise(rows)
        if call.opname.startswith("CALL") and guards(call.offset) == guards(row.offset)
    }
    return frozenset(begins | after)
