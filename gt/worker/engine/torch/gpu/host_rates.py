"""Rates of a GPU's link to host memory and of arithmetic there, measured once when a worker starts, which takes some 0.2 s."""

from __future__ import annotations

import logging
from time import perf_counter

import torch

log = logging.getLogger("gt.worker")

COPIED_BYTES, COPIES = 8 << 20, 4
# Of each tensor in the measured AdamW step. A server's cache may have 300 MB: four tensors of 8 MB stayed there, and the host
# was chosen where it took 1.7 times as long as the device.
ELEMENTS = 1 << 25
BYTES_PER_ELEMENT = 28  # read and written in host memory


def measure(device: torch.device) -> list[float]:
    """Bytes a second: of copies, each way, and of AdamW in host memory. [] if there is no room to measure them."""
    try:
        return [_link(device), _memory()]
    except RuntimeError as error:
        log.info("the rates of host memory are not measured: %s", error)
        return []
    finally:
        torch.cuda.empty_cache()


def _link(device: torch.device) -> float:
    here = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    on_device.copy_(here, non_blocking=True)
    torch.cuda.synchronize(device)
    start = perf_counter()
    for _ in range(COPIES):
        here.copy_(on_device, non_blocking=True)
        on_device.copy_(here, non_blocking=True)
    torch.cuda.synchronize(device)
    return 2 * COPIES * COPIED_BYTES / (perf_counter() - start)


def _memory() -> float:
    tensors = [[torch.ones(ELEMENTS)] for _ in range(4)]
    seconds = 0.0
    for step in (1.0, 2.0):  # the first one starts threads
        start = perf_counter()
        torch._fused_adamw_(
            *tensors,
            [],
            [torch.tensor(step)],
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        seconds = perf_counter() - start
    return BYTES_PER_ELEMENT * ELEMENTS / seconds
