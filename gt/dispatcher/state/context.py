"""State that a session's parts share: its tensors, its emitter, its journal, the op in hand. Knows none of the parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from gt.config.schema import Config
from gt.dispatcher.cluster.workers import Cluster, Worker
from gt.dispatcher.fairness.time_slices import Pace
from gt.dispatcher.programs.recording import Recording
from gt.dispatcher.sharding.groups import Groups
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.state.emitter import Emitter
from gt.dispatcher.state.failures import Failures, OpJournal, Placed, Planned
from gt.dispatcher.state.op_queue import OpQueue
from gt.dispatcher.state.records import NO_ORIGIN, Origin
from gt.dispatcher.state.tensors import Storage, Table, Tensor
from gt.errors import ProtocolError
from gt.ir.layout import Layout, Mesh
from gt.ir.schema import SessionOps
from gt.wire.messages import Message

STEP_WRITES = 8  # instructions whose writing takes as long as the planning of one
TURN_WRITES = 20_000  # instructions that are planned and written in a turn


def no_switches(worker: Worker) -> dict[str, Any]:
    """Torch's switches of a session that sets none."""
    return {}


@dataclass(slots=True)
class SessionTerms:
    """Terms of one session. memory: bytes that it may hold on a worker; stall_timeout: seconds without progress; 0: no limit.

    switches: torch's, by worker. page: takes the lines of the instruction log, None without one.
    """

    memory: int = 0
    stall_timeout: float = 0.0
    switches: Callable[[Worker], dict[str, Any]] = no_switches
    pace: Pace = field(default_factory=Pace)
    page: list[str] | None = None


class SessionContext:
    """State of one client between its messages. `out(peer, message, frames)` sends."""

    def __init__(self, number: int, peer: bytes, config: Config, cluster: Cluster, out: Callable, terms: SessionTerms) -> None:
        self.number, self.peer, self.config, self.cluster = number, peer, config, cluster
        self.out, self.terms, self.pace = out, terms, terms.pace
        self.ended = False

        # What the config and the workers say, and all tensors of the session.
        self.groups = Groups(config)
        self.ops = SessionOps(cluster.library_ops())
        self.table = Table()

        # The pen, the journal of ops that workers may still report, and what has failed of them.
        self.emitter = Emitter(cluster, number, terms.page)
        self.journal = OpJournal()
        self.failures = Failures(cluster, self.table, self.journal)

        # The client's stream: batches, and the templates and origins that its numbers name.
        self.queue = OpQueue()
        self.templates: dict[int, OpSchema] = {}
        self.origins: dict[int, Origin] = {0: NO_ORIGIN}
        self.tape: Recording | None = None  # while a program is recorded
        self.uploaded = 0  # bytes
        self.pause: Callable[[], None] | None = None  # lets others have turns within one op; None where it cannot be left
        self._layouts: dict[Layout, Layout] = {}

    @property
    def origin(self) -> Origin:
        """The origin of the op that is being planned."""
        return self.emitter.origin

    def send(self, message: Message, frames: tuple = ()) -> None:
        """Send the client a message."""
        self.out(self.peer, message, frames)

    def intern(self, layout: Layout) -> Layout:
        """The one object for equal layouts, so that plans can be keyed by identity."""
        return self._layouts.setdefault(layout, layout)

    def set_layout(self, tensor: Tensor, layout: Layout) -> None:
        """Note the layout of a tensor, which may have had another one before."""
        tensor.layout = self.intern(layout)
        self.table.relaid += 1  # programs that were checked against the old layouts check again

    def default_mesh(self) -> Mesh:
        """The mesh of ungrouped work: the first worker that is alive."""
        return Mesh((), (next((w.index for w in self.cluster.workers if not w.lost), 0),))

    def note(self, extra: str = "") -> str:
        """Line and group of the op that is being planned, for plan lines."""
        return self.emitter.origin.note(extra)

    def row(self, tensor: Any) -> Tensor:
        """A live tensor of this session; ProtocolError otherwise."""
        row = self.table.rows.get(tensor) if type(tensor) is int else None
        if row is None:
            raise ProtocolError(f"tensor %{tensor!r:.40} is not of this session")
        return row

    def note_planned(self, known: OpSchema, reads: tuple[Storage, ...], makes: tuple[Storage, ...]) -> None:
        """Journal work beside the client's ops under a number of its own; the op in hand gets the next."""
        self.journal.add(Planned(self.emitter.seq, known, self.emitter.origin, reads, (), makes))
        self.emitter.end_op()

    def note_placed(self, known: OpSchema, storage: Storage) -> None:
        """Journal the placement of a storage whose recipe needs nothing that the client keeps."""
        seq, origin = self.emitter.seq, self.emitter.origin
        assert storage.recipe is not None
        row = Placed(seq, known, origin, (), (), (storage,), storage.recipe, storage.slots, storage.undecided)
        self.journal.add(row)
        self.emitter.end_op()

    def needs_pauses(self, operands: int, tensors: Iterable[Tensor]) -> bool:
        """True if this takes longer than a turn: operands to bind, and tensors of which those without a place are made."""
        # A step is bound once, written for each worker, and packed: 5 us and 0.7 us on two cores of an AMD EPYC.
        steps = operands + sum([len(t.storage.recipe) for t in tensors if t.storage.recipe is not None])
        return steps * (STEP_WRITES + len(self.cluster.workers)) > TURN_WRITES and self.pace.background.beside

    def breathe(self) -> None:
        """Let others have their turns, if this one is over and the work in hand can be left."""
        if self.pause is not None and self.pace.spent:
            self.pause()

    def apart(self) -> AbstractContextManager[None]:
        """Let other sessions go on during long work, which may touch this session's state alone.

        Nothing may be written for workers and not be sent. Numbers of ops are others' afterwards: begin a Run.
        """
        return self.pace.background.apart(lambda: self.ended)
