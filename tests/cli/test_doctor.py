"""`gt doctor`: a line for each thing, ok or what to do, on machines that are made up; and GT's workers really at work."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

import pytest

import gt
from gt.cli import exercise, gpus

doctor = importlib.import_module("gt.cli.doctor")  # gt.cli.doctor is the command

H200 = "{n}, NVIDIA H200, 143771, 5, 9.0, 580.65.06, 0\n"
HEAD = "| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0 |\n"
TOPO = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \t{way}\tSYS\t0-47\t0\tN/A\nGPU1\t{way}\t X \tSYS\t0-47\t0\tN/A\nNIC0\tSYS\tSYS\t X \n\n"
    "Legend:\n\n  X    = Self\n"
)
PROBED: dict[str, Any] = {
    "torch": "2.11.0+cu130", "cuda": "13.0", "apart": [], "nccl": [2, 28, 9], "nvshmem": "3.4.5", "nvshmem_error": "",
    "gpus": [["NVIDIA H200", [9, 0], 139 << 30, 140 << 30]] * 2,
}  # fmt: skip
RESULTS = [
    ("workers", True, "2 started"), ("training", True, "5 steps"),
    ("put 0-1", True, "256 MiB in 0.69 ms, 390.1 GB/s; 8 B in 9 us"), ("transport", True, "nvshmem"),
]  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, dict[str, str]]]:
    """The doctor on a machine: what nvidia-smi says, what torch finds, what workers do. Exit code, and lines by name."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(
        way: str = "NV18", count: int = 2, smi: Any = None, results: list = RESULTS, visible: bool = True, **probed: Any
    ) -> tuple[int, dict[str, str]]:
        def said(*args: str) -> str:
            if smi is not None:
                raise smi
            if args[:1] == ("topo",):
                return TOPO.format(way=way)
            return "".join(H200.format(n=n) for n in range(count)) if args else HEAD

        def done(*args: str) -> list[str]:
            return [json.dumps({**PROBED, **probed})] if args == ("probe",) else [json.dumps(row) for row in results]

        monkeypatch.setattr(doctor.machine, "gpus", lambda: [str(n) for n in range(count if visible else 0)])
        monkeypatch.setattr(gpus, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(gpus, "smi", said)
        monkeypatch.setattr(gpus, "child", done)
        code = doctor.main([])
        lines = [line for line in capsys.readouterr().out.splitlines()]
        assert all(line[:8].strip() in ("ok", "note", "missing", "fails") for line in lines), lines
        return code, {line[9:23].strip(): f"{line[:8].strip()}: {line[24:]}" for line in lines}

    return run


def test_a_good_machine(machine: Callable) -> None:
    code, lines = machine()
    assert code == 0
    assert lines["gpus"] == "ok: 2 visible: 0,1"
    assert lines["nvidia-smi"] == "ok: 2 x NVIDIA H200, 140 GiB; busy 0, 0 %"
    assert lines["driver"] == "ok: 580.65.06, CUDA up to 13.0"
    assert lines["links"] == "ok: NVLink between all: NV18 (1 pairs)"
    assert lines["torch on gpus"] == "ok: 2.11.0+cu130 with CUDA 13.0, 2 GPUs"
    assert lines["capability"] == "ok: 9.0" and lines["gpu memory"] == "ok: 139, 139 GiB free"
    assert lines["peer access"] == "ok: between all" and lines["nccl"] == "ok: 2.28.9" and lines["nvshmem"] == "ok: 3.4.5"
    assert "mpi" not in lines and "gpt-2 files" not in lines
    assert lines["put 0-1"] == "ok: 256 MiB in 0.69 ms, 390.1 GB/s; 8 B in 9 us" and lines["transport"] == "ok: nvshmem"


OLD, FULL = ["Tesla P40", [6, 1], 20 << 30, 22 << 30], ["NVIDIA H200", [9, 0], 1 << 30, 140 << 30]
WRONG: list[tuple[dict[str, Any], int, str, str]] = [
    ({"smi": RuntimeError("nvidia-smi does not run")}, 0, "nvidia-smi", "note: nvidia-smi does not run"),
    ({"cuda": None, "gpus": []}, 1, "torch on gpus", "fails: 2.11.0+cu130 is built without CUDA: install torch from"),
    ({"gpus": []}, 1, "torch on gpus", "fails: 2.11.0+cu130 sees no GPU: its CUDA 13.0 wants a newer driver"),
    ({"gpus": [OLD, FULL]}, 1, "capability", "fails: 6.1, 9.0: 7.0 or more is needed"),
    ({"gpus": [FULL, FULL]}, 0, "gpu memory", "note: 1, 1 GiB free: `nvidia-smi` shows who has the rest"),
    ({"apart": [[0, 1]]}, 0, "peer access", "note: not between 0 and 1: NVSHMEM cannot join these, so workers use NCCL"),
    ({"nvshmem_error": "ImportError: libnvshmem_host.so.3"}, 0, "nvshmem",
     "note: ImportError: libnvshmem_host.so.3: pip install nvshmem4py-cu13"),
    ({"nccl": []}, 0, "nccl", "note: not part of this torch: one built with CUDA brings it"),
    ({"smi": RuntimeError("nvidia-smi failed"), "visible": False, "gpus": []}, 0, "gpus",
     "note: none: workers run on the CPU; if there should be some: nvidia-smi failed"),
    ({"visible": False}, 0, "gpus", "note: none: nvidia-smi lists 2, but neither /dev/nvidia* nor"),
    ({"cuda": None, "gpus": [], "smi": RuntimeError("nvidia-smi failed")}, 1, "nccl", "ok: 2.28.9"),
    ({"way": "SYS"}, 0, "links", "note: SYS (1 pairs): no NVLink between GPU0 and GPU1"),
    ({"results": [["training", False, "loss nan"]]}, 1, "training", "fails: loss nan"),
    ({"results": [["put 0-1", True, "256 MiB in 99 ms, 2.7 GB/s; 8 B in 9 us"]]}, 0, "put 0-1",
     "note: 256 MiB in 99 ms, 2.7 GB/s; 8 B in 9 us: NVLink is not used: see nvshmem above"),
    ({"count": 1, "gpus": PROBED["gpus"][:1], "results": RESULTS[:2]}, 0, "put", "note: needs two GPUs"),
]  # fmt: skip


@pytest.mark.parametrize(("how", "code", "name", "says"), WRONG, ids=[f"{w[2]} {n}" for n, w in enumerate(WRONG)])
def test_a_defect_is_named_with_its_remedy(how: dict, code: int, name: str, says: str, machine: Callable) -> None:
    found, lines = machine(**how)
    assert found == code and lines[name].startswith(says), lines[name]


def test_variables_that_mpirun_needs_are_named(machine: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_BOOTSTRAP", "MPI")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    code, lines = machine()
    assert code == 0 and lines["mpi"].startswith("note: NVSHMEM_BOOTSTRAP set, as mpirun programs want: unset it")
    assert lines["nvidia-smi"].endswith("CUDA_VISIBLE_DEVICES=1 leaves 1 of them")


LACKING: dict[str, Any] = {"gpus": [], "nccl": [], "nvshmem": "", "nvshmem_error": "ModuleNotFoundError: no nvshmem"}
ANSWERED = {  # what is said of GPUs that torch does not see, beside `gpus` and `torch on gpus`
    "nvidia-smi": "ok: 2 x NVIDIA H200, 140 GiB; busy 0, 0 %", "driver": "ok: 580.65.06", "links": "ok: NVLink",
    "capability": "ok: 9.0", "nccl": "note: not part of this torch: one built with CUDA brings it",
    "nvshmem": "note: ModuleNotFoundError: no nvshmem: pip install nvshmem4py-cu13",
    "mpi": "note: NVSHMEM_BOOTSTRAP set",
}  # fmt: skip


@pytest.mark.parametrize("value", ["", "-1"])
def test_a_variable_that_hides_gpus_is_named(value: str, machine: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    monkeypatch.setenv("NVSHMEM_BOOTSTRAP", "MPI")
    code, lines = machine(visible=False, **LACKING)
    assert code == 0  # somebody may want it so
    assert lines["gpus"].startswith("note: none: CUDA_VISIBLE_DEVICES, empty or -1, hides the 2 that nvidia-smi lists: unset")
    assert lines["torch on gpus"] == "note: 2.11.0+cu130 sees no GPU: CUDA_VISIBLE_DEVICES hides all"
    assert all(lines[name].startswith(says) for name, says in ANSWERED.items()), lines
    assert "leaves" not in lines["nvidia-smi"]
    assert not {"gpu memory", "peer access", "workers", "put 0-1", "put"} & set(lines)


def test_a_torch_without_cuda_is_one_line_of_all_that_can_be_said(machine: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("NVSHMEM_BOOTSTRAP", "MPI")
    code, lines = machine(cuda=None, **LACKING)
    assert code == 1 and lines["torch on gpus"].startswith("fails: 2.11.0+cu130 is built without CUDA")
    assert all(lines[name].startswith(says) for name, says in ANSWERED.items()), lines


def test_a_torch_that_fails_to_say_anything_leaves_the_rest(machine: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()  # for what it sets
    monkeypatch.setenv("NVSHMEM_BOOTSTRAP", "MPI")
    monkeypatch.setattr(gpus, "child", lambda *args: [json.dumps(("finished", False, "ImportError"))])
    rows = {name: (good, needed) for name, _, good, needed in gpus.checks(True)}
    assert rows["torch on gpus"] == (False, True) and rows["driver"] == (True, False) and "mpi" in rows and "nccl" not in rows


def test_a_machine_without_gpus_gets_a_few_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", *gpus.FOREIGN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor.machine, "gpus", lambda: [])
    monkeypatch.setattr(gpus, "which", lambda name: None)
    monkeypatch.setattr(gpus, "child", None)
    assert doctor.main([]) == 0
    (none,) = capsys.readouterr().out.splitlines()[len(doctor.CHECKS) - 1 :]
    assert none.startswith("note     gpus           none: workers run on the CPU; if there should be some: there is no nv")
    monkeypatch.setenv("NVSHMEM_BOOTSTRAP", "MPI")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.main([]) == 0
    none, mpi = capsys.readouterr().out.splitlines()[len(doctor.CHECKS) - 1 :]
    assert "unset CUDA_VISIBLE_DEVICES" in none and mpi.startswith("note     mpi            NVSHMEM_BOOTSTRAP set")


def test_a_child_that_hangs_or_fails_is_a_line() -> None:
    name, good, text = json.loads(gpus.child("probe", patience=0.01)[-1])
    assert (name, good) == ("in time", False) and "not done after 0.01 s: see whether all GPUs are visible" in text
    name, good, text = json.loads(gpus.child("two", "0")[-1])
    assert (name, good) == ("finished", False) and "ValueError: invalid literal" in text and "gt.cli.exercise two 0" in text


def test_probing_says_what_torch_has() -> None:
    import torch

    (line,) = gpus.child("probe")
    found = json.loads(line)
    assert found["torch"] == torch.__version__ and len(found["gpus"]) == torch.cuda.device_count()
    assert bool(found["nccl"]) == torch.distributed.is_nccl_available()  # said without a GPU too


def test_workers_really_send_and_add_up(server: Any, plain_threads: None) -> None:
    """The same that runs on GPUs, on CPU workers."""

    def start(n: int, config: str) -> None:
        gt.connect(server.address, config=config, token=server.token)

    try:
        rows = list(exercise.exercise(3, start, 1 << 16))
    finally:
        gt.shutdown()
    assert [name for name, _, _ in rows] == ["workers", "training", "put 0-1", "put 1-2", "all-reduce", "transport"]
    assert all(good for _, good, _ in rows), rows
    assert "GB/s" in rows[2][2] and "0 B through the dispatcher" in rows[-1][2]


def test_wrong_values_are_found(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong sums are reported in the lines: these checks can fail."""

    def start(n: int, config: str) -> None:
        gt.connect(server.address, config=config, token=server.token)

    import torch

    real = torch.Tensor.item
    monkeypatch.setattr(gt.client.device.remote_tensor.RemoteTensor, "item", lambda self: real(self) * 1.5 + 1, raising=False)
    try:
        rows = {name: (good, text) for name, good, text in exercise.exercise(2, start, 1 << 16)}
    finally:
        gt.shutdown()
    assert rows["training"][0] is False and "GPUs compute wrong values" in rows["training"][1]
    assert rows["put 0-1"] == (False, "another value arrived than was sent")
    assert rows["all-reduce"][0] is False and "want 3.0" in rows["all-reduce"][1]


def test_an_option_for_several_hosts_wants_hosts(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        doctor.main(["--most", "1MiB"])
    assert end.value.code == 2 and "--most is for checks of several hosts: give --hosts" in capsys.readouterr().err
