"""Rules of modules by name: shell patterns with character classes, of which the most specific wins.

`*` also matches dots, so `transformer.h.[0-5].*` matches everything inside the first six blocks. A pattern that ends in a
name beats one that ends in `*`. Among equals more literal characters win, then the later rule. The model itself has the name
"", which only the pattern "" matches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from gt.config.schema import SUFFIX_AXIS, Rule
from gt.errors import ConfigError

_WILD = re.compile(r"\[!?.[^\]]*\]|\*|\?")


def specificity(pattern: str) -> tuple[bool, bool, int]:
    """Sort key of a pattern: no wildcard, then an end in a name, then the number of literal characters."""
    literal = _WILD.sub("", pattern)
    return literal == pattern, not pattern.endswith("*"), len(literal)


def match(rules: Sequence[Rule], name: str) -> Rule | None:
    """The most specific rule whose pattern the name matches, or None."""
    # The place is the last part of the key, so that of equal patterns the later rule wins.
    found = [(specificity(rule.pattern), at, rule) for at, rule in enumerate(rules) if matches(name, rule.pattern)]
    return max(found, key=lambda row: row[:2])[2] if found else None


def matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) if name else not pattern


def unmatched(rules: Sequence[Rule], names: Iterable[str]) -> list[Rule]:
    """Rules that match no name, such as misspelt patterns."""
    names = list(names)
    return [rule for rule in rules if not any(matches(name, rule.pattern) for name in names)]


# ---- the group of each module


def assign(rules: Sequence[Rule], names: Iterable[str]) -> dict[str, Rule]:
    """Rules of the modules that have one, each with its one group there. names: parents before children."""
    names = list(names)
    runs = {rule.pattern: cut(rule, names) for rule in rules if rule.stages}
    placed: dict[str, Rule] = {}
    # Parents come first, so the group around a module is known when a suffix asks for it.
    for name in names:
        rule = match(rules, name)
        if rule is None:
            continue
        group = rule.group
        # Several stages: the module has the stage of the outermost module around it that the rule matches.
        if rule.stages:
            group = next(runs[rule.pattern][module] for module in (name, *around(name)) if module in runs[rule.pattern])
        elif group in SUFFIX_AXIS:
            # A suffix means a group of the stage around: of the nearest module around this one that has a group.
            outer = next((placed[module] for module in around(name) if module in placed), None)
            if outer is None:
                hint = f"give {name.partition('.')[0]!r} a stage, or name a whole group"
                raise ConfigError(f"modules {rule.pattern!r}: {name} is in no stage, so {group} means no group there; {hint}")
            group = stem(outer.group) + group
        placed[name] = replace(rule, group=group, stages=())
    return placed


def cut(rule: Rule, names: Sequence[str]) -> dict[str, str]:
    """The stage of each outermost module that a rule of several stages matches. Earlier stages get the longer runs."""
    # Only outermost modules are divided: what is inside of one goes with it. 7 blocks in 3 stages become 3, 2 and 2.
    matched = {name for name in names if matches(name, rule.pattern)}
    outermost = [name for name in names if name in matched and not any(outer in matched for outer in around(name))]
    count, extra = divmod(len(outermost), len(rule.stages))
    if matched and not count:
        modules = f"{len(outermost)} modules for {len(rule.stages)} stages"
        raise ConfigError(f"modules {rule.pattern!r}: {modules}, want a module or more for each; name fewer stages")
    lengths = [count + (place < extra) for place in range(len(rule.stages))]
    order = [stage for stage, length in zip(rule.stages, lengths) for _ in range(length)]
    return dict(zip(outermost, order))


def around(name: str) -> list[str]:
    """Names of the modules around a module, innermost first, the model itself last."""
    parts = name.split(".")
    return [".".join(parts[:at]) for at in range(len(parts) - 1, -1, -1)] if name else []


def stem(group: str) -> str:
    """The stage's name, of any of its groups."""
    for suffix in SUFFIX_AXIS:
        group = group.removesuffix(suffix)
    return group
