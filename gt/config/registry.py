"""Configs that a program states in Python: signal groups by function calls, and any form of `config=`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from gt.config.files import read
from gt.config.load import LOADER, load
from gt.errors import ConfigError

Workers = Sequence[int] | Sequence[Sequence[int]]
Given = str | os.PathLike[str] | Mapping[str, Any]  # a path, YAML text or the mapping
_registered: dict[str, dict[str, Any]] = {}  # groups by name


@dataclass
class ShardConfig:
    """`shard:` of a signal group. workers: None for all."""

    axis: int | None = None
    workers: Workers | None = None
    replicated: bool = False


@dataclass
class SignalConfig:
    """One signal group. shard: None for a group that only says `compile`."""

    shard: ShardConfig | None = None
    backward: str | None = None
    compile: bool = False


def register_config(name: str, config: SignalConfig | Mapping[str, Any]) -> None:
    """Add a signal group to the configs of sessions that begin from now on; one of the same name is replaced.

    config: a SignalConfig, or the group as in the YAML. ConfigError for a group that the YAML may not have.
    """
    group = _group(config) if isinstance(config, SignalConfig) else dict(config)
    # Checked at once, by itself. The group that `backward` names may be registered later, so one stands in for it.
    later = group.get("backward")
    known = {later: {"workers": None}} if isinstance(later, str) and later != name else {}
    load(_text({**known, name: group}), "gt.register_config")
    _registered[name] = group


def load_config(config: Given) -> None:
    """Add the groups of a YAML to the configs of sessions that begin from now on. config: as for gt.connect."""
    text, path = _given(config)
    load(text, path)
    _registered.update(yaml.load(text, LOADER) or {})


def clear_configs() -> None:
    """Forget the groups of register_config and load_config."""
    _registered.clear()


def source(config: Given | None, default: str) -> tuple[str, str]:
    """Text and path of a session's config: a path, YAML text or a mapping; None for `default`, a path.

    Registered groups are added, unless the config is "". ConfigError for a file that cannot be read.
    """
    text, path = _given(default if config is None else config)
    if not _registered or config == "":
        return text, path
    # Loaded alone first: a fault has the file's line, which the joined text would not have.
    load(text, path)
    return _text({**(yaml.load(text, LOADER) or {}), **_registered}), path or "gt.register_config"


def _given(config: Given) -> tuple[str, str]:
    if isinstance(config, Mapping):
        return _text(dict(config)), "the dict"
    if isinstance(config, os.PathLike):
        path = os.fsdecode(config)
        return read(path), path
    if not isinstance(config, str):
        raise ConfigError(f"config is {config!r:.80} of type {type(config).__name__}; want a path, YAML text or a dict")
    # A path has none of these.
    if "\n" in config or config.lstrip().startswith("{") or ": " in config:
        return config, "the text"
    return read(config), config


def _group(config: SignalConfig) -> dict[str, Any]:
    # As the YAML would have it: keys at their defaults are left out, so that `load` checks both forms alike.
    group: dict[str, Any] = {}
    if config.shard is not None:
        said = dataclasses.asdict(config.shard).items()
        group["shard"] = {"workers": None, **{key: value for key, value in said if value is not None and value is not False}}
    if config.backward is not None:
        group["backward"] = config.backward
    if config.compile:
        group["compile"] = True
    return group


def _text(config: dict[str, Any]) -> str:
    try:
        return yaml.safe_dump(_plain(config), sort_keys=False)
    except yaml.representer.RepresenterError as error:
        value, want = error.args[-1], "want text, numbers, true, false, null, lists and dicts"
        raise ConfigError(f"the config has {value!r:.80} of type {type(value).__name__}; {want}") from None


def _plain(value: Any) -> Any:
    """Tuples and ranges as lists, mappings as dicts."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_plain(item) for item in value]
    return value
