"""The workers as the dispatcher sees them: who they are, what is queued for each, where on the heap they exchange data.

Pure bookkeeping: definitions are numbered here, heap offsets handed out here, since only here every use is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gt.ir.heap import BUFFER_BYTES, SLOT_BYTES, SLOTS, channel_bytes, channel_class, team_bytes
from gt.ir.instr import FIRST, Define
from gt.wire.messages import Run


@dataclass(slots=True)
class Worker:
    """One worker process and the stream that is being written for it. runs/done count its Run messages."""

    index: int
    name: str
    peer: bytes
    info: dict
    lost: str = ""
    known: set[int] = field(default_factory=set)
    defines: list = field(default_factory=list)
    code: list = field(default_factory=list)
    runs: int = 0
    done: int = 0

    def define(self, definition: Define) -> int:
        """Number of the definition, sent along if this worker has not seen it."""
        number = definition.number
        if number not in self.known:
            self.known.add(number)
            self.defines.append(definition.wire())
        return number

    def flush(self, base: int) -> Run | None:
        """The Run message for what was queued, if anything was."""
        if not self.code:
            return None
        self.runs += 1
        run = Run(self.runs, base, self.defines, self.code)
        self.defines, self.code = [], []
        return run


class Cluster:
    """Workers by index, with heap regions for pairs and teams."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.next_define = FIRST
        self.heap_used = 0
        self.generation = 0
        self.seq = 0  # of the next op, over all sessions
        self.next_key = 0
        self._channels: dict[int, int] = {}
        self._teams: dict[tuple[int, ...], tuple[int, int]] = {}

    def add(self, peer: bytes, info: dict) -> Worker:
        """A worker joins; one of the name of a lost worker takes its place."""
        name = info.get("name") or ""
        for worker in self.workers:
            if worker.lost and (not name or worker.name == name):
                fresh = Worker(worker.index, worker.name, peer, info)
                self.workers[worker.index] = fresh
                return fresh
        index = len(self.workers)
        worker = Worker(index, name or f"w{index}", peer, info)
        self.workers.append(worker)
        return worker

    def named(self, name: str) -> Worker | None:
        return next((w for w in self.workers if w.name == name), None)

    def number(self) -> int:
        self.next_define += 1
        return self.next_define - 1

    def key(self) -> int:
        """A new name for one upload or answer."""
        self.next_key += 1
        return self.next_key

    def _take(self, nbytes: int) -> int:
        offset = self.heap_used
        self.heap_used += nbytes
        limit = min((w.info.get("heap_bytes", 0) for w in self.workers), default=0)
        if self.heap_used > limit:
            raise MemoryError(f"the symmetric heap of {limit} bytes has no room for {nbytes} more")
        return offset

    def channel(self, source: int, target: int) -> int:
        """Heap offset of the slots for messages source -> target; pairs that never meet in a heap share one."""
        shared = channel_class(source, target)
        if shared not in self._channels:
            self._channels[shared] = self._take(channel_bytes(SLOT_BYTES, SLOTS))
        return self._channels[shared]

    def team(self, workers: tuple[int, ...]) -> tuple[int, int]:
        """(id, heap offset) of a team, made on first use."""
        if workers not in self._teams:
            self._teams[workers] = (len(self._teams), self._take(team_bytes(BUFFER_BYTES, len(workers))))
        return self._teams[workers]

    def team_payload(self, workers: tuple[int, ...], rank: int) -> dict:
        number, offset = self.team(workers)
        return {"id": number, "workers": list(workers), "rank": rank, "offset": offset, "bytes": BUFFER_BYTES}

    def channel_payload(self, source: int, target: int, peer: int) -> dict:
        return {"peer": peer, "offset": self.channel(source, target), "bytes": SLOT_BYTES, "slots": SLOTS}
