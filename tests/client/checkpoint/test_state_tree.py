"""States as JSON: all that a training program saves, bit for bit, and nothing that would need a pickle."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gt.client.checkpoint.state_tree import decode, encode
from gt.errors import CheckpointError


def again(state):
    tensors = {}

    def put(path, tensor):
        tensors[str(len(tensors))] = tensor
        return str(len(tensors) - 1)

    return decode(json.loads(json.dumps(encode(state, put), allow_nan=False)), tensors.__getitem__)


_leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
_keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
_states = st.recursive(
    _leaves, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(_keys, inner), max_leaves=20
)


@given(_states)
def test_a_state_of_plain_values_survives(state):
    made = again(state)
    assert made == state and repr(made) == repr(state)


def test_numbers_that_json_lacks_survive():
    assert math.isnan(again(float("nan"))) and again([math.inf, -math.inf, -0.0]) == [math.inf, -math.inf, 0.0]
    assert again(10**40) == 10**40 and again(1 + 2j) == 1 + 2j and again(torch.bfloat16) is torch.bfloat16
    assert again(np.float32(0.5)) == 0.5


@pytest.mark.parametrize("digits", [600, 700, 4300, 4400, 100_000])
def test_numbers_of_any_length_survive(digits):
    """Python writes and reads no decimal number of more than 4300 digits, or of as few as 640."""
    number = 10**digits + 7
    state = {"n": number, "m": -number, number: torch.ones(2), (1, number): 3}
    made = again(state)
    assert (made["n"], made["m"], made[1, number]) == (number, -number, 3) and made[number].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match=r"state\["):
        again({number: {(number, 2): object()}})


def test_arrays_of_another_order_of_bytes_keep_their_values():
    for array in (np.arange(5, dtype=">i4"), np.array(0.5, ">f8"), np.arange(6, dtype=">u2").reshape(2, 3).T):
        made = again(array)
        assert np.array_equal(made, array) and made.dtype == array.dtype.newbyteorder("=")


def test_random_states_survive():
    assert again(random.getstate()) == random.getstate()
    state = np.random.get_state()
    made = again(state)
    assert made[0] == state[0] and (made[1] == state[1]).all() and made[1].dtype == state[1].dtype and made[2:] == state[2:]


def test_versions_of_modules_survive():
    state = torch.nn.BatchNorm1d(3).state_dict()
    made = again(state)
    assert isinstance(made, OrderedDict) and made._metadata == state._metadata


def test_an_optimizer_and_a_schedule_are_saved_as_they_say():
    optimizer = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 10)
    assert again({"o": optimizer})["o"]["param_groups"] == optimizer.state_dict()["param_groups"]
    fresh = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 20)
    fresh.load_state_dict(again({"s": schedule})["s"])
    assert fresh.total_steps == 10


def test_what_cannot_be_saved_is_named():
    with pytest.raises(CheckpointError, match=r"state\['a'\]\[1\]\['b'\] is a builtins.object, want"):
        again({"a": [1, {"b": object()}]})
    with pytest.raises(CheckpointError, match=r"builtins\.function"):
        again([lambda: 0])
    with pytest.raises(CheckpointError, match="nested more than"):
        loop: list = []
        loop.append(loop)
        again(loop)
    with pytest.raises(CheckpointError, match=r"state\[0\] is a numpy.ndarray"):
        again([np.zeros(2, np.longdouble)])
    with pytest.raises(CheckpointError, match="a key that is not supported"):
        again({b"x": 1})


@pytest.mark.parametrize("node", [{}, {"tensor": "1", "x": 1}, {"code": "1"}, {"dict": 3}, {"float": []}, {"bytes": "%"}])
def test_json_that_is_no_state_raises_a_plain_error(node):
    with pytest.raises((KeyError, ValueError, TypeError)):
        decode(node, {}.__getitem__)
