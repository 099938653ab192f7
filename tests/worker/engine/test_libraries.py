"""A worker's owner names libraries: imported at the worker's start, their ops join the table of that process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from gt import env
from gt.errors import ConfigError
from gt.ir.schema import OpTable
from gt.worker import __main__ as worker
from gt.worker.engine.numpy import NumpyEngine
from gt.worker.engine.torch import libraries

OPS = """
import torch
library = torch.library.Library("{name}", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.define("twice_(Tensor(a!) x) -> Tensor(a!)")
library.define("part(Tensor(a) x) -> Tensor(a)")
library.define("count(Tensor x) -> int")
library.define("draw(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
library.define("into(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
library.define("on_gpus(Tensor x) -> Tensor")
library.define("two(Tensor x) -> (Tensor, Tensor[])")
for op in ("twice", "twice_", "part", "count", "draw", "into", "two"):
    library.impl(op, lambda x: x, "CPU")
library.impl("on_gpus", lambda x: x, "CUDA")
"""


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OpTable:
    """A table of this test in place of the process's; modules of tmp_path can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(libraries, "TABLE", OpTable())
    return libraries.TABLE


def module(tmp_path: Path, name: str, text: str = OPS) -> str:
    (tmp_path / f"{name}.py").write_text(text.format(name=name))
    return name


def test_ops_between_tensors_with_a_kernel_for_the_device_join_the_table(table: OpTable, tmp_path: Path):
    lines = libraries.load([module(tmp_path, "gt_test_ops")], "cpu")
    assert sorted(table) == [f"gt_test_ops.{op}.default" for op in ("twice", "twice_", "two")]
    assert sorted(line.partition("(")[0] for line in lines) == sorted(table)
    assert table.find("gt_test_ops.twice_.default")[0].writes == ("x",)


def test_a_gpu_has_other_kernels(table: OpTable, tmp_path: Path):
    libraries.load([module(tmp_path, "gt_test_gpu_ops")], "cuda")
    assert list(table) == ["gt_test_gpu_ops.on_gpus.default"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "'gt_test_missing' .*cannot be imported: ModuleNotFoundError"),
        ("raise OSError('no such file')", "cannot be imported: OSError: no such file"),
        ("x = 1", "registers no op with torch"),
    ],
)
def test_a_library_that_adds_nothing_is_an_error_of_the_worker(table: OpTable, tmp_path: Path, text: str | None, match: str):
    name = "gt_test_missing" if text is None else module(tmp_path, f"gt_test_{len(text)}", text)
    with pytest.raises(ConfigError, match=match):
        libraries.load([name], "cpu")
    assert not len(table)


def test_the_numpy_engine_has_no_libraries():
    assert NumpyEngine().load([]) == []
    with pytest.raises(ConfigError, match="torchvision need torch"):
        NumpyEngine().load(["torchvision"])


@pytest.mark.parametrize(
    ("argv", "variable", "want"),
    [
        (["--library", "a", "--library", "b.c"], "x", ["a", "b.c"]),
        ([], "x, y.z,", ["x", "y.z"]),
        ([], "", []),
    ],
)
def test_libraries_are_named_by_the_command_line_or_a_variable(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], variable: str, want: list[str]
):
    options: list[Any] = []
    monkeypatch.setenv("GT_LIBRARIES", variable)
    monkeypatch.setattr(worker, "run", lambda given, *rest: options.append(given) or "")
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    assert worker.main(["-p", "1", *argv]) == 0
    assert options[0].libraries == want and env.names("GT_LIBRARIES") == [p.strip() for p in variable.split(",") if p.strip()]
