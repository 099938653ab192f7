"""`gt doctor --hosts h0,h1`: checks of several hosts: versions, links of every pair, RDMA, NCCL, an all-reduce.

The hosts' agents are started by ssh, or are the other processes of a launcher's job.

Pure functions turn the hosts' facts and measurements into rows: ok, note or fails, and what to do.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import os
import re
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import IO, Any

from gt import env
from gt.errors import SystemFailure
from gt.launch import job, job_agents, launchers, machine, ssh
from gt.launch.host_agent import Listener

Facts = Mapping[str, Any]
Row = tuple[str, str, str]  # mark, name, text
Pairs = Mapping[tuple[int, int], Sequence[Mapping[str, Any]]]  # (from, to) -> an attempt for each address
OK, NOTE, FAILS = "ok", "note", "fails"
ANSWER_SECONDS, WORK_SECONDS = 60.0, 540.0
WORDS_SECONDS = 1.0  # for the last words of a process whose stderr another may hold, as ssh's master of ControlPersist
CLOCK_SECONDS = 5.0
SLOWER = 10  # times slower than the other direction, or than its device: noted
MAX_EXPECTED_MBPS = 10_000  # of one connection
MAX_ADDRESSES = 8  # addresses of one host that another host tries
GIB = 1 << 30
MEETING = "/doctor"  # the key of its port, behind the job's
ROUTED = (2, 30)  # the first NCCL whose subnet-aware routing pairs the right devices of a mesh
USED = re.compile(r"via (NET/\S+|P2P\S*|SHM\S*)|Loaded net plugin (.*)|(NET/Plugin: Could not find.*)")


class Agent:
    """A process on one host, which answers orders."""

    def __init__(self, name: str, orders: IO[str], answers: IO[str]) -> None:
        self.name, self._orders, self._answers = name, orders, answers
        self._received = b""  # of its answers, behind the last whole line

    def tell(self, **order: Any) -> None:
        with contextlib.suppress(ConnectionError):  # its end has a reason, which `ask` says
            self._orders.write(json.dumps(order) + "\n")
            self._orders.flush()

    def ask(self, **order: Any) -> dict[str, Any]:
        """The answer to one order. SystemFailure if the process has ended, or hangs."""
        self.tell(**order)
        until, why = time.monotonic() + ANSWER_SECONDS, ""
        try:
            while line := self._line(until):
                if line.startswith(b"{"):  # not a greeting of the login shell
                    return json.loads(line)
        except TimeoutError:
            why = f"none within {ANSWER_SECONDS:g} s to {order['do']!r}; "
        except OSError:  # its end has a reason, which follows
            pass
        raise SystemFailure(f"{self.name} does not answer: {why}{self._words(bool(why)) or 'no reason given'}")

    def _line(self, until: float) -> bytes:
        """The next line of its answers, b"" at their end. TimeoutError if it is not there in time."""
        while b"\n" not in self._received:
            data = _read(self._answers.fileno(), until)
            if not data:
                return b""
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line + b"\n"

    def _words(self, hangs: bool) -> str:
        """Its last words."""
        return "its connection is there, look at its output" if hangs else "its connection ended"

    def close(self) -> None:
        for stream in (self._orders, self._answers):
            with contextlib.suppress(OSError):
                stream.close()


class StartedAgent(Agent):
    """An agent that this process has started, over ssh or on this host."""

    def __init__(self, host: ssh.HostEntry, command: Sequence[str], python: str) -> None:
        line = ssh.command(host.name, command, ["gt.launch", "--agent"], python)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        super().__init__(host.name, self._process.stdin, self._process.stdout)

    def _words(self, hangs: bool) -> str:
        assert self._process.stderr is not None
        data, until = b"", time.monotonic() + WORDS_SECONDS
        with contextlib.suppress(TimeoutError):
            while more := _read(self._process.stderr.fileno(), until):
                data += more
        return " | ".join(data.decode(errors="replace").strip().splitlines()[-4:])

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


def _read(fd: int, until: float) -> bytes:
    """Bytes of a pipe or socket, b"" at its end. TimeoutError if there are none in time."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    left = until - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError
    return os.read(fd, 1 << 16)


class Checklist:
    """Prints rows. worst: 1 once one fails, the exit code."""

    def __init__(self) -> None:
        self.worst = 0

    def show(self, *rows: Row) -> None:
        for row in rows:
            self.worst |= row[0] == FAILS
            print(f"{row[0]:8} {row[1]:14} {row[2]}", flush=True)


def main(hosts: Sequence[ssh.HostEntry], command: Sequence[str], python: str, most: int) -> int:
    """Print all checks; 1 if one fails. command: of ssh. most: bytes of the largest all-reduce, 0 for none."""
    report, agents, known = Checklist(), list[Agent](), list[Facts]()
    try:
        for host in hosts:
            agents.append(StartedAgent(host, command, python))
        for agent in list(agents):
            try:
                known.append(asked(agent))
            except SystemFailure as error:
                report.show((FAILS, "ssh", f"{error}: try `ssh {agent.name} true`, and gt in the same folder there"))
                agent.close()
                agents.remove(agent)
        if len(known) == len(hosts):
            report.show((OK, "ssh", f"{', '.join(agent.name for agent in agents)} answer"))
        if known:
            examine(report, agents, known)
    finally:
        for agent in agents:
            agent.close()
    lines = [f"{host.name} slots={host.slots}" if host.slots else host.name for host in hosts]
    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as hostfile:
        hostfile.write("\n".join(lines) + "\n")
        hostfile.flush()
        options = ["--hostfile", hostfile.name, "--ssh", " ".join(command), *(["--python", python] if python else [])]
        return finish(report, options, most, known)


def described_workers(hosts: Sequence[ssh.HostEntry], command: Sequence[str], python: str) -> list[dict[str, Any]]:
    """The description of its host that each worker of these hosts would give the dispatcher, in the order of its index.

    SystemFailure if a host does not answer.
    """
    workers_of_all: list[dict[str, Any]] = []
    for host in hosts:
        agent = StartedAgent(host, command, python)
        try:
            about = asked(agent)
        finally:
            agent.close()
        workers = host.slots or max(1, about["gpus"])
        row = {"host": host.name, "home": about["home"], "port": 1, **about["network"]}
        workers_of_all += [{**row, "rank": len(workers_of_all) + n} for n in range(workers)]
    return workers_of_all


def in_job(most: int) -> int:
    """The same within a launcher's job: rank 0 prints the checks, and the other processes answer it."""
    at = job.place()
    token, host = job.token_for(at), launchers.LOOPBACK if at.alone else at.host
    if at.rank:
        try:
            works = job_agents.answer(host, partial(job.port_of, at, MEETING), at.rank, token)
        except SystemFailure as error:
            print(f"gt doctor: rank {at.rank}: {error}", file=sys.stderr)
            return 1
        return job.work(at) if works else 0
    report, agents = Checklist(), list[Agent]()
    meeting = job_agents.Meeting(launchers.LOOPBACK if at.alone else job.EVERYWHERE, at.port, token)
    job.publish(at, meeting.port, MEETING)
    with contextlib.ExitStack() as opened:
        ranks = [0]
        agents.append(StartedAgent(ssh.HostEntry("localhost"), (), ""))
        opened.callback(agents[0].close)
        for rank, sock in meeting.members(at.size).items():
            opened.enter_context(sock)
            agents.append(Agent(f"rank {rank}", sock.makefile("w"), sock.makefile("r")))
            opened.callback(agents[-1].close)
            ranks.append(rank)
        report.show(meeting_row(at.launcher, ranks, at.size))
        by_host: dict[str, tuple[Agent, Facts]] = {}  # one process of each host answers for it
        for agent in agents:
            try:
                about = asked(agent)
                by_host.setdefault(about["home"], (agent, about))
            except SystemFailure as error:
                report.show((FAILS, "job", str(error)))
        names = [about["name"] for _, about in by_host.values()]
        for agent, about in by_host.values():
            agent.name = about["name"] if names.count(about["name"]) == 1 else f"{about['name']} ({agent.name})"
        known = [about for _, about in by_host.values()]
        examine(report, [agent for agent, _ in by_host.values()], known, host)
        if most and not report.worst:
            for agent in agents[1:]:
                agent.tell(do="work")
    return finish(report, (), most, known)


def meeting_row(launcher: str, ranks: Sequence[int], size: int) -> Row:
    """The processes of a job that have come."""
    missing = [str(rank) for rank in range(size) if rank not in ranks]
    name = launcher or "no launcher"
    if missing:
        todo = "start `gt doctor --hosts env` in all processes of the job; the port of rank 0 has to be open"
        return FAILS, "job", f"{name}: {', '.join(missing)} of ranks 0 to {size - 1} are not here: {todo}"
    return OK, "job", f"{name}: {'rank 0 is alone' if size == 1 else f'ranks 0 to {size - 1} are here'}"


def asked(agent: Agent) -> Facts:
    """Facts of an agent's host, and how far its clock is from this one's. SystemFailure if it does not answer."""
    begin = time.time()
    about = agent.ask(do="facts")
    about["clock"] = about["time"] - (begin + time.time()) / 2
    return about


def examine(report: Checklist, agents: Sequence[Agent], known: Sequence[Facts], here: str = "") -> None:
    """Show all that facts and measurements say. here: this host's address for the others, "" for that of their ssh."""
    names = [agent.name for agent in agents]
    report.show(*compare(names, known), *judge_subnets(names, known))
    report.show(*judge_links(names, measured(agents, known)), *judge_network(names, known))
    report.show(judge_server(names, way_back(agents, here)))


def finish(report: Checklist, options: Sequence[str], most: int, known: Sequence[Facts]) -> int:
    """The all-reduces, if all is well so far; the exit code. options: of `gt run`."""
    if most and not report.worst:
        for row in at_work(options, most, all(about["rdma"] for about in known)):
            report.show(row)
    elif most:
        report.show((NOTE, "all-reduce", "not tried: mend the lines above first"))
    return report.worst


def measured(agents: Sequence[Agent], known: Sequence[Facts]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Attempts from each host to each other: at addresses of common subnets, else at all of its subnets, one of each device."""
    token = secrets.token_hex(16)
    ports = [agent.ask(do="listen", token=token)["port"] for agent in agents]
    measures: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for a, b in itertools.permutations(range(len(agents)), 2):
        common = [theirs for _, theirs in subnets(known[a], known[b])]
        tried = {(link[2], _network(link)): link for link in reversed(common or known[b]["links"])}
        for link in list(reversed(tried.values()))[:MAX_ADDRESSES]:
            attempt = agents[a].ask(do="connect", address=link[0], port=ports[b], token=token)
            about = {"address": link[0], "device": link[2], "mbps": link[3], "common": bool(common)}
            measures.setdefault((a, b), []).append({**about, **attempt})
    return measures


def way_back(agents: Sequence[Agent], here: str = "") -> list[dict[str, Any]]:
    """Attempts from each host to this one, where a server would be, by default at the address that its ssh is from."""
    token = secrets.token_hex(16)
    with contextlib.closing(Listener(token)) as listener:
        return [agent.ask(do="connect", address=here, port=listener.port, token=token) for agent in agents]


def subnets(one: Facts, other: Facts) -> list[tuple[list[Any], list[Any]]]:
    """Pairs of links of two hosts that are in one subnet."""
    return [(a, b) for a in one["links"] for b in other["links"] if a[0] != b[0] and _network(a) == _network(b)]


def _network(link: Sequence[Any]) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(f"{link[0]}/{link[1]}", strict=False)


# ---- rows


def compare(names: Sequence[str], known: Sequence[Facts]) -> Iterator[Row]:
    """Versions, names, clocks and limits of the hosts."""
    for key in sorted({key for about in known for key in about["versions"]}):
        yield _same(key, names, [about["versions"].get(key, "none") for about in known], f"install the same {key} everywhere")
    if any(about["driver"] for about in known):
        todo = "install the same driver everywhere, and reboot"
        yield _same("driver", names, [about["driver"] or "none" for about in known], todo)
    yield _same("gpus", names, [str(about["gpus"]) for about in known], "give each host its slots in a hostfile", NOTE)
    own = [about["name"] for about in known]
    twice = sorted({name for name in own if own.count(name) > 1})
    homes = [about["home"] for about in known]
    if len(set(homes)) < len(homes):
        same = [name for name, home in zip(names, homes) if homes.count(home) > 1]
        yield NOTE, "names", f"{' and '.join(same)} are one machine"
    elif twice:
        yield NOTE, "names", f"several hosts are called {twice[0]!r}: `hostnamectl set-hostname` makes logs readable"
    else:
        yield OK, "names", ", ".join(name if name == self else f"{name} is {self}" for name, self in zip(names, own))
    clocks = [(name, about["clock"]) for name, about in zip(names, known) if abs(about["clock"]) > CLOCK_SECONDS]
    late = [f"{name} by {seconds:+.1f} s" for name, seconds in clocks]
    yield (NOTE, "clock", f"differs, {', '.join(late)}: start an NTP service") if late else (OK, "clock", "all agree")
    small = [name for name, about in zip(names, known) if about["shm_free"] < GIB]
    todo = "NCCL and GT exchange tensors there; mount it larger, as --shm-size or an emptyDir with medium: Memory"
    text = f"less than 1 GiB free in /dev/shm of {', '.join(small)}: {todo}"
    yield (NOTE, "shared memory", text) if small else (OK, "shared memory", "1 GiB or more is free in /dev/shm")


def _same(what: str, names: Sequence[str], values: Sequence[str], todo: str, mark: str = FAILS) -> Row:
    if len(set(values)) == 1:
        return OK, what, f"{values[0]} everywhere"
    usual = max(set(values), key=lambda value: (values.count(value), value))
    other = ", ".join(f"{value} on {name}" for name, value in zip(names, values) if value != usual)
    return mark, what, f"{usual} on most, {other}: {todo}"


def judge_links(names: Sequence[str], pairs: Pairs) -> Iterator[Row]:
    """A row for each pair of hosts, and the cure where TCP does not get through."""
    good = {pair for pair, attempts in pairs.items() if any("rate" in attempt for attempt in attempts)}
    for a, b in itertools.combinations(range(len(names)), 2):
        what = f"{names[a]} - {names[b]}"
        forth, back = pairs.get((a, b), ()), pairs.get((b, a), ())
        if (a, b) in good and (b, a) in good:
            broken = [attempt for attempt in (*forth, *back) if attempt["common"] and "error" in attempt]
            routed = "" if any(attempt["common"] for attempt in (*forth, *back)) else "routed: "
            text = f"{routed}{_best(forth)} there, {_best(back)} back"
            if broken:
                yield NOTE, what, f"{text}; {broken[0]['address']} on {broken[0]['device']}: {_cure(broken[0])}"
            elif slow := _slow((names[a], names[b]), _fastest(forth), _fastest(back)):
                yield NOTE, what, f"{text}; {slow}"
            else:
                yield OK, what, text
            continue
        common = [attempt for attempt in (*forth, *back) if attempt["common"]]
        relays = [c for c in range(len(names)) if {(a, c), (c, a), (b, c), (c, b)} <= good]
        if common:
            failed = next(attempt for attempt in common if "error" in attempt)
            one, other = (names[a], names[b]) if failed in forth else (names[b], names[a])
            yield FAILS, what, f"{one} cannot reach {other} at {failed['address']}: {_cure(failed)}"
        elif relays:
            other_hosts = ", ".join(names[c] for c in relays)
            yield NOTE, what, f"no subnet in common: reached through {other_hosts} only; a cable of its own is faster"
        else:
            reason = next((attempt["error"] for attempt in forth if "error" in attempt), "no address")
            yield FAILS, what, f"no subnet in common and no host that reaches both ({reason}): add a link, or a route"


def judge_server(names: Sequence[str], attempts: Sequence[Mapping[str, Any]]) -> Row:
    """The hosts' way to a server on this machine."""
    for name, attempt in zip(names, attempts):
        if "error" in attempt:
            todo = "or give `gt run` an --address of this machine that it reaches"
            return FAILS, "server", f"{name} cannot reach this machine at {attempt['address']}: {_cure(attempt)}; {todo}"
    return OK, "server", f"all reach this machine, {', '.join(sorted({attempt['address'] for attempt in attempts}))}"


def _fastest(attempts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return max((attempt for attempt in attempts if "rate" in attempt), key=lambda attempt: attempt["rate"])


def _best(attempts: Sequence[Mapping[str, Any]]) -> str:
    best = _fastest(attempts)
    return f"{best['address']} ({best['device']}) {best['us']:.0f} us, {_rate(best)}"


def _rate(attempt: Mapping[str, Any]) -> str:
    rate = attempt["rate"]
    return f"{rate:.2f} GB/s" if rate >= 0.05 else f"{rate * 1e3:.2f} MB/s"


def _slow(names: tuple[str, str], forth: Mapping[str, Any], back: Mapping[str, Any]) -> str:
    """The direction that is much slower than the other, or than its device, and what to do; "" if none is."""
    for (one, other), there, reverse in ((names, forth, back), (names[::-1], back, forth)):
        device = min(there.get("mbps", 0), MAX_EXPECTED_MBPS) / 8000  # GB/s; 0: unknown
        against = "the other direction" if there["rate"] * SLOWER < reverse["rate"] else f"{there['device']} can"
        if there["rate"] * SLOWER < max(reverse["rate"], device):
            todo = f"the cable, `ethtool {there['device']}` (speed, duplex), `tc qdisc` (a limit), other traffic"
            return f"{one} to {other} is {_rate(there)}, far slower than {against}: look at {todo}"
    return ""


def judge_subnets(names: Sequence[str], known: Sequence[Facts]) -> Iterator[Row]:
    """Links that lead to no other host, of hosts that have others which do: a cable whose other end lacks its address?"""
    for name, about in zip(names, known):
        theirs = {_network(link) for other in known if other is not about for link in other["links"]}
        lone = [link for link in about["links"] if _network(link) not in theirs and not any(link[4:])]
        if len(lone) < len(about["links"]):
            for link in lone:
                todo = "if a cable joins it to one, give that end an address of this subnet (`ip addr add`)"
                yield NOTE, "subnets", f"{link[0]}/{link[1]} ({link[2]}) of {name} is in no subnet of another host: {todo}"


def _cure(attempt: Mapping[str, Any]) -> str:
    """The meaning of a failed attempt, and what to do."""
    error = attempt["error"]
    if "timed out" in error and attempt.get("ping"):
        return f"{error}, and it answers a ping: a firewall; open the ports (ufw allow from SUBNET, or nft)"
    if "refused" in error:
        return f"{error}: a firewall rejects it; open the ports (ufw allow from SUBNET, or nft)"
    if "unreachable" in error:
        return f"{error}: its device is down or has no address; `ip addr`, then the cable"
    if attempt.get("ping") is None:  # no ping is there to ask
        return f"{error}: a firewall, the cable, the device's state (`ip link`), or the address"
    return f"{error}, and it answers no ping: the cable, the device's state (`ip link`), or the address"


def judge_network(names: Sequence[str], known: Sequence[Facts]) -> Iterator[Row]:
    """NCCL's settings, its plugin and RDMA devices."""
    yield _bootstrap(names, known)
    yield from _plugins(names, known)
    counts = [len(about["rdma"]) for about in known]
    if not any(counts):
        if any(about["gpus"] for about in known):
            todo = "with RDMA hardware install rdma-core, and leave NCCL_NET empty"
            yield NOTE, "rdma", f"no device on any host: NCCL uses TCP; {todo}"
        return
    without = [name for name, count in zip(names, counts) if not count]
    if without:
        yield FAILS, "rdma", f"no device on {', '.join(without)}: install rdma-core there, and look at `ibv_devices`"
    for name, about in zip(names, known):
        for device in about["rdma"]:
            yield _gids(name, device, about["nccl"])
        if about["rdma"] and 0 <= about["memlock"] < GIB:
            yield FAILS, "memlock", f"{about['memlock'] >> 10} KiB on {name}: `ulimit -l unlimited`, in containers IPC_LOCK"
        if about["rdma"] and about["gpus"] and not about["peermem"]:
            yield NOTE, "peermem", f"nvidia_peermem is not loaded on {name}: `modprobe nvidia_peermem`, unless DMA-BUF is there"


def _bootstrap(names: Sequence[str], known: Sequence[Facts]) -> Row:
    """The device by which all hosts find one another: NCCL wants one subnet of all for that."""
    wanted = [about["nccl"].get("NCCL_SOCKET_IFNAME", "") for about in known]
    for name, about, text in zip(names, known, wanted):
        bare = text.lstrip("^=")
        devices = [link[2] for link in about["links"]]
        if text and not text.startswith("^") and not any(device.startswith(tuple(bare.split(","))) for device in devices):
            have = ", ".join(devices)
            return FAILS, "bootstrap", f"NCCL_SOCKET_IFNAME={text}, and {name} has {have}: set it to a device of each host"
    shared = set.intersection(*({_network(link) for link in about["links"]} for about in known)) if known else set()
    if not shared:
        return NOTE, "bootstrap", "no subnet is shared by all hosts, which NCCL's bootstrap needs: add a management network"
    network = min(shared, key=str)
    devices = [next(link[2] for link in about["links"] if _network(link) == network) for about in known]
    names_of = sorted(set(devices))
    alone = all(len(about["links"]) == 1 for about in known)
    if any(wanted) or alone:
        return OK, "bootstrap", f"{network} is shared by all, {', '.join(names_of)}"
    return NOTE, "bootstrap", f"{network} is shared by all: set NCCL_SOCKET_IFNAME={','.join(names_of)}"


def _plugins(names: Sequence[str], known: Sequence[Facts]) -> Iterator[Row]:
    paths = {about["plugin"]["path"] for about in known}
    if paths == {""}:
        mesh = any(len(subnets(a, b)) == 1 and a["rdma"] and b["rdma"] for a, b in itertools.combinations(known, 2))
        old = [name for name, about in zip(names, known) if machine.version_of(about["versions"].get("nccl", "")) < ROUTED]
        if mesh and len(known) > 2 and old:
            todo = "set NCCL_IB_SUBNET_AWARE_ROUTING=1 with NCCL 2.30 or later, or NCCL_NET_PLUGIN to a plugin for meshes"
            yield FAILS, "plugin", f"RDMA devices in several subnets, and NCCL before 2.30 on {', '.join(old)}: {todo}"
        return
    for name, about in zip(names, known):
        plugin = about["plugin"]
        if plugin["path"] == "":
            yield FAILS, "plugin", f"NCCL_NET_PLUGIN is not set on {name}: set it on all hosts"
        elif "error" in plugin:
            todo = "NCCL goes on without it, silently; build it on every host, or on storage that all share"
            yield FAILS, "plugin", f"{plugin['path']} on {name}: {plugin['error']}: {todo}"
        elif not plugin.get("plugin", True):
            yield FAILS, "plugin", f"{plugin['path']} on {name} is no NCCL net plugin"
        elif not plugin.get("verbs", True):
            todo = "install libibverbs-dev and librdmacm-dev, and build it again"
            yield NOTE, "plugin", f"{plugin['path']} on {name} uses no verbs, so TCP only: {todo}"
        else:
            yield OK, "plugin", f"{plugin['path']} on {name}"


def _gids(name: str, device: Mapping[str, Any], nccl: Mapping[str, str]) -> Row:
    """GIDs of a device: RoCE needs an index of type v2 with an IPv4 address."""
    port = f"{device['device']}/{device['port']} on {name}"
    if "ACTIVE" not in device["state"]:
        state = device["state"] or "in no state"
        return FAILS, "rdma", f"{port} is {state}: the cable, or `ip link set {(device['net'] or ['?'])[0]} up`"
    good = sorted(int(index) for index, (gid, kind) in device["gids"].items() if "v2" in kind and ":ffff:" in gid)
    wanted = nccl.get("NCCL_IB_GID_INDEX") or nccl.get("NCCL_MESH_GID_INDEX") or ""
    if good and wanted.isdecimal() and int(wanted) not in good:
        return FAILS, "gid", f"{port}: index {wanted} is no RoCE v2 address with IPv4: want {', '.join(map(str, good))}"
    kinds = {kind for _, kind in device["gids"].values()}
    if not good and any("RoCE" in kind for kind in kinds):
        return FAILS, "gid", f"{port} has no RoCE v2 GID with an IPv4 address: give {(device['net'] or ['it'])[0]} an address"
    index = f", GID index {good[0]}" if good else ""
    return OK, "rdma", f"{port}, {device['rate']}{index}; compare `ib_send_bw -d {device['device']}`"


# ---- GT at work


def at_work(options: Sequence[str], most: int, rdma: bool) -> Iterator[Row]:
    """Rows of all-reduces over workers on all hosts, in a program of their own, and of NCCL's log. rdma: NCCL should use it."""
    variables = env.child(PYTHONPATH=env.python_path(ssh.ROOT), NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,GRAPH")
    program = [sys.executable, "-m", "gt", "run", *options, "-m", "gt.cli.all_reduce", str(most)]
    try:
        done = subprocess.run(program, env=variables, capture_output=True, text=True, timeout=WORK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        yield FAILS, "all-reduce", f"not done within {WORK_SECONDS:g} s: a link hangs, or choose a smaller --most"
        return
    for text in done.stdout.splitlines():
        if text.startswith("["):
            name, good, result = json.loads(text)
            yield OK if good else FAILS, name, result
    yield from used(done.stderr, rdma)
    if done.returncode:
        words = [word for word in done.stderr.strip().splitlines() if "NCCL INFO" not in word]
        yield FAILS, "all-reduce", f"ended with exit code {done.returncode}: {' | '.join(words[-3:])}"


def used(log: str, rdma: bool) -> Iterator[Row]:
    """Rows for the networks that NCCL has used, by its log."""
    ways = sorted({match[1].partition("/GDRDMA")[0] for match in USED.finditer(log) if match[1]})
    for match in USED.finditer(log):
        if match[3]:
            yield FAILS, "nccl", f"{match[3]}: the path has to exist on every host"
            return
    if ways:
        slow = rdma and any("Socket" in way for way in ways)
        text = ", ".join(ways)
        note = NOTE, "nccl", f"{text}: sockets beside RDMA devices; see rdma above"
        yield note if slow else (OK, "nccl", f"has used {text}")
