"""The JSON Schema of a config, for editors, made from schema.py's tables. `gt schema` prints it."""

from __future__ import annotations

import json
from typing import Any

from gt.config.schema import (
    CHECKPOINT_KEYS,
    DATA_AXIS,
    DTYPES,
    GROUP_KEYS,
    GT_KEYS,
    MAX_AXIS,
    MAX_FUSED_PARTS,
    OFFLOAD_KEYS,
    PRECISION_KEYS,
    RESERVED,
    RULE_KEYS,
    SHARD_KEYS,
    SPACES,
    STAGES,
    STEPS,
    SUFFIX_AXIS,
)
from gt.ir.schedules import NAMES
from gt.ir.text import UNITS

_NUMBERS = {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"type": "integer", "minimum": 0}}
_GROUP_NAMES = {"type": "array", "minItems": 1, "items": {"type": "string"}}

# Forms are texts, which errors show too. One that is missing here raises KeyError, so the two cannot drift apart.
# the form of a value, as schema.py states it -> its JSON Schema
FORMS: dict[str, dict[str, Any]] = {
    "a whole number": {"type": "integer", "minimum": 0, "maximum": MAX_AXIS},
    "a whole number from 1 to 999": {"type": "integer", "minimum": 1, "maximum": MAX_FUSED_PARTS},
    "true or false": {"type": "boolean"},
    "a list of worker numbers": {"anyOf": [_NUMBERS, {"type": "array", "minItems": 1, "items": _NUMBERS}, {"type": "null"}]},
    "the name of a group": {"type": "string"},
    "the name of a group, a suffix, or a list of groups": {"anyOf": [{"type": "string"}, _GROUP_NAMES]},
    "a list of worker numbers, null for all, or dp: the outer lists of groups' workers": {
        "anyOf": [_NUMBERS, {"type": "null"}, {"const": DATA_AXIS}]
    },
    "0, 1, 2 or 3": {"type": "integer", "enum": list(STAGES)},
    "fp32, bf16 or fp16": {"type": "string", "enum": list(DTYPES)},
    "cpu, nvme or none": {"type": "string", "enum": list(SPACES)},
    "auto, host or device": {"type": "string", "enum": list(STEPS)},
    "the absolute path of a folder": {"type": "string", "pattern": "^/"},
    "bytes of gradients, as 25MiB": {"type": "string", "pattern": rf"^\d+(\.\d+)? *({'|'.join(UNITS)})$"},
    "a module pattern, or a list of them": {"anyOf": [{"type": "string"}, _GROUP_NAMES]},
    "the name of a schedule": {"type": "string", "pattern": f"^({'|'.join(NAMES)})(:.*)?$"},
}


def schema() -> dict[str, Any]:
    """The schema as a dict. KeyError if schema.py has a form that FORMS lacks."""
    rule = {"anyOf": [*FORMS[RULE_KEYS["group"]]["anyOf"], _mapping(RULE_KEYS, required=["group"])]}
    modules = {"type": "object", "additionalProperties": rule}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "signal groups of GT",
        "type": "object",
        "properties": {RESERVED: _mapping(GT_KEYS, {**_settings(), "modules": {**modules, "description": GT_KEYS["modules"]}})},
        "patternProperties": {f"{suffix}$": _group({"const": axis}) for suffix, axis in SUFFIX_AXIS.items()},
        "additionalProperties": _group(),
    }


def _settings() -> dict[str, Any]:
    """Schemas of the settings that are mappings."""
    precision = {"anyOf": [FORMS["fp32, bf16 or fp16"], _mapping(PRECISION_KEYS, required=["compute"])]}
    checkpoint = _mapping(CHECKPOINT_KEYS, required=["modules"])
    own = {"precision": precision, "activation_checkpoint": checkpoint, "offload": _mapping(OFFLOAD_KEYS)}
    return {key: {**schema, "description": GT_KEYS[key]} for key, schema in own.items()}


def text() -> str:
    return json.dumps(schema(), indent=1) + "\n"


def _group(axis: dict[str, Any] | None = None) -> dict[str, Any]:
    """A signal group. axis: the schema of its axis, if its suffix decides that."""
    own = {"axis": {**axis, "description": SHARD_KEYS["axis"]}} if axis else {}
    shard = {**_mapping(SHARD_KEYS, own), "description": GROUP_KEYS["shard"]}
    return {
        **_mapping(GROUP_KEYS, {"shard": shard}),
        "anyOf": [{"required": [key]} for key in ("workers", "shard", "compile")],
    }


def _mapping(keys: dict[str, str], own: dict[str, Any] | None = None, required: list[str] | None = None) -> dict[str, Any]:
    """A mapping with these keys. own: schemas of those whose form is a mapping."""
    own = own or {}
    properties = {key: own[key] if key in own else {**FORMS[form], "description": form} for key, form in keys.items()}
    made: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**made, "required": required} if required else made
