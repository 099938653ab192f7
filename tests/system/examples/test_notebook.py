"""The notebook example: its cells run, as a kernel runs them, and what they end in has a form for notebooks."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest

from tests.helpers import EXAMPLES
from tests.helpers.limits import limit
from tests.helpers.processes import run_program

NOTEBOOK = EXAMPLES / "notebook.ipynb"
PRELUDE = """
import ast, json, os, sys
from tests.helpers.limits import limit
sys.path.insert(0, {root!r})

def run(path, folder):
    os.chdir(folder)
    scope, shown = {{"__name__": "__main__"}}, []
    for n, cell in enumerate(json.load(open(path))["cells"]):
        if cell["cell_type"] != "code":
            continue
        body = ast.parse("".join(cell["source"]), f"<cell {{n}}>")
        last = ast.Expression(body.body.pop().value) if body.body and isinstance(body.body[-1], ast.Expr) else None
        exec(compile(body, f"<cell {{n}}>", "exec"), scope)
        if last is not None:
            value = eval(compile(last, f"<cell {{n}}>", "eval"), scope)
            if value is not None:
                shown.append([type(value).__name__, getattr(value, "_repr_html_", lambda: "")()])
    print("SHOWN", json.dumps(shown))

"""


def test_its_cells_run_in_order(tmp_path: Path) -> None:
    said = run_program(PRELUDE, f"run({str(NOTEBOOK)!r}, {str(tmp_path)!r})", 120)
    shown = json.loads(said.partition("SHOWN ")[2])
    assert [name for name, _ in shown] == ["TensorPlacement", "MemorySummary", "TextReport", "int"]
    assert all(markup.startswith("<") for _, markup in shown[:3]) and shown[0][1].count("<svg") == 4
    first, last = map(float, said.partition("loss ")[2].splitlines()[0].split(" to "))
    assert last < first and json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "1 program" in shown[2][1], shown[2][1]


def test_it_is_stored_without_outputs() -> None:
    body = json.loads(NOTEBOOK.read_text())
    assert body["nbformat"] == 4 and len({cell["id"] for cell in body["cells"]}) == len(body["cells"])
    for cell in body["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            ast.parse("".join(cell["source"]))


@pytest.mark.skipif(importlib.util.find_spec("nbclient") is None, reason="nbclient is not installed")
def test_a_kernel_runs_it(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    NotebookClient(notebook, timeout=int(limit(120)), resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("<svg" in output.get("data", {}).get("text/html", "") for output in outputs)
