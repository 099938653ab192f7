"""torch.distributed.checkpoint with remote tensors: copies for async_save, files that are checked before a load, loss scales.

Its own copies go by storages, and a remote tensor has none in this process. Its readers copy into tensors as they read, so a
damaged file would leave a model of which a part is new.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gt.client.device.remote_tensor import RemoteTensor
from gt.client.groups.loss_scale import SAVED
from gt.errors import CheckpointError

MAX_SHOWN = 8  # problems in an error
Check = Callable[[Any, str, list], Iterable[str]]


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


def keep_loss_scale(module: Any) -> None:
    """torch.distributed.checkpoint.state_dict: a flat state has the loss scale, and keeps it as it becomes param_groups again.

    Torch takes the entries that the optimizer's own groups have. GT adds the scale in state_dict() alone.
    """
    original = module._unflatten_optim_state_dict

    @functools.wraps(original)
    def _unflatten_optim_state_dict(optim: torch.optim.Optimizer, state_dict: dict[str, Any], info: Any) -> Any:
        state = original(optim, state_dict, info)
        for group in state["param_groups"]:
            for key in SAVED:
                name = f"param_groups.{group['params'][0]}.{key}"
                if name in state_dict:
                    group[key] = state_dict[name]
        return state

    module._unflatten_optim_state_dict = _unflatten_optim_state_dict


def check_before_load(module: Any) -> None:
    """torch.distributed.checkpoint.filesystem: its reader checks all items of remote tensors before it reads the first."""
    _check_first(module.FileSystemReader, _torch_problems)


def check_safetensors_before_load(module: Any) -> None:
    """torch.distributed.checkpoint.hf_storage: as `check_before_load`."""
    _check_first(module.HuggingFaceStorageReader, _safetensors_problems)


def _check_first(reader: Any, check: Check) -> None:
    original = reader.read_data

    @functools.wraps(original)
    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        remote = any(
            item.type.name == "TENSOR" and isinstance(planner.resolve_tensor(item), RemoteTensor) for item in plan.items
        )
        problems = _problems(self, plan, check) if remote else []
        if problems:
            more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
            raise CheckpointError(f"{self.path} cannot be loaded: {'; '.join(problems[:MAX_SHOWN])}{more}")
        return original(self, plan, planner)

    reader.read_data = read_data


def _problems(reader: Any, plan: Any, check: Check) -> list[str]:
    """All that is wrong with the files that a plan reads."""
    files: dict[str, list] = {}
    for item in plan.items:
        files.setdefault(os.fspath(reader.storage_data[item.storage_index].relative_path), []).append(item)
    problems: list[str] = []
    for name, items in sorted(files.items()):
        path = os.path.join(reader.path, name)
        try:
            problems += check(reader, path, items)
        except Exception as error:  # of any type: it depends on what the file has in place of the saved data
            problems.append(f"{path}: {str(error) or type(error).__name__:.200}")
    return problems


def _torch_problems(reader: Any, path: str, items: list) -> Iterable[str]:
    """Items that are not in the file, or are no tensor of the size that .metadata has. No value is read."""
    with reader.fs.create_stream(path, "rb") as stream:
        nbytes = stream.seek(0, os.SEEK_END)
        for item in items:
            place = reader.storage_data[item.storage_index]
            name = item.storage_index.fqn
            if place.offset + place.length > nbytes:
                yield f"{path} has {nbytes} bytes, {name} ends at {place.offset + place.length}: it was cut"
            elif item.type.name == "TENSOR" and not getattr(place, "transform_descriptors", None):
                stream.seek(0)
                try:
                    saved = torch.load(reader._slice_file(stream, place), map_location="meta", weights_only=True)
                except Exception as error:
                    yield f"{path} has no tensor {name} at byte {place.offset}, or a damaged one ({type(error).__name__})"
                    continue
                ends = [offset + n for offset, n in zip(item.storage_offsets, item.lengths)]
                if not isinstance(saved, torch.Tensor) or saved.dim() != len(ends) or any(map(int.__gt__, ends, saved.shape)):
                    shown = list(saved.shape) if isinstance(saved, torch.Tensor) else type(saved).__name__
                    yield f"{path} has {shown} in place of {name}, of which {ends} is wanted"


def _safetensors_problems(reader: Any, path: str, items: list) -> Iterable[str]:
    """Tensors that are not in the file, or of another shape. The library compares its header with its size."""
    from safetensors import safe_open

    with safe_open(filename=path, framework="pt") as file:
        names = set(file.keys())
        for item in items:
            name = item.storage_index.fqn
            wanted = list(reader.storage_data[item.storage_index].shape)
            have = file.get_slice(name).get_shape() if name in names else None
            if have != wanted:
                yield f"{path} has {name} of shape {have}, want {wanted}" if have else f"{path} lacks {name}"
