"""Messages between the dispatcher and a worker: instructions, their results, uploads, the world of workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from gt.wire.messages.base import Message, Numbers

# ---- dispatcher -> worker


@dataclass(frozen=True, slots=True)
class World(Message):
    """Dispatcher -> worker: all workers; sent whenever they change.

    workers: [index, name, pid, host, heap_fd, heap_bytes, doorbell, home, port] of each. members: those of this worker's host
    that share memory of their devices from now on, [] for none. unique_id: the id by which members find one another. hosts: by
    home, how many workers compute in its memory. ways: [a, b, epoch, kind, address of a, of b, workers that relay from a to b]
    of each pair a < b, once there are two hosts. kind is "shm", "tcp", "routed" (TCP over routers), "via" or "none". The epoch
    changes whenever messages under way are lost. key: each end of a connection proves that it has it. nccl: pairs [a, b],
    a < b, that NCCL joins. broken: [a, b, address of a, of b] of connections that have failed and would be better than the
    pair's present way: a tries them now and then, and answers by LinkMade.
    """

    generation: int
    workers: list
    members: list = field(default_factory=list)
    unique_id: str = ""
    hosts: dict = field(default_factory=dict)
    ways: list = field(default_factory=list)
    key: str = ""
    nccl: list = field(default_factory=list)
    broken: list = field(default_factory=list)


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

    An upload with total 0 has no frame; total -1 cancels it. Its frames are sent in order, before the Run that
    uses it.
    """

    key: int
    offset: int
    total: int


@dataclass(frozen=True, slots=True)
class UseBlock(Message):
    """Dispatcher -> worker: the bytes of upload or fetched piece `key` are in an arena. It precedes the Run that uses them.

    offset, shape, itemsize: of the whole tensor, row-major in the arena. boxes: the worker's piece of it. write: of a fetched
    piece, which the worker writes there and answers by Piece; an upload it reads and answers by UploadProgress. The arena may
    be a file: the worker reads it at once, and no Run that uses it is sent before the answer. later: of a piece for a file,
    see Store.
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
class PrepareCompilation(Message):
    """Dispatcher -> worker: a step is recorded whose program will be compiled. What that needs may start beside the call.

    idle: the call's ops are executed when it returns, so the worker may import the compiler meanwhile.
    """

    idle: bool


@dataclass(frozen=True, slots=True)
class Skip(Message):
    """Dispatcher -> worker: begin no instruction of this session but uploads, and answer by Paused.

    When all workers have answered, another Skip has as `since` the first seq that none of them has begun. A worker executes
    what precedes it and skips the rest, until `on` is false in a later Skip. That one is in order with Runs. A Run's seqs that
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
    `stats["holders"]` has [id, bytes] of its largest tensors; -1 for none. process: pid of a silent worker of the same home, or
    0; Report.body has "sight": [its state by proc(5), CPU seconds], see wire.liveness.
    """

    request: int
    stats: bool = True
    programs: list = field(default_factory=list)
    holders: int = -1
    process: int = 0


@dataclass(frozen=True, slots=True)
class Renew(Message):
    """Dispatcher -> worker: its session has ended; it restarts as a new process of its name, and this one is heard no more."""

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

    kind: "op", "unsupported", "peer", "missing" (the worker has no tensor with an operand's id), "memory", or "interrupted", of
    a Skip. memory: with some of the kind "memory"; {"limit", "session_limit": 0 for none, "used", "session": tensors of the
    session, "others": of other sessions, "top": the session's largest [id, bytes]}, in bytes. others: if many ops of the Run
    failed in the same way, up to MAX_OTHERS of them; the first is `seq`.
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


@dataclass(frozen=True, slots=True)
class LinkMade(Message):
    """Worker -> dispatcher: `worker` has proved itself to it between these addresses, the sender's first.

    epoch: of the pair's way, whose connection this is. 0: it is one of World.broken, tried beside the way. That is answered
    by a World once no transfer is under way: those under way would be lost.
    """

    worker: int
    epoch: int
    source: str
    target: str
