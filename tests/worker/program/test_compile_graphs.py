"""Programs that a device replays: values, memory and errors as of their instructions, on a device that is played here."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

from gt.ir.heap import SLOTS
from gt.ir.instr import END, FORGET, FREE, Define
from gt.ir.template import T
from gt.worker.engine.torch import COMBINE, TorchEngine
from gt.worker.engine.torch.compiler.inductor import Inductor
from gt.worker.engine.torch.gpu import cuda as module
from gt.worker.engine.torch.gpu.cuda import Cuda, Events, Pool
from gt.worker.engine.torch.gpu.direct import DirectEngine
from gt.worker.engine.torch.gpu.graphs import Graphs
from gt.worker.engine.torch.slots import address, raw_bytes
from gt.worker.plane.nvshmem import NvshmemPlane
from gt.worker.program import graph_outputs
from gt.worker.program.graph_outputs import PendingOutputs
from tests.helpers.compiled_parts import Script, inputs, program, replay, report, same
from tests.helpers.worker_parts import Bench
from tests.worker.offload.test_host_ops import OwnMemory

CPU = torch.device("cpu")


class Played:
    """A simulated GPU with graphs: recording computes nothing, and a replay works on the memory of the recording.

    Memory that a recording makes is given to others once nobody owns it; here it is overwritten by `scramble`.
    """

    device = CPU

    def __init__(self) -> None:
        self.held: dict[int, torch.Tensor] = {}
        self.pool: dict[int, torch.Tensor] = {}  # all bytes that recordings made, by address
        self.own: dict[int, Any] = {}  # of these, the pool of one program, by address
        self.records = self.replays = self.clock = self.rooms = self.finished = 0
        self.fail = self.late = False  # when recording begins, or when it ends
        self.worker: Any = None  # whose counts a replay does not know of
        self.marks: list[list[int]] | None = None  # of the recording under way
        self.again: Iterator[list[int]] | None = None  # of the replay under way

    def finish(self) -> None:
        self.finished = self.replays

    def release_cache(self) -> None:
        self.rooms += 1

    def new_pool(self) -> Pool:
        pool = Pool.__new__(Pool)
        pool.broken = False
        return pool

    def record(self, run: Callable[[], None], pool: Pool | None = None) -> Callable[[], None]:
        if self.fail:
            raise RuntimeError("this is not permitted while a stream is captured")
        self.records += 1
        held, taken = self.held, dict(self.held)
        known = {address(t): raw_bytes(t.untyped_storage(), CPU) for t in taken.values() if address(t)}
        before = {where: memory.clone() for where, memory in {**known, **self.pool}.items()}
        self.marks = marks = []
        try:
            run()
        finally:
            self.marks = None
        for where, old in before.items():
            {**known, **self.pool}[where].copy_(old)
        if self.late:
            raise RuntimeError("this was not permitted while a stream was captured")
        made = {i: t for i, t in held.items() if taken.get(i) is not t}
        owned = [t for t in made.values() if address(t) and address(t) not in known]
        fresh = {address(t): raw_bytes(t.untyped_storage(), CPU) for t in owned}
        self.pool.update(fresh)
        for where, memory in fresh.items():
            memory.fill_(99)
            self.own.pop(where, None)
            if pool is not None:
                self.own[where] = pool

        def again() -> None:
            self.replays += 1
            now = dict(held)
            _become(held, taken)
            self.again = iter(marks)
            tally = None if self.worker is None else self.worker.counters()
            run()
            if tally is not None:
                self.worker.since(tally).undo()
            self.again = None
            for i, tensor in made.items():
                if address(tensor) in fresh:
                    fresh[address(tensor)].copy_(raw_bytes(held[i].untyped_storage(), CPU))
            _become(held, now)

        return again

    def on_side_stream(self, run: Callable[[], None]) -> None:
        run()

    def join(self, count: int) -> None:
        pass

    def mark(self) -> list[int] | None:
        """A list whose number is when a replay was last there."""
        if self.again is not None:
            self.clock += 1
            mark = next(self.again)
            mark[0] = self.clock
            return mark
        if self.marks is None:
            return None
        self.marks.append([0])
        return self.marks[-1]

    def seconds(self, marks: list[list[int]]) -> list[float]:
        return [float(mark[0]) for mark in marks]

    def scramble(self, pool: Any = None) -> None:
        """Overwrite a pool of programs, as PendingOutputs names it; or all for None."""
        wanted = None if pool in (None, graph_outputs.SHARED) else pool._own_pool or self
        for where, memory in self.pool.items():
            if pool is None or self.own.get(where) is wanted:
                memory.fill_(77)


class Plainly(Inductor):
    """No segments: every op is an instruction."""

    def fits(self, payload: dict[str, Any]) -> bool:
        return False


class Engine(TorchEngine):
    def __init__(self, device: Played, refused: tuple[str, ...] = (), reaches: bool = False) -> None:
        super().__init__("cpu")
        self.direct = DirectEngine(self, COMBINE) if reaches else None
        self.graphs = Graphs(Plainly(self), device)
        issues = self.graphs.records
        self.graphs.records = lambda payload: payload["op"] not in refused and issues(payload)  # type: ignore[method-assign]

    def compiler(self, backend: str) -> Any:
        return (self.graphs, "") if backend == "cudagraphs" else super().compiler(backend)


def _become(held: dict, other: dict) -> None:
    held.clear()
    held.update(other)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Played:
    """A device that overwrites the outputs of programs as soon as they must have been copied out."""
    played, settle = Played(), PendingOutputs.copy_out

    def settled(left: PendingOutputs, dropped: Any = graph_outputs.NONE, pool: Any = None, program: Any = None) -> None:
        try:
            settle(left, dropped, pool, program)
        finally:
            played.scramble(pool)

    monkeypatch.setattr(PendingOutputs, "copy_out", settled)
    return played


def benches(device: Played, seed: int, length: int = 14, refused: tuple[str, ...] = ()) -> tuple[Bench, Bench]:
    """The same program on the device and as instructions."""
    script = program(seed, length)
    got = script.bench("cudagraphs", inputs(seed), Engine(device, refused))
    device.held = got.executor.tensors
    return got, script.bench("eager", inputs(seed))


REFUSED: list[tuple[str, ...]] = [(), ("aten.tanh.default",), ("aten.mul_.Scalar", "aten.relu.default"), ("aten.add.Tensor",)]


@pytest.mark.parametrize("refused", REFUSED)
def test_random_programs(device: Played, refused: tuple[str, ...]) -> None:
    recorded = 0
    for seed in range(40):
        device.pool.clear()
        got, want = benches(device, seed, refused=refused)
        for _ in range(7):
            replay(got)
            replay(want)
            same(got, want)
        recorded += report(got)["graphs"]
        assert {why for _, why in report(got)["reasons"]} <= {f"no graph: {name}" for name in refused}, (seed, report(got))
    assert recorded >= 40 and device.replays > device.records


def test_one_recording_serves_all_replays(device: Played) -> None:
    got, want = benches(device, 3)
    replay(got, 20)
    replay(want, 20)
    same(got, want)
    assert report(got)["graphs"] == 1 and device.records <= 3


def test_an_input_that_is_another_tensor_is_found(device: Played) -> None:
    got, want = benches(device, 5)
    for turn in range(8):
        for bench in (got, want):
            for i in (1, 3):
                bench.executor.tensors[i] = torch.full((4, 4), float(turn))
            replay(bench)
        same(got, want)
    assert report(got)["graphs"] == 1 and device.records <= 4


def test_what_lies_otherwise_each_time_is_done_as_instructions(device: Played) -> None:
    got, want = benches(device, 5)
    whole = torch.randn(4, 4, 8)
    for turn in range(9):
        for bench in (got, want):
            bench.executor.tensors[3] = whole.clone()[:, :, turn % 8]
            replay(bench)
        same(got, want)
    assert report(got)["graphs"] == 0 and "from one replay to the next" in str(report(got)["reasons"])


ALIAS = 98
OTHER: dict[str, Any] = {"code": [], "randoms": [], "actions": [], "backend": "eager", "channels": [], "once": False}


def named(bench: Bench, source: int, target: int) -> None:
    """Another name for a tensor, as what a program returned gets one."""
    bench.executor.define([Define(ALIAS, "alias", {}).wire()])
    bench.executor.run([ALIAS, 0, source, target], 0)


def made(bench: Bench) -> list[int]:
    """Ids of what its program left in memory of its own."""
    given = set(map(address, inputs_of(bench)))
    return [i for i, t in bench.executor.tensors.items() if 1000 < i < 5000 and address(t) not in given]


def test_what_a_replay_left_stays_under_the_names_that_outlive_the_next(device: Played) -> None:
    found = 0
    for seed in range(20):
        device.pool.clear()
        got, _ = benches(device, seed)
        kept: dict[int, torch.Tensor] = {}
        for turn in range(6):
            replay(got)
            for i in made(got)[:3]:
                target = 5000 + 100 * turn + len(kept)
                named(got, i, target)
                kept[target] = got.executor.tensors[i].clone()
            assert all(torch.equal(got.executor.tensors[i], then) for i, then in kept.items()), (seed, turn)
        found += len(kept)
    assert found > 100


def test_what_a_replay_left_and_the_next_drops_is_not_copied(device: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    got, want = benches(device, 3)
    for bench in (got, want):
        replay(bench, 4)
    copies: list[int] = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda new, old: copies.append(len(new)))
    for _ in range(3):
        for bench in (got, want):
            replay(bench)
        same(got, want)
    assert len(made(got)) > 2 and sum(copies) <= 3, "but for what is of no op"


def test_what_was_left_is_copied_out_before_its_program_is_forgotten_or_another_runs(device: Played) -> None:
    for forgets in (True, False):
        got, want = benches(device, 3)
        for bench in (got, want):
            replay(bench, 5)
        got.executor.define([Define(97, "program", OTHER).wire()])
        got.executor.run([FORGET, 0, 1, 99] if forgets else [97, 0, 0, 0], 0)
        device.scramble()
        same(got, want)


def test_actions_are_stamped_by_the_device(device: Played) -> None:
    script = program(3)
    names, row = ["0F0", "0B0", "0F1"], len(script.rows) // 4
    for refused in ((), ("aten.tanh.default",)):
        got = script.bench("cudagraphs", inputs(3), Engine(device, refused), [(n * row, name) for n, name in enumerate(names)])
        device.held = got.executor.tensors
        for turn in range(5):
            replay(got)
            found = got.executor.stats([99])["actions"]
            if turn > 1 and not refused:
                assert [name for name, _, _ in found] == names and not report(got)["reasons"]
                assert all(end == start + 1 for _, start, end in found) and found[0][1] == device.clock - 3


def test_a_trace_of_a_replay_has_its_graph_and_no_marks(device: Played) -> None:
    script = program(3)
    got = script.bench("cudagraphs", inputs(3), Engine(device), [(0, "0F0"), (len(script.rows) // 2, "0B0")])
    device.held, executor = got.executor.tensors, got.executor
    replay(got, 5)
    assert report(got)["graphs"] == 1 and not report(got)["reasons"]
    executor.begin_trace(executor.session)
    replay(got)
    (part,) = executor.end_trace(executor.session, 1)
    count = sum(place >= 0 for place, _ in script.rows)
    assert [int(number) for number in part.events[::4]] == [-count, 99], (
        "a row that only marks an action or begins a replay is none"
    )


def inputs_of(bench: Bench) -> list[torch.Tensor]:
    return [t for i, t in bench.executor.tensors.items() if i < 1000]


def full(new: list, old: list) -> None:
    raise torch.OutOfMemoryError("no room")


def test_what_cannot_be_copied_out_is_no_value_that_is_written_over(device: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed output is reported, and the next run is executed as usual."""
    got, want = benches(device, 3)
    for bench in (got, want):
        replay(bench, 3)
        bench.executor.run([99, 0, 0, 0], 200)
    named(got, made(got)[0], 5000)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", full)
        got.executor.run([99, 0, 0, 0], 500)
    want.executor.run([99, 0, 0, 0], 500)
    ((trouble, _),) = got.sent
    got.sent.clear()
    assert trouble.seq == 200 and "no room" in trouble.message and 5000 not in got.executor.tensors
    records = device.records
    for bench in (got, want):
        replay(bench)
    same(got, want)
    assert device.records == records


@pytest.mark.parametrize("program", [True, False])
def test_a_peer_gets_its_message_also_where_what_was_left_cannot_be_copied(
    device: Played, planes: list[NvshmemPlane], program: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(inputs(5))
    (left,) = script.op("aten.relu.default", [T(0)], [3])
    script.op("aten.tanh.default", [T(0)], [left])
    got = script.bench("cudagraphs", inputs(5), Engine(device, (), True), (), planes[0])
    device.held, device.worker = got.executor.tensors, got.executor.worker
    replay(got, 5)
    code = {**OTHER, "code": [300, 0, 1], "channels": [[1, 0, True]]}
    got.executor.define([Define(300, "send", {"channel": CHANNEL, "boxes": [[[0, 4], [0, 4]]]}).wire()])
    got.executor.define([Define(97, "program", code).wire()])
    monkeypatch.setattr(torch, "_foreach_copy_", full)
    monkeypatch.setattr(graph_outputs, "MAX_NAMED_IDS", 0)
    got.executor.run([97, 0, 0, 0] if program else [300, 0, 1], 500)
    assert planes[0].cursors() == {(1, 0, True): 1} and "no room" in got.sent[0][0].message


def test_only_names_since_are_too_many(device: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_outputs, "MAX_NAMED_IDS", 10)
    script = Script(inputs(5))
    for _ in range(20):
        script.op("aten.relu.default", [T(0)], [1])
    got = script.bench("cudagraphs", inputs(5), Engine(device))
    device.held = got.executor.tensors
    replay(got, 5)
    copies: list[int] = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda new, old: copies.append(len(new)))
    for k in range(12):
        named(got, 1, 5000 + k)
        assert bool(copies) == (k >= 9)


def test_marks_are_not_what_is_done_between_graphs(device: Played) -> None:
    script = Script(inputs(5))
    (made,) = script.op("aten.relu.default", [T(0)], [1])
    script.op("aten.tanh.default", [T(0)], [made])
    got = script.bench("cudagraphs", inputs(5), Engine(device, ("aten.tanh.default",)), [(0, "0F0"), (1, "0F1")])
    device.held = got.executor.tensors
    replay(got, 4)
    assert report(got)["reasons"] == [[1, "no graph: aten.tanh.default"]]


def test_another_name_for_what_it_names_already_is_made_anew(device: Played) -> None:
    script = Script({1: torch.ones(4, 4), 5: torch.ones(4, 4)})
    script.alias(5, 1)
    got = script.bench("cudagraphs", {}, Engine(device))
    device.held = held = got.executor.tensors
    held.update({1: torch.ones(4, 4), 5: torch.full((4, 4), 2.0)})
    replay(got, 4)
    held[1] = torch.full((4, 4), 7.0)
    replay(got)
    assert torch.equal(held[1], held[5])


def test_inputs_that_come_to_share_memory_still_do_in_a_replay(device: Played) -> None:
    script = Script({1: torch.ones(4, 4), 2: torch.ones(4, 4)})
    script.op("aten.add_.Tensor", [T(0), T(1)], [1, 2])
    script.op("aten.mul_.Tensor", [T(0), T(1)], [2, 1])
    got, want = script.bench("cudagraphs", {}, Engine(device)), script.bench("eager", {})
    device.held = got.executor.tensors
    for turn in range(8):
        for bench in (got, want):
            a = torch.full((4, 4), 1.0 + turn)
            bench.executor.tensors.update({1: a, 2: a if turn == 6 else torch.full((4, 4), 2.0)})
            replay(bench)
        same(got, want)


def test_a_recording_that_the_device_refuses_runs_as_instructions_with_the_reason(device: Played) -> None:
    device.fail = True
    got, want = benches(device, 3)
    replay(got, 4)
    replay(want, 4)
    same(got, want)
    assert report(got)["graphs"] == 0 and "not permitted" in str(report(got)["reasons"])


def test_an_op_that_fails_while_it_is_recorded_is_done_as_instructions(device: Played) -> None:
    """The instructions say which op it was, once a replay."""
    got, _ = benches(device, 3)
    replay(got, 2)
    assert not got.sent
    del got.executor.tensors[1], got.executor.tensors[3]
    replay(got)
    assert got.sent and all(message.kind == "missing" for message, _ in got.sent)


# ---- beside the device


class Silent:
    """NVSHMEM with a peer that is always ready."""

    def __init__(self) -> None:
        self.memory = [ctypes.create_string_buffer((4 << 20) + 64) for _ in range(2)]

    def gpu(self) -> str:
        return ""

    def unique_id(self) -> str:
        return ""

    def join(self, unique_id: str, rank: int, count: int, nbytes: int) -> int:
        return self.peer(0, 0)

    def peer(self, address: int, rank: int) -> int:
        start = ctypes.addressof(self.memory[rank])
        return start + -start % 64

    def barrier(self, *args: Any) -> None: ...

    send = recv = signal = wait = barrier


@pytest.fixture
def planes() -> Iterator[list[NvshmemPlane]]:
    """Two of worker 0, each with a worker 1 of its own."""
    made = []
    for _ in range(2):
        made.append(NvshmemPlane(Engine(Played(), (), True), 4 << 20, Silent()))
        made[-1].open()
        made[-1].world([[1, "w1", 1, "host", 0, 0, "a", "home", 0]])
        made[-1].gathered = lambda members, rank, own: [own, ""]  # type: ignore[method-assign]
        made[-1].form([0, 1], 0, "nvshmem:")
    yield made
    for plane in made:
        plane.close()


CHANNEL = {"peer": 1, "offset": 0, "bytes": 4096, "slots": SLOTS}


@pytest.mark.parametrize("late", [False, True])
def test_channels_go_on_where_instructions_would_have_left_them(device: Played, planes: list[NvshmemPlane], late: bool) -> None:
    """Else the other end, which may do instructions, waits at another slot for ever."""
    given = inputs(5)
    script = Script(given)
    for n in range(3):  # two, one and two messages, instructions between
        (made,) = script.op("aten.relu.default", [T(0)], [3 if n else 1])
        for _ in range(1 if n == 1 else 2):
            script.send(made, CHANNEL)
        script.op("aten.tanh.default", [T(0)], [1])
    got, want = (
        script.bench(backend, inputs(5), Engine(device, ("aten.tanh.default",), True), (), plane, [[1, 0, True]])
        for backend, plane in zip(("cudagraphs", "eager"), planes, strict=True)
    )
    device.held, device.worker, device.late = got.executor.tensors, got.executor.worker, late
    for turn in range(8):
        for bench in (got, want):
            bench.executor.tensors[3] = torch.full((4, 4), float(turn))  # is elsewhere, which the later runs find
            replay(bench)
        assert planes[0].cursors() == planes[1].cursors() == {(1, 0, True): 5 % SLOTS}, turn
        assert planes[0].counters() == planes[1].counters(), turn
    assert device.replays == 0 if late else report(got)["graphs"] == 3


def test_a_transfer_that_finds_no_room_while_it_is_recorded_is_done_as_instructions(
    device: Played, planes: list[NvshmemPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was issued that others would wait for: the worker need not end."""
    script, engine = Script(inputs(5)), Engine(device, (), True)
    (made,) = script.op("aten.relu.default", [T(0)], [1])
    script.send(made, CHANNEL)
    packed = engine.direct.packed

    def tight(tensor: torch.Tensor) -> torch.Tensor:
        if device.marks is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return packed(tensor)

    monkeypatch.setattr(engine.direct, "packed", tight)
    got = script.bench("cudagraphs", inputs(5), engine, (), planes[0], [[1, 0, True]])
    device.held, device.worker = got.executor.tensors, got.executor.worker
    replay(got, 5)
    assert report(got)["graphs"] == 0 and "Tried to allocate" in str(report(got)["reasons"])
    assert planes[0].cursors() == {(1, 0, True): 5 % SLOTS} and not got.sent


def test_what_is_put_together_of_a_workers_own_parts_stays_on_its_device(device: Played) -> None:
    given = inputs(5)
    script = Script(given)
    (made,) = script.op("aten.relu.default", [T(0)], [1])
    copied = script.copy(made)
    script.op("aten.tanh.default", [T(0)], [copied])
    got = script.bench("cudagraphs", inputs(5), Engine(device, (), True))
    want = script.bench("eager", inputs(5))
    device.held, device.worker = got.executor.tensors, got.executor.worker
    for _ in range(4):
        for bench in (got, want):
            replay(bench)
        same(got, want)
    assert report(got)["graphs"] == 1 and device.replays


def test_what_is_moved_beside_actions_is_stamped_too(device: Played, planes: list[NvshmemPlane]) -> None:
    script = Script(inputs(5))
    (made,) = script.op("aten.relu.default", [T(0)], [1])
    script.send(made, CHANNEL)
    script.op("aten.tanh.default", [T(0)], [1])
    got = script.bench("cudagraphs", inputs(5), Engine(device, (), True), [(0, "0F0"), (2, "0F1")], planes[0], [[1, 0, True]])
    device.held, device.worker = got.executor.tensors, got.executor.worker
    for _ in range(4):
        replay(got)
    stats = got.executor.stats([99])
    ((name, start, end),) = stats["transfers"]
    (_, begin, over), _ = stats["actions"]
    assert name == "send" and begin < start == end - 1 < over


def test_definitions_from_before_workers_share_memory_move_data_there_from_then_on(device: Played) -> None:
    """Their other ends may be defined later, and all ends have to go one way."""
    script = Script(inputs(5))
    script.send(1, CHANNEL)
    plane = NvshmemPlane(Engine(device, (), True), 4 << 20, Silent())
    plane.gathered = lambda members, rank, own: [own, ""]  # type: ignore[method-assign]
    plane.open()
    try:
        bench = script.bench("cudagraphs", inputs(5), Engine(device, (), True), (), plane, [[1, 0, True]])
        device.held = bench.executor.tensors
        plane.world([[1, "w1", 1, "host", 0, 0, "a", "home", 0]])
        replay(bench)
        assert "is on host 'host'" in bench.sent.pop()[0].message  # through host memory, where nobody is
        plane.form([0, 1], 0, "nvshmem:")
        bench.executor.rebind_transfers()
        replay(bench)
        bench.executor.run([100, 0, 1], 0)
        assert not bench.sent and plane.cursors() == {(1, 0, True): 2}
    finally:
        plane.close()


def test_memory_that_inputs_are_copied_into_ends_with_its_programs(device: Played) -> None:
    got, _ = benches(device, 5)
    for turn in range(6):
        got.executor.tensors[3] = torch.full((4, 4), float(turn))
        replay(got)
    held: dict = got.executor._engine.graphs._slots
    assert len(held)
    got.executor.run([FORGET, 0, 1, 99], 0)
    gc.collect()
    assert not len(held)


def test_an_end_of_a_program_that_only_frees_is_done(device: Played) -> None:
    bench = Bench(engine=Engine(device))
    bench.put(_1=torch.ones(2))
    code = {"code": [FREE, 0, 1, 1], "randoms": [], "actions": [], "backend": "cudagraphs", "channels": [], "once": False}
    bench.executor.define([Define(99, "program", code).wire()])
    replay(bench, 3)
    assert not bench.sent and not bench.executor.tensors


class Event:
    """One that was there when it was asked, and is awaited again when it is read."""

    def __init__(self, **how: Any) -> None: ...

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        raise RuntimeError("Both events must be completed before calculating elapsed time.")


def test_times_that_the_next_replay_overtakes_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked for by the thread of the link, which an error would end."""
    monkeypatch.setattr(module.torch.cuda, "Event", Event)
    cuda = Cuda.__new__(Cuda)
    cuda._clock = None
    assert cuda.seconds([Event()]) == []


class Capture:
    """A graph whose capture something broke."""

    ended = 0

    def capture_begin(self, **how: Any) -> None: ...

    def capture_end(self) -> None:
        Capture.ended += 1
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


class Stream:
    waits: ClassVar[list[tuple[Any, Any]]] = []

    def __init__(self, *args: Any) -> None: ...

    def wait_stream(self, other: Any) -> None:
        Stream.waits.append((self, other))

    def record_event(self) -> None: ...


def refuses(*args: Any) -> None:
    raise RuntimeError("no recording to this pool")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda, as far as a recording that fails needs it."""
    cuda = module.torch.cuda
    for name, stand_in in {"CUDAGraph": Capture, "Stream": Stream, "graph_pool_handle": itertools.count().__next__}.items():
        monkeypatch.setattr(cuda, name, stand_in)
    monkeypatch.setattr(module.torch._C, "_cuda_endAllocateToPool", refuses, raising=False)  # as after a capture that ended
    monkeypatch.setattr(cuda, "current_stream", Stream)
    monkeypatch.setattr(cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(Stream, "waits", [])
    monkeypatch.setattr(Capture, "ended", 0)


def test_what_is_aside_is_joined_also_where_a_recording_fails(played: None) -> None:
    """torch's allocator is not told of the end of a capture that work was apart from. What is not apart cannot be joined."""
    device = Cuda(CPU)

    def run() -> None:
        device.on_side_stream(lambda: None)
        raise ValueError("it waits for the device")

    pair = device._stream, device._side
    for what, joins in ((run, 1), (lambda: 1 / 0, 0)):
        Stream.waits.clear()
        with pytest.raises((ValueError, ZeroDivisionError)):
            device._record(what, Pool())
        assert Stream.waits.count(pair) == joins
    assert Capture.ended == 2


def test_why_a_recording_failed_is_told_not_that_it_did(played: None) -> None:
    def run() -> None:
        raise ValueError("it waits for the device")

    with pytest.raises(ValueError, match="waits for the device"):
        Cuda(CPU)._record(run, Pool())
    assert Capture.ended == 1
    with pytest.raises(RuntimeError, match="previous error"):
        Cuda(CPU)._record(lambda: None, Pool())


@pytest.fixture
def told(played: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Calls of torch's allocator about pools. A recording ends well unless `run` makes it fail."""
    found: list[tuple] = []
    for name in ("end", "release"):
        whole = {"end": "_cuda_endAllocateToPool", "release": "_cuda_releasePool"}[name]
        monkeypatch.setattr(torch._C, whole, lambda *which, name=name: found.append((name, *which)))
    monkeypatch.setattr(Capture, "capture_end", lambda self: None)
    return found


def breaks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function that breaks the current recording."""
    end = Capture.capture_end

    def broken(self: Capture) -> None:
        monkeypatch.setattr(Capture, "capture_end", end)
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    return lambda: monkeypatch.setattr(Capture, "capture_end", broken)


def test_after_a_broken_recording_another_pool_is_there(told: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may not have told its allocators that it ended: they refuse a pool that is recorded into twice at a time."""
    device = Cuda(CPU)
    kept, pools = [], []
    for _ in range(2):
        kept.append(device.record(lambda: None))
        pools.append(device._pool())
        with pytest.raises(RuntimeError, match="previous error"):
            device.record(breaks(monkeypatch))
    kept.append(device.record(lambda: None))
    assert len({*pools, device._pool()}) == 3 and None not in pools
    assert told == [(what, 0, pool.handle) for pool in pools for what in ("end", "release")]
    assert len(device._broken) == 2  # pinned memory's allocator asks them still


def test_a_pool_of_which_torch_has_told_that_it_is_free_is_gone_on_with(
    told: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*which: Any) -> None:
        raise RuntimeError("not currently recording to mempool_id")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", refused)
    device = Cuda(CPU)
    kept = device.record(lambda: None)
    pool = device._pool()
    with pytest.raises(RuntimeError, match="previous error"):
        device.record(breaks(monkeypatch))
    with pytest.raises(ZeroDivisionError):  # the recording ended well, for all that
        device.record(lambda: 1 / 0)
    assert kept and device._pool() is pool is not None and not device._broken and not told


def test_a_pool_ends_with_the_last_recording(told: list[tuple]) -> None:
    """Or no other program of the worker would get its memory."""
    device = Cuda(CPU)
    kept = [device.record(lambda: None) for _ in range(2)]
    pool = device._pool()
    kept.pop()
    assert pool is not None and device._pool() is pool
    graphs = weakref.WeakSet(pool.graphs)
    kept.clear()
    del pool
    assert device._pool() is None and not graphs
    kept.append(device.record(lambda: None))
    assert device._pool() is not None


def test_a_program_that_is_forgotten_keeps_nothing(device: Played) -> None:
    """Not until cycles are collected either: nothing that a worker does makes that happen."""
    got, _ = benches(device, 3)
    replay(got, 5)
    assert report(got)["graphs"] == 1
    held = got.executor.tensors
    memory = [weakref.ref(tensor) for tensor in held.values()]
    device.held, device.pool = {}, {}
    gc.collect()
    gc.disable()
    try:
        got.executor.run([FORGET, 0, 1, 99, END, 0, 2, 1, 5000], 0)
        assert not held and not [ref for ref in memory if ref() is not None]
        assert device.finished == device.replays > 0  # before
    finally:
        gc.enable()


def test_what_waits_for_the_device_before_a_recording_is_no_op_that_is_stuck(device: Played, monkeypatch: Any) -> None:
    """Memory is given back once the device is through, and that may wait for what another worker compiles."""
    got, _ = benches(device, 3)
    seen: list[Any] = []
    monkeypatch.setattr(device, "release_cache", lambda: seen.append(got.executor.where()))
    record = device.record

    def recorded(run: Callable[[], None], pool: Pool | None) -> Callable[[], None]:
        def watched() -> None:
            runner, run_rows = got.executor.runner, got.executor.runner.run_rows
            monkeypatch.setattr(runner, "run_rows", lambda rows: (seen.append(got.executor.where()), run_rows(rows))[1])
            run()
            monkeypatch.setattr(runner, "run_rows", run_rows)

        return record(watched, pool)

    monkeypatch.setattr(device, "record", recorded)
    replay(got, 3)
    assert len(seen) > 1 and {where[2] for where in seen} == {"compile"}


def test_while_the_device_is_waited_for_nothing_is_asked_of_it(device: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread of the link, which would wait in the driver with the interpreter's lock, for a worker that died perhaps."""
    got, _ = benches(device, 3)
    engine, asked = got.executor._engine, []
    monkeypatch.setattr(engine, "peak", lambda: asked.append(1) or 7)
    monkeypatch.setattr(engine, "progress", Events(Event))
    monkeypatch.setattr(device, "release_cache", lambda: found.append(got.executor.stats([99])))
    found: list[dict] = []
    assert got.executor.stats([99])["peak_bytes"] == 7 and asked == [1]
    replay(got, 3)
    assert [stats["peak_bytes"] for stats in found] == [7] and asked == [1]
    assert got.executor.stats([99])["peak_bytes"] == 7 and asked == [1, 1]


def test_what_is_refused_when_it_is_launched_first_was_not_done(device: Played, planes: Any) -> None:
    """Counts of what was exchanged go on as a peer's do, that had no trouble."""
    script = Script(inputs(5))
    (made,) = script.op("aten.relu.default", [T(0)], [1])
    script.send(made, CHANNEL)
    got = script.bench("cudagraphs", inputs(5), Engine(device, (), True), (), planes[0], [[1, 0, True]])
    want = script.bench("eager", inputs(5), Engine(device, (), True), (), planes[1], [[1, 0, True]])
    device.held, device.worker = got.executor.tensors, got.executor.worker
    record = device.record

    def refused(run: Callable[[], None], pool: Pool | None) -> Callable[[], None]:
        record(run, pool)

        def again() -> None:
            raise RuntimeError("CUDA error: out of memory")

        return again

    device.record = refused  # type: ignore[method-assign]
    for _ in range(4):
        replay(got)
        replay(want)
        assert planes[0].cursors() == planes[1].cursors() and planes[0].counters() == planes[1].counters()
    assert "out of memory" in str(report(got)["reasons"])


def test_what_is_copied_in_may_come_to_be_what_is_read_where_it_is(device: Played) -> None:
    script = Script({1: torch.ones(4, 4), 2: torch.ones(4, 4)})
    script.op("aten.add_.Tensor", [T(0), T(1)], [1, 2])
    script.op("aten.mul_.Tensor", [T(0), T(1)], [2, 1])
    got, want = script.bench("cudagraphs", {}, Engine(device)), script.bench("eager", {})
    device.held = got.executor.tensors
    kept = [torch.empty(4, 4) for _ in (got, want)]
    for turn in range(9):
        for bench, two in zip((got, want), kept, strict=True):
            one = two if turn == 6 else torch.full((4, 4), 1.0 + turn)
            bench.executor.tensors.update({1: one, 2: two.fill_(2.0)})
            replay(bench)
        same(got, want)


class HostStepEngine(Engine):
    """Its host ops are done by a thread beside the device, as those of a GPU."""

    lane, evicted = OwnMemory.lane, OwnMemory.evicted


PARAMETER, STATE, X = 1, 2, 3


def host_step(script: Script, name: str, ids: list[int], fresh: list[int]) -> None:
    """An op in host memory that changes its first operand."""
    counts = {"tensors": 2, "values": 0, "outs": [["same", None, 0]], "writes": [0], "random": None, "fresh": fresh}
    script._write("host_op", {"op": name, "args": [{"t": 0}, {"t": 1}], "kwargs": {}, **counts}, ids)


def offloaded(script: Script, engine: Engine, backend: str, *evicted: int) -> Bench:
    torch.manual_seed(1)
    bench = script.bench(backend, {i: torch.randn(4, 4) for i in (PARAMETER, STATE, X)}, engine=engine)
    for i in evicted:
        bench.executor.tensors.evict(i, "cpu", "")
    return bench


def both(device: Played, script: Script, *evicted: int) -> Bench:
    """Replays on the device, compared with the same as instructions."""
    want = offloaded(script, HostStepEngine(Played()), "eager", *evicted)
    got = offloaded(script, HostStepEngine(device), "cudagraphs", *evicted)
    device.held = got.executor.tensors
    for _ in range(4):
        for bench in (got, want):
            replay(bench)
        for i in sorted(i for i in want.executor.tensors if i > 1000):
            assert torch.equal(got.executor.tensors[i], want.executor.tensors[i]), i
    for i in (PARAMETER, STATE):
        assert torch.equal(got.executor.tensors[i], want.executor.tensors[i]), i
    assert not got.sent and not want.sent
    for bench in (got, want):
        bench.executor.worker.engine.lane()._thread.shutdown()
    return got


def test_a_step_on_the_host_is_done_between_recordings_and_its_parameter_is_waited_for(device: Played) -> None:
    """A recording deletes what it brings back itself: every later op on the parameter would fail, and its peers wait."""
    script = Script({i: torch.zeros(4, 4) for i in (PARAMETER, STATE, X)})
    (product,) = script.op("aten.mm.default", [T(0), T(1)], [X, PARAMETER])
    (gradient,) = script.op("aten.mul.Tensor", [T(0), T(1)], [product, X])
    host_step(script, "aten.add_.Tensor", [STATE, gradient], [1])
    host_step(script, "aten.sub_.Tensor", [PARAMETER, STATE], [])
    script.op("aten.mm.default", [T(0), T(1)], [X, PARAMETER])
    bench = both(device, script, STATE)
    assert report(bench)["graphs"] == 2 and device.records == 2
    assert [1 for count, why in report(bench)["reasons"] if why == "no graph: host_op"] == [1]


def test_what_a_program_evicts_is_used_by_instructions(device: Played) -> None:
    script = Script({i: torch.zeros(4, 4) for i in (PARAMETER, STATE, X)})
    (product,) = script.op("aten.mm.default", [T(0), T(1)], [X, X])
    (turned,) = script.op("aten.t.default", [T(0)], [PARAMETER])
    (other,) = script.op("aten.add.Tensor", [T(0), T(1)], [product, turned])
    script.free(turned)
    script._write("evict", {"space": "cpu", "path": ""}, [PARAMETER])
    script.op("aten.mul.Tensor", [T(0), T(1)], [other, X])
    bench = both(device, script, PARAMETER)
    assert report(bench)["graphs"] == 2 and device.records == 2
    reasons = [why for _, why in report(bench)["reasons"]]
    assert "no graph: aten.add.Tensor uses a tensor that comes back to other memory each time" in reasons
