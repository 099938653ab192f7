"""The cost of a replay: the user's thread, messages, and a GPT step beside native torch, in the same run.

`python benchmarks/bench_replay.py [--json FILE]`. Prints a table and one line of JSON. One CPU worker with one thread, and
torch with one thread. Issue times are of the thread that calls, while nothing else is under way.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "tuning_demo"), str(Path(__file__).resolve().parent)]

# figure -> (unit, limit)
LIMITS = {
    **{
        f"{kind}, program of {n:,} ops": ("us", limit)
        for n in (100, 1_000, 10_000)
        for kind, limit in (("issue of a replay", 100), ("  after a fetch", None))
    },
    "worker, small ops of a replay": ("us/op", None),
    "messages of the client, one step": ("messages", 1),
    "messages to each worker, one step": ("messages", 1),
    "GPT step (6 layers, 256 wide, 8 x 128)": ("ms", None),
    "  over native eager": ("x", 1.05),
    "  issued eagerly": ("ms", None),
    "GPT step, backend inductor": ("ms", None),
    "  over native torch.compile": ("x", 1.05),
    "  first replays, compiling": ("s", None),
    "capture of 10,000 ops, more than its eager time": ("s", 5),
    "deep GPT step, eight workers": ("ops", None),
    "  planned in a new process, more than later": ("s", 1),
    "  captured, more than its eager time": ("s", 5),
}


def program(ops: int) -> Callable:
    """A compiled chain of small ops."""
    import torch

    import gt

    w = torch.ones(4, 4, device="remote")

    def chain(x: Any) -> Any:
        for _ in range(ops // 2):
            x = (x + w) * 0.5
        return x

    run = gt.compile(chain)
    x = torch.ones(4, 4)
    for _ in range(4):
        run(x).sum().item()
    assert run._programs[0].replays == 2, run.explain()
    return lambda: run(x)


def issue() -> dict[str, float]:
    measured = {}
    for ops in (100, 1_000, 10_000):
        run = program(ops)
        for in_a_row in (10, 1):  # as a training loop issues them; and alone, each awaited
            times = []
            for n in range(100):
                start = time.perf_counter()
                result = run()
                times.append(time.perf_counter() - start)
                if n % in_a_row == in_a_row - 1:
                    result.sum().item()
            kind = "issue of a replay" if in_a_row > 1 else "  after a fetch"
            measured[f"{kind}, program of {ops:,} ops"] = statistics.median(times) * 1e6
    start = time.perf_counter()
    for _ in range(10):
        result = run()
    result.sum().item()
    measured["worker, small ops of a replay"] = (time.perf_counter() - start) / 10 / 10_000 * 1e6
    return measured


def messages() -> dict[str, float]:
    """Messages of one replay: counters before and after, without those of reading the counters."""
    import gt

    run = program(100)

    def counts() -> tuple[int, int]:
        stats = gt.stats()
        return stats["client"]["messages_sent"], stats["dispatcher"]["runs_sent"]

    run()  # what the question left to be freed goes with it
    before = counts()
    for _ in range(10):
        run()
    after = counts()
    # The second question is a message, and before it goes one with the last result to be freed, which the worker is told too.
    mine, workers = after[0] - before[0] - 2, after[1] - before[1] - 1
    return {"messages of the client, one step": mine / 10, "messages to each worker, one step": workers / 10}


def gpt(device: str, compiled: bool = False) -> tuple[Callable, Any]:
    """A step and its batch; compiled: forward and backward by torch.compile."""
    import torch
    from model import PRESETS, MiniGPT

    torch.manual_seed(0)
    shape = {**PRESETS["tiny"], "num_layers": 6, "hidden_size": 256, "num_heads": 8, "intermediate_size": 1024}
    model = MiniGPT(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    forward = torch.compile(model) if compiled else model

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    tokens = torch.randint(256, (8, 129))
    return step, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def steps() -> dict[str, float]:
    """Blocks of three steps in turn: native, replayed, eager, native torch.compile, replayed in compiled segments."""
    import gt

    native, batch = gpt("cpu")
    torch_compiled, _ = gpt("cpu", compiled=True)
    eager, _ = gpt("remote")
    compiled, inductor = gt.compile(gpt("remote")[0]), gt.compile(gpt("remote")[0], backend="inductor")
    remote = tuple(part.to("remote") for part in batch)
    runs = {
        "native": lambda: native(*batch),
        "compiled": lambda: compiled(*batch),
        "eager": lambda: eager(*remote),
        "torch.compile": lambda: torch_compiled(*batch),
        "inductor": lambda: inductor(*batch),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    first = time.perf_counter()
    for _ in range(4):
        inductor(*batch).item()
    first = time.perf_counter() - first
    for block in range(12):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(3):
                loss = run()
            loss.item()
            if block >= 2:
                times[name].append((time.perf_counter() - start) / 3)
    assert compiled._programs[0].replays > 20, compiled.explain()
    assert "not as asked for" not in inductor.explain() and inductor._programs[0].replays > 20, inductor.explain()

    def over(ours: str, theirs: str) -> float:
        return statistics.median(a / b for a, b in zip(times[ours], times[theirs], strict=True))

    name = "GPT step (6 layers, 256 wide, 8 x 128)"
    medians = {key: statistics.median(values) * 1e3 for key, values in times.items()}
    measured = {name: medians["compiled"], "native " + name: medians["native"], "  issued eagerly": medians["eager"]}
    measured |= {
        "GPT step, backend inductor": medians["inductor"],
        "native GPT step, backend inductor": medians["torch.compile"],
    }
    measured |= {"  over native torch.compile": over("inductor", "torch.compile"), "  first replays, compiling": first}
    return {**measured, "  over native eager": over("compiled", "native")}


def capture() -> dict[str, float]:
    import torch

    import gt

    w = torch.ones(4, 4, device="remote")

    def chain(x: Any) -> Any:
        for _ in range(5_000):
            x = (x + w) * 0.5
        return x

    def timed(run: Callable) -> float:
        start = time.perf_counter()
        run(torch.ones(4, 4, device="remote")).sum().item()
        return time.perf_counter() - start

    timed(chain)
    eager = statistics.median(timed(chain) for _ in range(3))
    run = gt.compile(chain)
    first, second = timed(run), timed(run)
    return {"capture of 10,000 ops, more than its eager time": max(first, second) - eager}


def deep() -> dict[str, float]:
    """A GPT of 24 layers over eight workers, its batch in parts, in a process that has done nothing else."""
    import torch
    from model import PRESETS, MiniGPT

    import gt

    gt.cpu_workers(8, config=str(ROOT / "configs" / "tp2pp4.yaml"))
    torch.manual_seed(0)
    model = MiniGPT({**PRESETS["tiny"], "num_layers": 24}, gt.signal.groups()).to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        total = torch.zeros((), device="remote")
        for a, b in gt.microbatches((x, y), 5):
            loss = model(a, b) / 5
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    tokens = torch.randint(256, (10, 33))
    batch = [part.contiguous().to("remote") for part in (tokens[:, :-1], tokens[:, 1:])]

    def timed(run: Callable) -> float:
        start = time.perf_counter()
        run(*batch).item()
        return time.perf_counter() - start

    torch.zeros(1, device="remote").item()
    before = gt.stats()["client"]["ops"]
    first = timed(step)
    ops = gt.stats()["client"]["ops"] - before
    timed(step)  # the optimizer's state is there now
    eager = statistics.median(timed(step) for _ in range(3))
    run = gt.compile(step, schedule="1f1b")
    recorded = [timed(run) for _ in range(2)]
    assert len(run._programs) == 1, run.explain()
    gt.shutdown()
    return {
        "deep GPT step, eight workers": ops,
        "  planned in a new process, more than later": first - eager,
        "  captured, more than its eager time": max(recorded) - eager,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--deep", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.deep:
        print(json.dumps(deep()))
        return 0
    import torch

    import gt

    torch.set_num_threads(1)
    gt.cpu_workers(1, config="")
    measured = {**issue(), **messages(), **steps(), **capture()}
    gt.shutdown()
    command = [sys.executable, __file__, "--deep"]
    measured |= json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    print(f"{'':52s} {'GT':>10s} {'plain torch':>12s} {'limit':>8s}")
    for name, (unit, limit) in LIMITS.items():
        beside = measured.get("native " + name)
        over = "  OVER" if limit is not None and measured[name] > limit else ""
        cells = [f"{measured[name]:.2f}", "" if beside is None else f"{beside:.2f}", str(limit or "")]
        print("{:52s} {:>10s} {:>12s} {:>8s}".format(f"{name} ({unit})", *cells) + over)
    from bench_dispatch import machine

    about = {**machine(), "command": " ".join(["python", "benchmarks/bench_replay.py", *sys.argv[1:]])}
    print(json.dumps({"machine": about, "figures": measured}))
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "figures": measured}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
