"""One client's session: its op stream, tensors, groups and requests. Parts: planner, lists, mover, placer.

Everything here is bookkeeping; what has to be sent is handed to `out` and to the workers' streams.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from gt.config.schema import Config
from gt.dispatcher.cluster.workers import Cluster, Worker
from gt.dispatcher.fairness.run_queue import Unit
from gt.dispatcher.fairness.time_slices import Leavings, Pace
from gt.dispatcher.planning.list_ops import Lists
from gt.dispatcher.planning.materializer import Placer
from gt.dispatcher.planning.op_stream import Batches
from gt.dispatcher.planning.planner import Planner
from gt.dispatcher.planning.redistributor import Mover
from gt.dispatcher.programs.programs import Programs
from gt.dispatcher.sharding.groups import Groups
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.state.emitter import Emitter
from gt.dispatcher.state.failures import Cause, Launched, OpJournal, Planned, worker_lost
from gt.dispatcher.state.fetches import Requests
from gt.dispatcher.state.log_lines import Scribe
from gt.dispatcher.state.tensors import Storage, Table, Tensor
from gt.dispatcher.state.uploads import Uploads
from gt.dispatcher.state.validate import Origin
from gt.errors import GTError, ProtocolError
from gt.ir.layout import Layout, Mesh
from gt.wire.messages import Ack, Data, Message, Run, TorchSettings

log = logging.getLogger("gt.dispatcher")

MOST_UNREPORTED = 64  # failures that nobody has been told of
NONE: dict[int, float] = {}
UNSENT = 1 << 62  # number of a Run that is held back, until it has one


@dataclass(slots=True)
class BufferedInstructions:
    """What is written for workers and waits for the uploads that it takes: (worker, its life, defines, code)."""

    base: int
    rows: list[tuple[Worker, int, list, list]]
    runs: dict[int, int]
    timed: bool
    seconds: dict[int, float]  # that it takes on each worker, by estimate
    uploads: Sequence[tuple[int, list[Worker]]] = ()  # that it takes, and of whom
    also: Sequence[dict[int, int]] = ()  # other `runs`, of what was made one with it


class ClientSession:
    """State of one client between its messages. `out(peer, message, frames)` sends.

    Nothing that takes an upload goes to a worker before all of the upload has: a worker never waits for a client. Until then
    the session is `stalled`, and whoever feeds it keeps its messages. `switches` are torch's, by worker.
    """

    def __init__(self, number: int, peer: bytes, config: Config, cluster: Cluster, out: Callable) -> None:
        self.number, self.peer, self.config, self.cluster = number, peer, config, cluster
        self.out = out
        self.switches: Callable[[Worker], dict] = lambda worker: {}
        self.ended = False
        self.memory = 0  # bytes that it may hold on a worker, 0 for no limit of its own
        self.groups = Groups(config)
        self.table = Table()
        self.emitter = Emitter(cluster, number)
        self.journal = OpJournal()
        self.mover, self.placer = Mover(self), Placer(self)
        self.planner, self.lists = Planner(self), Lists(self)
        self.requests = Requests(self)
        self.programs = Programs(self)
        self.uploads = Uploads(self)
        self.batches = Batches(self)
        self.began, self.warned = cluster.now, False  # warned: told that its time is nearly over
        self.pace = Pace()
        self.aside = False  # something of it goes on in a thread
        self.inbox: deque[tuple[Message, tuple]] = deque()  # what came while stalled
        self.held: list[BufferedInstructions] = []
        cluster.queue.enter(number)
        self.uses: set[int] = set()  # workers that it has sent something
        self.next_batch = 0
        self.told_stuck = False  # that workers are, since batches were last acknowledged
        self.stall_timeout = 0.0  # seconds in which no worker gets on until that is an error, 0 for none
        self.templates: dict[int, OpSchema] = {}
        self.origins: dict[int, Origin] = {0: Origin("", 0, "", False)}
        self.origin = self.origins[0]
        self.troubled = False  # some storage may be failed: ops take the careful path
        self.unreported: deque[Cause] = deque()
        self._last_error: GTError | None = None  # of an op
        self.full_upto = 0  # ops before it that found no room are told of
        self.ops = self.uploaded = self.plan_hits = 0
        self.scribe: Scribe | None = None  # where an instruction log is kept
        self._layouts: dict[Layout, Layout] = {}
        self.known_names: set[str] = set()
        self.names: dict[str, str] = {}  # of files and groups
        self.name_characters = self.template_parts = 0
        self._losses: dict[int, Cause] = {}
        self._lost: Cause | None = None  # the last of them, also when all are back
        self._failed_ops: set[int] = set()

    # ---- to workers

    def cut(self) -> None:
        """Send what is written so far apart from what follows."""
        self.flush(self.emitter.base)
        self.emitter.seq = self.emitter.base

    def flush(self, base: int) -> dict[int, int]:
        """Send what is written for workers, or hold it back for its uploads; the number of each one's last Run, once sent."""
        if not (self.held or self.uploads.awaited):
            self.emitter.forget()
        held = self.taken(base)
        if self.programs.tape is not None:
            for worker, _, _, code in held.rows:
                self.programs.take(worker.index, base, code)
        if self.uploads.awaited:
            self.held.append(held)
        else:
            self.dispatch(held)
        return held.runs

    def taken(self, base: int) -> BufferedInstructions:
        """What is written for workers, no longer theirs."""
        seconds = {w.index: w.seconds for w in self.cluster.workers if w.seconds} if self.emitter.seconds else NONE
        rows = [(w, w.lives, *part) for w in self.cluster.workers for part in w.take()]
        self.emitter.seconds = 0.0
        self.emitter.used.update(worker.index for worker, *_ in rows if not worker.lost)
        self.emitter.base = self.cluster.seq
        runs = {index: UNSENT for index in self.emitter.used}
        held = BufferedInstructions(base, rows, runs, self.programs.tape is not None, seconds)
        if self.uploads.unsent:
            held.uploads, self.uploads.unsent = self.uploads.unsent, []
        return held

    def dispatch(self, held: BufferedInstructions) -> None:
        """Send it when it is this session's turn, and not before a recording that it belongs to is over."""
        if self.programs.deferred.hold(held):
            return
        if not held.seconds and self.cluster.queue.free(self.number):
            self.transmit(held)
            return
        costs = {worker.index: held.seconds.get(worker.index, 0.0) for worker, *_ in held.rows}
        unit = Unit(self.number, costs, partial(self.transmit, held), held.uploads)
        if self.cluster.queue.offer(unit):
            unit.send()

    def _switch(self, worker: Worker, shared: bool) -> None:
        """Tell a worker whose Runs follow, unless it knows."""
        wanted = self.switches(worker)
        if self.ended or (worker.session == self.number and worker.switches == wanted and worker.shared == shared):
            return
        worker.session, worker.switches, worker.shared = self.number, wanted, shared
        self.out(worker.peer, TorchSettings(wanted, self.number, self.memory, shared), ())

    def transmit(self, held: BufferedInstructions) -> None:
        """To every worker in one go, so that all of them see what sessions exchange in the same order."""
        sent: dict[int, int] = {}
        queue = self.cluster.queue
        counted = bool(held.seconds) or not queue.free(self.number)
        for worker, life, defines, code in held.rows:
            if worker.lost or worker.lives != life:
                continue
            if worker.index not in self.uses:
                self.uses.add(worker.index)
                queue.use(self.number, worker.index)
            self._switch(worker, queue.contended(worker.index))
            worker.runs += 1
            self.out(worker.peer, Run(worker.runs, held.base, defines, code, held.timed), ())
            if counted:
                sent[worker.index] = worker.runs
        for index, run in sent.items():
            queue.sent(self.number, index, run, held.seconds.get(index, 0.0))
        workers = self.cluster.workers
        reach = {index: workers[index].runs for index in self.emitter.used if not workers[index].lost}
        for runs in (held.runs, *held.also):
            runs.clear()
            runs.update(reach)

    @property
    def stalled(self) -> bool:
        return bool(self.held) or self.batches.busy or self.aside

    def release(self) -> None:
        """Send what was held back, if all it waits for has come."""
        if self.held and not self.uploads.awaited:
            self._release()

    def _release(self) -> None:
        held, self.held = self.held, []
        for one in held:
            self.dispatch(one)
        self.settle_batches()

    def discard(self) -> None:
        """Nothing of what this event has written is sent: it would be half of what workers do together."""
        for worker in self.cluster.workers:
            worker.discard()

    def settle_batches(self) -> None:
        """Acknowledge the batches that all workers have carried out, and forget their journal."""
        last, pending = None, self.batches.pending
        while pending and self.reached(pending[0].runs):
            last = pending.popleft()
        if last is not None:
            self.told_stuck = False
            self.journal.forget(last.end)
            self._failed_ops = {seq for seq in self._failed_ops if seq >= last.end}
            self.send(Ack(last.seq))
        self.requests.settle()

    def reached(self, runs: dict[int, int]) -> bool:
        """Whether workers have come so far (one that is lost has come as far as it ever will)."""
        workers = self.cluster.workers
        return all(workers[index].done >= run or workers[index].lost for index, run in runs.items())

    # ---- failures

    def note_planned(self, known: OpSchema, reads: tuple[Storage, ...], makes: tuple[Storage, ...]) -> None:
        """Journal what is done beside ops, under a number of its own; the op that is being planned gets the next."""
        self.journal.add(Planned(self.emitter.seq, known, self.origin, reads, (), makes))
        self.cluster.seq += 1
        self.emitter.seq = self.cluster.seq

    def spread(
        self, known: OpSchema, reads: tuple[Storage, ...], writes: tuple[Storage, ...], makes: tuple[Storage, ...]
    ) -> None:
        """What reads a failed storage fails; a whole overwrite from good ones heals."""
        sources = [s for s in reads if not (known.overwrites and s in writes)]
        cause = next((s.failed for s in sources if s.failed), None)
        if cause is not None:
            for storage in (*writes, *makes):
                storage.failed = storage.failed or cause
        elif known.overwrites:
            for storage in writes:
                if storage.failed is not None and storage.failed.lost < 0:
                    storage.failed = None

    def trouble(self, seq: int, error: GTError, others: Sequence[int] = (), full: bool = False) -> None:
        """A worker reported that op `seq` failed. One that was given a placeholder fails of that, which is no news."""
        older = self.journal.earlier(seq)
        error = (self._last_error or error) if others else error
        if older is None:
            self._last_error = error
        # What it made is worthless either way. The cause is another object: what healed of the older one stays as it is.
        cause = Cause(error, seq=seq, full=full) if older is None else Cause(older.error, older.lost, older.seq, older.full)
        told = others or (full and (seq < self.full_upto or any(one.full for one in self.unreported)))  # others: as before it
        if self.taint(seq, cause, others) and older is None and not told and len(self.unreported) < MOST_UNREPORTED:
            self.unreported.append(cause)

    def taint(self, seq: int, cause: Cause, others: Iterable[int] = ()) -> bool:
        """Op `seq` and others failed for this cause; False if another worker of the mesh has reported it."""
        new = {seq, *others} - self._failed_ops
        if not new:
            return False
        self._failed_ops |= new
        self.troubled = True
        self.journal.taint(new, cause)
        return seq in new

    def cause_of_loss(self, worker: Worker | None) -> Cause:
        assert worker is not None
        if worker.index not in self._losses:
            under_way = next((row.number for row in self.journal.rows if isinstance(row, Launched)), 0)
            self._lost = Cause(worker_lost(worker.name, worker.lost, under_way), lost=worker.index)
            self._losses[worker.index] = self._lost
        return self._losses[worker.index]

    def loss(self) -> Cause | None:
        """Why a worker misses a peer: another is lost, or was, and its successor came before what waited for it had ended."""
        lost = next((w for w in self.cluster.workers if w.lost), None)
        return self._lost if lost is None else self.cause_of_loss(lost)

    def lose(self, worker: Worker) -> None:
        """A worker is gone: what it held is failed for good, and so is what waits for it."""
        self.cluster.queue.lose(worker.index)
        self.cluster.send_all()
        self.uploads.lose(worker.index)
        if worker.index not in self.emitter.used:
            self.release()
            return
        self.troubled = True
        cause = self.cause_of_loss(worker)
        self.programs.lose(worker.index, cause)
        for tensor in self.table.rows.values():
            if tensor.layout is not None and worker.index in tensor.layout.mesh.workers:
                tensor.storage.failed = cause
            if tensor.copies:
                tensor.copies = {k: v for k, v in tensor.copies.items() if worker.index not in k.mesh.workers}
            tensor.sums = None
        self.unreported.append(cause)
        self.requests.fail_all(cause)
        self.programs.deferred.flush()
        self._release()  # planned with the old process in mind: peers must meet its end, not its successor
        self.settle_batches()

    def regain(self, worker: Worker) -> None:
        """A new process has a lost worker's place; what the old one held stays lost."""
        self.cluster.send_all()
        self._losses.pop(worker.index, None)
        self.emitter.used.discard(worker.index)

    def recover(self) -> None:
        """Care is no longer needed once nothing that failed is left, and no worker is missing."""
        if self.troubled and not self._losses and all(t.storage.failed is None for t in self.table.rows.values()):
            self.troubled = False

    # ---- small things

    def apart(self) -> AbstractContextManager[None]:
        """Work within takes long, and touches nothing but what is this session's: others go on. Nothing may be written
        for workers and not be sent; numbers of ops are others' afterwards, so that `renumber` comes first.
        """
        return self.pace.background.apart(lambda: self.ended)

    def renumber(self) -> None:
        """Write from here on what comes after all that others have sent meanwhile."""
        self.emitter.seq = self.emitter.base = self.cluster.seq

    def intern(self, layout: Layout) -> Layout:
        """The one object for equal layouts, so that plans can be keyed by identity."""
        return self._layouts.setdefault(layout, layout)

    def default_mesh(self) -> Mesh:
        """Where ungrouped work runs: the first worker that is there."""
        return Mesh((), (next((w.index for w in self.cluster.workers if not w.lost), 0),))

    def note(self, extra: str = "", origin: Origin | None = None) -> str:
        """Origin and group, for plan lines."""
        origin = origin or self.origin
        where = f"{origin.file.rpartition('/')[2]}:{origin.line}" if origin.file else ""
        return " ".join(filter(None, (extra, where, origin.group.rpartition("/")[2], "backward" if origin.backward else "")))

    def send(self, message: Message, frames: tuple = ()) -> None:
        self.out(self.peer, message, frames)

    def row(self, tensor: Any) -> Tensor:
        """A live tensor of this session; ProtocolError otherwise."""
        row = self.table.rows.get(tensor) if type(tensor) is int else None
        if row is None:
            raise ProtocolError(f"tensor %{tensor!r:.40} is not of this session")
        return row

    def close(self, leavings: Leavings) -> None:
        """The client is gone: nothing of it stays on any worker. What is large is left to be freed in slices."""
        takes = [one.uploads for one in (*self.programs.deferred.drop(), *self.held)]
        takes += [unit.uploads for unit in self.cluster.queue.leave(self.number)]
        self.programs.discard()
        self.discard()
        self.ended = True  # what follows frees, for which workers need no switches
        self.requests.close()
        unsent = [row for rows in (self.uploads.unsent, *takes) for row in rows]
        orphans = {**self.uploads.close(), **{key: [w.index for w in workers] for key, workers in unsent}}
        for key, indices in orphans.items():
            for index in indices:
                self.out(self.cluster.workers[index].peer, Data(key, 0, -1), ())
        self.emitter.end()
        self.flush(self.cluster.seq)
        self.cluster.take_turns()
        leavings.add(self.table.rows, Tensor.leave)
        self.table.rows = {}
        for container in (self.held, self.inbox, self.batches.coming, self.journal.rows, self.templates, self.origins):
            leavings.add(container)
        self.programs.leave(leavings)
