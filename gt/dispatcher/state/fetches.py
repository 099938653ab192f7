"""Answers that a client waits for: values, shapes, reports. None is sent before all that it may depend on is known to be good.

A fetch is answered when every worker of the session has executed what was issued before it. A failure anywhere upstream
is known by then. The client puts the pieces of a split tensor together (gt.client.exchange.host_buffers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod

from gt import errors
from gt.dispatcher.planning.materializer import Materializer
from gt.dispatcher.planning.redistributor import Redistributor
from gt.dispatcher.state.arenas import BlockPlace, SessionArenas
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.emitter import lost_in
from gt.dispatcher.state.outbox import Outbox
from gt.dispatcher.state.records import Cause
from gt.dispatcher.state.tensors import Tensor
from gt.errors import CheckpointError, GTError, OpFailed, ProtocolError
from gt.ir.instr import Define
from gt.ir.layout import Layout, Mesh, boxes, local_shape, replicated, spans
from gt.ir.spec import Spec
from gt.wire.messages import AHEAD, CHUNK, THROUGH, Described, Failed, Piece, Report, UseBlock, Value, WindowUpdate

NO_PLACE = -1
MAX_REQUESTS = 256  # requests of a client under way
MAX_DESCRIBED_TENSORS = 4096  # tensors in one Describe
MAX_STORED_TENSORS = 256  # tensors in one Store


# Life of a fetch:
#   1. `fetch` reduces a partial value, asks one holder of each distinct part, and sends the Runs.
#   2. Workers answer with Pieces. They stay in `held` until all workers of the session have executed `runs`.
#   3. `answer_ready` finds a failure upstream, and answers Failed, or announces the Value and sends what was held.
#   4. Later Pieces pass through; the last one ends the request (`_finish`).
# Example: f32[4,6] split by rows over workers 0 and 1. keys {7: 0, 8: 1}, sizes {7: 48, 8: 48},
# parts [[7, [[[0, 2], [0, 6]]]], [8, [[[2, 4], [0, 6]]]]].
@dataclass(slots=True)
class Request:
    """One request under way. runs: by worker, the Run that must be done before the answer; since: time of the request."""

    number: int
    kind: str
    runs: dict[int, int]
    tensors: list[Tensor]
    keys: dict[int, int] = field(default_factory=dict)  # key of each piece -> the worker that sends it
    parts: list = field(default_factory=list)  # [key, boxes] of a fetch
    held: list[tuple[Piece, tuple]] = field(default_factory=list)
    specs: dict[int, list] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)  # bytes of each piece to come (1 for an empty one)
    sizes: dict[int, int] = field(default_factory=dict)  # bytes of each piece
    shape: tuple[int, ...] = ()
    dtype: str = ""
    verified: bool = False
    since: float = 0.0
    seq: int = -1  # op number under which the workers were asked
    named: dict[int, str] = field(default_factory=dict)  # for a store: op number -> name of the tensor
    place: BlockPlace | None = None  # the client's block that workers write their pieces into
    granted: dict[int, int] = field(default_factory=dict)  # key -> bytes of a large piece that its worker may send by now
    asking: bool = False  # not all its workers are asked yet
    holds: bool = False  # workers write from the tensors themselves: no op may change them before the answer
    moved: float = -1.0  # time of the answer's last progress; below 0: workers have still to compute it

    @property
    def owed(self) -> set[int]:
        """Workers that have still to send what they may."""
        if self.kind == "describe":
            return {index for key, index in self.keys.items() if key not in self.specs}
        if self.place is not None:
            return {self.keys[key] for key, left in self.left.items() if left}
        # A worker is waited for only if the end of its next frame is within its window; beyond that the client is waited for.
        ends = {key: self.sizes[key] - left + min(left, CHUNK) for key, left in self.left.items() if left}
        return {self.keys[key] for key, end in ends.items() if end <= self.granted.get(key, AHEAD)}

    @property
    def files(self) -> dict[str, set[int]]:
        """Names of files that workers have still to write, as far as is known, and these workers."""
        return {} if self.place is None or not self.owed else {self.place.arena.name: self.owed}

    @property
    def name(self) -> str:
        return f"%{self.tensors[0].id}" if self.tensors else "what says that it is through"

    @property
    def spec(self) -> str:
        return self.tensors[0].spec.text() if self.tensors else "u8[]"


class Fetches:
    """Requests of one session, by number while they are open."""

    def __init__(
        self,
        context: SessionContext,
        outbox: Outbox,
        materializer: Materializer,
        redistributor: Redistributor,
        arenas: SessionArenas,
    ) -> None:
        self._context, self._outbox, self._arenas = context, outbox, arenas
        self._materializer, self._redistributor = materializer, redistributor
        self._emitter, self._cluster, self._failures = context.emitter, context.cluster, context.failures
        self.open: dict[int, Request] = {}
        self.by_key: dict[int, Request] = {}
        self.fetched = 0
        self._byte: Define | None = None
        self.holding = 0  # requests of which ops wait for the answer
        self._stored: Counter[int] = Counter()  # bytes that each worker was asked to write into files or blocks

    # ---- asking

    def fetch(self, number: int, tensor_id: int, place: int = NO_PLACE) -> None:
        """Ask the workers that hold the parts, each part once. place: of the client's block for the value."""
        self._check(number)
        if tensor_id == THROUGH:
            self._synchronize(number)
            return
        tensor = self._context.row(tensor_id)
        if self._refused(number, [tensor]):
            return
        mesh = tensor.layout.mesh if tensor.layout is not None else self._context.default_mesh()
        if (lost := lost_in(self._cluster, mesh)) is not None:
            self._fail(number, self._failures.cause_of_loss(lost))
            return

        # A tensor that has no place yet is computed for this answer alone, and freed below: reading does not place it.
        self._outbox.begin_run()
        source = tensor if tensor.layout is not None else self._materializer.read(tensor)
        if source.layout is not None and source.layout.partial:
            self._redistributor.reduce_partial(source.storage)
        assert source.layout is not None

        request = Request(number, "fetch", {}, [tensor, source], shape=tensor.spec.shape, dtype=tensor.spec.dtype)
        request.place = self._block(place, tensor.spec, source.layout.mesh.workers)
        # A large value does not wait for its own Run: its pieces pass as workers send them, once all ops before are known to be
        # good. So the ops before are sent as a Run of their own.
        if tensor.spec.nbytes > CHUNK:
            request.runs = self._outbox.flush(self._emitter.base)
        with self._emitter.op():
            self._ask_parts(request, source.id, source.layout, tensor.spec)
            request.seq = self._emitter.seq
        if source is not tensor:
            self._emitter.free(source.layout.mesh.workers, [source.id])
        self._begin(request)

    def store(self, number: int, rows: list, later: bool, file: int) -> None:
        """Have workers write tensors into files, each part once: of equal parts, the one on the worker with least to write."""
        self._check(number)
        if len(rows) > MAX_STORED_TENSORS or any(type(row) is not list or list(map(type, row)) != [int, int] for row in rows):
            raise ProtocolError(f"Store.rows: want at most {MAX_STORED_TENSORS} pairs of a tensor and its place in a file")
        if not rows:
            self._context.send(Report(number, {"shared": self._arenas.shared_by_all(file)}))
            return
        tensors = [self._context.row(tensor_id) for tensor_id, _ in rows]
        places = [self._arenas.file(place, tensor.spec.nbytes) for tensor, (_, place) in zip(tensors, rows)]

        # All or none: refused if a tensor has failed, a worker is lost, or a worker does not share the file system.
        if self._refused(number, tensors):
            return
        layouts = [tensor.layout or replicated(self._context.default_mesh()) for tensor in tensors]
        for layout in layouts:
            if (lost := lost_in(self._cluster, layout.mesh)) is not None:
                self._fail(number, self._failures.cause_of_loss(lost))
                return
        if not all(self._arenas.shared(place, layout.mesh.workers) for place, layout in zip(places, layouts)):
            self._context.send(Report(number, {"shared": False}))
            return

        # `later`: workers copy the tensors first and write afterwards. Otherwise ops wait for the answer (`holds`), since they
        # could change what is being written.
        self._emitter.begin_run()
        request = Request(number, "store", {}, [], holds=not later, asking=True)
        self._open(request)
        for tensor, place, layout in zip(tensors, places, layouts):
            if self._context.pace.spent and not self._pause(request, layout.mesh):
                return
            # In a pause a worker may have come, on which tensors without a place are made from now on.
            mesh = tensor.layout.mesh if tensor.layout is not None else self._context.default_mesh()
            if not self._arenas.shared(place, mesh.workers):
                self._outbox.flush(self._emitter.base)
                self._drop(request)
                self._context.send(Report(number, {"shared": False}))
                return
            source = tensor if tensor.layout is not None else self._materializer.read(tensor)
            if source.layout is not None and source.layout.partial:
                self._redistributor.reduce_partial(source.storage)
            assert source.layout is not None
            request.tensors += [tensor, source]
            request.place = place
            with self._emitter.op():
                self._ask_parts(request, source.id, source.layout, tensor.spec, later or source is not tensor)
                request.named[self._emitter.seq] = f"%{tensor.id}"
            if source is not tensor:
                self._emitter.free(source.layout.mesh.workers, [source.id])
        request.asking = False
        self._begin(request)

    def needs_pauses(self, rows: list) -> bool:
        """True if the tensors of a Store take longer than a turn."""
        tensors = [self._context.table.rows.get(row[0]) for row in rows if type(row) is list and row and type(row[0]) is int]
        return self._context.needs_pauses(0, [tensor for tensor in tensors if tensor is not None])

    def _pause(self, request: Request, mesh: Mesh) -> bool:
        """Let others have turns within a Store; False if it has failed meanwhile."""
        self._outbox.flush(self._emitter.base)
        self.by_key.update(dict.fromkeys(request.keys, request))
        with self._context.apart():
            pass
        if self.open.get(request.number) is not request:
            return False
        if (lost := lost_in(self._cluster, mesh)) is not None:
            self._drop(request)
            self._fail(request.number, self._failures.cause_of_loss(lost))
            return False
        self._outbox.begin_run()
        return True

    def _block(self, place: int, spec: Spec, workers: Sequence[int]) -> BlockPlace | None:
        """The block that a value can be written into; None if not all workers that have parts of it share the arena."""
        block = self._arenas.memory(place, spec.nbytes) if place != NO_PLACE and spec.nbytes > CHUNK else None
        return block if block is not None and self._arenas.shared(block, workers) else None

    def _synchronize(self, number: int) -> None:
        """Fetch a byte from each worker of the session, which its device makes behind all that was issued."""
        emitter = self._emitter
        if self._refused(number, []):
            return
        workers = [self._cluster.workers[index] for index in sorted(emitter.used)]
        workers = [worker for worker in workers if not worker.lost]
        self._outbox.begin_run()
        if self._byte is None:
            self._byte = emitter.define("fill", {"shape": (), "stride": (), "dtype": "uint8"})
        request = Request(number, "fetch", {}, [], shape=(len(workers),), dtype="uint8")
        # A fetch of a fill that the device executes last: the byte arrives
        # when the device is through. rank: place in the answer.
        mark = emitter.temporary()
        with emitter.op():
            request.seq = emitter.seq
            for rank, worker in enumerate(workers):
                key = self._cluster.key()
                request.parts.append([key, [[[rank, rank + 1]]]])
                request.keys[key], request.sizes[key], request.left[key] = worker.index, 1, 1
                emitter.write(worker, self._byte, emitter.ids([mark]))
                emitter.write(worker, emitter.common("fetch"), [*emitter.ids([mark]), key])
        emitter.free([worker.index for worker in workers], [mark])
        self._begin(request)

    def _ask_parts(self, request: Request, source: int, layout: Layout, spec: Spec, later: bool = False) -> None:
        emitter = self._emitter
        define = emitter.common("fetch")

        # Workers with an equal part are rows of one list; one of them is asked. A replicated value has one part: all of it.
        everyone = [*range(len(layout.mesh.workers))]
        holders: dict[tuple, list[int]] = {(): everyone} if layout.replicated else {}
        for rank in [] if layout.replicated else everyone:
            holders.setdefault(spans(layout, spec.shape, rank), []).append(rank)

        for ranks in holders.values():
            # Of a checkpoint each worker writes its share: the one with least bytes so far.
            rank = ranks[0]
            if request.kind == "store":
                rank = min(ranks, key=lambda rank: self._stored[layout.mesh.workers[rank]])
            index = layout.mesh.workers[rank]
            if layout.replicated:
                parts, nbytes = [[[0, extent] for extent in spec.shape]], spec.nbytes
            else:
                parts = [[list(span) for span in box] for box in boxes(layout, spec.shape, rank)]
                nbytes = spec.itemsize * prod(local_shape(layout, spec.shape, rank))

            key = self._cluster.key()
            request.parts.append([key, parts])
            request.keys[key] = index
            # An empty piece is one message all the same, so 1 is left of it.
            request.sizes[key], request.left[key] = nbytes, max(nbytes, 1)
            if request.place is not None:
                arena, offset = request.place
                block = UseBlock(key, arena.offer.arena, offset, list(spec.shape), spec.itemsize, parts, True, later)
                self._stored[index] += nbytes
                self._context.out(self._cluster.workers[index].peer, block, ())
            emitter.write(self._cluster.workers[index], define, [emitter.offset + source, key])

    def describe(self, number: int, tensors: list[int]) -> None:
        """Ask one worker for the specs of outputs whose shape depends on values."""
        self._check(number)
        if len(tensors) > MAX_DESCRIBED_TENSORS:
            raise ProtocolError(f"Describe.tensors has {len(tensors)} tensors, at most {MAX_DESCRIBED_TENSORS} are described")
        rows = [self._context.row(t) for t in tensors]
        if self._refused(number, rows):
            return
        for row in rows:
            if row.layout is None:
                raise ProtocolError(f"Describe.tensors: the shape of %{row.id} does not depend on values, so it is known")
            if (lost := lost_in(self._cluster, row.layout.mesh)) is not None:
                self._fail(number, self._failures.cause_of_loss(lost))
                return
        emitter = self._emitter
        emitter.begin_run()
        request = Request(number, "describe", {}, rows)
        with emitter.op():
            request.seq = emitter.seq
            for row in rows:
                key = self._cluster.key()
                assert row.layout is not None
                worker = self._cluster.workers[row.layout.mesh.workers[0]]
                request.keys[key] = worker.index
                emitter.write(worker, emitter.common("describe"), [emitter.offset + row.id, key])
        self._begin(request)

    def _check(self, number: int) -> None:
        if number in self.open or len(self.open) >= MAX_REQUESTS:
            raise ProtocolError(f"request {number} is in use, or more than {MAX_REQUESTS} requests are open")

    def _begin(self, request: Request) -> None:
        last = self._outbox.flush(self._emitter.base)
        request.runs = request.runs or last
        self._open(request)
        self.by_key.update(dict.fromkeys(request.keys, request))
        self.answer_ready()

    def _open(self, request: Request) -> None:
        if request.number not in self.open:
            request.since = self._cluster.now
            self.open[request.number] = request
            self.holding += request.holds

    def _refused(self, number: int, tensors: list[Tensor]) -> bool:
        """Fail a request at once if its tensors, or ops before it, are known to have failed."""
        for tensor in tensors:
            if tensor.storage.failed is not None:
                self._fail(number, tensor.storage.failed)
                return True
        if self._failures.unreported:
            self._fail(number, self._failures.unreported.popleft())
            return True
        return False

    def inspect(self, number: int, tensor_id: int) -> None:
        """Layout, mesh, and each piece's worker, shape and bytes."""
        tensor = self._context.row(tensor_id)
        spec, layout = tensor.spec, tensor.layout
        body: dict = {
            "tensor": tensor_id,
            "spec": spec.text(),
            "shape": list(spec.shape),
            "layout": "unplaced",
            "mesh": "",
            "pieces": [],
        }
        if layout is not None:
            body.update(layout=str(layout), mesh=layout.mesh.text())
            for rank, index in enumerate(layout.mesh.workers):
                shape = local_shape(layout, spec.shape, rank)
                nbytes = spec.itemsize
                for extent in shape:
                    nbytes *= extent
                name = self._cluster.workers[index].name
                intervals = [[list(interval) for interval in box] for box in boxes(layout, spec.shape, rank)]
                piece = {"worker": name, "index": index, "shape": list(shape), "bytes": nbytes, "boxes": intervals}
                body["pieces"].append(piece)
        self._context.send(Report(number, body))

    # ---- what workers and client answer

    def _asked(self, key: int, index: int) -> Request | None:
        """The request that a worker's answer is for; None for one that is no longer open."""
        request = self.by_key.get(key)
        if request is not None and request.keys[key] != index:
            raise ProtocolError(f"key {key} belongs to another worker's piece")
        return request

    def piece(self, index: int, message: Piece, frames: tuple) -> None:
        """A frame of a fetched piece: passed on, or held until the value may be known."""
        request = self._asked(message.key, index)
        if request is None:
            return
        if request.kind == "describe":
            raise ProtocolError(f"Piece.key is {message.key}, want Described for this key")
        size, total = sum(len(f) for f in frames), request.sizes[message.key]
        # The op gave another shape than the client's shape inference: an error of the request, not of the protocol.
        if message.total != total:
            self._misfit(request, f"it has {message.total} bytes on worker {self._cluster.workers[index].name}, not {total}")
            return

        # A block or file: the worker has written the bytes itself and says so once, without frames.
        if request.place is not None:
            if frames or message.offset != total:
                raise ProtocolError(f"Piece.offset is {message.offset} with {size} bytes of a piece in an arena, want {total}")
            request.left[message.key] = 0
            self.fetched += total
            self._arenas.bytes_shared += total
            for other in [request] if request.kind == "fetch" else self.open.values():
                if other.kind == request.kind and other.verified:  # workers write the next one after this one
                    other.moved = self._cluster.now
            self._finish(request)
            return

        # Frames: in order and without gaps.
        offset = total - request.left[message.key] if total else 0
        if message.offset != offset or size > total - offset or (total and not size):
            raise ProtocolError(f"Piece.offset is {message.offset} with {size} bytes of {total}, want {offset}")
        request.left[message.key] -= size if total else 1
        self.fetched += size
        if request.verified:
            request.moved = self._cluster.now
            self._context.send(message, frames)
            self._finish(request)
        else:
            request.held.append((message, frames))

    def taken_in(self, key: int, upto: int) -> None:
        """The client has taken in so many bytes of a piece: the worker may send as many more."""
        request = self.by_key.get(key)
        if request is None or request.kind != "fetch":
            return  # it has ended meanwhile
        if not 0 <= upto <= request.sizes[key] - request.left[key]:
            sent = request.sizes[key] - request.left[key]
            raise ProtocolError(f"UploadProgress.upto is {upto} of piece {key}, of which {sent} bytes were sent")
        request.granted[key], request.moved = upto + AHEAD, self._cluster.now
        self._update_window(request, key, upto + AHEAD)

    def _update_window(self, request: Request, key: int, upto: int) -> None:
        worker = self._cluster.workers[request.keys[key]]
        if not worker.lost:
            self._context.out(worker.peer, WindowUpdate(key, upto), ())

    def close(self) -> None:
        """The client is gone: workers keep nothing for it."""
        for request in list(self.open.values()):
            self._drop(request)

    def failed(self, seq: int, worker: str, how: str) -> bool:
        """A worker could not answer: fail the request. False if no request has this number."""
        request = next((r for r in self.open.values() if (r.seq == seq and seq >= 0) or seq in r.named), None)
        if request is None:  # a request that names several pieces has no number of its own: its seq is -1
            return False
        self._drop(request)
        # The failure of an op upstream says more than the worker's failure to answer.
        cause = next((t.storage.failed for t in request.tensors if t.storage.failed), None)
        if cause is not None:
            self._fail(request.number, cause)
            return True
        error: GTError = OpFailed(f"{request.name} cannot be read on worker {worker}: {how}")
        if request.kind == "store":
            error = CheckpointError(f"worker {worker} cannot write {request.named[seq]}: {how}")
        self._context.send(Failed(request.number, errors.to_wire(error)))
        return True

    def asks(self, seqs: Collection[int]) -> bool:
        """True if a question has one of these numbers."""
        return any(request.seq in seqs or not request.named.keys().isdisjoint(seqs) for request in self.open.values())

    def drop(self, seqs: Collection[int]) -> None:
        """An interrupt dropped the questions of these numbers."""
        for request in list(self.open.values()):
            name = next((name for seq, name in request.named.items() if seq in seqs), "")
            if name or request.seq in seqs:
                how = f"{name} was not saved" if name else f"{request.name} was not read"
                self.give_up(request, OpFailed(f"{how}, since an interrupt (Ctrl-C) ended what was queued"))

    def _misfit(self, request: Request, how: str) -> None:
        """An op gave another shape than the client said."""
        self._drop(request)
        error = OpFailed(f"{request.name} was declared as {request.spec} by the client and is another: {how}")
        self._context.send(Failed(request.number, errors.to_wire(error)))

    def described(self, index: int, key: int, specs: list) -> None:
        request = self._asked(key, index)
        if request is None:
            return
        try:
            (spec,) = specs
            Spec.from_wire(spec)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"Described.specs: {error}") from None
        request.specs[key] = spec
        self.answer_ready()

    def answer_ready(self, acked: int = -1) -> bool:
        """Answer the requests that have come far enough. acked: a batch to acknowledge; True if the first value does."""
        acknowledged = False
        # All workers have executed what was issued before these requests, and every failure among it has been reported.
        for request in list(self.open.values()):
            if request.asking or request.verified or not self._outbox.reached(request.runs):
                continue
            if request.moved < 0:
                request.moved = self._cluster.now
            cause = next((t.storage.failed for t in request.tensors if t.storage.failed), None)
            # A failure elsewhere is reported by the first answer after it, as CUDA reports asynchronous errors.
            if cause is None and self._failures.unreported:
                cause = self._failures.unreported.popleft()
            if cause is not None:
                self._drop(request)
                self._fail(request.number, cause)
            elif request.kind == "fetch" and request.place is None:
                self._answer_value(request, -1 if acknowledged else acked)
                acknowledged = True
            elif request.kind != "describe":
                request.verified = True
                self._finish(request)
            elif len(request.specs) == len(request.keys):
                self._answer_specs(request)
        return acknowledged

    def _answer_value(self, request: Request, acked: int) -> None:
        """Announce a good value and send the pieces that are here. A whole small one is sent within the announcement."""
        request.verified = True
        buffered, request.held = request.held, []
        value = Value(request.number, list(request.shape), request.dtype, request.parts, acked)
        alone = len(buffered) == 1 and not any(request.left.values())
        self._context.send(value, buffered.pop()[1] if alone else ())
        for message, frames in buffered:
            self._context.send(message, frames)
        self._finish(request)

    def _answer_specs(self, request: Request) -> None:
        specs = [request.specs[key] for key in request.keys]
        for tensor, spec in zip(request.tensors, specs, strict=True):
            tensor.spec = Spec.from_wire(spec)
        self._drop(request)
        self._context.send(Described(request.number, specs))

    def _finish(self, request: Request) -> None:
        if request.verified and not any(request.left.values()):
            self._drop(request)
            if request.kind == "store":
                self._context.send(Report(request.number, {"shared": True}))
            elif request.place is not None:
                self._context.send(Value(request.number, list(request.shape), request.dtype, []))

    def _drop(self, request: Request) -> None:
        if self.open.pop(request.number, None) is not None:
            self.holding -= request.holds
        for key in request.keys:
            self.by_key.pop(key, None)
            # -1 ends the window: a worker that waits for it forgets the rest of the piece.
            if request.left.get(key) and (request.sizes[key] > AHEAD or request.place is not None):
                self._update_window(request, key, -1)

    def _fail(self, number: int, cause: Cause) -> None:
        # Ops that are planned by now and find no room fail of the same shortage, which this tells.
        if cause.full:
            self._failures.full_upto = self._cluster.seq
        reported = [other for other in self._failures.unreported if other is cause or (other.full and cause.full)]
        for other in reported:
            self._failures.unreported.remove(other)
        self._context.send(Failed(number, errors.to_wire(cause.error)))

    def give_up(self, request: Request, error: GTError) -> None:
        """End a request whose answer may take for ever; the client may ask again."""
        self._cluster.send_all()  # a worker forgets the piece once it has handled the Runs before
        self._drop(request)
        self._context.send(Failed(request.number, errors.to_wire(error)))

    def fail_all(self, cause: Cause) -> None:
        """A worker is lost: fail all requests."""
        for request in list(self.open.values()):
            self._drop(request)
            self._fail(request.number, cause)
