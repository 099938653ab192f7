"""Doubts about a config that is legal: names, workers and axes that probably were to mean something else."""

from __future__ import annotations

import difflib
import re

from gt.config.match import stem
from gt.config.schema import SUFFIX_AXIS, Config, Group

MAX_DOUBTS = 8  # warnings about one config
MAX_SUFFIX_CHARACTERS = 16  # characters of a name's end that may be a misspelt suffix
MIN_SIMILARITY = 0.75  # difflib's ratio: colpr, col_par and colpars are similar to colpar; rows and part are not
_SEPARATORS = re.compile(r"[_\-. ]")


def doubts(config: Config) -> list[str]:
    """Sentences for the user, one for each doubt."""
    if not config.groups:
        empty = [f"{config.path}: no groups in it, so everything runs on one worker"] if config.path else []
        return empty + _schedule(config)
    warnings = _schedule(config)
    for group in config.groups.values():
        warnings += filter(None, (_suffix(config, group), _elsewhere(config, group), _unused_axis(config, group)))
    return warnings[:MAX_DOUBTS]


def _schedule(config: Config) -> list[str]:
    """A schedule where no two groups can be stages of a pipeline."""
    # Stages are groups on different workers. Groups without workers, which only say `compile`, are none.
    places = {(group.workers, group.everyone) for group in config.groups.values() if group.workers or group.everyone}
    if not config.schedule or len(places) > 1:
        return []
    why = "all groups have the same workers" if places else "no group has workers"
    said = f"schedule {config.schedule} orders the stages of a pipeline, and {why}"
    return [f"{config.path or 'config'}: {said}; give each stage a group of its own, or leave schedule out"]


def _suffix(config: Config, group: Group) -> str:
    """A name that ends almost in a suffix."""
    meant = _meant(group.name) if not group.name.endswith(tuple(SUFFIX_AXIS)) else ""
    if not meant:
        return ""
    kind = "a group without workers" if not group.workers and not group.everyone else "an ordinary group"
    return f"{config.where(group.name)}: {kind}, which splits no weights; did you mean *{meant}?"


def _meant(name: str) -> str:
    """The suffix that the end of a name was perhaps to be, or \"\"."""
    # The last part of the name, and the last two joined: "mlp_col_par" was meant to be "mlp_colpar".
    parts = [part.lower() for part in _SEPARATORS.split(name[-2 * MAX_SUFFIX_CHARACTERS :])]
    for end in (parts[-1], "".join(parts[-2:])):
        names = [suffix[1:] for suffix in SUFFIX_AXIS]
        near = difflib.get_close_matches(end, names, 1, MIN_SIMILARITY) if len(end) <= MAX_SUFFIX_CHARACTERS else []
        near = near or [name for name in names if end.startswith(name)]
        if near:
            return f"_{near[0]}"
    return ""


def _elsewhere(config: Config, group: Group) -> str:
    """A tensor-parallel group on other workers than its stage, or than the other group of that."""
    # The groups of one stage (mlp, mlp_colpar, mlp_rowpar) should have the same workers. The first difference is told.
    own = stem(group.name)
    if own == group.name:
        return ""
    for name in (own, *(own + suffix for suffix in SUFFIX_AXIS)):
        other = config.groups.get(name)
        if other is None or name == group.name:
            continue
        if (other.workers, other.everyone) != (group.workers, group.everyone):
            here, there = _shown(group), _shown(other)
            return (
                f"{config.where(group.name)} has workers {here}, and {name} has {there}: activations are transferred between "
                "them at every use; give both the same workers"
            )
        return ""
    return ""


def _shown(group: Group) -> str:
    rows = [list(row) for row in group.workers]
    return "null" if group.everyone else str(rows if group.nested else rows[0] if rows else [])


def _unused_axis(config: Config, group: Group) -> str:
    """An axis that splits nothing: of a tensor-parallel stage, or of a replicated group."""
    if not group.axis or group.name.endswith(tuple(SUFFIX_AXIS)):
        return ""
    stage = next((group.name + suffix for suffix in SUFFIX_AXIS if group.name + suffix in config.groups), "")
    why = f"with {stage} it is a tensor-parallel stage" if stage else "it is replicated" if group.replicated else ""
    return f"{config.where(group.name)}: axis {group.axis} splits nothing, since {why}; leave axis out" if why else ""
