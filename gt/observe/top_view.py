"""The state of a running server as lines of text, for `gt top`. Pure: knows no terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gt.ir.text import UNITS, column, counted, cut, wrapped
from gt.logs import plain

MAX_LINES, MAX_LINKS, MAX_ERRORS = 5, 8, 3  # rows of these tables
WIDE = 72  # columns of the wide form of tables; with fewer, as on a phone, rows have fewer columns and more rows
ERROR_ROWS = 3  # of one error
UNKNOWN = "-"
Row = dict[str, Any]
# name of an order -> the key of a worker, largest first but for names
ORDERS: dict[str, Callable[[Row], Any]] = {
    "name": lambda w: (len(w["name"]), w["name"]),
    "busy": lambda w: -(w["busy_share"] or 0.0),
    "memory": lambda w: -w["live_bytes"],
    "ops": lambda w: -(w["ops_per_second"] or 0.0),
}


def lines(state: dict[str, Any], order: str = "name", session: int = -1, width: int = 80, height: int = 0) -> list[str]:
    """All tables. order: of workers, one of ORDERS. session: the only one that is shown, -1 for all.

    height: rows that there are, 0 for any number. Where the tables have more, the longest are cut, so that each is seen.
    """
    # 1. Choose and sort the rows.
    server = state["server"]
    workers = sorted(state["workers"], key=ORDERS[order])
    sessions = state["sessions"]
    if session >= 0:
        workers = [w for w in workers if session in w["sessions"]]
        sessions = [s for s in sessions if s["number"] == session]
    shown = {worker["name"] for worker in workers}
    links = [link for link in state["links"] if link["source"] in shown]
    samples = [line for line in state["lines"] if session < 0 or line["session"] == session]

    # 2. The title, then a table for each part of the state.
    counts = [counted(len(state[f"{noun}s"]), noun) for noun in ("worker", "session")]
    count = f"{', '.join(counts)}, {len(state['queue'])} waiting"
    hosts = {worker["host"] for worker in state["workers"]}
    at = f" on {cut(next(iter(hosts)), 12)}" if len(hosts) == 1 else ""
    title = f"{server.get('sharing', '')} server{at}, up {server.get('at', 0):.0f} s: {count}; by {order}"
    titles = wrapped(title, width)
    no_workers, no_sessions = _none(state, session)
    tables = [
        _workers(workers, len(hosts) > 1, width) if workers else [no_workers],
        _sessions(sessions, width) if sessions else wrapped(no_sessions, width),
    ]
    if state["queue"]:
        waiting = "queue  " + "; ".join(f"{q['place']} {q['user']} {q['program']}" for q in state["queue"])
        tables.append(wrapped(waiting, width, rest=7))
    of = f" of session {session}" if session >= 0 else ""
    tables += [_links(links, of, width), _lines(samples, of, width)]
    errors = [error for error in state["errors"] if session < 0 or error["session"] in (session, -1)]
    if errors:
        tables.append(["errors"] + [row for error in errors[-MAX_ERRORS:] for row in _error(error, width)])
    tables += [_pipeline(one, width) for one in sessions if one["schedule"] is not None]

    # 3. Fit them to the terminal: each table has a blank row above it.
    if height:
        tables = fit(tables, height - len(titles) - len(tables))
    text = [*titles, *(row for table in tables for row in ("", *table))]
    return [cut(plain(line), width) for line in text]


def _none(state: dict[str, Any], session: int) -> tuple[str, str]:
    """The texts in place of workers and of sessions where none is shown. session: the choice, -1 for all."""
    if session < 0:
        return "no workers", "no sessions"
    others = ", ".join(str(each["number"]) for each in state["sessions"])
    return f"no workers of session {session}", f"no session {session}; sessions: {others or 'none'}"


def fit(tables: Sequence[list[str]], height: int) -> list[list[str]]:
    """The tables in so many rows, if each has at least two: all get the same number of rows, or all of its own."""
    # Rows are dealt out in rounds, one to each table that has more, until none is left (max-min fairness).
    sizes = [0] * len(tables)
    left = max(height, 2 * len(tables))
    while left > 0 and (open_ := [place for place, table in enumerate(tables) if sizes[place] < len(table)]):
        for place in open_[:left]:
            sizes[place] += 1
        left -= len(open_)
    return [
        table if size == len(table) else [*table[: size - 1], f"and {counted(len(table) - size + 1, 'row')} more"]
        for table, size in zip(tables, sizes, strict=True)
    ]


def _workers(workers: Sequence[Row], hosts: bool, width: int) -> list[str]:
    """hosts: they are on several, so that each row names its own."""
    if width < WIDE:
        head = f"{'worker':8}{'state':11}{'busy':>5}{'tensors':>9}"
        return [head, *(row for worker in workers for row in _narrow_worker(worker, hosts, width))]
    host = f"{'host':8}" if hosts else ""
    head = f"{'worker':8}{host}{'state':11}{'busy':>5}{'ops/s':>8}{'tensors':>9}{'taken':>9}{'limit':>9}  now"
    rows = []
    for worker in workers:
        rows += [_worker(worker, hosts), *([] if worker["current"] else _under(worker["reason"], width))]
    return [head, *rows]


def _narrow_worker(worker: Row, hosts: bool, width: int) -> list[str]:
    at = f"on {worker['host']}" if hosts else ""
    now = f"at {_op(worker['current']['op'])} {_place(worker['current'])}" if worker["current"] else worker["reason"]
    first = f"{column(worker['name'], 8)}{worker['state']:11}{_share(worker['busy_share']):>5}{_tensors(worker):>9}"
    return [first, *_under(", ".join(filter(None, (at, now))), width)]


def _under(text: str, width: int) -> list[str]:
    """Rows under the one that they say more of."""
    return wrapped(text, width, 8, 8)


def _worker(worker: Row, hosts: bool) -> str:
    taken = worker["memory"].get("process", worker["memory"].get("peak"))
    # The line comes first, since the end may be cut.
    now = f"{_place(worker['current'])} {_op(worker['current']['op'])}" if worker["current"] else ""
    head = column(worker["name"], 8) + (column(worker["host"], 8) if hosts else "")
    return (
        f"{head}{worker['state']:11}{_share(worker['busy_share']):>5}{_rate(worker['ops_per_second']):>8}"
        f"{_tensors(worker):>9}{UNKNOWN if taken is None else _size(taken):>9}{_limit(worker):>9}  {now}"
    )


def _tensors(w: Row) -> str:
    return UNKNOWN if w["age"] < 0 and w["state"] != "lost" else _size(w["live_bytes"])


def _limit(w: Row) -> str:
    return UNKNOWN if w["age"] < 0 else _size(w["limit"]) if w["limit"] else "none"


def _sessions(sessions: Sequence[Row], width: int) -> list[str]:
    wide = width >= WIDE
    rows = [f"{'session':8}{'user':9}{'program':18}" + f"{'ops/s':>8}{'steps/s':>9}  {'waits for':10} logged" * wide]
    for session in sessions:
        values = " ".join(f"{name}={_number(value)}" for name, value in session["values"].items()) or UNKNOWN
        ops, steps, waits = _rate(session["ops_per_second"]), _rate(session["steps_per_second"]), session["waits"] or UNKNOWN
        row = f"{session['number']:<8}{column(session['user'], 9)}{column(session['program'], 18)}"
        if wide:
            rows.append(f"{row}{ops:>8}{steps:>9}  {waits:10} {values}")
        else:
            rows += [row, *_under(f"ops/s {ops}, steps/s {steps}, waits for {waits}, logged {values}", width)]
        if session["memory"] is not None:
            held = "holds " + ", ".join(f"{use} {_size(nbytes)}" for use, nbytes in session["memory"].items())
            rows += wrapped(held, width, 8, 14)
        if session["current"]:
            rows += _under(
                f"at {_op(session['current']['op'])} {_place(session['current'])} {session['current']['group']}", width
            )
    return rows


def _links(links: Sequence[Row], of: str, width: int) -> list[str]:
    if not links:
        return wrapped(f"links: no worker{of} has sent tensors to another", width)
    # Busiest first; links without a rate by their bytes.
    most = sorted(links, key=lambda link: -(link["bytes_per_second"] or 0.0) or -link["bytes"])
    wide = 18 if width >= WIDE else 14
    rows = [f"{'link':{wide}}{'sent':>10}{'a second':>12}"]
    for link in most[:MAX_LINKS]:
        rate = link["bytes_per_second"]
        name = f"{link['source']} -> {link['target']}"
        rows.append(f"{column(name, wide)}{_size(link['bytes']):>10}{UNKNOWN if rate is None else _size(int(rate)):>12}")
    return rows + ([f"and {len(links) - MAX_LINKS} links more"] if len(links) > MAX_LINKS else [])


def _lines(samples: Sequence[Row], of: str, width: int) -> list[str]:
    if not samples:
        return wrapped(f"lines: no worker was seen at an op{of} yet", width)
    rows = [f"{'share':>6}  line that workers were seen at"]
    return rows + [f"{_share(line['share']):>6}  {_place(line)}  {_op(line['op'])}" for line in samples[:MAX_LINES]]


def _pipeline(session: Row, width: int) -> list[str]:
    """The last step: a row for each worker, a letter for what it did at that time, `.` for nothing."""
    # All bars have one scale, from the first action of any worker to the last.
    schedule = session["schedule"]
    measured, predicted = schedule["measured"], schedule["predicted"]
    title = (
        f"session {session['number']}, {schedule['name']}: {measured['makespan'] * 1e3:.1f} ms, bubble {measured['idle']:.1%} "
        f"measured, {predicted['idle']:.1%} predicted"
    )
    actions = {name: stamps for name, stamps in schedule["actions"].items() if stamps}
    titles = wrapped(title, width)
    if not actions:
        return [*titles, "its actions are too many to show" if not schedule["actions"] else "no worker has told its actions"]
    begin = min(start for stamps in actions.values() for _, start, _ in stamps)
    end = max(stop for stamps in actions.values() for _, _, stop in stamps)
    bar = max(10, width - 9)
    return [*titles, *(f"{column(name, 8)}{_bar(stamps, begin, end, bar)}" for name, stamps in actions.items())]


def _bar(stamps: Sequence[Sequence], begin: float, end: float, columns: int) -> str:
    bar = ["."] * columns
    scale = columns / (end - begin) if end > begin else 0.0
    for action, start, stop in stamps:
        # Even the shortest action has a column.
        first = min(int((start - begin) * scale), columns - 1)
        letter = next((sign for sign in action if sign.isalpha()), "?")
        for place in range(first, min(max(int((stop - begin) * scale), first + 1), columns)):
            bar[place] = letter
    return "".join(bar)


def _error(error: Row, width: int) -> list[str]:
    session = f" session {error['session']}" if error["session"] >= 0 else ""
    text = f"{error['at']:.0f} s{session} {error['peer']}: {error['text']}"
    return wrapped(text, width, 2, 4, ERROR_ROWS)


def _op(name: str) -> str:
    """An op without its namespace and overload: mm for aten.mm.default."""
    return name.split(".")[1] if name.count(".") == 2 else name


def _size(nbytes: float) -> str:
    """A size of at most 8 characters, as on the dashboard's page."""
    unit, by = next(((u, b) for u, b in reversed(UNITS.items()) if nbytes >= b and u), ("B", 1))
    return f"{nbytes / by:.{int(by > 1 and nbytes < 10 * by)}f} {unit}"


def _place(row: Row) -> str:
    return f"{row['file'].rpartition('/')[2]}:{row['line']}" if row["file"] else "no line"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{min(value, 1.0):.0%}"


def _rate(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.5g}"
