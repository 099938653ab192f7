"""Programs that the tests run on hosts: `programs.py NAME ADDRESS ...`. They say what they found in lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gt

STAGE = """
pp_stage{n}: {{shard: {{axis: 0, workers: {w}}}}}
pp_stage{n}_colpar: {{shard: {{axis: 1, workers: {w}}}}}
pp_stage{n}_rowpar: {{shard: {{axis: 0, workers: {w}}}}}
"""
TP_NEAR = STAGE.format(n=0, w=[0, 1]) + STAGE.format(n=1, w=[2, 3])
TP_FAR = STAGE.format(n=0, w=[0, 2]) + STAGE.format(n=1, w=[1, 3])
ZERO = "gt: {data_parallel: [0, 1, 2], zero: 3}\n"
DEMO = ["--preset", "tiny", "--steps", "2", "--batch-size", "8", "--seq-len", "32", "--microbatches", "2"]


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def start(address: str, config: str, workers: int) -> None:
    """Connect to a server, or start workers of this host."""
    if address == "local":
        gt.cpu_workers(workers, config)
    else:
        gt.connect(address, config, workers=workers)


def demo(address: str) -> None:
    """The tuning demo, tensor parallel within and across hosts, and data parallel over hosts: losses as hex, all bits."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "tuning_demo"))
    os.environ["GT_CONFIG"] = ""
    import train

    losses = {}
    for name, config in (("near", TP_NEAR), ("far", TP_FAR)):
        start(address, config, 4)
        with contextlib.redirect_stdout(sys.stderr):
            losses[name] = [loss.hex() for loss in train.train(train.arguments(DEMO), ("pp_stage0", "pp_stage1"))]
        if name == "far":
            report = gt.stats()["workers"]
        gt.shutdown()
    losses["data"] = data_parallel(address, "dp: {shard: {axis: 0, workers: [[0], [1], [2], [3]]}}", 4, "dp")
    say(losses=losses, ways=[row.get("ways", {}) for row in report], relayed=[row.get("bytes_relayed", {}) for row in report])


def data_parallel(address: str, config: str, workers: int, group: str = "") -> list[str]:
    start(address, config, workers)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 300)).to("remote")
    optimizer, draw = torch.optim.AdamW(model.parameters(), 1e-2), torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        x, y = torch.randn(24, 32, generator=draw), torch.randint(300, (24,), generator=draw)
        with gt.signal.context(group) if group else contextlib.nullcontext():
            loss = torch.nn.functional.cross_entropy(model(x.to("remote")), y.to("remote"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    gt.shutdown()
    return losses


def zero(address: str) -> None:
    say(losses=[float.fromhex(loss) for loss in data_parallel(address, ZERO, 3)])


def routed(address: str) -> None:
    """Data parallel and a pipeline over two workers: losses as hex, and their ways."""
    losses = data_parallel(address, "dp: {shard: {axis: 0, workers: [[0], [1]]}}", 2, "dp")
    start(address, KINDS, 2)
    right, ways = pipeline()(), [row.get("ways", {}) for row in gt.stats()["workers"]]
    gt.shutdown()
    say(losses=losses, right=right, ways=ways)


def client(address: str) -> None:
    """One of several at once: pipelines and sums over hosts, again and again."""
    start(address, "a: {shard: {axis: 0, workers: [0, 1, 2]}}\ns0: {workers: [0]}\ns2: {workers: [2]}", 3)
    say(ready=True)
    sys.stdin.readline()
    right = 0
    for number in range(20):
        with gt.signal.context("a"):
            x = torch.full((30, 7), float(number), device="remote") * 2
        with gt.signal.context("s0"):
            y = torch.full((50_000,), float(number), device="remote") + 1
        with gt.signal.context("s2"):
            z = y * 3
        right += x.sum().item() == number * 420.0 and z[-1].item() == 3.0 * (number + 1)
    gt.shutdown()
    say(right=right)


def lose(address: str, target: str) -> None:
    """Transfers from worker 0 to `target` until one fails; after a word, others until one succeeds."""
    start(address, f"s0: {{workers: [0]}}\ns1: {{workers: [{target}]}}\nall: {{shard: {{axis: 0, workers: [0, 1, 2]}}}}", 3)

    def transfer() -> float:
        with gt.signal.context("s0"):
            x = torch.ones(200_000, device="remote") + 0
        with gt.signal.context("s1"):
            return (x * 2).sum().item()

    transfer()
    say(ready=True)
    try:
        while True:
            assert transfer() == 400_000
    except gt.GTError as error:
        say(error=type(error).__name__, text=str(error), at=time.monotonic())
    sys.stdin.readline()
    pause, until, failures = threading.Event(), time.monotonic() + 60, list[str]()
    while time.monotonic() < until:
        try:
            say(again=transfer(), failures=failures, ways=[row.get("ways", {}) for row in gt.stats()["workers"]])
            break
        except gt.GTError as error:
            failures.append(f"{type(error).__name__}: {error}")
            pause.wait(0.1)  # no message announces that the worker's successor has joined
    else:
        say(again=None, failures=failures)
    gt.shutdown()


def mend(address: str) -> None:
    """Transfers from worker 0 to 1, of which the first may fail; after a word, others until a cable joins the two again."""
    start(address, "s0: {workers: [0]}\ns1: {workers: [1]}\nall: {shard: {axis: 0, workers: [0, 1, 2]}}", 3)

    def transfer() -> bool:
        with gt.signal.context("s0"):
            x = torch.ones(200_000, device="remote") + 0
        with gt.signal.context("s1"):
            return (x * 2).sum().item() == 400_000

    def way() -> str:
        return gt.stats()["workers"][0]["ways"]["w1"]

    transfer()
    say(ready=way())
    sys.stdin.readline()
    try:
        while True:
            assert transfer()
    except gt.GTError as error:
        say(text=str(error))
    while not way().startswith("via"):
        pass
    assert transfer()
    say(relayed=way())
    until, count = time.monotonic() + 60, 0
    while (now := way()).startswith("via") and time.monotonic() < until:
        assert transfer()
        count += 1
    say(mended=now, right=transfer(), count=count)
    gt.shutdown()


KINDS = """
s0: {workers: [0]}
s1: {workers: [1]}
all: {shard: {axis: 0, workers: [0, 1]}}
columns: {shard: {axis: 1, workers: [0, 1]}}
zero_: {shard: {axis: 0, workers: [0, 1]}}
pp_stage0: {workers: [0]}
pp_stage1: {workers: [1]}
"""


def send() -> bool:
    with gt.signal.context("s0"):
        x = torch.ones(200_000, device="remote") + 0
    with gt.signal.context("s1"):
        return (x * 2).sum().item() == 400_000


def total() -> bool:
    with gt.signal.context("all"):
        x = torch.ones(2, 200_000, device="remote") + 0
        return x.sum(0)[-1].item() == 2


def gather() -> bool:
    with gt.signal.context("all"):
        x = torch.ones(600, 500, device="remote") + 0
    with gt.signal.context("columns"):
        x = x + 1
    with gt.signal.context("s0"):
        return (x * 2).sum().item() == 600 * 500 * 4


def upload() -> bool:
    with gt.signal.context("s1"):
        return torch.ones(500_000).to("remote").add(1).cpu()[-1].item() == 2


def pipeline() -> Callable[[], bool]:
    """A captured step over two stages. A lost transfer spoils the parameters: a new model for each attempt."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(64, 400), torch.nn.Linear(400, 1)
    first.to("remote"), second.to("remote")
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 1e-3)

    @gt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        with gt.signal.context("pp_stage0"):
            hidden = first(x)
        with gt.signal.context("pp_stage1"):
            loss = second(hidden).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(1)).to("remote")
    return lambda: step(x).item() >= 0


def restore() -> Callable[[], bool]:
    """A checkpoint of sharded tensors that is written and read."""
    folder = f"/dev/shm/{os.getpid()}"

    def step() -> bool:
        with gt.signal.context("all"):
            x = torch.ones(600, 500, device="remote") + 0
        gt.save({"x": x}, folder)
        return gt.load(folder)["x"].sum().item() == 600 * 500

    return step


WORK: dict[str, Callable[[], Callable[[], bool]]] = {
    "send": lambda: send, "total": lambda: total, "gather": lambda: gather, "upload": lambda: upload,
    "pipeline": pipeline, "restore": restore,
}  # fmt: skip


def cuts(address: str) -> None:
    """For each kind of transfer that is named: it is repeated until it fails, and then until it succeeds."""
    start(address, KINDS, 2)
    say(ready=True)
    pause = threading.Event()
    for line in sys.stdin:
        kind = line.strip()
        work = WORK[kind]()
        assert all([work() for _ in range(3)])
        say(running=kind)
        try:
            while True:
                assert work()
        except gt.GTError as error:
            say(error=type(error).__name__, text=str(error), at=time.monotonic())
        sys.stdin.readline()
        until, failures = time.monotonic() + 60, list[str]()
        while time.monotonic() < until:
            try:
                say(again=WORK[kind]()(), failures=failures)
                break
            except gt.GTError as error:
                failures.append(f"{type(error).__name__}: {error}")
                pause.wait(0.1)  # no message announces that a worker or a link is back
        else:
            say(again=None, failures=failures)
    gt.shutdown()


def far(address: str) -> None:
    """Seconds of a captured step, of one whose loss is read, and of a small read while a large upload is under way."""
    start(address, "", 1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 10)).to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    small, x, y = (torch.ones(4), torch.randn(64, 256), torch.zeros(64, dtype=torch.long))
    small, x, y = small.to("remote"), x.to("remote"), y.to("remote")

    @gt.compile
    def step() -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def seconds(work: Callable[[], Any], count: int) -> float:
        began = time.monotonic()
        for _ in range(count):
            work()
        return (time.monotonic() - began) / count

    def steps() -> None:
        for _ in range(100):
            loss = step()
        loss.item()

    steps()
    captured, awaited = seconds(steps, 2) / 100, seconds(lambda: step().item(), 10)
    read = seconds(lambda: (small + 1)[0].item(), 10)
    large = torch.ones(1_000_000).to("remote")  # 4 MB
    began = time.monotonic()
    during = [seconds(lambda: (small + 1)[0].item(), 1) for _ in range(4)]
    assert large[-1].item() == 1
    upload = time.monotonic() - began
    gt.shutdown()
    say(captured=captured, awaited=awaited, read=read, during=during, upload=upload)


def refused(address: str) -> None:
    try:
        start(address, "a: {shard: {axis: 0, workers: [0, 1]}}", 2)
    except gt.GTError as error:
        say(error=type(error).__name__, text=str(error))
    gt.shutdown()


if __name__ == "__main__":
    programs = (demo, cuts, far, zero, client, lose, mend, refused, routed)
    {program.__name__: program for program in programs}[sys.argv[1]](*sys.argv[2:])
