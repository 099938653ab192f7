"""Peak of memory of a program's instructions, as far as the program itself makes the memory: which segments set it.

Pure; knows no tensors. Memory from before the program counts as nothing, since it is alive at each row alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from gt.ir.dataflow import Definition, aliases, instruction
from gt.worker.instructions.step import Row
from gt.worker.program.partition import row_bytes

MIN_EXCESS = 50  # 1 / MIN_EXCESS of the peak between segments: what a segment holds beyond that counts


def segments_at_peak(pieces: Sequence[tuple[bool, Sequence[Row]]], code: Sequence, definition: Definition) -> list[bool]:
    """For each piece of `partition`: True for a segment that holds more within it than is ever alive outside of segments.

    Compiled code makes few of the values that end within a segment. Where they lower no peak it saves nothing.
    """
    alive = _Alive()
    inside: list[int] = []
    outside = 0
    for fits, rows in pieces:
        # The level after a segment's last row is alive outside of it too; those before are only inside.
        levels = [alive.after(code, at, definition) for at, _ in rows]
        inside.append(max(levels, default=0) if fits else 0)
        outside = max([outside, *(levels[-1:] if fits else levels)])
    return [most * MIN_EXCESS > outside * (MIN_EXCESS + 1) for most in inside]


class _Alive:
    """Bytes of the memory that rows have made and that some id still names."""

    def __init__(self) -> None:
        self._memory: dict[int, int] = {}  # id -> number of its memory
        self._names: list[int] = []  # by memory: ids that name it
        self._sizes: list[int] = []
        self._total = 0

    def after(self, code: Sequence, at: int, definition: Definition) -> int:
        """Bytes once one more row has been executed."""
        define, operands = instruction(code, at, definition)
        if define is None:
            for tensor in operands:
                self._forget(tensor)
            return self._total
        sizes = row_bytes(define)
        new = aliases(define, operands)
        # Owners first: an instruction may give an output the id of its own input.
        owners = [None if source is None else self._memory.get(source) for _, source in new]
        for place, ((tensor, source), owner) in enumerate(zip(new, owners, strict=True)):
            self._forget(tensor)
            # A view of memory from before the program, which this count leaves out.
            if source is not None and owner is None:
                continue
            if owner is None:
                owner = len(self._sizes)
                self._names.append(0)
                self._sizes.append(sizes[place] if place < len(sizes) else 0)
                self._total += self._sizes[owner]
            self._memory[tensor] = owner
            self._names[owner] += 1
        return self._total

    def _forget(self, tensor: int) -> None:
        owner = self._memory.pop(tensor, None)
        if owner is None:
            return
        self._names[owner] -= 1
        if not self._names[owner]:
            self._total -= self._sizes[owner]
