"""Processes killed while a program saves: the last good checkpoint always loads."""

import pytest

from tests.stress import checkpoints


@pytest.mark.parametrize("stream", [False, True], ids=["files", "streamed"])
def test_the_last_good_checkpoint_loads_whoever_is_killed(stream):
    counts = checkpoints.run(1, seed=1, stream=stream)
    assert all(counts[victim] == 1 for victim in checkpoints.VICTIMS) and counts["saves"] >= 3
    assert [sum(counts["moments"][victim].values()) for victim in checkpoints.VICTIMS] == [1, 1, 1]
