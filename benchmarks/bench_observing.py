"""The cost of a dashboard and a `gt top` that watch a run: CPU time by process, and memory of server and page over the run.

`python benchmarks/bench_observing.py --program tuning_demo --seconds 600 [--json FILE]`; `gpt2` is the other program. Needs
chromium and rich. CPU times are the kernel's, of all threads, in nanoseconds; the dashboard's and gt top's are those of their
processes. At the end the program stands still. Server and workers then use more CPU time while they are watched. That time by
the number of looks is the cost of a look there. Looks of the run are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from bench_observe import cpu_seconds  # noqa: E402
from machine import tell  # noqa: E402

from tests.observe.browser import Browser, chromium  # noqa: E402
from tools import dashboard_pictures  # noqa: E402

LINGER = 75  # seconds after which a dashboard without a page looks no more
# share: of the run's CPU time. growth: bytes from the middle of the run to its end; curves grow until they have 480 samples
LIMITS = {"share": 0.01, "growth": 1 << 20}
# Counts the times that the page was told a new state
COUNT = """(() => {
    window.looks = 0;
    const what = {childList: true, characterData: true, subtree: true};
    new MutationObserver(() => { window.looks += 1; }).observe(document.getElementById("server"), what);
})()"""
READY = (
    "document.getElementById('memory').dataset.state === 'ready' && document.getElementById('curves').dataset.state === 'ready'"
)


def resident(pid: int) -> int:
    """Bytes of resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def gpt2(address: str) -> Iterator[subprocess.Popen]:
    """examples/gpt2 on the server's workers: a small model and text of this repository."""
    folder = ROOT / "examples" / "gpt2"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as data:
        texts = sorted(map(str, (ROOT / "docs").glob("*.md")))
        subprocess.run(
            [sys.executable, str(folder / "prepare_data.py"), *texts, "--to", data],
            check=True,
            env=env,
            stdout=subprocess.DEVNULL,
        )
        names = {path.name.rpartition("_")[2]: str(path) for path in Path(data).glob("*.bin")}
        command = [
            sys.executable,
            str(folder / "train.py"),
            "--connect",
            address,
            "-e",
            "d4",
            "-b",
            "8",
            "-t",
            "64",
            "-m",
            "0",
            "-s",
            "0",
            "-l",
            "1e-4",
        ]
        command += ["--steps", "1000000", "--stages", "2", "-i", names["train.bin"], "-j", names["val.bin"]]
        command += ["--tokenizer", names["tokenizer.bin"]]
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def tuning_demo(address: str) -> Iterator[subprocess.Popen]:
    with dashboard_pictures.demo(address, 10_000_000, (*dashboard_pictures.FLAGS, "--lr", "1e-4")) as process:
        yield process


PROGRAMS = {"tuning_demo": (tuning_demo, 8), "gpt2": (gpt2, 2)}  # with the number of workers


@contextlib.contextmanager
def top(address: str) -> Iterator[subprocess.Popen]:
    """`gt top`, live on a terminal of 80 columns that is read."""
    near, far = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "LINES": "40", "TERM": "xterm-256color"}
    process = subprocess.Popen([sys.executable, "-m", "gt", "top", address], env=env, stdin=far, stdout=far, stderr=far)
    os.close(far)

    def drain() -> None:
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while os.read(near, 1 << 16):
                pass

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
        reader.join()
        os.close(near)


class Processes:
    """Those of one run, by part."""

    def __init__(self, **parts: list[int]) -> None:
        self.by_part = parts

    def cpu(self) -> dict[str, float]:
        return {part: sum(map(cpu_seconds, pids)) for part, pids in self.by_part.items()}

    def during(self, seconds: float, browser: Browser | None = None) -> dict[str, float]:
        """CPU seconds of each part in a second, and "looks" in a second."""
        count = (lambda: float(browser.run("window.looks"))) if browser is not None else (lambda: 0.0)
        before, looks, began = self.cpu(), count(), time.monotonic()
        time.sleep(seconds)
        after, passed = self.cpu(), time.monotonic() - began
        return {**{part: (after[part] - before[part]) / passed for part in after}, "looks": (count() - looks) / passed}


def settle(processes: Processes, seconds: float = 120.0) -> None:
    """Wait until workers have done what the program had sent before it was stopped."""
    end = time.monotonic() + seconds
    while processes.during(2.0)["workers"] > 0.05:
        if time.monotonic() > end:
            raise SystemExit(f"workers still work {seconds:g} s after the program was stopped")


def memory(processes: Processes, browser: Browser) -> dict[str, int]:
    browser.send("HeapProfiler.collectGarbage")
    heap = {row["name"]: row["value"] for row in browser.send("Performance.getMetrics")["metrics"]}
    parts = {part: resident(processes.by_part[part][0]) for part in ("server", "dashboard", "top", "program")}
    parts["workers"] = sum(map(resident, processes.by_part["workers"]))
    return {**parts, "page": int(heap["JSHeapUsedSize"]), "nodes": int(heap["Nodes"])}


def run(program: str, seconds: float, turn: float) -> dict[str, Any]:
    start, workers = PROGRAMS[program]
    with (
        dashboard_pictures.server(workers, "--heartbeat", "600") as (address, link, started),
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        Browser(Path(folder)) as browser,
        start(address) as process,
    ):
        browser.open(link)
        browser.wait(READY, 300)
        with top(address) as watcher:
            time.sleep(20)
            browser.run(COUNT)
            (dashboard,) = children(started[0].pid)
            own = {"workers": [each.pid for each in started[1:]], "program": [process.pid]}
            processes = Processes(server=[started[0].pid], dashboard=[dashboard], top=[watcher.pid], **own)
            seen, memories = [], [memory(processes, browser)]
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                seen.append(processes.during(turn, browser))
                memories.append(memory(processes, browser))
            if process.poll() is not None or watcher.poll() is not None or browser.errors:
                codes = f"{program}: exit code {process.poll()}, gt top: {watcher.poll()}"
                raise SystemExit("\n".join([codes, *browser.errors]))
            os.kill(process.pid, signal.SIGSTOP)  # what is left is the cost of looking
            settle(processes)
            still = {"watched": processes.during(2 * turn, browser)}
        del processes.by_part["top"]
        browser.open("about:blank")
        time.sleep(LINGER)
        still["alone"] = processes.during(2 * turn)
        os.kill(process.pid, signal.SIGCONT)
    return {"running": seen, "memory": memories, "still": still}


def figures(body: dict[str, Any]) -> dict[str, Any]:
    """CPU seconds in a second by part, of the run and of looking, and memory."""
    mean = {part: statistics.mean(row[part] for row in body["running"]) for part in body["running"][0]}
    watched, alone = body["still"]["watched"], body["still"]["alone"]
    a_look = {part: max(0.0, watched[part] - alone[part]) / watched["looks"] for part in ("server", "workers")}
    looking = {
        **{part: cost * mean["looks"] for part, cost in a_look.items()},
        "dashboard": mean["dashboard"],
        "top": mean["top"],
    }
    whole = sum(mean[part] for part in ("server", "workers", "program"))
    grown = {}
    for name in body["memory"][0]:
        series = [row[name] for row in body["memory"]]
        grown[name] = {"first": series[0], "middle": series[len(series) // 2], "last": series[-1], "largest": max(series)}
    return {
        "looks a second": round(mean["looks"], 3),
        "cpu of the run": {part: round(mean[part], 5) for part in ("server", "workers", "program")},
        "cpu of looking": {part: round(cost, 5) for part, cost in looking.items()},
        "cpu of a look, ms": {part: round(1e3 * cost / mean["looks"], 3) for part, cost in looking.items()},
        "share of the run": round(sum(looking.values()) / (whole - looking["server"] - looking["workers"]), 5),
        "memory": grown,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", choices=tuple(PROGRAMS), default="tuning_demo")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the run with a page open")
    parser.add_argument("--turn", type=float, default=20.0, help="seconds between two measurements")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not chromium():
        raise SystemExit("bench_observing.py needs chromium")
    result = figures(run(given.program, given.seconds, given.turn))
    for name, value in result.items():
        for key, each in value.items() if isinstance(value, dict) else [("", value)]:
            print(f"{name:20} {key:10} {each}")
    tell(
        "bench_observing.py",
        {"program": given.program, "seconds": given.seconds, "figures": result, "limits": LIMITS},
        given.json,
    )
    flat = all(
        row["last"] - row["middle"] <= LIMITS["growth"]
        for part, row in result["memory"].items()
        if part in ("server", "dashboard", "top", "page")
    )
    return int(result["share of the run"] >= LIMITS["share"] or not flat)


if __name__ == "__main__":
    sys.exit(main())
