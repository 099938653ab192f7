"""Messages that begin and end the connection of any peer."""

from __future__ import annotations

from dataclasses import dataclass, field

from gt.wire.messages.base import Message

# ---- begin and end of a connection


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Client, worker or observer -> dispatcher: the first message. Answered by Welcome or Reject.

    role: "client", "worker" or "observer". config: text of a client's YAML, "" for none. config_path: its path, for error
    messages only. switches: of a client; {"threads": int, "matmul_precision": str, "deterministic": bool, "cudnn_benchmark":
    bool, "cudnn_tf32": bool, "stall_timeout": seconds without progress that are an error, 0 for none, "workers": how many
    workers it wants, 0 for all; an exclusive server lends them}. info: of a worker; {"name": "" asks for the next free one,
    "pid", "host", "backend", "device", "heap_fd", "heap_bytes", "doorbell", "unique_id", "home": see gt.wire.liveness, "proof":
    see gt.wire.access.proof, "ops": lines of the schemas of its libraries' ops, see ir.schema, "rank": its index, -1 lets the
    dispatcher choose, "gpu": its number on the host, -1 for none, "port": where it accepts workers of other hosts, 0 nowhere,
    "links": [address, prefix, device, Mbit/s or 0, True if a default route leads out there] of its host, "routes":
    [network, prefix, device or "" where packets are refused] of its host but defaults, "scope": of its addresses, the same
    for containers that share a network, "rates": of its GPU's link and of host memory, bytes/s}. Of a client, for
    observers; {"user", "program", "host", "pid"}.
    """

    version: int
    gt: str
    role: str
    config: str
    config_path: str
    switches: dict
    info: dict


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Dispatcher -> client, worker or observer, answers Hello.

    workers: their names, in order of index. groups: names of the signal groups, in order. process: [pid, home] of the
    dispatcher, see wire.liveness; peers on its host see whether it is stopped. ops: for a client, lines of the schemas of the
    libraries' ops that all of its workers have. gpus: for a client, true if each of its workers has a GPU.
    """

    session: int
    name: str
    workers: list
    groups: list
    credit: int
    process: list = field(default_factory=list)
    ops: list = field(default_factory=list)
    gpus: bool = False


@dataclass(frozen=True, slots=True)
class Reject(Message):
    """Dispatcher -> client, worker or observer, answers Hello: the connection is refused. error: see errors.to_wire."""

    error: dict


@dataclass(frozen=True, slots=True)
class Goodbye(Message):
    """Client, worker or observer -> dispatcher: ends the connection; not answered. reason: why a worker ended, or ""."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Exit(Message):
    """Dispatcher -> any peer: the server stops, or has ended this connection."""

    reason: str
