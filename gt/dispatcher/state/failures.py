"""What failed, and what fails with it: taint spreads over the ops planned since, as far as values flow.

Workers run every op, with placeholders where one failed; only here is it known whose value is then worthless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gt.errors import GTError, OpFailed, UnsupportedOp, WorkerLost

if TYPE_CHECKING:
    from gt.dispatcher.sharding.op_schema import OpSchema
    from gt.dispatcher.state.tensors import Storage
    from gt.dispatcher.state.validate import Origin


@dataclass(slots=True)
class Cause:
    """Why values are worthless. lost: the index of a worker that is gone, else -1. seq: of the op that failed, else -1.

    full: a worker had no room, as it may have none for the ops after it: of such ones the first is told.
    """

    error: GTError
    lost: int = -1
    seq: int = -1
    full: bool = False


@dataclass(slots=True)
class Planned:
    """One op of the journal, with the storages it read, wrote and made."""

    seq: int
    known: OpSchema
    origin: Origin
    reads: tuple[Storage, ...]
    writes: tuple[Storage, ...]
    makes: tuple[Storage, ...]

    @property
    def end(self) -> int:
        """Sequence number of what came after it."""
        return self.seq + 1

    def at(self, seq: int) -> Planned:
        """The op of this number."""
        return self


@dataclass(slots=True)
class Launched(Planned):
    """A program's replay: all of its ops under consecutive numbers, with what all of them read, wrote and made."""

    ops: list[Planned]
    number: int  # of the replay, from 1
    cause: Cause | None = None  # of the first of its ops that failed

    @property
    def end(self) -> int:
        return self.seq + len(self.ops)

    def at(self, seq: int) -> Planned:
        return self.ops[seq - self.seq]


@dataclass(slots=True)
class OpJournal:
    """Ops that some worker may still report as failed, oldest first. tape: where a recording keeps them too."""

    rows: deque[Planned] = field(default_factory=deque)
    tape: list[Planned] | None = None

    def add(self, row: Planned) -> None:
        self.rows.append(row)
        if self.tape is not None:
            self.tape.append(row)

    def forget(self, upto: int) -> None:
        """Every op before `upto` is known to have succeeded or failed."""
        rows = self.rows
        while rows and rows[0].seq < upto:
            rows.popleft()

    def taint(self, seqs: Collection[int], cause: Cause) -> None:
        """Mark what these ops made and wrote, and all that was computed from it since; a whole overwrite heals."""
        first = min(seqs)
        for row in self.rows:
            if row.end <= first:
                continue
            if isinstance(row, Launched):
                harmed = any(row.seq <= seq < row.end for seq in seqs)
                row.cause = row.cause or (cause if harmed else None)
            else:
                harmed = row.seq in seqs
            if harmed or any(s.failed is cause for s in row.reads):
                for storage in (*row.writes, *row.makes):
                    storage.failed = storage.failed or cause
            elif row.known.overwrites:
                for storage in row.writes:
                    if storage.failed is cause:
                        storage.failed = None

    def earlier(self, seq: int) -> Cause | None:
        """Why something that op `seq`, or its replay, reads had failed before: then its own failure says nothing new."""
        row = self.find(seq)
        if row is None:
            return None
        if isinstance(row, Launched) and row.cause is not None:
            return row.cause
        return next((s.failed for s in row.reads if s.failed is not None and s.failed.seq < seq), None)

    def find(self, seq: int) -> Planned | None:
        return next((row for row in self.rows if row.seq <= seq < row.end), None)


def op_failed(row: Planned | None, seq: int, kind: str, message: str, worker: str) -> GTError:
    """The user's error for what a worker reported of op `seq`."""
    if row is None:
        return OpFailed(f"an op failed on worker {worker}: {message}", worker=worker)
    replay = ""
    if isinstance(row, Launched):
        replay = f"\n  this was replay {row.number} of a program: its outputs mix two steps; restore them from a checkpoint"
    row = row.at(seq)
    origin, op = row.origin, row.known.template.op
    where = f"{origin.file}:{origin.line}" if origin.file else "an op"
    group = f", group {origin.group}" if origin.group else ""
    ins = "".join(f" {spec.text()}" for spec in row.known.template.ins[:8])
    text = f"{where}: {op}{ins} failed on worker {worker}{group}: {message}"
    if kind == "unsupported":
        return UnsupportedOp(f"{where}: {message} (worker {worker}{group})")
    text += replay + "\n  tensors computed from its result fail too, until they get a new value; other tensors are unharmed"
    return OpFailed(text, op=op, worker=worker, group=origin.group, origin=f"{origin.file}:{origin.line}")


def worker_lost(name: str, reason: str, replay: int = 0) -> WorkerLost:
    """replay: number of a program's replay that was under way."""
    half = (
        f"Replay {replay} of a program was under way, and its outputs elsewhere mix two steps: load these too. "
        if replay
        else ""
    )
    return WorkerLost(
        f"worker {name} is lost: {reason}; its tensors are gone: create them again, or load a checkpoint. {half}"
        "GT restarts a worker that it started, empty; if you started it by hand, start it again"
    )
