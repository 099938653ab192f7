"""Fragments of one call: its ops are held back and handed over in runs, which the dispatcher replays as programs.

Python runs in such a call, so every branch, print and counter is as in an eager one. A run ends where the program waits for
something: a value that is read, a shape that depends on values, the end of the call. The dispatcher compares its ops with those
of earlier calls, and needs no guards (gt/dispatcher/programs/fragments/fragments.py).
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

import torch

from gt.client.device import random
from gt.client.trace.recorder import MAX_BATCH_NUMBERS, MAX_FREED_PER_BATCH
from gt.ir.instr import END_FRAGMENT, FRAGMENT

if TYPE_CHECKING:
    from gt.client.capture.aliasing import Containers
    from gt.client.trace.provenance import Origins
    from gt.client.trace.recorder import Recorder

MAX_CUTS = 32  # places in a function that are counted


class FragmentTape:
    """One call of a function whose Python runs. slot, call: see ir.instr.FRAGMENT. cuts: place and reason -> count."""

    records = False  # values can be read
    shared = False  # whether another thread used remote tensors meanwhile
    most_held = MAX_BATCH_NUMBERS  # numbers; as eager batches have, so that workers have work while Python goes on

    def __init__(
        self, recorder: Recorder, origins: Origins, slot: int, call: int, backend: int, cuts: Counter[tuple[str, str]]
    ) -> None:
        self.recorder, self.origins, self.cuts = recorder, origins, cuts
        self.thread = threading.get_ident()
        self._header = FRAGMENT, slot, call, backend
        self._uploads: list = []
        self._random = random.initial_seed(), random._State.counter

    def take_batch(self, code: list, frames: list, freed: list[int]) -> tuple[list, list[int]]:
        """The batch as a fragment behind its uploads. Returns it, and the ids that may be freed behind it."""
        # A fragment in the op stream: uploads, then FRAGMENT slot call backend seed counter length, its ops, END_FRAGMENT
        # count ids. Seed and counter are those before its first op, so that random ops are compared from there
        uploads, self._uploads = self._uploads, []
        (seed, counter), self._random = self._random, (random.initial_seed(), random._State.counter)
        if not code:
            return uploads, freed
        ended, rest = freed[:MAX_FREED_PER_BATCH], freed[MAX_FREED_PER_BATCH:]
        header = (*self._header, seed, counter, len(code))
        return [*uploads, *header, *code, END_FRAGMENT, len(ended), *ended], rest

    def uploads(self, code: list) -> list:
        """The list that takes the rows of uploads: they are sent ahead, and the fragment reads their tensors."""
        return self._uploads

    def defer(self, freed: list[int]) -> list[int]:
        """The ids that may be freed before a large result: all."""
        return freed

    def refuse(self, what: str, origin: int) -> None:
        """The next op cannot be part of a program: end the fragment before it."""
        self._cut(self.origins.where(origin), what.partition(",")[0])
        self.recorder.pass_on()

    def folded(self, tensor: torch.Tensor) -> None:
        """No value is: each call runs its Python, and may read another."""

    def constant(self, tensor: torch.Tensor) -> None:
        """A value is read, for which the caller waits; that ends the fragment."""
        self._cut(self.origins.where(self.origins.here()), f"the value of a tensor of shape {list(tensor.shape)} is read")

    def upload(self, host: torch.Tensor) -> None:
        """Every tensor is uploaded."""

    def source(self, host: torch.Tensor) -> None:
        """Uploads are inputs of a fragment: nothing is to be noted."""

    def forbids_reads(self) -> bool:
        """A library's question whether a capture forbids reads of values."""
        return False

    def _cut(self, where: str, what: str) -> None:
        if (where, what) in self.cuts or len(self.cuts) < MAX_CUTS:
            self.cuts[where, what] += 1


def end_fragments(recorder: Recorder, containers: Containers) -> None:
    """A call that was run in fragments is over: hand over its last one."""
    try:
        containers.give_back()
    finally:
        try:
            recorder.pass_on()
        finally:
            recorder.end_tape()
