"""Arguments of one attention call, for the composite on any device and for a GPU's fused kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionCall:
    """q [..., heads, L, E], k [..., heads, S, E], v [..., heads, S, Ev]; mask broadcasts to the scores [..., L, S]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    gqa: bool
    learns: bool = False  # whether the mask, of floats, requires a gradient

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v

    def bias(self) -> torch.Tensor | None:
        """The mask as torch's composite converts it: a bool mask becomes 0 where True, -inf where False."""
        mask = self.mask
        if mask is None or mask.dtype != torch.bool:
            return mask
        return torch.zeros_like(mask, dtype=self.q.dtype).masked_fill_(mask.logical_not(), float("-inf"))
