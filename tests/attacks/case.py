"""An attack as a list of steps that can be written to a file and played again: what is said, by which peer, and when one waits.

A step is a dict: {"do": "connect", "as"}, {"do": "send", "as", "body", "frames"} (bytes as they are), {"do": "host", "as",
"body", "frames", "need"} (the key of what was asked for), {"do": "wait", "as", "request"}, {"do": "leave", "as"},
{"do": "puppet", "as", "seed"} (a worker that lies), {"do": "lie", "as", "target"} (it says one message more),
{"do": "tcp", "seed", "how"} (a stranger). "group": steps that are left out together.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gt.wire import codec
from gt.wire.link import hello
from gt.wire.messages import Exit, Fetch, Message, Ops, Welcome
from tests.attacks.peer import Leaks, Peer
from tests.attacks.puppet import Puppet
from tests.attacks.stranger import misbehave
from tests.helpers.limits import limit

PATIENCE = 2.0  # seconds that an attacker waits for an answer, which nobody owes to one who lies
OWED = limit(10)  # seconds until a server that goes on has answered what is right
END = 1 << 29  # the request by which a case ends


@dataclass
class Case:
    part: str
    seed: str
    text: str = ""  # of the mutation, for people
    backend: str = "torch"
    steps: list[dict[str, Any]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=0))

    @classmethod
    def load(cls, path: Path) -> Case:
        return cls(**json.loads(path.read_text()))


def text_of(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


def bytes_of(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


class Player:
    """Does steps against a server and writes them down."""

    def __init__(self, address: str, token: str, leaks: Leaks, case: Case) -> None:
        self.address, self.token, self.leaks, self.case = address, token, leaks, case
        self.peers: dict[str, Peer] = {}
        self.group = 0  # steps of one group need one another, and nothing of other groups but 0
        self._closing: list[Any] = []
        self._puppets: dict[str, Puppet] = {}
        self._batches = 0

    def play(self, step: dict[str, Any]) -> Any:
        """Carry a step out; the answer that a wait was for."""
        if self.group:
            step["group"] = self.group
        self.case.steps.append(step)
        return getattr(self, f"_{step['do']}")(**{k: v for k, v in step.items() if k != "do"})

    def close(self) -> None:
        for peer in [*self.peers.values(), *self._closing]:
            peer.close()
        self.peers.clear()

    # ---- for generators

    def connect(
        self, name: str = "client", config: str = "", changed: bytes | None = None, workers: int = 0, role: str = "client"
    ) -> Welcome | None:
        """A peer that says Hello, or these bytes in its place."""
        peer = self.play({"do": "connect", "as": name})
        switches = {"workers": workers} if workers else {}
        message = hello(role, config, "attack.yaml", switches=switches)
        if changed is not None:
            self.send(changed, name=name)
        else:
            self.case.steps.append({"do": "hello", "as": name, "config": config, "workers": workers, "role": role})
            peer.say(message)
        return peer.welcome(OWED if changed is None else PATIENCE / 4)

    def send(self, body: bytes | Message, frames: Sequence[bytes] = (), name: str = "client", numbered: bool = False) -> None:
        """numbered: an Ops whose number is its place, whatever is left out before it."""
        if isinstance(body, Message):
            body = codec.pack(body)
        step: dict[str, Any] = {"do": "send", "as": name, "body": text_of(body), "frames": [text_of(f) for f in frames]}
        if numbered:
            step["numbered"] = True
        self.play(step)

    def wait(self, request: int, name: str = "client", seconds: float = PATIENCE) -> Message | None:
        return self.play({"do": "wait", "as": name, "request": request, "seconds": seconds})

    def settle(self, name: str = "client", seconds: float = PATIENCE) -> Message | None:
        """Wait until all that was said has been executed, or refused."""
        self.send(Fetch(END, -1), name=name)
        return self.wait(END, name, seconds)

    # ---- steps

    def _connect(self, **step: Any) -> Peer:
        if step["as"] in self.peers:
            self.peers[step["as"]].close()
        self.peers[step["as"]] = Peer(self.address, self.token, self.leaks)
        return self.peers[step["as"]]

    def _hello(self, **step: Any) -> None:
        """The Hello of a replayed case."""
        switches = {"workers": step["workers"]} if step["workers"] else {}
        self.peers[step["as"]].say(hello(step.get("role", "client"), step["config"], "attack.yaml", switches=switches))
        self.peers[step["as"]].welcome(OWED)

    def _send(self, **step: Any) -> None:
        body = bytes_of(step["body"])
        with contextlib.suppress(Exception):  # what is no message stays as it is
            message = codec.unpack(body)
            if isinstance(message, Ops) and step.get("numbered"):
                body = codec.pack(dataclasses.replace(message, seq=self._batches))
                self._batches += 1
        self.peers[step["as"]].send(body, [bytes_of(f) for f in step["frames"]])

    def _host(self, **step: Any) -> None:
        peer = self.peers[step["as"]]
        peer.wait(lambda _: len(peer.needs) > step["need"], PATIENCE / 4)
        message: Any = codec.unpack(bytes_of(step["body"]))
        key = peer.needs[step["need"]].key if len(peer.needs) > step["need"] else message.key
        peer.send(codec.pack(dataclasses.replace(message, key=key)), [bytes_of(f) for f in step["frames"]])

    def _wait(self, **step: Any) -> Message | None:
        request = step["request"]
        peer = self.peers[step["as"]]
        return peer.wait(lambda m: getattr(m, "request", None) == request or isinstance(m, Exit), step["seconds"])

    def _leave(self, **step: Any) -> None:
        peer = self.peers.pop(step["as"], None)
        if peer is not None:
            peer.close()

    def _puppet(self, **step: Any) -> Puppet:
        puppet = Puppet(self.address, self.token, self.leaks, random.Random(step["seed"]))
        self._closing.append(puppet)
        self._puppets[step["as"]] = puppet
        return puppet

    def _lie(self, **step: Any) -> None:
        self._puppets[step["as"]].lie_in(step["target"])

    def _tcp(self, **step: Any) -> None:
        misbehave(int(self.address.rpartition(":")[2]), random.Random(step["seed"]), step["how"])


def replay(case: Case, address: str, token: str, leaks: Leaks) -> None:
    """Play all of a case's steps again."""
    player = Player(address, token, leaks, Case(case.part, case.seed))
    try:
        for step in case.steps:
            player.play(step)
    finally:
        player.close()
