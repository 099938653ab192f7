"""The links of this host: addresses, subnets and speeds of its network devices, as the kernel shows them. Linux only."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gt import env
from gt.errors import ConfigError

# Flags of a device: switched on, and its cable is plugged in. IFF_RUNNING says the latter too, but up to a second late
_UP, _LOWER_UP = 0x1, 0x10000
_INNER = ("lo", "docker", "br-", "virbr", "veth", "cni", "flannel", "kube")  # devices that lead to no other host
_MAX_LINKS = 64


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
    routed, rows = _routed(), []
    for name, flags, address, prefix in _addresses():
        if flags & _UP and flags & _LOWER_UP and chosen(name, env.get("GT_IFNAME")):
            rows.append([address, prefix, name, _speed(name), name in routed])
    return rows[:_MAX_LINKS]


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
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 1 << 16):
        raise ConfigError(f"GT_PORTS is {text!r}, want ports from 1 to 65535, as 20000-20100")
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


def _routed() -> set[str]:
    """Devices of default routes."""
    found = set()
    try:
        for line in Path("/proc/net/route").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1] == "00000000" and fields[7] == "00000000":
                found.add(fields[0])
    except (OSError, IndexError):
        pass
    try:
        for line in Path("/proc/net/ipv6_route").read_text().splitlines():
            target, prefix, *_, device = line.split()
            if prefix == "00" and not int(target, 16) and device != "lo":
                found.add(device)
    except (OSError, ValueError):
        pass
    return found
