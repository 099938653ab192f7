"""torch.distributed.checkpoint.async_save: its copies of remote tensors on the CPU are fetched values.

Its own copies go by storages, and a remote tensor has none in this process.
"""

from __future__ import annotations

from typing import Any

import torch

from gt.client.device.remote_tensor import RemoteTensor


def stage_remote(module: Any) -> None:
    """torch.distributed.checkpoint._state_dict_stager: stage remote tensors by fetching them."""
    stager = module.StateDictStager
    original = stager._offload_tensor

    def _offload_tensor(self: Any, x: torch.Tensor, memo: dict, non_blocking: bool = False) -> torch.Tensor:
        if not isinstance(x, RemoteTensor):
            return original(self, x, memo, non_blocking)
        memo[id(x)] = x.detach().cpu()
        return memo[id(x)]

    stager._offload_tensor = _offload_tensor
