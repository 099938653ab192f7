"""A dispatcher's core among hostile clients and workers, beside one honest program whose every value is compared.

No sockets. The honest workers parse all that they are told (half a batch would not parse) and execute what is of the
honest session.
"""

from __future__ import annotations

import random
import struct
import time
from collections import Counter
from math import prod
from typing import Any

from gt.dispatcher.core import Core
from gt.dispatcher.events import Close, Malformed, PeerLost, Received, Send, Tick
from gt.dispatcher.state.emitter import BASE_BITS
from gt.errors import ProtocolError
from gt.ir.instr import END, FORGET, FREE, Define
from gt.ir.layout import piece_shape
from gt.wire import codec
from gt.wire.link import hello
from gt.wire.messages import (
    Ack,
    ArenaOpened,
    Data,
    Described,
    Done,
    Exit,
    Failed,
    Fetch,
    Goodbye,
    Message,
    OfferArena,
    OfferFile,
    Ops,
    Paused,
    Piece,
    Query,
    Reject,
    Report,
    Run,
    Skip,
    Trace,
    TraceRows,
    UploadProgress,
    UseBlock,
    Value,
)
from tests.helpers.hostile.liar import CONFIGS, HOME, TEMPLATES, Liar, spec


class HonestWorker:
    """Parses everything, executes what belongs to the honest session, answers Done to all."""

    def __init__(self, field: Field, peer: bytes) -> None:
        self.field, self.peer = field, peer
        self.defines: dict[int, Define] = {}
        self.tensors: dict[int, list[float]] = {}
        self.data: dict[int, bytes] = {}
        self.blocks: dict[int, int] = {}  # bytes of pieces that are written into shared memory
        self.begun = -1  # number of the last op

    def receive(self, message: Message, frames: tuple) -> list[tuple[Message, tuple]]:
        if isinstance(message, Data):
            if message.total < 0:
                self.data.pop(message.key, None)
            else:
                assert message.offset + sum(map(len, frames)) <= message.total <= 1 << 20, f"{message} reached a worker"
                self.data[message.key] = self.data.get(message.key, b"") + b"".join(map(bytes, frames))
        elif isinstance(message, Query):
            return [(Report(message.request, {"stats": {"live": len(self.tensors)}, "at": None}), ())]
        elif isinstance(message, (OfferArena, OfferFile)):
            return [(ArenaOpened(message.arena, True), ())]
        elif isinstance(message, UseBlock):
            nbytes = prod(piece_shape(message.boxes)) * message.itemsize
            if not message.write:
                return [(UploadProgress(message.key, nbytes), ())]
            self.blocks[message.key] = nbytes
        elif isinstance(message, Skip):
            return [(Paused(message.session, self.begun), ())] if message.on and message.since < 0 else []
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
            self.begun = max(self.begun, message.base + code[at + 1])
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
        elif kind == "fetch" and operands[1] in self.blocks:
            nbytes = self.blocks.pop(operands[1])
            return [(Piece(operands[1], nbytes, nbytes), ())]
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
        self.taken: Counter[tuple[str, str]] = Counter()  # by role, messages and codes of liars who were not put out for them
        self.cases = self.refused = self.internal = self.peers = 0
        self.now = self.slowest = 0.0
        self.slowest_message = ""
        self.values: dict[int, list[float]] = {}
        self.batch = self.next_id = self.request = 0
        for n, peer in enumerate(self.workers):
            info = {"name": f"w{n}", "pid": 1, "host": "h", "heap_bytes": 1 << 30, "backend": "torch", "home": HOME}
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
            self.taken[self.liars.pop(peer).role, "Goodbye"] += 1
            self.give(peer, Goodbye(), ())
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
        if (liar := self.liars.get(peer)) is not None:
            codes = liar.drawn if isinstance(message, Ops) else ()
            self.taken.update((liar.role, name) for name in (type(message).__name__, *codes))

    def finish(self) -> None:
        """Everybody hostile leaves: nothing of them is left."""
        for peer in list(self.liars):
            self.liars.pop(peer, None)  # what waited for one that left may put out another
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
