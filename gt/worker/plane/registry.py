"""Planes by the name of their transport. A plane's module is imported when the plane is opened, and not before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from gt import env
from gt.errors import ConfigError
from gt.ir.heap import DEVICE_HEAP_BYTES, HEAP_BYTES, MIN_BYTES
from gt.worker.plane.base import Plane
from gt.worker.plane.heap import PAGE_BYTES

log = logging.getLogger("gt.worker")


def _shm(engine: Any, wide: bool) -> Plane:
    from gt.worker.plane.shm import ShmPlane

    return ShmPlane(heap_size(HEAP_BYTES))


def _net(engine: Any, wide: bool) -> Plane:
    if engine.direct is not None:
        from gt.worker.plane.internode.planes import HostMemoryPlane

        return HostMemoryPlane(engine, heap_size(HEAP_BYTES))
    from gt.worker.plane.net.plane import NetPlane

    return NetPlane(heap_size(HEAP_BYTES))


def _nvshmem(engine: Any, wide: bool) -> Plane:
    from gt.worker.plane.internode.planes import InternodeNvshmemPlane
    from gt.worker.plane.nvshmem import NvshmemPlane

    _on_gpu("nvshmem", engine)
    kind = InternodeNvshmemPlane if wide else NvshmemPlane
    return kind(engine, heap_size(DEVICE_HEAP_BYTES), forced=env.get("GT_TRANSPORT") == "nvshmem")


def _nccl(engine: Any, wide: bool) -> Plane:
    from gt.worker.plane.internode.planes import InternodeNcclPlane
    from gt.worker.plane.nccl import NcclPlane

    _on_gpu("nccl", engine)
    return (InternodeNcclPlane if wide else NcclPlane)(engine, heap_size(HEAP_BYTES))


def heap_size(default: int) -> int:
    """GT_HEAP_SIZE, in whole pages."""
    nbytes = env.size("GT_HEAP_SIZE", default, least=MIN_BYTES)
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _on_gpu(name: str, engine: Any) -> None:
    if engine.direct is None:
        raise ConfigError(f"plane {name} moves memory of GPUs, and this worker has none: leave GT_TRANSPORT empty, or use shm")


# GT_TRANSPORT -> its plane; for GPUs the first that there is
PLANES: dict[str, Callable[[Any, bool], Plane]] = {"nvshmem": _nvshmem, "nccl": _nccl, "net": _net, "shm": _shm}


def open_plane(name: str, engine: Any, wide: bool = False) -> Plane:
    """The plane of a transport's name for an engine; "" is the best one there is. wide: workers of other hosts may join."""
    if wide and name in ("", "net") and engine.direct is None:
        return _net(engine, wide)
    if name and name not in PLANES:
        raise ConfigError(f"no data plane is named {name!r}: GT_TRANSPORT may be {', '.join(PLANES)}, or empty")
    if name or engine.direct is None:
        return PLANES[name or "shm"](engine, wide)
    for name in ("nvshmem", "nccl"):
        try:
            return PLANES[name](engine, wide)
        except ConfigError as error:
            log.warning("transfers between GPUs do not go by %s: %s", name, error)
    log.warning("transfers between GPUs go through host memory")
    return _net(engine, wide) if wide else _shm(engine, wide)
