"""Costs of a plan grow with the number of operands, and of tensors that a session has, not with its square."""

from __future__ import annotations

from gt.dispatcher.planning.sharded_parameters import GatheredCopies, ShardedParameters
from gt.dispatcher.sharding import list_rules
from gt.dispatcher.sharding.op_schema import OpSchema
from gt.dispatcher.state.tensors import Storage
from gt.ir.layout import Layout, Mesh, Shard
from gt.ir.spec import Spec
from gt.ir.template import T, Template
from tests.helpers.limits import calls_of

PIECES = Layout(Mesh((("dp", 2),), (0, 1)), (Shard(0),))


def on_pieces(count: int) -> int:
    """Calls for all indices of a list op on so many parameters."""
    lists, spec = 4, Spec((4,), (1,), 0, "float32")
    columns = tuple([T(column * count + n) for n in range(count)] for column in range(lists))
    written = tuple(range(count))
    known = OpSchema(Template("aten._fused_sgd_.default", columns, (), (spec,) * (count * lists), 0, (), written))
    return calls_of(lambda: [list_rules.on_pieces(known, place, PIECES, None) for place in range(count)])


def test_each_index_of_a_list_op_costs_the_same():
    assert on_pieces(400) < 3 * on_pieces(200)


class Unread(dict):
    """A dict that nobody looks through."""

    def values(self):
        raise AssertionError("all copies are looked through for one")

    __iter__ = items = keys = values


def test_each_gathered_parameter_costs_the_same():
    sharded = ShardedParameters.__new__(ShardedParameters)
    sharded._gathered, sharded._small = GatheredCopies(), GatheredCopies()
    sharded._largest, sharded._largest_now = 1 << 40, 0
    sharded._small.by_storage, sharded._gathered.by_storage = Unread(), Unread()
    for _ in range(300):
        sharded._note_copy(Storage(), 1 << 20)
    assert sharded._small.nbytes == 300 << 20
    sharded._small.by_storage = dict(dict.items(sharded._small.by_storage))
    sharded._small.drop(next(iter(sharded._small.by_storage)))
    assert sharded._small.nbytes == sum(sharded._small.by_storage.values()) == 299 << 20
