"""The documents are true: their Python and shell lines run, and their tables and generated pages agree with the code."""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, longer
from tests.helpers.limits import limit
from tests.helpers.processes import unhurried

DEMO = ROOT / "examples" / "tuning_demo"
GENERATED = ("ops", "protocol", "environment")
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")) if path.stem not in GENERATED))
LIBRARIES = "docs/libraries.md"  # runs in a process of its own: its workers import a module of the page
APART = {LIBRARIES, "docs/observe.md"}  # tests of their own run these: this file, and tests/observe/test_observe_page.py
LONGER = ("CONTRIBUTING.md", *(f"examples/{example}/README.md" for example in ("gpt2", "mesh", "strategies", "tuning_demo")))
WITH_SHELL = tuple(page for page in PAGES if page not in {"docs/gpus.md", "docs/security.md"}) + LONGER[-1:]


def environment(**env: str) -> dict[str, str]:
    """This process's, without GT's own variables, and without a width that `ps` would cut lines at."""
    ours = ("GT_", "COLUMNS")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(ours) or key == "GT_TEST_RUN"}
    return {**clean, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **env}


def run(*command: str, timeout: float = 100, **env: str) -> str:
    """Standard output of a Python program run at the repository root."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=limit(timeout),
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


# ---- what the documents show


def blocks(document: str) -> list[tuple[str, str]]:
    """(language, text) of every fenced block that names one."""
    return re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / document).read_text(), re.S | re.M)


UNQUOTED = r""";(?=(?:[^"']*["'][^"']*["'])*[^"']*$)"""  # a semicolon


def commands(document: str) -> Iterator[str]:
    """Shell commands, one a line or between semicolons, without comments."""
    for language, text in blocks(document):
        if language == "bash":
            for line in text.replace("\\\n", "").splitlines():
                yield from filter(None, (part.strip() for part in re.split(UNQUOTED, line.partition("  #")[0])))


def name_of(text: str) -> str:
    """The file that a block says it is, in its first line."""
    first = re.match(r"# (\w+\.py)\n", text)
    return first[1] if first else "snippet.py"


def program(document: str, folder: Path) -> None:
    """Lay out the last config before `program.py`, and the named programs of a document, in a folder."""
    for language, text in blocks(document):
        if language == "yaml" and not (folder / "program.py").exists():
            (folder / "sharding.yaml").write_text(text)
        if language == "python":
            (folder / name_of(text)).write_text(text)


@pytest.fixture
def shared(server: Any, session: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder to run snippets in; workers they start are the shared server's."""
    import gt

    def workers(n: int, config: str = "", name: bool = True) -> None:
        gt.connect(server.address, config=config, token=server.token, name=name)

    for name in ("cpu_workers", "gpu_workers"):
        monkeypatch.setattr(gt, name, workers, raising=False)
    monkeypatch.setenv("GT_SERVER", server.address)
    monkeypatch.setenv("GT_TOKEN", server.token)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["train.py", "sparse.py"])
def test_the_page_of_other_libraries_runs_and_prints_what_it_says(name: str, tmp_path: Path) -> None:
    program(LIBRARIES, tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == {"my_ops.py", "train.py", "sparse.py"}
    said = re.findall(r"# -> (.*)", (tmp_path / name).read_text())
    assert said and run(str(tmp_path / name)).splitlines() == said


WITH_PYTHON = [page for page in PAGES if page not in APART and any(language == "python" for language, _ in blocks(page))]
IMPORTS_GT = re.compile(r"^(import .*\bgt\b|from gt\b)", re.M)


@pytest.mark.parametrize("document", WITH_PYTHON)
def test_a_documents_python_runs_and_prints_what_it_says(document: str, shared: Path) -> None:
    """Blocks in order. One that imports gt begins a program, others continue it; the YAML above is its sharding.yaml.

    `# -> x` is a printed line.
    """
    import gt
    from gt.config.load import load

    names: dict[str, Any] = {}
    for language, text in blocks(document):
        if language == "yaml":
            (shared / "sharding.yaml").write_text(load(text).text)
        if language != "python":
            continue
        if IMPORTS_GT.search(text):
            gt.shutdown()
            names = {"__name__": "__main__"}
        assert names, f"{document}: no block before this one imports gt:\n{text}"
        path, printed = shared / name_of(text), io.StringIO()
        path.write_text(text)
        with contextlib.redirect_stdout(printed):
            exec(compile(text, str(path), "exec"), names)
        assert re.findall(r"# -> (.*)", text) in ([], printed.getvalue().splitlines()), text
    gt.shutdown()


NOT_RUN = {  # pages with blocks of `py`, and why these are not run
    "docs/hosts.md": "they need a cluster of Ray",
    "examples/tuning_demo/README.md": "they are lines of model.py",
    "docs/sharing.md": "they need a server with other options; tests/system/test_process_sharing.py has such servers",
}


@pytest.mark.parametrize("document", [*PAGES, *LONGER])
def test_every_block_has_a_language_and_those_that_are_not_run_say_why(document: str) -> None:
    """Blocks of `python` run in a test. `py` is not run: its syntax and its names are tested. `text` is output."""
    opened = re.findall(r"^```([^\n]*)\n.*?^```$", (ROOT / document).read_text(), re.S | re.M)
    assert set(opened) <= {"python", "py", "bash", "yaml", "text"}, opened
    not_run = [text for language, text in blocks(document) if language == "py"]
    assert bool(not_run) == (document in NOT_RUN)
    if "lines of" not in NOT_RUN.get(document, ""):
        assert [unknown for text in not_run if (unknown := undefined(text))] == []
    assert document in PAGES or "python" not in opened
    outputs = [text for language, text in blocks(document) if language == "text"]
    assert [text for text in outputs if re.search(r"^(import |from \w+ import |\w+ = \w+[.(])", text, re.M)] == []


def undefined(text: str) -> set[str]:
    """Names that a program uses and nowhere defines."""
    nodes = list(ast.walk(ast.parse(text)))
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    known = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    known |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    return used - known - set(dir(builtins))


def test_the_first_program_is_data_parallel_without_a_file(tmp_path: Path) -> None:
    program("docs/quickstart.md", tmp_path)
    assert "GT_AUTO_SHARD=1 python program.py" in commands("docs/quickstart.md")
    alone, split = (run(str(tmp_path / "program.py"), GT_AUTO_SHARD=value) for value in ("", "1"))
    assert (alone.partition(", ")[2], split.partition(", ")[2]) == ("x on w0\n", "x on w0, w1\n")
    losses = [float(line.split()[1].rstrip(",")) for line in (alone, split)]
    assert abs(losses[0] - losses[1]) < 0.002


# ---- shell lines

ELSEWHERE = {  # shell lines of the documents that do what another test does
    "make (demo|test|tiny|check)": "the machine that runs the tests",
    r"pip install '?\.(\[\w+\])?'?( opentelemetry-sdk)?": "the install of that machine",
    r"(GT_VERBOSE=1 )?(GT_CONFIG=\S+ +)?python examples/tuning_demo/train_simple.py( --check| --steps 5)?": (
        "test_the_demo_equals_one_process, and each config in test_parity.py"
    ),
    r"python examples/tuning_demo/train.py --connect localhost:\d+": "test_the_demo_by_hand",
    r"GT_INSTRUCTION_LOG=/tmp/trace.log python examples/tuning_demo/train_simple.py": "test_the_log_and_its_greps",
    r"python benchmarks/bench_dispatch.py": "a benchmark",
    r"gt (plan|trace) .*": "test_plan.py and test_trace.py",
    "GT_AUTO_SHARD=1 python program.py": "test_the_first_program_is_data_parallel_without_a_file",
    r"GT_MEMORY_LIMIT=4GiB python program.py": "test_memory_limits.py",
    r"gt (top|dashboard|metrics|server) .*": "test_top.py, test_dashboard_run.py and test_prometheus.py",
    r"gt (key|doctor|run)\b.*": "test_cli.py, test_hosts.py and test_job.py",
    r"srun -N3 .*gt doctor --hosts env": "test_hosts.py of tests/cli, with a launcher's variables by hand",
    r"sbatch deploy/slurm/train.sbatch .*": "test_deploy.py, and python -m tests.stress.slurm",
    r"python benchmarks/gpu/bench_hosts.py --json hosts.json": "a benchmark",
}
BY_HAND = r"python -m gt.(server|worker)\b[^~]*|GT_SERVER=localhost:\d+ python \w+.py|ps aux \| grep gt.worker"
WITH_TOKEN = r".*~/\.gt-token.*"
LOGGED = r"GT_\w+=\S+ python program.py|(grep .*|tail -1) /tmp/trace.log"


def test_every_shell_line_of_the_documents_is_run_by_a_test() -> None:
    known = [re.compile(pattern) for pattern in (*ELSEWHERE, BY_HAND, WITH_TOKEN, LOGGED)]
    for document in WITH_SHELL:
        for command in commands(document):
            assert any(pattern.fullmatch(command) for pattern in known), f"{document}: nothing runs {command!r}"


def documented() -> Iterator[tuple[str, list[str]]]:
    """(document, words) of each shell command, without its variables and redirections."""
    for document in (*PAGES, *LONGER):
        for command in commands(document):
            words = shlex.split(re.split(r"[|>]", command)[0])
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            yield document, words


def help_of(command: str) -> str:
    """What `gt COMMAND --help` prints."""
    from gt.cli import main

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        main([command, "--help"])
    return shown.getvalue()


def test_every_option_in_the_documents_exists() -> None:
    """Of gt's commands by their help, of this repository's scripts by their source; behind a script's name they are its own."""
    helps: dict[str, str] = {}
    unknown = []
    for document, words in documented():
        if words[:2] == ["python", "-m"]:
            words = [*words[2].split(".", 1), *words[3:]]
        head, *rest = words
        if head == "gt":
            command, *rest = rest
            where = helps.get(command) or helps.setdefault(command, help_of(command))
            rest = rest[: next((n for n, word in enumerate(rest) if word.endswith(".py")), len(rest))]
        elif head == "tests":
            package = ROOT.joinpath("tests", *rest.pop(0).split("."))
            where = "".join(p.read_text() for p in (package.with_suffix(".py"), *package.glob("*.py")) if p.exists())
        elif head == "python" and rest and (ROOT / rest[0]).is_file():
            folder = (ROOT / rest.pop(0)).parent
            where = "".join(path.read_text() for path in folder.glob("*.py"))
        elif head == "make":
            where, rest = (ROOT / "Makefile").read_text(), [f"{target}:" for target in rest]
        else:
            continue
        options = [word.partition("=")[0] for word in rest if word.startswith("-") or head == "make"]
        unknown += [f"{document}: {' '.join(words)}: {option}" for option in options if option not in where]
    assert unknown == [] and {"server", "worker", "plan", "doctor"} <= set(helps)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts a line of a shell, in a folder of its own. All that still run in the end are killed."""
    made: list[subprocess.Popen] = []

    def start(line: str, **pipes: Any) -> subprocess.Popen:
        command = ["bash", "-c", f"exec env {line}"]
        made.append(subprocess.Popen(command, cwd=tmp_path, env=environment(), text=True, **pipes))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def test_server_workers_and_program_by_hand(tmp_path: Path, shell: Callable[..., subprocess.Popen]) -> None:
    """The three shells of the quickstart, on a free port."""
    program("docs/quickstart.md", tmp_path)
    lines = [c for c in commands("docs/quickstart.md") if re.fullmatch(BY_HAND, c)]
    assert [line.split("gt.")[-1].split()[0] for line in lines[:2]] == ["server", "worker"] and len(lines) == 3
    server = shell(lines[0].replace("12345", "0"), stdout=subprocess.PIPE)
    port = server.stdout.readline().strip().rpartition(":")[2]
    workers = [shell(lines[1].replace("12345", port), stderr=subprocess.PIPE) for _ in range(2)]
    asking = shell(lines[2].replace("12345", port), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    done = asking.communicate(timeout=limit(60))
    assert done[0] == "4.0\n" and unhurried(done[1]) == "", [done, *(w.poll() for w in workers)]
    shown = shell("bash -c 'ps aux | grep gt.worker'", stdout=subprocess.PIPE).communicate(timeout=limit(20))[0]
    assert len([line for line in shown.splitlines() if f"-p {port}" in line]) >= 2, shown
    server.terminate()
    assert server.communicate(timeout=limit(20))[0] == ""
    for worker in workers:
        said = worker.communicate(timeout=limit(20))[1].splitlines()
        assert worker.returncode == 0 and len(said) == 2 and said[1].startswith("gt worker: connected as w")


def test_server_worker_and_program_with_a_token(tmp_path: Path, shell: Callable[..., subprocess.Popen]) -> None:
    """The quickstart's lines for other addresses, on a free port of this machine; `gt` is the module of that name."""
    program("docs/quickstart.md", tmp_path)
    key, server, worker, client = (c for c in commands("docs/quickstart.md") if re.fullmatch(WITH_TOKEN, c))
    port = "0"

    def here(line: str, **pipes: Any) -> subprocess.Popen:
        for name, value in (("~/.gt-token", "key"), ("server.example", "localhost"), ("12345", port)):
            line = line.replace(name, value)
        return shell(line, **pipes)

    made = here(key.replace("gt key", "python -c 'import sys; from gt.cli import main; sys.exit(main())' key"), stdout=-3)
    assert made.wait(limit(60)) == 0 and (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    serving = here(server, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    port = serving.stdout.readline().strip().rpartition(":")[2]
    working = here(worker, stderr=subprocess.PIPE)
    done = here(client, stdout=subprocess.PIPE, stderr=subprocess.PIPE).communicate(timeout=limit(60))
    assert done[0] == "4.0\n" and unhurried(done[1]) == "", done
    without = here(client.replace("GT_TOKEN=", "GT_UNSET="), stdout=-3, stderr=subprocess.PIPE)
    assert "wants a token: set GT_TOKEN" in without.communicate(timeout=limit(60))[1]
    serving.terminate()
    out, err = serving.communicate(timeout=limit(20))
    assert out + unhurried(err) == ""
    assert working.wait(limit(20)) == 0


def test_the_log_and_its_greps(tmp_path: Path) -> None:
    """The debugging page's program, each of its greps finding something, and its excerpt as the log has it."""
    program("docs/debugging.md", tmp_path)
    lines = [c for c in commands("docs/debugging.md") if re.fullmatch(LOGGED, c)]
    trace = tmp_path / "trace.log"
    env = environment(GT_VERBOSE="1")
    for line in lines[:1] + [line for line in lines if line.endswith("/tmp/trace.log")]:
        command = line.replace("/tmp/trace.log", str(trace))
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=limit(60))
        assert done.returncode == 0 and done.stdout, f"{command}\n{done.stderr}"
        if line.startswith("tail"):
            assert re.search(r"SUMMARY +dispatcher \d+ ops, .* 1 errors$", done.stdout), done.stdout
        if line.startswith("GT_"):
            assert "gt.worker" in done.stderr and "Traceback" not in done.stderr, done.stderr
    excerpt = next(text for language, text in blocks("docs/debugging.md") if language == "text")
    logged = {plain(line) for line in trace.read_text().splitlines()}
    assert [line for line in excerpt.splitlines() if plain(line) not in logged] == []


def plain(line: str) -> str:
    """A line of the log without time and number, folders, and tensors' numbers."""
    return re.sub(r"%\d+", "%", re.sub(r"/\S*/", "", " ".join(line.split()[2:])))


# ---- tables and generated pages


@pytest.mark.parametrize("page", ["protocol.md", "environment.md"])
def test_generated_pages_are_what_the_code_says(page: str) -> None:
    from tools.docs import PAGES as WRITTEN

    assert (ROOT / "docs" / page).read_text() == WRITTEN[page](), "run `python -m tools.docs`, and commit what it wrote"


def test_the_protocol_page_explains_every_reserved_number() -> None:
    """Some numbers below FIRST have a comment of several lines above, and none behind."""
    from gt.ir import instr
    from tools.docs import reserved

    rows = {name.strip("`"): (int(number), meaning) for number, name, meaning in reserved()}
    numbers = {name: value for name, value in vars(instr).items() if name.isalpha() and name.isupper() and type(value) is int}
    assert {name: number for name, (number, _) in rows.items()} == numbers
    assert [name for name, (_, meaning) in rows.items() if not meaning] == []


def test_the_table_of_layouts_is_the_tested_one() -> None:
    from tests.dispatcher.sharding.test_plan_layouts import TABLE

    cells: dict[str, list[str]] = {}
    for op, _, _, result, parameter in TABLE:
        cells.setdefault(op.__name__, []).append(f"{result}, {parameter}")
    text = (ROOT / "docs/signal_groups.md").read_text()
    for op, row in cells.items():
        assert f"| {' | '.join(row)} |" in text, f"{op}: {row}"


def test_the_debugging_page_has_every_counter_and_error(one: None) -> None:
    import gt
    from gt.errors import KINDS

    text = (ROOT / "docs/debugging.md").read_text()
    gt.ones(2).sum().item()
    found = gt.stats()
    names = [*KINDS, *gt.inspect(gt.ones(2)), *found["client"], *found["dispatcher"], *found["workers"][0]]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_the_security_page_names_the_ops_that_trust_values() -> None:
    from gt.ir.schema import FILE

    rows = re.findall(r"^\w+\.(\w+)\..* trusts_values\b", FILE.read_text(), re.M)
    section = (ROOT / "docs/security.md").read_text().partition("## Ops that trust index values")[2].partition("\n## ")[0]
    listed = {name for line in section.splitlines() if line[:2] in ("- ", "  ") for name in re.findall(r"`(\w+)`", line)}
    assert rows and listed == set(rows)


def test_documents_are_linked_and_their_links_lead_somewhere() -> None:
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    readme = (ROOT / "README.md").read_text()
    assert [page for page in pages if f"docs/{page}" not in readme] == []
    for document in ("README.md", *LONGER, *(f"docs/{page}" for page in pages)):
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text()):
            assert ((ROOT / document).parent / link).exists(), f"{document} leads to {link}, which is not there"


MAX_WORDS = 25  # words of a sentence
WRITTEN_BY_HAND = (*PAGES, *LONGER)


def sentences(document: str) -> Iterator[str]:
    """Sentences of paragraphs, cells of tables and entries of lists, without fenced blocks and headings. Code is one word."""
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text(), flags=re.S | re.M)
    for part in re.split(r"\n\s*\n|\||\n(?=\s*(?:[-*]|\d+\.) )|^#.*$", text, flags=re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", part))
        yield from re.split(r"(?<=[.!?;:])\s+", plain)


@pytest.mark.parametrize("document", WRITTEN_BY_HAND)
def test_a_sentence_has_one_idea(document: str) -> None:
    assert [s for s in sentences(document) if len(s.split()) > MAX_WORDS] == []


# ---- examples


EXAMPLES = [("quickstart.py", "right: "), ("signal_demo.py", "largest difference"), ("compile_demo.py", "ok\n")]


@pytest.mark.parametrize(("example", "says"), EXAMPLES)
def test_an_example_runs(example: str, says: str) -> None:
    assert says in run(str(ROOT / "examples" / example))


def test_the_demo_is_plain_torch_on_the_cpu(tmp_path: Path) -> None:
    losses = tmp_path / "losses.json"
    run(str(DEMO / "train.py"), "--device", "cpu", "--steps", "6", "--losses", str(losses))
    found = json.loads(losses.read_text())
    assert len(found) == 6 and found[-1] < found[0]


@pytest.mark.slow
@pytest.mark.parametrize("order", longer(["gpipe", "1f1b"], ["1f1b"]))
def test_the_demo_equals_one_process(order: str) -> None:
    out = run(str(DEMO / "train_simple.py"), "--check", "--steps", "2", "--order", order)
    assert re.search(r"^ok: loss .* in 2 steps on 8 workers \(tp 2, pp 4\), largest difference", out, re.M), out


@pytest.mark.slow
def test_the_demo_captured_and_scheduled_equals_one_process() -> None:
    out = run(str(DEMO / "train_simple.py"), "--check", "--steps", "5", "--compile", "--schedule", "zb-h1")
    assert re.search(r"^ok: loss .* in 5 steps on 8 workers", out, re.M), out
    assert "schedule zb-h1: 4 stages, 4 micro-batches" in out and "2 replays" in out, out


@pytest.mark.slow
def test_the_demo_by_hand() -> None:
    config = str(ROOT / "configs" / "tp2pp2.yaml")  # four workers, since each imports torch by itself
    out = run(str(DEMO / "launch.py"), "--workers", "4", "--", "--steps", "2", GT_CONFIG=config)
    assert re.search(r"^ok: loss .* on 4 workers", out, re.M), out


def test_the_orders_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GT_CONFIG", "")  # the script sets it if nobody has
    monkeypatch.syspath_prepend(str(DEMO))
    from train import passes

    text = {order: " ".join(f"{kind}{i}" for kind, i in passes(order, 4, 3)) for order in ("gpipe", "1f1b")}
    assert text["gpipe"] == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert text["1f1b"] == "F0 F1 F2 B0 F3 B1 B2 B3"
    for order in ("gpipe", "1f1b"):
        for stages in (1, 2, 8):
            assert sorted(passes(order, 4, stages)) == [(kind, i) for kind in "BF" for i in range(4)]
