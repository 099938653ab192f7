"""Supervisor: the process through which a program starts a dispatcher and workers on its own machine.

It forks the dispatcher, imports torch once, and forks the workers, which share the import. It restarts a worker that dies, and
one that stays stopped once the dispatcher has given it up. It ends with the program: when its stdin ends, its parent changes,
or on SIGTERM. If it is stopped then, the kernel continues it (see __main__). It reports to the program in JSON lines on stdout.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gt import env, logs
from gt.errors import DispatcherLost, GTError
from gt.launch import machine
from gt.launch.process import ending, fork, how_ended
from gt.launch.ssh import RemoteHost
from gt.wire import tcp
from gt.wire.liveness import POLLS_PER_HEARTBEAT, Vigil, home, sight
from gt.wire.socket import resolve, written

POLL_SECONDS = 0.2  # seconds between looks at parent and children
EXIT_SECONDS, SIGTERM_SECONDS = 0.5, 1.0  # seconds for children to end after the dispatcher's Exit, and after SIGTERM
MAX_RESTARTS, RESTARTS_SECONDS = 3, 60.0  # restarts of a worker, at most, within so many seconds
REPLACED_HEARTBEATS = 2  # heartbeats for which a worker's process may be stopped until it is replaced
STARTING_HEARTBEATS = 0.5  # heartbeats for which a starting process may be stopped until that is an error
WAITS_SECONDS = 15.0  # after which a worker says that it waits for its server, again and again
KEPT_LINES = 12  # lines of stderr kept of each worker, for the error if it dies at start
HOST_GRACE_SECONDS = 3.0  # seconds more for hosts that are reached by ssh
ENDED, LOST, UNREACHED = 0, 3, 4  # exit codes of a worker: told to end; its link ended; no server took it
# Signals that launchers send to every process of a job, for the program to answer. STOP_SIGNAL is the supervisor's own.
SIGNALS_OF_JOBS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STOP_SIGNAL = signal.SIGRTMIN + 5


class Supervisor:
    """order: {"token", "workers", "gpu", "backend", "heartbeat", "libraries", "path"}, see launch.local.

    The token is the server's secret. path: folders where the program finds modules, for the libraries. A job's order has more,
    see launch.job:

        listen    host and port; the token is then one that people gave
        own       the address for workers of this host
        first     index of its first worker
        total     workers of the whole job
        hosts     those that it reaches by ssh
        patient   signals are the program's to answer
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._parent = os.getppid()
        self._select = selectors.DefaultSelector()
        self._dispatcher = 0
        self._workers: dict[int, int] = {}  # pid -> number
        self._vigils: dict[int, Vigil] = {}  # by pid
        self._next_poll = 0.0  # time of the next look at them
        self._words: dict[int, deque[str]] = {}
        self._again: dict[int, deque[float]] = {}  # number -> times of its restarts
        self._start: Callable[[int], None] = lambda number: None
        self._ready = self._stopping = self._silent = self._terminated = False
        self._port = 0  # once the dispatcher has reported it
        self._status = b""  # the dispatcher's output up to now: an incomplete line
        self._total = order.get("total") or order["workers"]
        self._hosts: dict[int, RemoteHost] = {}  # by pid of ssh
        self._patient = bool(order.get("patient"))
        # Ctrl-C and a job's signals go to the whole group of processes. They are
        # for the program, which tells this one to end by closing its stdin.
        signal.signal(signal.SIGTERM, signal.SIG_IGN if self._patient else self._on_sigterm)
        for number in (signal.SIGINT, *(SIGNALS_OF_JOBS if self._patient else ())):
            signal.signal(number, signal.SIG_IGN)

    def run(self) -> int:
        """Supervise until the end; the process's exit code."""
        # 1. The dispatcher is forked before torch is imported, which it does not need: it binds its port meanwhile. What it
        # shares with workers is imported first.
        status = os.pipe()
        if self._order["workers"]:
            import gt.worker.loop  # noqa: F401 - half of its modules are the dispatcher's too, and NumPy and ZeroMQ
        self._dispatcher = fork("gt.server", lambda: _dispatch(self._order, status[1]))
        os.close(status[1])
        self._watch(self._dispatcher)

        try:
            # 2. torch, once for all workers. Nothing here may initialise CUDA, since a process that has cannot fork workers.
            gpus = preload(self._order["backend"]) if self._order["workers"] else []
            self._select.register(0, selectors.EVENT_READ, self._on_stdin)
            self._select.register(status[0], selectors.EVENT_READ, self._on_status)
            # 3. Workers, once the port is known; then supervision until something ends it.
            while not (self._port or self._stopping):
                self._turn(POLL_SECONDS)
            if not self._stopping:
                self._fork_workers(self._port, gpus if self._order["gpu"] else [])
                for about in self._order.get("hosts", ()):
                    self._reach(RemoteHost(about, self._order, self._port))
                self._report(port=self._port, gpus=len(gpus))
            while not self._stopping:
                self._turn(POLL_SECONDS)
        except (RuntimeError, GTError) as error:
            self._report(failed=str(error))
        finally:
            self._end()
        return 0

    # ---- children

    def _fork_workers(self, port: int, gpus: list[str]) -> None:
        gc.freeze()  # pages shared with the children stay shared
        self._start = partial(self._fork_worker, port, gpus)
        for number in range(self._order["workers"]):
            self._start(number)
        if not self._total:
            self._up()

    def _fork_worker(self, port: int, gpus: list[str], number: int) -> None:
        # Its stderr passes through a pipe, so that the last lines can be in the error if it dies at its start.
        end, start = os.pipe()
        gpu = gpus[number] if number < len(gpus) else ""
        pid = fork(f"gt.worker {self._order.get('first', 0) + number}", self._body(port, gpu, number), stderr=start)
        os.close(start)
        self._workers[pid] = number
        self._watch(pid)
        self._words[number] = deque(maxlen=KEPT_LINES)
        self._select.register(end, selectors.EVENT_READ, partial(self._on_stderr, number=number))

    def _body(self, port: int, gpu: str, number: int) -> Callable[[], object]:
        """The function that a worker's process executes."""
        return partial(work, self._order, (self._order.get("own", "127.0.0.1"), port), gpu, number)

    def _reach(self, host: RemoteHost) -> None:
        """Start a host's workers by ssh."""
        self._hosts[host.start()] = host
        self._select.register(host.stderr(), selectors.EVENT_READ, partial(self._on_remote, host=host))

    def _on_remote(self, fd: int, host: RemoteHost) -> None:
        data = os.read(fd, 1 << 16)
        if not data:
            self._select.unregister(fd)
            os.close(fd)
        self._pass_on(host.prefixed(data))

    def _lost_host(self, host: RemoteHost, code: int) -> None:
        """Reach it again, some times: it may have restarted. RuntimeError while the job starts."""
        # While a job starts, a host that is not reached is an error of the user's; later it may only have restarted.
        if not self._ready:
            self._drain()
            raise RuntimeError(host.ended(code))
        self._pass_on(f"gt: {host.ended(code)}\n".encode())
        if host.again(time.monotonic()):
            self._reach(host)

    def _watch(self, pid: int) -> None:
        patience = REPLACED_HEARTBEATS if self._ready else STARTING_HEARTBEATS
        self._vigils[pid] = Vigil(pid, home(), int(patience * POLLS_PER_HEARTBEAT))

    def _up(self) -> None:
        """Report that all have started. From here on the program watches the dispatcher."""
        # Workers get new vigils, since a running process may be stopped for longer than a starting one.
        self._ready = True
        self._vigils.clear()
        for pid in self._workers:
            self._watch(pid)

    def _lost_worker(self, number: int) -> None:
        """Start another worker in its place, unless it keeps dying. The dispatcher reports lost tensors to sessions."""
        # `times` has at most MAX_RESTARTS entries: if the oldest is recent, all are.
        now, times = time.monotonic(), self._again.setdefault(number, deque(maxlen=MAX_RESTARTS))
        if len(times) == MAX_RESTARTS and now - times[0] < RESTARTS_SECONDS:
            often = f"{MAX_RESTARTS + 1} times within {RESTARTS_SECONDS:g} s"
            sys.stderr.write(f"gt: worker {number} died {often} and is not started again\n")
            return
        times.append(now)
        self._start(number)

    def _turn(self, timeout: float) -> None:
        ready = self._select.select(timeout)
        # Looked at first: what workers say of a dead dispatcher, the program is told anyway.
        self._silent |= bool(ready) and not logs.asked("worker") and self._dispatcher_ends()

        # Ends are collected before pipes are read, and handled after: so a
        # dead worker's last words are there when it is reported.
        dead = list(_ended())
        for key, _ in ready:
            key.data(key.fd)
        if os.getppid() != self._parent:
            self._stopping = True

        for pid, code in dead:
            if pid == self._dispatcher:
                self._dispatcher, self._stopping = 0, True
                self._vigils.pop(pid, None)
                if not self._ready:
                    self._drain()
                    raise RuntimeError(f"the dispatcher died while starting{how_ended(code)}")
                self._report(ended=f"the dispatcher died{how_ended(code)}")
            elif pid in self._hosts:
                host = self._hosts.pop(pid)
                if not self._stopping:
                    self._lost_host(host, code)
            elif pid in self._workers:
                number = self._workers.pop(pid)
                self._vigils.pop(pid, None)
                self._ended_worker(number, code)
        self._end_stopped()

    def _dispatcher_ends(self) -> bool:
        """True once the program is told of the dispatcher's end, so that its workers need not say it too."""
        return not self._dispatcher or ending(self._dispatcher)

    def _ended_worker(self, number: int, code: int) -> None:
        if not self._ready and not self._stopping:
            self._drain()
            raise RuntimeError(_last_words(number, code, self._words[number]))
        if not self._stopping and self._dispatcher:
            self._lost_worker(number)

    def _on_sigterm(self, number: int, frame: object) -> None:
        self._stopping = self._terminated = True

    def _end_stopped(self) -> None:
        """End workers that the dispatcher has given up, even if they could continue. RuntimeError at the start."""
        now = time.monotonic()
        if self._vigils and now >= self._next_poll:
            # A worker that is stopped this long was given up by the dispatcher, which waits one heartbeat. Its end lets a
            # successor start.
            self._next_poll = now + self._order["heartbeat"] / POLLS_PER_HEARTBEAT
            for pid, vigil in self._vigils.items():
                if not vigil.poll():
                    continue
                if not self._ready:
                    name = f"worker {self._workers[pid]}" if pid in self._workers else "the dispatcher"
                    how = f"its process {pid} is stopped by a signal or a debugger (state {sight(pid, home()).state})"
                    raise RuntimeError(f"{name} does not start: {how}; start again")
                _signal(pid, signal.SIGKILL)

    def _drain(self) -> None:
        """Read the last stderr of dead workers."""
        for key, _ in self._select.select(0):
            key.data(key.fd)

    def _end(self) -> None:
        """End the workers: by the dispatcher's Exit, then by SIGTERM, then by SIGKILL."""
        if 0 in self._select.get_map():
            self._select.unregister(0)
        if self._terminated:
            self._report(ended=f"process {os.getpid()}, which started dispatcher and workers, received SIGTERM")

        # The dispatcher's Exit ends its workers; ssh ends with its standard input. Who is left gets signals.
        left = {self._dispatcher, *self._workers, *self._hosts} - {0}
        stop = STOP_SIGNAL if self._patient else signal.SIGTERM
        _signal(self._dispatcher, stop)
        for host in self._hosts.values():
            host.close()
        left = self._wait(left, EXIT_SECONDS + (HOST_GRACE_SECONDS if self._hosts else 0.0))
        for pid in left:
            _signal(pid, stop if pid in self._workers else signal.SIGTERM)
        for pid in self._wait(left, SIGTERM_SECONDS):
            _signal(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _wait(self, pids: set[int], seconds: float) -> set[int]:
        """The processes that are alive after `seconds`. Their stderr is forwarded meanwhile."""
        deadline = time.monotonic() + seconds
        while pids and time.monotonic() < deadline:
            for key, _ in self._select.select(0.01):
                key.data(key.fd)
            pids = pids - {pid for pid, _ in _ended()}
        return pids

    # ---- reports and stderr of children

    def _on_stdin(self, fd: int) -> None:
        if not os.read(fd, 4096):
            self._select.unregister(fd)
            self._stopping = True

    def _on_status(self, fd: int) -> None:
        data = os.read(fd, 4096)
        if not data:
            self._select.unregister(fd)
            return
        # The dispatcher's reports, one JSON object a line: {"port"}, then {"workers": names} at each change, or {"failed"}.
        *lines, self._status = (self._status + data).split(b"\n")
        for row in map(json.loads, lines):
            if "failed" in row:
                raise RuntimeError(row["failed"])
            self._port = row.get("port", self._port)
            if "workers" in row and not self._ready:
                self._report(connected=row["workers"])
                if len(row["workers"]) == self._total:
                    self._up()
                    self._report(ready=self._total)

    def _on_stderr(self, fd: int, number: int) -> None:
        data = os.read(fd, 1 << 16)
        if not data:
            self._select.unregister(fd)
            os.close(fd)
            return
        self._words[number].extend(data.decode(errors="replace").splitlines())
        if not self._silent:
            self._pass_on(data)

    def _pass_on(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(2, data)

    def _report(self, **facts: Any) -> None:
        with contextlib.suppress(OSError):  # the program is gone: the end of stdin shows it too
            os.write(1, json.dumps(facts).encode() + b"\n")


def read_order() -> dict[str, Any]:
    """The order: one JSON line on stdin, as its token must not show in `ps`. Empty if stdin has ended."""
    line = b""
    while not line.endswith(b"\n"):
        # One byte at a time: what follows the line is not ours to take from the pipe.
        data = os.read(0, 1)
        if not data:
            return {}
        line += data
    return json.loads(line)


# ---- in the children


def _dispatch(order: dict[str, Any], status: int) -> None:
    """The dispatcher process: reports its port, then the names of its workers."""
    from gt import errors
    from gt.dispatcher.cluster.leases import Terms
    from gt.dispatcher.server import Server
    from gt.wire.access.auth import Access
    from gt.wire.process_settings import collect_less, keep_freed, more_descriptors, take_turns

    def announce(**facts: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(status, json.dumps(facts).encode() + b"\n")

    # In a job SIGTERM is the program's to answer, so the supervisor ends this process by another signal.
    logs.setup("dispatcher", "gt.server")
    more_descriptors()
    stop: int = signal.SIGTERM
    if order.get("patient"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop = STOP_SIGNAL

    # Without `listen` the token is a secret of this start on loopback; a job's token was given by people.
    listen = order.get("listen")
    host, port = listen or ("127.0.0.1", 0)
    try:
        access = Access(token=order["token"]) if listen else Access(secret=order["token"])
        terms = Terms(most=order.get("total") or order["workers"])
        server = Server(host, port, access, order["heartbeat"], terms=terms)
    except errors.GTError as error:
        announce(failed=str(error))
        return

    # The supervisor learns the port, then each change of the workers that are connected.
    signal.signal(stop, lambda *_: server.stop("the process that started it has ended"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server.on_workers = lambda count: announce(workers=server.worker_names)
    announce(port=server.port)
    keep_freed()
    collect_less()
    take_turns()
    server.run()


def work(
    order: dict[str, Any], server: tuple[str, int], gpu: str, number: int, wait: float = 10.0,
    met: Callable[[], object] = lambda: None,
) -> int:  # fmt: skip
    """Be a worker until its end. Returns its process's exit code: ENDED if it was told to end, LOST, or UNREACHED.

    server: host and port. met: called once the server has taken the worker.
    """
    from gt.worker.loop import WorkerOptions, run

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A job's SIGTERM goes to every process. It is blocked, so that the program can save a checkpoint with its workers' help.
    if order.get("patient"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        signal.signal(STOP_SIGNAL, _terminate)

    # Set before the first use of CUDA: the worker sees its own GPU alone, as number 0.
    if gpu:
        env.export(CUDA_VISIBLE_DEVICES=gpu)
    device = "cuda:0" if gpu else "cpu"
    sys.path.extend(folder for folder in order["path"] if folder not in sys.path)
    rank = order["first"] + number if "first" in order else -1
    options = WorkerOptions(
        *server, order["token"], f"w{rank}" if rank >= 0 else "", order["backend"], device, wait,
        libraries=order["libraries"], rank=rank,
    )  # fmt: skip
    connected: list[str] = []
    here = threading.Event()

    def joined(name: str) -> None:
        connected.append(name)
        here.set()
        met()

    # A rank may be up minutes before rank 0, and then waits. One that has the wrong place to look at waits in vain.
    if wait > WAITS_SECONDS:
        about = here, f"worker {max(rank, number)}", *server
        threading.Thread(target=_say_that_it_waits, args=about, daemon=True).start()
    why = run(options, joined)
    here.set()
    if why:
        sys.stderr.write(f"gt worker: {why}\n")
    return ENDED if not why else LOST if connected else UNREACHED


def _say_that_it_waits(here: threading.Event, name: str, host: str, port: int) -> None:
    """Now and then, until a worker is connected, say which server it waits for, and if anything listens there."""
    while not here.wait(WAITS_SECONDS):
        with contextlib.suppress(DispatcherLost, OSError):
            found = "it does not take this one yet" if tcp.listens(resolve(host), port) else "nothing answers there"
            todo = "is rank 0 up, has it this address and port, and does no firewall keep it from this host?"
            sys.stderr.write(f"gt: {name} waits for the server at {written(host, port)}: {found}; {todo}\n")


def _terminate(number: int, frame: object) -> None:
    """End a worker that ignores its job's SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


# ---- helpers


def preload(backend: str) -> list[str]:
    """Import the modules that all workers share, and return the usable GPUs."""
    from gt.worker.engine.registry import ENGINES, import_torch_engine, open_engine

    # An engine is opened for its modules alone, which the forked workers then share.
    if backend != "torch":
        if backend in ENGINES:
            open_engine(backend, "cpu")
        return []
    import_torch_engine()
    import torch

    return machine.gpus() if torch.backends.cuda.is_built() else []


def _ended() -> Iterator[tuple[int, int]]:
    """(pid, exit code) of each child that has ended since; negative codes are signals."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            yield pid, os.waitstatus_to_exitcode(status)


def _signal(pid: int, number: int) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _last_words(number: int, code: int, words: deque[str]) -> str:
    last_lines = ": " + " | ".join(words) if words else ", and said nothing: run with GT_VERBOSE=1 to see why"
    return f"worker {number} died while starting{'' if code in (LOST, UNREACHED) else how_ended(code)}{last_lines}"
