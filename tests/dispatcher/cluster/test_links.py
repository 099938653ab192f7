"""Ways between hosts, chosen from their links; the order of hosts; indices by rank."""

from __future__ import annotations

import pytest

from gt.dispatcher.cluster.links import Host, Link, Way, described, failure, order, ways
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
    assert found["a", "c"] == Way("tcp", "192.0.2.1", "198.51.100.1")
    assert found["b", "c"] == Way("via", via=("a",))


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
    with pytest.raises(Refused, match="has rank 2 already"):
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
    assert not cluster.fail_link(a, b, 1, "10.0.1.1", "10.0.9.9", 0.0), "it is not their way"
    assert not cluster.fail_link(a, b, 0, "10.0.1.1", "10.0.1.2", 0.0), "it is news of an earlier way"
    assert cluster.fail_link(b, a, 1, "10.0.1.2", "10.0.1.1", 0.0)
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
    assert cluster.fail_link(*cluster.workers, epoch, source, target, 1.0)
    assert [row[2:4] for row in cluster.routes()] == [[2, "none"]]
    assert not cluster.retry_links(2.0) and cluster.retry_links(100.0) and not cluster.retry_links(200.0)
    assert [row[2:4] for row in cluster.routes()] == [[3, "tcp"]]


@pytest.mark.parametrize(
    "about",
    [{"rank": 1 << 20}, {"port": -1}, {"links": [["nowhere", 24, "eth0", 0, True]]}, {"links": [["::1", 200, "e", 0, True]]}]
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
