"""The computation of each worker of a placement in a step, measured on one GPU: one worker runs at a time, and nothing is sent.

`python benchmarks/gpu/work.py [--json FILE] [--preset 512m] [--cases tp4:x1:1 d12=8,4:4:zb-h1] [--rivals 4:12:1]`.
All workers share the GPU. The dispatcher plans and schedules as ever, each worker records its CUDA graphs, and then one after
another replays them while the others do nothing: that is its time. What would come from others is made up where it would
arrive, and sums over workers are left out, so losses mean nothing. It is a floor: transfers and waiting come on top.
A case is bench_tp_pp.py's (of --preset), or a model of examples/gpt2 and a case of bench_pipeline.py. Rivals are cases of
tensor parallel alone of native_tp.py: one rank by itself, in a process group that moves nothing.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import bench_pipeline
import bench_tp_pp
import cases
import native
import native_tp

COLUMNS = {"": -34, "ms of each worker": 44, "none works, ms": 16, "longest": 10, "mean": 10, "first s": 9}
ALL, NONE = -1, -2  # who works
LARGE = 1 << 20  # bytes from which what comes from others is activations or gradients, not numbers of tokens


# ---- workers


class Turn:
    """Whose turn it is to work: a number in a file that all of them map."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    @property
    def whose(self) -> int:
        return int(struct.unpack("q", self._map)[0])

    @whose.setter
    def whose(self, number: int) -> None:
        self._map[:] = struct.pack("q", number)


def nowhere(engine: Any) -> Any:
    """A plane whose peers are not there."""
    import torch

    from gt.worker.plane.shm import ShmPlane

    pattern = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).view(torch.uint8)

    class Nowhere(ShmPlane):
        transport = "nowhere"

        def open(self, index: int = -1) -> dict[str, Any]:
            return {**super().open(index), **({} if engine.direct is None else {"unique_id": "nowhere"})}

        def form(self, members: Sequence[int], own: int, unique_id: str) -> None:
            self._pattern = pattern.to("cuda")

        def device_transport(self, workers: Sequence[int]) -> Any:
            return None if engine.direct is None else self

        def send(self, channel: Any, data: Any) -> None:
            pass

        def recv(self, channel: Any, into: Any) -> None:
            if isinstance(into, memoryview):
                into.cast("B")[:] = bytes(len(into))
                return
            for start in range(0, len(into), len(self._pattern)):
                part = into[start : start + len(self._pattern)]
                part[:] = self._pattern[: len(part)] if len(into) >= LARGE else 0

        def all_reduce(self, team: Any, data: Any, combine: Any, then: Callable[[], None] = lambda: None) -> None:
            then()

        def all_gather(self, team: Any, data: Any, outs: Sequence[Any]) -> None:
            for out in outs:
                out[:] = data[: len(out)]

        def reduce_scatter(self, team: Any, sections: Sequence[Any], out: Any, combine: Any) -> None:
            out[:] = sections[team["rank"]]

        def all_to_all(self, team: Any, sends: Sequence[Any], recvs: Sequence[Any], longest: int = 0) -> None:
            for piece, into in zip(sends, recvs, strict=True):
                into[: len(piece)] = piece[: len(into)]

    return Nowhere()


def worker(address: str, number: str, turn: str) -> int:
    """One of them: replays its graphs while it is its turn."""
    import torch

    from gt import env
    from gt.worker.loop import WorkerOptions, run
    from gt.worker.plane import registry

    own, whose = int(number), Turn(Path(turn))
    registry.PLANES = dict.fromkeys(registry.PLANES, nowhere)  # type: ignore[misc]
    if torch.cuda.is_available():
        replay = torch.cuda.CUDAGraph.replay

        def in_turn(graph: Any) -> None:
            if whose.whose in (own, ALL):
                replay(graph)

        torch.cuda.CUDAGraph.replay = in_turn  # type: ignore[method-assign]
    host, _, port = address.rpartition(":")
    options = WorkerOptions(host, int(port), env.token(None), f"gt.worker {number}")
    why = run(options, joined=lambda name: print(end="+", flush=True))
    return int(bool(why))


def workers(stack: ExitStack, count: int, config: str, turn: Path) -> None:
    """In place of gt.gpu_workers."""
    import gt
    from gt.launch import local

    started = local.start(0)
    stack.callback(started.stop)
    environment = {**os.environ, "GT_TOKEN": started.token}
    for number in range(count):
        said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        stack.callback(said.close)
        command = [sys.executable, __file__, "--child", "worker", started.address, str(number), str(turn)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=said)
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        if not process.stdout.read(1):  # of a worker that has joined
            said.seek(0)
            raise SystemExit(f"worker {number} did not come up: {said.read()[-2000:]}")
    gt.connect(started.address, config, token=started.token)


# ---- cases


def ours(case: str, size: str, preset: str, vocab: str, seconds: float) -> cases.Row:
    import torch

    import gt

    counts: list[int] = []
    with ExitStack() as stack:
        turn = Path(stack.enter_context(tempfile.NamedTemporaryFile()).name)
        turn.write_bytes(bytes(8))
        whose = Turn(turn)
        whose.whose = ALL

        def start(count: int, config: str) -> None:
            counts.append(count)
            workers(stack, count, config, turn)

        for name in ("gpu_workers", "cpu_workers"):
            stack.enter_context(mock.patch.object(gt, name, start))
        model, _, rest = case.rpartition("=")
        step = bench_pipeline.trainer(rest, size, model) if model else bench_tp_pp.training(case, size, preset, vocab)[0]
        data = bench_tp_pp.batch_of(size, vocab)

        def timed(number: int) -> float:
            whose.whose = number
            return cases.timed(lambda: step(*data), torch.remote.synchronize, seconds)[0]

        begun = time.perf_counter()
        for _ in range(8):
            step(*data)
            torch.remote.synchronize()
        first = time.perf_counter() - begun
        print(step.explain(), file=sys.stderr)
        turns = range(counts[0]) if torch.cuda.is_available() else [ALL]
        each = [min(of) for of in zip(*([timed(number) for number in turns] for _ in range(2)), strict=True)]
        row = {"each": each, "none": timed(NONE), "first s": first}
        gt.shutdown()
        return row


class Alone(native.World):
    """A rank whose peers are not there."""

    def wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def agree(self, count: int) -> int:
        return count

    def gathered(self, value: float) -> list[float]:
        return [value]

    def told(self, found: cases.Row, knows: bool) -> cases.Row:
        return found


def rival(case: str, size: str, preset: str, vocab: str, seconds: float) -> cases.Row:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    asked = native_tp.Case.read(case)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=asked.gpus)
    own = Alone(0, asked.gpus, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    split = native_tp.split

    def split_whole(stage: Any, mesh: Any) -> None:
        """Nobody told this rank its part of the weights."""
        split(stage, mesh)
        for p in stage.parameters():
            torch.nn.init.normal_(getattr(p, "to_local", lambda p=p: p)().detach(), std=0.02)

    batch, length = map(int, size.split("x"))
    with mock.patch.object(native_tp, "split", split_whole):
        row = native_tp.run(own, asked, (batch, length), preset, int(vocab), seconds)
    return {"each": [row["ms"]], "first s": row["first s"]}


def rows(args: argparse.Namespace) -> Iterator[tuple[str, cases.Row | None, str]]:
    rest = (args.size, args.preset, args.vocab, "--seconds", args.seconds)
    for case in args.rivals:
        yield f"native {case}", *cases.together([[__file__, "--child", "native", case, *rest]], args.limit, OMP_NUM_THREADS="1")
    for case in args.cases:
        yield case, *cases.together([[__file__, "--child", "gt", case, *rest]], args.limit)


def cells(row: cases.Row) -> list[str]:
    n, each = cases.number, row["each"]
    mean = sum(each) / len(each)
    return [" ".join(f"{ms:.2f}" for ms in each), n(row.get("none")), n(max(each)), n(mean), n(row["first s"], ".1f")]


def main() -> int:
    parser = cases.flags(__doc__ or "")
    parser.add_argument("--preset", default="seed", help="of the tuning demo")
    parser.add_argument("--vocab", type=int, default=native_tp.VOCAB, help="rows of embedding and head of the tuning demo")
    parser.add_argument("--size", default="32x1024", help="batch x tokens")
    parser.add_argument("--cases", nargs="*", default=["tp4:x1:1", "tp2pp2:x2:4:zb-h1"])
    parser.add_argument("--rivals", nargs="*", default=[], help="cases of native_tp.py, as 4:8:1 or 4:8:1:graph")
    args = parser.parse_args()
    if args.child:
        kind, *rest = args.child
        if kind == "worker":
            from gt.worker.__main__ import leave

            leave(worker(*rest))
        if kind == "native":
            cases.without_gt()
        print(json.dumps({"gt": ours, "native": rival}[kind](*rest, args.seconds)), flush=True)
        os._exit(0)
    report = cases.Report("benchmarks/gpu/work.py", args.json, COLUMNS, preset=args.preset, size=args.size)
    report.head()
    for name, row, said in rows(args):
        lines = [line for line in said.splitlines() if any(word in line for word in ("backend", "schedule", "graph", "layers"))]
        report.row(name, row, said, cells, lines if row else [])
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
