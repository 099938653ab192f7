"""Processes killed while a program saves: the last good checkpoint always loads."""

from tests.stress import checkpoints


def test_the_last_good_checkpoint_loads_whoever_is_killed():
    counts = checkpoints.run(1, seed=1)
    assert all(counts[victim] == 1 for victim in checkpoints.VICTIMS) and counts["saves"] >= 3
