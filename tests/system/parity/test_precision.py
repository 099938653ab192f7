"""`precision` in a config: an unchanged program has the numbers of the same casts written out in plain torch."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import gt
from gt.client.groups import mixed_precision, module_calls
from tests.helpers.planned import planned
from tests.interrupts.presses import interrupted

STEPS, ROWS, WORDS, WIDTH = 6, 16, 33, 32
SCALE = 2.0**16  # at first, of fp16


class Model(nn.Module):
    """Tied, frozen and 0-dim parameters, keyword and dict arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, words: torch.Tensor, *, bias: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        h = self.norm(self.table(words) + bias)
        h = h + self.down(F.gelu(self.up(h))) * self.scale + self.frozen(h)
        return h @ self.table.weight.t(), {"h": h}


def loss_of(found: tuple, words: torch.Tensor, rows: int) -> torch.Tensor:
    logits, more = found
    assert logits.dtype == more["h"].dtype
    return F.cross_entropy(logits.float().flatten(0, 1), words.flatten(), reduction="sum") / (rows * words.shape[1])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=True)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randint(0, WORDS, (ROWS, 6)), torch.randn(ROWS, 6, WIDTH) * 0.1) for _ in range(STEPS)]


def written_out(workers: int, dtype: torch.dtype, scale: float = 1.0) -> tuple[list[float], list[torch.Tensor]]:
    """FSDP2's arithmetic: each worker's rows with casts of fp32 parameters, its gradients widened, then added up in fp32."""
    torch.manual_seed(0)
    model = Model()
    optimizer, losses, first = optimizer_of(model), [], []
    for words, bias in batches():
        optimizer.zero_grad()
        total = 0.0
        for own_words, own_bias in zip(words.chunk(workers), bias.chunk(workers), strict=True):
            casts = {name: p.to(dtype) for name, p in model.named_parameters()}
            found = functional_call(model, casts, (own_words,), {"bias": own_bias.to(dtype)})
            loss = loss_of(found, own_words, ROWS)
            (loss * scale).backward()
            total += loss.item()
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= scale
        first = first or [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        losses.append(total)
    return losses, first


def trained(captured: bool = False) -> tuple[list[float], list[torch.Tensor], nn.Module]:
    torch.manual_seed(0)
    model = Model().to("remote")
    optimizer, losses, first = optimizer_of(model), [], []

    def step(words, bias):
        optimizer.zero_grad()
        loss = loss_of(model(words, bias=bias), words, ROWS)
        loss.backward()
        if not captured:
            first[:] = first or [p.grad.cpu() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        return loss.detach()

    call = gt.compile(step) if captured else step
    for words, bias in batches():
        losses.append(float(call(words.to("remote"), bias.to("remote"))))
    return losses, first, model


CASES = [(1, 0, False), (2, 0, False), (2, 1, False), (2, 3, False), (4, 2, False), (2, 3, True), (4, 2, True)]


@pytest.mark.parametrize(("workers", "stage", "captured"), CASES)
def test_bf16_is_the_casts_written_out(session, workers, stage, captured):
    session(f"gt: {{data_parallel: {[*range(workers)]}, zero: {stage}, precision: bf16}}")
    losses, first, model = trained(captured)
    want, gradients = written_out(workers, torch.bfloat16)
    assert losses == pytest.approx(want, rel=2e-3, abs=1e-5)
    assert losses[0] == pytest.approx(want[0], rel=1e-5)
    for got, expected in zip(first, gradients, strict=not captured):
        assert got.dtype == torch.float32 and float((got - expected).norm()) <= 2e-3 * float(expected.norm())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_gradients_are_reduced_in_bf16_where_the_config_says_so(session):
    """The weight has more elements than those that are widened before in any case."""
    told = {}
    for reduce in ("fp32", "bf16"):
        session(f"gt: {{data_parallel: [0, 1], precision: {{compute: bf16, reduce: {reduce}}}}}")
        torch.manual_seed(0)
        wide = nn.Linear(1024, 512, bias=False).to("remote")
        wide(torch.randn(8, 1024).to("remote")).float().square().sum().backward()
        told[reduce] = wide.weight.grad.cpu()
    assert told["fp32"].dtype == told["bf16"].dtype == torch.float32
    assert torch.equal(told["bf16"], told["bf16"].bfloat16().float())
    assert not torch.equal(told["fp32"], told["fp32"].bfloat16().float())


def test_recurrent_layers_and_batch_norms(session):
    """The one has a list of its weights beside its parameters, the other computes with fp32 statistics."""
    session("gt: {data_parallel: [0], precision: bf16}")
    torch.manual_seed(0)
    rnn, norm = nn.LSTM(WIDTH, WIDTH, batch_first=True).to("remote"), nn.BatchNorm1d(WIDTH).to("remote")
    h, _ = rnn(torch.randn(4, 6, WIDTH).to("remote"))
    y = norm(h.transpose(1, 2))
    assert h.dtype == y.dtype == torch.bfloat16 and norm.running_mean.dtype == torch.float32
    y.float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 for p in (*rnn.parameters(), *norm.parameters()))
    assert all(a is b for a, b in zip(rnn._flat_weights, rnn.parameters(), strict=True))
    assert not rnn._weights_have_changed()  # or each call makes new lists, which end a capture
    step = gt.compile(lambda x: rnn(x)[0].sum())
    x = torch.randn(4, 6, WIDTH).to("remote")
    assert len({step(x).item() for _ in range(4)}) == 1 and "1 program" in step.explain() and "parts" not in step.explain()


def test_a_module_without_parameters_computes_as_it_is_asked(session):
    session("gt: {data_parallel: [0], precision: bf16}")
    x = torch.randn(4, 8).to("remote")
    assert nn.MSELoss()(x, x + 1).dtype == torch.float32
    assert nn.Linear(8, 8).to("remote")(x).dtype == torch.bfloat16


def test_outputs_have_the_dtype_that_the_config_says(session):
    session("gt: {data_parallel: [0], precision: {compute: bf16, output: fp32}}")
    layer = nn.Linear(8, 8).to("remote")
    y = layer(torch.randn(4, 8).to("remote"))
    assert y.dtype == torch.float32 and torch.equal(y.cpu(), y.cpu().bfloat16().float())


def test_a_failed_call_leaves_the_parameters_of_the_program(session):
    session("gt: {data_parallel: [0], precision: bf16}")
    layer = nn.Linear(8, 8).to("remote")
    before = list(layer.parameters())
    with pytest.raises(RuntimeError):
        layer(torch.randn(4, 9).to("remote"))
    assert all(a is b for a, b in zip(before, layer.parameters(), strict=True))


def test_ctrl_c_at_any_instruction_leaves_the_parameters_of_the_program():
    """Before the first statement of the function that undid it, the casts stayed in the module for good."""
    with planned("gt: {precision: {compute: bf16}}", 1):
        model = nn.ModuleList([nn.Linear(4, 4), nn.GRU(4, 4)]).to("remote")
        x = torch.ones(2, 3, 4, device="remote")
        model.forward = lambda x: model[1](model[0](x))[0]
        assert model(x).dtype == torch.bfloat16
        before = [(id(p), p.dtype) for p in model.parameters()]
        weights = model[1]._flat_weights
        presses = 0
        while interrupted(functools.partial(model, x), presses, [module_calls, mixed_precision]):
            presses += 1
            assert [(id(p), p.dtype) for p in model.parameters()] == before and model[1]._flat_weights is weights, presses
            assert model(x).dtype == torch.bfloat16, presses
    assert presses > 50


def test_backward_computes_a_part_again_in_the_same_precision(session):
    """torch.utils.checkpoint in the program, in both of its forms."""
    told = []
    for reentrant in (None, False, True):
        session("gt: {data_parallel: [0, 1], zero: 2, precision: bf16}")
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 16))

        class Outer(nn.Module):
            def __init__(self, inner: nn.Module = inner, reentrant: bool | None = reentrant) -> None:
                super().__init__()
                self.first, self.inner, self.reentrant = nn.Linear(16, 16), inner, reentrant

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.first(x)
                if self.reentrant is None:
                    return self.inner(x)
                return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.reentrant)

        model = Outer().to("remote")
        model(torch.ones(8, 16).to("remote")).float().square().mean().backward()
        told.append([p.grad.cpu() for p in model.parameters()])
    for others in told[1:]:
        assert all(torch.equal(a, b) for a, b in zip(told[0], others, strict=True))


# ---- fp16


@pytest.mark.parametrize(("workers", "stage"), [(1, 0), (2, 3)])
def test_fp16_is_the_casts_and_the_scale_written_out(session, workers, stage):
    session(f"gt: {{data_parallel: {[*range(workers)]}, zero: {stage}, precision: fp16}}")
    losses, first, _ = trained()
    want, gradients = written_out(workers, torch.float16, SCALE)
    assert losses == pytest.approx(want, rel=1e-3)
    for got, expected in zip(first, gradients, strict=True):
        assert got.dtype == torch.float32 and float((got - expected).norm()) <= 1e-3 * float(expected.norm())


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("output", ["fp16", "fp32"])
def test_no_gradient_outside_of_modules_is_scaled(session, output, zero):
    """Of parameters that keep their dtype, as of a batch norm, and of an input that has the dtype of computation already."""

    def gradients(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh())
        second = nn.ModuleDict({"low": nn.Linear(16, 16).half(), "wide": nn.Linear(16, 8)})
        second.forward = lambda x: second["wide"](second["low"](x.half()).to(second["wide"].weight.dtype))
        x = torch.randn(8, 12)
        first, second, x = first.to(device), second.to(device), x.to(device).requires_grad_()
        second(first(x)).float().square().mean().backward()
        return [t.grad.float().cpu() for t in (x, *first.parameters(), *second.parameters())]

    session(f"gt: {{data_parallel: [0, 1], zero: {zero}, precision: {{compute: fp16, output: {output}}}}}")
    for got, want in zip(gradients("remote"), gradients("cpu"), strict=True):
        assert float((got - want).norm()) <= 1e-2 * float(want.norm()) + 1e-4, (got, want)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("row", [0, 7])
def test_an_overflow_in_one_piece_leaves_out_the_step_on_all_workers(session, row, fused):
    """The piece is one worker's. The scale is halved until gradients are finite."""
    session("gt: {data_parallel: [0, 1], zero: 2, precision: fp16}")
    torch.manual_seed(0)
    layer = nn.Linear(16, 8, bias=False).to("remote")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.1, fused=fused)
    loud = torch.ones(8)
    loud[row] = 3e4  # in the gradient of this row of the weight, with a scale of 2 ** 16
    changed = []
    for n in range(8):
        before = layer.weight.detach().cpu().clone()
        optimizer.zero_grad()
        factor = (loud if n % 4 == 0 else torch.ones(8)).to("remote")
        (layer(torch.ones(4, 16).to("remote")) * factor).sum().backward()
        finite = bool(layer.weight.grad.isfinite().all())
        optimizer.step()
        after = layer.weight.detach().cpu()
        assert after.isfinite().all() and (not torch.equal(before, after)) == finite
        changed.append(finite)
    assert not changed[0] and changed[-1]


def test_a_scale_that_changes_before_backward_leaves_gradients_as_they_are(session):
    """As the generator's loss of an adversarial network, whose backward comes after the other network's step."""
    session("gt: {data_parallel: [0, 1], zero: 2, precision: fp16}")
    torch.manual_seed(0)
    one, other = nn.Linear(6, 4, bias=False).to("remote"), nn.Linear(6, 4, bias=False).to("remote")
    optimizer, x = torch.optim.SGD(other.parameters(), lr=0.1), torch.ones(4, 6).to("remote")
    loss = one(x).mean()
    (other(x) * 3e4).sum().backward()
    optimizer.step()  # is left out, and halves the scale
    assert not other.weight.grad.isfinite().all()
    loss.backward()
    assert torch.equal(one.weight.grad.cpu(), torch.full((4, 6), 0.25))


def test_a_step_in_fp16_is_captured(session):
    """With the loss scale: a replay with an overflow leaves out the step, and the next ones have half the scale."""
    session("gt: {data_parallel: [0, 1], zero: 2, precision: fp16}")

    def trained(captured: bool) -> tuple[list[float], str]:
        torch.manual_seed(0)
        layer = nn.Linear(16, 8).to("remote")
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)

        def step(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (layer(x).square() * factor).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        call = gt.compile(step) if captured else step
        factors = [1.0, 1.0, 1.0, 1.0, 3e4, 3e4, 1.0, 1.0]
        losses = [call(torch.ones(4, 16).to("remote"), torch.tensor(factor).to("remote")).item() for factor in factors]
        assert losses[4] == losses[5] == pytest.approx(3e4 * losses[6], rel=1e-5)  # neither step was made
        return losses, call.explain().splitlines()[0] if captured else ""

    (losses, text), (want, _) = trained(True), trained(False)
    assert losses == want and text.endswith(": 1 program"), text
