"""`gt dashboard [HOST:PORT]`: a page in the browser that shows a running server. `gt server --dashboard` runs it."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

from gt import env
from gt.cli import observing
from gt.errors import GTError
from gt.observe.bounded_server import LOOPBACK
from gt.observe.dashboard.feed import Feed
from gt.observe.dashboard.page_server import PageServer
from gt.observe.record_stream import RecordStream
from gt.wire.process_settings import die_with_parent
from gt.wire.socket import PAGE_PORT, PORT, port, server_of_environment

CONNECT_SECONDS = 5.0  # for an attempt; the page says so, and there is another
OPEN = "gt dashboard: the page on {host} is not encrypted: who sees the traffic sees the page; `ssh -L` is safer\n"


def main(args: list[str], text: str) -> int:
    """Exit code: 0 once interrupted, 1 if the server cannot be observed or the port cannot be had."""
    given = _parser(text).parse_args(args)
    if given.parent:
        die_with_parent(given.parent)
    try:
        address = given.address or server_of_environment(f"127.0.0.1:{PORT}")
        token = env.token(given.token_file)
        with RecordStream(address, token) as stream:  # an address or token that is wrong is an error now
            observing.tell_delay("gt dashboard", stream)
            stream.next()
        return _serve(given, address, token)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # of the output: gt.cli.main ends it in silence
        raise
    except (GTError, ValueError) as error:
        sys.stderr.write(f"gt dashboard: {error}\n")
    except OSError as error:
        sys.stderr.write(f"gt dashboard: --token-file {error.filename} cannot be read: {error.strerror}\n")
    return 1


def _serve(given: argparse.Namespace, address: str, token: str) -> int:
    """Serve the page until Ctrl-C or SIGTERM; the exit code. Its threads end with it, also after an error."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, frame: ended.set())
    feed = Feed(lambda log: RecordStream(address, token, given.interval, CONNECT_SECONDS, log), given.always)
    server: PageServer | None = None
    try:
        server = PageServer(feed, given.host, given.port, _tell)
        if given.host not in LOOPBACK:
            sys.stderr.write(OPEN.format(host=given.host))
        ended.wait()
        return 0
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stderr.write(f"gt dashboard: {given.host}:{given.port} cannot be served: {error.strerror}; try --port 0\n")
        return 1
    finally:
        feed.close()  # first: threads of the server wait for its events
        if server is not None:
            server.close()


def _tell(link: str) -> None:
    print(f"gt dashboard: {link} opens the page once, then the browser has a cookie", flush=True)


def _parser(text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gt dashboard", description=text)
    option = parser.add_argument
    option("address", nargs="?", default="", metavar="HOST:PORT", help=f"default: GT_SERVER, or 127.0.0.1:{PORT}")
    option("--port", type=port, default=PAGE_PORT, help=f"port of the page, 0 for a free one; default: {PAGE_PORT}")
    option("--host", default="127.0.0.1", help="address of the page; default: 127.0.0.1, which nobody else reaches")
    observing.add_interval(parser, 1.0, "states")
    option("--always", action="store_true", help="observe while no page is open too: curves then begin with the dashboard")
    option("--parent", type=int, default=0, help=argparse.SUPPRESS)  # process that this one ends with
    option("--token-file", type=Path, help="file with the server's token; default: GT_TOKEN")
    return parser
