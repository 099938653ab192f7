"""Layers, losses and an optimizer with the names and forms that scripts of GT's predecessor use, on top of torch's.

`gt.nn` is torch.nn, which new programs should use. Here a Linear's weight is [in, out], and `parameters()` is a list.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gt.client.device.remote_tensor import Shown

relu, sigmoid, tanh = torch.relu, torch.sigmoid, torch.tanh
mse_loss, binary_cross_entropy, cross_entropy = F.mse_loss, F.binary_cross_entropy, F.cross_entropy


class Module(nn.Module):
    """torch's Module, whose parameters() is a list: it has a length and can be read twice."""

    def parameters(self, recurse: bool = True) -> list[nn.Parameter]:  # type: ignore[override]
        return list(super().parameters(recurse))


class Linear(Module):
    """x @ weight + bias. weight [in_features, out_features], bias [out_features], both remote."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        bound = 1 / math.sqrt(in_features) if in_features else 0.0  # torch's initialisation of nn.Linear
        self.weight = nn.Parameter(torch.empty(in_features, out_features, device=Shown.device))
        self.bias = nn.Parameter(torch.empty(out_features, device=Shown.device)) if bias else None
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight if self.bias is None else x @ self.weight + self.bias


class SGD(torch.optim.SGD):
    """torch's SGD with a default learning rate."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01, **options: Any) -> None:
        super().__init__(params, lr=lr, **options)
