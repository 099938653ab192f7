"""Products that are accumulated: the matrix product adds to its tensor itself, as gradients of micro-batches are added up.

Inductor writes a product to memory of its own and adds it to the gradient in another kernel, or makes the sum and copies it
back: three to five more passes over the gradient. With the product's own sum (beta = 1 of a BLAS) it is one, which reads.

    mm = aten.mm(a, b); sum = aten.add(grad, mm); aten.copy_(grad, sum)  ->  aten.addmm_(grad, a, b)

The sum is rounded once, where the ops round the product and then the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_aten = torch.ops.aten
IN_PLACE = {_aten.mm.default: _aten.addmm_.default, _aten.bmm.default: _aten.baddbmm_.default}
# Inductor has joined a product and a sum before, where it found that worthwhile
JOINED = {_aten.addmm.default: _aten.addmm_.default, _aten.baddbmm.default: _aten.baddbmm_.default}


@contextmanager
def accumulated_products() -> Iterator[None]:
    """Within it, code that Inductor makes accumulates products in place. The caller holds a lock: the setting is global."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class AccumulateProducts(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            accumulate(graph)

        def uuid(self) -> Any:  # part of the key by which Inductor keeps code
            return get_hash_for_files((__file__,))

    with config.patch(post_grad_custom_post_pass=AccumulateProducts()):
        yield


def accumulate(graph: torch.fx.Graph) -> None:
    """Change a graph of Inductor's, in which an input that is written has a copy_ at the end."""
    for copy in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        into, total = copy.args[:2]
        if not isinstance(total, torch.fx.Node) or set(total.users) != {copy} or set(into.users) != {total, copy} or copy.users:
            continue  # somebody reads the old value, or the sum
        found = _product(into, total)
        if found is None:
            continue
        op, factors, product = found
        with graph.inserting_before(total):
            added = graph.call_function(op, (into, *factors))
        added.meta.update(total.meta)
        for node in (copy, total, product):
            if node is not None:
                graph.erase_node(node)


def _product(into: torch.fx.Node, total: torch.fx.Node) -> tuple[Any, Sequence[Any], torch.fx.Node | None] | None:
    """The op that adds in place, its two factors, and the node of a product that nobody else reads."""
    if total.kwargs or not _alike(into, total):
        return None
    if total.target in JOINED and total.args[0] is into:
        return JOINED[total.target], total.args[1:], None
    if total.target is not _aten.add.Tensor:
        return None
    (product,) = (node for node in total.args if node is not into)
    if not isinstance(product, torch.fx.Node) or product.target not in IN_PLACE:
        return None
    if set(product.users) != {total} or product.kwargs or not _alike(into, product):
        return None
    return IN_PLACE[product.target], product.args, product


def _alike(into: torch.fx.Node, node: torch.fx.Node) -> bool:
    """True if they have one shape and dtype: nothing is broadcast, and nothing converted."""
    first, second = into.meta.get("val"), node.meta.get("val")
    return first is not None and second is not None and (first.shape, first.dtype) == (second.shape, second.dtype)
