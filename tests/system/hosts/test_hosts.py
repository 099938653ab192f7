"""Programs over several hosts, each a set of namespaces of this machine: mesh, line and switch; cables that are pulled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache

import pytest
import yaml

from tests.helpers import ROOT
from tests.helpers.limits import limit
from tests.helpers.processes import children
from tests.system.hosts.lab import Lab, why_not
from tests.system.hosts.site import PROGRAMS, Site, environment

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"), pytest.mark.timeout(limit(300))]
DETECTED = limit(1.0)  # seconds from the end of a cable to an error


@cache
def on_one_host(program: str) -> dict:
    """What the program says with workers of one host."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS), program, "local"], env=environment(), capture_output=True, text=True, timeout=limit(150)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


@pytest.mark.long
def test_on_a_switch_of_two_all_bits_are_one_hosts():
    with Lab.switch(2) as lab:
        site = Site(lab, [0, 0, 1, 1], links=False)
        found = site.program("demo").hear()
        assert found["losses"] == on_one_host("demo")["losses"]
        assert found["ways"][0]["w1"] == "shm" and found["ways"][0]["w2"].startswith("tcp 10.77.0.1 to 10.77.0.2")
        site.close()


def test_on_a_mesh_all_bits_are_one_hosts():
    with Lab.mesh(3, management=True) as lab:
        site = Site(lab, [0, 0, 1, 2])
        found = site.program("demo").hear()
        assert found["losses"] == on_one_host("demo")["losses"]
        assert all(way.startswith(("tcp 192.168", "shm")) for row in found["ways"] for way in row.values())
        site.close()


def test_a_mesh_with_addresses_of_ipv6_alone():
    with Lab.mesh(3, management=True, six=True) as lab:
        site = Site(lab, [0, 1, 2], backend="numpy")
        program = site.program("lose", "1", host=2)
        assert program.hear() == {"ready": True}
        site.workers[1].kill()
        assert program.hear()["error"] == "WorkerLost"
        site.workers[1].wait()
        site.workers[1] = site.worker(1, 1)
        program.tell()
        again = program.hear()
        assert again["again"] == 400_000 and again["ways"][0]["w1"] == "tcp fd00:100::1 to fd00:100::2", again
        program.end()
        site.close()


def test_zero_3_on_a_mesh_trains_as_on_one_host_and_four_programs_share_it():
    with Lab.mesh(3, management=True) as lab:
        site = Site(lab, [0, 1, 2])
        want = on_one_host("zero")["losses"]
        assert site.program("zero").hear()["losses"] == pytest.approx(want, rel=1e-5)
        four_programs(site)
        site.close()


def four_programs(site: Site) -> None:
    """Four programs at once, on all hosts in turn."""
    programs = [site.program("client", host=at % len(site.lab.hosts)) for at in range(4)]
    for program in programs:
        assert program.hear() == {"ready": True}
    for program in programs:
        program.tell()
    assert [program.hear() for program in programs] == [{"right": 20}] * 4


@pytest.mark.long
def test_four_programs_share_a_line():
    with Lab.line(3, management=True) as lab:
        site = Site(lab, [0, 1, 2], backend="numpy")
        four_programs(site)
        site.close()


@pytest.mark.long
def test_four_programs_share_a_switch():
    with Lab.switch(2) as lab:
        site = Site(lab, [0, 0, 1], links=False, backend="numpy")
        four_programs(site)
        site.close()


def test_on_a_line_the_host_between_relays_and_all_bits_are_one_hosts():
    with Lab.line(3, management=True) as lab:
        site = Site(lab, [0, 1, 2, 2])
        found = site.program("demo").hear()
        assert found["losses"] == on_one_host("demo")["losses"]
        assert found["ways"][0]["w2"] == "via worker 1" and sum(found["relayed"][1].values()) > 0
        site.close()


def test_a_relay_that_ends_amid_transfers_is_named_at_once_and_its_successor_relays():
    with Lab.line(3, management=True) as lab:
        site = Site(lab, [0, 1, 2], backend="numpy")
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV):
            program = site.program("lose", "2")
            assert program.hear() == {"ready": True}
            relay = site.workers[1]
            ended = time.monotonic()
            os.kill(children(relay.pid)[-1], number)
            found = program.hear()
            assert found["error"] == "WorkerLost" and "worker w1" in found["text"] and found["at"] - ended < DETECTED, found
            relay.wait(limit(10))
            site.workers[1] = site.worker(1, 1)
            program.tell()
            again = program.hear()
            assert again["again"] == 400_000 and again["ways"][0]["w2"] == "via worker 1", again
            program.end()
        site.close()


def test_hosts_that_routes_join_train_without_a_worker_between_and_all_bits_are_one_hosts():
    with Lab.line(3, management=True, forward=True) as lab:
        site = Site(lab, [0, 2])
        found = site.program("routed").hear()
        assert found["losses"] == on_one_host("routed")["losses"] and found["right"] is True
        assert found["ways"][0]["w1"] == f"routed {lab.address(0, 1)} to {lab.address(2, 1)}"
        site.close()


def test_a_route_that_ends_is_an_error_of_both_ends_and_used_again_once_it_is_back():
    with Lab.line(3, management=True, forward=True, six=True) as lab:
        site = Site(lab, [0, 2, 2], backend="numpy")
        ends = lab.address(0, 1), lab.address(2, 1)
        program = site.program("lose", "1")
        assert program.hear() == {"ready": True}
        lab.pass_on(1, False)
        cut = time.monotonic()
        found = program.hear()
        assert found["at"] - cut < DETECTED, found
        assert all(part in found["text"] for part in ("'w0' on h0", "'w1' on h2", *ends)), found
        lab.pass_on(1, True)
        program.tell()
        again = program.hear()
        assert again["again"] == 400_000 and again["ways"][0]["w1"] == "routed {} to {}".format(*ends), again
        program.end()
        site.close()


def test_a_route_that_ends_is_replaced_by_a_relay():
    with Lab.line(3, management=True, forward=True) as lab:
        site = Site(lab, [0, 2, 1], backend="numpy")
        program = site.program("lose", "1")
        assert program.hear() == {"ready": True}
        lab.pass_on(1, False)
        cut = time.monotonic()
        found = program.hear()
        assert found["at"] - cut < DETECTED, found
        program.tell()
        again = program.hear()
        assert again["again"] == 400_000 and again["ways"][0]["w1"] == "via worker 2", again
        program.end()
        site.close()


FACTS = "from gt.worker.process import network_links as n; import json; print(json.dumps([n.links(), n.routes()]))"
TABLE = (
    *("addr add 169.254.7.1/16 dev to-h1", "addr add fe80::77/64 dev to-h1 nodad", "addr add fd00:5::1/64 dev to-h1 nodad"),
    *("route add 10.1.0.0/16 via 192.168.100.2 metric 5", "route add 10.1.0.0/16 via 10.77.0.2 metric 9"),
    *("route add blackhole 10.2.0.0/16", "route add 10.3.0.1/32 dev to-h1", "route add fd00:6::/48 via fd00:5::2"),
    *("route add unreachable fd00:7::/64", "route add default via 10.77.0.2", "route add multicast 239.0.0.0/8 dev to-h1"),
    *(f"addr add 192.168.100.{at}/24 dev to-h1" for at in range(10, 210)),
)


def test_the_kernels_routes_and_many_addresses_as_a_worker_tells_them():
    with Lab(2, [(0, 1)], management=True) as lab:
        lab.host(0).ip(*TABLE)
        links, routes = json.loads(lab.host(0).run([sys.executable, "-c", FACTS], env=environment()).stdout)
    assert sorted(routes) == [
        ["10.1.0.0", 16, "to-h1"], ["10.2.0.0", 16, ""], ["10.3.0.1", 32, "to-h1"],
        ["fd00:6::", 48, "to-h1"], ["fd00:7::", 64, ""],
    ]  # fmt: skip
    assert len(links) == 64 and {"10.77.0.1", "fd00:5::1", "192.168.100.1"} == {row[0] for row in links[:3]}
    assert [row[0] for row in links if row[4]] == ["10.77.0.1"]


JOB_PROGRAM = """
import torch, gt
x = torch.ones(3, device="remote") + 1
print("sum", x.sum().item(), [row["name"] for row in gt.stats()["workers"]], flush=True)
"""


def test_the_variables_of_the_jobset_make_one_job_of_three_hosts(tmp_path):
    """As a kubelet starts its pods: the manifest's variables and the rank, and the name of pod 0 in a DNS."""
    spec = yaml.safe_load((ROOT / "deploy/kubernetes/jobset.yaml").read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    variables = {row["name"]: row["value"] for row in container["env"]}
    token, program = tmp_path / "token", tmp_path / "program.py"
    token.write_text("a token of the lab, 0123456789\n")
    token.chmod(0o400)
    program.write_text(JOB_PROGRAM)
    start = container["command"].index("run") + 1
    with Lab.switch(spec["completions"]) as lab:
        pods = []
        for rank, host in enumerate(lab.hosts):
            host.run(["sh", "-c", f"echo {lab.address(0)} {variables['MASTER_ADDR']} >> /etc/hosts"])
            own = {**environment(**variables), "GT_TOKEN_FILE": str(token), "GT_BACKEND": "numpy"}
            own |= {"JOB_COMPLETION_INDEX": str(rank)}
            del own["GT_TOKEN"]
            line = [sys.executable, *container["command"][1:start], str(program)]
            pods.append(host.popen(line, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        said = [pod.communicate(timeout=limit(60))[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0] * len(pods), said
    assert "sum 6.0 ['w0', 'w1', 'w2']" in said[0].splitlines(), said


def test_a_cable_of_a_mesh_is_pulled_and_the_third_host_relays():
    with Lab.mesh(3, management=True) as lab:
        site = Site(lab, [0, 1, 2], backend="numpy")
        program = site.program("lose", "1", host=2)
        assert program.hear() == {"ready": True}
        cut = time.monotonic()
        lab.cut(0, 1)
        found = program.hear()
        assert found["at"] - cut < DETECTED, found
        assert all(part in found["text"] for part in ("'w0' on h0", "'w1' on h1", "192.168.100.1", "192.168.100.2")), found
        program.tell()
        again = program.hear()
        assert again["again"] == 400_000 and again["ways"][0]["w1"] == "via worker 2", again
        program.end()
        site.close()


@pytest.mark.long
def test_the_only_cable_is_pulled_in_each_kind_of_transfer_and_is_used_again_once_it_is_back():
    with Lab.mesh(2, management=True) as lab:
        site = Site(lab, [0, 1], backend="numpy")
        program = site.program("cuts")
        assert program.hear() == {"ready": True}
        for kind in ("send", "total", "gather", "pipeline"):
            program.tell(kind)
            assert program.hear() == {"running": kind}
            cut = time.monotonic()
            lab.cut(0, 1)
            found = program.hear()
            assert found["at"] - cut < DETECTED, found
            assert all(part in found["text"] for part in ("'w0' on h0", "'w1' on h1", "192.168.100.1", "192.168.100.2")), found
            lab.mend(0, 1)
            program.tell()
            again = program.hear()
            assert again["again"] is True, again
        program.process.stdin.close()
        program.end()
        site.close()


def test_a_host_is_unplugged_amid_uploads_and_checkpoints_and_comes_back():
    with Lab.switch(2) as lab:
        site = Site(lab, [0, 1], links=False, backend="numpy")
        program = site.program("cuts")
        assert program.hear() == {"ready": True}
        for kind in ("upload", "restore"):
            program.tell(kind)
            assert program.hear() == {"running": kind}
            unplugged = time.monotonic()
            lab.unplug(1)
            found = program.hear()
            assert found["at"] - unplugged < DETECTED, found
            assert found["error"] == "WorkerLost" or all(part in found["text"] for part in ("'w0' on h0", "'w1' on h1")), found
            site.workers[1].kill()
            site.workers[1].wait()
            lab.plug(1)
            site.workers[1] = site.worker(1, 1)
            program.tell()
            again = program.hear()
            assert again["again"] is True, again
        program.process.stdin.close()
        program.end()
        site.close()


def test_a_host_that_is_unplugged_is_lost_and_its_successor_goes_on():
    with Lab.switch(3) as lab:
        site = Site(lab, [0, 1, 2], links=False, backend="numpy")
        program = site.program("lose", "2", host=0)
        assert program.hear() == {"ready": True}
        unplugged = time.monotonic()
        lab.unplug(2)
        found = program.hear()
        assert found["error"] == "WorkerLost" and found["at"] - unplugged < DETECTED, found
        site.workers[2].kill()
        site.workers[2].wait()
        site.workers[2] = site.worker(2, 1)
        program.tell()
        assert program.hear()["again"] == 400_000
        program.end()
        site.close()


def test_a_host_that_is_killed_is_lost_at_once():
    with Lab.switch(2) as lab:
        site = Site(lab, [0, 1, 0], links=False, backend="numpy")
        program = site.program("lose", "1")
        assert program.hear() == {"ready": True}
        killed = time.monotonic()
        site.workers[1].kill()
        site.workers[1].wait()
        found = program.hear()
        assert found["error"] == "WorkerLost" and found["at"] - killed < DETECTED, found
        site.workers[1] = site.worker(1, 1)
        program.tell()
        assert program.hear()["again"] == 400_000
        program.end()
        site.close()


def test_a_program_far_away_waits_one_round_trip_for_a_value_and_none_for_a_captured_step():
    trip = 0.05  # seconds there and back
    with Lab(2, [(0, 1)], delay=trip / 2, rate="20mbit") as lab:
        site = Site(lab, [0], links=False)
        program = site.program("far", host=1)
        found = program.hear()
        assert trip < found["awaited"] < 2 * trip + 0.1 and trip < found["read"] < 2 * trip + 0.1, found
        assert found["captured"] < trip / 2, found
        assert found["upload"] > 1.0, f"4 MB take 1.6 s at 20 Mbit/s: {found}"
        assert sorted(found["during"])[1] < 3 * trip + 0.1, f"an upload stalls what follows it: {found}"
        program.end()
        site.close()


def test_a_group_whose_hosts_nothing_joins_is_refused_when_its_program_connects():
    with Lab(2, [], management=True) as lab:
        site = Site(lab, [0, 1], backend="numpy")  # only links named to-* would carry tensors, and there are none
        found = site.program("refused").hear()
        assert found["error"] == "ConfigError"
        assert "a (the text:1) spans h0 and h1, which no link joins" in found["text"], found
        site.close()


def test_a_cable_that_is_back_is_used_again_while_a_relay_works_and_no_transfer_is_lost():
    with Lab.mesh(3, management=True) as lab:
        site = Site(lab, [0, 1, 2], backend="numpy")
        program = site.program("mend", host=2)
        ready = program.hear()["ready"]
        assert ready == "tcp 192.168.100.1 to 192.168.100.2"
        lab.cut(0, 1)
        program.tell()
        said = program.hear()["text"]
        assert all(part in said for part in ("'w0' on h0", "'w1' on h1", "192.168.100.1", "192.168.100.2")), said
        assert program.hear()["relayed"] == "via worker 2"
        lab.mend(0, 1)
        found = program.hear()
        assert found["mended"] == ready and found["right"] is True, found
        program.end()
        site.close()
