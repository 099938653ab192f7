"""The protocol: every message once, with its sender and its answer.

A message is one msgpack body `[code, *fields]`. Messages that carry tensor bytes have extra frames of at most CHUNK bytes.
The codec checks field types by the annotations. It refuses a value of another type and names the field.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Numbers = list  # a stream: numbers only

VERSION = 7
CHUNK = 1 << 20  # bytes of one frame of tensor data
AHEAD = 4 * CHUNK  # bytes of a fetched piece that are sent before its client has acknowledged any
MAX_VALUES = 64  # in one Metrics
MAX_ROLES = 8192  # tensors in one TensorRoles
TIMES = 4096  # definitions in one Done, at most
MAX_PIECES = 64  # fetched pieces in one Done
MAX_BODY = 16 << 20  # bytes of one msgpack body


@dataclass(frozen=True, slots=True)
class Message:
    """Base class. The `frames` of a received message are passed beside it."""


# ---- either side -> dispatcher


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Client, worker or observer -> dispatcher: the first message. Answered by Welcome or Reject.

    role: "client", "worker" or "observer". config: text of a client's YAML, "" for none. config_path: its path, for error
    messages only. switches: of a client; {"threads": int, "matmul_precision": str, "deterministic": bool, "cudnn_benchmark":
    bool, "cudnn_tf32": bool, "stall_timeout": seconds without progress that are an error, 0 for none, "workers": how many
    workers it wants, 0 for all; an exclusive server lends them}. info: of a worker; {"name": "" asks for the next free one,
    "pid", "host", "backend", "device", "heap_fd", "heap_bytes", "doorbell", "unique_id", "home": see gt.wire.liveness, "proof":
    see gt.wire.access.proof, "ops": lines of the schemas of its libraries' ops, see ir.schema, "rank": its index, -1 lets the
    dispatcher choose, "gpu": its number on the host, -1 for none, "port": where it accepts workers of other hosts, 0 nowhere,
    "links": [address, prefix, device, Mbit/s or 0, True if a default route leads out there] of its host, "rates": of
    its GPU's link and of host memory, bytes/s}. Of a client, for observers; {"user", "program", "host", "pid"}.
    """

    version: int
    gt: str
    role: str
    config: str
    config_path: str
    switches: dict
    info: dict


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


THROUGH = -1  # Fetch.tensor: no tensor; waits for all devices
UNREADABLE = -2  # UploadChunk.total, Data.total: no more of the upload is sent


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
    """Client -> dispatcher: asks how much of a function's calls programs carried out. Answered by Report.

    slot: of the function, as in the FRAGMENTs of its stream. Report.body: {"programs": count, "ops": of all calls, "carried":
    those of them that programs carried out, "last_ops", "last_carried": of the last call, "why": [[ops, reason], ...]}.
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
    """

    arena: int
    owner: int
    fd: int
    nbytes: int
    write: bool


@dataclass(frozen=True, slots=True)
class Store(Message):
    """Client -> dispatcher: has workers write tensors into files that it lends. Answered by Report or Failed.

    rows: [[tensor, place], ...], see gt.wire.arena. later: workers copy their pieces and write the copies beside the
    instructions that follow. Report.body: {"shared": whether all workers share `file`, or all the files of the rows}; if
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


@dataclass(frozen=True, slots=True)
class Goodbye(Message):
    """Client, worker or observer -> dispatcher: ends the connection; not answered. reason: why a worker ended, or ""."""

    reason: str = ""


# ---- dispatcher -> client


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Dispatcher -> client, worker or observer, answers Hello.

    workers: their names, in order of index. groups: names of the signal groups, in order. process: [pid, home] of the
    dispatcher, see wire.liveness; peers on its host see whether it is stopped. ops: for a client, lines of the schemas of the
    libraries' ops that all of its workers have.
    """

    session: int
    name: str
    workers: list
    groups: list
    credit: int
    process: list = field(default_factory=list)
    ops: list = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reject(Message):
    """Dispatcher -> client, worker or observer, answers Hello: the connection is refused. error: see errors.to_wire."""

    error: dict


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


# ---- dispatcher -> worker


@dataclass(frozen=True, slots=True)
class World(Message):
    """Dispatcher -> worker: all workers; sent whenever they change.

    workers: [index, name, pid, host, heap_fd, heap_bytes, doorbell, home, port] of each. members: those of this worker's host
    that share memory of their devices from now on, [] for none. unique_id: the id by which members find one another. hosts: by
    home, how many workers compute in its memory. ways: [a, b, epoch, kind, address of a, of b, workers that relay from a to b]
    of each pair a < b, once there are two hosts; kind is "shm", "tcp", "via" or "none"; the epoch is another whenever messages
    under way are lost. key: each end of a connection proves that it has it. nccl: pairs [a, b], a < b, that NCCL joins.
    """

    generation: int
    workers: list
    members: list = field(default_factory=list)
    unique_id: str = ""
    hosts: dict = field(default_factory=dict)
    ways: list = field(default_factory=list)
    key: str = ""
    nccl: list = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Run(Message):
    """Dispatcher -> worker: instructions. Answered by Done. defines: new Define.wire(). timed: Done reports their times."""

    seq: int
    base: int
    defines: list
    code: Numbers
    timed: bool = False


@dataclass(frozen=True, slots=True)
class Data(Message):
    """Dispatcher -> worker: a frame of upload `key`, at byte `offset` of `total`. Answered by UploadProgress.

    An upload with total 0 has no frame; total -1 cancels it. All frames precede the Run that uses the upload.
    """

    key: int
    offset: int
    total: int


@dataclass(frozen=True, slots=True)
class UseBlock(Message):
    """Dispatcher -> worker: the bytes of upload or fetched piece `key` are in an arena. It precedes the Run that uses them.

    offset, shape, itemsize: of the whole tensor, row-major in the arena. boxes: the worker's piece of it. write: of a fetched
    piece, which the worker writes there and answers by Piece; an upload it reads and answers by UploadProgress. The arena may
    be a file. later: of a piece for a file, see Store.
    """

    key: int
    arena: int
    offset: int
    shape: list
    itemsize: int
    boxes: list
    write: bool
    later: bool = False


@dataclass(frozen=True, slots=True)
class TorchSettings(Message):
    """Dispatcher -> worker: the session whose Runs follow, and its torch switches (as Hello.switches).

    It precedes a session's Run if the worker's last Run was another session's. The program's threads are divided among its
    workers. From its second session on, a worker clears memory before an op gets it. memory: the session's limit there, in
    bytes, 0 for none. shared: other sessions use the worker too; Done then means that its GPU is through, else that work was
    issued.
    """

    switches: dict
    session: int = 0
    memory: int = 0
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Skip(Message):
    """Dispatcher -> worker: begin no instruction of this session but uploads, and answer by Paused.

    When all workers have answered, another Skip has the first seq that none of them has begun as `since`: carry out what
    precedes it, and skip what does not, until `on` is false in a later Skip. That one is in order with Runs. A Run's seqs that
    were skipped are reported by an OpError of the kind "interrupted".
    """

    session: int
    on: bool
    since: int = -1


@dataclass(frozen=True, slots=True)
class Abort(Message):
    """Dispatcher -> worker: worker `index` is lost. Fail every wait that involves it, and go on."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Query(Message):
    """Dispatcher -> worker: asks for the state of its work. Its I/O thread answers with a Report.

    stats: include the counters. programs: definitions whose last replay and compiled parts are reported. Report.body: {"done":
    last Run executed, "stats": {...}, "took": seconds of CPU time for these, "at": [Run, place in it, the op's seq, kind, Runs
    that its GPU has finished] of the current instruction or None, "work": seconds of CPU time used}; the kind is the
    instruction's, or "compile", "load" (its GPU runs it for the first time) or "device" (it waits for its GPU). With the same
    `at` twice an instruction takes long; with the same `work` too, the worker makes no progress. holders: a session's number;
    `stats["holders"]` has [id, bytes] of its largest tensors; -1 for none.
    """

    request: int
    stats: bool = True
    programs: list = field(default_factory=list)
    holders: int = -1


@dataclass(frozen=True, slots=True)
class Renew(Message):
    """Dispatcher -> worker: its session has ended; it restarts as a new process of its name, and this one is heard no more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Exit(Message):
    """Dispatcher -> any peer: the server stops, or has ended this connection."""

    reason: str


# ---- worker -> dispatcher


@dataclass(frozen=True, slots=True)
class Done(Message):
    """Worker -> dispatcher: every Run up to `seq` is executed. Its failures were sent before.

    On a GPU that sessions share, the device has executed them too: see TorchSettings.shared.

    times: [number, seconds, ...] of the definitions of timed Runs: the shortest time of each. pieces: keys of fetched pieces
    whose frames this message has, one frame each: as a Piece before it would have.
    """

    seq: int
    times: Numbers = field(default_factory=list)
    pieces: Numbers = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OpError(Message):
    """Worker -> dispatcher: op `seq` failed, and its outputs are placeholders.

    kind: "op", "unsupported", "peer", "memory" or "interrupted", see Skip. memory: with some of the kind "memory"; {"limit",
    "session_limit": 0 for none, "used", "session": tensors of the session, "others": of other sessions, "top": the session's
    largest [id, bytes]}, in bytes. others: if many ops of the Run failed in the same way, all of them; the first is `seq`.
    """

    seq: int
    kind: str
    message: str
    memory: dict = field(default_factory=dict)
    others: Numbers = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Paused(Message):
    """Worker -> dispatcher, answers a Skip without `since`: the last seq of the session that it has begun, -1 for none."""

    session: int
    seq: int


@dataclass(frozen=True, slots=True)
class UploadProgress(Message):
    """Worker -> dispatcher: it has received bytes of upload `key` up to `upto`, or read all of them from their block.

    Client -> dispatcher: it has received bytes of fetched piece `key` up to `upto`; only for pieces of more than AHEAD bytes.
    """

    key: int
    upto: int


@dataclass(frozen=True, slots=True)
class ArenaOpened(Message):
    """Worker -> dispatcher, answers OfferArena and OfferFile. opened: it has proved that it is its client's, and uses it."""

    arena: int
    opened: bool


@dataclass(frozen=True, slots=True)
class LinkFailed(Message):
    """Worker -> dispatcher: it has no connection to `worker` between these addresses, its own first. Answered by a World.

    epoch: of the pair's way. A failure of an earlier way than the present one is ignored.
    """

    worker: int
    epoch: int
    source: str
    target: str
    reason: str


# ---- observers


@dataclass(frozen=True, slots=True)
class Observe(Message):
    """Observer -> dispatcher: asks for Records, and acknowledges those up to number `seen`; 0 at first.

    interval: milliseconds between two Records, at least; the dispatcher may send fewer. log: lines of the instruction log are
    wanted, which the dispatcher writes for nobody else. An observer that acknowledges too little is dropped.
    """

    seen: int
    interval: int = 0
    log: bool = False


@dataclass(frozen=True, slots=True)
class Records(Message):
    """Dispatcher -> observer: the state of server, workers and sessions at one moment.

    number: from 1. rows: see gt.wire.records.
    """

    number: int
    rows: list


CODES: tuple[type[Message], ...] = (
    Hello, Ops, Fetch, Describe, Inspect, Stats, UploadChunk, Goodbye, Welcome, Reject, Ack, UploadRequest, Release, Value,
    Piece, Described, Report, Failed, World, Run, Data, TorchSettings, Abort, Query, Exit, Done, OpError, WindowUpdate,
    UploadProgress, FinishCapture, Notice, Renew, OfferArena, CloseArenas, UseBlock, ArenaOpened, InspectFragments,
    Metrics, Watched, Observe, Records, TensorRoles, Trace, TraceRows, OfferFile, Store, Interrupt, Skip, LinkFailed,
    Paused,
)  # fmt: skip
