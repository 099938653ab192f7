"""A dispatcher's core among hostile clients and workers, beside one honest program whose every value is compared.

No sockets. The honest workers parse all that they are told (half a batch would not parse) and execute what is of the
honest session. What hostile peers say is plausible first and mutated then, from one seed.
"""

from __future__ import annotations

import copy
import math
import random
import struct
import time
from dataclasses import fields
from typing import Any

from gt.dispatcher.core import Core
from gt.dispatcher.events import Close, Malformed, PeerLost, Received, Send, Tick
from gt.dispatcher.state.emitter import BASE_BITS
from gt.errors import ProtocolError
from gt.ir.instr import DISCARD, DROP, END, END_FRAGMENT, FORGET, FRAGMENT, FREE, LAUNCH, RECORD, Define
from gt.wire import codec
from gt.wire.link import hello
from gt.wire.messages import (
    CODES,
    Ack,
    Data,
    Describe,
    Described,
    Done,
    Exit,
    Failed,
    Fetch,
    FinishCapture,
    Goodbye,
    Hello,
    Inspect,
    Interrupt,
    Message,
    Metrics,
    Observe,
    OpError,
    Ops,
    Piece,
    Query,
    Records,
    Reject,
    Report,
    Run,
    Stats,
    TensorRoles,
    Trace,
    TraceRows,
    UploadChunk,
    UploadProgress,
    UploadRequest,
    Value,
    WindowUpdate,
)

WILD: list[Any] = [
    -1, 0, 1, 2, 3, 7, 15, 16, 17, 255, 1 << 20, 10 << 30, 1 << 31, 1 << 39, 1 << 40, 1 << 62, (1 << 63) - 1, (1 << 64) - 1,
    -(1 << 63), 0.5, -1.5, float("inf"), float("nan"), True, False, None, "", "x", "float32", "new", "view", "aten.mm.default",
    "../../etc/passwd", "\x00", "a/b/c", "g#999999999", "é" * 300, [], {}, [0], [[0, 1]], [[[0, 2], [0, 2]]], {"t": 0},
    {"v": -1},
]  # fmt: skip
CONFIGS = [
    "",
    "a: {shard: {axis: 0, workers: [0]}}\nb: {shard: {axis: 0, workers: [1]}}\n",
    "d: {shard: {axis: 0, workers: [0, 1]}}\n",
    "s: {workers: [0, 1]}\ns_colpar: {shard: {axis: 1, workers: [0, 1]}}\ns_rowpar: {shard: {axis: 0, workers: [0, 1]}}\n",
    "s_colpar: {shard: {axis: 1, workers: [1, 0]}}\nt: {workers: [0], backward: s_colpar}\n",
    "a: {workers: [0, 99999999]}\n",
    "a: [&x [*x]]",
    "a: " + "[" * 2000,
    "a: {workers: [0, 0]}",
    "\x00",
]
GROUPS = ["", "a", "b", "d", "s", "s_colpar", "s_rowpar", "s/s_colpar", "a_to_b", "s#3/s_colpar#3", "nothing", "/" * 50]


def spec(*shape: int, dtype: str = "float32") -> list:
    stride, step = [], 1
    for n in reversed(shape):
        stride.insert(0, step)
        step *= max(n, 1)
    return [list(shape), stride, 0, dtype]


def row(op: str, args: list, ins: list, outs: list, values: int = 0, writes: tuple = (), **kwargs: Any) -> list:
    made = [["new", out, -1] if isinstance(out, list) else out for out in outs]
    return [op, args, kwargs, ins, values, [list(o) for o in made], list(writes), False, op.startswith("aten.add")]


T0, T1, T2 = {"t": 0}, {"t": 1}, {"t": 2}
F44, F4, HEADS = spec(4, 4), spec(4), spec(1, 2, 4, 4)
TEMPLATES = [
    row("gt.upload.default", [], [], [F44], 1),
    row("aten.zeros.default", [[4, 4]], [], [F44]),
    row("aten.zeros.default", [[1 << 40, 1 << 20]], [], [spec(1 << 40, 1 << 20)]),
    row("aten.neg.default", [T0], [F44], [F44]),
    row("aten.add.Tensor", [T0, T1], [F44, F44], [F44]),
    row("aten.mul.Tensor", [T0, {"v": 0}], [F44], [F44], 1),
    row("aten.mm.default", [T0, T1], [F44, F44], [F44]),
    row("aten.addmm.default", [T0, T1, T2], [F4, F44, F44], [F44]),
    row("aten.t.default", [T0], [F44], [("view", F44, 0)]),
    row("aten.view.default", [T0, [16]], [F44], [("view", spec(16), 0)]),
    row("aten.split.Tensor", [T0, 2, 1], [F44], [("view", spec(4, 2), 0)] * 2),
    row("aten.slice.Tensor", [T0, 0, 1, 3], [F44], [("view", spec(2, 4), 0)]),
    row("aten.expand.default", [T0, [1 << 40, 4]], [F4], [("view", spec(1 << 40, 4), 0)]),
    row("aten.add_.Tensor", [T0, T1], [F44, F44], [("same", None, 0)], 0, (0,)),
    row("aten.fill_.Scalar", [T0, {"v": 0}], [F44], [("same", None, 0)], 1, (0,)),
    row("aten.uniform_.default", [T0, 0.0, 1.0], [F44], [("same", None, 0)], 2, (0,)),
    row("aten.sum.dim_IntList", [T0, [0]], [F44], [F4]),
    row("aten._softmax.default", [T0, 1, False], [F44], [F44]),
    row("aten.cat.default", [[T0, T1]], [F44, F44], [spec(8, 4)]),
    row("aten._foreach_add_.List", [[T0, T1], [T2, {"t": 3}]], [F44] * 4, [("same", None, 0), ("same", None, 1)], 0, (0, 1)),
    row("aten._foreach_norm.Scalar", [[T0, T1]], [F44, F44], [spec(), spec()]),
    row("aten.embedding.default", [T0, T1], [F44, spec(3, dtype="int64")], [spec(3, 4)]),
    row("aten.nll_loss_forward.default", [T0, T1, None, 1, -100], [F44, spec(4, dtype="int64")], [spec(), spec()]),
    row("gt.sdpa.default", [T0, T1, T2, None, 0.0, True, None, False], [HEADS] * 3, [HEADS, spec(1, 2, 4)], 2),
    row(
        "gt.rnn.default", [T0, [T1], [T2, {"t": 3}], "gru", False, 1, True, False, [], [True] * 4, True],
        [spec(3, 2, 4), spec(1, 2, 4), spec(12, 4), spec(12, 4)], [spec(3, 2, 4), spec(1, 2, 4), spec(0)],
    ),
    row("aten.view.default", [T0, [1, 2, 4, 4]], [spec(8, 4)], [("view", HEADS, 0)]),
    row("gt.move.default", [T0], [F44], [F44]),
    [*row("aten.nonzero.default", [T0], [F44], [("new", None, -1)])[:7], True, False],
]  # fmt: skip


def mutated(rng: random.Random, form: Any, depth: int = 0) -> Any:
    """A copy with one node replaced, dropped, doubled or moved."""
    if not isinstance(form, (list, dict)) or not form or (depth and rng.random() < 0.2):
        return copy.deepcopy(rng.choice(WILD))
    if isinstance(form, dict):
        key = rng.choice(list(form))
        made = dict(form)
        value = made.pop(key)
        made[key if rng.random() < 0.8 else str(rng.choice(WILD))] = mutated(rng, value, depth + 1)
        return made
    made, at = list(form), rng.randrange(len(form))
    how = rng.random()
    if how < 0.75:
        made[at] = mutated(rng, made[at], depth + 1)
    elif how < 0.85:
        del made[at]
    elif how < 0.95:
        made.insert(at, copy.deepcopy(made[at]))
    else:
        made += copy.deepcopy(made) * rng.choice((1, 3))
    return made


class Liar:
    """A hostile client or worker: says what is plausible, then something that is not."""

    def __init__(self, field: Field, peer: bytes, role: str) -> None:
        self.field, self.rng, self.peer, self.role = field, field.rng, peer, role
        self.heard: list[Message] = []
        self.batch = 0
        self.numbers = 16
        self.ids: list[tuple[int, str]] = []  # and what each is said to be
        self.next_id = 1
        self.sealed: list[int] = []

    def hello(self) -> Hello:
        rng = self.rng
        if self.role == "worker":
            info = {"name": rng.choice(["", "w0", "evil"]), "pid": 1, "host": "h", "backend": "torch", "heap_fd": 3}
            message = hello("worker", info={**info, "heap_bytes": rng.choice([0, 1 << 30]), "doorbell": "3-1"})
        elif self.role == "observer":
            message = hello("observer")
        else:
            switches = {"threads": rng.choice([1, 2]), "workers": rng.choice([0, 2]), "matmul_precision": "highest"}
            config = rng.choice(CONFIGS[:5] if rng.random() < 0.9 else CONFIGS)
            message = hello("client", config=config, config_path="e.yaml", switches=switches)
        return self.changed(message) if rng.random() < 0.1 else message

    def changed(self, message: Any) -> Any:
        """The message with one field replaced by something of the field's type, mostly."""
        names = [f.name for f in fields(message)]
        if not names:
            return message
        name = self.rng.choice(names)
        value = getattr(message, name)
        new = mutated(self.rng, value) if isinstance(value, (list, dict)) else self.rng.choice(WILD)
        if type(new) is not type(value) and self.rng.random() < 0.9:
            new = self.rng.choice([w for w in WILD if type(w) is type(value)] or [value])
        return type(message)(**{**{n: getattr(message, n) for n in names}, name: new})

    def say(self) -> tuple[Message, tuple]:
        message, frames = {"client": self.as_client, "worker": self.as_worker, "observer": self.as_observer}[self.role]()
        if self.rng.random() < 0.06:
            message = self.changed(message)
        if self.rng.random() < 0.02:
            frames = (*frames, bytes(self.rng.choice((0, 1, 64, 70_000))))
        return message, frames

    def id(self, wanted: str = "") -> Any:
        """A tensor, of this spec if there is one."""
        rng = self.rng
        fit = [i for i, said in self.ids[-60:] if said == wanted] if rng.random() < 0.95 else []
        if self.ids and rng.random() < 0.995:
            return rng.choice(fit or [i for i, _ in self.ids])
        return rng.choice([*range(1, 12), *[w for w in WILD if isinstance(w, (int, float))], 1 + (1 << BASE_BITS)])

    def ops(self) -> tuple[Ops, tuple]:
        rng, templates, origins, code, frames = self.rng, [], [], [], []
        if self.batch == 0 or rng.random() < 0.1:
            origins = [[n, "evil.py", n, group, n % 2 == 0, -1] for n, group in enumerate(GROUPS, 1)]
        for _ in range(rng.randrange(1, 6)):
            form = rng.choice(TEMPLATES if self.ids else TEMPLATES[:2])
            if rng.random() < 0.08:
                form = mutated(rng, form)
            number = self.numbers
            self.numbers += 1
            templates.append([number, form])
            for _ in range(rng.randrange(1, 4)):
                code += self.op(number, form, frames)
        if rng.random() < 0.3:
            freed = [self.id() for _ in range(rng.randrange(4))]
            code += [FREE, rng.choice([len(freed)] * 20 + [1 << 40, -3]), *freed]
        if rng.random() < 0.1:
            code += [1, self.id()]
        code = self.recorded(code)
        if rng.random() < 0.05:
            code = [c for c in mutated(rng, code) if isinstance(c, (int, float))] if code else code
        seq = self.batch if rng.random() < 0.97 else rng.choice([0, self.batch + 1, 1 << 62])
        self.batch += 1
        fetch = [rng.randrange(1 << 30), self.as_int(self.id()), -1] if rng.random() < 0.3 else []
        if rng.random() < 0.02:
            fetch = rng.choice([[1], [1, 2, 0.5], [1, 1 << 62, -1], [1, 2, 3, 4]])
        return Ops(seq, templates, origins, code, fetch), tuple(frames)

    def recorded(self, code: list) -> list:
        """With beginnings, ends and replays of programs about it."""
        rng, some = self.rng, [i for i, _ in self.ids[-3:]]
        if code and rng.random() < 0.3:
            freed = [self.id() for _ in range(rng.randrange(3))]
            count = rng.choice([len(code)] * 20 + [0, -1, 1 << 40, len(code) - 1])
            backend, seed = rng.choice([0] * 20 + [1, 2, 9]), rng.choice([0, 7])
            header = [FRAGMENT, rng.randrange(3), rng.randrange(2), backend, seed, 0, count]
            ending = [END_FRAGMENT, rng.choice([len(freed)] * 20 + [-1, 1 << 40]), *freed]
            code = [*header, *code, *(ending if rng.random() < 0.97 else [])]
        if rng.random() < 0.15:
            code = [RECORD, rng.randrange(4), rng.randrange(3), rng.choice([len(some)] * 20 + [1 << 40, -1]), *some, *code]
        if rng.random() < 0.1:
            code = [*code, rng.choice([DISCARD, RECORD])]
        if rng.random() < 0.2:
            code = [*code, LAUNCH, self.program(), rng.choice([0, 7, 1 << 62]), rng.choice([0, -1, 1 << 60])]
        return [*code, DROP, self.program()] if rng.random() < 0.02 else code

    def program(self) -> Any:
        rng = self.rng
        return rng.choice(self.sealed) if self.sealed and rng.random() < 0.95 else rng.choice([1, -1, 99, 0.5])

    def seal(self) -> FinishCapture:
        rng = self.rng
        number = len(self.sealed) + 1
        self.sealed.append(number)
        carried = [[self.id(), self.id()] for _ in range(rng.choice([0, 0, 0, 1, 2]))]
        if rng.random() < 0.05:
            carried = mutated(rng, carried) if carried else [[]]
        schedule = rng.choice(["", "", "1f1b", "zb-v", "auto", "no schedule"])
        backend = rng.choice(["eager", "eager", "inductor", "x"])
        numbers = rng.choice([0, 7]), rng.choice([0, 5, -1])
        return FinishCapture(rng.randrange(1 << 30), number, schedule, backend, carried, *numbers, rng.random() < 0.5)

    def op(self, number: int, form: Any, frames: list) -> list:
        rng = self.rng
        try:
            ins, values, outs = len(form[3]), form[4], sum(o[0] in ("new", "view") for o in form[5])
            wanted = [str(form[3][n]) for n in range(ins)]
            values = values if isinstance(values, int) and 0 <= values < 9 else 1
        except (TypeError, IndexError, KeyError):
            return [number, 0, self.id()]
        words: list = [self.id(one) for one in wanted]
        if form and form[0] == "gt.upload.default":
            if rng.random() < 0.6:
                frames.append(bytes(64 if rng.random() < 0.9 else 63))
                words += [len(frames) - 1]
            else:
                words += [-1]
        else:
            words += [rng.choice([0, 1, 0.5, 3, 1 << 62]) for _ in range(values)]
        made = [self.next_id + n for n in range(outs)]
        self.next_id += outs
        said = [str(o[1]) for o in form[5] if o[0] in ("new", "view")] if outs else []
        self.ids += zip(made, said, strict=True)
        return [number, rng.choice([0, *range(1, len(GROUPS) + 1), 77 if rng.random() < 0.02 else 1]), *words, *made]

    def as_client(self) -> tuple[Message, tuple]:
        rng = self.rng
        need = next((m for m in reversed(self.heard) if isinstance(m, (UploadRequest, WindowUpdate))), None)
        dice = rng.random()
        if need is not None and dice < 0.4:
            total = rng.choice([64, 32, 16, need.upto, 10 << 30, 1 << 62])
            if rng.random() < 0.8:
                total = (
                    64 if isinstance(need, WindowUpdate) else 4 * math.prod(b - a for a, b in need.boxes[0]) * len(need.boxes)
                )
            size = min(total, need.upto, 1 << 20) if rng.random() < 0.9 else 32
            return UploadChunk(need.key, 0 if rng.random() < 0.95 else 32, total), (bytes(size),) if size else ()
        if dice < 0.75:
            return self.ops()
        request = rng.choice([rng.randrange(1 << 30), 1, -1])
        kinds: list[Message] = [
            Fetch(request, self.as_int(self.id())), Describe(request, [self.id() for _ in range(rng.randrange(3))]),
            Inspect(request, self.as_int(self.id())), Stats(request), UploadChunk(rng.randrange(100), 0, 10 << 30), self.seal(),
            self.metrics(), self.roles(), Trace(request, rng.random() < 0.6), Stats(request, -1, True),
            Interrupt(rng.choice([self.batch, self.batch - 1, -1, 1 << 62])),
        ]  # fmt: skip
        if dice > 0.98:
            return self.anything()
        return rng.choice(kinds), ()

    def trace_rows(self, request: int) -> TraceRows:
        rng = self.rng
        numbers = [[], [1, 2, 3.0, 4.0], [float("nan")] * 4, [1 << 62]]
        names = rng.choice([[], [[1, "op", "x", 1, []]], [3], [["origin"]], [["op", 1, 2, 3, 4]]])
        clock = rng.choice([0.0, float("nan"), float("inf"), -1e300])
        streams = rng.choice([[], ["compute"], [3], [["x"]], ["compute"] * 100])
        parts = rng.choice(numbers), rng.choice(numbers), streams, rng.choice(numbers), names
        return TraceRows(
            request, rng.choice([0, -1, 1 << 40]), *parts, clock, rng.choice([0, -1]), rng.choice([0, 1, -1, 1 << 62])
        )

    def metrics(self) -> Metrics:
        return Metrics(self.rng.choice([1, 7, -1, 1 << 63]), {"loss": self.rng.choice([0.5, 1, float("nan"), "x", True])})

    def roles(self) -> TensorRoles:
        kinds, names = ("weights", "optimizer", "gradients", "other"), ("", "a.b", "n" * 300, "<b>", "\u202e", 7)
        rows = [[self.id(), self.rng.choice(kinds[:3]), self.rng.choice(names[:2])] for _ in range(self.rng.randrange(4))]
        return TensorRoles(
            rows if self.rng.random() < 0.9 else [*rows, [self.id(), self.rng.choice(kinds), self.rng.choice(names)]]
        )

    @staticmethod
    def as_int(value: Any) -> int:
        return value if type(value) is int else 0

    def as_worker(self) -> tuple[Message, tuple]:
        rng = self.rng
        runs = [m.seq for m in self.heard if isinstance(m, Run)]
        keys = [rng.randrange(200), self.field.last_key()]
        queries = [m.request for m in self.heard if isinstance(m, Query)]
        traces = [m.request for m in self.heard if isinstance(m, Trace)]
        said: list[tuple[Message, tuple]] = [
            (Done(runs[-1] if runs else rng.randrange(5)), ()),
            (Piece(rng.choice(keys), 0, rng.choice([64, 16, 10 << 30])), (bytes(64),)),
            (Piece(rng.choice(keys), 0, 0), ()),
            (Done(runs[-1] if runs else 0, [], [rng.choice(keys)]), (bytes(rng.choice([64, 16])),)),
            (Described(rng.choice(keys), [rng.choice([spec(3), "x", [], spec(1 << 40, 1 << 40)])]), ()),
            (
                OpError(
                    rng.randrange(self.field.core.cluster.seq + 2),
                    rng.choice(["op", "peer", "unsupported", "interrupted", "?"]),
                    "lie",
                ),
                (),
            ),
            (UploadProgress(rng.choice(keys), rng.choice([0, 64, 1 << 62])), ()),
            (Report(rng.choice([*queries[-1:], 3]), {"stats": rng.choice([{}, 3, {"name": []}]), "at": rng.choice(WILD)}), ()),
            (
                Report(
                    rng.choice([*queries[-1:], 3]), {"stats": {"holders": rng.choice([[], [[1, 2]], [[1]], 3, [["x", 2]]])}}
                ),
                (),
            ),
            (self.trace_rows(rng.choice([*traces[-1:], 3])), ()),
        ]
        return rng.choice(said) if rng.random() < 0.98 else self.anything()

    def as_observer(self) -> tuple[Message, tuple]:
        rng = self.rng
        seen = max([m.number for m in self.heard if isinstance(m, Records)], default=0)
        if rng.random() < 0.1:
            return self.anything()
        return Observe(seen if rng.random() < 0.95 else rng.choice([-1, 1 << 62]), rng.choice([0, 500, -1, 1 << 62])), ()

    def anything(self) -> tuple[Message, tuple]:
        """Any message of the protocol, whoever may send it."""
        cls = self.rng.choice(CODES)
        makers = {"int": int, "str": str, "bool": bool, "float": float, "list": list, "Numbers": list, "dict": dict}
        values = []
        for f in fields(cls):
            kind = makers[str(f.type)]
            values.append(copy.deepcopy(self.rng.choice([w for w in WILD if type(w) is kind] or [kind()])))
        return cls(*values), ()


class HonestWorker:
    """Parses everything, executes what belongs to the honest session, answers Done to all."""

    def __init__(self, field: Field, peer: bytes) -> None:
        self.field, self.peer = field, peer
        self.defines: dict[int, Define] = {}
        self.tensors: dict[int, list[float]] = {}
        self.data: dict[int, bytes] = {}

    def receive(self, message: Message, frames: tuple) -> list[tuple[Message, tuple]]:
        if isinstance(message, Data):
            if message.total < 0:
                self.data.pop(message.key, None)
            else:
                assert message.offset + sum(map(len, frames)) <= message.total <= 1 << 20, f"{message} reached a worker"
                self.data[message.key] = self.data.get(message.key, b"") + b"".join(map(bytes, frames))
        elif isinstance(message, Query):
            return [(Report(message.request, {"stats": {"live": len(self.tensors)}, "at": None}), ())]
        elif isinstance(message, Trace):
            return [(TraceRows(message.request, 0, [], [], [], [], [], 0.0, 0, 0), ())]
        elif isinstance(message, Run):
            return [*self.run(message), (Done(message.seq), ())]
        return []

    def run(self, message: Run) -> list[tuple[Message, tuple]]:
        for wire in message.defines:
            self.defines[wire[0]] = Define.from_wire(wire)
        code, at, answers = message.code, 0, []
        while at < len(code):
            if code[at] == END:
                end = at + 5
                for number in [i for i in self.tensors if code[at + 3] <= i < code[at + 4]]:
                    del self.tensors[number]
            elif code[at] in (FREE, FORGET):
                end = at + 3 + code[at + 2]
                table = self.tensors if code[at] == FREE else self.defines
                for number in code[at + 3 : end]:
                    table.pop(number, None)
            else:
                define = self.defines[code[at]]
                end = at + 2 + define.operands
                answers += self.step(define, code[at + 2 : end])
            at = end
        assert at == len(code), "half an instruction"
        return answers

    def step(self, define: Define, operands: list) -> list[tuple[Message, tuple]]:
        kind, held = define.kind, self.tensors
        if kind == "upload":
            self.data.setdefault(operands[1], b"")  # all of it came before this
            raw = self.data.pop(operands[1])
            if self.honest(operands[0]):
                held[operands[0]] = list(struct.unpack(f"{len(raw) // 4}f", raw))
        elif kind == "fetch" and self.honest(operands[0]):
            raw = struct.pack(f"{len(held[operands[0]])}f", *held[operands[0]])
            return [(Piece(operands[1], 0, len(raw)), (raw,))]
        elif kind == "fetch":
            return [(Piece(operands[1], 0, 64), (bytes(64),))]
        elif kind == "describe":
            return [(Described(operands[1], [spec(2, 2)]), ())]
        elif kind == "op" and define.payload["tensors"] and self.honest(operands[0]):
            name, ins = define.payload["op"], [held[i] for i in operands[: define.payload["tensors"]]]
            out = {
                "aten.add.Tensor": lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
                "aten.neg.default": lambda a: [-x for x in a],
            }[name](*ins)
            held[operands[-1]] = out
        return []

    def honest(self, tensor: int) -> bool:
        return tensor >> BASE_BITS == self.field.honest_number


class Field:
    """The core, two honest workers, the honest program, and liars that come and go."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.core = Core(heartbeat=10.0)
        self.workers = {peer: HonestWorker(self, peer) for peer in (b"w0", b"w1")}
        self.liars: dict[bytes, Liar] = {}
        self.answers: list[tuple[Message, tuple]] = []
        self.honest_number = -1
        self.cases = self.refused = self.internal = self.peers = 0
        self.now = self.slowest = 0.0
        self.slowest_message = ""
        self.values: dict[int, list[float]] = {}
        self.batch = self.next_id = self.request = 0
        for n, peer in enumerate(self.workers):
            info = {"name": f"w{n}", "pid": 1, "host": "h", "heap_bytes": 1 << 30, "backend": "torch"}
            self.feed(Received(peer, hello("worker", info=info)))
        self.feed(Received(b"first", hello("client")))  # so that the honest session's ids have a base
        self.feed(Received(b"honest", hello("client", config=CONFIGS[1], config_path="h.yaml", switches={"workers": 2})))
        self.feed(PeerLost(b"first", "gone"))
        self.honest_number = self.core.sessions[b"honest"].number

    def last_key(self) -> int:
        return self.core.cluster.next_key - self.rng.randrange(3)

    # ---- events

    def feed(self, event: Any) -> None:
        """Feed one event, then every answer of honest peers to the messages that follow."""
        pending = [event]
        while pending:
            one = pending.pop(0)
            start = time.thread_time()
            actions = self.core.handle(one)
            took = time.thread_time() - start
            if took > self.slowest:
                self.slowest, self.slowest_message = took, f"{getattr(one, 'message', one)!r:.300}"
            self.core.check()
            for action in actions:
                pending += self.carry_out(action)

    def carry_out(self, action: Any) -> list:
        if isinstance(action, Close):
            assert action.peer not in self.workers and action.peer != b"honest", "an honest peer was shut out"
            self.liars.pop(action.peer, None)
        if not isinstance(action, Send):
            return []
        codec.pack(action.message)  # fits a body
        if action.peer == b"honest":
            assert not isinstance(action.message, (Failed, Reject, Exit)), f"the honest program was told {action.message}"
            self.answers.append((action.message, action.frames))
        elif action.peer in self.workers:
            said = self.workers[action.peer].receive(action.message, action.frames)
            return [Received(action.peer, message, frames, self.now) for message, frames in said]
        elif (liar := self.liars.get(action.peer)) is not None:
            liar.heard = [*liar.heard[-20:], action.message]
            if isinstance(action.message, (Failed, Reject)):
                self.refused += 1
                self.internal += "internal error" in action.message.error["message"]
        return []

    # ---- the honest program

    def honest_step(self) -> None:
        """Some ops on both workers, and the comparison of one value."""
        rng, templates, code = self.rng, [], []
        if self.batch == 0:
            templates = [[16, TEMPLATES[0]], [17, TEMPLATES[4]], [18, TEMPLATES[3]]]
        origins = [[1, "h.py", 1, "a", False, -1], [2, "h.py", 2, "b", False, -1]] if self.batch == 0 else []
        frames = []
        for group in (1, 2):
            numbers = [float(rng.randrange(100)) for _ in range(16)]
            frames.append(struct.pack("16f", *numbers))
            upload, total, out = self.next_id + 1, self.next_id + 2, self.next_id + 3
            self.next_id += 3
            code += [16, group, len(frames) - 1, upload, 17, group, upload, upload, total, 18, group, total, out]
            self.values[out] = [-2 * x for x in numbers]
        out = rng.choice(list(self.values))
        self.request += 1
        fetch = [self.request, out, -1] if rng.random() < 0.5 else []
        self.answers.clear()
        self.feed(Received(b"honest", Ops(self.batch, templates, origins, code, fetch), tuple(frames), self.now))
        self.batch += 1
        if not fetch:
            self.feed(Received(b"honest", Fetch(self.request, out), (), self.now))
        assert any(isinstance(m, Value) for m, _ in self.answers), self.answers
        raw = b"".join(bytes(f) for m, frames in self.answers if isinstance(m, (Piece, Value)) for f in frames)
        assert list(struct.unpack("16f", raw)) == self.values[out]
        if len(self.values) > 20:
            gone = list(self.values)[:-4]
            ids = [i for out in gone for i in (out - 2, out - 1, out)]
            self.feed(Received(b"honest", Ops(self.batch, [], [], [FREE, len(ids), *ids]), (), self.now))
            self.batch += 1
            for out in gone:
                del self.values[out]

    # ---- the hostile ones

    def hostile_step(self) -> None:
        """One thing that a hostile peer says or does."""
        rng = self.rng
        self.cases += 1
        self.now += rng.random() * 0.01
        if (len(self.liars) < 6 and rng.random() < 0.5) or not self.liars:
            self.peers += 1
            role = rng.choices(["client", "worker", "observer"], [80, 15, 5])[0]
            liar = Liar(self, b"evil%d" % self.peers, role)
            self.liars[liar.peer] = liar
            self.give(liar.peer, liar.hello(), ())
            return
        peer = rng.choice(list(self.liars))
        dice = rng.random()
        if dice < 0.005:
            self.liars.pop(peer)
            self.feed(PeerLost(peer, "gone", self.now))
        elif dice < 0.01:
            self.feed(Malformed(peer, "not msgpack", self.now))
        elif dice < 0.02:
            self.now += 0.25
            self.feed(Tick(self.now))
        elif dice < 0.025:
            self.give(peer, Goodbye(), ())
            self.liars.pop(peer, None)
        else:
            self.give(peer, *self.liars[peer].say())

    def give(self, peer: bytes, message: Message, frames: tuple) -> None:
        """A message as it comes through the codec, which refuses some."""
        try:
            message = codec.unpack(codec.pack(message))
        except ProtocolError as error:
            self.refused += 1
            self.feed(Malformed(peer, str(error), self.now))
            return
        self.feed(Received(peer, message, frames, self.now))

    def finish(self) -> None:
        """Everybody hostile leaves: nothing of them is left."""
        for peer in list(self.liars):
            self.liars.pop(peer)
            self.feed(PeerLost(peer, "gone", self.now))
        self.honest_step()
        core = self.core
        assert set(core.sessions) == {b"honest"} and set(core.workers) == set(self.workers)
        assert not core.admission.waiting and not core.watch.surveys
        for worker in self.workers.values():
            assert all(worker.honest(tensor) for tensor in worker.tensors)
            assert not worker.data, f"uploads that nothing takes are left: {list(worker.data)}"
            assert len(worker.defines) < 20, "definitions of sessions that ended are left"
        assert any(isinstance(m, Ack) or (isinstance(m, Value) and m.acked >= 0) for m, _ in self.answers) or self.batch


def rounds(seed: int, cases: int, until: float = float("inf")) -> Field:
    """A field after so many hostile cases, an honest step after every twentieth."""
    field = Field(seed)
    while field.cases < cases and time.monotonic() < until:
        field.hostile_step()
        if field.cases % 20 == 0:
            field.honest_step()
    field.finish()
    return field
