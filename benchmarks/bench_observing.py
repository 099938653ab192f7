"""The cost of a dashboard that is open: CPU time by process, and memory of server and page, beside the tuning demo.

`python benchmarks/bench_observing.py --seconds 600 [--json FILE]`. Needs chromium. The demo trains on eight CPU workers while a
page is open. CPU times are the kernel's, of whole processes. At the end the program stands still: the cost within server and
workers is the difference of their CPU time with an open page and without one. The dashboard's own is measured during the run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.observe.browser import Browser, chromium  # noqa: E402
from tools import dashboard_pictures  # noqa: E402

TICKS = os.sysconf("SC_CLK_TCK")


def cpu(pid: int) -> float:
    """Seconds of CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident(pid: int) -> int:
    """Bytes of resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Processes:
    """Those of one run, by part."""

    def __init__(self, server: int, workers: list[int], program: int) -> None:
        (dashboard,) = children(server)
        self.by_part = {"server": [server], "dashboard": [dashboard], "workers": workers, "program": [program]}

    def cpu(self) -> dict[str, float]:
        return {part: sum(map(cpu, pids)) for part, pids in self.by_part.items()}

    def during(self, seconds: float) -> dict[str, float]:
        before = self.cpu()
        time.sleep(seconds)
        return {part: after - before[part] for part, after in self.cpu().items()}


def memory(processes: Processes, browser: Browser) -> dict[str, int]:
    browser.send("HeapProfiler.collectGarbage")
    heap = {row["name"]: row["value"] for row in browser.send("Performance.getMetrics")["metrics"]}
    parts = {part: resident(processes.by_part[part][0]) for part in ("server", "dashboard")}
    return {**parts, "page": int(heap["JSHeapUsedSize"]), "nodes": int(heap["Nodes"])}


def run(seconds: float, turn: float) -> dict[str, Any]:
    flags = (*dashboard_pictures.FLAGS, "--lr", "1e-4")
    with (
        dashboard_pictures.server(8, "--heartbeat", "600") as (address, link, started),
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        Browser(Path(folder)) as browser,
        dashboard_pictures.demo(address, flags=flags) as program,
    ):
        browser.open(link)
        browser.wait(dashboard_pictures.READY, 300)
        time.sleep(20)
        page = browser.run("location.href")
        processes = Processes(started[0].pid, [process.pid for process in started[1:]], program.pid)
        seen, memories = [], [memory(processes, browser)]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            seen.append(processes.during(turn))
            memories.append(memory(processes, browser))
        os.kill(program.pid, signal.SIGSTOP)  # what is left is the cost of looking
        time.sleep(3)
        still = {"open": processes.during(turn)}
        browser.open("about:blank")
        time.sleep(75)  # the dashboard looks a while longer
        still["closed"] = processes.during(turn)
        os.kill(program.pid, signal.SIGCONT)
        if browser.errors:
            raise SystemExit("\n".join([page, *browser.errors]))
    return {"turn": turn, "running": seen, "memory": memories, "still": still}


def shown(body: dict[str, Any]) -> list[str]:
    turn, rows = body["turn"], body["running"]
    whole = statistics.mean(sum(row.values()) for row in rows) / turn
    dashboard = statistics.mean(row["dashboard"] for row in rows) / turn
    looks = min(1.0, dashboard / max(body["still"]["open"]["dashboard"] / turn, 1e-9))  # looks are rarer during the run
    cost = {part: looks * (body["still"]["open"][part] - body["still"]["closed"][part]) / turn for part in rows[0]}
    cost["dashboard"] = dashboard
    total = sum(cost.values())
    lines = [f"{'part':12}{'CPU of the run':>16}{'of looking':>14}"]
    for part in rows[0]:
        lines.append(
            f"{part:12}{statistics.mean(row[part] for row in rows) / turn:>16.4f}{cost[part]:>14.4f}  CPU seconds a second"
        )
    lines.append(f"looking takes {total / (whole - dashboard):.2%} of the run's CPU time")
    for name in body["memory"][0]:
        series = [row[name] for row in body["memory"]]
        lines.append(f"{name:12}first {series[0]:>12,} last {series[-1]:>12,} largest {max(series):>12,}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of the run with a page open")
    parser.add_argument("--turn", type=float, default=20.0, help="seconds between two measurements")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not chromium():
        raise SystemExit("bench_observing.py needs chromium")
    body = run(args.seconds, args.turn)
    print("\n".join(shown(body)))
    if args.json:
        args.json.write_text(json.dumps(body))


if __name__ == "__main__":
    main()
