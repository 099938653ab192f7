"""The links of this host, as the kernel shows them: addresses, subnets, speeds of devices, and routes. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gt import env
from gt.errors import ConfigError

# Flags of a device: switched on, and its cable is plugged in. IFF_RUNNING says the latter too, but up to a second late
_UP, _LOWER_UP = 0x1, 0x10000
# Devices that lead to no other host
_PORT = re.compile(r"[0-9]{1,5}")
_INNER = ("lo", "docker", "podman", "br-", "virbr", "veth", "lxc", "lxd", "incus", "cni", "cali", "cilium", "flannel", "kube")
MAX_LINKS, MAX_ROUTES = 64, 128
_RTF_UP, _RTF_REJECT, _RTF_LOCAL = 0x1, 0x200, 0x80000000


class KernelRoute(NamedTuple):
    """A row of the kernel's table: the way to a network. device: "" if the kernel refuses to send there."""

    network: str
    prefix: int
    device: str
    metric: int


class _IfAddrs(ctypes.Structure):
    """struct ifaddrs of getifaddrs(3)."""


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def links() -> list[list[Any]]:
    """Rows [address, prefix, device, Mbit/s or 0, True if a default route leads out there]; GT_IFNAME chooses devices."""
    default = {route.device for route in _table() if not route.prefix}
    rows = [[address, prefix, name, _speed(name), name in default] for name, address, prefix in _chosen_addresses()]
    return _first_of_each_device(rows)[:MAX_LINKS]


def routes() -> list[list[Any]]:
    """Rows [network, prefix, device] of routes but defaults, which the kernel takes by the longest prefix.

    Routes to the subnets of `links` are left out. Of too many the widest are kept.
    """
    own = {(_network(address, prefix), name) for name, address, prefix in _chosen_addresses()}
    best: dict[tuple[str, int], KernelRoute] = {}
    for route in sorted(_table(), key=lambda route: route.metric):
        if route.prefix and (f"{route.network}/{route.prefix}", route.device) not in own:
            best.setdefault((route.network, route.prefix), route)
    widest = sorted(best.values(), key=lambda route: (route.prefix / (128 if ":" in route.network else 32), route.network))
    return [[route.network, route.prefix, route.device] for route in widest[:MAX_ROUTES]]


def namespace() -> str:
    """A name for the scope of this host's addresses: one boot of one host, one network namespace; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def _network(address: str, prefix: int) -> str:
    return str(ipaddress.ip_network(f"{address}/{prefix}", strict=False))


def _chosen_addresses() -> Iterator[tuple[str, str, int]]:
    """(device, address, prefix) where the device is up, and GT_IFNAME chooses it."""
    for name, flags, address, prefix in _addresses():
        if flags & _UP and flags & _LOWER_UP and chosen(name, env.get("GT_IFNAME")):
            yield name, address, prefix


def _first_of_each_device(rows: list[list[Any]]) -> list[list[Any]]:
    """The same rows, first one of each subnet, then the second of each: a bound leaves out none of the subnets."""
    seen: dict[tuple[str, str], int] = {}
    ranks = []
    for address, prefix, name, *_ in rows:
        key = name, _network(address, prefix)
        ranks.append(seen.get(key, 0))
        seen[key] = ranks[-1] + 1
    return [row for _, row in sorted(zip(ranks, rows, strict=True), key=lambda pair: pair[0])]


def chosen(device: str, filter_: str) -> bool:
    """True if a device fits GT_IFNAME: prefixes between commas, after ^ those to leave out, after = whole names."""
    if not filter_:
        return not device.startswith(_INNER)
    negated, text = filter_.startswith("^"), filter_.removeprefix("^")
    exact, text = text.startswith("="), text.removeprefix("=")
    fits = any(device == name if exact else device.startswith(name) for name in text.split(",") if name)
    return (fits != negated) and not (negated and device.startswith(_INNER))


def ports() -> range:
    """The ports of GT_PORTS, 0 alone for any that is free."""
    text = env.get("GT_PORTS")
    first, _, last = text.partition("-")
    if not text:
        return range(1)
    last = last or first
    if not (_PORT.fullmatch(first) and _PORT.fullmatch(last) and 0 < int(first) <= int(last) < 1 << 16):
        raise ConfigError(f"GT_PORTS is {text!r:.80}, want ports from 1 to 65535, as 20000-20100")
    return range(int(first), int(last) + 1)


def _addresses() -> Iterator[tuple[str, int, str, int]]:
    """(device, flags, address, prefix) of each address, link-local ones left out."""
    libc, first = ctypes.CDLL(None, use_errno=True), ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) < 0:
        raise OSError(ctypes.get_errno(), "the network's devices cannot be listed")
    try:
        at = first
        while at:
            row = at.contents
            if row.address and row.netmask:
                address, mask = _ip(row.address), _ip(row.netmask)
                if address is not None and mask is not None and not ipaddress.ip_address(address).is_link_local:
                    prefix = bin(int(ipaddress.ip_address(mask))).count("1")
                    yield os.fsdecode(row.name), row.flags, address, prefix
            at = row.next
    finally:
        libc.freeifaddrs(first)


def _ip(sockaddr: int) -> str | None:
    """The address in a struct sockaddr_in or sockaddr_in6."""
    family = int.from_bytes(ctypes.string_at(sockaddr, 2), "little")
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(sockaddr + 4, 4))
    return socket.inet_ntop(family, ctypes.string_at(sockaddr + 8, 16)) if family == socket.AF_INET6 else None


def _speed(device: str) -> int:
    try:
        return max(0, int(Path(f"/sys/class/net/{device}/speed").read_text()))
    except (OSError, ValueError):
        return 0


def _table() -> list[KernelRoute]:
    """The kernel's main table, of both families. Without those to single addresses of this host, multicast and link-local."""
    rows: list[KernelRoute] = []
    for name, parse in (("route", _four), ("ipv6_route", _six)):
        with contextlib.suppress(OSError, ValueError):  # a kernel without that family, or one that tells it otherwise
            rows += parse(Path(f"/proc/net/{name}").read_text().splitlines())
    return [row for row in rows if not _inner_network(row.network)]


def _inner_network(network: str) -> bool:
    address = ipaddress.ip_address(network)
    return address.is_link_local or address.is_multicast or address.is_loopback


def _four(lines: Iterable[str]) -> Iterator[KernelRoute]:
    """Rows of /proc/net/route, whose numbers are in the order of bytes of this machine."""
    for line in list(lines)[1:]:
        device, target, _, flags, _, _, metric, mask, *_ = line.split()
        if int(flags, 16) & _RTF_UP:
            network = socket.inet_ntoa(struct.pack("=I", int(target, 16)))
            lead = "" if int(flags, 16) & _RTF_REJECT or device == "*" else device
            yield KernelRoute(network, int(mask, 16).bit_count(), lead, int(metric))


def _six(lines: Iterable[str]) -> Iterator[KernelRoute]:
    """Rows of /proc/net/ipv6_route, without those of this host's own addresses."""
    for line in lines:
        target, prefix, _, _, _, metric, _, _, flags, device = line.split()
        about = int(flags, 16)
        if not about & _RTF_LOCAL and (about & _RTF_REJECT or (about & _RTF_UP and device != "lo")):
            network = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(target))
            yield KernelRoute(network, int(prefix, 16), "" if about & _RTF_REJECT else device, int(metric, 16))
