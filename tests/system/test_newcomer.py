"""A newcomer's first errors are one clear sentence with a next step, and a normal end is silent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gt
from gt.config.load import load
from gt.errors import ConfigError, DispatcherLost, ProgramError, SystemFailure
from gt.launch import local
from tests.helpers import ROOT
from tests.helpers.limits import limit
from tests.helpers.processes import unhurried


def said(*command: str, code: int = 2, **env: str) -> str:
    """The one line on stderr (usage aside) of a command that fails with this exit code."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=limit(60)
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("port", ["99999", "-5"])
def test_a_port_that_is_none(port: str) -> None:
    assert "is not a port: want 0 to 65535" in said("gt.server", "-p", port)


@pytest.mark.parametrize("command", [("gt.server", "-p", "0"), ("gt.worker", "-p", "1")])
def test_a_token_file_that_is_not_there(command: tuple[str, ...]) -> None:
    line = said(*command, "--token-file", "/nonexistent")
    assert "--token-file /nonexistent cannot be read: No such file or directory" in line


def test_a_worker_that_cannot_be() -> None:
    worker = ("gt.worker", "-p", "1")
    assert "no engine is named 'nonsense'" in said(*worker, code=1, GT_BACKEND="nonsense")
    assert "no data plane is named 'nonsense'" in said(*worker, code=1, GT_TRANSPORT="nonsense")
    assert "no device is called 'nonsense'" in said(*worker, "--device", "nonsense", code=1)


def test_workers_that_cannot_start_say_why_and_nothing_else(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemFailure, match=r"worker \d died while starting: gt worker: no engine is named 'nonsense'"):
        local.start(1, backend="nonsense")
    assert "Traceback" not in capfd.readouterr().err


def test_a_server_that_a_call_passes_over_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_workers(*args: object, **named: object) -> None:
        raise SystemFailure("none are started here")

    monkeypatch.setattr(local, "start", no_workers)
    monkeypatch.setenv("GT_SERVER", "localhost:5")
    with pytest.raises(SystemFailure, match="none are started here"):
        gt.cpu_workers(1)
    assert "GT_SERVER=localhost:5 is not used" in caplog.text and "gt.connect('localhost:5')" in caplog.text


def test_one_library_is_not_taken_for_a_list_of_its_letters() -> None:
    with pytest.raises(TypeError, match=r"libraries is 'torchvision', want a list of modules, such as \['torchvision'\]"):
        gt.cpu_workers(1, libraries="torchvision")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        (["frobnicate"], 2, "gt: no command 'frobnicate'"),
        (["docter"], 2, "did you mean 'doctor'?"),
        (["--help"], 0, "usage: gt COMMAND"),
        (["doctor", "--help"], 0, "usage: gt doctor"),
        (["env", "--help"], 0, "usage: gt env"),
    ],
)
def test_the_command_line(command: list[str], code: int, text: str, capsys: pytest.CaptureFixture) -> None:
    from gt import cli

    try:
        found = cli.main(command)
    except SystemExit as exit:
        found = exit.code
    shown = capsys.readouterr()
    assert (found, text in (shown.err if code else shown.out)) == (code, True)


@pytest.mark.parametrize("text", ["a:\n  b: 1\n c: 2\n", "a: {b: [0, 1", "a:\n\tb: 1\n"])
def test_yaml_that_is_none_says_where_to_look(text: str) -> None:
    with pytest.raises(ConfigError, match=r"my\.yaml:\d: not YAML: .*; check the indentation"):
        load(text, "my.yaml")


BUSY = """
import torch, gt
gt.cpu_workers(2)
x = torch.randn(400, 400, device="remote")
for _ in range(100):
    x = (x @ x).tanh()
"""
ENDINGS = {"returns": "", "waits": "print(x.sum().item() < 1e9)", "raises": "raise SystemExit(3)"}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_in_silence(ending: str) -> None:
    """Workers that are still busy when their server tells them to stop do not complain of losing it."""
    command = [sys.executable, "-c", BUSY + ENDINGS[ending]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(60))
    assert (done.returncode, unhurried(done.stderr)) == (3 if ending == "raises" else 0, "")


def test_a_dead_dispatcher_is_told_once_by_the_programs_error(capfd: pytest.CaptureFixture) -> None:
    import gt
    from gt import api

    gt.cpu_workers(2, config="")
    gt.ones(3).sum().item()
    children = Path(f"/proc/{(nursery := api._Started.local._process.pid)}/task/{nursery}/children").read_text().split()
    titles = {Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0"): int(pid) for pid in children}
    os.kill(titles[b"gt.server"], signal.SIGKILL)
    with pytest.raises(gt.DispatcherLost):
        for _ in range(1000):
            gt.ones(3).sum().item()
    gt.shutdown()
    assert unhurried(capfd.readouterr().err) == ""


def test_a_wait_for_workers_is_announced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import threading

    from gt.client import session
    from gt.dispatcher.server import Server

    monkeypatch.setattr(session, "FIRST_NOTICE_SECONDS", 0.05)
    monkeypatch.setattr(session, "WELCOME_SECONDS", 0.1)
    server = Server()
    thread = threading.Thread(target=server.run, name="gt-test-server")
    thread.start()
    try:
        with pytest.raises(DispatcherLost):  # as none answers in time, or as none could be reached in time
            session.Session(server.address, wait=0.1)
    finally:
        server.stop()
        thread.join()
    text = rf"waiting for the server at {server.address}: it (is not up yet|has 0 of the 1 workers that the program wants)"
    assert re.search(text, caplog.text)


def test_a_connection_that_fails_leaves_the_session_as_it_was(session, tmp_path: Path) -> None:
    import socket

    import torch

    session()
    x = torch.ones(3, device="remote") * 2
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("a: {nonsense: 3}\n")
    with socket.socket() as nobody:  # has a port, and never listens there
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        for given, kind in (({"address": "nonsense"}, DispatcherLost), ({"address": address, "wait": 0.1}, DispatcherLost)):
            with pytest.raises(kind):
                gt.connect(**given)
            assert x.sum().item() == 6
        with pytest.raises(ConfigError):
            gt.connect(address, config=str(wrong))
    assert x.sum().item() == 6


def test_a_connection_to_another_server_ends_the_session(session) -> None:
    import torch

    from tests.helpers.serving import serving

    session()
    x = torch.ones(3, device="remote")
    with serving(1, backend="torch") as other:
        gt.connect(other.address)
        assert torch.ones(4, device="remote").sum().item() == 4
        with pytest.raises(ProgramError, match="belongs to a session that has ended"):
            x.sum()
        gt.shutdown()


def test_tensors_of_an_ended_session_say_so(session) -> None:
    import torch

    import gt

    session()
    old = gt.ones(2, 3)
    model = torch.nn.Linear(3, 3).to("remote")
    old.sum().item()
    gt.shutdown()
    with pytest.raises(ProgramError, match=r"a tensor of shape \[2, 3\] belongs to a session that has ended"):
        old.tolist()
    session()
    new = gt.ones(2, 3)
    for use in (
        lambda: old + 1,
        lambda: new + old,
        lambda: new.copy_(old),
        lambda: torch.stack([new, old]),
        lambda: model(new),
        lambda: old.detach().mul_(2),
        lambda: torch.nn.functional.scaled_dot_product_attention(old, old, old),
        lambda: gt.inspect(old),
        lambda: repr(old),
    ):
        for _ in range(2):
            with pytest.raises(ProgramError, match="belongs to a session that has ended"):
                use()
    assert (new + 1).sum().item() == 12


@pytest.mark.parametrize("captured", [False, True])
def test_one_failure_is_told_once_however_long_nobody_looked(session, captured: bool) -> None:
    """Each step's loss fails, of its label and of what was computed from the last."""
    import torch

    import gt

    session()
    model = torch.nn.Linear(4, 3).to("remote")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    run = gt.compile(step) if captured else step
    x, good, bad = torch.randn(5, 4).to("remote"), torch.tensor([0, 1, 2, 1, 0]), torch.tensor([0, 1, 2, 3, 0])
    for labels in [good] * 4 + [bad] * 6:
        loss = run(x, labels if captured else labels.to("remote"))
    with pytest.raises(gt.OpFailed, match=r"nll_loss.*Target 3 is out of bounds"):
        torch.remote.synchronize()
    assert all(torch.ones(3, device="remote").sum().item() == 3 for _ in range(3))
    with pytest.raises(gt.OpFailed, match="Target 3"):  # what was computed from it fails as before
        loss.item()
    assert torch.ones(3, device="remote").sum().item() == 3


def test_a_failure_for_which_there_is_no_room_for_a_placeholder_is_told_once(session) -> None:
    import torch

    import gt

    session()
    with pytest.raises(gt.OpFailed, match=r"out of memory: it needs 16384.0 GiB, and .* are left"):
        torch.empty(1 << 42, device="remote").sum().item()
    assert torch.ones(3, device="remote").sum().item() == 3


def test_a_misspelled_group_is_told_to_the_program(session, caplog: pytest.LogCaptureFixture) -> None:
    import torch

    import gt

    session("tp: {workers: [0, 1]}\ntp_colpar: {workers: [0, 1]}\n")
    for _ in range(2):
        with gt.signal.context("tp_colpra"):
            assert torch.ones(3, device="remote").sum().item() == 3
    (text,) = [record.getMessage() for record in caplog.records if "tp_colpra" in record.getMessage()]
    assert "test_newcomer.py:" in text
    assert text.endswith("the config has no group 'tp_colpra': ops run as outside it; did you mean 'tp_colpar'?")


@pytest.mark.parametrize("device", ["remote:1", "remote:7"])
def test_there_is_one_remote_device(session, device: str) -> None:
    import torch

    session()
    assert torch.ones(2, device="remote:0").sum().item() == 2
    here, model, moved = torch.ones(2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).to("remote")
    there = moved.weight.detach()
    assert there.to("remote:0") is there
    makes = (lambda: torch.ones(2, device=device), lambda: here.to(device), lambda: model.to(device))
    for make in (*makes, lambda: there.to(device), lambda: there.to(device, torch.float64), lambda: moved.to(device)):
        with pytest.raises(RuntimeError, match=f"there is no {device}: all workers are one device"):
            make()


def test_a_ctrl_c_ends_the_demo_with_one_line() -> None:
    program = ROOT / "examples" / "tuning_demo" / "train_simple.py"
    command = [sys.executable, str(program), "--steps", "100000"]
    demo = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with demo:
        assert demo.stdout is not None
        try:
            assert any(line.startswith("step   2") for line in demo.stdout)
            os.killpg(demo.pid, signal.SIGINT)
            _, err = demo.communicate(timeout=limit(60))
        finally:
            demo.kill()
    assert (demo.returncode, err.splitlines()[-1]) == (130, "train_simple.py: interrupted") and "Traceback" not in err
