"""One worker's part of a program as numbers: what is dead is freed at its last use, and where actions begin is written down."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gt.dispatcher.programs.passes.hoist_transfers import turned
from gt.dispatcher.programs.recording import Instruction
from gt.ir.instr import FREE, Define
from gt.wire.messages import FinishCapture

LONGEST = 1 << 19  # numbers of one definition of a program; a longer one is several


def _channels(define: Define) -> list[tuple[int, int, bool]]:
    """(peer, offset, whether it sends) of each channel that an instruction uses."""
    if define.kind == "send":
        channels = [define.payload["channel"]]
    else:
        channels = [channel for channel, _ in define.payload["parts"]] if define.kind in ("recv", "merge") else []
    return [(channel["peer"], channel["offset"], define.kind == "send") for channel in channels]


class Writer:
    """One worker's stream of a program. index: op by sequence number; lasting: tensors that are there afterwards."""

    def __init__(self, index: dict[int, int], lasting: set[int], seal: FinishCapture, names: dict[int, str]) -> None:
        self.index, self.lasting, self.names = index, lasting, names
        self.seed, self.counter, self.backend = seal.seed, seal.counter, seal.backend
        self.parts: list[dict] = []
        self._channels: list[tuple[int, int, bool]] = []
        self._code: list = []
        self._randoms: list[int] = []
        self._actions: list[list] = []
        self._name = ""
        self._at = 0  # the op that is being written

    def write(self, rows: Sequence[Instruction]) -> None:
        last: dict[int, int] = {}
        made: dict[int, int] = {}
        self._channels = sorted({use for row in rows for use in _channels(row.define)})
        for n, row in enumerate(rows):
            reads, makes = row.ids()
            for i in makes:
                made.setdefault(i, n)
            last.update(dict.fromkeys((*reads, *makes), n))
        ends = defaultdict(list)
        for i in made:
            if i not in self.lasting:
                ends[last[i]].append(i)
        self._free([i for i in made if i in self.lasting])  # of the replay before: nothing here reads them
        for n, row in enumerate(rows):
            self._row(row)
            self._free(ends.get(n, ()))
        self._end()

    def alias(self, define: Define, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._code += (define.number, self._at, source, target)
        self._end()

    def _row(self, row: Instruction) -> None:
        self._at = self.index.get(row.seq, self._at)
        name = self.names.get(id(row), "")
        if name != self._name:
            if self._name and self.backend == "cudagraphs" and name in turned(self._name):
                self._actions[-1][1] += f"+{name}"
            else:
                self._actions.append([len(self._code), name])
            self._name = name
        payload, operands = row.define.payload, list(row.operands)
        if row.define.kind == "op" and payload["random"] is not None:
            place = payload["tensors"] + payload["values"] - 2
            if operands[place] == self.seed:
                self._randoms.append(len(self._code) + 2 + place)
                operands[place + 1] -= self.counter
        self._code += (row.define.number, self._at, *operands)
        if len(self._code) > LONGEST and row.define.kind not in ("together", "all_reduce"):  # those stay in one definition
            self._end()

    def _free(self, ids: Sequence[int]) -> None:
        if ids:
            self._code += (FREE, self._at, len(ids), *ids)

    def _end(self) -> None:
        if self._code:
            first = [] if self.parts else self._channels
            self.parts.append(
                {
                    "code": self._code, "randoms": self._randoms, "actions": self._actions, "backend": self.backend,
                    "channels": [list(use) for use in first], "once": False,
                }
            )  # fmt: skip
            self._code, self._randoms, self._actions = [], [], [[0, self._name]] if self._name else []
