"""Jobs of several processes, which a launcher or ssh has started: rank 0 has server and program, and all ranks have workers.

gt.launch.launchers says which rank this process is. A process of another rank becomes the supervisor of its workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from gt import env
from gt.errors import ConfigError, DispatcherLost, Refused, SystemFailure
from gt.launch import launchers, local, machine, ssh
from gt.launch.host_agent import links
from gt.launch.launchers import JobPlace
from gt.wire.access import auth
from gt.wire.socket import host_and_port, resolve

START_SECONDS = 600.0  # until all ranks are there: images are pulled, and torch is imported from a cold disk
SERVER_SECONDS = 20.0  # for workers behind ssh to reach their server, which is up before they are
HEARTBEAT_SECONDS = 10.0
LONGEST_COUNT = 9  # digits of a number of workers
EVERYWHERE = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
_begun: list[JobPlace] = []  # jobs that this process has started


@dataclass(frozen=True)
class Running:
    """A running job, as its program connects to it."""

    address: str
    token: str
    workers: int


def running() -> Running | None:
    """The job that `gt run` has started around this program, None without one."""
    address, _, workers = env.get("GT_JOB").partition(" ")
    if not address:
        return None
    try:
        host_and_port(address)
        count = int(workers) if workers.isdecimal() and len(workers) <= LONGEST_COUNT else 0
    except DispatcherLost:
        count = 0
    if not count:
        raise ConfigError(f"GT_JOB is {env.get('GT_JOB')!r:.80}, want host:port and a number of workers; only `gt run` sets it")
    return Running(address, _token(), count)


def place() -> JobPlace:
    """This process's place in its job; alone on this host if no launcher has started it."""
    job_place = launchers.place(env.of_launcher(launchers.VARIABLES))
    if job_place is None:
        return JobPlace("")
    port = _port()
    return replace(job_place, port=port, store=None) if port else job_place


def work(at: JobPlace) -> NoReturn:
    """Replace this process by the supervisor of its rank's workers, which ends with the job. For ranks above 0."""
    token, count = token_for(at), workers_of(at)
    host = launchers.LOOPBACK if at.alone else at.host
    port = port_of(at)
    order = _order(token, count, first=at.rank * count, server=[host, port], wait=START_SECONDS, patient=True)

    # The supervisor reads its order from stdin and ends with it. The writing end stays open in the new image of this process
    # and is never closed: it ends when the process does. An order is far shorter than a pipe's buffer, so the write does not
    # wait.
    reading, writing = os.pipe()
    os.write(writing, json.dumps(order).encode() + b"\n")
    os.dup2(reading, 0)
    os.set_inheritable(writing, True)

    # Buffers of this image are lost at execve.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    variables = env.child(PYTHONPATH=env.python_path(str(Path(__file__).parents[2])), **_own_gpu(at))
    os.execve(sys.executable, [sys.executable, "-m", "gt.launch"], variables)


def start(at: JobPlace, meanwhile: Callable[[], None] | None = None) -> local.Local:
    """Start rank 0's server and workers, and return once the workers of all ranks are connected. For one job, once."""
    # The other ranks' processes ended with the first server, so a second one would wait for them in vain.
    if _begun and at.size > 1:
        raise Refused("this job has ended by gt.shutdown(), and its other processes with it: start the job again")
    _begun.append(at)
    token, count = token_for(at), workers_of(at)
    env.export(**_own_gpu(at))
    listen = [launchers.LOOPBACK if at.alone else EVERYWHERE, at.port]
    own = launchers.LOOPBACK if at.alone else own_address(at.host)
    order = _order(token, count, first=0, total=at.size * count, listen=listen, own=own, patient=True)

    try:
        return local.launch(order, local.Start(START_SECONDS, meanwhile, partial(publish, at), spoken=True))
    except SystemFailure as error:
        raise SystemFailure(f"{error}{_elsewhere(at)}") from None


def _elsewhere(at: JobPlace) -> str:
    """A sentence with a cure, if rank 0's host is not the one at which the job's processes look for it; else ""."""
    with contextlib.suppress(DispatcherLost):
        address = resolve(at.host)
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
            try:
                sock.bind((address, 0))
            except OSError:
                name = address if address == at.host else f"{at.host} is {address}, which"
                where = f"{name} is no address of {socket.gethostname()}"
                return f"; {where}: start rank 0 there, or set MASTER_ADDR to this host for all processes"
    return ""


def publish(at: JobPlace, port: int, use: str = "") -> None:
    """Tell other ranks the port that rank 0 has taken. use: of a port that is not the server's."""
    if at.store is not None and at.size > 1:
        _store(at).set(at.store[2] + use, str(port))


def port_of(at: JobPlace, use: str = "") -> int:
    """The port that rank 0 has published; waits for it."""
    return int(_store(at).get(at.store[2] + use)) if at.store is not None else at.port


@dataclass(frozen=True)
class Reach:
    """The way to hosts: ssh's command, the interpreter there, and the address of this host for them, "" to take ssh's."""

    ssh: Sequence[str] = ssh.SSH
    python: str = ""
    address: str = ""


def start_hosts(hosts: Sequence[ssh.HostEntry], reach: Reach, meanwhile: Callable[[], None] | None = None) -> local.Local:
    """Start a server here and workers on the hosts, in their order, and return once all are connected."""
    token = env.token() or auth.strong()
    # Workers are numbered host by host: `first` is the index of a host's first one.
    known = ssh.with_slots(hosts, reach.ssh, reach.python)
    rows, first = [], 0
    for host in known:
        rows.append({"host": host.name, "slots": host.slots, "first": first})
        first += host.slots
    alone = all(ssh.is_this_host(host.name) for host in known)
    order = _order(
        token, 0, total=first, hosts=rows, listen=[launchers.LOOPBACK if alone else EVERYWHERE, _port()], wait=SERVER_SECONDS,
        own=launchers.LOOPBACK if alone else own_address(reach.address), ssh=list(reach.ssh), python=reach.python,
        address=reach.address, variables=env.for_hosts(),
    )  # fmt: skip
    return local.launch(order, local.Start(START_SECONDS, meanwhile, spoken=True))


def workers_of(at: JobPlace) -> int:
    """Number of workers that each process of the job starts."""
    own = env.whole("GT_WORKERS", 0, least=1, most=launchers.MAX_PROCESSES)
    return own or at.workers or max(len(machine.gpus()) if at.local_size == 1 else 1, 1)


def own_address(host: str = "") -> str:
    """An address of this host for its own workers, who accept other hosts' workers only if their server is off loopback.

    host: a name of this host, which it may itself resolve to loopback.
    """
    # /etc/hosts often maps a host's own name to 127.0.1.1; then the address of its first link is taken.
    with contextlib.suppress(DispatcherLost):
        if host and not auth.loopback(address := resolve(host)):
            return address
    return next((link[0] for link in links()), launchers.LOOPBACK)


def _own_gpu(at: JobPlace) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for the workers of one of several processes on a host that all see all GPUs."""
    # torchrun and mpirun show all GPUs to each process, of which each takes its own. srun may have divided them already.
    gpus = machine.gpus()
    if at.local_size == 1 or len(gpus) < 2:
        return {}
    count = workers_of(at)
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[at.local_rank * count : (at.local_rank + 1) * count])}


def _order(token: str, workers: int, **more: Any) -> dict[str, Any]:
    libraries = env.names("GT_LIBRARIES")
    common = {"token": token, "workers": workers, "gpu": True, "backend": env.backend(), "heartbeat": HEARTBEAT_SECONDS}
    return {**common, "libraries": libraries, "path": sys.path if libraries else [], **more}


def _port() -> int:
    return env.whole("GT_PORT", 0, least=1, most=(1 << 16) - 1)


def _token() -> str:
    try:
        return env.token()
    except OSError as error:
        raise Refused(f"GT_TOKEN_FILE={error.filename} cannot be read: {error.strerror}") from None


def token_for(at: JobPlace) -> str:
    """The job's token. Refused for a job on several hosts that has none."""
    token = _token()
    if not token and not at.alone:
        raise Refused(
            "a job on several hosts needs a token: make one with `gt key ~/.gt-token`, and set GT_TOKEN_FILE=~/.gt-token "
            "(or GT_TOKEN, or --token-file) for all of its processes"
        )
    return token


def _store(at: JobPlace) -> Any:
    """The store of torchrun's agent."""
    from torch.distributed import TCPStore

    assert at.store is not None
    host, port, _ = at.store
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=START_SECONDS))
