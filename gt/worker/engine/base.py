"""What the executor asks of an engine: ATen on local pieces. One file an engine; nothing here knows torch.

A tensor is the engine's own kind of array; the executor only indexes it with slices and passes it back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from gt.errors import ConfigError
from gt.ir.spec import Spec

if TYPE_CHECKING:
    from gt.worker.context import Counted, Step
    from gt.worker.engine.codegen import Source
    from gt.worker.program.graph_outputs import Lent
    from gt.worker.program.partition import Row, Wired

Tensor = Any
Call = Callable[..., Any]  # (*tensors, *values) -> None, one tensor, or a tuple: one for each `new` or `view` output
Combine = Callable[[memoryview, memoryview], None]  # dst = dst op src
Each = Callable[[Sequence["Row"]], Any]  # carries rows of a program out
Strictly = Callable[[Sequence["Row"]], "Counted"]  # the same, all or none


class Misfit(Exception):
    """Compiled code was given what it was not compiled for; it has done nothing."""


class CompiledSegment(Protocol):
    """A segment as compiled code: called with its inputs it gives its outputs; Misfit for others, else as its ops fail."""

    key: Hashable  # the same for the same code
    specs: Sequence[Spec]  # of its outputs

    @property
    def writes(self) -> bool:
        """True if a call that fails may leave inputs changed."""

    def __call__(self, inputs: list[Tensor]) -> Sequence[Tensor]: ...


class DeviceReplays(Protocol):
    """What a device recorded of one program; `begin`, `ending` and runs are steps, in the program's order."""

    def begin(self, code: list, at: int) -> None:
        """The first step of a replay."""

    def run(self, rows: list[Row], reads: list[int], makes: set[int], moving: set[int]) -> Step:
        """Rows as one, recorded when they are first carried out. reads, makes: ids; moving: of reads, what moves each time."""

    def ending(self, last: set[int]) -> Step:
        """The last step of a replay that leaves these ids behind."""

    def aside(self, step: Step, ids: Sequence[int], name: str) -> Step:
        """A transfer as a step of a run, that other work may pass; what these ids stand for stays until it is joined."""

    def join(self, count: int) -> Step:
        """A step of a run: what follows waits for the first `count` transfers of the run."""

    def mark(self, name: str) -> Step:
        """A step where an action begins, "" for what is none."""

    def stamps(self) -> list[tuple[str, float, float]]:
        """Name, start and end (seconds of the monotonic clock) of the actions of the last replay, [] if not known yet."""

    def transfers(self) -> list[tuple[str, float, float]]:
        """The same of transfers that were put aside, if the program has actions."""

    def report(self) -> tuple[int, list[str]]:
        """How many runs are recorded, and why others are not."""

    def close(self) -> None:
        """There will be no more replays: give back memory."""


class DeviceRecorder(Protocol):
    """What an engine may have: a device that does again what was recorded, on the same memory, in one launch."""

    def records(self, payload: dict[str, Any]) -> bool:
        """Whether an `op` definition, unless it draws new random numbers, only issues work, the same each time."""

    def draws(self, payload: dict[str, Any]) -> bool:
        """True if the device makes an op's random numbers, by a key in its memory that each replay sets anew."""

    def program(self, held: dict[int, Tensor], each: Each, strictly: Strictly, lent: Lent, dropped: set[int]) -> DeviceReplays:
        """each: carries out rows; strictly: the same, and raises where one fails. lent: is told what a replay leaves where the
        next writes. dropped: ids that end before the program reads anything.
        """


class Compiler(Protocol):
    """What an engine may have: segments (gt.worker.program.partition) as code of their own."""

    name: str

    @property
    def recorder(self) -> DeviceRecorder | None:
        """Of this device, if it can."""

    def fits(self, payload: dict[str, Any]) -> bool:
        """Whether an `op` definition can be in a segment."""

    def seen(self, inputs: Sequence[Tensor]) -> Hashable:
        """All that code made for these inputs may depend on, their values left out."""

    def compile(self, wired: Wired, seen: Any) -> CompiledSegment:
        """The code of a segment for inputs that were seen so; what it raises is why there is none."""


IDENTITY = {"sum": 0.0, "norm2": 0.0, "product": 1.0, "max": float("-inf"), "min": float("inf")}


class Moves(Protocol):
    """What steps that move data ask of an engine."""

    def copy(self, dst: Tensor, src: Tensor) -> None:
        """dst[:] = src, whatever their strides."""

    def flat(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """A contiguous tensor's memory in another shape."""

    def packed(self, tensor: Tensor) -> Tensor:
        """The tensor itself where `view` can show it, else a contiguous copy in host memory."""

    def staging(self, shape: Sequence[int], dtype: str) -> Tensor:
        """As `empty`, in memory that `view` can show."""

    def adopt(self, tensor: Tensor) -> Tensor:
        """A staging tensor as one of this worker's device."""

    def view(self, tensor: Tensor) -> memoryview:
        """The bytes of a packed tensor, writable, not copied."""

    def combine(self, op: str, dtype: str) -> Combine:
        """What a reduction does to two buffers of elements."""

    def divide(self, tensor: Tensor, by: int) -> None:
        """tensor /= by, in place."""

    def dtype(self, tensor: Tensor) -> str:
        """The dtype's name as in ir.spec.DTYPES."""


class Direct(Moves, Protocol):
    """The same where devices move each other's memory: a view is a flat tensor of bytes on the device."""

    def address(self, view: Tensor) -> int:
        """Where its bytes are."""

    def words(self, view: Tensor) -> Tensor:
        """The same memory as int64."""

    def memory(self, address: int, nbytes: int) -> Tensor:
        """A view of memory that this device can reach."""

    def stream(self) -> int:
        """What work is issued to, as the device's library names it."""

    def write(self, view: Tensor, data: bytes) -> None:
        """Bytes of the host into a view of the same size."""

    def read(self, view: Tensor) -> bytes:
        """A view's bytes; waits for what was issued."""

    def finish(self) -> None:
        """Wait for all that was issued."""


class Progress(Protocol):
    """How far a device has come in what it was given. By any thread."""

    def note(self) -> None:
        """Something was issued, by the calling thread."""

    def come(self) -> int:
        """How often what was issued until a note was done, as it was last seen. At once: to ask has it looked again."""

    def fence(self) -> Callable[[], None]:
        """A wait, for any thread, for what the calling thread has issued until now. It ends too if the device has failed."""


class Engine(Moves, Protocol):
    """The numpy-like core that a backend has to have; errors of an op are raised as they are, UnsupportedOp by name.

    It may have `compiler(backend) -> (Compiler or None, why it is not what the backend's name says)` too.
    """

    name: str
    kind: str  # of its device, as torch names it: cpu, cuda

    @property
    def direct(self) -> Direct | None:
        """For steps that move data between devices, None on the host."""

    @property
    def clock(self) -> Callable[[], float] | None:
        """Seconds; None where an op goes on after its call has returned."""

    @property
    def progress(self) -> Progress | None:
        """How far the device has come, None on the host."""

    def guard(self) -> AbstractContextManager:
        """Around a batch of instructions: nothing is recorded for autograd."""

    def bind(self, payload: dict[str, Any]) -> Call:
        """The callable of an `op` definition (ir.instr.KINDS)."""

    def source(self, payload: dict[str, Any]) -> Source:
        """The same as source."""

    def empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        """A contiguous tensor of memory as it comes."""

    def zeros(self, spec: Spec) -> Tensor:
        """A tensor of zeros with the spec's shape, strides and dtype (not its offset)."""

    def filled(self, like: Tensor, op: str) -> Tensor:
        """A contiguous tensor of a reduction's identity, IDENTITY, or the nearest the dtype has."""

    def clone(self, tensor: Tensor) -> Tensor:
        """A contiguous copy."""

    def upload(self, buffer: Any, spec: Spec) -> Tensor:
        """A tensor of row-major bytes; owns the buffer and keeps its memory where it can."""

    def spec(self, tensor: Tensor) -> Spec:
        """Shape, strides, offset, dtype."""

    def storage(self, tensor: Tensor) -> tuple[int, int]:
        """(address, bytes) of the memory it is a view of."""

    def peak(self) -> int:
        """The most bytes of its device's memory that were in use at once, 0 where that is not counted."""

    def switch(self, switches: dict[str, Any]) -> None:
        """Thread count, matmul precision, determinism: Hello.switches."""

    def bound(self, nbytes: int) -> None:
        """Its device's memory is full once it has taken so many bytes. ConfigError for more than there are."""

    def clear(self) -> None:
        """From here on no memory reaches an op with what was in it before: another session may have left that."""

    def poisoned(self, error: BaseException) -> bool:
        """Whether no later op of this process can succeed."""


def _torch(device: str) -> Engine:
    from gt.worker.engine.torch import TorchEngine

    return TorchEngine(device)


def _numpy(device: str) -> Engine:
    from gt.worker.engine.numpy import NumpyEngine

    return NumpyEngine(device)


# GT_BACKEND -> its engine on a device, imported when it is opened and not before
ENGINES: dict[str, Callable[[str], Engine]] = {"torch": _torch, "numpy": _numpy}


def open_engine(backend: str, device: str) -> Engine:
    """The engine of a backend's name."""
    if backend not in ENGINES:
        raise ConfigError(f"no engine is named {backend!r}: GT_BACKEND and --backend may be {' or '.join(ENGINES)}")
    return ENGINES[backend](device)
