"""Messages between a client and the dispatcher: ops, values, uploads, files, questions about a session.

A message that the dispatcher passes on from a client to workers, or from workers to a client, is here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gt.wire.messages.base import Message, Numbers

# ---- client -> dispatcher


@dataclass(frozen=True, slots=True)
class Ops(Message):
    """Client -> dispatcher: a batch of the op stream. Answered by Ack, or a Value that has it, which gives credit.

    seq: number of the batch, from 0. templates: [number, Template.wire()] of each new template. origins: [number, file, line,
    group, backward, micro-batch or -1] of each new line. code: a stream, see ir.instr. frames: bytes of inline uploads, by
    index. fetch: the fields of a Fetch that follows, [] for none: workers get both at once.
    """

    seq: int
    templates: list
    origins: list
    code: Numbers
    fetch: Numbers = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fetch(Message):
    """Client -> dispatcher: asks for a tensor's value. Answered by Value and Piece messages, or Failed.

    tensor: its id; -1 waits for the devices: each worker sends a byte that its device makes after all earlier work. place: of
    a block of an arena that has room for the value, see gt.wire.arena; -1 for none.
    """

    request: int
    tensor: int
    place: int = -1


@dataclass(frozen=True, slots=True)
class Describe(Message):
    """Client -> dispatcher: asks for the specs of a dynamic op's outputs. Answered by Described or Failed."""

    request: int
    tensors: list


@dataclass(frozen=True, slots=True)
class FinishCapture(Message):
    """Client -> dispatcher: makes `program` of the ops recorded since RECORD. Answered by Report or Failed.

    schedule: name of a pipeline schedule, "" for the order of the calls. backend: one of ir.instr.BACKENDS. carried: [[read,
    made], ...]; a replay reads as `read` the tensor that the one before made as `made`. seed, counter: state of the random
    numbers when the recording began. recompute: cheap values are recomputed where that lowers the peak of memory: 0 none, 1 if
    it saves much, 2 all. Report.body: {"why": reason against the program or "", "ops": count, "instructions": count by worker,
    "schedule": its report, {} without one, "recomputed": by worker [values recomputed, peak bytes before, peak bytes after],
    "batched": by worker [collectives, as how many they are done], "advanced", if there are any: by worker [parts of the
    optimizer's step on the host, those that begin before the rest of the program ends]}.
    """

    request: int
    program: int
    schedule: str
    backend: str
    carried: list
    seed: int
    counter: int
    recompute: int


@dataclass(frozen=True, slots=True)
class Inspect(Message):
    """Client -> dispatcher: asks for a tensor's layout and pieces. Answered by Report or Failed."""

    request: int
    tensor: int


@dataclass(frozen=True, slots=True)
class InspectFragments(Message):
    """Client -> dispatcher: asks how much of a function's calls programs executed. Answered by Report.

    slot: of the function, as in the FRAGMENTs of its stream. Report.body: {"programs": count, "ops": of all calls, "carried":
    those of them that programs executed, "last_ops", "last_carried": of the last call, "why": [[ops, reason], ...]}.
    """

    request: int
    slot: int


@dataclass(frozen=True, slots=True)
class Stats(Message):
    """Client -> dispatcher: asks for counters. Answered by Report. program: whose replay they show, -1 for the newest.

    holders: include the session's tensors by worker: `Report.body["workers"][..]["holders"]`, see state/memory_report.
    """

    request: int
    program: int = -1
    holders: bool = False


@dataclass(frozen=True, slots=True)
class Trace(Message):
    """Client -> dispatcher -> workers: times of a session's instructions are recorded from now on (on), or no longer.

    Client: answered by Report once all workers know, by Failed if one of them answers nothing. When it ends, TraceRows of each
    process come before the Report, whose "missing" says which workers have sent none, and why. A trace that begins takes the
    place of another. Worker: answered by TraceRows. session: to workers, whose Runs are recorded; a client sends 0.
    """

    request: int
    on: bool
    session: int = 0


@dataclass(frozen=True, slots=True)
class Metrics(Message):
    """Client -> dispatcher: numbers that the program logs, while it is watched. Not answered.

    steps: calls of gt.log so far. values: by name, the newest.
    """

    steps: int
    values: dict


@dataclass(frozen=True, slots=True)
class TensorRoles(Message):
    """Client -> dispatcher: roles of tensors, while it is watched. They replace those told before. Not answered.

    rows: [id, "weights", "gradients" or "optimizer", name of the parameter]; weights first.
    """

    rows: list


@dataclass(frozen=True, slots=True)
class Interrupt(Message):
    """Client -> dispatcher: ops of batches up to `upto` that workers have not begun are not wanted any more. Not answered.

    Tensors that such ops would have made fail; those that they would have changed stay as they are. Batches up to `upto` may
    still come. A replay is dropped whole. Ignored while a call is recorded.
    """

    upto: int


@dataclass(frozen=True, slots=True)
class UploadChunk(Message):
    """Client -> dispatcher, answers UploadRequest and WindowUpdate: the next frame of a host copy's region.

    Its bytes begin at `offset` of `total`. total: UNREADABLE for a region of a file that cannot be read.
    """

    key: int
    offset: int
    total: int


@dataclass(frozen=True, slots=True)
class OfferArena(Message):
    """Client -> dispatcher -> workers of its host: memory that they may share, see gt.wire.arena. Answered by ArenaOpened.

    arena: its number; to workers the dispatcher's. pid, fd: process and descriptor that have it. nonce: a random number in hex;
    to workers the arena's first bytes, see gt.wire.arena. home: see gt.wire.liveness. An upload's value in Ops.code is then -2
    minus the place of its bytes.
    """

    arena: int
    pid: int
    fd: int
    nbytes: int
    nonce: str
    home: str


@dataclass(frozen=True, slots=True)
class OfferFile(Message):
    """Client -> dispatcher -> workers of its host: a file that it has open, for tensors at offsets. Answered by ArenaOpened.

    arena: its number, among those of arenas. owner: an open arena, which proves that the process is the client's. fd: the
    process's descriptor. write: workers write there (Store), else they read (uploads, whose places are as in an arena).
    name: for messages to people.
    """

    arena: int
    owner: int
    fd: int
    nbytes: int
    write: bool
    name: str = ""


@dataclass(frozen=True, slots=True)
class Store(Message):
    """Client -> dispatcher: has workers write tensors into files that it lends. Answered by Report or Failed.

    rows: [[tensor, place], ...], see gt.wire.arena. Ops that follow wait for the answer. later: they do not, since workers
    write copies of their pieces. Report.body: {"shared": whether all workers share `file`, or all the files of the rows}; if
    not, nothing is written. file: without rows, the file to ask about.
    """

    request: int
    rows: list
    later: bool = False
    file: int = 0


@dataclass(frozen=True, slots=True)
class CloseArenas(Message):
    """Client -> dispatcher -> workers: nothing names these arenas and files any more."""

    arenas: list


# ---- dispatcher -> client


@dataclass(frozen=True, slots=True)
class Ack(Message):
    """Dispatcher -> client: all batches up to `seq` have been executed."""

    seq: int


@dataclass(frozen=True, slots=True)
class UploadRequest(Message):
    """Dispatcher -> client: asks for a region of upload `tensor`, row-major, as UploadChunk messages with `key`.

    boxes: [[start, stop], ...] of each box of the region. upto: frames beyond this byte wait for a WindowUpdate, which
    bounds the bytes in flight.
    """

    tensor: int
    key: int
    boxes: list
    upto: int = 1 << 62


@dataclass(frozen=True, slots=True)
class WindowUpdate(Message):
    """Dispatcher -> client: allows UploadChunk frames of `key` up to byte `upto`. -> worker: Piece frames.

    -1 cancels the rest.
    """

    key: int
    upto: int


@dataclass(frozen=True, slots=True)
class Release(Message):
    """Dispatcher -> client: the host copies of these uploads are no longer needed, and no worker reads them any more."""

    tensors: list


@dataclass(frozen=True, slots=True)
class Value(Message):
    """Dispatcher -> client, answers Fetch: shape and dtype of a tensor. Its pieces follow as Piece messages.

    pieces: [[key, boxes], ...]. If the Value has a frame, that frame is the only piece, and no Piece follows. Without
    pieces the whole value is in the block that Fetch named. acked: as the seq of an Ack before it, -1 for none.
    """

    request: int
    shape: list
    dtype: str
    pieces: list
    acked: int = -1


@dataclass(frozen=True, slots=True)
class Piece(Message):
    """Worker -> dispatcher -> client: a frame of a fetched piece, at byte `offset` of `total`; with total 0 there is none.

    With no frame and offset `total`, all of the piece is in the arena block of UseBlock.
    """

    key: int
    offset: int
    total: int


@dataclass(frozen=True, slots=True)
class Described(Message):
    """Dispatcher -> client, answers Describe: Spec.wire() of each. Worker -> dispatcher: one spec; `request` is the key."""

    request: int
    specs: list


@dataclass(frozen=True, slots=True)
class Report(Message):
    """Dispatcher -> client, answers Inspect, InspectFragments, Stats, Store, FinishCapture. Worker -> it, answers Query."""

    request: int
    body: dict


@dataclass(frozen=True, slots=True)
class TraceRows(Message):
    """Worker -> dispatcher -> client: a part of a trace. Times are seconds of the sender's monotonic clock.

    worker: its index; -1 for the dispatcher's part. events: number, seq, start, end of each instruction; of the dispatcher's:
    kind of the event by its place in `names`, 0, start, end. device: number, seq, start, end as a GPU has measured them, and
    the stream by its place in `streams`. streams: their names. counters: time, bytes of live tensors, bytes sent, bytes
    received, of each sample. names: of a worker [number, kind, op, bytes, peers] of each definition; of the dispatcher see
    cluster/tracing. clock: when it was sent. dropped: events that had no room. left: parts that follow.
    """

    request: int
    worker: int
    events: Numbers
    device: Numbers
    streams: list
    counters: Numbers
    names: list
    clock: float
    dropped: int
    left: int


@dataclass(frozen=True, slots=True)
class Notice(Message):
    """Dispatcher -> client: news that is no failure. place: position in the queue for workers, from 1; 0: not in a queue."""

    text: str
    place: int = 0


@dataclass(frozen=True, slots=True)
class Watched(Message):
    """Dispatcher -> client: whether anybody observes the server. Only while somebody does, it sends Metrics and TensorRoles."""

    on: bool


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """Dispatcher -> client: a request failed; request -1 raises at the next wait. error: see errors.to_wire."""

    request: int
    error: dict
