"""The protocol: every message once, with its sender and its answer.

A message is one msgpack body `[code, *fields]`. Messages that carry tensor bytes have extra frames of at most CHUNK bytes.
The codec checks field types by the annotations. It refuses a value of another type and names the field.
"""
# A module for each peer of the dispatcher: handshake.py has the messages that all peers share. Import them from here.

from gt.wire.messages.base import (  # noqa: F401
    AHEAD,
    CHUNK,
    MAX_ARENAS,
    MAX_BODY_BYTES,
    MAX_HOLDERS,
    MAX_OTHERS,
    MAX_PIECES,
    MAX_ROLE_CHARACTERS,
    MAX_ROLES,
    MAX_STALL_SECONDS,
    MAX_TIMES,
    MAX_VALUES,
    THROUGH,
    UNREADABLE,
    VERSION,
    Message,
    Numbers,
)
from gt.wire.messages.clients import (
    Ack,
    CloseArenas,
    Describe,
    Described,
    Failed,
    Fetch,
    FinishCapture,
    Inspect,
    InspectFragments,
    Interrupt,
    Metrics,
    Notice,
    OfferArena,
    OfferFile,
    Ops,
    Piece,
    Release,
    Report,
    Stats,
    Store,
    TensorRoles,
    Trace,
    TraceRows,
    UploadChunk,
    UploadRequest,
    Value,
    Watched,
    WindowUpdate,
)
from gt.wire.messages.handshake import (
    Exit,
    Goodbye,
    Hello,
    Reject,
    Welcome,
)
from gt.wire.messages.observers import (
    Observe,
    Records,
)
from gt.wire.messages.workers import (
    Abort,
    ArenaOpened,
    Data,
    Done,
    LinkFailed,
    LinkMade,
    OpError,
    Paused,
    PrepareCompilation,
    Query,
    Renew,
    Run,
    Skip,
    TorchSettings,
    UploadProgress,
    UseBlock,
    World,
)

# A message's code is its place here, so a new one goes to the end.
CODES: tuple[type[Message], ...] = (
    Hello, Ops, Fetch, Describe, Inspect, Stats, UploadChunk, Goodbye, Welcome, Reject, Ack, UploadRequest, Release, Value,
    Piece, Described, Report, Failed, World, Run, Data, TorchSettings, Abort, Query, Exit, Done, OpError, WindowUpdate,
    UploadProgress, FinishCapture, Notice, Renew, OfferArena, CloseArenas, UseBlock, ArenaOpened, InspectFragments,
    Metrics, Watched, Observe, Records, TensorRoles, Trace, TraceRows, OfferFile, Store, Interrupt, Skip, LinkFailed,
    Paused, PrepareCompilation, LinkMade,
)  # fmt: skip
