"""This worker's ways to others, as the newest World gives them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

CONNECTED = ("tcp", "routed")  # kinds of one connection: on a subnet of both hosts, or over routers


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

    def __str__(self) -> str:
        if self.kind == "via":
            return f"via {', '.join(f'worker {index}' for index in self.relays)}"
        return f"{self.kind} {self.source} to {self.target}" if self.kind in CONNECTED else self.kind


def routes(ways: Iterable[Sequence[Any]], own: int) -> dict[int, Route]:
    """This worker's ways in the rows of World.ways."""
    route_of = {}
    for a, b, epoch, kind, source, target, relays in ways:
        if own == a:
            route_of[b] = Route(b, epoch, kind, source, target, relays[0] if relays else b, tuple(relays))
        elif own == b:
            route_of[a] = Route(a, epoch, kind, target, source, relays[-1] if relays else a, tuple(relays[::-1]))
    return route_of
