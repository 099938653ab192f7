"""Hello.info of workers and clients, with all fields, checked."""

from __future__ import annotations

import ipaddress
import math
from typing import Any

from gt.errors import ProtocolError
from gt.ir.schema import library_schemas
from gt.logs import plain

MAX_NAME_CHARACTERS = 64
MAX_TEXT_CHARACTERS = 255
MAX_RANK = (1 << 12) - 1
MAX_LINKS, MAX_ROUTES = 64, 128
MAX_MBPS = 1 << 30
# Every field with its default, whose type a peer's value must have
# exactly. What they mean is said in gt.wire.messages.handshake.
WORKER: dict[str, Any] = {
    "name": "", "pid": 0, "host": "", "backend": "", "device": "", "heap_fd": -1, "heap_bytes": 0, "doorbell": "",
    "unique_id": "", "home": "", "proof": "", "ops": [], "rank": -1, "gpu": -1, "port": 0, "links": [], "nccl": "", "rates": [],
    "routes": [], "scope": "",
}  # fmt: skip
CLIENT: dict[str, Any] = {"user": "", "program": "", "host": "", "pid": 0}


def worker_info(info: dict[str, Any]) -> dict[str, Any]:
    """A worker's info with all fields, `ops` as schemas by name. ProtocolError names a field that is unknown or bad."""
    # Types first, for all fields alike; then ranges, field by field.
    whole = _whole(info, WORKER)
    if not -1 <= whole["heap_bytes"] < 1 << 62 or not whole["name"].isprintable() or len(whole["name"]) > MAX_NAME_CHARACTERS:
        got = f"heap_bytes is {whole['heap_bytes']} and name {whole['name']!r:.80}"
        raise ProtocolError(f"Hello.info: {got}, want -1 or more, and {MAX_NAME_CHARACTERS} printable characters at most")
    if not -1 <= whole["rank"] <= MAX_RANK or not 0 <= whole["port"] < 1 << 16 or not -1 <= whole["gpu"] <= MAX_RANK:
        got = f"rank is {whole['rank']}, gpu {whole['gpu']} and port {whole['port']}"
        raise ProtocolError(f"Hello.info: {got}, want -1 to {MAX_RANK}, the same, and 0 to 65535")
    if len(whole["links"]) > MAX_LINKS or not all(map(_link, whole["links"])):
        raise ProtocolError(f"Hello.info.links is {whole['links']!r:.80}, want up to {MAX_LINKS} rows as gt.wire.messages says")
    if len(whole["routes"]) > MAX_ROUTES or not all(map(_route, whole["routes"])):
        raise ProtocolError(f"Hello.info.routes is {whole['routes']!r:.80}, want up to {MAX_ROUTES} as gt.wire.messages says")
    if not _are_rates(whole["rates"]):
        raise ProtocolError(f"Hello.info.rates is {whole['rates']!r:.80}, want two finite numbers above 0, or none")
    try:
        whole["ops"] = library_schemas(whole["ops"])
    except ValueError as error:
        raise ProtocolError(f"Hello.info.ops: {error}") from None
    return whole


def _are_rates(rates: list) -> bool:
    return not rates or (len(rates) == 2 and all(type(rate) is float and 0 < rate < math.inf for rate in rates))


def _link(row: Any) -> bool:
    """True for [address, prefix, device, mbps, routed]."""
    match row:  # by patterns, which check length and types at once
        case [str(address), int(prefix), str(device), int(mbps), bool()]:
            return _network(address, prefix, device) and 0 <= mbps <= MAX_MBPS
    return False


def _route(row: Any) -> bool:
    """True for [network, prefix, device]."""
    match row:
        case [str(network), int(prefix), str(device)]:
            return _network(network, prefix, device) and prefix > 0
    return False


def _network(address: str, prefix: int, device: str) -> bool:
    try:
        most = ipaddress.ip_address(address).max_prefixlen
    except ValueError:
        return False
    # "%" begins a scope, which names a device of another host.
    return len(device) <= MAX_NAME_CHARACTERS and device.isprintable() and "%" not in address and 0 <= prefix <= most


def client_info(info: dict[str, Any]) -> dict[str, Any]:
    """A client's info with all fields, its texts on one line; ProtocolError as for a worker's."""
    return {key: plain(value) if isinstance(value, str) else value for key, value in _whole(info, CLIENT).items()}


def _whole(info: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    for key, value in info.items():
        if key not in defaults:
            raise ProtocolError(f"Hello.info.{key:.40} is not a known field, want one of {', '.join(defaults)}")
        if type(value) is not type(defaults[key]) or (isinstance(value, str) and len(value) > MAX_TEXT_CHARACTERS):
            kind = type(defaults[key]).__name__
            raise ProtocolError(f"Hello.info.{key} is {value!r:.40}, want a {kind} up to {MAX_TEXT_CHARACTERS} characters")
    return {**defaults, **info}
