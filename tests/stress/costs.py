"""The costliest messages: what each kind of message can cost the dispatcher's loop, at its limits and a little beyond.

`python -m tests.stress.costs` prints a table of CPU milliseconds: the longest turn of each message, and its number of turns.
A turn is an event with the packing of what is sent for it. CPU time is the loop's own thread's and that of threads that it
waits for, so that other processes on the machine do not count, nor passes beside the loop. A case over the bound is measured
again, and the shortest counts.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gt.dispatcher.cluster.peer_info import MAX_LINKS, MAX_ROUTES
from gt.dispatcher.core import Core
from gt.dispatcher.events import Malformed, PeerLost, Received, Send, Turn, TurnWanted
from gt.dispatcher.fairness.background import Background
from gt.dispatcher.fairness.time_slices import Pace
from gt.dispatcher.programs.fragments.fragment_pattern import MAX_NUMBERS
from gt.dispatcher.programs.fragments.fragment_table import MAX_ALIKE, MAX_FRAGMENTS
from gt.errors import ProtocolError
from gt.ir import check
from gt.ir.instr import DISCARD, DROP, END_FRAGMENT, FRAGMENT, FREE, LAUNCH, PARAM, RECORD
from gt.ir.schema import MAX_LIBRARY_CHARACTERS
from gt.wire import codec
from gt.wire.arena import PAGE_BYTES, place
from gt.wire.link import Gate, hello
from gt.wire.messages import (
    MAX_OTHERS,
    ArenaOpened,
    Describe,
    Described,
    Done,
    Fetch,
    FinishCapture,
    Goodbye,
    Inspect,
    Message,
    OfferArena,
    OfferFile,
    OpError,
    Ops,
    Piece,
    Query,
    Report,
    Run,
    Stats,
    Store,
    TensorRoles,
    UploadChunk,
    UploadProgress,
    UploadRequest,
)
from gt.wire.process_settings import collect_less
from tests.helpers.hostile import row, spec

BOUND = 50.0  # milliseconds
TRIES = 3  # measurements of a case that is over the bound
NAMES = [chr(0x4E00 + i) for i in range(150)]
UPLOAD = row("gt.upload.default", [], [], [spec(4, 4)], 1)
NEG = row("aten.neg.default", [{"t": 0}], [spec(4, 4)], [spec(4, 4)])
VIEW = row("aten.t.default", [{"t": 0}], [spec(4, 4)], [("view", spec(4, 4), 0)])
BOTH = [[1, "f", 1, "a", False, -1], [2, "f", 1, "b", False, -1]]  # origins in its groups
SPLIT = "a: {shard: {axis: 0, workers: [0, 1, 2, 3]}}\nb: {workers: [4, 5, 6, 7]}\n"


class TimedBackground(Background):
    """`held`: CPU seconds of threads that had the baton, while the loop waited for them."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self.held = self._since = 0.0

    def begin(self, call: Callable[[], None]) -> None:
        def timed() -> None:
            self._since = time.thread_time()
            try:
                call()
            finally:
                self.held += time.thread_time() - self._since

        super().begin(timed)

    @contextlib.contextmanager
    def apart(self, over: Callable[[], bool]) -> Iterator[None]:
        if getattr(self._here, "leg", None) is None:  # in the loop's own thread
            yield
            return
        self.held += time.thread_time() - self._since
        try:
            with super().apart(over):
                yield
        finally:
            self._since = time.thread_time()


@dataclass
class Loop:
    """The part of a server between its sockets, with eight workers that answer Done, and one client `c`."""

    config: str = ""
    workers: int = 8
    home: str = ""  # of the workers, which open what the client of this home offers
    core: Core = field(init=False)
    longest: float = 0.0
    count: int = 0
    answering: bool = True  # workers say that they are done
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._call = threading.Event()
        self.background = TimedBackground(self._call.set)
        self.core = Core(pace=Pace(time.monotonic, background=self.background))
        self.gates: dict[bytes, Gate] = {}
        self.batch = 0
        self.needs: list[UploadRequest] = []
        self.answers: list[Message] = []
        for n in range(self.workers):
            self.give(b"w%d" % n, hello("worker", info={"name": f"w{n}", "heap_bytes": 1 << 40, "home": self.home}))
        self.give(b"c", hello("client", config=self.config, switches={"workers": self.workers}))
        self.longest, self.count = 0.0, 0

    def _timed(self, call: Callable[[], list]) -> list:
        self.background.held = 0.0
        start = time.thread_time()
        actions = call()
        for action in actions:
            if isinstance(action, Send):
                codec.pack(action.message)
        self.longest = max(self.longest, time.thread_time() - start + self.background.held)
        self.count += 1
        return actions

    def give(self, peer: bytes, message: Message | bytes, frames: tuple = ()) -> None:
        """A message as it comes: weighed, unpacked, dealt with; then all that follows, each in a turn of its own."""
        body = message if isinstance(message, bytes) else codec.pack(message)
        pending = [self._timed(lambda: self._taken(peer, body, frames))]
        while pending:
            again = False
            for action in pending.pop(0):
                again |= isinstance(action, TurnWanted)
                follows = self._follows(action) if isinstance(action, Send) else None
                if follows is not None:
                    answer = Received(action.peer, follows)
                    pending.append(self._timed(partial(self.core.handle, answer)))
            while (again or self.background._legs) and not pending:
                if not again:
                    self._call.wait(0.05)
                    self._call.clear()
                pending.append(self._timed(lambda: self.core.handle(Turn(0.0))))
                again = False

    def _taken(self, peer: bytes, body: bytes, frames: tuple) -> list:
        try:
            codec.weigh(body)
            message = codec.unpack(body)
            self.gates.setdefault(peer, Gate()).admit(message, len(frames))
        except ProtocolError as error:
            self.errors.append(str(error))
            return self.core.handle(Malformed(peer, str(error)))
        return self.core.handle(Received(peer, message, frames))

    def _follows(self, action: Send) -> Message | None:
        message = action.message
        if isinstance(message, UploadRequest):
            self.needs.append(message)
        if action.peer == b"c":
            self.answers.append(message)
            if hasattr(message, "error"):
                self.errors.append(message.error["message"])
        if isinstance(message, Run) and self.answering:
            return Done(message.seq)
        if isinstance(message, (OfferArena, OfferFile)):
            return ArenaOpened(message.arena, True)
        if isinstance(message, Query):
            return Report(message.request, {"stats": {}})
        return None

    def ops(self, code: list, templates: list | None = None, origins: list | None = None, frames: tuple = ()) -> None:
        self.batch += 1
        self.give(b"c", Ops(self.batch - 1, templates or [], origins or [], code), frames)

    def lose(self, peer: bytes) -> None:
        pending = [self._timed(lambda: self.core.handle(PeerLost(peer, "gone")))]
        while any(isinstance(a, TurnWanted) for a in pending[-1]):
            pending.append(self._timed(lambda: self.core.handle(Turn(0.0))))

    def tensors(self, count: int, template: list = NEG) -> None:
        """So many tensors, of which 1 is uploaded and the others are made from it: 2 ... count - 1."""
        self.ops([17, 0, 0, 1], [[16, template], [17, UPLOAD]], frames=(bytes(64),))
        for first in range(2, count, 20_000):
            self.ops(list(itertools.chain.from_iterable((16, 0, 1, n) for n in range(first, min(count, first + 20_000)))))

    def fresh(self) -> None:
        self.longest, self.count = 0.0, 0
        self.errors.clear()
        gc.collect()


def words(count: int, length: int) -> list[str]:
    """Names that are hard to tell apart."""
    draw, letters = random.Random(1), [NAMES[i % 150] for i in range(length)]
    return ["".join(draw.sample(letters, length)) for _ in range(count)]


CASES: dict[str, Callable[[], Loop]] = {}


def case(make: Callable[[], Loop]) -> Callable[[], Loop]:
    CASES[make.__name__] = make
    return make


def asked(config: str = "", **rest: Any) -> Loop:
    loop = Loop()
    loop.fresh()
    loop.give(b"x", hello("client", config=config, **rest))
    return loop


# ---- Hello


@case
def hello_of_1400_groups() -> Loop:
    return asked("".join(f"g{i}: {{workers: [0]}}\n" for i in range(1400)))


@case
def hello_of_many_numbers() -> Loop:
    return asked("a: {workers: [" + ",".join(map(str, range(6000))) + "]}")


@case
def hello_of_aliases() -> Loop:
    numbers = ",".join(map(str, range(2000)))
    return asked(f"a: {{workers: &x [{numbers}]}}\n" + "".join(f"g{i}: {{workers: *x}}\n" for i in range(1000)))


@case
def hello_of_brackets() -> Loop:
    return asked("a: " + "[" * 16 + "0," * 16_000 + "]" * 16)


@case
def hello_of_dashes() -> Loop:
    return asked("- " * 16_000)


@case
def hello_of_lines_set_in() -> Loop:
    return asked("".join(" " * i + "a:\n" for i in range(250)))


@case
def hello_of_rules() -> Loop:
    groups = "".join(f"g{i}: {{workers: [0]}}\n" for i in range(500))
    return asked(groups + "gt: {modules: {" + ",".join(f"m{i}: _colpar" for i in range(900)) + "}}")


@case
def hello_of_a_text_of_15_mib() -> Loop:
    return asked("x" * (15 << 20))


@case
def hello_of_many_switches() -> Loop:
    return asked(switches={f"s{i}": i for i in range(50_000)})


@case
def hello_of_long_names_told_apart() -> Loop:
    names = words(20, 1000)
    groups = "".join(f"{name}: {{workers: [0]}}\n" for name in names)
    return asked(groups + f"z: {{workers: [0], backward: {words(1, 1000)[0][::-1]}}}")


@case
def hello_of_a_worker_with_many_ops() -> Loop:
    loop = Loop()
    loop.fresh()
    types = (f"{base}({letter}{n}!)[]? x, " for base in ("Tensor", "int") for letter in "abcdefghij" for n in range(100))
    lines = [f"library.op{n}.x({''.join(itertools.islice(types, 90))}int y) -> (Tensor)  # 2.11-2.13" for n in range(20)]
    lines += [f"library.op{n}.x({'int b, ' * 270}int y) -> (Tensor)  # 2.11-2.13" for n in range(20, 32)]
    assert 0.8 * MAX_LIBRARY_CHARACTERS < sum(map(len, lines)) <= MAX_LIBRARY_CHARACTERS
    loop.give(b"x", hello("worker", info={"name": "x", "ops": lines}))
    return loop


@case
def hello_of_a_worker_with_many_links() -> Loop:
    """The 17th host, each with as many links as there may be, which routers join."""
    loop = Loop()

    def asks(n: int) -> None:
        rows = [[f"fd{n:02x}:{i:x}::1", 64, f"eth{i}", 1000 + i, True] for i in range(MAX_LINKS)]
        routes = [[f"fd{r % 17:02x}:{r:x}::", max(1, 128 - r), f"eth{r % MAX_LINKS}"] for r in range(MAX_ROUTES)]
        loop.give(b"x%d" % n, hello("worker", info={"home": f"h{n}", "port": 1, "links": rows, "routes": routes}))

    for n in range(16):
        asks(n)
    loop.fresh()
    asks(16)
    return loop


# ---- Ops


def batch(code: list, templates: list, origins: list | None = None, config: str = "", frames: tuple = (bytes(64),)) -> Loop:
    loop = Loop(config)
    loop.fresh()
    loop.ops(code, templates, origins, frames)
    return loop


@case
def ops_of_as_many_as_fit() -> Loop:
    code = itertools.chain.from_iterable((17, 0, 1, n) for n in range(2, 30_000))
    return batch([16, 0, 0, 1, *code], [[16, UPLOAD], [17, NEG]])


@case
def ops_of_as_many_in_a_group() -> Loop:
    code = itertools.chain.from_iterable((17, 1, 1, n) for n in range(2, 30_000))
    return batch([16, 1, 0, 1, *code], [[16, UPLOAD], [17, NEG]], [[1, "f", 1, "a", False, -1]], SPLIT)


@case
def ops_that_move_between_groups() -> Loop:
    code = itertools.chain.from_iterable((17, 1 + n % 2, n - 1, n) for n in range(2, 20_000))
    return batch(
        [16, 1, 0, 1, *code], [[16, UPLOAD], [17, NEG]], [[1, "f", 1, "a", False, -1], [2, "f", 1, "b", False, -1]], SPLIT
    )


@case
def ops_of_templates_that_differ() -> Loop:
    rows = [[18 + n, row("aten.mul.Tensor", [{"t": 0}, n], [spec(4, 4)], [spec(4, 4)])] for n in range(5000)]
    code = itertools.chain.from_iterable((18 + n, 1, 1, 2 + n) for n in range(5000))
    return batch([16, 1, 0, 1, *code], [[16, UPLOAD], *rows], [[1, "f", 1, "a", False, -1]], SPLIT)


@case
def ops_of_a_heavy_list() -> Loop:
    n = check.MAX_TEMPLATE_PARTS // 31
    holes = [[{"t": i} for i in range(n)], [{"t": i} for i in range(n, 2 * n)]]
    form = row("aten._foreach_add.List", holes, [spec(4)] * 2 * n, [spec(4)] * n)
    made = [16, row("aten.zeros.default", [[4]], [], [spec(4)])]
    code = [16, 1, 1, *itertools.chain.from_iterable([[16, 1, i + 2] for i in range(64)])]
    code += [17, 1, *(i % 64 + 1 for i in range(2 * n)), *range(1000, 1000 + n)]
    return batch(code, [made, [17, form]], [[1, "f", 1, "a", False, -1]], SPLIT, ())


@case
def ops_of_a_heavy_stack() -> Loop:
    n = check.MAX_TEMPLATE_PARTS // 11
    form = row("aten.stack.default", [[{"t": i} for i in range(n)]], [spec(4)] * n, [spec(n, 4)])
    made = [16, row("aten.zeros.default", [[4]], [], [spec(4)])]
    return batch([16, 1, 1, 17, 1, *[1] * n, 2], [made, [17, form]], [[1, "f", 1, "a", False, -1]], SPLIT, ())


@case
def ops_of_a_template_of_numbers() -> Loop:
    return batch([], [[16, row("aten.stack.default", [[0] * 81_000], [], [spec(4)])]])


@case
def ops_of_a_template_of_empty_lists() -> Loop:
    return batch([], [[16, row("aten.stack.default", [[[]] * 90_000], [], [spec(4)])]])


@case
def ops_of_a_template_of_nothing() -> Loop:
    return batch([], [[[]] * 90_000])


@case
def ops_of_many_empty_lists() -> Loop:
    loop = Loop()
    loop.fresh()
    loop.give(b"c", b"\x95\x01\x00\xdd" + (1_500_000).to_bytes(4, "big") + b"\x90" * 1_500_000 + b"\x90\x90")
    return loop


@case
def ops_of_nested_lists() -> Loop:
    loop = Loop()
    loop.fresh()
    item = b"\x91" * 19 + b"\x90"
    loop.give(b"c", b"\x95\x01\x00\xdd" + (4_900).to_bytes(4, "big") + item * 4_900 + b"\x90\x90")
    return loop


@case
def ops_of_many_origins() -> Loop:
    return batch([], [], [[n + 1, "f.py", n, "a/b/c", False, -1] for n in range(20_000)], SPLIT)


@case
def ops_of_origins_of_unknown_groups() -> Loop:
    names = words(100, 1000)
    config = "".join(f"{name}: {{workers: [0]}}\n" for name in words(20, 1000)[::-1])[: 30 << 10].rpartition("\n")[0]
    return batch([], [], [[n + 1, "f.py", n, name, False, -1] for n, name in enumerate(names)], config)


@case
def ops_of_origins_of_short_unknown_groups() -> Loop:
    config = "".join(f"{name}: {{workers: [0]}}\n" for name in words(100, 60))
    paths = ["/".join(words(60, 60)[n : n + 50]) for n in range(10)]
    return batch([], [], [[n + 1, "f.py", n, path, False, -1] for n, path in enumerate(paths)], config)


@case
def ops_of_deep_origins() -> Loop:
    return batch([], [], [[n + 1, "f.py", n, "/" * 4000, False, -1] for n in range(300)], SPLIT)


@case
def ops_that_free_100000() -> Loop:
    loop = Loop(SPLIT)
    loop.tensors(100_000)
    loop.fresh()
    loop.ops([FREE, 99_998, *range(2, 100_000)])
    return loop


@case
def ops_of_views_of_one() -> Loop:
    code = itertools.chain.from_iterable((17, 0, n - 1, n) for n in range(2, 20_000))
    return batch([16, 0, 0, 1, *code], [[16, UPLOAD], [17, VIEW]])


@case
def ops_of_views_of_what_is_nowhere() -> Loop:
    code = itertools.chain.from_iterable((17, 1, n // 2, n) for n in range(2, 20_000))
    return batch(
        [16, 1, 0, 1, *code, 18, 1, 1, 30_000], [[16, UPLOAD], [17, VIEW], [18, NEG]], [[1, "f", 1, "a", False, -1]], SPLIT
    )


@case
def ops_that_move_what_has_views() -> Loop:
    views = itertools.chain.from_iterable((17, 0, 1, n) for n in range(3, 20_000))
    use = row("aten.add_.Tensor", [{"t": 0}, {"t": 1}], [spec(4, 4)] * 2, [("same", None, 0)], 0, (0,))
    code = [16, 0, 0, 1, 18, 0, 1, 2, *views, PARAM, 1, 19, 1, 1, 2, 19, 2, 1, 2]
    both = [[1, "f", 1, "a", False, -1], [2, "f", 1, "b", False, -1]]
    return batch(code, [[16, UPLOAD], [17, VIEW], [18, NEG], [19, use]], both, SPLIT)


@case
def ops_of_params() -> Loop:
    return batch([16, 0, 0, 1, *[PARAM, 1] * 60_000], [[16, UPLOAD]])


@case
def ops_of_nothing_known() -> Loop:
    return batch([99] * 130_000, [])


@case
def ops_too_long() -> Loop:
    return batch([1] * 1_400_000, [])


# ---- fragments


def fragment(call: int, ops: int, sources: list[int] | None = None) -> list:
    """A call of a fragment of so many ops, each of them on the result before; sources: of the ops, by place."""
    first = 3 + call * ops
    code = itertools.chain.from_iterable((17, 1, first + n - 1 if n else 2, first + n) for n in range(ops))
    numbers = list(code)
    for n, source in enumerate(sources or []):
        numbers[-4 * (n + 1) + 2] = first + source
    return [FRAGMENT, 0, call, 0, 0, 0, len(numbers), *numbers, END_FRAGMENT, 0]


def fragmented(workers: int) -> Loop:
    loop = Loop(f"a: {{workers: {list(range(workers))}}}\n", workers)
    loop.ops([16, 1, 0, 1, 17, 1, 1, 2], [[16, UPLOAD], [17, NEG]], [[1, "f", 1, "a", False, -1]], (bytes(64),))
    return loop


@case
def a_fragment_that_is_recorded() -> Loop:
    loop, ops = fragmented(64), MAX_NUMBERS // 4
    loop.ops(fragment(0, ops))
    loop.fresh()
    loop.ops(fragment(1, ops))
    return loop


@case
def fragments_that_are_alike() -> Loop:
    """Each differs from the others in one of its last operands."""
    loop, ops = fragmented(8), MAX_NUMBERS // 4
    for n in range(MAX_ALIKE):
        loop.ops(fragment(n, ops, [n]))
    loop.fresh()
    loop.ops(fragment(MAX_ALIKE, ops, [MAX_ALIKE]))
    return loop


@case
def a_fragment_in_as_many_parts_as_can_be() -> Loop:
    """Each op has a line of its own, behind which two earlier runs have parted. It is met, recorded, and launched."""
    loop, ops = fragmented(64), MAX_NUMBERS // 4
    lines = range(2, 2 + min(ops, MAX_FRAGMENTS - 2))
    loop.ops([], [], [[line, "f", line, "a", False, -1] for line in lines])
    names = itertools.count(3)
    for first in range(0, len(lines), 128):
        runs: list[int] = []
        for line, last in itertools.product(lines[first : first + 128], lines[-2:]):
            one, two = next(names), next(names)
            runs += [FRAGMENT, 0, line, 0, 0, 0, 8, 17, line, 2, one, 17, last, one, two, END_FRAGMENT, 2, one, two]
        loop.ops(runs)
    loop.fresh()
    for call in range(3):
        outs = [next(names) for _ in lines]
        rows = itertools.chain.from_iterable(zip(itertools.repeat(17), lines, [2, *outs], outs))
        loop.ops([FRAGMENT, 0, call, 0, 0, 0, 4 * len(outs), *rows, END_FRAGMENT, len(outs), *outs])
    return loop


# ---- programs


def recorded(ops: int, config: str = SPLIT, chain: bool = True) -> Loop:
    loop = Loop(config)
    name = [[1, "f", 1, "a", False, -1]]
    loop.ops([16, 1, 0, 1, 17, 1, 1, 2], [[16, UPLOAD], [17, NEG]], name, (bytes(64),))
    loop.ops([RECORD, 1, 0, 1, 2])
    for first in range(3, ops, 10_000):
        many = range(first, min(ops, first + 10_000))
        loop.ops(list(itertools.chain.from_iterable((17, 1, n - 1 if chain else 2, n) for n in many)))
    return loop


def sealed(ops: int, **how: Any) -> Loop:
    loop = recorded(ops, chain=how.pop("chain", True))
    loop.fresh()
    fields = {"schedule": "", "backend": "eager", "carried": [], "seed": 0, "counter": 0, "recompute": 0, **how}
    loop.give(b"c", FinishCapture(1, 0, *fields.values()))
    return loop


@case
def seal_of_100000_ops() -> Loop:
    return sealed(100_000)


@case
def seal_with_recompute() -> Loop:
    return sealed(30_000, recompute=2, backend="inductor")


@case
def seal_with_a_schedule() -> Loop:
    return sealed(10_000, schedule="auto")


@case
def seal_of_many_pairs() -> Loop:
    return sealed(40_000, chain=False, carried=[[2, n] for n in range(3, 40_000)])


@case
def launches_as_many_as_fit() -> Loop:
    loop = sealed(20_000)
    loop.fresh()
    loop.ops([LAUNCH, 0, 1, 1] * 300)
    return loop


@case
def records_and_discards() -> Loop:
    loop = Loop(SPLIT)
    loop.tensors(60_000)
    loop.fresh()
    loop.ops([RECORD, 1, 0, 0, DISCARD] * 100)
    return loop


@case
def a_recording_dropped() -> Loop:
    loop = recorded(100_000)
    loop.fresh()
    loop.ops([DISCARD])
    return loop


@case
def a_program_dropped() -> Loop:
    loop = sealed(100_000)
    loop.fresh()
    loop.ops([DROP, 0])
    return loop


@case
def a_recording_held_back_ends() -> Loop:
    loop = Loop(SPLIT)
    loop.ops([16, 1, 0, 1, 17, 1, 1, 2], [[16, UPLOAD], [17, NEG]], [[1, "f", 1, "a", False, -1]], (bytes(64),))
    loop.ops([RECORD, 1, 3, 1, 2])
    for first in range(3, 60_000, 20_000):
        loop.ops(list(itertools.chain.from_iterable((17, 1, n - 1, n) for n in range(first, first + 20_000))))
    loop.fresh()
    loop.ops([DISCARD])
    return loop


@case
def the_first_launch_of_100000_ops() -> Loop:
    loop = sealed(100_000)
    loop.fresh()
    loop.ops([LAUNCH, 0, 1, 1])
    return loop


@case
def a_program_dropped_while_it_is_launched() -> Loop:
    loop = sealed(50_000)
    loop.fresh()
    loop.ops([LAUNCH, 0, 1, 1, DROP, 0])
    return loop


# ---- tensors without a place, in great number: each is made by all of its steps, on each worker


ZEROS = row("aten.zeros.default", [[4, 4]], [], [spec(4, 4)])


def unplaced(count: int, workers: int = 64, steps: int = 60, first: int = 1) -> tuple[Loop, list[int]]:
    """A loop whose workers and client share memory, and the ids of so many tensors, each a view of a view and so on."""
    loop = Loop(f"a: {{workers: {list(range(workers))}}}\n", workers, "here")
    loop.ops([], [[16, ZEROS], [17, VIEW]], BOTH[:1])
    ids = described(loop, count, steps, first)
    loop.fresh()
    return loop, ids


def described(loop: Loop, count: int, steps: int, first: int) -> list[int]:
    ids, code = [], []
    for name in range(first, first + count * (steps + 1), steps + 1):
        code += [16, 1, name, *itertools.chain.from_iterable((17, 1, name + n, name + n + 1) for n in range(steps))]
        ids.append(name + steps)
        if len(code) > 40_000 or len(ids) == count:
            loop.ops(code)
            code = []
    return ids


def listed(op: str, count: int, lists: int = 1, **of: int) -> Loop:
    """An op on lists of tensors without a place."""
    loop, ids = unplaced(count * lists, **of)
    columns: list = [[{"t": n} for n in range(start, start + count)] for start in range(0, count * lists, count)]
    made = [] if lists > 1 else [spec(4, 4)] * count
    scalars = [{"v": 0}] if lists > 1 else []
    written = tuple(range(count if lists > 1 else 0))
    template = row(op, [*columns, *scalars], [spec(4, 4)] * len(ids), made, len(scalars), written)
    if "cat" in op:
        template = row(op, columns, [spec(4, 4)] * len(ids), [spec(4 * count, 4)])
    first = ids[-1] + 1
    loop.ops([20, 1, *ids, *[1.0] * len(scalars), *range(first, first + len(template[5]))], [[20, template]])
    return loop


@case
def a_list_op_on_what_is_nowhere() -> Loop:
    return listed("aten._foreach_neg.default", 314)


@case
def an_optimizer_on_what_is_nowhere() -> Loop:
    return listed("aten._foreach_addcmul_.Scalar", 314, 3, steps=0)


@case
def a_cat_of_what_is_nowhere() -> Loop:
    return listed("aten.cat.default", 1000)


@case
def a_recording_of_what_is_nowhere(count: int = 300) -> Loop:
    """The second one of its kind, which places its inputs as the first did."""
    loop, ids = unplaced(count)
    neg = row("aten._foreach_neg.default", [[{"t": n} for n in range(count)]], [spec(4, 4)] * count, [spec(4, 4)] * count)
    first = ids[-1] + 1
    loop.ops([RECORD, 1, 0, count, *ids, 20, 1, *ids, *range(first, first + count), DISCARD], [[20, neg]])
    ids = described(loop, count, 60, first + count)
    loop.fresh()
    loop.ops([RECORD, 1, 0, count, *ids])
    return loop


@case
def seal_of_what_is_nowhere(count: int = 300) -> Loop:
    loop, ids = unplaced(1)
    loop.ops([RECORD, 1, 0, 1, *ids])
    described(loop, count, 60, ids[-1] + 1)
    loop.fresh()
    loop.give(b"c", FinishCapture(1, 0, "", "eager", [], 0, 0, 0))
    return loop


def stored(count: int, **of: int) -> Loop:
    loop, ids = unplaced(count, **of)
    loop.give(b"c", OfferArena(1, 4321, 5, 2 * PAGE_BYTES, "ab" * 16, "here"))
    loop.give(b"c", OfferFile(7, 1, 9, 1 << 20, True, "model.safetensors"))
    loop.fresh()
    loop.give(b"c", Store(5, [[i, place(7, 64 * n)] for n, i in enumerate(ids)], False))
    return loop


@case
def a_store_of_what_is_nowhere() -> Loop:
    return stored(256, steps=200)


@case
def roles_of_as_many_as_fit() -> Loop:
    loop = Loop(SPLIT)
    loop.tensors(32_000)
    loop.fresh()
    loop.give(b"c", TensorRoles([[n, "weights", f"n{n}"] for n in range(2, 32_000)]))
    return loop


@case
def a_fragment_of_views() -> Loop:
    """Each op is a view of the result before, so that each result names another."""
    loop, ops = fragmented(8), MAX_NUMBERS // 4
    loop.ops([], [[17, VIEW]])
    loop.ops(fragment(0, ops))
    loop.fresh()
    loop.ops(fragment(1, ops))
    return loop


# ---- questions


@case
def fetch_256() -> Loop:
    loop = Loop(SPLIT)
    loop.tensors(1000)
    loop.fresh()
    for n in range(255):
        loop.give(b"c", Fetch(n, 2))
    return loop


@case
def describe_4096() -> Loop:
    loop = Loop(SPLIT)
    loop.tensors(5000)
    loop.fresh()
    loop.give(b"c", Describe(1, list(range(2, 4098))))
    return loop


@case
def describe_of_what_is_none() -> Loop:
    loop = Loop(SPLIT)
    loop.fresh()
    loop.give(b"c", Describe(1, [[]] * 90_000))
    return loop


@case
def inspect_of_many_pieces() -> Loop:
    loop = Loop(SPLIT, 64)
    loop.tensors(10)
    loop.fresh()
    loop.give(b"c", Inspect(1, 2))
    return loop


@case
def stats_beside_100000_tensors() -> Loop:
    loop = Loop(SPLIT)
    loop.tensors(100_000)
    loop.fresh()
    loop.give(b"c", Stats(1))
    return loop


@case
def a_question_behind_32_batches() -> Loop:
    loop = Loop(SPLIT)
    loop.ops([16, 1, 0, 1], [[16, UPLOAD], [17, NEG]], [[1, "f", 1, "a", False, -1]], (bytes(64),))
    for first in range(2, 200_000, 8000):
        loop.ops(list(itertools.chain.from_iterable((17, 1, 1, n) for n in range(first, first + 8000))))
    loop.give(b"c", Inspect(1, 2))
    return loop


# ---- the end of a session


@case
def the_end_of_100000_tensors() -> Loop:
    loop = Loop(SPLIT)
    loop.tensors(100_000)
    loop.fresh()
    loop.lose(b"c")
    return loop


@case
def the_end_of_a_recording() -> Loop:
    loop = recorded(100_000)
    loop.fresh()
    loop.lose(b"c")
    return loop


@case
def the_end_of_programs() -> Loop:
    loop = sealed(100_000)
    loop.fresh()
    loop.give(b"c", Goodbye("x" * 1_000_000))
    return loop


@case
def the_end_of_a_worker() -> Loop:
    loop = Loop(SPLIT)
    loop.tensors(100_000)
    loop.fresh()
    loop.lose(b"w0")
    return loop


@case
def the_end_of_many_fragments() -> Loop:
    loop, ops = fragmented(8), MAX_NUMBERS // 4
    for n in range(24):
        loop.ops(fragment(n, ops - n))
    loop.fresh()
    loop.give(b"c", Goodbye(""))
    return loop


@case
def the_end_of_many_definitions() -> Loop:
    rows = [[18 + n, row("aten.mul.Tensor", [{"t": 0}, n], [spec(4, 4)], [spec(4, 4)])] for n in range(20_000)]
    loop = Loop(SPLIT)
    loop.ops([16, 1, 0, 1], [[16, UPLOAD]], BOTH, (bytes(64),))
    for first in range(0, 20_000, 4000):
        code = itertools.chain.from_iterable((18 + n, 1, 1, 2 + n) for n in range(first, first + 4000))
        loop.ops([*code], rows[first : first + 4000])
    loop.fresh()
    loop.lose(b"c")
    return loop


# ---- what a worker may say


def said(message: Message) -> Loop:
    loop = Loop(SPLIT)
    loop.tensors(20_000)
    loop.fresh()
    loop.give(b"w0", message)
    return loop


@case
def done_of_many_times() -> Loop:
    return said(Done(0, list(itertools.chain.from_iterable((n, 1.0) for n in range(4096)))))


@case
def a_report_of_much() -> Loop:
    return said(Report(1, {"stats": {"actions": [["F0", 1.0, 2.0]] * 60_000}}))


@case
def a_described_of_much() -> Loop:
    return said(Described(1, [[[4], [1], 0, "float32"]] * 20_000))


@case
def a_trouble() -> Loop:
    return said(OpError(5, "op", "x" * 1_000_000))


def troubles(kind: str) -> Loop:
    """As many ops as one message may name, of those that are under way."""
    loop = Loop(SPLIT)
    loop.answering = False
    loop.ops([16, 1, 0, 1], [[16, UPLOAD], [17, NEG]], BOTH, (bytes(64),))
    for first in range(2, 40_000, 8000):
        loop.ops(list(itertools.chain.from_iterable((17, 1, 1, n) for n in range(first, min(first + 8000, 40_000)))))
    loop.fresh()
    loop.give(b"w0", OpError(20_000, kind, "", {}, list(range(20_000, 20_000 + MAX_OTHERS))))
    return loop


@case
def a_trouble_of_many_ops() -> Loop:
    return troubles("op")


@case
def an_interrupt_of_many_ops() -> Loop:
    return troubles("interrupted")


@case
def what_nobody_asked_for() -> Loop:
    loop = said(Piece(7, 0, 0))
    loop.give(b"w1", UploadProgress(1 << 60, 5))
    loop.give(b"c", UploadProgress(1 << 60, 5))
    loop.give(b"c", UploadChunk(1 << 60, 5, 1 << 62))
    return loop


@case
def a_goodbye_of_a_mebibyte() -> Loop:
    return said(Goodbye("\n" * (1 << 20)))


# ---- carrying it out


@contextlib.contextmanager
def as_in_the_server() -> Iterator[None]:
    """The collector as a server has it."""
    before = gc.get_threshold()
    collect_less()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def measured(name: str) -> tuple[float, int, list[str]]:
    """CPU milliseconds of the longest turn of a case, its turns, and what was refused."""
    loop = CASES[name]()
    loop.background.close()
    return loop.longest * 1e3, loop.count, loop.errors


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.stress.costs", description=__doc__)
    parser.add_argument("names", nargs="*", help="of cases; default: all")
    args = parser.parse_args(argv)
    over = 0
    with as_in_the_server():
        for name in args.names or CASES:
            longest, count, errors = measured(name)
            for _ in range(TRIES - 1):
                longest = min(longest, measured(name)[0]) if longest > BOUND else longest
            over += longest > BOUND
            mark = "OVER" if longest > BOUND else ""
            sys.stdout.write(f"{name:42} {longest:9.1f} ms  {count:6} turns  {mark:5}{errors[-1][:80] if errors else ''}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{over} over {BOUND:g} ms\n")
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
