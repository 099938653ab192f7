"""Configs: the YAML of signal groups, parsed and checked. Knows nothing about torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gt.config.registry import ShardConfig, SignalConfig, clear_configs, load_config, register_config

__all__ = ["ShardConfig", "SignalConfig", "clear_configs", "load_config", "register_config"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gt.config' has no attribute {name!r}")
    from gt.config import registry  # late: it needs YAML, which `gt doctor` can do without

    return vars(registry)[name]
