"""GPT-2 data parallel: GT by a YAML of one group, captured, beside torch's DDP and FSDP2, compiled, in the same run.

`python benchmarks/gpu/bench_data_parallel.py [--json FILE] [--configs dp2] [--rivals ddp@2 fsdp2@2 ..] [--native]`.
The batch is split over the GPUs. bf16 weights, fused AdamW. Prints milliseconds a step (median of blocks of steps that are
waited for together), how much faster than one GPU, and one line of JSON. All have to have the first row's losses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
import native

ALONE = "native graph"  # of bench_step.py
COLUMNS = {
    "": -34,
    "ms": 10,
    "alone ms": 10,
    "tokens/s": 11,
    "x one GPU": 11,
    "first s": 9,
    "losses off by": 15,
    "peak MiB": 28,
}
LEAST = 1.0  # times the best rival's rate


def ours(name: str, size: str, model_name: str, seconds: float) -> cases.Row:
    import torch
    from model import GPT2, fresh

    import gt

    path = str(cases.ROOT / "configs" / f"{name}.yaml")
    workers = int("".join(c for c in name if c.isdigit()))
    gpus = torch.cuda.is_available()
    (gt.gpu_workers if gpus else gt.cpu_workers)(workers, config=path)
    config = fresh(model_name)
    groups = gt.signal.groups()[:1] * (config.layers + 2)
    model = GPT2(config, groups).materialize(torch.bfloat16).initialize(0).to("remote")
    optimizer = native.optimizer_of(model.parameters())

    @gt.compile(backend="cudagraphs" if gpus else "eager")
    def step(tokens: Any, targets: Any) -> Any:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    data = native.batch_of(*map(int, size.split("x")), "cpu")
    return cases.captured(step, data, seconds, model, optimizer)


def rows(args: argparse.Namespace) -> Iterator[tuple[str, cases.Row | None, str]]:
    rest = (args.size, args.model, args.seconds)
    if args.native:
        script = str(Path(__file__).with_name("bench_step.py"))
        yield ALONE, *cases.together([[script, "--child", ALONE, *rest[:2], "--seconds", args.seconds]], args.limit)
    for case in args.rivals:
        yield f"native {case}", *native.measured(case, *rest, args.limit)
    for name in args.configs:
        yield name, *cases.together([[__file__, "--child", name, *rest[:2], "--seconds", args.seconds]], args.limit)


def main() -> int:
    parser = cases.flags(__doc__ or "")
    parser.add_argument("--model", default="d12", help="of examples/gpt2")
    parser.add_argument("--size", default="32x1024", help="batch x tokens")
    parser.add_argument("--configs", nargs="*", default=["dp2"], help="of configs/")
    parser.add_argument("--rivals", nargs="*", default=["ddp@2", "ddp-static@2", "fsdp2@2"], help="cases of native.py")
    parser.add_argument("--native", action="store_true", help="measure one GPU too: torch.compile in a CUDA graph")
    parser.add_argument("--one", type=float, help="ms of a step of one GPU, where --native was measured before")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(ours(*args.child, args.seconds)))
        return 0
    about = {"model": args.model, "size": args.size, "one": args.one}
    report = cases.Report("benchmarks/gpu/bench_data_parallel.py", args.json, COLUMNS, **about)
    report.head()
    one, best, wanted = args.one, 0.0, []
    batch, length = map(int, args.size.split("x"))
    for name, row, said in rows(args):
        if row is not None:
            one = row["ms"] if name == ALONE else one
            wanted = wanted or row["losses"]
            row |= {"x one GPU": one and one / row["ms"], "tokens/s": batch * length / row["ms"] * 1e3}
            row["apart"] = cases.apart(row["losses"], wanted)
            if row["apart"] > cases.NOISE:
                row, said = None, f"its losses {row['losses']} are not those of the first row, {wanted}"
        wants = ("backend", "not as asked", "graph")
        lines = [] if name.startswith("native") else [line for line in said.splitlines() if any(w in line for w in wants)]
        report.row(name, row, said, cells, lines)
        if row is not None and "@" in name:
            best = min(best or row["ms"], row["ms"])
        elif row is not None and name != ALONE and best:
            report.bar(f"{name}: rate over that of the best rival", best / row["ms"], least=LEAST)
    return report.end()


def cells(row: cases.Row) -> list[str]:
    n = cases.number
    memory = row["peak MiB"] if isinstance(row["peak MiB"], list) else [row["peak MiB"]]
    return [
        n(row["ms"]), n(row["alone ms"]), n(row["tokens/s"], ".0f"), n(row["x one GPU"], ".2f"), n(row["first s"], ".1f"),
        n(row["apart"], ".1e"), " ".join(f"{mib:.0f}" for mib in memory),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
