"""`python -m tests.stress.load --part i/n`: part i of the test files beside busy loops, with time limits that fit.

A test that passes alone and fails here takes a slow process for a dead one. Parts are balanced by the seconds in
durations.json, which `--record` takes from the report of a run with nothing beside it (`pytest --junitxml FILE`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gt.launch.process import fork
from tests.helpers import ROOT

DURATIONS = ROOT / "tests" / "stress" / "durations.json"
LOOPS = 20
FACTOR = 12  # by which time limits grow: two processes of tests have about two twelfths of what they have alone
GRACE = 60  # seconds in which a run that takes too long says what it has
LIMIT = 120  # seconds of a test beside nothing
UNKNOWN = 10.0  # seconds of a file that has never been timed


def files() -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))


def parts(names: list[str], seconds: dict[str, float], count: int) -> list[list[str]]:
    """The files in `count` parts of about the same length: the longest first, each to the shortest part so far."""
    rows: list[list[str]] = [[] for _ in range(count)]
    totals = [0.0] * count
    for name in sorted(names, key=lambda name: (-seconds.get(name, UNKNOWN), name)):
        part = totals.index(min(totals))
        rows[part].append(name)
        totals[part] += seconds.get(name, UNKNOWN)
    return [sorted(row) for row in rows]


def durations(report: Path) -> tuple[dict[str, float], Counter, list[str]]:
    """Seconds by file, number of tests by outcome, and names of failed tests, from a JUnit report."""
    seconds: dict[str, float] = {}
    ends: Counter = Counter()
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("classname", "").replace(".", "/") + ".py"
        seconds[name] = seconds.get(name, 0.0) + float(case.get("time", 0))
        end = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        ends[end] += 1
        if end in ("failure", "error"):
            failed.append(f"{name}::{case.get('name')}")
    return seconds, ends, failed


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that do nothing and never rest. They end with this one, whichever way it ends."""
    pids = [fork("gt.test busy", spin) for _ in range(count)]
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def spin() -> None:
    while True:
        pass


def run(names: list[str], args: argparse.Namespace, report: Path) -> int:
    """pytest on these files; its exit code, or 124 if it takes too long."""
    command = [sys.executable, "-m", "pytest", "-n", str(args.processes), "--dist", "loadfile", f"--junitxml={report}"]
    environment = {**os.environ, "GT_TEST_SLOWDOWN": str(args.factor), "PYTEST_TIMEOUT": str(LIMIT * args.factor)}
    start = time.monotonic()
    with busy(args.loops):
        process = subprocess.Popen([*command, *args.rest, *names], cwd=ROOT, env=environment, start_new_session=True)
        try:
            code = process.wait(args.minutes * 60)
        except subprocess.TimeoutExpired:
            code = 124
            os.killpg(process.pid, signal.SIGINT)  # it reports what it has
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        load = os.getloadavg()[0]
    took = (time.monotonic() - start) / 60
    cores = len(os.sched_getaffinity(0))
    said = f"{len(names)} files beside {args.loops} busy loops on {cores} cores (load {load:.0f}): {took:.1f} minutes"
    if code == 124:
        said += "\nit took too long and was ended"
    if report.exists():
        seconds, ends, failed = durations(report)
        counts = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
        longest = ", ".join(f"{name} {took:.0f} s" for name, took in sorted(seconds.items(), key=lambda row: -row[1])[:5])
        said += "".join([f"\n{counts}; longest: {longest}", *(f"\nFAILED {name}" for name in failed)])
    else:
        said += f"\nno report: pytest ended with {code}"
    sys.stdout.write(said + "\n")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.stress.load", description=__doc__)
    parser.add_argument("--part", default="1/1", help="i/n: the i-th of n parts of the test files")
    parser.add_argument("--loops", type=int, default=LOOPS, help="busy processes beside the tests")
    parser.add_argument("--processes", type=int, default=2, help="processes that run tests")
    parser.add_argument("--factor", type=float, default=FACTOR, help="by which time limits grow")
    parser.add_argument("--minutes", type=float, default=60, help="after which it is ended")
    parser.add_argument("--list", action="store_true", help="say what is in each part, and end")
    parser.add_argument("--record", type=Path, help="a JUnit report of a run beside nothing: write durations.json, and end")
    parser.add_argument("rest", nargs="*", help="files in place of a part, and what pytest is told besides, after --")
    args = parser.parse_args()
    if args.record:
        found = {name: round(took, 1) for name, took in sorted(durations(args.record)[0].items())}
        DURATIONS.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    part, count = map(int, args.part.split("/"))
    if not 0 < part <= count:
        parser.error(f"--part is {args.part}, want i/n with 1 <= i <= n")
    seconds = json.loads(DURATIONS.read_text())
    rows = parts(files(), seconds, count)
    if args.list:
        for number, row in enumerate(rows, 1):
            sys.stdout.write(f"{number}/{count}: {sum(seconds.get(n, UNKNOWN) for n in row):.0f} s alone: {' '.join(row)}\n")
        return 0
    chosen = [name for name in args.rest if name.startswith("tests/")]
    args.rest = [name for name in args.rest if name not in chosen]
    with tempfile.TemporaryDirectory(prefix="gt-load-") as folder:
        return run(chosen or rows[part - 1], args, Path(folder) / "report.xml")


if __name__ == "__main__":
    sys.exit(main())
