"""Failed ops, and the ops that fail with them: taint spreads over later ops along the flow of values.

Workers run every op, with placeholders where one failed; only here is it known whose value is then worthless.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from gt.dispatcher.cluster.workers import Cluster, Worker
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.state.records import Cause, Origin
from gt.dispatcher.state.tensors import RecipeStep, Storage, Table
from gt.errors import GTError, OpFailed, UnsupportedOp, WorkerLost
from gt.ir.layout import Layout

NOT_MOVED = "a tensor was not moved to where an op wanted it, since an interrupt (Ctrl-C): compute it again"
UNDROPPED = 1 << 62  # number of the first dropped op where there is none
MAX_UNREPORTED_FAILURES = 64  # that the client has not been told of


@dataclass(slots=True)
class Planned:
    """One op of the journal, with the storages it read, wrote and made."""

    seq: int
    known: OpSchema
    origin: Origin
    reads: Sequence[Storage]
    writes: Sequence[Storage]
    makes: Sequence[Storage]

    @property
    def end(self) -> int:
        """The number behind its last op."""
        return self.seq + 1

    @property
    def overwrites(self) -> bool:
        """True if the old value of what it writes has no influence on the new one."""
        return self.known.overwrites

    def at(self, seq: int) -> Planned:
        """The op of this number."""
        return self


@dataclass(slots=True)
class PlannedInPart(Planned):
    """An op that overwrites a part of a storage, as `x[0].zero_()`: the rest keeps its value."""

    @property
    def overwrites(self) -> bool:
        return False


@dataclass(slots=True)
class Placed(Planned):
    """The placement of a storage, with the recipe that it had before. The recipe needs no data that the client keeps."""

    recipe: list[RecipeStep]
    slots: dict[int, int]
    undecided: bool

    def undo(self) -> bool:
        """Have the storage unplaced again; False if a view of it is not in the recipe."""
        (storage,) = self.makes
        if storage.recipe is not None or not storage.tensors.keys() <= self.slots.keys():
            return False
        # Views that have ended since need no slot: no op can name them again.
        storage.recipe, storage.slots = self.recipe, {i: slot for i, slot in self.slots.items() if i in storage.tensors}
        storage.undecided, storage.default, storage.rest = self.undecided, False, None
        for tensor in storage.tensors.values():
            tensor.layout = None
        return True


@dataclass(slots=True, eq=False)
class Moved:
    """A move of a storage, or the sum of its terms, with its state before.

    earlier: number of the op that moved it before. stays: each worker that had a piece of it still has that, if it skips this.
    """

    seq: int
    storage: Storage
    earlier: int
    layouts: dict[int, Layout | None]
    rest: Layout | None
    default: bool
    undecided: bool
    stays: bool

    @classmethod
    def before(cls, seq: int, storage: Storage, stays: bool) -> Moved:
        """The storage is about to move for this op."""
        layouts = {i: tensor.layout for i, tensor in storage.tensors.items()}
        return cls(seq, storage, storage.moved, layouts, storage.rest, storage.default, storage.undecided, stays)

    def undo(self) -> None:
        """The storage is where it was. A view made since is made again anyway, since the op that made it was dropped too."""
        storage = self.storage
        for i, tensor in storage.tensors.items():
            tensor.layout = self.layouts.get(i, tensor.layout)
        storage.moved, storage.rest = self.earlier, self.rest
        storage.default, storage.undecided = self.default, self.undecided


@dataclass(slots=True)
class Sealed(Planned):
    """An op of a program, with the layout of its newest result when it was recorded."""

    layout: Layout | None


def layout_of(row: Planned) -> Layout | None:
    """The layout of an op's newest result, as long as it is alive."""
    storages = row.makes or row.writes
    tensors = storages[-1].tensors if storages else {}
    return next(reversed(tensors.values())).layout if tensors else None


@dataclass(slots=True)
class Launched(Planned):
    """A program's replay: all of its ops under consecutive numbers, with the storages that they read, wrote and made."""

    ops: Sequence[Planned]
    number: int  # number of the replay, from 1
    cause: Cause | None = None  # the cause of the first op that failed in it

    @property
    def end(self) -> int:
        return self.seq + len(self.ops)

    def at(self, seq: int) -> Planned:
        return self.ops[seq - self.seq]


# Example: op 5 fails a storage, op 6 overwrites it whole, op 9 fails it again, and a report for op 7 arrives last:
#   Mark(5, None, A)   Mark(6, A, None)   Mark(7, None, B)   Mark(9, B, C)
# `after` of a mark equals `before` of the next, and `after` of the newest is `storage.failed`.
@dataclass(slots=True, eq=False)
class Mark:
    """An op failed or healed a storage: why its value was worthless before the op, and is since."""

    seq: int
    before: Cause | None
    after: Cause | None


class OpJournal:
    """Ops that some worker may still report as failed, oldest first.

    While neither a recording nor a trace is made, `add` has no branch for them.
    """

    def __init__(self) -> None:
        self.rows: deque[Planned] = deque()
        self.moves: deque[Moved] = deque()  # for these ops
        self.marks: dict[Storage, list[Mark]] = {}  # by storage: failures and healings, in order of op numbers
        self._tape: list[Planned] | None = None
        self._layouts: dict[int, Layout | None] = {}
        self._trace: Callable[[Planned], None] | None = None
        # The method itself, since this is called for every op; `_choose` replaces it.
        self.add: Callable[[Planned], None] = self.rows.append

    def record(self, rows: list[Planned] | None, layouts: dict[int, Layout | None] | None = None) -> None:
        """Keep the rows here too from now on, and by number the layouts of results; None to stop."""
        self._tape, self._layouts = rows, {} if layouts is None else layouts
        self._choose()

    def trace(self, call: Callable[[Planned], None] | None) -> None:
        """Call this with each row from now on."""
        self._trace = call
        self._choose()

    def _choose(self) -> None:
        also = [call for call in (None if self._tape is None else self._keep, self._trace) if call is not None]
        append = self.rows.append

        def add(row: Planned) -> None:
            append(row)
            for call in also:
                call(row)

        self.add = add if also else append

    def _keep(self, row: Planned) -> None:
        assert self._tape is not None
        self._tape.append(row)
        self._layouts[row.seq] = layout_of(row)

    def first(self, end: int) -> int:
        """Number of the first op that may still be reported, `end` if there is none."""
        return self.rows[0].seq if self.rows else end

    def forget(self, upto: int) -> None:
        """Every op before `upto` is known to have succeeded or failed."""
        rows = self.rows
        while rows and rows[0].seq < upto:
            rows.popleft()
        while self.moves and self.moves[0].seq < upto:
            self.moves.popleft()
        for storage, marks in [*self.marks.items()]:
            kept = self.marks[storage] = [mark for mark in marks if mark.seq >= upto]
            if not kept:
                del self.marks[storage]

    def set_cause(self, seq: int, storage: Storage, cause: Cause | None) -> None:
        """Op `seq` has left this value failed for this cause, or good. Ops behind it may have been marked before it."""
        marks = self.marks.setdefault(storage, [])
        # Workers run ahead of one another, so a report may concern an op before one that has a mark already. Find its place.
        place = len(marks)
        while place and marks[place - 1].seq > seq:
            place -= 1
        newest = place == len(marks)

        # Only the newest mark decides what the storage is now; behind an older one, later marks have the last word.
        before = storage.failed if newest else marks[place].before
        if before is not cause:
            marks.insert(place, Mark(seq, before, cause))
            if newest:
                storage.failed = cause
            else:
                marks[place + 1].before = cause

    def fail(self, seq: int, storage: Storage, cause: Cause) -> None:
        """Op `seq` has failed this value, unless it had failed before."""
        if self._behind(seq, storage) is None:
            self.set_cause(seq, storage, cause)

    def _behind(self, seq: int, storage: Storage) -> Cause | None:
        """The reason why a value is worthless behind op `seq`."""
        later = next((mark for mark in self.marks.get(storage, ()) if mark.seq > seq), None)
        return storage.failed if later is None else later.before

    def unmark(self, seqs: Collection[int]) -> None:
        """These ops were not begun: tensors that they would have written are unchanged."""
        for storage, marks in self.marks.items():
            for mark in [mark for mark in marks if mark.seq in seqs]:
                place = marks.index(mark)
                del marks[place]
                if place < len(marks):
                    marks[place].before = mark.before
                # Otherwise it has failed for another reason since.
                elif storage.failed is mark.after:
                    storage.failed = mark.before

    def remove(self, seqs: Collection[int]) -> None:
        """These ops were not begun: a failure that is reported later neither taints nor heals by them."""
        kept = [row for row in self.rows if row.seq not in seqs]
        self.rows.clear()  # in place: `add` appends to it
        self.rows.extend(kept)

    def undo_moves(self, seqs: Collection[int]) -> None:
        """These ops were not begun: a storage that they would have moved keeps its layout, if its pieces still exist."""
        gone: set[Storage] = set()
        # Newest first: each undo restores `storage.moved`, so the move before it is recognized in turn. A move that freed
        # pieces cannot be undone, and nor can the moves before it.
        for move in reversed(self.moves):
            storage = move.storage
            if move.seq in seqs and storage.moved == move.seq and storage.recipe is None and storage not in gone:
                if move.stays:
                    move.undo()
                else:
                    gone.add(storage)

    def own(self, seqs: Collection[int]) -> set[int]:
        """Those of these numbers that an op here has, or that are of a replay here."""
        own: set[int] = set()
        ordered = sorted(seqs)
        for row in self.rows:
            if isinstance(row, Launched):
                own.update(ordered[bisect_left(ordered, row.seq) : bisect_left(ordered, row.end)])
            elif row.seq in seqs:
                own.add(row.seq)
        return own

    def taint(self, seqs: Collection[int], cause: Cause) -> None:
        """Mark the storages that these ops made and wrote, and all computed from them since; a whole overwrite heals."""
        ordered = sorted(seqs)
        first = ordered[0]
        # Forward data flow over the journal. `tainted` is the state at the row in hand: `storage.failed` is the state behind
        # the last row, and may have another cause by then.
        tainted: set[Storage] = set()
        for row in self.rows:
            if row.end <= first:
                continue

            # A replay is one row: if one of its ops failed, all its results count as harmed.
            if isinstance(row, Launched):
                harmed = bisect_left(ordered, row.seq) < bisect_left(ordered, row.end)
                row.cause = row.cause or (cause if harmed else None)
            else:
                harmed = row.seq in seqs

            # The old value of a storage that is written whole has no influence on the new one.
            sources = [s for s in row.reads if s not in row.writes] if row.overwrites else row.reads
            if harmed or not tainted.isdisjoint(sources):
                for storage in (*row.writes, *row.makes):
                    tainted.add(storage)
                    self.fail(row.seq, storage, cause)
                # Out of memory: there may be no placeholder either, so a later overwrite has no memory to write into.
                for storage in row.makes if cause.full else ():
                    storage.unallocated = True
            elif row.overwrites:
                # The op reads nothing tainted and writes the whole storage: its value is good from here on.
                for storage in row.writes:
                    if storage in tainted and not storage.unallocated:
                        tainted.discard(storage)
                        if self._behind(row.seq, storage) is cause:
                            self.set_cause(row.seq, storage, None)

    def earlier(self, seq: int) -> Cause | None:
        """The earlier failure of something that op `seq`, or its replay, reads: then its own failure says nothing new."""
        row = self.find(seq)
        if row is None:
            return None
        if isinstance(row, Launched) and row.cause is not None:
            return row.cause
        # As it is now, and as it was at that op: a later one may have healed it since
        causes = (cause for storage in row.reads for cause in (storage.failed, self._behind(seq, storage)))
        return next((cause for cause in causes if cause is not None and cause.seq < seq), None)

    def find(self, seq: int) -> Planned | None:
        return next((row for row in self.rows if row.seq <= seq < row.end), None)


class Failures:
    """Failures of one session: the ops that failed, the causes not yet reported to the client, and the lost workers."""

    def __init__(self, cluster: Cluster, table: Table, journal: OpJournal) -> None:
        self._cluster, self._table, self._journal = cluster, table, journal
        self.troubled = False  # some storage may be failed: ops take the careful path
        self.unreported: deque[Cause] = deque()
        self.full_upto = 0  # ops before it that found no room are told of
        self._last_error: GTError | None = None  # the last error of an op that was reported
        self._losses: dict[int, Cause] = {}  # by lost worker: the cause that its tensors get
        self._lost: Cause | None = None  # the last of them, also when all are back
        self._failed_ops: set[int] = set()
        self._dropped_ops: set[int] = set()  # ops among them that were not begun
        self.dropped = False  # an interrupt has dropped ops
        self.unviewed: set[Storage] = set()  # storages of which a view could not be made
        self.first_dropped = UNDROPPED  # number of the first of them, since an interrupt ended last

    def forget(self, end: int) -> None:
        """No worker will report an op before this one any more."""
        self._journal.forget(end)
        self._failed_ops = {seq for seq in self._failed_ops if seq >= end}
        self._dropped_ops = {seq for seq in self._dropped_ops if seq >= end}

    def regain(self, worker: Worker) -> None:
        """A new process has a lost worker's place."""
        self._losses.pop(worker.index, None)

    def spread(self, row: Planned) -> None:
        """Fail an op that reads a failed storage; heal the storages that one overwrites whole from good ones."""
        overwrites, writes = row.overwrites, row.writes
        # The old value of a storage that is written whole has no influence on the new one.
        sources = [s for s in row.reads if not (overwrites and s in writes)]
        cause = next((s.failed for s in sources if s.failed), None)
        if cause is not None:
            for storage in (*writes, *row.makes):
                self._journal.fail(row.seq, storage, cause)
        elif overwrites:
            # With a lost worker the piece itself is gone: `renew` comes first. Without memory there is nothing to write into
            for storage in writes:
                if storage.failed is not None and storage.failed.lost < 0 and not storage.unallocated:
                    self._journal.set_cause(row.seq, storage, None)

    def trouble(self, seq: int, error: GTError, others: Sequence[int] = (), full: bool = False) -> None:
        """A worker reported that op `seq` failed. An op may fail because its operand is a placeholder, which is no news."""
        # A report with `others` stands for the failures of a Run beyond the first few, which were reported one by one. Its
        # text says nothing, so the last error is the cause here too.
        older = self._journal.earlier(seq)
        error = (self._last_error or error) if others else error
        if older is None:
            self._last_error = error

        # Its results are worthless either way. The cause is another object: storages that healed from the older one stay.
        cause = Cause(error, seq=seq, full=full) if older is None else Cause(older.error, older.lost, older.seq, older.full)

        # One memory shortage fails many ops: the client hears of the first, until it has been told and goes on.
        reported = others or (full and (seq < self.full_upto or any(report.full for report in self.unreported)))
        if self.taint(seq, cause, others) and older is None and not reported and len(self.unreported) < MAX_UNREPORTED_FAILURES:
            self.unreported.append(cause)

    def taint(self, seq: int, cause: Cause, others: Iterable[int] = ()) -> bool:
        """Op `seq` and others failed for this cause; False if another worker of the mesh has reported it."""
        # Each worker of a mesh reports the same op. Numbers of nothing that is under way here are not kept.
        new = self._journal.own({seq, *others}) - self._failed_ops
        if not new:
            return False
        self._failed_ops |= new
        self.troubled = True
        self._journal.taint(new, cause)
        return seq in new

    def drop(self, seqs: Collection[int]) -> None:
        """Ops were not begun: their results have no value, and tensors that they would have changed keep theirs."""
        self.troubled = self.dropped = True
        # Each worker of the mesh reports them.
        seqs = set(seqs) - self._failed_ops
        self._failed_ops |= seqs
        self._dropped_ops |= seqs
        self.first_dropped = min((self.first_dropped, *seqs))

        # 1. Storages that these ops would have written are as good or bad as before. Recipes that they executed are restored.
        self._journal.unmark(seqs)
        unplaced = [row for row in self._journal.rows if row.seq in seqs and isinstance(row, Placed) and row.undo()]

        # 2. Their results have no value. A view's memory exists all the same: only the view has to be made again.
        for row in self._journal.rows:
            if row.seq in seqs and row not in unplaced:
                cause = Cause(not_begun(row), seq=row.seq)
                for storage in row.makes:
                    if any(storage is read for read in row.reads):  # a view's base is in the table
                        self.unviewed.add(storage)
                    else:
                        self._journal.fail(row.seq, storage, cause)
                        storage.unallocated = True

        # 3. Storages that they would have moved are where they were; one whose old pieces are freed by now has failed.
        self._table.relaid += 1  # layouts are undone, so programs compare all of them again
        self._journal.undo_moves(self._dropped_ops)  # some workers may have reported earlier ones before
        for storage in {id(tensor.storage): tensor.storage for tensor in self._table.rows.values()}.values():
            if storage.moved in self._dropped_ops and storage.recipe is None:
                op = self._journal.find(storage.moved)
                error = not_begun(op) if op is not None else OpFailed(NOT_MOVED)
                self._journal.fail(storage.moved, storage, Cause(error, seq=storage.moved))
                storage.unallocated = True

        # Last, since the steps above look these rows up.
        self._journal.remove(seqs)

    def cause_of_loss(self, worker: Worker | None) -> Cause:
        assert worker is not None
        # One cause for all tensors of a worker, by identity: so the client is told of a loss once.
        if worker.index not in self._losses:
            under_way = next((row.number for row in self._journal.rows if isinstance(row, Launched)), 0)
            self._lost = Cause(worker_lost(worker.name, worker.lost, under_way), lost=worker.index)
            self._losses[worker.index] = self._lost
        return self._losses[worker.index]

    def loss(self) -> Cause | None:
        """The cause for which a worker misses a peer: another one is lost, or was until its successor joined."""
        lost = next((w for w in self._cluster.workers if w.lost), None)
        return self._lost if lost is None else self.cause_of_loss(lost)

    @property
    def missing(self) -> bool:
        """True while a worker of the session is lost."""
        return bool(self._losses)

    def harm(self, rows: Iterable[Planned]) -> str:
        """The reason why these ops give no values, or "": a worker is lost, or one of the ops uses a failed value."""
        if not self.troubled:
            return ""
        if self._losses:
            return str(next(iter(self._losses.values())).error).splitlines()[0]
        storages = (storage for row in rows for storage in (*row.reads, *row.writes, *row.makes))
        cause = next((storage.failed for storage in storages if storage.failed is not None), None)
        return "" if cause is None else f"it uses a value that failed: {str(cause.error).splitlines()[0]}"

    def recover(self) -> None:
        """Care is no longer needed once nothing that failed is left, and no worker is missing."""
        if self.troubled and not self._losses and all(t.storage.failed is None for t in self._table.rows.values()):
            self.troubled = False


def op_failed(row: Planned | None, seq: int, kind: str, message: str, worker: str) -> GTError:
    """The user's error for a worker's report on op `seq`."""
    if row is None:
        return OpFailed(f"an op failed on worker {worker}: {message}", worker=worker)
    replay = ""
    if isinstance(row, Launched):
        replay = f"\n  this was replay {row.number} of a program: its outputs mix two steps; restore them from a checkpoint"
    # Line and op first, since that is what the user can change; then worker and group, the worker's words, and what to do.
    row = row.at(seq)
    origin, op = row.origin, row.known.template.op
    where = f"{origin.file}:{origin.line}" if origin.file else "an op"
    group = f", group {origin.group}" if origin.group else ""
    ins = "".join(f" {spec.text()}" for spec in row.known.template.ins[:8])
    text = f"{where}: {op}{ins} failed on worker {worker}{group}: {message}"
    if kind == "unsupported":
        return UnsupportedOp(f"{where}: {message} (worker {worker}{group})")
    text += replay + "\n  tensors computed from its result fail too, until they get a new value; other tensors are unharmed"
    return OpFailed(text, op=op, worker=worker, group=origin.group, origin=f"{origin.file}:{origin.line}")


def not_begun(row: Planned) -> OpFailed:
    """The error of an op that an interrupt dropped."""
    origin, op = row.origin, row.known.template.op
    where = f"{origin.file}:{origin.line}" if origin.file else "an op"
    text = f"{where}: {op} was not begun, since an interrupt (Ctrl-C) ended the work that was queued: compute it again"
    return OpFailed(text, op=op, group=origin.group, origin=f"{origin.file}:{origin.line}")


def worker_lost(name: str, reason: str, replay: int = 0) -> WorkerLost:
    """replay: number of a program's replay that was under way."""
    half = (
        f"Replay {replay} of a program was under way, and its outputs elsewhere mix two steps: load these too. "
        if replay
        else ""
    )
    return WorkerLost(
        f"worker {name} is lost: {reason}; its tensors are gone: create them again, or load a checkpoint. {half}"
        "GT restarts a worker that it started, empty; if you started it by hand, start it again"
    )
