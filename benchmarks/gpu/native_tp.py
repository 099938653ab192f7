"""A user's alternative: the tuning demo's model by DTensor tensor parallel x torch.distributed.pipelining, bf16.

A case is text: `2:4,4:4:1f1b` is tensor parallel on 2 GPUs, a pipeline of such pairs with 4 and 4 layers, 4 micro-batches;
`4:8:1` is tensor parallel alone. Compiled unless `:eager` is its end; `:graph` has the whole step of tensor parallel alone
in a CUDA graph. q, k and v are apart, since DTensor cannot split a fused weight by heads; the head is split over the vocabulary
and so is the loss. Fused AdamW. Each first trains beside one process, whose losses it has to have. Without GPUs: gloo.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cases
import native
from native import World

VOCAB = 50304  # rows of embedding and head: those of 50257 tokens, padded as matmuls like it


@dataclass(frozen=True)
class Case:
    """A case, parsed from its text."""

    tp: int
    cut: tuple[int, ...]
    parts: int
    schedule: str
    mode: str

    @property
    def gpus(self) -> int:
        return self.tp * len(self.cut)

    @staticmethod
    def read(text: str) -> Case:
        fields = text.split(":")
        mode = fields.pop() if fields[-1] in ("eager", "graph") else "compiled"
        tp, cut, parts, *schedule = fields
        counts = tuple(map(int, cut.split(",")))
        name = schedule[0] if schedule else "1f1b"
        if name not in ("gpipe", "1f1b") or (mode == "graph" and len(counts) > 1):
            raise SystemExit(f"{text}: want gpipe or 1f1b, and graph for tensor parallel alone")
        return Case(int(tp), counts, int(parts), name, mode)


# ---- the model


def sizes(preset: str, vocab: int = VOCAB) -> dict[str, int]:
    return {**cases.tuning_demo().PRESETS[preset], "vocab_size": vocab}


def demo(preset: str, vocab: int, groups: Sequence[str] = ()) -> Any:
    """The demo's own model on the CPU, the same in each process."""
    import torch

    torch.manual_seed(0)
    return cases.tuning_demo().MiniGPT(sizes(preset, vocab), groups).to(torch.bfloat16)


def stage_class() -> type:
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.tensor import DTensor

    def linear(weight: Any, bias: Any = None) -> Any:
        made = nn.Linear(*weight.shape, bias=bias is not None, device="meta")
        made.weight = nn.Parameter(weight.detach().t().contiguous())
        if bias is not None:
            made.bias = nn.Parameter(bias.detach().clone())
        return made

    class Block(nn.Module):
        """A block of the demo's, with the same weights."""

        def __init__(self, of: Any) -> None:
            super().__init__()
            hidden = of.out_weight.shape[0]
            self.size, self.ln1, self.ln2 = hidden // of.heads, of.norm1, of.norm2
            weights, biases = of.qkv_weight.split(hidden, 1), of.qkv_bias.split(hidden)
            self.q, self.k, self.v = (linear(w, b) for w, b in zip(weights, biases, strict=True))
            self.o, self.up = linear(of.out_weight, of.out_bias), linear(of.up_weight, of.up_bias)
            self.down = linear(of.down_weight, of.down_bias)

        def forward(self, x: Any) -> Any:
            h = self.ln1(x)
            q, k, v = (f(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(y.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))

    class Stage(nn.Module):
        """Some blocks; the first has the embedding, the last one's value is the mean loss, of shape [1]."""

        def __init__(self, of: Any, begin: int, end: int, first: bool, last: bool) -> None:
            super().__init__()
            self.first, self.last = first, last
            self.blocks = nn.ModuleList(Block(block) for block in of.blocks[begin:end])
            if first:
                self.tokens, self.positions = of.token_weight, of.position_weight
            if last:
                self.norm, self.head = of.norm, linear(of.head_weight)

        def forward(self, x: Any, targets: Any = None) -> Any:
            if self.first:
                x = F.embedding(x, self.tokens) + self.positions[: x.shape[1]]
            for block in self.blocks:
                x = block(x)
            if not self.last:
                return x
            logits = self.head(self.norm(x))
            if not isinstance(logits, DTensor):
                return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").float().mean()[None]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            return (loss.full_tensor() if isinstance(loss, DTensor) else loss)[None]

    return Stage


def split(stage: Any, mesh: Any) -> None:
    """Tensor parallel: columns, then rows, an all-reduce after each pair; the head's result stays split."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")} | {name: RowwiseParallel() for name in ("o", "down")}
    for block in stage.blocks:
        parallelize_module(block, mesh, plan)
    if stage.last:
        parallelize_module(stage, mesh, {"head": ColwiseParallel(use_local_output=False)})


def optimizers(stage: Any, graph: bool) -> list[Any]:
    """One for DTensors, one for plain tensors: a fused op refuses a mixture."""
    import torch
    from torch.distributed.tensor import DTensor

    kinds: dict[bool, list[Any]] = {True: [], False: []}
    for p in stage.parameters():
        kinds[isinstance(p, DTensor)].append(p)
    more = {"capturable": True} if graph else {}
    return [torch.optim.AdamW(found, lr=native.LR, fused=True, **more) for found in kinds.values() if found]


def one_process(preset: str, vocab: int, data: Sequence[Any], parts: int, device: Any) -> list[float]:
    """The losses that a case has to have: all of it on this device, not compiled."""
    model = stage_class()(demo(preset, vocab), 0, None, True, True).to(device)
    return native.one_process(lambda x, y: model(x, y)[0], data, parts, parameters=model.parameters())


# ---- a case


def meta(number: int, stages: int, shape: Sequence[int], width: int) -> Any:
    """The output of a stage; -1 is the input of the first."""
    import torch

    if number == -1:
        return torch.empty(*shape, dtype=torch.int64, device="meta")
    if number == stages - 1:
        return torch.empty(1, device="meta", requires_grad=True)
    return torch.empty(*shape, width, dtype=torch.bfloat16, device="meta", requires_grad=True)


def passes(case: Case, stage: Any, module: Any, index: int, mesh: Any, own: World, data: Sequence[Any]) -> Callable:
    """Forward and backward of all micro-batches; gives their losses, already divided by how many there are."""
    x, y = data
    if len(case.cut) == 1:

        def plain() -> list[Any]:
            losses = []
            for a, b in zip(x.chunk(case.parts), y.chunk(case.parts), strict=True):
                loss = module(a, b)[0] / case.parts
                loss.backward()
                losses.append(loss.detach())
            return losses

        return plain
    import torch.distributed.pipelining as pipelining

    count, group = len(case.cut), mesh["pp"].get_group()
    shape, width = (x.shape[0] // case.parts, x.shape[1]), stage.blocks[0].ln1.weight.numel()
    known = {"input_args": (meta(index - 1, count, shape, width),), "output_args": (meta(index, count, shape, width),)}
    placed = pipelining.PipelineStage(module, index, count, own.device, group=group, **known)
    kind = getattr(pipelining, native.SCHEDULES[case.schedule])
    schedule = kind(placed, case.parts, loss_fn=lambda out, _: out[0] / case.parts, scale_grads=False)

    def piped() -> list[Any]:
        losses: list[Any] = []
        more = {"target": y, "losses": losses, "targets": y} if stage.last else {}
        schedule.step(*([x] if stage.first else []), **more)
        return losses

    return piped


def run(own: World, case: Case, size: tuple[int, int], preset: str, vocab: int, seconds: float) -> cases.Row:
    import itertools

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel

    data = native.batch_of(*size, own.device, min(vocab, 50257))
    knows = own.rank == own.size - 1
    wanted = one_process(preset, vocab, data, case.parts, own.device) if knows else []
    start = time.perf_counter()
    mesh = init_device_mesh(own.device.type, (len(case.cut), case.tp), mesh_dim_names=("pp", "tp"))
    index = mesh["pp"].get_local_rank()
    ends = list(itertools.accumulate(case.cut, initial=0))
    model = demo(preset, vocab)
    if ends[-1] != len(model.blocks):
        raise SystemExit(f"{case.cut}: the model has {len(model.blocks)} layers")
    stage = stage_class()(model, ends[index], ends[index + 1], index == 0, index == len(case.cut) - 1).to(own.device)
    if case.tp > 1:
        split(stage, mesh["tp"])
        loss_parallel().__enter__()  # for as long as this process lives: backward, too, has to be within it
    weights = cases.Weights(stage.parameters())
    train = passes(case, stage, stage if case.mode == "eager" else torch.compile(stage), index, mesh, own, data)
    opts = optimizers(stage, case.mode == "graph")
    native.reset(own)

    def step() -> list[Any]:
        losses = train()
        for optimizer in opts:
            optimizer.step()
            optimizer.zero_grad()
        return losses

    for _ in range(cases.STEPS):
        step()
    once = recorded(step, own) if case.mode == "graph" else step
    own.wait()
    first = time.perf_counter() - start
    weights.again(*opts)
    losses = [sum(loss.item() for loss in once()) for _ in range(cases.STEPS)]
    ms, alone = cases.timed(once, own.wait, seconds, own.agree)
    row = {"ms": ms, "alone ms": alone, "first s": first, "peak MiB": own.gathered(own.peak())}
    return own.told({**row, "losses": losses, "wanted": wanted}, knows)


def recorded(step: Callable, own: World) -> Callable:
    """The step in a CUDA graph, NCCL's collectives among the rest."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    own.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        losses = step()
    return lambda: (graph.replay(), losses)[1]


# ---- started by others


def measured(text: str, size: str, preset: str, vocab: int, seconds: float, limit: float) -> tuple[cases.Row | None, str]:
    """A case's row, and why there is none."""
    case = Case.read(text)
    with cases.meeting(__file__, case.gpus, "--child", text, size, preset, vocab, "--seconds", seconds) as commands:
        row, said = cases.together(commands, limit, OMP_NUM_THREADS="1")
    if row is not None and row["apart"] > cases.NOISE:
        return None, f"its losses {row['losses']} are not those of one process, {row['wanted']}"
    return row, said


def main() -> int:
    parser = cases.flags(__doc__ or "")
    parser.add_argument("--preset", default="seed", help="of the tuning demo")
    parser.add_argument("--vocab", type=int, default=VOCAB, help="rows of embedding and head")
    parser.add_argument("--size", default="32x1024", help="batch x tokens")
    parser.add_argument("--cases", nargs="+", default=["2:4,4:4:1f1b", "2:6,2:4:1f1b", "4:8:1"])
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world", type=int)
    parser.add_argument("--meet")
    args = parser.parse_args()
    if args.child:
        cases.without_gt()
        text, size, preset, vocab = args.child
        batch, length = map(int, size.split("x"))
        own = native.world(args.rank, args.world, args.meet)
        print(json.dumps(run(own, Case.read(text), (batch, length), preset, int(vocab), args.seconds)), flush=True)
        os._exit(0)  # a process group is not always taken down in time, and there is nothing left to do
    columns = {"": -32, "ms": 10, "alone ms": 10, "first s": 9, "idle": 8, "losses off by": 15}
    about = {"preset": args.preset, "vocab": args.vocab, "size": args.size}
    report = cases.Report("benchmarks/gpu/native_tp.py", args.json, columns, **about)
    report.head()
    for text in args.cases:
        row, said = measured(text, args.size, args.preset, args.vocab, args.seconds, args.limit)
        report.row(text, row, said, native.cells)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
