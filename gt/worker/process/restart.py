"""Restart of a worker's process: it executes its own command line again, so that nothing of its memory is left.

The new process has the same pid, name and environment. Descriptors give it the secrets of files that may be gone. They also
give it the signals that the old process received and did not handle, which the kernel counts as handled after the restart.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from gt import env

WAIT_SECONDS = 120.0  # for the server: a server that has ended meanwhile will not tell the new process to end
OPTIONS = ("--wait", "--name", "--signals", "--token-file", "--worker-token-file")  # what is appended to the command line


class Renewal:
    """Made in the main thread when the process begins; `start` may be called by any thread.

    secrets: what was read from the files of options; "" where the new process finds it as this one did.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self._secrets = dict(secrets)
        self._environment = env.child()  # as it is now: libraries and devices change it
        self._signals, told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        with contextlib.suppress(ChildProcessError):  # what the process before this one ended
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def start(self, name: str) -> NoReturn:
        """Become a new process of that name. OSError if it cannot be executed."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for child in children():  # compilers, say: they would be the new process's
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for entry in os.listdir("/proc/self/fd"):
            if int(entry) > 2:
                with contextlib.suppress(OSError):  # the listing's own
                    os.set_inheritable(int(entry), False)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        more = {option: f"/proc/self/fd/{inherited(secret)}" for option, secret in self._secrets.items() if secret}
        os.set_inheritable(self._signals, True)
        line = command(sys.orig_argv, name, {"--signals": str(self._signals), **more})
        os.execve(sys.executable, line, self._environment)


def command(argv: Sequence[str], name: str, more: Mapping[str, str]) -> list[str]:
    """The command line of the process that replaces one of this command line. more: options of OPTIONS; the last one counts."""
    own = list(argv)
    while len(own) > 1 and own[-2] in OPTIONS:
        del own[-2:]
    return [*own, "--wait", f"{WAIT_SECONDS:g}", "--name", name, *(part for row in more.items() for part in row)]


def told_to_end(signals: int) -> int:
    """The number of the first SIGTERM or SIGINT that the process before this one received and did not handle, 0 for none.

    signals: a descriptor of the numbers of the signals that it received; it is closed. OSError if it is none.
    """
    with os.fdopen(signals, "rb", buffering=0) as received:
        numbers = received.read(1 << 16) or b""
    return next((number for number in numbers if number in (signal.SIGTERM, signal.SIGINT)), 0)


def children() -> list[int]:
    """Pids of this process's children."""
    pids: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            pids += map(int, (task / "children").read_text().split())
    return pids


def inherited(secret: str) -> int:
    """A descriptor of memory with the secret, which an executed process keeps."""
    descriptor = os.memfd_create("gt-token", 0)
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, secret.encode())
    return descriptor
