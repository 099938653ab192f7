"""Costs of a plan grow with the number of operands, and of tensors that a session has, not with its square."""

from __future__ import annotations

import time

from gt.dispatcher.planning.sharded_parameters import GatheredCopies, ShardedParameters
from gt.dispatcher.sharding import list_rules
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.state.tensors import Storage
from gt.ir.layout import Layout, Mesh, Shard
from gt.ir.spec import Spec
from gt.ir.template import T, Template

SECONDS = 0.5  # CPU time: ten times of what is taken, and a fifth of what squares take
PIECES = Layout(Mesh((("dp", 2),), (0, 1)), (Shard(0),))


def test_each_index_of_a_list_op_costs_the_same():
    count, lists, spec = 4000, 4, Spec((4,), (1,), 0, "float32")
    columns = tuple([T(column * count + n) for n in range(count)] for column in range(lists))
    written = tuple(range(count))
    known = OpSchema(Template("aten._fused_sgd_.default", columns, (), (spec,) * (count * lists), 0, (), written))
    start = time.thread_time()
    assert all(list_rules.on_pieces(known, place, PIECES, None) for place in range(count))
    assert time.thread_time() - start < SECONDS


def test_each_gathered_parameter_costs_the_same():
    sharded = ShardedParameters.__new__(ShardedParameters)
    sharded._gathered, sharded._small = GatheredCopies(), GatheredCopies()
    sharded._largest, sharded._largest_now = 1 << 40, 0
    start = time.thread_time()
    for _ in range(30_000):
        sharded._note_copy(Storage(), 1 << 20)
    assert time.thread_time() - start < SECONDS
    assert sharded._small.nbytes == 30_000 << 20
    sharded._small.drop(next(iter(sharded._small.by_storage)))
    assert sharded._small.nbytes == sum(sharded._small.by_storage.values()) == 29_999 << 20
