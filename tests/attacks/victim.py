"""The program of a cell of the matrix: at work of one kind until something ends it, then on with what is left.

`python -m tests.attacks.victim` imports torch once and forks a child for each order, a JSON line {"moment", "address", "token",
"folder", "size", "orders", "answers"}; the last two are named pipes. `python -m tests.attacks.victim ADDRESS FILE` observes a
server until its standard input ends, and writes a line for each view, or for what ends it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gt import env
from gt.launch.process import fork
from tests.attacks.honest import CONFIGS
from tests.helpers.limits import limit

ON = limit(8)  # seconds in which new work has to succeed
BATCH = 8 << 20  # bytes of a batch: blocks of shared memory are used in turn
VIEWS = "views"  # file of an observer's views
CONFIG = {"all-reduce": "eager", "schedule": "pipelined"}
SHARDED = "gt: {{data_parallel: [0, 1], zero: {zero}, bucket: 4KiB{offload}}}\n"


def config_of(moment: str, folder: Path) -> str:
    """The config of a moment's client."""
    if moment in ("offload", "zero replay"):
        offload = f", offload: {{optimizer: nvme, params: nvme, path: {folder}}}" if moment == "offload" else ""
        return SHARDED.format(zero=3 if moment == "offload" else 2, offload=offload)
    return CONFIGS[CONFIG.get(moment, "captured")]


def sharded(compiled: bool) -> Iterator[Callable[[], Any]]:
    """Steps of ZeRO: with state on disk, or replays with buckets of gradients."""
    import torch

    import gt

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to("remote")
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.ones(8, 64).to("remote")

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(data) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = gt.compile(step) if compiled else step
    for _ in range(4 if compiled else 1):
        run().item()
    while True:
        yield lambda: run().item()


def checkpoints(moment: str, folder: Path, size: int) -> Iterator[Callable[[], Any]]:
    """Saves beside steps, each of a checkpoint that has to be whole; or loads of one."""
    import torch

    import gt

    where = folder / "checkpoint"
    state = {"model": {"weight": torch.ones(size // 16, device="remote"), "small": torch.ones(3, device="remote")}}

    def save() -> None:
        gt.save(state, where)
        (state["model"]["small"] + 1).sum().item()

    def save_beside() -> None:
        last = gt.save(state, where, wait=False)
        (state["model"]["small"] + 1).sum().item()
        last.wait()

    def load() -> None:
        gt.load(where)["model"]["weight"].sum().item()

    save()
    while True:
        yield {"saving": save, "saving beside": save_beside, "loading": load}[moment]


def batches() -> Iterator[Callable[[], Any]]:
    """Uploads one after the other, each of which has to arrive as it is."""
    import torch

    number = 0
    while True:
        number += 1
        hosts = [torch.full((BATCH // 4,), float(number + part)) for part in range(4)]

        def upload(hosts: list = hosts, total: float = sum(number + part for part in range(4)) * (BATCH // 4)) -> None:
            got = sum(host.to("remote") for host in hosts).double().sum().item()
            assert got == total, f"{got} of {total}"

        yield upload


def moments(moment: str, size: int, folder: Path) -> Iterator[Callable[[], Any]]:
    """Pieces of work; during each of them the signal may come."""
    import torch

    import gt

    def small() -> float:
        return (torch.ones(8, 8, device="remote") * 2 + 1).sum().item()

    def tower(first: torch.nn.Linear, second: torch.nn.Linear, groups: tuple[str, str]) -> Callable:
        def step(x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros((), device="remote")
            for (part,) in gt.microbatches((x,), 4):
                with gt.signal.context(groups[0]):
                    hidden = torch.relu(first(part))
                with gt.signal.context(groups[1]):
                    loss = second(hidden).square().mean()
                loss.backward()
                total = total + loss.detach()
            return total

        return step

    if moment in ("starting", "idle", "eager", "observed"):
        while True:
            yield small
    if moment in ("offload", "zero replay"):
        yield from sharded(moment == "zero replay")
    if moment in ("saving", "saving beside", "loading"):
        yield from checkpoints(moment, folder, size)
    if moment == "batches":
        yield from batches()
    if moment == "fetch":
        large = torch.ones(size // 16, device="remote")
        while True:
            yield lambda: (large + 1).cpu()
    if moment == "upload":
        host = torch.ones(size // 4)
        while True:
            yield lambda: host.to("remote").sum().item()
    if moment == "capture":
        while True:
            yield lambda: gt.compile(lambda x: (x * 2 + 1).relu().sum())(torch.ones(8, 8, device="remote")).item()
    if moment == "all-reduce":
        up, down = torch.ones(64, 64).to("remote"), torch.ones(64, 64).to("remote")

        def reduced() -> float:
            with gt.signal.context("tp_colpar"):
                hidden = torch.relu(torch.ones(64, 64, device="remote") @ up)
            with gt.signal.context("tp_rowpar"):
                return (hidden @ down).sum().item()

        while True:
            yield reduced
    layers = torch.nn.Linear(16, 32).to("remote"), torch.nn.Linear(32, 4).to("remote")
    groups = ("pp_stage0", "pp_stage1") if moment == "schedule" else ("none", "none")
    compiled = gt.compile(tower(*layers, groups), schedule="1f1b" if moment == "schedule" else None)
    data = torch.ones(8, 16)
    for _ in range(4):
        compiled(data.to("remote")).item()  # replayed from here on
    while True:
        yield lambda: compiled(data.to("remote")).item()


def serve(order: dict[str, Any]) -> None:
    """One cell: {"mark"} before each piece of work; {"error", "text"}, {"on"} and {"again"} afterwards."""
    import torch

    import gt

    torch.set_num_threads(1)
    orders, answers = open(order["orders"]), os.open(order["answers"], os.O_WRONLY)  # noqa: SIM115

    def say(**what: Any) -> None:
        os.write(answers, json.dumps(what).encode() + b"\n")

    moment = order["moment"]
    try:
        if moment == "observed":
            say(observer=_observer(order).pid)
        say(mark=0)
        _connect(order["address"], order["token"], moment, Path(order["folder"]))
        for number, work in enumerate(moments(moment, order["size"], Path(order["folder"])), 1):
            say(mark=number)
            if moment in ("idle", "starting") and number == 2:
                orders.readline()  # idle until told
            work()
    except gt.GTError as error:
        say(error=type(error).__name__, text=str(error)[:400])
    except Exception as error:
        say(error=f"not an error of GT: {type(error).__name__}", text=str(error)[:400])
    say(on=_works(lambda: None), **_why)
    for line in orders:
        address, token = json.loads(line)
        gt.shutdown()
        say(again=_works(lambda a=address, t=token: _connect(a, t, moment, Path(order["folder"]))), **_why)
        break
    gt.shutdown()


_why: dict[str, str] = {}


def _connect(address: str, token: str, moment: str, folder: Path) -> None:
    import gt

    if not address:
        gt.cpu_workers(2, config="")
        return
    config = folder / f"{moment}.yaml"
    config.write_text(config_of(moment, folder))
    gt.connect(address, config=str(config), token=token)


def _works(before: Callable[[], None]) -> float:
    """Seconds until new work succeeds, -1 if it does not."""
    import torch

    import gt

    begin = time.monotonic()
    before_done = False
    while time.monotonic() - begin < ON:
        try:
            if not before_done:
                before()
                before_done = True
            if torch.ones(3, device="remote").sum().item() == 3:
                _why.clear()
                return round(time.monotonic() - begin, 2)
        except gt.DispatcherLost as error:
            _why["why"] = str(error)[:200]
            return -1
        except gt.GTError as error:
            _why["why"] = str(error)[:200]
    return -1


def _observer(order: dict[str, Any]) -> subprocess.Popen:
    """A process that observes the server as long as this one lives."""
    code = [sys.executable, "-m", "tests.attacks.victim", order["address"], str(Path(order["folder"]) / VIEWS)]
    own = env.child(PYTHONPATH=os.getcwd(), GT_TOKEN=order["token"])
    observer = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=own, text=True)
    assert observer.stdout is not None
    observer.stdout.readline()
    return observer


def observe(address: str, path: str) -> None:
    """Views of a server, a line each; the first is announced."""
    from gt.errors import GTError
    from gt.observe.record_stream import RecordStream

    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    with open(path, "a", buffering=1) as file:
        try:
            with RecordStream(address, env.get("GT_TOKEN"), 0.5) as stream:
                while stream.next():
                    file.write("view\n")
                    sys.stdout.write("view\n")
                    sys.stdout.flush()
        except GTError as error:
            file.write(f"{type(error).__name__}: {error}\n")


def main() -> int:
    if len(sys.argv) > 1:
        observe(*sys.argv[1:])
        return 0
    import torch  # noqa: F401

    import gt  # noqa: F401

    for line in sys.stdin:
        order = json.loads(line)
        pid = fork("gt victim", lambda order=order: serve(order))
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        sys.stdin.readline()  # over
        for number in (18, 9):  # SIGCONT, SIGKILL
            os.kill(pid, number)
        os.waitpid(pid, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
