"""The rules that no linter holds: one list each, no pickle, the environment in one place, short documents."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.limits import limit

MODULES = sorted((ROOT / "gt").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BANNED_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), name(path))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def attributes(path: Path) -> Iterator[tuple[str, int]]:
    """`a.b` of every attribute access on a plain name, with its line."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}", node.lineno


def test_every_module_says_what_it_is() -> None:
    for path in MODULES:
        if not path.read_text().strip():
            assert path.name == "__init__.py", f"{name(path)} is empty"
            continue
        text = ast.get_docstring(tree(path))
        assert text, f"{name(path)} has no docstring"
        assert len(text.splitlines()) <= 12, f"the docstring of {name(path)} has {len(text.splitlines())} lines"


def test_nothing_is_pickled() -> None:
    found = [(name(p), m) for p in MODULES for m in imported(p) if m.split(".")[0] in BANNED_IMPORTS]
    writer = "gt/client/reports/memory_snapshot.py"
    assert found == [(writer, "pickle")]  # the format of torch's memory viewer
    used = {node.attr for node in ast.walk(tree(ROOT / writer)) if isinstance(node, ast.Attribute)}
    assert "dump" in used and not used & {"load", "loads", "Unpickler"}, "a pickle is written, and never read"


# Where a name that is no literal is looked up or code is made, and why it is none that was sent
LOOK_UPS = {
    ("gt/dispatcher/schedule/costs.py", "getattr"): "names of a dataclass's own fields",
    ("gt/worker/engine/codegen.py", "exec"): "names made there, and argument names of the op's schema",
    ("gt/worker/program/python_codegen.py", "exec"): "names made there, and numbers formatted as such",
    ("gt/worker/program/python_codegen.py", "compile"): "the same source",
    ("gt/worker/executor.py", "getattr"): "names of instruction kinds, gt.ir.instr.KINDS",
    ("gt/worker/executor.py", "hasattr"): "the same names",
    ("gt/worker/engine/numpy/blas.py", "getattr"): "names of functions written there",
    ("gt/worker/engine/torch/dtypes.py", "getattr"): "names of dtypes, gt.ir.spec.DTYPES",
    ("gt/worker/engine/torch/libraries.py", "getattr"): "names of ops that torch's dispatcher lists",
    ("gt/worker/engine/torch/libraries.py", "import_module"): "names of modules, from the process's owner alone",
    ("gt/worker/engine/torch/overloads.py", "getattr"): "names of the table's ops, or of the process's owner",
    ("gt/wire/codec.py", "attrgetter"): "names of a message's own fields",
    ("gt/wire/deferred_imports.py", "__dict__"): "attributes of this process's modules, by names that its code imports",
}
CALLS = ("getattr", "setattr", "delattr", "hasattr", "eval", "exec", "compile", "import_module", "__import__", "attrgetter",
         "methodcaller")  # fmt: skip
PEERS_TEXT = ("gt/wire/", "gt/ir/", "gt/dispatcher/", "gt/worker/", "gt/config/")  # packages that read what was sent


def looked_up(path: Path) -> Iterator[tuple[str, int]]:
    """Calls that take a name or code which is no literal, with their lines; subscripts of namespaces too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            called = str(getattr(node.func, "id", getattr(node.func, "attr", "")))
            own = isinstance(node.func, ast.Attribute) and called in ("compile", "exec")  # a method of ours, or of re
            named = node.args[1:2] if called.endswith("attr") else node.args
            if called in CALLS and not own and not all(isinstance(arg, ast.Constant) for arg in named):
                yield called, node.lineno
            if called in ("globals", "vars", "locals"):
                yield called, node.lineno
        elif isinstance(node, ast.Attribute) and node.attr in ("__dict__", "__globals__", "__builtins__"):
            yield node.attr, node.lineno


def test_no_text_that_was_sent_is_looked_up_or_run() -> None:
    found = {}
    for path in MODULES:
        if name(path).startswith(PEERS_TEXT):
            found.update({(name(path), called): line for called, line in looked_up(path)})
    assert set(found) == set(LOOK_UPS), {key: found.get(key) for key in set(found) ^ set(LOOK_UPS)}
    assert all(len(reason) > 10 for reason in LOOK_UPS.values())


def test_one_module_reads_the_environment() -> None:
    reads = ("os.environ", "os.getenv", "os.putenv", "os.environb")
    found = [f"{name(p)}:{line}" for p in MODULES if name(p) != "gt/env.py" for what, line in attributes(p) if what in reads]
    assert found == []


def test_library_code_does_not_print() -> None:
    found = []
    for path in MODULES:
        if name(path).startswith("gt/cli"):
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                found.append(f"{name(path)}:{node.lineno}")
    # the nursery tells its parent its port on stdout: that is its interface
    assert [f for f in found if not f.startswith("gt/launch/")] == []


def test_tests_do_not_sleep_or_fix_ports() -> None:
    found = []
    for path in TESTS:
        found += [f"{name(path)}:{line}" for what, line in attributes(path) if what == "time.sleep"]
        ports = re.findall(r"(?:localhost|127\.0\.0\.1):[1-9]\d{3,4}", path.read_text())
        found += [f"{name(path)}: {port}" for port in ports]
    allowed = ("tests/house/test_house.py",)
    assert [f for f in found if not f.startswith(allowed)] == []


def test_environment_variables_are_named_once() -> None:
    from gt import env

    listed = {v.name for v in env.VARIABLES}
    assert len(listed) == len(env.VARIABLES)
    assert all(v.help for v in env.VARIABLES)
    for path in MODULES:
        for node in ast.walk(tree(path)):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and re.fullmatch(r"GT_[A-Z_]+", value):
                assert value in listed, f"{name(path)}:{node.lineno} names {value}, which gt/env.py lacks"


DOCUMENTS = ["README.md", "CLAUDE.md", "examples/tuning_demo/README.md", *map(name, sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_only_variables_that_exist(document: str) -> None:
    from gt import env

    listed = {v.name for v in env.VARIABLES}
    mentioned = set(re.findall(r"\bGT_[A-Z]+(?:_[A-Z]+)*\b", (ROOT / document).read_text()))
    assert mentioned <= listed, f"{document} names {sorted(mentioned - listed)}"


@pytest.mark.parametrize(("document", "limit"), [("CLAUDE.md", 100), ("README.md", 140)])
def test_documents_are_short(document: str, limit: int) -> None:
    lines = len((ROOT / document).read_text().splitlines())
    assert lines <= limit, f"{document} has {lines} lines, at most {limit}"


def test_readme_opens_with_code_that_runs() -> None:
    head = (ROOT / "README.md").read_text().splitlines()[:15]
    assert any(line.startswith("```python") for line in head) and head.count("```") >= 1


def test_paths_the_documents_name_exist() -> None:
    for document in ("README.md", "CLAUDE.md", "docs/glossary.md", "docs/when.md"):
        folders = r"`((?:gt|tests|examples|benchmarks|configs|docs|tools)/[\w./]*)`"
        for path in re.findall(folders, (ROOT / document).read_text()):
            assert (ROOT / path).exists(), f"{document} names {path}, which is not there"


def test_error_kinds_travel_and_come_back() -> None:
    from gt import errors

    for kind, cls in errors.KINDS.items():
        back = errors.from_wire(errors.to_wire(cls("7 is not 8")))
        assert type(back) is cls and type(back).__name__ == kind and str(back) == "7 is not 8"


def test_messages_are_coded_once() -> None:
    from gt.wire import messages

    rooms = [importlib.import_module(f"{messages.__name__}.{room.name}") for room in pkgutil.iter_modules(messages.__path__)]
    defined = {c for room in rooms for c in vars(room).values() if isinstance(c, type) and issubclass(c, messages.Message)}
    assert defined - {messages.Message} == set(messages.CODES)
    assert len(set(messages.CODES)) == len(messages.CODES)


def fresh(code: str) -> str:
    """Standard output of a fresh interpreter that runs `code` at the repository root."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit(60))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_gt_starts_nothing() -> None:
    code = "import os, sys, threading, gt; print('zmq' in sys.modules, threading.active_count(), os.listdir('/proc/self/fd'))"
    plain = "import os, sys, threading, torch; print('zmq' in sys.modules, 1, os.listdir('/proc/self/fd'))"
    assert fresh(code) == fresh(plain)


TORCH_FREE = ["gt.wire.messages", "gt.ir.layout", "gt.config.load", "gt.dispatcher.core", "gt.server"]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_free_modules_load_without_torch(module: str) -> None:
    # a user's program needs the device, so torch
    as_ours = "import sys; sys.argv = ['-m']; sys.orig_argv = ['python', '-m', 'gt.server']"
    assert fresh(f"{as_ours}; import {module}; print('torch' in sys.modules)") == "False"


def test_a_class_name_occurs_once():
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{name(path)}:{node.lineno}")
    assert {cls: where for cls, where in places.items() if len(where) > 1} == {}


def test_limits_say_what_they_count():
    """MAX_UNITS, not MOST: a limit is used far from where it is defined."""
    bare = {"MOST", "LEAST", "MAX", "MIN", "LIMIT", "BOUND", "CAP"}
    found = [
        f"{name(path)}:{node.lineno} {target.id}"
        for path in MODULES
        for node in tree(path).body
        if isinstance(node, ast.Assign)
        for target in ast.walk(node)
        if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store) and target.id in bare
    ]
    assert found == []


PROTOCOL_WORDS = {"CHUNK", "AHEAD"}  # bytes, under the names that the protocol's page explains


def test_constants_carry_their_unit():
    """SPEAK_SECONDS, not SPEAK: a constant whose comment begins with seconds or bytes has that in its name."""
    line = re.compile(r"^(_?[A-Z][A-Z_]*) = [^#\n\"]*# (seconds|bytes)\b", re.MULTILINE)
    found = [
        f"{name(path)} {constant}"
        for path in MODULES
        for constant, unit in line.findall(path.read_text())
        if unit.upper() not in constant and constant not in PROTOCOL_WORDS
    ]
    assert found == []


WAITS = {"wait", "join", "settimeout", "communicate"}


def unscaled(node: ast.AST) -> bool:
    """A call with a time limit of a second or more that is not scaled; shorter ones are pauses, or show that nothing comes."""
    if not isinstance(node, ast.Call):
        return False
    waits = isinstance(node.func, ast.Attribute) and node.func.attr in WAITS and len(node.args) == 1 and not node.keywords
    limits = [word.value for word in node.keywords if word.arg == "timeout"] + (node.args if waits else [])
    return any(isinstance(n, ast.Constant) and isinstance(n.value, (int, float)) and n.value >= 1 for n in limits)


def test_time_limits_of_tests_are_scaled():
    """On a machine under load a wait takes as many times as long as the machine is slower."""
    pauses = {ROOT / "tests" / "stress" / "strangers.py"}
    found = [
        f"{name(path)}:{node.lineno}" for path in TESTS if path not in pauses for node in ast.walk(tree(path)) if unscaled(node)
    ]
    assert found == [], "want limit(...) of tests.helpers.limits"


def test_a_folder_has_few_entries():
    """A reader sees a room at one look."""
    folders = {path.parent for path in (*MODULES, *TESTS)} - {ROOT / "gt", ROOT / "tests", ROOT / "tests" / "attacks"}
    apart = {"__pycache__", "__init__.py"}
    counts = {name(folder): len({entry.name for entry in folder.iterdir()} - apart) for folder in folders}
    assert {folder: count for folder, count in counts.items() if count > 15} == {}


INDIRECT = ("What", "Whether", "Where", "How", "Of", "Which", "That", "Why", "Who", "When")


def test_docstrings_begin_with_their_subject():
    found = []
    beside = [path for folder in ("benchmarks", "examples", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]
    for path in [*MODULES, *beside]:
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                words = (ast.get_docstring(node) or "").split()
                if words and words[0] in INDIRECT:
                    found.append(f"{name(path)}:{node.body[0].lineno} {' '.join(words[:6])}")
    assert found == []


def test_a_pass_has_an_example_and_its_source():
    """The text of a pass has a step before and after it, and the paper or the year of the technique."""
    from gt.dispatcher.programs.pass_manager import PASSES

    texts = {made.__module__: inspect.getdoc(sys.modules[made.__module__]) or "" for made in PASSES}
    assert len(texts) == len(PASSES), "a pass has a file of its own"
    wanted = ("Example", "before:", "after:")
    assert [module for module, text in texts.items() if not all(word in text for word in wanted)] == []
    assert [module for module, text in texts.items() if not re.search(r"\b(19|20)\d\d\b", text)] == []


# Folders of tests that are no package of gt/: runs by hand, the whole path, the repository, and what tests share
TESTS_APART = {"attacks", "conformance", "corpus", "helpers", "house", "interrupts", "programs", "stress", "system"}


def test_tests_mirror_the_tree():
    folders = {path.parent.relative_to(ROOT / "tests") for path in TESTS if path.name.startswith("test_")} - {Path()}
    assert {f.as_posix() for f in folders if f.parts[0] not in TESTS_APART and not (ROOT / "gt" / f).is_dir()} == set()
    assert {path.parent.as_posix() for path in TESTS if not path.with_name("__init__.py").exists()} == set()


def test_a_module_of_tests_has_one_name():
    """A second name would be a second copy of its state; pytest imports conftest as `tests.conftest`."""
    stems = {path.stem for path in TESTS} | {path.parent.name for path in TESTS}
    stems -= {"tests", "__init__", "__main__"}
    found = [f"{name(path)} imports {module}" for path in TESTS for module in imported(path) if module.split(".")[0] in stems]
    assert found == []
    assert {module for module in sys.modules if module.rpartition(".")[2] == "conftest"} == {"tests.conftest"}


def test_one_module_advances_the_number_of_an_op():
    """A number that is left over from another session's op blames the wrong program."""
    counted = {("emitter", "seq"), ("emitter", "base"), ("cluster", "seq")}
    assigned = set()
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                if (owner.lstrip("_"), node.attr) in counted:
                    assigned.add(name(path))
    assert assigned == {"gt/dispatcher/state/emitter.py"}


PARTS = frozenset({"context", "core", "emitter", "fetches", "host_copies", "later", "materializer", "observers", "offload",
                   "op_stream", "outbox", "planner", "programs", "queue", "redistributor", "round_robin", "s", "session",
                   "sharded", "traces", "uploads"})  # fmt: skip


def test_a_sessions_parts_do_not_reach_through_one_another():
    """A part gets what it needs in its constructor: no `self.<part>.<part>`, and no other object's state assigned."""
    folders = tuple(f"gt/dispatcher/{room}/" for room in ("state", "planning", "programs", "cluster", "fairness"))
    reached = []
    for path in MODULES:
        if not name(path).startswith(folders):
            continue
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Attribute):
                continue
            owner = node.value
            through = isinstance(owner, ast.Attribute) and owner.attr.lstrip("_") in PARTS and node.attr.lstrip("_") in PARTS
            if through and getattr(owner.value, "id", "") == "self":
                reached.append(f"{name(path)}:{node.lineno} self.{owner.attr}.{node.attr}")
            if getattr(owner, "id", "") == "self" and node.attr == "s":
                reached.append(f"{name(path)}:{node.lineno} self.s")
    assert reached == []


def imports_of(path: Path, names: dict[str, Path]) -> set[str]:
    """Modules of gt/ that one imports: at its top, within functions and under TYPE_CHECKING."""
    modules = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            modules.update(full & set(names))
            if not full <= set(names):
                modules.add(node.module)
    return modules & set(names)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected components of more than one module."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, left = set(), [start]
        while left:
            new = graph[left.pop()] - seen
            seen |= new
            left += new
        reach[start] = seen
    components = {frozenset(other for other in seen if start in reach[other]) for start, seen in reach.items() if start in seen}
    return sorted(map(set, components), key=sorted)


def test_imports_have_no_circles():
    """Types count too: who reads one module of a circle has to read all of them."""
    names = {name(path)[:-3].replace("/", ".").removesuffix(".__init__"): path for path in MODULES}
    graph = {module: imports_of(path, names) - {module} for module, path in names.items()}
    assert circles(graph) == []


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]
    assert circles({"a": {"b"}, "b": set()}) == []
