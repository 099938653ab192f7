"""A user's alternative on several GPUs: GPT-2 of examples/gpt2 by torch.distributed alone, bf16 weights, fused AdamW.

A case is text: `8,4:4:1f1b` is a pipeline (layers of each stage, micro-batches, schedule of torch.distributed.pipelining),
`ddp@2`, `ddp-static@2`, `fsdp2@2` are data parallel on two GPUs. All are compiled, unless `:eager` stands behind it.
Each first trains for a few steps beside one process, whose losses it has to have. Without GPUs: gloo, for trying this out.

`python benchmarks/gpu/native.py --cases 8,4:4:1f1b ddp@2` measures them by themselves; other benchmarks call `measured`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cases

LR = 1e-4
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
}
SPLIT = ("zb-h1", "zb-v")  # weight gradients apart: torch refuses compiled stages for them
DATA_PARALLEL = ("ddp", "ddp-static", "fsdp2")


@dataclass(frozen=True)
class Case:
    """A case, parsed from its text. cut: layers of each stage, for a pipeline."""

    kind: str  # a schedule, or one of DATA_PARALLEL
    gpus: int
    compiled: bool
    cut: tuple[int, ...] = ()
    parts: int = 1

    @staticmethod
    def read(text: str) -> Case:
        fields = text.split(":")
        mode = fields.pop() if fields[-1] == "eager" else ""
        if "@" in fields[0]:
            kind, _, gpus = fields[0].partition("@")
            if kind not in DATA_PARALLEL:
                raise SystemExit(f"{text}: want one of {', '.join(DATA_PARALLEL)} before the @")
            return Case(kind, int(gpus), not mode)
        cut, parts, kind = fields
        if kind not in SCHEDULES:
            raise SystemExit(f"{text}: want one of the schedules {', '.join(SCHEDULES)}")
        counts = tuple(map(int, cut.split(",")))
        gpus = len(counts) // 2 if kind in ("zb-v", "interleaved") else len(counts)
        return Case(kind, gpus, not mode and kind not in SPLIT, counts, int(parts))


@dataclass(frozen=True)
class World:
    """This process among those of a case."""

    rank: int
    size: int
    device: Any

    def wait(self) -> None:
        """All that anybody has issued is done."""
        import torch
        import torch.distributed as dist

        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def agree(self, count: int) -> int:
        """The value that rank 0 proposes."""
        import torch
        import torch.distributed as dist

        told = torch.tensor(count, device=self.device)
        dist.broadcast(told, 0)
        return int(told)

    def peak(self) -> float:
        import torch

        return torch.cuda.max_memory_allocated() / 2**20 if self.device.type == "cuda" else 0.0

    def gathered(self, value: float) -> list[float]:
        """Everybody's."""
        import torch
        import torch.distributed as dist

        every = [torch.zeros((), dtype=torch.float64, device=self.device) for _ in range(self.size)]
        dist.all_gather(every, torch.tensor(value, dtype=torch.float64, device=self.device))
        return [one.item() for one in every]

    def told(self, found: cases.Row, knows: bool) -> cases.Row:
        """The same row at every rank, with the losses of the one that knows them."""
        import torch.distributed as dist

        rows: list[Any] = [None] * self.size
        dist.all_gather_object(rows, {k: found[k] for k in ("losses", "wanted")} if knows else None)
        (row,) = (row for row in rows if row)
        return {**found, **row, "apart": cases.apart(row["losses"], row["wanted"])}


def world(rank: int, size: int, meet: str) -> World:
    """Joined, by a file that all of them name."""
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(rank)
    more = {"device_id": device} if cuda else {}
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{meet}", rank=rank, world_size=size, **more)
    return World(rank, size, device)


# ---- the model


def model_of(name: str) -> Any:
    """On the CPU, the same in each process."""
    import torch
    from model import GPT2, fresh

    model = GPT2(fresh(name)).materialize(torch.bfloat16)
    model.head.unembed.weight = model.embed.wte.weight  # torch by itself gives up on that where memory is first given
    return model.initialize(0)


def batch_of(batch: int, length: int, device: Any, vocab: int = 50257) -> list[Any]:
    """Tokens and targets, the same in each process."""
    import torch

    data = torch.randint(vocab, (batch, length + 1), generator=torch.Generator().manual_seed(1))
    return [data[:, :-1].contiguous().to(device), data[:, 1:].contiguous().to(device)]


def optimizer_of(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=LR, fused=True)


def one_process(model: Any, data: Sequence[Any], parts: int, parameters: Any = None) -> list[float]:
    """The losses that a case has to have: the whole model on this process's device, not compiled."""
    optimizer = optimizer_of(parameters or model.parameters())
    losses = []
    for _ in range(cases.STEPS):
        terms = []
        for x, y in zip(*(part.chunk(parts) for part in data), strict=True):
            loss = model(x, y) / parts
            loss.backward()
            terms.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(terms).item())
    return losses


def stage_class() -> type:
    import torch.nn.functional as F
    from torch import nn

    class Stage(nn.Module):
        """Pieces of a GPT-2 in order; if the head is the last, the value is the mean loss, of shape [1]."""

        def __init__(self, pieces: Sequence[nn.Module], last: bool) -> None:
            super().__init__()
            self.pieces, self.last = nn.ModuleList(pieces), last

        def forward(self, x: Any, targets: Any = None) -> Any:
            for piece in self.pieces:
                x = piece(x)
            if not self.last:
                return x
            return F.cross_entropy(x.flatten(0, 1), targets.flatten(), reduction="none").float().mean()[None]

    return Stage


# ---- a pipeline


@dataclass
class Pipeline:
    """This rank's stages, and what makes a step of them."""

    world: World
    case: Case
    data: Sequence[Any]
    width: int
    stages: dict[int, Any]  # by number
    schedule: Any
    optimizer: Any
    tie: Callable[[], None]

    def step(self) -> list[Any]:
        """Losses of the micro-batches, where the last stage is."""
        x, y = self.data
        losses: list[Any] = []
        first, last = 0 in self.stages, len(self.case.cut) - 1 in self.stages
        more = {"target": y, "losses": losses, "targets": y} if last else {}
        self.schedule.step(*([x] if first else []), **more)
        self.tie()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def alone(self) -> float:
        """ms of this rank's own work in a step, with nobody to wait for."""
        import torch

        x, y = (part.chunk(self.case.parts)[0] for part in self.data)
        given = torch.zeros(*x.shape, self.width, dtype=torch.bfloat16, device=self.world.device)

        def work() -> None:
            for _ in range(self.case.parts):
                for number, module in self.stages.items():
                    enters = x if number == 0 else given.clone().requires_grad_()
                    out = module(enters, y) if number == len(self.case.cut) - 1 else module(enters)
                    out.backward(torch.ones_like(out))
            self.optimizer.step()
            self.optimizer.zero_grad()

        cuda = self.world.device.type == "cuda"
        return cases.timed(work, torch.cuda.synchronize if cuda else lambda: None, 0.5)[0]


def tied(model: Any, own: World, ranks: Sequence[int]) -> Callable[[], None]:
    """The head's weight becomes another leaf; the value adds up the two gradients, wherever they are."""
    import torch.distributed as dist
    from torch import nn

    wte, first, last = model.embed.wte, ranks[0], ranks[-1]
    if len(ranks) == 1:
        return lambda: None
    if first == last:
        head = model.head.unembed.weight = nn.Parameter(wte.weight.detach())  # of the same memory, and not the optimizer's

        def add() -> None:
            if own.rank == first:
                wte.weight.grad.add_(head.grad)
                head.grad = None

        return add
    model.head.unembed.weight = nn.Parameter(wte.weight.detach().clone())
    group = dist.new_group([first, last]) if own.size > 2 else None

    def tie() -> None:
        if own.rank in (first, last):
            weight = wte.weight if own.rank == first else model.head.unembed.weight
            dist.all_reduce(weight.grad, group=group)

    return tie


def pipeline(own: World, case: Case, model: Any, data: Sequence[Any]) -> Pipeline:
    import itertools

    import torch
    import torch.distributed.pipelining as pipelining
    from model import layers_cut, workers_of

    ranks = workers_of(len(case.cut), case.kind)
    tie = tied(model, own, ranks)
    ends = list(itertools.accumulate(layers_cut(case.cut), initial=0))
    pieces, width, numbers = model.pieces(), model.config.width, [n for n, rank in enumerate(ranks) if rank == own.rank]
    stages = {n: stage_class()(pieces[ends[n] : ends[n + 1]], n == len(ranks) - 1).to(own.device) for n in numbers}
    if ranks[0] == ranks[-1] == own.rank and len(ranks) > 1:  # moved one by one, they have come apart
        model.head.unembed.weight.data = model.embed.wte.weight.data
    doubled = model.head.unembed.weight if ranks[0] == ranks[-1] else None
    parameters = [p for stage in stages.values() for p in stage.parameters() if p is not doubled or len(ranks) == 1]
    batch, length = data[0].shape[0] // case.parts, data[0].shape[1]

    def meta(number: int) -> Any:
        """The output of a stage; -1 is the input of the first."""
        if number == -1:
            return torch.empty(batch, length, dtype=torch.int64, device="meta")
        if number == len(ranks) - 1:
            return torch.empty(1, device="meta", requires_grad=True)
        return torch.empty(batch, length, width, dtype=torch.bfloat16, device="meta", requires_grad=True)

    modules = {n: torch.compile(stage) if case.compiled else stage for n, stage in stages.items()}
    placed = [
        pipelining.PipelineStage(modules[n], n, len(ranks), own.device, input_args=(meta(n - 1),), output_args=(meta(n),))
        for n in numbers
    ]
    kind = getattr(pipelining, SCHEDULES[case.kind])
    single = case.kind in ("gpipe", "1f1b")
    schedule = kind(placed[0] if single else placed, case.parts, loss_fn=lambda out, _: out[0] / case.parts, scale_grads=False)
    return Pipeline(own, case, data, width, modules, schedule, optimizer_of(parameters), tie)


def run_pipeline(own: World, case: Case, size: tuple[int, int], name: str, seconds: float) -> cases.Row:
    data = batch_of(*size, own.device)
    last = own.rank == (case.gpus - 1 if case.kind != "zb-v" else 0)
    wanted = one_process(model_of(name).to(own.device), data, case.parts) if last else []
    start = time.perf_counter()
    train = pipeline(own, case, model_of(name), data)
    reset(own)
    losses = [sum(loss.item() for loss in train.step()) for _ in range(cases.STEPS)]
    own.wait()
    first = time.perf_counter() - start
    ms, alone = cases.timed(train.step, own.wait, seconds, own.agree)
    row = {"ms": ms, "alone ms": alone, "first s": first, "peak MiB": own.gathered(own.peak())}
    work = own.gathered(train.alone())
    row |= {"work ms": work, "idle": 1 - sum(work) / len(work) / ms, "losses": losses, "wanted": wanted}
    return own.told(row, last)


def reset(own: World) -> None:
    import torch

    if own.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# ---- data parallel


def data_parallel(own: World, case: Case, model: Any) -> Any:
    """forward(tokens, targets) of this rank's part."""
    import torch

    if case.kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        stage = stage_class()(model.pieces(), True)
        if case.compiled:
            for block in model.h:
                block.compile()
        for block in model.h:
            fully_shard(block, reshard_after_forward=False)
        fully_shard(stage, reshard_after_forward=False)
        return stage
    from torch.nn.parallel import DistributedDataParallel

    static = case.kind == "ddp-static"
    if static:
        torch._dynamo.config.optimize_ddp = False  # cuts the graph at buckets, which a static graph does not have
    where = {"device_ids": [own.rank]} if own.device.type == "cuda" else {}
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=static, **where)
    return torch.compile(wrapped) if case.compiled else wrapped


def run_data_parallel(own: World, case: Case, size: tuple[int, int], name: str, seconds: float) -> cases.Row:
    import torch.distributed as dist

    whole = batch_of(*size, own.device)
    wanted = one_process(model_of(name).to(own.device), whole, math.gcd(4, size[0])) if own.rank == 0 else []
    start = time.perf_counter()
    forward = data_parallel(own, case, model_of(name).to(own.device))
    optimizer = optimizer_of(forward.parameters())
    data = [part.chunk(own.size)[own.rank] for part in whole]
    reset(own)

    def step() -> Any:
        loss = forward(*data)
        loss.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().sum()

    losses = []
    for _ in range(cases.STEPS):
        loss = step() / own.size
        dist.all_reduce(loss)
        losses.append(loss.item())
    first = time.perf_counter() - start
    ms, alone = cases.timed(step, own.wait, seconds, own.agree)
    row = {"ms": ms, "alone ms": alone, "first s": first, "peak MiB": own.gathered(own.peak())}
    return own.told({**row, "losses": losses, "wanted": wanted}, own.rank == 0)


# ---- started by others


def measured(text: str, size: str, name: str, seconds: float, limit: float) -> tuple[cases.Row | None, str]:
    """A case's row, and why there is none."""
    case = Case.read(text)
    with cases.meeting(__file__, case.gpus, "--child", text, size, name, "--seconds", seconds) as commands:
        row, said = cases.together(commands, limit, OMP_NUM_THREADS="1")
    if row is not None and row["apart"] > cases.NOISE:
        return None, f"its losses {row['losses']} are not those of one process, {row['wanted']}"
    return row, said


def main() -> int:
    parser = cases.flags(__doc__ or "")
    parser.add_argument("--model", default="d12", help="of examples/gpt2")
    parser.add_argument("--size", default="32x1024", help="batch x tokens")
    parser.add_argument("--cases", nargs="+", default=["8,4:4:1f1b", "ddp@2", "fsdp2@2"])
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world", type=int)
    parser.add_argument("--meet")
    args = parser.parse_args()
    if args.child:
        cases.without_gt()
        text, size, name = args.child
        batch, length = map(int, size.split("x"))
        case = Case.read(text)
        run = run_pipeline if case.cut else run_data_parallel
        print(json.dumps(run(world(args.rank, args.world, args.meet), case, (batch, length), name, args.seconds)), flush=True)
        os._exit(0)  # a process group is not always taken down in time, and there is nothing left to do
    columns = {"": -32, "ms": 10, "alone ms": 10, "first s": 9, "idle": 8, "losses off by": 15}
    report = cases.Report("benchmarks/gpu/native.py", args.json, columns, model=args.model, size=args.size)
    report.head()
    for text in args.cases:
        row, said = measured(text, args.size, args.model, args.seconds, args.limit)
        report.row(text, row, said, cells)
    return report.end()


def cells(row: cases.Row) -> list[str]:
    n = cases.number
    return [n(row["ms"]), n(row["alone ms"]), n(row["first s"], ".1f"), n(row.get("idle"), ".1%"), n(row["apart"], ".1e")]


if __name__ == "__main__":
    sys.exit(main())
