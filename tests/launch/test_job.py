"""Jobs of several processes on this machine: under torchrun, by hand, and on hosts behind an ssh that is a script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gt
from gt.errors import ConfigError, SystemFailure
from gt.launch import job
from gt.launch.launchers import JobPlace
from gt.launch.ssh import HostEntry
from tests.helpers import ROOT
from tests.helpers.limits import limit
from tests.helpers.processes import free_ports, of_the_server, started, unhurried, wait_until

TOKEN = "a token of this test, 0123456789"
SUM = """
import sys, torch, gt
x = torch.ones(4, device="remote") + 1
print("sum", x.sum().item(), [worker["name"] for worker in gt.stats()["workers"]], flush=True)
"""
CHECKPOINT = """
import signal, sys, threading, torch, gt
gt.connect("env")
x = torch.ones(4, device="remote")
told = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: told.set())
print("ready", flush=True)
while not told.wait(0.1):
    pass
print("saved", (x + 1).sum().item(), flush=True)
sys.exit(3)
"""
SSH = """#!/bin/bash
while [[ "$1" == -o ]]; do shift 2; done
host=$1; shift
[[ $host == gone* ]] && { echo "ssh: connect to host $host: No route to host" >&2; exit 255; }
SSH_CONNECTION="127.0.0.1 5 127.0.0.1 22" exec bash -c "$*"
"""


def of_this_test() -> dict[int, str]:
    """Living processes but for those of the run's shared server."""
    return {pid: line for pid, line in started().items() if pid not in of_the_server}


def environment(**variables: str) -> dict[str, str]:
    """Workers of NumPy start faster; nothing of a launcher around the tests is passed on."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "RANK", "WORLD_SIZE", "MASTER_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "GT_BACKEND": "numpy", "OMP_NUM_THREADS": "1", "GT_TOKEN": TOKEN, **variables}


def python(*args: str, **variables: str) -> subprocess.Popen:
    command = [sys.executable, *map(str, args)]
    return subprocess.Popen(
        command, env=environment(**variables), cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def end(*processes: subprocess.Popen) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each, within a time limit."""
    try:
        texts = [process.communicate(timeout=limit(90)) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]


def script(folder: Path, text: str, name: str = "program.py") -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("local_rank", "local_size", "variable", "workers", "gpu"), [
    (0, 1, "", 4, None),  # alone on its host: a worker for each GPU
    (2, 4, "", 1, "6"),  # one of four: the GPU of its local rank
    (5, 6, "", 1, ""),  # more processes than GPUs
    (0, 0, "", 1, "4"),  # unknown
    (0, 1, "2", 2, None),
    (1, 2, "2", 2, "6,7"),  # several workers of each process
    (0, 0, "4", 4, "4,5,6,7"),
])  # fmt: skip
def test_gpus_and_workers_of_a_process(
    local_rank: int, local_size: int, variable: str, workers: int, gpu: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job.machine, "gpus", lambda: ["4", "5", "6", "7"])
    monkeypatch.setenv("GT_WORKERS", variable)
    at = JobPlace("srun", local_rank, 12, local_rank, local_size, "h0", 1)
    assert job.workers_of(at) == workers
    assert job._own_gpu(at).get("CUDA_VISIBLE_DEVICES") == gpu


def test_torchrun_with_two_agents_of_two_processes(tmp_path: Path) -> None:
    """The port of the server is published in the agents' store; indices of workers are ranks."""
    program = script(tmp_path, SUM + "sys.exit(0)\n")
    endpoint = f"127.0.0.1:{free_ports()[0]}"
    common = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=gt")
    common += (f"--rdzv-endpoint={endpoint}", "--local-addr=127.0.0.1", "--no-python", sys.executable, "-m", "gt", "run")
    results = end(*(python(*common, program) for _ in range(2)))
    assert [code for code, _, _ in results] == [0, 0], results
    said = [line for _, out, _ in results for line in out.splitlines() if line.startswith("sum")]
    assert said == ["sum 8.0 ['w0', 'w1', 'w2', 'w3']"], results


def ranks(size: int, program: Path, *args: str) -> list[subprocess.Popen]:
    """The processes of a job by hand, the last rank first."""
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_ports()[0])}
    return [python(*args, program, RANK=str(rank), **place) for rank in reversed(range(size))][::-1]


def test_a_program_by_hand_has_its_own_exit_code_and_ends_all_ranks(tmp_path: Path) -> None:
    results = end(*ranks(3, script(tmp_path, f"import gt\ngt.connect('env')\n{SUM}\nraise SystemExit(7)\n")))
    assert [code for code, _, _ in results] == [7, 0, 0], results
    assert results[0][1] == "sum 8.0 ['w0', 'w1', 'w2']\n" and results[1][1] == results[2][1] == ""


def test_a_process_with_a_rank_of_another_or_beyond_the_job_says_so(tmp_path: Path) -> None:
    program = script(tmp_path, f"{SUM}\nsys.stdin.read()\n")
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_ports()[0])}
    given = ((0, 2), (1, 2), (1, 2), (2, 3))
    processes = [python("-m", "gt", "run", program, RANK=str(rank), WORLD_SIZE=str(size), **place) for rank, size in given]
    wait_until(lambda: sum(process.poll() is not None for process in processes) == 2, 60)  # they are refused
    results = end(*processes)
    assert sorted(code for code, _, _ in results) == [0, 0, 1, 1], results
    assert results[0][1] == "sum 8.0 ['w0', 'w1']\n" and "rank 2, and this job has 2 workers" in results[3][2], results
    assert "has rank 1 already" in results[1][2] + results[2][2], results


def test_an_exception_of_the_program_is_its_own(tmp_path: Path) -> None:
    """The same program runs without a launcher: gt.cpu_workers takes the job's workers."""
    program = script(tmp_path, f"import gt\ngt.cpu_workers(2)\n{SUM}\nraise ValueError('mine')\n")
    results = end(*ranks(2, program, "-m", "gt", "run"))
    assert [code for code, _, _ in results] == [1, 0], results
    text = results[0][2]
    assert text.endswith("ValueError: mine\n") and "runpy" not in text and "gt/cli" not in text, text


def test_sigterm_to_all_leaves_time_for_a_checkpoint(tmp_path: Path) -> None:
    """As srun sends it before the time limit, to every process of the job."""
    processes = ranks(2, script(tmp_path, CHECKPOINT))
    try:
        assert processes[0].stdout is not None and processes[0].stdout.readline() == "ready\n"
        for process in processes:
            process.send_signal(signal.SIGTERM)
    finally:
        results = end(*processes)
    assert (results[0][0], results[0][1]) == (3, "saved 8.0\n") and results[1][0] == 0, results
    assert "workers end with the program" in results[1][2]


def test_a_killed_worker_of_another_rank_comes_back(tmp_path: Path) -> None:
    text = """
import os, sys, torch, gt
gt.connect("env", config="there: {workers: [1]}")
def there():
    with gt.signal.context("there"):
        return (torch.ones(4, device="remote") + 1).sum().item()
print(there(), flush=True)
sys.stdin.readline()
lost = 0
while True:
    try:
        value = there()
        if lost:
            break
    except gt.WorkerLost as error:
        lost += 1
        assert "w1" in str(error), error
print(value, lost > 0, flush=True)
"""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_ports()[0])}
    program = script(tmp_path, text)
    command = [sys.executable, str(program)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen(command, env=environment(RANK="0", **place), **pipes)
    second = subprocess.Popen(command, env=environment(RANK="1", **place), **pipes)
    try:
        assert first.stdout is not None and first.stdin is not None and first.stdout.readline() == "8.0\n"
        (worker,) = (pid for pid, line in of_this_test().items() if line.startswith("gt.worker 1"))
        os.kill(worker, signal.SIGKILL)
        first.stdin.write("\n")
        first.stdin.flush()
    finally:
        results = end(first, second)
    assert [code for code, _, _ in results] == [0, 0] and results[0][1] == "8.0 True\n", results


def test_a_hostfile_starts_workers_in_its_order(tmp_path: Path) -> None:
    hostfile = script(tmp_path, "h1 slots=2\nlocalhost slots=1  # needs no ssh\n", "hosts")
    ssh = script(tmp_path, SSH, "ssh")
    program = script(tmp_path, SUM + "sys.exit(5)\n")
    (done,) = end(python("-m", "gt", "run", "--hostfile", hostfile, "--ssh", f"{ssh} -o BatchMode=yes", program, GT_TOKEN=""))
    assert done[:2] == (5, "sum 8.0 ['w0', 'w1', 'w2']\n") and unhurried(done[2]) == "", done
    assert wait_until(lambda: not [line for line in of_this_test().values() if "gt.worker" in line])


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    program = script(tmp_path, SUM)
    for hosts in ("h0,gone:2", "gone"):
        line = ("-m", "gt", "run", "--hosts", hosts, "--ssh", str(script(tmp_path, SSH, "ssh")), program)
        (done,) = end(python(*line))
        assert done[0] == 2 and done[1] == "", done
        assert "the workers' process on gone ended (exit code 255): ssh: connect to host gone: No route to host" in done[2]


def test_a_host_that_does_not_reach_the_server_is_named_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GT_BACKEND", "numpy")
    monkeypatch.setattr(job, "SERVER_SECONDS", 0.5)  # it was the time that ranks have which start before their server
    reach = job.Reach((str(script(tmp_path, SSH, "ssh")),), address="127.0.0.1:1")  # no address
    with pytest.raises(SystemFailure, match=r"on h0 ended \(exit code 1\): gt worker: .*`gt doctor --hosts h0` checks ssh"):
        job.start_hosts([HostEntry("h0", 1)], reach)


def test_a_host_without_torch_is_named(tmp_path: Path) -> None:
    """It was a traceback at the host, and at rank 0 a process that had died."""
    (tmp_path / "torch").mkdir()
    script(tmp_path / "torch", "raise ModuleNotFoundError(\"No module named 'torch'\")", "__init__.py")
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_ports()[0]), "GT_BACKEND": "torch"}
    common["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    results = end(*(python("-m", "gt", "run", RANK=rank, **common) for rank in "01"))
    assert [code for code, _, _ in results] == [2, 1], results
    for _, _, text in results:
        assert "No module named 'torch': install torch for" in text and "Traceback" not in text, results


def test_a_rank_0_that_is_not_where_the_others_look_for_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise SystemFailure("worker 0 died")

    monkeypatch.setattr(job.local, "launch", fails)
    monkeypatch.setattr(job, "_begun", [])
    for host, says in (
        ("192.0.2.1", "^worker 0 died; 192.0.2.1 is no address of .* start rank 0 there"),
        ("127.0.0.1", "^worker 0 died$"),
    ):
        with pytest.raises(SystemFailure, match=says):
            job.start(JobPlace("x", 0, 1, 0, 1, host, 1))


def test_connect_takes_hosts_for_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GT_BACKEND", "numpy")
    script(tmp_path, SSH, "ssh")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gt.connect(ssh=["h0:1", "localhost:1"])
    try:
        assert gt.ones(3).sum().item() == 3.0
        assert [worker["name"] for worker in gt.stats()["workers"]] == ["w0", "w1"]
    finally:
        gt.shutdown()
    with pytest.raises(SystemFailure, match="on gone ended"):
        gt.connect(ssh=["gone:1"])
    with pytest.raises(ValueError, match="wants an address, or ssh"):
        gt.connect("localhost:1", ssh=["h0"])
    with pytest.raises(ConfigError, match="names no host"):
        gt.connect(ssh=[])


def test_a_job_on_several_hosts_needs_a_token(tmp_path: Path) -> None:
    program = script(tmp_path, SUM)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "h0", "GT_TOKEN": ""}
    for rank in "01":
        (done,) = end(python("-m", "gt", "run", program, RANK=rank, **place))
        assert done[0] == 2 and "a job on several hosts needs a token: make one with `gt key ~/.gt-token`" in done[2], done
    (done,) = end(python("-m", "gt", "run", tmp_path / "nothing.py", RANK="0", **place))
    assert done[0] == 2 and "there is no file" in done[2]


@pytest.mark.slow
def test_a_module_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    script(tmp_path, "import nothing_of_this_name", "mine.py")
    for module, says in (("nosuch.part", "gt run: no module named nosuch.part"), ("mine", "import nothing_of_this_name")):
        line = ("-m", "gt", "run", "--workers", "1", "-m", module)
        command = [sys.executable, *line]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 1 and says in done.stderr, done.stderr
        assert ("Traceback" in done.stderr) == (module == "mine")


def test_the_mesh_example_trains_saves_and_goes_on(tmp_path: Path) -> None:
    line = ("-m", "gt", "run", "--workers", "2", "examples/strategies/finetune.py", "--preset", "mesh", "--model", "tiny")
    line += ("--max-length", "8", "--lr", "1e-2", "--warmup", "2", "--save", str(tmp_path / "mesh"), "--steps")
    (first,) = end(python(*line, "3", GT_BACKEND="torch"))
    (second,) = end(python(*line, "6", GT_BACKEND="torch"))
    assert first[0] == second[0] == 0, (first, second)
    assert "Batch 0/3 | Loss" in first[1] and "resumed from" in second[1] and "Batch 5/6 | Loss" in second[1], (first, second)


def test_the_mesh_example_checks_its_sums() -> None:
    (done,) = end(python("-m", "gt", "run", "--workers", "3", "examples/mesh/all_reduce.py", "--most", "4096"))
    lines = done[1].splitlines()
    assert done[0] == 0 and lines[-1] == "ok" and "WRONG" not in done[1], done
    assert sum("MiB in" in line for line in lines) == 6 and [line.split()[0] for line in lines[-3:-1]] == ["1024", "4096"]


def test_without_a_program_a_job_serves_others(tmp_path: Path) -> None:
    token = script(tmp_path, TOKEN, "token")
    serving = python("-m", "gt", "run", "--workers", "2", "--token-file", token, GT_TOKEN="")
    try:
        assert serving.stdout is not None
        line = serving.stdout.readline()
        assert line.startswith("gt run: listening on 127.0.0.1:") and line.endswith(", 2 workers; Ctrl-C ends it\n")
        variables = {"GT_SERVER": line.split()[4].rstrip(","), "GT_TOKEN": "", "GT_TOKEN_FILE": str(token)}
        (done,) = end(python(script(tmp_path, SUM), **variables))
        assert done == (0, "sum 8.0 ['w0', 'w1']\n", ""), done
        serving.send_signal(signal.SIGTERM)
    finally:
        results = end(serving)
    assert results[0][0] == 0, results
