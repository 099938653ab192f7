"""`python -m gt.server -p 12345`: a dispatcher in the foreground, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from gt import env, log
from gt.dispatcher.server import Server
from gt.errors import GTError
from gt.wire.auth import Access
from gt.wire.memory import collect_less, keep_freed


def port(text: str) -> int:
    number = int(text)
    if not 0 <= number < 1 << 16:
        raise argparse.ArgumentTypeError(f"{number} is not a port: want 0 to 65535")
    return number


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="gt.server", description="A dispatcher: programs and workers connect to it.")
    made.add_argument("-p", "--port", type=port, default=12345, help="port to listen on; 0 picks a free one")
    made.add_argument("--host", default="127.0.0.1", help="address to listen on; off loopback a token is needed")
    made.add_argument("--token-file", type=Path, help="file with the token that clients and workers need; default: GT_TOKEN")
    made.add_argument("--encrypt", action="store_true", help="encrypt on loopback too, which lets in all who have the token")
    made.add_argument("--insecure", action="store_true", help="without a token, let anybody in off loopback, unencrypted")
    made.add_argument("--heartbeat", type=float, default=10.0, help="seconds until a silent peer counts as lost")
    return made


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 once told to stop, 2 if it cannot start."""
    args = parser().parse_args(argv)
    log.setup("dispatcher")
    try:
        access = Access(env.token(args.token_file), args.encrypt, args.insecure)
        server = Server(args.host, args.port, access, args.heartbeat)
    except GTError as error:
        sys.stderr.write(f"gt.server: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"gt.server: --token-file {args.token_file} cannot be read: {error.strerror}\n")
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: server.stop(f"it got {signal.Signals(got).name}"))
    sys.stdout.write(f"gt.server: listening on {server.address}\n")
    sys.stdout.flush()
    keep_freed()
    collect_less()
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
