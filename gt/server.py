"""`gt server -p 12345`, or `python -m gt.server`: a dispatcher in the foreground, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gt import env, logs
from gt.dispatcher.cluster.leases import Terms
from gt.dispatcher.server import Server
from gt.errors import GTError, Refused
from gt.wire.access.auth import Access
from gt.wire.process_settings import collect_less, keep_freed, more_descriptors, take_turns
from gt.wire.socket import PAGE_PORT, PORT, port, positive, written

STOP_SECONDS = 5.0  # for a process beside the server to end


def parser() -> argparse.ArgumentParser:
    about = "run a dispatcher, to which programs and workers connect"
    arguments = argparse.ArgumentParser(prog="gt server", description=about)
    option = arguments.add_argument
    option("-p", "--port", type=port, default=PORT, help=f"port to listen on; default: {PORT}; 0: a free one")
    host = "addresses to listen on, with commas between; :: is all of IPv6 and IPv4; default: 127.0.0.1; others need a token"
    option("-H", "--host", default="127.0.0.1", help=host)
    option("--token-file", type=Path, help="file with the token for clients and workers; default: GT_TOKEN")
    option("--encrypt", action="store_true", help="encrypt on loopback too, where anybody with the token may then connect")
    option("--insecure", action="store_true", help="without a token, accept anybody off loopback, unencrypted")
    option("--heartbeat", type=positive(float), default=10.0, help="seconds until a stopped worker counts as lost; default: 10")
    sharing = "shared (default): all programs use all workers; exclusive: each program has its own workers, in new processes"
    option("--sharing", choices=("shared", "exclusive"), default="shared", help=sharing)
    workers = "most workers of a program with --sharing exclusive; default: all"
    option("--max-workers", type=positive(int), default=0, help=workers)
    secret = "file with a secret that workers need besides the token; default: none"
    option("--worker-token-file", type=Path, help=secret)
    option("--max-session-time", type=positive(float), default=0.0, help="seconds until a session ends; default: no limit")
    memory = "most bytes of a session on a CPU worker, as 4GiB; default: no limit"
    option("--memory-limit", default="", help=memory)
    metrics = "serve metrics for Prometheus on this port of 127.0.0.1, by a process of its own; default: none"
    option("--metrics", type=port, metavar="PORT", help=metrics)
    page = f"show the server in the browser, by a process of its own on 127.0.0.1; default port: {PAGE_PORT}; default: none"
    option("--dashboard", type=port, nargs="?", const=PAGE_PORT, metavar="PORT", help=page)
    return arguments


def terms(args: argparse.Namespace) -> Terms:
    """On which workers are lent. Refused for options that do not go together, OSError for a file that cannot be read."""
    exclusive, file = args.sharing == "exclusive", args.worker_token_file
    if args.max_workers and not exclusive:
        raise Refused("--max-workers is for --sharing exclusive: of a shared server everybody has all workers")
    secret = env.token(file) if file else ""
    if exclusive and not secret:
        sys.stderr.write("gt server: who has the token can offer a worker, and see its work: --worker-token-file prevents it\n")
    memory = env.size("--memory-limit", 0, args.memory_limit) if args.memory_limit else 0
    return Terms(exclusive, args.max_workers, args.max_session_time, secret, memory=memory)


@contextmanager
def beside(server: Server, args: argparse.Namespace) -> Iterator[None]:
    """Inside, `gt metrics` and `gt dashboard` run as processes of their own, if asked for. They observe the server, and end
    with it.
    """
    asked = {"metrics": args.metrics, "dashboard": args.dashboard}
    processes = [_observer(server, args, name, number) for name, number in asked.items() if number is not None]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _observer(server: Server, args: argparse.Namespace, name: str, number: int) -> subprocess.Popen:
    """Start a command that observes the server and serves a port."""
    first = server.host.partition(",")[0]
    host = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}.get(first, first)
    command = [sys.executable, "-m", "gt", name, written(host, server.port), "--port", str(number)]
    command += ["--parent", str(os.getpid())]
    command += ["--token-file", str(args.token_file)] if args.token_file else []
    variables = env.child(PYTHONPATH=env.python_path(str(Path(__file__).parents[1])))
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=variables)


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 once told to stop, 2 if it cannot start."""
    args = parser().parse_args(argv)
    logs.setup("dispatcher")
    more_descriptors()
    try:
        access = Access(env.token(args.token_file), args.encrypt, args.insecure)
        server = Server(args.host, args.port, access, args.heartbeat, terms=terms(args))
    except GTError as error:
        sys.stderr.write(f"gt server: {error}\n")
        return 2
    except OSError as error:
        option = "--worker-token-file" if str(error.filename) == str(args.worker_token_file) else "--token-file"
        sys.stderr.write(f"gt server: {option} {error.filename} cannot be read: {error.strerror}\n")
        return 2
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: server.stop(f"it got {signal.Signals(got).name}"))
    sys.stdout.write(f"gt server: listening on {server.address}\n")
    sys.stdout.flush()
    keep_freed()
    collect_less()
    take_turns()
    with beside(server, args):
        server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
