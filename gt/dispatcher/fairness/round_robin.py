"""Round robin of sessions: messages that wait for their session, and sessions that have more to do than fits one turn.

A session's messages are taken in order. While it is stalled they wait. Long work is cut into slices, and between two of
them every other peer is heard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gt.dispatcher.events import Peer, Received
from gt.dispatcher.fairness.time_slices import Pace
from gt.dispatcher.session import ClientSession
from gt.dispatcher.state.fetches import MAX_REQUESTS
from gt.dispatcher.state.validate import CREDIT
from gt.errors import GTError, ProtocolError
from gt.wire.messages import Describe, Fetch, FinishCapture, Inspect, InspectFragments, Message, Ops, Stats, Store, Trace

# Messages that a stalled session keeps for later, in order
DEFERRED = frozenset({Ops, Fetch, Describe, Inspect, InspectFragments, FinishCapture, Stats, Store, Trace})
MAX_DEFERRED_MESSAGES = CREDIT + MAX_REQUESTS + 1


class SessionHost(Protocol):
    """The core, as far as turns need it."""

    sessions: dict[Peer, ClientSession]

    def handle_message(self, peer: Peer, message: Message, frames: tuple) -> None: ...
    def attempt(self, peer: Peer, what: str, call: Callable, *args: object) -> None: ...
    def guarded(self, session: ClientSession, what: str, call: Callable, *args: object) -> None: ...
    def refuse(self, peer: Peer, error: GTError) -> None: ...


class RoundRobin:
    """The turns of one core's sessions. `pending`: work is left, even if no message arrives."""

    def __init__(self, core: SessionHost, pace: Pace) -> None:
        self._core, self._pace = core, pace
        self._waiting: dict[Peer, None] = {}  # sessions with more to do, in the order of their turns

    @property
    def pending(self) -> bool:
        return bool(self._waiting or self._pace.leavings or self._pace.background.pending)

    def begin_thread(self, session: ClientSession, what: str, call: Callable[[], None]) -> None:
        """Do what may take long for a session, which is stalled meanwhile."""

        def done() -> None:
            try:
                self._core.attempt(session.peer, what, call)
            finally:
                session.op_stream.in_thread = False
                self._note(session.peer)
            if session.peer in self._core.sessions:
                self._core.guarded(session, "an interrupt", session.op_stream.interrupt_late)

        session.op_stream.in_thread = True
        self._pace.background.begin(done)

    def waits(self, event: Received) -> bool:
        """True if a session's message is kept for later, or is dropped because an earlier one was refused."""
        if type(event.message) not in DEFERRED:
            return False
        core, session = self._core, self._core.sessions[event.peer]
        # Order within a session: nothing overtakes what waits already. `_stalled` may have ended the session.
        if session.inbox or self._stalled(event.peer, session, event.message):
            if len(session.inbox) >= MAX_DEFERRED_MESSAGES:
                core.refuse(
                    event.peer, ProtocolError(f"{type(event.message).__name__} came, {MAX_DEFERRED_MESSAGES} wait already")
                )
            elif event.peer in core.sessions:
                session.inbox.append((event.message, event.frames))
                self._note(event.peer)
            return True
        return event.peer not in core.sessions

    def resume(self, peer: Peer) -> None:
        """Handle a session's waiting messages, until it stalls or the turn is over."""
        core = self._core
        while (session := core.sessions.get(peer)) is not None and session.inbox:
            if self._stalled(peer, session, session.inbox[0][0]):
                break
            # `_stalled` may have ended the session, or emptied its inbox.
            if session.inbox and core.sessions.get(peer) is session:
                core.handle_message(peer, *session.inbox.popleft())
            if self._pace.spent:
                break
        self._note(peer)

    def go_on(self) -> None:
        """One slice for the session whose turn it is."""
        self._pace.background.go_on()
        if not self._waiting:
            return

        # The first in the row leaves it; `_note` puts it at the end again, if it has more to do.
        peer = next(iter(self._waiting))
        del self._waiting[peer]
        session = self._core.sessions.get(peer)
        if session is not None and session.op_stream.in_thread:
            return  # it comes again when that is done
        if session is not None and session.op_stream.busy and session.op_stream.long:
            self.begin_thread(session, "Ops", session.op_stream.go_on)
        elif session is not None and session.op_stream.busy:
            self._core.attempt(peer, "Ops", session.op_stream.go_on)
            self._note(peer)
        else:
            self.resume(peer)

    def _note(self, peer: Peer) -> None:
        """Put a session that has more to do at the end of the row."""
        session = self._core.sessions.get(peer)
        if (
            session is not None
            and not session.op_stream.in_thread
            and (session.op_stream.busy or (session.inbox and not session.stalled))
        ):
            self._waiting.setdefault(peer)

    def _stalled(self, peer: Peer, session: ClientSession, message: Message) -> bool:
        """True if a message has to wait; a question ends the waiting of what was sent before it."""
        # Ops may be held back for a decision that depends on later ones. A question wants their result, so no more can follow.
        if not session.stalled and not isinstance(message, Ops):
            self._core.attempt(peer, "Ops", session.op_stream.finish)
            if not isinstance(message, FinishCapture) and not session.op_stream.busy:
                session.outbox.send_deferred()
        return session.stalled or session.arenas.awaits(message) or session.op_stream.awaits(message)

    def check(self) -> None:
        """Invariants between events; tests call it."""
        for session in self._core.sessions.values():
            assert len(session.inbox) <= MAX_DEFERRED_MESSAGES
            assert session.stalled or not session.inbox or session.peer in self._waiting
            assert not session.op_stream.busy or session.op_stream.in_thread or session.peer in self._waiting
