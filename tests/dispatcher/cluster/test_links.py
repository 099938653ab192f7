"""Ways between hosts, chosen from their links; the order of hosts; indices by rank."""

from __future__ import annotations

import random
from ipaddress import ip_address, ip_network
from itertools import pairwise

import pytest

from gt.dispatcher.cluster.links import MAX_ATTEMPTS, Host, Link, LinkRoute, Way, candidates, described, failure, order, ways
from gt.dispatcher.cluster.peer_info import worker_info
from gt.dispatcher.cluster.workers import ABSENT, Cluster
from gt.errors import ProtocolError, Refused


def host(name, *addresses, listening=True):
    links = [Link(address, 24, f"eth{at}", 10_000, False) for at, address in enumerate(addresses)]
    return Host(f"home-{name}", name, tuple(links), listening)


MESH = [host("a", "10.0.1.1", "10.0.2.1"), host("b", "10.0.1.2", "10.0.3.2"), host("c", "10.0.2.3", "10.0.3.3")]
LINE = [host("a", "10.0.1.1"), host("b", "10.0.1.2", "10.0.2.2"), host("c", "10.0.2.3", "10.0.3.3"), host("d", "10.0.3.4")]


def test_each_pair_of_a_mesh_uses_the_subnet_that_both_have():
    found = ways(MESH)
    assert found["home-a", "home-b"] == Way("tcp", "10.0.1.1", "10.0.1.2")
    assert found["home-c", "home-a"] == Way("tcp", "10.0.2.3", "10.0.2.1")
    assert found["home-b", "home-c"] == Way("tcp", "10.0.3.2", "10.0.3.3")


def test_the_fastest_common_subnet_is_used_and_the_next_one_once_it_failed():
    slow, fast = Link("10.0.0.1", 24, "eth0", 1000, True), Link("10.1.0.1", 24, "ib0", 100_000, False)
    a = Host("a", "a", (slow, fast), True)
    b = Host("b", "b", (slow._replace(address="10.0.0.2"), fast._replace(address="10.1.0.2")), True)
    assert ways([a, b])["a", "b"] == Way("tcp", "10.1.0.1", "10.1.0.2")
    broken = {failure("b", "a", (b.links[1], fast))}
    assert ways([a, b], frozenset(broken))["b", "a"] == Way("tcp", "10.0.0.2", "10.0.0.1")
    broken.add(failure("a", "b", (slow, b.links[0])))
    assert ways([a, b], frozenset(broken))["a", "b"].kind == "none"


def test_hosts_of_a_line_relay_by_the_fewest_between():
    found = ways(LINE)
    assert found["home-a", "home-c"] == Way("via", via=("home-b",))
    assert found["home-d", "home-a"] == Way("via", via=("home-c", "home-b"))
    assert found["home-a", "home-d"] == found["home-d", "home-a"].back()


def test_hosts_without_a_link_or_that_accept_nobody_have_no_way():
    lonely, deaf = host("x", "10.9.9.9"), host("y", "10.0.1.9", listening=False)
    found = ways([MESH[0], lonely, deaf])
    assert {way.kind for way in found.values()} == {"none"}
    assert described([lonely, deaf]) == "x has 10.9.9.9/24 (eth0); y has 10.0.1.9/24 (eth0), accepts no connections"


def test_ipv6_and_routed_addresses():
    a = Host("a", "a", (Link("fd00::1", 64, "eth0", 0, False), Link("192.0.2.1", 24, "eth1", 0, True)), True)
    b = Host("b", "b", (Link("fd00::2", 64, "eth0", 0, False),), True)
    c = Host("c", "c", (Link("198.51.100.1", 24, "eth0", 0, True),), True)
    found = ways([a, b, c])
    assert found["a", "b"] == Way("tcp", "fd00::1", "fd00::2")
    assert found["a", "c"] == Way("routed", "192.0.2.1", "198.51.100.1")
    assert found["b", "c"] == Way("via", via=("a",))


def on(name, address, *routes, device="eth0", prefix=24, default=False, scope="", more=()):
    links = (Link(address, prefix, device, 0, default), *more)
    return Host(name, name, links, True, tuple(LinkRoute(*row) for row in routes), scope or name)


def test_routes_to_one_another_join_two_hosts_before_a_relay_does():
    relay = on("r", "10.0.1.9", more=(Link("10.0.2.9", 24, "eth1", 0, False),))
    a, b = on("a", "10.0.1.1", ["10.0.2.0", 24, "eth0"]), on("b", "10.0.2.1", ["10.0.0.0", 16, "eth0"])
    there = Way("routed", "10.0.1.1", "10.0.2.1")
    assert ways([a, b, relay])["a", "b"] == there and ways([relay, b, a])["b", "a"] == there.back()
    failed = frozenset({failure("b", "a", (b.links[0], a.links[0]))})
    assert ways([a, b, relay], failed)["a", "b"] == Way("via", via=("r",))
    one_sided = on("b", "10.0.2.1")
    assert ways([a, one_sided, relay])["a", "b"].kind == "via", "b has no way back"
    refusing = on("a", "10.0.1.1", ["10.0.0.0", 8, "eth0"], ["10.0.2.0", 24, ""])
    assert ways([refusing, b, relay])["a", "b"].kind == "via", "a refuses to send to b's network"
    elsewhere = on("a", "10.0.1.1", ["10.0.0.0", 8, "eth0"], ["10.0.2.0", 24, "docker0"])
    assert ways([elsewhere, b, relay])["a", "b"].kind == "via", "a's packets to b leave at another device"


def test_routes_of_ipv6_join_two_hosts():
    a = on("a", "fd00:1::1", ["fd00:2::", 64, "eth0"], prefix=64)
    b = on("b", "fd00:2::1", ["fd00::", 16, "eth0"], prefix=64)
    assert ways([a, b])["a", "b"] == Way("routed", "fd00:1::1", "fd00:2::1")


def test_a_route_to_a_network_is_tried_before_two_default_routes():
    outer = Link("192.0.2.1", 24, "wan", 0, True)
    a = on("a", "10.0.1.1", ["10.0.2.0", 24, "eth0"], more=(outer,))
    b = on("b", "10.0.2.1", ["10.0.1.0", 24, "eth0"], more=(outer._replace(address="198.51.100.1"),))
    pairs = [(source.device, target.device) for source, target in candidates(a, b)]
    assert pairs == [("eth0", "eth0"), ("wan", "wan")]


def test_an_address_that_two_hosts_have_joins_only_those_that_share_a_network():
    bridge = Link("172.17.0.1", 16, "bridge", 10_000, False)
    slow = on("a", "10.0.1.1", more=(bridge,)), on("b", "10.0.1.2", more=(bridge,))
    assert ways(slow)["a", "b"] == Way("tcp", "10.0.1.1", "10.0.1.2"), "two bridges of one number join nobody"
    parted = on("a", "10.0.1.1", more=(bridge,)), on("b", "10.0.2.2", more=(bridge,))
    assert ways(parted)["a", "b"].kind == "none"
    containers = on("a", "172.17.0.1", scope="n"), on("b", "172.17.0.1", scope="n")
    assert ways(containers)["a", "b"] == Way("tcp", "172.17.0.1", "172.17.0.1")
    inner = bridge._replace(address="172.17.0.5", device="eth1")
    doubtful = on("a", "10.0.1.1", more=(bridge, inner)), on("b", "10.0.1.2", more=(bridge,))
    assert [source.address for source, _ in candidates(*doubtful)] == ["10.0.1.1", "172.17.0.5"], "it may be a real one: last"


def test_hosts_of_many_addresses_try_few_of_them():
    many = tuple(Link(f"10.1.{at // 250}.{at % 250 + 1}", 16, "eth0", 0, True) for at in range(200))
    a, b = Host("a", "a", many[:100], True), Host("b", "b", many[100:], True)
    assert len(list(candidates(a, b))) == 1, "where one address of a subnet fails, another of the same devices does too"
    wide = tuple(Link(f"10.{at}.0.1", 24, f"eth{at}", 0, True) for at in range(64))
    other = tuple(Link(f"10.{at + 64}.0.1", 24, f"eth{at}", 0, True) for at in range(64))
    assert len(list(candidates(Host("a", "a", wide, True), Host("b", "b", other, True)))) == MAX_ATTEMPTS


def test_of_many_addresses_those_of_the_best_devices_are_paired():
    slow = [Link(f"10.0.0.{at + 1}", 16, f"eth{at % 3}", 1000, False) for at in range(60)]
    a = Host("a", "a", (*slow, Link("10.0.1.1", 16, "ib0", 100_000, False)), True, scope="a")
    b = Host("b", "b", tuple(link._replace(address=f"10.0.2.{at + 1}") for at, link in enumerate(a.links)), True, scope="b")
    first, *rest = candidates(a, b)
    assert (first[0].device, first[1].device) == ("ib0", "ib0")
    assert len({(x.device, y.device) for x, y in rest}) == len(rest) == MAX_ATTEMPTS - 1
    rails = [Link(f"10.1.{at}.1", 24, f"rail{at}", 1000, False) for at in range(64)]
    own = Host("c", "c", tuple(rails), True, (LinkRoute("10.2.63.0", 24, "rail63"),))
    far = [link._replace(address=link.address.replace("10.1", "10.2")) for link in rails]
    assert candidates(own, Host("d", "d", tuple(far), True, (LinkRoute("10.1.63.0", 24, "rail63"),))) == [(rails[63], far[63])]


def test_what_joins_two_hosts_is_searched_once_as_long_as_both_are_there(monkeypatch):
    searched = []
    search = lambda one, other: searched.append(one.name + other.name) or candidates(one, other)  # noqa: E731
    monkeypatch.setattr("gt.dispatcher.cluster.links.candidates", search)
    cluster = Cluster()
    about = [{"host": one.name, "home": one.home, "port": 7, "links": [list(link) for link in one.links]} for one in MESH]
    workers = [cluster.add(b"%d" % at, worker_info(one)) for at, one in enumerate(about)]
    whole = cluster.ways()
    assert cluster.ways() == whole == ways(cluster.hosts_of(workers), known={}) and searched[:3] == ["ab", "ac", "bc"]
    del searched[:]
    workers[0].lost = "killed"
    assert set(cluster.ways()) == {("home-b", "home-c"), ("home-c", "home-b")} and not searched
    workers[0].revive(b"new", worker_info({**about[0], "links": []}))
    assert cluster.ways()["home-a", "home-b"].kind == "none" and searched == ["ab", "ac"]


def random_hosts(draw: random.Random) -> list[Host]:
    """Hosts on some of few subnets, some of one number elsewhere, with routes of any prefix, and some defaults."""
    found = []
    for at in range(draw.randint(2, 6)):
        nets = draw.sample(range(6), draw.randint(0, 3))
        default = draw.choice([-1, -1, *nets])
        links = tuple(Link(f"10.{net}.0.{at + 1}", 24, f"e{net}", draw.choice([0, 1000]), net == default) for net in nets)
        targets = [draw.choice([(f"10.{net}.0.0", 24), (f"10.{net & 6}.0.0", 15), ("10.0.0.0", 8)]) for net in range(6)]
        rows = {row: draw.choice(["", "docker0", *(link.device for link in links)]) for row in draw.sample(targets, 3)}
        routes = tuple(LinkRoute(*network, device) for network, device in rows.items())
        found.append(Host(f"{at}", f"{at}", links, draw.random() < 0.9, routes, f"{at}"))
    return found


def leaves_at(host: Host, address: str) -> set[str]:
    """Devices of the longest prefix, by the library's networks."""
    rows = [(ip_network(f"{link.address}/{link.prefix}", strict=False), link.device) for link in host.links]
    rows += [(ip_network(f"{route.network}/{route.prefix}"), route.device) for route in host.routes]
    rows += [(ip_network("0.0.0.0/0"), link.device) for link in host.links if link.routed]
    fits = [(net.prefixlen, device) for net, device in rows if ip_address(address) in net]
    return {device for prefix, device in fits if prefix == max(fits)[0]}


@pytest.mark.parametrize("seed", range(200))
def test_the_way_of_any_two_hosts_is_one_that_their_networks_have(seed):
    draw = random.Random(seed)
    hosts = random_hosts(draw)
    failed = frozenset(
        failure(a.home, b.home, pair) for a in hosts for b in hosts for pair in candidates(a, b) if draw.random() < 0.2
    )  # fmt: skip
    found = ways(hosts, failed)
    for a in hosts:
        for b in hosts:
            if a is b:
                continue
            way = found[a.home, b.home]
            assert found[b.home, a.home] == way.back(), "both ends agree"
            by_kind = joined_by(a, b, failed)
            want = next((kind for kind in ("tcp", "routed") if by_kind[kind]), None)
            if want is None:
                assert not way.connected, "nothing joins them"
                path = [a.home, *way.via, b.home]
                assert way.kind == "none" or all(found[leg].connected for leg in pairwise(path))
            else:
                assert way.kind == want and (way.source, way.target) in by_kind[want], "subnets, then routes, then relays"


def joined_by(a: Host, b: Host, failed: frozenset) -> dict[str, set[tuple[str, str]]]:
    """Pairs of addresses that a subnet, or routes, join and that have not failed."""
    pairs: dict[str, set[tuple[str, str]]] = {"tcp": set(), "routed": set()}
    for x in a.links if a.listening and b.listening else ():
        for y in b.links:
            if failure(a.home, b.home, (x, y)) not in failed:
                if ip_network(f"{x.address}/{x.prefix}", strict=False) == ip_network(f"{y.address}/{y.prefix}", strict=False):
                    pairs["tcp"].add((x.address, y.address))
                elif x.device in leaves_at(a, y.address) and y.device in leaves_at(b, x.address):
                    pairs["routed"].add((x.address, y.address))
    return pairs


def test_hosts_are_in_natural_order_and_on_a_line_along_it():
    assert order([host("h10", "10.0.0.3"), host("h2", "10.0.0.2")]) == ["home-h2", "home-h10"]
    crossed = [host("a", "10.0.1.1"), host("c", "10.0.1.2", "10.0.2.2"), host("b", "10.0.2.3")]
    assert order(crossed) == ["home-a", "home-c", "home-b"]


def info(host_name, rank=-1, gpu=-1, name=""):
    return worker_info({"host": host_name, "rank": rank, "gpu": gpu, "name": name, "heap_bytes": 1 << 30})


def test_a_worker_with_a_rank_has_that_index_whenever_it_joins():
    cluster = Cluster()
    assert cluster.add(b"2", info("b", 2, name="w0")).index == 2
    assert [(w.name, w.lost) for w in cluster.workers][:2] == [("w3", ABSENT), ("w1", ABSENT)]
    assert cluster.add(b"0", info("a", 0)).index == 0
    with pytest.raises(Refused, match="worker w0 on b has rank 2 already"):
        cluster.add(b"x", info("c", 2))
    cluster.workers[2].lost = "killed"
    assert cluster.add(b"n", info("c", 2)).name == "w0"
    assert len({w.name for w in cluster.workers}) == 3


def test_workers_without_ranks_are_in_the_order_of_hosts_and_gpus_until_a_session_uses_them():
    cluster = Cluster()
    for host_name, gpu in (("h1", 1), ("h0", 0), ("h1", 0), ("h0", 1)):
        cluster.add(f"{host_name}{gpu}".encode(), info(host_name, gpu=gpu))
    cluster.announced = True
    cluster.arrange()
    assert [w.peer for w in cluster.workers] == [b"h00", b"h01", b"h10", b"h11"]
    assert [w.index for w in cluster.workers] == [0, 1, 2, 3] and not cluster.announced
    assert cluster.add(b"late", info("a")).index == 4
    cluster.arrange()
    assert cluster.workers[4].peer == b"late"


def test_a_failed_connection_makes_another_way_and_another_epoch():
    cluster = Cluster()
    for at, one in enumerate(MESH):
        about = {"host": one.name, "home": one.home, "port": 7, "links": [list(link) for link in one.links], "heap_bytes": 1}
        cluster.add(b"%d" % at, worker_info(about))
    assert [row[:4] + [row[6]] for row in cluster.routes()] == [
        [0, 1, 1, "tcp", []],
        [0, 2, 1, "tcp", []],
        [1, 2, 1, "tcp", []],
    ]
    a, b, _ = cluster.workers
    assert not cluster.fail_link(a, b, 1, ("10.0.1.1", "10.0.9.9"), 0.0), "it is not their way"
    assert not cluster.fail_link(a, b, 0, ("10.0.1.1", "10.0.1.2"), 0.0), "it is news of an earlier way"
    assert cluster.fail_link(b, a, 1, ("10.0.1.2", "10.0.1.1"), 0.0)
    assert [row[:4] + [row[6]] for row in cluster.routes()] == [
        [0, 2, 1, "tcp", []], [1, 2, 1, "tcp", []], [0, 1, 2, "via", [2]],
    ]  # fmt: skip
    assert not cluster.retry_links(100.0), "a worker relays"
    cluster.forgive(a)
    assert [0, 1, 3, "tcp", "10.0.1.1", "10.0.1.2", []] in cluster.routes()


def test_failed_connections_are_tried_again_where_no_other_way_is_left():
    cluster = Cluster()
    for at, one in enumerate(MESH[:2]):
        about = {"host": one.name, "home": one.home, "port": 7, "links": [list(link) for link in one.links], "heap_bytes": 1}
        cluster.add(b"%d" % at, worker_info(about))
    [(_, _, epoch, _, source, target, _)] = cluster.routes()
    assert cluster.fail_link(*cluster.workers, epoch, (source, target), 1.0)
    assert [row[2:4] for row in cluster.routes()] == [[2, "none"]]
    assert not cluster.retry_links(2.0) and cluster.retry_links(100.0) and not cluster.retry_links(200.0)
    assert [row[2:4] for row in cluster.routes()] == [[3, "tcp"]]


def test_the_news_that_nothing_joins_two_hosts_names_each_way_and_why_it_failed():
    cluster = Cluster()
    for at, one in enumerate((host("h1", "10.0.1.1", "10.0.2.1"), host("h2", "10.0.1.2", "10.0.2.2"))):
        about = {"host": one.name, "home": one.home, "port": 7, "links": [list(link) for link in one.links], "heap_bytes": 1}
        cluster.add(b"%d" % at, worker_info(about))
    news = []
    for reason in ("timed out", "refused"):
        [(_, _, epoch, _, source, target, _)] = cluster.routes()
        news.append(cluster.fail_link(*cluster.workers, epoch, (source, target), 1.0, reason))
    assert "is tried now" in news[0]
    assert "h1 and h2: 10.0.2.1 to 10.0.2.2 failed: refused; so did 10.0.1.1 to 10.0.1.2: timed out; nothing else" in news[1]


def of_mesh():
    """A cluster of three hosts, each pair joined by a cable; that of the first two has failed."""
    cluster = Cluster()
    for at, one in enumerate(MESH):
        about = {"host": one.name, "home": one.home, "port": 7, "links": [list(link) for link in one.links], "heap_bytes": 1}
        cluster.add(b"%d" % at, worker_info(about))
    cluster.routes()
    assert cluster.broken() == []
    news = cluster.fail_link(*cluster.workers[1::-1], 1, ("10.0.1.2", "10.0.1.1"), 0.0, "timed out")
    assert news == (
        "hosts a and b: 10.0.1.1 to 10.0.1.2 failed: timed out (a firewall that drops it, or a cable); "
        "c relays until it is back, which is slower"
    )
    assert cluster.troubles() == [news]
    cluster.routes()
    return cluster


def test_a_connection_that_works_again_is_used_once_no_transfer_is_under_way():
    cluster = of_mesh()
    a, b, c = cluster.workers
    assert cluster.broken() == [[0, 1, "10.0.1.1", "10.0.1.2"]]
    cluster.mend_link(a, c, "10.0.2.1", "10.0.2.3")
    assert not cluster.mended, "it has not failed"
    cluster.mend_link(a, b, "10.0.1.1", "10.0.1.2")
    c.runs = 1
    assert cluster.use_mended() == [] and cluster.mended, "a worker is at work"
    cluster.finished(c, 1)
    c.code = [1]
    assert cluster.use_mended() == [] and cluster.mended, "half a batch is written"
    c.code, cluster.queue.waiting = [], 1
    assert cluster.use_mended() == [] and cluster.mended, "work waits, of which a part may be done"
    cluster.queue.waiting = 0
    assert cluster.use_mended() == ["hosts a and b have their connection 10.0.1.1 to 10.0.1.2 again"]
    assert [0, 1, 3, "tcp", "10.0.1.1", "10.0.1.2", []] in cluster.routes()
    assert not cluster.mended and cluster.broken() == [] == cluster.troubles() == cluster.use_mended()


def test_a_connection_that_fails_again_before_it_is_used_is_not_used():
    cluster = of_mesh()
    a, b, c = cluster.workers
    cluster.mend_link(b, a, "10.0.1.2", "10.0.1.1")
    cluster.forgive(c)
    assert cluster.mended, "another host has joined"
    cluster.forgive(b)
    assert not cluster.mended, "all are tried anew"
    (route,) = [row for row in cluster.routes() if row[:2] == [0, 1]]
    assert cluster.fail_link(a, b, route[2], ("10.0.1.1", "10.0.1.2"), 1.0, "refused")
    assert cluster.use_mended() == []


def test_a_connection_that_fails_whenever_it_is_used_again_rests_longer_each_time():
    """A greeting passes where large packets are dropped: programs would lose transfers every few seconds."""
    cluster = of_mesh()
    a, b, _ = cluster.workers
    link = "10.0.1.1", "10.0.1.2"
    for epoch, rest in ((3, 10.0), (5, 40.0), (7, 160.0)):
        cluster.mend_link(a, b, *link)
        assert cluster.use_mended() and cluster.routes()
        assert cluster.fail_link(a, b, epoch, link, cluster.now, "timed out") is not None
        assert cluster.broken() == [] and cluster.routes()
        cluster.now += rest - 1
        cluster.mend_link(a, b, *link)
        assert not cluster.mended and not cluster.retry_links(cluster.now), "it rests, whatever a worker says"
        cluster.now += 2
        assert cluster.retry_links(cluster.now) and not cluster.retry_links(cluster.now), "workers are told, once"
        assert cluster.broken() == [[0, 1, *link]]

    # One that worked for long is tried at once, as the first time.
    cluster.mend_link(a, b, *link)
    assert cluster.use_mended() and cluster.routes()
    cluster.now += 4000
    assert cluster.fail_link(a, b, 9, link, cluster.now, "timed out") is not None
    assert cluster.broken() == [[0, 1, *link]]


def test_a_program_is_told_of_few_failed_connections_and_how_many_others_there_are():
    cluster = Cluster()
    for at in range(7):
        about = {"host": f"h{at}", "home": f"home{at}", "port": 7, "links": [[f"10.0.0.{at + 1}", 24, "eth0", 1000, False]]}
        cluster.add(b"%d" % at, worker_info({**about, "heap_bytes": 1}))
    for a, b, epoch, _, source, target, _ in cluster.routes():
        assert cluster.fail_link(cluster.workers[a], cluster.workers[b], epoch, (source, target), 0.0, "refused")
    *first, last = cluster.troubles()
    assert len(first) == 8 and last == "and 13 other connections between hosts have failed: see `gt doctor --hosts`"


@pytest.mark.parametrize(
    "about",
    [{"routes": [["10.0.0.0", 24, "e"]] * 129}, {"routes": [["10.0.0.0", 0, "e"]]}, {"routes": [["fe80::%1", 64, "e"]]}]
    + [{"routes": [["10.0.0.0", 33, "e"]]}, {"routes": [["10.0.0.0", 24, "e" * 65]]}, {"scope": "x" * 300}]
    + [{"rank": 1 << 20}, {"port": -1}, {"links": [["nowhere", 24, "eth0", 0, True]]}, {"links": [["::1", 200, "e", 0, True]]}]
    + [{"links": [["10.0.0.1", 24, "e", 0, True]] * 65}, {"links": [7]}, {"gpu": 1 << 40}],
)
def test_a_false_description_of_links_is_refused(about):
    with pytest.raises(ProtocolError):
        worker_info(about)


def test_nccl_joins_workers_of_one_version_that_a_connection_joins():
    cluster = Cluster()
    rows = [("a", "2.28.9", "10.0.1.1"), ("a", "2.28.9", "10.0.1.1"), ("b", "2.28.9", "10.0.1.2"), ("c", "2.30.1", "10.0.1.3")]
    rows += [("d", "", "10.0.1.4"), ("e", "2.28.9", "10.0.9.5")]
    for n, (name, version, address) in enumerate(rows):
        info = {
            "name": f"w{n}",
            "host": name,
            "home": name,
            "nccl": version,
            "port": 4,
            "links": [[address, 24, "eth0", 0, False]],
        }
        cluster.add(b"%d" % n, info)
    cluster.routes()
    assert cluster.nccl == [[0, 1], [0, 2], [1, 2]]
    assert worker_info({"nccl": "2.28.9"})["nccl"] == "2.28.9"


def test_a_pair_is_unmet_from_a_new_way_until_it_is_connected():
    cluster = of_mesh()
    a, b, c = cluster.workers
    assert cluster.unmet == {(0, 2), (1, 2)}, "the way of the first two is relayed"
    cluster.meet(c, a, 1)
    cluster.meet(b, c, 7)
    cluster.routes()
    assert cluster.unmet == {(1, 2)}, "it is news of another epoch"
    cluster.meet(b, c, 1)
    assert not cluster.unmet
    c.revive(b"again", c.info)
    cluster.routes()
    assert cluster.unmet == {(0, 2), (1, 2)}, "a new process has none of the old connections"
