"""The cost of plane net between hosts, each a set of namespaces of this machine, with its anchors beside it in the same run.

`python benchmarks/bench_net.py [--json FILE] [--quick] [--only small|large|reduce|relay|delay]`. Needs root and iproute2, and
iperf3 where it is installed. Anchors, in turn with plane net in the same processes: blocking TCP sockets in Python, gloo's
all-reduce, the kernel's forwarding; and iperf3's one stream. Prints a table and JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from machine import tell  # noqa: E402

from gt.ir.heap import BUFFER_BYTES, SLOT_BYTES, SLOTS  # noqa: E402
from gt.wire.liveness import home  # noqa: E402
from gt.wire.process_settings import keep_freed  # noqa: E402
from tests.system.hosts.lab import Lab, why_not  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
KEY = "5a" * 32
HEAP = 64 * MIB
BLOCKS = 6  # of steps by each means, in turn


# ---- on a host: one side of a case, told what to do by lines of JSON


def side(order: dict[str, Any]) -> None:
    """Say what others need of this side, hear all sides', and do the case in blocks of each means in turn; say the figures.

    In turn, so that what else the machine does delays all of them alike. Figures: median seconds of a step, and the
    process's CPU seconds of one, of threads too.
    """
    keep_freed()  # as a worker does
    means = {by: {"net": net, "tcp": tcp, "gloo": gloo}[by](order) for by in order["by"]}
    say({by: next(mean) for by, mean in means.items()})
    rows = json.loads(sys.stdin.readline())
    steps = {by: mean.send([row[by] for row in rows]) for by, mean in means.items()}
    if order["between"]:
        watch(order)
    else:
        take_turns(order, steps)
    sys.stdin.readline()
    for mean in means.values():
        mean.close()


def watch(order: dict[str, Any]) -> None:
    """On a host between: all CPU time is plane net's relay."""
    before = time.process_time()
    sys.stdin.readline()
    cpu = (time.process_time() - before) / (max(1, order["count"] // BLOCKS) * (BLOCKS + 1))
    say({by: [0.0, cpu if by == "net" else 0.0] for by in order["by"]})


def take_turns(order: dict[str, Any], steps: dict[str, Callable[[], Any]]) -> None:
    means = order["by"]
    wall: dict[str, list[float]] = {by: [] for by in means}
    cpu = dict.fromkeys(means, 0.0)
    for block in range(BLOCKS + 1):
        for by, step in steps.items():
            before = time.process_time()
            times = [timed(step) for _ in range(max(1, order["count"] // BLOCKS))]
            if block:  # the first warms up
                wall[by] += times
                cpu[by] += time.process_time() - before
    say({by: [statistics.median(times), cpu[by] / len(times)] for by, times in wall.items()})


def timed(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


Means = Generator[Any, Any, None]  # yields what others need to know, then, sent all sides' rows, a step


def net(order: dict[str, Any]) -> Means:
    from gt.worker.plane.net.plane import NetPlane

    rank, plane = order["rank"], NetPlane(HEAP)
    info = plane.open()
    own = [rank, f"w{rank}", os.getpid(), socket.gethostname(), info["heap_fd"], info["heap_bytes"], info["doorbell"]]
    rows = yield [*own, home(), info["port"]]
    plane.introduce(rows, order["ways"], KEY, rank)
    plane.world(rows, order["ways"])
    last = len(rows) - 1
    if order["what"] == "all_reduce":
        team = {"id": 0, "workers": list(range(last + 1)), "rank": rank, "offset": 8 * MIB, "bytes": BUFFER_BYTES}
        values = np.zeros(order["bytes"] // 4, "f4")
        yield lambda: plane.all_reduce(team, values, add)
    else:
        channel = {"peer": last - rank, "offset": 8192, "bytes": SLOT_BYTES, "slots": SLOTS}
        yield exchange(order, lambda data: plane.send(channel, data), lambda into: plane.recv(channel, into))
    plane.close()


def tcp(order: dict[str, Any]) -> Means:
    rank, last = order["rank"], order["members"] - 1
    if rank == 0:
        listener = socket.create_server(("", 7000))
        yield None
        sock, _ = listener.accept()
        listener.close()
    else:
        yield None
        sock = socket.create_connection((order["address"], 7000), 10) if rank == last else socket.socket()
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(into: memoryview) -> None:
        at = 0
        while at < len(into):
            at += sock.recv_into(into[at:])

    yield exchange(order, sock.sendall, receive)
    sock.close()


def gloo(order: dict[str, Any]) -> Means:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    yield None
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    at = f"tcp://{order['address']}:7100"
    dist.init_process_group("gloo", init_method=at, rank=order["rank"], world_size=order["members"])
    values = torch.zeros(order["bytes"] // 4)
    yield lambda: dist.all_reduce(values)
    dist.destroy_process_group()


def exchange(order: dict[str, Any], send: Callable, receive: Callable) -> Callable[[], None]:
    """A step: a message there and a word back, or as many bytes back of a small one. Nothing on hosts between."""
    rank, nbytes = order["rank"], order["bytes"]
    data, word = memoryview(bytearray(nbytes)), memoryview(bytearray(min(nbytes, 8)))

    def first() -> None:
        send(data)
        receive(word)

    def last() -> None:
        receive(data)
        send(word)

    return first if rank == 0 else last if rank == order["members"] - 1 else lambda: None


def add(dst: memoryview, src: memoryview) -> None:
    out = np.frombuffer(dst, np.float32)
    np.add(out, np.frombuffer(src, np.float32), out)


def say(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


# ---- here: cases


def run(lab: Lab, by: Sequence[str], what: str, nbytes: int, count: int, members: int, address: str = "") -> dict[str, list]:
    """By means: seconds of a step at rank 0, and CPU seconds of all. A process on each of the first hosts."""
    ways = []
    for a in range(members):
        for b in range(a + 1, members):
            if lab.links and (a, b) not in lab.links:
                ways.append([a, b, 1, "via", "", "", list(range(a + 1, b))])
            else:
                ends = (lab.address(a, b), lab.address(b, a)) if lab.links else (lab.address(a), lab.address(b))
                ways.append([a, b, 1, "tcp", *ends, []])
    processes = []
    for rank in range(members):
        order = {"by": by, "what": what, "rank": rank, "bytes": nbytes, "count": count, "ways": ways, "members": members}
        order["between"] = what == "pair" and 0 < rank < members - 1
        order["address"] = address or lab.address(0, 1 if lab.links else -1)
        line = [sys.executable, __file__, "--side", json.dumps(order)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        processes.append(lab.host(rank).popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment))
    try:
        rows = [json.loads(process.stdout.readline()) for process in processes]
        for process in processes:
            tell_process(process, json.dumps(rows))
        ends = processes if what == "all_reduce" else [processes[0], processes[-1]]
        figures = [json.loads(process.stdout.readline()) for process in ends]
        for process in [process for process in processes if process not in ends]:
            tell_process(process, "")
            figures.append(json.loads(process.stdout.readline()))
        for process in processes:
            tell_process(process, "")
        for process in processes:
            process.wait(20)
        return {mean: [figures[0][mean][0], sum(row[mean][1] for row in figures)] for mean in by}
    finally:
        for process in processes:
            process.kill()


def tell_process(process: subprocess.Popen, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def iperf(lab: Lab, server: int, address: str, client: int = 0) -> float | None:
    """Bytes a second of iperf3's one stream, None without iperf3."""
    if shutil.which("iperf3") is None:
        return None
    listening = lab.host(server).popen(["iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE, text=True)
    assert listening.stdout is not None
    while "listening" not in listening.stdout.readline():
        pass
    done = lab.host(client).run(["iperf3", "-c", address, "-t", "2", "-J"], check=False)
    listening.wait(10)
    return json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"] / 8 if done.returncode == 0 else None


class Table:
    """Figures by case: ours, the anchor's, and the ratios of rate and of CPU time, above 1 where ours is better."""

    def __init__(self) -> None:
        self.cases: dict[str, dict[str, Any]] = {}
        print(f"{'case':52} {'ours':>10} {'anchor':>10} {'':5} {'rate':>7} {'CPU':>7}")

    def rates(self, name: str, nbytes: int, figures: dict[str, list]) -> None:
        """`net` beside the other means."""
        (ours, own), (anchor, other) = (figures[by] for by in sorted(figures, key="net".__ne__))
        self.note(name, nbytes / ours / 1e9, nbytes / anchor / 1e9, "GB/s", anchor / ours, other / own)

    def note(
        self, name: str, ours: float, anchor: float | None, unit: str, rate: float | None, cpu: float | None = None
    ) -> None:
        self.cases[name] = {"ours": ours, "anchor": anchor, "unit": unit, "ratio": rate, "cpu_ratio": cpu}
        texts = [
            f"{anchor:10.4g}" if anchor else f"{'-':>10}",
            unit,
            *(f"{r:6.2f}x" if r else f"{'-':>7}" for r in (rate, cpu)),
        ]
        print(f"{name:52} {ours:10.4g} {texts[0]} {texts[1]:5} {texts[2]} {texts[3]}", flush=True)


def cases(quick: bool, only: str) -> dict[str, dict[str, Any]]:
    table, few = Table(), 6 if quick else 20

    def beside_iperf(lab: Lab, name: str, members: int) -> None:
        """64 MiB beside a TCP socket in Python on the same way, in turn, and beside iperf3 before and after."""
        last = members - 1
        address = lab.address(last, last - 1)
        streams = [iperf(lab, last, address)]
        figures = run(lab, ("net", "tcp"), "pair", 64 * MIB, few, members)
        streams.append(iperf(lab, last, address))
        table.rates(f"64 MiB{name}, a TCP socket in Python", 64 * MIB, figures)
        ours = 64 * MIB / figures["net"][0] / 1e9
        stream = statistics.mean(stream for stream in streams if stream) / 1e9 if all(streams) else None
        table.note(f"64 MiB{name}, iperf3 with one stream", ours, stream, "GB/s", stream and ours / stream)

    if only in "small large":
        with Lab.mesh(2) as lab:
            for nbytes in (8, KIB) if only in "small" else ():
                figures = run(lab, ("net", "tcp"), "pair", nbytes, 4000, 2)
                (ours, own), (anchor, other) = figures["net"], figures["tcp"]
                name = f"{nbytes} B one way, blocking TCP"
                table.note(name, ours / 2 * 1e6, anchor / 2 * 1e6, "us", anchor / ours, other / own)
            if only in "large":
                beside_iperf(lab, "", 2)
    if only in "reduce":
        with Lab.switch(3) as lab:
            for nbytes in (KIB, MIB, 16 * MIB):
                count = 200 if nbytes == KIB else 40 if nbytes == MIB else few
                figures = run(lab, ("net", "gloo"), "all_reduce", nbytes, count, 3, lab.address(0))
                table.rates(f"all-reduce of {nbytes // KIB} KiB, 3 hosts on a switch, gloo", nbytes, figures)
    if only in "relay":
        with Lab.line(3, forward=True) as lab:
            beside_iperf(lab, " relayed, forwarded by the kernel", 3)
            ours, _ = run(lab, ("net",), "all_reduce", 16 * MIB, few, 3)["net"]
            table.note("all-reduce of 16 MiB, 3 hosts on a line", 16 * MIB / ours / 1e9, None, "GB/s", None)
    if only in "delay":
        with Lab.mesh(2, delay=0.001) as lab:
            beside_iperf(lab, " with 1 ms of delay", 2)
    return table.cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--only", choices=["small", "large", "reduce", "relay", "delay"], default="", help="these cases alone")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        side(json.loads(args.side))
        return
    if reason := why_not():
        raise SystemExit(f"bench_net.py: this machine can have no hosts: {reason}")
    tell("benchmarks/bench_net.py", {"cases": cases(args.quick, args.only)}, args.json)


if __name__ == "__main__":
    main()
