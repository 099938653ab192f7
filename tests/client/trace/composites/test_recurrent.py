"""nn.RNN, nn.GRU and nn.LSTM as one op forward and one backward: torch's bits on one worker, sums on several."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import gt
from gt.ir import recurrent
from gt.ir.recurrent import Stack

pytestmark = [pytest.mark.usefixtures("plain_threads"), pytest.mark.filterwarnings("ignore:LSTM with projections")]
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": nn.RNN}


def _layer(rng: random.Random, kind: str) -> nn.Module:
    options: dict[str, Any] = {name: rng.random() < 0.5 for name in ("bidirectional", "batch_first", "bias")}
    if kind == "lstm" and rng.random() < 0.3:
        options["proj_size"] = 3
    if kind in ("tanh", "relu"):
        options["nonlinearity"] = kind
    return KINDS[kind](4, 6, rng.randint(1, 3), **options)


def _trained(layer: nn.Module, x: torch.Tensor, lengths: list[int] | None, parts: tuple[bool, ...]) -> list[torch.Tensor]:
    """Results, and gradients of x, of the initial states and of parameters, for a loss of some of the results."""
    x = x.detach().requires_grad_()
    count = layer.num_layers * (1 + layer.bidirectional)
    width = getattr(layer, "proj_size", 0) or layer.hidden_size
    torch.manual_seed(7)
    batch = x.shape[0 if layer.batch_first else 1]
    first = [torch.randn(count, batch, n).to(x.device).requires_grad_() for n in (width, layer.hidden_size)]
    states = first if isinstance(layer, nn.LSTM) else first[:1]
    given = x if lengths is None else pack_padded_sequence(x, lengths, layer.batch_first)
    out, after = layer(given, tuple(states) if len(states) == 2 else states[0])
    results = [out if lengths is None else out.data, *(after if len(states) == 2 else [after])]
    loss = sum(result.square().sum() for result, part in zip(results, parts) if part)
    wanted = [x, *states, *layer.parameters()]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [*results, *(torch.zeros_like(w) if g is None else g for g, w in zip(grads, wanted))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trial", range(4))
def test_bits_of_the_cpu(one: Any, kind: str, trial: int) -> None:
    rng = random.Random(f"{kind} {trial}")
    torch.manual_seed(trial)
    layer = _layer(rng, kind)
    layer.train(rng.random() < 0.5)
    x = torch.randn(3, 5, 4) if layer.batch_first else torch.randn(5, 3, 4)
    lengths = rng.choice([None, [5, 3, 2], [5, 5, 5]])
    parts = (True, True, True) if trial % 2 else rng.choice([(True, False, False), (False, True, False)])
    want = _trained(layer, x, lengths, parts)
    got = _trained(layer.to("remote"), x.to("remote"), lengths, parts)
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.stride() == b.stride() and torch.equal(a.detach().cpu(), b.detach()), (number, layer)


@pytest.mark.parametrize("kind", KINDS)
def test_one_op_a_direction_of_autograd(one: Any, kind: str) -> None:
    """As a loop over steps, a layer of 400 steps would be thousands of ops."""
    layer = _layer(random.Random(0), kind).to("remote")
    x = torch.randn(2, 400, 4).to("remote") if layer.batch_first else torch.randn(400, 2, 4).to("remote")
    x.sum().item()
    before = gt.stats()["client"]["ops"]
    layer(x)[0].sum().backward()
    assert gt.stats()["client"]["ops"] - before < 20


def test_second_derivatives(one: Any) -> None:
    def penalty(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer, x = nn.GRU(4, 6, 2, batch_first=True).to(device), torch.randn(2, 5, 4).to(device).requires_grad_()
        out, state = layer(x)
        (slope,) = torch.autograd.grad(out.square().sum() + state.sum(), x, create_graph=True)
        (slope.norm() - 1).square().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    torch.testing.assert_close([t.cpu() for t in penalty("remote")], penalty("cpu"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(one: Any, context: Any, kind: str) -> None:
    layer, x = _layer(random.Random(kind), kind).eval(), torch.randn(3, 3, 4)
    with context():
        want = layer(x)[0]
        assert torch.equal(layer.to("remote")(x.to("remote"))[0].cpu(), want)


def test_transforms_of_torch_func_take_torchs_loop(one: Any) -> None:
    layer, x, v = nn.GRU(4, 6), torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    want = torch.func.jvp(lambda x: layer(x)[0], (x,), (v,))
    layer = layer.to("remote")
    got = torch.func.jvp(lambda x: layer(x)[0], (x.to("remote"),), (v.to("remote"),))
    torch.testing.assert_close([t.cpu() for t in got], [*want])


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_operands_have_no_gradients(one: Any, kind: str) -> None:
    """Bits are those of the CPU with the same operands frozen: some kernels choose their form by it."""

    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer, x = _layer(random.Random(f"frozen {kind}"), kind).to(device), torch.randn(3, 3, 4).to(device)
        for name, own in layer.named_parameters():
            own.requires_grad_("hh" in name)
        out = layer(x)[0]
        out.square().sum().backward()
        assert {name: own.grad is not None for name, own in layer.named_parameters()} == {
            name: "hh" in name for name, _ in layer.named_parameters()
        }
        return [out.detach(), *(own.grad for own in layer.parameters() if own.grad is not None)]

    assert all(torch.equal(a.cpu(), b) for a, b in zip(run("remote"), run("cpu"), strict=True))


def test_backward_twice_and_after_a_copy(one: Any) -> None:
    """The kernel's own memory is with the output, and used once: then forward runs again."""
    layer, x = nn.LSTM(4, 6).to("remote"), torch.randn(5, 2, 4).to("remote")
    out = layer(x)[0]
    for _ in range(2):
        out.sum().backward(retain_graph=True)
    twice = [p.grad.cpu() for p in layer.parameters()]
    layer.zero_grad()
    layer(x)[0].clone().sum().backward()
    assert all(torch.equal(2 * p.grad.cpu(), g) for p, g in zip(layer.parameters(), twice, strict=True))


def test_dropout_between_layers_is_that_of_a_loop(one: Any) -> None:
    torch.manual_seed(0)
    layer, x = nn.LSTM(4, 6, 2, dropout=0.5).to("remote"), torch.randn(5, 2, 4).to("remote")
    first, second = nn.LSTM(4, 6).to("remote"), nn.LSTM(6, 6).to("remote")
    for name, own in layer.named_parameters():
        part = (first, second)["l1" in name]
        getattr(part, name.replace("l1", "l0")).data.copy_(own.data)
    torch.manual_seed(3)
    got, (states, _) = layer(x)
    torch.manual_seed(3)
    between, (early, _) = first(x)
    want, (late, _) = second(nn.functional.dropout(between, 0.5))
    assert torch.equal(got, want) and torch.equal(states, torch.cat([early, late]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_data_parallel(session: Any, kind: str, packed: bool) -> None:
    torch.manual_seed(1)
    rng = random.Random(f"{kind} {packed}")
    layer = _layer(rng, kind)
    shape = (6, 5, 4) if layer.batch_first else (5, 6, 4)
    x, lengths = torch.randn(shape), [5, 5, 4, 3, 2, 1] if packed else None
    want = _trained(layer, x, lengths, (True, True, True))
    session("gt: {data_parallel: [0, 1, 2]}")
    got = _trained(layer.to("remote"), x.to("remote"), lengths, (True, True, True))
    torch.testing.assert_close([t.detach().cpu() for t in got], [t.detach() for t in want], rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_refused(one: Any) -> None:
    layer = nn.LSTM(4, 6)
    flat = [p.detach() for p in layer.parameters()]
    x, state = torch.randn(5, 2, 4), torch.zeros(1, 2, 6)
    data, lists = x[..., :3].to("remote"), ([state.to("remote")] * 2, [p.to("remote") for p in flat])
    with pytest.raises(
        RuntimeError, match="shapes cannot be multiplied"
    ):  # torch's kernel on the CPU reads beyond its operands
        torch.lstm(data, *lists, True, 1, 0.0, True, False, False)
    with pytest.raises(RuntimeError, match="at least two devices"):
        layer.to("remote")(x)


def test_shapes_of_operands() -> None:
    stack = Stack("lstm", True, 2, True, True, ())
    layer = nn.LSTM(4, 6, 2, bidirectional=True, proj_size=3)
    params, states = [tuple(p.shape) for p in layer.parameters()], [(4, 2, 3), (4, 2, 6)]
    assert recurrent.fits((5, 2, 4), states, params, stack)
    for x in ((5, 2, 5), (5, 3, 4), (10, 4), (0, 2, 4)):
        assert not recurrent.fits(x, states, params, stack)
    assert not recurrent.fits((5, 2, 4), [(4, 2, 6), (4, 2, 6)], params, stack)
    assert not recurrent.fits((5, 2, 4), states, params[:-1], stack)
    packed = stack._replace(sizes=(2, 2, 1))
    assert recurrent.fits((5, 4), states, params, packed)
    for sizes in ((2, 1, 2), (3, 1, 1), (2, 2, 0, 1), (2, 2, 2), (5, -2, 2)):
        assert not recurrent.fits((5, 4), states, params, packed._replace(sizes=sizes))
