"""Transfers between two workers: any size, any interleaving, the same constant flags hundreds of times."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gt.ir.heap import ChannelRegion, TeamRegion, channel_bytes, channel_class, enough, sizes, team_bytes
from tests.worker.plane import planes


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3000), max_size=12),
    slot=st.sampled_from([64, 128, 1024]),
    slots=st.integers(1, 4),
)
def test_messages_of_any_size_arrive_in_order(sizes, slot, slots):
    messages = [random.Random(at).randbytes(size) for at, size in enumerate(sizes)]

    def work(index, plane):
        for message in messages:
            if index == 0:
                plane.send(planes.channel(1, 4096, slot, slots), message)
            else:
                into = bytearray(len(message))
                plane.recv(planes.channel(0, 4096, slot, slots), into)
                assert into == message
        return plane.counters()

    with planes.world(2) as world:
        sender, receiver = planes.together(world, work)
    total = {"w1": sum(sizes)} if sum(sizes) else {}
    assert sender == {"bytes_sent": total, "bytes_received": {}}
    assert receiver["bytes_received"] == ({"w0": sum(sizes)} if sum(sizes) else {})


def test_send_does_not_wait_while_a_slot_is_free():
    with planes.world(2) as (first, second):
        for number in range(4):  # nobody receives yet
            first.send(planes.channel(1, slots=4), bytes([number]))
        into = bytearray(1)
        for number in range(4):
            second.recv(planes.channel(0, slots=4), into)
            assert into == bytes([number])


def test_a_forward_only_program_replayed_never_reads_wrong_data():
    """Nothing flows back, so only the empty flags hold the sender off the slots."""
    rounds, stages = 400, 3

    def work(index, plane):
        wrong, value = 0, np.zeros(40, np.int64)
        for step in range(rounds):
            if index == 0:
                value[:] = step
            else:
                plane.recv(planes.channel(index - 1, slots=1), value)
                wrong += int((value != step + index - 1).any())
            if index < stages - 1:
                plane.send(planes.channel(index + 1, slots=1), value + (index > 0))
        return wrong

    with planes.world(stages) as world:
        assert planes.together(world, work) == [0] * stages


def crossings(seed, workers, count):
    """Messages in one global order: (source, target, bytes)."""
    draw = random.Random(seed)
    return [(*draw.sample(range(workers), 2), draw.choice([0, 1, 64, 200, 256, 257, 5000])) for _ in range(count)]


def carry_out(index, plane, order):
    for number, (source, target, size) in enumerate(order):
        data = random.Random(number).randbytes(size)
        if source == index:
            plane.send(planes.channel(target, channel_class(source, target) * 8192), data)
        elif target == index:
            into = bytearray(size)
            plane.recv(planes.channel(source, channel_class(source, target) * 8192), into)
            assert into == data, f"message {number} of {size} bytes"


@pytest.mark.parametrize("seed", range(5))
def test_crossing_transfers_in_one_global_order(seed):
    """Regions of one class are shared by all pairs of the class."""
    order = crossings(seed, 4, 200)
    with planes.world(4) as world:
        planes.together(world, lambda index, plane: carry_out(index, plane, order))


def test_crossing_transfers_between_processes():
    order = crossings(99, 4, 400)
    with planes.forked(4, lambda index, plane, say: carry_out(index, plane, order)) as workers:
        assert [worker.hear() for worker in workers] == [None] * 4


def test_regions_of_a_heap_do_not_overlap():
    for slot, slots in ((64, 1), (100, 3), (1024, 4)):
        region = ChannelRegion(128, slot, slots)
        starts = [f(k) for f in (region.full, region.empty, region.slot) for k in range(slots)]
        assert len(set(starts)) == len(starts) and all(start % 64 == 0 for start in starts)
        assert region.slot(slots - 1) + slot <= 128 + channel_bytes(slot, slots)
    team = TeamRegion(64, 1000, 9)
    assert team.flag(8) + 8 <= team.header(0) < team.buffer(0)
    assert team.buffer(0) + 1000 <= team.header(1) and team.buffer(1) + 1000 <= 64 + team_bytes(1000, 9)
    assert {channel_class(a, b) for a in range(8) for b in range(8) if a != b} == set(range(1, 8))


def test_nothing_is_left_open():
    def descriptors():
        return set(os.listdir("/proc/self/fd"))

    before = descriptors()
    with planes.world(3) as world:
        planes.together(world, lambda index, plane: carry_out(index, plane, crossings(1, 3, 30)))
        for plane in world:
            plane.close()  # and once more at the end
    assert descriptors() <= before  # what tests before this one left may be collected meanwhile


@pytest.mark.parametrize("mib", [4, 256, 512, 2048, 4096])
def test_the_heap_that_is_said_to_be_enough_is(mib):
    """A channel's share of a large heap does not grow with it for ever."""
    small = mib << 20
    now = channel_bytes(sizes(small).slot, sizes(small).slots)
    for count in (1, 40, 500):
        large = enough(small, count * now)
        found = sizes(large)
        assert large > small and count * channel_bytes(found.slot, found.slots) <= large * 1.1
