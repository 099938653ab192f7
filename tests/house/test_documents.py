"""The documents are true: their Python and shell lines run, and their tables and generated pages agree with the code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT
from tests.helpers.limits import limit

DEMO = ROOT / "examples" / "tuning_demo"
SHOWN = ("quickstart", "signal_groups", "debugging", "programs", "schedules", "plan", "models", "sharded", "hosts")
WITH_PYTHON = ("README.md", *(f"docs/{page}.md" for page in SHOWN))
LIBRARIES = "docs/libraries.md"  # runs in a process of its own: its workers import a module of the page
WITH_SHELL = (*WITH_PYTHON, "examples/tuning_demo/README.md")


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


def commands(document: str) -> Iterator[str]:
    """Shell commands, one a line or between semicolons, without comments."""
    for language, text in blocks(document):
        if language == "bash":
            for line in text.splitlines():
                yield from filter(None, (part.strip() for part in line.partition("  #")[0].split(";")))


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

    def workers(n: int, config: str = "") -> None:
        gt.connect(server.address, config=config, token=server.token)

    for name in ("cpu_workers", "gpu_workers"):
        monkeypatch.setattr(gt, name, workers, raising=False)
    monkeypatch.setenv("GT_SERVER", server.address)
    monkeypatch.setenv("GT_TOKEN", server.token)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_of_other_libraries_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    program(LIBRARIES, tmp_path)
    said = re.findall(r"# -> (.*)", (ROOT / LIBRARIES).read_text())
    assert run(str(tmp_path / "train.py")).splitlines() == said


@pytest.mark.parametrize("document", WITH_PYTHON)
def test_a_documents_python_runs_and_prints_what_it_says(document: str, shared: Path) -> None:
    """Blocks in order, each a program of its own; the YAML above one is its sharding.yaml; `# -> x` is a printed line."""
    import gt
    from gt.config.load import load

    ran = 0
    for language, text in blocks(document):
        if language == "yaml":
            (shared / "sharding.yaml").write_text(load(text).text)
        if language != "python":
            continue
        path, said = shared / name_of(text), io.StringIO()
        path.write_text(text)
        with contextlib.redirect_stdout(said):
            exec(compile(text, str(path), "exec"), {"__name__": "__main__", "gt": gt})
        assert re.findall(r"# -> (.*)", text) in ([], said.getvalue().splitlines()), text
        ran += 1
        gt.shutdown()
    assert ran


# ---- shell lines

ELSEWHERE = {  # shell lines of the documents that do what another test does
    "make (demo|test|tiny|check)": "the machine that runs the tests",
    r"pip install '?\.(\[gpu\])?'?": "the install of that machine",
    r"(GT_VERBOSE=1 )?(GT_CONFIG=\S+ +)?python examples/tuning_demo/train_simple.py( --check| --steps 5)?": (
        "test_the_demo_equals_one_process, and each config in test_parity.py"
    ),
    r"python examples/tuning_demo/train.py --connect localhost:\d+": "test_the_demo_by_hand",
    r"GT_INSTRUCTION_LOG=/tmp/trace.log python examples/tuning_demo/train_simple.py": "test_the_log_and_its_greps",
    r"python benchmarks/bench_dispatch.py": "a benchmark",
    r"gt (plan|trace) .*": "test_plan.py and test_trace.py",
}
BY_HAND = r"python -m gt.(server|worker)\b[^~]*|GT_SERVER=localhost:\d+ python \w+.py|ps aux \| grep gt.worker"
WITH_TOKEN = r".*~/\.gt-token.*"
SLOW = re.compile(r"waiting for the server at \S+: .*\n")  # what a program says where workers take more than three seconds
LOGGED = r"GT_\w+=\S+ python program.py|grep .* /tmp/trace.log"


def test_every_shell_line_of_the_documents_is_run_by_a_test() -> None:
    known = [re.compile(pattern) for pattern in (*ELSEWHERE, BY_HAND, WITH_TOKEN, LOGGED)]
    for document in WITH_SHELL:
        for command in commands(document):
            assert any(pattern.fullmatch(command) for pattern in known), f"{document}: nothing runs {command!r}"


def test_server_workers_and_program_by_hand(tmp_path: Path) -> None:
    """The three shells of the quickstart, on a free port."""
    program("docs/quickstart.md", tmp_path)
    lines = [c for c in commands("docs/quickstart.md") if re.fullmatch(BY_HAND, c)]
    assert [line.split("gt.")[-1].split()[0] for line in lines[:2]] == ["server", "worker"] and len(lines) == 3

    def shell(line: str, **pipes: Any) -> subprocess.Popen:
        return subprocess.Popen(["bash", "-c", f"exec env {line}"], cwd=tmp_path, env=environment(), text=True, **pipes)

    server = shell(lines[0].replace("12345", "0"), stdout=subprocess.PIPE)
    try:
        port = server.stdout.readline().strip().rpartition(":")[2]
        workers = [shell(lines[1].replace("12345", port), stderr=subprocess.PIPE) for _ in range(2)]
        asking = shell(lines[2].replace("12345", port), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        done = asking.communicate(timeout=limit(60))
        assert done[0] == "4.0\n" and SLOW.sub("", done[1]) == "", [done, *(w.poll() for w in workers)]
        shown = shell("bash -c 'ps aux | grep gt.worker'", stdout=subprocess.PIPE).communicate(timeout=limit(20))[0]
        assert len([line for line in shown.splitlines() if f"-p {port}" in line]) >= 2, shown
    finally:
        server.terminate()
        assert server.communicate(timeout=limit(20))[0] == ""
    for worker in workers:
        said = worker.communicate(timeout=limit(20))[1].splitlines()
        assert worker.returncode == 0 and len(said) == 2 and said[1].startswith("gt worker: connected as w")


def test_server_worker_and_program_with_a_token(tmp_path: Path) -> None:
    """The quickstart's lines for other addresses, on a free port of this machine; `gt` is the module of that name."""
    program("docs/quickstart.md", tmp_path)
    key, server, worker, client = (c for c in commands("docs/quickstart.md") if re.fullmatch(WITH_TOKEN, c))
    port = "0"

    def shell(line: str, **pipes: Any) -> subprocess.Popen:
        for name, value in (("~/.gt-token", "key"), ("server.example", "localhost"), ("12345", port)):
            line = line.replace(name, value)
        return subprocess.Popen(["bash", "-c", f"exec env {line}"], cwd=tmp_path, env=environment(), text=True, **pipes)

    made = shell(key.replace("gt key", "python -c 'import sys; from gt.cli import main; sys.exit(main())' key"), stdout=-3)
    assert made.wait(limit(60)) == 0 and (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    serving = shell(server, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        port = serving.stdout.readline().strip().rpartition(":")[2]
        working = shell(worker, stderr=subprocess.PIPE)
        done = shell(client, stdout=subprocess.PIPE, stderr=subprocess.PIPE).communicate(timeout=limit(60))
        assert done[0] == "4.0\n" and SLOW.sub("", done[1]) == "", done
        without = shell(client.replace("GT_TOKEN=", "GT_UNSET="), stdout=-3, stderr=subprocess.PIPE)
        assert "wants a token: set GT_TOKEN" in without.communicate(timeout=limit(60))[1]
    finally:
        serving.terminate()
        assert serving.communicate(timeout=limit(20)) == ("", "")
    assert working.wait(limit(20)) == 0
    working.stderr.close()


def test_the_log_and_its_greps(tmp_path: Path) -> None:
    """The debugging page's program, each of its greps finding something, and its excerpt as the log has it."""
    program("docs/debugging.md", tmp_path)
    lines = [c for c in commands("docs/debugging.md") if re.fullmatch(LOGGED, c)]
    trace = tmp_path / "trace.log"
    env = environment(GT_VERBOSE="1")
    for line in lines[:1] + [line for line in lines if line.startswith("grep")]:
        command = line.replace("/tmp/trace.log", str(trace))
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=limit(60))
        assert done.returncode == 0 and done.stdout, f"{command}\n{done.stderr}"
        if not line.startswith("grep"):
            assert "gt.worker" in done.stderr and "Traceback" not in done.stderr, done.stderr
    excerpt = dict(blocks("docs/debugging.md"))["text"]
    logged = {plain(line) for line in trace.read_text().splitlines()}
    assert [line for line in excerpt.splitlines() if plain(line) not in logged] == []


def plain(line: str) -> str:
    """A line of the log without time and number, folders, and tensors' numbers."""
    return re.sub(r"%\d+", "%", re.sub(r"/\S*/", "", " ".join(line.split()[2:])))


# ---- tables and generated pages


@pytest.mark.parametrize("page", ["protocol.md", "environment.md"])
def test_generated_pages_are_what_the_code_says(page: str) -> None:
    from tools.docs import PAGES

    assert (ROOT / "docs" / page).read_text() == PAGES[page](), "run `python -m tools.docs`, and commit what it wrote"


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
    for document in (*WITH_SHELL, *(f"docs/{page}" for page in pages)):
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text()):
            assert ((ROOT / document).parent / link).exists(), f"{document} leads to {link}, which is not there"


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
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
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
