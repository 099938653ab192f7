"""Parts for tests of the worker: definitions by hand, an executor with a list as its link, groups of executors in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gt.ir.instr import Define
from gt.ir.template import to_wire
from gt.wire.liveness import home
from gt.worker.engine.torch import NAME, TorchEngine
from gt.worker.executor import Executor
from gt.worker.plane.base import PeerGone
from gt.worker.plane.shm import ShmPlane
from tests.helpers.limits import limit


def spec(tensor: torch.Tensor) -> list:
    return [list(tensor.shape), list(tensor.stride()), tensor.storage_offset(), NAME[tensor.dtype]]


def new(tensor: torch.Tensor) -> list:
    """An output with this tensor's spec, in memory of its own."""
    return ["new", [list(tensor.shape), list(tensor.stride()), 0, NAME[tensor.dtype]], -1]


def op(name: str, args: Sequence[Any], tensors: int, outs: list, values: int = 0, random: Any = None, **kwargs: Any) -> dict:
    return {
        "op": name,
        "args": to_wire(list(args)),
        "kwargs": {key: to_wire(value) for key, value in kwargs.items()},
        "tensors": tensors,
        "values": values,
        "outs": outs,
        "writes": [of for kind, _, of in outs if kind == "same"],
        "random": random,
    }


class Bench:
    """An executor, the messages that it sent, and definitions numbered in order."""

    def __init__(self, plane: Any = None, engine: Any = None) -> None:
        self.sent: list[tuple[Any, tuple]] = []
        self.executor = Executor(engine or TorchEngine("cpu"), plane or DeadPlane(), self._send)
        self.number = 15

    def _send(self, message: Any, frames: tuple = ()) -> None:
        self.sent.append((message, frames))

    def put(self, **tensors: Any) -> None:
        """put(_1=x): x goes by id 1."""
        self.executor.tensors.update({int(key[1:]): value for key, value in tensors.items()})

    def do(self, kind: str, payload: dict, *operands: Any, seq: int = 0) -> None:
        self.number += 1
        self.executor.define([Define(self.number, kind, payload).wire()])
        self.executor.run([self.number, seq, *operands], 100)

    def __getitem__(self, tensor: int) -> Any:
        return self.executor.tensors[tensor]


class DeadPlane:
    """A plane whose peers are all gone."""

    def __getattr__(self, name: str) -> Callable:
        def call(*args: Any) -> None:
            raise PeerGone(3, "it was killed")

        return call

    def counters(self) -> dict:
        return {"bytes_sent": {}, "bytes_received": {}}

    def ways(self) -> dict:
        return {}

    def facts(self) -> dict:
        return {}

    def cursors(self) -> dict:
        return {}

    def restore_cursors(self, cursors: dict) -> None:
        assert not cursors


def world(size: int, part: Callable[[Bench, int], Any], engine: Any = None) -> list[Any]:
    """part(bench, rank) in `size` threads, each an executor with a real plane; their results."""
    planes = [ShmPlane(1 << 20) for _ in range(size)]
    infos = [plane.open() for plane in planes]
    import os
    import socket

    rows = [
        [i, f"w{i}", os.getpid(), socket.gethostname(), info["heap_fd"], info["heap_bytes"], info["doorbell"], home(), 0]
        for i, info in enumerate(infos)
    ]
    results: list[Any] = [None] * size

    def main(rank: int) -> None:
        try:
            results[rank] = part(Bench(planes[rank], engine), rank)
        except BaseException as error:
            results[rank] = error
            for plane in planes:
                plane.abort(rank, f"its thread failed: {error}")

    for plane in planes:
        plane.world(rows)
    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit(30))
    for plane in planes:
        plane.close()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
