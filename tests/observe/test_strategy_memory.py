"""Peak memory of a captured step in each strategy, as workers count it after each instruction, beside `gt plan` and theory."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gt
from gt.dispatcher.planning import offload
from gt.dispatcher.programs.passes import rematerialize
from tests.dispatcher.programs.test_compile_memory import peaks  # noqa: F401 - a fixture
from tests.helpers import longer
from tests.helpers.serving import serving, settled

WIDE, LAYERS, ROWS, WORDS = 64, 4, 512, 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def training(steps: int, before: Any = lambda: None) -> Any:
    """Train; `before` is called before each step. Returns what keeps the tensors alive."""
    torch.manual_seed(0)
    return captured([Block() for _ in range(LAYERS)], (ROWS, WIDE), steps, before)[1:]


def eager_training(steps: int, before: Any = lambda: None) -> Any:
    """As `training`, op by op."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(LAYERS)]).to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(ROWS, WIDE).to("remote")
    for _ in range(steps):
        gc.collect()
        before()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert float(loss.detach()) >= 0
    return model, optimizer


class Attention(nn.Module):
    """Words, layers of attention, and a head that is tied to the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDE)
        layers = [nn.TransformerEncoderLayer(WIDE, 4, 2 * WIDE, 0.0, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(x, self.table.weight)


def attention_training(steps: int, before: Any = lambda: None) -> Any:
    """Train it op by op, with results far smaller than what a batch of ops makes in all."""
    torch.manual_seed(0)
    model = Attention().to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    words = torch.randint(0, WORDS, (8, 32)).to("remote")
    for _ in range(steps):
        gc.collect()
        before()
        loss = model(words).float().logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert float(loss.detach()) >= 0
    return model, optimizer


def captured(blocks: list[nn.Module], shape: tuple[int, int], steps: int, before: Any, recompute: bool | None = None) -> tuple:
    """Train the blocks in a row by a captured step. Returns the step, the model and its optimizer."""
    model = nn.Sequential(*blocks).to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    @gt.compile(recompute=recompute)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x = torch.randn(*shape).to("remote")
    for _ in range(steps):
        gc.collect()
        before()
        assert float(step(x)) >= 0
    return step, model, optimizer


def measured(config: str, path: Path, peaks: dict, train: Any = training, workers: int = 2) -> int:  # noqa: F811
    """Most bytes that a worker holds in the last of some steps."""
    path.write_text(config)
    with serving(workers, "torch") as server:
        gt.connect(server.address, config=str(path))
        try:
            kept = train(5, peaks.clear)
            most = max(peaks.values())
            del kept
        finally:
            gt.shutdown()
    return most


STRATEGIES = {
    "dp": "zero: 0", "zero1": "zero: 1", "zero2": "zero: 2", "zero3": "zero: 3",
    "zero3 checkpoint": 'zero: 3, activation_checkpoint: {modules: "*"}',
    "zero1 checkpoint": 'zero: 1, activation_checkpoint: {modules: "*"}',
    "zero2 host": "zero: 2, offload: {optimizer: cpu, step: host}",
    "zero1 device": "zero: 1, offload: {optimizer: cpu, step: device}",
    "zero3 all": "zero: 3, offload: {optimizer: cpu, params: cpu}",
    "zero2 bf16": "zero: 2, precision: bf16", "zero3 bf16": "zero: 3, precision: bf16",
}  # fmt: skip


def config_of(strategy: str) -> str:
    return f"gt: {{data_parallel: [0, 1], {STRATEGIES[strategy]}}}"


@pytest.mark.parametrize("train", longer([training, eager_training], [training]))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_planned_peak_is_that_of_a_step(strategy: str, train: Any, peaks: dict, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "strategy.yaml"
    most = measured(config_of(strategy), path, peaks, train)
    body = gt.plan(lambda: train(5), config=str(path)).body
    planned = max(row["peak"] for row in body["memory"])
    assert most == pytest.approx(planned, rel=0.1)
    if "theory" in body:
        for row in body["memory"]:
            theory = body["theory"][row["workers"][0]]
            if "params" in STRATEGIES[strategy]:
                kept = row["weights"] + row["optimizer"] + row["offloaded"]
                assert kept == pytest.approx(theory["weights"] + theory["optimizer"], rel=0.05)
                continue
            assert row["weights"] == pytest.approx(theory["weights"], rel=0.05)
            assert row["optimizer"] + row.get("offloaded", 0) == pytest.approx(theory["optimizer"], rel=0.05)


@pytest.mark.parametrize("strategy", ["dp", "zero1 layers", "zero3 layers"])
def test_the_planned_peak_of_small_results_is_that_of_a_step(strategy: str, peaks: dict, tmp_path: Path) -> None:  # noqa: F811
    """Values are freed soon, whenever their batch is handed over; a batch would hold most of a layer's."""
    path = tmp_path / "strategy.yaml"
    stage, _, layers = strategy.partition(" ")
    again = ', activation_checkpoint: {modules: "layers.*"}' if layers else ""
    text = f"gt: {{data_parallel: [0, 1], {STRATEGIES[stage]}{again}}}"
    most = measured(text, path, peaks, attention_training)
    rows = gt.plan(attention_training, 4, config=str(path)).body["memory"]
    assert most == pytest.approx(max(row["peak"] for row in rows), rel=0.1)


def test_a_dropped_value_is_freed_before_later_results(session: Any) -> None:
    """As in plain torch: the ops of one batch do not hold what the program has let go of."""

    def chain() -> torch.Tensor:
        x = torch.zeros(1 << 18, device="remote")
        for _ in range(50):
            x = x * 2
        return x

    body = gt.plan(chain, workers=1).body
    assert body["memory"][0]["peak"] <= 4 * 4 * (1 << 18)


def test_a_view_of_which_no_schema_tells_has_the_memory_of_its_operand(session: Any) -> None:
    """Each linear layer on more than two dims ends with one."""

    def view() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.zeros(1 << 18, device="remote")
        return x, torch.ops.aten._unsafe_view(x, [512, 512])

    assert gt.plan(view, workers=1).body["memory"][0]["peak"] == 4 << 18


FEW_ROWS = 64  # weights are most of the memory: the order of their gathers and reductions sets the peak
MESHES = {  # groups, modules in groups, keys
    "dp": ("", {}, "data_parallel: [0, 1], "),
    "tp": (
        "".join(f"stage0{end}: {{workers: [[0, 1], [2, 3]]}}\n" for end in ("", "_colpar", "_rowpar")),
        {"": "stage0", "*.up": "_colpar", "*.down": "_rowpar"},
        "",
    ),
    "pp": ("stage0: {workers: [0, 1]}\nstage1: {workers: [2, 3]}\n", {**dict.fromkeys("01", "stage0"), "": "stage1"}, ""),
}
CAPTURED = [
    ("dp", "zero: 1, precision: bf16"), ("tp", "zero: 1, precision: bf16"), ("tp", "zero: 3"),
    ("tp", 'zero: 3, activation_checkpoint: {modules: "*"}'), ("pp", "zero: 3"), ("pp", "zero: 2, schedule: 1f1b"),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "keys"), CAPTURED)
@pytest.mark.usefixtures("plain_threads")
def test_the_planned_peak_is_that_of_the_order_that_workers_execute(
    mesh: str,
    keys: str,
    peaks: dict,  # noqa: F811
    tmp_path: Path,
) -> None:
    groups, modules, more = MESHES[mesh]
    path, workers = tmp_path / "strategy.yaml", 2 if mesh == "dp" else 4

    def train(steps: int, before: Any = lambda: None) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*[Block() for _ in range(LAYERS)]).to("remote")
        if modules:
            gt.signal.apply(model, modules)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        @gt.compile
        def step(x: torch.Tensor) -> torch.Tensor:
            for part in gt.microbatches(x, 2 if mesh == "pp" else 1):
                y = model(part)
                with gt.signal.context("stage1" if mesh == "pp" else "stage0") if modules else nullcontext():
                    loss = y.float().square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        x = torch.randn(FEW_ROWS, WIDE).to("remote")
        for _ in range(steps):
            gc.collect()
            before()
            assert float(step(x)) >= 0
        return step, model, optimizer

    most = measured(f"{groups}gt: {{{more}{keys}}}", path, peaks, train, workers)
    rows = gt.plan(lambda: train(5), config=str(path)).body["memory"]
    assert most == pytest.approx(max(row.get("peak_scheduled", row["peak"]) for row in rows), rel=0.035)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_frozen_weights_are_weights_of_the_plan(session: Any, tmp_path: Path, stage: int) -> None:
    """As of a LoRA: most weights are in no optimizer."""
    path = tmp_path / "strategy.yaml"
    path.write_text(f"gt: {{data_parallel: [0, 1], zero: {stage}}}")

    def train() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(Block().requires_grad_(False), nn.Linear(WIDE, WIDE), Block().requires_grad_(False)).to("remote")
        optimizer = torch.optim.AdamW(model[1].parameters(), fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(ROWS, WIDE).to("remote")).square().mean().backward()
            optimizer.step()
        return model, optimizer

    body = gt.plan(train, config=str(path)).body
    session(str(path))
    kept = train()
    frozen, trained = (4 * sum(p.numel() for p in kept[0].parameters() if p.requires_grad is asked) for asked in (False, True))
    parts, counted = 2 if stage else 1, settled()
    for n, (planned, worker) in enumerate(zip(body["memory"], counted["workers"], strict=False)):
        assert planned["weights"] == pytest.approx((frozen + trained) / parts, rel=0.01)
        held = sum(planned[kind] for kind in ("weights", "gradients", "optimizer"))
        copies = (
            counted["sharding"]["workers"][n]["copies"] if stage else 0
        )  # nothing writes a frozen weight: it stays gathered
        assert worker["live_bytes"] - copies == pytest.approx(held, rel=0.05)
    theories = [row["theory"] for row in counted["sharding"]["workers"]] if stage else []
    for theory in (*body.get("theory", {}).values(), *theories):
        want = {"weights": frozen + trained, "gradients": trained * (parts if stage == 1 else 1), "optimizer": 2 * trained}
        assert theory == {kind: pytest.approx(nbytes / parts, rel=0.01) for kind, nbytes in want.items()}


def test_activations_that_are_computed_again_are_not_held(peaks: dict, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "strategy.yaml"
    without = measured(config_of("zero3"), path, peaks)
    again = measured(config_of("zero3 checkpoint"), path, peaks)
    inner = ROWS // 2 * 4 * WIDE * 4  # what tanh and the second matmul of a layer keep on a worker
    assert again <= without - (LAYERS - 2) * inner


def test_offloaded_state_is_not_held(peaks: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    from gt.dispatcher.planning import offload

    state = 2 * 4 * LAYERS * (2 * 4 * WIDE * WIDE) // 2  # two moments, on one of two workers
    monkeypatch.setattr(offload, "PART_BYTES", state // (2 * LAYERS))
    path, peak = tmp_path / "strategy.yaml", {}
    for name, more in (("held", ""), ("away", ", offload: {optimizer: cpu}")):
        peak[name] = measured(f"gt: {{data_parallel: [0, 1], zero: 2{more}}}", path, peaks)
    assert peak["away"] <= peak["held"] - 0.5 * state


# ---- beside theory


class Gated(nn.Module):
    """A layer as Llama has it, without attention: a norm in fp32, and a gated MLP, around a residual."""

    def __init__(self, wide: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(wide))
        self.gate, self.up = nn.Linear(wide, inner, bias=False), nn.Linear(wide, inner, bias=False)
        self.down = nn.Linear(inner, wide, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = self.norm * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def gated_training(steps: int, before: Any = lambda: None) -> Any:
    torch.manual_seed(0)
    blocks = [Gated(GATED_WIDE, GATED_INNER) for _ in range(GATED_LAYERS)]
    step, *kept = captured(blocks, (GATED_ROWS, GATED_WIDE), steps, before, recompute=True)
    assert "values are recomputed" in step.explain(), step.explain()
    return kept


GATED_WIDE, GATED_INNER, GATED_LAYERS, GATED_ROWS = 64, 192, 8, 512  # a CPU multiplies bf16 slowly


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_peak_of_a_bf16_step_is_that_of_theory(
    stage: int,
    peaks: dict,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """State as in the ZeRO paper's table; bf16 values that autograd has to keep of a layer; whole weights as the stage has."""
    monkeypatch.setattr(rematerialize, "BOUNDS", {2: rematerialize.Bounds(1.0, 0.0)})  # of a step with little work
    matrix, rows = GATED_WIDE * GATED_INNER, GATED_ROWS // 2
    weights = GATED_LAYERS * 3 * matrix
    state = 12 * weights // (2 if stage else 1)  # fp32 weights and two moments
    kept = 2 * rows * (GATED_WIDE + 2 * GATED_INNER)  # of a layer: its input, gate and up
    copies = 2 * (weights if stage < 3 else 3 * matrix)  # in bf16; two of the largest, and one ahead
    batch, loss = 4 * rows * GATED_WIDE, 3 * 4 * rows * GATED_WIDE
    most = measured(
        f"gt: {{data_parallel: [0, 1], zero: {stage}, precision: bf16}}", tmp_path / "c.yaml", peaks, gated_training
    )
    assert most == pytest.approx(state + GATED_LAYERS * kept + copies + batch + loss, rel=0.1)


@pytest.mark.parametrize("step", ["host", "device"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_first_step_has_no_room_for_offloaded_state(session: Any, step: str, fused: bool, monkeypatch: Any) -> None:
    """Else a model whose state fits the host alone could not take its first step."""
    monkeypatch.setattr(offload, "PART_BYTES", 1)
    config = f"gt: {{data_parallel: [0], offload: {{optimizer: cpu, step: {step}}}}}"

    def train() -> None:
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(20)]).to("remote")
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        model(torch.ones(1, 256, device="remote")).sum().backward()
        optimizer.step()

    (row,) = gt.plan(train, config=config).body["memory"]
    theory = row["weights"] + row["gradients"]
    assert row["offloaded"] == pytest.approx(theory, rel=0.01)
    extra = theory / 2 if step == "device" and not fused else 0.15 * theory  # the former brings state back for each of its ops
    assert row["peak"] <= theory + extra
