"""`gt top [HOST:PORT]`: workers, sessions, links and slow lines of a running server, live in the terminal or once as text."""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gt.cli import observing
from gt.observe import top_view
from gt.observe.live_view import LiveView
from gt.observe.record_stream import RecordStream

KEYS = "keys: s sorts workers, 0-9 shows one session, a all, q ends"
NO_RICH = "gt top: the live view needs rich: pip install rich; this is the view of one moment, as with --once"


def main(args: list[str], text: str) -> int:
    """Exit code: 0, 1 if the server cannot be observed."""
    given = _parser(text).parse_args(args)
    return observing.observe("gt top", given, given.interval, lambda stream: _show(stream, given))


def _parser(text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gt top", description=text, epilog=KEYS)
    observing.add_options(parser)
    option = parser.add_argument
    option("--interval", type=float, default=0.5, help="seconds between two views, at least 0.5; default: 0.5")
    option("--once", action="store_true", help="print one view and end")
    option("--json", action="store_true", help="with --once: print JSON, with the keys workers, sessions, links and others")
    option("--sort", choices=tuple(top_view.ORDERS), default="name", help="order of workers; default: name")
    option("--session", type=int, default=-1, help="show this session alone")
    return parser


def _show(stream: RecordStream, given: argparse.Namespace) -> int:
    view = LiveView()
    if given.once or given.json or not sys.stdout.isatty() or not sys.stdin.isatty():
        return _print(stream, view, given)
    try:
        import rich  # noqa: F401 - an extra
    except ImportError:
        sys.stderr.write(NO_RICH + "\n")
        return _print(stream, view, given)
    return _live(stream, view, given)


def _print(stream: RecordStream, view: LiveView, given: argparse.Namespace) -> int:
    """One view: rates take two moments."""
    view.update(stream.next())
    state = view.update(stream.next())
    if given.json:
        print(json.dumps(state, allow_nan=False))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
        print("\n".join(line.rstrip() for line in top_view.lines(state, given.sort, given.session, max(width, 80))))
    return 0


def _live(stream: RecordStream, view: LiveView, given: argparse.Namespace) -> int:
    from rich.live import Live
    from rich.text import Text

    order, session = given.sort, given.session
    with _keys(), Live(screen=True, auto_refresh=False) as live:
        while True:
            state = view.update(stream.next())
            for key in _pressed():
                if key == "q":
                    return 0
                order, session = after_key(key, order, session)
            width, height = live.console.size
            rows = top_view.lines(state, order, session, max(width - 1, 20), height - 1)[: height - 1]
            live.update(Text("\n".join([*rows, KEYS[:width]]), no_wrap=True), refresh=True)


def after_key(key: str, order: str, session: int) -> tuple[str, int]:
    """Order and session that are shown after a key."""
    if key == "s":
        orders = list(top_view.ORDERS)
        return orders[(orders.index(order) + 1) % len(orders)], session
    if key == "a":
        return order, -1
    return order, int(key) if key.isascii() and key.isdigit() else session


@contextmanager
def _keys() -> Iterator[None]:
    """Inside, keys are read one by one and not shown."""
    import termios
    import tty

    before: Any = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed() -> str:
    """Keys that were pressed since the last call."""
    ready = select.select([sys.stdin], [], [], 0)[0]
    return os.read(sys.stdin.fileno(), 64).decode(errors="replace") if ready else ""
