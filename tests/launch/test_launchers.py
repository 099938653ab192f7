"""A process's place in a job by each launcher's variables, and hostfiles. No process is started."""

from __future__ import annotations

import pytest

import gt
from gt.errors import ConfigError, SystemFailure
from gt.launch import launchers, machine, ssh
from gt.launch.launchers import JobPlace, hostnames, place, tasks_per_node
from gt.launch.ssh import HostEntry, entries

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h0", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "2", "SLURM_NTASKS": "6", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "h[07-08]", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_JOB_ID": "70", "SLURM_STEP_ID": "2",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
CASES = {
    "torchrun": (TORCHRUN, JobPlace("torchrun", 3, 4, 1, 2, "h0", 0, ("h0", 29500, "gt/job7/1"))),
    "torchrun without the agent's store": (
        {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}, JobPlace("torchrun", 3, 4, 1, 2, "h0", 29500),
    ),
    "by hand, no port": (
        {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "nodeA"}, JobPlace(launchers.HAND, 1, 3, 0, 0, "nodeA", launchers.PORT),
    ),
    "by hand, one process": (
        {"RANK": "0", "WORLD_SIZE": "1"}, JobPlace(launchers.HAND, 0, 1, 0, 1, "127.0.0.1", launchers.PORT),
    ),
    "PyTorchJob": (
        {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "PYTHONUNBUFFERED": "0"},
        JobPlace(launchers.HAND, 2, 3, 0, 0, "job-master-0", 23456),
    ),
    "TrainJob": (
        {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "t-0",
         "PET_MASTER_PORT": "29400"},
        JobPlace("Kubeflow", 1, 2, 0, 1, "t-0", 29400, None, 4),
    ),
    "JobSet": (
        {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "gt-hosts-0-0.gt", "MASTER_PORT": "12345"},
        JobPlace("an indexed Kubernetes job", 2, 3, 0, 1, "gt-hosts-0-0.gt", 12345),
    ),
    "srun": (SRUN, JobPlace("srun", 2, 3, 0, 1, "h07", 20000 + 70 * 16 + 2)),
    "srun on one node": (
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "h0", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "1"},
        JobPlace("srun", 1, 2, 1, 2, "h0", 20016),
    ),
    "srun with a port": ({**SRUN, "MASTER_PORT": "29500", "MASTER_ADDR": "ib7"}, JobPlace("srun", 2, 3, 0, 1, "ib7", 29500)),
    "srun --resv-ports": ({**SRUN, "SLURM_STEP_RESV_PORTS": "12100-12102"}, JobPlace("srun", 2, 3, 0, 1, "h07", 12100)),
    "Open MPI on one host": (OPEN_MPI, JobPlace("mpirun of Open MPI", 1, 4, 1, 4, "127.0.0.1", launchers.PORT)),
    "MPICH": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "h0"},
        JobPlace("mpirun of MPICH", 1, 2, 0, 1, "h0", launchers.PORT),
    ),
    "torchrun within srun": ({**SRUN, **TORCHRUN}, JobPlace("torchrun", 3, 4, 1, 2, "h0", 0, ("h0", 29500, "gt/job7/1"))),
    "nothing": ({"MASTER_ADDR": "h0"}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_place_that_a_launcher_gives(case: str) -> None:
    variables, wanted = CASES[case]
    assert place(variables) == wanted
    assert set(variables) - set(launchers.VARIABLES) <= {"PYTHONUNBUFFERED"}


@pytest.mark.parametrize(("variables", "says"), [
    ({"WORLD_SIZE": "3"}, "WORLD_SIZE is '3' and RANK is not set"),
    ({"RANK": "3", "WORLD_SIZE": "3", "MASTER_ADDR": "h0"}, "RANK is '3', want a whole number from 0 to 2"),
    ({"RANK": "x", "WORLD_SIZE": "3"}, "RANK is 'x', want"),
    ({"RANK": "0"}, "WORLD_SIZE is not set"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "does not say where rank 0 is: set MASTER_ADDR"),
    ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is '70000', want a whole number from 1 to 65535"),
    ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "mpirun of Open MPI does not say where rank 0 is"),
    ({"JOB_COMPLETION_INDEX": "0"}, "WORLD_SIZE is not set"),
    ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, "this is SLURM's batch script itself, and none of its tasks: put srun"),
    ({**SRUN, "SLURM_STEP_NODELIST": "h[3-1]"}, r"SLURM_STEP_NODELIST is 'h\[3-1\]', want names"),
])  # fmt: skip
def test_a_wrong_variable_is_named(variables: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        place(variables)


def test_short_forms_of_slurm() -> None:
    assert hostnames("h[0-2,07],gpu-a01") == ["h0", "h1", "h2", "h07", "gpu-a01"]
    assert hostnames("r[1-2]n[08-10]x") == ["r1n08x", "r1n09x", "r1n10x", "r2n08x", "r2n09x", "r2n10x"]
    assert list(tasks_per_node("2(x3),1")) == [2, 2, 2, 1]


def test_lines_of_a_hostfile() -> None:
    lines = ["# my boxes", "h0 slots=2  # fast", "", "user@h1", "10.0.0.3 slots=1", "h4:3"]
    assert entries(lines, "F") == [HostEntry("h0", 2), HostEntry("user@h1"), HostEntry("10.0.0.3", 1), HostEntry("h4", 3)]


@pytest.mark.parametrize(("line", "says"), [
    ("h0 slots=0", "F:1: 'h0 slots=0' has 0 slots, want 1 to"),
    ("h0 slot=2", "F:1: got 'h0 slot=2', want a host, and behind it slots=N"),
    ("h0:two", "F:1: got 'h0:two', want the number of workers behind the colon"),
    ("-oProxyCommand=touch", "F:1: got '-oProxyCommand=touch'"),
    ("h0;reboot", "F:1: got 'h0;reboot'"),
    ("# nothing", "F names no host"),
    ("h0\nh0 slots=2", "F:2: host 'h0' is there twice"),
])  # fmt: skip
def test_a_wrong_line_of_a_hostfile_is_named(line: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        entries(line.split("\n"), "F")


def test_other_systems_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.unsupported("linux") == machine.unsupported() == ""
    why = machine.unsupported("darwin")
    assert why.startswith("this is macOS, and GT needs Linux") and "container" in why
    monkeypatch.setattr(machine, "unsupported", lambda: why)
    with pytest.raises(SystemFailure, match="this is macOS"):
        gt.connect("localhost:1")


def test_the_words_of_a_host_are_whole_lines_however_they_arrive() -> None:
    names = ("token", "gpu", "backend", "heartbeat", "libraries", "path", "wait", "variables", "own", "address")
    order: dict[str, object] = dict.fromkeys(names, "")
    host = ssh.RemoteHost({"host": "h1", "slots": 1, "first": 0}, {**order, "ssh": ["ssh"], "python": ""}, 1)
    parts = (b"env: ", b"/nope", b": No such file\ncannot", b" go on\n", b"the end")
    assert [host.prefixed(part) for part in parts] == [b"", b"", b"h1: env: /nope: No such file\n", b"h1: cannot go on\n", b""]
    assert "env: /nope: No such file | cannot go on | the end;" in host.ended(1)
    assert host.prefixed(b"") == b"h1: the end\n" and host.prefixed(b"") == b""


def test_this_host_needs_no_ssh() -> None:
    assert ssh.command("localhost", ssh.SSH, ["gt.launch"])[0] == "env"
    assert ssh.command("h1", ("ssh",), ["gt.launch"], "/py")[:2] == ["ssh", "h1"]
