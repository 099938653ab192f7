"""No message keeps the dispatcher's loop busy: the costliest ones that tests.stress.costs knows and that are quickly made."""

from __future__ import annotations

import pytest

from gt.config.load import hint
from tests.stress.costs import BOUND, CASES, as_in_the_server, measured, words

SLOW = 3  # times as long a turn may take beside other processes that use the same caches
QUICK = [
    name for name in CASES if name.startswith(("hello", "ops_of_origins", "ops_of_deep", "ops_of_n", "ops_of_a_temp", "fetch"))
]
QUICK += [
    "ops_of_templates_that_differ",
    "ops_of_many_empty_lists",
    "ops_of_views_of_one",
    "ops_of_a_heavy_list",
    "describe_4096",
]
QUICK += ["describe_of_what_is_none", "a_report_of_much", "a_trouble", "a_goodbye_of_a_mebibyte", "what_nobody_asked_for"]
QUICK += ["a_trouble_of_many_ops", "an_interrupt_of_many_ops", "a_fragment_that_is_recorded", "fragments_that_are_alike"]


@pytest.mark.parametrize("name", QUICK)
def test_the_costliest_message_of_a_kind_is_short(name):
    with as_in_the_server():
        longest, turns, _ = measured(name)
    assert longest < SLOW * BOUND, f"{longest:.1f} ms of CPU time in one of {turns} turns"


def test_a_hint_is_among_few_short_names():
    names = words(2000, 64)
    assert hint("stage", ["stage0", *names]) == "; did you mean 'stage0'?"
    assert "did you mean" not in hint("x" * 65, ["x" * 64])
    assert len(hint("nothing", [name * 20 for name in names])) < 20 * 70
