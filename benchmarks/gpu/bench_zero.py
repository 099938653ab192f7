"""Stages of ZeRO: Llama 1.1B in bf16 with fp32 weights, by GT's config, beside DDP and FSDP2 in the same run.

`python benchmarks/gpu/bench_zero.py [--json FILE] [--gpus 2] [--cases dp zero1 ..] [--rivals ddp fsdp2 ..]`. Eight rows of 1024
tokens for each GPU, fused AdamW, gradients added up in fp32. Prints milliseconds a step, tokens a second, the peak memory of
each GPU, and one line of JSON. All have to have the first row's losses. `--model tiny --size 2x64` tries it on CPUs.
`--gpus 1 --cases offload offload-all --rivals fsdp2-offload`: state in host memory. `--model 9.9b --size 4x1024 --gpus 1
--cases offload --rivals`: a model whose state, 158 GB, is more than one GPU has. "busy" is the share of the timed steps in
which a kernel ran on the GPUs; "link" the bytes of a step between host and GPU, over what pinned copies both ways at once move
in that time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import cases
import native

CASES = {  # settings below `gt:` beside data_parallel and precision
    "dp": "zero: 0", "zero1": "zero: 1", "zero2": "zero: 2", "zero3": "zero: 3",
    "zero3-checkpoint": 'zero: 3, activation_checkpoint: {modules: "*.layers.*"}',
    "offload": "zero: 0, offload: {optimizer: cpu}", "offload-all": "zero: 3, offload: {optimizer: cpu, params: cpu}",
}  # fmt: skip
RIVALS = ("ddp", "fsdp2", "fsdp2-reshard", "fsdp2-prefetch", "fsdp2-checkpoint", "fsdp2-offload")
# Bytes a parameter that cross the link at each step of FSDP2: an fp32 gradient, and a value for forward and for backward
RIVAL_LINK_BYTES = 12
# of a case: the native rows of the same strategy, of which the best counts
BESIDE = {
    "dp": ("ddp",), "zero1": ("fsdp2",), "zero2": ("fsdp2",), "zero3": ("fsdp2-reshard", "fsdp2-prefetch"),
    "zero3-checkpoint": ("fsdp2-checkpoint",), "offload": ("fsdp2-offload",), "offload-all": ("fsdp2-offload",),
}  # fmt: skip
COLUMNS = {
    "": -30, "ms": 10, "alone ms": 10, "tokens/s": 11, "first s": 9, "losses off by": 15, "busy": 8, "link": 8, "peak MiB": 28,
}  # fmt: skip
# "tiny" tries the bench on CPUs. "9.9b" has no more room on the host than on the GPU: it is made by the workers.
LLAMAS = {
    "tiny": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2},
    "9.9b": {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 36, "num_attention_heads": 32},
}
BY_WORKERS = ("9.9b",)
RATE, MEMORY = 1.0, 1.05  # at least and at most, times that of the best native row
NOISE = 1e-2  # relative: what bf16 does to losses of so many steps where kernels differ
LR = 1e-4


def model_of(name: str) -> Any:
    """In fp32 on the default device, the CPU unless one is entered. It is the same in each process."""
    import torch
    import transformers as hf
    import zoo

    torch.manual_seed(0)
    if name == "1.1b":
        return zoo.llama(4)[0].train()
    config = hf.LlamaConfig(
        **LLAMAS[name], vocab_size=zoo.VOCABULARY, max_position_embeddings=2048, use_cache=False, tie_word_embeddings=False
    )
    return hf.LlamaForCausalLM(config).train()


def batch_of(rows: int, length: int) -> dict[str, Any]:
    """Tokens of a whole step, the same in each process."""
    import torch
    import zoo

    torch.manual_seed(1)
    return zoo.tokens(rows, length)


def optimizer_of(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


# ---- GT


def ours(case: str, gpus: int, size: str, name: str, seconds: float) -> cases.Row:
    import torch

    import gt

    cuda = torch.cuda.is_available()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(f"gt: {{data_parallel: {[*range(gpus)]}, precision: bf16, {CASES[case]}}}\n")
        file.flush()
        (gt.gpu_workers if cuda else gt.cpu_workers)(gpus, config=file.name)
    rows, length = map(int, size.split("x"))
    with torch.device("remote" if name in BY_WORKERS else "cpu"):
        model = model_of(name).to("remote")
    optimizer = optimizer_of(model)

    @gt.compile(backend="cudagraphs" if cuda else "eager")
    def step(input_ids: Any, labels: Any) -> Any:
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = {key: value.to("remote") for key, value in batch_of(gpus * rows, length).items()}
    start = time.perf_counter()
    losses = [step(**batch).item() for _ in range(cases.MADE)][: cases.STEPS]
    first = time.perf_counter() - start
    with cases.GpuUtilization() as busy:
        ms, alone = cases.timed(lambda: step(**batch), torch.remote.synchronize, seconds)
    moved = link_bytes()
    step(**batch).item()
    stats = gt.stats()
    moved = link_bytes() - moved
    print(step.explain(), file=sys.stderr)
    gt.shutdown()
    peaks = [round(worker["peak_bytes"] / 2**20) for worker in stats["workers"]]
    live = [round(worker["live_bytes"] / 2**20) for worker in stats["workers"]]
    found = {"ms": ms, "alone ms": alone, "first s": first, "losses": losses, "peak MiB": peaks, "live MiB": live}
    if "offload" in stats:
        print(f"the step is computed {stats['offload']}", file=sys.stderr)
    return found | shares(moved, ms, busy)


def link_bytes() -> int:
    """Bytes between workers and their hosts so far."""
    import gt

    return sum(worker["bytes_to_host"] + worker["bytes_to_device"] for worker in gt.stats()["workers"])


def shares(moved: int, ms: float, busy: cases.GpuUtilization) -> cases.Row:
    """The shares of time in which GPUs computed, and of the link in use. moved: bytes of a step, 0 without offload."""
    import torch

    found: cases.Row = {"busy": busy.share}
    if moved and torch.cuda.is_available():
        found["link"] = moved / (ms / 1e3) / cases.link_rate()
    return found


# ---- rivals


def wrapped(kind: str, model: Any, own: native.World) -> Any:
    """The model, data parallel as the kind says; DDP's computes in bf16 by autocast."""
    import torch

    compiled = own.device.type == "cuda"
    if kind == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        where = {"device_ids": [own.rank]} if compiled else {}
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True, **where)
        if compiled:
            torch._dynamo.config.optimize_ddp = False  # cuts the graph at buckets, which a static graph does not have
        return torch.compile(parallel) if compiled else parallel
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if kind == "fsdp2-checkpoint":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = list(model.model.layers)
    more = {"offload_policy": CPUOffloadPolicy(pin_memory=compiled)} if kind == "fsdp2-offload" else {}
    for layer in layers:
        if compiled:
            layer.compile()
        fully_shard(layer, mp_policy=policy, reshard_after_forward=kind != "fsdp2", **more)
    fully_shard(model, mp_policy=policy, reshard_after_forward=kind != "fsdp2", **more)
    if kind in ("fsdp2-prefetch", "fsdp2-offload"):
        for layer, following in itertools.pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
    return model


def rival(own: native.World, kind: str, size: str, name: str, seconds: float) -> cases.Row:
    import torch
    import torch.distributed as dist

    rows, length = map(int, size.split("x"))
    whole = batch_of(own.size * rows, length)
    batch = {key: value.chunk(own.size)[own.rank].to(own.device) for key, value in whole.items()}
    model = wrapped(kind, model_of(name).to(own.device), own)
    optimizer = optimizer_of(model)
    native.reset(own)
    start = time.perf_counter()

    def step() -> Any:
        with torch.autocast(own.device.type, torch.bfloat16, enabled=kind == "ddp"):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = []
    for _ in range(cases.MADE):
        loss = step() / own.size
        dist.all_reduce(loss)
        losses.append(loss.item())
    first = time.perf_counter() - start
    with cases.GpuUtilization() as busy:
        ms, alone = cases.timed(step, own.wait, seconds, own.agree)
    peaks = [round(mib) for mib in own.gathered(own.peak())]
    found = {"ms": ms, "alone ms": alone, "first s": first, "losses": losses[: cases.STEPS], "peak MiB": peaks}
    moved = RIVAL_LINK_BYTES * sum(p.numel() for p in model.parameters()) if "offload" in kind else 0
    return found | shares(moved, ms, busy)


# ---- the table


def rows(args: argparse.Namespace) -> Iterator[tuple[str, cases.Row | None, str]]:
    rest = (args.gpus, args.size, args.model, "--seconds", args.seconds)
    for kind in args.rivals:
        with cases.meeting(__file__, args.gpus, "--child", "native", kind, *rest) as commands:
            # The host computes the step of offloaded state: its processes share its cores
            threads = "1" if kind != "fsdp2-offload" else str(max(1, (os.cpu_count() or 1) // args.gpus))
            yield f"native {kind}", *cases.together(commands, args.limit, OMP_NUM_THREADS=threads)
    for case in args.cases:
        yield case, *cases.together([[__file__, "--child", "gt", case, *rest]], args.limit)


def bars(report: cases.Report, case: str, row: cases.Row) -> None:
    """A case beside the best native row of its strategy."""
    beside = [report.rows.get(f"native {kind}", {}) for kind in BESIDE[case]]
    times = [one["ms"] for one in beside if "ms" in one]
    if times:
        report.bar(f"{case}: rate over that of the best rival", min(times) / row["ms"], least=RATE)
    peaks = [max(one["peak MiB"]) for one in beside if any(one.get("peak MiB", ()))]
    if peaks:
        report.bar(f"{case}: peak memory over that of the best rival", max(row["peak MiB"]) / min(peaks), most=MEMORY)


def main() -> int:
    parser = cases.flags(__doc__ or "")
    parser.add_argument("--model", default="1.1b", choices=["1.1b", *LLAMAS])
    parser.add_argument("--size", default="8x1024", help="rows a GPU x tokens")
    parser.add_argument("--gpus", type=int, default=2)
    usual = ([name for name in names if "offload" not in name] for names in (CASES, RIVALS))
    parser.add_argument("--cases", nargs="*", default=next(usual), choices=list(CASES))
    parser.add_argument("--rivals", nargs="*", default=next(usual), choices=RIVALS)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world", type=int)
    parser.add_argument("--meet")
    args = parser.parse_args()
    if args.child:
        who, kind, gpus, size, name = args.child
        if who == "gt":
            print(json.dumps(ours(kind, int(gpus), size, name, args.seconds)))
            return 0
        cases.without_gt()
        own = native.world(args.rank, args.world, args.meet)
        print(json.dumps(rival(own, kind, size, name, args.seconds)), flush=True)
        os._exit(0)  # a process group is not always taken down in time, and there is nothing left to do
    report = cases.Report("benchmarks/gpu/bench_zero.py", args.json, COLUMNS, model=args.model, size=args.size, gpus=args.gpus)
    report.head()
    wanted: list[float] = []
    length = args.gpus * int(args.size.split("x")[0]) * int(args.size.split("x")[1])
    for name, row, said in rows(args):
        if row is not None:
            wanted = wanted or row["losses"]
            row |= {"tokens/s": length / row["ms"] * 1e3, "apart": cases.apart(row["losses"], wanted)}
            if row["apart"] > NOISE:
                row, said = None, f"its losses {row['losses']} are not those of the first row, {wanted}; {row['ms']:.2f} ms"
        shown = () if name.startswith("native") else ("backend", "graph", "offload", "computed")
        lines = [line for line in said.splitlines() if any(word in line for word in shown)]
        report.row(name, row, said, cells, lines)
        if row is not None and not name.startswith("native"):
            bars(report, name, row)
    return report.end()


def cells(row: cases.Row) -> list[str]:
    n = cases.number
    return [
        n(row["ms"]), n(row["alone ms"]), n(row["tokens/s"], ".0f"), n(row["first s"], ".1f"), n(row["apart"], ".1e"),
        *(n(row.get(share), ".2f") for share in ("busy", "link")), " ".join(f"{mib:.0f}" for mib in row["peak MiB"]),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
