"""The interface of an engine, which executes ATen ops on local pieces. Nothing here knows torch.

A tensor is the engine's own kind of array; the executor only indexes it with slices and passes it back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gt.ir.spec import Spec
from gt.worker.engine.codegen import Call, Source
from gt.worker.instructions.step import Row, Step
from gt.worker.program.graph_outputs import PendingOutputs
from gt.worker.program.partition import BoundSegment

Tensor = Any
Combine = Callable[[memoryview, memoryview], None]  # dst = dst op src


class Misfit(Exception):
    """The inputs of compiled code do not match its signature; the code has done nothing."""


@dataclass(slots=True)
class CompilationSeconds:
    """Seconds that compiled code took until it ran: to generate it, to wait for its kernels, and in its first call.

    The first call loads kernels, and measures which of their forms is fastest.
    """

    generating: float = 0.0
    kernels: float = 0.0
    first_call: float = 0.0


@dataclass(frozen=True, slots=True)
class SegmentRefusal:
    """Reason why a segment cannot be compiled. calls: numbers of its ops that are in the way, if the compiler knows them."""

    why: str
    calls: tuple[int, ...] = ()


class CompiledSegment(Protocol):
    """A segment as compiled code, called with its inputs for its outputs. Misfit for other inputs, else its ops' errors."""

    key: Hashable  # equal for equal code
    specs: Sequence[Spec]  # dtypes and shapes of its outputs
    seconds: CompilationSeconds

    @property
    def writes(self) -> bool:
        """True if a call that fails may leave inputs changed."""

    def __call__(self, inputs: list[Tensor]) -> Sequence[Tensor]: ...


class ReplayedWork(Protocol):
    """Counters that rows have advanced: a replay advances them again, though no code of the worker runs."""

    def count_again(self) -> None:
        """The device has executed the rows once more."""

    def undo(self) -> None:
        """The rows were not executed after all."""


class RowRunner(Protocol):
    """The executor as a recorder sees it (gt.worker.program.runner.ProgramRunner)."""

    @property
    def tensors(self) -> dict[int, Tensor]:
        """The worker's tensors by id."""

    @property
    def pending_outputs(self) -> PendingOutputs:
        """Outputs of a replay in memory that the next replay overwrites."""

    def run_rows(self, rows: Sequence[Row]) -> bool:
        """Carry out rows; a failed one is reported. True if none failed."""

    def run_all_or_none(self, rows: Sequence[Row]) -> ReplayedWork:
        """Carry out rows; raises where one fails, and then nothing counts as done."""


class DeviceReplays(Protocol):
    """The recordings of one program. `begin`, runs and `ending` are steps, in the program's order."""

    def begin(self, code: list, at: int) -> None:
        """The first step of a replay."""

    def run(self, rows: list[Row], reads: list[int], makes: set[int], moving: set[int]) -> Step:
        """Rows as one step, recorded when first executed. reads, makes: ids; moving: ids of inputs that move each time."""

    def leave(self, ids: set[int]) -> None:
        """Other programs read these results, before anything is recorded."""

    def ending(self, last: set[int]) -> Step:
        """The last step of a replay, after which these ids are alive."""

    def on_side_stream(self, step: Step, ids: Sequence[int], name: str) -> Step:
        """A transfer as a step of a run, which other work may overtake. Tensors of these ids stay alive until it is joined."""

    def join(self, count: int) -> Step:
        """A step of a run: later rows wait for the first `count` transfers of the run."""

    def mark(self, name: str) -> Step:
        """A step at the start of an action; "" ends the action before it."""

    def action_times(self) -> list[tuple[str, float, float]]:
        """Name, start and end (seconds of the monotonic clock) of the actions of the last replay, [] if not known yet."""

    def transfers(self) -> list[tuple[str, float, float]]:
        """The same of transfers on the side stream, if the program has actions."""

    def report(self) -> tuple[int, list[str]]:
        """Number of recorded runs, and reasons for the others."""

    def close(self) -> None:
        """The program is forgotten: give memory back."""


class DeviceRecorder(Protocol):
    """A device that records work and replays it in one launch, on the same memory. Engines need not have one."""

    def records(self, payload: dict[str, Any]) -> bool:
        """True if an `op` definition only issues work, the same each time but for random numbers."""

    def draws(self, payload: dict[str, Any]) -> bool:
        """True if the device draws an op's random numbers by a key in its memory, which each replay sets."""

    def program(self, runner: RowRunner, dropped: set[int], unchanged: set[int]) -> DeviceReplays:
        """Replays of one program.

        dropped: ids that are freed before the program reads anything. unchanged: results that no instruction writes to.
        """


class Compiler(Protocol):
    """A compiler of segments (gt.worker.program.partition). Engines need not have one."""

    name: str

    @property
    def recorder(self) -> DeviceRecorder | None:
        """The recorder of this device, if it has one."""

    def fits(self, payload: dict[str, Any]) -> bool:
        """True if an `op` definition can be in a segment."""

    def signature(self, inputs: Sequence[Tensor]) -> Hashable:
        """Everything about these inputs but their values that compiled code may depend on."""

    def compile(
        self, requests: Sequence[tuple[BoundSegment, Any]], more: bool = False
    ) -> Sequence[CompiledSegment | SegmentRefusal]:
        """Compile segments, each for inputs of its signature.

        more: others will follow soon, so processes that help may stay.
        """


IDENTITY = {"sum": 0.0, "norm2": 0.0, "product": 1.0, "max": float("-inf"), "min": float("inf")}


class Moves(Protocol):
    """Methods of an engine for steps that move data."""

    def copy(self, dst: Tensor, src: Tensor) -> None:
        """dst[:] = src, for any strides."""

    def flat(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """A contiguous tensor's memory in another shape."""

    def packed(self, tensor: Tensor) -> Tensor:
        """The tensor itself if `view` takes it, else a contiguous copy in host memory."""

    def staging(self, shape: Sequence[int], dtype: str) -> Tensor:
        """An uninitialized tensor in memory that `view` takes."""

    def adopt(self, tensor: Tensor) -> Tensor:
        """A staging tensor as one of this worker's device."""

    def view(self, tensor: Tensor) -> memoryview:
        """The bytes of a packed tensor, writable, not copied."""

    def combine(self, op: str, dtype: str) -> Combine:
        """The function of a reduction on two buffers of elements."""

    def divide(self, tensor: Tensor, by: int) -> None:
        """tensor /= by, in place."""

    def dtype(self, tensor: Tensor) -> str:
        """The dtype's name as in ir.spec.DTYPES."""


class PinnedBuffer(Protocol):
    """Pinned memory of the host, through which a device's bytes pass. `memory`: its bytes."""

    memory: memoryview

    def fetch(self, source: Tensor, at: int) -> Callable[[], None]:
        """Copy a view to memory[at:], after the work that was issued before. The result waits for the copy."""

    def put(self, target: Tensor, at: int) -> None:
        """Copy memory[at:] to a view, before work that is issued later. The memory must not change any more."""


class Direct(Moves, Protocol):
    """The same for devices that reach each other's memory: a view is a flat tensor of bytes on the device."""

    def address(self, view: Tensor) -> int:
        """Address of its bytes."""

    def words(self, view: Tensor) -> Tensor:
        """The same memory as int64."""

    def memory(self, address: int, nbytes: int) -> Tensor:
        """A view of memory that this device can reach."""

    def stream(self) -> int:
        """The stream that work is issued to, as the device's library names it."""

    def write(self, view: Tensor, data: bytes) -> None:
        """Bytes of the host into a view of the same size."""

    def read(self, view: Tensor) -> bytes:
        """A view's bytes; waits for issued work."""

    def finish(self) -> None:
        """Wait for all issued work."""

    def bounce(self, nbytes: int) -> PinnedBuffer:
        """Pinned memory of the host."""

    def side_stream(self, use: Hashable) -> int:
        """The stream of a use. Its later work follows all work that was issued before, and compute does not wait for it."""

    def issuing_to(self, stream: int) -> AbstractContextManager:
        """Within it the calling thread, which may be another than the engine's, issues work to this stream.

        It is asked for by the engine's thread, whose instruction a trace names.
        """

    def fence(self) -> Callable[[], None]:
        """A wait, for any thread, for the work that the calling thread has issued so far. It raises if the device fails."""


class HostCopies(Protocol):
    """Copies between a device and pinned memory of the host, which the device executes beside other work."""

    def pin(self, memory: np.ndarray) -> Callable[[], None]:
        """Pin pages; the result undoes it, once no copy is under way. RuntimeError if they cannot be pinned."""

    def upload(self, source: np.ndarray, spec: Spec) -> tuple[Tensor, Callable[[], None]]:
        """A tensor of pinned row-major bytes, for work that is issued later, and a wait until the bytes have been read.

        Does not wait for work that was issued before.
        """

    def download(self, tensor: Tensor, target: np.ndarray) -> None:
        """Write a tensor's values, row-major, to pinned bytes. Waits for them."""


class Progress(Protocol):
    """Progress of a device through issued work. By any thread."""

    def note(self) -> None:
        """The calling thread has issued work."""

    def completed(self) -> int:
        """Number of notes whose work is complete, as last observed. Returns at once, and starts another observation."""

    def fence(self) -> Callable[[], None]:
        """A wait, for any thread, for the work that the calling thread has issued so far. It ends too if the device fails."""


class EarlyValues(Protocol):
    """Numbers that the program may read while the device still carries out later work. By the executing thread."""

    def made(self, i: int, tensor: Tensor, source: Tensor | None = None) -> None:
        """An instruction has issued the work that makes this number, of one element. source: it is a copy of that one."""

    def forget(self) -> None:
        """Memory may have changed without the tensors' knowledge."""

    def in_program(self, now: bool) -> None:
        """A program begins, or ends. Of its numbers only those count that its recordings announce."""


Listener = Callable[[str, Any, Any], None]  # (name of a stream, mark before the work, mark after it)
Marker = Callable[[], Any]


class DeviceTimes(Protocol):
    """Times at which a device came to points of the work that was issued to it, for traces."""

    def mark(self, spare: Any = None) -> Any:
        """A point after all work that the calling thread has issued to its stream; None while the device records.

        spare: an older mark that nobody needs any more.
        """

    def listen(self, listener: Listener | None, mark: Marker | None) -> tuple[Listener | None, Marker | None]:
        """Tell this listener of work that goes to other streams than compute's, between marks that `mark` makes.

        None ends that. Returns the pair before.
        """

    def clocks(self) -> Any:
        """A moment by the device's clock and by the host's, which `seconds` takes."""

    def seconds(self, marks: Sequence[Any], began: Any) -> list[float | None]:
        """Seconds of the monotonic clock at which the device came to these points, None if it has not yet. By any thread.

        began: `clocks()` from when the trace began. [] if the device is lost.
        """


class LaneOperand(Protocol):
    """An operand of an op in host memory: a tensor that rests there, or the host copy of one on the device."""

    nbytes: int

    def host(self) -> Tensor:
        """The tensor in host memory, once it is there. Called by the lane."""

    def used(self, changed: bool) -> None:
        """The op was given to the lane. changed: it writes this operand."""


class HostCopy(LaneOperand, Protocol):
    """The host copy of a tensor on the device."""

    def begin(self, tensor: Tensor) -> None:
        """Begin to copy the tensor's value."""

    def send(self, tensor: Tensor) -> Any:
        """Begin to copy the value back to the tensor, once the op is over.

        Returns a gt.worker.offload.tensors.Resting of the tensor until it is back, None if nobody has to wait.
        """


class HostLane(Protocol):
    """Ops in host memory, executed in order. That of a GPU works beside the thread that calls it."""

    def bind(self, payload: dict[str, Any]) -> Call:
        """The callable of an op on tensors in host memory."""

    def copy(self, tensor: Tensor) -> HostCopy:
        """Memory for the host copy of a tensor."""

    def run(self, call: Call, operands: Sequence[LaneOperand], values: Sequence, outs: int) -> list[Any]:
        """Carry out an op; its results as gt.worker.offload.tensors.Resting. outs: their number."""

    def in_memory(self, buffer: Any, spec: Spec) -> Tensor:
        """A tensor in host memory of bytes that `Engine.memory_of` gave. It shares the buffer."""


class Engine(Moves, Protocol):
    """A backend of workers. An op's errors are raised unchanged; UnsupportedOp names an op that it lacks.

    It may have `compiler(backend) -> (Compiler or None, reason if it is not the compiler of that name)` too, and
    `prepare_compilation(idle)`, which starts what that compiler needs; the worker has nothing else to do if it is idle.
    """

    name: str
    kind: str  # torch's name of its device type: cpu, cuda

    @property
    def direct(self) -> Direct | None:
        """For steps that move data between devices, None on the host."""

    @property
    def clock(self) -> Callable[[], float] | None:
        """Clock in seconds; None if ops run asynchronously."""

    @property
    def times(self) -> DeviceTimes | None:
        """Times of the device's work, None on the host."""

    @property
    def copies(self) -> HostCopies | None:
        """Copies from and to pinned memory, None on the host."""

    @property
    def early(self) -> EarlyValues | None:
        """Numbers that can be read before all issued work is done, None on the host."""

    @property
    def progress(self) -> Progress | None:
        """Progress of the device, None on the host."""

    def load(self, libraries: Sequence[str]) -> list[str]:
        """Import libraries for their ops: lines of the ops' schemas. For the process's owner, before it serves anybody."""

    def guard(self) -> AbstractContextManager:
        """Around a batch of instructions: nothing is recorded for autograd."""

    def bind(self, payload: dict[str, Any]) -> Call:
        """The callable of an `op` definition (ir.instr.KINDS)."""

    def source(self, payload: dict[str, Any]) -> Source:
        """The callable of an `op` definition as Python source."""

    def empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        """An uninitialized contiguous tensor."""

    def zeros(self, spec: Spec) -> Tensor:
        """A tensor of zeros with the spec's shape, strides and dtype (not its offset)."""

    def filled(self, like: Tensor, op: str) -> Tensor:
        """A contiguous tensor of a reduction's identity, IDENTITY, or the nearest the dtype has."""

    def clone(self, tensor: Tensor) -> Tensor:
        """A contiguous copy."""

    def upload(self, buffer: Any, spec: Spec) -> Tensor:
        """A tensor of row-major bytes. It takes over the buffer, and its memory where possible."""

    def spec(self, tensor: Tensor) -> Spec:
        """Shape, strides, offset, dtype."""

    def storage(self, tensor: Tensor) -> tuple[int, int]:
        """(address, bytes) of the tensor's memory."""

    def host_rates(self) -> list[float]:
        """Bytes a second of the link to host memory, each way, and of arithmetic there; [] if its device is the host."""

    def lane(self) -> HostLane:
        """The lane of its ops in host memory: one for its lifetime."""

    def evicted(self, tensor: Tensor) -> Any:
        """A copy in host memory that the device can bring back (gt.worker.offload.tensors.Resting), None on the host itself."""

    def shared(self, tensor: Tensor) -> bool:
        """True if another tensor has the same memory."""

    def memory_of(self, tensor: Tensor) -> memoryview | None:
        """Bytes of the memory of a tensor that has all of it; None if the engine has no such form."""

    def in_memory(self, buffer: Any, spec: Spec) -> Tensor:
        """A tensor of bytes that `memory_of` gave."""

    def peak(self) -> int:
        """Peak bytes in use of its device's memory, 0 if not counted."""

    def switch(self, switches: dict[str, Any]) -> None:
        """Thread count, matmul precision, determinism: Hello.switches."""

    def bound(self, nbytes: int) -> None:
        """Limit its device's memory to so many bytes. ConfigError for more than the device has."""

    def clear(self) -> None:
        """From here on clear memory before an op gets it: it may hold data of another session."""

    def poisoned(self, error: BaseException) -> bool:
        """True if no later op of this process can succeed."""
