"""Numbers that are read before a device's later work: the value of the moment, or none; and where compiled code makes them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gt.worker.engine.torch.compiler import early_results
from gt.worker.engine.torch.gpu.early_values import MAX_KNOWN, MAX_SLOTS, MAX_TAPS, EarlyNumbers, Tap
from gt.worker.engine.torch.gpu.graphs import GraphRun, _final

CPU = torch.device("cpu")


@pytest.fixture
def early() -> EarlyNumbers:
    return EarlyNumbers(CPU)


def number(value: float) -> torch.Tensor:
    return torch.tensor([1.0, value])[1]


def test_a_number_is_known_until_something_writes_to_it(early: EarlyNumbers) -> None:
    loss, other, row = number(3), number(4), torch.ones(2)
    early.made(1, loss)
    early.made(2, other)
    early.made(3, row)
    for same in (loss, loss.detach(), loss.view(1), loss.reshape(1, 1)):
        got = early.read(same)
        assert got is not None and torch.equal(got, same) and got.data_ptr() != loss.data_ptr()
    for unknown in (row, row[0], number(3), loss.clone(), torch.view_as_real(torch.tensor(1j))[0]):
        assert early.read(unknown) is None
    loss.detach().add_(1)
    assert early.read(loss) is None and early.read(other) is not None
    early.forget()
    assert early.read(other) is None


def test_a_freed_number_is_not_taken_for_one_in_its_memory(early: EarlyNumbers) -> None:
    early.made(1, number(3))
    gc.collect()
    assert all(early.read(number(n)) is None for n in range(20))


def test_the_newest_numbers_are_known(early: EarlyNumbers) -> None:
    numbers = [number(n) for n in range(MAX_KNOWN + 3)]
    for n, tensor in enumerate(numbers):
        early.made(n, tensor)
    assert [early.read(tensor) is not None for tensor in numbers] == [False] * 3 + [True] * MAX_KNOWN


def test_outside_of_recordings_a_row_of_one_is_read_with_all_work(early: EarlyNumbers) -> None:
    row = torch.tensor([3.0])
    early.made(1, row)
    assert early.read(row) is None
    assert [tap.memory.holds(row) for tap in recorded(early, {1: row}, {1})][:1] == [True]


def test_of_a_programs_numbers_those_of_its_recordings_count(early: EarlyNumbers) -> None:
    before, within = number(1), number(2)
    early.made(1, before)
    early.in_program(True)
    early.made(2, within)
    early.in_program(False)
    assert early.read(before) is None and early.read(within) is None


def recorded(early: EarlyNumbers, tensors: dict[int, torch.Tensor], wanted: set[int]) -> list[Tap]:
    with early.recording(wanted) as taps:
        for i, tensor in tensors.items():
            early.made(i, tensor)
        early.tap(number(9))  # of compiled code, which knows no ids
    assert early._slots is not None
    for tap in taps:  # on a device, to record the copies is not to make them
        early._slots.counts[tap.slot] -= 1
        early._slots.arrived[tap.slot] -= 1
    return taps


def replay(early: EarlyNumbers, tensor: torch.Tensor, tap: Tap) -> None:
    """A recording's replay, which here is carried out at once."""
    assert early._slots is not None
    early.launched(tap)
    early._slots.record(tap.slot, tensor)


def test_each_replay_has_its_own_value(early: EarlyNumbers) -> None:
    loss = number(5)
    taps = recorded(early, {1: loss, 2: number(6), 3: torch.ones(2)}, {1, 3})
    assert len(taps) == 2 and not taps[1].memory.holds(loss)
    for value in (7.0, 8.0):
        result = number(value)
        replay(early, result, taps[0])
        early.replayed(result, taps[0])
        assert early.read(result) == value

    # A copy of the result needs no other copy to the host. Its value is gone once a later replay has written there.
    copy = result.clone()
    early.made(4, copy, result)
    assert early.read(copy) == 8.0
    replay(early, number(10), taps[0])
    assert early.read(copy) is None


def test_results_that_share_memory_or_were_changed_have_no_tap(early: EarlyNumbers) -> None:
    alone, changed, shared = number(1), number(2), number(3)
    taps = recorded(early, {1: alone, 2: changed, 3: shared}, {1, 2, 3})
    changed.add_(1)
    found = _final(taps, {1: alone, 2: changed, 3: shared, 4: shared.detach(), 5: number(4)})
    assert list(found) == [1] and found[1] is taps[0]


def test_slots_are_free_again_with_their_recording(early: EarlyNumbers) -> None:
    for _ in range(3 * MAX_SLOTS // MAX_TAPS):
        assert len(recorded(early, {n: number(n) for n in range(20)}, set(range(20)))) == MAX_TAPS
        gc.collect()
    assert early._slots is not None and len(early._slots.free) == MAX_SLOTS


def test_a_slot_that_has_changed_hands_waits_for_its_own_replay(early: EarlyNumbers) -> None:
    before, after = number(1), number(2)
    (old,) = recorded(early, {}, set())
    slots, place = early._slots, old.slot
    assert slots is not None
    early.launched(old)  # this replay is still under way when its recording is given up
    del old
    gc.collect()
    (new,) = recorded(early, {}, set())
    assert new.slot == place
    early.launched(new)
    early.replayed(after, new)
    slots.record(place, before)
    assert slots.arrived[place] < new.count
    slots.record(place, after)
    assert early.read(after) == 2.0


class Device:
    """A device that records the copies of numbers to the host, and makes them when it is replayed."""

    device = CPU

    def __init__(self, early: EarlyNumbers, monkeypatch: pytest.MonkeyPatch) -> None:
        self.early, self.patch = early, monkeypatch

    def record(self, run: Callable[[], None], pool: Any = None) -> Callable[[], None]:
        slots, issued = self.early._slots, []
        assert slots is not None
        with self.patch.context() as patch:
            patch.setattr(slots, "record", lambda *copies: issued.append(copies))
            run()
        return lambda: [slots.record(number, tensor) for number, tensor in issued] and None


def graph_run(early: EarlyNumbers, device: Device, work: Callable[[], torch.Tensor]) -> GraphRun:
    """A run that makes tensor 1, which the program returns."""
    tensors: dict[int, torch.Tensor] = {}

    def execute(rows: list) -> SimpleNamespace:
        tensors[1] = work()
        return SimpleNamespace(count_again=lambda: None, undo=lambda: None)

    graphs, runner = SimpleNamespace(early=early), SimpleNamespace(run_all_or_none=execute)
    same: dict[str, Any] = {"without_ownership": lambda i, tensor: tensor, "own_pool": lambda: None}
    same |= {"kept": [], "pooled": {}, "pool": set(), "recording": True}
    replays: Any = SimpleNamespace(graphs=graphs, runner=runner, tensors=tensors, device=device, unchanged={1}, **same)
    return GraphRun(replays, [], [], {1}, set())


def test_a_slot_whose_number_is_no_result_is_given_to_no_other_graph(
    early: EarlyNumbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice() -> torch.Tensor:
        early.tap(number(9))  # compiled code makes it, and the program changes it or drops it
        loss = number(5)
        early.made(1, loss)
        return loss

    device = Device(early, monkeypatch)
    runs = [graph_run(early, device, twice) for _ in range(2)]
    for replay in range(3):
        for run in runs:
            run([], 0)
            run._replays.recording = False
            slots = early._slots
            assert slots is not None and slots.arrived.tolist() == slots.launched, f"after replay {replay}"
    assert len(slots.free) == MAX_SLOTS - 4
    del run
    runs.clear()
    early.forget()
    gc.collect()
    assert len(slots.free) == MAX_SLOTS


class Kernel:
    """A kernel as Inductor's scheduler has it."""

    def __init__(self, name: str, reads: str = "", nbytes: int = 8, tap: bool = False) -> None:
        self.name, self.nbytes = name, nbytes
        self.unmet_dependencies = [type("Dep", (), {"name": read}) for read in reads]
        self.node = type("Node", (), {"op_overload": torch.ops.gt_worker.tap.default if tap else None})

    def get_buffer_names(self) -> list[str]:
        return [self.name]

    def get_outputs(self) -> list[Any]:
        return [type("Output", (), {"mpi_buffer": type("Buffer", (), {"size_alloc": self.nbytes})})]


def order(*kernels: Kernel) -> str:
    return "".join(kernel.name for kernel in early_results.with_taps_early(list(kernels)))


def test_small_kernels_that_a_tap_waits_for_come_as_early_as_what_they_read() -> None:
    large = 1 << 30
    a, b, c = Kernel("a", nbytes=large), Kernel("b", "a", large), Kernel("c", "b", large)
    part, loss, tap = Kernel("p", "a"), Kernel("l", "p"), Kernel("t", "l", tap=True)
    assert order(a, b, c, part, loss, tap) == "apltbc"
    assert order(a, b, part, c, loss) == "abpcl"
    assert order(a, b, Kernel("p", "a", large), c, loss, tap) == "abpltc"
    # An order that cannot be understood stays as it is.
    assert order(a, b, Kernel("t", "a", tap=True)) == "atb"
    assert order(a, b, Kernel("t", "a", tap=True, nbytes=None)) == "abt"  # type: ignore[arg-type]


def test_compiled_code_names_its_numbers_and_keeps_its_results() -> None:
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        out = torch.tanh(x @ weight)
        loss = out.square().mean()
        grad = 2 / out.numel() * out * (1 - out * out)
        return [loss, x.t() @ grad, early_results.tap(loss)]

    inputs = [torch.randn(8, 4), torch.randn(4, 6)]
    seen: list[torch.Tensor] = []
    early_results.receive_by(seen.append)
    try:
        with early_results.early_taps():
            code = compile_fx(make_fx(step)(*inputs), inputs)
        seen.clear()
        loss, grad, _ = code(*inputs)
    finally:
        early_results.receive_by(lambda number: None)
    torch.testing.assert_close([loss, grad], step(*inputs)[:2])
    assert len(seen) == 1 and seen[0].data_ptr() == loss.data_ptr()
