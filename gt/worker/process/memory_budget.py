"""Memory budget of this process, so that an op fails before the kernel ends the process.

Planned results are compared with the room that is left. RLIMIT_DATA bounds the workspace that kernels allocate. It is a reserve
above the limit: the reserve is for messages, whose library ends the process if it gets no memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import time
from collections.abc import Callable

from gt.errors import ConfigError
from gt.ir.instr import Define
from gt.ir.spec import Spec, contiguous
from gt.ir.text import size
from gt.wire.process_settings import available_bytes
from gt.worker.instructions.step import Step, StepTable

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
HOST_SHARE = 0.9  # part of the host's memory that its CPU workers share by default
SPARE_SHARE = 0.25  # part of the free room that may be kept for later use, at most
RESERVE_BYTES = 64 << 20  # bytes above the limit
STACK_BYTES = 8 << 20  # bytes of a thread's stack, which count as data; pools of threads are made when they are first needed
MIN_LIMIT_BYTES = 16 << 20  # bytes of a limit
PLANNED_BYTES = 16 << 10  # bytes of results from which an op is compared with the room by itself
NUMBERS_PER_INSTRUCTION = 4  # at least: it bounds the count of small results of a stream
NOBODY = -1
UNSET = -(1 << 62)
TRIM_SECONDS = 1.0  # until freed memory is given back once more
LOOKS, LOOK_SECONDS = 5, 0.01  # looks for room, and seconds before each, until an op fails for want of it


class OutOfMemory(MemoryError):
    """An op needs more than there is room for."""


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2; of its ten fields `fordblks` is wanted."""

    _fields_ = [("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


LIBC = ctypes.CDLL(None)
_mallinfo = getattr(LIBC, "mallinfo2", None)
if _mallinfo is not None:
    _mallinfo.restype = _Mallinfo


class Budget:
    """Budget of one worker. Without a limit it costs nothing.

    `admit`, `used` and `spares` are for any thread, the rest for the executing thread.
    held: bytes of a session's tensors, by its number.
    """

    def __init__(self, held: Callable[[int], int] = lambda session: 0) -> None:
        self.limit = 0  # bytes for tensors and uploads, 0 for no limit
        self.session, self.session_limit = NOBODY, 0
        self.held = held
        self.reclaim: Callable[[], object] = lambda: None  # frees memory that is kept for later use
        self._left = 0  # bytes that may be made before memory is measured again
        self._bound = self._left = 0
        self._base = NOBODY
        self._stacks = 0  # bytes of threads' stacks within `_base`
        self._slack = UNSET  # bytes that were freed and kept when RLIMIT_DATA was set
        self._trimmed = self._waited = 0.0
        self._statm = -1

    @property
    def bounded(self) -> bool:
        return bool(self._bound)

    def open(self, own: int) -> None:
        """Bound this process. own: bytes, 0 for a share of the host's memory. ConfigError for too few."""
        if own and own < MIN_LIMIT_BYTES:
            raise ConfigError(f"the memory limit is {size(own)}, want at least {size(MIN_LIMIT_BYTES)}")
        self._bound = own or int(available_bytes() * HOST_SHARE)
        self._own = bool(own)
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        self._threads = 1 + (os.cpu_count() or 1)
        self._base = NOBODY  # until it begins to serve

    def close(self) -> None:
        if self._statm >= 0:
            os.close(self._statm)
            self._statm, self._bound, self.limit = -1, 0, 0
            resource.setrlimit(resource.RLIMIT_DATA, self._before)

    def share(self, workers: int) -> None:
        """Divide the host's memory among so many CPU workers."""
        if self._bound:
            self.limit = self._bound if self._own else self._bound // max(workers, 1)
            if self._base < 0:  # includes the memory of its links
                self._base, self._stacks = self._data() - _freed(), _stack_bytes()
            self._slack = UNSET
            self._left = self._room()

    def serve(self, session: int, limit: int) -> None:
        """Serve this session from here on. limit: bytes of tensors that it may hold on this worker, 0 for no limit."""
        before, self.session, self.session_limit = self.session_limit, session, limit
        if (limit or before) and self._bound:
            self._slack = UNSET
            self._left = self._room()

    def used(self) -> int:
        """Bytes that this process has taken since it began to serve."""
        return self._data() - _freed() - self._base if self._statm >= 0 else 0

    def need(self, nbytes: int) -> None:
        """So many bytes are about to be allocated; OutOfMemory if there is no room."""
        left = self._left - nbytes
        self._left = left if left >= 0 or not self._bound else self._room_after(nbytes)

    def fits(self, nbytes: int) -> bool:
        """As `need`; False if there is no room."""
        try:
            self.need(nbytes)
        except OutOfMemory:
            return False
        return True

    def spares(self, nbytes: int) -> bool:
        """True if so many bytes may be kept for later use: they are the smaller part of the room. For any thread."""
        return not self._bound or (not self._own and SPARE_SHARE * (self.limit - self.used()) > nbytes)

    def hold(self, nbytes: int) -> None:
        """So many bytes that this process has allocated are about to belong to the session; OutOfMemory beyond its limit."""
        if self.session_limit and nbytes > (room := self.session_limit - self.held(self.session)):
            raise OutOfMemory(f"out of memory: it needs {size(nbytes)}, the session's limit leaves {size(max(room, 0))}")

    def begin(self, numbers: int) -> bool:
        """A stream of so many numbers follows; True if its small results must be compared with the room one by one."""
        if not self._bound:
            return False
        small = numbers // NUMBERS_PER_INSTRUCTION * PLANNED_BYTES
        if self._left < small:
            self._left = self._room()
        if self._left < small:
            return True
        self._left -= small
        return False

    def unsure(self) -> None:
        """Results of an unknown size were allocated."""
        self._left = -1

    def admit(self, nbytes: int) -> None:
        """An upload begins; OutOfMemory if there is no room for it."""
        if self.limit and nbytes > (room := self.limit - self.used()):  # it may arrive before this worker knows its share
            raise OutOfMemory(self._refusal(nbytes, room))
        self._left = -1

    def _room_after(self, nbytes: int) -> int:
        """Bytes that are left once these are allocated; OutOfMemory if there is no room."""
        room = self._room()
        if nbytes > room:
            self.reclaim()
            room = self._room()
        # Other threads free memory too, such as that of messages, and a look at it takes two readings: it may be a moment early
        if nbytes > room and time.monotonic() - self._waited > TRIM_SECONDS:
            self._leave_out_stacks()
            for _ in range(LOOKS):
                time.sleep(LOOK_SECONDS)
                room = self._room()
                if nbytes <= room:
                    break
            self._waited = time.monotonic()
        if nbytes > room:
            raise OutOfMemory(self._refusal(nbytes, room))
        return room - nbytes

    def _leave_out_stacks(self) -> None:
        """Leave stacks of threads that have begun since out of the memory taken: they are data, of which little is used."""
        if self._base >= 0:
            before, self._stacks = self._stacks, _stack_bytes()
            self._base += self._stacks - before

    def _room(self) -> int:
        """Bytes that may be allocated now.

        Freed memory that the C library keeps counts as room, although it may be in pieces. So RLIMIT_DATA is as much above the
        limit, and the kernel gets the pages back.
        """
        data, freed = self._data(), _freed()
        taken = data - freed - self._base if self._base >= 0 else 0
        own = room = (self.limit or self._bound) - taken
        if self.session_limit:
            own = min(room, self.session_limit - self.held(self.session))
        if self.session_limit or abs(freed - self._slack) > RESERVE_BYTES // 4:
            self._slack = freed
            self._set_data_limit(data + max(own, 0) + RESERVE_BYTES + self._threads * STACK_BYTES)
        if data - self._base > self.limit and time.monotonic() - self._trimmed > TRIM_SECONDS:
            self._trimmed = time.monotonic()
            LIBC.malloc_trim(0)
        return own

    def _refusal(self, nbytes: int, room: int) -> str:
        return f"out of memory: it needs {size(nbytes)}, and {size(max(room, 0))} are left"

    def _data(self) -> int:
        return int(os.pread(self._statm, 128, 0).split()[5]) * PAGE_BYTES

    def _set_data_limit(self, soft: int) -> None:
        """Set RLIMIT_DATA: kernels get no more data than this."""
        hard = self._before[1]
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_DATA, (soft if hard < 0 else min(soft, hard), hard))


class CheckedSteps:
    """A table of steps that compares small results with the room too."""

    def __init__(self, steps: StepTable, small: dict[int, int], need: Callable[[int], None]) -> None:
        self._steps, self._small, self._need = steps, small, need

    def __getitem__(self, number: int) -> tuple[Step, int]:
        step, numbers = self._steps[number]
        return self.step(number, step), numbers

    def step(self, number: int, step: Step) -> Step:
        small, need = self._small.get(number, 0), self._need

        def checked(code: list, at: int) -> None:
            need(small)
            step(code, at)

        return checked if small else step


def result_bytes(define: Define) -> int:
    """Bytes of an instruction's new tensors; below 0 if they depend on values or inputs."""
    payload = define.payload
    if define.kind == "op":
        specs = [out[1] for out in payload["outs"] if out[0] == "new"]
        return -1 if None in specs else sum(Spec.from_wire(spec).nbytes for spec in specs)
    if define.kind in ("shard", "fill"):
        return contiguous(tuple(payload["shape"]), payload["dtype"]).nbytes
    return -1 if define.kind == "partial" else 0


def check_room(step: Step, nbytes: int, budget: Budget) -> Step:
    """A step whose results (`result_bytes`) are compared with the room before it runs."""
    need = budget.need

    def large(code: list, at: int) -> None:
        need(nbytes)
        step(code, at)

    def unknown(code: list, at: int) -> None:
        step(code, at)
        budget.unsure()

    return unknown if nbytes < 0 else large if nbytes >= PLANNED_BYTES else step


def _stack_bytes() -> int:
    """Bytes of threads' stacks, those included that the C library keeps for later threads. Each lies behind a guard page."""
    total, guard = 0, ""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, mode = line.split(" ", 2)[:2]
            begin, end = span.split("-")
            nbytes = int(end, 16) - int(begin, 16)
            if mode == "rw-p" and begin == guard:
                total += min(nbytes, STACK_BYTES)
            guard = end if mode == "---p" and nbytes == PAGE_BYTES else ""
    return total


def _freed() -> int:
    """Freed bytes that the C library keeps for later allocations."""
    return int(_mallinfo().fordblks) if _mallinfo is not None else 0
