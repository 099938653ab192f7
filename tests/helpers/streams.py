"""A program as a bare op stream, as a client's recorder would send it, with every value known beforehand.

For tests of sessions beside one another; needs no torch on this side.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np

from gt.client.session import Session
from gt.ir.instr import FREE, PARAM
from gt.ir.spec import contiguous
from gt.ir.template import Out, T, Template, V

ROWS, COLUMNS = 8, 6
SPEC = contiguous((ROWS, COLUMNS), "float32")
TEMPLATES = (
    Template("gt.upload.default", (), (), (), 1, (Out("new", SPEC),)),
    Template("aten.add.Tensor", (T(0), T(1)), (), (SPEC, SPEC), 0, (Out("new", SPEC),), pointwise=True),
    Template("aten.neg.default", (T(0),), (), (SPEC,), 0, (Out("new", SPEC),), pointwise=True),
    Template("aten.mul.Tensor", (T(0), V(0)), (), (SPEC,), 1, (Out("new", SPEC),), pointwise=True),
    Template("aten.add_.Tensor", (T(0), T(1)), (), (SPEC, SPEC), 0, (Out("same", None, 0),), (0,), pointwise=True),
)
UPLOAD, ADD, NEG, MUL, ADD_INTO = range(16, 16 + len(TEMPLATES))


CONFIGS = (  # and the contexts in which ops are issued
    ("", ("",)),
    ("a: {shard: {axis: 0, workers: [0]}}\nb: {shard: {axis: 0, workers: [1]}}\n", ("a", "b", "a_to_b", "")),
    ("a: {shard: {axis: 0, workers: [0, 1]}}\nb: {shard: {axis: 1, workers: [1, 2]}}\n", ("a", "b", "")),
    ("s: {workers: [2, 1, 0]}\nt: {shard: {axis: 0, workers: [[0, 1, 2]]}}\n", ("s", "t")),
)


class Stream:
    """A session and the expected values of its tensors. `groups` are contexts in which ops are issued."""

    def __init__(self, address: str, config: str = "", groups: tuple[str, ...] = ("",), seed: int = 0, **how: Any) -> None:
        self.rng = random.Random(seed)
        self.session = Session(address, (config, "stream.yaml"), **how)
        self.values: dict[int, np.ndarray] = {}
        self.checked = 0
        self._ids = itertools.count(1)
        self._groups = groups
        self._code: list = []
        self._frames: list[bytes] = []
        self._templates: list = [[16 + n, template.wire()] for n, template in enumerate(TEMPLATES)]
        self._origins: list = [[n, "stream.py", n, group, False, -1] for n, group in enumerate(groups, 1)]

    def op(self, number: int, *operands: Any, value: np.ndarray | None = None) -> int:
        """Append an op; returns the id of its output, whose expected value is `value`."""
        self._code += [number, self.rng.randrange(len(self._groups)) + 1, *operands]
        if value is None:
            return 0
        made = next(self._ids)
        self._code.append(made)
        self.values[made] = value
        return made

    def upload(self, array: np.ndarray, host: bool = False) -> int:
        """Upload an array. host: the array stays here until the server requests it."""
        if host:
            made = self.op(UPLOAD, -1, value=array)
            self._code[-2] = self.session.keep(made, array)
            return made
        self._frames.append(array.tobytes())
        return self.op(UPLOAD, len(self._frames) - 1, value=array)

    def random_ops(self, count: int) -> None:
        rng, values = self.rng, self.values
        for _ in range(count):
            kind = rng.choice((UPLOAD, UPLOAD, ADD, NEG, MUL, ADD_INTO)) if len(values) > 2 else UPLOAD
            a, b = (rng.choice(list(values)), rng.choice(list(values))) if values else (0, 0)
            if kind == UPLOAD:
                array = np.float32(rng.randrange(100)) + np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
                self.upload(array, host=rng.random() < 0.3)
            elif kind == ADD:
                self.op(ADD, a, b, value=values[a] + values[b])
            elif kind == NEG:
                self.op(NEG, a, value=-values[a])
            elif kind == MUL:
                self.op(MUL, a, 0.5, value=values[a] * np.float32(0.5))
            else:
                values[a] = values[a] + values[b]
                self.op(ADD_INTO, a, b)
        if len(values) > 30:
            self.free(rng.sample(sorted(values), 20))

    def free(self, ids: list[int]) -> None:
        self._code += [FREE, len(ids), *ids]
        for i in ids:
            del self.values[i]

    def param(self, tensor: int) -> None:
        self._code += [PARAM, tensor]

    def flush(self) -> None:
        code, frames, self._code, self._frames = self._code, self._frames, [], []
        if code:
            self.session.wait_credit()
            self.session.submit(self._templates, self._origins, code, frames)
            self._templates, self._origins = [], []

    def fetch(self, tensor: int) -> np.ndarray:
        self.flush()
        shape, dtype, data = self.session.fetch(tensor)
        return data.view(dtype).reshape(shape)

    def check(self, count: int = 1) -> None:
        """Fetch some tensors and compare them with their expected values."""
        self.flush()
        for tensor in self.rng.sample(sorted(self.values), min(count, len(self.values))):
            found = self.fetch(tensor)
            np.testing.assert_array_equal(found, self.values[tensor], f"%{tensor} is not this program's")
            self.checked += 1
