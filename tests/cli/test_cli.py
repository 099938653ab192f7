"""The command `gt` as a process: which commands start without torch or anything else, one name in help, clear usage errors."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import gt
from gt.wire.socket import PORT
from tests.helpers import ROOT
from tests.helpers.limits import limit

SCRIPT = "import sys\nfrom gt.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"  # as pip writes it
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "GT_SERVER": "", "GT_CONFIG": ""}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The console script, as an installation has it."""
    path = tmp_path_factory.mktemp("bin") / "gt"
    path.write_text(SCRIPT)
    return str(path)


def ran(*command: str, options: tuple[str, ...] = (), code: int = 0, **changes: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, *options, *command], env={**ENVIRONMENT, **changes}, capture_output=True, text=True, timeout=limit(60)
    )
    assert done.returncode == code, done.stderr
    return done


def imported(*command: str) -> set[str]:
    """Modules that a command imports."""
    lines = ran(*command, options=("-X", "importtime")).stderr.splitlines()
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}


COMMANDS = ("--help", "--version", "version", "env", "server --help", "worker --help", "doctor --help")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_start_without_torch(command: str, script: str) -> None:
    for way in ((script,), ("-m", "gt")):
        found = imported(*way, *command.split())
        assert "gt.cli" in found and not {"torch", "gt.client.device.register"} & found


def test_a_users_program_has_the_device_whatever_its_arguments_are() -> None:
    code = "import sys; sys.argv = ['train.py', '-m', 'gt']; import gt, torch; print(torch.device('remote').type)"
    assert ran("-c", code, "-m", "gt.server").stdout == "remote\n"


@pytest.mark.parametrize("command", ["server", "worker"])
def test_a_command_has_one_name_however_it_is_started(command: str, script: str) -> None:
    ways = ((script, command), ("-m", "gt", command), ("-m", f"gt.{command}"))
    (text,) = {ran(*way, "--help", COLUMNS="80").stdout for way in ways}
    assert text.startswith(f"usage: gt {command} [-h]")


def test_the_version_names_gt_torch_and_python(script: str) -> None:
    torch = importlib.metadata.version("torch")
    python = ".".join(map(str, sys.version_info[:3]))
    want = f"gt {gt.__version__} (torch {torch}, Python {python})\n"
    assert ran(script, "--version").stdout == ran("-m", "gt", "version").stdout == want


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("command", ["--version", "--help", "schema", "env"])
def test_a_reader_that_ends_first_is_no_error(command: str, buffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ways = {"env": {**ENVIRONMENT, "PYTHONUNBUFFERED": buffered}, "stdout": writer, "stderr": subprocess.PIPE}
    done = subprocess.run([sys.executable, "-m", "gt", command], **ways, text=True, timeout=limit(60))
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_doctor_says_what_is_missing_where_nothing_is_installed(script: str) -> None:
    lines = ran(script, "doctor", options=("-S",), code=1).stdout.splitlines()
    assert lines[0].startswith("ok       python")
    missing = {line.split()[1]: line for line in lines if line.startswith("missing")}
    assert set(missing) == {"pyzmq", "msgpack", "pyyaml", "numpy", "torch"}
    assert missing["torch"].endswith("not installed: pip install torch")


def test_the_doctor_says_why_torch_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: no such file')")
    lines = ran("-m", "gt", "doctor", code=1, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}").stdout.splitlines()
    (line,) = (line for line in lines if line.split()[1] == "torch")
    assert line.startswith("missing") and "cannot be imported: OSError: libtorch.so: no such file" in line


@pytest.mark.parametrize("command", ["plan", "trace", "trace -o out.json"])
def test_a_script_that_is_left_out_is_asked_for_and_its_arguments_are_not(command: str, script: str) -> None:
    said = ran(script, *command.split(), code=2).stderr.splitlines()
    assert said[-1] == f"gt {command.split()[0]}: error: the following arguments are required: script.py"


def test_plan_makes_the_device_for_a_script_and_passes_its_arguments_on(script: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch, gt\nprint(sys.argv[1:], (torch.ones(4, device='remote') * 2).sum().item())\nsys.exit(1)\n"
    )
    done = ran(script, "plan", str(program), "--steps", "3")
    ended, whole = done.stderr.splitlines()[-2:]
    assert ended.endswith("program.py ended with exit code 1: a check of values, which are 0 here, may be the reason")
    assert whole == "gt plan: the plan is complete"
    assert "['--steps', '3'] 0.0" in done.stderr and "1 read of values gave 0" in done.stdout


def test_trace_returns_the_scripts_exit_code(script: str, tmp_path: Path) -> None:
    program, out = tmp_path / "program.py", tmp_path / "out.json"
    program.write_text("import sys, gt\ngt.cpu_workers(1)\nprint(gt.ones(4).sum().item())\nsys.exit(3)\n")
    done = ran(script, "trace", "-o", str(out), str(program), code=3)
    assert done.stderr.splitlines()[-1] == f"gt trace: {program} ended with exit code 3" and out.exists()


@pytest.mark.parametrize("behind", [("-o", "x.json"), ("3", "--output=x.json")])
def test_options_behind_a_traced_script_are_its_own_and_a_misplaced_one_is_told(
    behind: tuple[str, ...], script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text("import sys\nprint(sys.argv[1:])\n")
    told, printed, _ = ran(script, "trace", "program.py", *behind, code=1).stderr.splitlines()
    option = " ".join(arg for arg in behind if arg != "3")
    right = f"gt trace {option} program.py{' 3' if '3' in behind else ''}"
    assert told == f"gt trace: program.py gets {option}, and the trace is written to trace.json: else `{right}`"
    assert printed == str([*behind])
    assert len(ran(script, "trace", "-o", "y.json", "program.py", *behind, code=1).stderr.splitlines()) == 2


def test_a_trace_in_the_place_of_the_script_is_refused(script: str) -> None:
    said = ran(script, "trace", "out.json", "program.py", code=2).stderr.splitlines()[-1]
    assert said == "gt trace: error: out.json is no program: for a trace in that file put -o before it"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("plam", "gt: no command 'plam'; did you mean 'plan'?"),
        ("server --heartbeat -1", "argument --heartbeat: got '-1', want a number above 0"),
        ("server --max-workers two", "argument --max-workers: got 'two', want a whole number above 0"),
        ("worker --wait nan", "argument --wait: got 'nan', want a number above 0"),
        ("run --workers -1", "argument --workers: got '-1', want a whole number above 0"),
        ("plan --workers -1 x.py", "argument --workers: got '-1', want a whole number above 0"),
        ("run --hosts= x.py", "ssh names no host"),
        ("run .", "gt run: . is a folder, want a program in it"),
    ],
)
def test_a_wrong_command_is_refused_on_standard_error(
    command: str, says: str, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    done = ran(script, *command.split(), code=2)
    assert says in done.stderr and done.stdout == ""


def test_a_plan_says_an_error_once_and_which_options_the_script_gets(script: str, tmp_path: Path) -> None:
    program = tmp_path / "x.py"
    program.write_text("import gt\ngt.cpu_workers(1, {'a': {'workers': [0]}})\n")
    (tmp_path / "b.yaml").write_text("b: {workers: [0, 1]}\n")
    said = ran(script, "plan", "--workers", "1", "--config", str(tmp_path / "b.yaml"), str(program), "--json", code=1).stderr
    assert said.startswith(f"gt plan: {program} gets --json: options of gt plan itself stand before {program}\n")
    assert said.count("names worker 1") == 1 and said.splitlines()[-1].startswith("gt plan: b (")


@pytest.mark.parametrize("command", ["plan", "trace"])
def test_a_script_that_is_not_there_is_named(command: str, script: str) -> None:
    assert ran(script, command, "nosuch.py", code=1).stderr.startswith(f"gt {command}: there is no file nosuch.py in ")


def waiting(*options: str, **changes: str) -> str:
    """The first line of a worker that has no server."""
    command = [sys.executable, "-m", "gt", "worker", "--backend", "numpy", *options]
    with subprocess.Popen(command, env={**ENVIRONMENT, **changes}, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            return process.stderr.readline()
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    ("options", "server", "address"),
    [
        ((), "", f"localhost:{PORT}"),
        ((), "127.0.0.1:7", "127.0.0.1:7"),
        (("-p", "9"), "127.0.0.1:7", "127.0.0.1:9"),
        (("--host", "localhost", "-p", "9"), "no address", "localhost:9"),
    ],
)
def test_a_worker_looks_where_its_options_or_the_environment_say(options: tuple[str, ...], server: str, address: str) -> None:
    assert waiting(*options, GT_SERVER=server) == f"gt worker: waiting for the server at {address}; Ctrl-C ends the wait\n"


def test_a_worker_refuses_what_is_no_address() -> None:
    assert "'localhost:0' is not an address: want host:port" in ran("-m", "gt", "worker", "-p", "0", code=2).stderr
    assert "GT_SERVER is 'nowhere', want host:port" in ran("-m", "gt", "worker", code=2, GT_SERVER="nowhere").stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--device", "foo"), "no device is called 'foo'"),
        (("--device", "meta"), "no device is called 'meta'"),
        (("--backend", "numpy", "--device", "cuda:0"), "the numpy engine runs on the cpu, not on 'cuda:0'"),
        (("--library", "no_such_library"), "the library 'no_such_library'"),
    ],
)
def test_a_worker_refuses_its_options_before_it_waits(options: tuple[str, ...], said: str) -> None:
    heard = ran("-m", "gt", "worker", *options, "-p", str(PORT), code=1).stderr
    assert heard.startswith(f"gt worker: {said}") and heard.count("\n") == 1


def test_server_and_worker_have_the_same_port_by_default() -> None:
    from gt.server import parser

    assert parser().parse_args([]).port == PORT


def test_a_numpy_worker_of_the_script_has_no_torch(script: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        command = [sys.executable, "-X", "importtime", script, "worker", "--backend", "numpy", "--wait", "0.1", "-p", port]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=limit(60))
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 1 and "gt.worker.loop" in names and "torch" not in names
