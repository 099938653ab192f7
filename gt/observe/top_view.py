"""The state of a running server as lines of text, for `gt top`. Pure: knows no terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gt.ir.schedules import size
from gt.logs import plain

MAX_LINES, MAX_LINKS, MAX_ERRORS = 5, 8, 3  # rows of these tables
UNKNOWN = "-"
Row = dict[str, Any]
# name of an order -> the key of a worker, largest first but for names
ORDERS: dict[str, Callable[[Row], Any]] = {
    "name": lambda w: (len(w["name"]), w["name"]),
    "busy": lambda w: -(w["busy_share"] or 0.0),
    "memory": lambda w: -w["live_bytes"],
    "ops": lambda w: -(w["ops_per_second"] or 0.0),
}


def lines(state: dict[str, Any], order: str = "name", session: int = -1, width: int = 80) -> list[str]:
    """All tables. order: of workers, one of ORDERS. session: the only one that is shown, -1 for all."""
    server = state["server"]
    workers = sorted(state["workers"], key=ORDERS[order])
    sessions = state["sessions"]
    if session >= 0:
        workers = [w for w in workers if session in w["sessions"]]
        sessions = [s for s in sessions if s["number"] == session]
    shown = {worker["name"] for worker in workers}
    links = [link for link in state["links"] if link["source"] in shown]
    samples = [line for line in state["lines"] if session < 0 or line["session"] == session]
    count = f"{len(state['workers'])} workers, {len(state['sessions'])} sessions, {len(state['queue'])} waiting"
    text = [f"{server.get('sharing', '')} server, up {server.get('at', 0):.0f} s: {count}; by {order}", ""]
    text += _workers(workers, width) + [""] + _sessions(sessions, width)
    if state["queue"]:
        text += ["", "queue  " + "; ".join(f"{q['place']} {q['user']} {q['program']}" for q in state["queue"])]
    text += ["", *_links(links, width), "", *_lines(samples, width)]
    errors = [error for error in state["errors"] if session < 0 or error["session"] in (session, -1)]
    if errors:
        text += ["", "errors"] + [f"  {_error(error)}" for error in errors[-MAX_ERRORS:]]
    for one in sessions:
        if one["schedule"] is not None:
            text += ["", *_pipeline(one, width)]
    return [plain(line)[:width] for line in text]


def _workers(workers: Sequence[Row], width: int) -> list[str]:
    if not workers:
        return ["no workers"]
    head = f"{'worker':8}{'host':12}{'state':11}{'busy':>5}{'ops/s':>8}{'tensors':>9}{'taken':>9}{'limit':>9}  now"
    return [head, *(_worker(worker) for worker in workers)]


def _worker(w: Row) -> str:
    taken = w["memory"].get("process", w["memory"].get("peak"))
    now = f"{w['current']['op']} {_place(w['current'])}" if w["current"] else w["reason"]
    return (
        f"{w['name'][:7]:8}{w['host'][:11]:12}{w['state']:11}{_share(w['busy_share']):>5}{_rate(w['ops_per_second']):>8}"
        f"{size(w['live_bytes']):>9}{UNKNOWN if taken is None else size(taken):>9}"
        f"{size(w['limit']) if w['limit'] else 'none':>9}  {now}"
    )


def _sessions(sessions: Sequence[Row], width: int) -> list[str]:
    if not sessions:
        return ["no sessions"]
    rows = [f"{'session':8}{'user':9}{'program':18}{'ops/s':>8}{'steps/s':>9}  {'waits for':10} logged"]
    for s in sessions:
        values = " ".join(f"{name}={_number(value)}" for name, value in s["values"].items())
        rows.append(
            f"{s['number']:<8}{s['user'][:8]:9}{s['program'][:17]:18}{_rate(s['ops_per_second']):>8}"
            f"{_rate(s['steps_per_second']):>9}  {s['waits'] or UNKNOWN:10} {values or UNKNOWN}"
        )
        if s["memory"] is not None:
            rows.append("        holds " + ", ".join(f"{use} {size(nbytes)}" for use, nbytes in s["memory"].items()))
        if s["current"]:
            rows.append(f"        at {s['current']['op']} {_place(s['current'])} {s['current']['group']}")
    return rows


def _links(links: Sequence[Row], width: int) -> list[str]:
    if not links:
        return ["links: no worker has sent tensors to another"]
    most = sorted(links, key=lambda link: -(link["bytes_per_second"] or 0.0) or -link["bytes"])
    rows = [f"{'link':18}{'sent':>10}{'a second':>12}"]
    for link in most[:MAX_LINKS]:
        rate = link["bytes_per_second"]
        name = f"{link['source']} -> {link['target']}"
        rows.append(f"{name[:17]:18}{size(link['bytes']):>10}{UNKNOWN if rate is None else size(int(rate)):>12}")
    return rows + ([f"and {len(links) - MAX_LINKS} links more"] if len(links) > MAX_LINKS else [])


def _lines(samples: Sequence[Row], width: int) -> list[str]:
    if not samples:
        return ["lines: no worker was seen at an op yet"]
    rows = [f"{'share':>6}  line that workers were seen at"]
    return rows + [f"{_share(line['share']):>6}  {_place(line)}  {line['op']}" for line in samples[:MAX_LINES]]


def _pipeline(session: Row, width: int) -> list[str]:
    """The last step: a row for each worker, a letter for what it did at that time, `.` for nothing."""
    schedule = session["schedule"]
    measured, predicted = schedule["measured"], schedule["predicted"]
    title = (
        f"session {session['number']}, {schedule['name']}: {measured['makespan'] * 1e3:.1f} ms, bubble {measured['idle']:.1%} "
        f"measured, {predicted['idle']:.1%} predicted"
    )
    actions = {name: stamps for name, stamps in schedule["actions"].items() if stamps}
    if not actions:
        return [title, "its actions are too many to show" if not schedule["actions"] else "no worker has told its actions"]
    begin = min(start for stamps in actions.values() for _, start, _ in stamps)
    end = max(stop for stamps in actions.values() for _, _, stop in stamps)
    columns = max(10, width - 9)
    return [title, *(f"{name[:7]:8}{_bar(stamps, begin, end, columns)}" for name, stamps in actions.items())]


def _bar(stamps: Sequence[Sequence], begin: float, end: float, columns: int) -> str:
    bar = ["."] * columns
    scale = columns / (end - begin) if end > begin else 0.0
    for action, start, stop in stamps:
        first = min(int((start - begin) * scale), columns - 1)
        letter = next((sign for sign in action if sign.isalpha()), "?")
        for column in range(first, min(max(int((stop - begin) * scale), first + 1), columns)):
            bar[column] = letter
    return "".join(bar)


def _error(error: Row) -> str:
    session = f" session {error['session']}" if error["session"] >= 0 else ""
    return f"{error['at']:.0f} s{session} {error['peer']}: {error['text']}"


def _place(row: Row) -> str:
    return f"{row['file'].rpartition('/')[2]}:{row['line']}" if row["file"] else "no line"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{min(value, 1.0):.0%}"


def _rate(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.5g}"
