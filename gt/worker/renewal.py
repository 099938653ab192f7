"""A worker's process starts afresh: it executes its own command line again, so that nothing of its memory is left.

The new process has the same pid, name and environment, and the token of a file that may be gone by a descriptor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from gt import env

WAIT = 120.0  # seconds that the new process looks for the server: one that has gone meanwhile will not tell it to end
OPTIONS = ("--wait", "--name", "--token-file")  # what is appended to the command line


class Renewal:
    """Made in the main thread when the process begins; `start` may be called by any thread.

    token: what was read from a file; "" where the new process finds it as this one did.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._environment = env.child()  # as it is now: libraries and devices change it
        self._signals, told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)

    def start(self, name: str) -> NoReturn:
        """Become a new process of that name. OSError if it cannot be executed."""
        for number in self._pending():  # one that no handler has seen yet would be lost
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            if number in (signal.SIGTERM, signal.SIGINT):
                os._exit(128 + number)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for entry in os.listdir("/proc/self/fd"):
            if int(entry) > 2:
                with contextlib.suppress(OSError):  # the listing's own
                    os.set_inheritable(int(entry), False)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        file = f"/proc/self/fd/{inherited(self._token)}" if self._token else ""
        os.execve(sys.executable, command(sys.orig_argv, name, file), self._environment)

    def _pending(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(self._signals, 1 << 10)
        return b""


def command(argv: Sequence[str], name: str, token_file: str) -> list[str]:
    """The command line of the process that comes after one of this command line: the last of an option counts."""
    own = list(argv)
    while len(own) > 1 and own[-2] in OPTIONS:
        del own[-2:]
    return [*own, "--wait", f"{WAIT:g}", "--name", name, *(("--token-file", token_file) if token_file else ())]


def inherited(secret: str) -> int:
    """A descriptor of memory with the secret, which an executed process keeps."""
    descriptor = os.memfd_create("gt-token", 0)
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, secret.encode())
    return descriptor
