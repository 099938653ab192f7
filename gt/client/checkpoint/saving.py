"""gt.save: a state of nested dicts with tensors becomes a folder of safetensors files, which workers write.

The client plans the files, writes their headers and its own tensors, and lends the files to workers of its host. Each worker
writes its pieces at their offsets. Workers elsewhere stream pieces to the client, which writes each to its offset.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from gt.client import current_session
from gt.client.checkpoint import safetensors_format, state_tree
from gt.client.checkpoint.folder import NewFolder, reason, sealed
from gt.client.checkpoint.safetensors_format import NAMES, WRITER, FileEntry
from gt.client.current_session import Current
from gt.client.device.meta import dtype_name
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.exchange.host_buffers import FileAssembly, write
from gt.client.reports import progress
from gt.client.session import Session
from gt.client.trace.uploads import values
from gt.errors import CheckpointError, GTError, ProgramError
from gt.wire.arena import place
from gt.wire.signals import Latch, uninterrupted

log = logging.getLogger("gt.client")

VERSION = 1  # version of the manifest's format
FILE_BYTES = 5_000_000_000  # largest file, unless one tensor is larger
ROWS = 256  # tensors of one request to the server
MAX_REQUESTS = 4  # such requests under way at once, while the program waits
COPIED_BYTES = 1 << 30  # bytes of tensors that workers copy at once for a save that streams them while the program goes on
_SET_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DEFAULT_SET, _MODEL_SET = "state", "model"


@dataclass(slots=True)
class _SavedTensor:
    """One tensor that is written. names: of its set; the first one is in the file, others name the same memory."""

    tensor: torch.Tensor
    names: list[str]
    entry: FileEntry | None = None


@dataclass
class _FileSet:
    """Files that one index describes: those of a model, or of an optimizer."""

    name: str
    tensors: dict[str, _SavedTensor] = field(default_factory=dict)  # by the name in the file
    memory: dict[tuple, str] = field(default_factory=dict)  # memory of a tensor -> name

    def add(self, wanted: str, tensor: torch.Tensor) -> str:
        """Take a tensor; the name that it has in the file."""
        # Tied tensors are written once. Empty ones all have address 0, and each is itself
        key = (
            (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device) if tensor.numel() else (id(tensor),)
        )
        known = self.memory.get(key)
        if known is not None:
            self.tensors[known].names.append(wanted)
            return known
        name, number = wanted, 1
        while name in self.tensors or name == "__metadata__":
            number += 1
            name = f"{wanted}#{number}"
        self.memory[key] = name
        self.tensors[name] = _SavedTensor(tensor, [name])
        return name

    def files(self) -> Iterator[tuple[str, list[str]]]:
        """Name and tensors of each file."""
        # In order, each file up to FILE_BYTES: the number of files is
        # in all their names, so they are divided before any is made
        shares: list[list[str]] = [[]]
        size = 0
        for name, saved in self.tensors.items():
            nbytes = saved.tensor.numel() * saved.tensor.element_size()
            if shares[-1] and size + nbytes > FILE_BYTES:
                shares.append([])
                size = 0
            shares[-1].append(name)
            size += nbytes
        for number, share in enumerate(shares, 1):
            yield f"{self.name}-{number:05d}-of-{len(shares):05d}.safetensors", share


class _SavedState:
    """A state as it is saved: its JSON, and its tensors by set."""

    def __init__(self, state: Any) -> None:
        if state_tree.has_state(state):
            state = state.state_dict()
        self.sets: dict[str, _FileSet] = {}
        self.described: dict[str, list] = {}  # in the manifest: [device, requires_grad]
        self._flat = _is_flat(state)
        self.tree = state_tree.encode(state, self._put)

    def _put(self, path: state_tree.Path, tensor: torch.Tensor) -> str:
        shown = state_tree.show(path)
        if torch.nn.parameter.is_lazy(tensor):
            raise CheckpointError(f"{shown} is a lazy module's, and has no shape yet: call the module once first")
        if tensor.device.type == "meta":
            raise CheckpointError(f"{shown} is on the meta device and has no values: initialise or load it first")
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "is a nested tensor" if tensor.is_nested else f"has layout {tensor.layout}"
            raise CheckpointError(f"{shown} {kind}, want a dense tensor")
        dtype = dtype_name(tensor.dtype)
        if dtype not in NAMES:
            cure = "torch.view_as_real" if tensor.is_complex() else "its bytes, by view(torch.uint8)"
            raise CheckpointError(f"{shown} has dtype {dtype}, want one of {', '.join(NAMES)}; try {cure}")
        tensor, grad = tensor.detach(), tensor.requires_grad
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if not isinstance(tensor, RemoteTensor):
            tensor = tensor.cpu()
        name, rest = (_MODEL_SET, path) if self._flat else (_DEFAULT_SET, path)
        if not self._flat and len(path) > 1 and isinstance(path[0], str) and _SET_NAME.fullmatch(path[0]):
            name, rest = path[0], path[1:]
        return self._add(name, rest, tensor, grad)

    def _add(self, name: str, rest: state_tree.Path, tensor: torch.Tensor, grad: bool) -> str:
        """Take a tensor into a set of files; the name of its entry."""
        files = self.sets.setdefault(name, _FileSet(name))
        entry = f"{name}/{files.add(state_tree.name_of(rest) or 'tensor', tensor)}"
        device = "remote" if isinstance(tensor, RemoteTensor) else "cpu"
        self.described.setdefault(entry, [device, grad])
        return entry

    def tensors(self) -> Iterator[_SavedTensor]:
        for files in self.sets.values():
            yield from files.tensors.values()

    @property
    def nbytes(self) -> int:
        return sum(saved.tensor.numel() * saved.tensor.element_size() for saved in self.tensors())


def _is_flat(state: Any) -> bool:
    """True for names and tensors of one model: the state of a module, or tensors without a dict of tensors beside them."""
    if not isinstance(state, Mapping) or hasattr(state, "_metadata"):  # torch's mark on a module's state
        return isinstance(state, Mapping)
    nested = any(state_tree.has_state(value) or (isinstance(value, Mapping) and _has_tensor(value)) for value in state.values())
    return not nested and any(isinstance(value, torch.Tensor) for value in state.values())


def _has_tensor(state: Mapping, depth: int = 0) -> bool:
    return depth < state_tree.MAX_DEPTH and any(
        isinstance(value, torch.Tensor) or (isinstance(value, Mapping) and _has_tensor(value, depth + 1))
        for value in state.values()
    )


class Save:
    """A save under way, or its end. `wait` waits for the end; `done` tells whether it has come."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._ended = Latch()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until the checkpoint is on disk, under its name. Raises the error that prevented it, once."""
        self._ended.wait()
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _begin(self, writer: _Writer) -> None:
        def run() -> None:
            try:
                writer.finish()
            except BaseException as error:
                self._error = error
                log.warning("gt.save to %s failed: %s", self.path, error)
            finally:
                self._ended.set()

        # No daemon: the interpreter's end waits for it
        self._thread = threading.Thread(target=run, name="gt-save")
        self._thread.start()


class _Current:
    """The save of this process that may still be writing."""

    save: Save | None = None  # that was begun last
    turn = threading.RLock()  # held from the end of the save before until the next one is known, or written


def save(state: Any, path: str | os.PathLike, *, wait: bool = True) -> Save:
    """Save a state in the folder `path`, in place of a checkpoint that is there.

    state: dicts, lists and tuples of tensors, numbers, texts and None, and objects with a state_dict, such as modules and
        optimizers. Each worker writes its own pieces.
    wait: False returns once workers have copied their pieces, or have them queued for writing; training goes on. Another save,
        gt.shutdown and the program's end wait for this one. Where pieces stream to the program, workers copy 1 GiB at most;
        the call returns once the rest is written.

    An interrupted save leaves the old checkpoint as it was. Raises CheckpointError for a state or path that cannot be saved.
    """
    if Current.recorder is not None and Current.recorder.tape is not None:
        raise ProgramError("gt.save cannot be called in a compiled function: call it between two steps")
    with _Current.turn:
        finish()
        saved, made = _SavedState(state), Save(os.fspath(path))
        # Once the main thread has ended, as in an atexit handler, nothing would wait for another thread
        wait = wait or not threading.main_thread().is_alive()
        if Current.recorder is not None and not isinstance(Current.recorder.session, Session):  # `gt plan`: there are no values
            made._ended.set()
        elif wait:
            with progress.bar(f"saving {os.path.basename(made.path) or made.path}", saved.nbytes) as tick:
                _Writer(saved, path, wait, tick).finish()
            made._ended.set()
        else:
            writer = _Writer(saved, path, wait)
            with uninterrupted():  # a save that nobody has begun would be waited for
                _Current.save = made
                if _finish_quietly not in current_session.on_disconnect:
                    current_session.on_disconnect.append(_finish_quietly)
                made._begin(writer)
    return made


def finish() -> None:
    """Wait for the save that is under way, and raise its error."""
    last = _Current.save  # it stays there: Ctrl-C leaves it under way, and no later save may overtake it
    if last is not None:
        last.wait()


def _finish_quietly() -> None:
    """Wait for the save that is under way; its error has been logged, and its handle keeps it."""
    if _Current.save is not None:
        _Current.save._ended.wait()


_Streamed = tuple[int, FileEntry, torch.Tensor]  # that the client is to write into the file of this descriptor


class _Writer:
    """One save: the constructor begins it, in the order of the program's ops; `finish` may be called by another thread."""

    def __init__(self, state: _SavedState, path: str | os.PathLike, wait: bool, tick: progress.Tick | None = None) -> None:
        self._state, self._wait, self._tick = state, wait, tick
        self._asked: deque[int] = deque()  # bytes of each request
        self._session: Session | None = None
        self._lent: list[int] = []
        self._requests: deque[int] = deque()
        self._streamed: deque[_Streamed] = deque()
        self._sums: dict[str, int] = {}  # crc32 of each file's header, or of an index
        self._folder = NewFolder(path)
        try:
            self._begin()
        except OSError as error:
            self._end()
            raise _named(error, self._folder) from None
        except BaseException:
            self._end()
            raise

    def _begin(self) -> None:
        remote: list[tuple[int, _SavedTensor]] = []
        self._folder.refuse(f"{name}.safetensors" for name in self._state.sets)
        for files in self._state.sets.values():
            index: dict[str, str] = {}
            for name, share in files.files():
                # Second names of tied tensors are metadata of the file: {"head.weight": "embed.weight"}
                names = {alias: saved for saved in share for alias in files.tensors[saved].names[1:] if alias != saved}
                aliases = {alias: saved for alias, saved in names.items() if alias != WRITER}
                rows = [(n, dtype_name(files.tensors[n].tensor.dtype), tuple(files.tensors[n].tensor.shape)) for n in share]
                header, entries = safetensors_format.layout(rows, {WRITER: "pt", **aliases})
                # The file has its full size from the start, so that workers can write their pieces in any order
                fd = self._folder.create(name, max(e.offset + e.nbytes for e in entries))
                os.pwrite(fd, header, 0)
                self._sums[name] = zlib.crc32(header)
                for entry in entries:
                    saved = files.tensors[entry.name]
                    saved.entry, index[entry.name] = entry, name
                    if isinstance(saved.tensor, RemoteTensor):
                        remote.append((fd, saved))
                    else:
                        _write_host(fd, entry, saved.tensor)
                        self._wrote(entry.nbytes)

            # The index, as transformers and others read it: which file has which tensor
            total = sum(saved.entry.nbytes for saved in files.tensors.values() if saved.entry is not None)
            body = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
            text = json.dumps(body, indent=1).encode()
            self._folder.put(f"{files.name}.safetensors.index.json", text)
            self._sums[f"{files.name}.safetensors.index.json"] = zlib.crc32(text)
        if remote:
            self._begin_remote(remote)

    def _begin_remote(self, remote: list[tuple[int, _SavedTensor]]) -> None:
        """Have workers write the tensors, or stream them to this process: copies of them, if the program goes on meanwhile."""
        recorder = current_session.current()
        self._session = session = recorder.session
        for _, saved in remote:
            current_session.check(saved.tensor)
        recorder.flush_ops()
        recorder.note_wait()
        numbers: dict[int, int] = {}
        for fd in dict.fromkeys(fd for fd, _ in remote):
            numbers[fd] = session.lend_file(fd, os.fstat(fd).st_size, True)
            self._lent.append(numbers[fd])
        # Workers that share this host's files write by themselves. A save that waits has a few requests under way at a time
        if all(session.shares_file(number) for number in numbers.values()):
            written = [(fd, saved) for fd, saved in remote if saved.tensor.numel()]
            for start in range(0, len(written), ROWS):
                part = written[start : start + ROWS]
                rows = [[s.tensor._ref.id, place(numbers[fd], s.entry.offset)] for fd, s in part if s.entry is not None]
                self._requests.append(session.begin_store(rows, not self._wait))
                self._asked.append(sum(s.entry.nbytes for _, s in part if s.entry is not None))
                if self._wait and len(self._requests) >= MAX_REQUESTS:
                    self._await_one()
            return
        # Some worker is elsewhere: all pieces come through this process
        streamed = [(fd, s.entry, s.tensor) for fd, s in remote if s.entry is not None and s.entry.nbytes]
        self._streamed.extend(streamed if self._wait else self._copied(streamed))
        recorder.flush_ops()

    def _copied(self, streamed: list[_Streamed]) -> list[_Streamed]:
        """Copies on the workers of as many tensors as they may hold twice; the others are streamed now."""
        room = COPIED_BYTES
        fits: list[_Streamed] = []
        others: list[_Streamed] = []
        # Small ones first: the most tensors are copied, and fewest are waited for
        for row in sorted(streamed, key=lambda row: row[1].nbytes):
            room -= row[1].nbytes
            (fits if room >= 0 else others).append(row)
        for row in others:
            self._stream(*row)
        with torch.no_grad():
            return [(fd, entry, tensor.clone()) for fd, entry, tensor in fits]

    def _await_one(self) -> None:
        assert self._session is not None
        request = self._requests.popleft()
        try:
            shared = self._session.wait(request, self._tick)["shared"]
        except CheckpointError as error:  # raised for a worker, which knows no names of files
            raise CheckpointError(f"{self._folder.target} cannot be saved: {error}") from None
        if not shared:
            raise CheckpointError("a worker has joined that does not share this host's files: save again")
        self._wrote(self._asked.popleft())

    def _wrote(self, nbytes: int) -> None:
        if self._tick is not None:
            self._tick(nbytes)

    def finish(self) -> None:
        """Wait until all is written, and put the folder in its place."""
        try:
            while self._requests:
                self._await_one()
            while self._streamed:  # a copy is freed once it is written
                self._stream(*self._streamed.popleft())
            self._return_files()
            state = self._state
            manifest = {
                "format": "gt", "version": VERSION, "sets": sorted(state.sets), "tensors": state.described, "state": state.tree,
                "files": {name: os.fstat(fd).st_size for name, fd in sorted(self._folder.files.items())},
                "sums": dict(sorted(self._sums.items())),
            }  # fmt: skip
            self._folder.commit(sealed(manifest))
        except OSError as error:
            raise _named(error, self._folder) from None
        finally:
            self._end()

    def _stream(self, fd: int, entry: FileEntry, tensor: torch.Tensor) -> None:
        """Fetch a tensor into the file."""
        assert self._session is not None and isinstance(tensor, RemoteTensor)
        into = partial(FileAssembly, fd, entry.offset, entry.nbytes)
        shape, dtype = self._session.fetch_into(tensor._ref.id, into)
        if tuple(shape) != entry.shape or dtype != entry.dtype:
            raise CheckpointError(f"{entry.name} is {dtype}{list(shape)}, it was to be {entry.dtype}{list(entry.shape)}")
        self._wrote(entry.nbytes)

    def _return_files(self) -> None:
        for number in self._lent:
            if number and self._session is not None:
                self._session.take_back_file(number)
        self._lent.clear()

    def _end(self) -> None:
        """Let go of everything; without a commit the old checkpoint stays."""
        for request in self._requests:
            assert self._session is not None
            self._session.forget(request)
        self._requests.clear()
        self._streamed.clear()
        self._return_files()
        self._folder.remove_incomplete()


def _write_host(fd: int, entry: FileEntry, tensor: torch.Tensor) -> None:
    """Write a tensor of this process."""
    if entry.nbytes:
        write(fd, memoryview(np.ascontiguousarray(values(tensor)).reshape(-1).view(np.uint8)), entry.offset)


def _named(error: OSError, folder: NewFolder) -> Exception:
    """An error of the system as a CheckpointError that names the checkpoint; GT's own, as WorkerLost, as it is."""
    if isinstance(error, GTError):
        return error
    return CheckpointError(f"{folder.target} cannot be saved: {reason(error)}")
