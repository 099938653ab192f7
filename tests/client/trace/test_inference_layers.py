"""Layers of torch.nn that take one fused op in inference; and what torch reads from remote tensors in its own C++ code."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gt

CONFIG = "split_colpar: {workers: [0, 1]}\ndata: {workers: [[0], [1]]}\n"
CLOSE = {"rtol": 1e-5, "atol": 3e-6}


def masks(length: int, batch: int, kind: str, padded: bool) -> dict[str, torch.Tensor]:
    made = {}
    if kind == "bool":
        made["mask"] = torch.ones(length, length).triu(1).bool()
    elif kind == "float":
        made["mask"] = torch.randn(length, length)
    if padded:
        made["src_key_padding_mask"] = torch.arange(length) >= torch.randint(1, length + 1, (batch, 1))
    return made


def to_remote(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("remote") for name, tensor in tensors.items()}


@pytest.mark.parametrize("group", ["split_colpar", "data"])
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage:UserWarning")
@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning", "ignore:enable_nested_tensor:UserWarning")
def test_an_encoder_in_inference_has_the_values_of_its_training_form(session, group):
    """torch's fused layer takes a mask of numbers for one of bools, so the reference is the layer without it."""
    session(CONFIG)
    kinds = itertools.product((False, True), (False, True), ("relu", "gelu"), ("", "bool", "float"), (False, True))
    for seed, (norm_first, batch_first, activation, kind, padded) in enumerate(kinds):
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation, norm_first=norm_first, batch_first=batch_first)
        model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 5, 8)
        length, batch = (5, 3) if batch_first else (3, 5)
        given = masks(length, batch, kind, padded)
        want = model(x, **given).detach()
        with torch.no_grad(), gt.signal.context(group):
            have = model.to("remote")(x.to("remote"), **to_remote(given)).cpu()
        kept = ~given.get("src_key_padding_mask", torch.zeros(batch, length, dtype=torch.bool))
        kept = kept if batch_first else kept.T
        torch.testing.assert_close(have[kept], want[kept], **CLOSE)


def test_attention_in_inference_returns_weights_as_asked(session):
    session()
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(3, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[2], [5], [3]])
    asked = ({}, {"need_weights": False}, {"average_attn_weights": False}, {"key_padding_mask": padding})
    want = [model(x, x, x, **given) for given in asked]
    model, y = model.to("remote"), x.to("remote")
    with torch.no_grad():
        for given, (out, weights) in zip(asked, want):
            moved = {k: v.to("remote") if isinstance(v, torch.Tensor) else v for k, v in given.items()}
            have, shares = model(y, y, y, **moved)
            torch.testing.assert_close(have.cpu(), out.detach(), **CLOSE)
            assert (shares is None) is (weights is None)
            if weights is not None:
                torch.testing.assert_close(shares.cpu(), weights.detach(), **CLOSE)


def test_torch_reads_values_in_lists_and_ends_of_ranges_as_those_of_a_gpu(session):
    session()
    x = torch.tensor([1.5, 2.5, 3.0]).to("remote")
    assert torch.equal(torch.tensor([x[0], 2.0, x[2]]), torch.tensor([1.5, 2.0, 3.0]))
    assert torch.equal(torch.tensor([[x.sum().long()], [x[1].int()]]), torch.tensor([[7], [2]]))
    assert torch.equal(torch.tensor([x[0] > 1, x[0] > 2]), torch.tensor([True, False]))
    assert torch.equal(torch.as_tensor([x[0].to(torch.complex64) * 1j]), torch.tensor([1.5j]))
    made = torch.tensor([x[0], x[1]], device="remote")
    assert made.device.type == "remote" and made.tolist() == [1.5, 2.5]
    with pytest.raises(ValueError, match="only one element"):
        torch.tensor([x, x])
    for ends in ((0, x[2]), (x[0], 3), (x[0], x[2])):
        plain = [end.item() if isinstance(end, torch.Tensor) else end for end in ends]
        for make in (torch.linspace, torch.logspace):
            assert torch.equal(make(*ends, 4), make(*plain, 4))
            assert torch.equal(make(*ends, 4, device="remote").cpu(), make(*plain, 4))
    host = torch.zeros(2)
    assert host.fill_(x[0]).tolist() == [1.5, 1.5]


def test_a_gradient_by_frequency_counts_the_indices_of_all_pieces(session):
    session(CONFIG)
    torch.manual_seed(0)
    table, indices = torch.randn(10, 4), torch.randint(0, 4, (8, 6))

    def gradient(device: str) -> torch.Tensor:
        weight = table.to(device).requires_grad_()
        with gt.signal.context("data"):
            rows = F.embedding(indices.to(device), weight, scale_grad_by_freq=True)
            (rows * rows).sum().backward()
        return weight.grad.cpu()

    torch.testing.assert_close(gradient("remote"), gradient("cpu"))
