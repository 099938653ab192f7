"""The commit, hardware and command of a figure, without which it means nothing."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def about(script: str) -> dict[str, Any]:
    """Commit, hardware and command."""
    import torch

    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    facts = {
        "commit": os.environ.get("COMMIT") or git.stdout.strip() or "unknown",
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": " ".join(["python", script, *sys.argv[1:]]),
    }
    if torch.cuda.is_available():
        ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]  # torch would make a context to say it
        names = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.splitlines()
        facts |= {"gpus": names[: torch.cuda.device_count()], "cuda": torch.version.cuda}
    return facts


def tell(script: str, found: dict[str, Any], path: Path | None, silent: bool = False) -> None:
    """Print a result as one line of JSON (unless there is more to come), and write it where it is to be kept."""
    result = {"machine": about(script), **found}
    if not silent:
        print(json.dumps(result), flush=True)
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")
