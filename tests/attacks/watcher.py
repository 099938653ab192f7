"""An honest observer of the attacked server, which must see it all the time; and observers and traces that lie."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from gt.errors import GTError
from gt.observe.record_stream import RecordStream
from gt.wire import codec
from gt.wire.link import hello
from gt.wire.messages import Message, Observe, Trace
from tests.attacks import mutate
from tests.attacks.ground import Ground, Sign
from tests.helpers.limits import limit

BLIND = limit(10)  # seconds without records, on a loaded machine, that are a sign


@dataclass
class Watcher:
    """Observes the server from the start to the end of a run. views: Records that it took."""

    views: int = 0
    slowest: float = 0.0  # seconds between two views
    _stream: RecordStream | None = None
    _start = -1  # of the server that is observed
    _seen = 0.0

    def look(self, ground: Ground, deaths: bool = False) -> list[Sign]:
        """Take the newest records. deaths: the server may have been started again."""
        if self._stream is None or self._start != ground.starts:
            self.stop()
            self._stream, self._start = RecordStream(ground.address, ground.token, 0.1), ground.starts
            self._seen = time.monotonic()
        try:
            rows = self._stream.take(BLIND)
        except GTError as error:
            self.stop()
            return [] if deaths else [Sign("observer lost", str(error)[:60], str(error))]
        now = time.monotonic()
        self.slowest, self._seen = max(self.slowest, now - self._seen), now
        self.views += 1
        if rows is None:
            return [Sign("observer blind", "no records", f"a running server has sent no records for {BLIND:g} s")]
        return [] if rows else [Sign("observer blind", "no rows", "the records of a running server are empty")]

    def stop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def lies(rng: random.Random) -> tuple[bytes, list[bytes], list[str]]:
    """A Hello of an observer, or of a client that traces; bodies of messages after it; and their changed fields."""
    traces = rng.random() < 0.4
    greeting: Message = hello("client" if traces else "observer", "", "")
    honest: list[Message] = [Trace(1, True), Trace(2, False), Trace(3, True)] if traces else [Observe(0, 0), Observe(1, 100)]
    bodies, changed = [], []
    for _ in range(rng.randrange(1, 12)):
        message = rng.choice(honest)
        how = rng.random()
        if how < 0.2:
            bodies.append(codec.pack(message))
        elif how < 0.6:
            new, name = mutate.field_changed(rng, message)
            bodies.append(mutate._flat((new, (), ""))[0])
            changed.append(f"{type(message).__name__}.{name}")
        elif how < 0.8:
            bodies.append(mutate.structure_changed(rng, message))
        else:  # what only others may say
            role = rng.choice(["client", "worker"])
            bodies.append(mutate._flat((mutate.default(rng.choice(mutate.SENT[role]), rng), (), ""))[0])
    return codec.pack(greeting), bodies, changed
