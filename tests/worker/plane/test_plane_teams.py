"""Collectives equal numpy's, in rank order, at any size and timing."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.plane import planes

MEMBERS = st.integers(1, 4)
FLOATS = planes.adding(np.float32)


def values(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def in_order(terms):
    """The float sum from rank 0 up."""
    total = terms[0].copy()
    for term in terms[1:]:
        total += term
    return total


def reduced(index, plane, count, total, **form):
    data = values(index, total)
    plane.all_reduce(planes.team(list(range(count)), index, **form), data, FLOATS)
    return data


@settings(max_examples=40, deadline=None)
@given(count=MEMBERS, total=st.integers(0, 5000), buffer=st.sampled_from([256, 1024, 4096]))
def test_all_reduce_has_the_same_bits_everywhere(count, total, buffer):
    with planes.world(count) as world:
        results = planes.together(world, lambda index, plane: reduced(index, plane, count, total, bytes=buffer))
    for result in results:
        assert np.array_equal(result, in_order([values(rank, total) for rank in range(count)]))


@pytest.mark.parametrize("total", [5000, 100_000])  # direct, two phases
@pytest.mark.parametrize("count", [2, 3])
def test_all_reduce_of_both_kinds_and_its_bytes(count, total):
    with planes.world(count) as world:
        results = planes.together(world, lambda index, plane: reduced(index, plane, count, total, bytes=1 << 20))
        sent = [plane.counters()["bytes_sent"] for plane in world]
        received = [plane.counters()["bytes_received"] for plane in world]
    for result in results:
        assert np.array_equal(result, in_order([values(rank, total) for rank in range(count)]))
    for a in range(count):
        for b in range(count):
            assert a == b or sent[a][f"w{b}"] == received[b][f"w{a}"]
    if count == 2:
        assert sent == [{"w1": 4 * total}, {"w0": 4 * total}]


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 900), min_size=1, max_size=4), buffer=st.sampled_from([256, 4096]))
def test_all_gather_of_pieces_of_any_size(sizes, buffer):
    def work(index, plane):
        outs = [np.empty(size, np.float32) for size in sizes]
        team = planes.team(list(range(len(sizes))), index, bytes=buffer)
        plane.all_gather(team, values(index, sizes[index]), outs)
        return outs

    with planes.world(len(sizes)) as world:
        for outs in planes.together(world, work):
            for rank, out in enumerate(outs):
                assert np.array_equal(out, values(rank, sizes[rank]))


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 900), min_size=1, max_size=4), buffer=st.sampled_from([256, 4096]))
def test_reduce_scatter_with_sections_of_any_size(sizes, buffer):
    count = len(sizes)

    def work(index, plane):
        sections = [values(10 * index + rank, size) for rank, size in enumerate(sizes)]
        out = np.empty(sizes[index], np.float32)
        plane.reduce_scatter(planes.team(list(range(count)), index, bytes=buffer), sections, out, FLOATS)
        return out

    with planes.world(count) as world:
        for rank, out in enumerate(planes.together(world, work)):
            assert np.array_equal(out, in_order([values(10 * peer + rank, sizes[rank]) for peer in range(count)]))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), count=MEMBERS, buffer=st.sampled_from([256, 4096]))
def test_all_to_all_where_only_a_pair_knows_its_size(data, count, buffer):
    sizes = [[data.draw(st.integers(0, 900)) for _ in range(count)] for _ in range(count)]

    def work(index, plane):
        sends = [values(10 * index + rank, sizes[index][rank]) for rank in range(count)]
        recvs = [np.empty(sizes[rank][index], np.float32) for rank in range(count)]
        plane.all_to_all(planes.team(list(range(count)), index, bytes=buffer), sends, recvs)
        return recvs

    with planes.world(count) as world:
        for index, recvs in enumerate(planes.together(world, work)):
            for rank, out in enumerate(recvs):
                assert np.array_equal(out, values(10 * rank + index, sizes[rank][index]))


@st.composite
def batches(draw):
    """Members, kind, elements of each collective by rank, bytes of a buffer."""
    count, kind = draw(st.integers(1, 4)), draw(st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]))
    sizes = draw(st.lists(st.lists(st.integers(0, 400), min_size=count, max_size=count), min_size=1, max_size=6))
    return count, kind, sizes, draw(st.sampled_from([256, 1024, 1 << 16]))


def collective(index, plane, kind, sizes, number, form, log, combine=FLOATS):
    """One collective, and its result once it is done."""

    def call(done):
        seed = 100 * number + 10 * index
        if kind == "all_reduce":
            out = values(seed, sizes[0])
            plane.all_reduce(form, out, combine, lambda: done(out))
        elif kind == "reduce_scatter":
            out = np.empty(sizes[index], np.float32)
            sections = [values(seed + rank, size) for rank, size in enumerate(sizes)]
            plane.reduce_scatter(form, sections, out, combine, lambda: done(out))
        else:
            outs = [np.empty(size, np.float32) for size in sizes]
            plane.all_gather(form, values(seed, sizes[index]), outs, lambda: done(np.concatenate(outs)))

    call(lambda out: log.append((number, out)))


@settings(max_examples=80, deadline=None)
@given(case=batches())
def test_a_batch_has_the_bits_and_bytes_of_its_collectives_one_by_one(case):
    count, kind, sizes, buffer = case

    def work(together):
        def part(index, plane):
            form, log = planes.team(list(range(count)), index, bytes=buffer), []
            with plane.batch() if together else contextlib.nullcontext(()) as failures:
                for number, of_ranks in enumerate(sizes):
                    collective(index, plane, kind, of_ranks, number, form, log)
            assert not failures and [number for number, _ in log] == [*range(len(sizes))]
            return [out for _, out in log], plane.counters()

        return part

    with planes.world(count) as world:
        alone = planes.together(world, work(False))
    with planes.world(count) as world:
        batched = planes.together(world, work(True))
    for (want, _), (got, _) in zip(alone, batched, strict=True):
        assert all(map(np.array_equal, want, got))
    if kind != "all_reduce":  # of which the members add parts of a batch, not parts of each
        assert [counters for _, counters in alone] == [counters for _, counters in batched]


@pytest.mark.parametrize("lacking", [{0: 1}, {0: 1, 1: 2}, {0: 0, 1: 0, 2: 0}, {2: 3}])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_member_that_cannot_bring_its_part_of_a_batch_fails_that_one_alone(kind, lacking):
    """lacking: by member, the number of the collective without its bytes."""
    nothing = memoryview(bytearray())

    def work(index, plane):
        form, log = planes.team([0, 1, 2], index, bytes=4096), []
        with plane.batch() as failures:
            for number in range(4):
                if lacking.get(index) != number:
                    collective(index, plane, kind, [30, 30, 30], number, form, log)
                elif kind == "all_reduce":
                    plane.all_reduce(form, nothing, FLOATS)
                elif kind == "reduce_scatter":
                    plane.reduce_scatter(form, [nothing] * 3, nothing, FLOATS)
                else:
                    plane.all_gather(form, nothing, [nothing] * 3)
        return [number for number, _ in log], failures

    with planes.world(3) as world:
        for index, (done, failures) in enumerate(planes.together(world, work)):
            short = set(lacking.values())
            assert done == [n for n in range(4) if n not in short]
            assert [n for n, _ in failures] == sorted(short - {lacking.get(index)})
            assert all("members of a collective brought" in str(error) for _, error in failures)


def test_a_combine_that_raises_fails_its_collective_and_the_batch_goes_on():
    def broken(dst, src):
        raise MemoryError("no room")

    def work(index, plane):
        form, log = planes.team([0, 1], index, bytes=256), []
        with plane.batch() as failures:
            for number in range(4):
                combine = broken if index and number == 1 else FLOATS
                collective(index, plane, "all_reduce", [20, 20], number, form, log, combine)
        return len(log), [(n, type(error)) for n, error in failures]

    with planes.world(2) as world:
        assert planes.together(world, work) == [(4, []), (3, [(1, MemoryError)])]


def mixed(index, plane):
    """Rows and columns of a 2 x 2 mesh and the whole of it, in turn, with transfers between."""
    data = np.full(300, index + 1.0, np.float32)
    row, column = [index // 2 * 2, index // 2 * 2 + 1], [index % 2, index % 2 + 2]
    for step in range(100):
        plane.all_reduce(planes.team(row, index, id=1, offset=1 << 20), data[: 3 * step], FLOATS)
        plane.all_reduce(planes.team(column, index, id=2, offset=2 << 20), data[step:], FLOATS)
        if index == 0:
            plane.send(planes.channel(3), data)
        elif index == 3:
            plane.recv(planes.channel(0), data)
        plane.all_reduce(planes.team([3, 1, 0, 2], index, id=3, offset=3 << 20), data, FLOATS)
        data /= np.abs(data).max()
    return data.tolist()


def test_overlapping_teams_agree_in_threads_and_in_processes():
    with planes.world(4) as world:
        threads = planes.together(world, mixed)
    with planes.forked(4, lambda index, plane, say: mixed(index, plane)) as workers:
        processes = [worker.hear() for worker in workers]
    assert threads == processes
    assert threads[0] == threads[1] == threads[2] == threads[3]


def test_eight_processes_reduce_hundreds_of_times():
    def work(index, plane, say):
        wrong = 0
        for step in range(300):
            data = np.full(step, index + step, np.int64)
            plane.all_reduce(planes.team(list(range(8)), index), data, planes.adding(np.int64))
            wrong += int((data != 8 * step + 28).sum())
        return wrong

    with planes.forked(8, work) as workers:
        assert [worker.hear() for worker in workers] == [0] * 8


def test_a_member_whose_addition_fails_does_not_hold_up_the_others():
    def fail(dst, src):
        raise ValueError("no such sum")

    def work(index, plane):
        team, data = planes.team([0, 1, 2], index, bytes=1 << 18), values(index, 50_000)
        if index == 1:
            with pytest.raises(ValueError, match="no such sum"):
                plane.all_reduce(team, data, fail)
        else:
            plane.all_reduce(team, data, FLOATS)
        return reduced(index, plane, 3, 100, bytes=1 << 18)

    with planes.world(3) as world:
        for result in planes.together(world, work):
            assert np.array_equal(result, in_order([values(rank, 100) for rank in range(3)]))
