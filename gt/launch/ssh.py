"""Hosts that are reached by ssh: hostfiles, and the process that runs a host's workers.

The host's supervisor gets its order, with the token, on its standard input, and ends when that does.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gt import env
from gt.errors import ConfigError, SystemFailure

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
NAME = re.compile(r"[\w@.\[\]:%-]*[\w.\]]")
MAX_ATTEMPTS, ATTEMPTS_SECONDS = 3, 60.0  # attempts to reach a lost host again, at most, within so many seconds
MAX_SLOTS = 1 << 12
MAX_LINE_BYTES = 16 << 10  # of a line of it
KEPT_LINES = 8  # lines of a host's stderr that are kept for its error
PROBE_SECONDS = 60.0
PIPE_SECONDS = 1.0  # that the ends of a process's pipes may come after its own
ROOT = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class HostEntry:
    """A line of a hostfile. slots: workers there; 0: one for each GPU, else one."""

    name: str
    slots: int = 0


def entry(text: str, where: str) -> HostEntry:
    """Parse `host`, `host slots=N` or `host:N`. ConfigError, which begins with `where`, for another text."""
    # A name that begins with "-" would be an option of ssh, such as one that executes a command here.
    name, *rest = text.split()
    if not rest and (match := re.fullmatch(r"([^:]+):(\d+)", name)):
        name, rest = match[1], [f"slots={match[2]}"]
    match = re.fullmatch(r"slots=(\d+)", rest[0]) if len(rest) == 1 else None
    if not rest and name.count(":") == 1:
        raise ConfigError(f"{where}: got {text!r}, want the number of workers behind the colon, as in h0:4")
    if name.startswith("-") or not NAME.fullmatch(name) or len(rest) > 1 or (rest and not match):
        raise ConfigError(f"{where}: got {text!r}, want a host, and behind it slots=N or nothing")
    slots = int(match[1]) if match else 0
    if match and not 0 < slots <= MAX_SLOTS:
        raise ConfigError(f"{where}: {text!r} has {slots} slots, want 1 to {MAX_SLOTS}")
    return HostEntry(name, slots)


def entries(lines: Iterable[str], path: str = "") -> list[HostEntry]:
    """The hosts of a hostfile's lines, or of a list. ConfigError for a bad line, a host that is there twice, and for none."""
    hosts: list[HostEntry] = []
    for number, line in enumerate(lines, 1):
        if text := line.partition("#")[0].strip():
            where = f"{path}:{number}" if path else f"ssh host {number}"
            hosts.append(entry(text, where))
            if any(other.name == hosts[-1].name for other in hosts[:-1]):
                raise ConfigError(f"{where}: host {hosts[-1].name!r} is there twice; give it more slots instead")
    if not hosts:
        raise ConfigError(f"{path or 'ssh'} names no host: want lines such as `h0 slots=1`")
    return hosts


def read_hostfile(path: str) -> list[HostEntry]:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the hostfile {path} cannot be read: {error}") from None
    return entries(text.splitlines(), path)


def is_this_host(name: str) -> bool:
    return name in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def command(host: str, ssh: Sequence[str], args: Sequence[str], python: str = "") -> list[str]:
    """The command that runs `python -m ARGS` on a host, in the same folder, with this copy of gt if the host has it too.

    ssh: the command, ssh or another one that takes a host and a command, as srun -w.
    """
    if is_this_host(host):
        return ["env", f"PYTHONPATH={env.python_path(ROOT)}", sys.executable, "-m", *args]
    line = ["env", f"PYTHONPATH={env.python_path(ROOT)}", python or sys.executable, "-m", *args]
    text = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(line)}"
    # ssh hands one text to a shell there; another command (srun -w) takes arguments.
    if "ssh" in Path(ssh[0]).name:
        return [*ssh, host, text]
    return [*ssh, host, "sh", "-c", text]


def with_slots(hosts: Sequence[HostEntry], ssh: Sequence[str], python: str = "") -> list[HostEntry]:
    """The hosts with slots: those that have none are asked for their number of GPUs. SystemFailure if one does not answer."""
    # All hosts are asked at once; the answers are collected in turn.
    asked = {
        host.name: subprocess.Popen(
            command(host.name, ssh, ["gt.launch", "--gpus"], python), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for host in hosts if not host.slots
    }  # fmt: skip
    slots: dict[str, int] = {}
    try:
        for name, process in asked.items():
            try:
                out, err = said(process, PROBE_SECONDS)
            except subprocess.TimeoutExpired:
                raise SystemFailure(f"{name} did not answer by ssh within {PROBE_SECONDS:g} s: try `ssh {name} true`") from None
            if process.returncode or not out.strip().isdecimal():
                raise SystemFailure(_failed(name, process.returncode, err.splitlines()))
            slots[name] = max(int(out), 1)
    finally:
        for process in asked.values():
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()
    return [HostEntry(host.name, host.slots or slots[host.name]) for host in hosts]


def said(process: subprocess.Popen, seconds: float) -> list[str]:
    """The stdout and stderr of a process until it ends. TimeoutExpired if that takes longer.

    Another process may hold its pipes open for hours, as ssh's master of ControlPersist does: it is not waited for.
    """
    until = time.monotonic() + seconds
    while True:
        ended = process.poll() is not None
        try:
            return list(process.communicate(timeout=PIPE_SECONDS))
        except subprocess.TimeoutExpired as error:
            if ended:
                return [(data or b"").decode(errors="replace") for data in (error.output, error.stderr)]
            if time.monotonic() >= until:
                raise


def _failed(name: str, code: int, words: Iterable[str]) -> str:
    last = list(words)[-KEPT_LINES:]
    last_lines = ": " + " | ".join(last) if last else ""
    todo = f"`gt doctor --hosts {name}` checks ssh, gt's folder there and the way back"
    return f"the workers' process on {name} ended (exit code {code}){last_lines}; {todo}"


class RemoteHost:
    """A host's workers, by a supervisor of their own behind ssh. about: {"host", "slots", "first"}; order: the job's."""

    def __init__(self, about: dict[str, Any], order: dict[str, Any], port: int) -> None:
        self.name = about["host"]
        self._command = command(self.name, order["ssh"], ["gt.launch"], order["python"])
        keys = ("token", "gpu", "backend", "heartbeat", "libraries", "path", "wait", "variables")
        address = order["own"] if is_this_host(self.name) else order["address"]
        # The host's own part of the order replaces the job's. "" as the address: the one that ssh comes from.
        own = {"workers": about["slots"], "first": about["first"], "server": [address, port]}
        self._order = json.dumps({**{key: order[key] for key in keys}, **own}).encode() + b"\n"
        self._words: deque[str] = deque(maxlen=KEPT_LINES)
        self._rest = b""  # of its stderr, behind the last whole line
        self._times: deque[float] = deque(maxlen=MAX_ATTEMPTS)
        self._process: subprocess.Popen | None = None

    def start(self) -> int:
        """Start ssh, and hand over the order; its pid."""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, bufsize=0)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end has a reason, which is reported
            self._process.stdin.write(self._order)
        return self._process.pid

    def stderr(self) -> int:
        """A descriptor of its standard error, the caller's to close."""
        assert self._process is not None and self._process.stderr is not None
        with self._process.stderr as stream:
            return os.dup(stream.fileno())

    def prefixed(self, data: bytes) -> bytes:
        """Whole lines of its stderr, each behind its name. A line without an end waits for its rest, or for b"", the end."""
        *whole, self._rest = (self._rest + data).split(b"\n") if data else (self._rest, b"")
        if len(self._rest) > MAX_LINE_BYTES:  # as of a progress bar, which begins its line anew
            whole, self._rest = [*whole, self._rest], b""
        lines = [line for row in whole for line in row.decode(errors="replace").splitlines()]
        self._words.extend(lines)
        return "".join(f"{self.name}: {line}\n" for line in lines).encode()

    def ended(self, code: int) -> str:
        rest = self._rest.decode(errors="replace").splitlines()
        return _failed(self.name, code, [*self._words, *rest])

    def again(self, now: float) -> bool:
        """True if it may be tried once more."""
        # `_times` has the last MAX_ATTEMPTS attempts: all of them within the time are too many.
        if len(self._times) == MAX_ATTEMPTS and now - self._times[0] < ATTEMPTS_SECONDS:
            return False
        self._times.append(now)
        return True

    def close(self) -> None:
        """End its standard input, and so its supervisor."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
