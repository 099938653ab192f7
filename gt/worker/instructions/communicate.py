"""Steps that move data between workers, through the plane: collectives and pairwise transfers.

Transfers carry boxes one after the other, each row-major; collectives carry a rank's local tensor, row-major. A step may be
unable to bring its part (no such tensor, another shape, no memory). Then it takes part with no bytes. The other members fail at
once instead of waiting, and later exchanges stay matched, also those of other programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from gt.errors import SystemFailure
from gt.ir.layout import Box, volume
from gt.ir.spec import DTYPES, contiguous
from gt.worker.context import ExecutionContext
from gt.worker.engine.base import Combine, Moves, Tensor
from gt.worker.instructions.pieces import as_boxes, extent, index, leading, local, part_of, shared
from gt.worker.instructions.step import Step
from gt.worker.plane.batch import unused

# Every step below has the same form. What can fail locally is done first. If it fails, the step still takes part, with NOTHING,
# so that peers' sequences of exchanges stay equal to this worker's; only then it raises. `finish` is called by the plane, once
# what follows may count on the bytes.
NOTHING = memoryview(bytearray())


def peers(payload: dict[str, Any]) -> Sequence[int]:
    """Workers that take part in a transfer or collective, this one included."""
    if "team" in payload:
        return payload["team"]["workers"]
    channels = [payload["channel"]] if "channel" in payload else [channel for channel, _ in payload.get("parts", ())]
    return [channel["peer"] for channel in channels]


def _declined(decline: Callable, *args: Any) -> None:
    """Take part with no bytes; the caller raises the reason."""
    with suppress(Exception):
        decline(*args)


def _combines(engine: Moves) -> Any:
    # One cache for each bound step: it ends with its definition, and its keys (reduction, dtype) are few.
    return lru_cache(maxsize=None)(engine.combine)


def all_reduce(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    """The reduction `op` of the members' tensors, in place."""
    held, team, op = worker.tensors, payload["team"], payload["op"]
    engine, plane = worker.route(team["workers"])
    combines = _combines(engine)

    def step(code: list, at: int) -> None:
        worker.collectives["all_reduce"] += 1
        try:
            target = held[code[at]]
            # Row-major bytes: the tensor itself if it is contiguous, else a copy, which `finish` copies back.
            data = engine.packed(target)
            view = engine.view(data)
            # avg is a sum and one division at the end; dividing by steps would round each time.
            combine: Combine = combines("sum" if op == "avg" else op, engine.dtype(target))
        except Exception:
            _declined(plane.all_reduce, team, NOTHING, unused)
            raise

        def finish() -> None:
            if op == "avg":
                engine.divide(data, len(team["workers"]))
            if data is not target:
                engine.copy(target, data)

        plane.all_reduce(team, view, combine, finish)

    return step


def together(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    """Does nothing by itself: gt.worker.program.overlap makes one row of the collectives that follow."""
    return lambda code, at: None


def all_gather(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    """dst: the whole tensor, from the members' pieces src, which are its `boxes`."""
    held, team = worker.tensors, payload["team"]
    engine, plane = worker.route(team["workers"])
    shape, dtype = tuple(payload["shape"]), payload["dtype"]
    ranks = [as_boxes(rows) for rows in payload["boxes"]]
    own = local(ranks[team["rank"]])[0]
    # A rank's boxes are in global indices: ((0, 4), (0, 8)) are rows 0 to 3 of a [8, 8] tensor on two ranks.
    # A piece that is one run of the result's memory is received in place; others land in staging memory and are copied.
    direct = [len(boxes) == 1 and leading(boxes[0], shape) for boxes in ranks]
    need, nbytes = worker.budget.need, contiguous(shape, dtype).nbytes

    def step(code: list, at: int) -> None:
        worker.collectives["all_gather"] += 1
        try:
            src = engine.view(engine.packed(planned(engine, held[code[at]], own, dtype)))
            need(nbytes)
            dst = engine.staging(shape, dtype)
            pieces = [
                dst[index(boxes[0])] if straight else engine.staging(local(boxes)[0], dtype)
                for boxes, straight in zip(ranks, direct, strict=True)
            ]
            views = [engine.view(piece) for piece in pieces]
        except Exception:
            _declined(plane.all_gather, team, NOTHING, [NOTHING] * len(ranks))
            raise
        target = code[at + 1]

        def finish() -> None:
            for boxes, piece, straight in zip(ranks, pieces, direct, strict=True):
                if not straight:
                    for box, place in zip(boxes, local(boxes)[1], strict=True):
                        engine.copy(dst[index(box)], piece[index(place)])
            held[target] = engine.adopt(dst)

        plane.all_gather(team, src, views, finish)

    return step


def reduce_scatter(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    """dst: this rank's boxes of the reduction `op` of the members' whole terms src."""
    held, team = worker.tensors, payload["team"]
    engine, plane = worker.route(team["workers"])
    op, shape, dtype = payload["op"], tuple(payload["shape"]), payload["dtype"]
    ranks = [as_boxes(rows) for rows in payload["boxes"]]
    own = local(ranks[team["rank"]])[0]
    combines = _combines(engine)
    need, nbytes = worker.budget.need, contiguous(own, dtype).nbytes

    def step(code: list, at: int) -> None:
        worker.collectives["reduce_scatter"] += 1
        try:
            src = planned(engine, held[code[at]], shape, dtype)
            need(nbytes)
            # Section r is the part of this worker's term that rank r will own.
            sections = [engine.view(_assembled(engine, src, boxes, dtype)) for boxes in ranks]
            out = engine.staging(own, dtype)
            view, combine = engine.view(out), combines(op, dtype)
        except Exception:
            _declined(plane.reduce_scatter, team, [NOTHING] * len(ranks), NOTHING, unused)
            raise
        target = code[at + 1]

        def finish() -> None:
            held[target] = engine.adopt(out)

        plane.reduce_scatter(team, sections, view, combine, finish)

    return step


def all_to_all(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    """dst: this rank's boxes `want` of a tensor of which each member's src has the boxes `have`."""
    held, team = worker.tensors, payload["team"]
    engine, plane = worker.route(team["workers"])
    dtype, rank = payload["dtype"], payload["team"]["rank"]
    have = [as_boxes(rows) for rows in payload["have"]]
    want = [as_boxes(rows) for rows in payload["want"]]
    shape, own = local(want[rank])[0], local(have[rank])[0]
    # outgoing[r]: boxes of src that rank r wants. incoming[r]: boxes of dst that rank r has. Both sides list the overlaps in
    # the same order, so the bytes need no description.
    outgoing = [[src for src, _ in shared(have[rank], boxes)] for boxes in want]
    incoming = [[dst for _, dst in shared(boxes, want[rank])] for boxes in have]
    need, nbytes = worker.budget.need, contiguous(shape, dtype).nbytes
    # Bytes of the largest section between any two members: the same figure on all of them.
    longest = DTYPES[dtype][0] * max(sum(volume(src) for src, _ in shared(a, b)) for a in have for b in want)

    def step(code: list, at: int) -> None:
        worker.collectives["all_to_all"] += 1
        try:
            src = planned(engine, held[code[at]], own, dtype)
            need(nbytes)
            dst = engine.staging(shape, dtype)
            sends = [engine.view(_packed(engine, src, boxes, dtype)) for boxes in outgoing]
            recvs = [_room(engine, dst, boxes, dtype) for boxes in incoming]
            views = [engine.view(part) for part in recvs]
        except Exception:
            _declined(plane.all_to_all, team, [NOTHING] * len(have), [NOTHING] * len(have))
            raise
        plane.all_to_all(team, sends, views, longest)
        for boxes, part in zip(incoming, recvs, strict=True):
            _spread(engine, dst, boxes, part)
        held[code[at + 1]] = engine.adopt(dst)

    return step


def send(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    """Send `boxes` of src to the other end of a channel."""
    held, channel = worker.tensors, payload["channel"]
    engine, plane = worker.route([channel["peer"]])
    boxes = as_boxes(payload["boxes"])

    def step(code: list, at: int) -> None:
        try:
            src = held[code[at]]
            data = engine.view(_packed(engine, src, boxes, engine.dtype(src)))
        except Exception:
            _declined(plane.send, channel, NOTHING)
            raise
        plane.send(channel, data)

    return step


def recv(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    """dst: a new tensor of the boxes that peers send for it."""
    held, receive = worker.tensors, _receiver(worker, payload)
    engine = _between(worker, payload)
    need, nbytes = worker.budget.need, contiguous(tuple(payload["shape"]), payload["dtype"]).nbytes

    def step(code: list, at: int) -> None:
        try:
            need(nbytes)
            dst = engine.staging(payload["shape"], payload["dtype"])
        except Exception:
            _decline(worker, payload)
            raise
        receive(dst)
        held[code[at]] = engine.adopt(dst)

    return step


def merge(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    """dst: as recv, with the boxes of `local` from src."""
    held, receive = worker.tensors, _receiver(worker, payload)
    engine = _between(worker, payload)
    need, nbytes = worker.budget.need, contiguous(tuple(payload["shape"]), payload["dtype"]).nbytes
    pairs = [as_boxes(pair) for pair in payload["local"]]

    def step(code: list, at: int) -> None:
        try:
            src = held[code[at]]
            need(nbytes)
            dst = engine.staging(payload["shape"], payload["dtype"])
            # First the part that this worker has already; peers send the rest.
            for source, target in pairs:
                engine.copy(dst[index(target)], part_of(src, source))
        except Exception:
            _decline(worker, payload)
            raise
        receive(dst)
        held[code[at + 1]] = engine.adopt(dst)

    return step


def _between(worker: ExecutionContext, payload: dict[str, Any]) -> Moves:
    """Engine of a receive: the same for all parts, which are assembled in one kind of memory."""
    engines = [worker.route([channel["peer"]])[0] for channel, _ in payload["parts"]]
    if any(engine is not engines[0] for engine in engines):
        raise SystemFailure("workers on GPUs and others send parts of one tensor: keep groups to one kind of worker")
    return engines[0] if engines else worker.route([])[0]


def _decline(worker: ExecutionContext, payload: dict[str, Any]) -> None:
    """Receive every part with no room for it: the channel drops the bytes."""
    for channel, _ in payload["parts"]:
        _, plane = worker.route([channel["peer"]])
        _declined(plane.recv, channel, NOTHING)


def _receiver(worker: ExecutionContext, payload: dict[str, Any]) -> Any:
    """dst -> None: receives every part, even after one failed, so that the channels of living peers stay matched."""
    dtype = payload["dtype"]
    engine = _between(worker, payload)
    parts = [(worker.route([channel["peer"]])[1], channel, as_boxes(rows)) for channel, rows in payload["parts"]]

    def receive(dst: Tensor) -> None:
        failure: Exception | None = None
        for plane, channel, boxes in parts:
            try:
                room = _room(engine, dst, boxes, dtype)
                view = engine.view(room)
            except Exception as error:
                failure = failure or error
                _declined(plane.recv, channel, NOTHING)
                continue  # the other parts are still received: their senders count on it
            try:
                plane.recv(channel, view)
                _spread(engine, dst, boxes, room)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    return receive


# ---- boxes of a tensor and runs of bytes


def planned(engine: Moves, tensor: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    """The tensor; ValueError unless it is as planned, or members would read old bytes of a team's buffer."""
    if tuple(tensor.shape) != shape or engine.dtype(tensor) != dtype:
        raise ValueError(f"the tensor is {engine.dtype(tensor)}{list(tensor.shape)}, planned is {dtype}{list(shape)}")
    return tensor


def _assembled(engine: Moves, src: Tensor, boxes: list[Box], dtype: str) -> Tensor:
    """The local tensor of these boxes of src, packed for `view`."""
    if len(boxes) == 1:
        return engine.packed(part_of(src, boxes[0]))
    shape, places = local(boxes)
    part = engine.staging(shape, dtype)
    for box, place in zip(boxes, places, strict=True):
        engine.copy(part[index(place)], part_of(src, box))
    return part


def _packed(engine: Moves, src: Tensor, boxes: list[Box], dtype: str) -> Tensor:
    """The boxes of src one after the other."""
    if len(boxes) == 1:
        return engine.packed(part_of(src, boxes[0]))
    flat = engine.staging((sum(map(volume, boxes)),), dtype)
    for box, run in _runs(engine, flat, boxes):
        engine.copy(run, part_of(src, box))
    return flat


def _room(engine: Moves, dst: Tensor, boxes: list[Box], dtype: str) -> Tensor:
    """Memory to receive boxes of dst in: their own place where they are one run of memory, else a staging tensor."""
    if len(boxes) == 1 and leading(boxes[0], tuple(dst.shape)):
        return dst[index(boxes[0])]
    return engine.staging((sum(map(volume, boxes)),), dtype)


def _spread(engine: Moves, dst: Tensor, boxes: list[Box], room: Tensor) -> None:
    """Copy boxes from the memory of `_room` to their place in dst."""
    if len(boxes) == 1 and leading(boxes[0], tuple(dst.shape)):
        return
    for box, run in _runs(engine, room, boxes):
        engine.copy(dst[index(box)], run)


def _runs(engine: Moves, flat: Tensor, boxes: list[Box]) -> list[tuple[Box, Tensor]]:
    runs, start = [], 0
    for box in boxes:
        stop = start + volume(box)
        runs.append((box, engine.flat(flat[start:stop], extent(box))))
        start = stop
    return runs
