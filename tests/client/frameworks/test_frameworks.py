"""Lightning, Accelerate and torch.accelerator know the device, whether they are imported before GT or after it."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gt.client.frameworks import accelerate, after_import
from tests.helpers import ROOT
from tests.helpers.limits import limit

# ---- calls after an import


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that can be imported; what the test imports or watches is forgotten after it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_a_watched_module_is_called_with_after_its_import_and_at_once_if_it_is_there(modules: Path):
    for name in ("gt_test_early", "gt_test_late", "gt_test_never"):
        (modules / f"{name}.py").write_text("value = 1\n")
    import gt_test_early  # type: ignore[import-not-found]

    seen: list[tuple[str, int]] = []

    def call(module: ModuleType) -> None:
        seen.append((module.__name__, module.value))

    after_import.watch(dict.fromkeys(("gt_test_early", "gt_test_late", "gt_test_never", "gt_test_missing"), call))
    assert seen == [("gt_test_early", 1)] and gt_test_early.value == 1
    import gt_test_late  # type: ignore[import-not-found]

    assert seen == [("gt_test_early", 1), ("gt_test_late", 1)]
    assert gt_test_late.__spec__.loader.get_source("gt_test_late") == "value = 1\n" and "gt_test_never" not in sys.modules
    del sys.modules["gt_test_late"]
    import gt_test_late

    assert seen[1:] == [("gt_test_late", 1)] * 2
    with pytest.raises(ModuleNotFoundError):
        import gt_test_missing  # type: ignore[import-not-found]  # noqa: F401


def test_a_framework_of_another_form_is_imported_and_warned_of(modules: Path, caplog: pytest.LogCaptureFixture):
    (modules / "gt_test_changed.py").write_text("value = 1\n")
    after_import.watch({"gt_test_changed": lambda module: module.registry})
    with caplog.at_level(logging.WARNING, "gt.client"):
        import gt_test_changed  # type: ignore[import-not-found]
    assert gt_test_changed.value == 1 and "gt_test_changed does not know the device remote: AttributeError" in caplog.text


BF16 = "def is_torch_bf16_gpu_available():\n    return False\n"
OTHER_ARGUMENTS = {  # a version of transformers.training_args, and what it lacks
    "_setup_devices": BF16 + "class TrainingArguments:\n    device = 'cpu'\n",
    "func": BF16 + "class TrainingArguments:\n    _setup_devices = property(lambda self: 'cpu')\n    device = _setup_devices\n",
    "is_torch_bf16_gpu_available": "from functools import cached_property\nclass TrainingArguments:\n"
    "    @cached_property\n    def _setup_devices(self):\n        return 'cpu'\n"
    "    device = property(lambda self: self._setup_devices)\n",
    "TrainingArguments": "",
}


@pytest.mark.parametrize("missing", OTHER_ARGUMENTS)
def test_a_trainer_of_another_form_works_as_without_gt(modules: Path, caplog: pytest.LogCaptureFixture, missing: str):
    (modules / "gt_test_arguments.py").write_text(OTHER_ARGUMENTS[missing])
    after_import.watch({"gt_test_arguments": accelerate.trainer_on_remote})
    with caplog.at_level(logging.WARNING, "gt.client"):
        import gt_test_arguments  # type: ignore[import-not-found]
    assert "gt_test_arguments does not know the device remote" in caplog.text and missing in caplog.text
    if missing != "TrainingArguments":
        assert gt_test_arguments.TrainingArguments().device == "cpu"


# ---- Lightning

# The parts of Lightning that GT touches, under one of its names
STAND_IN = {
    "__init__": "",
    "accelerators": """
from abc import ABC, abstractmethod
class Accelerator(ABC):
    @abstractmethod
    def setup_device(self, device): ...
    @abstractmethod
    def teardown(self): ...
    @staticmethod
    @abstractmethod
    def parse_devices(devices): ...
    @staticmethod
    @abstractmethod
    def get_parallel_devices(devices): ...
    @staticmethod
    @abstractmethod
    def auto_device_count(): ...
    @staticmethod
    @abstractmethod
    def is_available(): ...
    @staticmethod
    @abstractmethod
    def name(): ...
class Registry(dict):
    def register(self, name, accelerator, description, override):
        self[name] = accelerator
AcceleratorRegistry = ACCELERATOR_REGISTRY = Registry()
""",
    "strategies/__init__": "",
    "strategies/single_device": """
class SingleDeviceStrategy:
    def __init__(self, accelerator):
        self.accelerator = accelerator
    @property
    def root_device(self):
        return "cpu"
""",
    "connector": """
class Precision:
    device, scaler = "cuda", object()
class _Connector:
    def __init__(self, accelerator):
        self.accelerator = accelerator
    def _check_and_init_precision(self):
        return Precision()
""",
    "trainer/__init__": "",
    "trainer/connectors/__init__": "",
}
USE = """
import importlib, sys
before, after = "pytorch_lightning", "lightning_fabric"
parts = ["accelerators", "strategies.single_device", sys.argv[1] + "connector"]
def load(name):
    return [importlib.import_module(f"{name}.{part}") for part in parts]
found = [load(before)]
import gt, torch
parts[2] = "connector"
found.append(load(after))
for accelerators, strategies, connector in found:
    remote = accelerators.AcceleratorRegistry["remote"]()
    assert remote.is_available() and remote.auto_device_count() == 1 and remote.name() == "remote"
    assert remote.get_parallel_devices(remote.parse_devices("auto")) == [torch.device("remote", 0)]
    try:
        remote.parse_devices(2)
    except ValueError as error:
        assert "signal groups" in str(error)
    else:
        raise AssertionError
    remote.setup_device(torch.device("remote", 0))
    assert strategies.SingleDeviceStrategy(remote).root_device == torch.device("remote", 0)
    assert strategies.SingleDeviceStrategy(None).root_device == "cpu"
    made = (getattr(connector, "_AcceleratorConnector", None) or connector._Connector)(remote)._check_and_init_precision()
    assert made.device == "remote" and isinstance(made.scaler, torch.amp.GradScaler)
    other = (getattr(connector, "_AcceleratorConnector", None) or connector._Connector)(None)._check_and_init_precision()
    assert other.device == "cuda"
print("ok")
"""


def test_lightning_knows_the_device_whether_it_is_imported_before_or_after(tmp_path: Path):
    for package in ("pytorch_lightning", "lightning_fabric"):
        for name, text in STAND_IN.items():
            path = tmp_path / package / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    trainer = tmp_path / "pytorch_lightning" / "trainer" / "connectors" / "accelerator_connector.py"
    trainer.write_text(STAND_IN["connector"].replace("_Connector", "_AcceleratorConnector"))
    (tmp_path / "use.py").write_text(USE)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "use.py"), "trainer.connectors.accelerator_"],
        cwd=ROOT,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=limit(60),
    )
    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr


def test_lightning_trains_and_validates_on_remote(one: None, plain_threads: None, tmp_path: Path):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 2)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.log("val", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    def metrics(accelerator: str) -> dict[str, float]:
        torch.manual_seed(0)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = lightning.Trainer(accelerator=accelerator, max_epochs=2, default_root_dir=tmp_path, **quiet)
        loader = torch.utils.data.DataLoader(data, batch_size=8)
        model = Model()
        trainer.fit(model, loader, loader)
        assert trainer.strategy.root_device.type == accelerator
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    assert metrics("remote") == metrics("cpu")


# ---- Accelerate


def test_accelerate_takes_the_device_without_a_variable(one: None, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    try:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator()
        model, optimizer = torch.nn.Linear(4, 2), None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4)
        )
        losses = []
        for x in loader:
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert accelerator.device.type == x.device.type == "remote" and losses[1] < losses[0]
        AcceleratorState._reset_state(reset_partial_state=True)
        assert Accelerator(cpu=True).device.type == "cpu"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


# ---- torch.accelerator


def test_torch_accelerator_is_the_device(one: None):
    accelerator = torch.accelerator
    assert accelerator.is_available() and accelerator.current_accelerator(check_available=True).type == "remote"
    assert (accelerator.device_count(), accelerator.current_device_index()) == (1, 0)
    x = torch.ones(1024, device=accelerator.current_accelerator())
    accelerator.synchronize()
    assert accelerator.memory_allocated() >= x.nbytes
    assert accelerator.memory_stats()["allocated_bytes.all.current"] == accelerator.memory_reserved()
    free, total = accelerator.get_memory_info()
    assert 0 < free < total
    assert torch.bfloat16 in accelerator.get_device_capability()["supported_dtypes"]
    for name in ("empty_cache", "empty_host_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        if hasattr(accelerator, name):
            getattr(accelerator, name)()
    with accelerator.device_index(0):
        accelerator.set_stream(accelerator.current_stream())
