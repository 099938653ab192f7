"""Configs from Python: dicts, texts, and groups that are registered by calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gt
from gt.config import ShardConfig, SignalConfig, clear_configs, load_config, register_config
from gt.config.load import load, resolve
from gt.config.registry import source
from gt.errors import ConfigError

TEXT = "s: {workers: [0, 1]}\n"


@pytest.fixture(autouse=True)
def cleared() -> Iterator[None]:
    yield
    clear_configs()


def test_a_config_is_a_path_a_text_or_a_dict(tmp_path: Path) -> None:
    path = tmp_path / "sharding.yaml"
    path.write_text(TEXT)
    want = load(TEXT).groups["s"].workers
    for config in (str(path), path, TEXT, "s: {workers: [0, 1]}", "{s: {workers: [0, 1]}}", {"s": {"workers": (0, 1)}}):
        assert load(*source(config, "")).groups["s"].workers == want
    assert load(*source(None, str(path))).groups["s"].workers == want
    assert source("", str(path)) == ("", "")
    assert load(*source({"s": {"workers": range(2)}}, "")).groups["s"].workers == want


def test_registered_groups_join_those_of_the_file() -> None:
    register_config("mine", SignalConfig(ShardConfig(axis=0, workers=[2, 3]), backward="back"))
    register_config("back", {"workers": [2, 3]})
    register_config("fast", SignalConfig(compile=True))
    load_config("s: {workers: [4]}")
    config = load(*source(TEXT, ""))
    assert set(config.groups) == {"s", "mine", "back", "fast"}
    assert config.groups["mine"].backward == "back" and config.groups["mine"].flat == (2, 3)
    assert config.groups["s"].flat == (4,), "the registered group replaces the file's"
    assert config.groups["fast"].compile and not config.groups["fast"].workers
    assert source("", "") == ("", "")


def test_a_file_that_the_reader_accepts_can_be_registered() -> None:
    """libyaml accepts a tab after a colon, Python's own reader of YAML does not."""
    load_config("s:\t{workers: [4]}\n")
    assert load(*source("t:\t{workers: [1]}\n", "")).groups.keys() == {"s", "t"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: register_config("s", {"worker": [0]}), "did you mean 'workers'"),
        (lambda: register_config("s_colpar", SignalConfig(ShardConfig(axis=0, workers=[0, 1]))), "axis is 0"),
        (lambda: register_config("s", SignalConfig(ShardConfig(axis=7, workers=[0, 1]))), "axis is 7"),
        (lambda: source({"s": {"workers": torch.ones(2)}}, ""), "of type Tensor; want text, numbers"),
        (lambda: source({"gt": {"precision": torch.bfloat16}}, ""), "torch.bfloat16 of type dtype; want text"),
        (lambda: source(3, ""), "config is 3 of type int; want a path"),
        (lambda: source("nosuch.yaml", ""), "cannot be read"),
        (lambda: source(Path("nosuch.yaml"), ""), "nosuch.yaml: cannot be read"),
    ],
)
def test_a_mistake_is_a_config_error(call, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_null_means_all_workers_of_the_session() -> None:
    config = load("s: {shard: {axis: 0, workers: null}}\nt: {workers: [1]}")
    assert config.groups["s"].everyone and not config.groups["s"].workers
    known = resolve(config, [0, 2, 3])
    assert known.groups["s"].flat == (0, 2, 3) and known.groups["t"].flat == (1,)


def test_a_session_takes_a_dict_with_all_workers_and_a_replicated_group(server) -> None:
    config = {"all": {"workers": None}, "same": {"replicated": True, "workers": [0, 1]}}
    gt.connect(server.address, config=config, token=server.token)
    try:
        x = torch.ones(8, 2, device="remote")
        with gt.signal.context("all"):
            y = x * 2
        with gt.signal.context("same"):
            z = x * 2
        assert gt.inspect(y)["layout"] == "[S(0)]" and len(gt.inspect(y)["pieces"]) == 8
        assert gt.inspect(z)["layout"] == "[R]" and len(gt.inspect(z)["pieces"]) == 2
        assert torch.equal(y.cpu(), z.cpu())
    finally:
        gt.shutdown()


def test_a_group_that_only_says_compile_places_nothing(server) -> None:
    gt.connect(server.address, config="fast: {compile: true}\nd: {workers: [0, 1]}", token=server.token)
    try:
        with gt.signal.context("d"), gt.signal.context("fast"):
            y = torch.ones(8, 2, device="remote") + 1
        with gt.signal.context("fast"):
            z = torch.ones(8, 2, device="remote") + 1
        z.sum()
        assert gt.inspect(y)["layout"] == "[S(0)]" and gt.inspect(z)["layout"] == "[]"
    finally:
        gt.shutdown()


def test_auto_shard_is_data_parallel_over_all_workers(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GT_AUTO_SHARD", "1")
    gt.connect(server.address, token=server.token)
    try:
        x, w = torch.randn(16, 4), torch.randn(4, 2)
        leaf = w.to("remote").requires_grad_()
        y = x.to("remote") @ leaf
        y.sum().backward()
        assert gt.inspect(y)["layout"] == "[S(0)]" and len(gt.inspect(y)["pieces"]) == 8
        assert gt.inspect(leaf)["layout"] == "[R]" and gt.inspect(leaf.grad)["layout"] == "[P]"
        torch.testing.assert_close(leaf.grad.cpu(), x.sum(0)[:, None].expand(4, 2))
    finally:
        gt.shutdown()
    gt.connect(server.address, config="", token=server.token)
    try:
        assert gt.signal.groups() == []
    finally:
        gt.shutdown()
