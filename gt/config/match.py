"""Which rule a module's name falls under: shell patterns with character classes, the most specific wins.

`*` also crosses dots, so `transformer.h.[0-5].*` is everything inside the first six blocks. A pattern that ends in a
name is about that name and beats one that ends in `*`; among equals the one with more written-out characters wins, then
the later one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from gt.config.schema import Rule

_WILD = re.compile(r"\[!?.[^\]]*\]|\*|\?")


def specificity(pattern: str) -> tuple[bool, bool, int]:
    """Sorts patterns: no wildcard at all, then ends in a name, then characters written out."""
    literal = _WILD.sub("", pattern)
    return literal == pattern, not pattern.endswith("*"), len(literal)


def match(rules: Sequence[Rule], name: str) -> Rule | None:
    """The most specific rule whose pattern the name matches, or None."""
    found = [(specificity(rule.pattern), at, rule) for at, rule in enumerate(rules) if fnmatchcase(name, rule.pattern)]
    return max(found, key=lambda row: row[:2])[2] if found else None


def unmatched(rules: Sequence[Rule], names: Iterable[str]) -> list[Rule]:
    """Rules that match no name at all, so that a misspelt pattern is noticed."""
    names = list(names)
    return [rule for rule in rules if not any(fnmatchcase(name, rule.pattern) for name in names)]
