"""Redistribution: whatever the layouts, the pieces afterwards are those of the whole tensor, and no byte moves twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gt.dispatcher.cluster.workers import Cluster
from gt.dispatcher.sharding.redistribution_steps import between, on_mesh
from gt.ir.layout import Layout, Mesh, P, R, Shard, local_shape
from tests.dispatcher.sharding.pieces import carry_out, split


def cluster(workers: int) -> Cluster:
    made = Cluster()
    for _ in range(workers):
        made.add(b"", {"heap_bytes": 1 << 40})
    return made


shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)


def placements(axes: int, dims: int):
    choices = [st.just(R)]
    if dims:
        choices.append(st.integers(0, dims - 1).map(Shard))
    return st.tuples(*[st.one_of(choices) for _ in range(axes)])


def meshes(first: int):
    sizes = st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3)])
    names = ("dp", "tp")
    return sizes.map(
        lambda s: Mesh(
            tuple((names[-len(s) :][i], n) for i, n in enumerate(s) if n > 1),
            tuple(range(first, first + int(np.prod(s)))),
        )
    )


@st.composite
def moves(draw, same: bool):
    shape = draw(shapes)
    first = draw(meshes(0))
    second = first if same else draw(meshes(draw(st.integers(0, 6))))
    have = Layout(first, draw(placements(len(first.axes), len(shape))))
    want = Layout(second, draw(placements(len(second.axes), len(shape))))
    return shape, have, want


@given(moves(same=True))
@settings(max_examples=400, deadline=None)
def test_on_one_mesh_the_pieces_are_those_of_the_whole(move):
    shape, have, want = move
    whole = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    pieces = split(whole, have)
    for step in on_mesh(cluster(12), shape, "int64", have, want):
        pieces, _ = carry_out(step, pieces)
    expected = split(whole, want)
    assert all(np.array_equal(pieces[w], expected[w]) for w in want.mesh.workers)


@given(moves(same=False))
@settings(max_examples=400, deadline=None)
def test_between_meshes_each_receiver_gets_what_it_lacks_and_no_more(move):
    shape, have, want = move
    whole = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    pieces, moved = carry_out(between(cluster(16), shape, "int64", have, want, "a_to_b"), split(whole, have))
    expected = split(whole, want)
    assert all(np.array_equal(pieces[w], expected[w]) for w in want.mesh.workers)
    most = sum(int(np.prod(local_shape(want, shape, r))) for r in range(len(want.mesh.workers)))
    assert moved <= most


def test_a_fused_projection_goes_to_its_parts_and_back():
    mesh = Mesh((("tp", 2),), (0, 1))
    whole = np.arange(4 * 12).reshape(4, 12)
    parts = Layout(mesh, (Shard(1, 3),))
    plain = Layout(mesh, (Shard(1),))
    assert split(whole, parts)[0][0].tolist() == [0, 1, 4, 5, 8, 9]
    for have, want in ((plain, parts), (parts, plain), (parts, Layout(mesh, (R,))), (Layout(mesh, (R,)), parts)):
        pieces = split(whole, have)
        for step in on_mesh(cluster(2), whole.shape, "int64", have, want):
            pieces, _ = carry_out(step, pieces)
        expected = split(whole, want)
        assert all(np.array_equal(pieces[w], expected[w]) for w in (0, 1)), (have, want)


def test_a_value_becomes_terms_at_one_worker():
    mesh = Mesh((("tp", 2),), (0, 1))
    have, want = Layout(mesh, (R,)), Layout(mesh, (P,))
    (step,) = on_mesh(cluster(2), (3,), "int64", have, want)
    pieces, moved = carry_out(step, split(np.array([1, 2, 3]), have))
    assert (pieces[0] + pieces[1]).tolist() == [1, 2, 3] and moved == 0
