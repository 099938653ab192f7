"""The dispatcher's core with peers that do only what a test says; its invariants are checked after every event."""

from __future__ import annotations

from gt.dispatcher.core import Core
from gt.dispatcher.events import Close, Received, Send
from gt.wire.link import hello
from gt.wire.messages import Data, Exit, Failed, Reject, Run

TWO = "a: {shard: {axis: 0, workers: [0]}}\nb: {shard: {axis: 0, workers: [1]}}\n"


class CorePeers:
    """A core, and the messages and closed connections that each event led to."""

    def __init__(self, core: Core) -> None:
        self.core, self.now = core, 0.0
        self.sent: list = []
        self.closed: list = []

    def feed(self, event) -> list:
        """Handle one event; returns (peer, message) of every message sent."""
        actions = self.core.handle(event)
        self.core.check()
        self.sent = [(a.peer, a.message) for a in actions if isinstance(a, Send)]
        self.closed = [a.peer for a in actions if isinstance(a, Close)]
        return self.sent

    def give(self, peer: bytes, message, frames: tuple = (), at: float | None = None) -> list:
        return self.feed(Received(peer, message, frames, self.now if at is None else at))

    def to(self, peer: bytes, kind: type) -> list:
        return [m for p, m in self.sent if p == peer and isinstance(m, kind)]


class CoreBench(CorePeers):
    """A core with two idle workers, and clients."""

    def __init__(self, config: str = TWO) -> None:
        super().__init__(Core())
        for n in range(2):
            self.give(b"w%d" % n, hello("worker", info={"name": f"w{n}", "heap_bytes": 1 << 30}))
        self.client(b"c", config)

    def client(self, peer: bytes, config: str = TWO) -> None:
        self.give(peer, hello("client", config=config, config_path="t.yaml", switches={"workers": 2}))
        assert peer in self.core.sessions, self.sent

    def refusal(self, peer: bytes, message, frames: tuple = ()) -> str:
        """The error that answers a message; the sender's connection is closed, and nobody else receives anything."""
        self.give(peer, message, frames)
        assert peer in self.closed and peer not in self.core.sessions
        said = [m.error["message"] for p, m in self.sent if p == peer and isinstance(m, (Failed, Reject))]
        said += [m.reason for p, m in self.sent if p == peer and isinstance(m, Exit)]
        assert said and all(p == peer or isinstance(m, (Run, Data)) for p, m in self.sent), self.sent
        return said[0]
