"""The cost of replaying a training step whose loss is read at each call, by number of parameters, beside plain torch.

`python benchmarks/bench_awaited.py [--parameters 10,100,1000] [--rounds N] [--calls N] [--json FILE]`. Prints a table and one
line of JSON. One worker, on a GPU where there is one. The layers are tiny, so that all of it is cost. Losses and weights are
compared with plain torch's bit for bit first. Rounds alternate. Wall times are medians; CPU times are the kernel's, by
process and call, medians of rounds: on a machine with other work on it only these say anything.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from bench_footing import processes  # noqa: E402
from machine import tell  # noqa: E402

WARM_CALLS = 6
WAYS = ("awaited", "pipelined")
COLUMNS = ("wall", "over native", "caller", "client", "dispatcher", "worker", "native's wall", "native's CPU")


def training(parameters: int, device: str) -> tuple[Callable[[], Any], Any]:
    """A step of a chain of `Linear(2, 2)` with a fused AdamW, and its model."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(max(1, parameters // 2))]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.ones(2, 2).to(device)

    def step() -> Any:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process that live."""
    tasks = [*Path(f"/proc/{pid}/task").glob("*/schedstat")]
    if tasks:
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a kernel without it counts in hundredths
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def awaited(step: Callable[[], Any], calls: int) -> float:
    """Seconds of a call whose loss is read."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        step().item()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def pipelined(step: Callable[[], Any], calls: int) -> float:
    """Seconds of a call of several in a row, of which only the last is read."""
    start = time.perf_counter()
    for _ in range(calls):
        loss = step()
    loss.item()
    return (time.perf_counter() - start) / calls


def one_round(run: Callable[[Callable[[], Any], int], float], step: Callable[[], Any], calls: int, pids: dict) -> dict:
    """Milliseconds of a call: wall, of this thread, and of each process."""
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    thread = time.thread_time()
    wall = run(step, calls)
    thread = time.thread_time() - thread
    spent = {name: 1e3 * (cpu_seconds(pid) - before[name]) / calls for name, pid in pids.items()}
    return {"wall": 1e3 * wall, "caller": 1e3 * thread / calls, **spent}


def calls_of_functions(step: Callable[[], Any]) -> int:
    """Calls of functions of Python and from Python's code, by the thread that calls a replay."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def compare(ours: tuple[Callable, Any], native: tuple[Callable, Any]) -> None:
    """Have both take the same steps, and see that each loss and all weights are the same."""
    import torch

    for n in range(WARM_CALLS):
        a, b = ours[0]().item(), native[0]().item()
        assert a == b, f"loss of call {n}: {a!r}, of plain torch {b!r}"
    for name, weight in native[1].state_dict().items():
        assert torch.equal(ours[1].state_dict()[name].cpu(), weight.cpu()), f"{name} differs from plain torch's"


def measure(parameters: int, options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Figures of one size, in milliseconds, by way of reading."""
    import gt
    from gt.client.device import torch_remote

    step, model = training(parameters, gt.device)
    captured, native = gt.compile(step), training(parameters, device)
    compare((captured, model), native)
    (program,) = captured._programs
    assert program.replays >= 2, captured.explain()
    pids = {"client": os.getpid(), **processes()}
    rows: dict[str, list[dict]] = {f"{who} {way}": [] for way in WAYS for who in ("ours", "native")}
    empty: list[float] = []
    for _ in range(options.rounds):
        for way, run in zip(WAYS, (awaited, pipelined), strict=True):
            rows[f"ours {way}"].append(one_round(run, captured, options.calls, pids))
            rows[f"native {way}"].append(one_round(run, native[0], options.calls, {"client": os.getpid()}))
        start = time.perf_counter()
        for _ in range(options.calls):
            torch_remote.synchronize()
        empty.append(1e3 * (time.perf_counter() - start) / options.calls)
    assert len(captured._programs) == 1, captured.explain()
    found: dict[str, Any] = {"empty message": statistics.median(empty), "calls of functions": calls_of_functions(captured)}
    for way in WAYS:
        mine, theirs = (
            {key: statistics.median(row[key] for row in rows[f"{who} {way}"]) for key in rows[f"{who} {way}"][0]}
            for who in ("ours", "native")
        )
        found[way] = {**mine, "native's wall": theirs["wall"], "native's CPU": theirs["client"]}
        found[way]["over native"] = mine["wall"] - theirs["wall"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", default="10,100,1000", help="numbers of parameters, such as 10,100")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20, help="in a round")
    parser.add_argument("--json", type=Path, help="write the result here too")
    options = parser.parse_args()
    import torch

    import gt

    torch.set_num_threads(1)  # of the workers too
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # without the name `remote`, which breaks backward of local CUDA tensors
    (gt.gpu_workers if device == "cuda" else gt.cpu_workers)(1, config="", name=False)
    figures = {}
    print(f"ms a call    {'':>9s}" + "".join(f"{name:>14s}" for name in COLUMNS))
    for parameters in map(int, options.parameters.split(",")):
        row = figures[parameters] = measure(parameters, options, device)
        for way in WAYS:
            print(f"{parameters:6d} {way:>15s}" + "".join(f"{row[way][name]:14.3f}" for name in COLUMNS))
        print(f"{'':6s} an empty message and back {row['empty message']:.3f}; {row['calls of functions']} calls of functions")
    gt.shutdown()
    tell("benchmarks/bench_awaited.py", {"device": device, "figures": figures}, options.json)


if __name__ == "__main__":
    main()
