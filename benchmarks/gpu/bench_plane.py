"""The time of GT's plane between GPUs of one host, beside raw NVSHMEM (nvshmem4py) and NCCL in the same run.

`python benchmarks/gpu/bench_plane.py [--json FILE] [--cases pair@2 all_reduce@2 all_gather@4 ..] [--sizes 8 65536 ..]`. `pair`
is a put with its signal, one way: half a round trip; sizes of collectives are those of the whole. Microseconds, the median of
replays of a CUDA graph of many repetitions, as a captured step runs them. Without GPUs a file plays NVSHMEM, gloo NCCL.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cases

SIZES = [8, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
METHODS = ("plane", "nvshmem", "nccl", "peers")  # nvshmem: raw; peers: the plane with no NCCL, which it has for large ones
OPS = ("pair", "all_reduce", "all_gather", "reduce_scatter")
REPEATS = ((64 << 10, 200), (1 << 20, 100), (16 << 20, 20), (64 << 20, 8), (1 << 62, 4))  # in one graph, up to such a size
REPLAYS, MEASURES = 3, 5
NEAR, WIDE, OVER = 1.5, 0.98, 1.05  # us over raw below 64 KiB; of its rate at 256 MiB; times the best all-reduce


@dataclass(frozen=True)
class Repetition:
    """One repetition of a case: a function that issues it, one that prepares its memory, and one that checks its result."""

    issue: Callable[[], None]
    before: Callable[[], object]
    right: Callable[[], bool]


class Rank:
    """One process with one GPU: the plane, its rivals, and memory for all of them."""

    def __init__(self, rank: int, size: int, meet: str, heap: int, most: int, plane: bool) -> None:
        """plane: NCCL as GT's workers have it; else as it is by itself, for the rival."""
        import torch
        import torch.distributed as dist

        from gt.ir.heap import channel_bytes, sizes
        from gt.worker.engine.torch import COMBINE, TorchEngine
        from gt.worker.engine.torch.gpu.direct import DirectEngine
        from gt.worker.plane.symmetric import Arena, ArenaMemory

        self.torch, self.dist, self.rank, self.size = torch, dist, rank, size
        self.cuda = torch.cuda.is_available()
        self.ring = self.nccl() if plane and self.cuda else None  # before NCCL reads its variables
        self.device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        more = {"device_id": self.device} if self.cuda else {}
        dist.init_process_group(
            "nccl" if self.cuda else "gloo", init_method=f"file://{meet}", rank=rank, world_size=size, **more
        )
        self.raw_at = heap  # of symmetric memory: what is received, what is sent, a flag
        slot, slots, buffer = sizes(heap)
        team_at = 8 * channel_bytes(slot, slots)
        library, base = self.joined(meet, heap + 2 * most + 4096)
        self.base, self.library = base, library
        nbytes = heap + 2 * most + 4096
        engine = DirectEngine(TorchEngine(str(self.device)), COMBINE)
        self.arena = Arena(self, library, engine, ArenaMemory(range(size), rank, base, nbytes), self.ring)
        self.sum = engine.combine("sum", "bfloat16")
        self.form: Any = {"id": 0, "workers": list(range(size)), "rank": rank, "offset": team_at, "bytes": buffer}
        self.channel: Any = {"peer": 1 - rank, "offset": 0, "bytes": slot, "slots": slots}
        self.raw_bytes, self.count = most, 1000

    def nccl(self) -> Any:
        from gt.worker.plane import nccl_bindings as nccl

        return nccl.Nccl()

    def joined(self, meet: str, nbytes: int) -> tuple[Any, int]:
        """NVSHMEM's library as the plane uses it, and this rank's symmetric memory."""
        if not self.cuda:
            from played import Library

            library = Library(Path(meet + ".heap"), self.rank, self.size, nbytes, self.meet)
            return library, library.base
        from gt.worker.plane import nvshmem

        found = nvshmem.Library()
        name = [found.unique_id() if self.rank == 0 else ""]
        self.dist.broadcast_object_list(name)
        return found, found.join(name[0], self.rank, self.size, nbytes)

    def count_bytes(self, *_: int) -> None:
        """A worker's plane counts bytes here; a benchmark does not."""

    def wait(self) -> None:
        for what in (self.finish, self.meet, self.finish):
            what()

    def meet(self) -> None:
        """All are here. (A barrier of torch.distributed wants to know of an accelerator, which gt's device is not.)"""
        self.dist.all_reduce(self.torch.zeros(1, device=self.device))

    def finish(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()

    def stream(self) -> int:
        return self.torch.cuda.current_stream().cuda_stream if self.cuda else 0

    def empty(self, nbytes: int) -> Any:
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device=self.device)

    def numbers(self, nbytes: int, rank: int) -> Any:
        """Small whole numbers, whose sums bf16 has exactly."""
        n = self.torch.arange(max(1, nbytes // 2), device=self.device)
        return ((n * (rank + 1)) % 8).to(self.torch.bfloat16)

    # ---- one repetition of each

    def pair(self, method: str, nbytes: int) -> Repetition:
        """There and back."""
        mine, theirs = self.numbers(nbytes, self.rank).view(self.torch.uint8)[:nbytes], self.empty(nbytes)
        if method == "plane":
            send, recv = lambda: self.arena.send(self.channel, mine), lambda: self.arena.recv(self.channel, theirs)
        elif method == "nccl":
            send, recv = lambda: self.dist.send(mine, 1 - self.rank), lambda: self.dist.recv(theirs, 1 - self.rank)
        else:
            flag, there = self.base + self.raw_at + 2 * self.raw_bytes, self.base + self.raw_at
            theirs = self.arena.memory[self.rank][self.raw_at : self.raw_at + nbytes]

            def send() -> None:
                self.put(there, mine.data_ptr(), nbytes, flag, self.count)

            def recv() -> None:
                self.await_flag(flag, self.count)

        def both() -> None:
            self.count += 1
            for step in (send, recv) if self.rank == 0 else (recv, send):
                step()

        wanted = self.numbers(nbytes, 1 - self.rank).view(self.torch.uint8)[:nbytes]
        return Repetition(both, theirs.zero_, lambda: bool((theirs == wanted).all()))

    def put(self, target: int, source: int, nbytes: int, flag: int, value: int) -> None:
        if not self.cuda:
            return self.library.put(target, source, nbytes, flag, 1 - self.rank, 0, value)
        from nvshmem import bindings

        library, stream = self.library, self.stream()
        return bindings.putmem_signal_on_stream(target, source, nbytes, flag, value, library._set, 1 - self.rank, stream)

    def await_flag(self, flag: int, value: int) -> None:
        self.library.wait(flag, value, self.stream())

    def all_reduce(self, method: str, nbytes: int) -> Repetition:
        wanted = sum(self.numbers(nbytes, rank).float() for rank in range(self.size))
        mine = self.numbers(nbytes, self.rank)
        if method == "nvshmem":
            source, out = self.symmetric(nbytes)
            source.copy_(mine)
            call = self.team_call("bfloat16_sum_reduce_on_stream", out, source, len(mine))
            return Repetition(call, out.zero_, lambda: bool((out == wanted).all()))
        result = mine.clone()
        flat = result.view(self.torch.uint8)
        ours = partial(self.arena.all_reduce, self.form, flat, self.sum)
        issue = ours if method == "plane" else partial(self.dist.all_reduce, result)
        return Repetition(issue, lambda: result.copy_(mine), lambda: bool((result == wanted).all()))

    def all_gather(self, method: str, nbytes: int) -> Repetition:
        part = max(2, nbytes // self.size // 2 * 2)
        mine, wanted = self.numbers(part, self.rank), self.torch.cat([self.numbers(part, rank) for rank in range(self.size)])
        if method == "nvshmem":
            source, out = self.symmetric(part, part * self.size)
            source.copy_(mine)
            call = self.team_call("bfloat16_fcollect_on_stream", out, source, len(mine))
            return Repetition(call, out.zero_, lambda: bool((out == wanted).all()))
        out = self.torch.empty_like(wanted)
        flat, rows = mine.view(self.torch.uint8), [row.view(self.torch.uint8) for row in out.chunk(self.size)]
        ours = partial(self.arena.all_gather, self.form, flat, rows)
        issue = ours if method == "plane" else partial(self.dist.all_gather_into_tensor, out, mine)
        return Repetition(issue, out.zero_, lambda: bool((out == wanted).all()))

    def reduce_scatter(self, method: str, nbytes: int) -> Repetition:
        part = max(2, nbytes // self.size // 2 * 2)
        mine = self.numbers(part * self.size, self.rank)
        every = sum(self.numbers(part * self.size, rank).float() for rank in range(self.size))
        wanted = every.chunk(self.size)[self.rank]
        if method == "nvshmem":
            source, out = self.symmetric(part * self.size, part)
            source.copy_(mine)
            call = self.team_call("bfloat16_sum_reducescatter_on_stream", out, source, part // 2)
            return Repetition(call, out.zero_, lambda: bool((out == wanted).all()))
        out = self.torch.empty(part // 2, dtype=self.torch.bfloat16, device=self.device)
        flat, rows = out.view(self.torch.uint8), [row.view(self.torch.uint8) for row in mine.chunk(self.size)]
        ours = partial(self.arena.reduce_scatter, self.form, rows, flat, self.sum)
        issue = ours if method == "plane" else partial(self.dist.reduce_scatter_tensor, out, mine)
        return Repetition(issue, out.zero_, lambda: bool((out == wanted).all()))

    def symmetric(self, nbytes: int, out: int = 0) -> tuple[Any, Any]:
        """A source and a result in symmetric memory, behind the plane's."""
        memory, at = self.arena.memory[self.rank], self.raw_at + self.raw_bytes
        views = memory[at : at + nbytes], memory[self.raw_at : self.raw_at + (out or nbytes)]
        return views[0].view(self.torch.bfloat16), views[1].view(self.torch.bfloat16)

    def team_call(self, name: str, out: Any, source: Any, count: int) -> Callable[[], None]:
        from nvshmem import bindings

        call, to, of = getattr(bindings, name), out.data_ptr(), source.data_ptr()
        return lambda: call(0, to, of, count, self.stream())  # team 0 is the world

    # ---- measuring

    def rewind(self) -> None:
        self.arena.reset_cursors([[1 - self.rank, 0, sends] for sends in (True, False)])

    def measure(self, op: str, method: str, nbytes: int) -> float:
        """us of one repetition; of a pair one way. AssertionError where what arrives is not what was sent.

        That is looked at before, and behind all replays in one more, recorded as they are, of a single repetition.
        """
        self.arena.ring = None if method == "peers" else self.ring
        case: Repetition = getattr(self, op)("plane" if method == "peers" else method, nbytes)
        issue = case.issue
        self.wait()
        self.reset_cursors()
        issue()
        self.wait()
        assert case.right(), f"{op} of {nbytes} bytes by {method}: another value than was sent"
        issue()
        self.wait()
        count = next(n for most, n in REPEATS if nbytes <= most)
        self.count = 0  # a flag's value in the graph is another one for each repetition
        replay = self.recorded(issue, count if self.cuda else 4)
        self.count = 1000
        replay()
        took = []
        for _ in range(MEASURES):
            self.wait()
            took.append(self.clocked(replay) / (count if self.cuda else 4))
        self.wait()
        self.count = 2000
        last = self.recorded(issue, 1)
        case.before()
        self.wait()
        last()
        self.wait()
        assert case.right(), f"{op} of {nbytes} bytes by {method}: another value than was sent, after replays"
        self.count = 3000
        return statistics.median(took) / (2 if op == "pair" else 1)

    def recorded(self, issue: Callable[[], None], count: int) -> Callable[[], None]:
        def all_of_it() -> None:
            self.reset_cursors()
            if not self.cuda:
                self.count = 0
            for _ in range(count):
                issue()

        if not self.cuda:
            return all_of_it
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, capture_error_mode="thread_local"):
            all_of_it()
        self.keep = graph  # its memory is used for as long as it may be replayed
        return graph.replay

    def clocked(self, replay: Callable[[], None]) -> float:
        """us of a replay; several follow one another, so that they begin together but for the first."""
        if not self.cuda:
            start = time.perf_counter()
            replay()
            return (time.perf_counter() - start) * 1e6
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / REPLAYS


def child(args: argparse.Namespace) -> None:
    """A rank of a case; the first prints what there is after each size, in case there is no more."""
    op, *methods = args.child
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[args.rank] if visible else str(args.rank)
    own = Rank(args.rank, args.world, args.meet, args.heap << 20, max(args.sizes), "plane" in methods)
    found: dict[str, dict[str, float]] = {}
    context = own.torch.cuda.stream(own.torch.cuda.Stream()) if own.cuda else contextlib.nullcontext()
    with context, own.torch.no_grad():
        for method in methods:
            if (method == "peers" and op == "pair") or (method == "nvshmem" and op != "pair" and not own.cuda):
                continue  # there is no such thing, or it is not played
            for size in args.sizes:
                found.setdefault(method, {})[str(size)] = own.measure(op, method, size)
                if own.rank == 0:
                    print(json.dumps(found), flush=True)
    os._exit(0)


def bars(report: cases.Report, name: str, found: dict[str, dict[str, float]]) -> None:
    plane, raw, nccl, _ = (found.get(method, {}) for method in METHODS)
    if name.startswith("pair"):
        near = [plane[s] - raw[s] for s in plane.keys() & raw.keys() if int(s) < 64 << 10]
        if near:
            report.bar(f"{name}: us over raw NVSHMEM below 64 KiB", max(near), most=NEAR)
        if (large := str(256 << 20)) in plane and large in raw:
            report.bar(f"{name}: of raw NVSHMEM's rate at 256 MiB", raw[large] / plane[large], least=WIDE)
        if both := plane.keys() & nccl.keys():
            report.bar(f"{name}: times NCCL, the worst of all sizes", max(plane[s] / nccl[s] for s in both), most=1.0)
    elif name.startswith("all_reduce") and (both := plane.keys() & nccl.keys() & (raw or nccl).keys()):
        worst = max(plane[s] / min(nccl[s], raw.get(s, nccl[s])) for s in both)
        report.bar(f"{name}: times the best of NCCL and NVSHMEM, the worst of all sizes", worst, most=OVER)


def main() -> int:
    parser = cases.flags(__doc__ or "")
    parser.add_argument("--cases", nargs="+", default=["pair@2", "all_reduce@2", "all_gather@2", "reduce_scatter@2"])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes")
    parser.add_argument("--heap", type=int, default=2048, help="MiB of a worker's symmetric memory, as GT_HEAP_SIZE")
    for name in ("--rank", "--world"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
    columns = {"": -32, **dict.fromkeys((f"{method} us" for method in METHODS), 14), "plane GB/s": 12, "nvshmem GB/s": 14}
    report = cases.Report("benchmarks/gpu/bench_plane.py", args.json, columns, heap=args.heap)
    report.head()
    for case in args.cases:
        op, _, world = case.partition("@")
        if op not in OPS or (op == "pair" and world != "2"):
            raise SystemExit(f"{case}: want one of {', '.join(OPS)}, @ and how many GPUs, two for a pair")
        found: dict[str, Any] = {}
        whys = []
        for methods in (("plane", "peers", "nvshmem"), ("nccl",)):  # raw collectives last: not all of them may be recorded
            rest = ("--child", op, *methods, "--heap", args.heap, "--sizes", *args.sizes)
            with cases.meeting(__file__, int(world), *rest) as commands:
                some, said = cases.together(commands, args.limit, partly=True)
            found |= some or {}
            whys += [said] if said and (some is None or "exit codes" in said or "given up" in said) else []
        for size in args.sizes:
            times = {method: found[method][str(size)] for method in found if str(size) in found[method]}
            if times:
                report.row(f"{case} {size}", {**times}, "", lambda row, size=size: cells(row, size))
        for why in whys:
            report.row(case, None, why, lambda row: [])
        bars(report, case, found)
    return report.end()


def cells(row: cases.Row, size: int) -> list[str]:
    rate = [f"{size / row[method] / 1e3:.1f}" if method in row else "" for method in METHODS[:2]]
    return [*(cases.number(row.get(method), ".2f") for method in METHODS), *rate]


if __name__ == "__main__":
    sys.exit(main())
