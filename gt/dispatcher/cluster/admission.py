"""Admission: checks of a Hello, and clients that wait for the workers that their config names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from gt.config.load import check_workers, load
from gt.config.schema import Config
from gt.dispatcher.cluster.leases import PATIENCE_SECONDS, Exclusive, Shared, Waiting
from gt.dispatcher.cluster.links import described, home
from gt.dispatcher.cluster.peer_info import client_info
from gt.dispatcher.cluster.workers import Cluster, Worker
from gt.errors import ConfigError, ProtocolError, Refused
from gt.wire.messages import MAX_STALL_SECONDS, Hello

MAX_CONFIG_CHARACTERS = 32 << 10
SHORT_CONFIG_CHARACTERS = 8 << 10  # a longer one takes up to 0.1 s to read, and is read beside the loop
MAX_WAITING_CLIENTS = 1024
PRECISIONS = frozenset({"highest", "high", "medium"})


@dataclass(slots=True)
class Admission:
    """most: workers that there will ever be, 0 if more may come."""

    lending: Shared | Exclusive
    most: int = 0
    waiting: list[Waiting] = field(default_factory=list)
    reading: set[bytes] = field(default_factory=set)  # peers whose config is read

    def expect(self, peer: bytes, hello: Hello, now: float, apart: Callable[[], AbstractContextManager[None]]) -> None:
        """A client's Hello. apart: lets others go on while the config is read.

        ConfigError, Refused or ProtocolError if no workers can make it good.
        """
        # 1. Limits, before the config is read: reading takes time with its length.
        _switches(hello.switches)
        if len(hello.config) > MAX_CONFIG_CHARACTERS:
            raise ConfigError(
                f"{hello.config_path or 'config'} has {len(hello.config)} characters, at most {MAX_CONFIG_CHARACTERS}"
            )
        if len(self.waiting) + len(self.reading - {peer}) >= MAX_WAITING_CLIENTS:
            raise Refused(f"{MAX_WAITING_CLIENTS} programs wait for workers already, and no more can: try again later")
        # Others go on meanwhile. `reading` counts such clients, and tells if this one has left when its config is read.
        try:
            with apart():
                config = load(hello.config, hello.config_path)
        except RecursionError:
            raise ConfigError(f"{hello.config_path or 'config'} is nested too deep") from None

        # 2. Errors that no wait can mend are raised now: a worker that this server will never have, or more than are allowed.
        self.reading.discard(peer)
        if self.most:
            check_workers(config, [f"w{n}" for n in range(self.most)])
        client = Waiting(peer, hello, config, now + PATIENCE_SECONDS, used_workers(config), client_info(hello.info))
        self.lending.examine(client)
        self.waiting.append(client)

    def forget(self, peer: bytes) -> None:
        self.reading.discard(peer)
        self.waiting = [w for w in self.waiting if w.peer != peer]

    def knows(self, peer: bytes) -> bool:
        return peer in self.reading or any(w.peer == peer for w in self.waiting)


def used_workers(config: Config) -> frozenset[int]:
    """Indices of the workers that a config names."""
    return frozenset(index for group in config.groups.values() for index in group.flat)


def _switches(switches: dict[str, Any]) -> None:
    """ProtocolError unless a client's switches are of the protocol."""
    allowed = {
        "threads": lambda v: type(v) is int and 0 <= v <= 1 << 12,
        "workers": lambda v: type(v) is int and 0 <= v <= 1 << 16,
        "matmul_precision": lambda v: v in PRECISIONS,
        "deterministic": lambda v: type(v) is bool,
        "cudnn_benchmark": lambda v: type(v) is bool,
        "cudnn_tf32": lambda v: type(v) is bool,
        "stall_timeout": lambda v: type(v) in (int, float) and 0 <= v <= MAX_STALL_SECONDS,
    }
    for name, value in switches.items():
        # A list or dict may not be hashable, as `v in PRECISIONS` needs.
        if name not in allowed or isinstance(value, (list, dict)) or not allowed[name](value):
            raise ProtocolError(f"Hello.switches.{name:.40} is {value!r:.40}, want a known setting with a value that it allows")


class SharedThreads:
    """A program's switches on each worker, its threads shared out among the workers it uses on one host.

    Eight workers with all the cores' threads each spend their time in one another's way (seen: 30 times slower on two cores).
    Hosts are counted anew only for a worker that has been replaced: each Run to each worker asks.
    """

    def __init__(self, switches: dict[str, Any], config: Config, cluster: Cluster) -> None:
        self._switches, self._used, self._cluster = switches, used_workers(config), cluster
        self._lives: dict[int, int] = {}  # worker -> its count of lives when threads were shared out
        self._on_host: Counter[str] = Counter()

    def __call__(self, worker: Worker) -> dict[str, Any]:
        threads = self._switches.get("threads", 0)
        if not threads:
            return self._switches
        # The count holds until a worker is replaced, which may bring it to another host.
        if self._lives.get(worker.index) != worker.lives:
            workers = self._cluster.workers
            self._lives = {one.index: one.lives for one in workers}
            self._on_host = Counter(home(workers[index].info) for index in self._used)
        on_host = self._on_host[home(worker.info)]
        return {**self._switches, "threads": max(threads // on_host, 1)} if on_host > 1 else self._switches


def check_links(config: Config, cluster: Cluster) -> None:
    """ConfigError for a group whose workers are on hosts that nothing joins."""
    ways = cluster.ways() if len(cluster.hosts_of(cluster.workers)) > 1 else {}
    parted = {pair for pair, way in ways.items() if way.kind == "none"}
    for group in config.groups.values() if parted else ():
        hosts = cluster.hosts_of(cluster.workers[index] for index in group.flat)
        for place, one in enumerate(hosts):
            for other in hosts[place + 1 :]:
                if (one.home, other.home) in parted:
                    raise ConfigError(
                        f"{config.where(group.name)} spans {one.name} and {other.name}, which no link joins, and no host "
                        f"relays between them: {described([one, other])}; join them, or keep the group to one of them"
                    )
