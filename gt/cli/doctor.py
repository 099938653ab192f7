"""`gt doctor`: checks a machine, one line for each check; exit code 1 if a requirement is missing.

gt/cli/gpus.py has the checks of GPUs, also where workers would get none.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import socket
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from gt import env
from gt.cli import gpus
from gt.errors import ConfigError
from gt.ir.text import size
from gt.launch import machine

NEEDED, WANTED = "missing", "note"


class Doubt(Exception):
    """A warning: a check's result that may be wrong or harmless."""


def main(args: list[str], about: str = "") -> int:
    """Exit code: 1 if a requirement is missing. about: the command's text."""
    parser = argparse.ArgumentParser(prog="gt doctor", description=about)
    text = "check these hosts over ssh instead, and their links: h0,h1:4; env: those of the job, in each of its processes"
    parser.add_argument("--hosts", metavar="H,H", help=text)
    parser.add_argument("--hostfile", help="the same from a file of lines `host slots=N`")
    parser.add_argument("--ssh", default="", help="command for ssh; default: ssh in batch mode; srun -N1 -n1 -w works too")
    parser.add_argument("--python", default="", help="interpreter on the hosts; default: the path of this one")
    parser.add_argument("--most", default="", help="bytes of the largest all-reduce of the hosts, or 0; default: 1GiB")
    options = parser.parse_args(args)
    if options.hostfile or options.hosts is not None:
        options.most = options.most or "1GiB"
        return _hosts(options)
    unused = [f"--{name}" for name in ("ssh", "python", "most") if getattr(options, name)]
    if unused:
        parser.error(f"{unused[0]} is for checks of several hosts: give --hosts or --hostfile too")
    return _machine()


def _hosts(given: argparse.Namespace) -> int:
    from gt.cli import hosts
    from gt.launch import ssh

    try:
        if given.hosts == "env":
            return hosts.in_job(env.size("--most", 0, given.most))
        known = ssh.read_hostfile(given.hostfile) if given.hostfile else ssh.entries(given.hosts.split(","))
        most = env.size("--most", 0, given.most)
    except ConfigError as error:
        print(f"gt doctor: {error}")
        return 2
    return hosts.main(known, given.ssh.split() or ssh.SSH, given.python, most)


def _machine() -> int:
    worst = 0
    for name, check, weight in CHECKS:
        try:
            result, mark = check(), "ok"
        except Doubt as doubt:
            result, mark = f"{doubt}", WANTED
        except Exception as error:  # any error is the check's result
            result, mark = f"{error}", weight
        worst |= mark == NEEDED
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
    installed = _package("torch")
    try:
        importlib.import_module("torch")
    except Exception as error:
        raise RuntimeError(f"{installed} cannot be imported: {type(error).__name__}: {error}; install it again") from None
    if doubt := machine.untested(installed):
        raise (RuntimeError if machine.version_of(installed) < machine.TESTED_TORCH[0] else Doubt)(doubt)
    return installed


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
    return f"{size(free.f_bavail * free.f_frsize)} free in /dev/shm"


def _sockets() -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell, socket.socket() as tcp:
        bell.bind(f"\0gt-doctor-{os.getpid()}")
        tcp.bind(("127.0.0.1", 0))
    return "abstract unix sockets and loopback work"


def _cpus() -> str:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{len(os.sched_getaffinity(0))} cores, {size(pages)} memory"


def _gpus() -> str:
    visible = machine.gpus()
    if not visible:
        raise RuntimeError(gpus.none())
    return f"{len(visible)} visible: {','.join(visible)}"


CHECKS: tuple[tuple[str, Callable[[], str], str], ...] = (
    ("python", _python, NEEDED),
    ("pyzmq", lambda: _package("pyzmq"), NEEDED),
    ("msgpack", lambda: _package("msgpack"), NEEDED),
    ("pyyaml", lambda: _package("PyYAML"), NEEDED),
    ("numpy", lambda: _package("numpy"), NEEDED),
    ("machine", _cpus, NEEDED),
    ("memory", _memory, NEEDED),
    ("sockets", _sockets, NEEDED),
    ("shared memory", _shm, WANTED),
    ("torch", _torch, NEEDED),  # takes seconds, so quick checks come first
    ("gpus", _gpus, WANTED),
)
