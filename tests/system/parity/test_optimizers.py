"""torch's own list of optimizers and their options: on the remote device each takes the steps it takes on the CPU."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest")  # torch's tests need it
STEPS = 2
KINDS = ({"foreach": False}, {"foreach": True}, {"fused": True}, {"capturable": True, "foreach": False}, {})


def infos() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's testing modules
        from torch.testing._internal.common_optimizers import optim_db
    return {info.optim_cls.__name__: info for info in optim_db if info.optim_cls is not torch.optim.SparseAdam}


def options(info: Any) -> Iterator[dict[str, Any]]:
    """Each of its inputs, in each kind of implementation that it has."""
    for given in info.optim_inputs_func(device="cpu"):
        kwargs = {k: v for k, v in given.kwargs.items() if k not in ("foreach", "fused", "capturable")}
        for kind in KINDS:
            named = {k for k, on in kind.items() if on}
            if named <= set(info.supported_impls) | set(inspect.signature(info.optim_cls).parameters) - {"foreach", "fused"}:
                yield {**deepcopy(kwargs), **kind}


def trained(info: Any, device: str, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(*s, generator=generator).to(device).requires_grad_() for s in ((4, 3), (4, 2))]
    data = torch.randn(5, 3, generator=generator).to(device)
    kwargs = {k: v.to(device) if isinstance(v, torch.Tensor) and v.dim() else v for k, v in kwargs.items()}
    optimizer = info.optim_cls(weights, **kwargs)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (torch.tanh(data @ weights[0].T) @ weights[1]).square().sum()
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
    return [w.detach().cpu() for w in weights]


@pytest.mark.parametrize("name", sorted(infos()))
@pytest.mark.filterwarnings("ignore")
def test_it_takes_the_same_steps(name: str, one: None) -> None:
    info, done = infos()[name], 0
    for kwargs in options(info):
        try:
            want = trained(info, "cpu", {k: v for k, v in kwargs.items() if k != "capturable"})  # the CPU has none
        except (RuntimeError, ValueError, TypeError, AssertionError):  # what plain torch does not offer on the CPU
            continue
        for got, right in zip(trained(info, "remote", dict(kwargs)), want, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5, msg=lambda m, k=kwargs: f"{k}: {m}")
        done += 1
    assert done >= len(info.optim_inputs_func(device="cpu")), f"{done} options ran"
