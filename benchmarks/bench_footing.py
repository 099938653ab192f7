"""Basic costs: moving 100 MB, memory of an idle worker and after a million ops, the log, the first step, what is new.

`python benchmarks/bench_footing.py [--json FILE] [--only move|idle|long|log|cold|new] [--ops N]`. Prints a table and a line of
JSON, plain torch or bare ZeroMQ beside it in the same run. Each section runs in a fresh process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_dispatch import ROOT, machine

MB = 1_000_000
# figure -> (unit, limit); "at least" where the unit is MB/s
LIMITS = {
    "upload 100 MB": ("MB/s", 500),
    "fetch 100 MB": ("MB/s", 500),
    "  a copy within one process": ("MB/s", None),
    "idle torch worker, resident": ("MB", 400),
    "  of which its own": ("MB", None),
    "client, growth over the ops": ("MB", 8),
    "dispatcher, growth over the ops": ("MB", 8),
    "worker, growth over the ops": ("MB", 8),
    "client, more objects": ("objects", 5_000),
    "instruction log, cost of throughput": ("%", 10),
    "first step of 12 layers": ("s", 5),
    "five ops on a slice at a new place": ("us", 1_500),
    "five ops on a slice at a known place": ("us", None),
    "captured step, another learning rate at each call": ("us", None),
    "captured step, one learning rate": ("us", None),
}


# ---- processes of this program


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def processes() -> dict[str, int]:
    """Pid of the dispatcher and of the first worker, by name."""
    measured = {}
    for nursery in children(os.getpid()):
        for pid in children(nursery):
            measured[Path(f"/proc/{pid}/comm").read_text().strip()] = pid
    return {"dispatcher": measured["gt.server"], "worker": measured["gt.worker 0"]}


def resident(pid: int, key: str = "VmRSS") -> float:
    """MB of a process."""
    path = Path(f"/proc/{pid}/status" if key == "VmRSS" else f"/proc/{pid}/smaps_rollup")
    rows = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return int(rows[key].split()[0]) * 1024 / MB


@contextmanager
def workers(count: int, **env: str) -> Iterator[Any]:
    os.environ.update(env)
    import torch

    import gt

    torch.set_num_threads(1)
    gt.cpu_workers(count)
    yield torch
    gt.shutdown()


# ---- sections


def move() -> dict[str, float]:
    """MB/s of 100 MB each way, from a CPU tensor until the worker has it, and until it is a CPU tensor again."""
    ups, downs, copies = [], [], []
    with workers(1) as torch:
        host = torch.arange(25_000_000, dtype=torch.float32)
        for _ in range(7):
            start = time.perf_counter()
            there = host.to("remote")
            there[:1].mul_(1)  # an upload that nothing has used is kept here, and every reading would upload it again
            there[-1].item()
            middle = time.perf_counter()
            back = there.cpu()
            end = time.perf_counter()
            assert torch.equal(back, host)
            copied = time.perf_counter()
            back.copy_(host)
            copies.append(100 / (time.perf_counter() - copied))
            ups.append(100 / (middle - start))
            downs.append(100 / (end - middle))
            del there, back
    rates = {"upload 100 MB": ups, "fetch 100 MB": downs, "  a copy within one process": copies}
    return {name: statistics.median(found) for name, found in rates.items()}


def relay() -> dict[str, float]:
    """MB/s of the same bytes through a bare ZeroMQ ROUTER, nothing copied in Python: what the machine has to give."""
    import zmq

    context, frame = zmq.Context(), bytes(1 << 20)
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.SNDHWM, 0)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def end(name: bytes) -> zmq.Socket:
        sock = context.socket(zmq.DEALER)
        sock.setsockopt(zmq.IDENTITY, name)
        sock.connect(f"tcp://127.0.0.1:{port}")
        sock.send(b"")
        return sock

    def pass_on() -> None:
        while True:
            target, *rest = [part.buffer for part in router.recv_multipart(copy=False)][1:]
            if bytes(target) == b"":
                continue
            if bytes(target) == b"end":
                return
            router.send_multipart([target, *rest], copy=False)

    thread = threading.Thread(target=pass_on)
    thread.start()
    source, sink = end(b"source"), end(b"sink")
    sink.send_multipart([b"source", b"ready"])
    source.recv_multipart()
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(96):
            source.send_multipart([b"sink", frame], copy=False)
        for _ in range(96):
            sink.recv_multipart(copy=False)
        rates.append(96 * len(frame) / MB / (time.perf_counter() - start))
    source.send(b"end")
    thread.join()
    for sock in (source, sink, router):
        sock.close(0)
    context.term()
    return {"upload 100 MB": statistics.median(rates), "fetch 100 MB": statistics.median(rates)}


def idle() -> dict[str, float]:
    with workers(2) as torch:
        torch.ones((), device="remote").add(1).item()
        worker = processes()["worker"]
        own = resident(worker, "Private_Dirty") + resident(worker, "Private_Clean")
        return {"idle torch worker, resident": resident(worker), "  of which its own": own}


def long(ops: int) -> dict[str, float]:
    """Memory before and after many ops, a tenth of which have a template of their own."""
    with workers(1) as torch:
        model = torch.nn.Linear(16, 16).to("remote")
        optimizer = torch.optim.AdamW(model.parameters())
        one = torch.ones((), device="remote")

        def run(count: int, fresh: Iterator[int]) -> None:
            import gt

            goal = gt.stats()["client"]["ops"] + count
            while gt.stats()["client"]["ops"] < goal:
                for _ in range(100):
                    model(torch.ones(4, 16, device="remote")).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    torch.zeros(next(fresh), device="remote").add_(1)
                one.item()

        def memory() -> tuple[dict[str, float], int]:
            gc.collect()
            one.item()
            return {k: resident(pid) for k, pid in {"client": os.getpid(), **processes()}.items()}, len(gc.get_objects())

        def shapes() -> Iterator[int]:
            n = 0
            while True:
                n += 1
                yield n % 100_000

        fresh = shapes()
        run(ops // 2, fresh)  # tables fill up to their bounds
        before, objects = memory()
        run(ops, fresh)
        after, more = memory()
        grown = {f"{name}, growth over the ops": after[name] - before[name] for name in before}
        return {**grown, "client, more objects": more - objects}


def chain(torch: Any, n: int = 10_000) -> float:
    x = torch.ones(4, 4, device="remote")
    start = time.perf_counter()
    for _ in range(n // 2):
        x = x + 1.0
        x = x * 0.5
    x.sum().item()
    return time.perf_counter() - start


def log(path: str) -> dict[str, float]:
    """Seconds of the same chain with and without a log; the parent process compares."""
    with workers(1, **({"GT_INSTRUCTION_LOG": path} if path else {})) as torch:
        chain(torch)
        return {"seconds": statistics.median(chain(torch) for _ in range(9))}


def cold(device: str) -> dict[str, float]:
    """Seconds from the end of start-up and placing of a GPT's weights until its first step's loss is here."""
    import torch

    if device == "remote":
        import gt

        gt.cpu_workers(1)
    sys.path.insert(0, str(ROOT / "examples" / "tuning_demo"))
    from model import PRESETS, MiniGPT

    torch.set_num_threads(1)
    torch.manual_seed(0)
    start = time.perf_counter()
    model = MiniGPT({**PRESETS["tiny"], "num_layers": 12}).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(256, (2, 32)).to(device)
    loss = model(tokens, tokens)
    loss.backward()
    optimizer.step()
    loss.item()
    seconds = time.perf_counter() - start
    if device == "remote":
        gt.shutdown()
    return {"first step of 12 layers": seconds}


def new(device: str) -> dict[str, float]:
    """Microseconds of what a loop meets for the first time at each turn: slices of data, and rates of a scheduler."""
    import torch

    if device == "remote":
        import gt

        gt.cpu_workers(1)
    torch.set_num_threads(1)
    data, weight = torch.randn(40_000, 16).to(device), torch.randn(16, 16).to(device)

    def slices(starts: range) -> float:
        begin = time.perf_counter()
        for start in starts:
            rows = data[start : start + 8]
            total = (rows @ weight + rows).relu().sum()
        total.item()
        return (time.perf_counter() - begin) / len(starts) * 1e6

    layer = torch.nn.Linear(16, 16).to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)

    def step(x: Any) -> Any:
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    called = gt.compile(step) if device == "remote" else step

    def steps(factor: float, count: int = 300) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            loss = called(data[:8])
            optimizer.param_groups[0]["lr"] *= factor
        loss.item()
        return (time.perf_counter() - begin) / count * 1e6

    slices(range(0, 80, 8))
    first, known = slices(range(80, 16_080, 8)), slices(range(80, 16_080, 8))
    steps(1.0, 20), steps(0.999, 20)
    one, other = (statistics.median(steps(factor) for _ in range(3)) for factor in (1.0, 0.999))
    if device == "remote":
        gt.shutdown()
    return dict(zip(list(LIMITS)[-4:], (first, known, other, one), strict=True))


# ---- putting together


def measure(*section: str) -> dict[str, float]:
    """One section in a process of its own."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GT_")}
    command = [sys.executable, __file__, "--section", *section]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=1200)
    return json.loads(done.stdout.splitlines()[-1])


def cost_of_log() -> float:
    """Percent of throughput, from pairs of runs in turn."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(5):
            plain, logged = (measure("log", path)["seconds"] for path in ("", f"{folder}/log"))
            ratios.append(plain / logged)
    return (1 - statistics.median(ratios)) * 100


def figures(only: str, ops: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {"gt": {}, "beside": {}}
    if only in ("", "move"):
        found["gt"].update(measure("move"))
        found["beside"].update(measure("relay"))
    if only in ("", "idle"):
        found["gt"].update(measure("idle"))
    if only in ("", "long"):
        found["gt"].update(measure("long", str(ops)))
    if only in ("", "log"):
        found["gt"]["instruction log, cost of throughput"] = cost_of_log()
    if only in ("", "cold"):
        found["gt"].update(measure("cold", "remote"))
        found["beside"].update(measure("cold", "cpu"))
    if only in ("", "new"):
        found["gt"].update(measure("new", "remote"))
        found["beside"].update(measure("new", "cpu"))
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    lines = [f"{'':50s} {'GT':>10s} {'beside it':>12s} {'limit':>8s}"]
    for name, (unit, limit) in LIMITS.items():
        if name not in found["gt"]:
            continue
        got, beside = found["gt"][name], found["beside"].get(name)
        over = limit is not None and (got < limit if unit == "MB/s" else got > limit)
        cells = [f"{got:.1f}", "" if beside is None else f"{beside:.1f}", str(limit or "")]
        lines.append("{:50s} {:>10s} {:>12s} {:>8s}".format(f"{name} ({unit})", *cells) + ("  OVER" if over else ""))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--only", choices=("move", "idle", "long", "log", "cold", "new"), default="", help="one section")
    parser.add_argument("--ops", type=int, default=1_000_000, help="ops of the long run")
    parser.add_argument("--section", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.section:
        name, *rest = args.section
        sections: dict[str, Any] = {"move": move, "relay": relay, "idle": idle, "log": log, "cold": cold, "new": new}
        print(json.dumps(long(int(rest[0])) if name == "long" else sections[name](*rest)))
        return 0
    measured = figures(args.only, args.ops)
    about = {**machine(), "command": " ".join(["python", "benchmarks/bench_footing.py", *sys.argv[1:]])}
    print(table(measured))
    print(json.dumps({"machine": about, "figures": measured}))
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "figures": measured}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
