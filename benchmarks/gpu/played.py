"""NVSHMEM and the kernels for messages, simulated in host memory, to try out code for GPUs without one."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Messages:
    """The methods of gt.worker.plane.kernels.Kernels. A flag is an address in this process."""

    def await_flag(self, flag: int, value: int) -> None:
        raise NotImplementedError

    def tell_flag(self, flag: int, value: int) -> None:
        raise NotImplementedError

    def send(self, source: int, nbytes: int, passage: Any, stream: int) -> None:
        self._pass(source, nbytes, passage, True)

    def recv(self, into: int, nbytes: int, passage: Any, stream: int) -> None:
        self._pass(into, nbytes, passage, False)

    def _pass(self, data: int, nbytes: int, passage: Any, sends: bool) -> None:
        """Step after step, one lane after the other; none writes outside its own."""
        region, how = passage.region, passage.chunks
        assert how.chunk <= how.wide and how.lanes * how.wide <= region.bytes
        for step in range(how.steps):
            slot = (passage.first + step) % region.slots
            for lane in range(how.lanes):
                at = (step * how.lanes + lane) * how.chunk
                if at >= nbytes and at:
                    break
                here = passage.slots + region.slot(slot) - region.slot(0) + lane * how.wide
                full, empty = (flag + region.full(slot) - region.full(0) + 8 * lane for flag in (passage.full, passage.empty))
                self.await_flag(empty if sends else full, 0 if sends else 1)
                ctypes.c_int64.from_address(empty if sends else full).value = int(sends)
                into, source = (here, data + at) if sends else (data + at, here)
                ctypes.memmove(into, source, min(how.chunk, nbytes - at))
                self.tell_flag(full if sends else empty, int(sends))


class Library(Messages):
    """The methods of gt.worker.plane.nvshmem.Library, and of `raw` in bench_plane.py. meeting: a barrier of all."""

    def __init__(self, path: Path, rank: int, count: int, nbytes: int, meeting: Callable[[], None]) -> None:
        self.rank, self.meeting = rank, meeting
        self._maps = []
        for peer in range(count):
            handle = os.open(f"{path}.{peer}", os.O_RDWR | os.O_CREAT)
            os.ftruncate(handle, nbytes)
            self._maps.append(mmap.mmap(handle, nbytes))
            os.close(handle)
        self._bases = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in self._maps]

    @property
    def base(self) -> int:
        return self._bases[self.rank]

    def barrier(self) -> None:
        self.meeting()

    def peer(self, address: int, rank: int) -> int:
        return address - self.base + self._bases[rank]

    def put(self, target: int, source: int, nbytes: int, flag: int, rank: int, stream: int, value: int = 1) -> None:
        ctypes.memmove(self.peer(target, rank), source, nbytes)
        self.signal(flag, value, rank, stream)

    def signal(self, flag: int, value: int, rank: int, stream: int) -> None:
        ctypes.c_int64.from_address(self.peer(flag, rank)).value = value

    def tell_flag(self, flag: int, value: int) -> None:
        ctypes.c_int64.from_address(flag).value = value

    def wait(self, flag: int, value: int, stream: int) -> None:
        self.await_flag(flag, value)

    def await_flag(self, flag: int, value: int) -> None:
        word = ctypes.c_int64.from_address(flag)
        while word.value != value:
            time.sleep(0)
