"""Plane `nvshmem`: GPUs of one host put and read each other's memory in the order of a stream; no host waits.

Plane shm below it serves host memory, and members that NVSHMEM does not reach. Once the dispatcher has named the members
(World.members), they join one NVSHMEM world by the unique id of the first member. Each has one arena of symmetric memory
(gt.worker.plane.symmetric), with the dispatcher's offsets. That file also decides which collectives go by NCCL. A wait on a
stream cannot be cancelled: when a member dies, the others' processes have to end.
"""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Sequence
from typing import Any

from gt import env
from gt.errors import ConfigError, SystemFailure
from gt.ir.heap import LINE
from gt.worker.plane import nccl_bindings
from gt.worker.plane.base import ALL, PeerGone, TeamForm, Unreachable
from gt.worker.plane.gpu import DevicePlane
from gt.worker.plane.kernels import Kernels
from gt.worker.plane.nccl import NcclTransport
from gt.worker.plane.symmetric import Arena, ArenaMemory

log = logging.getLogger("gt.worker")
OWN_BYTES = 64 << 20  # symmetric memory that NVSHMEM itself takes
MESSAGE_BYTES = 7 * LINE  # longest text that a member sends the others
JOIN_SECONDS = 30.0  # within which all members have joined or failed to, once one has


class Library:
    """nvshmem4py at the level of addresses. ConfigError says which part is missing."""

    def __init__(self) -> None:
        # multicast is not needed here, and machines that forbid it fail where it is tried
        env.foreign("NVSHMEM_DISABLE_NVLS", "1")
        try:
            import nvshmem.core as core
            from cuda.core import Device
            from nvshmem import bindings
            from nvshmem.core.direct import ComparisonType, SignalOp
        except ImportError as error:
            raise ConfigError(f"NVSHMEM needs the package nvshmem4py, of the extra `gpu`: {error}") from None
        self._core, self._bindings, self._device = core, bindings, Device
        self._kernels = Kernels(Device(0))
        self.send, self.recv = self._kernels.send, self._kernels.recv
        self._set, self._equal = int(SignalOp.SIGNAL_SET), int(ComparisonType.CMP_EQ)
        self._buffer: Any = None

    def gpu(self) -> str:
        """The driver's name of this process's GPU."""
        return f"GPU-{self._device(0).uuid.removeprefix('GPU-')}"

    def obstacle(self, other: str) -> str:
        """Reason why NVSHMEM cannot map another GPU's memory, or "". NVSHMEM itself would end the process."""
        if env.switched_on("NVSHMEM_DISABLE_P2P"):
            return "NVSHMEM_DISABLE_P2P is set"
        try:
            from cuda.core import system

            own, far = (system.Device(uuid=uuid) for uuid in (self.gpu(), other))
            states = {str(system.get_p2p_status(own, far, way)) for way in ("read", "write")}
        except Exception as error:  # older packages lack it, containers may hide the other GPU
            log.info("whether GPUs can map each other's memory is not known before they try: %s", error)
            return ""
        return ", ".join(sorted(states - {"ok", "unknown"}))

    def unique_id(self) -> str:
        """The id by which the other members join this process."""
        return base64.b64encode(bytes(self._core.get_unique_id()._data.tobytes())).decode()

    def join(self, unique_id: str, rank: int, count: int, nbytes: int) -> int:
        """Join the other members for as long as the process lives; the address of an arena of symmetric memory."""
        env.foreign("NVSHMEM_SYMMETRIC_SIZE", str(nbytes + OWN_BYTES), always=True)
        name = self._core.get_unique_id(empty=True)
        name._data.view("int8")[:] = memoryview(base64.b64decode(unique_id)).cast("b")
        device = self._device(0)
        device.set_current()
        self._core.init(device=device, uid=name, rank=rank, nranks=count, initializer_method="uid")
        self._kernels.load()
        self._buffer = self._core.buffer(nbytes)
        return int(self._buffer.handle)

    def barrier(self) -> None:
        """Wait for all members, on the host."""
        self._bindings.barrier_all()

    def peer(self, address: int, rank: int) -> int:
        """Address of that member's symmetric memory in this process; 0 if it is not mapped."""
        return int(self._bindings.ptr(address, rank))

    def signal(self, flag: int, value: int, rank: int, stream: int) -> None:
        """Write a flag of another member, or of this one."""
        self._bindings.signal_op_on_stream(flag, value, self._set, rank, stream)

    def wait(self, flag: int, value: int, stream: int) -> None:
        """Later work of the stream waits until a flag of this member has this value."""
        self._bindings.signal_wait_until_on_stream(flag, self._equal, value, stream)


def _ring() -> nccl_bindings.Nccl | None:
    try:
        return nccl_bindings.Nccl()
    except ConfigError as error:
        log.warning("large collectives go without NCCL: %s", error)
        return None


class NvshmemPlane(DevicePlane):
    """Plane over NVSHMEM. arena_bytes: of symmetric memory, and of the heap in host memory, which takes pages when touched.

    forced: fail if a GPU cannot map another's memory. Otherwise transfers go by NCCL then.
    """

    name = "nvshmem"

    def __init__(self, engine: Any, arena_bytes: int, library: Any = None, ring: Any = None, forced: bool = False) -> None:
        super().__init__(engine, arena_bytes)
        self.arena_bytes, self._forced = arena_bytes, forced
        self._library = Library() if library is None else library
        self._ring = _ring() if library is None else ring

    def unique_id(self) -> str:
        return self._library.unique_id()

    def join(self, members: Sequence[int], own: int, unique_id: str) -> Arena | NcclTransport | None:
        rank, base, why = list(members).index(own), 0, ""
        # Ask the driver before NVSHMEM, which ends the process where it cannot map a peer. Each step ends in an exchange of
        # reasons, so that all members decide alike: NVSHMEM, NCCL or host memory.
        gpus = self.gather_texts(members, rank, self._library.gpu())
        far = {member: self._library.obstacle(gpu) for member, gpu in zip(members, gpus, strict=True) if gpu and member != own}
        why = "; ".join(f"the GPU of worker {own} cannot map worker {n}'s memory: {text}" for n, text in far.items() if text)
        reasons = [text for text in self.gather_texts(members, rank, why) if text]
        if not reasons:
            try:
                base = self._library.join(unique_id, rank, len(members), self.arena_bytes)
                lost = [index for n, index in enumerate(members) if n != rank and not self._library.peer(base, n)]
                why = f"NVSHMEM cannot map the memory of workers {lost} on the GPU of worker {own}" if lost else ""
            except Exception as error:  # the library's have no class of their own
                why = f"worker {own} cannot join NVSHMEM: {error}"
                log.warning("%s", why)
            reasons = self.gather_reasons(members, rank, why)
        if not reasons:
            memory = ArenaMemory(members, own, base, self.arena_bytes)
            return Arena(self, self._library, self._engine.direct, memory, self._ring)
        if self._forced:
            raise SystemFailure(f"{reasons[0]}: leave GT_TRANSPORT empty, or set it to nccl")
        way = "through host memory" if self._ring is None else "by nccl"
        log.warning("transfers between GPUs go %s: %s", way, "; ".join(reasons))
        return None if self._ring is None else NcclTransport(self._ring, self._engine.direct, self, self.count_bytes)

    def gather_reasons(self, members: Sequence[int], rank: int, why: str) -> list[str]:
        """Reasons of the members that failed to join, the same list on all of them.

        A member that is late may be waiting within NVSHMEM for one that failed: SystemFailure, which ends this process and so
        the others'.
        """
        text = f"no word for {JOIN_SECONDS:g} s of whether it has joined NVSHMEM"
        # A member that is stuck within NVSHMEM sends no text. The timer aborts this member's wait on shared memory.
        late = threading.Timer(JOIN_SECONDS, self.abort, (ALL, text))
        late.daemon = True
        late.start()
        try:
            return [text for text in self.gather_texts(members, rank, why) if text]
        except SystemFailure as error:
            raise SystemFailure(why or str(error)) from error
        finally:
            late.cancel()

    def gather_texts(self, members: Sequence[int], rank: int, own: str) -> list[str]:
        """The text of each member; "" of all others if plane shm does not reach them all (other containers)."""
        form: TeamForm = {"id": -1, "workers": list(members), "rank": rank, "offset": 0, "bytes": MESSAGE_BYTES}
        every = [bytearray(MESSAGE_BYTES) for _ in members]
        try:
            self.all_gather(form, own.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES), every)
        except PeerGone as error:
            if not isinstance(error, Unreachable):
                raise SystemFailure(f"worker {members[rank]} waits for others to join NVSHMEM: {error}") from error
            log.info("%s: whether others can join is not known", error)
            return [own if n == rank else "" for n in range(len(members))]
        return [text.decode(errors="replace").strip() for text in every]
