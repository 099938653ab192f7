"""Values of small integer tensors that the program has just uploaded, such as the masks and lengths of a batch.

They are known as long as nothing but uploads was recorded since: no op can have changed them. Knows no captured programs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

MAX_BYTES = 1 << 20  # of one tensor; no library reads a larger one to choose an algorithm
KEPT_BYTES = 8 << 20  # of all tensors
DTYPES = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})  # equal on every device


class UploadedValues:
    """The values of one recorder's newest uploads."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[torch.Size, np.ndarray]] = {}  # by id
        self._nbytes = 0
        self._ops = 0  # that were recorded when the newest upload was

    def note(self, number: int, host: torch.Tensor, values: np.ndarray, begun: int, recorded: int) -> None:
        """An upload was recorded. begun, recorded: the recorder's number of ops before its first one, and now.

        values: what is uploaded. They are copied.
        """
        if begun != self._ops:
            self.clear()
        self._ops = recorded
        if host.dtype in DTYPES and values.nbytes <= MAX_BYTES:
            if self._nbytes + values.nbytes > KEPT_BYTES:
                self.clear()
            self._values[number] = host.shape, values.copy()
            self._nbytes += values.nbytes

    def of(self, tensor: Any, recorded: int) -> torch.Tensor | None:
        """A remote tensor's value, on the CPU; None if it is not known. recorded: the recorder's number of ops now."""
        if recorded != self._ops or tensor._ref.id not in self._values:
            return None
        shape, values = self._values[tensor._ref.id]
        return torch.from_numpy(values) if shape == tensor.shape else None

    def clear(self) -> None:
        """Ops are recorded that may change any tensor."""
        self._values.clear()
        self._nbytes = 0
