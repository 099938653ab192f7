"""One GPU: a training step of many kinds of models through `remote`, with native PyTorch beside it in the same run.

`python benchmarks/gpu/bench_models.py [--json FILE] [--models llama bert ...] [--only NAME ...] [--host]`. bf16 weights, fused
AdamW. Prints a row a case and one line of JSON: milliseconds a step (median of blocks, and of steps that are each waited for),
peak memory, and seconds to the first step at full speed. `--host` gives each step a batch from host memory,
pinned for native rows. Losses of all rows are compared, from the first weights on.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import cases
import zoo

NATIVE = ("native eager", "native torch.compile", "native graph")
GT = ("gt eager", "gt cudagraphs", "gt model")  # the last: the model alone is captured, as torch.compile(model) compiles it
COLUMNS = {"ms": ".2f", "alone ms": ".2f", "peak MiB": ".0f", "first s": ".1f", "apart": ".1e"}
CAPTURED, EAGER = 1.03, 1.10  # at most so many times the best native row, and native's eager row
NOISE = 2e-2  # relative: what bf16 does to losses of so many steps where kernels differ


def training(name: str, device: str, compiles: Callable[..., Any] | None) -> tuple[Callable, dict, Callable[[], None], Any]:
    """step(**batch) -> loss; its batch on the CPU; what has it begin with the first weights again; the model that it calls.

    compiles: captures or compiles the model.
    """
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model, batch = zoo.ZOO[name]()
    torch.set_default_dtype(torch.float32)
    batch = {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}
    batch |= {key: batch[key].bfloat16() for key in ("input_features", "pixel_values", "input_values") if key in batch}
    model = model.train().to(device)
    weights = cases.Weights([*model.parameters(), *model.buffers()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=device == "cuda")
    forward = model if compiles is None else compiles(model)

    def step(**batch: Any) -> Any:
        output = forward(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, batch, lambda: weights.again(optimizer), forward


def native(kind: str, name: str, seconds: float, host: bool) -> cases.Row:
    import torch

    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    step, batch, again, _ = training(name, device, None if kind == "native eager" else torch.compile)
    given = {key: value.pin_memory() if cuda else value for key, value in batch.items()}
    held = {key: value.to(device) for key, value in batch.items()}
    start = time.perf_counter()
    for _ in range(cases.STEPS):
        step(**held).item()
    run: Callable[..., Any] = step
    if kind == "native graph" and cuda:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step(**held)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step(**held)

        def run(**batch: Any) -> Any:
            for key, value in batch.items():
                if value is not held[key]:
                    held[key].copy_(value, non_blocking=True)
            graph.replay()
            return loss

    def once() -> Any:
        if not host:
            return run(**held)
        return run(**(given if kind == "native graph" else {k: v.to(device, non_blocking=True) for k, v in given.items()}))

    first = time.perf_counter() - start
    again()
    losses = [once().item() for _ in range(cases.STEPS)]
    ms, alone = cases.timed(once, torch.cuda.synchronize if cuda else lambda: None, seconds)
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
    return {"ms": ms, "alone ms": alone, "peak MiB": peak, "first s": first, "losses": losses}


def remote(kind: str, name: str, seconds: float, host: bool) -> cases.Row:
    import gt

    gt.gpu_workers(1)
    captured = functools.partial(gt.compile, backend="cudagraphs")
    step, batch, again, model = training(name, "remote", captured if kind == "gt model" else None)
    run = captured(step) if kind == "gt cudagraphs" else step
    held = {key: value.to("remote") for key, value in batch.items()}

    def once() -> Any:
        if not host:
            return run(**held)
        return run(**(batch if run is not step else {key: value.to("remote") for key, value in batch.items()}))

    start = time.perf_counter()
    for _ in range(cases.STEPS if kind == "gt eager" else cases.MADE):
        once().item()
    first = time.perf_counter() - start
    again()
    losses = [once().item() for _ in range(cases.STEPS)]
    last: list = []

    def kept() -> None:
        last[:] = [once()]

    ms, alone = cases.timed(kept, lambda: last[0].item(), seconds)
    (worker,) = gt.stats()["workers"]
    explained = model if kind == "gt model" else run
    print(explained.explain() if kind != "gt eager" else "", file=sys.stderr)
    gt.shutdown()
    return {"ms": ms, "alone ms": alone, "peak MiB": worker["peak_bytes"] / 2**20, "first s": first, "losses": losses}


def main() -> int:
    parser = cases.flags(__doc__ or "")
    parser.add_argument("--models", nargs="+", default=list(zoo.ZOO), choices=list(zoo.ZOO))
    parser.add_argument("--only", nargs="+", default=[*NATIVE, *GT], choices=[*NATIVE, *GT])
    parser.add_argument("--host", action="store_true", help="a new batch from host memory at each step")
    args = parser.parse_args()
    if args.child:
        kind, name = args.child
        print(json.dumps((native if kind in NATIVE else remote)(kind, name, args.seconds, args.host)))
        return 0
    columns = {"": -36, **dict.fromkeys(COLUMNS, 12)}
    report = cases.Report("benchmarks/gpu/bench_models.py", args.json, columns, host=args.host)
    report.head()
    for name in args.models:
        wanted: list[float] = []
        for kind in args.only:
            command = [__file__, "--child", kind, name, "--seconds", args.seconds, *(["--host"] if args.host else [])]
            # A cache a row: no row finds what another compiled. A compiler that is ended may still write into it.
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
                caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
                row, said = cases.together([command], args.limit, **caches)
            if row is not None:
                wanted = wanted or row["losses"]
                row["apart"] = cases.apart(row["losses"], wanted)
                if row["apart"] > (0.1 if name in zoo.RANDOM else NOISE):
                    row, said = None, f"its losses {row['losses']} are not those of the first row, {wanted}; {row['ms']:.2f} ms"
            lines = said.strip()[-900:].splitlines() if kind in GT else []
            report.row(f"{name} {kind}", row, said, lambda row: [f"{row[k]:{form}}" for k, form in COLUMNS.items()], lines)
        times = {kind: report.rows.get(f"{name} {kind}", {}).get("ms") for kind in args.only}
        best = min((ms for kind, ms in times.items() if ms and kind in NATIVE), default=None)
        if best and "gt cudagraphs" in times:
            ours = times["gt cudagraphs"] or float("nan")
            report.bar(f"{name}: captured over the best native row", ours / best, most=CAPTURED)
        if times.get("native torch.compile") and "gt model" in times:
            ours = times["gt model"] or float("nan")
            report.bar(f"{name}: the model captured over torch.compile", ours / times["native torch.compile"], most=CAPTURED)
        if times.get("native eager") and "gt eager" in times:
            ours = times["gt eager"] or float("nan")
            report.bar(f"{name}: eager over native eager", ours / times["native eager"], most=EAGER)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
