"""The processes under attack: a server with workers, watched for deaths, memory, logs and internal errors."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gt.launch import local
from tests.helpers.limits import limit
from tests.helpers.processes import children, resident

SERVER_MEMORY, WORKER_MEMORY = 256 << 20, 1 << 30  # bytes that a process may grow by before that is a finding
ROOM = 4 << 30  # address space beyond what a process has at start: torch asks for more than it touches
LOOK = 0.05  # seconds between looks at memory
STDERR_GROWTH = 1 << 20  # bytes of the log of errors in one run
LONGEST_LINE = 16 << 10  # bytes of a line of the instruction log
LINE = re.compile(rb"^ *\d+\.\d{6} +\d+ [A-Z]")
AGAIN = limit(10)  # seconds until a worker that died has to be there again


@dataclass(frozen=True)
class Sign:
    """Something that must not happen: its kind, the part of the text that tells cases of one cause apart, and the text."""

    kind: str
    cause: str
    text: str


@dataclass
class Ground:
    """start, look (what has happened since), stop."""

    folder: Path
    backend: str = "torch"
    workers: int = 2
    log: bool = True
    local: local.Local | None = None
    starts: int = 0
    most: dict[str, int] = field(default_factory=dict)  # role -> bytes grown by at most
    _pids: dict[int, str] = field(default_factory=dict)
    _rest: dict[int, int] = field(default_factory=dict)  # pid -> bytes at rest
    _grown: list[Sign] = field(default_factory=list)
    _read: dict[str, int] = field(default_factory=dict)

    # ---- start and end

    def start(self) -> None:
        self.starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._surroundings():
            self.local = local.start(self.workers, backend=self.backend)
        self._pids = self.processes()
        nursery = self.local._process.pid
        for pid in (nursery, *self._pids):
            self._limit(pid)
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="sampler", daemon=True)
        self._sampler.start()

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        """The log of instructions, and a file in place of stderr, for what is started within."""
        before = os.environ.get("GT_INSTRUCTION_LOG")
        if self.log:
            os.environ["GT_INSTRUCTION_LOG"] = str(self.folder / f"instructions.{self.starts}")
        kept = os.dup(2)
        errors = os.open(self.folder / f"stderr.{self.starts}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(errors, 2)
        os.close(errors)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.environ.pop("GT_INSTRUCTION_LOG", None)
            if before is not None:
                os.environ["GT_INSTRUCTION_LOG"] = before

    def _limit(self, pid: int) -> None:
        """Bound what a process can take, for the machine's sake: an attack may make it ask for all there is."""
        with contextlib.suppress(OSError):
            size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
            resource.prlimit(pid, resource.RLIMIT_AS, (size + ROOM, size + ROOM))
            self._rest[pid] = resident(pid)

    def stop(self) -> list[Sign]:
        """End it; processes that are left are signs."""
        if self.local is None:
            return []
        self._over.set()
        self._sampler.join()
        pids = {pid: (role, born(pid)) for pid, role in self.processes().items()}
        self.local.stop()
        self.local = None
        left = {pid: role for pid, (role, when) in pids.items() if alive(pid) and born(pid) == when}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [Sign("process left", role, f"{role} (pid {pid}) outlives its server") for pid, role in left.items()]

    # ---- facts

    @property
    def address(self) -> str:
        assert self.local is not None
        return self.local.address

    @property
    def token(self) -> str:
        assert self.local is not None
        return self.local.token

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def processes(self) -> dict[int, str]:
        """pid -> "gt.server" or "gt.worker N" of the children of the nursery."""
        assert self.local is not None
        found = {}
        for pid in children(self.local._process.pid):
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
                if title.startswith("gt.") and alive(pid):
                    found[pid] = title
        return found

    def pid_of(self, role: str) -> int:
        return next((pid for pid, name in self.processes().items() if name == role), 0)

    def cpu(self) -> float:
        """Seconds of CPU that the dispatcher's loop has used."""
        pid = next((pid for pid, role in self._pids.items() if role == "gt.server"), 0)
        try:
            return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
        except (OSError, IndexError):
            return 0.0

    # ---- watching

    def _sample(self) -> None:
        while not self._over.wait(LOOK):
            for pid, role in list(self._pids.items()):
                grown = resident(pid) - self._rest.get(pid, 0)
                kind = "server" if role == "gt.server" else "worker"
                self.most[kind] = max(self.most.get(kind, 0), grown)
                limit = SERVER_MEMORY if kind == "server" else WORKER_MEMORY
                if pid in self._rest and grown > limit:
                    text = f"{role} holds {grown >> 20} MiB more than at rest"
                    self._grown.append(Sign("memory", kind, text))
                    self._rest[pid] = resident(pid) + (1 << 50)  # said once
                if grown > ROOM // 2 and pid in self.processes():  # and no other process that has its number by now
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)  # before the machine suffers

    def gives_back(self, seconds: float) -> bool:
        """True once each process holds less than a worker may grow by, as it does at rest."""
        deadline, pause = time.monotonic() + seconds, threading.Event()
        while max(map(resident, self.processes()), default=0) > WORKER_MEMORY:
            if time.monotonic() > deadline:
                return False
            pause.wait(LOOK)
        self._rest = {pid: resident(pid) for pid in self._rest}
        return True

    def look(self) -> list[Sign]:
        """The signs since the last look."""
        assert self.local is not None
        signs, self._grown = self._grown, []
        now = self.processes()
        for pid, role in self._pids.items():
            if pid not in now:
                signs.append(Sign("process died", role.split()[0], f"{role} (pid {pid}) died{self._last_words()}"))
        if self.local._process.poll() is not None:
            signs.append(Sign("process died", "gt.launch", "the process that starts the others died"))
        for pid in now.keys() - self._pids.keys():
            self._limit(pid)
        self._pids = now
        return [*signs, *self._stderr(), *self._instructions()]

    def _last_words(self) -> str:
        path = self.folder / f"stderr.{self.starts}"
        text = path.read_bytes()[-300:].decode(errors="replace").strip().replace("\n", " | ") if path.exists() else ""
        return f": {text}" if text else ""

    @property
    def whole(self) -> bool:
        """True if all processes are alive."""
        return self.local is not None and self.local._process.poll() is None and len(self.processes()) == self.workers + 1

    def heal(self) -> bool:
        """Wait until all processes are there again, starting all anew if they do not come; whether that was needed."""
        deadline = time.monotonic() + AGAIN
        pause = threading.Event()
        while not self.whole:
            dead = self.local is None or self.local._process.poll() is not None or "gt.server" not in self.processes().values()
            if dead or time.monotonic() > deadline or b"is not started again" in self._new_text():
                self.stop()
                self.start()
                return True
            pause.wait(0.05)  # nobody announces it to us
        self.look()
        return False

    def _new_text(self) -> bytes:
        path = self.folder / f"stderr.{self.starts}"
        return path.read_bytes()[-4000:] if path.exists() else b""

    def _fresh(self, name: str, most: int = 4 << 20) -> bytes:
        path = self.folder / f"{name}.{self.starts}"
        if not path.exists():
            return b""
        begin, size = self._read.get(path.name, 0), path.stat().st_size
        self._read[path.name] = size
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(min(size - begin, most))

    def _stderr(self) -> list[Sign]:
        text = self._fresh("stderr")
        signs = []
        for found in re.finditer(rb"Traceback[^\0]{0,4000}?\n(\w[^\n]{0,300})", text):
            last = found[1].decode(errors="replace")
            signs.append(Sign("internal error", _place(found[0]) or last[:60], last))
        if self._read.get(f"stderr.{self.starts}", 0) > STDERR_GROWTH and not self._read.get(f"said.{self.starts}"):
            self._read[f"said.{self.starts}"] = 1
            signs.append(Sign("log grows", "stderr", f"{self._read[f'stderr.{self.starts}']} bytes of errors"))
        return signs

    def _instructions(self) -> list[Sign]:
        signs = []
        for line in self._fresh("instructions").split(b"\n")[1:-1]:
            if len(line) > LONGEST_LINE:
                signs.append(Sign("log grows", "long line", f"a line of {len(line)} bytes in the instruction log"))
            if not LINE.match(line) or re.search(rb"[\x00-\x08\x0b-\x1f\x7f]", line):
                signs.append(Sign("log forged", "instruction log", repr(line[:200])))
        return signs[:3]


def _place(text: bytes) -> str:
    """The last file and line of a traceback."""
    lines = re.findall(rb'File "[^"\n]*/(\w+\.py)", line (\d+)', text)
    return f"at {lines[-1][0].decode()}:{lines[-1][1].decode()}" if lines else ""


def born(pid: int) -> int:
    """The start time of a process in the kernel's ticks, since pids are reused."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def alive(pid: int) -> bool:
    """True if a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
