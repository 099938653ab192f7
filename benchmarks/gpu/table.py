"""Every figure of docs/gpus.md by one command.

`python benchmarks/gpu/table.py [--out DIR] [--within SECONDS] [--only NAME ..]`.

Runs what the GPUs of this machine are enough for, each on GPUs of its own. Figures are measured beside one another where
there is room (`--alone`: one after the other). Results are DIR/gpu-NAME-COMMIT.json, as in benchmarks/results, and the
printed text is beside them. Figures with a result of this commit are left out, so a second call goes on where the first ran out
of time: none is begun that would not end within it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
from machine import ROOT, about  # noqa: E402


@dataclass(frozen=True)
class Item:
    """A run. seconds: about what it takes on H200s. one: the item that has the ms of one GPU; else it measures that itself."""

    name: str
    gpus: int
    seconds: float
    command: str
    one: str = ""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command)


GRAPH = "'native graph' 'gt cudagraphs'"
D36 = "--model d36 --seconds 1.5 --limit 195"
ITEMS = [
    Item("step", 1, 130, f"bench_step.py --sizes 32x1024 --only 'native torch.compile' {GRAPH}"),
    Item("step-4x128", 1, 90, f"bench_step.py --sizes 4x128 --only {GRAPH}"),
    Item("step-eager", 1, 45, "bench_step.py --sizes 32x1024 --only 'native eager' 'gt eager'"),
    Item("step-d36", 1, 110, f"bench_step.py {D36} --sizes 32x1024 --only 'native graph'"),
    Item("work-512m", 1, 230, "work.py --preset 512m --seconds 1.2 --rivals 4:12:1"),
    Item("pipeline2", 2, 110, "bench_pipeline.py --rivals 8,4:4:1f1b --cases 4,4,4,0:4:zb-v", "step"),
    Item("pipeline2-4x128", 2, 95, "bench_pipeline.py --size 4x128 --rivals 6,6:2:1f1b --cases 6,6:1:1f1b", "step-4x128"),
    Item("dp2", 2, 125, "bench_data_parallel.py --rivals ddp@2 fsdp2@2 --configs dp2", "step"),
    Item("pipeline2-d36", 2, 200, f"bench_pipeline.py {D36} --rivals 19,17:8:1f1b --cases 9,10,9,8:4:zb-v", "step-d36"),
    Item("losses2-bf16", 2, 150, "check_losses.py --only bf16 --models d12:8x256 --backends eager"),
    Item("losses2-bf16-compiled", 2, 270, "check_losses.py --only bf16 --models d12:8x256 --backends cudagraphs"),
    Item("losses2", 2, 240, "check_losses.py --only fp32 --models d8:8x64 --backends cudagraphs"),
    Item("losses2-eager", 2, 150, "check_losses.py --only fp32 --models d8:8x64 --backends eager"),
    Item("soak2", 2, 100, "soak.py"),
    Item("plane2", 2, 40, "bench_plane.py --cases pair@2 all_reduce@2"),
    Item("plane4", 4, 30, "bench_plane.py --cases all_reduce@4"),
    Item("pipeline4", 4, 150, "bench_pipeline.py --rivals 4,4,3,1:8:1f1b --cases 3,3,3,3+head:8:zb-h1 4,4,4,0:8:zb-h1", "step"),
    Item("dp4", 4, 130, "bench_data_parallel.py --rivals ddp@4 fsdp2@4 --configs dp4", "step"),
    Item("tp-pp4", 4, 180, "bench_tp_pp.py --rivals 2:6,2:4:1f1b 4:8:1 --cases tp2pp2:x2:4:zb-h1 tp4:x1:1"),
    Item("tp-pp4-512m", 4, 235, "bench_tp_pp.py --preset 512m --rivals 2:7,5:4:1f1b 4:12:1 --cases tp2pp2:x2:4:zb-h1 tp4:x1:1"),
    Item("pipeline4-d36", 4, 230, f"bench_pipeline.py {D36} --rivals 10,10,10,6:8:1f1b --cases 5,5,5,5,5,5,4,2:8:zb-v",
         "step-d36"),
]  # fmt: skip


def next_of(waiting: Iterable[Item], free: int, left: float, under_way: Iterable[str]) -> Item | None:
    """The first that `free` GPUs and `left` seconds are enough for; not while what it asks for its `one` is under way."""
    busy = set(under_way)
    return next((item for item in waiting if item.gpus <= free and item.seconds <= left and item.one not in busy), None)


def gpus_here() -> list[str]:
    """Numbers of the GPUs that may be used."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [number for number in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if number]
    with suppress(OSError):
        ask = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        answer = subprocess.run(ask, capture_output=True, text=True, check=False)
        return answer.stdout.split() if not answer.returncode else []
    return []


class Table:
    def __init__(self, out: Path, gpus: Sequence[str], within: float, alone: bool) -> None:
        self.out, self.gpus, self.free, self.alone = out, gpus, [*gpus], alone
        self.commit = about(__file__)["commit"]
        self.end = time.monotonic() + within
        self.running: dict[subprocess.Popen, tuple[Item, list[str], float]] = {}
        self.failed: list[str] = []

    def path(self, name: str, suffix: str = "json") -> Path:
        return self.out / f"gpu-{name}-{self.commit}.{suffix}"

    def begin(self, item: Item) -> None:
        script, *rest = item.words
        if item.one:
            one = self.one_gpu(item.one)
            rest += ["--one", f"{one:.4g}"] if one else ["--native"]
        mine, self.free = self.free[: item.gpus], self.free[item.gpus :]
        with self.path(item.name, "txt").open("w") as said:
            process = subprocess.Popen(
                [sys.executable, str(HERE / script), *rest, "--json", str(self.path(item.name, "part"))],
                stdout=said, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(mine)},
            )  # fmt: skip
        self.running[process] = item, mine, time.monotonic()
        print(f"{item.name}: begun on GPU {' '.join(mine)}", flush=True)

    def one_gpu(self, name: str) -> float | None:
        """Milliseconds of native's step on one GPU, by an item's result."""
        with suppress(OSError):
            rows = json.loads(self.path(name).read_text())["figures"]
            return next((row["ms"] for case, row in rows.items() if case.endswith("native graph") and "ms" in row), None)
        return None

    def held(self, item: Item) -> bool:
        """True if a result has all rows and is within all bounds."""
        found = json.loads(self.path(item.name).read_text())
        return not any("failed" in row for row in found["figures"].values()) and not any("MISSED" in b for b in found["bars"])

    def ended(self, process: subprocess.Popen) -> None:
        item, mine, start = self.running.pop(process)
        self.free = [gpu for gpu in self.gpus if gpu in {*self.free, *mine}]  # in their order, whichever ended first
        part = self.path(item.name, "part")
        if part.exists() and json.loads(part.read_text()).get("ended"):  # else it broke off: what there is may be little
            part.rename(self.path(item.name))
        print(f"{item.name}: exit code {process.returncode} after {time.monotonic() - start:.0f} s")
        print(self.path(item.name, "txt").read_text(), flush=True)
        if process.returncode:
            self.failed.append(item.name)

    def run(self, items: Sequence[Item]) -> list[Item]:
        """Those that there was no time for."""
        waiting = [item for item in items if not self.path(item.name).exists()]
        self.failed = [item.name for item in items if item not in waiting and not self.held(item)]
        try:
            while True:
                busy = [item.name for item, _, _ in self.running.values()]
                free = 0 if self.alone and busy else len(self.free)
                if (item := next_of(waiting, free, self.end - time.monotonic(), busy)) is not None:
                    waiting.remove(item)
                    self.begin(item)
                elif not self.running:
                    return waiting
                else:
                    pid, status = os.waitpid(-1, 0)
                    process = next(process for process in self.running if process.pid == pid)
                    process.returncode = os.waitstatus_to_exitcode(status)
                    self.ended(process)
        finally:
            for process in self.running:
                process.send_signal(signal.SIGINT)  # it ends what it has started
            for process in self.running:
                process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    parser.add_argument("--within", type=float, default=3600.0, help="seconds in which all has to end")
    parser.add_argument("--only", nargs="+", choices=[item.name for item in ITEMS], help="these, in the order given")
    parser.add_argument("--alone", action="store_true", help="one at a time, also where GPUs are left over")
    args = parser.parse_args()
    gpus = gpus_here()
    if not gpus:
        print("no GPU here: each of the benchmarks by itself can be tried out on a CPU")
        return 2
    named = {item.name: item for item in ITEMS}
    wanted = [named[name] for name in args.only or named]
    table = Table(args.out, gpus, args.within, args.alone)
    args.out.mkdir(parents=True, exist_ok=True)
    left = table.run([item for item in wanted if item.gpus <= len(gpus)])
    for item in wanted:
        if item.gpus > len(gpus):
            print(f"{item.name}: not run, it needs {item.gpus} GPUs and there are {len(gpus)}")
        elif item in left:
            print(f"{item.name}: not run, it takes about {item.seconds:g} s and there was no time; run this again")
    print("all that ran held its bars" if not table.failed else f"failed, or missed a bar: {' '.join(table.failed)}")
    return int(bool(table.failed))


if __name__ == "__main__":
    sys.exit(main())
