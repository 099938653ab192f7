"""Reads of values that constants and uploads alone decide: answered without a wait, with the values of plain torch."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gt.client import current_session
from gt.client.trace import recorder as recorder_module
from gt.client.values import known_values
from gt.ir.instr import LAUNCH
from tests.helpers.inline_session import inline  # noqa: F401

pytestmark = pytest.mark.usefixtures("inline")
R = "remote"


class Waits:
    """Counts waits for values, which `fetch` of the session are."""

    def __init__(self) -> None:
        self.recorder: Any = current_session.current()
        self.before = self.recorder.fetches

    @property
    def count(self) -> int:
        return self.recorder.fetches - self.before


@pytest.fixture
def waits() -> Iterator[Waits]:
    yield Waits()


def mask_of_ones() -> torch.Tensor:
    return torch.ones(2, 8, dtype=torch.int64).to(R)


def padded() -> torch.Tensor:
    return torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [1] * 8]).to(R)


# name -> (program on a device, its value)
DECIDED: dict[str, Callable[[str], Any]] = {
    "mask of ones": lambda d: bool(torch.ones(2, 8, dtype=torch.int64).to(d).all()),
    "padded mask": lambda d: bool((torch.tensor([[1, 1, 0], [1, 1, 1]]).to(d) == 1).all()),
    "mask in a 4-D form": lambda d: torch.tensor([[1, 0], [1, 1]]).to(d).bool()[:, None, None, :].expand(2, 1, 2, 2).tolist(),
    "packed sequences": lambda d: bool((torch.arange(9, device=d)[None].diff(dim=-1) != 1).any()),
    "positions of a mask": lambda d: positions(torch.tensor([[0, 1, 1]]).to(d)),
    "largest position": lambda d: int(torch.arange(3, 12, device=d).max()),
    "a factory": lambda d: torch.zeros(3, dtype=torch.int32, device=d).tolist(),
    "filled memory": lambda d: torch.empty(3, dtype=torch.int64, device=d).fill_(5).tolist(),
    "causal": lambda d: torch.ones(4, 4, dtype=torch.bool, device=d).tril().sum(1).tolist(),
    "an item of a list": lambda d: [int(n) for n in torch.tensor([3, 1, 2], device=d)],
    "equal": lambda d: torch.equal(torch.arange(4, device=d), torch.tensor([0, 1, 2, 3]).to(d)),
    "shared memory written": lambda d: written_views(d),
    "index_put_": lambda d: assigned(d),
    "division": lambda d: (torch.arange(9, device=d) // 2 + torch.arange(9, device=d) % 3).tolist(),
    "text": lambda d: str(torch.arange(3, device=d).cpu()),
    "a counter of floats": lambda d: counted(d),
    "a noise schedule": lambda d: [float(n) for n in torch.linspace(1, 0, 5).to(d) if n != 0],
    "sums and products": lambda d: scaled(torch.tensor([0.1, 0.7, -3.0]).to(d)),
    "float64": lambda d: scaled(torch.tensor([0.1, 0.7, -3.0], dtype=torch.float64).to(d)),
    "floats of integers": lambda d: (torch.arange(5, device=d) * 0.3 > 0.5).tolist(),
    "ASGD": lambda d: averaged(d),
}  # fmt: skip


def positions(mask: torch.Tensor) -> list:
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1).tolist()


def written_views(device: str) -> list:
    x = torch.zeros(3, 4, dtype=torch.int64, device=device)
    row, before = x[1], x + 1
    row.add_(5)
    x[:, 0] = 7
    x.data.t()[2] -= 1
    return [x.tolist(), row.tolist(), before.tolist()]


def counted(device: str) -> list:
    count, rate = torch.zeros((), device=device), torch.ones((), device=device)
    for n in range(3):
        count += 1
        rate.copy_(torch.as_tensor(1 / (n + 3)))
    return [count.item(), rate.item(), bool(count == 3), float(count * 0.1 - rate)]


def scaled(x: torch.Tensor) -> list:
    y = torch.where(x > 0.5, 1 - x * 0.3, -x)
    y[0] = 0.1
    y[1:].mul_(x[1:])
    return y.tolist()


def averaged(device: str) -> float:
    """Its rates and counters are tensors of the device, which torch reads in each step."""
    w = torch.ones(3, device=device, requires_grad=True)
    optimizer = torch.optim.ASGD([w], lr=0.1, t0=2, foreach=False)
    for _ in range(4):
        w.grad = torch.full((3,), 0.5, device=device)
        optimizer.step()
    return optimizer.state[w]["eta"].item()


def assigned(device: str) -> list:
    x = torch.arange(6, device=device)
    x[torch.tensor([1, 1, 4], device=device)] = 9
    x[x > 8] = 0
    return x.tolist()


@pytest.mark.parametrize("name", DECIDED)
def test_what_constants_and_uploads_decide_is_read_without_a_wait(name: str, waits: Waits) -> None:
    assert DECIDED[name](R) == DECIDED[name]("cpu")
    assert waits.count == 0


@pytest.mark.parametrize("name", DECIDED)
def test_it_is_read_after_the_ops_were_handed_over(name: str, waits: Waits) -> None:
    """As in a long step, whose batches have left the buffer before the read."""
    waits.recorder.batch = 0
    assert DECIDED[name](R) == DECIDED[name]("cpu")
    waits.recorder.batch = 0
    assert waits.count == 0


def floats(x: torch.Tensor) -> Any:
    return x.float().sum().item()


def drawn(x: torch.Tensor) -> Any:
    torch.manual_seed(0)
    return torch.randint(0, 9, (3,), device=R).tolist()


def a_tie(x: torch.Tensor) -> Any:
    return x.argmax().item()


def a_shape(x: torch.Tensor) -> Any:
    return x[x > 0].tolist()


def reinterpreted(x: torch.Tensor) -> Any:
    x.view(torch.int32).zero_()
    return x.tolist()


def of_floats(x: torch.Tensor) -> Any:
    x.copy_(torch.rand(8, device=R))
    return x.tolist()


def a_sum_of_floats(x: torch.Tensor) -> Any:
    return torch.tensor([0.1, 0.2, 0.3]).to(R).sum().item()


def a_quotient(x: torch.Tensor) -> Any:
    return (torch.ones((), device=R) / 3).item()


def a_scaled_sum(x: torch.Tensor) -> Any:
    return torch.ones((), device=R).add(torch.ones((), device=R), alpha=0.1).item()


def floats_as_integers(x: torch.Tensor) -> Any:
    return torch.tensor([1.5, 3e20]).to(R).long()[0].item()


def half_precision(x: torch.Tensor) -> Any:
    return (torch.ones((), device=R, dtype=torch.bfloat16) * 0.1).item()


def many_floats(x: torch.Tensor) -> Any:
    return torch.zeros(5000, device=R)[0].item()


def uninitialised(x: torch.Tensor) -> Any:
    return torch.empty(3, dtype=torch.int64, device=R).tolist()


def partly_uninitialised(x: torch.Tensor) -> Any:
    y = torch.empty(3, dtype=torch.int64, device=R)
    y[0] = 1
    return y.tolist()


def several_at_one_place(x: torch.Tensor) -> Any:
    x[torch.tensor([0, 0], device=R)] = torch.tensor([1, 2], device=R)
    return x.tolist()


def by_minus_one(x: torch.Tensor) -> Any:
    return (x // -1).tolist()


def large(x: torch.Tensor) -> Any:
    return torch.zeros(1 << 18, dtype=torch.int64, device=R).sum().item()


FETCHED = [
    floats, drawn, a_tie, a_shape, reinterpreted, of_floats, uninitialised, partly_uninitialised, several_at_one_place,
    by_minus_one, large, a_sum_of_floats, a_quotient, a_scaled_sum, floats_as_integers, half_precision, many_floats,
]  # fmt: skip


@pytest.mark.parametrize("program", FETCHED, ids=lambda f: f.__name__)
def test_what_only_workers_decide_is_fetched(program: Callable[[torch.Tensor], Any], waits: Waits) -> None:
    x = torch.arange(8, device=R)
    program(x)
    assert waits.count >= 1


def test_a_write_by_floats_ends_a_value_that_was_read(waits: Waits) -> None:
    x = torch.arange(3, device=R)
    row = x[1:]
    assert x.tolist() == [0, 1, 2]
    x.copy_(torch.tensor([5.0, 6.0, 7.0]).to(R))
    assert row.tolist() == [6, 7]
    assert waits.count == 1


def test_an_op_that_fails_is_left_to_the_worker(waits: Waits) -> None:
    x = torch.arange(3, device=R)
    y = x.index_select(0, torch.tensor([7]).to(R))
    assert x.tolist() == [0, 1, 2], "which does not depend on it"
    with pytest.raises(Exception, match="out of range"):
        y.tolist()


def test_a_value_that_was_returned_is_the_callers(waits: Waits) -> None:
    x = torch.arange(3, device=R)
    x.cpu().add_(9)
    mask = torch.ones(3, dtype=torch.int64)
    y = mask.to(R)
    mask.zero_()
    y.add_(1)
    assert (x.tolist(), y.tolist(), waits.count) == ([0, 1, 2], [2, 2, 2], 0)


def test_after_ctrl_c_workers_are_asked(waits: Waits) -> None:
    """It drops ops that were handed over, and a write may be among them."""
    x = torch.arange(3, device=R)
    waits.recorder.session.interrupts = 1
    x.add_(1)
    assert x.tolist() == [1, 2, 3]
    assert waits.count == 1
    assert torch.arange(2, device=R).tolist() == [0, 1]
    assert waits.count == 1


def test_a_fixed_mask_is_known_in_every_step(waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_values, "MAX_LOG", 200)
    mask, x = mask_of_ones(), torch.ones(4, 4, device=R)
    for _ in range(30):
        assert bool(mask.all())
        for _ in range(40):
            x = x + 1
    assert waits.count == 0


def test_a_program_that_reads_no_integers_keeps_a_bounded_log(waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_values, "MAX_LOG", 200)
    values = waits.recorder.values
    waits.recorder.batch = 20
    for _ in range(300):
        mask_of_ones().add_(1)
    assert not values._cells and not values._rows
    assert sum(len(e.code) if hasattr(e, "code") else 1 for e in values._log) <= 200
    assert padded().sum().item() == 13
    assert waits.count == 0


def test_what_is_followed_is_bounded(waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters that grow in place, and results that nobody reads."""
    monkeypatch.setattr(known_values, "MAX_ROWS", 40)
    mask, count = mask_of_ones(), torch.zeros((), dtype=torch.int64, device=R)
    values = waits.recorder.values
    for n in range(200):
        unread = mask.sum(-1) + n
        assert bool((mask == 1).all())
        assert len(values._rows) <= 100 and len(values._cells) <= 200
    del unread
    for n in range(200):
        count += 1
        if n % 10 == 9:
            bool(torch.rand(2, device=R).gt(2).any())
            assert len(values._rows) <= 100
    assert count.item() == 200


def test_a_chain_that_is_too_long_to_evaluate_is_not_followed_to_its_end(waits: Waits) -> None:
    """Its first reads would take longer than the chain itself."""
    values = waits.recorder.values
    for length, wait in ((known_values.MAX_READ_ROWS - 8, 0), (4 * known_values.MAX_READ_ROWS, 1)):
        x = torch.ones(4, dtype=torch.int64, device=R)
        for _ in range(length):
            x = x + 1
        before = waits.count
        assert x.sum().item() == 4 * (length + 1)
        assert waits.count - before == wait
    assert len(values._rows) <= known_values.MAX_READ_ROWS


def test_counters_of_floats_that_nobody_reads_leave_masks_known(waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_values, "MAX_ROWS", 40)
    monkeypatch.setattr(known_values, "MAX_LOG", 400)
    mask, counts = mask_of_ones(), [torch.zeros((), device=R) for _ in range(4)]
    values = waits.recorder.values
    for _ in range(60):
        for count in counts:
            count += 1
        assert bool(mask.all())
        assert len(values._rows) <= 100
    assert waits.count == 0
    assert counts[0].item() == 60


def test_reads_of_results_are_soon_not_looked_up(waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss is no constant: what came before it is followed for the first reads on its line, and not for each."""
    values, looked_up = waits.recorder.values, []
    of = type(values).of
    monkeypatch.setattr(type(values), "of", lambda *args: looked_up.append(1) or of(*args))
    x = torch.rand(3, device=R)
    for _ in range(20):
        x = x * 2
        x.sum().item()
    assert waits.count == 20
    assert len(looked_up) < 6


def test_copies_of_dropped_tensors_go() -> None:
    values: Any = current_session.current().values  # type: ignore[attr-defined]
    x = torch.arange(1000, device=R)
    x.tolist()
    kept = weakref.ref(values._cells[x._ref.id].value)  # type: ignore[attr-defined]
    gc.disable()
    try:
        del x
        current_session.current().flush()
        torch.arange(2, device=R).tolist()
        assert kept() is None
    finally:
        gc.enable()


# ---- random programs


class Program:
    """A random program on one device: views, writes and new tensors of a pool of numbers. The same for the same seed."""

    def __init__(self, seed: int, device: str, dtype: torch.dtype = torch.int64) -> None:
        self.draw, self.device = random.Random(seed), device
        numbers = [torch.arange(12).view(3, 4), torch.tensor([[3, 1, 4, 1]] * 3)]
        self.pool = [(n * 0.37 if dtype.is_floating_point else n).to(dtype).to(device) for n in numbers]
        self.read: list = []

    def step(self) -> None:
        draw = self.draw
        x, y = draw.choice(self.pool), draw.choice(self.pool)
        n, k = draw.randrange(-3, 9), draw.randrange(3)
        kind = draw.choice(STEPS)
        with (torch.no_grad if draw.random() < 0.5 else torch.inference_mode)() if k == 0 else torch.enable_grad():
            made = kind(self, x, y, n)
        if isinstance(made, torch.Tensor) and k:
            self.pool.append(made)
        if len(self.pool) > 9:
            self.pool.pop(draw.randrange(len(self.pool)))
        if draw.random() < 0.4:
            z = draw.choice(self.pool)
            self.read.append([z.tolist(), bool((z > 2).any()), int(z.sum())])

    def rebound(self, x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
        z = x.clone()
        z.data = y
        z[0].add_(n)
        return z


def _by_rand(p: Program, x: torch.Tensor, y: torch.Tensor, n: int) -> None:
    x.copy_(torch.full(x.shape, float(n)).to(p.device))


def _out(p: Program, x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
    out = torch.zeros(3, 4, dtype=x.dtype, device=p.device)
    torch.add(x.expand(3, 4), y.expand(3, 4), out=out)
    return out


STEPS: list[Callable[[Program, torch.Tensor, torch.Tensor, int], Any]] = [
    lambda p, x, y, n: x + n,
    lambda p, x, y, n: x * y.sum(),
    lambda p, x, y, n: x[:, :2].repeat(1, 2)[:3],
    lambda p, x, y, n: x.flip(0),
    lambda p, x, y, n: x.detach(),
    lambda p, x, y, n: x.data,
    lambda p, x, y, n: x.view(3, 4),
    lambda p, x, y, n: torch.where(x > y, x, y),
    lambda p, x, y, n: (x != y).to(x.dtype),
    lambda p, x, y, n: x.cumsum(1).clamp(0, 50),
    lambda p, x, y, n: x.index_select(0, torch.tensor([2, 0, 1]).to(p.device)),
    lambda p, x, y, n: torch.cat([x[:1], y[1:]]),
    lambda p, x, y, n: torch.arange(n, n + 12, device=p.device, dtype=x.dtype).view(3, 4),
    lambda p, x, y, n: torch.empty_like(x).copy_(y),
    _out,
    lambda p, x, y, n: x.add_(n) and None,
    lambda p, x, y, n: x[1].fill_(n) and None,
    lambda p, x, y, n: x.t()[0].mul_(2) and None,
    lambda p, x, y, n: x[:, 1:3].masked_fill_(y[:, 1:3].clone() > 3, n) and None,
    lambda p, x, y, n: x.index_put_((torch.tensor([0, 2]).to(p.device),), torch.tensor(n, dtype=x.dtype).to(p.device)) and None,
    lambda p, x, y, n: x.__setitem__((slice(None), 0), n),
    lambda p, x, y, n: x.copy_(y.clone()) and None,
    lambda p, x, y, n: torch._foreach_add_([x], n),
    _by_rand,
    Program.rebound,
]


def run(seed: int, dtype: torch.dtype = torch.int64) -> list:
    """The reads of a program, and the errors of torch that it met."""
    program = Program(seed, R, dtype)
    for step in range(50):
        try:
            program.step()
        except RuntimeError as error:
            program.read.append(str(error))
        if step % 7 == 3:
            current_session.current().flush()
    return program.read


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("first", range(0, 30, 5))
def test_random_programs_read_what_a_worker_would_say(first: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of these tests executes each op with plain torch."""
    recorder: Any = current_session.current()
    programs = range(first, first + 5)
    here = [run(seed, dtype) for seed in programs]
    assert recorder.values.answered > 10 < recorder.fetches, "both kinds of reads"
    monkeypatch.setattr(recorder, "known_value", lambda tensor, origin: None)
    for seed, reads in zip(programs, here, strict=True):
        assert reads == run(seed, dtype), seed


@pytest.mark.parametrize("handed_over", [True, False], ids=["in a batch", "in the buffer"])
def test_ops_before_a_launch_are_not_followed(monkeypatch: pytest.MonkeyPatch, waits: Waits, handed_over: bool) -> None:
    """A program may write to any tensor of before it: a loop that launches one a round follows one round."""
    waits.recorder.batch = 1400
    before = torch.arange(3, device=R)
    for _ in range(10):
        before = before + 1
    first = waits.recorder.code[:]
    after = torch.arange(4, device=R) + 1
    second = waits.recorder.code[len(first) :]
    followed: list[int] = []
    follow = known_values.KnownValues._follow_op
    monkeypatch.setattr(known_values.KnownValues, "_follow_op", lambda *args: (followed.append(args[4]), follow(*args))[1])
    values = known_values.KnownValues(waits.recorder.templates)
    values.handed_over(first, ())
    values.launched = True
    code = [LAUNCH, 1, 0, 0, *second]
    if handed_over:
        values.handed_over(code, ())
        code = []
    known = values.of(after._ref.id, code, 0)
    assert known is not None and known.tolist() == [1, 2, 3, 4]
    assert len(followed) == 2  # arange, add
    assert values.of(before._ref.id, code, 0) is None


@pytest.mark.parametrize("handed_over", [True, False], ids=["in a batch", "in the buffer"])
def test_a_value_that_was_known_before_a_launch_is_known_no_more(waits: Waits, handed_over: bool) -> None:
    waits.recorder.batch = 1400
    before = torch.arange(3, device=R) + 1
    first = waits.recorder.code[:]
    values = known_values.KnownValues(waits.recorder.templates)
    values.handed_over(first, ())
    known = values.of(before._ref.id, [], 0)
    assert known is not None and known.tolist() == [1, 2, 3]
    values.launched, code = True, [LAUNCH, 1, 0, 0]
    if handed_over:
        values.handed_over(code, ())
        code = []
    assert values.of(before._ref.id, code, 0) is None


def test_a_line_where_workers_alone_decide_is_looked_up_seldom(monkeypatch: pytest.MonkeyPatch, waits: Waits) -> None:
    """As the end of a loop over tokens; and again at each read once a value was known there."""
    looked: list[int] = []
    look = known_values.KnownValues.of
    monkeypatch.setattr(known_values.KnownValues, "of", lambda *args: (looked.append(args[1]), look(*args))[1])

    def read(x: torch.Tensor) -> bool:
        return bool((x > 2).all())

    for _ in range(recorder_module.MAX_WHOLE_MISSES + 24):
        assert not read(torch.rand(2, device=R))
    assert len(looked) == recorder_module.MAX_WHOLE_MISSES + 24 / recorder_module.READS_PER_LOOK
    for _ in range(recorder_module.READS_PER_LOOK):
        assert read(torch.arange(3, 5, device=R))
    before = waits.count
    assert read(torch.arange(3, 5, device=R)) and not read(torch.arange(5, device=R))
    assert waits.count == before
