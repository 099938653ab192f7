"""Small state whose values a captured step reads in Python: a guard of its programs, which each write of the memory ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gt
from gt.client import current_session
from gt.errors import OpFailed

REMOTE = "remote"
pytestmark = pytest.mark.usefixtures("one")


class Gate(torch.nn.Module):
    """A flag among the buffers decides the sign. It is element 1 of `flags`, and is read by a view."""

    def __init__(self, dtype: torch.dtype = torch.bool) -> None:
        super().__init__()
        self.register_buffer("flag", torch.zeros(1, dtype=dtype))
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.weight
        return -h if self.flag else h


def fetches() -> int:
    return current_session.current().fetches


def check(step: Any, gate: Gate, calls: int = 4) -> None:
    """Each call has the numbers of the state of now."""
    sign = -1 if gate.flag.cpu() else 1
    for _ in range(calls):
        x = torch.randn(3)
        assert torch.equal(step(x).cpu(), sign * x)


@torch.no_grad()
def captured(gate: Gate) -> Any:
    """A step with a program, whose guard knows the flag."""
    gate.to(REMOTE)
    step = gt.compile(torch.no_grad()(lambda x: gate(x)))
    check(step, gate)
    assert step._programs and step._programs[0].replays, step.explain()
    return step


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.uint8])
def test_a_flag_that_nothing_writes_costs_no_wait(dtype: torch.dtype) -> None:
    gate = Gate(dtype)
    step = captured(gate)
    gate.flag.logical_or_(torch.ones(1, dtype=torch.bool, device=REMOTE))
    check(step, gate)
    optimizer, before = torch.optim.SGD(gate.parameters(), lr=0.0), fetches()
    for _ in range(6):
        out = step(torch.ones(3))
        (gate.weight * 2).sum().backward()  # eager ops write other memory
        optimizer.step()
        optimizer.zero_grad()
    assert fetches() == before and len(step._programs) == 2, step.explain()
    assert out.tolist() == [-1, -1, -1]


def by_fill(gate: Gate) -> None:
    gate.flag.fill_(True)


def by_copy(gate: Gate) -> None:
    gate.flag.copy_(torch.ones(1, dtype=torch.bool))


def by_view(gate: Gate) -> None:
    gate.flag.view(1, 1)[0].fill_(True)


def by_data(gate: Gate) -> None:
    gate.flag.data[0] = True


def by_new_data(gate: Gate) -> None:
    gate.flag.data = torch.ones(1, dtype=torch.bool, device=REMOTE)


def by_out(gate: Gate) -> None:
    torch.logical_not(torch.zeros(1, dtype=torch.bool, device=REMOTE), out=gate.flag)


def by_list_op(gate: Gate) -> None:
    torch._foreach_copy_([gate.weight.data, gate.flag], [gate.weight.data, torch.ones(1, dtype=torch.bool, device=REMOTE)])


def by_index(gate: Gate) -> None:
    gate.flag[torch.tensor([0], device=REMOTE)] = True


def by_state_dict(gate: Gate) -> None:
    gate.load_state_dict({"weight": torch.ones(3), "flag": torch.ones(1, dtype=torch.bool)})


def by_assigned_state_dict(gate: Gate) -> None:
    state = {"weight": torch.ones(3, device=REMOTE), "flag": torch.ones(1, dtype=torch.bool, device=REMOTE)}
    gate.load_state_dict(state, assign=True)


def by_another_buffer(gate: Gate) -> None:
    gate.flag = torch.ones(1, dtype=torch.bool, device=REMOTE)


def by_fragments(gate: Gate) -> None:
    @gt.compile
    def other() -> float:
        value = gate.weight.sum().item()
        gate.flag.logical_or_(gate.weight[:1] > value - 100)
        return value

    for _ in range(5):
        other()


def by_thread(gate: Gate) -> None:
    thread = threading.Thread(target=by_fill, args=(gate,))
    thread.start()
    thread.join()


WRITES = [
    by_fill, by_copy, by_view, by_data, by_new_data, by_out, by_list_op, by_index, by_state_dict, by_assigned_state_dict,
    by_another_buffer, by_fragments, by_thread,
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
def test_each_write_of_its_memory_is_seen(write: Callable[[Gate], None]) -> None:
    gate = Gate()
    step = captured(gate)
    check(step, gate, 2)
    with torch.no_grad():
        write(gate)
    assert step(torch.ones(3)).tolist() == [-1, -1, -1]
    check(step, gate)


VIEWS = [lambda flag: flag.view(1, 1), lambda flag: flag.data[:1], lambda flag: flag.detach().unbind()[0]]


@pytest.mark.parametrize("of", VIEWS)
def test_views_from_before_the_programs_are_seen(of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    gate = Gate().to(REMOTE)
    view = of(gate.flag)
    inner = view[..., None]
    step = captured(gate)
    for value, name in ((True, view), (False, inner), (True, inner)):
        with torch.no_grad():
            name.fill_(value)
        assert step(torch.ones(3)).tolist() == ([-1, -1, -1] if value else [1, 1, 1])
        check(step, gate)


def test_a_flag_that_is_a_view_itself() -> None:
    gate, flags = Gate().to(REMOTE), torch.zeros(4, dtype=torch.bool, device=REMOTE)
    gate.flag = flags[1:2]
    step = captured(gate)
    for value in (True, False, True):
        flags.fill_(value)
        assert step(torch.ones(3)).tolist() == ([-1, -1, -1] if value else [1, 1, 1])
        check(step, gate)


@pytest.mark.parametrize("through", ["state", "argument", "view"])
def test_other_programs_that_write_it_are_seen(through: str) -> None:
    gate = Gate().to(REMOTE)
    view = gate.flag.view(1, 1)

    @gt.compile
    def other(flag: torch.Tensor) -> None:
        target = {"state": gate.flag, "argument": flag, "view": view[0]}[through]
        target.logical_not_()

    step = captured(gate)
    for _ in range(10):
        other(gate.flag)
        check(step, gate, 1)
    assert other._programs[0].replays, other.explain()


def test_a_checkpoint_that_is_loaded_is_seen(tmp_path: Path) -> None:
    gate = Gate()
    step = captured(gate)
    with torch.no_grad():
        gate.flag.fill_(True)
        gt.save(gate.state_dict(), tmp_path / "saved")
        gate.flag.fill_(False)
    check(step, gate)
    gate.load_state_dict(gt.load(tmp_path / "saved"))
    assert step(torch.ones(3)).tolist() == [-1, -1, -1]


def test_a_flag_of_an_optimizer() -> None:
    gate = Gate(torch.float32)
    step = captured(gate)
    flag = torch.nn.Parameter(gate.flag)
    optimizer = torch.optim.SGD([flag], lr=1.0)
    for value in (1.0, -1.0, 1.0):
        flag.grad = torch.full((1,), -value, device=REMOTE)
        optimizer.step()
        check(step, gate)


class Counter(torch.nn.Module):
    """As batch renormalization and averages have it: a counter among the buffers, which each call adds to."""

    def __init__(self, dtype: torch.dtype = torch.int64) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=dtype))
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        h = x * self.weight
        if self.count < 6:
            h = h * 2
        return (-h if self.count % 3 == 0 else h).sum()


def train(module: Counter, device: str, compiled: bool, meanwhile: Callable[[Counter, int], None]) -> tuple[list, Any, int]:
    module.to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    call = gt.compile(step) if compiled else step
    generator, losses, waits = torch.Generator().manual_seed(0), [], 0
    for n in range(24):
        meanwhile(module, n)
        if n == 16 and compiled:
            waits = fetches()
        losses.append(call(torch.randn(3, generator=generator).to(device)))
    waits = fetches() - waits if compiled else 0
    return [loss.item() for loss in losses], call, waits


def set_back(module: Counter, n: int) -> None:
    if n in (13, 17, 18):
        module.count.fill_(n % 2)


def alone(module: Counter, n: int) -> None:
    pass


def read(module: Counter, n: int) -> None:
    assert module.count.item() == n


@pytest.mark.parametrize("meanwhile", [alone, set_back, read])
def test_a_counter_has_a_program_for_each_branch(meanwhile: Callable[[Counter, int], None]) -> None:
    expected = train(Counter(), "cpu", False, meanwhile)[0]
    losses, step, waits = train(Counter(), REMOTE, True, meanwhile)
    assert losses == expected
    assert len(step._programs) >= 2 and sum(program.replays for program in step._programs) >= 8, step.explain()
    assert meanwhile is not alone or waits == 0


def test_a_counter_of_fractions_and_one_that_data_changes() -> None:
    """What this process cannot compute, each call waits for."""

    class Average(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = x * 2 if self.mean > 0.2 else x * 3
            self.mean.mul_(0.9).add_(x.mean() * 0.1)
            return out

    mine, plain = Average().to(REMOTE), Average()
    step = gt.compile(lambda x: mine(x))
    for n in range(24):
        x = torch.full((3,), 2.0 if n // 6 % 2 else -2.0)
        assert torch.equal(step(x).cpu(), plain(x)), n
    assert len(step._programs) == 2, step.explain()


def test_a_value_that_differs_at_each_call_runs_in_parts() -> None:
    count = torch.zeros((), dtype=torch.int64, device=REMOTE)

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * count.item()

    for n in range(12):
        assert step(torch.ones(2)).tolist() == [n + 1.0] * 2
    assert not step._programs and "in parts" in step.explain()


def test_state_that_is_replaced_runs_in_parts() -> None:
    gate = Gate().to(REMOTE)

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        out = -x if gate.flag else x
        gate.flag = ~gate.flag
        return out

    for n in range(12):
        assert step(torch.ones(2)).tolist() == [-1.0 if n % 2 else 1.0] * 2


def test_an_error_ends_what_is_known() -> None:
    count, table = torch.zeros((), dtype=torch.int64, device=REMOTE), torch.arange(4.0, device=REMOTE)

    @gt.compile
    def step(index: torch.Tensor) -> torch.Tensor:
        out = table[index]
        count.add_(1)
        return out if count < 6 else -out

    for _ in range(4):
        step(torch.tensor([1]))
    with pytest.raises((OpFailed, IndexError)):
        step(torch.tensor([9])).tolist()
    with pytest.raises((OpFailed, IndexError)):
        step(torch.tensor([1]))  # the counter of a replay that failed has no value
    count.fill_(3)
    for n in range(6):
        assert step(torch.tensor([1])).tolist() == [1.0 if n < 2 else -1.0]


def test_two_names_of_one_memory_are_read_at_each_call() -> None:
    gate = Gate().to(REMOTE)
    gate.other = gate.flag.view(1, 1)

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        gate.other.logical_not_()
        return -x if gate.flag else x

    for n in range(10):
        assert step(torch.ones(2)).tolist() == [1.0 if n % 2 else -1.0] * 2


def test_a_captured_model_that_counts_keeps_its_graph() -> None:
    """Its forward pass could not be computed again for a backward pass that no program has."""
    plain, module = Counter(), gt.compile(Counter().to(REMOTE))
    for n in range(14):
        x = torch.randn(3)
        for each, device in ((plain, "cpu"), (module, REMOTE)):
            each.zero_grad()
            loss = each(x.to(device))
            if n % 4 == 1:
                loss = loss + each(x.to(device)) * 2
            loss.backward()
        assert torch.equal(module.weight.grad.cpu(), plain.weight.grad), n


def test_a_captured_model_with_a_flag_has_two_programs() -> None:
    gate = Gate().to(REMOTE)
    module = gt.compile(gate)
    for n in range(16):
        if n == 8:
            gate.flag.fill_(True)
        module.zero_grad()
        module(torch.ones(3)).sum().backward()
        assert gate.weight.grad.tolist() == ([-1, -1, -1] if n >= 8 else [1, 1, 1])
    assert module.explain().startswith("Gate: 4 programs"), module.explain()


def test_a_write_through_a_view_that_this_process_does_not_evaluate() -> None:
    count = torch.zeros(2, dtype=torch.int64, device=REMOTE)

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        count.as_strided((1,), (1,)).add_(1)
        return x if count[0] % 2 == 0 else -x

    assert [step(torch.ones(())).item() for _ in range(10)] == [-1.0, 1.0] * 5
