"""Members that bring other sizes than they should, or nothing: all who meet fail at once, and what follows is in step."""

from __future__ import annotations

import numpy as np
import pytest

from tests.worker.plane import planes

FLOATS = planes.adding(np.float32)
NOTHING = bytearray()


@pytest.mark.parametrize(("sent", "wanted"), [(1000, 8), (0, 8), (8, 0), (600, 5000)])
def test_a_message_of_another_size_is_an_error_and_the_next_one_arrives(sent, wanted):
    def work(index, plane):
        for round in range(5):
            if index == 0:
                plane.send(planes.channel(1), bytes(sent))
                plane.send(planes.channel(1), bytes([round]) * 300)
            else:
                with pytest.raises(ValueError, match=f"worker w0 sent {sent} bytes, want {wanted}"):
                    plane.recv(planes.channel(0), bytearray(wanted))
                into = bytearray(300)
                plane.recv(planes.channel(0), into)
                assert into == bytes([round]) * 300

    with planes.world(2) as world:
        planes.together(world, work)


COLLECTIVES = {
    "all_reduce": lambda plane, team, good: plane.all_reduce(team, np.ones(2000 if good else 3, np.float32), FLOATS),
    "all_gather": lambda plane, team, good: plane.all_gather(
        team, bytearray(10_000 if good else 0), [bytearray(10_000 if good else 0) for _ in range(3)]
    ),
    "reduce_scatter": lambda plane, team, good: plane.reduce_scatter(
        team, [np.ones(900, np.float32)] * 3 if good else [NOTHING] * 3, np.ones(900, np.float32) if good else NOTHING, FLOATS
    ),
}


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_member_that_brings_something_else_fails_all_and_nobody_waits(kind):
    def work(index, plane):
        team = planes.team([0, 1, 2], index)
        for _ in range(5):
            with pytest.raises(ValueError, match="want the same of all"):
                COLLECTIVES[kind](plane, team, good=index != 1)
            data = np.full(3000, index + 1, np.float32)
            plane.all_reduce(team, data, FLOATS)
            assert (data == 6).all()

    with planes.world(3) as world:
        planes.together(world, work)


def test_all_to_all_with_a_member_that_has_nothing_ends():
    def work(index, plane):
        team = planes.team([0, 1, 2], index)
        sizes = [0 if index == 1 else 5000] * 3
        plane.all_to_all(team, [bytearray(n) for n in sizes], [bytearray(n) for n in sizes])
        data = np.full(30, index + 1, np.float32)
        plane.all_reduce(team, data, FLOATS)
        assert (data == 6).all()

    with planes.world(3) as world:
        planes.together(world, work)


def test_a_member_that_wants_rounds_without_end_fails_all_to_all():
    """It has the token, and would keep the others at it for as long as it likes."""

    def work(index, plane):
        team = planes.team([0, 1, 2], index)
        if index == 1:
            plane._team(team).announce(1 << 60)
            plane._team(team).exchange()
        else:
            with pytest.raises(ValueError, match="wants 1152921504606846976 rounds"):
                plane.all_to_all(team, [bytearray(5000)] * 3, [bytearray(5000) for _ in range(3)], 5000)
        data = np.full(30, index + 1, np.float32)
        plane.all_reduce(team, data, FLOATS)
        assert (data == 6).all()

    with planes.world(3) as world:
        planes.together(world, work)
