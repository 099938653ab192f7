"""The lines of the instruction log that come with every op, so fast that logging costs little.

Two ops that differ in numbers only have lines that differ in numbers only: each kind is formatted once, by journal.text, with
holes for the numbers; these are filled in for all lines of an event at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gt.dispatcher.events import MARK, Log
from gt.dispatcher.journal import text
from gt.ir.text import PlanLine

if TYPE_CHECKING:
    from gt.dispatcher.plan.known import Known
    from gt.dispatcher.planning import Plan
    from gt.dispatcher.sessions import Origin, Session

MOST = 1 << 14  # kinds of RECV line that are kept
MOST_ORIGINS = 64  # of one plan, whose lines are kept
# What stands for a tensor's number, and for the op's in its column. No name has them, for they cannot be UTF-8.
_HOLE: Any = "\ud800"
_SEQ: Any = "\ud801"


class Page:
    """Lines of the event that is being dealt with: forms, and the numbers that fill them."""

    def __init__(self) -> None:
        self.forms: list[str] = []
        self.numbers: list[int] = []

    def take(self) -> str:
        written = "".join(self.forms) % tuple(self.numbers)
        self.forms.clear()
        self.numbers.clear()
        return written


class Scribe:
    """Writes one session's lines to a page."""

    def __init__(self, session: Session, page: Page) -> None:
        self._session, self._emitter = session, session.emitter
        self._put, self._fill = page.forms.append, page.numbers.extend
        self._name = f"client{session.number}"
        self._received: dict[tuple, str] = {}

    def received(self, known: Known, origin: Origin, ins: Sequence[int]) -> None:
        """An op has come."""
        key = known.template.op, len(ins), origin
        form = self._received.get(key)
        if form is None:
            if len(self._received) >= MOST:
                self._received.clear()
            operands = " ".join([f"%{_HOLE}"] * len(ins))
            form = self._received[key] = _form(Log("RECV", self._name, operands, {"op": key[0], **_where(origin, _SEQ)}))
        self._put(form)
        self._fill((self._emitter.seq, *ins))

    def planned(self, known: Known, plan: Plan, ins: Sequence[int], outs: Sequence[int], both: bool = False) -> None:
        """An op's instruction has been written, a line for each tensor that it makes; both: and before that it has come."""
        origin, seq = self._session.origin, self._emitter.seq
        forms = plan.forms.get(origin)
        if forms is None:
            forms = self._forms(known, plan, len(ins))
        if both:
            self._put(forms[1])
            self._fill((seq, *ins))
        else:
            self._put(forms[0])
        for out in outs:
            self._fill((seq, out, *ins))

    def step(self, line: PlanLine) -> None:
        """Anything else that is planned."""
        self._put(_form(self._entry(line, self._emitter.seq)))

    def _forms(self, known: Known, plan: Plan, count: int) -> tuple[str, str]:
        """Lines of a plan alone, and after that of the op's coming."""
        origin, holes, lines = self._session.origin, (_HOLE,) * count, ""
        for index in known.news:
            spec, layout = known.template.outs[index].spec, plan.outs[index]
            name, note = known.template.op.removesuffix(".default"), self._session.note()
            step = PlanLine(_HOLE, spec.text() if spec else "?", str(layout), name, holes, layout.mesh.workers, note)
            lines += _form(self._entry(step, _SEQ))
        operands = " ".join([f"%{_HOLE}"] * count)
        come = _form(Log("RECV", self._name, operands, {"op": known.template.op, **_where(origin, _SEQ)}))
        if len(plan.forms) >= MOST_ORIGINS:
            plan.forms.clear()
        plan.forms[origin] = lines, come + lines
        return lines, come + lines

    def _entry(self, line: PlanLine, seq: Any) -> Log:
        cluster, origin = self._session.cluster, self._session.origin
        workers = ",".join(cluster.workers[i].name for i in line.workers)
        moved = line.note.partition(" B")[0]
        fields = {"layout": line.layout, "bytes": int(moved) if moved.isdigit() else "", **_where(origin, seq)}
        return Log("WORKER_SEND", workers, str(line), {"op": line.op.partition(" ")[0], **fields})


def _form(entry: Log) -> str:
    plain = text(entry, 0).replace("%", "%%").replace(MARK, "?")
    return MARK + plain.replace(f"{_SEQ:>8}", "%8d", 1).replace(_HOLE, "%d")


def _where(origin: Origin, seq: Any) -> dict[str, Any]:
    return {"seq": seq, "group": origin.group, "origin": f"{origin.file}:{origin.line}" if origin.file else ""}
