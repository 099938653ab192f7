"""Compiled steps against the same steps run eagerly: the same bits, whatever the step does, and replays where it may."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gt
from tests.helpers import CONFIGS, longer
from tests.helpers.models import GPT, mini

CALLS = 12


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


class State:
    """The state of one training: a model on the remote device, an optimizer, data, results."""

    def __init__(self, make: Callable[[], nn.Module] = net, optimizer: Any = None) -> None:
        torch.manual_seed(0)
        gt.manual_seed(0)
        self.model = make().to("remote")
        optimizer = optimizer or functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
        self.optimizer = optimizer(self.model.parameters())
        self.x, self.y = torch.randn(CALLS, 16, 8), torch.randn(CALLS, 16, 4)
        self.seen: list[torch.Tensor] = []

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(x), y)

    def values(self) -> list[torch.Tensor]:
        """Everything that training leaves behind."""
        held = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [t.detach().cpu() for t in (*self.seen, *self.model.state_dict().values(), *held, *grads)]


def agree(
    make: Callable[[], State],
    step: Callable[[State], Callable],
    around: Callable[[State, Callable, int], None] | None = None,
    replays: int = CALLS - 4,
) -> gt.client.capture.compiled_function.CompiledFunction:
    """The step run eagerly and compiled gives the same bits; `around` makes the calls. At least so many are replays."""

    def train(compiled: bool) -> tuple[State, Any]:
        state = make()
        run = step(state)
        if compiled:
            run = gt.compile(run)
        for n in range(CALLS):
            if around is not None:
                around(state, run, n)
            else:
                x, y = state.x[n], state.y[n]
                state.seen.append(run(x, y) if compiled else run(x.to("remote"), y.to("remote")))
        return state, run

    state, run = train(True)
    for group in state.optimizer.param_groups:  # a step count that was Python's has been moved: so it is for the rival
        capturable = group.get("capturable", False)
    wanted = make()
    first = step(wanted)
    for group in wanted.optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = capturable
    for n in range(CALLS):
        if around is not None:
            around(wanted, lambda x, y: first(x.to("remote"), y.to("remote")), n)
        else:
            wanted.seen.append(first(wanted.x[n].to("remote"), wanted.y[n].to("remote")))
    got, want = state.values(), wanted.values()
    assert len(got) == len(want) and len(state.seen) == len(wanted.seen)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert sum(program.replays for program in run._programs) >= replays, run.explain()
    return run


def plain(state: State) -> Callable:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        state.optimizer.zero_grad()
        loss = state.loss(x, y)
        loss.backward()
        state.optimizer.step()
        return loss

    return step


OPTIMIZERS: dict[str, Callable] = {
    **{
        f"{cls.__name__} {form}": functools.partial(cls, lr=1e-2, **{form: True} if form != "single" else {"foreach": False})
        for cls in (torch.optim.AdamW, torch.optim.Adam)
        for form in ("fused", "foreach", "single", "capturable", "amsgrad")
    },
    "SGD": functools.partial(torch.optim.SGD, lr=0.1),
    "SGD momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-2),
    "NAdam": functools.partial(torch.optim.NAdam, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("plain_threads", "one")
def test_optimizers(name: str) -> None:
    agree(lambda: State(net, OPTIMIZERS[name]), plain)


@pytest.mark.usefixtures("plain_threads", "one")
def test_adagrad_counts_on_the_device_once_it_is_captured() -> None:
    """Its fused kernel, which reads the count there, has other last bits."""
    optimizer = functools.partial(torch.optim.Adagrad, lr=1e-2, lr_decay=0.1)
    eager, captured = State(net, optimizer), State(net, optimizer)
    by_op, run = plain(eager), gt.compile(plain(captured))
    losses = [(run(x, y).item(), by_op(x.to("remote"), y.to("remote")).item()) for x, y in zip(eager.x, eager.y, strict=True)]
    torch.testing.assert_close(*torch.tensor(losses).unbind(1), rtol=1e-5, atol=1e-6)
    assert run.explain().splitlines()[0].endswith(": 1 program") and "in parts" not in run.explain()
    steps = [state["step"].item() for state in captured.optimizer.state.values()]
    assert set(steps) == {CALLS}


@pytest.mark.usefixtures("one")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_adagrad_with_sparse_gradients_is_left_as_it_is() -> None:
    table = nn.Embedding(8, 4, sparse=True).to("remote")
    optimizer = torch.optim.Adagrad(table.parameters())

    @gt.compile
    def step(rows: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = table(rows).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(torch.arange(4)).item() for _ in range(6)]
    assert losses == sorted(losses, reverse=True) and optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop"])
@pytest.mark.usefixtures("plain_threads", "one")
def test_an_optimizer_whose_state_is_older_than_the_capture(kind: str) -> None:
    def losses(device: str, wrap: Callable) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(6, 1).to(device)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        calls = [step] * 2 + [wrap(step)] * 6
        return [float(call((torch.ones(4, 6) * n).to(device))) for n, call in enumerate(calls)]

    assert losses("remote", gt.compile) == pytest.approx(losses("cpu", lambda step: step), rel=1e-3)


@pytest.mark.usefixtures("plain_threads", "one")
def test_a_tensor_learning_rate_is_read_at_each_replay() -> None:
    def make() -> State:
        state = State(net, functools.partial(torch.optim.AdamW, lr=torch.tensor(1e-2, device="remote"), capturable=True))
        return state

    def around(state: State, run: Callable, n: int) -> None:
        state.optimizer.param_groups[0]["lr"].fill_(1e-2 / (n + 1))
        state.seen.append(run(state.x[n], state.y[n]))

    agree(make, plain, around)


@pytest.mark.usefixtures("plain_threads", "one")
def test_a_rate_that_changes_late_makes_one_other_program() -> None:
    def make() -> State:
        state = State()
        state.scheduler = torch.optim.lr_scheduler.StepLR(state.optimizer, 6)
        return state

    def around(state: State, run: Callable, n: int) -> None:
        state.seen.append(run(state.x[n], state.y[n]))
        state.scheduler.step()

    run = agree(make, plain, around, replays=3)
    assert "'lr'" in run.explain() and len(run._programs) == 1


@pytest.mark.usefixtures("plain_threads", "one")
def test_a_warm_up_has_one_program_and_the_bits_of_its_numbers() -> None:
    def around(state: State, run: Callable, n: int) -> None:
        state.optimizer.param_groups[0]["lr"] = min(n + 1, 5) * 1e-3
        state.seen.append(run(state.x[n], state.y[n]))

    run = agree(State, plain, around)
    assert len(run._programs) == 1 and "parts" not in run.explain()


@pytest.mark.usefixtures("plain_threads", "one")
def test_an_average_of_weights_by_rebinding() -> None:
    def make() -> State:
        state = State()
        state.ema = [torch.zeros_like(p) for p in state.model.parameters()]
        return state

    def step(state: State) -> Callable:
        inner = plain(state)

        def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = inner(x, y)
            with torch.no_grad():
                for n, p in enumerate(state.model.parameters()):
                    state.ema[n] = 0.9 * state.ema[n] + 0.1 * p
            return loss

        return run

    def around(state: State, run: Callable, n: int) -> None:
        state.seen.append(run(state.x[n], state.y[n]))
        state.seen.append(state.ema[0].clone())
        if n == 8:  # eager work on what a program carries
            state.ema[0].mul_(2)

    agree(make, step, around)


@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.usefixtures("plain_threads", "one")
def test_gradients_none_and_zeroed_inside_and_outside(none: bool, inside: bool) -> None:
    def step(state: State) -> Callable:
        def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if inside:
                state.optimizer.zero_grad(set_to_none=none)
            loss = state.loss(x, y)
            loss.backward()
            state.optimizer.step()
            return loss

        return run

    def around(state: State, run: Callable, n: int) -> None:
        if not inside:
            state.optimizer.zero_grad(set_to_none=none)
        state.seen.append(run(state.x[n], state.y[n]))
        state.seen.append(state.model[0].weight.grad.clone())

    agree(State, step, around)


@pytest.mark.usefixtures("plain_threads", "one")
def test_gradients_that_accumulate_over_calls() -> None:
    def step(state: State) -> Callable:
        def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = state.loss(x, y)
            loss.backward()
            return loss

        return run

    def around(state: State, run: Callable, n: int) -> None:
        state.seen.append(run(state.x[n], state.y[n]))
        if n % 4 == 3:
            state.optimizer.step()
            state.optimizer.zero_grad()

    run = agree(State, step, around, replays=6)
    assert len(run._programs) == 2


@pytest.mark.usefixtures("plain_threads", "one")
def test_clipping_dropout_and_buffers() -> None:
    def make() -> State:
        return State(lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4)))

    def step(state: State) -> Callable:
        def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            state.optimizer.zero_grad()
            loss = state.loss(x, y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(state.model.parameters(), 0.1)
            state.optimizer.step()
            return loss + 0 * norm

        return run

    def around(state: State, run: Callable, n: int) -> None:
        state.seen.append(run(state.x[n], state.y[n]))
        state.seen.append(torch.rand(3, device="remote"))  # eager draws between replays

    agree(make, step, around)


@pytest.mark.usefixtures("plain_threads", "one")
def test_results_stay_what_they_were() -> None:
    """Nested, of every kind; those of one call are not overwritten by the next."""
    state = State()

    @gt.compile
    def step(batch: dict[str, torch.Tensor], scale: float) -> dict[str, Any]:
        out = state.model(batch["x"]) * scale
        return {"out": out, "many": [out.sum(), (out.mean(), 3)], "weight": state.model[0].weight, "scale": scale}

    with torch.no_grad():
        kept = [step({"x": state.x[n]}, 2.0) for n in range(CALLS)]
    assert step._programs[0].replays == CALLS - 2
    for n, found in enumerate(kept):
        want = state.model(state.x[n].to("remote")) * 2.0
        assert torch.equal(found["out"].cpu(), want.detach().cpu())
        assert torch.equal(found["many"][0].cpu(), want.sum().detach().cpu())
        assert found["weight"] is state.model[0].weight and found["many"][1][1] == 3 and found["scale"] == 2.0
        assert not found["out"].requires_grad
    again = step({"x": state.x[0]}, 3.0)
    assert torch.equal(again["out"].cpu(), (state.model(state.x[0].to("remote")) * 3.0).detach().cpu())


@pytest.mark.usefixtures("plain_threads", "one")
def test_remote_arguments_that_vary_and_that_stay() -> None:
    table = torch.zeros(4, device="remote")

    @gt.compile
    def step(x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        into.add_(x)
        return into * 2

    total = torch.zeros(4)
    for n in range(CALLS):
        x = torch.full((4,), float(n))
        total += x
        assert torch.equal(step(x.to("remote"), table).cpu(), total * 2)
    assert step._programs[0].replays == CALLS - 2 and torch.equal(table.cpu(), total)


@pytest.mark.usefixtures("plain_threads", "one")
def test_constants_from_the_host_and_several_programs_mixed_with_eager_work() -> None:
    weight = torch.ones(3, device="remote")

    def a(x: torch.Tensor) -> torch.Tensor:
        shift = torch.tensor([1.0, 2.0, 3.0], device="remote")
        shift.add_(weight)  # a copy of the constant each time
        return x + shift

    def b(x: torch.Tensor) -> torch.Tensor:
        weight.mul_(0.5)
        return x * weight

    one, two = gt.compile(a), gt.compile(b)
    host = torch.ones(3)
    for n in range(CALLS):
        x = torch.randn(3)
        assert torch.equal(one(x).cpu(), x + (torch.tensor([1.0, 2.0, 3.0]) + host))
        host = host * 0.5
        assert torch.equal(two(x).cpu(), x * host)
        if n == 6:
            weight.add_(1)
            host = host + 1
    assert one._programs[0].replays and two._programs[0].replays


@pytest.mark.usefixtures("plain_threads", "one")
def test_shapes_are_programs_and_only_so_many_are_kept() -> None:
    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sum()

    for size in range(1, 14):
        for _ in range(3):
            x = torch.randn(size)
            assert torch.equal(step(x).cpu(), (x * 2).sum())
    assert len(step._programs) == 8
    assert step(torch.ones(13)).item() == 26 and step._programs[0].replays == 2
    gt.stats()
    gone = gt.stats()["dispatcher"]
    assert gone["programs"] == 8


@pytest.mark.usefixtures("plain_threads", "one")
def test_a_value_that_is_read_inside_cuts_the_function_there() -> None:
    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 0 else -x

    for sign in (1, -1, 1, -1):
        assert step(sign * torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    assert "the value of a remote tensor of shape [] is read" in step.explain() and not step._programs
    assert (torch.ones(3, device="remote") + 1).sum().item() == 6  # and nothing is left of the recording


@pytest.mark.usefixtures("plain_threads", "one")
def test_an_exception_in_the_function_is_the_users_and_the_next_call_is_right() -> None:
    fail = [True]

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if fail[0]:
            raise KeyError("mine")
        return y

    with pytest.raises(KeyError, match="mine"):
        step(torch.ones(2))
    fail[0] = False
    for n in range(6):
        assert step(torch.full((2,), float(n))).tolist() == [2.0 * n] * 2
    assert step._programs[0].replays == 4


@pytest.mark.parametrize("config", longer(["tp2", "pp2", "dp2", "tp2pp2", "dp2tp2pp2"], ["tp2", "dp2tp2pp2"]))
@pytest.mark.slow
@pytest.mark.usefixtures("plain_threads", "session")
def test_workers(config: str, session: Callable[..., None]) -> None:
    """A transformer over several workers, micro-batched: the same bits as eagerly."""
    path = CONFIGS / f"{config}.yaml"
    session(path)

    def make() -> State:
        state = State(lambda: mini(gt.signal.groups()))
        state.x = state.y = torch.randint(64, (CALLS, 8, 17))
        return state

    def step(state: State) -> Callable:
        def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            state.optimizer.zero_grad()
            total = torch.zeros((), device="remote")
            for part in gt.microbatches(x, 2):
                loss = state.model(part[:, :-1], part[:, 1:]) / 2
                loss.backward()
                total = total + loss.detach()
            state.optimizer.step()
            return total

        return run

    agree(make, step)


@pytest.mark.usefixtures("plain_threads", "session")
def test_gradients_of_data_parallel_workers_are_summed_together(session: Callable[..., None]) -> None:
    """Among them one of a weight that is used twice, and ones that are views of what is summed; as torch on the whole batch."""
    session(CONFIGS / "dp2.yaml")

    def made(device: str) -> Callable:
        torch.manual_seed(0)
        embedding, linear = nn.Embedding(50, 16), nn.Linear(16, 16)
        model = nn.ModuleList([embedding, linear]).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with gt.signal.context("pp_stage0"):
                out = F.gelu(linear(embedding(x))) @ embedding.weight.t()
                loss = F.cross_entropy(out.view(-1, 50), y.view(-1))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return step

    plain, compiled = made("cpu"), gt.compile(made("remote"))
    for _ in range(7):
        x, y = torch.randint(50, (2, 4, 8))
        torch.testing.assert_close(compiled(x, y).cpu(), plain(x, y), rtol=1e-5, atol=1e-6)
    assert compiled._programs[0].replays > 2, compiled.explain()


MEANS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a mean": lambda y: y.mean().detach(),
    "a sum": lambda y: y.sum(),
    "a mean for each column": lambda y: y.mean(0).detach(),
    "a sum for each column": lambda y: y.sum(0),
    "the largest of each column": lambda y: y.amax(0),
    "rows": lambda y: y * 2,
}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.usefixtures("plain_threads")
def test_what_workers_hold_terms_of_is_whole_after_each_replay(name: str, session: Callable[..., None]) -> None:
    """Reading it adds the terms up where they are; the next replay leaves terms there again."""
    session("rows: {shard: {axis: 0, workers: [0, 1]}}\n")
    weight = torch.arange(16.0).reshape(4, 4)
    remote = torch.nn.Parameter(weight.to("remote"))

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        with gt.signal.context("rows"):
            return MEANS[name](x @ remote)

    for n in range(6):
        x = torch.randint(9, (8, 4), generator=torch.Generator().manual_seed(n)).float()
        with torch.no_grad():
            assert torch.equal(step(x).cpu(), MEANS[name](x @ weight))
    assert step._programs[0].replays == 4


@pytest.mark.usefixtures("plain_threads", "one")
def test_a_transformer_on_one_worker_is_torchs_to_the_bit() -> None:
    torch.manual_seed(0)
    data = torch.randint(64, (CALLS, 8, 17))

    def train(device: str) -> tuple[list, list]:
        torch.manual_seed(0)
        model = GPT().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x[:, :-1], x[:, 1:])
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = gt.compile(step) if device == "remote" else step
        return [run(x) for x in data], list(model.parameters())

    (losses, weights), (want, other) = train("remote"), train("cpu")
    for a, b in zip(losses + weights, want + other, strict=True):
        assert torch.equal(a.detach().cpu(), b.detach())


def test_micro_batches() -> None:
    batch = {"x": torch.arange(6), "rest": (torch.arange(12).reshape(6, 2), "name")}
    parts = list(gt.microbatches(batch, 3))
    assert [p["x"].tolist() for p in parts] == [[0, 1], [2, 3], [4, 5]]
    assert parts[1]["rest"][0].tolist() == [[4, 5], [6, 7]] and parts[2]["rest"][1] == "name"
    with pytest.raises(ValueError, match="6 rows cannot be cut into 4"):
        gt.microbatches(batch, 4)


def test_a_worker_lost_in_a_replay_is_an_error_that_says_what_is_half_done(tmp_path: Path) -> None:
    from gt import api

    config = tmp_path / "stages.yaml"
    config.write_text("a: {shard: {axis: 0, workers: [0]}}\nb: {shard: {axis: 0, workers: [1]}}\n")
    gt.cpu_workers(2, config=str(config))
    try:
        weights = [torch.nn.Parameter(torch.ones(4, 4, device="remote")) for _ in range(2)]

        @gt.compile
        def step(x: torch.Tensor) -> torch.Tensor:
            for name, weight in zip("ab", weights, strict=True):
                with gt.signal.context(name):
                    x = x @ weight
            with torch.no_grad():
                for weight in weights:
                    weight.mul_(0.5)
            return x

        for _ in range(4):
            step(torch.ones(2, 4)).sum().item()
        nursery = api._Started.local._process.pid
        pids = map(int, Path(f"/proc/{nursery}/task/{nursery}/children").read_text().split())
        (worker,) = (pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() == "gt.worker 1")
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(gt.WorkerLost, match=r"worker w\d is lost"):
            for _ in range(100):
                step(torch.ones(2, 4)).sum().item()
        with pytest.raises(gt.WorkerLost, match=r"worker w\d is lost"):
            step(torch.ones(2, 4)).sum().item()
    finally:
        gt.shutdown()


@pytest.mark.usefixtures("plain_threads", "one")
def test_an_op_that_fails_in_a_replay_is_named_and_what_it_wrote_is_not_trusted() -> None:
    index = torch.zeros(2, dtype=torch.int64, device="remote")
    table, total = torch.arange(4.0, device="remote"), torch.zeros(2, device="remote")

    @gt.compile
    def step(shift: torch.Tensor) -> torch.Tensor:
        total.add_(table[index + shift])
        return total * 1

    for n in range(4):
        assert step(torch.tensor(0)).tolist() == [0.0, 0.0], n
    bad = step(torch.tensor(9))  # out of bounds, in the second replay
    with pytest.raises(gt.OpFailed, match=r"test_compile\.py:\d+: aten\.index\.Tensor .*\n  this was replay \d+ of a program"):
        bad.tolist()
    with pytest.raises(gt.OpFailed, match=r"aten\.index\.Tensor"):
        total.tolist()
    total.zero_()  # a fresh value heals
    assert step(torch.tensor(1)).tolist() == [1.0, 1.0] and step(torch.tensor(2)).tolist() == [3.0, 3.0]


@pytest.mark.usefixtures("one")
def test_a_program_that_ends_while_another_call_is_recorded() -> None:
    """One in a cycle does so when that is collected, which recording does."""
    w = torch.ones(4, device="remote")
    for turn in range(12):  # programs have numbers, which are also those of other things

        @gt.compile
        def first(x: torch.Tensor, turn: int = turn) -> torch.Tensor:
            return x * w + turn

        first.me = first
        for _ in range(3):
            first(torch.ones(4))
        assert len(first._programs) == 1, first.explain()
        del first
        second = gt.compile(lambda x: (x * w * 3).sum())
        assert [second(torch.ones(4)).item() for _ in range(4)] == [12.0] * 4
        assert len(second._programs) == 1, second.explain()


@pytest.mark.usefixtures("one")
def test_an_interrupt_before_the_call_begins_leaves_no_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    from gt.client.capture import compiled_function as program

    class Interrupted(program.HostRngState):
        def __init__(self) -> None:
            raise KeyboardInterrupt

    x = torch.ones(4, device="remote")
    step = gt.compile(lambda x: x * 2)
    with monkeypatch.context() as patch:
        patch.setattr(program, "HostRngState", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(x)
    assert [step(x).sum().item() for _ in range(3)] == [8.0] * 3
