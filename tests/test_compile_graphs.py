"""Programs that a device replays: values, memory and errors as of their instructions, on a device that is played here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiled_parts import inputs, program, replay, report, same
from worker_parts import Bench

from gt.worker.engine.torch import TorchEngine
from gt.worker.engine.torch.graphs import Graphs, address, plain
from gt.worker.engine.torch.inductor import Inductor

CPU = torch.device("cpu")


class Played:
    """What a GPU does with graphs, done here: recording does nothing, a replay works on the memory of the recording.

    Memory that a recording makes is given to others once nobody owns it; here it is overwritten by `scramble`.
    """

    device = CPU

    def __init__(self) -> None:
        self.held: dict[int, torch.Tensor] = {}
        self.pool: dict[int, torch.Tensor] = {}  # all bytes that recordings made, by address
        self.records = self.replays = self.clock = 0
        self.fail = False
        self.marks: list[list[int]] | None = None  # of the recording under way
        self.again: Iterator[list[int]] | None = None  # of the replay under way

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.fail:
            raise RuntimeError("this is not permitted while a stream is captured")
        self.records += 1
        held, taken = self.held, dict(self.held)
        known = {address(t): plain(t.untyped_storage(), CPU) for t in taken.values() if address(t)}
        before = {where: memory.clone() for where, memory in {**known, **self.pool}.items()}
        self.marks = marks = []
        run()
        self.marks = None
        for where, old in before.items():
            {**known, **self.pool}[where].copy_(old)
        made = {i: t for i, t in held.items() if taken.get(i) is not t}
        fresh = {address(t): plain(t.untyped_storage(), CPU) for t in made.values() if address(t) and address(t) not in known}
        self.pool.update(fresh)
        for memory in fresh.values():
            memory.fill_(99)

        def again() -> None:
            self.replays += 1
            now = dict(held)
            _become(held, taken)
            self.again = iter(marks)
            run()
            self.again = None
            for i, tensor in made.items():
                if address(tensor) in fresh:
                    fresh[address(tensor)].copy_(plain(held[i].untyped_storage(), CPU))
            _become(held, now)

        return again

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

    def scramble(self) -> None:
        for memory in self.pool.values():
            memory.fill_(77)


class Plainly(Inductor):
    """No segments: every op is an instruction."""

    def fits(self, payload: dict[str, Any]) -> bool:
        return False


class Engine(TorchEngine):
    def __init__(self, device: Played, refused: tuple[str, ...] = ()) -> None:
        super().__init__("cpu")
        self.graphs = Graphs(Plainly(self), device)
        issues = self.graphs.records
        self.graphs.records = lambda payload: payload["op"] not in refused and issues(payload)  # type: ignore[method-assign]

    def compiler(self, backend: str) -> Any:
        return (self.graphs, "") if backend == "cudagraphs" else super().compiler(backend)


def _become(held: dict, other: dict) -> None:
    held.clear()
    held.update(other)


@pytest.fixture
def device() -> Iterator[Played]:
    yield Played()


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
            device.scramble()
            same(got, want)
        recorded += report(got)["graphs"]
        assert not report(got)["reasons"], (seed, report(got))
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
        device.scramble()
        same(got, want)
    assert report(got)["graphs"] == 1 and device.records <= 4


def test_what_lies_otherwise_each_time_is_done_as_instructions(device: Played) -> None:
    got, want = benches(device, 5)
    whole = torch.randn(4, 4, 8)
    for turn in range(9):
        for bench in (got, want):
            bench.executor.tensors[3] = whole.clone()[:, :, turn % 8]
            replay(bench)
        device.scramble()
        same(got, want)
    assert report(got)["graphs"] == 0 and "from one replay to the next" in str(report(got)["reasons"])


def test_what_a_replay_left_stays_when_the_next_is_done(device: Played) -> None:
    """It is not in memory that replays work on."""
    found = 0
    for seed in range(20):
        got, want = benches(device, seed)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(5):
            replay(got)
            given = {address(got.executor.tensors[i]) for i in want.executor.tensors if i < 1000}
            left = [t for i, t in got.executor.tensors.items() if i > 1000 and address(t) not in given]
            kept += [(tensor, tensor.clone()) for tensor in left]
            device.scramble()
            assert all(torch.equal(tensor, then) for tensor, then in kept), seed
        found += len(kept)
    assert found > 100


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


def test_where_the_device_refuses_instructions_do_it_and_the_reason_is_told(device: Played) -> None:
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
    assert got.sent and all(message.kind == "op" for message, _ in got.sent)
