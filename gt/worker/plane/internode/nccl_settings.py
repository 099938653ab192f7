"""NCCL's settings for a worker, from the links by which the dispatcher joins its host to others; and what NCCL says it took.

A variable that the user has set stays as it is. Pure but for `apply` and `NcclLog`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from gt import env

MAX_LOG_BYTES = 1 << 20
# Subnets of several cables without a switch: each device has its own neighbour, so NCCL must pair them by subnet.
MESH = {"NCCL_IB_SUBNET_AWARE_ROUTING": "1", "NCCL_IB_MERGE_NICS": "0", "NCCL_CROSS_NIC": "1"}
_USED = {
    "version": re.compile(r"NCCL version (\S+)"),
    "bootstrap": re.compile(r"Bootstrap\s?: Using (\S+)"),
    "network": re.compile(r"Using network (.+)"),
    "plugin": re.compile(r"Loaded net plugin (.+)|(NET/Plugin: Could not find.*)"),
}
_TAKEN = re.compile(r"(NCCL_\w+) set (?:by environment )?to (.*)")
_WAY = re.compile(r"via (NET/[^/\s]+|P2P|SHM)")


def settings(sources: Sequence[str], links: Sequence[Sequence[Any]], rdma: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Variables by name. sources: own addresses of the ways to other hosts; links: rows of network_links; rdma: its devices."""
    own = {row[0]: row for row in links}
    rows = [own[address] for address in dict.fromkeys(sources) if address in own]
    devices = list(dict.fromkeys(row[2] for row in rows))
    if not devices:
        return {}
    # NCCL's bootstrap is a ring of all members: of several devices none reaches all, but the one with a default route may.
    reach = devices if len(devices) == 1 else [row[2] for row in links if row[4]][:1]
    variables = {"NCCL_SOCKET_IFNAME": f"={reach[0]}"} if reach else {}
    active = {net: port["device"] for port in rdma if "ACTIVE" in port["state"] for net in port["net"]}
    # RDMA only if every way has an active device; a mixture would leave pairs that cannot talk.
    if all(device in active for device in devices):
        variables["NCCL_IB_HCA"] = "=" + ",".join(active[device] for device in devices)
        if len(devices) > 1:
            prefixes = {row[1] for row in rows if ":" not in row[0]}
            variables |= MESH | ({"NCCL_IB_SUBNET_PREFIX_LEN": str(*prefixes)} if len(prefixes) == 1 else {})
    return variables


def apply(found: Mapping[str, str]) -> None:
    """Set variables that the user has not set. A net plugin of the user's chooses RDMA devices itself."""
    plugin = env.set_elsewhere("NCCL_NET_PLUGIN")
    for name, value in found.items():
        if not (plugin and name != "NCCL_SOCKET_IFNAME"):
            env.foreign(name, value)


def parse(log: str) -> dict[str, Any]:
    """Facts of NCCL's log at level INFO: version, bootstrap, network, plugin, ways of its channels, variables taken."""
    facts: dict[str, Any] = {}
    for name, pattern in _USED.items():
        if (match := pattern.search(log)) is not None:
            facts[name] = next(text for text in match.groups() if text).strip()
    if ways := sorted(set(_WAY.findall(log))):
        facts["ways"] = ways
    if taken := {name: value.strip().rstrip(".") for name, value in _TAKEN.findall(log)}:
        facts["taken"] = taken
    return facts


class NcclLog:
    """The log of this process's NCCL, in memory; the user's own NCCL_DEBUG or NCCL_DEBUG_FILE leaves it empty."""

    def __init__(self) -> None:
        self._fd = -1
        if env.set_elsewhere("NCCL_DEBUG") or env.set_elsewhere("NCCL_DEBUG_FILE"):
            return
        self._fd = os.memfd_create("nccl-log", os.MFD_CLOEXEC)
        env.foreign("NCCL_DEBUG", "INFO")
        env.foreign("NCCL_DEBUG_SUBSYS", "INIT,NET,ENV")
        env.foreign("NCCL_DEBUG_FILE", f"/proc/{os.getpid()}/fd/{self._fd}")

    def facts(self) -> dict[str, Any]:
        """Facts of the log so far. By any thread."""
        if self._fd < 0:
            return {}
        with suppress(OSError):
            return parse(os.pread(self._fd, MAX_LOG_BYTES, 0).decode(errors="replace"))
        return {}

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
