"""README's Python runs as it stands, and the examples do what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "tuning_demo"


def run(*command: str, timeout: float = 100, **env: str) -> str:
    """Standard output of a Python program run at the repository root."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GT_") or key == "GT_TEST_RUN"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_readmes_python_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 2
    program = "\n".join(blocks[1:] + blocks[:1])  # starting and stopping first: the other uses what starts by itself
    assert float(run("-c", "import gt\n" + program)) > 0


@pytest.mark.parametrize(("example", "says"), [("quickstart.py", "right: "), ("signal_demo.py", "largest difference")])
def test_an_example_runs(example: str, says: str) -> None:
    assert says in run(str(ROOT / "examples" / example))


def test_the_demo_is_plain_torch_on_the_cpu(tmp_path: Path) -> None:
    losses = tmp_path / "losses.json"
    run(str(DEMO / "train.py"), "--device", "cpu", "--steps", "6", "--losses", str(losses))
    found = json.loads(losses.read_text())
    assert len(found) == 6 and found[-1] < found[0]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_the_demo_equals_one_process(order: str) -> None:
    out = run(str(DEMO / "train_simple.py"), "--check", "--steps", "4", "--order", order)
    assert re.search(r"^ok: loss .* in 4 steps on 8 workers \(tp 2, pp 4\), largest difference", out, re.M), out


@pytest.mark.slow
def test_the_demo_by_hand() -> None:
    out = run(str(DEMO / "launch.py"), "--", "--steps", "2")
    assert re.search(r"^ok: loss .* on 8 workers", out, re.M), out


def test_the_orders_of_passes() -> None:
    sys.path.insert(0, str(DEMO))
    try:
        from train import passes
    finally:
        sys.path.remove(str(DEMO))
    text = {order: " ".join(f"{kind}{i}" for kind, i in passes(order, 4, 3)) for order in ("gpipe", "1f1b")}
    assert text["gpipe"] == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert text["1f1b"] == "F0 F1 F2 B0 F3 B1 B2 B3"
    for order in ("gpipe", "1f1b"):
        for stages in (1, 2, 8):
            assert sorted(passes(order, 4, stages)) == [(kind, i) for kind in "BF" for i in range(4)]
