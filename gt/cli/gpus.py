"""The checks of GPUs in `gt doctor`: nvidia-smi, torch, then a run of GT's own workers.

Each check returns a text, or raises an error with a remedy. Only `which`, `smi` and `child` look at the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

from gt import env

GIB = 1 << 30
QUERY = ("index", "name", "memory.total", "memory.used", "compute_cap", "driver_version", "utilization.gpu")
SLOW_GB_PER_SECOND = 20.0  # GB/s: less than any NVLink, about that of PCIe
PATIENCE_SECONDS = 300.0  # seconds for workers to start, train and transfer
EXERCISED_BYTES = 256 << 20  # bytes of a transferred tensor
# settings for other NVSHMEM programs that a GT worker must not inherit
FOREIGN = ("NVSHMEM_BOOTSTRAP", "NVSHMEM_REMOTE_TRANSPORT")

Row = tuple[str, str, bool, bool]  # name, text, success, and True if GPUs are unusable without it


class Seen(NamedTuple):
    """One GPU in nvidia-smi's output; sizes in MiB."""

    number: str
    name: str
    total: int
    used: int
    capability: str
    driver: str
    busy: str


def smi(*args: str) -> str:
    """The output of nvidia-smi; RuntimeError where it does not run."""
    if which("nvidia-smi") is None:
        raise RuntimeError("there is no nvidia-smi: install the driver with its tools")
    try:
        done = subprocess.run(["nvidia-smi", *args], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"nvidia-smi does not run ({error}): install the driver with its tools") from None
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise RuntimeError(f"nvidia-smi failed: {lines[-1] if lines else done.returncode}: see whether the driver is loaded")
    return done.stdout


def child(*args: str, patience: float = PATIENCE_SECONDS) -> list[str]:
    """Output lines of `python -m gt.cli.exercise ...`, in a process of its own, which CUDA may crash or hang."""
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "gt.cli.exercise", *args]
    changes = {"PYTHONPATH": env.python_path(root), "GT_CONFIG": "", "GT_SERVER": ""}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env.child(**changes))
    try:
        out, err = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()  # its workers end with it
        out, err = process.communicate()
        return [*out.splitlines(), json.dumps(("in time", False, _stuck(patience)))]
    if process.returncode:
        last = (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        again = f"run `python -m gt.cli.exercise {' '.join(args)}` to see all of it"
        return [*out.splitlines(), json.dumps(("finished", False, f"{last}; {again}"))]
    return out.splitlines()


def _stuck(patience: float) -> str:
    return (
        f"not done after {patience:g} s: see whether all GPUs are visible (CUDA_VISIBLE_DEVICES) and free (nvidia-smi); "
        "GT_VERBOSE=1 says what workers do, py-spy dump where they wait"
    )


def none() -> str:
    """The reason why workers would get no GPU, and a remedy."""
    hidden = env.visible_gpus() == []
    try:
        count = len(seen())
    except RuntimeError as error:
        also = ", and unset CUDA_VISIBLE_DEVICES, which hides all" if hidden else ""
        return f"none: workers run on the CPU; if there should be some: {error}{also}"
    if hidden:
        return f"none: CUDA_VISIBLE_DEVICES, empty or -1, hides the {count} that nvidia-smi lists: unset it to have them used"
    todo = "see whether the container was given the devices, or workers run on the CPU"
    return f"none: nvidia-smi lists {count}, but neither /dev/nvidia* nor /proc/driver/nvidia/gpus is here: {todo}"


def checks(visible: bool) -> Iterator[Row]:
    """All rows that apply. visible: True if workers would get a GPU; otherwise no row is a failure."""
    probe: Any = {}
    can = 0
    if visible or which("nvidia-smi"):  # otherwise workers run on the CPU
        first = next(_rows((("nvidia-smi", _seen, False),)))
        yield first
        if first[2]:
            yield from _rows((("driver", _driver, False), ("links", _links, False)))
        lines = child("probe")
        try:
            probe = json.loads(lines[0])
        except (ValueError, IndexError):
            probe = {}
        if not isinstance(probe, dict) or not probe:
            yield "torch on gpus", f"torch does not say what it finds: {' '.join(lines) or 'nothing'}", False, visible
        else:
            can = 3 if probe["gpus"] else 2 if first[2] else 1
    about = [row for row in ABOUT if row[3] <= can]
    yield from _rows((name, lambda check=check: check(probe), needed and visible) for name, check, needed, _ in about)
    if strange := [name for name in FOREIGN if env.set_elsewhere(name)]:
        text = f"{' and '.join(strange)} set, as mpirun programs want: unset it, GT's workers meet by themselves"
        yield "mpi", text, False, False
    if can == 3 and visible:
        yield from _work(len(probe["gpus"]))


def _work(usable: int) -> Iterator[Row]:
    """Run GT's own workers on `usable` GPUs."""
    linked = _linked()
    for line in child(str(usable), str(EXERCISED_BYTES)):
        name, good, text = json.loads(line)
        rate = float(text.partition(" GB/s")[0].rpartition(" ")[2]) if good and name.startswith("put") else SLOW_GB_PER_SECOND
        if rate < SLOW_GB_PER_SECOND and linked:
            todo = "see nvshmem above; GT_TRANSPORT=nvshmem says what is missing"
            yield name, f"{text}: NVLink is not used: {todo}", False, False
        else:
            yield name, text, good, True
    if usable == 1:
        yield "put", "needs two GPUs, and so does all-reduce; everything else works with one", False, False


def _rows(about: Any) -> Iterator[Row]:
    for name, check, needed in about:
        try:
            yield name, check(), True, needed
        except RuntimeError as error:
            yield name, str(error), False, needed


# ---- nvidia-smi


def seen() -> list[Seen]:
    """The GPUs in nvidia-smi's list; RuntimeError for an empty list."""
    rows = []
    for line in smi(f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(QUERY):
            total, used = (int(c) if c.isdigit() else 0 for c in cells[2:4])
            rows.append(Seen(cells[0], cells[1], total, used, cells[4], cells[5], cells[6]))
    if not rows:
        raise RuntimeError("nvidia-smi lists none: see whether the driver is loaded, and whether a container was given GPUs")
    return rows


def _seen() -> str:
    rows, visible = seen(), env.visible_gpus()
    kinds = {f"{row.name}, {row.total / 1024:.0f} GiB": sum(r.name == row.name for r in rows) for row in rows}
    text = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    text += f"; busy {', '.join(row.busy for row in rows)} %"
    return text if not visible else f"{text}; CUDA_VISIBLE_DEVICES={','.join(visible)} leaves {len(visible)} of them"


def _driver() -> str:
    head = smi()
    return f"{seen()[0].driver}, CUDA up to {head.partition('CUDA Version:')[2].split()[0] if 'CUDA Version:' in head else '?'}"


def _matrix() -> dict[tuple[str, str], str]:
    """The link between each pair of GPUs by `nvidia-smi topo -m`: NV18, PIX, SYS, ..."""
    rows = [line.replace("\x1b[4m", "").replace("\x1b[0m", "").split() for line in smi("topo", "-m").splitlines()]
    names = [cell for cell in (rows[0] if rows else []) if cell.startswith("GPU") and cell[3:].isdigit()]
    links = {}
    for row in rows[1:]:
        if row and row[0] in names:
            links.update({(row[0], b): kind for b, kind in zip(names, row[1:]) if row[0] < b})
    return links


def _linked() -> bool:
    """True if NVLink connects every pair of GPUs."""
    try:
        kinds = _matrix().values()
    except RuntimeError:
        return False
    return bool(kinds) and all(kind.startswith("NV") for kind in kinds)


def _links() -> str:
    kinds = _matrix()
    if not kinds:
        return "one GPU, no links"
    listed = sorted(set(kinds.values()))
    ways = ", ".join(f"{kind} ({sum(k == kind for k in kinds.values())} pairs)" for kind in listed)
    if all(kind.startswith("NV") for kind in listed):
        return f"NVLink between all: {ways}"
    slow = next(f"{a} and {b}" for (a, b), kind in kinds.items() if not kind.startswith("NV"))
    raise RuntimeError(f"{ways}: no NVLink between {slow}, so transfers take PCIe; put neighbouring stages on linked GPUs")


# ---- torch and its libraries


def _torch(found: dict[str, Any]) -> str:
    if found["cuda"] is None:
        raise RuntimeError(f"{found['torch']} is built without CUDA: install torch from download.pytorch.org/whl/cu130")
    if not found["gpus"]:
        why = f"its CUDA {found['cuda']} wants a newer driver, or none is visible"
        why = "CUDA_VISIBLE_DEVICES hides all" if env.visible_gpus() == [] else why
        raise RuntimeError(f"{found['torch']} sees no GPU: {why}")
    return f"{found['torch']} with CUDA {found['cuda']}, {len(found['gpus'])} GPUs"


def _capability(found: dict[str, Any]) -> str:
    numbers = [tuple(gpu[1]) for gpu in found["gpus"]]
    if not numbers:  # nvidia-smi sees GPUs, torch none
        numbers = [tuple(map(int, row.capability.split("."))) for row in seen() if row.capability[:1].isdigit()]
    text = ", ".join(sorted({f"{a}.{b}" for a, b in numbers}))
    if any(number < (7, 0) for number in numbers):
        raise RuntimeError(f"{text}: 7.0 or more is needed; leave older ones out with CUDA_VISIBLE_DEVICES")
    return text or "nvidia-smi does not say"


def _memory(found: dict[str, Any]) -> str:
    free = [gpu[2] / GIB for gpu in found["gpus"]]
    text = f"{', '.join(f'{gib:.0f}' for gib in free)} GiB free"
    if any(gib < 4 for gib in free):
        todo = "or use a smaller batch (-b, -t), more micro-batches (-M) or more stages"
        raise RuntimeError(f"{text}: `nvidia-smi` shows who has the rest; end that, {todo}")
    return text


def _peers(found: dict[str, Any]) -> str:
    if len(found["gpus"]) < 2:
        return "one GPU"
    if found["apart"]:
        pairs = ", ".join(f"{a} and {b}" for a, b in found["apart"])
        instead = "NVSHMEM cannot join these, so workers use NCCL, which is slower there"
        raise RuntimeError(f"not between {pairs}: {instead}; look for an IOMMU, MIG or virtual machine")
    return "between all"


def _nccl(found: dict[str, Any]) -> str:
    if not found.get("nccl"):
        raise RuntimeError("not part of this torch: one built with CUDA brings it; collectives use NVSHMEM if that is there")
    return ".".join(map(str, found["nccl"]))


def _nvshmem(found: dict[str, Any]) -> str:
    if found["nvshmem_error"]:
        major = (found["cuda"] or "13").partition(".")[0]
        todo = f"pip install nvshmem4py-cu{major}, which brings the library; NVSHMEM_HOME and LD_LIBRARY_PATH are not needed"
        raise RuntimeError(f"{found['nvshmem_error']}: {todo}")
    return found["nvshmem"] or "loads"


# name, check, True if GPUs are unusable without it, needs: 3 a GPU seen by torch, 2 a GPU seen by nvidia-smi, 1 torch
ABOUT: tuple[tuple[str, Callable[[dict[str, Any]], str], bool, int], ...] = (
    ("torch on gpus", _torch, True, 1),
    ("capability", _capability, True, 2),
    ("gpu memory", _memory, False, 3),
    ("peer access", _peers, False, 3),
    ("nccl", _nccl, False, 1),
    ("nvshmem", _nvshmem, False, 1),
)
