"""Every environment variable that GT reads, one row each. No other module reads os.environ."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gt.errors import ConfigError


@dataclass(frozen=True)
class Variable:
    """An environment variable. default: its text where it is not set; help: its line in `gt env` and docs/environment.md."""

    name: str
    default: str
    help: str


VARIABLES = (
    Variable("GT_CONFIG", "", "path of the YAML of signal groups, or `gt:` and the name of a ready config, as gt:llama/tp2"),
    Variable("GT_AUTO_SHARD", "", "1: without a config, every op is data parallel over all workers"),
    Variable("GT_SERVER", "", "host:port of a running server, also for `gt worker`; empty: this program starts one"),
    Variable("GT_TOKEN", "", "secret of server, workers and clients; needed off loopback (`gt key FILE` makes one)"),
    Variable("GT_TOKEN_FILE", "", "path of a file with that secret, where GT_TOKEN is empty"),
    Variable("GT_WORKERS", "", "workers that each process of a job starts; empty: one for each of its GPUs, else one"),
    Variable("GT_PORT", "", "port of a job's server; empty: the launcher's MASTER_PORT, or a free one under torchrun"),
    Variable("GT_GRACE", "120", "seconds that a job's workers serve after SIGTERM, for the program's last checkpoint"),
    Variable("GT_JOB", "", "address and number of workers of a job, as host:port 4; `gt run` sets it for its program"),
    Variable("GT_BACKEND", "torch", "engine of workers: torch, or numpy (on CPUs, without torch)"),
    Variable("GT_TRANSPORT", "", "transport between workers: nvshmem, nccl, shm (one host), net (shm, TCP); empty: GT chooses"),
    Variable("GT_EXACT_ATTENTION_DROPOUT", "", "1: on GPUs too, attention's dropout has one mask for every split; slower"),
    Variable("GT_OPS", "", "path of a file of op schemas, made by `gt ops`, for ops that GT's table lacks"),
    Variable("GT_OFFLOAD", "", "folders, divided by colons, in which workers may write offloaded tensors; empty: any on disk"),
    Variable("GT_LIBRARIES", "", "modules whose ops workers execute, divided by commas, as torchvision,my_ops"),
    Variable(
        "GT_RANK", "", "index of a worker, set by its launcher: each has its own, from 0; empty: by order of hosts and GPUs"
    ),
    Variable(
        "GT_IFNAME", "", "network devices of transfers between hosts, by how names begin, as eth,ib; ^ excludes, = is exact"
    ),
    Variable("GT_PORTS", "", "ports on which a worker accepts workers of other hosts, as 20000-20100; empty: any that is free"),
    Variable("GT_HEAP_SIZE", "", "a worker's memory for exchange with others, as 512MiB; default 256MiB on CPUs, 2GiB on GPUs"),
    Variable("GT_MEMORY_LIMIT", "", "memory limit of a worker, as 4GiB; empty: its CPU workers share 90% of the host's memory"),
    Variable("GT_INSTRUCTION_LOG", "", "path of a log: the dispatcher writes a line for each event"),
    Variable("GT_STALL_TIMEOUT", "300", "seconds without progress of any worker before a wait ends in WorkerStuck; 0: never"),
    Variable("GT_VERBOSE", "", "1: every process logs its actions to stderr"),
    Variable("GT_DEBUG_CLIENT", "", "1: debug log of the client"),
    Variable("GT_DEBUG_DISPATCHER", "", "1: debug log of the dispatcher"),
    Variable("GT_DEBUG_WORKER", "", "1: debug log of the workers"),
)
PASSED_ON = ("GT_", "NCCL_", "NVSHMEM_", "UCX_", "TORCH_", "TORCHINDUCTOR_", "OMP_", "MKL_")  # begins of names, for `for_hosts`
BACKEND_ALIASES = {"pytorch": "torch"}  # other spellings of GT_BACKEND and --backend
MAX_WHOLE = (1 << 31) - 1  # of variables that are whole numbers, unless they have a limit of their own
_NAMES = {v.name: v for v in VARIABLES}


def get(name: str) -> str:
    """Value of a variable in VARIABLES, or its default."""
    return os.environ.get(name, "") or _NAMES[name].default


def backend(name: str | None = None) -> str:
    """The engine of workers: `name`, else GT_BACKEND."""
    name = name or get("GT_BACKEND")
    return BACKEND_ALIASES.get(name, name)


def token(file: Path | None = None) -> str:
    """The shared secret: a file's text, or GT_TOKEN, or the text of GT_TOKEN_FILE.

    OSError where the file cannot be read, or has no text: a server would ask for nothing.
    """
    if file is None and not get("GT_TOKEN") and get("GT_TOKEN_FILE"):
        try:
            return token(Path(get("GT_TOKEN_FILE")))
        except OSError as error:
            why = f"GT_TOKEN_FILE names a file without a token: {error.strerror}"
            raise OSError(error.errno, why, error.filename) from None
    if file is None:
        return get("GT_TOKEN")
    try:
        text = file.read_text().strip()
    except UnicodeError:
        raise OSError(errno.EINVAL, "it is no text: `gt key FILE` makes one", str(file)) from None
    if not text:
        raise OSError(errno.EINVAL, "it is empty: `gt key FILE` makes one", str(file))
    return text


def of_launcher(names: Iterable[str]) -> dict[str, str]:
    """Variables that a launcher has set, by name; those that are empty are left out."""
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def ssh_client() -> str:
    """Address from which this process is logged in by ssh, "" if it is not."""
    return os.environ.get("SSH_CONNECTION", "").partition(" ")[0]


def starting(prefix: str) -> dict[str, str]:
    """Variables of another library, by the beginning of their names."""
    return {key: value for key, value in os.environ.items() if key.startswith(prefix)}


def every_variable() -> Mapping[bytes, bytes]:
    """The whole environment of this process, as it is now and later."""
    return os.environ._data  # type: ignore[attr-defined]


def for_hosts() -> dict[str, str]:
    """Variables that workers on other hosts get too: GT's, but for secrets and addresses, and those of NCCL and the like."""
    own = ("GT_TOKEN", "GT_TOKEN_FILE", "GT_SERVER", "GT_JOB", "GT_PORT", "GT_CONFIG", "GT_INSTRUCTION_LOG", "GT_OPS")
    return {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON) and key not in own}


def runtime_folder() -> str:
    """The user's runtime directory (XDG_RUNTIME_DIR), "" if the system has not set one."""
    return os.environ.get("XDG_RUNTIME_DIR", "")


def names(name: str) -> list[str]:
    """A variable's parts between commas."""
    return [part.strip() for part in get(name).split(",") if part.strip()]


def flag(name: str) -> bool:
    return get(name) not in ("", "0", "false", "no")


def size(name: str, default: int, text: str = "", least: int = 0) -> int:
    """Bytes of a variable, or of `text`: a number with KiB, MiB or GiB behind it. ConfigError for another text, or too few."""
    text = text or get(name)
    if not text:
        return default
    match = re.fullmatch(r"(\d{1,19})\s*([KMG]i?B)?", text, re.ASCII)
    nbytes = int(match[1]) << (10 * " KMG".index((match[2] or " ")[0])) if match else -1
    if not least <= nbytes < 1 << 63:
        more = f", at least {least >> 20}MiB" if least and match else ""
        raise ConfigError(f"{name} is {text!r:.80}, want a size as 512MiB or 2GiB{more}")
    return nbytes


def seconds(name: str) -> float:
    """A variable's seconds, 0 or more."""
    text = get(name)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e9:
        raise ConfigError(f"{name} is {text!r:.80}, want seconds as 300, or 0 for no limit")
    return value


def whole(name: str, default: int = -1, least: int = 0, most: int = MAX_WHOLE) -> int:
    """A variable's whole number; ConfigError for another text, or for one that is too small or too large."""
    text = get(name)
    number = int(text) if re.fullmatch(r"\d{1,10}", text, re.ASCII) else -1
    if text and not least <= number <= most:
        end = f" to {most}" if most < MAX_WHOLE else ""
        raise ConfigError(f"{name} is {text!r:.80}, want a whole number from {least}{end}")
    return number if text else default


def foreign(name: str, value: str, always: bool = False) -> None:
    """Set a variable for a library in this process, unless the user has set it; `always`: even then."""
    if always or name not in os.environ:
        os.environ[name] = value


def child(**changes: str) -> dict[str, str]:
    """The environment for a child process: this one's, with changes."""
    return {**os.environ, **changes}


def export(**changes: str) -> None:
    """Set variables of this process, for libraries that read them when they start (CUDA)."""
    os.environ.update(changes)


def inductor_cache() -> str:
    """TORCHINDUCTOR_CACHE_DIR, the folder of compiled code; empty for torch's default."""
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")


def visible_gpus() -> list[str] | None:
    """CUDA_VISIBLE_DEVICES as a list; None where it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [part.strip() for part in value.split(",") if part.strip() not in ("", "-1")]


def set_elsewhere(name: str) -> bool:
    """True if a variable of another library is set."""
    return bool(os.environ.get(name))


def python_path(root: str) -> str:
    """PYTHONPATH for a child that imports from `root`."""
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))


def switched_on(name: str) -> bool:
    """True if a boolean variable of another library is on."""
    return os.environ.get(name, "")[:1].lower() not in ("", "0", "n", "f")
