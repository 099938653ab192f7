"""Uploads on their way from a client to workers. Host copies are asked for a window at a time, so that none fills a queue.

A client sends what it was granted, in order; workers say how much they have taken in. What is under way between is bounded
for each session, so what another session sends a worker never waits behind more than that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from gt.dispatcher.cluster.workers import Worker
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.state.context import SessionContext
from gt.errors import ProtocolError
from gt.ir.layout import Box, piece_shape, read_boxes
from gt.ir.spec import Spec
from gt.wire.messages import CHUNK, Data, UploadChunk, UploadRequest, WindowUpdate

Source = tuple[str, Any]  # "host" and the tensor whose copy the client keeps, or "inline" and its bytes

SMALL = 64 << 10  # bytes of an upload of which workers do not say that they took it
WINDOW = 2 * CHUNK  # bytes of one session between its client and the workers: at twice that, others wait twice as long


@dataclass(slots=True)
class Upload:
    """One region of a host copy. granted, received: by and from the client; taken: by each worker it is for."""

    key: int
    total: int
    taken: dict[int, int]
    granted: int = 0
    received: int = 0
    empty_came: bool = False

    @property
    def done(self) -> int:
        """Bytes that are under way no more."""
        return min(self.taken.values(), default=self.received)

    @property
    def arrived(self) -> bool:
        return self.received >= self.total and (self.total > 0 or self.empty_came)


class Uploads:
    """Those of one session."""

    def __init__(self, context: SessionContext) -> None:
        self._context, self._cluster, self._queue = context, context.cluster, context.queue
        self.open: dict[int, Upload] = {}  # oldest first
        self.awaited = 0  # of these, not all here yet
        self.unsent: list[tuple[int, list[Worker]]] = []  # that nothing which is written takes yet, and for whom
        self.moved = 0.0  # when something of them came, or was taken

    def source(self, known: OpSchema, values: tuple, outs: list[int]) -> Source | None:
        """The bytes of an op that uploads: in this batch, or kept by the client under the tensor's id; None for another op."""
        if known.name != "gt.upload":
            return None
        spec, index, frames = known.template.outs[0].spec, values[0], self._queue.frames
        if type(index) is not int or index >= len(frames):
            raise ProtocolError(f"Ops.code uploads frame {index!r:.40} of {len(frames)}")
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
        if kind == "host":
            total = prod(piece_shape(parts)) * spec.itemsize
            living = [w.index for w in workers if not w.lost]
            self.expect(key, data, [[list(span) for span in box] for box in parts], total, living)
            return key
        flat = np.frombuffer(data, dtype=np.uint8).view(f"V{spec.itemsize}") if spec.nbytes else np.empty(0, "V1")
        piece = read_boxes(flat.reshape(spec.shape), parts).reshape(-1) if spec.nbytes else flat
        raw = memoryview(piece.view(np.uint8)).cast("B") if spec.nbytes else memoryview(b"")
        for worker in workers:
            for offset in range(0, 0 if worker.lost else max(len(raw), 1), CHUNK):
                chunk = raw[offset : offset + CHUNK]
                self._context.out(worker.peer, Data(key, offset, len(raw)), (chunk,) if len(chunk) else ())
        return key

    def expect(self, key: int, tensor: int, boxes: list, total: int, workers: Iterable[int]) -> None:
        """Ask the client for a region, and for as much of it now as there is room for."""
        upload = self.open[key] = Upload(key, total, dict.fromkeys(workers, 0))
        self.awaited += 1
        self.moved = self._cluster.now
        upload.granted = max(0, min(self._room(), total))
        self._context.send(UploadRequest(tensor, key, boxes, upload.granted))

    def _room(self) -> int:
        return WINDOW - sum(u.granted - u.done for u in self.open.values())

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
        if message.total != upload.total:
            raise ProtocolError(f"UploadChunk.total is {message.total}, the region has {upload.total} bytes")
        if message.offset != upload.received or (upload.total and not size) or message.offset + size > upload.granted:
            raise ProtocolError(
                f"UploadChunk.offset is {message.offset} with {size} bytes, "
                f"want {upload.received}, up to {upload.granted} at most"
            )
        upload.received += size
        self.moved = self._cluster.now
        upload.empty_came = True
        for index in upload.taken:
            worker = self._cluster.workers[index]
            self._context.out(worker.peer, Data(message.key, message.offset, message.total), frames)
        if upload.total <= SMALL:
            upload.taken.clear()
        if upload.arrived:
            self.awaited -= 1
            self._drop_if_done(upload)
        self.pump()  # also before its end: what no worker takes any more is under way no longer than until here

    def took(self, index: int, key: int, upto: int) -> None:
        """A worker has taken in so many bytes. ProtocolError if it was not sent them."""
        upload = self.open[key]
        if index not in upload.taken or not upload.taken[index] <= upto <= upload.received:
            raise ProtocolError(f"UploadProgress.upto is {upto} of upload {key}, of which {upload.received} bytes were sent")
        upload.taken[index] = upto
        self.moved = self._cluster.now
        self._drop_if_done(upload)
        self.pump()

    def waits(self) -> set[int]:
        """Workers that have still to take in what came of uploads."""
        return {index for upload in self.open.values() for index, upto in upload.taken.items() if upto < upload.received}

    def lose(self, index: int) -> None:
        """A worker is gone: nothing is on its way to it."""
        for upload in list(self.open.values()):
            if upload.taken.pop(index, None) is not None:
                self._drop_if_done(upload)
        self.pump()

    def _drop_if_done(self, upload: Upload) -> None:
        if upload.arrived and upload.done >= upload.total:
            del self.open[upload.key]

    def check(self) -> None:
        """No upload stands still while there is room for it: nobody else would have it go on."""
        assert self.awaited == sum(not upload.arrived for upload in self.open.values())
        assert self._room() <= 0 or all(upload.granted == upload.total for upload in self.open.values())
        assert not any(self._cluster.workers[index].lost for upload in self.open.values() for index in upload.taken)

    def close(self) -> dict[int, list[int]]:
        """The client is gone: keys that nobody will send the rest of, and the workers they were for."""
        left = {upload.key: list(upload.taken) for upload in self.open.values() if not upload.arrived}
        self.open.clear()
        self.awaited = 0
        return left
