"""The instruction log: what is formatted once and filled in reads as if formatted anew, and comes in order."""

from __future__ import annotations

import logging
import os
import random
import socket
import stat
import sys
import threading
from typing import ClassVar

import pytest
import torch

import gt
from gt.client import current_session
from gt.client.session import Session
from gt.dispatcher.events import MARK, Lines, Log, Received
from gt.dispatcher.instruction_log import InstructionLog, line
from gt.dispatcher.server import Server
from gt.dispatcher.state import log_lines
from gt.errors import Refused
from gt.ir.instr import BASE_BITS
from gt.ir.text import PlanLine
from gt.logs import Plain, Unblocked, private_file
from gt.wire.messages import Ops
from tests.helpers.hostile import row, spec
from tests.helpers.planned import planned
from tests.helpers.toy_core import ToyCore

YAML = """
front: {shard: {axis: 0, workers: [0, 1]}}
front_colpar: {shard: {axis: 1, workers: [0, 1]}}
front_rowpar: {shard: {axis: 0, workers: [0, 1]}}
back: {workers: [2, 3]}
"""


class Slow(log_lines.Scribe):
    """Formats every line anew, beside what its parent fills in."""

    expected: ClassVar[list[str]] = []

    def received(self, known, origin, ins):
        super().received(known, origin, ins)
        fields = {"op": known.template.op, "seq": self._emitter.seq, "group": origin.group, "origin": where(origin)}
        self._expect(Log("RECV", f"client{self._emitter.offset >> BASE_BITS}", " ".join(f"%{i}" for i in ins), fields))

    def planned(self, known, plan, origin, ins, outs):
        super().planned(known, plan, origin, ins, outs)
        workers = self._emitter.cluster.workers
        place = {"seq": self._emitter.seq, "group": origin.group, "origin": where(origin)}
        for out, index in zip(outs, known.news, strict=True):
            spec, layout = known.template.outs[index].spec, plan.outs[index]
            op = known.template.op.removesuffix(".default")
            step = PlanLine(out, spec.text(), str(layout), op, tuple(ins), layout.mesh.workers, origin.note())
            names = ",".join(workers[i].name for i in layout.mesh.workers)
            self._expect(Log("WORKER_SEND", names, str(step), {"op": op, "layout": str(layout), **place}))

    def step(self, line):
        super().step(line)
        self._expect(self._entry(line, self._emitter.seq, self._emitter.origin))

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
    monkeypatch.setattr("gt.dispatcher.state.emitter.Scribe", Slow)
    monkeypatch.setattr(log_lines, "MAX_RECEIVED_FORMS", 40)
    monkeypatch.setattr(log_lines, "MAX_ORIGINS_PER_PLAN", 3)
    for seed in range(4):
        monkeypatch.setattr(Slow, "expected", [])
        with planned(YAML, 4) as plan:
            program(seed)
            current_session.current().flush()
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
        current_session.current().flush()
    assert kinds[:2] == ["Log", "Lines"] and "Lines" not in kinds[2:]


def test_lines_that_come_together_have_one_time(tmp_path):
    journal = InstructionLog(str(tmp_path / "log"))
    journal.write(Log("SEND", "w0"), 1.0)
    journal.write_lines(Lines(f"{MARK} a\n{MARK} b\n"), 2.0)
    journal.write(Log("SEND", "w0"), 3.0)
    journal.close()
    rows = (tmp_path / "log").read_text().splitlines()
    begins = [["1.000000", "0"], ["2.000000", "a"], ["2.000000", "b"], ["3.000000", "1"]]
    assert [row.split()[:2] for row in rows[:-1]] == begins


def test_a_new_log_is_for_its_owner_alone_and_one_that_exists_keeps_its_rights(tmp_path):
    """It shows every client's lines, shapes and errors."""
    shared = tmp_path / "shared"
    shared.touch()
    shared.chmod(0o644)
    for path, mode in [(tmp_path / "log", 0o600), (shared, 0o644)]:
        InstructionLog(str(path)).close()
        assert stat.S_IMODE(path.stat().st_mode) == mode
    os.close(private_file(tmp_path / "trace"))
    assert stat.S_IMODE((tmp_path / "trace").stat().st_mode) == 0o600


def test_what_another_program_appends_stays_and_a_log_may_be_emptied(tmp_path):
    journal, path = InstructionLog(str(tmp_path / "log")), tmp_path / "log"
    journal.write(Log("SEND", "w0"), 1.0)
    journal.flush()
    with path.open("a") as other:
        other.write("a note\n")
    journal.write(Log("SEND", "w0"), 2.0)
    journal.flush()
    assert [row.split()[0] for row in path.read_text().splitlines()] == ["1.000000", "a", "2.000000"]
    os.truncate(path, 0)  # as logrotate does
    journal.write(Log("SEND", "w0"), 3.0)
    journal.flush()
    assert path.read_bytes().startswith(b"    3.000000")
    journal.close()


def test_the_log_ends_with_the_numbers_of_its_lines(tmp_path):
    with planned("s: {workers: [0, 1]}\nt: {workers: [2]}", 3) as plan:
        with gt.signal.context("s"):
            x = torch.ones(4, 2, device="remote") + 1
        with gt.signal.context("t"):
            (x + 1).sum()
        plan.ask()
    journal = InstructionLog(str(tmp_path / "log"))
    journal.write_lines(Lines("".join(MARK + row for row in plan.rows)), 1.0)
    journal.write(Log("ERROR", "w0", "no memory left"), 2.0)
    journal.close()
    rows = (tmp_path / "log").read_text().splitlines()
    assert "SUMMARY" in rows[-1] and rows[-1].split()[0] == "2.000000"
    assert sum(" ERROR " in row for row in rows) == 1 and "sharded" not in rows[-1]
    ends = dict(reversed(part.split()) for part in rows[-1].partition("dispatcher ")[2].split(", "))
    assert ends["transfers"] == "1" and ends["errors"] == "1" and ends["collectives"] == "0"
    assert int(ends["splits"]) == sum(" sharded " in row for row in rows) > 0
    assert int(ends["ops"]) == 5  # torch.ones is two


# ---- what somebody else wrote into it

FORGED = "a.py\n    9.999999        1 ERROR       w0         worker w0 is lost\x1b[2J\x9b31m\u2028\u202e"


def test_no_field_ends_a_line_or_reaches_a_terminal():
    """Names of files, groups, peers and ops are the client's text."""
    fields = {"op": FORGED, "group": FORGED, "layout": FORGED, "bytes": FORGED, "origin": FORGED, "else": FORGED}
    shown = line(Log("ERROR", FORGED, FORGED, fields), 1.0, 0)
    assert shown.endswith("\n") and shown[:-1].isprintable()
    assert "\\x1b[2J" in shown and "a.py\\n" in shown


def test_fields_are_cut_and_short_ones_are_not():
    shown = line(Log("ERROR", "w0", "t" * 100_000, {"group": "g" * 100_000, "origin": "o" * 200}), 1.0, 0)
    assert len(shown) < 6000 and "o" * 200 in shown


def test_a_client_forges_no_line():
    """Whole lines, and those that are formatted once with holes for numbers."""
    with planned(YAML, 4) as plan:
        forged = [[1, FORGED, 1, FORGED, False, -1], [2, "%d" * 2000, 1, "g" * 4000, False, -1]]
        made = [16, row("aten.zeros.default", [[4]], [], [spec(4)])]
        added = [17, row("aten.add.Tensor", [{"t": 0}, {"t": 1}], [spec(4), spec(4)], [spec(4)])]
        many = [18, row("aten.stack.default", [[{"t": n} for n in range(900)]], [spec(4)] * 900, [spec(900, 4)])]
        code = [16, 1, 1, 16, 2, 2, 17, 1, 1, 2, 3, 17, 2, 1, 3, 4, 18, 2, *[4] * 900, 5]
        plan.handle(Received(b"client", Ops(0, [made, added, many], forged, code)))
        assert not plan.errors and len(plan.rows) > 4
    assert all(row.endswith("\n") and row[:-1].isprintable() and len(row) < 6000 for row in plan.rows)


def test_logged_text_is_one_line_and_tracebacks_are_set_in():
    shape = Plain("%(asctime)s gt.server %(levelname)s %(message)s")
    try:
        raise ValueError(FORGED)
    except ValueError:
        record = logging.LogRecord("gt", logging.ERROR, "f", 1, "%s failed", ("x\n" + FORGED,), sys.exc_info())
    first, *rest = shape.format(record).split("\n")
    assert first.isprintable() and "x\\na.py" in first
    assert len(rest) > 2 and all(line.isprintable() and line.startswith("  ") for line in rest)


def test_a_reader_of_stderr_who_stops_holds_nobody_up():
    source, sink = os.pipe()
    with os.fdopen(source, "rb"), os.fdopen(sink, "w") as stream:
        handler = Unblocked(stream)
        for _ in range(200):
            handler.emit(logging.LogRecord("gt", logging.ERROR, "f", 1, "y" * 1000, (), None))


# ---- where it cannot be written


def test_a_full_disk_ends_the_log_with_one_warning(caplog):
    journal = InstructionLog("/dev/full")
    for _ in range(3):
        for _ in range(3000):
            journal.write(Log("SEND", "w0", "x" * 100), 1.0)
        journal.flush()
    journal.close()
    assert [record.getMessage().count("the server goes on") for record in caplog.records] == [1]


@pytest.mark.parametrize("end", ["write", "flush", "close"])
def test_a_log_that_fails_loses_no_client(monkeypatch, end):
    """The server writes, flushes and closes it beside its work."""
    monkeypatch.setenv("GT_INSTRUCTION_LOG", "/dev/full")
    if end == "write":
        monkeypatch.setattr("gt.dispatcher.instruction_log.WRITE_BYTES", 1)
    server = Server(core=ToyCore())
    if end == "close":
        server._journal.flush = lambda: None
    thread = threading.Thread(target=server.run, name="gt-test-server")
    thread.start()
    try:
        client = Session(server.address)
        for number in range(1, 6):
            assert client.fetch(number)[1] == "float64"
        client.close()
    finally:
        server.stop()
        thread.join()


def test_a_pipe_that_nobody_reads_is_refused_at_once(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "log")
    monkeypatch.setenv("GT_INSTRUCTION_LOG", str(tmp_path / "log"))
    with pytest.raises(Refused, match="a pipe that nobody reads"):
        Server(core=ToyCore())


def test_a_reader_who_stops_reading_holds_nobody_up(tmp_path, caplog):
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    try:
        journal = InstructionLog(str(tmp_path / "log"))
        for _ in range(6):
            for _ in range(10_000):
                journal.write(Log("SEND", "w0", "x" * 100), 1.0)
            journal.flush()
        assert os.read(reader, 1 << 12).startswith(b"    1.000000")
        journal.close()
    finally:
        os.close(reader)
    assert [record.getMessage().count("bytes behind") for record in caplog.records] == [1]


@pytest.mark.parametrize("kind", ["folder", "socket"])
def test_a_path_that_is_no_file_is_refused(tmp_path, monkeypatch, kind):
    path = tmp_path / "log"
    with socket.socket(socket.AF_UNIX) as one:
        path.mkdir() if kind == "folder" else one.bind(str(path))
        monkeypatch.setenv("GT_INSTRUCTION_LOG", str(path))
        with pytest.raises(Refused, match="cannot be written"):
            Server(core=ToyCore())
