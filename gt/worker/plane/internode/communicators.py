"""NCCL between hosts, whose communicators are given up when a member or a connection is lost: the other processes live on.

A communicator is made at the first use, which its members reach in the dispatcher's order, by an id that the host's plane
carries. Calls of NCCL block, and so does its work on the device. A thread of each communicator makes them. Meanwhile the
transferring thread asks whether all members are there. The owner of each wait is the pair's connection in plane net, which the
kernel ends, or the dispatcher's word. A message is copied first: its sender goes on until all slots are under way.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gt.errors import SystemFailure
from gt.worker.plane.base import (
    ALL,
    Buffer,
    Channel,
    Combine,
    OnIssued,
    PeerGone,
    TeamForm,
    Unreachable,
    Unrecoverable,
    nothing,
)
from gt.worker.plane.internode.call_thread import CallThread
from gt.worker.plane.nccl import NcclTransport
from gt.worker.plane.nccl_bindings import ID_BYTES
from gt.worker.plane.symmetric import check_present

log = logging.getLogger("gt.worker")
LOOK_SECONDS = 0.02  # between looks at the members
HINT = "NCCL_DEBUG=INFO says more, and GT_TRANSPORT=net goes without NCCL"
ABORT_SECONDS = 5.0  # within which an aborted call returns


@dataclass(slots=True)
class Communicator:
    """key: another one for other processes or connections. workers: the other members. check: PeerGone if one is not there.

    pending: messages under way. ended: nothing is begun any more.
    """

    key: Any
    workers: Sequence[int]
    check: Callable[[], None]
    thread: CallThread = field(default_factory=partial(CallThread, "gt-nccl"))
    handle: Any = None
    ended: bool = False
    pending: deque[Future] = field(default_factory=deque)


class InternodeNccl(NcclTransport):
    """The transfers and collectives of plane.base.Plane for flat uint8 tensors, between workers of any hosts.

    host: an InternodePlane. `lose` is called by any thread.
    """

    def __init__(self, ring: Any, engine: Any, host: Any, count: Callable[[int, int, int], None]) -> None:
        super().__init__(ring, engine, host, count)
        self._lock = threading.Lock()  # guards communicators' handles and the tables of them
        self._ready: Communicator | None = None  # communicator of the collective under way

    def lose(self, index: int) -> None:
        """Abort all communicators with a worker, ALL: with any. Does not wait for that."""
        for comm in self._all():
            if index == ALL or index in comm.workers:
                self._abort(comm)

    def close(self) -> None:
        """Give up all communicators. No call is under way."""
        for comm in self._all():
            joined = comm.handle is not None
            if (aborting := self._abort(comm)) is not None:
                aborting.join(ABORT_SECONDS)
            comm.thread.close(ABORT_SECONDS if joined else 0.0)  # a call that joins waits for members that may never come

    def _all(self) -> list[Communicator]:
        with self._lock:
            return [*self._pairs.values(), *self._teams.values()]

    # ---- transfers

    def send(self, channel: Channel, data: Buffer) -> None:
        check_present(data)
        if len(data):
            with self._host.pair(channel) as (key, check):
                comm = self._of_pair(channel, True, key, check)
                # As many messages under way as the channel has slots: that is the sender's credit. Failures of finished ones
                # show here.
                while len(comm.pending) > channel["slots"] or (comm.pending and comm.pending[0].done()):
                    self._wait(comm, comm.pending.popleft())
                # The tensor may change as soon as this returns, so NCCL sends a copy, on a stream of its own behind the work
                # so far.
                copy = self._engine.staging((len(data),), "uint8")
                copy[:] = data
                stream = self._engine.side_stream((channel["peer"], channel["offset"]))

                def call() -> None:
                    self._ring.send(_handle(comm), self._engine.address(copy), len(copy), 1, stream)

                comm.pending.append(comm.thread.submit(partial(self._execute, call, self._engine.issuing_to(stream))))
        self._count(channel["peer"], len(data), 0)

    def recv(self, channel: Channel, into: Buffer) -> None:
        check_present(into)
        if len(into):
            with self._host.pair(channel) as (key, check):
                comm, stream = self._of_pair(channel, False, key, check), self._engine.stream()

                def call() -> None:
                    self._ring.recv(_handle(comm), self._engine.address(into), len(into), 0, stream)

                self._wait(comm, comm.thread.submit(partial(self._execute, call, self._engine.issuing_to(stream))))
        self._count(channel["peer"], 0, len(into))

    # ---- collectives

    def all_reduce(self, form: TeamForm, data: Buffer, combine: Combine, on_issued: OnIssued = nothing) -> None:
        check_present(data)
        self._meet(form, partial(super()._all_reduce, form, data, combine))
        on_issued()

    def all_gather(self, form: TeamForm, data: Buffer, outs: Sequence[Buffer], on_issued: OnIssued = nothing) -> None:
        check_present(data)
        self._meet(form, partial(super()._all_gather, form, data, outs))
        on_issued()

    def reduce_scatter(
        self, form: TeamForm, sections: Sequence[Buffer], out: Buffer, combine: Combine, on_issued: OnIssued = nothing
    ) -> None:
        check_present(out)
        self._meet(form, partial(super()._reduce_scatter, form, sections, out, combine))
        on_issued()

    def all_to_all(self, form: TeamForm, sends: Sequence[Buffer], recvs: Sequence[Buffer], longest: int = 0) -> None:
        check_present(sends[0])
        self._meet(form, partial(super().all_to_all, form, sends, recvs, longest))

    # ----

    def _meet(self, form: TeamForm, call: Callable[[], None]) -> None:
        """Have the communicator's thread make a collective's call."""
        with self._host.team(form) as (key, check):
            self._ready = comm = self._of_team(form, key, check)
            issuing = self._engine.issuing_to(self._engine.stream())
            self._wait(comm, comm.thread.submit(partial(self._execute, call, issuing)))

    def _execute(self, call: Callable[[], None], issuing: AbstractContextManager) -> None:
        """Issue work to a stream, and wait until the device has carried it out."""
        with issuing:
            call()
            wait = self._engine.fence()
        wait()

    def _team(self, form: TeamForm) -> Any:
        assert self._ready is not None, "a collective's communicator is there before its call"
        return _handle(self._ready)

    def _of_pair(self, channel: Channel, sends: bool, key: Any, check: Callable[[], None]) -> Communicator:
        """The communicator of one direction; the sender is rank 0, and does not wait for the receiver."""
        place = channel["peer"], channel["offset"], sends
        comm = self._pairs.get(place)
        if comm is None or comm.key != key:
            name = bytearray(self._ring.unique_id() if sends else ID_BYTES)
            (self._host.send if sends else self._host.recv)(channel, memoryview(name))
            comm = self._begin(self._pairs, place, Communicator(key, [channel["peer"]], check))
            joining = self._join(comm, bytes(name), 0 if sends else 1, 2)
            if sends:
                comm.pending.append(joining)
            else:
                self._wait(comm, joining)
        return comm

    def _of_team(self, form: TeamForm, key: Any, check: Callable[[], None]) -> Communicator:
        """A team's communicator, by the id of its first member."""
        comm = self._teams.get(form["id"])
        if comm is None or comm.key != key:
            names = [bytearray(ID_BYTES) for _ in form["workers"]]
            own = bytes(ID_BYTES) if form["rank"] else self._ring.unique_id()
            self._host.all_gather(form, memoryview(own), [memoryview(name) for name in names])
            others = [worker for rank, worker in enumerate(form["workers"]) if rank != form["rank"]]
            comm = self._begin(self._teams, form["id"], Communicator(key, others, check))
            self._wait(comm, self._join(comm, bytes(names[0]), form["rank"], len(names)))
        return comm

    def _begin(self, table: dict, place: Any, comm: Communicator) -> Communicator:
        """Enter a communicator, and end its predecessor."""
        with self._lock:
            before, table[place] = table.get(place), comm
        if before is not None:
            self._abort(before)
            before.thread.abandon()
        return comm

    def _join(self, comm: Communicator, name: bytes, rank: int, count: int) -> Future:
        stream = self._engine.stream()

        def join() -> None:
            with self._engine.issuing_to(stream):
                handle = self._ring.join(name, rank, count)
            with self._lock:
                # The communicator may have been given up while this thread joined it: nobody else knows the handle then.
                comm.handle, late = (None, True) if comm.ended else (handle, False)
            if late:
                self._ring.abort(handle)

        return comm.thread.submit(join)

    def _wait(self, comm: Communicator, future: Future) -> None:
        """Wait for a call. PeerGone once a member is not there, and then the communicator is given up."""
        while True:
            concurrent.futures.wait([future], LOOK_SECONDS)
            error = future.exception() if future.done() else None
            # Poisoned and the like end the process: they are no failure of this communicator.
            if error is not None and not isinstance(error, Exception):
                raise error
            why = str(error or "") or self._failure(comm)
            if future.done() and not why and not comm.ended:
                return
            try:
                # First the members: a lost one is the cause that the user should read, and NCCL's error only its consequence.
                comm.check()
                if why or comm.ended:
                    why = why or "a communicator was aborted"
                    raise Unreachable(comm.workers[0], f"{why}, with workers {list(comm.workers)}: {HINT}")
            except PeerGone as gone:
                self._give_up(comm, future, gone)
                raise

    def _failure(self, comm: Communicator) -> str:
        with self._lock:
            return "" if comm.handle is None else self._ring.failure(comm.handle)

    def _give_up(self, comm: Communicator, future: Future, error: PeerGone) -> None:
        """Abort a communicator, whose calls under way end then. Unrecoverable if they do not: the device waits for ever."""
        log.info("a communicator with workers %s is given up: %s", list(comm.workers), error)
        # A call that still joins has no handle to abort. It is left to its thread, which aborts it if it ever returns.
        joined = comm.handle is not None or comm.ended
        self._abort(comm)
        comm.thread.abandon()
        if joined:
            concurrent.futures.wait([future], ABORT_SECONDS)
            if not future.done():
                raise Unrecoverable(f"work of NCCL that was aborted does not end: {error}") from error

    def _abort(self, comm: Communicator) -> threading.Thread | None:
        """End a communicator; the thread that does so, None if no member has joined it. A call that joins it ends by itself."""
        with self._lock:
            handle, comm.handle, comm.ended = comm.handle, None, True
        if handle is None:
            return None
        aborting = threading.Thread(target=self._ring.abort, args=(handle,), name="gt-nccl-abort", daemon=True)
        aborting.start()
        return aborting


def _handle(comm: Communicator) -> Any:
    """A communicator's handle, once its members have met."""
    if comm.handle is None:
        raise SystemFailure("NCCL: the members of a communicator have not met")
    return comm.handle
