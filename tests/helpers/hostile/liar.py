"""What hostile peers say: plausible first and mutated then, from one seed."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from gt.dispatcher.state.emitter import BASE_BITS
from gt.ir.instr import COMPILED_LATER, DISCARD, DROP, END_FRAGMENT, FRAGMENT, FREE, GRAD, LAUNCH, PARAM, RECORD, SHARDED, STATE
from gt.wire import arena
from gt.wire.link import hello
from gt.wire.messages import (
    CODES,
    ArenaOpened,
    CloseArenas,
    Describe,
    Described,
    Done,
    Fetch,
    FinishCapture,
    Hello,
    Inspect,
    InspectFragments,
    Interrupt,
    LinkFailed,
    LinkMade,
    Message,
    Metrics,
    Observe,
    OfferArena,
    OfferFile,
    OpError,
    Ops,
    Paused,
    Piece,
    Query,
    Records,
    Report,
    Run,
    Skip,
    Stats,
    Store,
    TensorRoles,
    Trace,
    TraceRows,
    UploadChunk,
    UploadProgress,
    UploadRequest,
    Value,
    WindowUpdate,
    World,
)

if TYPE_CHECKING:
    from tests.helpers.hostile.field import Field

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
    "gt: {data_parallel: [0, 1], zero: 3}\ns: {workers: [0]}\n",
    "gt: {data_parallel: null, zero: 2, precision: bf16}\n",
    "gt: {data_parallel: null, zero: 1, offload: {optimizer: cpu}}\na: {workers: [1]}\n",
    "gt: {data_parallel: null, zero: 3, offload: {params: cpu, optimizer: cpu}}\na: {workers: [0]}\nb: {workers: [1]}\n",
    "a: {workers: [0, 99999999]}\n",
    "a: [&x [*x]]",
    "a: " + "[" * 2000,
    "a: {workers: [0, 0]}",
    "\x00",
]
PLAUSIBLE = 9  # configs that a server takes
GROUPS = ["", "a", "b", "d", "s", "s_colpar", "s_rowpar", "s/s_colpar", "a_to_b", "s#3/s_colpar#3", "nothing", "/" * 20]
NONCE, HOME, SHARED_BYTES = "0" * 32, "here", 1 << 21


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
    row("aten._foreach_add_.List", [[T0, T1], [T2, {"t": 3}]], [F44] * 4, [], 0, (0, 1)),
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
        self.shared: dict[int, bool | None] = {}  # arenas (None) and files, and whether these are written
        self.drawn: set[str] = set()  # control codes of the last batch
        self.recording, self.lent = False, 0

    def hello(self) -> Hello:
        rng = self.rng
        if self.role == "worker":
            info = {"name": rng.choice(["", "", "", "w0", "evil"]), "pid": 1, "host": "h", "backend": "torch", "heap_fd": 3}
            message = hello("worker", info={**info, "heap_bytes": rng.choice([0, 1 << 30]), "doorbell": "3-1", "home": HOME})
        elif self.role == "observer":
            message = hello("observer")
        else:
            switches = {"threads": rng.choice([1, 2]), "workers": rng.choice([0, 2]), "matmul_precision": "highest"}
            config = rng.choice(CONFIGS[:PLAUSIBLE] if rng.random() < 0.9 else CONFIGS)
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
        fit = [i for i, said in self.ids[-60:] if said == wanted] if rng.random() < 0.99 else []
        if self.ids and rng.random() < 0.999:
            return rng.choice(fit or [i for i, _ in self.ids])
        return rng.choice([*range(1, 12), *[w for w in WILD if isinstance(w, (int, float))], 1 + (1 << BASE_BITS)])

    def ops(self) -> tuple[Ops, tuple]:
        rng, templates, origins, code, frames = self.rng, [], [], [], []
        self.drawn, before = set(), list(self.ids)
        if self.batch == 0 or rng.random() < 0.1:
            groups = [*GROUPS, *(["/" * 50] if rng.random() < 0.02 else [])]
            origins = [[n, "evil.py", n, group, n % 2 == 0, rng.choice([-1, -1, 0, 1])] for n, group in enumerate(groups, 1)]
        for _ in range(rng.randrange(1, 6)):
            form = rng.choice(self.fitting())
            if rng.random() < 0.03:
                form = mutated(rng, form)
            number = self.numbers
            self.numbers += 1
            templates.append([number, form])
            for _ in range(rng.randrange(1, 4)):
                code += self.op(number, form, frames)
        if rng.random() < 0.3:
            freed = self.leave(rng.randrange(4))
            code += self.note("FREE", FREE, rng.choice([len(freed)] * 20 + [1 << 40, -3]), *freed)
        if rng.random() < 0.2:
            name, number, ids = rng.choice(
                (("PARAM", PARAM, 1), ("SHARDED", SHARDED, 1), ("STATE", STATE, 1), ("GRAD", GRAD, 2))
            )
            code += self.note(name, number, *(self.id() for _ in range(ids)))
        code = self.recorded(code, [number for number, said in before[-3:] if (number, said) in self.ids])
        if rng.random() < 0.02:
            code = [c for c in mutated(rng, code) if isinstance(c, (int, float))] if code else code
        seq = self.batch if rng.random() < 0.99 else rng.choice([0, self.batch + 1, 1 << 62])
        self.batch += 1
        fetch = [rng.randrange(1 << 30), self.as_int(self.id()), -1] if rng.random() < 0.3 else []
        if rng.random() < 0.01:
            fetch = rng.choice([[1], [1, 2, 0.5], [1, 1 << 62, -1], [1, 2, 3, 4]])
        return Ops(seq, templates, origins, code, fetch), tuple(frames)

    def fitting(self) -> list[Any]:
        """Templates whose operands are there."""
        said = {said for _, said in self.ids[-60:]}
        return [form for form in TEMPLATES if all(str(spec) in said for spec in form[3])]

    def leave(self, count: int) -> list[Any]:
        """Ids that the session names no more, mostly."""
        chosen = self.rng.sample(self.ids, min(count, len(self.ids)))
        if self.rng.random() < 0.95:
            self.ids = [one for one in self.ids if one not in chosen]
        return [number for number, _ in chosen]

    def note(self, name: str, *code: Any) -> list:
        """This code, which is drawn in the batch that is made."""
        self.drawn.add(name)
        return list(code)

    def recorded(self, code: list, some: list) -> list:
        """With beginnings, ends and replays of programs about it. some: tensors from before."""
        rng = self.rng
        if code and rng.random() < 0.3:
            freed = self.leave(rng.randrange(3))
            count = rng.choice([len(code)] * 80 + [0, -1, 1 << 40, len(code) - 1])
            backend, seed = rng.choice([0] * 20 + [1, 2] * 5 + [9]), rng.choice([0, 7])
            header = [*self.note("FRAGMENT", FRAGMENT), rng.randrange(3), rng.randrange(2), backend, seed, 0, count]
            ending = [END_FRAGMENT, rng.choice([len(freed)] * 20 + [-1, 1 << 40]), *freed]
            code = [*header, *code, *(ending if rng.random() < 0.97 else [])]
        if rng.random() < 0.15:
            way = rng.randrange(COMPILED_LATER + 1) if rng.random() < 0.95 else rng.choice([-1, COMPILED_LATER + 1, 1 << 62])
            count = rng.choice([len(some)] * 20 + [1 << 40, -1])
            self.recording = True
            code = [*self.note(f"RECORD {way}", RECORD, rng.randrange(4), way, count), *some, *code]
        if rng.random() < 0.1:
            discarded = rng.random() < 0.95
            self.recording = self.recording and not discarded
            code = [*code, *(self.note("DISCARD", DISCARD) if discarded else [RECORD])]
        if rng.random() < (0.2 if self.sealed else 0.01):
            seed = rng.choice([0, 7, 1 << 62]), rng.choice([0, -1, 1 << 60])
            code = [*code, *self.note("LAUNCH", LAUNCH, self.program(), *seed)]
        return [*code, *self.note("DROP", DROP, self.program())] if rng.random() < (0.1 if self.sealed else 0.005) else code

    def program(self) -> Any:
        rng = self.rng
        return rng.choice(self.sealed) if self.sealed and rng.random() < 0.98 else rng.choice([1, -1, 99, 0.5])

    def seal(self) -> FinishCapture:
        rng = self.rng
        number, self.recording = len(self.sealed) + 1, False
        self.sealed.append(number)
        carried = [[self.id(), self.id()] for _ in range(rng.choice([0, 0, 0, 1, 2]))]
        if rng.random() < 0.05:
            carried = mutated(rng, carried) if carried else [[]]
        schedule = rng.choice(["", "", "1f1b", "zb-v", "auto", "no schedule"])
        backend = rng.choice(["eager", "eager", "inductor", "x"])
        numbers = rng.choice([0, 7]), rng.choice([0, 5, -1])
        return FinishCapture(
            rng.randrange(1 << 30), number, schedule, backend, carried, *numbers, rng.choice([0, 1, 2] * 7 + [-1])
        )

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
                frames.append(bytes(64 if rng.random() < 0.98 else 63))
                words += [len(frames) - 1]
            else:
                words += [-2 - self.place() if self.shared and rng.random() < 0.5 else -1]
        else:
            words += [rng.choice([0, 1, 0.5, 3, 1 << 62]) for _ in range(values)]
        made = [self.next_id + n for n in range(outs)]
        self.next_id += outs
        said = [str(o[1]) for o in form[5] if o[0] in ("new", "view")] if outs else []
        self.ids += zip(made, said, strict=True)
        return [number, rng.choice([*range(1, len(GROUPS) + 1), 77 if rng.random() < 0.02 else 1]), *words, *made]

    # ---- memory and files that are shared

    def place(self) -> int:
        """A place of 64 bytes in something that this client lends, mostly."""
        rng = self.rng
        number = rng.choice(list(self.shared)) if self.shared and rng.random() < 0.98 else rng.choice([1, 99, 1 << 20])
        return arena.place(number, rng.choice([4096, 8192, 8192, 12288]))

    def offer(self) -> Message:
        """An arena, or a file that an arena proves."""
        rng, number = self.rng, self.lent + 1 if self.rng.random() < 0.98 else self.rng.choice([0, 1, 1 << 20])
        self.lent += 1
        owners = [n for n, written in self.shared.items() if written is None]
        nbytes = rng.choice([SHARED_BYTES] * 9 + [0, 1 << 62])
        if not owners or rng.random() < 0.4:
            self.shared[number] = None
            return OfferArena(number, 1, 3, nbytes, NONCE, rng.choice([HOME, HOME, "elsewhere", ""]))
        written = self.shared[number] = rng.random() < 0.5
        return OfferFile(
            number, rng.choice(owners), 4, nbytes, written, rng.choice(["../../etc/passwd", "\x1b[2J\n", "a" * 200])
        )

    def store(self, request: int) -> Store:
        rng = self.rng
        files = [n for n, written in self.shared.items() if written]
        if not files or rng.random() < 0.3:
            return Store(request, [], False, rng.choice([*self.shared, 99]))
        rows = [
            [self.as_int(self.id()), arena.place(rng.choice(files), rng.choice([0, 64, 5000]))] for _ in range(rng.randrange(3))
        ]
        return Store(request, rows, rng.random() < 0.5, rng.choice([0, *files]))

    def closing(self) -> CloseArenas:
        """Of some that are open. Some of them are named again afterwards."""
        some = self.rng.sample(list(self.shared), min(len(self.shared), self.rng.choice([0, 1, 1, 2])))
        for number in some if self.rng.random() < 0.9 else ():
            del self.shared[number]
        return CloseArenas(some)

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
        if self.recording and rng.random() < 0.2:
            return self.seal(), ()
        if dice < 0.7:
            return self.ops()
        request = rng.choice([rng.randrange(1 << 30), 1, -1])
        kinds: list[Message] = [
            Fetch(request, self.as_int(self.id()), self.place() if self.shared and rng.random() < 0.5 else -1),
            Describe(request, [self.id() for _ in range(rng.randrange(3))]), Inspect(request, self.as_int(self.id())),
            *([self.seal()] if rng.random() < 0.1 else []), Stats(request), Stats(request, -1, True), self.metrics(),
            self.roles(), Trace(request, rng.random() < 0.6), Interrupt(rng.choice([self.batch, self.batch - 1, -1, 1 << 62])),
            self.store(request), self.closing(), InspectFragments(request, rng.choice([0, 1, 2, -1])), self.progress(),
        ]  # fmt: skip
        if rng.random() < 0.2:
            return self.offer(), ()
        if dice > 0.995:
            return self.anything()
        if dice > 0.99:
            return UploadChunk(rng.randrange(100), 0, 10 << 30), ()
        return rng.choice(kinds), ()

    def progress(self) -> UploadProgress:
        """It has received bytes of a value."""
        keys = [row[0] for m in self.heard if isinstance(m, Value) for row in m.pieces]
        return UploadProgress(self.rng.choice([*keys[-1:], *keys[-1:], 3]), self.rng.choice([64, 0, 1 << 62]))

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
            (Done(runs[-1] if runs else 0), ()),
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
            *self.of_links(),
        ]
        return rng.choice(said) if rng.random() < 0.98 else self.anything()

    def of_links(self) -> list[tuple[Message, tuple]]:
        """What a worker says of shared memory, of interrupts and of other workers."""
        rng = self.rng
        offers = [m.arena for m in self.heard if isinstance(m, (OfferArena, OfferFile))]
        skips = [m.session for m in self.heard if isinstance(m, Skip) and m.on and m.since < 0]
        worlds = [row for m in self.heard if isinstance(m, World) for row in m.ways]
        way = rng.choice([*worlds[-1:], [0, 1, 0]])
        link = LinkFailed(way[rng.randrange(2)], way[2], rng.choice(["1.2.3.4", "x" * 300]), "1.2.3.5", "\x1b[2J")
        return [
            (ArenaOpened(rng.choice([*offers[-1:], 3]), rng.random() < 0.5), ()),
            (Paused(rng.choice([*skips[-1:], 1]), rng.choice([-1, 5, 1 << 62])), ()),
            (link, ()),
            (LinkMade(way[rng.randrange(2)], rng.choice([0, way[2], 1 << 62]), "1.2.3.4", "1.2.3.5"), ()),
        ]

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
