"""GPT-2 as a pipeline over several GPUs: examples/gpt2's step through `remote`, beside the best native step of one GPU.

`python benchmarks/gpu/bench_pipeline.py [--json FILE] [--size 32x1024] [--cases 8,4:4:1f1b ..] [--rivals CASE ..] [--native]`.
A case is layers of each stage (x4: four stages by cost; `+head` behind them: the head over all of their GPUs), micro-batches,
schedule; rivals are such by native.py. bf16 weights, fused AdamW. Prints milliseconds a step (median of blocks of steps that
are waited for together) and the gain over one GPU. Prints the bubble, too, each GPU's own work in a step, its bytes sent, the
hidden part of them, and one line of JSON. All have to have the first row's losses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cases
import native

ALONE = "native graph"  # of bench_step.py
COLUMNS = {
    "": -34, "ms": 10, "alone ms": 10, "tokens/s": 11, "x one GPU": 11, "idle, predicted": 17, "measured": 10, "first s": 9,
    "work of each, ms": 28, "transfers, ms (hidden)": 40, "peak MiB": 28,
}  # fmt: skip
# what must hold of GT's best: times one GPU, by model, size and GPUs; and ms
TIMES = {("d12", "32x1024", 2): 1.5, ("d12", "32x1024", 4): 2.2, ("d36", "32x1024", 2): 1.65, ("d36", "32x1024", 4): 2.8}
MOST = {("d12", "4x128", 2): 3.5}


def trainer(case: str, size: str, name: str, dtype: str = "bf16", backend: str = "") -> Callable[..., Any]:
    """The case's captured training step, on workers that are started for it."""
    return training(case, size, name, dtype, backend)[0]


def training(
    case: str, size: str, name: str, dtype: str, backend: str, vocab: int = 50257
) -> tuple[Callable[..., Any], Any, Any]:
    """And its model and optimizer."""
    import torch
    import train

    cut, parts, schedule = case.split(":", 2)
    batch, length = size.split("x")
    flags: dict[str, object] = {"-e": name, "-b": batch, "-t": length, "-M": parts, "--schedule": schedule, "--dtype": dtype}
    flags |= {"--seed": 0, "--vocab": vocab, "--connect": ""}  # no server, whatever GT_SERVER says
    cut, _, head = cut.partition("+")
    flags |= {"--stages": cut[1:]} if cut[0] == "x" else {"--stages": str(len(cut.split(","))), "--cut": cut}
    args = train.arguments([*(str(part) for pair in flags.items() for part in pair), *(["--split-head"] if head else [])])
    config = train.sizes(args)
    gpus = torch.cuda.device_count()
    workers = train.settle(args, config, gpus)
    args.gpus, args.workers, args.backend = gpus, max(workers) + 1, backend or ("cudagraphs" if gpus else "eager")
    model, _ = train.built(args, config)
    train.start(args, workers)
    model.to("remote")
    optimizer = native.optimizer_of(model.parameters())
    return train.steps(model, optimizer, args)[0], model, optimizer


def ours(case: str, size: str, name: str, seconds: float, vocab: int) -> cases.Row:
    step, model, optimizer = training(case, size, name, "bf16", "", vocab)
    return cases.captured(step, native.batch_of(*map(int, size.split("x")), "cpu"), seconds, model, optimizer)


def rows(args: argparse.Namespace) -> Iterator[tuple[str, cases.Row | None, str]]:
    """Name, result and what was said of each case, as they come: one GPU, the rivals, GT."""
    same = ["--size", args.size, "--model", args.model, "--seconds", args.seconds]
    if args.native:
        script = str(Path(__file__).with_name("bench_step.py"))
        command = [script, "--child", ALONE, args.size, args.model, "--seconds", args.seconds]
        yield ALONE, *cases.together([command], args.limit)
    for case in args.rivals:
        yield f"native {case}", *native.measured(case, args.size, args.model, args.seconds, args.limit)
    for case in args.cases:
        yield case, *cases.together([[__file__, "--child", case, *same, "--vocab", args.vocab]], args.limit)


def main() -> int:
    parser = cases.flags(__doc__ or "")
    parser.add_argument("--model", default="d12", help="of examples/gpt2")
    parser.add_argument("--vocab", type=int, default=50257, help="words of the vocabulary, in GT's cases; without rivals")
    parser.add_argument("--size", default="32x1024", help="batch x tokens")
    parser.add_argument("--cases", nargs="*", default=["8,4:4:1f1b", "8,4:4:zb-h1", "8,4:8:zb-h1", "9,3:4:1f1b"])
    parser.add_argument("--rivals", nargs="*", default=[], help="cases of native.py, as 8,4:4:1f1b")
    parser.add_argument("--native", action="store_true", help="measure one GPU too: torch.compile in a CUDA graph")
    parser.add_argument("--one", type=float, help="ms of a step of one GPU, where --native was measured before")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(ours(args.child[0], args.size, args.model, args.seconds, args.vocab)))
        return 0
    if args.vocab != 50257 and (args.rivals or args.native):
        parser.error("--vocab is of GT's cases: native.py's model has 50257 words")
    batch, length = map(int, args.size.split("x"))
    report = cases.Report(
        "benchmarks/gpu/bench_pipeline.py", args.json, COLUMNS, model=args.model, size=args.size, vocab=args.vocab, one=args.one
    )
    report.head()
    one: float | None = args.one
    wanted: list[float] = []
    for name, row, said in rows(args):
        if row is not None:
            one = row["ms"] if name == ALONE else one
            wanted = wanted or row["losses"]
            row["x one GPU"] = one and one / row["ms"]
            row["tokens/s"] = round(batch * length / row["ms"] * 1e3)
            row["apart"] = cases.apart(row["losses"], wanted)
            if row["apart"] > cases.NOISE:
                row, said = None, f"its losses {row['losses']} are not those of the first row, {wanted}"
        wants = ("backend", "not as asked", "schedule")
        lines = [] if name.startswith("native") else [line for line in said.splitlines() if any(w in line for w in wants)]
        report.row(name, row, said, cells, lines)
    bars(report, args)
    return report.end()


def gpus_of(case: str) -> int:
    cut, _, schedule = case.split(":", 2)
    stages = int(cut[1:]) if cut[0] == "x" else len(cut.split(","))
    return stages // 2 if schedule.startswith(("zb-v", "interleaved")) and stages > 1 else stages


def bars(report: cases.Report, args: argparse.Namespace) -> None:
    ms = {name: row["ms"] for name, row in report.rows.items() if "ms" in row}
    for gpus in (2, 4):
        found = [ms[case] for case in args.cases if case in ms and gpus_of(case) == gpus]
        rivals = [ms[f"native {case}"] for case in args.rivals if f"native {case}" in ms and gpus_of(case) == gpus]
        one, key = ms.get(ALONE, args.one), (args.model, args.size, gpus)
        if found and one and key in TIMES:
            report.bar(f"{gpus} GPUs: times one GPU", one / min(found), least=TIMES[key])
        if found and key in MOST:
            report.bar(f"{gpus} GPUs: ms", min(found), most=MOST[key])
        if found and rivals:
            report.bar(f"{gpus} GPUs: rate over that of the best native pipeline", min(rivals) / min(found), least=1.0)


def cells(row: cases.Row) -> list[str]:
    n, measured = cases.number, row.get("measured") or {}
    span = measured.get("makespan", 0) * 1e3
    work = row.get("work ms") or [(1 - share) * span for share in measured.get("bubble", ())]
    moves = zip(measured.get("transfers", ()), measured.get("hidden", ()), strict=True)
    moved = [f"{seconds * 1e3:.2f} ({hidden:.0%})" for seconds, hidden in moves]
    idle = row.get("predicted"), measured.get("idle", row.get("idle"))
    memory = row["peak MiB"] if isinstance(row["peak MiB"], list) else [row["peak MiB"]]
    return [
        n(row["ms"]), n(row["alone ms"]), f"{row['tokens/s']}", n(row["x one GPU"], ".2f"),
        *(n(share, ".1%") for share in idle),
        n(row["first s"], ".1f"), " ".join(f"{ms:.1f}" for ms in work), " ".join(moved),
        " ".join(f"{mib:.0f}" for mib in memory),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
