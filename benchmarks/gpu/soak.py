"""Many replays of one captured step, which nothing may grow with; then one worker is killed, and its world has to come back.

`python benchmarks/gpu/soak.py [--json FILE] [--workers 2] [--replays 10000] [--model d4 | mlp] [--size 4x64]`. Looks ten times
at resident memory and open descriptors of every process, memory of the GPUs, and tensors of the workers. Measures the CPU time
of the program's thread to issue a replay: by the clock it is longer where others use the machine. Afterwards: WorkerLost
within 2 s, new workers within 10 s, the GPUs' memory given back. Exits with 1 where that is not so. Without GPUs: CPU workers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import native

LOOKS = 10
AHEAD = 20  # replays under way before one is waited for
LOST, BACK = 2.0, 10.0  # seconds
# what may grow between the second look and the last: MiB of a process, of a GPU; times the issue of a replay
MORE, MORE_GPU, SLOWER = 8.0, 16.0, 1.3
GIVEN_BACK = 256.0  # MiB that a GPU may have more in use than before the loss
COLUMNS = {"after replays": -16, "issue us": 10, "ms a replay": 13, "RSS MiB of client, server, workers": 46, "descriptors": 28,
           "tensors": 16, "GPU MiB": 28}  # fmt: skip
Step = Callable[[], Any]


def pipeline(args: argparse.Namespace) -> Step:
    """GPT-2 in as many stages as there are workers."""
    from bench_pipeline import trainer

    batch, length = map(int, args.size.split("x"))
    step = trainer(f"x{args.workers}:{min(batch, 2 * args.workers)}:1f1b", args.size, args.model, "fp32", args.backend)
    data = native.batch_of(batch, length, "cpu")
    return lambda: step(*data)


def small(args: argparse.Namespace) -> Step:
    """A layer on each worker: a step of a millisecond or so."""
    import torch

    import gt

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stages.yaml"
        path.write_text("".join(f"stage{n}: {{shard: {{axis: 0, workers: [{n}]}}}}\n" for n in range(args.workers)))
        (gt.gpu_workers if torch.cuda.is_available() else gt.cpu_workers)(args.workers, config=str(path))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16).to("remote") for _ in range(args.workers)]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=1e-3)

    @gt.compile(backend=args.backend or ("cudagraphs" if torch.cuda.is_available() else "eager"))
    def step(x: Any) -> Any:
        for n, layer in enumerate(layers):
            with gt.signal.context(f"stage{n}"):
                x = layer(x).tanh()
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    data = torch.randn(8, 16)
    return lambda: step(data)


# ---- looking


def processes() -> dict[str, int]:
    """Name in `ps` -> pid, of what runs for this program and of itself."""
    from gt import api

    local = api._Started.local
    assert local is not None
    nursery = local._process.pid
    pids = Path(f"/proc/{nursery}/task/{nursery}/children").read_text().split()
    found = {"client": os.getpid()}
    for pid in pids:
        with contextlib.suppress(OSError):  # it may just have ended
            found[Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()] = int(pid)
    return found


def resident(pid: int) -> float:
    """MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def gpu_memory() -> list[float]:
    """MiB in use on each GPU that this may use, whoever uses it."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        return [float(line) for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]
    except (OSError, subprocess.SubprocessError):
        return []


def look(issue: list[float], seconds: float) -> cases.Row:
    import gt

    gc.collect()
    gt.stats()  # what is freed until now is gone when they answer again
    workers = gt.stats()["workers"]
    by_name = sorted(processes().items())
    return {  # the lower quartile: now and then a replay waits for those before it
        "issue us": statistics.quantiles(issue, n=4)[0] * 1e6, "ms": seconds / len(issue) * 1e3,
        "resident": {name: round(resident(pid), 1) for name, pid in by_name},
        "descriptors": {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in by_name},
        "tensors": [w["live_tensors"] for w in workers], "GPU MiB": gpu_memory(),
    }  # fmt: skip


def _later(found: list[float]) -> float:
    """The median of the later half over that of the earlier: one look may have met with other work on the machine."""
    half = len(found) // 2
    return statistics.median(found[half:]) / statistics.median(found[:half])


def replayed(step: Step, count: int) -> cases.Row:
    """Memory, descriptors, tensors and CPU time after `count` more replays."""
    issue, waiting = [], []
    start = time.perf_counter()
    for n in range(count):
        begin = time.thread_time()
        waiting.append(step())
        issue.append(time.thread_time() - begin)
        if n % AHEAD == AHEAD - 1:
            waiting.pop().item()
            waiting.clear()
    if waiting:
        waiting.pop().item()
    waiting.clear()
    return look(issue, time.perf_counter() - start)


# ---- a loss


def killed(step: Step, world: int) -> cases.Row:
    """Seconds until a dead worker is noticed, and until all are there again."""
    import gt

    waiting = [step() for _ in range(AHEAD)]
    os.kill(processes()[f"gt.worker {world - 1}"], signal.SIGKILL)
    start = time.monotonic()
    try:
        while time.monotonic() - start < 60:
            step().item()
        raise SystemExit("a worker was killed, and nothing was lost")
    except gt.WorkerLost:
        lost = time.monotonic() - start
    waiting.clear()
    while True:
        with contextlib.suppress(gt.WorkerLost):
            if all(serves(group) for group in gt.signal.groups()):
                break
        if time.monotonic() - start > 120:
            raise SystemExit("the workers did not come back within 120 s")
    return {"lost s": lost, "back s": time.monotonic() - start}


def serves(group: str) -> bool:
    import torch

    import gt

    with gt.signal.context(group):
        return (torch.ones(4, device="remote") + 1).sum().item() == 8


# ---- the whole


def child(args: argparse.Namespace) -> None:
    """Prints all that was found until then, again and again."""
    import gt

    found: cases.Row = {"looks": []}
    begin = gpu_memory()
    step = (small if args.model == "mlp" else pipeline)(args)
    for _ in range(8):
        step().item()
    for _ in range(LOOKS):
        found["looks"].append(replayed(step, args.replays // LOOKS))
        print(json.dumps(found), flush=True)
    if args.workers > 1:
        before = gpu_memory()
        found |= killed(step, args.workers)
        found |= {"before": before, "after": gpu_memory()}
        print(json.dumps(found), flush=True)
    gt.shutdown()
    print(json.dumps({**found, "left": [b - a for a, b in zip(begin, gpu_memory(), strict=True)]}), flush=True)


def bars(report: cases.Report, found: cases.Row) -> None:
    looks = found["looks"]
    if len(looks) > 2:
        early, last = looks[1], looks[-1]
        for name, mib in last["resident"].items():
            report.bar(f"MiB that {name} grew by", mib - early["resident"].get(name, mib), most=MORE)
        for name, count in last["descriptors"].items():
            report.bar(f"descriptors that {name} has more", count - early["descriptors"].get(name, count), most=0)
        report.bar(
            "tensors that workers have more", max(b - a for a, b in zip(early["tensors"], last["tensors"], strict=True)), most=0
        )
        for n, (a, b) in enumerate(zip(early["GPU MiB"], last["GPU MiB"], strict=True)):
            report.bar(f"MiB that GPU {n} has more in use", b - a, most=MORE_GPU)
        report.bar("times that a replay's issue takes longer", _later([row["issue us"] for row in looks[1:]]), most=SLOWER)
    if "lost s" in found:
        report.bar("seconds until a killed worker is WorkerLost", found["lost s"], most=LOST)
        report.bar("seconds until its world is there again", found["back s"], most=BACK)
    for n, (a, b) in enumerate(zip(found.get("before", ()), found.get("after", ()), strict=False)):
        report.bar(f"MiB that GPU {n} has in use beyond what it had before the loss", b - a, most=GIVEN_BACK)
    for n, mib in enumerate(found.get("left", ())):
        report.bar(f"MiB that GPU {n} is left with in the end", mib, most=MORE_GPU)


def main() -> int:
    parser = cases.flags(__doc__ or "")
    parser.set_defaults(limit=420.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--replays", type=int, default=10_000)
    parser.add_argument("--model", default="d4", help="of examples/gpt2, or mlp")
    parser.add_argument("--size", default="4x64", help="batch x tokens")
    parser.add_argument("--backend", default="", help="default: cudagraphs on GPUs, else eager")
    args = parser.parse_args()
    if args.child:
        child(args)
        return 0
    about = {"model": args.model, "size": args.size, "workers": args.workers, "replays": args.replays}
    report = cases.Report("benchmarks/gpu/soak.py", args.json, COLUMNS, **about)
    report.head()
    same = [part for name in ("workers", "replays", "model", "size", "backend") for part in (f"--{name}", getattr(args, name))]
    results, said = cases.together([[__file__, "--child", "soak", *same]], args.limit, partly=True)
    for n, row in enumerate(results["looks"] if results else ()):
        report.row(str((n + 1) * args.replays // LOOKS), row, "", cells)
    if results is None or "exit codes" in said or "given up" in said:
        report.row("soak", None, said, lambda row: [])
    else:
        report.about |= {k: v for k, v in results.items() if k != "looks"}
    if results:
        bars(report, results)
    return report.end()


def cells(row: cases.Row) -> list[str]:
    texts = [" ".join(f"{value:.0f}" for value in values) for values in (
        row["resident"].values(), row["descriptors"].values(), row["tensors"], row["GPU MiB"])]  # fmt: skip
    return [f"{row['issue us']:.0f}", f"{row['ms']:.3f}", *texts]


if __name__ == "__main__":
    sys.exit(main())
