"""Small facts of Linux processes: what the kernel does at a parent's end, and a process's name in `ps`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from gt.wire.process_settings import PR_SET_PDEATHSIG, die_with_parent

_PR_SET_NAME = 15
_PF_EXITING = 4


def fork(title: str, body: Callable[[], object], stderr: int = -1) -> int:
    """Fork a child that runs `body` under this title and is killed when we die; its pid. It never returns to our code.

    body: an int that it returns is the exit code. stderr: descriptor for its stderr. The child has no stdin and no stdout.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        if stderr >= 0:
            os.dup2(stderr, 2)
        rename(title)
        result = body()
        code = result if isinstance(result, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        # No exit handlers and no buffers of the parent's: they are the parent's to run and to write.
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def go_on_at_end_of_parent() -> None:
    """Have the kernel continue this process, should it be stopped, when its parent ends: it is to notice that and end.

    The signal is also sent when the thread that forked it ends. A running process does not notice it.
    """
    _libc().prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


def ending(pid: int) -> bool:
    """True once a child has begun to end, which is before its sockets close and before it can be waited for."""
    return bool(_stat(pid)[8] & _PF_EXITING)  # field 9 of proc(5), counted from 1


def how_ended(code: int) -> str:
    """A child's end in brackets, after a space; "" for exit code 0. code: negative ones are signals."""
    return f" (signal {signal.Signals(-code).name})" if code < 0 else f" (exit code {code})" if code else ""


def rename(title: str) -> None:
    """Set the title in `ps` and `top`, by overwriting this process's argument area, which limits its length."""
    # The kernel shows the bytes between arg_start and arg_end of this process's memory as its command line.
    stat = _stat(os.getpid())
    start, end = stat[47], stat[48]  # fields 48 and 49 of proc(5), counted from 1
    room = end - start
    text = title.encode()[: room - 1]
    if start and room > 1:
        ctypes.memset(start, 0, room)
        ctypes.memmove(start, text, len(text))
    _libc().prctl(_PR_SET_NAME, title.encode()[:15] + b"\0", 0, 0, 0)


def _stat(pid: int) -> list[int]:
    """Fields of /proc/PID/stat, with 0 for name and state, which are no numbers."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [pid, 0, 0, *map(int, fields[1:])]


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
