"""A session's way to workers: instructions are sent once their uploads are here, and it is the session's turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.fairness.run_queue import Unit
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.uploads import Uploads
from gt.dispatcher.state.validate import CREDIT
from gt.wire.messages import Run, TorchSettings

MAX_PENDING_BATCHES = CREDIT * 3 // 4  # its client waits when it has no credit left
UNFIT_KINDS = frozenset({"fetch", "describe", "program"})  # no instructions of a deferred call
NO_SECONDS: dict[int, float] = {}
UNSENT = 1 << 62  # number of a Run that is held back, until it has one


@dataclass(slots=True)
class BufferedInstructions:
    """Instructions for workers that are written and not sent: rows of (worker, its life, defines, code)."""

    base: int
    rows: list[tuple[Worker, int, list, list]]
    runs: dict[int, int]
    recording: object | None  # mark of the recording that it belongs to
    seconds: dict[int, float]  # that it takes on each worker, by estimate
    uploads: Sequence[tuple[int, list[Worker]]] = ()  # (key, workers) of uploads that these instructions consume
    also: Sequence[dict[int, int]] = ()  # other `runs`, of what was made one with it


class Outbox:
    """Instructions that consume an upload are held until the whole upload has been sent: a worker never waits for a client.

    Instructions of a recorded call may be deferred until it returns: `programs/deferred.py` makes one program of them.
    """

    def __init__(self, context: SessionContext, uploads: Uploads) -> None:
        self._context, self._uploads = context, uploads
        self._cluster, self._emitter = context.cluster, context.emitter
        self.held: list[BufferedInstructions] = []  # until their uploads are here
        self.deferred: list[BufferedInstructions] | None = None  # instructions of the recorded call, None if it is not deferred
        self.deferring: object | None = None  # mark of that call's recording
        self.uses: set[int] = set()  # workers that were sent something
        self.sent: dict[int, int] = {}  # each worker's last Run
        self.joined: list[dict[int, int]] = []  # `runs` of what is written and sent with what is written next
        self._cluster.queue.enter(context.number)

    def cut(self) -> None:
        """Send the instructions written so far, apart from those that follow."""
        self.flush(self._emitter.base)

    @property
    def joins(self) -> bool:
        """True if the instructions written so far may be sent together with later ones."""
        return self._context.tape is None and self.deferred is None and not (self.held or self._uploads.awaited)

    def join(self) -> dict[int, int]:
        """Leave the instructions for the next flush; returns each worker's last Run, filled in once they are sent."""
        runs = dict.fromkeys((worker.index for worker in self._cluster.workers), UNSENT)
        self.joined.append(runs)
        return runs

    def begin_run(self) -> None:
        """Begin a Run, unless its instructions are sent together with earlier ones."""
        if not self.joined:
            self._emitter.begin_run()

    def flush(self, base: int) -> dict[int, int]:
        """Send the instructions, or hold them for their uploads; returns each worker's last Run, filled in once sent."""
        # FORGET must not overtake instructions that are held and name the definition.
        if not (self.held or self._uploads.awaited):
            self._emitter.forget()
        written = self.written(base)
        tape = self._context.tape
        if tape is not None:
            for worker, _, _, code in written.rows:
                tape.append(worker.index, base, code)
        if self._uploads.awaited:
            self.held.append(written)
        else:
            self.dispatch(written)
        return written.runs

    def written(self, base: int) -> BufferedInstructions:
        """Take the instructions that are written for workers."""
        emitter, workers = self._emitter, self._cluster.workers
        seconds = {w.index: w.seconds for w in workers if w.seconds} if emitter.seconds else NO_SECONDS
        # A row names the worker's life: a successor, which knows none of these definitions, is not sent it (`_transmit`).
        rows = [(w, w.lives, *part) for w in workers for part in w.take()]
        emitter.seconds = 0.0
        emitter.used.update(worker.index for worker, *_ in rows if not worker.lost)
        emitter.begin_run()

        # Runs get their numbers in `_transmit`. Until then nobody has reached UNSENT, so nothing that waits for it is answered.
        runs = {index: UNSENT for index in emitter.used}
        also, self.joined = self.joined, []
        tape = self._context.tape
        buffered = BufferedInstructions(base, rows, runs, tape.mark if tape is not None else None, seconds, also=also)
        if self._uploads.unsent:
            buffered.uploads, self._uploads.unsent = self._uploads.unsent, []
        return buffered

    def dispatch(self, buffered: BufferedInstructions) -> None:
        """Send it when it is this session's turn, and not before a recording that it belongs to is over."""
        # Otherwise it was written before the recording, perhaps in an earlier one, and its uploads were awaited.
        if self.deferred is not None and buffered.recording is self.deferring:
            self.deferred.append(buffered)
            if self._prevents_deferral():
                self.send_deferred()
            return

        # Short work of a session that has its workers to itself takes no turn. All else queues with its costs.
        queue, number = self._cluster.queue, self._context.number
        if not buffered.seconds and queue.free(number):
            self._transmit(buffered)
            return
        costs = {worker.index: buffered.seconds.get(worker.index, 0.0) for worker, *_ in buffered.rows}
        unit = Unit(number, costs, partial(self._transmit, buffered), buffered.uploads)
        if queue.offer(unit):
            unit.send()

    def _prevents_deferral(self) -> bool:
        """True if the recorded call cannot be one program, or its client is nearly out of credit."""
        context, tape = self._context, self._context.tape
        unfit = tape is None or any(define.kind in UNFIT_KINDS for define in tape.defines.values())
        return unfit or context.failures.troubled or len(context.queue.pending) >= MAX_PENDING_BATCHES

    def send_deferred(self) -> None:
        """Send the instructions of a recorded call as they were written."""
        for buffered in self.take_deferred():
            self.dispatch(buffered)

    def take_deferred(self) -> list[BufferedInstructions]:
        deferred, self.deferred = self.deferred or [], None
        return deferred

    def _switch(self, worker: Worker, shared: bool) -> None:
        """Tell a worker whose Runs follow, unless it knows."""
        context = self._context
        wanted = context.terms.switches(worker)
        if context.ended or (worker.session == context.number and worker.switches == wanted and worker.shared == shared):
            return
        worker.session, worker.switches, worker.shared = context.number, wanted, shared
        context.out(worker.peer, TorchSettings(wanted, context.number, context.terms.memory, shared), ())

    def _transmit(self, buffered: BufferedInstructions) -> None:
        """Send to every worker in one go, so that all of them see what sessions exchange in the same order."""
        sent: dict[int, int] = {}
        queue, number, out = self._cluster.queue, self._context.number, self._context.out
        counted = bool(buffered.seconds) or not queue.free(number)
        for worker, life, defines, code in buffered.rows:
            if worker.lost or worker.lives != life:
                continue

            if worker.index not in self.uses:
                self.uses.add(worker.index)
                queue.use(number, worker.index)
            self._switch(worker, queue.contended(worker.index))
            worker.runs += 1
            out(worker.peer, Run(worker.runs, buffered.base, defines, code, buffered.recording is not None), ())
            if counted:
                sent[worker.index] = worker.runs
        for index, run in sent.items():
            queue.sent(number, index, run, buffered.seconds.get(index, 0.0))

        # In place: batches and requests hold these dicts, and wait for the numbers in them. A worker has to have executed all
        # its Runs up to now, also those without a row here.
        workers = self._cluster.workers
        reach = self.sent = {index: workers[index].runs for index in self._emitter.used if not workers[index].lost}
        for runs in (buffered.runs, *buffered.also):
            runs.clear()
            runs.update(reach)

    def send_held(self) -> None:
        """Send what was held back."""
        held, self.held = self.held, []
        for buffered in held:
            self.dispatch(buffered)

    def lose(self, index: int) -> None:
        """Send what is held of a lost worker's last instructions and before, without uploads that are not here.

        The other workers meet the end of the old process in it. What only they have to do waits on for its uploads.
        """
        last = max((n for n, held in enumerate(self.held) if any(w.index == index for w, *_ in held.rows)), default=-1)
        sent, self.held = self.held[: last + 1], self.held[last + 1 :]
        self._uploads.give_up({key for buffered in sent for key, _ in buffered.uploads})
        for buffered in sent:
            self.dispatch(buffered)

    def discard(self) -> None:
        """Send nothing of what this event has written: it would be half of what workers do together."""
        self.joined = []
        for worker in self._cluster.workers:
            worker.discard()

    def reached(self, runs: dict[int, int]) -> bool:
        """True if workers have come so far (one that is lost has come as far as it ever will)."""
        workers = self._cluster.workers
        return all(workers[index].done >= run or workers[index].lost for index, run in runs.items())
