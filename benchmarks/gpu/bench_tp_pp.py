"""Tensor x pipeline parallel: the tuning demo's model under its YAMLs, captured, beside DTensor x torch.distributed.pipelining.

`python benchmarks/gpu/bench_tp_pp.py [--json FILE] [--preset seed] [--cases tp2pp2:x2:4:zb-h1 ..] [--rivals 2:4,4:4:1f1b ..]`.
A case is a file of configs/ (or its path), layers of each stage (x2: by cost), micro-batches, schedule; rivals are
native_tp.py's. bf16 weights, fused AdamW. Prints milliseconds a step (median of blocks of steps that are waited for together),
the gain over the best rival, and one line of JSON. All have to have the losses of one process.
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
import native_tp

COLUMNS = {
    "": -34, "ms": 10, "alone ms": 10, "tokens/s": 11, "x best rival": 14, "idle, predicted": 17, "measured": 10, "first s": 9,
    "work of each, ms": 28, "losses off by": 15, "peak MiB": 28,
}  # fmt: skip
# what must hold: GT's best over the rivals' best, of tensor x pipeline and of tensor parallel alone
BARS = {"tensor x pipeline": 1.3, "tensor parallel alone": 1.05}


OURS = "ours"


def kind_of(rival: str) -> str:
    case = native_tp.Case.read(rival)
    return "pipeline alone" if case.tp == 1 else "tensor x pipeline" if len(case.cut) > 1 else "tensor parallel alone"


def config_of(name: str) -> str:
    return name if "/" in name else str(cases.ROOT / "configs" / f"{name}.yaml")


def by_cost(model: Any, stages: int, length: int) -> list[int]:
    """Layers of each stage, the head being as a layer of the last."""
    import torch

    import gt

    head = torch.nn.Linear(*model.head_weight.shape, bias=False, device="meta")
    example = torch.empty(1, length, model.head_weight.shape[0], dtype=model.head_weight.dtype, device="meta")
    runs = gt.signal.balance([*model.blocks, head.to(example.dtype)], stages, example)
    return [stop - start - (stop > len(model.blocks)) for start, stop in runs]


def cut_as(model: Any, counts: list[int], groups: list[str]) -> None:
    """So many layers in each stage, where the demo would spread them evenly."""
    rows = cases.tuning_demo().places(len(counts), groups)
    model.places = [rows[n] for n, count in enumerate(counts) for _ in range(count)]
    if len(model.places) != len(model.blocks):
        raise SystemExit(f"{counts}: the model has {len(model.blocks)} layers")
    for block, place in zip(model.blocks, model.places, strict=True):
        block.place = place


def mean_loss(model: Any, tokens: Any, targets: Any) -> Any:
    """In fp32, as the rivals': the demo's own mean is a bf16 number, of 8 bits."""
    import torch.nn.functional as F

    logits = model.logits(tokens)
    with cases.tuning_demo().within(model.places[-1].stage):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").float().mean()


def training(case: str, size: str, preset: str, vocab: str) -> tuple[Callable[..., Any], Any, Any]:
    """The case's captured training step, on workers that are started for it, its model and optimizer."""
    import torch

    import gt
    from gt.config.load import load

    name, cut, parts, *schedule = case.split(":", 3)
    path, count = config_of(name), int(parts)
    workers = max(w for group in load(Path(path).read_text(), path).groups.values() for w in group.flat) + 1
    gpus = torch.cuda.is_available()
    (gt.gpu_workers if gpus else gt.cpu_workers)(workers, config=path)
    model = native_tp.demo(preset, int(vocab), gt.signal.groups())
    length = int(size.partition("x")[2])
    counts = by_cost(model, int(cut[1:]), length) if cut[0] == "x" else [int(n) for n in cut.split(",")]
    print(f"layers of each stage: {counts}", file=sys.stderr)
    cut_as(model, counts, gt.signal.groups())
    model = model.to("remote")
    optimizer = native.optimizer_of(model.parameters())

    @gt.compile(backend="cudagraphs" if gpus else "eager", schedule=schedule[0] if schedule and len(counts) > 1 else None)
    def step(tokens: Any, targets: Any) -> Any:
        total = torch.zeros((), device=tokens.device)
        for part in gt.microbatches((tokens, targets), count):
            loss = mean_loss(model, *part) / count
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step, model, optimizer


def batch_of(size: str, vocab: str) -> list[Any]:
    return native.batch_of(*map(int, size.split("x")), "cpu", min(int(vocab), 50257))


def ours(case: str, size: str, preset: str, vocab: str, seconds: float) -> cases.Row:
    step, model, optimizer = training(case, size, preset, vocab)
    return cases.captured(step, batch_of(size, vocab), seconds, model, optimizer)


def rows(args: argparse.Namespace) -> Iterator[tuple[str, cases.Row | None, str]]:
    rest = (args.size, args.preset, args.vocab)
    for case in args.rivals:
        yield f"native {case}", *native_tp.measured(case, *rest, args.seconds, args.limit)
    for case in args.cases:
        yield case, *cases.together([[__file__, "--child", case, *rest, "--seconds", args.seconds]], args.limit)


def main() -> int:
    parser = cases.flags(__doc__ or "")
    parser.add_argument("--preset", default="seed", help="of the tuning demo")
    parser.add_argument("--vocab", type=int, default=native_tp.VOCAB, help="rows of embedding and head")
    parser.add_argument("--size", default="32x1024", help="batch x tokens")
    parser.add_argument("--cases", nargs="*", default=["tp2pp2:x2:4:1f1b", "tp2pp2:x2:4:zb-h1", "tp4:x1:1"])
    parser.add_argument("--rivals", nargs="*", default=[], help="cases of native_tp.py, as 2:4,4:4:1f1b or 4:8:1")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(ours(*args.child, args.seconds)))
        return 0
    batch, length = map(int, args.size.split("x"))
    about = {"preset": args.preset, "vocab": args.vocab, "size": args.size}
    report = cases.Report("benchmarks/gpu/bench_tp_pp.py", args.json, COLUMNS, **about)
    report.head()
    best: dict[str, float] = {}  # ms, by kind of rival, and of ours
    wanted: list[float] = []
    for name, row, said in rows(args):
        rival = name.startswith("native")
        kind = kind_of(name.removeprefix("native ")) if rival else OURS
        if row is not None:
            wanted = wanted or row.get("wanted") or row["losses"]
            row |= {"tokens/s": batch * length / row["ms"] * 1e3, "apart": cases.apart(row["losses"], wanted)}
            rivals = [ms for found, ms in best.items() if found != OURS]
            row["x best rival"] = None if rival or not rivals else min(rivals) / row["ms"]
            if row["apart"] > cases.NOISE:
                row, said = None, f"its losses {row['losses']} are not those of one process, {wanted}"
        wants = ("backend", "not as asked", "schedule", "graph")
        lines = [] if rival else [line for line in said.splitlines() if any(w in line for w in wants)]
        report.row(name, row, said, cells, lines)
        if row is not None:
            best[kind] = min(best.get(kind, row["ms"]), row["ms"])
    for kind, least in BARS.items():
        if OURS in best and kind in best:
            report.bar(f"rate of GT's best over that of the best native {kind}", best[kind] / best[OURS], least=least)
    return report.end()


def cells(row: cases.Row) -> list[str]:
    n, measured = cases.number, row.get("measured") or {}
    span = measured.get("makespan", 0) * 1e3
    work = [(1 - share) * span for share in measured.get("bubble", ())]
    return [
        n(row["ms"]), n(row["alone ms"]), n(row["tokens/s"], ".0f"), n(row["x best rival"], ".2f"),
        n(row.get("predicted"), ".1%"), n(measured.get("idle"), ".1%"), n(row["first s"], ".1f"),
        " ".join(f"{ms:.1f}" for ms in work), n(row["apart"], ".1e"), " ".join(f"{mib:.0f}" for mib in row["peak MiB"]),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
