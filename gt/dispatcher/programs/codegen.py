"""Code generation: one worker's instructions as the numbers of a program. Dead tensors are freed at their last use.

Example, with nothing but %4 alive afterwards (numbers are definitions, 0 is the op):

    before:  %2 = mm %0 %1; %3 = relu %2; %4 = mm %3 %1
    after:   [20, 0, 0, 1, 2,  21, 1, 2, 3,  FREE, 1, 1, 2,  20, 2, 3, 1, 4,  FREE, 2, 1, 3]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gt.dispatcher.programs.passes.hoist_transfers import backward_of
from gt.dispatcher.programs.recording import Instruction
from gt.ir.dataflow import last_uses
from gt.ir.instr import COLLECTIVES, FREE, RECEIVES, Define
from gt.wire.messages import FinishCapture

BATCHED = COLLECTIVES | {"together"}  # kinds that stay in one definition with what follows them
MAX_NUMBERS_PER_DEFINITION = 1 << 19  # numbers of code in one definition; a longer program has several


def _channels(define: Define) -> list[tuple[int, int, bool]]:
    """(peer, offset, true if it sends) of each channel that an instruction uses."""
    if define.kind == "send":
        channels = [define.payload["channel"]]
    else:
        channels = [channel for channel, _ in define.payload["parts"]] if define.kind in RECEIVES else []
    return [(channel["peer"], channel["offset"], define.kind == "send") for channel in channels]


def _read_before_made(rows: Sequence[Instruction]) -> set[int]:
    """Tensors that rows read as they were before the first row."""
    read: set[int] = set()
    made: set[int] = set()
    for row in rows:
        read.update(i for i in row.reads if i not in made)
        made.update(row.makes)
    return read


class ProgramWriter:
    """One worker's stream of a program. index: op by sequence number; lasting: tensors that are alive afterwards."""

    def __init__(self, index: dict[int, int], lasting: set[int], seal: FinishCapture) -> None:
        self.index, self.lasting = index, lasting
        self.seed, self.counter, self.backend = seal.seed, seal.counter, seal.backend
        self.parts: list[dict] = []
        self._channels: list[tuple[int, int, bool]] = []
        self._code: list = []
        self._randoms: list[int] = []
        self._actions: list[list] = []
        self._action = ""
        self._at = 0  # the op that is being written

    def write(self, rows: Sequence[Instruction], owned: Sequence[int] | None = None) -> None:
        """Write rows. owned: tensors from before that are freed at their last use too; with them results have new names."""
        # 1. The tensors that die behind each row: those made here and those handed over, unless they outlive the program.
        self._channels = sorted({use for row in rows for use in _channels(row.define)})
        results, last = last_uses(rows)
        ends = defaultdict(list)
        for i in results:
            if i not in self.lasting:
                ends[last[i]].append(i)
        for i in owned or ():
            if i in last:
                ends[last[i]].append(i)
        # 2. Results have the same names in every replay. Those of the replay before are freed at the start, so that both are
        #    not alive at once; but not what this replay reads first, as a tensor that gets another layout here.
        if owned is None:
            read = _read_before_made(rows)
            self._free([i for i in results if i in self.lasting and i not in read])

        # 3. The rows, with frees between.
        for n, row in enumerate(rows):
            self._row(row)
            self._free(ends.get(n, ()))
        self._end()

    def alias(self, define: Define, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._code += (define.number, self._at, source, target)
        self._end()

    def _row(self, row: Instruction) -> None:
        # `actions` has [place in the code, name] where an action begins. A forward action and its own backward pass right
        # behind it are one region of a device graph, "1F0+1B0".
        self._at = self.index.get(row.seq, self._at)
        if row.action != self._action:
            if self._action and self.backend == "cudagraphs" and row.action in backward_of(self._action):
                self._actions[-1][1] += f"+{row.action}"
            else:
                self._actions.append([len(self._code), row.action])
            self._action = row.action
        # A draw is written relative to the call's random counter, and a launch adds its own. Draws with another seed stay as
        # they are.
        payload, operands = row.define.payload, list(row.operands)
        if row.kind == "op" and payload["random"] is not None:
            place = payload["tensors"] + payload["values"] - 2
            if operands[place] == self.seed:
                self._randoms.append(len(self._code) + 2 + place)
                operands[place + 1] -= self.counter
        self._code += (row.define.number, self._at, *operands)
        if len(self._code) > MAX_NUMBERS_PER_DEFINITION and row.kind not in BATCHED:
            self._end()

    def _free(self, ids: Sequence[int]) -> None:
        if ids:
            self._code += (FREE, self._at, len(ids), *ids)

    def _end(self) -> None:
        if self._code:
            first = [] if self.parts else self._channels  # the first part declares the channels of all
            self.parts.append(
                {
                    "code": self._code, "randoms": self._randoms, "actions": self._actions, "backend": self.backend,
                    "channels": [list(use) for use in first], "once": False,
                }
            )  # fmt: skip
            self._code, self._randoms, self._actions = [], [], [[0, self._action]] if self._action else []
