"""`gt worker --host localhost -p 12345`, or `python -m gt.worker`: one worker in the foreground."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

from gt import env
from gt.errors import ConfigError, DispatcherLost
from gt.wire.socket import PORT, host_and_port, positive, server_of_environment, written
from gt.worker.engine.registry import ENGINES
from gt.worker.loop import WorkerOptions, run
from gt.worker.process.restart import Renewal, told_to_end


def main(argv: list[str] | None = None, own: bool = False) -> int:
    """Exit code. own: this process is the worker and nothing else, so that it can execute itself anew."""
    parser = argparse.ArgumentParser(prog="gt worker", description="run one worker, which executes instructions of a server")
    parser.add_argument("-H", "--host", default="", help="host of the server; default: GT_SERVER's, or localhost")
    parser.add_argument("-p", "--port", default="", help=f"port of the server; default: GT_SERVER's, or {PORT}")
    parser.add_argument("--name", default="", help="name in messages and logs; default: the next free one")
    parser.add_argument("--token-file", type=Path, help="file with the server's token; default: GT_TOKEN")
    parser.add_argument("--worker-token-file", type=Path, help="file with the secret of the server's workers, if it has one")
    parser.add_argument("--device", default="", help="cpu or cuda:0; default: the GPU if there is one")
    names = [*ENGINES, *env.BACKEND_ALIASES]
    parser.add_argument("--backend", choices=names, help="library that executes ops; pytorch is torch; default: GT_BACKEND")
    parser.add_argument("--wait", type=positive(float), help="seconds to wait for the server; default: no limit")
    parser.add_argument("--memory-limit", default="", help="most memory of the worker, as 4GiB; default: GT_MEMORY_LIMIT")
    library = "import this module, and execute the ops that it registers with torch; again for more; default: GT_LIBRARIES"
    parser.add_argument("--library", action="append", dest="libraries", metavar="MODULE", help=library)
    parser.add_argument("--signals", type=int, help=argparse.SUPPRESS)  # to restore after the process has executed itself anew
    args = parser.parse_args(argv)
    if args.signals is not None and (number := told_to_end(args.signals)):
        return 128 + number
    libraries = env.names("GT_LIBRARIES") if args.libraries is None else args.libraries
    try:
        limit = env.size("--memory-limit", 0, args.memory_limit) if args.memory_limit else 0
        host, port = _server(args.host, args.port)
        rank = env.whole("GT_RANK")
    except (ConfigError, DispatcherLost) as error:
        sys.stderr.write(f"gt worker: {error}\n")
        return 2
    try:
        token = env.token(args.token_file)
        secret = env.token(args.worker_token_file) if args.worker_token_file else ""
    except OSError as error:
        sys.stderr.write(f"gt worker: --token-file {error.filename} cannot be read: {error.strerror}\n")
        return 2
    files = {"--token-file": token if args.token_file else "", "--worker-token-file": secret}
    renew = Renewal(files).start if own else None
    backend = env.backend(args.backend)
    try:
        options = WorkerOptions(host, port, token, args.name, backend, args.device, args.wait, secret, limit, libraries, rank)
        why = run(options, _joined, renew, partial(_waits, host, port) if args.wait is None else None)
    except KeyboardInterrupt:
        why = "interrupted"
    if why:
        sys.stderr.write(f"gt worker: {why}\n")
    return 130 if why == "interrupted" else int(bool(why))


def _server(host: str, port: str) -> tuple[str, int]:
    """Host and port of the server: of the options, else of GT_SERVER, else of a server on this machine that has no options."""
    if not (host and port):
        own, number = host_and_port(server_of_environment(f"localhost:{PORT}"))
        host, port = host or own, port or str(number)
    return host_and_port(written(host, port))


def leave(code: int) -> NoReturn:
    """End this process at once: what NVSHMEM does at exit needs the other workers, which may be gone."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _waits(host: str, port: int) -> None:
    sys.stderr.write(f"gt worker: waiting for the server at {host}:{port}; Ctrl-C ends the wait\n")


def _joined(name: str) -> None:
    sys.stderr.write(f"gt worker: connected as {name}\n")


if __name__ == "__main__":
    leave(main(own=True))
