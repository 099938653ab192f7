"""Values of small integer tensors that the program has just uploaded, such as the masks and lengths of a batch.

They are known until an op is recorded that may change them: one that writes to them, or that makes another name for their
memory. Knows no captured programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from gt.ir.instr import client_ops
from gt.ir.template import Template

MAX_BYTES = 1 << 20  # largest tensor that is kept; no library reads a larger one to choose an algorithm
KEPT_BYTES = 8 << 20  # bytes of all kept tensors
MAX_FOLLOWED_OPS = 4096  # since the newest upload: a program that reads values does so before its next step
DTYPES = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})  # equal on every device


class UploadedValues:
    """The values of one recorder's newest uploads."""

    wanted = False  # True once the program has a compiled function, which may read them

    def __init__(self) -> None:
        self._values: dict[int, np.ndarray] = {}  # by id
        self._nbytes = 0
        self._since = 0  # ops recorded since the newest upload, and followed

    def __bool__(self) -> bool:
        return bool(self._values)

    def note(self, number: int, values: np.ndarray) -> None:
        """A small tensor of DTYPES was uploaded. values: an array that nobody changes."""
        if self._nbytes + values.nbytes > KEPT_BYTES:
            self.clear()
        self._values[number] = values
        self._nbytes += values.nbytes
        self._since = 0

    def handed_over(self, code: list, templates: Mapping[int, Template]) -> None:
        """These ops leave the recorder. Without a compiled function nobody follows them, and no value is known any more."""
        if not self.wanted:
            self.clear()
        elif self._values:
            self._since += self._forget_changed(code, templates)
            if self._since > MAX_FOLLOWED_OPS:
                self.clear()

    def of(self, tensor: Any, code: list, templates: Mapping[int, Template]) -> torch.Tensor | None:
        """A remote tensor's value, on the CPU; None if it is not known. code: ops that have not been handed over."""
        if tensor._ref.id not in self._values:
            return None
        self._forget_changed(code, templates)
        values = self._values.get(tensor._ref.id)
        return torch.from_numpy(values) if values is not None and values.shape == tensor.shape else None

    def clear(self) -> None:
        """Any tensor may be changed now."""
        self._values.clear()
        self._nbytes = 0

    def _forget_changed(self, code: list, templates: Mapping[int, Template]) -> int:
        """Forget the values that these ops may change now or later; the number of ops."""
        count = 0
        for template, at in client_ops(code, templates):
            count += 1
            viewed = [out.of for out in template.outs if out.kind == "view"]
            if viewed or template.writes:
                # A view counts as a write: what is written through it later cannot be told from its id
                self._forget(code[at + 2 + place] for place in (*viewed, *template.writes))
        return count

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            values = self._values.pop(number, None)
            if values is not None:
                self._nbytes -= values.nbytes
