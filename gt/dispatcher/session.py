"""One client's session, composed of its parts: op stream, planner, uploads, fetches and programs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gt.dispatcher.cluster.peer_info import client_info
from gt.dispatcher.cluster.tensor_roles import RoleTable
from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.planning.materializer import Materializer
from gt.dispatcher.planning.op_binder import OpBinder
from gt.dispatcher.planning.op_stream import OpStream
from gt.dispatcher.planning.planner import Planner
from gt.dispatcher.planning.redistributor import Redistributor
from gt.dispatcher.programs.programs import Programs
from gt.dispatcher.state.arenas import SessionArenas
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.fetches import Fetches
from gt.dispatcher.state.outbox import Outbox
from gt.dispatcher.state.records import Logged
from gt.dispatcher.state.tensors import Tensor
from gt.dispatcher.state.uploads import Uploads
from gt.wire.messages import Data, Message


class ClientSession:
    """One client between its messages. While it is `stalled`, round_robin.py keeps its messages in `inbox`."""

    def __init__(self, context: SessionContext) -> None:
        self.context = context
        self.number, self.peer, self.config, self.cluster = context.number, context.peer, context.config, context.cluster
        self.table, self.emitter, self.journal, self.failures = (
            context.table, context.emitter, context.journal, context.failures,
        )  # fmt: skip
        self.pace, self.stall_timeout = context.pace, context.terms.stall_timeout
        binder = OpBinder(context)
        self.arenas = SessionArenas(context)
        self.uploads = Uploads(context, self.arenas)
        self.outbox = Outbox(context, self.uploads)
        materializer = Materializer(context, self.uploads, binder)
        self.redistributor = Redistributor(context, binder, materializer)
        self.planner = Planner(context, self.uploads, binder, materializer, self.redistributor)
        self.fetches = Fetches(context, self.outbox, materializer, self.redistributor, self.arenas)
        self.programs = Programs(context, self.outbox, self.redistributor, self.planner.offload.host_copies)
        self.op_stream = OpStream(context, self.outbox, self.planner, self.redistributor, self.programs, self.fetches)
        self.inbox: deque[tuple[Message, tuple]] = deque()  # messages that came while stalled
        self.about = client_info({})  # facts of its process, for observers
        self.logged = Logged()
        self.roles = RoleTable()
        self.began, self.warned = self.cluster.now, False  # warned: told that its time is nearly over

    @property
    def stalled(self) -> bool:
        """True while messages have to wait."""
        first = self.inbox[0][0] if self.inbox else None
        awaits = first is not None and (self.arenas.awaits(first) or self.op_stream.awaits(first))
        return awaits or bool(self.outbox.held) or self.op_stream.busy or self.op_stream.in_thread

    @property
    def send(self) -> Callable[..., None]:
        """Sends the client a message."""
        return self.context.send

    def send_held(self) -> None:
        """Send what was held back, if all uploads that it waits for are here."""
        if self.outbox.held and not self.uploads.awaited:
            self.outbox.send_held()
            self.op_stream.acknowledge()

    # ---- lost workers, and the end

    def lose(self, worker: Worker) -> None:
        """A worker is lost: tensors with pieces there have failed for good, and requests get the cause as their answer."""
        # 1. Work that waits for its turn was planned with the old process in mind: it is sent before anything new.
        self.cluster.queue.lose(worker.index)
        self.cluster.send_all()
        self.arenas.lose(worker.index)
        self.uploads.lose(worker.index)
        self.op_stream.lose(worker.index)

        # 2. A session that has never used this worker goes on as it was.
        if worker.index not in self.emitter.used:
            self.send_held()
            return

        # 3. Every tensor with a piece there has failed, and programs and copies that name the worker are void.
        self.failures.troubled = True
        cause = self.failures.cause_of_loss(worker)
        self.programs.lose(worker.index, cause)
        self.op_stream.fragments.clear()
        for tensor in self.table.rows.values():
            if tensor.layout is not None and worker.index in tensor.layout.mesh.workers:
                tensor.storage.failed = cause
            if tensor.copies:
                tensor.copies = {k: v for k, v in tensor.copies.items() if worker.index not in k.mesh.workers}
            tensor.sums = None

        # 4. Whoever waits is told. What is deferred or held is sent after all: the other workers meet the end of the old
        # process in it, and not its successor, which knows nothing of this. An upload that is not here fails: a worker that
        # waited for this client would hang for all others.
        self.failures.unreported.append(cause)
        self.fetches.fail_all(cause)
        self.outbox.send_deferred()
        self.uploads.give_up_files()
        self.outbox.lose(worker.index)
        self.send_held()
        self.op_stream.acknowledge()

    def issued(self, seqs: set[int]) -> bool:
        """True if ops or questions of these numbers are this session's, or may be: an interrupt of it is under way."""
        known = any(row.seq in seqs for row in self.journal.rows) or self.fetches.asks(seqs)
        return known or self.op_stream.interrupted >= 0

    def drop(self, seqs: set[int]) -> None:
        """An interrupt dropped the ops and questions of these numbers."""
        self.failures.drop(seqs)
        self.fetches.drop(seqs)
        # Copies and sums are cached results of ops, and of dropped ops nobody knows whether they made them. All are freed.
        for tensor in self.table.rows.values():
            sums = [tensor.sums[1]] if tensor.sums is not None else []
            for layout, (_, copy) in [pair for t in (tensor, *sums) for pair in (t.copies or {}).items()]:
                self.op_stream.stale.append((layout.mesh.workers, copy))
            self.op_stream.stale += [(t.layout.mesh.workers, t.id) for t in sums if t.layout is not None]
            tensor.copies = tensor.sums = None

    def regain(self, worker: Worker) -> None:
        """A new process has a lost worker's place; tensors of the old one stay lost."""
        self.cluster.send_all()
        self.failures.regain(worker)
        self.emitter.used.discard(worker.index)
        self.arenas.regain(worker)
        self.op_stream.regain(worker)

    def close(self) -> None:
        """The client is gone: nothing of it stays on any worker. Large tables are left to be freed in slices."""
        context, outbox, leavings = self.context, self.outbox, self.pace.leavings
        # 1. Nothing more of it is sent; `takes`: uploads of instructions that are not sent.
        takes = [buffered.uploads for buffered in (*outbox.take_deferred(), *outbox.held)]
        takes += [unit.uploads for unit in self.cluster.queue.leave(self.number)]
        self.programs.discard()
        self.op_stream.fragments.close(leavings)
        outbox.discard()
        if self.op_stream.interrupted >= 0:
            self.op_stream.end_interrupt()
        context.ended = True  # what follows frees, for which workers need no switches
        self.fetches.close()

        # 2. Workers keep the bytes of an upload until an instruction takes them. Here none will: they are told to drop them.
        unsent = [row for rows in (self.uploads.unsent, *takes) for row in rows]
        orphans = {**self.uploads.close(), **{key: [w.index for w in workers] for key, workers in unsent}}
        for key, indices in orphans.items():
            for index in indices:
                context.out(self.cluster.workers[index].peer, Data(key, 0, -1), ())

        # 3. Workers free its tensors and definitions.
        self.emitter.end()
        outbox.flush(self.cluster.seq)
        self.arenas.end()
        self.cluster.take_turns()

        # 4. Its own memory: hundreds of thousands of rows would keep the loop for long.
        leavings.add(self.table.rows, Tensor.leave)
        self.table.rows = {}
        large = (outbox.held, self.inbox, self.op_stream.coming, self.journal.rows, context.templates, context.origins)
        for container in large:
            leavings.add(container)
        self.programs.leave(leavings)
