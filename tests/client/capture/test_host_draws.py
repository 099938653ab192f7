"""Captured functions that draw random numbers on the CPU: a replay draws them too, and Python runs where they decide anew."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gt


class LayerDrop(nn.Module):
    """Layers of which each call skips some, as encoders of speech models do."""

    def __init__(self, chance: float, layers: int = 3) -> None:
        super().__init__()
        self.layers, self.chance = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers)), chance
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            if self.training and torch.rand([]) < self.chance:
                continue
            x = x + torch.tanh(layer(x))
        return self.head(x)


def losses(chance: float, remote: bool, steps: int = 24):
    torch.manual_seed(0)
    model = LayerDrop(chance)
    x = torch.randn(6, 4)
    if remote:
        model, x = model.to("remote"), x.to("remote")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    run = gt.compile(step) if remote else step
    torch.manual_seed(1)
    return [run().item() for _ in range(steps)], torch.rand(3).tolist(), run


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5])
def test_layer_drop_is_that_of_plain_torch(one, chance):
    """The losses, and what the generator gives afterwards."""
    want, after, _ = losses(chance, False)
    got, then, run = losses(chance, True)
    assert got == pytest.approx(want, rel=1e-5)
    assert then == after
    if chance == 0.0:
        assert "1 program" in run.explain() and "21 replays" in run.explain()


@pytest.mark.parametrize("config", ["gt: {data_parallel: [0, 1]}", "gt: {data_parallel: [0, 1], zero: 3}"])
def test_layer_drop_over_several_workers(session, config):
    """The decisions are the program's: all workers drop the same layers."""
    want, after, _ = losses(0.2, False)
    session(config)
    got, then, run = losses(0.2, True)
    assert got == pytest.approx(want, rel=1e-4)
    assert then == after
    assert "replays" in run.explain()


def test_another_decision_runs_the_function(one):
    x = torch.arange(3.0, device="remote")

    @gt.compile
    def f():
        return x + 1 if torch.rand(()) < 0.75 else x - 1

    def plain():
        return 1.0 if torch.rand(()) < 0.75 else -1.0

    torch.manual_seed(3)
    want = [plain() for _ in range(60)]
    torch.manual_seed(3)
    assert [f()[0].item() for _ in range(60)] == want
    assert len(set(want)) == 2
    assert "replays" in f.explain()


def test_masks_views_and_writes_lead_to_a_value(one):
    """The tape has ops in place, views and constants made in the call."""
    x = torch.ones(3, device="remote")

    def decision():
        noise = torch.empty(4, 2)
        noise[1].uniform_()
        order = torch.randperm(4)
        both = torch.cat([noise[1], torch.tensor([0.25])]) * (order >= 0).float().mean()
        return bool((both > 0.9).any()) or torch.equal(order, torch.arange(4))

    @gt.compile
    def f():
        return x * 2 if decision() else x * 3

    torch.manual_seed(5)
    want = [2.0 if decision() else 3.0 for _ in range(50)]
    torch.manual_seed(5)
    assert [f()[0].item() for _ in range(50)] == want
    assert len(set(want)) == 2
    assert "replays" in f.explain()


@pytest.mark.parametrize("kind", ["tolist", "numpy", "number", "kept", "float", "storage", "written"])
def test_draws_that_a_replay_cannot_follow_are_drawn_by_python(one, kind):
    """Each call has its own numbers, as in plain torch, and explain() says why there is no program."""
    x = torch.ones(3, device="remote")
    kept, buffer = [], torch.zeros(3)

    def draw():
        drawn = torch.rand(3)
        if kind == "tolist":
            return drawn.tolist()[0]
        if kind == "numpy":
            return float(drawn.numpy()[0])
        if kind == "number":
            return torch.ones(1, device=x.device).add_(drawn[0]) - 1
        if kind == "storage":
            return float(drawn.untyped_storage()[0])
        if kind == "written":
            buffer.copy_(drawn)
            return float(buffer[0])
        if kind == "kept":
            kept[:] = [drawn]
            return 1.0
        return float(drawn[0])

    f = gt.compile(lambda: x * draw())
    torch.manual_seed(7)
    got = [f()[0].item() for _ in range(12)]
    x = torch.ones(3)
    torch.manual_seed(7)
    assert got == pytest.approx([(x * draw())[0].item() for _ in range(12)])
    assert "replays" not in f.explain()


def test_a_seed_of_each_call_is_not_a_draw_that_is_followed(one):
    x = torch.ones(3, device="remote")

    @gt.compile
    def f():
        torch.manual_seed(11)
        return x + 1 if torch.rand(()) < 0.5 else x - 1

    assert len({f()[0].item() for _ in range(8)}) == 1


def test_a_function_that_draws_may_make_tensors_of_numbers(one):
    x = torch.ones(3, device="remote")

    @gt.compile
    def f():
        torch.rand(())
        return x * torch.tensor([1.0, 2.0, 3.0], device=x.device)

    assert [f().tolist() for _ in range(5)] == [[1.0, 2.0, 3.0]] * 5
    assert f.explain().splitlines()[0].endswith(": 1 program"), f.explain()


def noise(device):
    return torch.randn(6, 4).to(device)


def steps_and_noise(device):
    """A diffusion model's draws: a step for each row, its factor from a table, noise, and a weight in another dtype."""
    steps, drawn = torch.randint(0, 100, (6,)), torch.randn(6, 4).to(device)
    factors = torch.linspace(0, 1, 100)[steps].to(device).unsqueeze(1)
    weights = torch.rand(6, 1).double().to(device, torch.float32)
    return (factors * drawn + (1 - factors)) * weights * torch.rand(())


def written_afterwards(device):
    """The same memory is uploaded twice, and written between and afterwards."""
    buffer = torch.empty(6, 4).uniform_()
    first = buffer.to(device, copy=True)
    buffer.masked_fill_(buffer > 0.9, 0)
    second = buffer.to(device, copy=True)
    buffer.normal_()
    return first - 2 * second


def written_on_the_device(device):
    drawn = torch.rand(6, 4).to(device)
    return drawn.mul_(2).sub_(0.5)


def indices(device):
    order = torch.randperm(6)
    return torch.ones(6, 4, device=device)[order[:3].repeat(2), order[3:].repeat(2) % 4].unsqueeze(1) + torch.rand(6, 1).to(
        device
    )


def with_decisions(device):
    """Layer drop beside noise: where the decision is another, Python runs."""
    scale = torch.rand(6, 1).to(device)
    return scale * 2 if torch.rand(()) < 0.8 else scale * torch.randn(6, 1).to(device)


def trained(draw, device, count=14):
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)

    def step(x):
        loss = (model(x + draw(device)) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    run = step if device == "cpu" else gt.compile(step)
    batches = torch.randn(count, 6, 4)
    torch.manual_seed(1)
    return [run(x).item() for x in batches], torch.rand(3).tolist(), run


@pytest.mark.parametrize("draw", [noise, steps_and_noise, written_afterwards, written_on_the_device, indices, with_decisions])
def test_uploaded_draws_are_inputs_that_each_replay_draws_anew(one, draw):
    """The losses of plain torch, to the bit, and the same numbers from the generator afterwards."""
    want, after, _ = trained(draw, "cpu")
    got, then, run = trained(draw, "remote")
    assert got == want
    assert then == after
    text = run.explain()
    assert text.startswith("trained.<locals>.step: 1 program\n") and "replays" in text, text
    if draw is not with_decisions:
        assert ", 10 replays" in text and text.count("an earlier call") == 2, text


def test_uploaded_draws_over_two_workers(session):
    want, after, _ = trained(steps_and_noise, "cpu")
    session("gt: {data_parallel: [0, 1]}")
    got, then, run = trained(steps_and_noise, "remote")
    assert got == pytest.approx(want, rel=1e-5)
    assert then == after
    assert ", 10 replays" in run.explain()


def test_a_large_draw_is_an_input_too(one):
    """Above the size of uploads within a batch of ops."""
    total = torch.zeros((), device="remote")

    @gt.compile
    def f():
        total.add_(torch.randn(300, 300).to("remote").sum())

    torch.manual_seed(2)
    for _ in range(8):
        f()
    after = torch.rand(2).tolist()
    torch.manual_seed(2)
    want = torch.zeros(())
    for _ in range(8):
        want.add_(torch.randn(300, 300).sum())
    assert total.item() == pytest.approx(want.item(), rel=1e-5)
    assert after == torch.rand(2).tolist()
    assert ", 4 replays" in f.explain()


def test_an_uploaded_draw_that_is_returned_is_the_callers_own(one):
    f = gt.compile(lambda: torch.rand(3).to("remote"))
    torch.manual_seed(4)
    got = [f() for _ in range(8)]
    torch.manual_seed(4)
    assert [t.tolist() for t in got] == [torch.rand(3).tolist() for _ in range(8)]


def test_a_draw_that_the_last_op_reads_is_not_kept(one):
    x = torch.zeros(2, device="remote")

    @gt.compile
    def f():
        x.add_(1)
        torch.rand(()) + 1

    for _ in range(6):
        f()
    assert x.tolist() == [6, 6] and ", 3 replays" in f.explain()


def test_draws_whose_number_changes_run_in_python(one):
    x = torch.ones(2, device="remote")

    def f():
        total = x
        for _ in range(int(torch.randint(1, 4, ()))):
            total = total + torch.rand(2).to(total.device)
        return total

    run = gt.compile(f)
    torch.manual_seed(6)
    got = [run().tolist() for _ in range(30)]
    x = torch.ones(2)
    torch.manual_seed(6)
    assert got == [f().tolist() for _ in range(30)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("use", ["decide", "upload"])
def test_draws_in_a_pipeline_schedule(session, use, schedule):
    """Layer drop and noise from the CPU in each micro-batch: a schedule's replays have an eager step's bits."""
    session("stage0: {shard: {axis: 0, workers: [0]}}\nstage1: {shard: {axis: 0, workers: [1]}}\n")

    def train(captured: bool):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)).to("remote")
        for p in layers.parameters():
            p.grad = torch.zeros_like(p)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

        def step(batch):
            optimizer.zero_grad(set_to_none=False)
            total = torch.zeros((), device=batch.device)
            for x in gt.microbatches(batch, 4):
                for n, layer in enumerate(layers):
                    with gt.signal.context(f"stage{n // 2}"):
                        if use == "decide" and torch.rand([]) < 0.01:
                            continue
                        x = x + torch.tanh(layer(x))
                        if use == "upload":
                            x = x + 0.1 * torch.randn(x.shape).to("remote")
                with gt.signal.context("stage1"):
                    loss = x.square().mean() / 4
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            return total

        run = gt.compile(step, schedule=schedule) if captured else step
        batches = [torch.full((8, 4), 0.1 * n).to("remote") for n in range(10)]
        torch.manual_seed(1)
        return [run(batch).item() for batch in batches], [p.tolist() for p in layers.parameters()], torch.rand(3).tolist(), run

    *got, step = train(True)
    *want, _ = train(False)
    assert got == want
    assert f"schedule {schedule}" in step.explain()


def averaged(remote: bool, use, calls: int = 14):
    """Weights, their average and its count after some calls, with `use(average)` in each."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    average = torch.optim.swa_utils.AveragedModel(model.to("remote") if remote else model)
    x = torch.ones(3, 4, device="remote" if remote else "cpu")

    def step():
        with torch.no_grad():
            for p in model.parameters():
                p.add_(model(x).mean() * 0.1)
        average.update_parameters(model)
        return use(average, model(x).sum().detach())

    run = gt.compile(step) if remote else step
    seen = []
    for n in range(calls):
        if n == 10:  # from outside, as a checkpoint does
            average.n_averaged.fill_(3)
        seen.append(run().item())
    return seen, int(average.n_averaged), [p.detach().tolist() for p in average.parameters()], run


def skewed(average, loss):
    """Reads the count by other means than ops of torch, after it changes it so."""
    average.n_averaged.numpy()[...] += 1
    return loss * int(average.n_averaged.numpy())


USES = {
    "averages": (lambda average, loss: loss, 1),
    "decides": (lambda average, loss: loss * 2 if average.n_averaged > 6 else loss, 2),
    "computes": (lambda average, loss: loss * (average.n_averaged + 1).to(loss.device), 1),
    "a number": (lambda average, loss: loss * average.n_averaged.item(), 0),
    "mixed": (lambda average, loss: loss * average.n_averaged, None),
    "numpy": (skewed, 0),
}


@pytest.mark.parametrize("name", USES)
def test_a_cpu_tensor_that_the_function_counts_in_is_that_of_plain_torch(one, plain_threads, name):
    use, programs = USES[name]
    seen, count, weights, run = averaged(True, use)
    wanted, counted, averages, _ = averaged(False, use)
    assert seen == wanted and count == counted and weights == averages
    if programs is not None:
        assert len(run._programs) == programs, run.explain()


def test_two_programs_count_in_one_tensor(one):
    count, w = torch.zeros(()), torch.ones(3, device="remote")

    @gt.compile
    def step(x):
        count.add_(1)
        return w * count.to("remote") + x

    for n in range(1, 21):
        x = torch.zeros(3) if n % 10 < 7 else torch.zeros(1)
        assert step(x).tolist() == [float(n)] * 3
    assert count.item() == 20 and len(step._programs) >= 1


def test_counts_of_a_list_that_a_new_number_is_added_to_are_followed(one):
    """As an optimizer's steps. The number was taken for memory that the op writes, and for random numbers."""
    counts = [torch.zeros(()) for _ in range(3)]
    weight = torch.ones(4, device="remote")

    def step(x):
        torch._foreach_add_(counts, torch.tensor(1.0, device="cpu"), alpha=1.0)
        weight.add_(x)
        return weight.sum()

    call = gt.compile(step)
    got = [call(torch.full((4,), float(n)).to("remote")).item() for n in range(6)]
    assert got == [4 + 4 * sum(range(n + 1)) for n in range(6)] and [count.item() for count in counts] == [6.0] * 3
    assert "3 replays" in call.explain(), call.explain()


MAKES = {
    "as_tensor": lambda: torch.as_tensor([0.5, 2.0, 3.0]).to("remote"),
    "tensor": lambda: torch.tensor([0.5, 2.0, 3.0], device="remote"),
    "cast": lambda: torch.arange(3).mul(2).to(device="remote", dtype=torch.float32),
}


@pytest.mark.parametrize("outer", ["random numbers", "a CPU tensor"])
@pytest.mark.parametrize("make", MAKES)
def test_constants_that_are_uploaded_beside_what_the_tape_follows(one, make, outer):
    """As a video model with positions that are no buffer, and means of colours: the tape kept the constants alive."""
    table = torch.arange(40.0)

    @gt.compile
    def step(x):
        followed = table if outer == "a CPU tensor" else torch.rand(40)
        return x + followed.to("remote")[:3] * MAKES[make]()

    for n in range(8):
        if outer == "a CPU tensor":
            table.add_(1)
        torch.manual_seed(n)
        result = step(torch.ones(3).to("remote")).tolist()
        torch.manual_seed(n)
        followed = table if outer == "a CPU tensor" else torch.rand(40)
        assert result == (1 + followed[:3] * MAKES[make]().cpu()).tolist(), n
    assert step._programs and step._programs[0].replays >= 3, step.explain()


def test_a_large_draw_on_the_cpu_that_is_returned_is_not_lent(one):
    """The next replay writes it before the program runs, so that no worker could copy it in time."""
    f = gt.compile(lambda: torch.rand(1 << 18).to("remote"))
    torch.manual_seed(4)
    got = [f() for _ in range(6)]
    torch.manual_seed(4)
    for tensor in got:
        assert torch.equal(tensor.cpu(), torch.rand(1 << 18))
