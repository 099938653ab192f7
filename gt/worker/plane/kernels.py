"""A message between GPUs as two kernels: one copies it into the receiver's slots and sets flags, one waits and copies it out.

A slot has lanes, each with its own flags and a block of threads at either end. No lane waits for another, so a message of any
length is one launch. The receiver copies its first part while the rest is under way. Peers' memory is written like own
memory (NVLink, or PCIe where GPUs reach each other by it). CUDA's Python packages compile the kernels when the plane is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gt.errors import ConfigError
from gt.ir.heap import LANES, ChannelRegion

THREADS_PER_LANE = 256
# A short message has at most 32 lanes, one for each 8 KiB: more lanes take multiprocessors from other kernels.
MAX_SHORT_LANES, SHORT_LANE_BYTES = 32, 8 << 10
LONG_LANE_BYTES = 256 << 10  # a long message has one lane for each
MAX_CHUNK_BYTES = 64 << 10  # that a lane copies before it sets a flag
MIN_LANE_BYTES = 4 << 10  # bytes of a slot that one lane copies, at least

SOURCE = r"""
typedef unsigned long long u64;

__device__ __forceinline__ void await(u64* flag, u64 value) {
    u64 seen;
    do {
        asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(flag) : "memory");
    } while (seen != value);
}

__device__ __forceinline__ void tell(u64* flag, u64 value) {  // after all that this block has written
    asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(flag), "l"(value) : "memory");
}

template <typename T>
__device__ __forceinline__ u64 copied(char* to, const char* from, u64 n) {  // whole Ts; how many bytes they are
    const T* a = (const T*)from;
    T* b = (T*)to;
    u64 count = n / sizeof(T), width = blockDim.x, i = threadIdx.x;
    for (; i + 7 * width < count; i += 8 * width) {
        T some[8];
        #pragma unroll
        for (int k = 0; k < 8; k++) some[k] = __ldcg(a + i + k * width);  // not from a cache that a peer's writes pass by
        #pragma unroll
        for (int k = 0; k < 8; k++) b[i + k * width] = some[k];
    }
    for (; i < count; i += width) b[i] = __ldcg(a + i);
    return count * sizeof(T);
}

__device__ __forceinline__ void copy(char* to, const char* from, u64 n) {
    u64 odd = (u64)to | (u64)from, done = 0;
    if (odd % 16 == 0) done = copied<int4>(to, from, n);
    else if (odd % 4 == 0) done = copied<int>(to, from, n);
    copied<char>(to + done, from + done, n - done);
}

// One lane of a message of n bytes: step after step, in slot after slot from the first, `chunk` bytes each.
template <bool SENDS>
__device__ __forceinline__ void lane(char* data, u64 n, char* slots, u64 slot_bytes, u64 wide, u64* full, u64* empty,
                                     u64 apart, u64 slot, u64 count, u64 chunk) {
    u64 own = blockIdx.x, row = gridDim.x * chunk;
    for (u64 at = own * chunk; at < n || (n == 0 && at == 0); at += row) {
        u64 left = n - at, size = left < chunk ? left : chunk;
        char* here = slots + slot * slot_bytes + own * wide;
        u64 *filled = full + slot * apart + own, *taken = empty + slot * apart + own;
        if (threadIdx.x == 0) {
            await(SENDS ? taken : filled, SENDS ? 0 : 1);
            *(volatile u64*)(SENDS ? taken : filled) = SENDS ? 1 : 0;  // this member's own: the peer turns it back
        }
        __syncthreads();
        if (SENDS) copy(here, data + at, size);
        else copy(data + at, here, size);
        __syncthreads();
        if (threadIdx.x == 0) tell(SENDS ? filled : taken, SENDS ? 1 : 0);
        slot = slot + 1 == count ? 0 : slot + 1;
    }
}

#define LANE char *data, u64 n, char *slots, u64 slot_bytes, u64 wide, u64 *full, u64 *empty, \
    u64 apart, u64 slot, u64 count, u64 chunk
#define GIVEN data, n, slots, slot_bytes, wide, full, empty, apart, slot, count, chunk
extern "C" __global__ void gt_send(LANE) { lane<true>(GIVEN); }
extern "C" __global__ void gt_recv(LANE) { lane<false>(GIVEN); }
"""


@dataclass(frozen=True, slots=True)
class Chunks:
    """A message cut for slots, the same at both ends: `steps` times `lanes` chunks. wide: bytes of a slot's lane."""

    lanes: int
    wide: int
    chunk: int
    steps: int


@lru_cache(4096)
def split_message(nbytes: int, slot_bytes: int) -> Chunks:
    """Chunks of a message, for slots of this size."""
    # Both ends compute this alone, from the sizes: it must depend on nothing else.
    most = max(1, min(LANES, slot_bytes // MIN_LANE_BYTES))
    wide = slot_bytes // most // 16 * 16
    # Few lanes for short messages, so that other kernels keep their multiprocessors; many for long ones, to fill the link.
    lanes = max(1, min(most, max(min(MAX_SHORT_LANES, -(-nbytes // SHORT_LANE_BYTES)), nbytes // LONG_LANE_BYTES)))
    # Multiples of 16 bytes, the widest load; smaller chunks than a lane's room start the receiver earlier.
    chunk = max(16, min(wide, MAX_CHUNK_BYTES, -(-nbytes // lanes // 16) * 16))
    return Chunks(lanes, wide, chunk, max(1, -(-nbytes // (lanes * chunk))))


@dataclass(frozen=True, slots=True)
class Passage:
    """The way of one message: addresses of the first slot and its flags in this process, and the slot to begin with."""

    region: ChannelRegion
    slots: int
    full: int
    empty: int
    first: int
    chunks: Chunks


class Kernels:
    """The kernels compiled for this GPU. ConfigError says which package is missing."""

    def __init__(self, device: Any) -> None:
        """device: a cuda.core.Device."""
        try:
            from cuda.core import LaunchConfig, Program, ProgramOptions, Stream, launch
        except ImportError as error:
            raise ConfigError(f"kernels for messages need cuda.core, which nvshmem4py brings along: {error}") from None
        try:
            options = ProgramOptions(std="c++17", arch=f"sm_{device.arch}")
            self._code = Program(SOURCE, "c++", options).compile("cubin")
        except Exception as error:  # of CUDA's compiler, its library or the driver: each has exceptions of its own
            raise ConfigError(f"kernels for messages could not be compiled: {type(error).__name__}: {error}") from None
        self._launch, self._stream_of = launch, lru_cache(64)(Stream.from_handle)
        self._config = lru_cache(LANES)(lambda lanes: LaunchConfig(grid=lanes, block=THREADS_PER_LANE))
        self._send: Any = None
        self._recv: Any = None

    def load(self) -> None:
        """Load the kernels, once this thread has set the device and before anything is recorded."""
        self._send, self._recv = self._code.get_kernel("gt_send"), self._code.get_kernel("gt_recv")

    def send(self, source: int, nbytes: int, passage: Passage, stream: int) -> None:
        """Send from this member's memory, in the order of the stream, which is done with the memory when the kernel is."""
        self._run(self._send, source, nbytes, passage, stream)

    def recv(self, into: int, nbytes: int, passage: Passage, stream: int) -> None:
        """Receive the next message of the other end, of the same size."""
        self._run(self._recv, into, nbytes, passage, stream)

    def _run(self, kernel: Any, data: int, nbytes: int, passage: Passage, stream: int) -> None:
        region, chunks = passage.region, passage.chunks
        slot, apart = region.slot(1) - region.slot(0), (region.full(1) - region.full(0)) // 8
        self._launch(
            self._stream_of(stream), self._config(chunks.lanes), kernel, data, nbytes, passage.slots, slot, chunks.wide,
            passage.full, passage.empty, apart, passage.first, region.slots, chunks.chunk,
        )  # fmt: skip
