"""Communication volume: bytes that one worker sends and receives for an instruction, as planes count them (plane/base.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from gt.ir.heap import aligned
from gt.ir.layout import volume
from gt.worker.instructions.pieces import as_boxes, shared
from gt.worker.plane.collectives import DIRECT_BYTES, parts

Traffic = Iterable[tuple[int, int, int]]  # peer, bytes sent to it, bytes received from it


def all_reduce(payload: dict[str, Any], nbytes: int) -> Traffic:
    """A small all_reduce sends the whole tensor to all other members; of a large one each member reduces a share."""
    team = payload["team"]
    members, rank = team["workers"], team["rank"]
    sent, received = [0] * len(members), [0] * len(members)
    # Part by part, as the plane does. To each member goes its share of this worker's term, and this worker's reduced share
    # comes back to all: so to member r go r's share and the own one.
    for start, stop in parts(nbytes, team["bytes"]):
        total = stop - start
        share = total if total <= DIRECT_BYTES else aligned(-(-total // len(members)))
        sizes = [max(0, min(r * share + share, total) - min(r * share, total)) for r in range(len(members))]
        for r in range(len(members)):
            sent[r] += total if total <= DIRECT_BYTES else sizes[r] + sizes[rank]
            received[r] += total if total <= DIRECT_BYTES else sizes[r] + sizes[rank]
    return _others(members, rank, sent, received)


def all_gather(payload: dict[str, Any], itemsize: int) -> Traffic:
    team = payload["team"]
    sizes = [itemsize * sum(map(volume, as_boxes(boxes))) for boxes in payload["boxes"]]
    return _others(team["workers"], team["rank"], [sizes[team["rank"]]] * len(sizes), sizes)


def reduce_scatter(payload: dict[str, Any], itemsize: int) -> Traffic:
    team = payload["team"]
    sizes = [itemsize * sum(map(volume, as_boxes(boxes))) for boxes in payload["boxes"]]
    return _others(team["workers"], team["rank"], sizes, [sizes[team["rank"]]] * len(sizes))


def all_to_all(payload: dict[str, Any], itemsize: int) -> Traffic:
    team = payload["team"]
    rank = team["rank"]
    have, want = [[as_boxes(b) for b in payload[key]] for key in ("have", "want")]

    # Bytes that both have and want: boxes of the source that intersect those which the target wants.
    def crossing(source: int, target: int) -> int:
        return itemsize * sum(volume(box) for box, _ in shared(have[source], want[target]))

    ranks = range(len(have))
    return _others(team["workers"], rank, [crossing(rank, r) for r in ranks], [crossing(r, rank) for r in ranks])


def send(payload: dict[str, Any], itemsize: int) -> Traffic:
    return [(payload["channel"]["peer"], itemsize * _boxes(payload["boxes"]), 0)]


def recv(payload: dict[str, Any], itemsize: int) -> Traffic:
    return [(channel["peer"], 0, itemsize * _boxes(boxes)) for channel, boxes in payload["parts"]]


merge = recv


def _boxes(boxes: Iterable[Iterable[Sequence[int]]]) -> int:
    return sum(prod(stop - start for start, stop in box) for box in boxes)


def _others(members: Sequence[int], rank: int, sent: Sequence[int], received: Sequence[int]) -> Traffic:
    return [(peer, sent[r], received[r]) for r, peer in enumerate(members) if r != rank]
