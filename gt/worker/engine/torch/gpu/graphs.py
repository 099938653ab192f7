"""Programs as CUDA graphs: a run of instructions is recorded once, and from then on is one launch.

A graph works on fixed memory. Inputs stay where they are; those that were found to move are copied into slots. Results are in
one pool that all graphs share, allocated in the order of the recording. So nothing may stay there when the next program begins:
results that outlive a program are copied out before (gt.worker.program.graph_outputs).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch

from gt.ir.ops import RANDOM
from gt.worker.engine.base import DeviceRecorder, ReplayedWork, RowRunner
from gt.worker.engine.torch.compiler.inductor import Inductor, unfit_tags
from gt.worker.engine.torch.gpu.cuda import Device, Pool
from gt.worker.engine.torch.gpu.early_values import EarlyNumbers, Tap
from gt.worker.engine.torch.layers import attention, recurrent
from gt.worker.engine.torch.slots import (
    InputsMoved,
    Slot,
    Tensors,
    ViewMetadata,
    address,
    is_same_view,
    metadata,
    raw_bytes,
    view_of,
    view_of_storage,
)
from gt.worker.instructions.step import Row, Step
from gt.worker.program.graph_outputs import SHARED

MAX_RECORDINGS = 4  # of one program, since its inputs may move
MAX_REASON_CHARS = 200
# A program has a pool of its own if another one reads so much of its results, or has begun while so much was alive: results
# would be copied out each time, and copied into slots there
OWN_POOL_BYTES = 16 << 20


class Graphs:
    """An engine.base.Compiler, whose segments are Inductor's, and an engine.base.DeviceRecorder."""

    name = "cudagraphs"

    def __init__(self, inductor: Inductor, device: Device, early: EarlyNumbers | None = None) -> None:
        self.recorder: DeviceRecorder | None = self
        self.early = early
        self._device = device
        self._slots: WeakValueDictionary[tuple[int, int], torch.Tensor] = WeakValueDictionary()  # recordings own them
        self.fits, self.signature, self.compile = inductor.fits, inductor.signature, inductor.compile
        self.draws = inductor.draws

    def records(self, payload: dict[str, Any]) -> bool:
        """True if an op only issues work, the same each time."""
        name = payload["op"]
        if name in attention.OPS or name in recurrent.OPS or self.draws(payload):
            return True
        return payload["random"] is None and name not in RANDOM and (self.fits(payload) or _issues(payload))

    def program(self, runner: RowRunner, dropped: set[int], unchanged: set[int]) -> GraphReplays:
        return GraphReplays(self, self._device, runner, dropped, unchanged)

    def slot(self, nbytes: int, number: int) -> torch.Tensor:
        """Memory of the number-th slot of this size. Runs share slots: each is done with them before the next fills them."""
        # Weak values: the memory ends with the last recording that uses it.
        key = nbytes, number
        memory = self._slots.get(key)
        if memory is None:
            memory = self._slots[key] = torch.empty(nbytes, dtype=torch.uint8, device=self._device.device)
        return memory


@dataclass(slots=True)
class GraphRecording:
    """The recording of a run, and the tensors that its ids name after a replay."""

    # An input is either fixed (read at its address) or in a slot (copied in before each launch). A result is in the pool, or a
    # view of a fixed input or of a slot.
    replay: Callable[[], None]
    work: ReplayedWork  # counters that a replay advances
    fixed: Tensors  # inputs that are read where they are
    slots: list[Slot]
    freed: list[int]  # ids that a replay frees
    views: Tensors = field(default_factory=dict)  # results that are views of fixed inputs
    pooled: Tensors = field(default_factory=dict)  # results in the pool, whose memory these tensors do not own
    slot_views: list[tuple[int, Slot, ViewMetadata]] = field(default_factory=list)  # results that are views of slots
    tapped: list[Tap] = field(default_factory=list)  # all numbers that replays copy to the host, changed ones too
    taps: dict[int, Tap] = field(default_factory=dict)  # by id, those of them that are results as they were copied
    fixed_memory: set[int] = field(init=False)  # addresses of fixed inputs

    def __post_init__(self) -> None:
        self.fixed_memory = {address(tensor) for tensor in self.fixed.values()}

    def inputs_in(self, addresses: set[int]) -> set[int]:
        """Inputs whose memory is at these addresses, before it is copied into slots."""
        slots = [slot for slot in self.slots if slot.source is not None and slot.source.data_ptr() in addresses]
        return {i for slot in slots for i in slot.views} | {i for i, t in self.fixed.items() if address(t) in addresses}

    def moved(self, tensors: Tensors) -> set[int]:
        """Fixed inputs that are elsewhere now."""
        fixed = self.fixed
        # Identity first, which is cheap. Another object of the same memory and strides will do, and is remembered for next
        # time.
        others = [i for i, tensor in fixed.items() if tensors.get(i) is not tensor]
        moved = {i for i in others if not is_same_view(tensors.get(i), fixed[i])}
        if not moved:
            fixed.update((i, tensors[i]) for i in others)
        return moved


class GraphReplays:
    """The recordings of one program, all made in one pass: the pool does not keep memory of older recordings apart."""

    def __init__(self, graphs: Graphs, device: Device, runner: RowRunner, dropped: set[int], unchanged: set[int]) -> None:
        self.graphs, self.device, self.runner, self.tensors = graphs, device, runner, runner.tensors
        self._dropped, self.unchanged = dropped, unchanged
        self.runs: list[GraphRun] = []
        self.marks: list[tuple[str, Any]] = []
        self.side_transfers: list[tuple[str, Any, Any]] = []  # name, mark at the start, mark at the end
        self.must_record = True  # in the next replay
        self.recording = False
        self.passes = 0
        self.pooled: Tensors = {}  # results in the pool when they were recorded, as tensors that do not own its memory
        self.pool: set[int] = set()  # addresses of these results
        self.kept: list[list] = []  # by transfer of a run: its tensors, none once it is joined
        self.apart = False  # whether it has a pool of its own
        self._own_pool: Pool | None = None

    def run(self, rows: list[Row], reads: list[int], makes: set[int], moving: set[int]) -> GraphRun:
        """Rows as one step. moving: ids of inputs that are elsewhere each time."""
        self.runs.append(GraphRun(self, rows, reads, makes, set(moving)))
        return self.runs[-1]

    def on_side_stream(self, step: Step, ids: Sequence[int], name: str) -> Step:
        number, device, clocked = len(self.side_transfers), self.device, bool(self.marks)
        self.side_transfers.append((name, None, None))

        def run(code: list, at: int) -> None:
            self.kept.append([self.tensors.get(i) for i in ids])  # or later results could be given their memory
            device.on_side_stream(partial(timed if clocked else step, code, at))

        def timed(code: list, at: int) -> None:
            begin = device.mark()
            step(code, at)
            self.side_transfers[number] = name, begin, device.mark()

        return run

    def join(self, count: int) -> Step:
        def step(code: list, at: int) -> None:
            self.device.join(count)
            for kept in self.kept[:count]:
                kept.clear()

        return step

    def mark(self, name: str) -> Callable[[list, int], None]:
        """A step at the start of an action; "" ends the action before it."""
        self.marks.append((name, None))
        number = len(self.marks) - 1

        def step(code: list, at: int) -> None:
            self.marks[number] = name, self.device.mark()

        return step

    def action_times(self) -> list[tuple[str, float, float]]:
        """Name, start and end of the actions of the last replay on the device; [] until it has completed them."""
        marks = list(self.marks)
        if not marks or any(mark is None for _, mark in marks):
            return []
        times = self.device.seconds([mark for _, mark in marks])
        pairs = zip(marks, itertools.pairwise(times)) if times else ()
        return [(name, start, end) for (name, _), (start, end) in pairs if name]

    def transfers(self) -> list[tuple[str, float, float]]:
        """The same of transfers on the side stream."""
        done = [transfer for transfer in self.side_transfers if transfer[1] is not None]
        times = self.device.seconds([mark for _, *ends in done for mark in ends]) if done else []
        return [(name, *ends) for (name, *_), ends in zip(done, zip(times[::2], times[1::2], strict=True))] if times else []

    @property
    def pool_key(self) -> Any:
        """The pool of its results, as PendingOutputs names it."""
        return self if self.apart else SHARED

    def own_pool(self) -> Pool | None:
        """The pool of its own; None if its results are in the shared one."""
        if self.apart and (self._own_pool is None or self._own_pool.broken):
            self._own_pool = self.device.new_pool()
        return self._own_pool

    def leave(self, ids: set[int]) -> None:
        memory = {address(t): t.untyped_storage().nbytes() for i in ids if (t := self.tensors.get(i)) is not None}
        if sum(memory.values()) >= OWN_POOL_BYTES:
            self.apart = True

    def move_apart(self) -> None:
        """Record in a pool of its own from the next replay on."""
        if not self.apart:
            self.apart = self.must_record = True

    def begin(self, code: list, at: int) -> None:
        """The first step of the program."""
        pending = self.runner.pending_outputs
        pending.copy_out(self._dropped, self.pool_key, self)
        if self.must_record and self.apart:
            pending.copy_out(self._dropped, SHARED, self)  # of its own replays before this one
        for i in self._dropped:  # not within a run: a recording would find room beside them
            self.tensors.pop(i, None)
        # One pass records all runs anew. Results of the last replay leave the pool first, except those that this program
        # drops.
        self.recording, self.must_record = self.must_record, False
        if self.recording:
            self.passes += 1
            self._forget()
            self.device.release_cache()

    def _forget(self) -> None:
        # With the last recording the pool may end. Its expandable segments are given back at once, although a stream may still
        # work on them: so wait first.
        if any(run.recorded for run in self.runs):
            self.device.finish()
        self.pooled.clear()
        self.pool.clear()
        for run in self.runs:
            run.forget()
        self._own_pool = None

    def close(self) -> None:
        self._forget()
        for kept in (self.runs, self.marks, self.side_transfers, self.kept):
            kept.clear()

    def without_ownership(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, as one that does not own memory of the pool."""
        pooled = self.pooled.get(i)
        return pooled if pooled is not None and is_same_view(tensor, pooled) else tensor

    def ending(self, last: set[int]) -> GraphOutputs:
        """The last step of a program, after which these ids are alive."""
        return GraphOutputs(self, last)

    def report(self) -> tuple[int, list[str]]:
        return sum(run.recorded for run in self.runs), [run.why for run in self.runs if run.why]


class GraphRun:
    """Rows of a program as one step."""

    def __init__(self, replays: GraphReplays, rows: list[Row], reads: list[int], makes: set[int], moving: set[int]) -> None:
        self.rows, self.why, self._makes = rows, "", makes
        self._replays, self._reads, self._moving, self._tensors = replays, reads, moving, replays.tensors
        self._recording: GraphRecording | None = None

    @property
    def recorded(self) -> bool:
        return self._recording is not None

    def forget(self) -> None:
        self._recording = None

    def __call__(self, code: list, at: int) -> None:
        replays, recording = self._replays, self._recording
        replays.kept.clear()
        try:
            if replays.recording and not self.why:
                self._record()
                return
            if recording is not None:
                self._replay(recording)
                return
        # The first move may be for good (an optimizer's state that was created in the first step): record again at the new
        # address. Ids that move once more get slots.
        except InputsMoved as error:
            replays.must_record = True
            if replays.passes > 1:  # once it may be another tensor for good
                self._moving |= error.ids
            if replays.passes >= MAX_RECORDINGS:
                self.why = "its inputs move from one replay to the next"
        except Exception as error:
            if "CUDA error" in str(error) and not any(word in str(error).lower() for word in ("captur", "out of memory")):
                raise  # the device is lost
            self.why = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON_CHARS]
        self._recording = None
        replays.kept.clear()
        replays.runner.run_rows(self.rows)

    def _replay(self, recording: GraphRecording) -> None:
        tensors = self._tensors
        moved = recording.moved(tensors)
        if moved:
            raise InputsMoved(moved)
        for slot in recording.slots:
            slot.find(tensors)
        # Inputs may share memory now that were apart when recorded. Copies in two slots, or in a slot and in place, would
        # diverge once one of them is written.
        sources = {slot.source.data_ptr() for slot in recording.slots if slot.source is not None}
        if len(sources) < len(recording.slots):  # two slots have one source now: they must become one slot
            raise InputsMoved({i for slot in recording.slots for i in slot.views})
        if not recording.fixed_memory.isdisjoint(sources):
            raise InputsMoved(recording.inputs_in(sources & recording.fixed_memory))
        self._launch(recording)
        # Only after the launch: a failure above falls back to instructions, which count themselves.
        recording.work.count_again()
        tensors.update(recording.views)
        tensors.update(recording.pooled)
        self._announce(recording)

    def _announce(self, recording: GraphRecording) -> None:
        early = self._replays.graphs.early
        if early is not None:
            for i, tap in recording.taps.items():
                early.replayed(self._tensors[i], tap)

    def _launch(self, recording: GraphRecording) -> None:
        tensors = self._tensors
        for slot in recording.slots:
            slot.fill()

        # Copy in, launch, copy back what the graph wrote into slots. Then bring the table of tensors to the state after the
        # run.
        recording.replay()
        early = self._replays.graphs.early
        if early is not None:
            for tap in recording.tapped:
                early.launched(tap)
        for slot in recording.slots:
            slot.copy_back()
        for i in recording.freed:
            tensors.pop(i, None)
        for i, slot, view in recording.slot_views:
            assert slot.source is not None
            tensors[i] = view_of(slot.source, view)
        for slot in recording.slots:
            slot.source = None

    def _record(self) -> None:
        tensors, replays = self._tensors, self._replays
        inputs = {i: tensors[i] for i in self._reads if i in tensors}
        slots = self._slots(inputs)
        fixed = {i: replays.without_ownership(i, t) for i, t in inputs.items() if not any(i in slot.views for slot in slots)}
        # While capturing nothing is executed: outputs have addresses, but no values. The table is changed, read, and restored.
        before = dict(tensors)
        work: list[ReplayedWork] = []
        early = replays.graphs.early
        in_slots = {i: view_of(slot.memory, view) for slot in slots for i, view in slot.views.items()}
        tensors.update(in_slots)
        try:
            with early.recording(replays.unchanged) if early is not None else nullcontext(list[Tap]()) as taps:
                pool = replays.own_pool()
                replay = replays.device.record(lambda: work.append(replays.runner.run_all_or_none(self.rows)), pool)
            makes = self._makes  # an id that names the same tensor again is a result too
            results = {i: t for i, t in tensors.items() if i in makes or (before.get(i) is not t and in_slots.get(i) is not t)}
            freed = [i for i in before if i not in tensors]
        except BaseException:
            # The device refused work that was issued well: it is done again as instructions, and counted then.
            for issued in work:
                issued.undo()
            raise
        finally:
            for i in [i for i in tensors if i not in before]:
                del tensors[i]
            tensors.update(before)

        # The capture has succeeded. Launch it once: this replay's values are still to be computed.
        recording = GraphRecording(replay, work[0], fixed, slots, freed, tapped=taps)
        try:
            owned = self._classify_results(recording, results)
            recording.taps = _final(taps, {i: t for i, t in owned.items() if i in replays.unchanged})
            for slot in slots:
                slot.find(tensors)
            self._launch(recording)
        except BaseException:
            work[0].undo()
            raise
        # Owning tensors until the program frees them: meanwhile later recordings must not be given their memory.
        tensors.update({**recording.views, **owned})
        replays.pooled.update(recording.pooled)
        replays.pool.update(map(address, owned.values()))
        self._recording = recording
        self._announce(recording)

    def _slots(self, inputs: Tensors) -> list[Slot]:
        """Slots for inputs that move, and for all that share memory with them."""
        groups: dict[int, list[int]] = {}
        for i, tensor in inputs.items():
            groups.setdefault(address(tensor), []).append(i)
        last: dict[int, int] = {}  # bytes of a slot -> number of the last one
        slots = []
        for ids in groups.values():
            # One slot for each storage, not for each tensor, so views that alias outside alias inside the slot too.
            nbytes = inputs[ids[0]].untyped_storage().nbytes()
            if self._moving.isdisjoint(ids) or not nbytes:
                continue
            last[nbytes] = last.get(nbytes, -1) + 1
            slots.append(Slot(self._replays.graphs.slot(nbytes, last[nbytes]), {i: metadata(inputs[i]) for i in ids}))
        return slots

    def _classify_results(self, recording: GraphRecording, results: Tensors) -> Tensors:
        """Fill in the results of a recording; those that own memory of the pool."""
        slots = {address(slot.memory): slot for slot in recording.slots}
        kept = {address(tensor) for tensor in recording.fixed.values()}
        storages: dict[int, Any] = {}
        pool = self._replays.pool
        owned: Tensors = {}
        for i, tensor in results.items():
            # Order matters: a slot first, then memory from before the pool, and all that is left was allocated in the pool.
            where = address(tensor)
            if where in slots:
                recording.slot_views.append((i, slots[where], metadata(tensor)))
            elif not where or (where in kept and where not in pool):
                recording.views[i] = tensor
            else:
                owned[i] = tensor
                storage = tensor.untyped_storage()
                # A non-owning twin of the pool's tensor. The owning one ends with the first pass, so that the pool can reuse
                # the memory as the recording planned; replays hand out the twin.
                if where not in storages:
                    storages[where] = torch._C._construct_storage_from_data_pointer(where, tensor.device, storage.nbytes())
                recording.pooled[i] = view_of_storage(storages[where], metadata(tensor))
        return owned


def _final(taps: list[Tap], results: Tensors) -> dict[int, Tap]:
    """The taps of numbers that are results and were not changed after the tap."""
    newest = {tap.memory.storage.cdata: tap for tap in taps}
    found: dict[int, Tap] = {}
    shared: set[int] = set()
    for i, tensor in results.items():
        identity = tensor.untyped_storage()._cdata
        tap = newest.get(identity)
        if tap is not None and tap.memory.holds(tensor):
            # Of two results in one memory, a write to one would not count as a write to the other.
            found = {n: other for n, other in found.items() if other is not tap} if identity in shared else {**found, i: tap}
            shared.add(identity)
    return found


class GraphOutputs:
    """Moves tensors that outlive a program out of the pool. Each memory is copied once, so tensors that share one still do."""

    def __init__(self, replays: GraphReplays, last: set[int]) -> None:
        self._replays, self._last = replays, last

    def __call__(self, code: list, at: int) -> None:
        replays = self._replays
        pending = replays.runner.pending_outputs
        # The results of a recording own memory of the pool, which later recordings of other programs are to get
        if replays.recording and not replays.apart:
            self._copy_out(self._last)
        else:
            if replays.recording:
                tensors = replays.tensors
                tensors.update({i: replays.without_ownership(i, tensors[i]) for i in self._last if i in tensors})
            pending.defer_copy(replays.pool_key, self._last, self._copy_out)
        pending.track_program(replays, replays.pool_key, self._last)

    def _copy_out(self, ids: set[int], program: GraphReplays | None = None) -> None:
        """Copy results out of the pool. program: that which begins, if one does."""
        replays, tensors = self._replays, self._replays.tensors
        groups: dict[int, list[int]] = {}
        for i in ids:
            tensor = tensors.get(i)
            if tensor is not None and address(tensor) in replays.pool:
                groups.setdefault(address(tensor), []).append(i)
        try:
            tensors.update(self._copied(groups))
        except Exception:  # the next replay would overwrite them in the pool
            for members in groups.values():
                for i in members:
                    del tensors[i]
            raise
        if program not in (None, replays):
            nbytes = sum(tensors[members[0]].untyped_storage().nbytes() for members in groups.values())
            if nbytes >= OWN_POOL_BYTES:
                replays.move_apart()

    def _copied(self, groups: dict[int, list[int]]) -> Tensors:
        tensors, device = self._replays.tensors, self._replays.device.device
        copies: dict[torch.dtype, tuple[list, list]] = {torch.int64: ([], []), torch.uint8: ([], [])}
        moved: Tensors = {}
        for members in groups.values():
            # The whole storage is copied, so views of it stay views of one memory. As int64 where possible: wide loads, and
            # one fused kernel for all copies.
            storage = tensors[members[0]].untyped_storage()
            memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
            dtype = torch.uint8 if storage.nbytes() % 8 else torch.int64
            copies[dtype][0].append(memory.view(dtype))
            copies[dtype][1].append(raw_bytes(storage, device).view(dtype))
            moved.update({i: view_of(memory, metadata(tensors[i])) for i in members})
        for new, old in copies.values():
            if new:
                torch._foreach_copy_(new, old)
        return moved


def _issues(payload: dict[str, Any]) -> bool:
    name = payload["op"]
    if any(out[0] == "new" and out[1] is None for out in payload["outs"]):
        return False
    return name.startswith("aten.") and not unfit_tags(name) - {"inplace_view"}
