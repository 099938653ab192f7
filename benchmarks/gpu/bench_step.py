"""One GPU: a training step of GPT-2 through `remote`, with native PyTorch beside it in the same run.

`python benchmarks/gpu/bench_step.py [--json FILE] [--sizes 4x128 32x1024] [--only NAME ...]`. bf16 weights, fused AdamW. Prints
a table and one line of JSON: milliseconds a step (median of blocks of steps that are waited for together, and of steps that are
each waited for), peak memory, seconds to the first step that runs as it will from then on. Native: eager, torch.compile, and
torch.compile with the whole step in a CUDA graph; GT: op by op, and captured with each backend.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "gpt2"), str(ROOT / "benchmarks")]

NATIVE = ("native eager", "native torch.compile", "native graph")
GT = ("gt eager", "gt eager captured", "gt inductor", "gt cudagraphs")
BLOCK = 0.25  # seconds of steps that are waited for together
# what must hold: (GT's, native's, at most so many times, of what, at which size)
BARS = [
    ("gt cudagraphs", "native graph", 1.03, "ms", "4x128"),
    ("gt cudagraphs", "native graph", 1.03, "ms", "32x1024"),
    ("gt cudagraphs", "native graph", 1.10, "peak MiB", "32x1024"),
    ("gt cudagraphs", "native torch.compile", 1.50, "first s", "32x1024"),
    ("gt eager", "native eager", 1.25, "ms", "32x1024"),
]


def training(device: str, batch: int, length: int, name: str, compiled: bool = False) -> tuple[Callable, list, Any]:
    """step(tokens, targets), the two on the CPU, and the model."""
    import torch
    from model import GPT2, fresh

    model = GPT2(fresh(name)).materialize(torch.bfloat16).initialize(0).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, fused=True, **({} if device == "remote" else {"capturable": True})
    )
    forward = torch.compile(model) if compiled else model

    def step(tokens: Any, targets: Any) -> Any:
        loss = forward(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    torch.manual_seed(1)
    data = torch.randint(50257, (batch, length + 1))
    return step, [data[:, :-1].contiguous(), data[:, 1:].contiguous()], model


def timed(step: Callable[[], Any], wait: Callable[[], None], seconds: float = 5.0) -> tuple[float, float]:
    """Median over blocks of steps, and over steps that are each waited for, in ms a step."""

    def block(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        return (time.perf_counter() - start) / count * 1e3

    alone = statistics.median(block(1) for _ in range(10))
    count = max(4, int(BLOCK / alone * 1e3))
    return statistics.median(block(count) for _ in range(max(5, int(seconds / BLOCK)))), alone


def native(name: str, batch: int, length: int, model: str) -> dict[str, float]:
    import torch

    torch.cuda.reset_peak_memory_stats()
    step, data, _ = training("cuda", batch, length, model, compiled=name != "native eager")
    data = [part.cuda() for part in data]
    start = time.perf_counter()
    losses = [step(*data).item() for _ in range(4)]
    run: Callable[[], Any] = lambda: step(*data)  # noqa: E731
    if name == "native graph":
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step(*data)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(*data)
        run = graph.replay
    first = time.perf_counter() - start
    ms, alone = timed(run, torch.cuda.synchronize)
    return {
        "ms": ms,
        "alone ms": alone,
        "peak MiB": torch.cuda.max_memory_allocated() / 2**20,
        "first s": first,
        "losses": losses,
    }


def remote(name: str, batch: int, length: int, model: str) -> dict[str, float]:
    import gt

    gt.gpu_workers(1)
    step, data, _ = training("remote", batch, length, model)
    start = time.perf_counter()
    run = step
    if name == "gt eager":
        data = [part.to("remote") for part in data]
    else:
        run = gt.compile(step, backend={"gt eager captured": "eager"}.get(name, name[3:]))
    last = []
    losses = [run(*data).item() for _ in range(4 if name == "gt eager" else 8)]
    first = time.perf_counter() - start

    def once() -> None:
        last[:] = [run(*data)]

    ms, alone = timed(once, lambda: last[0].item())
    (worker,) = gt.stats()["workers"]
    said = run.explain() if run is not step else ""
    print(said, file=sys.stderr)
    gt.shutdown()
    return {"ms": ms, "alone ms": alone, "peak MiB": worker["peak_bytes"] / 2**20, "first s": first, "losses": losses[:4]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--sizes", nargs="+", default=["4x128", "32x1024"], help="batch x tokens")
    parser.add_argument("--model", default="d12", help="of examples/gpt2")
    parser.add_argument("--only", nargs="+", default=[*NATIVE, *GT], choices=[*NATIVE, *GT])
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, size, model = args.child
        batch, length = map(int, size.split("x"))
        print(json.dumps((native if name in NATIVE else remote)(name, batch, length, model)))
        return 0
    found: dict[str, dict[str, Any]] = {}
    columns = ("ms", "alone ms", "tokens/s", "peak MiB", "first s")
    print(f"{'':36s}" + "".join(f"{name:>12s}" for name in columns))
    for size in args.sizes:
        batch, length = map(int, size.split("x"))
        for name in args.only:
            command = [sys.executable, __file__, "--child", name, size, args.model]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{size} {name}: failed\n{done.stderr[-3000:]}")
                continue
            row = found[f"{size} {name}"] = json.loads(done.stdout.splitlines()[-1])
            row["tokens/s"] = round(batch * length / row["ms"] * 1e3)
            print(
                f"{size + ' ' + name:36s} {row['ms']:10.3f} {row['tokens/s']:10d} {row['peak MiB']:10.0f} {row['first s']:8.1f}"
            )
            if done.stderr.strip() and name in GT:
                print("    " + done.stderr.strip()[-600:].replace("\n", "\n    "))
            sys.stdout.flush()
    for ours, theirs, most, what, size in BARS:
        a, b = found.get(f"{size} {ours}"), found.get(f"{size} {theirs}")
        if a and b:
            over = a[what] / b[what]
            print(
                f"{size}: {what} of {ours} is {over:.3f}x that of {theirs}, want {most}x" + ("" if over <= most else "  OVER")
            )
    from machine import tell

    tell("benchmarks/gpu/bench_step.py", {"figures": found}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
