"""The agent of `gt doctor --hosts` on one host: facts of the host, and measurements of its links to others. Knows no torch.

It reads orders, one JSON line each on stdin, answers each by a line on stdout, and ends with stdin.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import threading
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TextIO

from gt import env
from gt.launch import machine
from gt.wire.link import RELEASE
from gt.wire.liveness import home
from gt.worker.plane.net.strangers import Strangers
from gt.worker.process import network_links
from gt.worker.process.rdma_devices import rdma_devices

PINGS, BLOCK_BYTES, FIRST_BYTES = 64, 1 << 20, 16 << 10
SECONDS = 5.0  # for a connection, and for each wait on it
FULL_SECONDS = 0.01  # between two attempts to accept a connection without a free descriptor
BULK_SECONDS, MAX_BULK_BYTES = 1.0, 1 << 30  # limits of a measurement of the rate
PACKAGES = ("torch", "numpy", "pyzmq", "nvshmem4py-cu12", "nvshmem4py-cu13")


def facts() -> dict[str, Any]:
    """All that the checks compare, by name."""
    versions = {"gt": RELEASE, "python": platform.python_version(), **_packages()}
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shm = os.statvfs("/dev/shm")
    return {
        "name": socket.gethostname(), "home": home(), "time": time.time(), "versions": versions, "driver": _driver(),
        "gpus": len(machine.gpus()), "links": links(), "rdma": rdma_devices(), "plugin": _plugin(),
        "nccl": env.starting("NCCL_"), "shm_free": shm.f_bavail * shm.f_frsize, "memlock": soft,
        "peermem": Path("/sys/module/nvidia_peermem").exists(),
        "network": {"links": network_links.links(), "routes": network_links.routes(), "scope": network_links.namespace()},
    }  # fmt: skip


def _packages() -> dict[str, str]:
    versions = {}
    for package in distributions():
        name = (package.metadata["Name"] or "").lower()
        if name in PACKAGES or name.startswith("nvidia-nccl"):
            versions["nccl" if name.startswith("nvidia-nccl") else name] = package.version
    return versions


def _driver() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return ""


def links() -> list[list[Any]]:
    """[address, prefix, device, Mbit/s or 0] of the IPv4 addresses of this host's links; where it has none, of IPv6."""
    rows = [row[:4] for row in network_links.links()]
    return [row for row in rows if ":" not in row[0]] or rows


def _plugin() -> dict[str, Any]:
    """The file that NCCL_NET_PLUGIN names: whether it is there, is a plugin, and was built with verbs."""
    path = env.starting("NCCL_").get("NCCL_NET_PLUGIN", "")
    if "/" not in path:
        return {"path": path}
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        return {"path": path, "error": error.strerror or str(error)}
    return {"path": path, "plugin": b"ncclNetPlugin" in data or b"ncclNet_v" in data, "verbs": b"ibv_" in data}


# ---- links


class Listener:
    """Answers pings, and swallows bytes, of peers that know the token, until `close`."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        six = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if six else socket.AF_INET
        self._sock = socket.create_server(("", 0), family=family, dualstack_ipv6=six)
        self.port = self._sock.getsockname()[1]
        self._strangers = Strangers()  # whoever reaches the port can connect
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="gt-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no connections any more. Measurements under way go on."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # ends the wait for one
        self._thread.join()
        self._sock.close()
        self._strangers.end()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._sock.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(FULL_SECONDS)  # such as too few descriptors: it stays to be accepted
                continue
            self._strangers.add(peer)
            try:
                threading.Thread(target=self._serve, args=(peer,), name="gt-measured", daemon=True).start()
            except RuntimeError:  # too many threads
                self._strangers.remove(peer)
                peer.close()

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            try:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # The token was made for these measurements, and opens nothing else.
                shown = exactly(peer, len(self._token), time.monotonic() + SECONDS)
                if not hmac.compare_digest(shown, self._token) or not self._strangers.remove(peer):
                    return
                peer.settimeout(SECONDS)
                self._answer(peer)
            except OSError:  # the peer's end has the reason
                return
            finally:
                self._strangers.remove(peer)

    def _answer(self, peer: socket.socket) -> None:
        """First round trips, then bulk: a size of 8 bytes, so many bytes, and an answer once all are here."""
        for _ in range(PINGS):
            peer.sendall(exactly(peer, 8))
        view = memoryview(bytearray(BLOCK_BYTES))
        while (size := int.from_bytes(exactly(peer, 8), "big")) and size <= MAX_BULK_BYTES:
            while size:
                received = peer.recv_into(view, min(size, BLOCK_BYTES))
                if not received:
                    return
                size -= received
            peer.sendall(b"!")


def measure(address: str, port: int, token: str) -> dict[str, Any]:
    """Microseconds of a round trip and GB/s to a listener, or the error of the attempt and whether the host answers a ping."""
    try:
        with socket.create_connection((address, port), SECONDS) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(token.encode())
            # The shortest trip: longer ones have waited for a busy CPU.
            trips = []
            for _ in range(PINGS):
                begin = time.perf_counter()
                sock.sendall(b"12345678")
                exactly(sock, 8)
                trips.append(time.perf_counter() - begin)
            return {"us": min(trips) * 1e6, "rate": _rate(sock, min(trips)), "own": sock.getsockname()[0]}
    except OSError as error:
        return {"error": error.strerror or str(error), "ping": _ping(address)}


def _rate(sock: socket.socket, trip: float) -> float:
    """GB/s: doubled until it takes long enough. trip: seconds of a round trip."""
    # Each attempt is twice as long as the last one, until its time is long against a round trip and TCP's slow start. The first
    # is short: a slow link would not have carried a long one within SECONDS, and be taken for a broken one.
    block, size = memoryview(bytes(BLOCK_BYTES)), FIRST_BYTES
    while True:
        begin = time.perf_counter()
        sock.sendall(size.to_bytes(8, "big"))
        for start in range(0, size, BLOCK_BYTES):
            sock.sendall(block[: size - start])
        exactly(sock, 1)
        took = time.perf_counter() - begin
        if took > BULK_SECONDS / 4 + 4 * trip or size * 2 > MAX_BULK_BYTES:
            return size / took / 1e9
        size *= 2


def exactly(sock: socket.socket, count: int, until: float | None = None) -> bytes:
    """So many bytes. ConnectionResetError if the connection ends before, TimeoutError if they are not there at that time."""
    data = b""
    while len(data) < count:
        if until is not None:
            sock.settimeout(max(until - time.monotonic(), 1e-3))
        chunk = sock.recv(count - len(data))
        if not chunk:
            raise ConnectionResetError("the other end closed the connection")
        data += chunk
    return data


def _ping(address: str) -> bool | None:
    """True if it answers; None if this host has no ping."""
    try:
        done = subprocess.run(["ping", "-c1", "-W1", address], capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    except OSError:
        return None
    return done.returncode == 0


def main() -> int:
    serve(sys.stdin, sys.stdout)
    return 0


def serve(orders: TextIO, answers: TextIO) -> bool:
    """Answer orders until they end. True if the last is to work: no answer is wanted."""
    # Orders: {"do": "facts"}; {"do": "listen", "token"}; {"do": "connect",
    # "address", "port", "token"}; {"do": "work"}, the last.
    with contextlib.ExitStack() as stack:
        listener: Listener | None = None
        for line in orders:
            order = json.loads(line)
            answer: dict[str, Any]
            if order["do"] == "work":
                return True
            if order["do"] == "facts":
                answer = facts()
            elif order["do"] == "listen":
                listener = listener or stack.enter_context(contextlib.closing(Listener(order["token"])))
                answer = {"port": listener.port}
            else:
                address = order["address"] or env.ssh_client() or "127.0.0.1"  # "": where this process is logged in from
                answer = {"address": address, **measure(address, order["port"], order["token"])}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    return False
