"""Collectives of large tensors by NCCL, for teams whose members can hand each other its unique id.

Called through NCCL's C interface, on the caller's stream and with no process group: torch brings the library along. Sums come
out the same from run to run, since NCCL adds in an order that follows from sizes and links.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gt import env
from gt.errors import ConfigError, SystemFailure
from gt.ir.spec import DTYPES

ID_BYTES = 128  # of a unique id
TYPES = {"int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
IN_PROGRESS = 7  # a result of NCCL that is no error
OPS = {"sum": 0, "product": 1, "max": 2, "min": 3}


class _UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * ID_BYTES)]


class Nccl:
    """The library. ConfigError if there is none."""

    def __init__(self) -> None:
        env.foreign("NCCL_NVLS_ENABLE", "0")  # multicast, which machines forbid
        # memory known to NCCL only in graphs: undefined where one member replays what another does as instructions
        env.foreign("NCCL_GRAPH_REGISTER", "0")
        try:
            self._lib = ctypes.CDLL("libnccl.so.2")
        except OSError as error:
            raise ConfigError(f"NCCL cannot be loaded: {error}") from None
        self._lib.ncclGetErrorString.restype = ctypes.c_char_p
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._lib.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, _UniqueId, number]
        self._lib.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
        self._lib.ncclReduceScatter.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
        self._lib.ncclAllGather.argtypes = [pointer, pointer, size, number, pointer, pointer]
        self._lib.ncclSend.argtypes = self._lib.ncclRecv.argtypes = [pointer, size, number, number, pointer, pointer]
        self._lib.ncclCommAbort.argtypes = [pointer]
        self._lib.ncclCommGetAsyncError.argtypes = [pointer, ctypes.POINTER(number)]

    @property
    def version(self) -> str:
        """As 2.28.9."""
        number = ctypes.c_int()
        self._check(self._lib.ncclGetVersion(ctypes.byref(number)))
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def unique_id(self) -> bytes:
        """The id that a team's first member hands to the others."""
        name = _UniqueId()
        self._check(self._lib.ncclGetUniqueId(ctypes.byref(name)))
        return bytes(name)

    def join(self, unique_id: bytes, rank: int, count: int) -> Any:
        """Join the other members, and wait for them; the communicator."""
        comm = ctypes.c_void_p()
        self._check(self._lib.ncclCommInitRank(ctypes.byref(comm), count, _UniqueId.from_buffer_copy(unique_id), rank))
        return comm

    def failure(self, comm: Any) -> str:
        """Reason why a communicator has failed, "" if it has not. By any thread."""
        state = ctypes.c_int()
        code = self._lib.ncclCommGetAsyncError(comm, ctypes.byref(state)) or state.value
        return "" if code in (0, IN_PROGRESS) else f"NCCL: {self._lib.ncclGetErrorString(code).decode()}"

    def abort(self, comm: Any) -> None:
        """End a communicator at once. Calls and work on the device that wait for other members end, with any result."""
        self._check(self._lib.ncclCommAbort(comm))

    @contextmanager
    def group(self) -> Iterator[None]:
        """Calls within it become one launch."""
        self._check(self._lib.ncclGroupStart())
        try:
            yield
        finally:
            self._check(self._lib.ncclGroupEnd())

    def all_reduce(self, comm: Any, data: int, nbytes: int, combine: Any, stream: int) -> None:
        """In place. Addresses on this member's device; work is issued to the stream. combine: one that `can_reduce` takes."""
        count, kind, op = _of(combine, nbytes)
        self._check(self._lib.ncclAllReduce(data, data, count, kind, op, comm, stream))

    def all_gather(self, comm: Any, data: int, out: int, nbytes: int, stream: int) -> None:
        """nbytes of each member, one after the other."""
        self._check(self._lib.ncclAllGather(data, out, nbytes, TYPES["uint8"], comm, stream))

    def reduce_scatter(self, comm: Any, data: int, out: int, nbytes: int, combine: Any, stream: int) -> None:
        """nbytes of the result, of as many parts of that size as there are members."""
        count, kind, op = _of(combine, nbytes)
        self._check(self._lib.ncclReduceScatter(data, out, count, kind, op, comm, stream))

    def send(self, comm: Any, data: int, nbytes: int, rank: int, stream: int) -> None:
        """To another member, which receives as many: the stream waits until it does."""
        self._check(self._lib.ncclSend(data, nbytes, TYPES["uint8"], rank, comm, stream))

    def recv(self, comm: Any, into: int, nbytes: int, rank: int, stream: int) -> None:
        self._check(self._lib.ncclRecv(into, nbytes, TYPES["uint8"], rank, comm, stream))

    def _check(self, code: int) -> None:
        if code:
            raise SystemFailure(f"NCCL: {self._lib.ncclGetErrorString(code).decode()}")


def can_reduce(combine: Any) -> bool:
    """True if NCCL has this reduction for its dtype."""
    return getattr(combine, "op", None) in OPS and combine.kind in TYPES


def _of(combine: Any, nbytes: int) -> tuple[int, int, int]:
    """Number of elements, NCCL's numbers of their dtype and of the reduction."""
    return nbytes // DTYPES[combine.kind][0], TYPES[combine.kind], OPS[combine.op]
