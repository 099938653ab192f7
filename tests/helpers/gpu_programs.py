"""Programs of the tests on GPUs, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.helpers import ROOT
from tests.helpers.limits import limit


def run(prelude: str, program: str, seconds: float, **variables: str) -> str:
    """Standard output of a prelude, whose `{root!r}` is this repository, and a program. variables: of its environment."""
    done = subprocess.run(
        [sys.executable, "-c", prelude.format(root=str(ROOT)) + program],
        capture_output=True,
        text=True,
        timeout=limit(seconds),
        env={**os.environ, **variables},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
