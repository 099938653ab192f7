"""Lightning: `Trainer(accelerator="remote")` and `Fabric(accelerator="remote")`.

For Lightning `remote` is one device, which needs no strategy. A config of signal groups splits the work behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAME = "remote"


def calls(register: Callable[[], None]) -> dict[str, Callable[[Any], None]]:
    """By module of Lightning, under each of its names, the function that tells it of the device. register: names the device."""

    def trainer(module: Any) -> None:
        module.AcceleratorRegistry.register(NAME, _accelerator(module.Accelerator, register), "GT", override=True)

    def fabric(module: Any) -> None:
        module.ACCELERATOR_REGISTRY.register(NAME, _accelerator(module.Accelerator, register), "GT", override=True)

    return {
        **{f"{name}.accelerators": trainer for name in ("lightning.pytorch", "pytorch_lightning")},
        **{f"{name}.accelerators": fabric for name in ("lightning.fabric", "lightning_fabric")},
        **{
            f"{name}.strategies.single_device": _single_device
            for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")
        },
        "lightning.pytorch.trainer.connectors.accelerator_connector": _precision,
        "pytorch_lightning.trainer.connectors.accelerator_connector": _precision,
        **{f"{name}.connector": _precision for name in ("lightning.fabric", "lightning_fabric")},
    }


def _accelerator(base: type, register: Callable[[], None]) -> type:
    """The device as a subclass of Lightning's Accelerator."""

    class RemoteAccelerator(base):  # type: ignore[misc,valid-type]
        is_remote = True

        def setup_device(self, device: torch.device) -> None:
            register()

        def teardown(self) -> None:
            """Tensors stay alive after the fit."""

        @staticmethod
        def parse_devices(devices: Any) -> int:
            if devices not in (1, -1, "1", "-1", "auto", [0], "0,"):
                raise ValueError(
                    f"devices is {devices!r}, and remote is one device, whatever the number of workers: leave devices out; "
                    "signal groups of a config split the work"
                )
            return 1

        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            register()
            return [torch.device(NAME, 0)]

        @staticmethod
        def auto_device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return NAME

        @classmethod
        def device_name(cls, device: Any = None) -> str:
            return NAME

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return {"remote.memory_allocated": torch.remote.memory_allocated()}  # type: ignore[attr-defined]

    return RemoteAccelerator


def _single_device(module: Any) -> None:
    """Lightning gives an accelerator that it does not know the CPU as its device."""
    strategy = module.SingleDeviceStrategy
    original = strategy.root_device.fget

    def root_device(self: Any) -> torch.device:
        return torch.device(NAME, 0) if getattr(self.accelerator, "is_remote", False) else original(self)

    strategy.root_device = property(root_device)


def _precision(module: Any) -> None:
    """Lightning gives autocast and scaler of an accelerator that it does not know CUDA as their device."""
    connector = getattr(module, "_AcceleratorConnector", None) or module._Connector
    original = connector._check_and_init_precision

    def check_and_init_precision(self: Any) -> Any:
        precision = original(self)
        if getattr(self.accelerator, "is_remote", False) and getattr(precision, "device", "") == "cuda":
            precision.device = NAME
            if precision.scaler is not None:
                precision.scaler = torch.amp.GradScaler(NAME)
        return precision

    connector._check_and_init_precision = check_and_init_precision
