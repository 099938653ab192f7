"""A toy dispatcher core for tests of server, session and links: it answers every message of a client by simple rules.

Fetch(tensor=n): n < 0 fails, n < 100 is n as a float64, n >= 100 is what was uploaded as n, in two halves of rows.
Inspect has no answer, so its client waits. Stats has the number of messages received.
"""

from __future__ import annotations

import struct

from gt.dispatcher.events import Close, Log, Malformed, PeerLost, Received, Send
from gt.errors import GTError, OpFailed, SystemFailure, to_wire
from gt.wire import link
from gt.wire.messages import (
    CHUNK,
    Ack,
    Describe,
    Described,
    Exit,
    Failed,
    Fetch,
    Hello,
    Ops,
    Piece,
    Reject,
    Release,
    Report,
    Stats,
    UploadChunk,
    UploadRequest,
    Value,
    Welcome,
)


class ToyCore:
    def __init__(self) -> None:
        self.events: list = []
        self.peers: set[bytes] = set()
        self.codes: list = []
        self.frames: list[bytes] = []
        self.uploads: dict[int, bytearray] = {}

    def handle(self, event):
        if type(event).__name__ != "Tick":
            self.events.append(event)
        if isinstance(event, (PeerLost, Malformed)):
            self.peers.discard(event.peer)
            return [Close(event.peer), Log("ERROR", "toy", event.reason)]
        if not isinstance(event, Received):
            return []
        return [Send(event.peer, *answer) for answer in self.answers(event.peer, event.message, event.frames)]

    def answers(self, peer, message, frames):
        match message:
            case Hello():
                try:
                    link.examine(message)
                except GTError as error:
                    return [(Reject(to_wire(error)),)]
                self.peers.add(peer)
                return [(Welcome(1, "toy", ["w0"], ["stage0"], 2),)]
            case Ops():
                self.codes += message.code
                self.frames += [bytes(frame) for frame in frames]
                failures = [(Failed(-1, to_wire(OpFailed("op 7 failed", op="mm"))),)] if message.code == [-7] else []
                if message.code == [-8]:
                    return [(Failed(-1, to_wire(SystemFailure("the heap is full"))),), (Exit("the heap is full"),)]
                answers = self.fetch(Fetch(*message.fetch)) if message.fetch else []
                return [*failures, (Ack(message.seq),), *answers]
            case Describe():
                return [(Described(message.request, [[[n], [1], 0, "int64"] for n in message.tensors]),)]
            case Stats():
                return [(Report(message.request, {"dispatcher": {"codes": len(self.codes)}, "workers": []}),)]
            case Fetch():
                return self.fetch(message)
            case UploadChunk():
                data = self.uploads.setdefault(message.key, bytearray(message.total))
                for frame in frames:
                    data[message.offset : message.offset + len(frame)] = frame
                return [(Release([message.key]),)] if message.offset + CHUNK >= message.total else []
        return []

    def fetch(self, message):
        request, tensor = message.request, message.tensor
        if tensor < 0:
            return [(Failed(request, to_wire(OpFailed("it failed", op="aten.mm.default", origin="model.py:3"))),)]
        if tensor < 100:
            value = struct.pack("d", tensor)
            return [(Value(request, [], "float64", [[request, [[]]]]),), (Piece(request, 0, 8), [value])]
        return [(UploadRequest(tensor, tensor, [[[0, 2], [0, 400_000]]]),)]

    def stopping(self, reason):
        return [Send(peer, Exit(reason)) for peer in self.peers]
