"""Pipeline schedules, measured beside simulated: makespan and bubble, with matmuls that take a fixed time.

`python benchmarks/bench_schedule.py [--json FILE] [--stages 4 8] [--unit 0.04] [--only NAME]`. A worker is a process with the
numpy engine in which every aten.mm sleeps for a unit: two cores can stand for eight devices. Each action is stamped
where it runs. What is simulated goes by the costs that were measured while the step was recorded. The kinds of step: `even`;
with up to four stages also `head`: the last one has one and a half times the work, as with an LM head; and `dp`: each stage
on two workers, and an all-reduce of its gradients that takes as long as four matmuls. Exit code 1 if `verdicts` says so.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
ROWS, WIDE = 2, 16  # of a micro-batch and of a weight: their matmul is what a unit is of
REDUCE = 4  # units that an all-reduce of a weight takes
LINE = ("gpipe", "1f1b", "zb-h1", "auto")
TURNS = {"interleaved": "turns", "auto turns": "turns", "zb-v": "vee", "auto vee": "vee"}  # workers have two stages
KINDS = {"even": (*LINE, *TURNS), "head": (*LINE, *TURNS), "dp": ("1f1b", "zb-h1", "auto", "interleaved", "auto turns")}


def placement(name: str, p: int) -> list[int]:
    """Worker (or pair of workers) of each stage, as the schedule wants it; "auto turns" is auto on interleaved's."""
    again = {"turns": range(p), "vee": range(p - 1, -1, -1)}
    return [*range(p), *again.get(TURNS.get(name, ""), ())]


@contextlib.contextmanager
def running(workers: int, unit: float) -> Iterator[str]:
    """A dispatcher and workers whose matmuls and all-reduces sleep; the address. Forked before anything of torch is there."""
    from gt.dispatcher.server import Server
    from gt.launch.process import fork
    from gt.worker import executor
    from gt.worker.engine.numpy import NumpyEngine
    from gt.worker.loop import WorkerOptions, run

    bind, reduce = NumpyEngine.bind, executor.BIND["all_reduce"]

    def slow(self: Any, payload: dict) -> Any:
        call = bind(self, payload)

        def matmul(left: Any, right: Any) -> Any:
            time.sleep(unit * left.size * right.shape[1] / (ROWS * WIDE * WIDE))
            return call(left, right)

        return matmul if payload["op"] == "aten.mm.default" else call

    def slower(worker: Any, payload: dict) -> Any:
        step = reduce(worker, payload)

        def wait(code: list, at: int) -> None:
            step(code, at)
            time.sleep(REDUCE * unit * worker.tensors[code[at]].size / (WIDE * WIDE))

        return wait

    NumpyEngine.bind, executor.BIND["all_reduce"] = slow, slower  # type: ignore[method-assign]
    end, begin = os.pipe()

    def dispatch() -> None:
        server = Server()
        os.write(begin, str(server.port).encode())
        server.run()

    pids = [fork("gt.server bench", dispatch)]
    port = int(os.read(end, 16))
    for n in range(workers):
        options = WorkerOptions("127.0.0.1", port, name=f"w{n}", backend="numpy", device="cpu")
        pids.append(fork(f"gt.worker bench {n}", lambda options=options: run(options)))
    try:
        yield f"127.0.0.1:{port}"
    finally:
        NumpyEngine.bind, executor.BIND["all_reduce"] = bind, reduce  # type: ignore[method-assign]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def config(kind: str, where: list[int]) -> str:
    pairs = [[2 * w, 2 * w + 1] if kind == "dp" else [w] for w in where]
    return "".join(f"stage{n}: {{shard: {{axis: 0, workers: {pair}}}}}\n" for n, pair in enumerate(pairs))


def step_of(kind: str, name: str, stages: int, m: int) -> Any:
    """A compiled step of so many stages, and its batch. A worker's forward of a micro-batch is a unit."""
    import torch

    import gt

    torch.manual_seed(0)
    rows = ROWS // (2 if name in TURNS else 1) * (2 if kind == "dp" else 1)
    sizes = [WIDE] * stages + [WIDE * 3 // 2 if kind == "head" else WIDE]
    weights = [torch.nn.Parameter(torch.randn(b, a, device="remote") / 4) for a, b in itertools.pairwise(sizes)]
    scale = [torch.nn.Parameter(torch.ones(WIDE, device="remote"))] if kind != "dp" else []
    leaves = (*weights, *scale)

    @gt.compile(schedule=name.partition(" ")[0])
    def step(x: torch.Tensor) -> torch.Tensor:
        losses = []
        for part in gt.microbatches(x, m):
            with gt.signal.context("stage0"):
                for one in scale:
                    part = part * one  # so that the first stage has gradients of its input, as the others do
            for n, weight in enumerate(weights):
                with gt.signal.context(f"stage{n}"):
                    part = torch.nn.functional.linear(part, weight)
                    if n + 1 == len(weights):
                        losses.append(part.square().mean())
        for loss in losses:  # not in the loop above, so that recording takes less time
            loss.backward()
        with torch.no_grad():
            for leaf in leaves:
                leaf.add_(leaf.grad, alpha=-1e-3)
                leaf.grad = None
        return loss.detach()

    return step, torch.randn(rows * m, WIDE)


def measure(address: str, kind: str, name: str, p: int, m: int, folder: Path) -> dict[str, Any]:
    """One schedule: predicted and measured makespan in seconds, and the part of it in which workers were idle."""
    import gt
    from gt.dispatcher import schedule

    where = placement(name, p)
    path = folder / "config.yaml"
    path.write_text(config(kind, where))
    gt.connect(address, config=str(path))
    step, batch = step_of(kind, name, len(where), m)
    for _ in range(2):
        step(batch).item()
    order = step._programs[0].answer["schedule"]
    if order["why"]:
        raise SystemExit(f"{name}: {order['why']}")
    spans, idles = [], []
    for _ in range(3):
        step(batch).item()
        ran = gt.stats()["schedule"]["measured"]
        spans.append(ran["makespan"])
        idles.append(ran["idle"])
    gt.shutdown()
    costs = schedule.Costs.from_wire(order["costs"])
    named = [schedule.simulate(rows, costs).makespan / 1e6 for rows in _named(where, m, costs)]
    predicted = order["makespan"]
    return {
        "schedule": order["name"], "predicted_s": round(predicted, 4), "measured_s": round(statistics.median(spans), 4),
        "over": round(statistics.median(spans) / predicted - 1, 4),
        "bubble_predicted": round(sum(order["bubble"]) / len(order["bubble"]), 4),
        "bubble_measured": round(statistics.median(idles), 4), "best_named_predicted_s": round(min(named), 4),
        "measured_costs": round(order["measured"], 4), "rows": order["rows"],
    }  # fmt: skip


def _named(where: list[int], m: int, costs: Any) -> Iterator[Any]:
    """Every named schedule that this placement can have, by the same costs."""
    from gt.dispatcher import schedule
    from gt.errors import ConfigError

    for name in schedule.SCHEDULES:
        with contextlib.suppress(ConfigError):
            yield schedule.make(schedule.ScheduleRequest(name, where, m), costs).rows


def verdicts(found: dict[str, dict[str, Any]]) -> list[str]:
    """Broken bounds: 3% around the simulation; `auto` no worse than the best named schedule simulated, 2% at most measured."""
    bad = [f"{label}: {row['over']:+.1%} of what was simulated" for label, row in found.items() if abs(row["over"]) > 0.03]
    for label, row in found.items():
        where, _, name = label.partition(": ")
        if not name.startswith("auto"):
            continue
        if row["predicted_s"] > row["best_named_predicted_s"] * 1.0001:
            bad.append(f"{label}: simulated {row['predicted_s']} s, a named one {row['best_named_predicted_s']} s")
        alike = [n for n in found if n.startswith(where + ":") and TURNS.get(n.partition(": ")[2]) == TURNS.get(name)]
        best = min(found[n]["measured_s"] for n in alike)
        if row["measured_s"] > best * 1.02:
            bad.append(f"{label}: measured {row['measured_s']} s, the best named one {best} s")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8], help="workers; twice as many micro-batches")
    parser.add_argument("--unit", type=float, default=0.04, help="seconds of a matmul")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", nargs="+", help="of the schedules, these")
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    cases = [(kind, p, name) for kind in args.kinds for p in args.stages for name in KINDS[kind] if kind == "even" or p <= 4]
    most = max(p * (2 if kind == "dp" else 1) for kind, p, _ in cases)
    with tempfile.TemporaryDirectory() as folder, running(most, args.unit) as address:
        print(f"{'':32s} {'predicted s':>12s} {'measured s':>12s} {'over':>7s} {'bubble':>8s} {'measured':>9s}")
        for kind, p, name in cases:
            if args.only and name not in args.only:
                continue
            label = f"{kind} p={p} m={2 * p}: {name}"
            row = found[label] = measure(address, kind, name, p, 2 * p, Path(folder))
            said = label + (f" ({row['schedule']})" if row["schedule"] != name else "")
            print(
                f"{said:48s} {row['predicted_s']:8.3f} {row['measured_s']:12.3f} {100 * row['over']:6.1f}% "
                f"{100 * row['bubble_predicted']:7.1f}% {100 * row['bubble_measured']:8.1f}%",
                flush=True,
            )
    bad = verdicts(found)
    print("\n".join(bad))
    from bench_dispatch import machine

    about = {**machine(), "command": " ".join(["python", "benchmarks/bench_schedule.py", *sys.argv[1:]]), "unit_s": args.unit}
    print(json.dumps({"machine": about, "figures": found, "bad": bad}))
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "figures": found, "bad": bad}, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
