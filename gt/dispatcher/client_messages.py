"""Messages of clients to the dispatcher: each is passed to the part of their session that it concerns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gt.dispatcher.cluster.health import Survey
from gt.dispatcher.cluster.leases import Lease
from gt.dispatcher.cluster.observers import Observers, logged
from gt.dispatcher.events import Peer
from gt.dispatcher.fairness.round_robin import RoundRobin
from gt.dispatcher.session import ClientSession
from gt.dispatcher.state.fetches import MAX_REQUESTS
from gt.errors import ProtocolError
from gt.wire.messages import (
    THROUGH,
    CloseArenas,
    Describe,
    Fetch,
    FinishCapture,
    Inspect,
    InspectFragments,
    Interrupt,
    Message,
    Metrics,
    OfferArena,
    OfferFile,
    Ops,
    Report,
    Stats,
    Store,
    TensorRoles,
    UploadChunk,
    UploadProgress,
)


class ClientMessagesHost(Protocol):
    """The core, as far as these messages need it."""

    sessions: dict[Peer, ClientSession]
    observers: Observers
    round_robin: RoundRobin
    now: float

    def send(self, peer: Peer, message: Message, frames: tuple = ()) -> None: ...
    def log_line(self, kind: str, peer: str, text: str = "", **fields: object) -> None: ...
    def name(self, peer: Peer) -> str: ...
    def lease(self, peer: Peer) -> Lease: ...
    def surveyed(self, survey: Survey) -> None: ...


class ClientMessages:
    """`handlers`: the method for each message, which gets the peer, the message and its frames."""

    def __init__(self, core: ClientMessagesHost) -> None:
        self._core = core
        self.handlers: dict[type[Message], Callable] = {
            Ops: self._ops, Fetch: self._fetch, Describe: self._describe, Inspect: self._inspect,
            InspectFragments: self._inspect_fragments, FinishCapture: self._finish_capture, Stats: self._stats,
            Interrupt: self._interrupt, Metrics: self._metrics, TensorRoles: self._tensor_roles,
            UploadChunk: self._upload_chunk, OfferArena: self._offer_arena, OfferFile: self._offer_file, Store: self._store,
            CloseArenas: self._close_arenas,
        }  # fmt: skip

    def _session(self, peer: Peer) -> ClientSession:
        session = self._core.sessions.get(peer)
        if session is None:
            raise ProtocolError("the session has not been welcomed yet")
        return session

    def _ops(self, peer: Peer, message: Ops, frames: tuple) -> None:
        session = self._session(peer)
        self._core.log_line("RECV", self._core.name(peer), f"Ops {message.seq}", bytes=sum(len(f) for f in frames))
        session.op_stream.accept(message, frames)

    def _fetch(self, peer: Peer, message: Fetch, frames: tuple) -> None:
        wanted = "of every device" if message.tensor == THROUGH else f"%{message.tensor}"
        self._core.log_line("RECV", self._core.name(peer), f"Fetch {wanted}")
        self._session(peer).fetches.fetch(message.request, message.tensor, message.place)

    def _describe(self, peer: Peer, message: Describe, frames: tuple) -> None:
        self._session(peer).fetches.describe(message.request, message.tensors)

    def _inspect(self, peer: Peer, message: Inspect, frames: tuple) -> None:
        self._session(peer).fetches.inspect(message.request, message.tensor)

    def _inspect_fragments(self, peer: Peer, message: InspectFragments, frames: tuple) -> None:
        session = self._session(peer)
        session.op_stream.finish()
        session.send(Report(message.request, session.op_stream.fragments.report(message.slot)))

    def _finish_capture(self, peer: Peer, message: FinishCapture, frames: tuple) -> None:
        session = self._session(peer)
        self._core.round_robin.begin_thread(
            session, "FinishCapture", lambda: session.send(Report(message.request, session.programs.seal(message)))
        )

    def _stats(self, peer: Peer, message: Stats, frames: tuple) -> None:
        session, watch = self._session(peer), self._core.lease(peer).watch
        if sum(survey.session is session for survey in watch.surveys.values()) >= MAX_REQUESTS:
            raise ProtocolError(f"Stats.request {message.request} is one of more than {MAX_REQUESTS} under way")
        survey, asked = watch.survey(session, message)
        for worker, query in asked:
            self._core.send(worker, query)
        if not survey.left:
            for one in watch.without(-1):
                self._core.surveyed(one)

    def _interrupt(self, peer: Peer, message: Interrupt, frames: tuple) -> None:
        self._session(peer).op_stream.interrupt(message.upto)
        self._core.round_robin.resume(peer)

    def _metrics(self, peer: Peer, message: Metrics, frames: tuple) -> None:
        self._session(peer).logged = logged(message)

    def _tensor_roles(self, peer: Peer, message: TensorRoles, frames: tuple) -> None:
        session = self._session(peer)
        session.roles.tell(message.rows, self._core.now)
        if self._core.observers.active:
            session.roles.renew(session.table, session.cluster.workers, session.number, self._core.now)

    def _upload_chunk(self, peer: Peer, message: UploadChunk, frames: tuple) -> None:
        session = self._session(peer)
        session.uploads.host(message, frames)
        session.send_held()

    def taken_in(self, peer: Peer, message: UploadProgress, frames: tuple) -> None:
        """Handle the progress of a value on its way to this client."""
        self._session(peer).fetches.taken_in(message.key, message.upto)

    def _offer_arena(self, peer: Peer, message: OfferArena, frames: tuple) -> None:
        session = self._session(peer)
        session.arenas.offer(message)
        session.uploads.moved = self._core.now

    def _offer_file(self, peer: Peer, message: OfferFile, frames: tuple) -> None:
        session = self._session(peer)
        session.arenas.offer_file(message)
        session.uploads.moved = self._core.now

    def _store(self, peer: Peer, message: Store, frames: tuple) -> None:
        self._core.log_line("RECV", self._core.name(peer), f"Store of {len(message.rows)} tensors")
        session = self._session(peer)

        def store() -> None:
            session.fetches.store(message.request, message.rows, message.later, message.file)

        if session.fetches.needs_pauses(message.rows):
            self._core.round_robin.begin_thread(session, "Store", store)
        else:
            store()

    def _close_arenas(self, peer: Peer, message: CloseArenas, frames: tuple) -> None:
        self._session(peer).arenas.close(message)
