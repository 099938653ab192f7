"""One GPU: a training step of GPT-2 through `remote`, with native PyTorch beside it in the same run.

`python benchmarks/gpu/bench_step.py [--json FILE] [--sizes 4x128 32x1024] [--only NAME ...]`. bf16 weights, fused AdamW. Prints
a table and one line of JSON: milliseconds a step, peak memory, and seconds to the first step at full speed, with nothing
compiled before. Two medians of milliseconds: of blocks of steps that are waited for together, of steps that are each waited
for. All have to have the first row's losses, from the first weights on, by what is timed.
Native: eager, torch.compile, and torch.compile with the whole step in a CUDA graph; GT: op by op, and captured with each
backend.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import cases

NATIVE = ("native eager", "native torch.compile", "native graph")
GT = ("gt eager", "gt eager captured", "gt inductor", "gt cudagraphs")
COLUMNS = {"ms": ".3f", "alone ms": ".3f", "tokens/s": ".0f", "peak MiB": ".0f", "first s": ".1f", "apart": ".1e"}
# what must hold: (GT's, native's, at most so many times, of what, at which size)
BARS = [
    ("gt cudagraphs", "native graph", 1.03, "ms", "4x128"),
    ("gt cudagraphs", "native graph", 1.03, "ms", "32x1024"),
    ("gt cudagraphs", "native graph", 1.10, "peak MiB", "32x1024"),
    ("gt cudagraphs", "native torch.compile", 1.50, "first s", "32x1024"),
    ("gt eager", "native eager", 1.25, "ms", "32x1024"),
]


def training(device: str, batch: int, length: int, name: str, compiled: bool = False) -> tuple[Callable, list, Any]:
    """step(tokens, targets), the two on the CPU, and what has it begin with the first weights again."""
    import torch
    from model import GPT2, fresh

    model = GPT2(fresh(name)).materialize(torch.bfloat16).initialize(0)
    first = [p.detach().clone() for p in model.parameters()]
    weights = cases.Weights(model.to(device).parameters(), first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=device == "cuda")
    forward = torch.compile(model) if compiled else model

    def step(tokens: Any, targets: Any) -> Any:
        loss = forward(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    torch.manual_seed(1)
    data = torch.randint(50257, (batch, length + 1))
    return step, [data[:, :-1].contiguous(), data[:, 1:].contiguous()], lambda: weights.again(optimizer)


def native(name: str, batch: int, length: int, model: str, seconds: float) -> cases.Row:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"  # the latter to try this out
    step, data, again = training(device, batch, length, model, compiled=name != "native eager")
    data = [part.to(device) for part in data]
    start = time.perf_counter()
    for _ in range(cases.STEPS):
        step(*data).item()
    run: Callable[[], Any] = lambda: step(*data)  # noqa: E731
    if name == "native graph" and device == "cuda":
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step(*data)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step(*data)
        run = lambda: (graph.replay(), loss)[1]  # noqa: E731
    first = time.perf_counter() - start
    again()
    losses = [run().item() for _ in range(cases.STEPS)]
    ms, alone = cases.timed(run, torch.cuda.synchronize if device == "cuda" else lambda: None, seconds)
    return {
        "ms": ms,
        "alone ms": alone,
        "peak MiB": torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0,
        "first s": first,
        "losses": losses,
    }


def remote(name: str, batch: int, length: int, model: str, seconds: float) -> cases.Row:
    import gt

    gt.gpu_workers(1)
    step, data, again = training("remote", batch, length, model)
    start = time.perf_counter()
    run = step
    if name == "gt eager":
        data = [part.to("remote") for part in data]
    else:
        run = gt.compile(step, backend={"gt eager captured": "eager"}.get(name, name[3:]))
    last = []
    for _ in range(cases.STEPS if name == "gt eager" else cases.MADE):
        run(*data).item()
    first = time.perf_counter() - start
    again()
    losses = [run(*data).item() for _ in range(cases.STEPS)]

    def once() -> None:
        last[:] = [run(*data)]

    ms, alone = cases.timed(once, lambda: last[0].item(), seconds)
    (worker,) = gt.stats()["workers"]
    said = run.explain() if run is not step else ""
    print(said, file=sys.stderr)
    gt.shutdown()
    return {"ms": ms, "alone ms": alone, "peak MiB": worker["peak_bytes"] / 2**20, "first s": first, "losses": losses}


def main() -> int:
    parser = cases.flags(__doc__ or "")
    parser.add_argument("--sizes", nargs="+", default=["4x128", "32x1024"], help="batch x tokens")
    parser.add_argument("--model", default="d12", help="of examples/gpt2")
    parser.add_argument("--only", nargs="+", default=[*NATIVE, *GT], choices=[*NATIVE, *GT])
    args = parser.parse_args()
    if args.child:
        name, size, model = args.child
        batch, length = map(int, size.split("x"))
        print(json.dumps((native if name in NATIVE else remote)(name, batch, length, model, args.seconds)))
        return 0
    report = cases.Report("benchmarks/gpu/bench_step.py", args.json, {"": -36, **dict.fromkeys(COLUMNS, 12)}, model=args.model)
    report.head()
    for size in args.sizes:
        batch, length = map(int, size.split("x"))
        wanted: list[float] = []
        for name in args.only:
            command = [__file__, "--child", name, size, args.model, "--seconds", args.seconds]
            # A cache a row: no row finds what another compiled. A compiler that is ended may still write into it.
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
                caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
                row, said = cases.together([command], args.limit, **caches)
            if row is not None:
                wanted = wanted or row["losses"]
                row |= {"tokens/s": batch * length / row["ms"] * 1e3, "apart": cases.apart(row["losses"], wanted)}
                if row["apart"] > cases.NOISE:
                    row, said = None, f"its losses {row['losses']} are not those of the first row, {wanted}"
            lines = said.strip()[-600:].splitlines() if name in GT else []
            report.row(f"{size} {name}", row, said, lambda row: [f"{row[k]:{form}}" for k, form in COLUMNS.items()], lines)
    for ours, theirs, most, what, size in BARS:
        a, b = (report.rows.get(f"{size} {name}", {}).get(what) for name in (ours, theirs))
        if a and b:
            report.bar(f"{size}: {what} of {ours} over that of {theirs}", a / b, most=most)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
