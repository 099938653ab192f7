"""A worker that has the token and lies: it joins, answers as a worker would, and makes some of its answers wrong."""

from __future__ import annotations

import contextlib
import random
from math import prod
from typing import Any

from gt.errors import ProtocolError
from gt.ir.instr import END, FORGET, FREE, Define
from gt.ir.layout import piece_shape
from gt.wire import codec
from gt.wire.link import hello
from gt.wire.liveness import home
from gt.wire.messages import (
    ArenaOpened,
    Data,
    Described,
    Done,
    Message,
    OfferArena,
    OpError,
    Piece,
    Query,
    Report,
    Run,
    UploadProgress,
    UseBlock,
    World,
)
from tests.attacks import mutate
from tests.attacks.peer import Leaks, Peer
from tests.helpers.hostile import WILD, spec

RATE = 0.15  # of answers that are wrong


class Puppet:
    """Made with a connection; `changed` are the fields that it lied in."""

    def __init__(self, address: str, token: str, leaks: Leaks, rng: random.Random) -> None:
        self.rng = rng
        self.changed: list[str] = []
        self._defines: dict[int, Define] = {}
        self.peer = Peer(address, token, leaks, self.react)
        info = {
            "name": "",
            "pid": 1,
            "host": "puppet",
            "backend": "numpy",
            "heap_fd": -1,
            "heap_bytes": 1 << 20,
            "doorbell": "",
            "home": home() if rng.random() < 0.5 else "",  # then it is offered arenas, which it says to have opened
        }
        message: Message = hello("worker", info=info)
        if rng.random() < 0.2:
            info[rng.choice(sorted(info))] = rng.choice(WILD)
            with contextlib.suppress(ProtocolError):
                message = codec.unpack(codec.pack(hello("worker", info=info)))
        self.peer.say(message)
        self.welcome = self.peer.welcome(5.0)

    def close(self) -> None:
        self.peer.close()

    @property
    def index(self) -> int:
        """Its place among the workers, -1 if it has none."""
        worlds = self.peer.heard(World)
        name = self.welcome.name if self.welcome else ""
        return next((row[0] for world in reversed(worlds) for row in world.workers if row[1] == name), -1)

    def react(self, message: Message, frames: tuple) -> None:
        for answer, parts in self.answers(message):
            if self.rng.random() < RATE:
                self.lie(answer, parts)
            else:
                self.peer.say(answer, parts)
        if self.rng.random() < RATE / 5:
            cls = self.rng.choice(mutate.SENT["worker"])
            self.lie(mutate.default(cls, self.rng), ())

    def lie(self, answer: Message, parts: tuple) -> None:
        """An answer made wrong in one of its fields, in its bytes, or in its number."""
        rng, how = self.rng, self.rng.random()
        name = type(answer).__name__
        if how < 0.1:
            self.changed.append(f"{name} byte")
            self.peer.send(mutate.bytes_changed(rng, codec.pack(answer)), parts)
        elif how < 0.15:
            self.changed.append(f"{name} repeated")
            self.peer.say(answer, parts)
            self.peer.say(answer, parts)
        elif how < 0.2:
            self.changed.append(f"{name} dropped")
        else:
            new, which = mutate.field_changed(rng, answer)
            self.changed.append(f"{name}.{which}")
            with contextlib.suppress(ProtocolError):
                self.peer.send(codec.pack(new), parts)

    def lie_in(self, target: int) -> None:
        """Say the message of this number in mutate.targets, with its field made wrong."""
        said = mutate.targets("worker")
        cls, name = said[target % len(said)]
        wrong, name = mutate.field_changed(self.rng, mutate.default(cls, self.rng), name)
        self.changed.append(f"{cls.__name__}.{name}")
        self.peer.send(mutate.body_of(wrong))

    def answers(self, message: Message) -> list[tuple[Message, tuple]]:
        """The answers of an honest worker to this message."""
        if isinstance(message, Query):
            return [(Report(message.request, {"done": -1, "stats": {"name": "puppet"}, "at": None}), ())]
        if isinstance(message, Data) and message.total > 64 << 10:
            return [(UploadProgress(message.key, min(message.offset + (1 << 20), message.total)), ())]
        if isinstance(message, OfferArena):
            return [(ArenaOpened(message.arena, True), ())]
        if isinstance(message, UseBlock):
            nbytes = prod(piece_shape(message.boxes)) * message.itemsize
            done = Piece(message.key, nbytes, nbytes) if message.write else UploadProgress(message.key, nbytes)
            return [(done, ())]
        if isinstance(message, Run):
            return [*self._run(message), (Done(message.seq), ())]
        return []

    def _run(self, message: Run) -> list[tuple[Message, tuple]]:
        for wire in message.defines:
            self._defines[wire[0]] = Define.from_wire(wire)
        code, at, said = message.code, 0, []
        while at < len(code):
            if code[at] in (FREE, FORGET, END):
                at += 5 if code[at] == END else 3 + code[at + 2]
                continue
            define = self._defines[code[at]]
            said += self._step(define, code[at + 2 : at + 2 + define.operands])
            at += 2 + define.operands
        return said

    def _step(self, define: Define, operands: list[Any]) -> list[tuple[Message, tuple]]:
        if define.kind == "fetch":
            size = self.rng.choice((0, 4, 64, 256, 512, 1 << 19))
            return [(Piece(operands[1], 0, size), (bytes(size),) if size else ())]
        if define.kind == "describe":
            return [(Described(operands[1], [spec(2, 2)]), ())]
        if define.kind == "op" and self.rng.random() < 0.05:
            return [(OpError(0, "op", "a puppet's trouble"), ())]
        return []
