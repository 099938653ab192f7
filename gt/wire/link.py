"""Rules of a link, without I/O: the handshake, the messages that each role may send, and credit.

`hello` and `examine` are the handshake. `Gate` admits one peer's messages to the dispatcher. `Window` counts the client's
credit.
"""

from __future__ import annotations

from typing import Any

from gt import errors
from gt.errors import ProtocolError, Refused
from gt.wire.messages import (
    CHUNK,
    MAX_PIECES,
    VERSION,
    Abort,
    Ack,
    ArenaOpened,
    CloseArenas,
    Data,
    Describe,
    Described,
    Done,
    Exit,
    Failed,
    Fetch,
    FinishCapture,
    Goodbye,
    Hello,
    Inspect,
    InspectFragments,
    Interrupt,
    LinkFailed,
    LinkMade,
    Message,
    Metrics,
    Notice,
    Observe,
    OfferArena,
    OfferFile,
    OpError,
    Ops,
    Paused,
    Piece,
    PrepareCompilation,
    Query,
    Records,
    Reject,
    Release,
    Renew,
    Report,
    Run,
    Skip,
    Stats,
    Store,
    TensorRoles,
    TorchSettings,
    Trace,
    TraceRows,
    UploadChunk,
    UploadProgress,
    UploadRequest,
    UseBlock,
    Value,
    Watched,
    Welcome,
    WindowUpdate,
    World,
)

MAX_SHOWN_CHARACTERS = 40  # characters of a peer's text in an error
RELEASE = "0.1.0"  # for people; VERSION decides

# role -> (messages that it may send after Hello, messages that it may receive)
MAY_SEND: dict[str, tuple[frozenset[type[Message]], frozenset[type[Message]]]] = {
    "client": (
        frozenset(
            {Ops, Fetch, Describe, Inspect, InspectFragments, FinishCapture, Stats, Metrics, UploadChunk, UploadProgress}
            | {OfferArena, OfferFile, Store, TensorRoles, CloseArenas, Trace, Interrupt, Goodbye}
        ),
        frozenset(
            {Welcome, Reject, Ack, UploadRequest, WindowUpdate, Release, Value, Piece, Described, Report, Failed, Notice}
            | {Watched, TraceRows, Exit}
        ),
    ),
    "worker": (
        frozenset(
            {Piece, Described, Report, Done, OpError, UploadProgress, ArenaOpened, TraceRows, LinkFailed, LinkMade, Paused}
            | {Goodbye}
        ),
        frozenset(
            {Welcome, Reject, World, Run, Data, OfferArena, OfferFile, CloseArenas, UseBlock, WindowUpdate, TorchSettings}
            | {Abort, Query, Trace, Skip, PrepareCompilation, Renew, Exit}
        ),
    ),
    "observer": (frozenset({Observe, Goodbye}), frozenset({Welcome, Reject, Records, Exit})),
}
CARRIES = {Ops: 4096, UploadChunk: 1, Piece: 1, Data: 1, Done: MAX_PIECES}  # messages with frames -> number of frames, at most


def hello(role: str, config: str = "", config_path: str = "", **rest: dict[str, Any]) -> Hello:
    """The first message. rest: switches (client), info."""
    return Hello(VERSION, RELEASE, role, config, config_path, rest.get("switches", {}), rest.get("info", {}))


def examine(hello: Hello) -> None:
    """Raise Refused unless the peer speaks our version and has a known role."""
    # The version first: a peer of another one may mean other things by everything else.
    role = hello.role[:MAX_SHOWN_CHARACTERS]
    if hello.version != VERSION:
        raise Refused(
            f"the {role or 'peer'} speaks protocol {hello.version} (gt {hello.gt[:MAX_SHOWN_CHARACTERS]}), the server protocol "
            f"{VERSION} (gt {RELEASE}): install the same gt on both sides"
        )
    if hello.role not in MAY_SEND:
        raise Refused(f"unknown role {role!r}, want one of {sorted(MAY_SEND)}")


def answer(reply: Message) -> Welcome:
    """The Welcome of a handshake; raises the error of a Reject."""
    if isinstance(reply, Reject):
        raise errors.from_wire(reply.error)
    if not isinstance(reply, Welcome):
        raise ProtocolError(f"the server answered Hello with {type(reply).__name__}, want Welcome or Reject")
    return reply


class Gate:
    """Admits one peer's messages: Hello first and once, then those of its role, batches in order."""

    def __init__(self) -> None:
        self.role = ""
        self._next_batch = 0

    def admit(self, message: Message, frames: int = 0, longest: int = 0) -> None:
        """Raise ProtocolError if the message is out of place. longest: bytes of its longest frame."""
        # Each check is of one message and the state of this peer; the core checks the rest, such as ids.
        name = type(message).__name__
        if frames > (most := CARRIES.get(type(message), 0)):
            raise ProtocolError(f"{name} came with {frames} frames, it has {f'at most {most}' if most else 'none'}")
        if longest > CHUNK:
            raise ProtocolError(f"{name} came with a frame of {longest} bytes, at most {CHUNK} are taken")
        if isinstance(message, Hello):
            if self.role:
                raise ProtocolError("Hello came twice on one connection")
            self.role = message.role if message.role in MAY_SEND else "unknown"
            return
        if not self.role:
            raise ProtocolError(f"{name} came before Hello")
        if type(message) not in MAY_SEND.get(self.role, (frozenset(), frozenset()))[0]:
            article = "an" if self.role == "observer" else "a"
            raise ProtocolError(f"{article} {self.role} may not send {name}")
        # A gap or a repeated batch would make the dispatcher's tensors others than the client's.
        if isinstance(message, Ops):
            if message.seq != self._next_batch:
                raise ProtocolError(f"Ops.seq is {message.seq}, want {self._next_batch}")
            self._next_batch += 1


# Batches are numbered from 0: with sent 9 and acked 5, batches 6 to 9 are under way. -1: none yet.
class Window:
    """Number of unacknowledged batches, at most `credit` (a flow-control window)."""

    def __init__(self, credit: int) -> None:
        self.credit = max(1, credit)
        self.sent = -1
        self.acked = -1
        self.seconds = float("inf")  # between the last two acknowledgements, for each batch
        self._acked_at = 0.0

    @property
    def ahead(self) -> int:
        """Batches that were sent and not acknowledged."""
        return self.sent - self.acked

    @property
    def full(self) -> bool:
        return self.ahead >= self.credit

    def take(self) -> int:
        """The number of the next batch."""
        self.sent += 1
        return self.sent

    def ack(self, seq: int, now: float = 0.0) -> None:
        """Note that batches up to seq are done; ProtocolError for one that was never sent. now: by any clock, in seconds."""
        if seq > self.sent:
            raise ProtocolError(f"Ack.seq is {seq}, the last batch sent is {self.sent}")
        if seq > self.acked:
            self.seconds, self._acked_at = (now - self._acked_at) / (seq - self.acked), now
            self.acked = seq
