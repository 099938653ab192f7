"""Whether GT trains as one process of plain torch does: GPT-2 in stages, by every schedule, with CUDA graphs and without.

`python benchmarks/gpu/check_losses.py [--json FILE] [--gpus 2] [--models d8:8x64 d12:8x256] [--schedules ..] [--backends ..]`.
fp32 with TF32 off: the losses of 20 steps are within 1e-5 of that process's. bf16, 50 steps: a pipeline's differ from those of
the same program on one GPU by at most twice what two native runs do that differ only in how many micro-batches there are; and
from native's by at most twice what these do, or where GT compiles, what torch.compile does. Exits with 1 where that is not so.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import cases
import native
from bench_pipeline import trainer

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v")
DOUBLED = ("interleaved", "zb-v")  # two stages on each worker
EXACT, TWICE = 1e-5, 2.0
BATCHES = 4  # that come in turns
STEPS = {"fp32": 20, "bf16": 50}
COLUMNS = {"": -44, "largest difference": 22, "of typical size": 18, "last loss": 12}


def batches(size: str) -> list[list[Any]]:
    """Of so many sequences, each another one."""
    batch, length = map(int, size.split("x"))
    return [list(pair) for pair in zip(*(t.split(batch) for t in native.batch_of(BATCHES * batch, length, "cpu")), strict=True)]


def plain(name: str, size: str, dtype: str, parts: str, compiled: str = "") -> list[float]:
    """One process of torch; compiled: whether by torch.compile."""
    import torch
    from model import GPT2, fresh

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT2(fresh(name)).materialize({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    model.head.unembed.weight = model.embed.wte.weight
    model = model.initialize(0).to(device)
    optimizer = native.optimizer_of(model.parameters())
    forward = torch.compile(model) if compiled else model
    data, count, losses = [[t.to(device) for t in pair] for pair in batches(size)], int(parts), []
    for n in range(STEPS[dtype]):
        total = torch.zeros((), device=device)
        for x, y in zip(*(part.chunk(count) for part in data[n % BATCHES]), strict=True):
            loss = forward(x, y) / count
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return torch.stack(losses).tolist()


def ours(name: str, size: str, dtype: str, case: str, backend: str) -> list[float]:
    import torch

    import gt

    torch.set_float32_matmul_precision("highest")
    step, data = trainer(case, size, name, dtype, backend), batches(size)
    losses = [step(*data[n % BATCHES]).item() for n in range(STEPS[dtype])]
    print(step.explain(), file=sys.stderr)
    gt.shutdown()
    return losses


def apart(losses: Sequence[float], wanted: Sequence[float]) -> tuple[float, float]:
    """The largest relative difference, and the root of their mean square."""
    found = [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)]
    return max(found), math.sqrt(sum(d * d for d in found) / len(found))


class Check:
    """Runs and compares; `wanted` is one process's."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.report = cases.Report("benchmarks/gpu/check_losses.py", args.json, COLUMNS, gpus=args.gpus)
        self.report.head()

    def run(self, label: str, kind: str, *rest: object, wanted: Sequence[float] | None = None) -> Any:
        row, said = cases.together([[__file__, "--child", kind, *rest]], self.args.limit)
        if row is not None and not all(map(math.isfinite, row["losses"])):
            row, said = None, f"its losses are {row['losses']}"
        if row is not None and wanted:
            row["largest"], row["typical"] = apart(row["losses"], wanted)
        lines = [line for line in said.splitlines() if "not as asked" in line or "backend" in line or "graph" in line]
        self.report.row(label, row, said, cells, lines if row else [])
        return row

    def exact(self, name: str, size: str) -> None:
        alone = self.run(f"fp32 {name} {size} one process", "plain", name, size, "fp32", self.args.parts)
        for schedule in self.args.schedules if alone else ():
            stages = self.args.gpus * (2 if schedule in DOUBLED else 1)
            case = f"x{stages}:{self.args.parts}:{schedule}"
            for backend in self.args.backends:
                label = f"fp32 {name} {size} {case} {backend}"
                row = self.run(label, "ours", name, size, "fp32", case, backend, wanted=alone["losses"])
                if row:
                    self.report.bar(label, row["largest"], most=EXACT)

    def near(self, name: str, size: str) -> None:
        parts = self.args.parts
        model = f"bf16 {name} {size}"
        alone = self.run(f"{model} one process", "plain", name, size, "bf16", parts)
        if alone is None:
            return
        wanted = alone["losses"]
        others = {
            what: self.run(f"{model} one process, {what}", "plain", name, size, "bf16", *how, wanted=wanted)
            for what, how in ((f"{2 * parts} micro-batches", (2 * parts,)), ("torch.compile", (parts, "compiled")))
        }
        if None in others.values():
            return
        by_parts, by_compiling = (row["typical"] for row in others.values())
        for backend in self.args.backends:
            one, several = f"x1:{parts}:1f1b", f"x{self.args.gpus}:{parts}:1f1b"
            same = self.run(f"{model} {one} {backend}", "ours", name, size, "bf16", one, backend, wanted=wanted)
            label = f"{model} {several} {backend}"
            row = self.run(label, "ours", name, size, "bf16", several, backend, wanted=wanted) if same else None
            if row:
                beside = apart(row["losses"], same["losses"])[1]
                what, unit = ("micro-batches", by_parts) if backend == "eager" else ("torch.compile", by_compiling)
                self.report.bar(f"{label}: from one GPU, times native micro-batches", _over(beside, by_parts), most=TWICE)
                self.report.bar(f"{label}: from native, times native {what}", _over(row["typical"], unit), most=TWICE)


def _over(size: float, unit: float) -> float:
    return size / unit if unit else math.inf * size if size else 0.0


def cells(row: cases.Row) -> list[str]:
    n = cases.number
    return [n(row.get("largest"), ".2e"), n(row.get("typical"), ".2e"), n(row["losses"][-1], ".4f")]


def main() -> int:
    parser = cases.flags(__doc__ or "")
    parser.add_argument("--gpus", type=int, default=2, help="or CPU workers, where there are none")
    parser.add_argument("--models", nargs="+", default=["d8:8x64", "d12:8x256"], help="of examples/gpt2, and batch x tokens")
    parser.add_argument("--schedules", nargs="*", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--backends", nargs="*", default=["cudagraphs", "eager"])
    parser.add_argument("--parts", type=int, default=4, help="micro-batches")
    parser.add_argument("--only", choices=STEPS, help="one dtype")
    args = parser.parse_args()
    if args.child:
        kind, *rest = args.child
        print(json.dumps({"losses": {"plain": plain, "ours": ours}[kind](*rest)}))
        return 0
    check = Check(args)
    for model in args.models:
        name, _, size = model.partition(":")
        if args.only != "bf16":
            check.exact(name, size)
        if args.only != "fp32":
            check.near(name, size)
    return check.report.end()


if __name__ == "__main__":
    sys.exit(main())
