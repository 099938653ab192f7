"""Who may come in: what a Hello has to say, and clients that wait for the workers that their config names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gt import errors
from gt.config.load import check_workers, load
from gt.config.schema import Config
from gt.dispatcher.cluster import Cluster, Worker
from gt.errors import ConfigError, ProtocolError, Refused
from gt.wire.messages import Hello

PATIENCE = 30.0  # seconds a client's Hello waits for the workers that its config names
LONGEST_CONFIG = 32 << 10  # characters: parsing takes up to 0.4 s, and everybody waits
LONGEST_NAME = 64
MOST_NESTED = 16
MOST_WAITING = 1024
PRECISIONS = frozenset({"highest", "high", "medium"})


@dataclass(slots=True)
class Waiting:
    """A client whose config names workers that have not come yet."""

    peer: bytes
    hello: Hello
    config: Config
    until: float
    told: str = ""  # what it waits for


@dataclass(slots=True)
class Admission:
    cluster: Cluster
    waiting: list[Waiting] = field(default_factory=list)

    def expect(self, peer: bytes, hello: Hello, now: float) -> None:
        """A client's Hello; ConfigError or ProtocolError if no workers can make it good."""
        _switches(hello.switches)
        if len(hello.config) > LONGEST_CONFIG:
            raise ConfigError(f"{hello.config_path or 'config'} has {len(hello.config)} characters, at most {LONGEST_CONFIG}")
        if len(self.waiting) >= MOST_WAITING:
            raise Refused(f"{MOST_WAITING} programs are waiting for workers already")
        if _nesting(hello.config) > MOST_NESTED:
            raise ConfigError(f"{hello.config_path or 'config'} has more than {MOST_NESTED} brackets within one another")
        try:
            config = load(hello.config, hello.config_path)
        except RecursionError:
            raise ConfigError(f"{hello.config_path or 'config'} is nested too deep") from None
        self.waiting.append(Waiting(peer, hello, config, now + PATIENCE))

    def ready(self, client: Waiting, now: float) -> bool:
        """Whether every worker is here that a client needs; Refused or ConfigError if it has waited long enough."""
        names = self.names()
        wanted = client.hello.switches.get("workers", 0)
        late = now >= client.until
        if not names or len(names) < wanted:
            if not late:
                return False
            raise Refused(
                f"{len(names)} workers are connected, the program wants {max(wanted, 1)}: start more with `gt worker`"
            )
        everyone = [w.name for w in self.cluster.workers]
        try:
            check_workers(client.config, everyone)
        except errors.ConfigError:
            if late or wanted:
                raise
            return False
        used = {index for group in client.config.groups.values() for index in group.flat}
        gone = [w for w in self.cluster.workers if w.lost and w.index in used]
        if gone and late:
            lost = f"worker {gone[0].name} is lost ({gone[0].lost:.200}), and {len(names)} are here"
            raise Refused(f"{lost}: start another in its place with `gt worker`, or name others in the config")
        return not gone

    def missing(self, client: Waiting) -> str:
        """What a client waits for."""
        used = {index for group in client.config.groups.values() for index in group.flat}
        wanted = max(client.hello.switches.get("workers", 0), max(used, default=0) + 1)
        return f"it has {len(self.names())} of the {wanted} workers that the program wants"

    def names(self) -> list[str]:
        return [w.name for w in self.cluster.workers if not w.lost]

    def forget(self, peer: bytes) -> None:
        self.waiting = [w for w in self.waiting if w.peer != peer]

    def knows(self, peer: bytes) -> bool:
        return any(w.peer == peer for w in self.waiting)


def _nesting(text: str) -> int:
    """How deep brackets stand within brackets: parsing takes time with its square."""
    depth = deepest = 0
    for sign in text:
        if sign in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif sign in "]}":
            depth -= 1
    return deepest


def _switches(switches: dict[str, Any]) -> None:
    """ProtocolError unless a client's switches are of the protocol."""
    allowed = {
        "threads": lambda v: type(v) is int and 0 <= v <= 1 << 12,
        "workers": lambda v: type(v) is int and 0 <= v <= 1 << 16,
        "matmul_precision": lambda v: v in PRECISIONS,
        "deterministic": lambda v: type(v) is bool,
    }
    for name, value in switches.items():
        if name not in allowed or isinstance(value, (list, dict)) or not allowed[name](value):
            raise ProtocolError(f"Hello.switches.{name:.40} is {value!r:.40}")


def worker_info(info: dict[str, Any]) -> dict[str, Any]:
    """What a worker says of itself, complete; ProtocolError names what is no such thing."""
    defaults = {
        "name": "",
        "pid": 0,
        "host": "",
        "backend": "",
        "device": "",
        "heap_fd": -1,
        "heap_bytes": 0,
        "doorbell": "",
        "unique_id": "",
    }
    for key, value in info.items():
        if key not in defaults:
            raise ProtocolError(f"Hello.info.{key:.40} is nothing that a worker says of itself")
        if type(value) is not type(defaults[key]) or (isinstance(value, str) and len(value) > 255):
            raise ProtocolError(f"Hello.info.{key} is {value!r:.40}")
    whole = {**defaults, **info}
    if not -1 <= whole["heap_bytes"] < 1 << 62 or not whole["name"].isprintable() or len(whole["name"]) > LONGEST_NAME:
        raise ProtocolError(f"Hello.info: heap_bytes {whole['heap_bytes']} or name {whole['name']!r:.80} cannot be")
    return whole


def shared_out(switches: dict[str, Any], config: Config, cluster: Cluster, worker: Worker) -> dict[str, Any]:
    """A program's switches on one worker, its threads shared out among the workers it uses on one host.

    Eight workers with all the cores' threads each spend their time in one another's way (seen: 30 times slower on two cores).
    """
    used = {index for group in config.groups.values() for index in group.flat}
    beside = sum(cluster.workers[index].info.get("host") == worker.info.get("host") for index in used)
    threads = switches.get("threads", 0)
    return {**switches, "threads": max(threads // beside, 1)} if threads and beside > 1 else switches
