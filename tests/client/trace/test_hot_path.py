"""The cost of recording an op, counted: calls of Python functions and bytecodes, which no load on the machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from gt.client import current_session
from tests.helpers.inline_session import inline  # noqa: F401

pytestmark = pytest.mark.usefixtures("inline")
FUNCTIONS = 3  # torch's look for a rule (in versions that have it), `dispatch`, `Ref`
# op -> bytecodes at most: a tenth more than Python 3.11 executes, which has more of them than 3.12
OPS: dict[str, tuple[Callable[[Any, Any, Any], Any], int]] = {
    "add": (lambda x, y, w: x + y, 275),
    "add with gradient": (lambda x, y, w: w + x, 275),
    "multiply by a number": (lambda x, y, w: x * 2.0, 290),
    "in place": (lambda x, y, w: y.add_(x), 210),
    "one operand": (lambda x, y, w: x.relu(), 265),
    "view": (lambda x, y, w: x.view(16), 298),
    "slice": (lambda x, y, w: x[1:3], 276),
}


def cost(op: Callable[[], Any]) -> tuple[int, int]:
    """Calls of Python functions, and bytecodes, that the op takes below itself."""
    functions, bytecodes = 0, 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal functions, bytecodes
        if event == "call" and frame.f_code is not op.__code__:
            functions += 1
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return trace
        bytecodes += event == "opcode"
        return trace if frame.f_trace_opcodes else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        op()
    finally:
        sys.settrace(before)
    return functions, bytecodes


@pytest.mark.parametrize("name", OPS)
def test_recording_a_known_op_takes_few_calls_and_bytecodes(name: str) -> None:
    op, limit = OPS[name]
    x, y = torch.ones(4, 4, device="remote"), torch.ones(4, 4, device="remote")
    w = torch.ones(4, 4, device="remote", requires_grad=True)
    run = lambda: op(x, y, w)  # noqa: E731
    for _ in range(3):
        run()
    recorder = current_session.Current.recorder
    assert recorder is not None
    recorder.flush()
    recorder.batch = 1400  # the hand-over of a batch is not counted
    ops = recorder.ops
    functions, bytecodes = cost(run)
    assert recorder.ops == ops + 1
    assert functions - 1 <= FUNCTIONS, functions
    assert bytecodes <= limit, bytecodes
