"""`gt doctor --hosts`: each check on facts that are made up, and all of it on hosts behind an ssh that is a script."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gt.cli import all_reduce, hosts
from gt.errors import SystemFailure
from gt.launch import host_agent, job_agents, ssh
from gt.worker.plane.net.strangers import MAX_STRANGERS
from tests.helpers import ROOT
from tests.helpers.limits import limit
from tests.helpers.processes import free_ports, unhurried
from tests.launch.test_job import SSH, TOKEN, end, environment, python, script

GID = "0000:0000:0000:0000:0000:ffff:c0a8:6401"
VERSIONS = {"gt": "0.1.0", "torch": "2.13.0", "nccl": "2.30.7"}
TIMED_OUT, UNREACHABLE = {"error": "timed out", "ping": True}, {"error": "Network is unreachable", "ping": False}


def about(name: str, /, *links: list[Any], **changes: Any) -> dict[str, Any]:
    whole = {
        "name": name, "home": name, "clock": 0.0, "versions": VERSIONS, "driver": "580.1", "gpus": 1, "links": list(links),
        "rdma": [], "plugin": {"path": ""}, "nccl": {}, "shm_free": 8 << 30, "memlock": -1, "peermem": True,
    }  # fmt: skip
    return {**whole, **changes}


def rdma(name: str = "rocep1s0f0", state: str = "4: ACTIVE", **gids: list[str]) -> list[dict[str, Any]]:
    found = {key.removeprefix("gid"): value for key, value in gids.items()} or {"3": [GID, "RoCE v2"]}
    return [{"device": name, "port": "1", "net": ["eth1"], "rate": "100 Gb/sec", "state": state, "gids": found}]


def eth(n: int, subnet: int = 0, device: str = "eth0") -> list[Any]:
    return [f"10.77.{subnet}.{n}", 24, device, 1000]


def texts(rows: Any, mark: str = "fails") -> list[str]:
    return [f"{name}: {text}" for found, name, text in rows if found == mark]


MESH = [about("h0", eth(1, 1), eth(1, 2)), about("h1", eth(2, 1), eth(2, 3)), about("h2", eth(3, 2), eth(3, 3))]


def test_equal_hosts_are_ok() -> None:
    rows = list(hosts.compare(["h0", "h1"], [about("h0"), about("h1")]))
    assert {mark for mark, _, _ in rows} == {"ok"}
    assert [name for _, name, _ in rows] == ["gt", "nccl", "torch", "driver", "gpus", "names", "clock", "shared memory"]


@pytest.mark.parametrize(("changes", "mark", "says"), [
    ({"versions": {**VERSIONS, "torch": "2.12.1"}}, "fails", "torch: 2.13.0 on most, 2.12.1 on h2: install the same torch"),
    ({"versions": {"gt": "0.1.0", "torch": "2.13.0"}}, "fails", "nccl: 2.30.7 on most, none on h2"),
    ({"driver": "570.2"}, "fails", "driver: 580.1 on most, 570.2 on h2"),
    ({"gpus": 2}, "note", "gpus: 1 on most, 2 on h2"),
    ({"name": "h0"}, "note", "names: several hosts are called 'h0': `hostnamectl"),
    ({"home": "h0"}, "note", "names: h0 and h2 are one machine"),
    ({"clock": -7.25}, "note", "clock: differs, h2 by -7.2 s: start an NTP service"),
    ({"shm_free": 64 << 20}, "note", "shared memory: less than 1 GiB free in /dev/shm of h2"),
])  # fmt: skip
def test_a_host_that_differs_is_named(changes: dict[str, Any], mark: str, says: str) -> None:
    rows = hosts.compare(["h0", "h1", "h2"], [about("h0"), about("h1"), about("h2", **changes)])
    (found,) = texts(rows, mark)
    assert found.startswith(says)


def attempt(address: str, common: bool = True, **result: Any) -> dict[str, Any]:
    return {"address": address, "device": "eth0", "common": common, **(result or {"us": 20.0, "rate": 1.5})}


def test_subnets_in_common() -> None:
    assert [(a[0], b[0]) for a, b in hosts.subnets(MESH[0], MESH[1])] == [("10.77.1.1", "10.77.1.2")]
    assert hosts.subnets(about("h0", eth(1, 1)), about("h1", eth(1, 2))) == []


def test_a_link_whose_other_end_has_no_address_is_noted() -> None:
    known = [about("h0", eth(1), eth(1, 1, "eth1")), about("h1", eth(2)), about("h2", eth(3), [*eth(3, 9, "wan"), True])]
    (row,) = hosts.judge_subnets(["h0", "h1", "h2"], known)
    assert row[:2] == ("note", "subnets") and row[2].startswith("10.77.1.1/24 (eth1) of h0 is in no subnet of another host: if")
    assert not list(hosts.judge_subnets(["h0", "h1"], [about("h0", eth(1, 1)), about("h1", eth(1, 2))])), "routers join them"


def test_all_reduces_over_a_slow_link_are_few() -> None:
    assert all_reduce.times_of(1 << 10, 0.0) == 32 and all_reduce.times_of(1 << 28, 0.001) == 1
    assert all_reduce.times_of(1 << 18, 1.0) == 6 and all_reduce.times_of(1 << 20, 60.0) == 1


@pytest.mark.parametrize(("forth", "back", "mark", "says"), [
    ([attempt("10.77.1.2")], [attempt("10.77.1.1")], "ok", "h0 - h1: 10.77.1.2 (eth0) 20 us, 1.50 GB/s there, 10.77.1.1"),
    ([attempt("10.77.1.2", **TIMED_OUT)], [attempt("10.77.1.1")], "fails",
     "h0 - h1: h0 cannot reach h1 at 10.77.1.2: timed out, and it answers a ping: a firewall; open the ports"),
    ([attempt("10.77.1.2")], [attempt("10.77.1.1", error="Connection refused", ping=True)], "fails",
     "h0 - h1: h1 cannot reach h0 at 10.77.1.1: Connection refused: a firewall rejects it"),
    ([attempt("10.77.1.2", error="timed out", ping=False)], [attempt("10.77.1.1")], "fails",
     "h0 - h1: h0 cannot reach h1 at 10.77.1.2: timed out, and it answers no ping: the cable"),
    ([attempt("10.77.1.2", error="timed out", ping=None)], [attempt("10.77.1.1")], "fails",
     "h0 - h1: h0 cannot reach h1 at 10.77.1.2: timed out: a firewall, the cable"),
    ([attempt("10.77.1.2"), attempt("10.77.9.2", **UNREACHABLE)], [attempt("10.77.1.1")], "note",
     "h0 - h1: 10.77.1.2 (eth0) 20 us, 1.50 GB/s there, 10.77.1.1 (eth0) 20 us, 1.50 GB/s back; 10.77.9.2 on eth0: Network is"),
    ([attempt("10.77.3.2", False, **UNREACHABLE)], [attempt("10.77.2.1", False, **UNREACHABLE)], "note",
     "h0 - h1: no subnet in common: reached through h2 only"),
    ([attempt("10.77.1.2", us=20.0, rate=0.0006)], [attempt("10.77.1.1")], "note",
     "h0 - h1: 10.77.1.2 (eth0) 20 us, 0.60 MB/s there, 10.77.1.1 (eth0) 20 us, 1.50 GB/s back; "
     "h0 to h1 is 0.60 MB/s, far slower than the other direction: look at the cable, `ethtool eth0`"),
    ([attempt("10.77.1.2", us=20.0, rate=1.5)], [attempt("10.77.1.1", us=20.0, rate=0.1)], "note",
     "h0 - h1: 10.77.1.2 (eth0) 20 us, 1.50 GB/s there, 10.77.1.1 (eth0) 20 us, 0.10 GB/s back; h1 to h0 is 0.10 GB/s, far"),
    ([attempt("10.77.1.2", us=20.0, rate=0.1, mbps=100_000)], [attempt("10.77.1.1", us=20.0, rate=0.1, mbps=1000)], "note",
     "h0 - h1: 10.77.1.2 (eth0) 20 us, 0.10 GB/s there, 10.77.1.1 (eth0) 20 us, 0.10 GB/s back; "
     "h0 to h1 is 0.10 GB/s, far slower than eth0 can: look at"),
    ([attempt("10.77.1.2", us=20.0, rate=0.2, mbps=100_000)], [attempt("10.77.1.1", us=20.0, rate=0.2)], "ok",
     "h0 - h1: 10.77.1.2 (eth0) 20 us, 0.20 GB/s there, 10.77.1.1 (eth0) 20 us, 0.20 GB/s back"),
    ([attempt("10.77.3.2", False)], [attempt("10.77.2.1", False)], "ok",
     "h0 - h1: routed: 10.77.3.2 (eth0) 20 us, 1.50 GB/s there, 10.77.2.1 (eth0) 20 us, 1.50 GB/s back"),
])  # fmt: skip
def test_a_pair_of_hosts(forth: list, back: list, mark: str, says: str) -> None:
    other = {(0, 2): [attempt("a")], (2, 0): [attempt("a")], (1, 2): [attempt("a")], (2, 1): [attempt("a")]}
    rows = list(hosts.judge_links(["h0", "h1", "h2"], {**other, (0, 1): forth, (1, 0): back}))
    assert len(rows) == 3 and rows[0][0] == mark and f"{rows[0][1]}: {rows[0][2]}".startswith(says), rows[0]


class ConnectingAgent(hosts.Agent):
    """An agent that only notes the addresses it is to reach."""

    def __init__(self, name: str) -> None:
        self.name, self.reached = name, list[str]()

    def ask(self, **order: Any) -> dict[str, Any]:
        self.reached += [order["address"]] if order["do"] == "connect" else []
        return {"port": 7, "rate": 1.0}


@pytest.mark.parametrize("subnets", [(1, 1), (1, 2)], ids=["one subnet", "routed"])
def test_of_many_addresses_of_a_device_one_is_tried(subnets: tuple[int, int]) -> None:
    agents = [ConnectingAgent("h0"), ConnectingAgent("h1")]
    known = [about(f"h{at}", *(eth(at + 2 * n, subnet) for n in range(1, 20))) for at, subnet in enumerate(subnets)]
    hosts.measured(agents, known)
    assert [agent.reached for agent in agents] == [[f"10.77.{subnets[1]}.3"], [f"10.77.{subnets[0]}.2"]]


def test_hosts_with_addresses_of_ipv6_alone() -> None:
    six = [about(f"h{at}", [f"fd00::{at + 1}", 64, "eth0", 0]) for at in range(2)]
    assert [b[0] for _, b in hosts.subnets(*six)] == ["fd00::2"]
    assert ("ok", "bootstrap", "fd00::/64 is shared by all, eth0") in list(hosts.judge_network(["h0", "h1"], six))


def test_the_way_back_to_a_server_here() -> None:
    good = {"address": "10.0.0.9", "us": 20.0, "rate": 1.0}
    assert hosts.judge_server(["h0", "h1"], [good, good]) == ("ok", "server", "all reach this machine, 10.0.0.9")
    mark, _, text = hosts.judge_server(["h0", "h1"], [good, {"address": "10.0.0.9", **TIMED_OUT}])
    assert mark == "fails" and text.startswith("h1 cannot reach this machine at 10.0.0.9: timed out, and it answers a ping")
    assert text.endswith("or give `gt run` an --address of this machine that it reaches")


def test_hosts_that_nothing_joins() -> None:
    (row,) = hosts.judge_links(["h0", "h1"], {(0, 1): [attempt("a", False, **UNREACHABLE)], (1, 0): []})
    assert row[0] == "fails" and "no host that reaches both (Network is unreachable): add a link, or a route" in row[2]


@pytest.mark.parametrize(("changes", "says"), [
    ({"nccl": {"NCCL_SOCKET_IFNAME": "nosuch0"}}, "bootstrap: NCCL_SOCKET_IFNAME=nosuch0, and h2 has eth0: set it to a device"),
    ({"rdma": []}, "rdma: no device on h2: install rdma-core there"),
    ({"memlock": 64 << 10}, "memlock: 64 KiB on h2: `ulimit -l unlimited`"),
    ({"rdma": rdma(state="1: DOWN")}, "rdma: rocep1s0f0/1 on h2 is 1: DOWN: the cable, or `ip link set eth1 up`"),
    ({"rdma": rdma(gid0=["fe80::1", "RoCE v2"])}, "gid: rocep1s0f0/1 on h2 has no RoCE v2 GID with an IPv4 address"),
    ({"nccl": {"NCCL_MESH_GID_INDEX": "1"}}, "gid: rocep1s0f0/1 on h2: index 1 is no RoCE v2 address with IPv4: want 3"),
    ({"plugin": {"path": "/p/libnccl-net.so", "error": "No such file or directory"}},
     "plugin: /p/libnccl-net.so on h2: No such file or directory: NCCL goes on without it, silently"),
    ({"plugin": {"path": "/p/x.so", "plugin": False, "verbs": True}}, "plugin: /p/x.so on h2 is no NCCL net plugin"),
])  # fmt: skip
def test_the_network_of_nccl(changes: dict[str, Any], says: str) -> None:
    common: dict[str, Any] = {"rdma": rdma()}
    if "plugin" in changes:
        common["plugin"] = {"path": changes["plugin"]["path"], "plugin": True, "verbs": True}
    known = [about("h0", eth(1), **common), about("h1", eth(2), **common), about("h2", eth(3), **{**common, **changes})]
    assert [text for text in texts(hosts.judge_network(["h0", "h1", "h2"], known)) if text.startswith(says)]


def test_a_plugin_without_verbs_and_sockets_beside_rdma_are_notes() -> None:
    plugin = {"path": "/p/x.so", "plugin": True, "verbs": False}
    rows = hosts.judge_network(["h0"], [about("h0", eth(1), rdma=rdma(), plugin=plugin)])
    assert "uses no verbs, so TCP only: install libibverbs-dev" in texts(rows, "note")[0]
    log = "h0:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"
    assert list(hosts.used(log, True)) == [("note", "nccl", "NET/Socket/0: sockets beside RDMA devices; see rdma above")]
    assert list(hosts.used(log.replace("Socket", "IB"), True)) == [("ok", "nccl", "has used NET/IB/0")]
    assert next(hosts.used("NET/Plugin: Could not find: /p/x.so\n", False))[0] == "fails"
    assert list(hosts.used("nothing", True)) == []


def test_a_mesh_of_rdma_wants_a_recent_nccl() -> None:
    old = {"rdma": rdma(), "versions": {**VERSIONS, "nccl": "2.28.9"}}
    mesh = [{**host, **old} for host in MESH]
    (found,) = [text for text in texts(hosts.judge_network(["h0", "h1", "h2"], mesh)) if text.startswith("plugin")]
    assert "NCCL before 2.30 on h0, h1, h2: set NCCL_IB_SUBNET_AWARE_ROUTING=1" in found
    new = [{**host, "rdma": rdma()} for host in MESH]
    assert not [text for text in texts(hosts.judge_network(["h0", "h1", "h2"], new)) if "plugin" in text]
    assert "no subnet is shared by all hosts" in texts(hosts.judge_network(["h0", "h1", "h2"], MESH), "note")[0]


def test_all_of_it_over_ssh(tmp_path: Path) -> None:
    script(tmp_path, SSH, "ssh")
    variables = environment(PATH=f"{tmp_path}:{os.environ['PATH']}", GT_TOKEN="")
    command = [sys.executable, "-m", "gt", "doctor", "--most", "16KiB", "--hosts"]

    def doctor(names: str) -> tuple[int, list[str]]:
        done = subprocess.run([*command, names], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=limit(90))
        assert unhurried(done.stderr) == "", done.stderr
        return done.returncode, done.stdout.splitlines()

    code, lines = doctor("h0:1,h1:1")
    assert code == 0 and lines[0].split() == ["ok", "ssh", "h0,", "h1", "answer"], lines
    assert sum(line.startswith("ok       all-reduce") for line in lines) == 3, lines
    assert [line for line in lines if "h0 - h1" in line and "GB/s there" in line] or "none" in " ".join(lines)
    code, lines = doctor("h0:1,gone")
    assert code == 1 and "fails    ssh            gone does not answer: ssh: connect to host gone: No route to host" in lines[0]
    assert lines[-1].startswith("note     all-reduce     not tried")


def test_no_host_that_answers_is_a_line_and_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    command = [str(script(tmp_path, SSH, "ssh"))]
    assert hosts.main([ssh.HostEntry("gone")], command, "", 1024) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("fails    ssh            gone does not answer: ssh: connect to host gone: No route to host"), first
    assert last.startswith("note     all-reduce     not tried"), last


def test_all_of_it_by_the_processes_of_a_job() -> None:
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()[0])}
    doctor = ["-m", "gt", "doctor", "--hosts", "env", "--most", "16KiB"]
    started = [python(*doctor, RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in (1, 0)]
    (code, said, errors), (other, nothing, _) = reversed(end(*started))
    lines = said.splitlines()
    assert code == other == 0, errors
    assert lines[0].split()[:2] == ["ok", "job"] and "ranks 0 to 1 are here" in lines[0], lines
    assert sum(line.startswith("ok       all-reduce") for line in lines) == 3 and not nothing, lines


def test_a_rank_that_is_missing_is_named() -> None:
    mark, name, text = hosts.meeting_row("srun", [0, 2], 4)
    assert (mark, name) == ("fails", "job") and "srun: 1, 3 of ranks 0 to 3 are not here" in text


def test_a_process_with_another_token_is_no_rank_and_is_told_so() -> None:
    meeting = job_agents.Meeting("127.0.0.1", 0, TOKEN)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(job_agents.answer, "127.0.0.1", lambda: meeting.port, 1, "another token")
        with pytest.raises(SystemFailure, match="its token or number of processes is another"):
            pool.submit(meeting.members, 2, 2.0) and other.result(limit(30))
        right = job_agents.Meeting("127.0.0.1", 0, TOKEN)
        other = pool.submit(job_agents.answer, "127.0.0.1", lambda: right.port, 1, TOKEN)
        with right.members(2)[1] as sock:
            sock.sendall(b'{"do": "work"}\n')
            assert other.result(limit(30)) is True


def test_a_stranger_who_says_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_agents, "SECONDS", limit(120))
    meeting = job_agents.Meeting("127.0.0.1", 0, TOKEN)
    with ThreadPoolExecutor() as pool, socket.create_connection(("127.0.0.1", meeting.port)) as stranger:
        stranger.sendall(b"\0")
        members = pool.submit(meeting.members, 2, limit(30))
        other = pool.submit(job_agents.answer, "127.0.0.1", lambda: meeting.port, 1, TOKEN)
        with members.result(limit(60))[1]:
            pass
        assert other.result(limit(30)) is False and stranger.recv(100)[job_agents.NONCE_BYTES :] == b""


def test_a_connection_to_rank_0_that_is_cut_is_told() -> None:
    """The others ended as if rank 0 had ended in order: exit code 0, and no word."""
    meeting = job_agents.Meeting("127.0.0.1", 0, TOKEN)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(job_agents.answer, "127.0.0.1", lambda: meeting.port, 1, TOKEN)
        with meeting.members(2)[1] as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
        with pytest.raises(SystemFailure, match=r"rank 0 at 127\.0\.0\.1 was cut: Connection reset"):
            other.result(limit(30))


def test_an_agent_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was waited for without end."""
    monkeypatch.setattr(hosts, "ANSWER_SECONDS", 0.0)
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(hosts.Agent("h1", ours.makefile("w"), ours.makefile("r"))) as agent:
        with pytest.raises(SystemFailure, match="h1 does not answer: none within 0 s to 'facts'; its connection is there"):
            agent.ask(do="facts")
        monkeypatch.setattr(hosts, "ANSWER_SECONDS", limit(30))
        theirs.sendall(b'Welcome to h1\n{"name": "h1"}\n{"name": "h2"}\n')
        assert [agent.ask(do="facts") for _ in range(2)] == [{"name": "h1"}, {"name": "h2"}]


def test_a_pipe_that_another_process_holds_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master of ssh's ControlPersist holds the stderr of the ssh that has started it, for hours."""
    monkeypatch.setattr(hosts, "WORDS_SECONDS", 0.05)
    monkeypatch.setattr(ssh, "PIPE_SECONDS", 0.05)
    ends = os.pipe()
    with open(ends[0]) as stream, open(ends[1], "wb", buffering=0) as held:
        held.write(b"no route\n")
        agent = object.__new__(hosts.StartedAgent)
        agent._process = SimpleNamespace(stderr=stream)  # type: ignore[assignment]
        assert agent._words(False) == "no route"
        with subprocess.Popen(["echo", "3"], stdout=subprocess.PIPE, stderr=held, text=True) as process:
            process.stderr = stream
            held.write(b"a greeting\n")
            assert ssh.said(process, limit(30)) == ["3\n", "a greeting\n"]


def test_strangers_keep_no_measurement_out_and_take_few_threads() -> None:
    """Each had a thread and a descriptor for as long as it said nothing, in the process that would run a host's workers."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(host_agent.Listener(TOKEN)))
        for _ in range(2 * MAX_STRANGERS):
            stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
        measured = host_agent.measure("127.0.0.1", listener.port, TOKEN)
        assert measured["rate"] > 0
        own = [thread for thread in threading.enumerate() if thread.name == "gt-measured"]
        assert 0 < len(own) < 2 * MAX_STRANGERS
        listener.close()
        for thread in own:
            thread.join(limit(20))
        assert not any(thread.is_alive() for thread in own)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", listener.port))


def test_a_listener_goes_on_after_a_connection_for_which_there_was_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(socket.socket):
        failed = 0

        def accept(self) -> Any:
            Full.failed += 1
            if Full.failed == 1:
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    def listens(address: Any, **options: Any) -> socket.socket:
        sock = made(address, **options)
        return Full(sock.family, sock.type, sock.proto, sock.detach())

    made = socket.create_server
    monkeypatch.setattr(socket, "create_server", listens)
    with contextlib.closing(host_agent.Listener(TOKEN)) as listener:
        assert host_agent.measure("127.0.0.1", listener.port, TOKEN)["rate"] > 0
    assert Full.failed > 1


@pytest.mark.parametrize("rate", [60e3, 125e3, 3e9])
def test_a_slow_link_is_measured_and_not_taken_for_broken(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait of SECONDS for the other end is an error: 1 MiB takes longer at 1 Mbit/s."""

    class Wire:
        now, sent = 0.0, 0

        def sendall(self, data: bytes) -> None:  # the kernel takes all
            self.sent += len(data)

        def recv(self, count: int) -> bytes:
            self.now, seconds, self.sent = self.now + self.sent / rate, self.sent / rate, 0
            if seconds > host_agent.SECONDS:
                raise TimeoutError("timed out")
            return b"!"

    wire = Wire()
    monkeypatch.setattr(host_agent, "time", SimpleNamespace(perf_counter=lambda: wire.now))
    assert host_agent._rate(wire, 1e-4) == pytest.approx(rate / 1e9, rel=0.01)  # type: ignore[arg-type]


def test_a_host_measures_until_it_works() -> None:
    """The listener's port was open for as long as the job ran."""
    orders = io.StringIO('{"do": "listen", "token": "abc"}\n{"do": "work"}\n')
    answers = io.StringIO()
    assert host_agent.serve(orders, answers)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", json.loads(answers.getvalue())["port"]))
