"""Redistribution from one layout to another: collectives, transfers and the boxes that workers exchange. Pure.

On one mesh, one axis changes at a time. Between meshes, each receiver gets exactly the boxes that it lacks, pairwise.
The orders of a step have a sequence without deadlock: each receive follows its sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from gt.dispatcher.cluster.workers import Cluster
from gt.ir.layout import Interval, Layout, Mesh, Partial, Placement, R, Replicate, Shard, Spans, local_shape, spans
from gt.ir.spec import DTYPES


@dataclass(frozen=True, slots=True)
class Order:
    """One worker's instruction in a step. `text` is the step in plan notation, in one order of each step."""

    worker: int
    kind: str
    payload: dict


@dataclass(frozen=True, slots=True)
class RedistributionStep:
    """One collective, local change or transfer of a whole tensor, and the resulting layout."""

    orders: tuple[Order, ...]
    layout: Layout
    text: str
    nbytes: int


# Spans of a piece are, for each dim, the intervals of the whole tensor that it holds. With [8, 6] in S(0) of 2 parts on 2
# workers, the first holds ([(0, 2), (4, 6)], [(0, 6)]). A box has one interval for each dim, in local indices of a tensor.


def common(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The intersection of two lists of intervals."""
    both = [(max(first, second), min(stop, other)) for first, stop in a for second, other in b]
    return [(start, stop) for start, stop in both if start < stop]


def within(interval: Interval, held: Sequence[Interval]) -> Interval:
    """Local indices of a global interval, in a tensor that holds the intervals `held` one after the other."""
    # Example: (4, 6) within [(0, 2), (4, 6)] is (2, 4).
    at = 0
    for start, stop in held:
        if start <= interval[0] and interval[1] <= stop:
            return at + interval[0] - start, at + interval[1] - start
        at += stop - start
    raise AssertionError(f"{interval} is not in {held}")


def local_boxes(part: Sequence[Sequence[Interval]], held: Spans) -> list[list[list[int]]]:
    """The boxes of `part` (intervals of each dim) in local indices of a tensor that holds `held`."""
    where = [[list(within(i, holding)) for i in intervals_] for intervals_, holding in zip(part, held, strict=True)]
    return [[list(span) for span in box] for box in product(*where)]


def on_mesh(cluster: Cluster, shape: Sequence[int], dtype: str, have: Layout, want: Layout) -> Iterator[RedistributionStep]:
    """Steps between two layouts of one mesh: gathers first, from the last axis; then splits, from the first."""
    # Gathers go from the last axis to the first, since splits of one dim nest in the order of axes: the innermost is undone
    # first. Splits then go the other way. Each step begins with the layout that the step before it leaves.
    now = have
    tangled = _tangled(have, want)
    for axis in reversed(range(len(have.mesh.axes))):
        held, wanted = now.placements[axis], want.placements[axis]
        if isinstance(held, Replicate) or (held == wanted and not (isinstance(held, Shard) and held.dim in tangled)):
            continue
        if isinstance(held, Partial):
            raise AssertionError("a partial tensor is reduced in place before it is redistributed")
        # An all_to_all moves 1/n of what a gather moves. It is right only if no other axis splits either dim, at any time.
        if isinstance(wanted, Shard) and all(_alone(at, axis) for at in (now, want, now.with_placement(axis, wanted))):
            step = _exchange(cluster, shape, dtype, now, axis, wanted)
        else:
            step = _gather(cluster, shape, dtype, now, axis)
        now = step.layout
        yield step
    for axis in range(len(have.mesh.axes)):
        if now.placements[axis] != want.placements[axis]:
            step = _slice(shape, dtype, now, axis, want.placements[axis])
            now = step.layout
            yield step


def _tangled(have: Layout, want: Layout) -> set[int]:
    """Dims that several axes split, before or after, in different ways. Such splits nest, so all are gathered first."""
    tangled = set()
    for layout in (have, want):
        dims = [p.dim for p in layout.placements if isinstance(p, Shard)]
        tangled |= {d for d in dims if dims.count(d) > 1}
    return {d for d in tangled if _splits(have, d) != _splits(want, d)}


def _splits(layout: Layout, dim: int) -> list[Placement | None]:
    return [p if isinstance(p, Shard) and p.dim == dim else None for p in layout.placements]


def _alone(layout: Layout, axis: int) -> bool:
    """True if no other axis splits the dim that this axis splits."""
    mine = layout.placements[axis]
    return isinstance(mine, Shard) and all(
        not isinstance(p, Shard) or p.dim != mine.dim for i, p in enumerate(layout.placements) if i != axis
    )


def _nbytes(shape: Sequence[int], dtype: str) -> int:
    return prod(shape) * DTYPES[dtype][0]


def _orders(cluster: Cluster, kind: str, local: Layout, shape: Sequence[int], team: tuple[int, ...], body: dict) -> list[Order]:
    """A collective's orders to a team. local: the layout of the members' pieces; body: what all members get alike."""
    mesh = local.mesh
    return [
        Order(
            mesh.workers[rank],
            kind,
            {"team": team_payload(cluster, mesh, team, place), "shape": list(local_shape(local, tuple(shape), rank)), **body},
        )
        for place, rank in enumerate(team)
    ]


def _gather(cluster: Cluster, shape: Sequence[int], dtype: str, layout: Layout, axis: int) -> RedistributionStep:
    # boxes: the places of each member's piece in the gathered tensor. The tensor may still be split by other axes.
    mesh, after = layout.mesh, layout.with_placement(axis, R)
    orders: list[Order] = []
    for team in mesh.teams(axis):
        whole = spans(after, shape, team[0])
        boxes = [local_boxes(spans(layout, shape, rank), whole) for rank in team]
        orders += _orders(cluster, "all_gather", after, shape, team, {"dtype": dtype, "boxes": boxes})
    return RedistributionStep(tuple(orders), after, f"all_gather over {mesh.axes[axis][0]}", _nbytes(shape, dtype))


def _exchange(cluster: Cluster, shape: Sequence[int], dtype: str, layout: Layout, axis: int, to: Shard) -> RedistributionStep:
    """Shard(i) -> Shard(j) with one all_to_all."""
    mesh, after, whole_layout = layout.mesh, layout.with_placement(axis, to), layout.with_placement(axis, R)
    orders: list[Order] = []
    for team in mesh.teams(axis):
        whole = spans(whole_layout, shape, team[0])
        have = [local_boxes(spans(layout, shape, rank), whole) for rank in team]
        want = [local_boxes(spans(after, shape, rank), whole) for rank in team]
        orders += _orders(cluster, "all_to_all", whole_layout, shape, team, {"dtype": dtype, "have": have, "want": want})
    return RedistributionStep(tuple(orders), after, f"all_to_all over {mesh.axes[axis][0]}", _nbytes(shape, dtype))


def _slice(shape: Sequence[int], dtype: str, layout: Layout, axis: int, to: Placement) -> RedistributionStep:
    """Replicate -> Shard or Partial: each worker keeps its chunk, or the first worker the value."""
    mesh, after = layout.mesh, layout.with_placement(axis, to)
    orders = []
    for rank, worker in enumerate(mesh.workers):
        if isinstance(to, Partial):
            # One worker keeps the value and the others get zeros, so that the sum is right. Other reductions take equal terms.
            keep = to.op != "sum" or mesh.coordinates(rank)[axis] == 0
            orders.append(Order(worker, "partial", {"keep": keep, "op": to.op}))
            continue
        boxes = local_boxes(spans(after, shape, rank), spans(layout, shape, rank))
        local = list(local_shape(after, tuple(shape), rank))
        orders.append(Order(worker, "shard", {"shape": local, "dtype": dtype, "boxes": boxes}))
    return RedistributionStep(
        tuple(orders), after, f"{'keep' if isinstance(to, Partial) else 'shard'} over {mesh.axes[axis][0]}", 0
    )


def team_payload(cluster: Cluster, mesh: Mesh, team: tuple[int, ...], place: int) -> dict:
    return cluster.team_payload(tuple(mesh.workers[rank] for rank in team), place)


def reduce(cluster: Cluster, layout: Layout, axis: int) -> tuple[Order, ...]:
    """The in-place all_reduce of a partial axis."""
    place = layout.placements[axis]
    assert isinstance(place, Partial)
    mesh = layout.mesh
    return tuple(
        Order(mesh.workers[rank], "all_reduce", {"team": team_payload(cluster, mesh, team, i), "op": place.op})
        for team in mesh.teams(axis)
        for i, rank in enumerate(team)
    )


def scatter(cluster: Cluster, shape: Sequence[int], dtype: str, layout: Layout, axis: int, to: Placement) -> RedistributionStep:
    """Partial -> Shard with one reduce_scatter."""
    mesh, after, place = layout.mesh, layout.with_placement(axis, to), layout.placements[axis]
    assert isinstance(place, Partial)
    orders: list[Order] = []
    for team in mesh.teams(axis):
        held = spans(layout, shape, team[0])
        boxes = [local_boxes(spans(after, shape, rank), held) for rank in team]
        body = {"op": place.op, "dtype": dtype, "boxes": boxes}
        orders += _orders(cluster, "reduce_scatter", layout, shape, team, body)
    return RedistributionStep(tuple(orders), after, f"reduce_scatter over {mesh.axes[axis][0]}", _nbytes(shape, dtype))


def between(cluster: Cluster, shape: Sequence[int], dtype: str, have: Layout, want: Layout, name: str) -> RedistributionStep:
    """Pairwise transfers from one mesh to another; a worker of both keeps what it has."""
    # Example, [8] from S(0) on workers 0 and 1 to S(0) on workers 1, 2, 3 and 4: worker 1 wants 0..2 and lacks it, so 0 sends
    # to 1 and 2 (2..4), and 1 sends to 3 (4..6) and 4 (6..8). Ranks with equal spans are replicas: any of them may send.
    sources: dict[Spans, list[int]] = {}
    for rank in range(len(have.mesh.workers)):
        sources.setdefault(spans(have, shape, rank), []).append(rank)
    orders: list[Order] = []
    moved = 0
    for rank, worker in enumerate(want.mesh.workers):
        target = spans(want, shape, rank)
        parts, local = [], []
        for held, ranks in sources.items():
            part = [common(t, h) for t, h in zip(target, held, strict=True)]
            if not all(part):
                continue
            into = local_boxes(part, target)
            out = local_boxes(part, held)
            holders = [have.mesh.workers[r] for r in ranks]
            if worker in holders:
                local += [[src, dst] for src, dst in zip(out, into, strict=True)]
                continue
            # Receivers are spread over the replicas, neighbours to neighbours, so that no replica sends everything.
            sender = holders[rank * len(holders) // len(want.mesh.workers)]
            channel = cluster.channel_payload(sender, worker, worker)
            orders.append(Order(sender, "send", {"channel": channel, "boxes": out}))
            parts.append([cluster.channel_payload(sender, worker, sender), into])
            moved += sum(prod(b - a for a, b in box) for box in into)
        payload = {"shape": list(local_shape(want, tuple(shape), rank)), "dtype": dtype, "parts": parts}
        kind = "merge" if local else "recv"
        orders.append(Order(worker, kind, {**payload, "local": local} if local else payload))
    return RedistributionStep(tuple(orders), want, name, moved * DTYPES[dtype][0])
