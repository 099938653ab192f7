"""`gt top [HOST:PORT]`: workers, sessions, links and slow lines of a running server, live in the terminal or once as text."""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gt.cli import observing
from gt.errors import DispatcherLost
from gt.ir.text import wrapped
from gt.observe import top_view
from gt.observe.live_view import LiveView
from gt.observe.record_stream import ANSWER_SECONDS, RecordStream

KEYS = "keys: s sorts workers, 0-9 shows one session, n the next, a all, q ends"
SHORT_KEYS = "s sort, 0-9 n session, a all, q end"
MIN_COLUMNS = 20  # of a terminal; one with fewer breaks lines itself
TICK_SECONDS = 1.0  # until another size of the terminal is noticed, at most
NO_RICH = "gt top: the live view needs rich: pip install rich; this is the view of one moment, as with --once"


def main(args: list[str], text: str) -> int:
    """Exit code: 0, 1 if the server cannot be observed."""
    parser = _parser(text)
    given = parser.parse_args(args)
    if given.json and given.session >= 0:
        parser.error("--session is for the text: JSON has all sessions, each with its number")
    return observing.observe("gt top", given, given.interval, lambda stream: _show(stream, given))


def _parser(text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gt top", description=text, epilog=KEYS)
    observing.add_options(parser)
    option = parser.add_argument
    observing.add_interval(parser, 0.5, "views")
    option("--once", action="store_true", help="print one view and end")
    option("--json", action="store_true", help="with --once: print JSON, with the keys workers, sessions, links and others")
    option("--sort", choices=tuple(top_view.ORDERS), default="name", help="order of workers; default: name")
    option("--session", type=_session, default=-1, metavar="NUMBER", help="show this session alone, not with --json")
    return parser


def _session(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a session: want its number, such as 0")
    return int(text)


def _show(stream: RecordStream, given: argparse.Namespace) -> int:
    view = LiveView()
    if given.once or given.json or not sys.stdout.isatty() or not sys.stdin.isatty():
        return _print(stream, view, given)
    try:
        from rich.console import Console  # an extra
    except ImportError:
        sys.stderr.write(NO_RICH + "\n")
        return _print(stream, view, given)
    return _print(stream, view, given) if Console().is_dumb_terminal else _live(stream, view, given)


def _print(stream: RecordStream, view: LiveView, given: argparse.Namespace) -> int:
    """One view: rates take two moments."""
    view.update(stream.next())
    state = view.update(stream.next())
    if given.json:
        print(json.dumps(state, allow_nan=False))
    else:
        width = max(shutil.get_terminal_size().columns, MIN_COLUMNS) if sys.stdout.isatty() else 80
        print("\n".join(line.rstrip() for line in top_view.lines(state, given.sort, given.session, width)))
    return 0


def _live(stream: RecordStream, view: LiveView, given: argparse.Namespace) -> int:
    from rich.live import Live
    from rich.text import Text

    order, session = given.sort, given.session
    state: dict[str, Any] | None = None
    drawn: tuple = ()
    terminal = Live(screen=True, auto_refresh=False)
    with Following(stream, view, given) as following, Keys(following.nudge) as keys, terminal as live:
        while True:
            news = following.state(TICK_SECONDS)
            for key in keys.pressed():
                if key == "q":
                    return 0
                order, session = after_key(key, order, session, _numbers(state if news is None else news))
            if _another(state, news):
                session = -1  # its sessions have the same numbers
            state, frame = state if news is None else news, (order, session, following.problem, *live.console.size)
            if news is not None or frame != drawn:
                live.update(Text("\n".join(_screen(state, *frame)), no_wrap=True), refresh=True)
                drawn = frame


def _screen(state: dict[str, Any] | None, order: str, session: int, problem: str, width: int, height: int) -> list[str]:
    """Rows of the whole terminal. problem: why they are of some time ago."""
    keys, width = KEYS if len(KEYS) <= width else SHORT_KEYS, max(width - 1, MIN_COLUMNS)
    above = wrapped(f"{problem}; connecting again", width)[: max(height // 3, 1)] if problem else []
    room = max(height - 1 - len(above), 1)
    rows = ["waiting for the first records"] if state is None else top_view.lines(state, order, session, width, room)
    return [*above, *rows[:room], keys[:width]]


class Following:
    """A context manager: the newest state of a server. A link that ends is made again once, after which its end is an error.

    That of an observer who was stopped has ended, as has that to a server that is restarted.
    """

    def __init__(self, stream: RecordStream, view: LiveView, given: argparse.Namespace) -> None:
        self._stream, self._view, self._given = stream, view, given
        self._waited = 0.0  # counted, not by the clock: while this process is stopped it does not wait
        self.problem = ""  # the link has ended, for this reason

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *why: object) -> None:
        self._stream.close()

    def nudge(self) -> None:
        """End a wait for a new state. For another thread."""
        self._stream.nudge()

    def state(self, seconds: float) -> dict[str, Any] | None:
        """A new state, None if there is none within so many seconds. Raises GTError for the end of a second link."""
        try:
            records = self._stream.take(seconds)
            self._waited = 0.0 if records is not None else self._waited + seconds
            if self._waited >= (patience := ANSWER_SECONDS + self._given.interval):
                raise DispatcherLost(f"the server at {self._stream.address} has sent no records for {patience:g} s")
        except DispatcherLost as error:
            if self.problem:
                raise DispatcherLost(f"{self.problem}; {error}") from error
            self._again(str(error))
            return None
        if records is None:
            return None
        self.problem = ""
        return self._view.update(records)

    def _again(self, why: str) -> None:
        self._stream.close()
        self.problem, self._view, self._waited = why, LiveView(), 0.0
        token = observing.token(self._given.token_file)
        self._stream = RecordStream(self._stream.address, token, self._given.interval)


def _numbers(state: dict[str, Any] | None) -> list[int]:
    return [] if state is None else sorted(session["number"] for session in state["sessions"])


def _another(state: dict[str, Any] | None, news: dict[str, Any] | None) -> bool:
    """True if the news are of another server than the state before."""
    return state is not None and news is not None and state["server"].get("life") != news["server"].get("life")


def after_key(key: str, order: str, session: int, numbers: Sequence[int] = ()) -> tuple[str, int]:
    """Order and session that are shown after a key. numbers: of all sessions, ascending; after the last come all again."""
    if key == "s":
        orders = list(top_view.ORDERS)
        return orders[(orders.index(order) + 1) % len(orders)], session
    if key == "a":
        return order, -1
    if key == "n":
        return order, next((number for number in numbers if number > session), -1)
    return order, int(key) if key.isascii() and key.isdigit() else session


class Keys:
    """A context manager: inside, keys are read one by one and not shown. A thread waits for them, so that nothing polls."""

    def __init__(self, nudge: Callable[[], None]) -> None:
        """nudge: called in that thread when there are keys."""
        self._nudge = nudge
        self._read: deque[str] = deque()
        self._thread = threading.Thread(target=self._wait, name="gt-keys", daemon=True)

    def __enter__(self) -> Keys:
        import termios
        import tty

        self._before: Any = termios.tcgetattr(sys.stdin)
        self._end, self._ending = os.pipe()
        tty.setcbreak(sys.stdin)
        self._thread.start()
        return self

    def __exit__(self, *why: object) -> None:
        import termios

        os.write(self._ending, b"\0")
        self._thread.join()
        os.close(self._end)
        os.close(self._ending)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def pressed(self) -> str:
        """Keys that were pressed since the last call."""
        return "".join(self._read.popleft() for _ in range(len(self._read)))

    def _wait(self) -> None:
        while self._end not in select.select([sys.stdin, self._end], [], [])[0]:
            try:
                keys = os.read(sys.stdin.fileno(), 64)
            except OSError:
                return
            if not keys:  # the terminal is gone
                return
            self._read.append(keys.decode(errors="replace"))
            self._nudge()
