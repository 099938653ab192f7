"""A few random states that are saved in one layout and loaded in another; tests.client.checkpoint.random_layouts has more."""

from __future__ import annotations

import pytest

from tests.client.checkpoint import random_layouts


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("seed", [0, 3, 5, 10, 13, 19])
def test_a_random_state_is_the_same_in_another_layout(session, tmp_path, plain_threads, seed):
    random_layouts.run(seed, session, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("seed", [100, 101, 102, 103, 104, 105])
def test_a_random_state_of_replays_with_offload_is_the_same_in_another_layout(session, tmp_path, plain_threads, seed):
    random_layouts.run(seed, session, tmp_path, captured=True)
