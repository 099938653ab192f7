"""`offload` in a config: the numbers of training without it, and bytes that rest elsewhere, as workers count them."""

from __future__ import annotations

import gc
import re
from collections import Counter

import pytest
import torch
from torch import nn

import gt
from tests.helpers import longer
from tests.helpers.serving import serving, settled

WIDTH, LAYERS, STEPS = 128, 3, 4


def trained(captured: bool = False, backend=None, clip=1.0, said=None, steps=STEPS, **options):
    """Losses, the weights, and what keeps them alive. said: gets what `explain()` says."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.detach()

    call = gt.compile(step, backend=backend) if captured else step
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)).to("remote")
    losses = [float(call(x)) for _ in range(steps)]
    if said is not None:
        said.append(str(call.explain()))
    return losses, (model, optimizer)


def values(kept):
    model, optimizer = kept
    state = [v.cpu() for p in model.parameters() for v in optimizer.state[p].values()]
    return [*(p.detach().cpu() for p in model.parameters()), *state]


def counted():
    rows = [row for row in settled()["workers"] if row["live_bytes"]]
    return [(row["live_bytes"], row["offloaded"], row["restored_bytes"]) for row in rows]


def moved(worker=0):
    """Bytes of offloaded state that have come back to a worker's device, and all bytes to the host and to the device."""
    torch.ones(1).to("remote").add(1).cpu()
    row = settled()["workers"][worker]
    return Counter({key: row[key] for key in ("restored_bytes", "bytes_to_host", "bytes_to_device")})


PSI = 4 * LAYERS * WIDTH * (WIDTH + 1)
SMALL = 4 * LAYERS * WIDTH  # biases, of which nothing is gained
SPACES = ["{optimizer: cpu, STEP}", "{optimizer: nvme, path: PATH, STEP}", "{optimizer: nvme, params: cpu, path: PATH, STEP}"]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("options", longer([{"fused": True}, {"foreach": True}, {"foreach": False}], [{"fused": True}]))
@pytest.mark.parametrize("step", ["host", "device"])
@pytest.mark.parametrize("offload", SPACES)
def test_training_is_that_without_offload(session, tmp_path, offload, step, options, captured):
    base = "data_parallel: [0, 1], zero: 3"
    session(f"gt: {{{base}}}")
    want, kept = trained(captured, **options)
    wanted = values(kept)
    del kept
    offload = offload.replace("PATH", str(tmp_path / "files")).replace("STEP", f"step: {step}")
    session(f"gt: {{{base}, offload: {offload}}}")
    before = moved()
    losses, kept = trained(captured, **options)
    crossed = moved() - before
    for live, away, _ in counted():
        rests = PSI if "params" not in offload else 1.5 * PSI
        assert sum(away.values()) == pytest.approx(rests, abs=4 * SMALL)
        assert live <= (2 if "params" not in offload else 1.5) * PSI / 2 + 8 * SMALL + PSI  # weights, gradients and a copy
    if step == "device":
        assert crossed["restored_bytes"] >= (STEPS - 2) * PSI / 2
    elif "params" not in offload:
        assert crossed["restored_bytes"] == 0
        assert crossed["bytes_to_device"] == STEPS * PSI / 2  # a worker's half of the parameters, from the first step on
        # state once, then gradients; parameters once, but where weight decay changes them on the device
        copies = 1 if options.get("fused") else STEPS
        assert crossed["bytes_to_host"] == pytest.approx(PSI + (STEPS + copies) * PSI / 2, abs=1000)
    assert losses == want
    assert all(torch.equal(a, b) for a, b in zip(values(kept), wanted, strict=True))
    if "nvme" in offload:
        assert list((tmp_path / "files").iterdir()) == []  # the file has no name


@pytest.mark.parametrize("backend", longer(["inductor", "cudagraphs"], ["cudagraphs"]))
@pytest.mark.parametrize("step", ["host", "device"])
@pytest.mark.parametrize("offload", longer(SPACES, [SPACES[0], SPACES[2]]))
def test_segments_are_compiled_between_what_is_evicted(graphs, tmp_path, offload, step, backend):
    """Their inputs may rest elsewhere, and what ends with them is freed there, too. Without a GPU there are no graphs."""
    offload = offload.replace("PATH", str(tmp_path / "files")).replace("STEP", f"step: {step}")
    made, said = {}, []
    with serving(2, "torch") as server:
        for each in ("eager", backend):
            gt.connect(server.address, config=f"gt: {{data_parallel: [0, 1], zero: 3, bucket: 64KiB, offload: {offload}}}")
            try:
                losses, kept = trained(True, each, None, said, 7, fused=True)
                made[each] = losses, values(kept), [away for _, away, _ in counted()]
                del kept
                gc.collect()
                torch.ones(1).to("remote").add(1).cpu()
                assert not any(away for _, away, _ in counted())
            finally:
                gt.shutdown()
    eager, compiled = made["eager"], made[backend]
    assert graphs and re.search(r"backend inductor on w[01].* [1-9]\d* compiled", said[1]), said[1]
    assert compiled[0] == eager[0] and compiled[2] == eager[2]
    assert all(torch.equal(a, b) for a, b in zip(compiled[1], eager[1], strict=True))


@pytest.mark.parametrize("zero", longer([0, 1, 2, 3], [0, 3]))
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("step", ["host", "device"])
@pytest.mark.parametrize("offload", SPACES[:2])
def test_a_captured_step_on_offloaded_state_begins_during_backward(session, tmp_path, offload, step, zero, clip):
    """Its numbers are those of eager mode without offload. A norm over all gradients has it wait."""
    offload = offload.replace("PATH", str(tmp_path / "files")).replace("STEP", f"step: {step}")
    session(f"gt: {{data_parallel: [0, 1], zero: {zero}}}")
    want, kept = trained(clip=clip, fused=True)
    wanted, said = values(kept), []
    session(f"gt: {{data_parallel: [0, 1], zero: {zero}, bucket: 16KiB, offload: {offload}}}")
    losses, kept = trained(True, None, clip, said, fused=True)
    assert len(losses) == STEPS and losses == want
    assert all(torch.equal(a, b) for a, b in zip(values(kept), wanted, strict=True))
    early = re.search(r"[1-3] of [2-4] parts of the offloaded optimizer's step begin during the backward pass on w", said[0])
    assert (early is not None) == (clip is None), said[0]


def test_a_list_op_on_much_state_is_done_in_parts(session, monkeypatch):
    from gt.dispatcher.planning import offload

    session("gt: {data_parallel: [0], offload: {optimizer: cpu}}")
    want, _ = trained(fused=True)
    monkeypatch.setattr(offload, "PART_BYTES", 4 * WIDTH * WIDTH)
    session("gt: {data_parallel: [0], offload: {optimizer: cpu}}")
    assert trained(fused=True)[0] == want


@pytest.mark.parametrize("step", ["host", "device"])
def test_what_a_program_fills_like_a_parameter_is_no_state(session, step):
    """A mask, and a gradient that is made ahead, stay on the device, as does all that is computed of them."""
    session(f"gt: {{data_parallel: [0], offload: {{optimizer: cpu, step: {step}}}}}")
    layer = nn.Linear(WIDTH, WIDTH).to("remote")
    mask = torch.ones_like(layer.weight)
    layer.weight.grad = torch.zeros_like(layer.weight)
    before = moved()
    for _ in range(3):
        (torch.nn.functional.linear(torch.ones(2, WIDTH, device="remote"), layer.weight * mask)).sum().backward()
    assert not any(away for _, away, _ in counted())
    assert not any((moved() - before).values())

    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def closure():
        weight = layer.weight * torch.ones_like(layer.weight)
        loss = torch.nn.functional.linear(torch.ones(2, WIDTH, device="remote"), weight).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert not any(away for _, away, _ in counted())


def test_state_that_an_optimizer_makes_with_itself_leaves_the_device(session):
    session("gt: {data_parallel: [0], offload: {optimizer: cpu, step: host}}")
    layer = nn.Linear(WIDTH, WIDTH).to("remote")
    layer(torch.ones(2, WIDTH, device="remote")).sum().backward()
    optimizer = torch.optim.Adagrad(layer.parameters())
    torch.ones(1).to("remote").add(1).cpu()
    assert sum(sum(away.values()) for _, away, _ in counted()) >= 4 * WIDTH * WIDTH
    optimizer.step()


def test_state_is_freed_with_its_optimizer(session, tmp_path):
    session(f"gt: {{data_parallel: [0, 1], zero: 1, offload: {{optimizer: nvme, path: {tmp_path}}}}}")
    _, kept = trained(fused=True)
    assert any(away for _, away, _ in counted())
    del kept
    gc.collect()
    torch.ones(1).to("remote").add(1).cpu()
    assert not any(away for _, away, _ in counted())


def stepped(make, scheduled=False, scaled=False, captured=False, accumulate=1, disturb=False):
    """Losses, weights and state of a model with two groups of parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to("remote")
    groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[2].parameters(), "weight_decay": 0.1}]
    optimizer = make(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)) if scheduled else None
    scaler = torch.amp.GradScaler("remote", init_scale=8.0, enabled=scaled)

    def step(x):
        optimizer.zero_grad()
        for part in x.chunk(accumulate):
            loss = model(part).square().mean()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    call = gt.compile(step) if captured else step
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)).to("remote")
    losses = []
    for n in range(6):
        losses.append(float(call(x)))
        if schedule is not None:
            schedule.step()
        if disturb and n == 4:
            with torch.no_grad():  # between two replays
                model[0].weight.mul_(0.5)
    state = [v.cpu() for p in model.parameters() for v in optimizer.state[p].values() if v is not None]
    return losses, [*(p.detach().cpu() for p in model.parameters()), *state]


CASES = {
    "adam, amsgrad": (lambda g: torch.optim.Adam(g, lr=1e-3, amsgrad=True, fused=True), {}),
    "momentum": (lambda g: torch.optim.SGD(g, lr=1e-2, momentum=0.9, nesterov=True, fused=True), {}),
    "momentum, foreach": (lambda g: torch.optim.SGD(g, lr=1e-2, momentum=0.9), {"accumulate": 2}),
    "learning rates": (lambda g: torch.optim.AdamW(g, lr=1e-3, fused=True), {"scheduled": True}),
    "loss scale": (lambda g: torch.optim.AdamW(g, lr=1e-3, fused=True), {"scaled": True, "accumulate": 2}),
    "captured": (lambda g: torch.optim.AdamW(g, lr=1e-3, fused=True), {"captured": True, "disturb": True}),
    "captured, foreach": (lambda g: torch.optim.AdamW(g, lr=1e-3), {"captured": True, "disturb": True}),
}


@pytest.mark.parametrize("zero, workers", [(1, 1), (2, 2), (3, 4)])
@pytest.mark.parametrize("case", CASES)
def test_an_optimizer_on_the_host_gives_the_same_numbers(session, case, zero, workers):
    make, options = CASES[case]
    base = f"data_parallel: {[*range(workers)]}, zero: {zero}"
    session(f"gt: {{{base}}}")
    want = stepped(make, **options)
    session(f"gt: {{{base}, offload: {{optimizer: cpu, step: host}}}}")
    before = moved()
    losses, kept = stepped(make, **options)
    assert losses == want[0]
    assert all(torch.equal(a, b) for a, b in zip(kept, want[1], strict=True))
    assert (moved() - before)["bytes_to_device"] > 0


class Feedback(torch.optim.Optimizer):
    """Momentum whose state is another tensor after each step, as an optimizer without in-place ops writes it."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                total = state.get("rest", torch.zeros_like(p)) + p.grad
                state["rest"] = total * 0.5
                p.sub_(total, alpha=group["lr"])


@pytest.mark.parametrize("step", ["host", "device"])
@pytest.mark.parametrize("space", ["cpu", "nvme"])
def test_state_that_a_captured_step_replaces_is_the_new_one(session, tmp_path, space, step):
    base = "data_parallel: [0, 1], zero: 3"
    session(f"gt: {{{base}}}")
    want = stepped(Feedback)
    session(f"gt: {{{base}, offload: {{optimizer: {space}, path: {tmp_path / 'files'}, step: {step}}}}}")
    for captured in (False, True):
        losses, kept = stepped(Feedback, captured=captured)
        assert losses == want[0]
        assert all(torch.equal(a, b) for a, b in zip(kept, want[1], strict=True))


def test_a_learning_rate_that_changes_is_not_planned_again(session):
    session("gt: {data_parallel: [0, 1], zero: 2, offload: {optimizer: cpu, step: host}}")
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 64).to("remote"))
    optimizer = torch.optim.AdamW([weight], lr=1.0, fused=True)

    def definitions(lr):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
        return float(weight.sum().detach()) and settled()["workers"][0]["definitions"]

    counts = [definitions(1 / (n + 1)) for n in range(8)]
    assert len(set(counts[4:])) == 1


@pytest.mark.parametrize("space", ["cpu", "nvme"])
def test_a_resumed_step_on_the_host_is_the_same_to_the_bit(session, tmp_path, space):
    config = f"optimizer: {space}, path: {tmp_path / 'files'}, step: host"
    session(f"gt: {{data_parallel: [0, 1], zero: 3, precision: bf16, offload: {{{config}}}}}")
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)).to("remote")

    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to("remote")
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)}

    def train(state, steps):
        losses = []
        for _ in range(steps):
            state["optimizer"].zero_grad()
            loss = state["model"](x).float().square().mean()
            loss.backward()
            state["optimizer"].step()
            losses.append(float(loss.detach()))
        return losses

    state = made()
    train(state, 3)
    gt.save(state, tmp_path / "saved")
    want = train(state, 3)
    resumed = made()
    gt.load(tmp_path / "saved", into=resumed)
    assert train(resumed, 3) == want
    before = moved()["restored_bytes"]
    train(resumed, 2)
    assert moved()["restored_bytes"] == before  # what saving and loading brought to the device rests again


def test_casts_leave_the_masters_on_the_host(session):
    """bf16 computes, parameters stay fp32; numbers are those without offload, and no state crosses."""
    base = "data_parallel: [0, 1], zero: 2, precision: bf16"
    session(f"gt: {{{base}}}")
    want, _ = trained(fused=True)
    session(f"gt: {{{base}, offload: {{optimizer: cpu, step: host}}}}")
    before = moved()
    losses, kept = trained(fused=True)
    assert losses == want and kept[0][0].weight.dtype == torch.float32
    assert (moved() - before)["restored_bytes"] == 0
