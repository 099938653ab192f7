"""torch's autoload: a program that imports torch alone has the device, and pays next to nothing for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gt_autoload
from tests.helpers import ROOT
from tests.helpers.limits import limit


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the entry point of an installed package."""
    info = tmp_path / "gt_torch-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gt-torch\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ngt = gt_autoload:register\n")
    return tmp_path


def run(installed: Path, program: str, **environment: str) -> str:
    """Stdout of a program in which the package is installed."""
    (installed / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, str(installed / "program.py")],
        env={"PYTHONPATH": f"{installed}:{ROOT}", "PATH": "/usr/bin", **environment},
        capture_output=True,
        text=True,
        timeout=limit(90),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_names_the_device_and_imports_nothing_of_gt(installed: Path):
    program = """
import sys, time
import torch
torch.manual_seed(3)
assert torch.device("remote:0").type == "remote" and not any(name.partition(".")[0] == "gt" for name in sys.modules)
assert not torch.accelerator.is_available() and torch.accelerator.device_count() == 0
assert torch.accelerator.current_accelerator(check_available=True) is None
assert next(iter(torch.utils.data.DataLoader([1], pin_memory=True))).tolist() == [1]
model = torch.nn.Linear(2, 2)
model.to("cpu")
assert "gt" not in sys.modules
print("ok")
"""
    assert run(installed, program) == "ok\n"


def test_the_line_of_a_factory_is_the_users(installed: Path):
    program = """
import torch
import gt
gt.cpu_workers(1)
from gt.client.current_session import Current
lines = []
new_origin = Current.recorder.new_origin
Current.recorder.new_origin = lambda *row: (lines.append(row[:2]), new_origin(*row))[1]
x = torch.empty(3, device="remote")
y = torch.empty_strided((3,), (1,), device="remote")
print(lines == [(__file__, 9), (__file__, 10)], lines)
"""
    assert run(installed, program, GT_STALL_TIMEOUT="60").startswith("True"), run(installed, program)


def test_the_first_use_imports_gt(installed: Path):
    program = """
import sys
import torch
torch.manual_seed(3)
model = torch.nn.Linear(3, 2)
wanted = model(torch.ones(1, 3)).tolist()
weight = model.weight
model.to("remote")
assert "gt" in sys.modules and model.weight is weight and weight.device.type == "remote"
assert torch.allclose(model(torch.ones(1, 3, device="remote")).cpu(), torch.tensor(wanted))
assert torch.accelerator.is_available() and torch.accelerator.current_accelerator(True).type == "remote"
assert torch.get_device_module("remote").memory_allocated() > 0
print("ok")
"""
    assert run(installed, program) == "ok\n"


SAVED = "f = io.BytesIO(); torch.save(torch.ones(2), f); f.seek(0); "
LOAD = SAVED + "assert torch.load(f, map_location='remote').is_remote"


ONES = "assert (torch.ones(2, device='remote') + 1).tolist() == [2, 2]"


@pytest.mark.parametrize("first", [LOAD, "import gt; " + LOAD, ONES])
def test_any_use_may_be_the_first(installed: Path, first: str):
    assert run(installed, f"import io, torch\n{first}\nprint('ok')\n") == "ok\n"


def test_torch_s_switch_turns_it_off_and_an_address_makes_it_the_accelerator(installed: Path):
    program = """
import os, sys
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
assert "gt_autoload" not in sys.modules and torch._C._get_privateuse1_backend_name() == "privateuseone"
import gt_autoload
gt_autoload.register()
assert torch.accelerator.is_available() and torch.accelerator.device_count() == 1 and "gt" not in sys.modules
print("ok")
"""
    assert run(installed, program, GT_SERVER="localhost:1") == "ok\n"


def test_no_error_ends_an_import_of_torch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def fail() -> None:
        raise OSError("no disk")

    monkeypatch.setattr(gt_autoload, "_register", fail)
    gt_autoload.register()
    assert "OSError: no disk" in caplog.text


def test_a_gpu_s_name_waits_for_gt(monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(gt_autoload, "GPUS", ("/no/such/device", "/dev/null"))
    assert gt_autoload._gpu(torch)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert not gt_autoload._gpu(torch)
