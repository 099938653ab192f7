"""Legal configs that probably mean something else: each is named, with what was perhaps meant."""

from __future__ import annotations

import pytest

from gt.config.doubts import doubts
from gt.config.load import load
from tests.helpers import CONFIGS, EXAMPLES

STAGE = "s: {workers: [0, 1]}\ns_colpar: {workers: [0, 1]}\ns_rowpar: {workers: [0, 1]}\n"


@pytest.mark.parametrize("name", ["pp_0_colpr", "s_col_par", "s_COLPAR", "s-colpar", "colpars", "s_colparallel", "s_rowpra"])
def test_a_name_that_ends_almost_in_a_suffix(name: str) -> None:
    (doubt,) = doubts(load(f"{name}: {{workers: [0, 1]}}", "sharding.yaml"))
    suffix = "*_rowpar" if "row" in name else "*_colpar"
    assert doubt == f"{name} (sharding.yaml:1): an ordinary group, which splits no weights; did you mean {suffix}?"


@pytest.mark.parametrize("name", ["pp_stage0", "data", "rows", "columns", "head_part", "part", "color", "s_colpar", "parallel"])
def test_an_ordinary_name_is_no_doubt(name: str) -> None:
    assert doubts(load(f"{name}: {{workers: [0, 1]}}")) == []


def test_groups_of_one_stage_on_other_workers() -> None:
    text = STAGE.replace("s_colpar: {workers: [0, 1]}", "s_colpar: {workers: [2, 3]}")
    found = doubts(load(text, "sharding.yaml"))
    assert found[0].startswith("s_colpar (sharding.yaml:2) has workers [2, 3], and s has [0, 1]: activations are transferred")
    assert len(found) == 1
    lone = "s_colpar: {workers: [[0], [1]]}\ns_rowpar: {workers: null}\n"
    assert [line.partition(" has")[0] for line in doubts(load(lone))] == ["s_colpar (config:1)", "s_rowpar (config:2)"]


def test_an_axis_that_splits_nothing() -> None:
    (doubt,) = doubts(load(STAGE.replace("s: {workers: [0, 1]}", "s: {shard: {axis: 1, workers: [0, 1]}}")))
    assert "axis 1 splits nothing, since with s_colpar it is a tensor-parallel stage" in doubt
    (doubt,) = doubts(load("d: {replicated: true, shard: {axis: 1, workers: [0, 1]}}"))
    assert "since it is replicated" in doubt


def test_a_file_without_groups() -> None:
    assert doubts(load("# nothing\n", "sharding.yaml")) == ["sharding.yaml: no groups in it, so everything runs on one worker"]
    assert doubts(load("")) == []


def test_a_schedule_without_stages() -> None:
    (doubt,) = doubts(load("gt: {schedule: 1f1b}"))
    assert doubt.startswith("config: schedule 1f1b orders the stages of a pipeline, and no group has workers; give each stage")
    (doubt,) = doubts(load("a: {workers: [0, 1]}\nb: {workers: [0, 1]}\ngt: {schedule: zb-h1}"))
    assert "all groups have the same workers" in doubt
    assert doubts(load("a: {workers: [0]}\nb: {workers: [1]}\ngt: {schedule: 1f1b}")) == []


def test_our_own_configs_are_no_doubt() -> None:
    files = [*CONFIGS.rglob("*.yaml"), *EXAMPLES.rglob("*.yaml")]
    assert len(files) > 40
    for path in files:
        assert doubts(load(path.read_text(), str(path))) == []
