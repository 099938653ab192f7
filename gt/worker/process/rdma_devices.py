"""RDMA devices of this host, as the kernel shows them. Linux only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

INFINIBAND = Path("/sys/class/infiniband")


def rdma_devices() -> list[dict[str, Any]]:
    """Ports of RDMA devices: their network devices, rate, state, and GIDs by index with their type."""
    ports = []
    for device in sorted(INFINIBAND.glob("*")) if INFINIBAND.exists() else ():
        for port in sorted((device / "ports").glob("*")):
            gids = {}
            for gid in (port / "gids").glob("*"):
                text = _text(gid)
                if text.replace(":", "").strip("0"):
                    gids[gid.name] = [text, _text(port / "gid_attrs/types" / gid.name)]
            devices = [path.name for path in (device / "device/net").glob("*")]
            ports.append({"device": device.name, "port": port.name, "net": devices, "rate": _text(port / "rate"),
                          "state": _text(port / "state"), "gids": gids})  # fmt: skip
    return ports


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
