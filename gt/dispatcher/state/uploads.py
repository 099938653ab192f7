"""Uploads on their way from a client to workers: by shared memory where all workers of an upload share it, else in messages.

Workers read a host copy in an arena's block there. The client is told when the last of them has read it. A tensor in a file is
read ahead of the instructions that use it, which are held back meanwhile: its file system might never answer. Any other host
copy is asked for a window at a time, so that none fills a queue. A client sends what it was granted, in order. Workers report
how much they have received. What is under way between is bounded for each session, so what another session sends a worker
never waits behind more than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.state.arenas import BlockPlace, SessionArenas
from gt.dispatcher.state.context import SessionContext
from gt.errors import ProtocolError
from gt.ir.layout import Box, piece_shape, read_boxes
from gt.ir.spec import Spec
from gt.wire.arena import upload_index
from gt.wire.messages import CHUNK, UNREADABLE, Data, Release, UploadChunk, UploadRequest, UseBlock, WindowUpdate

Source = tuple[str, Any]  # "host" and the tensor whose copy the client keeps, or "inline" and its bytes

SMALL_BYTES = 64 << 10  # bytes of an upload of which workers do not say that they took it
WINDOW_BYTES = 2 * CHUNK  # bytes of one session between its client and the workers: at twice that, others wait twice as long


# Four counts of bytes, each at most the one before it:
#   total >= granted (the client may send) >= received (from the client) >= taken[worker] (that the worker has confirmed)
# granted - done bytes are under way. Their sum over the open uploads is at most WINDOW_BYTES: so a slow worker slows its client
# down, and the dispatcher's memory does not fill up.
@dataclass(slots=True)
class Upload:
    """One region of a host copy. granted, received: by and from the client; taken: by each worker it is for.

    given_up: its bytes are passed on no more.
    """

    key: int
    total: int
    taken: dict[int, int]
    granted: int = 0
    received: int = 0
    empty_came: bool = False
    given_up: bool = False

    @property
    def awaited(self) -> bool:
        """True if no instruction that uses it is sent before it has arrived."""
        return not (self.arrived or self.given_up)

    @property
    def done(self) -> int:
        """Bytes that are under way no more."""
        return min(self.taken.values(), default=self.received)

    @property
    def arrived(self) -> bool:
        return self.received >= self.total and (self.total > 0 or self.empty_came)


@dataclass(slots=True)
class BlockUpload:
    """One region of a host copy that is in an arena. workers: those that have not read it yet."""

    key: int
    tensor: int
    place: BlockPlace
    spec: Spec
    boxes: list
    workers: set[int]

    @property
    def nbytes(self) -> int:
        """Size of the region."""
        return prod(piece_shape(self.boxes)) * self.spec.itemsize

    @property
    def awaited(self) -> bool:
        """True if no instruction that uses it is sent before it is read."""
        return self.place.arena.in_file and bool(self.workers)


class Uploads:
    """Uploads of one session, by key while they are under way."""

    def __init__(self, context: SessionContext, arenas: SessionArenas) -> None:
        self._context, self._cluster, self._queue, self._arenas = context, context.cluster, context.queue, arenas
        self.open: dict[int, Upload] = {}  # oldest first
        self.reads: dict[int, BlockUpload] = {}  # by key: uploads that workers read from arenas
        self._undecided: list[BlockUpload] = []  # uploads that wait for workers to tell whether they share the arena
        self._places: dict[int, BlockPlace] = {}  # tensor -> place of its host copy in an arena
        self._readers: Counter[int] = Counter()  # tensor -> unfinished reads of its host copy
        self._released: set[int] = set()  # tensors whose host copy the client may release after these reads
        self.awaited = 0  # uploads that are incomplete or undecided
        self.unsent: list[tuple[int, list[Worker]]] = []  # (key, workers) of uploads that no written instruction uses yet
        self.moved = 0.0  # time of the last progress of any upload

    def source(self, known: OpSchema, values: tuple, outs: list[int]) -> Source | None:
        """The bytes of an op that uploads: in this batch, or kept by the client under the tensor's id; None for another op."""
        if known.name != "gt.upload":
            return None
        # The op's value: index of a frame of this batch; -1 for a copy that the client keeps; below that, a place in an arena.
        spec, index, frames = known.template.outs[0].spec, values[0], self._queue.frames
        if type(index) is not int or index >= len(frames):
            raise ProtocolError(f"Ops.code uploads frame {index!r:.40} of {len(frames)}")
        if index < -1 and spec is not None:
            place = self._arenas.readable(upload_index(index), spec.nbytes)
            if place is None:
                raise ProtocolError(f"Ops.code uploads from place {upload_index(index)}, where no arena is open")
            self._places[outs[0]] = place
        if index < 0:
            return "host", outs[0]
        if spec is None or len(frames[index]) != spec.nbytes:
            raise ProtocolError(f"frame {index} has {len(frames[index])} bytes, want those of {spec and spec.text()}")
        return "inline", frames[index]

    def begin(self, source: Source, spec: Spec, parts: list[Box], workers: list[Worker]) -> int:
        """Key under which these workers will get the boxes of an upload."""
        key = self._cluster.key()
        kind, data = source
        self._context.uploaded += spec.nbytes
        self.unsent.append((key, workers))

        # A copy that the client keeps: workers read it from shared memory, or the client sends the region in messages.
        if kind == "host":
            total = prod(piece_shape(parts)) * spec.itemsize
            living = [w.index for w in workers if not w.lost]
            boxes, place = [[list(span) for span in box] for box in parts], self._places.get(data)
            if place is None:
                self.expect(key, data, boxes, total, living)
            else:
                self._readers[data] += 1
                self._hand_over(BlockUpload(key, data, place, spec, boxes, set(living)))
            return key

        # Bytes that came with the batch. As items without a type (V4 for f32), so that any dtype is cut into boxes alike.
        flat = np.frombuffer(data, dtype=np.uint8).view(f"V{spec.itemsize}") if spec.nbytes else np.empty(0, "V1")
        piece = read_boxes(flat.reshape(spec.shape), parts).reshape(-1) if spec.nbytes else flat
        raw = memoryview(piece.view(np.uint8)).cast("B") if spec.nbytes else memoryview(b"")
        for worker in workers:
            for offset in range(0, 0 if worker.lost else max(len(raw), 1), CHUNK):
                chunk = raw[offset : offset + CHUNK]
                self._context.out(worker.peer, Data(key, offset, len(raw)), (chunk,) if len(chunk) else ())
        return key

    # ---- in arenas

    def _hand_over(self, upload: BlockUpload) -> None:
        """Have workers read a block, or ask the client for messages if some do not share it; later if that is undecided."""
        # Three answers of the workers: not told yet, all share the arena, or some do not, and then all get messages.
        if self._arenas.undecided(upload.place, upload.workers):
            self._undecided.append(upload)
            self.awaited += 1
            self.moved = self._cluster.now
        elif self._arenas.shared(upload.place, upload.workers):
            spec, (arena, offset) = upload.spec, upload.place
            block = UseBlock(upload.key, arena.offer.arena, offset, list(spec.shape), spec.itemsize, upload.boxes, False)
            for index in upload.workers:
                self._context.out(self._cluster.workers[index].peer, block, ())
            self._arenas.bytes_shared += upload.nbytes * len(upload.workers)
            self.reads[upload.key] = upload
            if upload.awaited:
                self.awaited += 1
                self.moved = self._cluster.now
            self._end_if_read(upload)
        else:
            self.expect(upload.key, upload.tensor, upload.boxes, upload.nbytes, upload.workers)
            self._end_read(upload.tensor)

    def decide(self) -> None:
        """A worker has told whether it shares an arena, or is gone."""
        undecided, self._undecided = self._undecided, []
        self.awaited -= len(undecided)
        for upload in undecided:
            self._hand_over(upload)

    def _read(self, upload: BlockUpload, index: int) -> None:
        """A worker has read it, or is gone."""
        # `awaited` is computed: it may change with the last worker.
        awaited = upload.awaited
        upload.workers.discard(index)
        self.awaited -= awaited and not upload.awaited
        self._end_if_read(upload)

    def give_up_files(self) -> None:
        """Await no tensor in a file: the instructions that use it are sent, and fail where it is not read."""
        for upload in [upload for upload in self.reads.values() if upload.awaited]:
            self._cancel(upload.key, upload.workers)
            for index in list(upload.workers):
                self._read(upload, index)

    def give_up(self, keys: set[int]) -> None:
        """Await none of these host copies: the instructions that use them are sent, and fail.

        The client sends the rest for nobody.
        """
        for upload in [self.open[key] for key in keys & self.open.keys()]:
            if upload.awaited:
                self._cancel(upload.key, upload.taken)
                upload.taken, upload.given_up = {}, True
                self.awaited -= 1
        for read in [read for read in self._undecided if read.key in keys]:
            self._cancel(read.key, read.workers)
            self._undecided.remove(read)
            self.awaited -= 1
            self._end_read(read.tensor)
        self.pump()

    def _cancel(self, key: int, workers: Iterable[int]) -> None:
        for index in workers:
            self._context.out(self._cluster.workers[index].peer, Data(key, 0, -1), ())

    @property
    def files(self) -> dict[str, set[int]]:
        """Names of files that workers have still to open or to read from, and these workers."""
        waits = self._arenas.opening
        for upload in self.reads.values():
            if upload.awaited:
                waits.setdefault(upload.place.arena.name, set()).update(upload.workers)
        return waits

    def _end_if_read(self, upload: BlockUpload) -> None:
        if not upload.workers:
            del self.reads[upload.key]
            self._end_read(upload.tensor)

    def _end_read(self, tensor: int) -> None:
        # The client may overwrite or free a host copy once it is released, so the last read has to end first.
        self._readers[tensor] -= 1
        if not self._readers[tensor]:
            del self._readers[tensor]
            if tensor in self._released:
                self._released.discard(tensor)
                self.release(tensor)

    def release(self, tensor: int) -> None:
        """No recipe needs the host copy any more: tell the client, once no worker reads it."""
        if self._readers.get(tensor):
            self._released.add(tensor)
            return
        self._places.pop(tensor, None)
        self._context.send(Release([tensor]))

    # ---- in messages

    def expect(self, key: int, tensor: int, boxes: list, total: int, workers: Iterable[int]) -> None:
        """Ask the client for a region, of which it may send now as much as the window has room for."""
        upload = self.open[key] = Upload(key, total, dict.fromkeys(workers, 0))
        self.awaited += 1
        self.moved = self._cluster.now
        upload.granted = max(0, min(self._room(), total))
        self._context.send(UploadRequest(tensor, key, boxes, upload.granted))

    def _room(self) -> int:
        return WINDOW_BYTES - sum(u.granted - u.done for u in self.open.values())

    def pump(self) -> None:
        """Grant as many bytes as the window has room for, to the oldest first."""
        room = self._room()
        for upload in self.open.values():
            step = min(room, upload.total - upload.granted)
            if step > 0:
                upload.granted += step
                self._context.send(WindowUpdate(upload.key, upload.granted))
                room -= step
            if room <= 0:
                return

    def host(self, message: UploadChunk, frames: tuple) -> None:
        """Bytes from the client: on to the workers. ProtocolError for what was not asked for."""
        upload = self.open.get(message.key)
        size = sum(len(frame) for frame in frames)
        if upload is None or upload.arrived:
            raise ProtocolError(f"UploadChunk.key {message.key} was not asked for")

        # The client cannot read its file. Workers are told, or their instructions would wait for ever.
        if message.total == UNREADABLE and not size:
            for index in upload.taken:
                self._context.out(self._cluster.workers[index].peer, Data(message.key, 0, UNREADABLE), ())
            del self.open[message.key]
            self.awaited -= upload.awaited
            self.moved = self._cluster.now
            self.pump()
            return
        if message.total != upload.total:
            raise ProtocolError(f"UploadChunk.total is {message.total}, the region has {upload.total} bytes")
        if message.offset != upload.received or (upload.total and not size) or message.offset + size > upload.granted:
            raise ProtocolError(
                f"UploadChunk.offset is {message.offset} with {size} bytes, "
                f"want {upload.received}, up to {upload.granted} at most"
            )

        awaited = upload.awaited
        upload.received += size
        self.moved = self._cluster.now
        upload.empty_came = True
        for index in upload.taken:
            worker = self._cluster.workers[index]
            self._context.out(worker.peer, Data(message.key, message.offset, message.total), frames)

        # Workers do not confirm small uploads: without `taken`, bytes are done as soon as they are received.
        if upload.total <= SMALL_BYTES:
            upload.taken.clear()
        if upload.arrived:
            self.awaited -= awaited
            self._drop_if_done(upload)
        # Also before its end: if all its workers are lost, its bytes are done on arrival, which makes room at once.
        self.pump()

    def took(self, index: int, key: int, upto: int) -> None:
        """A worker has taken in so many bytes. ProtocolError if it was not sent them."""
        # A block is read at once and whole.
        read = self.reads.get(key)
        if read is not None:
            if index not in read.workers or upto != read.nbytes:
                raise ProtocolError(f"UploadProgress.upto is {upto} of upload {key}, a block of {read.nbytes} bytes")
            self._read(read, index)
            self.moved = self._cluster.now
            return

        # Bytes in messages are confirmed in steps.
        upload = self.open[key]
        if upload.given_up:  # said before the worker knew
            return
        if index not in upload.taken or not upload.taken[index] <= upto <= upload.received:
            raise ProtocolError(f"UploadProgress.upto is {upto} of upload {key}, of which {upload.received} bytes were sent")
        upload.taken[index] = upto
        self.moved = self._cluster.now
        self._drop_if_done(upload)
        self.pump()

    def waits(self) -> set[int]:
        """Workers that have not taken in all received bytes of uploads, or not told whether they share an arena."""
        waits = {index for upload in self.open.values() for index, upto in upload.taken.items() if upto < upload.received}
        return waits.union(self._arenas.asked, *(upload.workers for upload in self.reads.values() if upload.awaited))

    def lose(self, index: int) -> None:
        """A worker is gone: nothing is on its way to it."""
        for read in self._undecided:
            read.workers.discard(index)
        for read in list(self.reads.values()):
            self._read(read, index)
        self.decide()
        for upload in list(self.open.values()):
            if upload.taken.pop(index, None) is not None:
                self._drop_if_done(upload)
        self.pump()

    def _drop_if_done(self, upload: Upload) -> None:
        if upload.arrived and upload.done >= upload.total:
            del self.open[upload.key]

    def check(self) -> None:
        """No upload stands still while there is room for it: nobody else would have it go on."""
        files = sum(upload.awaited for upload in self.reads.values())
        assert self.awaited == sum(upload.awaited for upload in self.open.values()) + len(self._undecided) + files
        assert all(self._arenas.undecided(upload.place, upload.workers) for upload in self._undecided)
        assert all(upload.workers and self._readers[upload.tensor] for upload in self.reads.values())
        assert self._room() <= 0 or all(upload.granted == upload.total for upload in self.open.values())
        assert not any(self._cluster.workers[index].lost for upload in self.open.values() for index in upload.taken)

    def close(self) -> dict[int, list[int]]:
        """The client is gone: keys that nobody will send the rest of, and the workers they were for."""
        left = {upload.key: list(upload.taken) for upload in self.open.values() if not upload.arrived}
        self.open.clear()
        for table in (self.reads, self._undecided, self._places, self._readers, self._released):
            table.clear()
        self.awaited = 0
        return left
