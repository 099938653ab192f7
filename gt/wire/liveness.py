"""Liveness of processes and connections by the kernel's evidence, because silence may only mean a loaded machine.

On the own host the kernel shows that a process is stopped. Another host's kernel acknowledges TCP segments, however busy or
stopped the peer's process is.
"""

from __future__ import annotations

import os
import socket as bsd
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

STOPPED = "TtZX"  # states of proc(5) without progress: stopped, traced, zombie, dead
POLLS_PER_HEARTBEAT = 8  # looks at a process within one heartbeat
SHORTEST_SECONDS = 2.0  # least seconds without an acknowledgement that count: the kernel may delay one
# Offsets in tcp_info: unanswered probes in a row, segments in flight, milliseconds since the last acknowledgement.
_PROBES, _UNACKED, _ANSWERED = 3, 24, 56
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_PARENT, _USED = 1, slice(11, 15)  # fields of /proc/PID/stat after the name: parent; CPU time of it and its ended children


class Sight(NamedTuple):
    """state: the letter of proc(5), "" for an invisible process. seconds: CPU time that it has used."""

    state: str = ""
    seconds: float = 0.0

    @property
    def stopped(self) -> bool:
        return self.state != "" and self.state in STOPPED


def process() -> list:
    """[pid, home], with which another process can look at this one."""
    return [os.getpid(), home()]


@cache
def home() -> str:
    """A name for the scope of this process's pid: one boot of one host, one namespace; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def sight(pid: int, where: str) -> Sight:
    """Look at process `pid` of home `where`."""
    if pid <= 0 or not where or where != home():
        return Sight()
    fields = _fields(str(pid))
    return Sight(fields[0], sum(map(int, fields[_USED][:2])) * _TICK) if fields else Sight()


def descendants_seconds(pid: int) -> float:
    """CPU seconds of all descendants of `pid`."""
    # CPU time of ended children is in their parent's row, so it is counted with the parent.
    rows = dict(_every())
    own = rows.get(pid)
    ended = sum(map(int, own[_USED][2:])) if own else 0
    children: dict[int, list[int]] = {}
    for number, fields in rows.items():
        children.setdefault(int(fields[_PARENT]), []).append(number)
    ticks, below = ended, list(children.get(pid, ()))
    while below:
        number = below.pop()
        ticks += sum(map(int, rows[number][_USED]))
        below += children.get(number, ())
    return ticks * _TICK


def _every() -> Iterator[tuple[int, list[str]]]:
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := _fields(name)):
            yield int(name), fields


def _fields(pid: str) -> list[str]:
    """Fields of /proc/PID/stat, from the state on; none for a process that is gone."""
    try:
        # "PID (NAME) STATE PPID ...": a name may have brackets and spaces, so fields count from the last bracket.
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return []


def unheard(fd: int) -> float:
    """Seconds without an acknowledgement by the other host on a TCP connection; 0 while no segment is in flight."""
    # The descriptor is libzmq's: `detach` gives it back without closing it. Family and kind do not matter for options.
    try:
        sock = bsd.socket(bsd.AF_INET, bsd.SOCK_STREAM, 0, fd)
    except OSError:
        return 0.0
    try:
        info = sock.getsockopt(bsd.IPPROTO_TCP, bsd.TCP_INFO, 104)
    except OSError:
        return 0.0
    finally:
        sock.detach()
    if len(info) < _ANSWERED + 4:
        return 0.0
    # A host with full buffers answers each probe. Where the own link is down, no segment is in flight.
    if not struct.unpack_from("I", info, _UNACKED)[0] and info[_PROBES] < 2:
        return 0.0
    return float(struct.unpack_from("I", info, _ANSWERED)[0]) / 1000


class Cable:
    """Watches one connection: it counts as cut after `seconds`, at two polls in a row at least."""

    def __init__(self, fd: int, seconds: float) -> None:
        self._fd, self._limit, self._before = fd, max(seconds, SHORTEST_SECONDS), False

    def poll(self) -> str:
        """The finding, once that is certain, or ""."""
        silent = unheard(self._fd)
        found, self._before = self._before and silent >= self._limit, silent >= self._limit
        return f"its host has acknowledged nothing for {silent:.0f} s" if found else ""


class Vigil:
    """Watches one process: it counts as stopped after `polls` polls in a row.

    Polls are counted, not seconds: the watcher may have been stopped itself, and must not blame the other for that time.
    """

    def __init__(self, pid: int, where: str, polls: int) -> None:
        self._pid, self._where, self._wanted, self._found = pid, where, polls, 0

    def poll(self) -> str:
        """The finding, once that is certain, or ""."""
        sighting = sight(self._pid, self._where)
        self._found = self._found + 1 if sighting.stopped else 0
        return describe(self._pid, sighting.state) if self._found >= self._wanted else ""


def describe(pid: int, state: str) -> str:
    """A stopped process in words, with the command that continues it."""
    if state in "Tt":
        how = "stopped" if state == "T" else "stopped by a debugger"
        return f"its process {pid} is {how} (state {state}; `kill -CONT {pid}` lets it go on)"
    return f"its process {pid} has ended (state {state})"
