"""This worker's ways to others, as the newest World gives them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

AT_OTHER_END = "it failed at the other end"
AT_ANOTHER = "it failed at the other end, or a relay of it is gone"
CONNECTED = ("tcp", "routed")  # kinds of one connection: on a subnet of both hosts, or over routers


class Leg(NamedTuple):
    """A connection between two other workers, or of this one, that a way takes."""

    a: int
    b: int
    epoch: int
    source: str
    target: str

    def __str__(self) -> str:
        return f"worker {self.a} at {self.source} to worker {self.b} at {self.target}"


@dataclass(frozen=True, slots=True)
class Route:
    """This worker's way to another. next: the worker whose connection the frames take."""

    index: int
    epoch: int
    kind: str
    source: str
    target: str
    next: int
    relays: tuple[int, ...]
    legs: tuple[Leg, ...] = ()  # the connections of a way that others relay

    @property
    def whole(self) -> str:
        """The way with the addresses of all of its connections."""
        return f"{self} ({', '.join(map(str, self.legs))})" if self.legs else str(self)

    def __str__(self) -> str:
        if self.kind == "via":
            return f"via {', '.join(f'worker {index}' for index in self.relays)}"
        return f"{self.kind} {self.source} to {self.target}" if self.kind in CONNECTED else self.kind


def routes(ways: Iterable[Sequence[Any]], own: int) -> dict[int, Route]:
    """This worker's ways in the rows of World.ways."""
    ways, route_of = list(ways), {}
    direct = {(a, b): Leg(a, b, epoch, source, target) for a, b, epoch, kind, source, target, _ in ways if kind in CONNECTED}
    for a, b, epoch, kind, source, target, relays in ways:
        legs = tuple(leg for x, y in pairwise((a, *relays, b)) if (leg := _leg(direct, x, y))) if relays else ()
        if own == a:
            route_of[b] = Route(b, epoch, kind, source, target, relays[0] if relays else b, tuple(relays), legs)
        elif own == b:
            back = tuple(Leg(leg.b, leg.a, leg.epoch, leg.target, leg.source) for leg in legs[::-1])
            route_of[a] = Route(a, epoch, kind, target, source, relays[-1] if relays else a, tuple(relays[::-1]), back)
    return route_of


def _leg(direct: Mapping[tuple[int, int], Leg], x: int, y: int) -> Leg | None:
    """The connection of two workers, from the first to the second."""
    leg = direct.get((min(x, y), max(x, y)))
    return leg if leg is None or x < y else Leg(x, y, leg.epoch, leg.target, leg.source)


def given_up(before: Route | None, ways: Iterable[Sequence[Any]], why: str) -> str:
    """An error's text for messages on a way that the newest World has no more. why: what is known of its end."""
    if before is None:
        return f"the way before is given up: {why or AT_ANOTHER}"
    epochs = {(row[0], row[1]): row[2] for row in ways}
    ended = [leg for leg in before.legs if epochs.get((min(leg.a, leg.b), max(leg.a, leg.b))) != leg.epoch]
    if ended and not why:
        why = f"its connection of {' and of '.join(map(str, ended))} has ended"
    return f"the way {before.whole} is given up: {why or (AT_ANOTHER if before.relays else AT_OTHER_END)}"
