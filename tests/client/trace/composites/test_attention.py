"""Attention's results on random shapes: the CPU's values and shapes, or an error where the CPU has one."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import gt
from gt.client.current_session import current

pytestmark = pytest.mark.usefixtures("one")


def call(draw: random.Random) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Arguments of one call; about a third have a fault."""
    lead = [draw.choice([1, 2, 3]) for _ in range(draw.choice([0, 1, 1, 2]))]
    heads, length, keys, width = draw.choice([1, 2, 4]), draw.choice([1, 3, 5]), draw.choice([1, 3, 4]), draw.choice([1, 2, 8])
    own, scores = draw.choice([heads, heads, 1, 2]), (*lead, heads, length, keys)
    q, k = torch.randn(*lead, heads, length, width), torch.randn(*lead, own, keys, width + (draw.random() < 0.1))
    v = torch.randn(*lead, own, keys, draw.choice([width, 3])).to(torch.float64 if draw.random() < 0.05 else torch.float32)
    mask = None
    if draw.random() < 0.5:
        mask = torch.randn([draw.choice([1, size, size]) for size in scores][draw.choice([0, 0, 1]) :])
        mask = mask[..., : draw.choice([2, 9, 9, 9])]
        mask = mask > 0 if draw.random() < 0.4 else mask
    causal = mask is None and draw.random() < 0.3
    return [q, k, v], {"attn_mask": mask, "is_causal": causal, "enable_gqa": draw.random() < 0.4}


def outcome(device: str, given: list[torch.Tensor], named: dict[str, Any]) -> torch.Tensor | None:
    named = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in named.items()}
    try:
        return F.scaled_dot_product_attention(*[tensor.to(device) for tensor in given], **named).cpu()
    except RuntimeError:
        return None


def test_shapes_and_errors_are_the_cpus() -> None:
    draw, refused = random.Random(3), 0
    torch.manual_seed(0)
    for _ in range(300):
        case = call(draw)
        ours, theirs = outcome("remote", *case), outcome("cpu", *case)
        refused += theirs is None
        assert (ours is None) == (theirs is None), case
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert 30 < refused < 200


BIASES = [(2, 4, 5, 6), (4, 5, 6), (1, 4, 5, 6), (2, 1, 1, 6), (5, 6), (4, 1, 6), (1,)]  # of scores [2, 4, 5, 6]


def learned(device: str, bias: tuple[int, ...], twice: bool, group: str = "") -> list[torch.Tensor]:
    """Attention with a bias that is learned: its output and gradients of q, k, v and the bias; or second derivatives."""
    torch.manual_seed(0)
    made = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8), torch.randn(bias), torch.randn(2, 4, 5, 8)
    *leaves, weight = (tensor.to(device) for tensor in made)
    for leaf in leaves:
        leaf.requires_grad_()
    with gt.signal.context(group) if group else nullcontext():
        out = F.scaled_dot_product_attention(*leaves)
        loss = (out * weight).sum()
    if not twice:
        loss.backward()
        return [out, *(leaf.grad for leaf in leaves)]
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    torch.stack([grad.square().sum() for grad in grads]).sum().backward()
    return [out, *grads, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("bias", BIASES)
def test_a_learned_bias_has_the_cpus_gradient(bias: tuple[int, ...], twice: bool) -> None:
    before = current().ops
    ours = learned("remote", bias, twice)
    if not twice:
        assert current().ops - before < 20  # one forward and one backward; the formula takes 40
    for got, want in zip(ours, learned("cpu", bias, twice), strict=True):
        assert torch.equal(got.detach().cpu(), want.detach())


@pytest.mark.parametrize("group", ["heads_colpar", "rows"])
@pytest.mark.parametrize("bias", BIASES)
def test_a_learned_bias_is_split_with_the_scores(session: Any, bias: tuple[int, ...], group: str) -> None:
    session("heads_colpar: {workers: [0, 1]}\nrows: {workers: [[0], [1]]}\n")
    for got, want in zip(learned("remote", bias, False, group), learned("cpu", bias, False), strict=True):
        torch.testing.assert_close(got.detach().cpu(), want.detach())


@pytest.mark.parametrize("causal", [False, True])
def test_attention_can_be_differentiated_twice(causal: bool) -> None:
    def second(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(2, 4, 6, 8, dtype=torch.float64).to(device).requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # plain torch's other kernels have no second derivative
            out = F.scaled_dot_product_attention(x, x, x, is_causal=causal)
            (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return x.grad.cpu()

    torch.testing.assert_close(second("remote"), second("cpu"))


def test_attention_with_dropout_says_that_it_has_no_second_derivative() -> None:
    x = torch.randn(2, 4, 6, 8, device="remote", requires_grad=True)
    (grad,) = torch.autograd.grad(F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative: want dropout_p=0"):
        grad.sum().backward()
