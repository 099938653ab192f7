"""Metrics for Prometheus: the table, the endpoint beside a server, and the names on the Grafana board."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import socket
import sys
import threading
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from gt.cli.metrics import main
from gt.errors import GTError
from gt.observe.live_view import LiveView
from gt.observe.prometheus import COUNTER, LOGGED, METRICS, QUEUE, STATES, UP, samples
from tests.cli.test_top import moment
from tests.helpers import ROOT
from tests.helpers.limits import limit
from tests.launch.test_server import running
from tests.observe.synthetic_records import SyntheticStream


def test_samples_are_the_states_figures() -> None:
    state = LiveView().update(moment(1.0))
    found = {(metric.name, labels): value for metric, labels, value in samples(state)}
    assert found["gt_worker_live_bytes", ("w1", "a-host-with-a-name")] == 2 << 20
    assert found["gt_session_logged", ("3", "ada", "train.py", "loss")] == 0.5
    assert found["gt_link_sent_bytes", ("w0", "w1")] == 1 << 20 and found["gt_queue_clients", ()] == 1
    assert found["gt_worker_state", ("w0", "a-host-with-a-name", "busy")] == 1
    assert {name for name, _ in found} == {metric.name for metric in (*METRICS, STATES, LOGGED, QUEUE, UP)}


def test_a_worker_that_has_told_nothing_has_no_figures() -> None:
    state = LiveView().update(moment(1.0))
    state["workers"][0]["age"] = -1.0
    names = [metric.name for metric, labels, _ in samples(state) if labels[:1] == ("w0",)]
    assert set(names) == {"gt_worker_state", "gt_link_sent_bytes"}


def test_the_board_shows_metrics_that_exist() -> None:
    board = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    known = {m.name + ("_total" if m.kind == COUNTER else "") for m in (*METRICS, STATES, LOGGED, QUEUE, UP)}
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(shown) > 5 and {name for expr in shown for name in re.findall(r"gt_\w+", expr)} <= known


def test_without_the_client_it_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(["127.0.0.1:1"], "") == 1
    assert "pip install prometheus-client" in capsys.readouterr().err


def test_a_server_serves_its_metrics() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    with running("--metrics", "0") as (process, _):
        line = process.stdout.readline()
        url = re.search(r"http://\S+", line)
        assert url is not None, line
        text = urlopen(url[0], timeout=limit(20)).read().decode()
    assert re.search(r"^gt_server_messages_sent_total \d", text, re.M) and "# TYPE gt_queue_clients gauge" in text
    assert re.search(r"^gt_server_up 1", text, re.M)


def test_each_reason_for_which_a_server_cannot_be_observed_is_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first were dropped, such as a token that has changed."""
    metrics = importlib.import_module("gt.cli.metrics")
    stream = SyntheticStream(1, 1)
    attempts = iter([GTError("it is gone"), GTError("another token"), OSError("no descriptor"), stream, stream])

    def connect(*about: Any) -> SyntheticStream:
        result = next(attempts)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(metrics, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(metrics, "RecordStream", connect)
    losses, given = metrics.Losses(), argparse.Namespace(token_file=None)
    assert metrics._again("127.0.0.1:1", given, "it is gone", losses) is stream
    losses.end()
    metrics._again("127.0.0.1:1", given, "no descriptor", losses)
    told = re.findall(r"gt metrics: (.*); it tries again", capsys.readouterr().err)
    assert told == ["it is gone", "another token", "no descriptor", "no descriptor"]


def test_a_server_that_is_restarted_is_observed_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    metrics = importlib.import_module("gt.cli.metrics")  # gt.cli has a function of this name
    first, second, ended = SyntheticStream(2, 4), SyntheticStream(3, 4), threading.Event()
    told, again = threading.Event(), threading.Event()

    def restarted(*about: Any) -> SyntheticStream:
        if ended.is_set():
            raise KeyboardInterrupt
        again.wait()
        return second

    monkeypatch.setattr(metrics, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(metrics, "RecordStream", restarted)
    monkeypatch.setattr("builtins.print", lambda text, flush: (lines.append(text), told.set()))
    lines: list[str] = []
    given = argparse.Namespace(host="127.0.0.1", port=0, token_file=None)

    def serve() -> None:
        with pytest.raises(KeyboardInterrupt):
            metrics._serve(first, given)

    first.release(1)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        told.wait()
        url = lines[0].split()[-1]
        assert 'gt_worker_live_bytes{host="a-host",worker="w1"}' in read(url)
        with pytest.raises(HTTPError, match="421"):
            urlopen(Request(url, headers={"Host": "evil.example"}), timeout=limit(20))
        assert b" 400 " in answer(url, "http://[/")
        first.fail("the server at 127.0.0.1:1 has ended the connection: it was told to stop")
        while "\ngt_server_up 1" in (text := read(url)):
            continue
        assert re.findall(r"^gt_\w+", text, re.M) == ["gt_server_up"]
        again.set()
        second.release(2)
        while "\ngt_server_up 0" in (text := read(url)):
            continue
        assert 'worker="w2"' in text
    finally:
        ended.set()
        again.set()
        second.stop()
        thread.join()
    assert "ended the connection" in capsys.readouterr().err


def answer(url: str, target: str) -> bytes:
    """The first line of the answer to a target that is no address."""
    host, _, port = url.split("/")[2].partition(":")
    with socket.create_connection((host, int(port)), limit(20)) as sock, sock.makefile("rb") as answers:
        sock.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        return answers.readline()


def read(url: str) -> str:
    return urlopen(url, timeout=limit(20)).read().decode()
