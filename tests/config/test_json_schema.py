"""The JSON Schema of configs takes what the loader takes, and refuses what an editor can refuse."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from gt.cli import main
from gt.config.json_schema import schema
from gt.config.load import load
from gt.errors import ConfigError
from tests.helpers import CONFIGS, EXAMPLES

TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}


def fits(value: Any, form: dict[str, Any]) -> bool:
    """A validator for the keywords that the schema uses."""
    want = TYPES.get(form.get("type", ""))
    if want is not None and (not isinstance(value, want) or (want is int and isinstance(value, bool))):
        return False
    if value not in form.get("enum", [value]) or value != form.get("const", value):
        return False
    if isinstance(value, int) and not form.get("minimum", value) <= value <= form.get("maximum", value):
        return False
    if isinstance(value, str) and "pattern" in form and not re.search(form["pattern"], value):
        return False
    if isinstance(value, list):
        unique = not form.get("uniqueItems") or len({repr(item) for item in value}) == len(value)
        if len(value) < form.get("minItems", 0) or not unique or not all(fits(v, form.get("items", {})) for v in value):
            return False
    if isinstance(value, dict) and not _mapping_fits(value, form):
        return False
    return "anyOf" not in form or any(fits(value, one) for one in form["anyOf"])


def _mapping_fits(value: dict, form: dict[str, Any]) -> bool:
    if not set(form.get("required", ())) <= value.keys():
        return False
    for key, item in value.items():
        forms = [form["properties"][key]] if key in form.get("properties", {}) else []
        forms += [one for pattern, one in form.get("patternProperties", {}).items() if re.search(pattern, key)]
        rest = form.get("additionalProperties", {})
        if not forms and rest is False:
            return False
        if not all(fits(item, one) for one in forms or [rest]):
            return False
    return True


def test_the_stored_schema_is_the_one_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert capsys.readouterr().out == (CONFIGS / "schema.json").read_text(), "run `python -m tools.docs`"


def test_every_config_of_ours_fits() -> None:
    form = json.loads(json.dumps(schema()))
    for path in [*CONFIGS.rglob("*.yaml"), *EXAMPLES.rglob("*.yaml")]:
        assert fits(yaml.safe_load(path.read_text()), form), path


@pytest.mark.parametrize(
    "text",
    [
        "a: {workers: null}",
        "a: {compile: true}",
        "a: {shard: {replicated: true, workers: [[0], [1]]}, backward: a}",
        "a: {shard: {axis: 2, workers: [0, 1]}}",
        "a_colpar: {shard: {axis: 1, workers: [0, 1]}}\ngt: {schedule: 'auto:2GiB'}",
        "a: {workers: [0]}\na_colpar: {workers: [0]}\ngt: {modules: {'*': a, 'h.*': {group: _colpar, parts: 3}}}",
        "gt: {data_parallel: null, zero: 1}",
        "gt: {data_parallel: [0, 1], zero: 3}",
        "a: {workers: [[0], [1]]}\ngt: {data_parallel: dp, zero: 2}",
        "a: {workers: [0]}\nb: {workers: [1]}\ngt: {modules: {'h.*': [a, b]}}",
    ],
)
def test_a_config_that_the_loader_takes_fits(text: str) -> None:
    load(text)
    assert fits(yaml.safe_load(text), schema())


@pytest.mark.parametrize(
    "text",
    [
        "a: {worker: [0, 1]}",
        "a: {workers: 2}",
        "a: {workers: 0-3}",
        "a: {workers: []}",
        "a: {workers: [0, 0]}",
        "a: {workers: [-1]}",
        "a: {}",
        "a: {backward: a}",
        "a: {shard: {axis: 7, workers: [0, 1]}}",
        "a: {shard: {axis: -1, workers: [0, 1]}}",
        "a_colpar: {shard: {axis: 0, workers: [0, 1]}}",
        "a: {workers: [0], compile: 1}",
        "a: {workers: [0]}\ngt: {schedule: 1f1c}",
        "a: {workers: [0]}\ngt: {modules: {'*': {parts: 3}}}",
        "a: {workers: [0]}\ngt: {modules: {'*': {group: a, parts: 0}}}",
        "gt: {data_parallel: pp}",
        "a: {workers: [[0], [1]]}\ngt: {zero: 4}",
        "parallelism: {tp: 2}",
    ],
)
def test_a_mistake_is_refused_by_both(text: str) -> None:
    with pytest.raises(ConfigError):
        load(text)
    assert not fits(yaml.safe_load(text), schema())
