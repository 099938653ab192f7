"""A program planned in one process: the real client records, the real core plans, and workers execute nothing.

`with planned(yaml, workers=8) as plan:` runs the block's remote ops through the planner; `plan.lines` is the plan's text.
Workers answer Done at once and hold nothing, so values cannot be fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gt.client import current_session
from gt.dispatcher.core import Core
from gt.dispatcher.events import MARK, Lines, Received, Send, Turn, TurnWanted
from gt.dispatcher.fairness.time_slices import Pace
from gt.ir.text import PlanLine, parse
from gt.wire.link import hello
from gt.wire.messages import Done, Failed, Ops, Query, Report, Run, Stats, UploadRequest


class PlanSession:
    """The client's Session, its dispatcher in the same thread."""

    failure = None

    def __init__(self, config: str, workers: int) -> None:
        self.core = Core(logging=True, pace=Pace())
        self.lines: list[PlanLine] = []
        self.rows: list[str] = []  # of the instruction log
        self.errors: list[dict] = []
        self.needs: list[UploadRequest] = []
        self.runs: list[tuple[bytes, Run]] = []
        self.batch = 0
        self.slow = False  # whether workers keep their Done to themselves
        for index in range(workers):
            info = {"name": "", "pid": 1, "heap_bytes": 1 << 40, "backend": "torch"}
            self.handle(Received(b"w%d" % index, hello("worker", info=info)))
        self.handle(Received(b"client", hello("client", config=config, config_path="test.yaml", switches={"workers": workers})))
        assert b"client" in self.core.sessions, self.errors
        self.groups = list(self.core.sessions[b"client"].config.groups)

    def handle(self, event) -> None:
        pending = [event]
        while pending:
            for action in self.core.handle(pending.pop(0)):
                if isinstance(action, TurnWanted) and not pending:
                    pending.append(Turn(0.0))
                elif isinstance(action, Lines):
                    rows = action.text.split(MARK)[1:]
                    self.rows += rows
                    self.lines += [parse(plan_of(row)) for row in rows if row.split()[1] == "WORKER_SEND"]
                elif isinstance(action, Send) and isinstance(action.message, Run):
                    self.runs.append((action.peer, action.message))
                    if not self.slow:
                        pending.append(Received(action.peer, Done(action.message.seq)))
                elif isinstance(action, Send) and isinstance(action.message, Query):
                    pending.append(Received(action.peer, Report(action.message.request, {"stats": {}})))
                elif isinstance(action, Send) and isinstance(action.message, UploadRequest):
                    self.needs.append(action.message)
                elif isinstance(action, Send) and (isinstance(action.message, Failed) or hasattr(action.message, "error")):
                    self.errors.append(action.message.error)
        self.core.check()

    def submit(self, templates, origins, code, frames, asks=False) -> None:
        self.handle(Received(b"client", Ops(self.batch, templates, origins, code), tuple(frames)))
        self.batch += 1
        assert not self.errors, self.errors

    def keep(self, tensor, array) -> int:
        return -1

    def crowded(self, nbytes) -> bool:
        return False

    def ask(self) -> None:
        """Plan everything recorded so far, as before any request of a client."""
        current_session.current().flush()
        self.handle(Received(b"client", Stats(1)))

    def tensor(self, remote):
        """The dispatcher's row of a remote tensor."""
        self.ask()
        return self.core.sessions[b"client"].table.rows[remote._ref.id]

    def layout(self, remote) -> str:
        row = self.tensor(remote)
        return "unplaced" if row.layout is None else f"{row.layout} on {','.join(map(str, row.layout.mesh.workers))}"

    def count(self, word: str) -> int:
        self.ask()
        return sum(word in line.op for line in self.lines)

    def text(self) -> str:
        self.ask()
        return "\n".join(map(str, self.lines))


def plan_of(row: str) -> str:
    """The plan's text in a line of the instruction log."""
    return row[row.index(" %") + 1 :].rpartition(" @ ")[0]


@contextmanager
def planned(config: str = "", workers: int = 8) -> Iterator[PlanSession]:
    session, before = PlanSession(config, workers), current_session.set_aside()
    current_session.connect(session, config)
    try:
        yield session
    finally:
        current_session.disconnect()
        current_session.restore(before)
