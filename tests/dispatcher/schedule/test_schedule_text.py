"""Schedules print and parse; a wrong token is named with its place, and rows that are not whole with what they lack."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gt.dispatcher.schedule import Action, ScheduleRequest, check, make, parse, show, text, uniform
from gt.errors import ConfigError
from tests.dispatcher.schedule.schedules import random_costs, random_rows

actions = st.builds(Action, st.integers(0, 999_999), st.sampled_from("FBIW"), st.integers(0, 999_999)) | st.builds(
    Action, st.integers(0, 999), st.sampled_from("LRO"), st.just(-1)
)
rows = st.lists(st.lists(actions, min_size=1).map(tuple), max_size=5).map(tuple)


@given(rows)
@settings(max_examples=200, deadline=None)
def test_printed_schedules_parse(made: tuple) -> None:
    assert parse(text(made)) == made


def test_text_is_one_line_a_worker() -> None:
    assert str(make(ScheduleRequest("1f1b", range(2), 2))) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert parse("# two workers\n 0F0, 0B0 # first\n\n1F0,\t1B0,1R") == (
        (Action(0, "F", 0), Action(0, "B", 0)),
        (Action(1, "F", 0), Action(1, "B", 0), Action(1, "R")),
    )


@pytest.mark.parametrize("token", ["0X1", "", "0F", "F0", "0R1", "-1F0", "0F0 0F1", "0f0", "٣F0", "0F1000000"])
def test_a_wrong_token_is_named_with_its_place(token: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(f"0F0,0B0\n\n# and\n1F0,1B0,{token},1F1")
    said = f"line 4, action 3: {token!r} is not an action; want a stage, one of F B I W and a micro-batch"
    assert str(error.value).startswith(said)


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_whole_rows_pass_and_any_that_lack_repeat_or_mix_an_action_do_not(seed: int, stages: int, m: int) -> None:
    rng = random.Random(seed)
    made = random_rows(rng, [(stage,) for stage in range(stages)], m, random_costs(rng, stages))
    check(made)
    check(made, m)
    row = rng.choice(made)
    place = rng.randrange(len(row))
    action = row.pop(place)
    with pytest.raises(ConfigError, match=rf"stage {action.stage} (has|is in no row)"):
        check(made, m)
    row[place:place] = [action, action]
    with pytest.raises(ConfigError, match=f"{action} is in a row twice"):
        check(made, m)
    row[place] = Action(action.stage, {"B": "W", "I": "B", "W": "B", "F": "F"}[action.kind], action.micro)
    with pytest.raises(ConfigError):
        check(made, m)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("0F0,0I0", "stage 0 has 0F0 0I0 of micro-batch 0; want F and B, or F, I and W"),
        ("0F0,0B0,0F2,0B2", "stage 0 has nothing of micro-batch 1; want F and B, or F, I and W"),
        ("0F0,0B0\n0F1,0B1", "stage 0 is in rows 0 and 1, and 0B0 is in one of them only"),
        ("0F0,0B0\n2F0,2B0", "stage 1 is in no row; stages are numbered from 0"),
        ("", "stage 0 is in no row; stages are numbered from 0"),
        ("0F0,0B0,0R,0R", "0R is in a row twice, want it once"),
    ],
)
def test_rows_that_are_not_whole_say_why(written: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(parse(written))
    assert str(error.value) == said
    with pytest.raises(ConfigError, match="0F1 has micro-batch 1, want 0 to 0"):
        check(parse("0F0,0B0,0F1,0B1"), 1)


def test_a_drawing_has_every_action_and_the_bubble() -> None:
    made = make(ScheduleRequest("zb-h1", range(2), 3)).rows
    assert show(made, uniform(2)) == (
        "worker 0 |0F0 0F1 ....0I0 0W0 0F2 0I1 0W1 0I2 0W2 | 10.00%\n"
        "worker 1 |....1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2 | 10.00%\n"
    )
    assert show(made, uniform(2), width=20) == (
        "worker 0 |FFFF..IIWWFFIIWWIIWW| 10.00%\n"
        "worker 1 |..FFIIFFIIWWFFIIWWWW| 10.00%\n"
    )  # fmt: skip
    assert show(parse("0F0,0B0"), uniform(1, 1, 2, 1)) == "worker 0 |0F0 0B0-------- |  0.00%\n"
