"""The cost of plane net between hosts, each a set of namespaces of this machine, with its anchors beside it in the same run.

`python benchmarks/bench_net.py [--json FILE] [--quick]`. Needs root and iproute2; iperf3 where it is installed. Anchors:
blocking TCP sockets in Python, iperf3's one stream, gloo's all-reduce, the kernel's forwarding. Prints a table and JSON.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from machine import tell  # noqa: E402

from gt.ir.heap import BUFFER_BYTES, SLOT_BYTES, SLOTS  # noqa: E402
from gt.wire.liveness import home  # noqa: E402
from tests.system.hosts.lab import Lab, why_not  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
KEY = "5a" * 32
HEAP = 64 * MIB


# ---- on a host: one side of a case, told what to do by lines of JSON


def side(order: dict[str, Any]) -> Any:
    """This side's figure; rank 0's counts."""
    return {"net": net, "tcp": tcp, "gloo": gloo}[order["by"]](order)


def net(order: dict[str, Any]) -> float | None:
    from gt.worker.plane.net.plane import NetPlane

    rank, plane = order["rank"], NetPlane(HEAP)
    info = plane.open()
    row = [rank, f"w{rank}", os.getpid(), socket.gethostname(), info["heap_fd"], info["heap_bytes"], info["doorbell"]]
    say([*row, home(), info["port"]])
    rows = json.loads(sys.stdin.readline())
    plane.introduce(rows, order["ways"], KEY, rank)
    plane.world(rows, order["ways"])
    last = len(rows) - 1
    if order["what"] == "all_reduce":
        team = {"id": 0, "workers": list(range(last + 1)), "rank": rank, "offset": 8 * MIB, "bytes": BUFFER_BYTES}

        values = np.zeros(order["bytes"] // 4, "f4")
        figure = timed(lambda: plane.all_reduce(team, values, add), order["count"])
    else:
        channel = {"peer": last - rank, "offset": 8192, "bytes": SLOT_BYTES, "slots": SLOTS}
        figure = exchange(order, lambda data: plane.send(channel, data), lambda into: plane.recv(channel, into), last)
    say(figure)
    sys.stdin.readline()
    plane.close()
    return None


def tcp(order: dict[str, Any]) -> float | None:
    rank = order["rank"]
    if rank == 0:
        listener = socket.create_server(("", 7000))
        say(None)
        sys.stdin.readline()
        sock, _ = listener.accept()
        listener.close()
    else:
        say(None)
        sys.stdin.readline()
        sock = socket.create_connection((order["address"], 7000), 10)
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(into: memoryview) -> None:
        at = 0
        while at < len(into):
            at += sock.recv_into(into[at:])

    say(exchange(order, sock.sendall, receive, 1))
    sys.stdin.readline()
    sock.close()
    return None


def gloo(order: dict[str, Any]) -> float | None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    say(None)
    sys.stdin.readline()
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    at = f"tcp://{order['address']}:7100"
    dist.init_process_group("gloo", init_method=at, rank=order["rank"], world_size=order["members"])
    values = torch.zeros(order["bytes"] // 4)
    figure = timed(lambda: dist.all_reduce(values), order["count"])
    say(figure)
    sys.stdin.readline()
    dist.destroy_process_group()
    return None


def exchange(order: dict[str, Any], send: Callable, receive: Callable, last: int) -> float | None:
    """Seconds of a message there and a word back, or of a round trip for small ones; None for hosts between."""
    rank, nbytes = order["rank"], order["bytes"]
    if 0 < rank < last:
        return None
    data, word = memoryview(bytearray(nbytes)), memoryview(bytearray(min(nbytes, 8)))

    def step() -> None:
        if rank == 0:
            send(data)
            receive(word)
        else:
            receive(data)
            send(word)

    return timed(step, order["count"])


def timed(step: Callable[[], Any], count: int) -> float:
    """Median seconds of a step, in blocks of which a scheduler's hiccup spoils one."""
    for _ in range(max(2, count // 10)):
        step()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def add(dst: memoryview, src: memoryview) -> None:
    out = np.frombuffer(dst, np.float32)
    np.add(out, np.frombuffer(src, np.float32), out)


def say(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


# ---- here: cases


def run(lab: Lab, by: str, what: str, nbytes: int, count: int, members: int, address: str = "") -> float:
    """Rank 0's figure of a case with a process on each of the first hosts."""
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
        order["address"] = address or lab.address(0, 1 if lab.links else -1)
        line = [sys.executable, __file__, "--side", json.dumps(order)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        processes.append(
            lab.host(rank).popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        )
    try:
        rows = [json.loads(process.stdout.readline()) for process in processes]
        for process in processes:
            tell_process(process, json.dumps(rows))
        figures = [json.loads(process.stdout.readline()) for process in processes]
        for process in processes:
            tell_process(process, "")
        for process in processes:
            process.wait(20)
        return figures[0]
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


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    """Figures by name: ours, the anchor's, and the ratio, above 1 where ours is better."""
    found: dict[str, dict[str, Any]] = {}
    few = 3 if quick else 10

    def note(name: str, ours: float, anchor: float | None, unit: str, less: bool = False) -> None:
        ratio = None if anchor is None else anchor / ours if less else ours / anchor
        found[name] = {"ours": ours, "anchor": anchor, "unit": unit, "ratio": ratio}
        text = f"{anchor:10.4g}" if anchor is not None else "         -"
        print(f"{name:44} {ours:10.4g} {text} {unit:5} {'' if ratio is None else f'{ratio:6.2f}x'}", flush=True)

    print(f"{'case':44} {'ours':>10} {'anchor':>10}")
    with Lab.mesh(2) as lab:
        far = lab.address(1, 0)
        for nbytes in (8, KIB):
            ours, anchor = (run(lab, by, "pair", nbytes, 2000, 2) / 2 * 1e6 for by in ("net", "tcp"))
            note(f"{nbytes} B one way, blocking TCP", ours, anchor, "us", less=True)
        ours, anchor = (64 * MIB / run(lab, by, "pair", 64 * MIB, few, 2) / 1e9 for by in ("net", "tcp"))
        note("64 MiB, a TCP socket in Python", ours, anchor, "GB/s")
        stream = iperf(lab, 1, far)
        note("64 MiB, iperf3 with one stream", ours, stream and stream / 1e9, "GB/s")
    with Lab.switch(3) as lab:
        for nbytes in (KIB, MIB, 16 * MIB):
            count = 200 if nbytes == KIB else 20 if nbytes == MIB else few
            took = [run(lab, by, "all_reduce", nbytes, count, 3, lab.address(0)) for by in ("net", "gloo")]
            ours, anchor = (nbytes / seconds / 1e9 for seconds in took)
            note(f"all-reduce of {nbytes // KIB} KiB, 3 hosts on a switch, gloo", ours, anchor, "GB/s")
    with Lab.line(3, forward=True) as lab:
        ours = 64 * MIB / run(lab, "net", "pair", 64 * MIB, few, 3) / 1e9
        stream = iperf(lab, 2, lab.address(2, 1))
        note("64 MiB relayed, the kernel's forwarding", ours, stream and stream / 1e9, "GB/s")
        ours = 16 * MIB / run(lab, "net", "all_reduce", 16 * MIB, few, 3) / 1e9
        note("all-reduce of 16 MiB, 3 hosts on a line", ours, None, "GB/s")
    with Lab.mesh(2, delay=0.001) as lab:
        ours = 64 * MIB / run(lab, "net", "pair", 64 * MIB, few, 2) / 1e9
        stream = iperf(lab, 1, lab.address(1, 0))
        note("64 MiB with 1 ms of delay, iperf3", ours, stream and stream / 1e9, "GB/s")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        side(json.loads(args.side))
        return
    if reason := why_not():
        raise SystemExit(f"bench_net.py: this machine can have no hosts: {reason}")
    tell("benchmarks/bench_net.py", {"cases": cases(args.quick)}, args.json)


if __name__ == "__main__":
    main()
