"""Steps that announce the numbers which they make, so that a program can read them before later work is done."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from gt.ir.instr import COMMUNICATION, Define
from gt.worker.context import ExecutionContext
from gt.worker.instructions.step import Step

COPY = "aten.clone.default"
MAX_NUMBERS = 4  # of one instruction: an op on lists makes hundreds, which nobody reads one by one
# They write to a tensor's memory, or put it elsewhere, and the tensor does not know
UNSEEN = COMMUNICATION | {"host_op", "stale", "evict", "restore"}


def announcing(worker: ExecutionContext, define: Define, step: Step) -> Step:
    """The step; it tells the engine's `early` of numbers, if the engine has one."""
    early = worker.engine.early
    if early is None:
        return step
    if writes_unseen(define):
        return _then(step, early.forget)
    places = numbers(define)
    if not places:
        return step
    held, made = worker.tensors, early.made

    def copied(code: list, at: int) -> None:
        step(code, at)
        i = code[at + 1]
        made(i, held[i], held[code[at]])

    def announced(code: list, at: int) -> None:
        step(code, at)
        for place in places:
            i = code[at + place]
            made(i, held[i])

    return copied if copies(define) else announced


def copies(define: Define) -> bool:
    """True for an op whose result has the value of its operand."""
    return define.kind == "op" and define.payload["op"] == COPY and define.operands == 2


def writes_unseen(define: Define) -> bool:
    """True for an instruction that changes a tensor's memory, and the tensor does not count the change.

    An op of another library may not count its writes, as torch's own ops do.
    """
    if define.kind != "op":
        return define.kind in UNSEEN
    return bool(define.payload["writes"]) and not define.payload["op"].startswith("aten.")


def numbers(define: Define) -> list[int]:
    """Places of results of one element among the operands of an op; none if there are many."""
    if define.kind != "op":
        return []
    payload = define.payload
    outs = [out for out in payload["outs"] if out[0] in ("new", "view")]
    places = [
        place
        for place, out in enumerate(outs, payload["tensors"] + payload["values"])
        if out[0] == "new" and out[1] is not None and prod(out[1][0]) == 1
    ]
    return places if len(places) <= MAX_NUMBERS else []


def _then(step: Step, after: Callable[[], None]) -> Step:
    def both(code: list, at: int) -> None:
        step(code, at)
        after()

    return both
