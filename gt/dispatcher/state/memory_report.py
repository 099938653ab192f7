"""The part of an out-of-memory error that says which lines of the program hold a worker's memory.

A session is told its own lines, and of other sessions how much they hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.programs.program import Program
from gt.dispatcher.session import ClientSession
from gt.dispatcher.state.records import Origin
from gt.ir.dataflow import decode, makes
from gt.ir.text import size
from gt.wire.messages import MAX_HOLDERS

MAX_SHOWN_IDS = 8  # tensors that share memory, of those that are named
LINES = 5  # lines of the program in a report: those that hold most
COUNTS = ("limit", "session_limit", "used", "session", "others")


def memory_report(session: ClientSession, worker: Worker, memory: dict[str, Any]) -> str:
    """Lines of an error, from OpError.memory; "" if that is malformed, since a worker's word is not trusted."""
    top = memory.get("top")
    if any(type(memory.get(name)) is not int for name in COUNTS) or type(top) is not list or not all(map(_named, top)):
        return ""
    # Sums first, then the lines with most bytes, then what to try.
    limit, own, used, mine, others = (memory[name] for name in COUNTS)
    bounds = [f"the limit of this worker is {size(limit)}, of which {size(used)} are taken"] if limit else []
    bounds += [f"that of a session {size(own)}"] if own else []
    holds = f"\n  {worker.name} holds {size(mine)} in tensors of this session and {size(others)} in those of others"
    lines = _lines(session, worker, top)
    most = sorted(lines.items(), key=lambda item: -item[1][0])[:LINES]
    largest = "; ".join(f"{size(nbytes)} in {count} of {where}" for where, (nbytes, count) in most)
    return (
        "; ".join([holds, *bounds])
        + (f"\n  most is held by {largest}" if largest else "")
        + "\n  try to delete what is not needed any more, smaller batches, more workers or a larger --memory-limit"
    )


def _named(row: Any) -> bool:
    return type(row) is list and [type(part) for part in row] == [int, int]


def _lines(session: ClientSession, worker: Worker, top: list[list[int]]) -> dict[str, tuple[int, int]]:
    """Bytes and tensors by the line that made them."""
    lines: dict[str, tuple[int, int]] = {}
    for holder in _holders(session, worker, top):
        where = "values between ops, or that your program holds no more"
        if holder.origin is not None:
            where = _where(holder.origin, f", {holder.what}" if holder.what else "")
        before = lines.get(where, (0, 0))
        lines[where] = before[0] + holder.nbytes, before[1] + 1
    return lines


def holders(session: ClientSession, worker: Worker, top: Any) -> list[list]:
    """[ids, bytes, file, line, group, what] of a worker's tensors, largest first, from Query.holders.

    ids: the client's of the tensors that share the memory, without order, at most IDS. what: "" for a tensor of the program.
    """
    if type(top) is not list or not all(map(_named, top)):
        return []
    return [
        [holder.ids, holder.nbytes, *_place(holder.origin), holder.what or ("" if holder.origin else "between ops")]
        for holder in _holders(session, worker, top[:MAX_HOLDERS])
    ]


class Holder(NamedTuple):
    """Memory of a worker. ids: of the client's tensors that share it; origin: None where nobody knows it any more."""

    ids: list[int]
    nbytes: int
    origin: Origin | None
    what: str


def _holders(session: ClientSession, worker: Worker, top: list[list[int]]) -> Iterator[Holder]:
    # An id on a worker is a tensor of the table, a copy of one in another layout, or a value inside of a program.
    rows, offset = session.table.rows, session.emitter.offset
    copies = {value_id: t for t in rows.values() for _, value_id in (t.copies or {}).values()}
    within: dict[int, tuple[Origin, str]] | None = None  # tensors that programs make, looked up when needed
    for name, nbytes in top:
        tensor_id = name - offset
        tensor, copied = rows.get(tensor_id) or copies.get(tensor_id), tensor_id in copies
        if tensor is not None and tensor.storage.origin is not None:
            ids = [] if copied else list(islice(tensor.storage.tensors, MAX_SHOWN_IDS))
            yield Holder(ids, nbytes, tensor.storage.origin, "a copy" if copied else "")
            continue

        # Decoding all programs takes long, so it is done once, and only if some id needs it.
        if within is None:
            within = {
                value_id: origin for program in session.programs.all.values() for value_id, origin in _made(program, worker)
            }
        ids = [] if tensor is None else list(islice(tensor.storage.tensors, MAX_SHOWN_IDS))
        origin, what = within.get(name, (None, ""))
        yield Holder(ids, nbytes, origin, what)


def _place(origin: Origin | None) -> tuple[str, int, str]:
    return ("", 0, "") if origin is None else (origin.file, origin.line, origin.group)


def _made(program: Program, worker: Worker) -> Iterator[tuple[int, tuple[Origin, str]]]:
    """Ids that a program makes on a worker, each with the line of its op."""
    defines = {define.number: define for define in program.uses}
    for part in program.code.get(worker.index, ()):
        # The number behind a definition's is its op's place in the journal, see gt.ir.instr.
        code = part.payload["code"]
        for at, define, operands in decode(code, defines.__getitem__):
            if define is not None:
                row = program.journal[code[at + 1]]
                for tensor in makes(define, operands):
                    yield tensor, (row.origin, f"{row.known.template.op} in a program")


def _where(origin: Origin, note: str) -> str:
    return (f"{origin.file}:{origin.line}" if origin.file else "ops without a line") + note
