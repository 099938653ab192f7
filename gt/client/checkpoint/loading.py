"""gt.load: reads checkpoints of gt.save and the safetensors files of others; workers read their own pieces.

All headers are read and compared before anything else. Then remote tensors are made that name places in files. Each worker
reads its piece once an op has decided the tensor's layout.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gt.client import current_session
from gt.client.checkpoint import optimizer_state, restoring, safetensors_format, saving, state_tree
from gt.client.checkpoint.folder import MANIFEST, MAX_JSON_BYTES, find, is_sealed, reason, watched
from gt.client.checkpoint.safetensors_format import FileEntry
from gt.client.current_session import Current
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.exchange.host_buffers import Frames, file_frames
from gt.client.groups import loss_scale
from gt.client.reports import progress
from gt.client.session import Session
from gt.client.trace.uploads import upload_from_file
from gt.errors import CheckpointError, GTError, ProgramError
from gt.ir.layout import Boxes
from gt.ir.spec import DTYPES
from gt.wire.arena import place

MAX_COPIED_BYTES = 16 << 20  # of tensors that were read, before those that have been copied are freed
MAX_SHOWN_PROBLEMS = 20  # of files, in an error
MAX_READS = 100  # tries to read a checkpoint that others replace meanwhile
_INDEX = ".safetensors.index.json"
_DTYPES = {name: getattr(torch, name) for name in safetensors_format.NAMES}
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def load(path: str | os.PathLike, into: Any = None, *, device: str | None = None, strict: bool = True) -> Any:
    """The state of a checkpoint: a folder of gt.save, a folder of transformers, or one safetensors file.

    Tensors that were remote when they were saved are remote again, and so are those of other libraries' files. Their first use
    decides their layout.

    into: modules and optimizers, or dicts and lists of these and of tensors. They get the values of the same names. Parameters
        on the meta device become remote ones. The whole state is returned as well.
    strict: False leaves alone what only `into` or only the checkpoint has; tensors of both must have one shape all the same.
    device: "cpu" reads all tensors into this process, without workers; "remote" makes all remote.

    CheckpointError names all that is wrong with the files, or does not fit `into`, before anything is changed.
    """
    if Current.recorder is not None and Current.recorder.tape is not None:
        raise ProgramError("gt.load cannot be called in a compiled function: call it between two steps")
    if device not in (None, "cpu", "remote"):
        raise ValueError(f"device is {device!r}, want 'cpu', 'remote', or None for the devices of the saved tensors")
    saving.finish()
    with contextlib.ExitStack() as opened:
        where, state, files = _read_unreplaced(path, opened, device)
        optimizer_state.note(files.remote)
        if into is not None:
            files.wait_for_copies()  # errors of earlier ops are raised before anything is changed
            restoring.restore(into, state, where, files.unread, strict)
            if files.loss_scale and restoring.trains(into):
                loss_scale.restore(files.loss_scale)
    return state


def _read_unreplaced(path: str | os.PathLike, opened: contextlib.ExitStack, device: str | None) -> tuple[Path, Any, _Files]:
    """The folder, its state and files, all files of one save even if others save to this path meanwhile."""
    for _ in range(MAX_READS):
        # Read all, then look whether it is still the same folder: a save
        # replaces it by one rename, and files of two saves would be mixed
        try:
            where = find(path)
            with watched(where) as replaced, contextlib.ExitStack() as attempt:
                files = _Files(attempt, device, attempt.enter_context(progress.bar(f"loading {where.name}")))
                try:
                    state = _read(where, files)
                except (CheckpointError, OSError) as error:
                    if replaced() or find(path) != where:
                        continue
                    raise (error if isinstance(error, GTError) else CheckpointError(f"{where}: {reason(error)}")) from None
                if not replaced() and find(path) == where:
                    # Good: files stay open beyond this attempt, until the caller's stack ends
                    opened.push(attempt.pop_all())
                    return where, state, files
        except FileNotFoundError:  # replaced before it was opened
            continue
        except GTError:
            raise
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path!s:.1000} cannot be read: {reason(error)}") from None
    raise CheckpointError(f"{path} was replaced by others {MAX_READS} times while it was read: load it when they have ended")


class LoadedFile:
    """A file that is open, and lent to workers once one of its tensors is remote. It is closed with its last use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd, self.nbytes = safetensors_format.open_file(path)
        self.number = -1  # among the session's arenas, 0 if workers do not share it
        self._session: Session | None = None
        self._uses = 1  # by gt.load, and by tensors
        self._lock = threading.Lock()

    def lend(self, session: Session) -> int:
        if self.number < 0:
            self._session, self.number = session, session.lend_file(self.fd, self.nbytes, False)
        return self.number

    def use(self) -> None:
        with self._lock:
            self._uses += 1

    def release(self) -> None:
        with self._lock:
            self._uses -= 1
            if self._uses:
                return
        # The last use. Workers are told first: once the descriptor is closed, its number may be another file's
        if self._session is not None and self.number > 0:
            self._session.take_back_file(self.number)
        os.close(self.fd)


@dataclass(frozen=True)
class _Source:
    """A tensor in a file, for an upload: see kept_uploads.FileTensor."""

    file: LoadedFile
    entry: FileEntry
    place: int

    def region(self, boxes: Boxes) -> tuple[int, Frames]:
        entry = self.entry
        return file_frames(self.file.fd, entry.offset, entry.shape, DTYPES[entry.dtype][0], boxes)

    def release(self) -> None:
        self.file.release()


class _Files:
    """Files of one checkpoint, each opened and checked once. They are closed with `opened`, or with their last tensor."""

    def __init__(self, opened: contextlib.ExitStack, device: str | None, tick: progress.Tick) -> None:
        self._opened, self._device, self._tick = opened, device, tick
        self.remote: list[RemoteTensor] = []  # tensors that were made
        self.loss_scale: dict[str, torch.Tensor] = {}  # that the session had, with `precision: fp16`
        self._sources: dict[int, tuple[LoadedFile, FileEntry, torch.dtype]] = {}  # by id of a loaded tensor
        self._copied = 0  # bytes of unread tensors since ended ones were freed
        self._files: dict[Path, tuple[LoadedFile, dict[str, FileEntry], dict[str, str]]] = {}

    def open(self, path: Path) -> tuple[dict[str, FileEntry], dict[str, str]]:
        """Tensors and metadata of a file."""
        if path not in self._files:
            file = LoadedFile(path)
            self._opened.callback(file.release)
            self._files[path] = (file, *safetensors_format.read_header(file.fd, file.nbytes, path))
        return self._files[path][1:]

    def checksum(self, path: Path) -> int:
        """crc32 of an index, or of a file's header."""
        if path.name.endswith(_INDEX):
            return zlib.crc32(_text_of(path))
        self.open(path)
        file = self._files[path][0]
        return safetensors_format.checksum(file.fd, file.nbytes)

    def tensor(self, path: Path, name: str, remote: bool = True) -> torch.Tensor:
        """One tensor: remote, or read here."""
        file, entries, _ = self._files[path]
        entry = entries[name]
        dtype = _DTYPES[entry.dtype]
        if not remote if self._device is None else self._device == "cpu":
            read = _read_here(file, entry, dtype)
            self._tick(entry.nbytes)
            return read
        made = _read_by_workers(file, entry, dtype)
        self.remote.append(made)
        self._sources[made._ref.id] = (file, entry, dtype)
        return made

    def unread(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values as a new remote tensor, which workers read once it is used; a tensor of this process as it is."""
        source = self._sources.get(tensor._ref.id) if isinstance(tensor, RemoteTensor) else None
        if source is None:
            return tensor
        self._copied += source[1].nbytes
        recorder = current_session.current()
        # Else workers would hold the values of a whole checkpoint beside the model: free those that were copied
        if self._copied >= MAX_COPIED_BYTES and recorder.live_tensors.ended:
            recorder.free_ended()
            self.wait_for_copies()
            self._copied = 0
        return _read_by_workers(*source)

    def wait_for_copies(self) -> None:
        """Wait until workers have copied the values so far: they read, or receive, those of a batch ahead of its ops."""
        if any(file.number >= 0 for file, *_ in self._files.values()):
            recorder = current_session.current()
            recorder.flush_ops(asks=True)
            recorder.note_wait()
            recorder.session.synchronize()


def _read_by_workers(file: LoadedFile, entry: FileEntry, dtype: torch.dtype) -> RemoteTensor:
    number = file.lend(current_session.current().session)
    file.use()
    return upload_from_file(entry.shape, dtype, _Source(file, entry, place(number, entry.offset) if number else -1))


def _read_here(file: LoadedFile, entry: FileEntry, dtype: torch.dtype) -> torch.Tensor:
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    # In pieces: Linux reads 2 GiB at most in one call
    data, at = bytearray(entry.nbytes), 0
    while at < entry.nbytes:
        count = os.preadv(file.fd, [memoryview(data)[at:]], entry.offset + at)
        if not count:
            raise CheckpointError(f"{file.path} ends at byte {entry.offset + at}: it was cut while it was read")
        at += count
    return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)


def _read(where: Path, files: _Files) -> Any:
    """The state at a path."""
    if where.is_dir() and (where / MANIFEST).exists():
        return _read_own(where, files)
    if not where.is_dir():
        return _read_flat({name: where for name in files.open(where)[0]}, files)
    # A folder of another library: one file, or an index of several
    indices = sorted(where.glob(f"*{_INDEX}"))
    whole = where / "model.safetensors"
    if whole.exists():
        return _read_flat({name: whole for name in files.open(whole)[0]}, files)
    if len(indices) == 1:
        return _read_flat(_by_index(indices[0], files), files)
    pickled = next((name for name in _PICKLES if (where / name).exists()), None)
    if pickled:
        raise CheckpointError(
            f"{where} has {pickled}, a pickle, which can run code: GT reads safetensors only; convert it first"
        )
    found = f"{len(indices)} indices" if indices else "no safetensors file"
    raise CheckpointError(f"{where} is not a checkpoint: it has {found}, want {MANIFEST}, model.safetensors or one *{_INDEX}")


def _read_flat(places: dict[str, Path], files: _Files) -> dict[str, torch.Tensor]:
    """Tensors by name, with the names that a file's metadata gives them besides."""
    tensors = {name: files.tensor(path, name) for name, path in places.items()}
    for path in dict.fromkeys(places.values()):
        for alias, name in files.open(path)[1].items():
            if name in tensors and alias not in tensors and alias != safetensors_format.WRITER:
                tensors[alias] = tensors[name]
    return tensors


def _text_of(path: Path) -> bytes:
    """The bytes of a manifest or index. CheckpointError unless it is a regular file that is not too large."""
    fd, size = safetensors_format.open_file(path)
    with os.fdopen(fd, "rb") as file:
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, at most {MAX_JSON_BYTES} are read")
        return file.read(size)


def _json(path: Path) -> Any:
    try:
        value = json.loads(_text_of(path).decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON, or was cut short: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def _by_index(index: Path, files: _Files) -> dict[str, Path]:
    """The file of each tensor of an index. CheckpointError lists the files and tensors that are missing."""
    names = _json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{index} has no weight_map of names and files")
    # An index of somebody who means harm could name any file of this host
    odd = next((file for file in names.values() if _elsewhere(file)), None)
    if odd is not None:
        raise CheckpointError(f"{index} names {odd!r:.100}, want a file beside it")
    problems: list[str] = []
    named: dict[str, list[str]] = {}  # names of tensors by file
    for name, file in names.items():
        named.setdefault(file, []).append(name)
    for file, tensors in sorted(named.items()):
        path = index.parent / file
        try:
            entries, _ = files.open(path)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        lacking = [name for name in tensors if name not in entries]
        if lacking:
            problems.append(f"{path} lacks {_some(lacking)}, which {index.name} names")
        unnamed = [name for name in entries if names.get(name) != file]
        if unnamed:
            problems.append(f"{path} has {_some(unnamed)}, which {index.name} does not name")
    _raise_for(problems)
    return {name: index.parent / file for name, file in names.items()}


def _elsewhere(name: str) -> bool:
    """True for a name that is not one of a file in the same folder."""
    return Path(name).name != name or name in ("", ".", "..") or "\0" in name


def _some(names: list[str]) -> str:
    shown = ", ".join(f"{name!r:.100}" for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} others"


def _raise_for(problems: list[str]) -> None:
    """CheckpointError with the first of the problems, if there are any: somebody's index may name 100,000 files."""
    if problems:
        more = len(problems) - MAX_SHOWN_PROBLEMS
        rest = [f"and {more} others of its files are wrong"] if more > 0 else []
        raise CheckpointError("; ".join(problems[:MAX_SHOWN_PROBLEMS] + rest))


def _check(sizes: Any, described: Any, sets: Any) -> None:
    """ValueError for parts of a manifest that save does not write; whoever wrote the file may have meant harm."""
    kinds = (("files", sizes, dict), ("tensors", described, dict), ("sets", sets, list))
    for key, part, kind in kinds:
        if type(part) is not kind:
            raise ValueError(f"{key} is a {type(part).__name__}, want a {kind.__name__}")
    odd = next((name for name in [*sizes, *sets] if _elsewhere(name)), None)
    if odd is not None:
        raise ValueError(f"it names {odd!r:.80}, want a file beside it")
    if len(set(sets)) < len(sets):
        raise ValueError(f"sets has {len(sets)} names, of which {len(set(sets))} differ")
    if any(type(row) is not list or len(row) != 2 for row in described.values()):
        raise ValueError("a row of its tensors is not a device and a truth value")


def _read_own(where: Path, files: _Files) -> Any:
    """The state of a checkpoint of gt.save."""
    path = where / MANIFEST
    manifest = _json(path)
    if manifest.get("format") != "gt":
        raise CheckpointError(f"{path} is not a manifest of gt.save")
    if manifest.get("version") != saving.VERSION:
        raise CheckpointError(f"{path} has version {manifest.get('version')!r:.40}, this GT reads version {saving.VERSION}")
    try:
        sizes, described, sets = manifest["files"], manifest["tensors"], manifest["sets"]
        wanted = state_tree.names([manifest["state"], manifest.get("loss_scale")])
        _check(sizes, described, sets)
        if lost := sorted(wanted - set(described)):
            raise ValueError(f"its state has {_some(lost)}, which its tensors lack")
    except _DAMAGE as error:
        raise _damaged(path, error) from None

    # Sizes of all files before any is opened: a copy of a folder that was cut short is named as such
    problems: list[str] = []
    for name, size in sizes.items():
        have = (where / name).stat().st_size if (where / name).is_file() else -1
        if have != size:
            problems.append(f"{where / name} {'is missing' if have < 0 else f'has {have} bytes'}, want {size} bytes")
    _raise_for(problems)
    places = {f"{s}/{name}": at for s in sets for name, at in _by_index(where / f"{s}{_INDEX}", files).items()}
    lost = [name for name in sorted(wanted) if name not in places]
    if lost:
        raise CheckpointError(f"{path} names {_some(lost)}, which no index has")

    _check_sums(where, manifest, files)

    # A name that occurs twice in the state is one tensor, as it was when it was saved
    tensors: dict[str, torch.Tensor] = {}

    def get(entry: str) -> torch.Tensor:
        if entry not in tensors:
            device, grad = described[entry]
            tensor = files.tensor(places[entry], entry.partition("/")[2], device == "remote")
            tensors[entry] = tensor.requires_grad_() if grad is True and tensor.is_floating_point() else tensor
        return tensors[entry]

    try:
        files.loss_scale = _loss_scale(manifest.get("loss_scale"), get)
        return state_tree.decode(manifest["state"], get)
    except _DAMAGE as error:  # such as an array of a dtype that NumPy does not have
        raise _damaged(path, error) from None


def _loss_scale(node: Any, get: state_tree.Get) -> dict[str, torch.Tensor]:
    """The loss scale of a manifest, {} for none; ValueError for anything else."""
    if node is None:
        return {}
    saved = state_tree.decode(node, get)
    tensors = saved.values() if isinstance(saved, dict) and saved.keys() == loss_scale.KEYS else (None,)
    if not all(isinstance(tensor, torch.Tensor) and not tensor.shape for tensor in tensors):
        raise ValueError(f"its loss scale is {saved!r:.80}")
    return saved


def _check_sums(where: Path, manifest: dict[str, Any], files: _Files) -> None:
    """CheckpointError for numbers and names that are not as they were saved, though they may be those of some state."""
    wrong = [] if is_sealed(manifest) else [MANIFEST]
    sums = manifest.get("sums", {})
    if not isinstance(sums, dict) or not sums.keys() <= manifest["files"].keys():
        raise _damaged(where / MANIFEST, ValueError("its sums are not of its files"))
    wrong += [name for name, want in sums.items() if files.checksum(where / name) != want]
    if wrong:
        raise CheckpointError(f"{where} was changed after it was saved: {_some(wrong)} {'has' if len(wrong) == 1 else 'have'} "
                              "another checksum")  # fmt: skip


_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {type(error).__name__} {error!s:.160}")
