"""Operands that a kernel would read beyond their storage: expanded ones give what a copy of them gives, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gt.ir.schema import TABLE
from gt.ir.template import T
from gt.worker.engine.torch import TorchEngine
from gt.worker.engine.torch.row_major import row_major
from tests.helpers.worker_parts import new, op

ENGINE = TorchEngine("cpu")
X, GRAD, WEIGHT, MEAN = torch.randn(64, 8, 4), torch.randn(64, 8, 4), torch.randn(8), torch.randn(64, 4)
ROWS, BAGS, PLACES = torch.randn(40, 6), torch.arange(0, 40, 4), torch.zeros(2, 3, 2, 2, 2, dtype=torch.int64)
VOLUME, POOLED = torch.randn(2, 3, 4, 4, 4), torch.randn(2, 3, 2, 2, 2)

# op: its arguments, among them tensors, of which each is expanded in turn
CALLS: dict[str, list[Any]] = {
    "aten.native_layer_norm_backward.default": [
        torch.randn(64, 4), torch.randn(64, 4), [4], torch.randn(64, 1), torch.rand(64, 1), torch.randn(4), torch.randn(4),
        [True, True, True],
    ],
    "aten.native_group_norm.default": [X, WEIGHT, WEIGHT.clone(), 64, 8, 4, 4, 1e-5],
    "aten.native_group_norm_backward.default": [GRAD, X, MEAN, MEAN.exp(), WEIGHT, 64, 8, 4, 4, [True, True, True]],
    "aten._embedding_bag.default": [ROWS, torch.randint(0, 40, (40,)), BAGS, False, 0, False, torch.randn(40)],
    "aten.adaptive_max_pool3d_backward.default": [POOLED, VOLUME, PLACES],
    "aten.median.dim": [ROWS, 0],
    "aten.nanmedian.dim": [ROWS, 1],
}  # fmt: skip


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    """Of its shape, with one element in memory."""
    return tensor.flatten()[:1].clone().reshape([1] * tensor.dim()).expand(tensor.shape)


@pytest.mark.parametrize("name", CALLS)
def test_no_kernel_reads_beyond_the_storage_of_an_expanded_operand(name):
    args = CALLS[name]
    places = [n for n, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    form = [T(places.index(n)) if n in places else arg for n, arg in enumerate(args)]
    call = ENGINE.resolve(op(name, form, len(places), [["none", None, -1]]))
    for place in places:
        alone = list(args)
        alone[place] = expanded(args[place])
        copied = list(args)
        copied[place] = alone[place].contiguous()
        torch.testing.assert_close(call(*alone), call(*copied), equal_nan=True)


@pytest.mark.parametrize(
    ("make", "same"),
    [
        (lambda: torch.randn(8, 4), True),
        (lambda: torch.randn(4, 8).t(), True),  # all its elements are there, in another order
        (lambda: torch.randn(16, 4)[::2], True),
        (lambda: torch.randn(8, 1).expand(8, 4), False),
        (lambda: torch.randn(9).as_strided((8, 2), (1, 1)), False),  # windows that overlap
        (lambda: torch.randn(6, 4)[2:].t().expand(2, 4, 4), False),
    ],
)
def test_only_operands_that_reach_too_far_are_copied(make: Callable[[], torch.Tensor], same: bool):
    given: list[Any] = []
    schema = TABLE.find("aten.native_group_norm.default")[0]
    x, w = make(), make()
    row_major(lambda *args: given.extend(args), schema)(x, [w, None], None, 3)
    assert (given[0] is x) is same and (given[1][0] is w) is same
    assert given[1][1] is None and given[2:] == [None, 3]
    assert torch.equal(given[0], x) and torch.equal(given[1][0], w)


def test_a_written_operand_is_never_copied():
    given: list[Any] = []
    x = torch.zeros(1).expand(8)
    row_major(lambda *args: given.extend(args), TABLE.find("aten.embedding_renorm_.default")[0])(x, x, 1.0, 2.0)
    assert given[0] is x and given[1] is not x


def test_a_traced_segment_has_the_copy():
    name, (x, _, *rest) = "aten.native_group_norm.default", CALLS["aten.native_group_norm.default"]
    call = ENGINE.bind(op(name, [T(0), T(1), None, *rest[1:]], 2, [new(X), ["none", None, -1], ["none", None, -1]]))
    with FakeTensorMode():
        fakes = [torch.empty(x.shape), torch.empty_strided((8,), (0,))]
        graph = make_fx(call)(*fakes)
    assert "clone" in graph.code


def test_a_result_that_the_arguments_leave_out_is_no_tensor():
    """None in its place would be kept for one, and end the worker when its memory is counted."""
    args = [torch.randn(4, 4), torch.randn(4, 4), [4], torch.rand(4, 1), None, [False, False]]
    form = [T(0), T(1), [4], T(2), None, [False, False]]
    payload = op("aten._fused_rms_norm_backward.default", form, 3, [["new", None, -1], ["new", None, -1]])
    with pytest.raises(ValueError, match="gave no tensor"):
        ENGINE.bind(payload)(args[0], args[1], args[3])
    whole = op("aten._fused_rms_norm_backward.default", [*form[:5], [True, False]], 3, [new(args[0]), ["none", None, -1]])
    assert ENGINE.bind(whole)(args[0], args[1], args[3]).shape == (4, 4)
