"""Blocks of clients' arenas and files: this worker reads uploads from them and writes fetched pieces into them.

An arena is mapped when it is offered. A GPU's worker pins it at its first use, in the executing thread, since the driver blocks
others meanwhile. The dispatcher names arenas by keys of its own, so that no session reaches another's.

All sessions share the worker's address space and its descriptors. An arena or file beyond a share of these is not opened, and
bytes are sent in messages instead. An arena counts until no block keeps it mapped.
"""

from __future__ import annotations

import logging
import resource
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gt.errors import ProtocolError
from gt.ir.layout import Boxes, piece_shape, read_boxes, write_boxes
from gt.ir.spec import Spec
from gt.wire.arena import PeerArena, check_boxes, tensor
from gt.wire.messages import ArenaOpened, CloseArenas, Data, OfferArena, OfferFile, Piece, UploadProgress, UseBlock
from gt.worker.engine.base import Engine, Tensor
from gt.worker.files import FileBlock, WorkerFiles
from gt.worker.process.completions import Completions
from gt.worker.process.memory_budget import Budget
from gt.worker.uploads import UploadBuffers

log = logging.getLogger("gt.worker")
MAX_PINNED_BYTES = 128 << 20  # an arena up to this size is pinned whole; a larger one only for a tensor of half of it
MAX_MAPPED_BYTES = 16 << 40  # all arenas together: an eighth of an address space of 47 bits
MAX_MAPPED_ARENAS = 8192  # arenas: an eighth of the mappings that Linux gives a process
DESCRIPTOR_SHARE = 0.5  # part of the process's descriptors: an arena takes one, a file up to two


@dataclass(slots=True)
class _OpenedArena:
    """An arena that this worker has mapped. unpin: undoes its pinning; None if it is not pinned."""

    memory: PeerArena
    unpin: Callable[[], None] | None = None
    pinnable: bool = True  # False once that was tried, or the arena is closed


@dataclass(frozen=True, slots=True)
class _TensorBlock:
    """One tensor in an arena, of which this worker has the boxes. It keeps the arena mapped until its instruction has run."""

    key: int
    arena: _OpenedArena
    offset: int
    whole: np.ndarray
    boxes: Boxes

    @property
    def nbytes(self) -> int:
        """Size of the worker's piece."""
        count = self.whole.itemsize
        for extent in piece_shape(self.boxes):
            count *= extent
        return count

    def populate(self) -> None:
        """Map its pages; MemoryError if there is no memory for them."""
        self.arena.memory.populate(self.offset, self.offset + self.whole.nbytes)

    def bytes(self) -> np.ndarray:
        """The piece's bytes, row-major: in the arena if they are contiguous there, else a copy."""
        return read_boxes(self.whole, self.boxes).reshape(-1).view(np.uint8)

    def in_place(self) -> np.ndarray | None:
        """The piece's bytes in the arena, None if they are not contiguous there."""
        if len(self.boxes) > 1:
            return None
        # One box may be one run of memory (rows of dim 0); several boxes never are.
        index: tuple = tuple(slice(start, stop) for start, stop in self.boxes[0])
        part = self.whole[index + (...,)]  # the ellipsis keeps a 0-dim result an array
        return part.reshape(-1).view(np.uint8) if part.flags.c_contiguous else None


@dataclass
class WorkerArenas:
    """Arenas of clients by the dispatcher's key. The I/O thread calls `receive` and `forget_read`, the other the rest."""

    send: Callable[..., None]
    engine: Engine
    uploads: UploadBuffers
    budget: Budget
    _arenas: dict[int, _OpenedArena] = field(default_factory=dict)
    _mapped: weakref.WeakSet[PeerArena] = field(default_factory=weakref.WeakSet)  # also arenas that are closed by now
    _reads: dict[int, _TensorBlock] = field(default_factory=dict)  # by key of an upload
    _writes: dict[int, _TensorBlock | FileBlock] = field(default_factory=dict)  # by key of a fetched piece

    def __post_init__(self) -> None:
        self._progress: Completions[UploadProgress] = Completions(self.send)
        self.files = WorkerFiles(self.send, self.engine, self.budget, self.uploads)

    def receive(self, message: OfferArena | OfferFile | UseBlock) -> None:
        """Handle a message of the dispatcher."""
        if isinstance(message, UseBlock):
            self._expect(message)
        else:
            self._open(message)

    def _open(self, message: OfferArena | OfferFile) -> None:
        """Map an arena or have a file opened, if it is proved to be its client's."""
        try:
            if isinstance(message, OfferArena):
                self._check_room(message.nbytes)
                arena = PeerArena(message)
                self._mapped.add(arena)
                self._arenas[message.arena] = _OpenedArena(arena)
            else:
                owner = self._arenas.get(message.owner)
                if owner is None:
                    raise OSError(f"the arena {message.owner} of the file's owner is not open")
                self._check_room(0)
                self.files.open(owner.memory.offer, message)
                return
        except (OSError, ValueError, OverflowError) as error:
            log.info("arena %d is not used: %s", message.arena, error)
            self.send(ArenaOpened(message.arena, False))
            return
        self.send(ArenaOpened(message.arena, True))

    def _check_room(self, nbytes: int) -> None:
        """OSError if another arena of this size, or a file, would leave too little for all else that this process does."""
        # Also arenas that are closed and still mapped by a block under way: a client could else open and close without limit.
        mapped, files = [arena.nbytes for arena in self._mapped], self.files.threads.files
        descriptors = DESCRIPTOR_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if (
            len(mapped) + 2 * files >= descriptors
            or len(mapped) >= MAX_MAPPED_ARENAS
            or sum(mapped) + nbytes > MAX_MAPPED_BYTES
        ):
            raise OSError(f"there is no room beside {files} files and {len(mapped)} arenas of {sum(mapped)} bytes in all")

    def _expect(self, message: UseBlock) -> None:
        """An instruction will read or write a block. What is wrong with it fails that instruction."""
        try:
            opened = self._arenas.get(message.arena)
            if opened is None and message.arena in self.files.opened:
                lent = self.files.block(message)
                if message.write:
                    self._writes[message.key] = lent
                else:
                    self.files.begin_read(lent)
                return
            if opened is None:
                raise ProtocolError(f"arena {message.arena} is not open")
            whole = tensor(opened.memory.bytes, message.offset, tuple(message.shape), message.itemsize)
            block = _TensorBlock(message.key, opened, message.offset, whole, check_boxes(message.boxes, whole.shape))
        except ProtocolError as error:
            log.warning("block of %d: %s", message.key, error)
            self._cancel(message.key)
            return
        (self._writes if message.write else self._reads)[message.key] = block

    def _cancel(self, key: int) -> None:
        self.uploads.receive(Data(key, 0, -1), None)

    def forget_read(self, key: int) -> None:
        """Nobody will read this upload."""
        self._reads.pop(key, None)

    def forget_write(self, key: int) -> None:
        """Nobody waits for this fetched piece, and all Runs that write it are done."""
        self._writes.pop(key, None)
        self.files.forget_write(key)

    # ---- executing thread

    def take_read(self, key: int) -> _TensorBlock | None:
        """The block of an upload; None if its bytes are received by messages, or read from a file meanwhile."""
        return self._reads.pop(key, None)

    def take_write(self, key: int) -> _TensorBlock | FileBlock | None:
        """The block of a fetched piece; None if it is sent in messages."""
        return self._writes.pop(key, None)

    def read(self, block: _TensorBlock, spec: Spec) -> Tensor:
        """A tensor of the block's values. The client may use the block again once it is read, or the read has failed."""
        wait = None
        try:
            if block.nbytes != spec.nbytes:
                raise ValueError(f"{block.nbytes} bytes were sent for {spec.text()}, want {spec.nbytes}")
            self.budget.need(spec.nbytes)
            self.budget.hold(spec.nbytes)
            copies, part = self.engine.copies, block.in_place()
            # Pinned: the device copies straight out of the arena, and `wait` tells when the client may reuse the block.
            if copies is not None and part is not None and spec.nbytes and self._pinned(block):
                made, wait = copies.upload(part, spec)
                return made
            block.populate()
            if part is not None and copies is None:  # the engine takes over the buffer, and this one is the client's
                buffer = np.empty(len(part), np.uint8)
                np.copyto(buffer, part)
                part = buffer
            return self.engine.upload(block.bytes() if part is None else part, spec)
        finally:
            self._progress.add(UploadProgress(block.key, block.nbytes), fence=wait)

    def write(self, block: _TensorBlock | FileBlock, source: Tensor, seq: int) -> None:
        """Write a tensor's values into the block, and answer for the piece. seq: of the op that asks for it."""
        if isinstance(block, FileBlock):
            self.files.write(block, source, seq)
            return
        spec = self.engine.spec(source)
        if spec.nbytes == block.nbytes > 0:  # the dispatcher compares them too
            copies, part = self.engine.copies, block.in_place()
            if copies is not None and part is not None and self._pinned(block):
                copies.download(source, part)
            else:
                block.populate()
                local = np.frombuffer(self.engine.view(self.engine.packed(source)), np.uint8)
                write_boxes(block.whole, block.boxes, local.view(block.whole.dtype))
        self.send(Piece(block.key, spec.nbytes, spec.nbytes))

    def _pinned(self, block: _TensorBlock) -> bool:
        opened, copies = block.arena, self.engine.copies
        # Pinning allocates the whole arena: a client may offer a large one and use little of it
        small = opened.memory.nbytes <= max(MAX_PINNED_BYTES, 2 * block.whole.nbytes)
        if opened.pinnable and copies is not None and small:
            opened.pinnable = False
            try:
                opened.unpin = copies.pin(opened.memory.bytes)
            except RuntimeError as error:
                log.warning("an arena of %d bytes cannot be pinned: %s", opened.memory.nbytes, error)
        return opened.unpin is not None

    def close(self, message: CloseArenas) -> None:
        """Take no new blocks of these arenas. They are unmapped with the last of their blocks.

        A Run that was sent later, when its turn had come, may still use a block. Without the block a fetched piece would go in
        messages, which the dispatcher does not expect.
        """
        for arena in message.arenas:
            opened = self._arenas.pop(arena, None)
            self.files.close(arena)
            if opened is not None:
                self.files.leave(arena)
                opened.pinnable = False
                unpin, opened.unpin = opened.unpin, None
                if unpin is not None:
                    unpin()

    def end(self) -> None:
        """Send no more."""
        self._progress.close()
        self._reads.clear()
        self._writes.clear()
        self.files.end()
