"""The files of a user's running servers: one an address of a network, of mode 0600, with what its clients and workers need.

Containers may share the folder, and each has a network of its own, where other servers have the same ports. A server holds
a lock on its file for as long as it has the port. A file that is not locked is a dead server's: nobody reads its secret, and
the next server removes it. Knows nothing of what the files say.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from gt import env
from gt.errors import Refused

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMES = ("server-*", ".server-*")  # of files, and of those that were not finished
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe of such a name is not waited for
ALONE_SECONDS = 5.0  # that another process may keep the folder, which takes it milliseconds unless it is stopped
PAUSE_SECONDS = 0.01  # between looks whether it does


class Published:
    """A server's file, until `remove`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    def remove(self) -> None:
        """Take it away, unless it is another server's file by now. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        # Compared by inode: a server that has taken the port since has replaced the file, and keeps its own.
        with contextlib.suppress(OSError), _alone(self.path.parent):
            if os.path.samestat(os.fstat(descriptor), os.lstat(self.path)):
                os.unlink(self.path)
        os.close(descriptor)


def publish(ip: str, port: int, text: str) -> Published:
    """Write the file of a server that has this port. Refused if there is no folder that is this user's alone."""
    folder = _own_folder()
    path = folder / _name(ip, port)
    try:
        with _alone(folder):
            _sweep(folder)
            # Locked before it has its name, so a reader never finds the file without the lock. The rename is atomic.
            new = folder / f".{path.name}.{os.getpid()}"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
            descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                whole = text.encode()
                if os.write(descriptor, whole) < len(whole):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.rename(new, path)
            except BaseException:
                os.close(descriptor)
                with contextlib.suppress(OSError):
                    os.unlink(new)
                raise
    except OSError as error:
        raise Refused(f"the server's secret cannot be kept in {path}: {error.strerror}; set XDG_RUNTIME_DIR") from None
    return Published(path, descriptor)


def find(ip: str, port: int) -> str | None:
    """The text of this user's running server at an address, None if there is none."""
    # A server on every address serves this one too.
    everywhere = ("0.0.0.0", "::") if ip.startswith("127.") else ("::",) if ip == "::1" else ()
    names = [_name(address, port) for address in (ip, *everywhere)]
    for folder in _folders():
        if _fault(folder):
            continue
        for name in names:
            with contextlib.suppress(OSError, UnicodeError):
                descriptor = os.open(folder / name, os.O_RDONLY | _FLAGS)
                try:
                    text = _text(descriptor)
                finally:
                    os.close(descriptor)
                if text is not None:
                    return text
    return None


def serves_elsewhere(port: int) -> bool:
    """True if a server of this user has this port in another network, to which no address here leads."""
    for folder in _folders():
        if _fault(folder):
            continue
        for path in folder.glob(f"server-*-{port}-*"):
            with contextlib.suppress(OSError, UnicodeError):
                descriptor = os.open(path, os.O_RDONLY | _FLAGS)
                try:
                    if not path.name.endswith(f"-{_network()}") and _text(descriptor) is not None:
                        return True
                finally:
                    os.close(descriptor)
    return False


def _text(descriptor: int) -> str | None:
    """Text of a file, if it is ours and its server has the port."""
    # Checks are of the open descriptor, so nobody can swap the file behind them.
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077 or not _held(descriptor):
        return None
    return os.read(descriptor, 1 << 16).decode()


def _held(descriptor: int) -> bool:
    """True if a server has the lock. A shared one is asked for, so that those who look do not take one another for a server."""
    # flock ends with its process, however that ends, so a file without a lock is a dead server's.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _sweep(folder: Path) -> None:
    """Remove the files of servers that were killed."""
    for path in itertools.chain.from_iterable(map(folder.glob, _NAMES)):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | _FLAGS)
            try:
                if not _held(descriptor):
                    os.unlink(path)
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Nobody else writes or removes files in the folder meanwhile. OSError if another process does for too long."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
    until = time.monotonic() + ALONE_SECONDS
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() >= until:
                raise OSError(errno.EBUSY, f"another process keeps {folder} locked, which may be stopped")
            time.sleep(PAUSE_SECONDS)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor too
    finally:
        os.close(descriptor)


def _name(ip: str, port: int) -> str:
    return f"server-{ip}-{port}-{_network()}"


def _folders() -> list[Path]:
    """The directory in which servers of this user keep their files, wherever they were started from."""
    user = os.geteuid()
    runtime = env.runtime_folder()
    homes = [Path(runtime) / "gt"] if runtime else []
    return list(dict.fromkeys([*homes, Path(f"/run/user/{user}/gt"), Path(f"/tmp/gt-{user}")]))


def _own_folder() -> Path:
    """The first that can be used. The user's runtime directory may be another's (after `su`): then it is passed over."""
    runtime = env.runtime_folder()
    homes = [Path(runtime)] if runtime else []
    for home in homes:
        folder = home / "gt"
        if not _fault(home):
            with contextlib.suppress(OSError):
                os.mkdir(folder, 0o700)
            if not _fault(folder):
                return folder

    # /tmp is everybody's: another user may have made the folder first, to read what is put there. `_fault` refuses that.
    last = _folders()[-1]
    with contextlib.suppress(OSError):
        os.mkdir(last, 0o700)
    if fault := _fault(last):
        raise Refused(f"the server's secret cannot be kept in {last}: {fault}; remove it, or set XDG_RUNTIME_DIR")
    return last


def _fault(folder: Path) -> str:
    """The reason why others could read or change the files of a folder, "" if they could not."""
    try:
        status = os.lstat(folder)
    except OSError as error:
        return error.strerror or "it cannot be looked at"
    if not stat.S_ISDIR(status.st_mode):
        return "it is no directory"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, not to {os.geteuid()}"
    return f"its mode is {stat.S_IMODE(status.st_mode):o}, want 700" if status.st_mode & 0o077 else ""


def _network() -> str:
    """A name of the network that an address is of: of the host as it runs now, and of the namespace there."""
    parts = []
    with contextlib.suppress(OSError):
        parts = [_BOOT_ID.read_text().strip(), str(os.stat("/proc/self/ns/net").st_ino)]
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=6).hexdigest()
