"""One client's session: its op stream, tensors, groups and requests. Parts: planner, lists, mover, placer.

Everything here is bookkeeping; what has to be sent is handed to `out` and to the workers' streams.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gt.config.schema import Config
from gt.dispatcher.cluster import Cluster, Worker
from gt.dispatcher.failures import Cause, Journal, Planned, worker_lost
from gt.dispatcher.lists import Lists
from gt.dispatcher.moving import Mover
from gt.dispatcher.placing import Placer
from gt.dispatcher.plan.groups import Groups, Meaning
from gt.dispatcher.plan.known import Known
from gt.dispatcher.planning import Planner
from gt.dispatcher.requests import Requests
from gt.dispatcher.stream import Emitter
from gt.dispatcher.tensors import Storage, Table, Tensor
from gt.errors import GTError, ProtocolError
from gt.ir import ops
from gt.ir.boxes import take
from gt.ir.instr import FIRST, FREE, PARAM
from gt.ir.layout import Box, Layout, Mesh
from gt.ir.spec import Spec
from gt.ir.template import Template
from gt.wire.messages import CHUNK, Ack, Data, Message, Need, Ops, Release

log = logging.getLogger("gt.dispatcher")


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Where the user issued an op. group: nested contexts, `outer/inner`; target: where a transfer among them leads."""

    file: str
    line: int
    group: str
    backward: bool
    meaning: Meaning | None = None
    target: Meaning | None = None


@dataclass(slots=True)
class Batch:
    """A batch that workers are carrying out: acknowledged when each has come to its `runs`."""

    seq: int
    end: int
    runs: dict[int, int]


class Session:
    """State of one client between its messages. `out(peer, message, frames)` sends."""

    def __init__(self, number: int, peer: bytes, config: Config, cluster: Cluster, out: Callable) -> None:
        self.number, self.peer, self.config, self.cluster = number, peer, config, cluster
        self._out = out
        self.groups = Groups(config)
        self.table = Table()
        self.emitter = Emitter(cluster, number)
        self.journal = Journal()
        self.mover, self.placer = Mover(self), Placer(self)
        self.planner, self.lists = Planner(self), Lists(self)
        self.requests = Requests(self)
        self.templates: dict[int, Known] = {}
        self.origins: dict[int, Origin] = {0: Origin("", 0, "", False)}
        self.origin = self.origins[0]
        self.pending: deque[Batch] = deque()
        self.troubled = False  # some storage may be failed: ops take the careful path
        self.unreported: deque[Cause] = deque()
        self.ops = self.uploaded = self.plan_hits = 0
        self.on_op: Callable[[Known, Origin, Sequence[int]], None] | None = None
        self._layouts: dict[Layout, Layout] = {}
        self._known_names: set[str] = set()
        self._code: list = []
        self._at = 0
        self._frames: tuple = ()
        self._losses: dict[int, Cause] = {}
        self._failed_ops: set[int] = set()

    # ---- the op stream

    def run(self, message: Ops, frames: tuple) -> None:
        """Carry out one batch: definitions, then the stream."""
        for number, row in message.templates:
            self._define(number, row)
        for number, file, line, group, backward in message.origins:
            self._origin(number, file, line, group, backward)
        self._frames = frames
        self._code = message.code
        first = self.emitter.base = self.cluster.seq
        try:
            self._stream(message.code)
        finally:
            self.emitter.seq = self.cluster.seq
            self._code, self._frames = [], ()
        runs = self.flush(first)
        self.pending.append(Batch(message.seq, self.cluster.seq, runs))
        self.settle_batches()

    def _define(self, number: int, row: list) -> None:
        try:
            template = Template.from_wire(row)
        except (TypeError, ValueError, KeyError) as error:
            raise ProtocolError(f"Ops.templates: template {number}: {error}") from error
        if number < FIRST or not ops.known(template.op):
            raise ProtocolError(f"Ops.templates: {number} {template.op!r} is not an op")
        self.templates[number] = Known(template)

    def _origin(self, number: int, file: str, line: int, group: str, backward: bool) -> None:
        meaning, missing = self.groups.find(group, backward)
        for name in missing:
            if name not in self._known_names and self.groups:
                self._known_names.add(name)
                log.warning("%s:%s: the config has no group %r: ops run as outside it", file, line, name)
        leads = (self.groups.destination(name, backward) for name in reversed(group.split("/")))
        target = next((found for found in leads if found is not None), None)
        self.origins[number] = Origin(file, line, group, backward, meaning, target)

    def _stream(self, code: list) -> None:
        templates, origins, rows = self.templates, self.origins, self.table.rows
        emitter, cluster, op = self.emitter, self.cluster, self.planner.op
        at, end = 0, len(code)
        while at < end:
            self._at = at
            number = code[at]
            if number < FIRST:
                at = self._special(number, code, at)
                continue
            try:
                known = templates[number]
                first = at + 2
                second = first + known.tensors
                third = second + known.values
                self.origin = origin = origins[code[at + 1]]
                ins = [rows[i] for i in code[first:second]]
                at = self._at = third + known.results
            except (IndexError, KeyError, TypeError) as error:
                raise ProtocolError(f"Ops.code names nothing of this session at {self._at}: {error!r}") from error
            if at > end:
                raise ProtocolError(f"Ops.code ends within an op, at {end}")
            emitter.seq = cluster.seq
            if self.on_op is not None:
                self.on_op(known, origin, code[first:second])
            op(known, origin, ins, tuple(code[second:third]), code[third:at])
            cluster.seq += 1
            self.ops += 1

    def _special(self, number: int, code: list, at: int) -> int:
        if number == FREE:
            count = code[at + 1]
            self.mover.release(code[at + 2 : at + 2 + count])
            return at + 2 + count
        if number == PARAM:
            self.table.rows[code[at + 1]].storage.param = True
            return at + 2
        raise ProtocolError(f"Ops.code has {number} at {at}, which names nothing")

    def ahead(self) -> tuple[list, int, dict[int, Known]]:
        """The rest of the batch, for planning that looks ahead."""
        return self._code, self._at, self.templates

    def flush(self, base: int) -> dict[int, int]:
        """Send what is queued for workers; the number of each one's last Run."""
        runs = {}
        for worker in self.cluster.workers:
            run = worker.flush(base)
            if run is not None and not worker.lost:
                self._out(worker.peer, run, ())
                self.emitter.used.add(worker.index)
            if worker.index in self.emitter.used and not worker.lost:
                runs[worker.index] = worker.runs
        self.emitter.base = self.cluster.seq
        return runs

    def settle_batches(self) -> None:
        """Acknowledge the batches that all workers have carried out, and forget their journal."""
        last = None
        while self.pending and self.reached(self.pending[0].runs):
            last = self.pending.popleft()
        if last is not None:
            self.journal.forget(last.end)
            self.send(Ack(last.seq))
        self.requests.settle()

    def reached(self, runs: dict[int, int]) -> bool:
        """Whether workers have come so far (one that is lost has come as far as it ever will)."""
        workers = self.cluster.workers
        return all(workers[index].done >= run or workers[index].lost for index, run in runs.items())

    # ---- uploads

    def upload_source(self, known: Known, values: tuple, outs: list[int]) -> Any:
        """Where the bytes of an upload are: in this batch, or kept by the client under the tensor's id."""
        if known.name != "gt.upload":
            return None
        return ("host", outs[0]) if values[0] < 0 else ("inline", self._frames[values[0]])

    def upload(self, source: tuple, spec: Spec, parts: list[Box], workers: list[Worker]) -> int:
        """Key under which these workers will get the boxes of an upload."""
        key = self.cluster.key()
        kind, data = source
        self.uploaded += spec.nbytes
        if kind == "host":
            self.requests.expect(key, [w.index for w in workers])
            self.send(Need(data, key, [[list(span) for span in box] for box in parts]))
            return key
        flat = np.frombuffer(data, dtype=np.uint8).view(f"V{spec.itemsize}") if spec.nbytes else np.empty(0, "V1")
        piece = take(flat.reshape(spec.shape), parts).reshape(-1) if spec.nbytes else flat
        raw = memoryview(piece.view(np.uint8)).cast("B") if spec.nbytes else memoryview(b"")
        for worker in workers:
            for offset in range(0, max(len(raw), 1), CHUNK):
                chunk = raw[offset : offset + CHUNK]
                self._out(worker.peer, Data(key, offset, len(raw)), (chunk,) if len(chunk) else ())
        return key

    def release_host(self, tensor: int) -> None:
        self.send(Release([tensor]))

    # ---- failures

    def note_planned(self, known: Known, reads: tuple[Storage, ...], makes: tuple[Storage, ...]) -> None:
        """Journal what is done beside ops, under a number of its own; the op that is being planned gets the next."""
        self.journal.rows.append(Planned(self.emitter.seq, known, self.origin, reads, (), makes))
        self.cluster.seq += 1
        self.emitter.seq = self.cluster.seq

    def spread(self, known: Known, reads: tuple[Storage, ...], writes: tuple[Storage, ...], makes: tuple[Storage, ...]) -> None:
        """What reads a failed storage fails; a whole overwrite from good ones heals."""
        sources = [s for s in reads if not (known.overwrites and s in writes)]
        cause = next((s.failed for s in sources if s.failed), None)
        if cause is not None:
            cause.dependents += 1
            for storage in (*writes, *makes):
                storage.failed = storage.failed or cause
        elif known.overwrites:
            for storage in writes:
                if storage.failed is not None and storage.failed.lost < 0:
                    storage.failed = None

    def trouble(self, seq: int, error: GTError) -> None:
        """A worker reported that op `seq` failed."""
        if seq in self._failed_ops:
            return  # another worker of the mesh reported the same op
        self._failed_ops.add(seq)
        cause = Cause(error)
        self.troubled = True
        self.journal.taint(seq, cause)
        self.unreported.append(cause)

    def cause_of_loss(self, worker: Worker | None) -> Cause:
        assert worker is not None
        if worker.index not in self._losses:
            self._losses[worker.index] = Cause(worker_lost(worker.name, worker.lost), lost=worker.index)
        return self._losses[worker.index]

    def lose(self, worker: Worker) -> None:
        """A worker is gone: what it held is failed for good, and so is what waits for it."""
        if worker.index not in self.emitter.used:
            return
        self.troubled = True
        cause = self.cause_of_loss(worker)
        for tensor in self.table.rows.values():
            if tensor.layout is not None and worker.index in tensor.layout.mesh.workers:
                tensor.storage.failed = cause
            if tensor.copies:
                tensor.copies = {k: v for k, v in tensor.copies.items() if worker.index not in k.mesh.workers}
        self.unreported.append(cause)
        self.requests.fail_all(cause)
        self.settle_batches()

    # ---- small things

    def intern(self, layout: Layout) -> Layout:
        """The one object for equal layouts, so that plans can be keyed by identity."""
        return self._layouts.setdefault(layout, layout)

    def default_mesh(self) -> Mesh:
        """Where ungrouped work runs: the first worker."""
        return Mesh((), (0,))

    def note(self, extra: str = "") -> str:
        """Origin and group, for plan lines."""
        origin = self.origin
        where = f"{origin.file.rpartition('/')[2]}:{origin.line}" if origin.file else ""
        return " ".join(filter(None, (extra, where, origin.group.rpartition("/")[2], "backward" if origin.backward else "")))

    def send(self, message: Message, frames: tuple = ()) -> None:
        self._out(self.peer, message, frames)

    def row(self, tensor: int) -> Tensor:
        """A live tensor of this session; ProtocolError otherwise."""
        row = self.table.rows.get(tensor)
        if row is None:
            raise ProtocolError(f"tensor %{tensor} is not of this session")
        return row

    def close(self) -> None:
        """The client is gone: nothing of it stays on any worker."""
        self.emitter.base = self.emitter.seq = self.cluster.seq
        owned: dict[Mesh, list[int]] = {}
        for tensor in self.table.rows.values():
            if tensor.layout is not None:
                owned.setdefault(tensor.layout.mesh, []).append(tensor.id)
            for layout, (_, copy) in (tensor.copies or {}).items():
                owned.setdefault(layout.mesh, []).append(copy)
        for mesh, ids in owned.items():
            self.emitter.free(mesh.workers, ids)
        self.table.rows.clear()
        for key, workers in self.requests.uploads.items():  # nobody will send these any more
            for index in workers:
                self._out(self.cluster.workers[index].peer, Data(key, 0, -1), ())
        self.flush(self.cluster.seq)
