"""The checks of `gt doctor` that may crash or hang, in a process of their own: `python -m gt.cli.exercise probe|GPUS`.

`probe` prints one JSON object with torch's properties of GPUs. With a number, GT's workers on so many GPUs train, transfer and
all-reduce. Each result is a line of JSON: name, success, text.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import gt
from gt.ir.text import size

MIB = 1 << 20
Result = tuple[str, bool, str]


def probe() -> dict[str, Any]:
    """Versions; each GPU's name, capability, free and total memory; pairs without peer access."""
    report: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": [], "apart": []}
    report["nvshmem"], report["nvshmem_error"] = _nvshmem()
    report["nccl"] = list(torch.cuda.nccl.version()) if torch.distributed.is_nccl_available() else []
    if not torch.cuda.is_available():
        return report
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        report["gpus"].append([torch.cuda.get_device_name(i), list(torch.cuda.get_device_capability(i)), free, total])
    pairs = [(i, j) for i in range(len(report["gpus"])) for j in range(i)]
    report["apart"] = [(j, i) for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    return report


def _nvshmem() -> tuple[str, str]:
    """Version of the loaded NVSHMEM, and the reason if it does not load."""
    try:
        importlib.import_module("cuda.core")
        core = importlib.import_module("nvshmem.core")
        version = core.get_version() if hasattr(core, "get_version") else ""
    except Exception as error:  # the loader raises various errors for a missing library
        return "", f"{type(error).__name__}: {error}".splitlines()[0]
    return str(getattr(version, "libnvshmem_version", version)), ""


# ---- GT at work


def yaml(workers: int) -> str:
    names = {"all": list(range(workers)), **{f"one{n}": [n] for n in range(workers)}}
    return "".join(f"{name}: {{workers: {numbers}}}\n" for name, numbers in names.items())


def exercise(workers: int, start: Callable[..., None], nbytes: int) -> Iterator[Result]:
    """Train on all workers, transfer from each to the next, all-reduce over all. start: gt.gpu_workers, or the like."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "doctor.yaml"
        path.write_text(yaml(workers))
        start(workers, config=str(path))
    yield "workers", True, f"{workers} started and connected in {time.perf_counter() - begin:.1f} s, without MPI"
    yield _training(workers)
    if workers > 1:
        for n in range(1, workers):
            yield _put(n - 1, n, nbytes)
        yield _all_reduce(workers, nbytes)
        yield _transport()


def _training(workers: int) -> Result:
    """A data-parallel training has the losses of plain torch in this process."""
    torch.manual_seed(0)
    layers = [torch.randn(32, 32) / 6 for _ in range(2)]
    x, y = torch.randn(8 * workers, 32), torch.randn(8 * workers, 32)
    curves = []
    for device in ("remote", "cpu"):
        weights = [torch.nn.Parameter(w.clone().to(device)) for w in layers]
        optimizer = torch.optim.SGD(weights, lr=0.1)
        inputs, targets = x.to(device), y.to(device)
        losses = []
        for _ in range(5):
            with gt.signal.context("all"):
                loss = torch.nn.functional.mse_loss(torch.tanh(inputs @ weights[0]) @ weights[1], targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        curves.append([loss.item() for loss in losses])
    worst = max(abs(a - b) / b for a, b in zip(*curves, strict=True))
    good = worst < 1e-3 and curves[0][-1] < curves[0][0]
    text = f"5 data-parallel steps, loss {curves[0][0]:.4f} -> {curves[0][-1]:.4f}, {worst:.0e} from plain torch"
    return "training", good, text if good else f"{text}: GPUs compute wrong values; run the tests, `make test`"


def _put(source: int, target: int, nbytes: int) -> Result:
    """Tensors of one worker are transferred to another."""
    count, many = nbytes // 4, 8
    large = _timed(source, target, [float(n) for n in range(many)], count)
    small = _timed(source, target, [1.0] * 64, 2)
    if large is None or small is None:
        return f"put {source}-{target}", False, "another value arrived than was sent"
    rate = many * nbytes / large / 1e9
    return (
        f"put {source}-{target}",
        True,
        (f"{nbytes / MIB:.0f} MiB in {large / many * 1e3:.2f} ms, {rate:.1f} GB/s; 8 B in {small / 64 * 1e6:.0f} us"),
    )


def _timed(source: int, target: int, values: list[float], count: int) -> float | None:
    """Seconds, the best of three, of `count` transfers; None where the sums of the tensors are wrong."""
    with gt.signal.context(f"one{source}"):
        sent = [torch.full((count,), value, device=gt.device) * 1 for value in values]
    best = float("inf")
    for turn in range(1, 4):
        with gt.signal.context(f"one{source}"):
            for x in sent:
                x.add_(1)  # else the copy of the previous turn would be reused
            sent[-1][:1].sum().item()
        begin = time.perf_counter()
        with gt.signal.context(f"one{target}"):
            sums = [x.sum() for x in sent]
        sums[-1].item()
        best = min(best, time.perf_counter() - begin)
        for found, value in zip(sums, values, strict=True):
            if abs(found.item() - (value + turn) * count) > 1e-4 * (value + turn) * count:
                return None
    return best


def _all_reduce(workers: int, nbytes: int) -> Result:
    """An all-reduce of a partial tensor; its time is the difference to the same ops without the reduction."""
    count, times = nbytes // 4, 8
    with gt.signal.context("all"):
        rows = torch.ones(workers, count, device=gt.device) * torch.arange(1, workers + 1, device=gt.device).view(-1, 1)
    seconds = {}
    wanted = workers * (workers + 1) / 2
    for name, op in (("terms", lambda t: t * 2), ("sum", torch.relu)):
        best = float("inf")
        for _ in range(3):
            begin = time.perf_counter()
            with gt.signal.context("all"):
                for _ in range(times):
                    last = op(rows.sum(0))
                ends = last[:1] if name == "terms" else last[-1:]
            value = ends.sum().item()
            best = min(best, time.perf_counter() - begin)
        seconds[name] = best / times
        if value != wanted * (2 if name == "terms" else 1):
            return "all-reduce", False, f"got {value}, want {wanted}"
    took = max(seconds["sum"] - seconds["terms"], 1e-9)
    text = f"{nbytes / MIB:.0f} MiB on {workers} workers in {took * 1e3:.2f} ms"
    return "all-reduce", True, f"{text}, {2 * (workers - 1) / workers * nbytes / took / 1e9:.1f} GB/s of bus bandwidth"


def _transport() -> Result:
    """The plane that workers report, and bytes relayed by the dispatcher."""
    counters = gt.stats()
    planes = sorted({str(worker["transport"]) for worker in counters["workers"]})
    relayed = counters["dispatcher"]["tensor_bytes_relayed"]
    sent = sum(sum(worker["bytes_sent"].values()) for worker in counters["workers"])
    text = f"{' and '.join(planes) or 'the default'}; {size(sent)} sent directly, {size(relayed)} through the dispatcher"
    return "transport", not relayed, text


def main(args: list[str]) -> int:
    if args == ["probe"]:
        print(json.dumps(probe()), flush=True)
        return 0
    workers, nbytes = int(args[0]), int(args[1])
    try:
        for result in exercise(workers, gt.gpu_workers, nbytes):
            print(json.dumps(result), flush=True)
    except gt.GTError as error:
        print(json.dumps(("workers", False, f"{type(error).__name__}: {error}")), flush=True)
        return 1
    finally:
        gt.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
