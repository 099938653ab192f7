"""`gt doctor`: one line a check of what GT needs of a machine; exit code 1 if something it cannot do without is missing.

gt/cli/gpus.py goes on with GPUs, and with what of them can be said where workers would get none.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from gt.cli import gpus
from gt.launch import machine

NEEDED, WANTED = "missing", "note"


def main(args: list[str]) -> int:
    worst = 0
    for name, check, weight in CHECKS:
        try:
            result, good = check(), True
        except Exception as error:  # whatever a check finds wrong is its result
            result, good = f"{error}", False
        mark = "ok" if good else weight
        worst |= not good and weight == NEEDED
        print(f"{mark:8} {name:14} {result}", flush=True)
    for name, text, good, needed in gpus.checks(bool(machine.gpus())):
        print(f"{'ok' if good else 'fails' if needed else 'note':8} {name:14} {text}", flush=True)
        worst |= needed and not good
    return worst


def _python() -> str:
    if platform.python_implementation() != "CPython":
        raise RuntimeError(f"{platform.python_implementation()}: torch needs CPython")
    return f"{platform.python_version()} on {platform.system()} {platform.release()}"


def _torch() -> str:
    found = _package("torch")
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if not (2, 11) <= numbers <= (2, 13):
        raise RuntimeError(f"{found}: 2.11 to 2.13 are supported")
    return found


def _package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        raise RuntimeError(f"not installed: pip install {name}") from None


def _memory() -> str:
    descriptor = os.memfd_create("gt-doctor")
    try:
        os.ftruncate(descriptor, 1 << 20)
        os.stat(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return "memfd and /proc/<pid>/fd work"


def _shm() -> str:
    free = os.statvfs("/dev/shm")
    return f"{free.f_bavail * free.f_frsize >> 20} MiB free in /dev/shm"


def _sockets() -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell, socket.socket() as tcp:
        bell.bind(f"\0gt-doctor-{os.getpid()}")
        tcp.bind(("127.0.0.1", 0))
    return "abstract unix sockets and loopback work"


def _cpus() -> str:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{len(os.sched_getaffinity(0))} cores, {pages >> 30} GiB memory"


def _gpus() -> str:
    found = machine.gpus()
    if not found:
        raise RuntimeError(gpus.none())
    return f"{len(found)} visible: {','.join(found)}"


CHECKS: tuple[tuple[str, Callable[[], str], str], ...] = (
    ("python", _python, NEEDED),
    ("torch", _torch, NEEDED),
    ("pyzmq", lambda: _package("pyzmq"), NEEDED),
    ("msgpack", lambda: _package("msgpack"), NEEDED),
    ("numpy", lambda: _package("numpy"), NEEDED),
    ("machine", _cpus, NEEDED),
    ("memory", _memory, NEEDED),
    ("sockets", _sockets, NEEDED),
    ("shared memory", _shm, WANTED),
    ("gpus", _gpus, WANTED),
)
