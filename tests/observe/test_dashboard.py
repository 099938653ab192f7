"""The dashboard without a browser: who may open the page, its figures, and what it keeps."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import gt
from gt.observe import bounded_server
from gt.observe.bounded_server import (
    MAX_CONNECTIONS,
    MAX_ERRORS_LOGGED,
    MAX_REQUEST_BYTES,
    BoundedHandler,
    BoundedServer,
    names_this,
)
from gt.observe.dashboard import feed as feed_module
from gt.observe.dashboard.feed import Feed, encoded
from gt.observe.dashboard.history import MAX_SAMPLES, History
from gt.observe.dashboard.page_keys import MAX_BROWSERS, PageKeys
from gt.observe.dashboard.page_server import FILES, PageServer
from gt.observe.dashboard.predicted_schedule import PredictedSchedules
from gt.observe.live_view import LiveView
from gt.observe.record_stream import RecordStream
from gt.wire.records import Record
from tests.helpers.limits import limit
from tests.helpers.serving import serving, settled
from tests.observe.synthetic_records import SyntheticStream


@contextmanager
def page(
    connect: Callable[[bool], Any], always: bool = False, host: str = "127.0.0.1"
) -> Iterator[tuple[PageServer, list[str]]]:
    """A page server, and the links that it has told."""
    links: list[str] = []
    feed = Feed(connect, always)
    server = PageServer(feed, host, 0, links.append)
    try:
        yield server, links
    finally:
        feed.close()
        server.close()


@contextmanager
def synthetic(**about: Any) -> Iterator[tuple[PageServer, list[str], SyntheticStream]]:
    stream = SyntheticStream(**about)
    with page(lambda log: stream) as (server, links):
        yield server, links, stream


def get(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=limit(20))
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def enter(server: PageServer, link: str) -> tuple[str, str]:
    """The cookie and the proof that a link gives."""
    status, headers, body = get(server, link[link.index("/?key=") :])
    proof = re.search(r"url=/#proof=([0-9a-f]{64})", body.decode())
    assert status == 200 and proof is not None
    return headers["set-cookie"].partition(";")[0], proof[1]


def test_a_link_opens_the_page_once_and_another_is_told() -> None:
    with synthetic() as (server, links, _):
        assert get(server, "/")[0] == get(server, "/events")[0] == get(server, "/main.js")[0] == 403
        status, headers, body = get(server, links[0][links[0].index("/?key=") :])
        assert status == 200 and b"url=/" in body and links[0].partition("key=")[2].encode() not in body
        for part in ("HttpOnly", "SameSite=Strict", "Path=/"):
            assert part in headers["set-cookie"]
        assert get(server, links[0][links[0].index("/?key=") :])[0] == 403
        assert len(links) == 2 and links[0] != links[1]
        cookie = headers["set-cookie"].partition(";")[0]
        assert get(server, "/", Cookie=cookie)[0] == 200
        assert get(server, "/", Cookie=cookie[:-1])[0] == get(server, "/", Cookie="=;;,")[0] == 403


def test_a_cookie_alone_opens_no_events() -> None:
    with synthetic() as (server, links, _):
        cookie, proof = enter(server, links[0])
        assert proof not in links[1] and proof not in cookie
        for path in ("/events", "/events?proof=", f"/events?proof={proof[:-1]}", f"/events?proof={proof.upper()}x"):
            assert get(server, path, "HEAD", Cookie=cookie)[0] == 403
        assert get(server, f"/events?proof={proof}", "HEAD")[0] == 403
        assert get(server, f"/events?proof={proof}", "HEAD", Cookie=cookie)[0] == 200
        assert enter(server, links[1])[1] == proof  # a page that is open goes on once the browser has another cookie


def test_only_this_machines_names_are_answered() -> None:
    assert names_this("127.0.0.1:80", "127.0.0.1") and names_this("localhost", "x") and names_this("[::1]:9", "::1")
    assert names_this("node1:9471", "node1") and names_this("LOCALHOST:1", "") and names_this("10.0.0.3:9471", "0.0.0.0")
    assert not names_this("evil.example:9471", "127.0.0.1") and not names_this("", "127.0.0.1")
    assert not names_this("127.0.0.1.evil.example", "127.0.0.1")
    with synthetic() as (server, links, _):
        cookie, _ = enter(server, links[0])
        assert get(server, "/", Cookie=cookie, Host="evil.example")[0] == 421
        assert get(server, links[1][links[1].index("/?key=") :], Host="evil.example")[0] == 421
        assert get(server, "/events", Cookie=cookie, Sec_Fetch_Site="cross-site")[0] == 403


def test_nothing_but_the_pages_files_is_served_under_a_strict_policy() -> None:
    with synthetic() as (server, links, _):
        cookie, _ = enter(server, links[0])
        for path in ("/../feed.py", "/%2e%2e/feed.py", "/page", "/feed.py", "//etc/passwd", "/index.html/..", "/."):
            assert get(server, path, Cookie=cookie)[0] == 404
        assert get(server, "/?" + "&".join("abcdefghij"), Cookie=cookie)[0] == 400
        for method in ("POST", "PUT", "DELETE", "BREW"):
            status, headers, body = get(server, "/<script>", method, Cookie=cookie)
            assert status == 501 and b"script" not in body and "default-src 'none'" in headers["content-security-policy"]
        for file in FILES.iterdir():
            status, headers, body = get(server, f"/{file.name}", Cookie=cookie)
            assert (status, body) == (200, file.read_bytes())
            assert "unsafe" not in headers["content-security-policy"] and headers["x-content-type-options"] == "nosniff"
        assert get(server, "/", "HEAD", Cookie=cookie)[2] == b""


def test_the_page_is_of_this_package_alone_and_sets_no_markup() -> None:
    for file in FILES.iterdir():
        text = file.read_text()
        others = [url for url in re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text) if url != "http://www.w3.org"]  # a name
        assert not others, f"{file.name} names {others}"
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
            assert word not in text, f"{file.name} has {word}"


def test_keys_are_forgotten_when_there_are_many() -> None:
    keys = PageKeys()
    first = keys.exchange(keys.key)
    assert keys.admits(first) and not keys.admits("") and not keys.exchange("") and not keys.exchange("ü")
    for _ in range(MAX_BROWSERS):
        keys.exchange(keys.key)
    assert not keys.admits(first)


def test_nobody_is_observed_while_no_page_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "LINGER_SECONDS", 0.0)
    opened = []
    stream = SyntheticStream(2, 4)

    def connect(log: bool) -> Any:
        opened.append(log)
        return stream

    with page(connect) as (server, _):
        assert not opened
        first = server.feed.open(log=True)
        assert dict(server.feed.events(first) or []) == {"log": {"lines": [], "missed": 0}, "problem": ""}
        stream.release()
        events = dict(server.feed.events(first) or [])
        assert opened == [True] and {"history", "state", "schedule", "layouts", "log", "problem"} <= set(events)
        server.feed.leave(first)
        stream.release()  # what it waits for: then it sees that nobody looks
        second = server.feed.open()
        events = dict(server.feed.events(second) or [])
        while "state" not in events:
            stream.release()
            events = dict(server.feed.events(second) or [])
        assert "log" not in events


def test_a_link_that_cannot_be_made_is_a_problem_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "RETRY_SECONDS", 0.0)
    stream, tries = SyntheticStream(2, 4), iter([OSError(24, "Too many open files"), None])

    def connect(log: bool) -> SyntheticStream:
        if (error := next(tries)) is not None:
            raise error
        return stream

    feed = Feed(connect)
    try:
        opened, told = feed.open(), []
        stream.release(2)
        while "state" not in [name for name, _ in told]:
            told += feed.events(opened) or []
        assert not [text for name, text in told[-1:] if name == "problem" and text]
    finally:
        feed.close()


def test_a_fault_of_the_dashboard_is_a_problem_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread ended, and pages showed the last state for ever."""
    monkeypatch.setattr(feed_module, "RETRY_SECONDS", 0.0)
    stream, tries = SyntheticStream(2, 4), iter([KeyError("sessions"), KeyError("sessions")])

    def connect(log: bool) -> SyntheticStream:
        if (error := next(tries, None)) is not None:
            raise error
        return stream

    feed = Feed(connect)
    try:
        opened = feed.open()
        while not (problem := dict(feed.events(opened) or [])["problem"]):
            pass
        assert problem == "the dashboard has failed: KeyError: 'sessions'"
        stream.release(2)
        while "state" not in (told := dict(feed.events(opened) or [])):
            pass
        assert told["problem"] == "" and len(caplog.records) == 1, "it is logged once"
    finally:
        feed.close()


@pytest.mark.parametrize("error", [BrokenPipeError, KeyboardInterrupt])
def test_a_dashboard_that_cannot_tell_its_link_ends_with_its_threads(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of its HTTP server went on, and so did the process."""
    command = importlib.import_module("gt.cli.dashboard")  # gt.cli has a function of this name
    before = threading.enumerate()

    def gone(link: str) -> None:
        raise error

    monkeypatch.setattr(command, "_tell", gone)
    monkeypatch.setattr(command.signal, "signal", lambda number, handler: None)
    with pytest.raises(error):
        command._serve(argparse.Namespace(host="127.0.0.1", port=0, interval=1.0, always=False), "127.0.0.1:1", "")
    assert threading.enumerate() == before


def test_another_server_in_the_place_of_the_first_tells_all_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sessions have the same numbers, and so have its layouts and replays."""
    monkeypatch.setattr(feed_module, "RETRY_SECONDS", 0.0)
    streams = [SyntheticStream(2, 4), SyntheticStream(2, 4, name="second-{}")]
    waiting = iter(streams)
    with page(lambda log: next(waiting)) as (server, _):
        shown = server.feed.open()
        server.feed.events(shown)
        streams[0].release()
        assert {"schedule", "layouts"} <= dict(server.feed.events(shown) or []).keys()
        streams[0].fail("it was stopped")
        events: dict[str, Any] = {}
        streams[1].release()
        while "state" not in events or not events["state"]["workers"][0]["name"].startswith("second"):
            events = dict(server.feed.events(shown) or [])
        assert events["layouts"]["tensors"][0][0].startswith("second") and "schedule" in events and "history" in events
        streams[1].stop()


def test_a_page_that_asks_while_the_link_is_made_anew_has_the_second_servers_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The problem is an event of its own, beside the last state of the first server."""
    monkeypatch.setattr(feed_module, "RETRY_SECONDS", 0.0)
    first, second, asked = SyntheticStream(2, 4), SyntheticStream(2, 4, name="second-{}"), threading.Event()
    waiting, take = iter([first, second]), second.next

    def asking() -> list[Record]:
        asked.set()
        return take()

    second.next = asking  # type: ignore[method-assign]
    with page(lambda log: next(waiting)) as (server, _):
        shown = server.feed.open()
        server.feed.events(shown)
        first.release()
        server.feed.events(shown)
        first.fail("it was stopped")
        assert asked.wait(limit(20))
        shown.version = -1  # as a page that was slower than the link
        server.feed.events(shown)
        second.release()
        events: dict[str, Any] = {}
        while "state" not in events or not events["state"]["workers"][0]["name"].startswith("second"):
            events = dict(server.feed.events(shown) or [])
        assert events["layouts"]["tensors"][0][0].startswith("second") and "schedule" in events
        second.stop()


def test_a_page_that_asks_seldom_misses_no_sample() -> None:
    with synthetic(stages=2, micro_batches=4) as (server, _, stream):
        shown, other = server.feed.open(), server.feed.open()
        stream.release()
        while "state" not in (events := dict(server.feed.events(shown) or [])):
            continue
        told = [sample["at"] for sample in events["history"]]
        for moment in range(2, 6):
            stream.release()
            while dict(server.feed.events(other) or []).get("state", {"server": {"at": 0}})["server"]["at"] < moment:
                continue
        told += [sample["at"] for sample in dict(server.feed.events(shown) or [])["sample"]]
        assert told == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_page_has_the_whole_of_a_replay_that_was_met_before_its_end() -> None:
    """Records of one replay, of which the first lack a worker's last actions."""
    stream = SyntheticStream(2, 4)
    with page(lambda log: stream) as (server, _):
        shown, whole = server.feed.open(), stream._schedule(1)
        rows = {name: actions[:-2] for name, actions in whole.actions.items()}
        parts = [replace(whole, actions=rows, measured={**whole.measured, "makespan": 0.1}), whole]
        stream._schedule = lambda moment: parts[moment - 1]  # type: ignore[method-assign]
        for part in parts:
            stream.release()
            while "schedule" not in (events := dict(server.feed.events(shown) or [])):
                continue
            assert [len(actions) for actions in events["schedule"]["actions"].values()] == [*map(len, part.actions.values())]


def test_figures_are_those_of_stats() -> None:
    with serving(2) as served:
        gt.connect(served.address, name=False, config="")
        with page(lambda log: RecordStream(served.address, "", 0.5)) as (server, _):
            shown = server.feed.open(log=True)
            assert server.feed.events(shown)
            model = torch.nn.Linear(16, 16).to(gt.device)
            model(torch.ones(8, 16, device=gt.device)).sum().item()
            stats = settled()
            want = [(w["name"], w["instructions"], w["live_bytes"], w["live_tensors"]) for w in stats["workers"]]
            for _ in range(20):
                events = server.feed.events(shown) or []
                state = next((data for name, data in events if name == "state"), None)
                if (
                    state
                    and [(w["name"], w["instructions"], w["live_bytes"], w["live_tensors"]) for w in state["workers"]] == want
                ):
                    break
            else:
                raise AssertionError(f"the page never had {want}, it has {state}")
            (session,) = state["sessions"]
            assert session["ops"] == stats["dispatcher"]["ops_planned"]
            assert session["uploaded"] == stats["dispatcher"]["tensor_bytes_uploaded"]
            assert session["fetched"] == stats["dispatcher"]["tensor_bytes_fetched"]
            for name, data in events:
                assert b"\n" not in encoded((name, data))[:-2].partition(b"\ndata: ")[2]
        gt.shutdown()


def test_the_past_is_bounded_and_keeps_every_peak() -> None:
    view, history, stream = LiveView(), History(), SyntheticStream(2, 4)
    state = view.update(stream.records(1))
    highest: dict[str, int] = {}
    for moment in range(1, 5 * MAX_SAMPLES):
        state = view.update(stream.records(moment))
        if moment == 700:
            state["workers"][0]["live_bytes"] = 1 << 30
        for worker in state["workers"]:
            highest[worker["name"]] = max(highest.get(worker["name"], 0), worker["live_bytes"])
        history.add(state)
        assert len(history.samples) <= MAX_SAMPLES
    assert {name: peak["bytes"] for name, peak in history.peaks.items()} == highest
    assert max(sample["workers"]["w0"]["live"] for sample in history.samples) == 1 << 30
    assert history.peaks["w1"]["current"]["op"] == "aten.mm.default"
    times = [sample["at"] for sample in history.samples]
    assert times == sorted(times) and times[-1] > 5 * MAX_SAMPLES - 20
    history.add({**state, "server": {"at": times[-1] + 1, "life": "second"}})  # another server, although its age is more
    assert len(history.samples) == 1


def test_predicted_actions_are_beside_the_measured_ones() -> None:
    predicted, view = PredictedSchedules(), LiveView()
    (session,) = view.update(SyntheticStream(4, 8).records(1))["sessions"]
    shown = predicted.beside(0, session["schedule"])
    assert shown["actions"].keys() == shown["planned"].keys() == {"w0", "w1", "w2", "w3"}
    for name, ran in shown["actions"].items():
        assert [action for action, _, _ in ran] == [action for action, _, _ in shown["planned"][name]]
    first = min(start for ran in shown["actions"].values() for _, start, _ in ran)
    assert first == 0
    ends = [max(end for ran in rows.values() for _, _, end in ran) for rows in (shown["actions"], shown["planned"])]
    assert ends[1] == pytest.approx(ends[0], rel=0.1)
    broken = {**session["schedule"], "rows": "no rows"}
    assert predicted.beside(0, broken)["planned"] == predicted.beside(0, {**broken, "rows": ""})["planned"] == {}
    endless = {**session["schedule"], "actions": {"w0": [["0F0", 0.0, float("inf")]]}}
    json.dumps(predicted.beside(0, endless), allow_nan=False)


# ---- strangers at its port: they keep nobody out, and cost little

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


def stranger_to(server: BoundedServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), limit(20))


def ends(stranger: socket.socket) -> bool:
    """Waits for the end of a connection that has no answer."""
    with contextlib.suppress(ConnectionResetError):
        return stranger.recv(1) == b""
    return True


def test_silent_connections_keep_no_browser_out() -> None:
    with synthetic() as (server, links, _), contextlib.ExitStack() as opened:
        strangers = [opened.enter_context(contextlib.closing(stranger_to(server))) for _ in range(2 * MAX_CONNECTIONS)]
        cookie, _ = enter(server, links[0])
        assert get(server, "/", Cookie=cookie)[0] == 200
        assert ends(strangers[0])  # the oldest has made room


def test_a_request_that_arrives_byte_by_byte_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_server, "REQUEST_SECONDS", 0.2)
    with synthetic() as (server, _, _), stranger_to(server) as stranger:
        stranger.settimeout(0.01)
        stranger.sendall(REQUEST + b"X: ")
        until = time.monotonic() + limit(8)  # a handler's own time limit is for each byte
        over = False
        while not over and time.monotonic() < until:
            try:
                stranger.sendall(b"x")
                over = stranger.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                over = True
        assert over


def test_a_page_that_is_open_has_no_deadline_and_is_not_put_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_server, "REQUEST_SECONDS", 0.0)
    with synthetic() as (server, links, stream), contextlib.ExitStack() as opened:
        monkeypatch.setattr(server, "service_actions", lambda: None)
        cookie, proof = enter(server, links[0])
        reader = opened.enter_context(stranger_to(server))
        reader.sendall(
            b"GET /events?proof=" + proof.encode() + b" HTTP/1.1\r\nHost: localhost\r\nCookie: " + cookie.encode() + b"\r\n\r\n"
        )
        answer = opened.enter_context(reader.makefile("rb"))
        assert b"200" in answer.readline()
        stream.release(1)
        while not answer.readline().startswith(b"event: state"):
            continue
        monkeypatch.undo()
        for _ in range(2 * MAX_CONNECTIONS):
            opened.enter_context(stranger_to(server))
        server.service_actions()
        stream.release(1)
        while not answer.readline().startswith(b"event: state"):
            continue


def test_pages_that_read_nothing_shut_no_other_browser_out() -> None:
    with synthetic() as (server, links, stream), contextlib.ExitStack() as opened:
        cookies = [enter(server, links[-1]) for _ in range(4)]

        def events(cookie: str, proof: str) -> socket.socket:
            reader = opened.enter_context(contextlib.closing(stranger_to(server)))
            reader.sendall(f"GET /events?proof={proof} HTTP/1.1\r\nHost: localhost\r\nCookie: {cookie}\r\n\r\n".encode())
            assert reader.recv(12) == b"HTTP/1.0 200"  # the stream has begun, or will be ended
            return reader

        honest = events(*cookies[0])
        for cookie in cookies[1:]:
            for _ in range(MAX_CONNECTIONS):
                events(*cookie)
        assert get(server, "/", Cookie=cookies[0][0])[0] == 200
        answer = opened.enter_context(honest.makefile("rb"))
        stream.release()
        while not answer.readline().startswith(b"event: state"):
            continue


def test_a_request_of_many_large_headers_is_not_read() -> None:
    with synthetic() as (server, _, _), stranger_to(server) as stranger:
        stranger.sendall(REQUEST)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for number in range(8):
                stranger.sendall(f"X-{number}: {'x' * (MAX_REQUEST_BYTES // 4)}\r\n".encode())
            stranger.sendall(b"\r\n")
        assert ends(stranger)


def test_a_cookie_of_quotes_costs_nothing() -> None:
    with synthetic() as (server, _, _):
        before = time.process_time()
        assert get(server, "/", Cookie='a="' + '\\"' * 30_000 + '"')[0] == 403
        assert time.process_time() - before < limit(2)


def test_a_content_type_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes 8 s of CPU time for this one."""
    read: list[int] = []
    monkeypatch.setattr(http.client.HTTPMessage, "get_boundary", lambda *_: read.append(1))
    with synthetic() as (server, _, _):
        assert get(server, "/", Content_Type="multipart/x" + ';"' + ";" * 60_000)[0] == 403
    assert not read


def test_requests_that_a_library_takes_amiss_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    class Handler(BoundedHandler):
        def do_GET(self) -> None:
            raise ValueError("as urllib's for http://[")

    server = BoundedServer("127.0.0.1", 0, Handler, "test-http")
    try:
        for _ in range(2 * MAX_ERRORS_LOGGED):
            with stranger_to(server) as stranger:
                stranger.sendall(b"GET http://[ HTTP/1.0\r\n\r\n")
                assert ends(stranger)
    finally:
        server.close()
    assert len(caplog.records) == MAX_ERRORS_LOGGED


def test_names_of_this_machine() -> None:
    assert names_this(f"{socket.gethostname().upper()}:9471", "0.0.0.0")
    with page(lambda log: None, host="0.0.0.0") as (server, links):
        address, _, query = links[0].removeprefix("http://").partition("/")
        assert get(server, f"/{query}", Host=address)[0] == 200
