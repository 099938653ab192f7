"""Llama 1.1B in bf16 on two GPUs by `configs/llama`: data parallel, tensor parallel, two stages; each beside native torch.

`python benchmarks/gpu/bench_llama.py [--json FILE] [--cases dp2 tp2 pp2] [--size 8x1024] [--model tiny]`. Fused AdamW, a step
that is captured. Prints milliseconds a step (median of blocks, and of steps that are each waited for), seconds to the first
step at full speed, the peak memory of each GPU, and one line of JSON. Rivals of `dp2`: DDP, FSDP2, both compiled.
Of `tp2`: DTensor's tensor parallel, compiled, with the loss split over the vocabulary. Of `pp2`: torch's pipeline in 1F1B,
compiled. A text such as `12:8:1f1b` is a pipeline: layers of the first stage, micro-batches, the schedule. All rows of a case
have the first one's losses. `--model tiny --size 8x16` tries it on CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import bench_hosts
import cases
import native
import native_tp

GPUS = 2
NOISE = 2e-2  # relative: what bf16 weights do to the losses of so many steps where kernels differ
RIVALS = {"dp2": ("ddp", "fsdp2"), "tp2": ("dtensor",), "pp2": ("11:4:1f1b", "12:4:1f1b", "12:8:1f1b")}
CASES = {"dp2": ("dp2",), "tp2": ("tp2",), "pp2": ("12:4:zb-h1", "12:4:1f1b")}
RATE = {"dp2": 1.0, "tp2": 1.1, "pp2": 1.2}  # at least, times that of the best rival
MEMORY = 1.05  # at most, times that of the best rival
COLUMNS = {"": -30, "ms": 10, "alone ms": 10, "tokens/s": 11, "first s": 9, "losses off by": 15, "peak MiB": 20}


def model_of(name: str) -> Any:
    """On the CPU in bf16, the same in each process."""
    import torch
    import transformers as hf
    import zoo

    torch.manual_seed(0)
    if name == "1.1b":
        model = zoo.llama()[0]
    else:
        config = hf.LlamaConfig(
            vocab_size=zoo.VOCABULARY, hidden_size=64, intermediate_size=160, num_hidden_layers=22, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=2048, use_cache=False, tie_word_embeddings=False,
        )  # fmt: skip
        model = hf.LlamaForCausalLM(config)
    return model.to(torch.bfloat16).train()


def batch_of(size: str) -> dict[str, Any]:
    """Tokens of a whole step, the same in each process."""
    import torch
    import zoo

    torch.manual_seed(1)
    return zoo.tokens(*map(int, size.split("x")))


def loss_of(logits: Any, labels: Any) -> Any:
    """The next token's cross-entropy. logits: [rows, tokens, words]; labels: [rows, tokens]."""
    import torch

    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


# ---- GT


def config_of(case: str, cut: int) -> str:
    """A config of `configs/llama`. cut: layers of the first stage, where there are two; the file's own cut is even."""
    text = (cases.ROOT / "configs/llama" / f"{case}.yaml").read_text()
    if case != "pp2":
        return text
    (even,) = (line for line in text.splitlines() if "model.layers.*" in line)
    own = "\n".join(f'    "model.layers.{n}": pp_stage{int(n >= cut)}' for n in range(22))
    return text.replace(even, own)


def ours(case: str, text: str, size: str, name: str, seconds: float) -> cases.Row:
    import torch

    import gt

    cut, parts, schedule = text.split(":") if ":" in text else (0, 1, None)
    count, cuda = int(parts), torch.cuda.is_available()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(config_of(case, int(cut)))
        file.flush()
        (gt.gpu_workers if cuda else gt.cpu_workers)(GPUS, config=file.name)
    model = model_of(name)
    gt.signal.apply(model)
    model.to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=native.LR, fused=True)

    def train(input_ids: Any, labels: Any) -> Any:
        total: Any = 0.0
        for ids, wanted in zip(gt.microbatches(input_ids, count), gt.microbatches(labels, count), strict=True):
            loss = model(input_ids=ids, labels=wanted).loss / count
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    step = gt.compile(train, backend="cudagraphs" if cuda else "eager", schedule=schedule)
    batch = {key: value.to("remote") for key, value in batch_of(size).items()}
    return cases.captured(step, list(batch.values()), seconds, model, optimizer)


# ---- rivals


def parallel(kind: str, own: native.World, size: str, name: str) -> tuple[Callable[[], Any], list[Any], Any]:
    """Data or tensor parallel: forward and backward of this rank's part, giving the loss; optimizers; the model."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    compiled = own.device.type == "cuda"
    batch = {key: value.to(own.device) for key, value in batch_of(size).items()}
    model = model_of(name).to(own.device)
    if kind == "dtensor":
        split(model, init_device_mesh(own.device.type, (own.size,)))
        run = torch.compile(model) if compiled else model

        def backward() -> Any:
            from torch.distributed.tensor.parallel import loss_parallel

            with loss_parallel():
                loss = loss_of(run(input_ids=batch["input_ids"]).logits, batch["labels"])
                loss.backward()
            return loss.detach().full_tensor() / own.size  # the sum over ranks is the loss

        return backward, native_tp.optimizers(model, False), model
    mine = {key: value.chunk(own.size)[own.rank] for key, value in batch.items()}
    if kind == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        where = {"device_ids": [own.rank]} if compiled else {}
        torch._dynamo.config.optimize_ddp = False  # cuts the graph at buckets, which a static graph does not have
        wrapped: Any = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True, **where)
        wrapped = torch.compile(wrapped) if compiled else wrapped
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            if compiled:
                layer.compile()
            fully_shard(layer, reshard_after_forward=False)
        wrapped = fully_shard(model, reshard_after_forward=False)

    def each() -> Any:
        loss = wrapped(**mine).loss
        loss.backward()
        return loss.detach() / own.size

    return each, [torch.optim.AdamW(model.parameters(), lr=native.LR, fused=True)], model


def split(model: Any, mesh: Any) -> None:
    """Tensor parallel as `configs/llama/tp2.yaml` is: heads, hidden units and the vocabulary by worker."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {part: ColwiseParallel() for part in columns}
    plan |= {part: RowwiseParallel() for part in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(use_local_output=False),
    }
    parallelize_module(model, mesh, ends)


def pipeline(text: str, own: native.World, size: str, name: str) -> tuple[Callable[[], Any], list[Any], Any]:
    """torch's own pipeline of two stages, as `parallel` gives it. text: as CASES has it."""
    import torch
    from torch.distributed import pipelining

    cut, parts, schedule = text.split(":")
    batch = {key: value.to(own.device) for key, value in batch_of(size).items()}
    module = bench_hosts.stage_of(model_of(name), own.rank, int(cut)).to(own.device)
    run = torch.compile(module) if own.device.type == "cuda" else module
    stage = pipelining.PipelineStage(run, own.rank, own.size, own.device)
    kind = getattr(pipelining, native.SCHEDULES[schedule])
    steps = kind(stage, int(parts), loss_fn=loss_of)

    def train() -> Any:
        losses: list[Any] = []
        if own.rank == 0:
            steps.step(batch["input_ids"])
            return torch.zeros((), device=own.device)
        steps.step(target=batch["labels"], losses=losses)
        return torch.stack(losses).mean().detach()

    return train, [torch.optim.AdamW(module.parameters(), lr=native.LR, fused=True)], module


def rival(own: native.World, kind: str, size: str, name: str, seconds: float) -> cases.Row:
    import torch.distributed as dist

    build = pipeline if ":" in kind else parallel
    train, optimizers, model = build(kind, own, size, name)
    weights = cases.Weights(model.parameters())
    native.reset(own)
    start = time.perf_counter()

    def step() -> Any:
        loss = train()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def awaited() -> float:
        loss = step().float()
        dist.all_reduce(loss)
        return loss.item()

    for _ in range(cases.MADE):
        awaited()
    first = time.perf_counter() - start
    weights.again(*optimizers)
    losses = [awaited() for _ in range(cases.STEPS)]
    ms, alone = cases.timed(step, own.wait, seconds, own.agree)
    return {"ms": ms, "alone ms": alone, "first s": first, "losses": losses, "peak MiB": own.gathered(own.peak())}


# ---- the table


def rows(args: argparse.Namespace, case: str) -> Iterator[tuple[str, cases.Row | None, str]]:
    rest = (args.size, args.model, "--seconds", args.seconds)
    for text in [] if args.skip == "own" else args.own or CASES[case]:
        name = " ".join(dict.fromkeys((case, text)))
        yield name, *cases.together([[__file__, "--child", "gt", case, text, *rest]], args.limit)
    for kind in [] if args.skip == "rivals" else args.rivals or RIVALS[case]:
        with cases.meeting(__file__, GPUS, "--child", "native", case, kind, *rest) as commands:
            yield f"native {case} {kind}", *cases.together(commands, args.limit, OMP_NUM_THREADS="1")


def child(args: argparse.Namespace) -> int:
    who, case, text, size, name = args.child
    if who == "gt":
        print(json.dumps(ours(case, text, size, name, args.seconds)))
        return 0
    cases.without_gt()
    own = native.world(args.rank, args.world, args.meet)
    print(json.dumps(rival(own, text, size, name, args.seconds)), flush=True)
    os._exit(0)  # a process group is not always taken down in time, and there is nothing left to do


def bars(report: cases.Report, case: str, best: list[cases.Row], own: list[cases.Row]) -> None:
    """The fastest row of GT's beside the rivals' fastest."""
    if not best or not own:
        return
    fastest, rival = (min(rows, key=lambda row: row["ms"]) for rows in (own, best))
    report.bar(f"{case}: rate over that of the best rival", rival["ms"] / fastest["ms"], least=RATE[case])
    peak = max(rival["peak MiB"])
    if peak:
        report.bar(f"{case}: peak memory over that of the best rival", max(fastest["peak MiB"]) / peak, most=MEMORY)


def main() -> int:
    parser = cases.flags(__doc__ or "")
    parser.add_argument("--model", default="1.1b", choices=["1.1b", "tiny"])
    parser.add_argument("--size", default="8x1024", help="rows of the whole batch x tokens")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rivals", nargs="*", default=[], help="instead of those of a case")
    parser.add_argument("--own", nargs="*", default=[], help="instead of GT's own of a case")
    parser.add_argument("--skip", choices=["own", "rivals"], help="their rows, and so the bars")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world", type=int)
    parser.add_argument("--meet")
    args = parser.parse_args()
    if args.child:
        return child(args)
    report = cases.Report("benchmarks/gpu/bench_llama.py", args.json, COLUMNS, model=args.model, size=args.size)
    report.head()
    rate = int(args.size.split("x")[0]) * int(args.size.split("x")[1]) * 1e3
    for case in args.cases:
        wanted: list[float] = []
        found: dict[bool, list[cases.Row]] = {True: [], False: []}
        for name, row, said in rows(args, case):
            lines = [line for line in said.splitlines() if "backend" in line or "recomputed" in line]
            if row is not None:
                wanted = wanted or row["losses"]
                row |= {"tokens/s": rate / row["ms"], "apart": cases.apart(row["losses"], wanted)}
                if row["apart"] > NOISE:
                    row, said = None, f"its losses {row['losses']} are not those of the first row, {wanted}; {row['ms']:.2f} ms"
            report.row(name, row, said, cells, lines if not name.startswith("native") else ())
            if row is not None:
                found[name.startswith("native")].append(row)
        bars(report, case, found[True], found[False])
    return report.end()


def cells(row: cases.Row) -> list[str]:
    n = cases.number
    return [
        n(row["ms"]), n(row["alone ms"]), n(row["tokens/s"], ".0f"), n(row["first s"], ".1f"), n(row["apart"], ".1e"),
        " ".join(f"{mib:.0f}" for mib in row["peak MiB"]),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
