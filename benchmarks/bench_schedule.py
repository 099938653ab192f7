"""Pipeline schedules as they run beside as they were simulated: makespan and bubble, with matmuls that take a fixed time.

`python benchmarks/bench_schedule.py [--json FILE] [--stages 4 8] [--unit 0.04]`. A worker is a process with the numpy engine
in which every aten.mm sleeps for a unit, so that two cores can stand for eight devices. Each action is stamped where it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v", "auto")


def placement(name: str, p: int) -> list[int]:
    """Worker of each stage, as the schedule wants it."""
    again = {"interleaved": range(p), "zb-v": range(p - 1, -1, -1)}
    return [*range(p), *again.get(name, ())]


@contextlib.contextmanager
def running(workers: int, unit: float) -> Iterator[str]:
    """A dispatcher and workers whose matmuls sleep; the address. Forked before anything of torch is there."""
    from gt.dispatcher.server import Server
    from gt.launch.process import fork
    from gt.worker.engine.numpy import NumpyEngine
    from gt.worker.loop import run

    bind = NumpyEngine.bind

    def slow(self: Any, payload: dict) -> Any:
        call = bind(self, payload)
        return (lambda *args: (time.sleep(unit), call(*args))[1]) if payload["op"] == "aten.mm.default" else call

    NumpyEngine.bind = slow  # type: ignore[method-assign]
    end, begin = os.pipe()

    def dispatch() -> None:
        server = Server()
        os.write(begin, str(server.port).encode())
        server.run()

    pids = [fork("gt.server bench", dispatch)]
    port = int(os.read(end, 16))
    for n in range(workers):
        pids.append(fork(f"gt.worker bench {n}", lambda n=n: run("127.0.0.1", port, "", f"w{n}", "numpy", "cpu")))
    try:
        yield f"127.0.0.1:{port}"
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def measure(address: str, name: str, p: int, m: int, unit: float, folder: Path) -> dict[str, Any]:
    """One schedule: predicted and measured makespan in seconds, and the part of it in which workers were idle."""
    import torch

    import gt
    from gt.dispatcher import schedule

    where = placement(name, p)
    config = folder / f"{name}.yaml"
    config.write_text("".join(f"stage{n}: {{shard: {{axis: 0, workers: [{w}]}}}}\n" for n, w in enumerate(where)))
    gt.connect(address, config=str(config))
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(16, 16, device="remote")) for _ in where]
    scale, shift = (torch.nn.Parameter(torch.ones(16, device="remote")) for _ in range(2))
    batch = torch.randn(2 * m, 16)

    @gt.compile(schedule=name)
    def step(x: torch.Tensor) -> torch.Tensor:
        for part in gt.microbatches(x, m):
            with gt.signal.context("stage0"):
                part = part * scale + shift  # so that the first stage has gradients of its input, as the others do
            for n, weight in enumerate(weights):
                with gt.signal.context(f"stage{n}"):
                    part = part @ weight
                    if n + 1 == len(weights):
                        loss = part.sum()
            loss.backward()
        for leaf in (*weights, scale, shift):
            leaf.grad = None
        return loss.detach()

    for _ in range(2):
        step(batch).item()
    order = step._programs[0].answer["schedule"]
    if order["why"]:
        raise SystemExit(f"{name}: {order['why']}")
    spans, idles = [], []
    for _ in range(3):
        step(batch).item()
        rows = [w["actions"] for w in gt.stats()["workers"][:p]]
        begin, end = min(r[0][1] for r in rows), max(r[-1][2] for r in rows)
        spans.append(end - begin)
        busy = sum(stop - start for row in rows for _, start, stop in row)
        idles.append(1 - busy / (p * (end - begin)))
    gt.shutdown()
    timeline = schedule.simulate(schedule.parse(order["rows"]), schedule.uniform(len(where)))
    predicted = timeline.makespan * unit
    return {
        "schedule": order["name"], "predicted_s": round(predicted, 4), "measured_s": round(statistics.median(spans), 4),
        "over": round(statistics.median(spans) / predicted - 1, 4), "bubble_predicted": round(timeline.idle, 4),
        "bubble_measured": round(statistics.median(idles), 4),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8], help="workers; twice as many micro-batches")
    parser.add_argument("--unit", type=float, default=0.04, help="seconds of a matmul")
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    import tempfile

    with tempfile.TemporaryDirectory() as folder, running(max(args.stages), args.unit) as address:
        print(f"{'':28s} {'predicted s':>12s} {'measured s':>12s} {'over':>7s} {'bubble':>8s} {'measured':>9s}")
        for p in args.stages:
            for name in SCHEDULES:
                row = found[f"p={p} m={2 * p} {name}"] = measure(address, name, p, 2 * p, args.unit, Path(folder))
                label = f"p={p} m={2 * p} {name}" + (f" ({row['schedule']})" if row["schedule"] != name else "")
                print(
                    f"{label:28s} {row['predicted_s']:12.3f} {row['measured_s']:12.3f} {100 * row['over']:6.1f}% "
                    f"{100 * row['bubble_predicted']:7.1f}% {100 * row['bubble_measured']:8.1f}%"
                    + ("  OVER" if abs(row["over"]) > 0.03 else "")
                )
    from bench_dispatch import machine

    about = {**machine(), "command": " ".join(["python", "benchmarks/bench_schedule.py", *sys.argv[1:]]), "unit_s": args.unit}
    print(json.dumps({"machine": about, "figures": found}))
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "figures": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
