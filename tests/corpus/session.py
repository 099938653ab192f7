"""A session whose dispatcher plans in this thread, and whose workers answer at once: no process, socket, engine or clock.

Values read as zeros. All that the dispatcher sends is written to a transcript. The dispatcher is the real one, as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import torch

from gt import api, env, errors
from gt.client import current_session
from gt.client.device import register
from gt.config.registry import source
from gt.dispatcher.core import Core
from gt.dispatcher.events import MARK, Action, Lines, Log, Received, Send, Turn, TurnWanted
from gt.dispatcher.fairness.time_slices import Pace
from gt.dispatcher.instruction_log import text as log_line
from gt.errors import UnsupportedOp
from gt.ir.spec import DTYPES, Spec
from gt.wire import messages as m
from gt.wire.link import hello
from tests.corpus.transcript import Transcript

CLIENT = b"client"
HEAP = 1 << 40  # bytes of a worker's arena


class PlannedSession:
    """The methods of gt.client.session.Session."""

    failure = None
    waiting = False

    def __init__(self, config: str, path: str, workers: int, transcript: Transcript) -> None:
        self.transcript = transcript
        self.on_idle: Any = None
        self.shapes: list[torch.Tensor] = []  # what an op whose shape depends on values makes
        self._core = Core(logging=True, pace=Pace())
        self._kept: dict[int, np.ndarray] = {}
        self._uploads: dict[int, deque[tuple[int, int]]] = {}  # key -> offset and total of frames that are not sent
        self._batch = self._request = 0
        self._answers: dict[int, Any] = {}
        self._error: dict | None = None
        for index in range(workers):
            info = {"name": "", "pid": 1, "heap_bytes": HEAP, "backend": "torch"}
            self._handle(Received(b"w%d" % index, hello("worker", info=info)))
        self._handle(Received(CLIENT, hello("client", config=config, config_path=path, switches={"workers": workers})))
        self.workers, self.groups = self._answers.pop(-1)

    # ---- the dispatcher, and what answers it

    def _handle(self, event: Received) -> None:
        pending: deque[Received | Turn] = deque([event])
        while pending:
            for action in self._core.handle(pending.popleft()):
                if isinstance(action, TurnWanted):
                    if not pending:
                        pending.append(Turn(0.0))
                else:
                    pending += self._act(action)
        if self._error is not None:
            error, self._error = self._error, None
            raise errors.from_wire(error)

    def _act(self, action: Action) -> Iterator[Received]:
        if isinstance(action, Lines):
            for row in action.text.split(MARK)[1:]:
                self.transcript.add(f"log{row}")
        elif isinstance(action, Log):
            self.transcript.add(f"log{log_line(action, 0)}")
        elif isinstance(action, Send):
            self.transcript.message(action.peer.decode(), action.message, action.frames)
            if action.peer == CLIENT:
                yield from self._client(action.message, action.frames)
            else:
                yield from self._worker(action.peer, action.message, action.frames)

    def _worker(self, peer: bytes, message: m.Message, frames: Sequence) -> Iterator[Received]:
        if isinstance(message, m.Run):
            yield Received(peer, m.Done(message.seq))
        elif isinstance(message, m.Data):
            yield Received(peer, m.UploadProgress(message.key, message.offset + sum(map(len, frames))))

    def _client(self, message: m.Message, frames: Sequence) -> Iterator[Received]:
        if isinstance(message, m.Welcome):
            self._answers[-1] = message.workers, message.groups
        elif isinstance(message, m.UploadRequest):
            size = self._kept[message.tensor].itemsize
            total = size * sum(prod(stop - start for start, stop in box) for box in message.boxes)
            self._uploads[message.key] = deque((at, total) for at in range(0, max(total, 1), m.CHUNK))
            yield from self._more(message.key, message.upto)
        elif isinstance(message, m.WindowUpdate):
            yield from self._more(message.key, message.upto)
        elif isinstance(message, m.Release):
            for tensor in message.tensors:
                self._kept.pop(tensor, None)
        elif isinstance(message, m.Value):
            self._answers[message.request] = tuple(message.shape), message.dtype
        elif isinstance(message, m.Described):
            self._answers[message.request] = message.specs
        elif isinstance(message, m.Report):
            self._answers[message.request] = message.body
        elif isinstance(message, (m.Failed, m.Reject)):
            self._error = self._error or message.error

    def _more(self, key: int, upto: int) -> Iterator[Received]:
        """Frames of an upload that end by byte `upto`."""
        left = self._uploads[key]
        while left and min(left[0][0] + m.CHUNK, left[0][1]) <= upto:
            offset, total = left.popleft()
            frames = (bytes(min(m.CHUNK, total - offset)),) if total else ()
            yield Received(CLIENT, m.UploadChunk(key, offset, total), frames)

    def _ask(self, question: m.Message) -> Any:
        """A question that workers have no part in answering."""
        self._handle(Received(CLIENT, question))
        return self._answers.pop(question.request)  # type: ignore[attr-defined]

    def _number(self) -> int:
        self._request += 1
        return self._request

    def _open(self, number: int) -> Any:
        """The dispatcher's record of a question that workers answer; None if it is answered."""
        return self._core.sessions[CLIENT].fetches.open.get(number)

    # ---- the client's questions

    def submit(self, templates: list, origins: list, code: list, frames: Sequence, asks: bool = False) -> None:
        self._handle(Received(CLIENT, m.Ops(self._batch, templates, origins, code), tuple(frames)))
        self._batch += 1

    def keep(self, tensor: int, array: np.ndarray) -> int:
        self._kept[tensor] = array
        return -1

    def crowded(self, nbytes: int) -> bool:
        return False

    def fetch(self, tensor: int, nbytes: int = 0) -> tuple[tuple[int, ...], str, np.ndarray]:
        number = self._number()
        self._handle(Received(CLIENT, m.Fetch(number, tensor)))
        request = self._open(number)
        for key, size in list(request.sizes.items()) if request is not None else ():
            for offset in range(0, max(size, 1), m.CHUNK):
                frames = (bytes(min(m.CHUNK, size - offset)),) if size else ()
                self._handle(Received(b"w%d" % request.keys[key], m.Piece(key, offset, size), frames))
        shape, dtype = self._answers.pop(number)
        return shape, dtype, np.zeros(prod(shape) * DTYPES[dtype][0], np.uint8)

    def synchronize(self) -> None:
        self.fetch(m.THROUGH)

    def describe(self, tensors: list[int]) -> list[Spec]:
        """The specs of the shapes that the program declares for its op."""
        if len(self.shapes) != len(tensors):
            raise UnsupportedOp("a shape depends on values, and nothing was computed")
        number = self._number()
        self._handle(Received(CLIENT, m.Describe(number, tensors)))
        request = self._open(number)
        for (key, index), made in zip(list(request.keys.items()), self.shapes, strict=True):
            spec = Spec(tuple(made.shape), made.stride(), 0, str(made.dtype)[6:])
            self._handle(Received(b"w%d" % index, m.Described(key, [spec.wire()])))
        return [Spec.from_wire(row) for row in self._answers.pop(number)]

    def seal(self, *what: Any) -> dict[str, Any]:
        return self._ask(m.FinishCapture(self._number(), *what))

    def inspect(self, tensor: int) -> dict[str, Any]:
        return self._ask(m.Inspect(self._number(), tensor))

    def inspect_fragments(self, slot: int) -> dict[str, Any]:
        return self._ask(m.InspectFragments(self._number(), slot))

    def stats(self, program: int = -1) -> dict[str, Any]:
        """Statistics in a server's form, all zero."""
        row = {"instructions": 0, "collectives": {}, "live_tensors": 0, "live_bytes": 0, "definitions": 0, "actions": []}
        workers = [{"name": name, **row, "bytes_sent": {}, "bytes_received": {}} for name in self.workers]
        return {"dispatcher": {"tensor_bytes_relayed": 0}, "workers": workers, "client": {}}

    def close(self) -> None:
        self._core.check()
        self._handle(Received(CLIENT, m.Goodbye()))


@contextmanager
def written(config: str | None, workers: int) -> Iterator[Transcript]:
    """Inside, whatever connects or starts workers gets a session that is written to the transcript.

    config: path of a YAML instead of the program's; None for that. workers: 0 for as many as program or config ask for.
    """
    transcript = Transcript()

    def begin(given: str | None, wanted: int) -> None:
        path = next(p for p in (config, given, env.get("GT_CONFIG")) if p is not None)
        text, path = source(path, "")
        register.register()
        session = PlannedSession(text, path, workers or wanted or api.workers_named((text, path)) or 1, transcript)
        current_session.connect(session, text, path)

    before, api._Started.plan = (api._Started.plan, current_session.set_aside()), begin
    try:
        yield transcript
        api.disconnect()
    finally:
        current_session.disconnect()
        api._Started.plan = before[0]
        current_session.restore(before[1])
