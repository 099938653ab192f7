"""The lines of the instruction log that come with every op, so fast that logging costs little.

Ops that differ only in numbers have lines that differ only in numbers. So each kind of op is formatted once, by journal.text,
with holes for the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gt.dispatcher.cluster.workers import Cluster
from gt.dispatcher.events import MARK, Log
from gt.dispatcher.instruction_log import text
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.state.records import OpPlan, Origin
from gt.ir.text import PlanLine

MAX_RECEIVED_FORMS = 1 << 14  # kinds of RECV line that are kept
MAX_ORIGINS_PER_PLAN = 64  # origins for which one plan's lines are cached
MAX_SHOWN_OPERANDS = 64  # operands of an op: a list op may have thousands, and a line for each output
# What stands for a tensor's number, and for the op's in its column. No name has them, for they cannot be UTF-8.
_HOLE: Any = "\ud800"
_SEQ: Any = "\ud801"


class OpInHand(Protocol):
    """The emitter, as far as lines need it: the op that is being planned."""

    cluster: Cluster
    seq: int
    origin: Origin


class Scribe:
    """Writes one session's lines to a page, a list that is made into text when the event has been dealt with.

    An op that only passes through has one line for each tensor that it makes. An op that waits, makes none, or takes more than
    its own instruction has a line for its arrival.
    """

    def __init__(self, emitter: OpInHand, session: int, page: list[str]) -> None:
        self._emitter = emitter
        self._put = page.append
        self._name = f"client{session}"
        self._received: dict[tuple, str] = {}

    def received(self, known: OpSchema, origin: Origin, ins: Sequence[int]) -> None:
        """An op has come."""
        # An example of a form: "\0 %8d RECV        client0    op=aten.mm.default group=mlp %%%d %%%d @ train.py:12".
        key = known.template.op, len(ins), origin
        form = self._received.get(key)
        if form is None:
            if len(self._received) >= MAX_RECEIVED_FORMS:
                self._received.clear()
            operands = " ".join([f"%{_HOLE}"] * min(len(ins), MAX_SHOWN_OPERANDS))
            form = self._received[key] = _form(Log("RECV", self._name, operands, {"op": key[0], **_where(origin, _SEQ)}))
        self._put(form % (self._emitter.seq, *ins[:MAX_SHOWN_OPERANDS]))

    def planned(self, known: OpSchema, plan: OpPlan, origin: Origin, ins: Sequence[int], outs: Sequence[int]) -> None:
        """An op's instruction has been written."""
        form = plan.forms.get(origin) or self._forms(known, plan, origin, len(ins))
        seq, ins = self._emitter.seq, ins[:MAX_SHOWN_OPERANDS]
        if len(outs) == 1:
            self._put(form % (seq, outs[0], *ins))
        else:
            # One line for each output, each with the op's number, the output's id and all operands.
            self._put(form % tuple([n for out in outs for n in (seq, out, *ins)]))

    def step(self, line: PlanLine) -> None:
        """Anything else that is planned."""
        self._put(_form(self._entry(line, self._emitter.seq, self._emitter.origin)) % ())

    def _forms(self, known: OpSchema, plan: OpPlan, origin: Origin, count: int) -> str:
        """Lines of a plan."""
        holes, lines = (_HOLE,) * min(count, MAX_SHOWN_OPERANDS), ""
        for index in known.news:
            spec, layout = known.template.outs[index].spec, plan.outs[index]
            name, note = known.template.op.removesuffix(".default"), origin.note()
            step = PlanLine(_HOLE, spec.text() if spec else "?", str(layout), name, holes, layout.mesh.workers, note)
            lines += _form(self._entry(step, _SEQ, origin))
        if len(plan.forms) >= MAX_ORIGINS_PER_PLAN:
            plan.forms.clear()
        plan.forms[origin] = lines
        return lines

    def _entry(self, line: PlanLine, seq: Any, origin: Origin) -> Log:
        workers = ",".join(self._emitter.cluster.workers[i].name for i in line.workers)
        moved = line.note.partition(" B")[0]
        fields = {"layout": line.layout, "bytes": int(moved) if moved.isdigit() else "", **_where(origin, seq)}
        return Log("WORKER_SEND", workers, str(line), {"op": line.op.partition(" ")[0], **fields})


def _form(entry: Log) -> str:
    # `%` of names is escaped, since the line becomes a format; each hole becomes its `%d`.
    plain = text(entry, 0).replace("%", "%%").replace(MARK, "?")
    return MARK + plain.replace(f"{_SEQ:>8}", "%8d", 1).replace(_HOLE, "%d")


def _where(origin: Origin, seq: Any) -> dict[str, Any]:
    return {"seq": seq, "group": origin.group, "origin": f"{origin.file}:{origin.line}" if origin.file else ""}
