"""Parts that several tests share."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIGS, EXAMPLES = ROOT / "configs", ROOT / "examples"


def longer(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Cases of a parametrized test. `make test` runs those that are kept; the others repeat their code: `make test-long`.

    A case of several parameters is a tuple.
    """
    cases = list(cases)
    if unknown := [case for case in kept if case not in cases]:
        raise ValueError(f"cases to keep that are none: {unknown}")
    return [
        case if case in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in cases
    ]
