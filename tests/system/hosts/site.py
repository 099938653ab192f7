"""A GT server and its workers on the hosts of a lab, and programs there that speak in lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.helpers import ROOT
from tests.helpers.limits import limit
from tests.system.hosts.lab import Host, Lab

PORT = 12345
PROGRAMS = ROOT / "tests" / "system" / "hosts" / "programs.py"


def environment(**more: str) -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "GT_TOKEN": "a token of the lab, 0123456789", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1", **more}


class Program:
    """A program on a host. Its standard error is at the end of its output."""

    def __init__(self, host: Host, *args: str, **variables: str) -> None:
        self.process = host.popen(
            [sys.executable, str(PROGRAMS), *args],
            env=environment(**variables), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def hear(self) -> Any:
        """The next line of JSON; AssertionError with all that it said if there is none."""
        said = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
            said.append(line)
        raise AssertionError(f"the program ended with {self.process.wait(limit(10))}: {''.join(said)[-4000:]}")

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.wait(limit(30)) == 0


class Site:
    """`placed`: the host of each worker, in order of rank. links: only those of the lab carry tensors, not its management."""

    def __init__(self, lab: Lab, placed: Sequence[int], links: bool = True, backend: str = "torch") -> None:
        host = lab.address(0)
        self.lab, self.address = lab, f"[{host}]:{PORT}" if ":" in host else f"{host}:{PORT}"
        self._links, self._backend = links, backend
        server = [sys.executable, "-m", "gt.server", "--host", "::" if ":" in host else "*", "-p", str(PORT)]
        self.server = lab.host(0).popen(server, env=environment(), stdout=subprocess.PIPE, text=True)
        assert self.server.stdout is not None and self.server.stdout.readline()
        self.workers = [self.worker(rank, host) for rank, host in enumerate(placed)]

    def worker(self, rank: int, host: int) -> subprocess.Popen:
        only = {"GT_IFNAME": "to-"} if self._links else {}
        line = [sys.executable, "-m", "gt.worker", "--host", self.lab.address(0), "-p", str(PORT), "--backend", self._backend]
        return self.lab.host(host).popen(line, env=environment(GT_RANK=str(rank), **only), stderr=subprocess.DEVNULL)

    def program(self, name: str, *args: str, host: int = 0) -> Program:
        return Program(self.lab.host(host), name, self.address, *args)

    def close(self) -> None:
        for process in (*self.workers, self.server):
            process.terminate()
        for process in (*self.workers, self.server):
            process.wait(limit(20))
        assert self.server.stdout is not None
        self.server.stdout.close()
