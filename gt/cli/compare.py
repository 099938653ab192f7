"""`gt plan --config A --config B script.py`: plans of one program with each config, fastest first."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from gt.observe.plan import size, time

COLUMNS = ("workers", "a step", "of work", "of transfers", "bubble", "memory of one")


def compare(configs: Sequence[str], workers: int, script: str, args: Sequence[str], as_json: bool) -> int:
    """Print a table, fastest first; 1 if a config cannot be planned. Each is planned in a process of its own."""
    rows = [_planned(config, workers, script, args) for config in configs]
    good = sorted((row for row in rows if "failed" not in row), key=lambda row: row["step"])
    bad = [row for row in rows if "failed" in row]
    if as_json:
        print(json.dumps([*good, *bad], indent=1))
        return int(bool(bad))
    width = max(map(len, ("# config", *configs))) + 2
    print(f"{'# config':{width}}" + "".join(f"{name:>16}" for name in COLUMNS))
    for row in good:
        bubble = "" if row["bubble"] is None else f"{row['bubble']:.1%}"
        cells = (row["workers"], *(time(row[key]) for key in ("step", "compute", "links")), bubble, size(row["memory"]))
        print(f"{row['config']:{width}}" + "".join(f"{cell:>16}" for cell in cells))
    for row in bad:
        print(f"{row['config']:{width}}not planned: {row['failed']}")
    if len(good) > 1:
        gain = good[1]["step"] / good[0]["step"]
        print(f"# by plan {good[0]['config']} is the fastest, {gain:.2f}x {good[1]['config']}; times are of a nominal GPU")
    return int(bool(bad))


def _planned(config: str, workers: int, script: str, args: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "gt", "plan", "--json", "--config", config]
    command += ["--workers", str(workers)] if workers else []
    done = subprocess.run([*command, script, *args], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"config": config, "failed": lines[-1].removeprefix("gt plan: ") if lines else f"exit code {done.returncode}"}
    body = json.loads(done.stdout)
    return {
        "config": config, "workers": body["workers"], **body["time"], "bubble": body["pipeline"].get("idle"),
        "memory": max(row.get("peak_scheduled", row["peak"]) for row in body["memory"]),
    }  # fmt: skip
