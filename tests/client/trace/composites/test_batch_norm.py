"""batch_norm as its one op: bits, statistics and errors of torch's own, whatever it is given."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from gt.client.current_session import Current

pytestmark = pytest.mark.usefixtures("one")
SHAPES = [(4, 3), (1, 3), (2, 3, 5), (2, 3, 2, 2), (2, 0, 4), (0, 3)]


def outcome(device: str, shape: tuple, training: bool, given: tuple[bool, ...], wide: int) -> Any:
    """Result, gradients and running statistics, or the error. wide: elements that statistics have too many."""
    torch.manual_seed(0)
    x = torch.randn(shape).to(device).requires_grad_()
    weight, bias, mean, variance = (torch.rand(3 if shape[1] else 0).to(device) if there else None for there in given)
    if wide and mean is not None:
        mean = torch.rand(shape[1] + wide).to(device)
    for parameter in (weight, bias):
        if parameter is not None:
            parameter.requires_grad_()
    try:
        y = torch.batch_norm(x, weight, bias, mean, variance, training, 0.1, 1e-5, True)
        y.backward(torch.arange(y.numel(), dtype=torch.float32).reshape(shape).to(device))
    except (RuntimeError, IndexError) as error:
        return repr(error)
    gradients = [t.grad for t in (x, weight, bias) if t is not None]
    return [t if t is None else t.detach().cpu() for t in (y, *gradients, mean, variance)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_torchs_batch_norm(shape: tuple) -> None:
    for training, affine, biased, statistics in itertools.product((True, False), repeat=4):
        for wide in (0, 1):
            case = shape, training, (affine, biased, statistics, statistics), wide
            ours, theirs = outcome("remote", *case), outcome("cpu", *case)
            if isinstance(theirs, str):
                assert ours == theirs, case
            else:
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg=str(case))


@pytest.mark.parametrize("grad", [True, False])
def test_it_is_one_op(grad: bool) -> None:
    norm = torch.nn.BatchNorm2d(3, track_running_stats=False).to("remote")
    x = torch.randn(2, 3, 4, 4, device="remote")
    with torch.inference_mode(not grad):
        norm(x)
        before = Current.recorder.ops
        norm(x)
    assert Current.recorder.ops - before == 1
