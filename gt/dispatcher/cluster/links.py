"""Ways between hosts, chosen from facts: their links, and those that have failed. Pure functions. A host's workers: workers.py.

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
MAX_PAIRED = 24  # addresses of a host in one subnet, or with routes to another host, that are paired with that one's
Subnet = tuple[int, int, int]  # bits of its addresses, its prefix, and so many leading bits of them as a number
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


Pair = tuple[Link, Link]
End = tuple[int, Link, int, set[str]]  # a link, its place, and the prefix and devices by which the other host sends to it


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


@dataclass(frozen=True, eq=False)
class Host:
    """One host. home: its identity; name: for people. listening: its workers accept connections. scope: of its addresses.

    Containers that share a network have one scope, and there an address of one is the other's too. A host is equal to itself
    alone: what has been found of two hosts is kept by them.
    """

    home: str
    name: str
    links: tuple[Link, ...] = ()
    listening: bool = False
    routes: tuple[LinkRoute, ...] = ()
    scope: str = ""

    @cached_property
    def table(self) -> dict[int, dict[int, dict[int, set[str]]]]:
        """Devices that lead to networks, by bits of addresses, by prefix, the longest first, and by network."""
        # Example: 10.0.0.1/24 on eth0, which also has the default route,
        # gives {32: {24: {0x0a0000: {eth0}}, 0: {0: {eth0}}}}.
        rows = [(link.address, link.prefix, link.device) for link in self.links]
        rows += [("::" if ":" in link.address else "0.0.0.0", 0, link.device) for link in self.links if link.routed]
        table: dict[int, dict[int, dict[int, set[str]]]] = {32: {}, 128: {}}
        for address, prefix, device in sorted((*rows, *self.routes), key=lambda row: -row[1]):
            bits, _, network = subnet(address, prefix)
            table[bits].setdefault(prefix, {}).setdefault(network, set()).add(device)
        return table

    def leads(self, address: str) -> tuple[int, set[str]]:
        """Length of the prefix by which packets to an address leave, 0 for a default route, and the devices where they do."""
        # The longest matching prefix decides, as in the kernel; if it leads out elsewhere, shorter ones do not count.
        bits, number = _number(address)
        for prefix, networks in self.table[bits].items():
            if devices := networks.get(number >> bits - prefix):
                return prefix, devices
        return 0, set()

    @cached_property
    def subnets(self) -> dict[Subnet, list[tuple[int, Link]]]:
        """Links with their places among all, by subnet, the fastest first, and at most MAX_PAIRED of each."""
        # Two addresses of a device are enough: where one fails the other does too, but for one that both hosts have.
        rows: dict[Subnet, list[tuple[int, Link]]] = {}
        for place, link in sorted(enumerate(self.links), key=lambda row: -row[1].mbps):
            known = rows.setdefault(subnet(link.address, link.prefix), [])
            before = [other.address for _, other in known if other.device == link.device]
            if len(known) < MAX_PAIRED and len(before) < 2 and link.address not in before:
                known.append((place, link))
        return rows


def home(info: Mapping[str, Any]) -> str:
    """The identity of a worker's host: a boot and a namespace of processes, else its name."""
    return info.get("home") or info.get("host", "")


def host(info: Mapping[str, Any]) -> Host:
    """A worker's host as it describes it."""
    links = tuple(Link(*row) for row in info.get("links", ()))
    routes = tuple(LinkRoute(*row) for row in info.get("routes", ()))
    return Host(home(info), info.get("host", ""), links, info.get("port", 0) > 0, routes, info.get("scope", ""))


def ways(
    hosts: Sequence[Host], failed: frozenset[Failure] = frozenset(), known: dict[tuple[Host, Host], list[Pair]] | None = None
) -> dict[tuple[str, str], Way]:
    """The way of each pair of different hosts, in both directions.

    known: the candidates of pairs of hosts, from earlier calls, to which this one adds.
    """
    way_of: dict[tuple[str, str], Way] = {}
    speeds: dict[str, dict[str, int]] = {host.home: {} for host in hosts}
    known = {} if known is None else known

    # 1. Pairs that connect directly, by the first candidate that has not failed. Their speeds are the graph of step 2.
    for place, host in enumerate(hosts):
        for other in hosts[place + 1 :]:
            if (pairs := known.get((host, other))) is None:
                pairs = known[host, other] = candidates(host, other)
            direct = next((pair for pair in pairs if failure(host.home, other.home, pair) not in failed), None)
            if direct is not None:
                source, target = direct
                kind: Literal["tcp", "routed"] = "tcp" if _joined(direct) else "routed"
                way_of[host.home, other.home] = Way(kind, source.address, target.address)
                speeds[host.home][other.home] = speeds[other.home][host.home] = min(source.mbps, target.mbps)

    # 2. The others go through hosts that relay, if any path exists.
    for place, host in enumerate(hosts):
        others = [other.home for other in hosts[place + 1 :] if (host.home, other.home) not in way_of]
        paths = widest(host.home, speeds) if any(speeds[home] for home in others) else {}
        for home in others:
            path = paths.get(home)
            way_of[host.home, home] = Way("none") if path is None else Way("via", via=path[1:-1])
    return {**way_of, **{(b, a): way.back() for (a, b), way in way_of.items()}}


def by_nccl(a: Mapping[str, Any], b: Mapping[str, Any], way: Way) -> bool:
    """True if NCCL may carry tensors between two workers, by their infos and way: it wants one version, and relays nothing."""
    return bool(a.get("nccl")) and a.get("nccl") == b.get("nccl") and (way.connected or way.kind == "shm")


def within(one: Host) -> Way:
    """The way between workers of one host. The address is for collectives that other hosts take part in."""
    address = one.links[0].address if one.links and one.listening else ""
    return Way("shm", address, address)


def failure(host: str, peer: str, pair: Sequence[Link]) -> Failure:
    """The name of a failed connection between two links, the same from both ends."""
    source, target = pair[0].address, pair[1].address
    return (host, peer, source, target) if host <= peer else (peer, host, target, source)


def candidates(one: Host, other: Host) -> list[Pair]:
    """Pairs of addresses to connect, the first MAX_ATTEMPTS of all that lead from each host to the other."""
    return list(islice(_pairs(one, other), MAX_ATTEMPTS)) if one.listening and other.listening else []


def _pairs(one: Host, other: Host) -> Iterator[Pair]:
    """First those of a subnet that both have, the fastest first, then those that routers join.

    Both hosts may have the same address: docker gives it to its bridge on every host. Then the subnet is most likely two
    separate networks of one number, and comes last.
    """
    twice = {a.address for a in one.links} & {b.address for b in other.links} if one.scope != other.scope else set()
    doubtful = {subnet(link.address, link.prefix) for link in one.links if link.address in twice}
    joined = [row for network in one.subnets if network in other.subnets for row in _in_subnet(one, other, network)]
    joined.sort(key=lambda row: row[0])

    # The order of attempts: sure subnets, routed pairs, doubtful subnets.
    yield from _first(pair for (*_, network), pair in joined if network not in doubtful)
    yield from _routed(one, other)
    yield from _first(pair for (*_, network), pair in joined if network in doubtful)


def _in_subnet(one: Host, other: Host, network: Subnet) -> Iterator[tuple[tuple[int, int, int, Subnet], Pair]]:
    """Pairs of a subnet that both hosts have, with their order among all: slowness, then the places of both links."""
    shared = one.scope == other.scope
    for place, a in one.subnets[network]:
        for there, b in other.subnets[network]:
            if shared or a.address != b.address:
                yield (_slowness(a, b), place, there, network), (a, b)


def _routed(one: Host, other: Host) -> Iterator[Pair]:
    """Pairs without a common subnet, each end of which has a route to the other: those that need no default route first."""
    # Ends that the other host has a route to, each with the devices at which its packets leave there.
    forth = [(place, link, *one.leads(link.address)) for place, link in enumerate(other.links)]
    back = [(place, link, *other.leads(link.address)) for place, link in enumerate(one.links)]
    targets, sources = _likely(forth, back), _likely(back, forth)
    routed, shared = [], one.scope == other.scope
    for place, a, prefix_back, devices in sources:
        for there, b, prefix, leaving in targets:
            meet = a.device in leaving and b.device in devices and (":" in a.address) == (":" in b.address)
            if meet and (shared or a.address != b.address) and not _joined((a, b)):
                routed.append(((prefix == 0) + (prefix_back == 0), _slowness(a, b), place, there))

    # One pair for each two devices and family of addresses: the sort puts the best first.
    best: dict[tuple[str, str, bool], Pair] = {}
    for _, _, place, there in sorted(routed):
        a, b = one.links[place], other.links[there]
        best.setdefault((a.device, b.device, ":" in a.address), (a, b))
    return iter(best.values())


def _likely(ends: list[End], others: list[End]) -> list[End]:
    """The first MAX_PAIRED ends, by need of a default route and speed, at whose devices packets to the other host leave."""
    devices = set().union(*(leaving for *_, leaving in others))
    likely = [end for end in ends if end[3] and end[1].device in devices]
    return sorted(likely, key=lambda end: (end[2] == 0, -end[1].mbps))[:MAX_PAIRED]


def _slowness(a: Link, b: Link) -> int:
    return -a.mbps if a.mbps < b.mbps else -b.mbps


def _first(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """One pair of each two devices and subnet: where it fails, another address of the same device does too."""
    known = set()
    for a, b in pairs:
        key = a.device, b.device, subnet(a.address, a.prefix)
        if key not in known:
            known.add(key)
            yield a, b


def _joined(pair: Pair) -> bool:
    """True for two addresses of one subnet. A host's own address reaches another container of it only if both share it."""
    a, b = pair
    return a.prefix == b.prefix and subnet(a.address, a.prefix) == subnet(b.address, b.prefix)


@lru_cache(maxsize=4096)
def _number(address: str) -> tuple[int, int]:
    """Bits of an address, and its number."""
    parsed = ipaddress.ip_address(address)
    return parsed.max_prefixlen, int(parsed)


@lru_cache(maxsize=4096)
def subnet(address: str, prefix: int) -> Subnet:
    """The network of an address."""
    bits, number = _number(address)
    return bits, prefix, number >> bits - prefix


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
