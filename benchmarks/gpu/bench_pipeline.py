"""GPT-2 as a pipeline over several GPUs: examples/gpt2's step through `remote`, beside the best native step of one GPU.

`python benchmarks/gpu/bench_pipeline.py [--json FILE] [--model d12] [--size 32x1024] [--cases 8,4:4:1f1b ...] [--native]`. A
case is layers of each stage, micro-batches, schedule. bf16 weights, fused AdamW. Prints milliseconds a step (median of blocks
of steps that are waited for together), how much faster than one GPU that is, the predicted bubble, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "gpt2"), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "gpu")]


def ours(case: str, size: str, name: str) -> dict[str, Any]:
    import torch
    import train
    from bench_step import timed

    import gt

    cut, parts, schedule = case.split(":")
    batch, length = map(int, size.split("x"))
    stages = len(cut.split(","))
    flags = {"-e": name, "-b": batch, "-t": length, "-M": parts, "--stages": stages, "--cut": cut, "--schedule": schedule}
    args = train.arguments([*(str(part) for pair in flags.items() for part in pair), "--dtype", "bf16"])
    config = train.sizes(args)
    workers = train.settle(args, config, torch.cuda.device_count())
    args.gpus, args.workers, args.backend = torch.cuda.device_count(), max(workers) + 1, "cudagraphs"
    model, _ = train.built(args, config)
    train.start(args, workers)
    model.to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step, _ = train.steps(model, optimizer, args)
    torch.manual_seed(1)
    data = torch.randint(50257, (batch, length + 1))
    batch_of = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    start = time.perf_counter()
    losses = [step(*batch_of).item() for _ in range(8)]
    first = time.perf_counter() - start
    last: list[Any] = []

    def once() -> None:
        last[:] = [step(*batch_of)]

    ms, alone = timed(once, lambda: last[0].item())
    step(*batch_of).item()
    stats = gt.stats()
    print(step.explain(), file=sys.stderr)
    gt.shutdown()
    found = stats.get("schedule", {})
    return {
        "ms": ms, "alone ms": alone, "first s": first, "losses": losses[:4],
        "idle": found.get("predicted", {}).get("idle"), "measured": found.get("measured", {}), "schedule": found.get("name"),
        "peak MiB": [round(w["peak_bytes"] / 2**20) for w in stats["workers"]],
        "transport": stats["workers"][0]["transport"],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--model", default="d12", help="of examples/gpt2")
    parser.add_argument("--size", default="32x1024", help="batch x tokens")
    parser.add_argument("--cases", nargs="+", default=["8,4:4:1f1b", "8,4:4:zb-h1", "8,4:8:zb-h1", "9,3:4:1f1b"])
    parser.add_argument("--native", action="store_true", help="measure one GPU too: torch.compile in a CUDA graph")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(ours(args.child, args.size, args.model)))
        return 0
    batch, length = map(int, args.size.split("x"))
    found: dict[str, dict[str, Any]] = {}
    alone = None
    commands = {}
    if args.native:
        script = str(Path(__file__).with_name("bench_step.py"))
        commands["native graph, one GPU"] = [script, "--child", "native graph", args.size, args.model]
    same = ["--size", args.size, "--model", args.model]
    commands |= {case: [__file__, "--child", case, *same] for case in args.cases}
    columns = {
        "": -32,
        "ms": 10,
        "alone ms": 10,
        "tokens/s": 12,
        "x one GPU": 11,
        "idle, predicted": 17,
        "measured": 10,
        "first s": 9,
    }
    print("".join(f"{text:>{w}s}" if w > 0 else f"{text:<{-w}s}" for text, w in columns.items()) + "  peak MiB")
    for name, command in commands.items():
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name}: failed\n{done.stderr[-3000:]}", flush=True)
            continue
        row = found[name] = json.loads(done.stdout.splitlines()[-1])
        alone = alone or (row["ms"] if name.startswith("native") else None)
        idle = f"{row['idle']:.1%}" if row.get("idle") is not None else ""
        ran = row.get("measured", {}).get("idle")
        idle = f"{idle:>17s}" + (f"{ran:10.1%}" if ran is not None else " " * 10)
        over = f"{alone / row['ms']:.2f}" if alone else ""
        rate = batch * length / row["ms"] * 1e3
        print(f"{name:32s}{row['ms']:10.3f}{rate:12.0f}{over:>11s}{idle}{row['first s']:9.1f}  {row['peak MiB']}", flush=True)
        said = [line for line in done.stderr.splitlines() if "backend" in line or "not as asked" in line or "schedule" in line]
        print("\n".join(f"    {line.strip()[:300]}" for line in said), flush=True)
    from machine import tell

    tell("benchmarks/gpu/bench_pipeline.py", {"model": args.model, "size": args.size, "figures": found}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
