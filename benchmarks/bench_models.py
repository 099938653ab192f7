"""A training step of each Hugging Face model: eager and captured on one CPU worker, beside plain torch in the same run.

`python benchmarks/bench_models.py [--json FILE] [NAME ...]`. The models are those of tests/helpers/transformer_models.py in two
sizes: steps of about 50 ms, and of a little over 20 ms. Mixtures of experts have their form of fixed shapes (grouped matmuls,
transformers' default). Both sides use one thread, fused AdamW and no dropout. The column cpu/ is the CPU time of all processes
of a captured step over plain torch's: other work on the machine disturbs it less. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

LIMIT = 1.1  # captured over plain torch, where a step takes 20 ms or more
HEADS = ("ops", "plain", "eager", "captured", "eager/", "captured/", "cpu/")
BLOCKS, STEPS, WARM = 9, 5, 2
WIDTHS = {"": {"width": 192, "heads": 6}, ", small": {"width": 128, "heads": 4}}
WORDS = {"layers": 4, "vocabulary": 2048, "rows": 4}
LENGTHS: dict[str, dict[str, Any]] = {"": {**WORDS, "length": 64}, ", small": {**WORDS, "length": 56}}
PICTURES: dict[str, dict[str, Any]] = {"": {"size": 64, "patch": 8}, ", small": {"size": 56, "patch": 8}}


def stepping(model: Any) -> Callable[[dict], Any]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: dict) -> Any:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def used() -> float:
    """Seconds of CPU that this process and all that it started have used."""
    import psutil

    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


def measure(name: str, how: str) -> dict[str, Any]:
    """Blocks of steps in turn, each block's last loss awaited; ratios are of adjacent blocks, and eager's are fewer."""
    import gt
    from tests.helpers.transformer_models import make

    sizes = {**WIDTHS[how], **({**PICTURES[how], "layers": 4, "rows": 4} if name == "vit" else LENGTHS[how])}
    runs: dict[str, tuple[Callable, dict]] = {}
    for kind in ("plain", "captured", "eager"):
        model, batch = make(name, **sizes)
        step = stepping(model.eval().to("cpu" if kind == "plain" else "remote"))
        runs[kind] = gt.compile(step) if kind == "captured" else step, batch
    runs["eager"] = runs["eager"][0], {key: value.to("remote") for key, value in runs["eager"][1].items()}
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    losses, cpu = {}, dict.fromkeys(runs, 0.0)
    for block in range(WARM + BLOCKS):
        for kind, (step, batch) in runs.items():
            if kind == "eager" and block >= WARM and block % 3:
                continue
            before, start = used(), time.perf_counter()
            for _ in range(STEPS):
                loss = step(batch)
            losses[kind] = loss.item()
            if block >= WARM:
                times[kind].append((time.perf_counter() - start) / STEPS)
                cpu[kind] += used() - before
    captured = runs["captured"][0]
    assert captured._programs and captured._programs[0].replays >= BLOCKS * STEPS, captured.explain()
    assert abs(losses["captured"] - losses["plain"]) < 1e-5 * losses["plain"], losses
    plain, replayed, eager = (statistics.median(each) * 1e3 for each in times.values())
    over = statistics.median(a / b for a, b in zip(times["captured"], times["plain"], strict=True))
    row = {"plain_ms": plain, "eager_ms": eager, "captured_ms": replayed, "eager_over": eager / plain, "captured_over": over}
    row["captured_cpu_over"] = cpu["captured"] / cpu["plain"]
    return {**{key: round(value, 3) for key, value in row.items()}, "ops": captured._programs[0].answer["ops"]}


def main() -> int:
    from tests.helpers.transformer_models import KINDS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(KINDS), metavar="NAME")
    parser.add_argument("--json", type=Path, help="write the result here too")
    args = parser.parse_args()
    import torch
    import transformers
    from machine import tell

    import gt

    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    gt.cpu_workers(1, config="")
    print("{:18s} {:>6s} {:>9s} {:>9s} {:>9s} {:>8s} {:>10s} {:>10s}".format("", *HEADS))
    rows = {}
    for name, how in [(name, how) for name in args.names for how in WIDTHS]:
        row = rows[name + how] = measure(name, how)
        over = "  OVER" if row["captured_over"] > LIMIT and row["plain_ms"] >= 20 else ""
        cells = [f"{row[key]:.1f} ms" for key in ("plain_ms", "eager_ms", "captured_ms")]
        ratios = f"{row['eager_over']:7.2f}x {row['captured_over']:9.2f}x {row['captured_cpu_over']:9.2f}x"
        print("{:18s} {:>6d} {:>9s} {:>9s} {:>9s} ".format(name + how, row["ops"], *cells) + ratios + over, flush=True)
    gt.shutdown()
    tell("benchmarks/bench_models.py", {"transformers": transformers.__version__, "limit": LIMIT, "models": rows}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
