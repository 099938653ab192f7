"""Programs as CUDA graphs: a run of instructions is recorded once, and from then on is one launch.

A graph works on fixed memory. What it reads stays where it is, or is copied into slots when it was found to move. What it makes
lies in one pool that all graphs share, freed and given again in the order of the recording; so nothing is kept there when the
next program begins: what outlives one is copied out before (gt.worker.program.graph_outputs).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch

from gt.ir.ops import RANDOM
from gt.worker.context import Counted, Step
from gt.worker.engine.base import DeviceRecorder, Each, Strictly
from gt.worker.engine.torch import attention
from gt.worker.engine.torch.gpu.cuda import Device
from gt.worker.engine.torch.inductor import UNFIT, Inductor
from gt.worker.engine.torch.overloads import OVERLOADS
from gt.worker.engine.torch.slots import Held, Look, Moved, Slot, address, look, lying, plain, shown, stands
from gt.worker.program.graph_outputs import Lent
from gt.worker.program.partition import Row

TRIES = 4  # recordings of a program, since what it reads may come to lie elsewhere
SAID = 200  # characters of a reason


class Graphs:
    """An engine.base.Compiler, whose segments are Inductor's, and an engine.base.Recorder."""

    name = "cudagraphs"

    def __init__(self, inductor: Inductor, device: Device) -> None:
        self.recorder: DeviceRecorder | None = self
        self._device = device
        self._slots: WeakValueDictionary[tuple[int, int], torch.Tensor] = WeakValueDictionary()  # recordings own them
        self.fits, self.seen, self.compile = inductor.fits, inductor.seen, inductor.compile
        self.draws = inductor.draws

    def records(self, payload: dict[str, Any]) -> bool:
        """Whether an op only issues work, the same each time."""
        name = payload["op"]
        if name in attention.OPS or self.draws(payload):
            return True
        return payload["random"] is None and name not in RANDOM and (self.fits(payload) or _issues(payload))

    def program(self, held: Held, each: Each, strictly: Strictly, lent: Lent, dropped: set[int]) -> GraphReplays:
        return GraphReplays(self, self._device, held, each, strictly, lent, dropped)

    def slot(self, nbytes: int, number: int) -> torch.Tensor:
        """The number-th slot of this size: runs share them, since each is read before the next is filled."""
        key = nbytes, number
        memory = self._slots.get(key)
        if memory is None:
            memory = self._slots[key] = torch.empty(nbytes, dtype=torch.uint8, device=self._device.device)
        return memory


@dataclass(slots=True)
class GraphRecording:
    """What replays a run, and what its names stand for then."""

    replay: Callable[[], None]
    counted: Counted  # what a replay does
    still: dict[int, torch.Tensor]  # what it reads where it is
    slots: list[Slot]
    gone: list[int]
    views: Held = field(default_factory=dict)  # what it makes that lies in what it reads
    pooled: Held = field(default_factory=dict)  # and in the pool, of which this keeps nothing
    where: set[int] = field(init=False)  # memory of what it reads where it is
    rebuilt: list[tuple[int, Slot, Look]] = field(default_factory=list)  # what it makes that lies in what was copied in

    def __post_init__(self) -> None:
        self.where = {address(tensor) for tensor in self.still.values()}

    def at(self, places: set[int]) -> set[int]:
        """What it reads that lies there, where it is or before it is copied in."""
        found = {i for slot in self.slots if slot.source is not None and slot.source.data_ptr() in places for i in slot.looks}
        return found | {i for i, tensor in self.still.items() if address(tensor) in places}

    def moved(self, held: Held) -> set[int]:
        """What it reads that is no longer where it was."""
        still = self.still
        others = [i for i, tensor in still.items() if held.get(i) is not tensor]
        found = {i for i in others if not stands(held.get(i), still[i])}
        if not found:
            still.update((i, held[i]) for i in others)
        return found


class GraphReplays:
    """The recordings of one program, which are all made in one pass: the pool knows of no memory that an older one uses."""

    def __init__(
        self, graphs: Graphs, device: Device, held: Held, each: Each, strictly: Strictly, lent: Lent, dropped: set[int]
    ) -> None:
        self.graphs, self.device, self.held, self.each, self.strictly = graphs, device, held, each, strictly
        self.lent, self._dropped = lent, dropped
        self.runs: list[GraphRun] = []
        self.marks: list[tuple[str, Any]] = []
        self.moves: list[tuple[str, Any, Any]] = []  # what was put aside: where it began and ended
        self.again = True  # to be recorded when it is carried out next
        self.recording = False
        self.passes = 0
        self.named: Held = {}  # what was made in the pool when it was recorded, by names that do not keep it
        self.pool: set[int] = set()  # where that lies
        self.kept: list[list] = []  # tensors that the transfers of a run work on, none of those that are joined

    def run(self, rows: list[Row], reads: list[int], makes: set[int], moving: set[int]) -> GraphRun:
        """Rows as one. moving: of what they read, what lies elsewhere each time."""
        self.runs.append(GraphRun(self, rows, reads, makes, set(moving)))
        return self.runs[-1]

    def aside(self, step: Step, ids: Sequence[int], name: str) -> Step:
        number, device, clocked = len(self.moves), self.device, bool(self.marks)
        self.moves.append((name, None, None))

        def run(code: list, at: int) -> None:
            self.kept.append([self.held.get(i) for i in ids])  # or what is made meanwhile could be given its memory
            device.aside(partial(timed if clocked else step, code, at))

        def timed(code: list, at: int) -> None:
            begin = device.mark()
            step(code, at)
            self.moves[number] = name, begin, device.mark()

        return run

    def join(self, count: int) -> Step:
        def step(code: list, at: int) -> None:
            self.device.join(count)
            for kept in self.kept[:count]:
                kept.clear()

        return step

    def mark(self, name: str) -> Callable[[list, int], None]:
        """A step where an action begins, "" for what is none."""
        self.marks.append((name, None))
        number = len(self.marks) - 1

        def step(code: list, at: int) -> None:
            self.marks[number] = name, self.device.mark()

        return step

    def stamps(self) -> list[tuple[str, float, float]]:
        """Name, start and end of the actions of the last replay, as the device had them; [] while it is not through."""
        marks = list(self.marks)
        if not marks or any(mark is None for _, mark in marks):
            return []
        times = self.device.seconds([mark for _, mark in marks])
        pairs = zip(marks, itertools.pairwise(times)) if times else ()
        return [(name, start, end) for (name, _), (start, end) in pairs if name]

    def transfers(self) -> list[tuple[str, float, float]]:
        """The same of what was put aside."""
        moves = [move for move in self.moves if move[1] is not None]
        times = self.device.seconds([mark for _, *ends in moves for mark in ends]) if moves else []
        return [(name, *ends) for (name, *_), ends in zip(moves, zip(times[::2], times[1::2], strict=True))] if times else []

    def begin(self, code: list, at: int) -> None:
        """The first step of the program."""
        self.lent.settle(self._dropped)
        self.recording, self.again = self.again, False
        if self.recording:
            self.passes += 1
            self._forget()
            self.device.room()

    def _forget(self) -> None:
        if any(run.recorded for run in self.runs):  # the pool may end with them, and segments of it that can be extended
            self.device.finish()  # are given back at once, whichever stream works on them
        self.named.clear()
        self.pool.clear()
        for run in self.runs:
            run.forget()

    def close(self) -> None:
        self._forget()
        for kept in (self.runs, self.marks, self.moves, self.kept):
            kept.clear()

    def stand_in(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        """A name for the same that does not keep memory of the pool."""
        known = self.named.get(i)
        return known if known is not None and stands(tensor, known) else tensor

    def ending(self, last: set[int]) -> GraphOutputs:
        """The last step of a program that leaves these ids behind."""
        return GraphOutputs(self, last)

    def report(self) -> tuple[int, list[str]]:
        return sum(run.recorded for run in self.runs), [run.why for run in self.runs if run.why]


class GraphRun:
    """Rows of a program as one: a worker's step."""

    def __init__(self, whole: GraphReplays, rows: list[Row], reads: list[int], makes: set[int], moving: set[int]) -> None:
        self.rows, self.why, self._makes = rows, "", makes
        self._whole, self._reads, self._moving, self._held = whole, reads, moving, whole.held
        self._recording: GraphRecording | None = None

    @property
    def recorded(self) -> bool:
        return self._recording is not None

    def forget(self) -> None:
        self._recording = None

    def __call__(self, code: list, at: int) -> None:
        whole, found = self._whole, self._recording
        whole.kept.clear()
        try:
            if whole.recording and not self.why:
                self._record()
                return
            if found is not None:
                self._replay(found)
                return
        except Moved as error:
            whole.again = True
            if whole.passes > 1:  # once it may be another tensor for good
                self._moving |= error.ids
            if whole.passes >= TRIES:
                self.why = "what it reads lies elsewhere from one replay to the next"
        except Exception as error:
            if "CUDA error" in str(error) and not any(word in str(error).lower() for word in ("captur", "out of memory")):
                raise  # the device is lost
            self.why = " ".join(f"{type(error).__name__}: {error}".split())[:SAID]
        self._recording = None
        whole.kept.clear()
        whole.each(self.rows)

    def _replay(self, found: GraphRecording) -> None:
        held = self._held
        moved = found.moved(held)
        if moved:
            raise Moved(moved)
        for slot in found.slots:
            slot.find(held)
        sources = {slot.source.data_ptr() for slot in found.slots if slot.source is not None}
        if len(sources) < len(found.slots):
            raise Moved({i for slot in found.slots for i in slot.looks})  # into one memory: they have to have one slot
        if not found.where.isdisjoint(sources):
            raise Moved(found.at(sources & found.where))
        self._launch(found)
        found.counted.again()
        held.update(found.views)
        held.update(found.pooled)

    def _launch(self, found: GraphRecording) -> None:
        held = self._held
        for slot in found.slots:
            slot.fill()
        found.replay()
        for slot in found.slots:
            slot.back()
        for i in found.gone:
            held.pop(i, None)
        for i, slot, seen in found.rebuilt:
            assert slot.source is not None
            held[i] = shown(slot.source, seen)
        for slot in found.slots:
            slot.source = None

    def _record(self) -> None:
        held, whole = self._held, self._whole
        entry = {i: held[i] for i in self._reads if i in held}
        slots = self._slots(entry)
        still = {i: whole.stand_in(i, t) for i, t in entry.items() if not any(i in slot.looks for slot in slots)}
        before = dict(held)
        counted: list[Counted] = []
        inside = {i: shown(slot.memory, seen) for slot in slots for i, seen in slot.looks.items()}
        held.update(inside)
        try:
            replay = whole.device.record(lambda: counted.append(whole.strictly(self.rows)))
            makes = self._makes  # another name for what it was already is made too
            made = {i: t for i, t in held.items() if i in makes or (before.get(i) is not t and inside.get(i) is not t)}
            gone = [i for i in before if i not in held]
        except BaseException:
            for some in counted:  # the device refused what was well issued, which is done again as instructions
                some.undo()
            raise
        finally:
            for i in [i for i in held if i not in before]:
                del held[i]
            held.update(before)
        found = GraphRecording(replay, counted[0], still, slots, gone)
        try:
            owned = self._name(found, made, still)
            for slot in slots:
                slot.find(held)
            self._launch(found)
        except BaseException:
            counted[0].undo()
            raise
        held.update({**found.views, **owned})  # until the program frees them the pool may not give them away
        whole.named.update(found.pooled)
        whole.pool.update(map(address, owned.values()))
        self._recording = found

    def _slots(self, entry: Held) -> list[Slot]:
        """Slots for what moves, and for all that shares memory with it."""
        groups: dict[int, list[int]] = {}
        for i, tensor in entry.items():
            groups.setdefault(address(tensor), []).append(i)
        counts: dict[int, int] = {}
        found = []
        for ids in groups.values():
            nbytes = entry[ids[0]].untyped_storage().nbytes()
            if self._moving.isdisjoint(ids) or not nbytes:
                continue
            counts[nbytes] = counts.get(nbytes, -1) + 1
            found.append(Slot(self._whole.graphs.slot(nbytes, counts[nbytes]), {i: look(entry[i]) for i in ids}))
        return found

    def _name(self, found: GraphRecording, made: Held, still: Held) -> Held:
        """Fill in what is made; those of it that own memory of the pool."""
        slots = {address(slot.memory): slot for slot in found.slots}
        kept = {address(tensor) for tensor in still.values()}
        storages: dict[int, Any] = {}
        pool = self._whole.pool
        owned: Held = {}
        for i, tensor in made.items():
            where = address(tensor)
            if where in slots:
                found.rebuilt.append((i, slots[where], look(tensor)))
            elif not where or (where in kept and where not in pool):
                found.views[i] = tensor
            else:
                owned[i] = tensor
                storage = tensor.untyped_storage()
                if where not in storages:
                    storages[where] = torch._C._construct_storage_from_data_pointer(where, tensor.device, storage.nbytes())
                found.pooled[i] = lying(storages[where], look(tensor))
        return owned


class GraphOutputs:
    """What outlives a program, out of the pool: each memory once, so that what shared one still does."""

    def __init__(self, whole: GraphReplays, last: set[int]) -> None:
        self._whole, self._last = whole, last

    def __call__(self, code: list, at: int) -> None:
        if self._whole.recording:  # what it left owns memory of the pool
            self._out(self._last)
        else:
            self._whole.lent.lend(self._last, self._out)

    def _out(self, ids: set[int]) -> None:
        whole, held = self._whole, self._whole.held
        groups: dict[int, list[int]] = {}
        for i in ids:
            tensor = held.get(i)
            if tensor is not None and address(tensor) in whole.pool:
                groups.setdefault(address(tensor), []).append(i)
        try:
            held.update(self._copied(groups))
        except Exception:  # in the pool the next replay would write over it
            for members in groups.values():
                for i in members:
                    del held[i]
            raise

    def _copied(self, groups: dict[int, list[int]]) -> Held:
        held, device = self._whole.held, self._whole.device.device
        copies: dict[torch.dtype, tuple[list, list]] = {torch.int64: ([], []), torch.uint8: ([], [])}
        found: Held = {}
        for members in groups.values():
            storage = held[members[0]].untyped_storage()
            memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
            dtype = torch.uint8 if storage.nbytes() % 8 else torch.int64
            copies[dtype][0].append(memory.view(dtype))
            copies[dtype][1].append(plain(storage, device).view(dtype))
            found.update({i: shown(memory, look(held[i])) for i in members})
        for new, old in copies.values():
            if new:
                torch._foreach_copy_(new, old)
        return found


def _issues(payload: dict[str, Any]) -> bool:
    name = payload["op"]
    if any(out[0] == "new" and out[1] is None for out in payload["outs"]):
        return False
    return name.startswith("aten.") and not {tag.name for tag in OVERLOADS[name].tags} & (UNFIT - {"inplace_view"})
