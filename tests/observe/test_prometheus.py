"""Metrics for Prometheus: the table, the endpoint beside a server, and the names on the Grafana board."""

from __future__ import annotations

import json
import re
import sys
from urllib.request import urlopen

import pytest

from gt.cli.metrics import main
from gt.observe.live_view import LiveView
from gt.observe.prometheus import COUNTER, LOGGED, METRICS, QUEUE, STATES, samples
from tests.cli.test_top import moment
from tests.helpers import ROOT
from tests.launch.test_server import running


def test_samples_are_the_states_figures() -> None:
    state = LiveView().update(moment(1.0))
    found = {(metric.name, labels): value for metric, labels, value in samples(state)}
    assert found["gt_worker_live_bytes", ("w1", "a-host-with-a-name")] == 2 << 20
    assert found["gt_session_logged", ("3", "ada", "train.py", "loss")] == 0.5
    assert found["gt_link_sent_bytes", ("w0", "w1")] == 1 << 20 and found["gt_queue_clients", ()] == 1
    assert found["gt_worker_state", ("w0", "a-host-with-a-name", "busy")] == 1
    assert {name for name, _ in found} == {metric.name for metric in (*METRICS, STATES, LOGGED, QUEUE)}


def test_a_worker_that_has_told_nothing_has_no_figures() -> None:
    state = LiveView().update(moment(1.0))
    state["workers"][0]["age"] = -1.0
    names = [metric.name for metric, labels, _ in samples(state) if labels[:1] == ("w0",)]
    assert set(names) == {"gt_worker_state", "gt_link_sent_bytes"}


def test_the_board_shows_metrics_that_exist() -> None:
    board = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    known = {m.name + ("_total" if m.kind == COUNTER else "") for m in (*METRICS, STATES, LOGGED, QUEUE)}
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(shown) > 5 and {name for expr in shown for name in re.findall(r"gt_\w+", expr)} <= known


def test_without_the_client_it_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(["127.0.0.1:1"], "") == 1
    assert "pip install 'gt-torch[observe]'" in capsys.readouterr().err


def test_a_server_serves_its_metrics() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    with running("--metrics", "0") as (process, _):
        line = process.stdout.readline()
        url = re.search(r"http://\S+", line)
        assert url is not None, line
        text = urlopen(url[0], timeout=20).read().decode()
    assert re.search(r"^gt_server_messages_sent_total \d", text, re.M) and "# TYPE gt_queue_clients gauge" in text
