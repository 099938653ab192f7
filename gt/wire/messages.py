"""The protocol: every message once, who sends it, what answers it.

A message is one msgpack body `[code, *fields]` and, for those that carry tensor bytes, extra frames of at most CHUNK bytes.
Field types are checked by the codec from the annotations; whatever does not fit is refused with the field's name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Numbers = list  # of numbers only: a stream

VERSION = 4
CHUNK = 1 << 20  # bytes of one frame of tensor data
AHEAD = 4 * CHUNK  # bytes of a fetched piece that are sent before its client has taken any in
TIMES = 4096  # definitions that one Done tells of, at most
MAX_BODY = 16 << 20  # bytes of one msgpack body


@dataclass(frozen=True, slots=True)
class Message:
    """Base; `frames` of a received message come beside it."""


# ---- either side -> dispatcher


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Client or worker -> dispatcher, first. Answered by Welcome or Reject.

    role: "client" | "worker". switches (client): {"threads": int, "matmul_precision": str, "deterministic": bool,
    "cudnn_benchmark": bool, "cudnn_tf32": bool, "stall_timeout": seconds without progress that are an error, 0 for none,
    "workers": how many it wants, of its own where the server is exclusive, 0 for all}. config (client): text of the YAML, ""
    for none; config_path only for messages. info (worker): {"name", "pid", "host", "backend", "device", "heap_fd",
    "heap_bytes", "doorbell", "unique_id", "home", "proof"}; name "" asks for the next free one; home, proof: of gt.wire.
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
    """Client -> dispatcher. A batch of the op stream; answered by Ack (credit).

    seq: number of the batch, from 0. templates: [number, Template.wire()] in use from here on. origins: [number, file,
    line, group, backward, micro-batch or -1]. code: see ir.instr. Frames: the bytes of inline uploads, by index.
    """

    seq: int
    templates: list
    origins: list
    code: Numbers


THROUGH = -1  # Fetch.tensor: nobody's value


@dataclass(frozen=True, slots=True)
class Fetch(Message):
    """Client -> dispatcher. Answered by Value and Piece messages, or Failed.

    tensor -1: a byte that each worker makes and sends once its device is through with what was issued before.
    """

    request: int
    tensor: int


@dataclass(frozen=True, slots=True)
class Describe(Message):
    """Client -> dispatcher, for the outputs of a dynamic op. Answered by Described or Failed."""

    request: int
    tensors: list


@dataclass(frozen=True, slots=True)
class Seal(Message):
    """Client -> dispatcher: what was recorded since RECORD is `program` from now on. Answered by Report or Failed.

    schedule: name of the order in which micro-batches pass the stages, "" for that of the calls. backend: of ir.instr.BACKENDS.
    carried: [[read, made], ...]: the next replay reads what this one made. seed, counter: of random numbers when it began.
    recompute: cheap values are made again, not kept, where that lowers the peak of memory: 0 none, 1 if it saves much, 2 all.
    Report.body: {"why": "" or what prevents it, "ops": how many it has, "instructions": by worker, "schedule": what came of
    it, {} without one, "recomputed": by worker, how many values are made again, bytes it makes at most before and then}.
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
    """Client -> dispatcher: layout and pieces of a tensor. Answered by Report or Failed."""

    request: int
    tensor: int


@dataclass(frozen=True, slots=True)
class Stats(Message):
    """Client -> dispatcher. Answered by Report. program: the one whose last replay workers tell of, -1 for the newest."""

    request: int
    program: int = -1


@dataclass(frozen=True, slots=True)
class Host(Message):
    """Client -> dispatcher, answers Need and More: the next frame of a region of a host copy, at byte `offset` of `total`."""

    key: int
    offset: int
    total: int


@dataclass(frozen=True, slots=True)
class Goodbye(Message):
    """Client -> dispatcher, or worker -> dispatcher: leaves; nothing answers. reason: what a worker ended of, or ""."""

    reason: str = ""


# ---- dispatcher -> client


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Dispatcher -> client or worker, answers Hello. workers: names in order of index; groups: signal groups, in order.

    process: [pid, home] of the dispatcher, see wire.liveness: who is on its host sees whether it is stopped.
    """

    session: int
    name: str
    workers: list
    groups: list
    credit: int
    process: list = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reject(Message):
    """Dispatcher -> client or worker, answers Hello: errors.to_wire form."""

    error: dict


@dataclass(frozen=True, slots=True)
class Ack(Message):
    """Dispatcher -> client: batches up to `seq` are carried out."""

    seq: int


@dataclass(frozen=True, slots=True)
class Need(Message):
    """Dispatcher -> client: send the region (box: [[start, stop], ...]) of upload `tensor`, row-major, as Host with `key`.

    Frames that end beyond byte `upto` wait for a More, so that what is under way stays bounded.
    """

    tensor: int
    key: int
    boxes: list
    upto: int = 1 << 62


@dataclass(frozen=True, slots=True)
class More(Message):
    """Dispatcher -> client: Host frames of `key` may go on, up to byte `upto`.

    Dispatcher -> worker: Piece frames likewise; -1: the rest is not wanted.
    """

    key: int
    upto: int


@dataclass(frozen=True, slots=True)
class Release(Message):
    """Dispatcher -> client: the host copies of these uploads will not be asked for again."""

    tensors: list


@dataclass(frozen=True, slots=True)
class Value(Message):
    """Dispatcher -> client, answers Fetch: `pieces` [[key, boxes], ...] of a tensor of this shape and dtype follow as Piece.

    A frame of the Value is the whole of its one piece, which then does not follow.
    """

    request: int
    shape: list
    dtype: str
    pieces: list


@dataclass(frozen=True, slots=True)
class Piece(Message):
    """Worker -> dispatcher -> client: one frame of a fetched piece, at byte `offset` of `total`; total 0 has no frame."""

    key: int
    offset: int
    total: int


@dataclass(frozen=True, slots=True)
class Described(Message):
    """Dispatcher -> client (answers Describe: Spec.wire() each), and worker -> dispatcher (request is the key, one spec)."""

    request: int
    specs: list


@dataclass(frozen=True, slots=True)
class Report(Message):
    """Dispatcher -> client, answers Inspect and Stats; worker -> dispatcher, answers Query."""

    request: int
    body: dict


@dataclass(frozen=True, slots=True)
class Notice(Message):
    """Dispatcher -> client: news for the program's author that is no failure; that a worker is slow, say.

    place: in the queue for workers of its own, from 1, for a client that has no Welcome yet; 0: of no queue.
    """

    text: str
    place: int = 0


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """Dispatcher -> client, answers a request (or -1: at the next wait): errors.to_wire form."""

    request: int
    error: dict


# ---- dispatcher -> worker


@dataclass(frozen=True, slots=True)
class World(Message):
    """Dispatcher -> worker: all workers, [index, name, pid, host, heap_fd, heap_bytes, doorbell], whenever that changes.

    members: workers that share memory of their devices from here on, [] for none; unique_id: by which they meet.
    hosts: how many workers that compute in its memory a host has.
    """

    generation: int
    workers: list
    members: list = field(default_factory=list)
    unique_id: str = ""
    hosts: dict = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run(Message):
    """Dispatcher -> worker. Instructions in order; answered by Done. defines: Define.wire(); timed: with what they took."""

    seq: int
    base: int
    defines: list
    code: Numbers
    timed: bool = False


@dataclass(frozen=True, slots=True)
class Data(Message):
    """Dispatcher -> worker: one frame of upload `key` at byte `offset` of `total`; total 0 has no frame, -1 calls it off.

    All of it comes before the Run that takes it. Answered by Took.
    """

    key: int
    offset: int
    total: int


@dataclass(frozen=True, slots=True)
class Switch(Message):
    """Dispatcher -> worker: the session whose Runs follow, and its torch switches (as Hello.switches).

    Sent before a session's Run wherever the Run before was another's, and never to a worker that the session does not use.
    Threads are the program's, shared out among its workers. A worker that has served a second session clears memory before an
    op gets it. memory: bytes that the session may hold there, 0 for no limit of its own. shared: other sessions use the worker
    too. Then a GPU worker says Done of the Runs that follow once its device has carried them out, else once they are issued.
    """

    switches: dict
    session: int = 0
    memory: int = 0
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Abort(Message):
    """Dispatcher -> worker: fail every wait that involves worker `index` (it is gone), and go on."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Query(Message):
    """Dispatcher -> worker, answered by Report from its I/O thread.

    {"done": last Run carried out, "stats": {...}, "at": [Run, place in it, op's seq, kind, Runs that its GPU is through with]
    of the instruction under way, or None, "work": seconds of CPU time that it has worked}: two answers with the same `at` say
    that it takes long, with the same `work` that it does not get on. kind: the instruction's, or "compile", "load" (a GPU is
    given it for the first time) or "device" (its GPU is waited for). stats: whether they are wanted; programs: the definitions
    whose last replay they tell of, and what of them is compiled.
    """

    request: int
    stats: bool = True
    programs: list = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Renew(Message):
    """Dispatcher -> worker: its session has ended. It starts afresh as a new process of its name; this one is heard no more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Exit(Message):
    """Dispatcher -> worker or client: the server is stopping."""

    reason: str


# ---- worker -> dispatcher


@dataclass(frozen=True, slots=True)
class Done(Message):
    """Worker -> dispatcher: every Run up to `seq` has been carried out (its failures were sent before).

    times: [number, seconds, ...] of definitions that timed Runs named: the least that each took.
    """

    seq: int
    times: Numbers = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Trouble(Message):
    """Worker -> dispatcher: op `seq` failed; kind: "op" | "unsupported" | "peer" | "memory". Its outputs are placeholders.

    memory (of that kind, not each time): {"limit", "session_limit" (0 for none), "used", "session", "others", "top"}, in bytes:
    what the process may have and has, tensors of the session and of others, and of the session's largest ones [id, bytes].
    others: of many ops of the Run that failed as those before, all; the first is `seq`.
    """

    seq: int
    kind: str
    message: str
    memory: dict = field(default_factory=dict)
    others: Numbers = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Took(Message):
    """Worker -> dispatcher: bytes of upload `key` up to `upto` have been taken in.

    Client -> dispatcher: of fetched piece `key`, if it has more than AHEAD bytes.
    """

    key: int
    upto: int


CODES: tuple[type[Message], ...] = (
    Hello, Ops, Fetch, Describe, Inspect, Stats, Host, Goodbye, Welcome, Reject, Ack, Need, Release, Value, Piece, Described,
    Report, Failed, World, Run, Data, Switch, Abort, Query, Exit, Done, Trouble, More, Took, Seal, Notice, Renew,
)  # fmt: skip
