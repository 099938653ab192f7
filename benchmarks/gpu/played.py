"""What NVSHMEM does, played between processes by a file that they share: for trying out what is written for GPUs."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path


class Library:
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

    def wait(self, flag: int, value: int, stream: int) -> None:
        word = ctypes.c_int64.from_address(flag)
        while word.value != value:
            time.sleep(0)
