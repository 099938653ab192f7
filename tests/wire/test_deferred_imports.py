"""Deferred modules are executed at their first use, once, and a worker's torch lacks nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from gt.wire import deferred_imports
from tests.helpers.limits import limit


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "deferred_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("from deferred_package import heavy as heavy\n")
    (folder / "heavy.py").write_text("import sys\nsys.executions.append(__name__)\nvalue = 3\n")
    (folder / "broken.py").write_text("raise ValueError('broken')\n")
    monkeypatch.setattr(sys, "executions", [], raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, deferred_imports._DeferringFinder)]
    for name in [name for name in sys.modules if name.startswith("deferred_package")]:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
def test_a_deferred_module_is_executed_at_its_first_use_and_once() -> None:
    with deferred_imports.deferred("deferred_package.heavy"):
        package = importlib.import_module("deferred_package")
    assert sys.executions == []  # type: ignore[attr-defined]
    assert package.heavy.__name__ == "deferred_package.heavy"
    assert sys.executions == []  # type: ignore[attr-defined]
    assert (package.heavy.value, package.heavy.value) == (3, 3)
    deferred_imports.execute_deferred("deferred_package.heavy")
    assert sys.executions == ["deferred_package.heavy"]  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="missing"):
        _ = package.heavy.missing


@pytest.mark.usefixtures("package")
def test_modules_outside_of_the_block_and_other_modules_are_executed_at_once() -> None:
    with deferred_imports.deferred("deferred_package.other"):
        importlib.import_module("deferred_package")
    assert sys.executions == ["deferred_package.heavy"]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("package")
def test_the_import_of_another_module_of_the_library_executes_the_deferred_ones_first(package: Path) -> None:
    (package / "later.py").write_text("import sys\nsys.executions.append(__name__)\n")
    with deferred_imports.deferred("deferred_package.heavy"):
        importlib.import_module("deferred_package")
    importlib.import_module("deferred_package.later")
    assert sys.executions == ["deferred_package.heavy", "deferred_package.later"]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("package")
def test_an_error_of_the_module_is_raised_at_each_use() -> None:
    with deferred_imports.deferred("deferred_package.broken"):
        broken = importlib.import_module("deferred_package.broken")
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            _ = broken.value


@pytest.mark.usefixtures("package")
def test_a_module_that_a_deferred_one_imports_at_its_own_import_is_executed_once(package: Path) -> None:
    (package / "heavy.py").write_text("import sys\nimport deferred_package.tool\nsys.executions.append(__name__)\n")
    (package / "tool.py").write_text("import sys\nsys.executions.append(__name__)\n")
    with deferred_imports.deferred("deferred_package.heavy"):
        importlib.import_module("deferred_package")
    tool = importlib.import_module("deferred_package.tool")
    assert sys.executions == ["deferred_package.tool", "deferred_package.heavy"]  # type: ignore[attr-defined]
    assert tool is sys.modules["deferred_package.tool"] is sys.modules["deferred_package"].tool
    assert tool.__spec__ is not None and tool.__spec__.loader is tool.__loader__ and tool.__spec__.origin == tool.__file__
    assert importlib.reload(tool) is tool


@pytest.mark.usefixtures("package")
def test_another_thread_waits_for_a_module_that_is_being_executed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "gates", (begun, go), raising=False)
    (package / "heavy.py").write_text(f"import sys\nsys.gates[0].set()\nassert sys.gates[1].wait({limit(60)})\nvalue = 3\n")
    with deferred_imports.deferred("deferred_package.heavy"):
        heavy = importlib.import_module("deferred_package").heavy
    values: list[int] = []
    threads = [threading.Thread(target=lambda: values.append(heavy.value)) for _ in range(2)]
    threads[0].start()
    assert begun.wait(limit(60))
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join()
    assert values == [3, 3]


@pytest.mark.usefixtures("package")
def test_stand_ins_are_for_their_importers_until_the_module_is_executed(package: Path) -> None:
    (package / "asking.py").write_text("from deferred_package.heavy import value\ndef ask():\n    return value\n")
    (package / "strange.py").write_text("from deferred_package.heavy import value\n")
    stand_in = deferred_imports.StandIn(object(), frozenset({"deferred_package.asking"}))
    with deferred_imports.deferred("deferred_package.heavy", before=(), stand_ins={"value": stand_in}):
        package_ = importlib.import_module("deferred_package")
    asking = importlib.import_module("deferred_package.asking")
    assert asking.ask() is stand_in.value
    assert sys.executions == []  # type: ignore[attr-defined]
    assert importlib.import_module("deferred_package.strange").value == 3
    assert sys.executions == ["deferred_package.heavy"]  # type: ignore[attr-defined]
    assert asking.ask() == 3
    assert type(package_.heavy) is ModuleType and package_.heavy.__spec__.loader is package_.heavy.__loader__
    assert package_.heavy.__loader__.get_source("deferred_package.heavy").startswith("import sys")


def test_a_workers_torch_executes_the_deferred_modules_when_they_are_used() -> None:
    code = """
import sys
from gt.wire.deferred_imports import DeferredModule, execute_deferred
from gt.worker.engine.registry import UNUSED, import_torch_engine

import_torch_engine()
import torch
waiting = [name for name in UNUSED if type(sys.modules[name]) is DeferredModule]
assert waiting == list(UNUSED), waiting
assert torch.addmm(torch.ones(2), torch.ones(2, 3), torch.ones(3, 2)).sum() == 16
execute_deferred("torch._meta_registrations")
assert (torch.empty(4, 1, device="meta") * torch.empty(3, device="meta")).shape == (4, 3)
assert torch.distributions.Normal(0.0, 1.0).mean == 0
assert callable(torch.export.export)
assert not [name for name in UNUSED if type(sys.modules[name]) is DeferredModule]
"""
    command = [sys.executable, "-c", "import sys; sys.argv[0] = 'gt'\n" + code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit(60))
    assert done.returncode == 0, done.stderr


def test_registrations_of_ops_keep_file_and_line_without_a_search_for_their_source() -> None:
    code = """
import inspect, torch
from gt.worker.engine.registry import without_source_lines
whole = inspect.getframeinfo
with without_source_lines():
    here = torch._library.utils.get_source(1)
    assert inspect.getframeinfo(inspect.currentframe()).code_context is None
    assert inspect.stack()[0].code_context is None
assert here == "<string>:6" and inspect.getframeinfo is whole
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=limit(60))


def test_a_process_that_has_torch_keeps_its_frames_sources() -> None:
    """Workers that are threads of one process would restore one another's change."""
    code = """
import inspect, sys, torch
from gt.worker.engine import registry
whole, seen = inspect.getframeinfo, []
class Finder:
    def find_spec(self, name, path, target=None):
        seen.append(inspect.getframeinfo is whole)
sys.meta_path.insert(0, Finder())
registry.import_torch_engine()
assert seen and all(seen)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=limit(60))
