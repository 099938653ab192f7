"""Ways between workers, chosen from facts: their hosts, the links of these, and links that have failed. Pure functions.

Workers of one host share memory. Others connect by TCP over the fastest subnet that both hosts have. Without a common subnet
they connect over routers, if the routes of each host lead to the other. Else hosts between them relay: as few as possible, and
of equally short ways the fastest.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice, pairwise, permutations
from typing import Any, Literal, NamedTuple

MAX_ORDERED_HOSTS = 7  # hosts for which an order along their links is searched
MAX_ATTEMPTS = 8  # pairs of addresses by which two hosts try to connect: each that fails may take seconds
Failure = tuple[str, str, str, str]  # two hosts in order, and the addresses between which no connection was made, or it broke


class Link(NamedTuple):
    """An address of a host. mbps: speed, 0 if unknown. routed: a default route leads out there."""

    address: str
    prefix: int
    device: str
    mbps: int
    routed: bool


class LinkRoute(NamedTuple):
    """A host's route to a network, no default. device: "" if the kernel refuses to send there."""

    network: str
    prefix: int
    device: str


class Way(NamedTuple):
    """The way from a worker to another. source, target: addresses; via: hosts that relay, in order. routed: over routers."""

    kind: Literal["shm", "tcp", "routed", "via", "none"]
    source: str = ""
    target: str = ""
    via: tuple[str, ...] = ()

    @property
    def connected(self) -> bool:
        """True if one connection leads there."""
        return self.kind in ("tcp", "routed")

    def back(self) -> Way:
        """The same way from the other end."""
        return Way(self.kind, self.target, self.source, self.via[::-1])


@dataclass(frozen=True)
class Host:
    """One host. home: its identity; name: for people. listening: its workers accept connections. scope: of its addresses.

    Containers that share a network have one scope, and there an address of one is the other's too.
    """

    home: str
    name: str
    links: tuple[Link, ...] = ()
    listening: bool = False
    routes: tuple[LinkRoute, ...] = ()
    scope: str = ""

    @cached_property
    def table(self) -> dict[tuple[int, int], dict[int, set[str]]]:
        """Devices that lead to networks, by (bits of addresses, prefix), the longest prefix first, and by network."""
        # Example: 10.0.0.1/24 on eth0, which also has the default route,
        # gives {(32, 24): {0x0a0000: {eth0}}, (32, 0): {0: {eth0}}}.
        table: dict[tuple[int, int], dict[int, set[str]]] = {}
        rows = [(link.address, link.prefix, link.device) for link in self.links]
        rows += [("::" if ":" in link.address else "0.0.0.0", 0, link.device) for link in self.links if link.routed]
        for address, prefix, device in (*rows, *self.routes):
            bits, number = _number(address)
            table.setdefault((bits, prefix), {}).setdefault(number >> bits - prefix, set()).add(device)
        return dict(sorted(table.items(), key=lambda item: -item[0][1]))

    def prefix(self, device: str, address: str) -> int:
        """Length of the prefix by which packets to an address leave at a device: 0 for a default route, -1 if they do not."""
        # The longest matching prefix decides, as in the kernel; if it leads out elsewhere, shorter ones do not count.
        bits, number = _number(address)
        for (kind, prefix), networks in self.table.items():
            if kind == bits and (devices := networks.get(number >> bits - prefix)):
                return prefix if device in devices else -1
        return -1


def home(info: Mapping[str, Any]) -> str:
    """The identity of a worker's host: a boot and a namespace of processes, else its name."""
    return info.get("home") or info.get("host", "")


def host(info: Mapping[str, Any]) -> Host:
    """A worker's host as it describes it."""
    links = tuple(Link(*row) for row in info.get("links", ()))
    routes = tuple(LinkRoute(*row) for row in info.get("routes", ()))
    return Host(home(info), info.get("host", ""), links, info.get("port", 0) > 0, routes, info.get("scope", ""))


def ways(hosts: Sequence[Host], failed: frozenset[Failure] = frozenset()) -> dict[tuple[str, str], Way]:
    """The way of each pair of different hosts, in both directions."""
    way_of: dict[tuple[str, str], Way] = {}
    speeds: dict[str, dict[str, int]] = {one.home: {} for one in hosts}

    # 1. Pairs that connect directly, by the first candidate that has not failed. Their speeds are the graph of step 2.
    for place, one in enumerate(hosts):
        for other in hosts[place + 1 :]:
            direct = next((pair for pair in candidates(one, other) if failure(one.home, other.home, pair) not in failed), None)
            if direct is not None:
                source, target = direct
                kind: Literal["tcp", "routed"] = "tcp" if _joined(direct) else "routed"
                way_of[one.home, other.home] = Way(kind, source.address, target.address)
                speeds[one.home][other.home] = speeds[other.home][one.home] = min(source.mbps, target.mbps)

    # 2. The others go through hosts that relay, if any path exists.
    for place, one in enumerate(hosts):
        paths = widest(one.home, speeds)
        for other in hosts[place + 1 :]:
            if (one.home, other.home) not in way_of:
                path = paths.get(other.home)
                way_of[one.home, other.home] = Way("none") if path is None else Way("via", via=path[1:-1])
    return {**way_of, **{(b, a): way.back() for (a, b), way in way_of.items()}}


def by_nccl(a: Mapping[str, Any], b: Mapping[str, Any], way: Way) -> bool:
    """True if NCCL may carry tensors between two workers, by their infos and way: it wants one version, and relays nothing."""
    return bool(a.get("nccl")) and a.get("nccl") == b.get("nccl") and (way.connected or way.kind == "shm")


def within(one: Host) -> Way:
    """The way between workers of one host. The address is for collectives that other hosts take part in."""
    address = one.links[0].address if one.links and one.listening else ""
    return Way("shm", address, address)


def failure(a: str, b: str, pair: Sequence[Link]) -> Failure:
    """The name of a failed connection between two links, the same from both ends."""
    source, target = pair[0].address, pair[1].address
    return (a, b, source, target) if a <= b else (b, a, target, source)


def candidates(one: Host, other: Host) -> Iterator[tuple[Link, Link]]:
    """Pairs of addresses to connect, the first MAX_ATTEMPTS of all that lead from each host to the other."""
    if one.listening and other.listening:
        yield from islice(_pairs(one, other), MAX_ATTEMPTS)


def _pairs(one: Host, other: Host) -> Iterator[tuple[Link, Link]]:
    """First those of a subnet that both have, the fastest first, then those that routers join.

    Both hosts may have the same address: docker gives it to its bridge on every host. Then the subnet is most likely two
    separate networks of one number, and comes last.
    """
    pairs = [(a, b) for a in one.links for b in other.links if a.address != b.address or one.scope == other.scope]
    twice = {a.address for a in one.links} & {b.address for b in other.links} if one.scope != other.scope else set()
    doubtful = {_network(link.address, link.prefix) for link in one.links if link.address in twice}

    # The order of attempts: sure subnets, routed pairs, doubtful subnets.
    joined = sorted(filter(_joined, pairs), key=_slowness)
    yield from _first((a, b) for a, b in joined if _network(a.address, a.prefix) not in doubtful)
    yield from _routed(one, other, pairs)
    yield from _first((a, b) for a, b in joined if _network(a.address, a.prefix) in doubtful)


def _routed(one: Host, other: Host, pairs: Sequence[tuple[Link, Link]]) -> Iterator[tuple[Link, Link]]:
    """Pairs without a common subnet, each end of which has a route to the other: those that need no default route first."""
    routed: list[tuple[int, tuple[Link, Link]]] = []
    for a, b in pairs:
        if (":" in a.address) == (":" in b.address) and not _joined((a, b)):
            forth, back = one.prefix(a.device, b.address), other.prefix(b.device, a.address)
            if forth >= 0 and back >= 0:
                routed.append(((forth == 0) + (back == 0), (a, b)))

    # One pair for each two devices and family of addresses: the sort puts the best first.
    best: dict[tuple[str, str, bool], tuple[Link, Link]] = {}
    for _, (a, b) in sorted(routed, key=lambda row: (row[0], _slowness(row[1]))):
        best.setdefault((a.device, b.device, ":" in a.address), (a, b))
    return iter(best.values())


def _slowness(pair: tuple[Link, Link]) -> int:
    return -min(pair[0].mbps, pair[1].mbps)


def _first(pairs: Iterable[tuple[Link, Link]]) -> Iterator[tuple[Link, Link]]:
    """One pair of each two devices and subnet: where it fails, another address of the same device does too."""
    known = set()
    for a, b in pairs:
        key = a.device, b.device, _network(a.address, a.prefix)
        if key not in known:
            known.add(key)
            yield a, b


def _joined(pair: tuple[Link, Link]) -> bool:
    """True for two addresses of one subnet. A host's own address reaches another container of it only if both share it."""
    a, b = pair
    return a.prefix == b.prefix and _network(a.address, a.prefix) == _network(b.address, b.prefix)


@lru_cache(maxsize=4096)
def _number(address: str) -> tuple[int, int]:
    """Bits of an address, and its number."""
    parsed = ipaddress.ip_address(address)
    return parsed.max_prefixlen, int(parsed)


@lru_cache(maxsize=4096)
def _network(address: str, prefix: int) -> Any:
    return ipaddress.ip_network(f"{address}/{prefix}", strict=False)


def widest(start: str, speeds: Mapping[str, Mapping[str, int]]) -> dict[str, tuple[str, ...]]:
    """Paths to all that can be reached: fewest hosts first, then the best slowest link, then the order of the hosts."""
    # Breadth-first, a whole level at a time: all paths of a level have equally many hosts, so the widest of them is final.
    # Host -> (Mbit/s of the slowest link, path).
    best: dict[str, tuple[int, tuple[str, ...]]] = {start: (1 << 62, (start,))}
    frontier = [start]
    while frontier:
        reached: dict[str, tuple[int, tuple[str, ...]]] = {}
        for home in frontier:
            width, path = best[home]
            for other, speed in speeds[home].items():
                if other not in best and min(width, speed) > reached.get(other, (-1, ()))[0]:
                    reached[other] = min(width, speed), (*path, other)
        best.update(reached)
        frontier = list(reached)
    return {other: path for other, (_, path) in best.items()}


def order(hosts: Sequence[Host]) -> list[str]:
    """Hosts in the order of their workers' indices: by name, but along the links where names do not follow them."""
    named = sorted(hosts, key=lambda one: (_natural(one.name), one.home))
    by_pair = ways(named)
    joined: Callable[[Host, Host], bool] = lambda a, b: by_pair[a.home, b.home].kind == "tcp"  # noqa: E731
    # Neighbours in a pipeline or ring should have a direct link. The first
    # permutation that has is nearest to the order of names.
    if len(named) <= MAX_ORDERED_HOSTS:
        chains = (chain for chain in permutations(named) if all(joined(a, b) for a, b in pairwise(chain)))
        return [one.home for one in next(chains, named)]
    return [one.home for one in named]


def _natural(name: str) -> list[tuple[str, int]]:
    """h2 before h10."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def described(hosts: Sequence[Host]) -> str:
    """The links of hosts, for an error: `h0 has 10.0.0.1/24 (eth0)`."""
    rows = []
    for one in hosts:
        links = ", ".join(f"{link.address}/{link.prefix} ({link.device})" for link in one.links)
        rows.append(f"{one.name} has {links or 'no link off the host'}" + (", accepts no connections" * (not one.listening)))
    return "; ".join(rows)
