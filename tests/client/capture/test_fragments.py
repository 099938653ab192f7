"""Functions whose Python runs at each call: runs of their ops are programs, and every bit, print and branch is as eager."""

import contextlib
import copy
import io
import logging
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gt
from gt.client.session import Session
from gt.errors import OpFailed
from tests.helpers import CONFIGS, longer
from tests.helpers.models import mini
from tests.helpers.serving import settled

functional = nn.functional
CALLS = 24
Run = Callable[[Callable], list]  # makes its state, wraps its step, calls it, and returns all that it has seen

pytestmark = [pytest.mark.usefixtures("plain_threads", "session")]


def batches(count: int = CALLS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(count)]


def net() -> nn.Module:
    torch.manual_seed(0)
    gt.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to("remote")


def remote(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return pair[0].to("remote"), pair[1].to("remote")


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, in lists and tuples too."""
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return torch.equal(a.detach().cpu(), b.detach().cpu())
    return bool(a == b)


def shares(explained: str) -> tuple[int, int]:
    """Percents of the last call's ops and of all ops that programs executed."""
    line = re.search(r"programs carry (\d+)% of .* last call, (\d+)% of", explained)
    assert line, explained
    return int(line[1]), int(line[2])


def lbfgs(wrap: Callable) -> list:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe", history_size=3)
    x, y = remote(batches(1)[0])

    def step() -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    step = wrap(step)
    return [[step().item() for _ in range(18)], *model.parameters()]


def maml(wrap: Callable) -> list:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss_of(x: torch.Tensor, y: torch.Tensor, weights: list) -> torch.Tensor:
        hidden = torch.tanh(functional.linear(x, weights[0], weights[1]))
        return functional.mse_loss(functional.linear(hidden, weights[2], weights[3]), y)

    def step(tasks: list) -> float:
        optimizer.zero_grad()
        seen = 0.0
        for x, y in tasks:
            fast = list(model.parameters())
            for _ in range(2):
                grads = torch.autograd.grad(loss_of(x, y, fast), fast, create_graph=True)
                fast = [p - 0.1 * g for p, g in zip(fast, grads, strict=True)]
            loss = loss_of(x, y, fast)
            loss.backward()
            seen += loss.item()
        optimizer.step()
        return seen

    step, data = wrap(step), batches(2 * CALLS)
    return [[step([remote(pair) for pair in data[2 * n : 2 * n + 2]]) for n in range(CALLS)], *model.parameters()]


def distributions(wrap: Callable) -> list:
    policy, value = net()[:1], net()
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        actor = torch.distributions.Categorical(logits=policy(x), validate_args=True)
        critic = torch.distributions.Normal(value(x), 1.0, validate_args=True)
        loss = -(actor.log_prob(actor.sample()) * y.squeeze(1)).mean() - critic.log_prob(y).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    step = wrap(step)
    return [[step(*remote(pair)).item() for pair in batches()], *policy.parameters(), *value.parameters()]


def training(act: Callable, optimizer: Callable = torch.optim.SGD) -> Run:
    """A step of a regression. act(optimizer, loss, number of the call): between the backward pass and the end of the step."""

    def run(wrap: Callable) -> list:
        model = net()
        descent = optimizer(model.parameters(), lr=0.05)

        def step(x: torch.Tensor, y: torch.Tensor, n: int) -> Any:
            descent.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return act(descent, loss, n)

        step, seen = wrap(step), []
        for n, pair in enumerate(batches()):
            try:
                seen.append(step(*remote(pair), n))
            except StopIteration as stop:
                seen.append(str(stop))
        return [[one.item() if isinstance(one, torch.Tensor) else one for one in seen], *model.parameters()]

    return run


def plateau(wrap: Callable) -> list:
    schedulers: dict[int, Any] = {}

    def act(descent: Any, loss: torch.Tensor, n: int) -> float:
        make = torch.optim.lr_scheduler.ReduceLROnPlateau
        descent.step()
        schedulers.setdefault(id(descent), make(descent, patience=2, factor=0.5)).step(loss.detach())
        return descent.param_groups[0]["lr"]

    return training(act)(wrap)


def read_at_end(descent: Any, loss: torch.Tensor, n: int) -> float:
    descent.step()
    return loss.item()


def branches(descent: Any, loss: torch.Tensor, n: int) -> torch.Tensor:
    """The ops depend on a value, and on Python; numbers in them vary."""
    parameters = [p for group in descent.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    if loss.isnan():
        return norm
    if loss > 1.0:
        descent.step()
    elif n % 3:
        with torch.no_grad():
            for p in parameters:
                p.sub_(p.grad * 0.01 * n)
    return loss * n


def stops(descent: Any, loss: torch.Tensor, n: int) -> float:
    if n % 5 == 4 and loss.item() > 0:
        raise StopIteration(n)
    descent.step()
    return loss.item()


def dropout_and_top(descent: Any, loss: torch.Tensor, n: int) -> float:
    grad = functional.dropout(descent.param_groups[0]["params"][0].grad, 0.3)
    first = torch.topk(grad.flatten(), 3).indices.tolist()[0]
    descent.step()
    return (grad.sum() + torch.rand((), device="remote")).item() + first


def kept(wrap: Callable) -> list:
    """Results stay alive over many calls, and are read by later ones."""
    history: list[torch.Tensor] = []

    def act(descent: Any, loss: torch.Tensor, n: int) -> torch.Tensor:
        descent.step()
        history.append(loss.detach())
        del history[:-4]
        return sum(history) / 4 * loss.item()

    return [training(act)(wrap), [loss.item() for loss in history]]


def scaler(wrap: Callable) -> list:
    scale = torch.amp.GradScaler("remote", init_scale=2.0**14, growth_interval=3)
    model = net()
    descent = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        descent.zero_grad()
        with torch.autocast("remote", dtype=torch.bfloat16):
            loss = functional.mse_loss(model(x).float(), y)
        scale.scale(loss).backward()
        scale.step(descent)
        scale.update()
        return loss

    step = wrap(step)
    return [[step(*remote(pair)).item() for pair in batches()], scale.get_scale(), *model.parameters()]


def views(wrap: Callable) -> list:
    """Views of tensors from before are written, made, returned and outlive their bases."""
    state = torch.zeros(4, 6, device="remote")

    def step(x: torch.Tensor) -> torch.Tensor:
        row = state[1]
        row.add_(x[0])
        state.t()[2].mul_(0.5)
        fresh = (x * 2).view(2, 4, 6)[1].t()
        if row.sum().item() > 0:
            fresh.add_(1)
        return fresh[1:3]

    step, seen = wrap(step), []
    for x, _ in batches():
        seen.append(step(x.to("remote")))
        seen[-1].add_(1)
    return [seen, state]


PROGRAMS: dict[str, Run] = {
    "LBFGS": lbfgs,
    "MAML": maml,
    "distributions that validate": distributions,
    "ReduceLROnPlateau": plateau,
    "the loss of each step": training(read_at_end, torch.optim.Adam),
    "branches": training(branches),
    "early exit by an exception": training(stops),
    "random numbers and top-k on the host": training(dropout_and_top),
    "results that are kept": kept,
    "GradScaler": scaler,
    "views": views,
}


@pytest.mark.parametrize("name", ["results that are kept", "branches"])
def test_calls_that_go_together_have_the_programs_of_single_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while workers are busy: a batch then has several fragments."""
    monkeypatch.setattr(Session, "busy", property(lambda session: session._greeting.done.is_set()))
    test_the_bits_are_those_of_eager_calls(name)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_bits_are_those_of_eager_calls(name: str) -> None:
    run, compiled = PROGRAMS[name], []

    def wrap(step: Callable) -> Callable:
        compiled.append(gt.compile(step))
        return compiled[-1]

    wanted, got = run(lambda step: step), run(wrap)
    explained = compiled[0].explain()
    assert same(got, wanted), explained
    assert shares(explained)[0] >= 90, explained
    assert re.search(r"cut at .*\.py:\d+: the value of a tensor of shape \[.*\] is read \(\d+ times\)", explained)


@pytest.mark.parametrize("what", ["a tensor", "text"])
def test_a_print_prints_at_each_call(what: str) -> None:
    x = torch.ones(3, device="remote")

    @gt.compile
    def step(y: torch.Tensor) -> torch.Tensor:
        z = x * y
        print(z if what == "a tensor" else "stepped")
        return z

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for n in range(8):
            step(torch.full((3,), float(n)))
    assert len(out.getvalue().splitlines()) == 8
    assert what == "text" or "tensor([7., 7., 7.]" in out.getvalue()
    assert shares(step.explain())[0] == 100, step.explain()
    assert what == "a tensor" or "the function prints" in step.explain()


@pytest.mark.parametrize("what", ["logs", "writes to a stream", "opens a file"])
def test_output_of_the_step_is_made_at_each_call(what: str, tmp_path: Path) -> None:
    lines, path, x = io.StringIO(), tmp_path / "log", torch.ones(3, device="remote")
    logger, handler = logging.getLogger("steps"), logging.StreamHandler(lines)
    logger.addHandler(handler)

    @gt.compile
    def step(y: torch.Tensor) -> torch.Tensor:
        if what == "logs":
            logger.warning("stepped")
        elif what == "opens a file":
            with open(path, "a") as file:
                file.write("stepped\n")
        else:
            sys.stdout.write("stepped\n")
        return x * y

    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            for n in range(8):
                assert step(torch.full((3,), float(n))).sum().item() == 3 * n
            assert "write" not in vars(out)  # the stream is as it was
    finally:
        logger.removeHandler(handler)
    text = lines.getvalue() + out.getvalue() + (path.read_text() if path.exists() else "")
    assert text == "stepped\n" * 8
    assert f"the function {what}" in step.explain()
    assert shares(step.explain())[0] == 100, step.explain()


def test_a_librarys_log_record_does_not_keep_a_step_from_capture() -> None:
    library = {"__name__": "torch.somewhere", "logging": logging}
    exec("def note():\n    logging.getLogger('torch.somewhere').error('seen')", library)
    x, note = torch.ones(3, device="remote"), library["note"]

    @gt.compile
    def step(y: torch.Tensor) -> torch.Tensor:
        note()
        return x * y

    for n in range(4):
        step(torch.full((3,), float(n)))
    assert "in parts" not in step.explain()


def test_numbers_and_data_that_vary_are_inputs() -> None:
    @gt.compile
    def step(x: torch.Tensor, scale: float) -> float:
        fresh = torch.tensor([scale, 2.0]).to("remote")
        return (x.mul(scale).add(1, alpha=scale) * fresh).sum().item()

    x = torch.ones(2, device="remote")
    for n in (0.5, -0.0, 3.25, 1e-3, float("inf"), 7.0, 11.0, 0.1):
        eager = (x.mul(n).add(1, alpha=n) * torch.tensor([n, 2.0]).to("remote")).sum().item()
        assert step(x, n) == eager or n == float("inf")
    report = step.explain()
    assert report.startswith("test_numbers_and_data_that_vary_are_inputs.<locals>.step: 1 program\n"), report
    assert shares(report)[0] == 100, report


def test_scalars_keep_the_sign_of_zero_and_nan() -> None:
    x = torch.ones(1, device="remote")

    @gt.compile
    def step(number: float) -> float:
        return torch.copysign(x, x.mul(number)).item()

    assert [step(n) for n in (0.0, -0.0, 0.0, -0.0, 1.0, -0.0)] == [1.0, -1.0, 1.0, -1.0, 1.0, -1.0]


def test_tensors_end_as_in_eager_calls() -> None:
    weight = torch.ones(4, 4, device="remote", requires_grad=True)

    @gt.compile
    def step(x: torch.Tensor) -> float:
        loss = (x @ weight).relu().square().mean()
        loss.backward()
        return loss.item()

    alive: list[int] = []
    for x, _ in batches(10):
        step(x[:4, :4].contiguous().to("remote"))
        alive.append(sum(worker["live_tensors"] for worker in settled()["workers"]))
    assert max(alive) <= min(alive) + 3, alive  # those that have ended since the last batch


def test_a_result_that_is_suddenly_kept_is_right() -> None:
    held: list[torch.Tensor] = []
    keep = False

    @gt.compile
    def step(x: torch.Tensor) -> float:
        y = x * 3
        z = y + 1
        if keep:
            held.append(y)
        return z.sum().item()

    for n in range(12):
        keep = n in (5, 6, 9)
        assert step(torch.full((2,), float(n), device="remote")) == 6.0 * n + 2
    assert [y.tolist() for y in held] == [[15.0, 15.0], [18.0, 18.0], [27.0, 27.0]]
    assert shares(step.explain())[0] == 100, step.explain()


def test_inputs_that_share_memory_differently_are_right() -> None:
    @gt.compile
    def step(a: torch.Tensor, b: torch.Tensor) -> float:
        a.add_(1)
        b.mul_(2)
        return (a + b).sum().item()

    for n in range(8):
        a = torch.ones(3, device="remote")
        b = a.view(3) if n % 3 == 2 else torch.ones(3, device="remote")
        assert step(a, b) == (24.0 if n % 3 == 2 else 12.0), n


PICKS = {  # gradients of four elements whose terms are on two workers: whole tensors, and views of some
    "a view, and none": lambda net, n: [net[0].bias, net[1].weight, net[2].bias][n % 3].grad,
    "rows": lambda net, n: net[2].weight.grad[n % 4],
    "views of other bases": lambda net, n: [net[3].weight.grad[2], net[2].weight.grad[2], net[0].bias.grad][n % 3],
}


@pytest.mark.parametrize("pick", PICKS)
def test_terms_of_a_view_are_added_up_before_it_is_read(pick: str, session: Callable[..., None]) -> None:
    """A run of ops meets inputs of one form that are views of other memory, or of none."""
    session("gt: {data_parallel: [0, 1]}")

    def run(device: str, wrap: Callable) -> list:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 5)).to(device)

        def step(x: torch.Tensor, n: int) -> torch.Tensor:
            layers.zero_grad()
            loss = layers(x).square().mean()
            loss.backward()
            gradient = PICKS[pick](layers, n)
            loss.item()
            result = gradient.exp() - gradient
            result.sum().item()
            return result.detach()

        step = wrap(step)
        return [step(x.to(device), n).cpu() for n, (x, _) in enumerate(batches(12))]

    for got, wanted in zip(run("remote", gt.compile), run("cpu", lambda step: step), strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_failed_op_raises_and_harms_no_other_tensor() -> None:
    table, bystander = torch.arange(4.0, device="remote"), torch.ones(2, device="remote")

    @gt.compile
    def step(places: torch.Tensor) -> float:
        bystander.add_(1)
        bystander.sum().item()
        return table[places].sum().item()

    good, bad = torch.tensor([1, 2], device="remote"), torch.tensor([1, 9], device="remote")
    for _ in range(4):
        assert step(good) == 3.0
    with pytest.raises(OpFailed, match=r"test_fragments\.py"):
        step(bad)
    assert step(good) == 3.0
    assert bystander.tolist() == [7.0, 7.0]
    assert step(good) == 3.0 and shares(step.explain())[0] == 100, step.explain()


def test_a_failed_op_that_is_not_read_taints_what_depends_on_it() -> None:
    table = torch.arange(4.0, device="remote")

    @gt.compile
    def step(places: torch.Tensor) -> tuple[torch.Tensor, float]:
        return table[places] * 2, table.sum().item()

    good, bad = torch.tensor([1, 2], device="remote"), torch.tensor([1, 9], device="remote")
    for _ in range(4):
        assert step(good)[0].tolist() == [2.0, 4.0]
    with contextlib.suppress(OpFailed):
        step(bad)
    with contextlib.suppress(OpFailed):
        table.tolist()
    assert step(good)[0].tolist() == [2.0, 4.0]


def test_two_threads_may_work_at_once() -> None:
    @gt.compile
    def step(x: torch.Tensor) -> float:
        y = x * 2
        for _ in range(10):
            y = y + 1
        return y.sum().item()

    wrong: list[Any] = []

    def work(first: int) -> None:
        for n in range(first, first + 20):
            got = step(torch.full((2,), float(n), device="remote"))
            beside = (torch.full((2,), float(n), device="remote") * 2).sum().item()
            if (got, beside) != (4.0 * n + 20, 4.0 * n):
                wrong.append((n, got, beside))

    threads = [threading.Thread(target=work, args=(100 * k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_compiled_functions_within_one_another() -> None:
    @gt.compile
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else -x

    @gt.compile
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    for n in (1.0, -1.0, 2.0, -2.0, 3.0, -3.0):
        assert outer(torch.full((2,), n, device="remote")).tolist() == [2 * n + 1 if n > 0 else 1 - n] * 2
        assert inner(torch.full((2,), n, device="remote")).tolist() == [2 * n if n > 0 else -n] * 2


def test_a_shape_that_depends_on_values_is_beside_the_programs() -> None:
    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        y = (x + 1) * 2
        return y[y > 0].sum() * 3

    for x, _ in batches(12):
        y = (x + 1) * 2
        torch.testing.assert_close(step(x.to("remote")).cpu(), y[y > 0].sum() * 3)
    assert "depends on values" in step.explain()


def test_large_uploads_vary_from_call_to_call() -> None:
    @gt.compile
    def step(n: int) -> float:
        data = torch.full((300, 300), float(n)).to("remote")
        return (data * 2).sum().item() + torch.arange(3.0).to("remote").sum().item()

    assert [step(n) for n in range(6)] == [90000.0 * 2 * n + 3 for n in range(6)]
    assert shares(step.explain())[0] == 100, step.explain()


def test_a_deep_copy_and_a_new_leaf_within_the_step() -> None:
    model = net()

    @gt.compile
    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        twin = copy.deepcopy(model)
        loss = functional.mse_loss(twin(x), y)
        loss.backward()
        with torch.no_grad():
            for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
                mine.sub_(0.1 * other.grad)
        return loss.item()

    losses = [step(*remote(pair)) for pair in [batches(1)[0]] * 10]
    assert losses == sorted(losses, reverse=True) and shares(step.explain())[0] == 100, step.explain()


@pytest.mark.parametrize("config", longer(["dp2", "tp2", "pp2", "dp2tp2pp2"], ["tp2", "dp2tp2pp2"]))
@pytest.mark.slow
def test_workers(config: str, session: Callable[..., None]) -> None:
    """A transformer over several workers whose step reads its loss: the bits of eager calls."""
    session(CONFIGS / f"{config}.yaml")

    def run(wrap: Callable) -> list:
        torch.manual_seed(0)
        gt.manual_seed(0)
        model = mini(gt.signal.groups()).to("remote")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(x: torch.Tensor, n: int) -> float:
            optimizer.zero_grad()
            loss = model(x[:, :-1], x[:, 1:])
            if loss.item() > 0:
                loss.backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 1e-2 / (n + 1)
            return loss.item()

        step = wrap(step)
        data = torch.randint(64, (10, 8, 17), generator=torch.Generator().manual_seed(1))
        return [[step(x.to("remote"), n) for n, x in enumerate(data)], *model.parameters()]

    compiled = []

    def wrap(step: Callable) -> Callable:
        compiled.append(gt.compile(step))
        return compiled[-1]

    wanted, got = run(lambda step: step), run(wrap)
    assert same(got, wanted), compiled[0].explain()
    assert shares(compiled[0].explain())[0] >= 90, compiled[0].explain()


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_that_rest_do_not_share_a_program_with_whole_values(stage: int, session: Callable[..., None]) -> None:
    """A line that reads a norm, once of a weight in pieces and once of a whole value: the weight stays in pieces."""
    session(f"gt:\n  data_parallel: [0, 1]\n  zero: {stage}\n")

    def run(wrap: Callable) -> list:
        torch.manual_seed(0)
        layer = nn.Linear(6, 16, bias=False).to("remote")
        row, column = torch.rand(16, 1).to("remote"), torch.rand(1, 6).to("remote")
        weight, layouts = layer.weight, []

        def norm(value: torch.Tensor) -> float:
            return [value.norm(2).item() for _ in range(2)][1]  # the second one is a fragment of its own

        def step(x: torch.Tensor) -> float:
            weight.grad = None
            loss = layer(x).square().mean()
            loss.backward()
            with torch.no_grad():
                size = norm(weight)
                update = row @ column
                torch._foreach_mul_([update], [weight.grad])
                torch._foreach_add_([weight], [update], alpha=-0.1 * size / norm(update))
            return loss.item()

        step, losses = wrap(step), []
        for x, _ in batches(12):
            losses.append(step(x.to("remote")))
            layouts.append(gt.inspect(weight)["layout"])
        return [losses, layouts, weight]

    wanted, got = run(lambda step: step), run(gt.compile)
    assert wanted[1] == ["[S(0)]"] * 12
    assert same(got, wanted), (got, wanted)


WRITES = {  # of a weight, by ops without a rule for pieces: it is made whole, and split again
    "index_add": lambda w, g, i: w.index_add_(0, i, g[i], alpha=-0.5),
    "rows by number": lambda w, g, i: w.__setitem__(i, w[i] * 0.9),
    "sort": lambda w, g, i: w.copy_(w.sort(0)[0] - g),
    "slice": lambda w, g, i: w[2:7].fill_(0.5),
    "gradient": lambda w, g, i: w.sub_(g.index_add_(0, i, g[i])),
}


@pytest.mark.parametrize("viewed", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_a_weight_that_gets_other_memory_has_its_new_value(write: str, viewed: bool, session: Callable[..., None]) -> None:
    """For its own name, and for views that are alive beside the step."""
    session("gt:\n  data_parallel: [0, 1]\n  zero: 1\n")

    def run(wrap: Callable) -> list:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(23, 4).to("remote"))
        weight.sum().item()
        views = [weight.detach().t(), weight.detach()[:5]] if viewed else []

        def step(rows: torch.Tensor) -> torch.Tensor:
            loss = weight[rows].square().mean()
            loss.backward()
            gradient, weight.grad = weight.grad, None
            with torch.no_grad():
                loss.item()
                WRITES[write](weight, gradient, rows[:3, 0])
            return loss.detach()

        call, losses = wrap(step), []
        generator = torch.Generator().manual_seed(4)
        for _ in range(8):
            losses.append(call(torch.randint(0, 23, (6, 5), generator=generator).to("remote")).item())
            losses += [value.detach().cpu() for value in (weight, *views)]
        return losses

    wanted, got = run(lambda step: step), run(gt.compile)
    assert same(got, wanted), (got, wanted)


PARTS = ("compiled_function.py", "aliasing.py", "recorder.py", "fragment_tape.py", "signals.py")  # that end a call


def press_at(place: int, call: Callable[[threading.Event], Any]) -> bool:
    """Call, and press Ctrl-C at this place of PARTS behind the last read of a value. Returns whether the call got so far.

    Places are those where the interpreter delivers it: the begin of a function, and a return from one that is not Python's.
    """
    left, read = place, threading.Event()

    def trace(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and read.is_set() and frame.f_code.co_filename.endswith(PARTS):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(trace)
    try:
        call(read)
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return left <= 0


@pytest.mark.usefixtures("one")
def test_an_interrupt_anywhere_at_the_end_of_a_call_ends_its_recording() -> None:
    from gt.client.current_session import current

    w = torch.zeros(4, device="remote")

    def step(read: threading.Event) -> None:
        w.add_(torch.ones(4).to("remote"))
        w.sum().item()
        w.add_(torch.arange(4.0).to("remote"))
        read.set()

    run = gt.compile(step)
    for _ in range(3):
        run(threading.Event())
    place, more, before = 0, True, w.cpu()
    while more:
        place += 1
        more = press_at(place, run)
        assert current().tape is None, place
        first, second = before + 1, before + 1 + torch.arange(4.0)
        before = w.cpu()
        assert torch.equal(before, second) or torch.equal(before, first), place  # what is queued may be dropped
    assert place > 20, run.explain()
