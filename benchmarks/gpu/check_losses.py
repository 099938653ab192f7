"""Checks that GT trains as one process of plain torch does: GPT-2 in stages, by every schedule, with CUDA graphs and without.

`python benchmarks/gpu/check_losses.py [--json FILE] [--gpus 2] [--models d8:8x64 d12:8x256] [--schedules ..] [--backends ..]`.
Trains on this project's documents, byte by byte: on random tokens GPT-2's loss leaps, and what differs by rounding is far apart
after a leap. fp32 with TF32 off: the losses of 20 steps are within 1e-5 of that process's. bf16, 50 steps: the bar is
twice the largest difference of two processes of torch (eager, or compiled where GT compiles) with other numbers of
micro-batches. A pipeline's losses differ by at most that from one process's, and from the same program's on one GPU. A
captured step is eager until it is made, and eager steps round more than compiled ones do (log_softmax to bf16). So all that is
compiled counts from where it is, after some steps, with the first weights again. Exits with 1 where that is not so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import cases
import native
from bench_pipeline import training

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v")
DOUBLED = ("interleaved", "zb-v")  # two stages on each worker
EXACT, TWICE = 1e-5, 2.0
TEXT = [cases.ROOT / "README.md", *sorted((cases.ROOT / "docs").glob("*.md"))]
BATCHES = 4  # that come in turns
STEPS = {"fp32": 20, "bf16": 50}
COLUMNS = {"": -44, "largest difference": 22, "of typical size": 18, "last loss": 12}


def batches(size: str) -> list[list[Any]]:
    """Batches of a size such as 8x128, each of other parts of the text."""
    import torch

    batch, length = map(int, size.split("x"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in TEXT)), dtype=torch.uint8).long()
    starts = torch.arange(BATCHES * batch)[:, None] * len(text) // (BATCHES * batch)
    rows = text[(starts + torch.arange(length + 1)) % len(text)]
    return [[rows[n::BATCHES, :-1].contiguous(), rows[n::BATCHES, 1:].contiguous()] for n in range(BATCHES)]


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
    (step, model, optimizer), data = training(case, size, name, dtype, backend), batches(size)
    if dtype == "bf16" and backend != "eager":
        _made(step, model, optimizer, data)
    losses = [step(*data[n % BATCHES]).item() for n in range(STEPS[dtype])]
    print(step.explain(), file=sys.stderr)
    gt.shutdown()
    return losses


def _made(step: Any, model: Any, optimizer: Any, data: Sequence[list[Any]]) -> None:
    """Have a step compiled; what it trains is as before."""
    weights = cases.Weights(model.parameters())
    for n in range(cases.MADE):
        step(*data[n % BATCHES]).item()
    weights.again(optimizer)


def apart(losses: Sequence[float], wanted: Sequence[float]) -> tuple[float, float]:
    """The largest relative difference, and the root of their mean square."""
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)]
    return max(differences), math.sqrt(sum(d * d for d in differences) / len(differences))


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
        parts, model = self.args.parts, f"bf16 {name} {size}"
        for backend in self.args.backends:
            compiled = ("",) if backend == "eager" else ("compiled",)
            how = "eager" if backend == "eager" else "torch.compile"
            alone = self.run(f"{model} one process, {how}", "plain", name, size, "bf16", parts, *compiled)
            wanted = alone and alone["losses"]
            others = [
                self.run(f"{model} one process, {how}, {n} parts", "plain", name, size, "bf16", n, *compiled, wanted=wanted)
                for n in dict.fromkeys((1, parts // 2, 2 * parts))
            ]
            one, several = (
                self.run(f"{model} {case} {backend}", "ours", name, size, "bf16", case, backend, wanted=wanted)
                for case in (f"x1:{parts}:1f1b", f"x{self.args.gpus}:{parts}:1f1b")
            )
            if None in (alone, *others, one, several):
                continue
            rivals = [row["losses"] for row in (alone, *others)]
            unit = max(apart(a, b)[1] for a, b in itertools.permutations(rivals, 2))
            beside = apart(several["losses"], one["losses"])[1]
            for what, found in (("one process", several["typical"]), ("one GPU", beside)):
                label = f"{model} x{self.args.gpus} {backend}: from {what}, times what micro-batches do by {how}"
                self.report.bar(label, _over(found, unit), most=TWICE)


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
