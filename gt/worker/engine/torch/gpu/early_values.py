"""Numbers that the program reads, such as a loss: sent once the device has made them, not once all issued work is done.

A training loop that reads its loss then waits for the forward pass alone. It issues its next step while the device still
computes this step's backward pass, and the device is never idle between two steps.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, sleep
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

MAX_KNOWN = 16  # newest numbers that are kept in mind
MAX_SLOTS = 256  # numbers of all recordings
MAX_TAPS = 8  # of one recording
SLOT_BYTES = 16  # a value and a count of replays, of 8 bytes each
SPIN_SECONDS, NAP_SECONDS = 2e-3, 5e-5  # a wait polls without sleeping at first
LOOK_SECONDS = 2e-3  # between two questions whether the device has stopped

Read = Callable[[torch.Tensor], torch.Tensor | None]  # waits for the number; None where it will not come


class _Memory:
    """The memory of a number as it is now: `holds` tells whether a tensor still has that value."""

    __slots__ = ("dtype", "offset", "storage", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # The weak reference keeps the storage's identity from being used again, so equal identities are one storage.
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.version, self.offset, self.dtype = tensor._version, tensor.storage_offset(), tensor.dtype

    def holds(self, tensor: torch.Tensor) -> bool:
        """True for the tensor, and views of it, unless one of them was written to."""
        same = tensor.storage_offset() == self.offset and tensor.dtype == self.dtype and not tensor.is_neg()
        return same and tensor._version == self.version and not self.storage.expired()


@dataclass(slots=True)  # not frozen: one is made for each number, and a frozen one takes three times as long
class _Number:
    """A number in the device's memory. copied: its replay copies it to the host, where copies of the tensor find it too."""

    memory: _Memory
    read: Read
    copied: bool


@dataclass(eq=False)
class Tap:
    """A number that each replay of a recording copies to the host. slot: where; count: replays so far."""

    memory: _Memory
    slot: int
    count: int


@dataclass(slots=True)
class _TapsUnderWay:
    """The recording under way. wanted: ids of tensors that may be read after it."""

    wanted: Set[int]
    taps: list[Tap] = field(default_factory=list)


class _Slots:
    """Pinned memory of the host to which replays copy numbers, each followed by the count of its recording's replays.

    The copies are in the device's order: so a count that has come says that the number before it has.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.zeros(MAX_SLOTS * SLOT_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.arrived = self.memory.view(torch.int64).numpy()[1::2]
        self.counts = torch.zeros(MAX_SLOTS, dtype=torch.int64, device=device)
        self.free = list(range(MAX_SLOTS))
        self.launched = [0] * MAX_SLOTS  # replays of all recordings that have had the slot, those under way too

    def value(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        start = number * SLOT_BYTES
        return self.memory[start : start + dtype.itemsize].view(dtype)

    def record(self, number: int, tensor: torch.Tensor) -> None:
        """Issue the copies, within a recording."""
        count = self.counts[number : number + 1]
        self.value(number, tensor.dtype).copy_(tensor.detach().reshape(1), non_blocking=True)
        count.add_(1)
        start = number * SLOT_BYTES + 8
        self.memory[start : start + 8].view(torch.int64).copy_(count, non_blocking=True)


class EarlyNumbers:
    """An engine.base.EarlyValues. The executing thread alone calls it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: OrderedDict[int, _Number] = OrderedDict()  # by the identity of the storage
        self._recording: _TapsUnderWay | None = None
        self._slots: _Slots | None = None
        self._in_program = False
        self._stream: Any = None
        # Outside of recordings all work of this thread goes to one stream
        self._computing = None if device.type == "cpu" else torch.cuda.current_stream(device)

    # ---- who makes and reads numbers

    def made(self, i: int, tensor: torch.Tensor, source: torch.Tensor | None = None) -> None:
        """An instruction has issued the work that makes this tensor. source: of which it is a copy.

        A tensor of one element and several dimensions counts only within a recording. Loops of generation make many of
        these and read none, and an event costs as much as an op. One that is read waits for all issued work.
        """
        known = None if source is None or self._recording is not None else self._find(source)
        if known is not None and known.copied:
            self._remember(tensor, known.read, copied=True)
        elif not tensor.dim() if self._recording is None else i in self._recording.wanted:
            self.tap(tensor)

    def tap(self, tensor: torch.Tensor) -> None:
        """Compiled code, or an instruction, has issued the work that makes this number."""
        if tensor.numel() != 1 or tensor.is_complex():
            return
        if self._recording is not None:
            self._tap(self._recording, tensor)
            return
        if self._in_program:  # instructions that follow may write to it, which only the recorder looks for
            return
        event = None if self._computing is None else self._computing.record_event()
        self._remember(tensor, partial(self._copy, event), copied=False)

    def forget(self) -> None:
        self._known.clear()

    def in_program(self, now: bool) -> None:
        self._in_program = now
        if now:
            self.forget()

    def read(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The number on the host, once the device has made it; None if it is not known here, or was changed since."""
        number = self._find(tensor)
        value = None if number is None else number.read(tensor)
        return None if value is None else value.reshape(tensor.shape)

    def _find(self, tensor: torch.Tensor) -> _Number | None:
        number = self._known.get(tensor.untyped_storage()._cdata) if tensor.numel() == 1 else None
        return number if number is not None and number.memory.holds(tensor) else None

    # ---- recordings

    @contextmanager
    def recording(self, wanted: Set[int]) -> Iterator[list[Tap]]:
        """Within it work is recorded, not executed: its taps."""
        if self._slots is None:
            self._slots = _Slots(self._device)  # outside of the recording's memory
        self._recording = recording = _TapsUnderWay(wanted)
        try:
            yield recording.taps
        finally:
            self._recording = None

    def _tap(self, recording: _TapsUnderWay, tensor: torch.Tensor) -> None:
        slots = self._slots
        assert slots is not None
        if not slots.free or len(recording.taps) == MAX_TAPS:
            return
        slot = slots.free.pop()
        slots.record(slot, tensor)
        # Not the count that has arrived: a replay of the recording that had the slot before may still be under way.
        tap = Tap(_Memory(tensor), slot, slots.launched[slot])
        weakref.finalize(tap, slots.free.append, slot)
        recording.taps.append(tap)

    def launched(self, tap: Tap) -> None:
        """A recording was launched that copies this number."""
        assert self._slots is not None
        self._slots.launched[tap.slot] += 1
        tap.count = self._slots.launched[tap.slot]

    def replayed(self, tensor: torch.Tensor, tap: Tap) -> None:
        """The launched recording makes this tensor's value."""
        self._remember(tensor, partial(self._arrival, tap, tap.count), copied=True)

    # ---- waits

    def _remember(self, tensor: torch.Tensor, read: Read, copied: bool) -> None:
        memory, known = _Memory(tensor), self._known
        key = memory.storage.cdata
        known[key] = _Number(memory, read, copied)
        known.move_to_end(key)
        if len(known) > MAX_KNOWN:
            known.popitem(last=False)

    def _copy(self, event: Any, tensor: torch.Tensor) -> torch.Tensor:
        if event is None:
            return tensor.detach().clone()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        value = torch.empty(1, dtype=tensor.dtype, pin_memory=True)
        # A stream of its own: the copy waits for the number alone, not for work that was issued after it.
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(event)
            value.copy_(tensor.detach().reshape(1), non_blocking=True)
            done = self._stream.record_event()
        done.synchronize()
        return value

    def _arrival(self, tap: Tap, count: int, _: torch.Tensor) -> torch.Tensor | None:
        """The number of a replay. None if the device has stopped without it."""
        slots = self._slots
        assert slots is not None
        arrived, slot, began = slots.arrived, tap.slot, monotonic()
        look = began + LOOK_SECONDS
        while arrived[slot] < count:
            now = monotonic()
            if now > look:
                # Raises if the device has failed.
                if torch.cuda.current_stream(self._device).query() and arrived[slot] < count:
                    return None
                look = now + LOOK_SECONDS
            sleep(0 if now - began < SPIN_SECONDS else NAP_SECONDS)
        value = slots.value(slot, tap.memory.dtype).clone()
        return value if arrived[slot] == count else None  # a later replay has written there
