"""Steps of this worker alone: ops, uploads, and answers to the dispatcher."""

from __future__ import annotations

from typing import Any

from gt.ir.spec import Spec
from gt.wire.messages import Described
from gt.worker.context import ExecutionContext
from gt.worker.instructions.pieces import as_boxes, index, local, part_of
from gt.worker.instructions.step import Step


def op(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    tensors, values = payload["tensors"], payload["values"]
    results = sum(out[0] in ("new", "view") for out in payload["outs"])
    call = worker.engine.bind(payload)
    if values == 0 and (tensors, results) in SPECIAL:
        return SPECIAL[tensors, results](worker.tensors, call)
    return _general(worker.tensors, call, tensors, values, results)


def _general(held: dict[int, Any], call: Any, tensors: int, values: int, results: int) -> Step:
    get = held.__getitem__
    inputs = tensors + values

    def none(code: list, at: int) -> None:
        call(*map(get, code[at : at + tensors]), *code[at + tensors : at + inputs])

    def one(code: list, at: int) -> None:
        held[code[at + inputs]] = call(*map(get, code[at : at + tensors]), *code[at + tensors : at + inputs])

    def many(code: list, at: int) -> None:
        outputs = call(*map(get, code[at : at + tensors]), *code[at + tensors : at + inputs])
        held.update(zip(code[at + inputs : at + inputs + results], outputs, strict=True))

    return none if results == 0 else one if results == 1 else many


def _one_to_none(held: dict[int, Any], call: Any) -> Step:
    def step(code: list, at: int) -> None:
        call(held[code[at]])

    return step


def _one_to_one(held: dict[int, Any], call: Any) -> Step:
    def step(code: list, at: int) -> None:
        held[code[at + 1]] = call(held[code[at]])

    return step


def _two_to_none(held: dict[int, Any], call: Any) -> Step:
    def step(code: list, at: int) -> None:
        call(held[code[at]], held[code[at + 1]])

    return step


def _two_to_one(held: dict[int, Any], call: Any) -> Step:
    def step(code: list, at: int) -> None:
        held[code[at + 2]] = call(held[code[at]], held[code[at + 1]])

    return step


def _three_to_one(held: dict[int, Any], call: Any) -> Step:
    def step(code: list, at: int) -> None:
        held[code[at + 3]] = call(held[code[at]], held[code[at + 1]], held[code[at + 2]])

    return step


# By (tensors, results): ops of these shapes without scalars are most of a program. Direct indexing spares them the slices and
# the `map` of the general step.
SPECIAL = {
    (1, 0): _one_to_none,
    (1, 1): _one_to_one,
    (2, 0): _two_to_none,
    (2, 1): _two_to_one,
    (3, 1): _three_to_one,
}


def host_op(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    tensors, inputs = payload["tensors"], payload["tensors"] + payload["values"]
    end = inputs + sum(out[0] == "new" for out in payload["outs"])
    # `fresh` is for the copies alone; to the engine the op is like any other.
    call = worker.engine.lane().bind({key: value for key, value in payload.items() if key != "fresh"})
    run, facts = worker.host_ops.run, (frozenset(payload["fresh"]), frozenset(payload["writes"]))

    def step(code: list, at: int) -> None:
        run(call, code[at : at + tensors], code[at + tensors : at + inputs], code[at + inputs : at + end], facts)

    return step


def stale(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    drop = worker.host_ops.drop

    def step(code: list, at: int) -> None:
        drop(code[at])

    return step


def evict(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    tensors, space, path = worker.tensors, payload["space"], payload["path"]

    def step(code: list, at: int) -> None:
        tensors.evict(code[at], space, path)

    return step


def restore(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    tensors = worker.tensors

    def step(code: list, at: int) -> None:
        tensors.prefetch(code[at])

    return step


def shard(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    engine, held = worker.engine, worker.tensors
    boxes, shape = as_boxes(payload["boxes"]), tuple(payload["shape"])
    _, places = local(boxes)

    def step(code: list, at: int) -> None:
        src = held[code[at]]
        if len(boxes) == 1:
            # A copy, not a view: a view would keep the whole tensor's memory alive.
            held[code[at + 1]] = engine.clone(part_of(src, boxes[0]))
            return
        dst = engine.empty(shape, engine.dtype(src))
        for box, place in zip(boxes, places, strict=True):
            engine.copy(dst[index(place)], part_of(src, box))
        held[code[at + 1]] = dst

    return step


def partial(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    engine, held, keep, reduction = worker.engine, worker.tensors, payload["keep"], payload["op"]

    def step(code: list, at: int) -> None:
        src = held[code[at]]
        # A copy, since an all-reduce in place may follow.
        held[code[at + 1]] = engine.clone(src) if keep else engine.filled(src, reduction)

    return step


def upload(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    engine, held, uploads, arenas = worker.engine, worker.tensors, worker.uploads, worker.arenas
    spec = Spec(tuple(payload["shape"]), tuple(payload["stride"]), 0, payload["dtype"])

    def step(code: list, at: int) -> None:
        # A client of this host shares its memory, or names a file: no bytes come in messages then.
        block = arenas.take_read(code[at + 1])
        if block is not None:
            held[code[at]] = arenas.read(block, spec)
            return
        data = uploads.take(code[at + 1], worker.epoch)
        # The buffer was admitted when it began to arrive; it becomes the tensor's memory, or is copied to the device.
        worker.budget.hold(len(data))
        held[code[at]] = engine.upload(data, spec)

    return step


def fetch(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    engine, held, begin, arenas = worker.engine, worker.tensors, worker.downloads.begin, worker.arenas

    def step(code: list, at: int) -> None:
        # Before the look-up, which may raise: the block is used up in any case.
        block = arenas.take_write(code[at + 1])
        src = held[code[at]]
        if block is not None:
            arenas.write(block, src, worker.base + code[at - 1])
            return
        packed = engine.packed(src)
        begin(code[at + 1], engine.view(packed), packed is not src)
        # More instructions follow in this Run, which may change the tensor under the bytes that wait for credit.
        if at + 2 < len(code):
            worker.downloads.copy_unsent()

    return step


def describe(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    engine, held, send = worker.engine, worker.tensors, worker.send

    def step(code: list, at: int) -> None:
        send(Described(code[at + 1], [engine.spec(held[code[at]]).wire()]))

    return step


def alias(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    held = worker.tensors

    def step(code: list, at: int) -> None:
        held[code[at + 1]] = held[code[at]]
        if held.away:
            held.renamed(code[at + 1])

    return step


def fill(worker: ExecutionContext, payload: dict[str, Any]) -> Step:
    engine, held = worker.engine, worker.tensors
    spec = Spec(tuple(payload["shape"]), tuple(payload["stride"]), 0, payload["dtype"])

    def step(code: list, at: int) -> None:
        held[code[at]] = engine.zeros(spec)

    return step
