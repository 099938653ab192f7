"""The page docs/observe.md: its program runs, and so do the trackers' lines where the package is installed."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.limits import limit
from tests.house.test_documents import environment

NEEDS = {"mlflow": "sqlalchemy"}  # mlflow-skinny has the module, and no store of its own
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "observe.md").read_text(), re.S | re.M)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_program_of_the_page_runs(number: int, tmp_path: Path) -> None:
    module = re.findall(r"^(?:from|import) ([\w.]+)", BLOCKS[number], re.M)[0]
    try:
        importlib.import_module(module)
        importlib.import_module(NEEDS.get(module, module))
    except ImportError:
        pytest.skip(f"{module} is not installed")
    text = BLOCKS[number] if number == 0 else "import torch\nloss, step = torch.ones(()), 0\n" + BLOCKS[number]
    (tmp_path / "program.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=limit(100)
    )
    assert done.returncode == 0, done.stderr
    if number == 0:  # a tracker may print what it likes, as wandb does
        assert done.stdout.splitlines() == re.findall(r"# -> (.*)", BLOCKS[number])
