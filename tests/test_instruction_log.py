"""The instruction log: what is formatted once and filled in reads as if formatted anew, and comes in order."""

from __future__ import annotations

import random
from typing import ClassVar

import torch

import gt
from gt.client import runtime
from gt.dispatcher import scribe
from gt.dispatcher.events import MARK, Lines, Log, Received
from gt.dispatcher.journal import Journal, line
from gt.ir.text import PlanLine
from gt.wire.messages import Ops
from tests.planned import planned

YAML = """
front: {shard: {axis: 0, workers: [0, 1]}}
front_colpar: {shard: {axis: 1, workers: [0, 1]}}
front_rowpar: {shard: {axis: 0, workers: [0, 1]}}
back: {workers: [2, 3]}
"""


class Slow(scribe.Scribe):
    """Formats every line anew, beside what its parent fills in."""

    expected: ClassVar[list[str]] = []

    def received(self, known, origin, ins):
        super().received(known, origin, ins)
        fields = {"op": known.template.op, "seq": self._emitter.seq, "group": origin.group, "origin": where(origin)}
        self._expect(Log("RECV", f"client{self._session.number}", " ".join(f"%{i}" for i in ins), fields))

    def planned(self, known, plan, origin, ins, outs):
        super().planned(known, plan, origin, ins, outs)
        workers = self._session.cluster.workers
        place = {"seq": self._emitter.seq, "group": origin.group, "origin": where(origin)}
        for out, index in zip(outs, known.news, strict=True):
            spec, layout = known.template.outs[index].spec, plan.outs[index]
            op = known.template.op.removesuffix(".default")
            step = PlanLine(
                out, spec.text(), str(layout), op, tuple(ins), layout.mesh.workers, self._session.note(origin=origin)
            )
            names = ",".join(workers[i].name for i in layout.mesh.workers)
            self._expect(Log("WORKER_SEND", names, str(step), {"op": op, "layout": str(layout), **place}))

    def step(self, line):
        super().step(line)
        self._expect(self._entry(line, self._emitter.seq, self._session.origin))

    def _expect(self, entry):
        self.expected.append(line(entry, 1.5, 0)[12:])


def where(origin):
    return f"{origin.file}:{origin.line}" if origin.file else ""


def program(seed: int) -> None:
    """Random ops in random groups: views, several outputs, lists, backward."""
    draw = random.Random(seed)
    w = [torch.nn.Parameter(torch.randn(8, 8).to("remote")) for _ in range(3)]
    values = [torch.randn(4, 8, device="remote") for _ in range(3)]
    groups = ["front", "front_colpar", "front_rowpar", "back", "100%odd-%s-%d"]
    steps = [
        lambda x: x @ draw.choice(w),
        lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
        lambda x: x + draw.choice(values),
        lambda x: torch.relu(x) * 2.5,
        lambda x: x.t().contiguous().t(),
        lambda x: x.add_(1) if not x.requires_grad else x * draw.random(),
        lambda x: x.max(-1).values[:, None] + x,
    ]
    for _ in range(60):
        with gt.signal.context(draw.choice(groups)):
            values[draw.randrange(3)] = draw.choice(steps)(draw.choice(values))
    torch._foreach_add_(values, 1.0) if not any(v.requires_grad for v in values) else sum(v.sum() for v in values).backward()


def test_lines_filled_in_are_those_formatted_anew(monkeypatch):
    monkeypatch.setattr("gt.dispatcher.core.Scribe", Slow)
    monkeypatch.setattr(scribe, "MOST", 40)
    monkeypatch.setattr(scribe, "MOST_ORIGINS", 3)
    for seed in range(4):
        monkeypatch.setattr(Slow, "expected", [])
        with planned(YAML, 4) as plan:
            program(seed)
            runtime.current().flush()
            assert len(plan.rows) > 300 and {"RECV", "WORKER_SEND"} <= {row.split()[1] for row in plan.rows}
            assert plan.rows == Slow.expected


def test_what_a_batch_brings_is_between_its_message_and_its_acknowledgement(tmp_path):
    kinds: list[str] = []
    with planned("", 1) as plan:
        plain = plan.core.handle

        def handle(event):
            actions = plain(event)
            if isinstance(event, Received) and isinstance(event.message, Ops):
                kinds.extend(type(a).__name__ for a in actions if isinstance(a, (Lines, Log)))
            return actions

        plan.core.handle = handle
        torch.ones(3, device="remote") + 1
        runtime.current().flush()
    assert kinds[:2] == ["Log", "Lines"] and "Lines" not in kinds[2:]


def test_lines_that_come_together_have_one_time(tmp_path):
    journal = Journal(str(tmp_path / "log"))
    journal.write(Log("SEND", "w0"), 1.0)
    journal.write_lines(Lines(f"{MARK} a\n{MARK} b\n"), 2.0)
    journal.write(Log("SEND", "w0"), 3.0)
    journal.close()
    rows = (tmp_path / "log").read_text().splitlines()
    assert [row.split()[:2] for row in rows] == [["1.000000", "0"], ["2.000000", "a"], ["2.000000", "b"], ["3.000000", "1"]]
