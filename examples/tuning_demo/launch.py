"""Starts a server and eight workers as a cluster's operator would by hand, then runs train.py against them.

`python examples/tuning_demo/launch.py --port 12345 -- --preset tiny --check`; flags after `--` go to train.py.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, help="default: a free one")
    parser.add_argument("--workers", type=int, default=8, help="default: 8")
    parser.add_argument("rest", nargs="*", help="flags for train.py, after --")
    args, unknown = parser.parse_known_args()
    if unknown:
        parser.error(f"{unknown[0]} is no flag of launch.py: flags for train.py stand behind --")
    if args.workers < 1:
        parser.error(f"--workers is {args.workers}, want at least 1")
    port = str(args.port or free_port())
    gpus = torch.cuda.device_count()

    processes = [subprocess.Popen([sys.executable, "-m", "gt.server", "-p", port])]
    try:
        for index in range(args.workers):
            env = {**os.environ, "CUDA_VISIBLE_DEVICES": str(index) if index < gpus else ""}
            command = [sys.executable, "-m", "gt.worker", "--host", "localhost", "-p", port]
            processes.append(subprocess.Popen(command, env=env))
        command = [sys.executable, str(HERE / "train.py"), "--connect", f"localhost:{port}", *args.rest]
        return subprocess.run(command, check=False).returncode
    finally:
        processes[0].terminate()  # the server, which tells its workers to leave
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


if __name__ == "__main__":
    sys.exit(main())
