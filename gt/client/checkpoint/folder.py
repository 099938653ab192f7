"""The folder of a checkpoint: written beside the old one, and put in its place by one rename.

A save that is killed leaves the old folder whole, and its own under a name that the next save removes. A lock on a new folder
tells that its writer is alive. Knows nothing of tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gt.errors import CheckpointError

log = logging.getLogger("gt.client")

MANIFEST = "gt.json"  # written last
_NEW, _OLD = "gt-saving-", "gt-replaced-"  # folders beside a checkpoint: not complete yet, or about to be removed
_AT_FDCWD, _EXCHANGE = -100, 2
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES)  # no hard links here, or not of another's file
MAX_JSON_BYTES = 256 << 20  # largest manifest or index
MAX_RENAMES = 100  # tries to put a folder in its place while others do the same


def find(path: str | os.PathLike) -> Path:
    """The folder or file of a checkpoint, as `path` names it. CheckpointError if there is none."""
    try:
        where = Path(os.path.realpath(path))
    except FileNotFoundError:  # of a relative path alone
        raise CheckpointError(f"{path} cannot be read: the program's working folder has been removed") from None
    if where.exists():
        return where
    replaced = _beside(where, _OLD) if where.parent.is_dir() else []
    for old in reversed(replaced):  # killed between the two renames of a file system that cannot exchange names
        if (old / MANIFEST).is_file():
            return old
    raise CheckpointError(f"{path} does not exist")


@contextlib.contextmanager
def watched(where: Path) -> Iterator[Callable[[], bool]]:
    """Tells whether another file or folder has taken the place of `where` since: a save that replaced it."""
    # While it is open, no other has its number. Where the system can, it is held without being opened: it may be a device
    fd = os.open(where, getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK) | os.O_CLOEXEC)

    def replaced() -> bool:
        try:
            return not os.path.samestat(os.fstat(fd), os.stat(where))
        except FileNotFoundError:
            return True

    try:
        yield replaced
    finally:
        os.close(fd)


def _beside(target: Path, kind: str) -> list[Path]:
    """Folders of saves to a target, by name. The name may have any characters, so no pattern is made of it."""
    prefix = f".{target.name}.{kind}"
    return sorted(Path(entry.path) for entry in os.scandir(target.parent) if entry.name.startswith(prefix))


def sealed(manifest: dict) -> bytes:
    """A manifest as it is written, with a checksum of its own."""
    return json.dumps({**manifest, "crc32": _crc32(manifest)}, separators=(",", ":")).encode()


def is_sealed(manifest: dict) -> bool:
    """True for a manifest that is as it was written. One without checksum is of an older GT."""
    rest = {key: value for key, value in manifest.items() if key != "crc32"}
    return manifest.get("crc32", _crc32(rest)) == _crc32(rest)


def _crc32(manifest: dict) -> int:
    return zlib.crc32(json.dumps(manifest, separators=(",", ":")).encode())


def reason(error: OSError | ValueError) -> str:
    """An error of the system, or of a path that no system takes, in words."""
    return (getattr(error, "strerror", None) or str(error)).lower()


class NewFolder:
    """A folder that becomes the checkpoint at `path` once it is complete. CheckpointError if it cannot be made there."""

    def __init__(self, path: str | os.PathLike) -> None:
        try:
            self.target = Path(os.path.realpath(path))
            self._check_target()
            parent, name = self.target.parent, self.target.name
            parent.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            for _ in range(MAX_RENAMES):
                self.path = parent / f".{name}.{_NEW}{secrets.token_hex(8)}"
                self.path.mkdir()
                try:
                    # Between mkdir and lock another save may take the folder for
                    # a leftover of a dead one, and remove it: then once more
                    lock = _lock(self.path, own=True)
                except OSError:
                    _remove(self.path)
                    raise
                if lock is not None and self.path.exists():  # else another process has just taken it for a leftover
                    break
            else:
                raise CheckpointError(f"{self.target} is replaced by others all the time: save to another path")
            self._lock = lock
        except CheckpointError:
            raise
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path!s:.1000} cannot be written: {reason(error)}") from None
        self.files: dict[str, int] = {}  # name -> descriptor
        self._open = True

    def _check_target(self) -> None:
        """CheckpointError if something is at the target that a checkpoint must not replace."""
        if not self.target.exists():
            return
        if not self.target.is_dir():
            raise CheckpointError(f"{self.target} is a file, want a folder for the checkpoint")
        for kind, same in (("a mount point", os.path.ismount), ("the program's working folder", _is_working_folder)):
            if same(self.target):
                raise CheckpointError(f"{self.target} is {kind}, which a save cannot replace: save to a folder in it")
        # A save replaces the folder: what it holds must be files that can be linked into the new one
        others = [entry.name for entry in list(os.scandir(self.target)) if not entry.is_file(follow_symlinks=False)]
        if others:
            raise CheckpointError(
                f"{self.target} is a folder with {others[0]!r}, which is not a plain file, and a save would replace it: "
                "want a checkpoint, or a path that does not exist"
            )

    def refuse(self, names: Iterable[str]) -> None:
        """CheckpointError if one of these files is there and no part of the old checkpoint: others would read it first."""
        own = _part_names(self.target)
        for name in names:
            if name not in own and (self.target / name).exists():
                raise CheckpointError(
                    f"{self.target} has {name}, which transformers and others read in place of this checkpoint: "
                    "remove it, or save to another folder"
                )

    def create(self, name: str, nbytes: int) -> int:
        """A new file of this size, with room on the disk; its descriptor."""
        fd = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self.files[name] = fd
        os.ftruncate(fd, nbytes)
        with contextlib.suppress(InterruptedError):
            try:
                # A full disk is told now, and not to a worker in the middle of its piece
                os.posix_fallocate(fd, 0, nbytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        return fd

    def put(self, name: str, data: bytes) -> None:
        """A new small file."""
        fd = self.create(name, len(data))
        at = 0
        while at < len(data):
            at += os.pwrite(fd, data[at:], at)

    def commit(self, manifest: bytes) -> None:
        """Make all files durable, then put the folder in its place. Plain files of the old one that are not in it stay."""
        # Contents before the manifest, the manifest before the rename:
        # whatever a power cut leaves is a whole checkpoint, or has no manifest
        for fd in self.files.values():
            os.fsync(fd)
        self.put(MANIFEST, manifest)
        os.fsync(self.files[MANIFEST])
        with contextlib.suppress(FileNotFoundError):  # another save is just replacing it
            self._check_target()  # once more: it may have become something else meanwhile
        with contextlib.suppress(FileNotFoundError, CheckpointError):  # none is there, or another save is just replacing it
            replaced = find(self.target)
            self._keep_others(replaced)
            os.chmod(self.path, stat.S_IMODE(replaced.stat().st_mode))
        os.fsync(self._lock)
        old = self._rename()
        _sync_folder(self.target.parent)
        self._end()
        if old is not None:
            _remove(old)

    def _keep_others(self, replaced: Path) -> None:
        """Link files that are no part of the old checkpoint, such as a model's config.json."""
        old = _part_names(replaced)
        for entry in list(os.scandir(replaced)):
            if entry.name not in old and entry.name not in self.files and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # another save has just replaced that folder, and kept its files
                    try:
                        os.link(entry.path, self.path / entry.name, follow_symlinks=False)
                    except OSError as error:
                        if error.errno not in _NO_LINKS:
                            raise
                        shutil.copy2(entry.path, self.path / entry.name, follow_symlinks=False)

    def _rename(self) -> Path | None:
        """Put this folder in the target's place; the name that the old one has now."""
        for _ in range(MAX_RENAMES):
            try:
                if not self.target.exists():
                    os.rename(self.path, self.target)
                    return None
                # One step: at no time is there no checkpoint at the target
                if _exchange(self.path, self.target):
                    return self.path
                return self._rename_both()
            except OSError as error:  # another save has just put its folder there, or is about to
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT) or not self.path.exists():
                    raise
        raise CheckpointError(f"{self.target} is replaced by others all the time: save to another path")

    def _rename_both(self) -> Path:
        """As `_rename`, where a file system cannot exchange names."""
        old = self.target.parent / f".{self.target.name}.{_OLD}{secrets.token_hex(8)}"
        # A process that is killed between the two renames leaves the old one beside: `find` and the next save know its name
        os.rename(self.target, old)
        try:
            os.rename(self.path, self.target)
        except OSError:
            with contextlib.suppress(OSError):  # another one's folder is there
                os.rename(old, self.target)
            raise
        return old

    def remove_incomplete(self) -> None:
        """Remove an incomplete folder."""
        if self._open:
            self._end()
            _remove(self.path)

    def _end(self) -> None:
        self._open = False
        for fd in (*self.files.values(), self._lock):
            os.close(fd)
        self.files.clear()

    def _remove_leftovers(self) -> None:
        """Remove folders of saves to this target whose processes have ended."""
        for left in _beside(self.target, _NEW):
            lock = _lock(left)
            if lock is not None:
                _remove(left)
                os.close(lock)
        for left in reversed(_beside(self.target, _OLD)):
            if self.target.exists():
                _remove(left)
            else:  # killed between two renames
                with contextlib.suppress(OSError):  # another save has done so, or has put its folder there
                    os.rename(left, self.target)


def _is_working_folder(path: Path) -> bool:
    """True for the folder that relative paths of this process begin at: it would be removed."""
    try:
        return os.path.samefile(path, ".")
    except OSError:  # it has been removed
        return False


def _part_names(folder: Path) -> set[str]:
    """Names of files that belong to the checkpoint in a folder."""
    names = {MANIFEST}
    # Whatever is there may be nobody's manifest, and of any size or depth
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        if (folder / MANIFEST).stat().st_size <= MAX_JSON_BYTES:
            made = json.loads((folder / MANIFEST).read_text())
            names |= {name for name in made["files"] if isinstance(name, str)}
    return names


def _lock(folder: Path, own: bool = False) -> int | None:
    """A descriptor that locks a folder; None if a living process has locked it, or it is none of ours.

    own: it is this process's new folder. On a file system without locks its descriptor locks nothing, and leftovers stay.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if own and error.errno != errno.ENOENT:
            raise
        return None
    try:
        # Anybody may have made a folder of this name where all may write: only this user's own leftovers are removed
        if os.fstat(fd).st_uid == os.geteuid() or own:  # a server of files may give it another owner
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    except BlockingIOError:
        pass
    except OSError:
        if own:
            return fd
    os.close(fd)
    return None


def _remove(folder: Path) -> None:
    """Remove a folder of plain files. What cannot be removed is left to the next save."""
    try:
        for entry in list(os.scandir(folder)):  # closed whatever is raised
            if stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                os.unlink(entry.path)
        os.rmdir(folder)
    except FileNotFoundError:
        return  # another save has removed it
    except OSError as error:
        log.warning("%s cannot be removed: %s", folder, error)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))
