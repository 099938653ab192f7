"""Events that the core handles, and actions that it returns: so it runs without a socket, clock or thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from gt.wire.messages import Message

Peer = bytes  # the ROUTER identity of a connection


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the protocol was received from a peer; frames are its tensor bytes."""

    peer: Peer
    message: Message
    frames: tuple = ()
    at: float = 0.0  # seconds since the server started


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A peer's connection ended, its process exited, or its heartbeat stopped."""

    peer: Peer
    reason: str
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Malformed:
    """A peer sent bytes that are no message of the protocol."""

    peer: Peer
    reason: str
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes; the shell sends one every quarter of a second."""

    at: float


@dataclass(frozen=True, slots=True)
class Examined:
    """A peer's process as the kernel sees it, answers Examine; state "" if it cannot be seen from here. See wire.liveness."""

    peer: Peer
    state: str
    seconds: float  # CPU seconds that it has used
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """Time for work that takes more than one turn. Sent behind the events of a turn, as long as the answer has TurnWanted."""

    at: float


Event = Received | PeerLost | Malformed | Tick | Examined | Turn


@dataclass(frozen=True, slots=True)
class Send:
    """Send a peer a message, with its frames of tensor bytes."""

    peer: Peer
    message: Message
    frames: tuple = ()


@dataclass(frozen=True, slots=True)
class Close:
    """Forget a peer; its messages are dropped from now on."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Log:
    """One line of the instruction log."""

    kind: str
    peer: str
    text: str = ""
    fields: dict = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TurnWanted:
    """Something is left to do: a Turn is wanted."""


# Lines are written before the shell knows the time of the action, so each begins with MARK in place of its time. No text of a
# user has this character, see logs.plain.
MARK = "\0"  # where a line of Lines begins: it takes the time's place


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of the instruction log that are formatted already, but for the time: many, since every op has some."""

    text: str


@dataclass(frozen=True, slots=True)
class Examine:
    """Look at a peer's process, if it runs on this host; answered by Examined."""

    peer: Peer
    pid: int
    home: str


Action = Send | Close | Log | Lines | TurnWanted | Examine
