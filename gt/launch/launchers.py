"""A process's place in a job, from the environment that its launcher has set: torchrun, srun, Kubernetes, mpirun, or by hand.

Rows of LAUNCHERS name the variables. Pure: a mapping goes in, a JobPlace comes out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gt.errors import ConfigError
from gt.wire.socket import PORT

LOOPBACK = "127.0.0.1"
MAX_PROCESSES = 1 << 12
JOB_PORTS = 20000, 10000  # the first of srun's jobs, and their number
HAND = "RANK, WORLD_SIZE and MASTER_ADDR"


@dataclass(frozen=True)
class Launcher:
    """Names of a launcher's variables; the first of a row that is set counts. sign: is set by this launcher alone.

    workers: how many workers each process starts, where the launcher says so. pods: each process has a host of its own.
    """

    name: str
    sign: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    host: tuple[str, ...] = ("MASTER_ADDR",)
    port: tuple[str, ...] = ("MASTER_PORT",)
    workers: tuple[str, ...] = ()
    pods: bool = False

    def variables(self) -> Iterator[str]:
        rows = (self.rank, self.size, self.local_rank, self.local_size, self.host, self.port, self.workers)
        yield self.sign
        for row in rows:
            yield from row


# In this order: torchrun also sets RANK, and torchrun may be started by srun, whose variables its processes then have too.
LAUNCHERS = (
    Launcher("torchrun", "TORCHELASTIC_RUN_ID", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    Launcher(HAND, "RANK", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    Launcher(
        "Kubeflow", "PET_NODE_RANK", ("PET_NODE_RANK",), ("PET_NNODES",), host=("PET_MASTER_ADDR", "MASTER_ADDR"),
        port=("PET_MASTER_PORT", "MASTER_PORT"), workers=("PET_NPROC_PER_NODE",), pods=True,
    ),
    Launcher("an indexed Kubernetes job", "JOB_COMPLETION_INDEX", ("JOB_COMPLETION_INDEX",), ("WORLD_SIZE",), pods=True),
    Launcher("srun", "SLURM_PROCID", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",)),
    Launcher(
        "mpirun of Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Launcher("mpirun of MPICH", "PMI_RANK", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
)  # fmt: skip
SLURM = (
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID",
    "SLURM_STEP_RESV_PORTS", "SLURM_LAUNCH_NODE_IPADDR",
)  # fmt: skip
TORCHRUN = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")
VARIABLES = tuple(dict.fromkeys([*(name for row in LAUNCHERS for name in row.variables()), *SLURM, *TORCHRUN]))


@dataclass(frozen=True)
class JobPlace:
    """One process of a job. host, port: of the job's server, which is rank 0's.

    port 0: rank 0 takes a free one. store: host and port of torchrun's store, through which others get that port, and the key.
    local_rank, local_size: among the job's processes of this host; local_size 0: unknown. workers: that each
    process starts, 0 where the launcher does not say.
    """

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = LOOPBACK
    port: int = 0
    store: tuple[str, int, str] | None = None
    workers: int = 0

    @property
    def alone(self) -> bool:
        """True if all processes of the job are on this host."""
        return self.local_size == self.size


def place(found: Mapping[str, str]) -> JobPlace | None:
    """The place that variables describe, None if no launcher has set any. found: the set ones of VARIABLES.

    ConfigError names a variable that is wrong or missing.
    """
    # Its sign says which launcher it is; a job script of SLURM has the signs of srun without being a task.
    launcher = next((row for row in LAUNCHERS if row.sign in found), None)
    if launcher is None:
        if "WORLD_SIZE" in found:
            raise ConfigError(f"WORLD_SIZE is {found['WORLD_SIZE']!r} and RANK is not set: want {HAND}")
        return None
    if launcher.name == "srun" and "SLURM_STEP_NODELIST" not in found:
        text = "this is SLURM's batch script itself, and none of its tasks"
        raise ConfigError(f"{text}: put srun before the command, as `srun gt run program.py`")

    # The place in the job, then on the host. A launcher that does not tell about the host leaves local_size 0.
    size = _number(found, launcher.size, 1, MAX_PROCESSES)
    rank = _number(found, launcher.rank, 0, size - 1)
    if launcher.name == "srun":
        return _srun(found, rank, size)
    local_size = _number(found, launcher.local_size, 1, size, 1 if launcher.pods or size == 1 else 0)
    local_rank = _number(found, launcher.local_rank, 0, max(local_size - 1, 0) if local_size else size - 1, 0)
    workers = _workers(found, launcher)
    host = _first(found, launcher.host) or (LOOPBACK if local_size == size else "")
    if not host:
        raise ConfigError(f"{launcher.name} does not say where rank 0 is: set {launcher.host[0]} to its host on all of them")

    port = _number(found, launcher.port, 1, (1 << 16) - 1, PORT)
    store = None
    # torchrun's agent listens at MASTER_PORT itself, so rank 0 takes a free
    # port, and tells it to the others by the agent's store.
    if found.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        key = f"gt/{found.get('TORCHELASTIC_RUN_ID', '')}/{found.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        store, port = (host, port, key), 0
    return JobPlace(launcher.name, rank, size, local_rank, local_size, host, port, store, workers)


def _srun(found: Mapping[str, str], rank: int, size: int) -> JobPlace:
    """A task of srun. The server is on the step's first node."""
    nodes = hostnames(found["SLURM_STEP_NODELIST"])
    counts = list(tasks_per_node(found.get("SLURM_STEP_TASKS_PER_NODE", "")))
    node = _number(found, ("SLURM_NODEID",), 0, len(nodes) - 1, 0)
    local_size = counts[node] if node < len(counts) else size if len(nodes) == 1 else 0
    local_rank = _number(found, ("SLURM_LOCALID",), 0, size - 1, 0)

    # All tasks compute the same port without talking. Jobs that share a node differ in it, most likely; it is no secret.
    job, step = (_number(found, (name,), 0, 1 << 32, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    first, count = JOB_PORTS
    port = first + (job * 16 + step % 16) % count
    if reserved := re.match(r"\d+", found.get("SLURM_STEP_RESV_PORTS", "")):
        port = int(reserved[0])
    port = _number(found, ("MASTER_PORT",), 1, (1 << 16) - 1, port)
    return JobPlace("srun", rank, size, local_rank, local_size, found.get("MASTER_ADDR") or nodes[0], port)


def hostnames(text: str) -> list[str]:
    """Names of SLURM's short form: "h[0-2,7],gpu-a01" has five. ConfigError for another text."""
    # Commas within brackets belong to a range.
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names += _expanded(part, text)
    if not names:
        raise ConfigError(f"SLURM_STEP_NODELIST is {text!r}, want names of nodes such as h[0-2]")
    return names


def _expanded(part: str, text: str) -> list[str]:
    begin, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    ranges, _, end = rest.partition("]")
    names = []
    for row in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", row)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not first <= last < first + MAX_PROCESSES:
            raise ConfigError(f"SLURM_STEP_NODELIST is {text!r}, want names of nodes such as h[0-2]")
        # SLURM pads with zeros: "h[08-10]" is h08, h09, h10. What follows the bracket may have ranges of its own.
        numbers = (f"{number:0{len(match[1])}}" for number in range(first, last + 1))
        names += [f"{begin}{number}{more}" for number in numbers for more in _expanded(end, text)]
    return names


def tasks_per_node(text: str) -> Iterator[int]:
    """Numbers of SLURM's short form: "2(x3),1" is 2, 2, 2, 1."""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        yield from [int(count)] * min(int(times or 1), MAX_PROCESSES)


def _workers(found: Mapping[str, str], launcher: Launcher) -> int:
    """Workers of each process; texts that torchrun would count by itself ("auto", "gpu") are 0."""
    text = _first(found, launcher.workers)
    return int(text) if text.isdecimal() and int(text) <= MAX_PROCESSES else 0


def _first(found: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((found[name] for name in names if name in found), "")


def _number(found: Mapping[str, str], names: tuple[str, ...], least: int, most: int, default: int | None = None) -> int:
    """The whole number of the first variable that is set. ConfigError if it is none, out of range, or missing."""
    name = next((name for name in names if name in found), "")
    if not name:
        if default is None:
            raise ConfigError(f"{' or '.join(names)} is not set: this process does not know its place in the job, want {HAND}")
        return default
    text = found[name]
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ConfigError(f"{name} is {text!r}, want a whole number from {least} to {most}")
    return int(text)
