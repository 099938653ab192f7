"""The distribution: files and metadata of the wheel, ready configs by name, versions of torch, types of public names."""

from __future__ import annotations

import ast
import configparser
import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

import gt
from gt.config import files
from gt.config.load import load
from gt.errors import ConfigError
from gt.launch import machine
from tests.helpers import ROOT
from tests.helpers.limits import limit
from tools import site

SOURCES = ("gt", "configs", "LICENSE", "README.md", "pyproject.toml", "setup.py")


def build_needs() -> str:
    """Why no wheel can be built here, or ""."""
    found = pytest.importorskip("setuptools").__version__
    return "" if int(found.split(".")[0]) >= 77 else f"setuptools is {found}, want 77 or later"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of a copy of the sources, since building leaves files among them."""
    if why := build_needs():
        pytest.skip(why)
    copy, made = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--wheel-dir", str(made), str(copy)], capture_output=True, text=True, timeout=limit(100))
    assert done.returncode == 0, done.stderr
    (path,) = made.iterdir()
    return zipfile.ZipFile(path)


@pytest.fixture
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_string(wheel.read(name).decode())


def test_the_wheel_holds_all_of_gt_and_the_ready_configs_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    code = {str(p.relative_to(ROOT)) for p in (ROOT / "gt").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    configs = {f"gt/{p.relative_to(ROOT)}" for p in (ROOT / "configs").rglob("*.*")}
    assert held == code | configs


def test_every_folder_of_data_is_listed_as_a_package() -> None:
    """Else setuptools warns that it will leave the folder out one day."""
    code = "import setuptools; setuptools.setup = lambda **given: print(*given['packages']); import runpy; "
    code += "runpy.run_path('setup.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=limit(60))
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")}
    wanted = {"gt." + str(folder).replace("/", ".") for folder in folders}
    files_of_gt = [path for path in (ROOT / "gt").rglob("*.*") if "__pycache__" not in path.parts]
    wanted |= {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in files_of_gt}
    assert wanted <= set(done.stdout.split()), done.stderr


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile, metadata: email.message.Message) -> None:
    assert (metadata["Name"], metadata["Version"], metadata["Requires-Python"]) == ("gt-torch", gt.__version__, ">=3.10")
    assert metadata["License-Expression"] == "BSD-3-Clause" and metadata["Author"] == "GT Contributors"
    classifiers = metadata.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers and not [text for text in classifiers if text.startswith("License")]
    (licence,) = (name for name in wheel.namelist() if name.endswith("/LICENSE"))
    assert "Copyright (c) 2026 GT Contributors" in wheel.read(licence).decode()
    scripts = configparser.ConfigParser()
    scripts.read_string(wheel.read(licence.partition("/")[0] + "/entry_points.txt").decode())
    assert dict(scripts["console_scripts"]) == {"gt": "gt.cli:main"}


def test_the_wheel_asks_for_no_older_torch(metadata: email.message.Message) -> None:
    (need,) = (need for need in metadata.get_all("Requires-Dist") or [] if need.startswith("torch"))
    assert need == "torch>={}.{}".format(*machine.TESTED_TORCH[0])


def test_the_long_description_has_no_relative_links(metadata: email.message.Message) -> None:
    text = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown" and text.strip().startswith("# ")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)]*)", prose) if not target.startswith("http")]
    assert targets == [] and not re.findall(r"^\[[^\]]+\]: (?!http)", prose, re.MULTILINE)
    words = {word for word, target in re.findall(r"\[([^\]]+)\]\(([^)]*)\)", (ROOT / "README.md").read_text())}
    assert [word for word in words if word not in text] == []  # a link became its words


def test_code_keeps_its_brackets_in_the_long_description() -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from setup import without_links
    finally:
        sys.path.remove(str(ROOT))
        sys.modules.pop("setup", None)
    markdown = "See [docs](docs/a.md#b), [torch](https://pytorch.org).\n\n```python\nrows[0](x)\n```\n![plot](a.png) end\n"
    assert without_links(markdown) == "See docs, [torch](https://pytorch.org).\n\n```python\nrows[0](x)\n```\nplot end\n"


def test_an_installed_wheel_finds_its_configs(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "from gt.config import files; print(files.__file__); print(files.read('gt:llama/tp2'))"
    command = [sys.executable, "-c", f"import sys; sys.argv = ['-m']; sys.orig_argv = ['python', '-m', 'gt']; {code}"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stderr
    path, _, text = done.stdout.partition("\n")
    assert path.startswith(str(tmp_path)) and text == (ROOT / "configs/llama/tp2.yaml").read_text() + "\n"


def test_a_ready_config_is_read_by_its_name() -> None:
    found = files.names()
    assert {str(path.relative_to(ROOT / "configs")) for path in found.values()} == {
        str(path.relative_to(ROOT / "configs")) for path in (ROOT / "configs").rglob("*.yaml")
    }
    for name, path in found.items():
        assert load(files.read(f"gt:{name}"), f"gt:{name}").groups == load(path.read_text()).groups


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gt:lama/tp2", "gt:lama/tp2: no ready config is called 'lama/tp2'; did you mean 'llama/tp2'?"),
        ("gt:llama/tp2.yaml", "did you mean 'llama/tp2'?"),
        ("gt:../pyproject", "no ready config is called '../pyproject'; known: dp2, "),
        ("gt:", "no ready config is called ''"),
    ],
)
def test_a_wrong_name_gets_near_ones(name: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        files.read(name)
    assert says in str(error.value)


def test_a_file_that_is_no_config_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match=r"weights\.bin: cannot be read \(it is not text in UTF-8\)"):
        files.read(str(tmp_path / "weights.bin"))
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read \(No such file"):
        files.read(str(tmp_path / "nothing.yaml"))


@pytest.mark.parametrize("path", ["dp4.yaml", "dp4", "configs/dp4.yaml"])
def test_a_path_without_a_file_gets_a_ready_config(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        files.read(path)
    assert str(error.value) == f"{path}: cannot be read (No such file or directory); try gt:dp4, a ready config"


def test_gt_config_may_name_a_ready_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GT_CONFIG", "gt:dp2")

    def step() -> None:
        with gt.signal.context("pp_stage0"):
            (torch.ones(4, 4, device="remote") * 2).sum()

    assert gt.plan(step).body["workers"] == 2
    assert gt.plan(step, config="gt:dp4").body["workers"] == 4


def test_versions_of_torch_that_were_not_tested_are_named() -> None:
    assert machine.untested("2.11.0") == machine.untested("2.13.1+cu130") == ""
    for version in ("2.10.2", "2.14.0a0+git1a2b", "3.0.0", "nightly"):
        said = machine.untested(version)
        assert said.startswith(f"torch is {version}, and GT was tested with 2.11 to 2.13")


def test_a_newer_torch_warns_once_at_the_line_that_imports_gt() -> None:
    code = (
        "import warnings, torch\ntorch.__version__ = '2.99.0'\n"
        "with warnings.catch_warnings(record=True) as caught:\n    warnings.simplefilter('always')\n"
        "    import gt\n    import gt.api\n    gt.make_device()\n"
        "print([(w.filename, w.lineno, w.category.__name__, str(w.message)[:18]) for w in caught])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=limit(60))
    assert done.stdout == "[('<string>', 5, 'UserWarning', 'torch is 2.99.0, a')]\n", done.stderr


def test_public_names_are_the_same_for_checkers_and_at_run_time() -> None:
    tree = ast.parse((ROOT / "gt/__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    declared = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, f"{alias.name}: `as` makes it public"
            declared[alias.name] = getattr(__import__(node.module, fromlist=[alias.name]), alias.name)
    assert {*declared, "__version__"} == set(gt.__all__) <= set(dir(gt))
    assert [name for name, value in declared.items() if value is not getattr(gt, name)] == []


def test_a_checker_sees_the_types_of_public_names(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    lines = [
        "import gt",
        "reveal_type(gt.cpu_workers)",
        "reveal_type(gt.signal.context)",
        "reveal_type(gt.OpFailed)",
        "gt.cpu_wrkers(2)",
        "@gt.compile",
        "def step(x: int) -> str: return ''",
        "reveal_type(step(1))",
        "@gt.compile(schedule='1f1b')",
        "def scheduled(x: int) -> str: return ''",
        "scheduled('a')",
        "reveal_type(scheduled.explain())",
    ]
    (tmp_path / "user.py").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "pyproject.toml"]
    command += ["--no-error-summary", "--follow-imports", "silent", "--cache-dir", str(tmp_path / "cache")]
    command.append(str(tmp_path / "user.py"))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(100))
    said = {int(line.split(":")[1]): line for line in done.stdout.splitlines()}
    config = "config: str | os.PathLike[str] | typing.Mapping[str, Any] | None ="
    assert f'"def (n: int, {config}, *, name: bool =' in said[2], done.stdout + done.stderr
    assert "gt.client.groups.group_context.context" in said[3] and "error" not in said[3], said[3]
    assert "gt.errors.OpFailed" in said[4]
    assert 'has no attribute "cpu_wrkers"' in said[5], "a misspelt name is an error, and not Any"
    assert '"str"' in said[8] and 'expected "int"' in said[11] and "TextReport" in said[12], done.stdout
    assert set(said) == {2, 3, 4, 5, 8, 11, 12}, "nothing else is wrong with this program"


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")


def test_the_site_has_every_page_in_its_navigation_and_no_dead_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "PAGES", tmp_path / "docs")
    site.main()
    files = {path.name: path for path in site.PAGES.iterdir() if path.is_file()}
    pages = set(files)
    assert pages == {"index.md", "changelog.md", "api.md", *(path.name for path in (ROOT / "docs").glob("*.md"))}
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert sorted(re.findall(r": (\w+\.md)$", navigation, re.MULTILINE)) == sorted(pages), "nav in mkdocs.yml: each page once"
    prose = {path.name: re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.M) for path in files.values()}
    headings = {page: set(map(slug, re.findall(r"^#+ (.*)", text, re.MULTILINE))) for page, text in prose.items()}
    dead = []
    for page, text in prose.items():
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
            if target.startswith("pictures/") and (site.PAGES / target).is_file():
                continue
            if (target or page) not in pages or (anchor and anchor not in headings[target or page]):
                dead.append(f"{page} -> {target}#{anchor}")
        if page != "api.md":  # `[a][b]` in prose is a reference to another page's name: the strict build ends there
            dead += [f"{page}: {line}" for line in re.sub(r"`[^`\n]*`", "", text).splitlines() if "][" in line]
    assert dead == []


def test_the_python_api_has_every_public_name_with_a_docstring() -> None:
    listed = set(re.findall(r"^::: gt\.(\w+)$", site.api(), re.MULTILINE))
    torchs = {"nn", "no_grad", "optim", "cat", "stack"}
    torchs |= {"bfloat16", "bool", "float16", "float32", "float64", "int32", "int64"}
    made = {"arange", "empty", "eye", "full", "ones", "rand", "randint", "randn", "tensor", "zeros"}
    made |= {f"{name}_like" for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")}
    assert listed == set(gt.__all__) - torchs - made - {"device", "__version__"}


def test_the_citation_and_the_changelog_name_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == gt.__version__ and citation["license"] == "BSD-3-Clause"
    assert f"## {gt.__version__}" in (ROOT / "CHANGELOG.md").read_text()
