"""`gt metrics [HOST:PORT] --port N`: metrics of a running server over HTTP, for Prometheus. `gt server --metrics N` runs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from gt.cli import observing
from gt.launch.process import die_with_parent
from gt.observe.live_view import LiveView
from gt.observe.prometheus import COUNTER, samples
from gt.observe.record_stream import RecordStream

NO_CLIENT = "gt metrics: prometheus_client is not installed: pip install 'gt-torch[observe]'"
INTERVAL = 1.0  # seconds between two Records


def main(args: list[str], text: str) -> int:
    """Exit code: 0 once interrupted, 1 if the server cannot be observed, or its link has ended."""
    given = _parser(text).parse_args(args)
    if given.parent:
        die_with_parent(given.parent)
    try:
        import prometheus_client  # noqa: F401 - an extra
    except ImportError:
        sys.stderr.write(NO_CLIENT + "\n")
        return 1
    return observing.observe("gt metrics", given, INTERVAL, lambda stream: _serve(stream, given))


def _serve(stream: RecordStream, given: argparse.Namespace) -> int:
    """Serve the newest state until it is interrupted, or the link ends."""
    import prometheus_client

    collector = StateCollector()
    collector.state = collector.view.update(stream.next())
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(collector)
    server, thread = prometheus_client.start_http_server(given.port, given.host, registry)
    try:
        print(f"gt metrics: http://{given.host}:{server.server_port}/metrics", flush=True)
        while True:
            collector.state = collector.view.update(stream.next())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _parser(text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gt metrics", description=text)
    observing.add_options(parser)
    option = parser.add_argument
    option("--port", type=int, default=9470, help="port of the HTTP server, 0 for a free one; default: 9470")
    option("--host", default="127.0.0.1", help="address of the HTTP server, which asks for no token; default: 127.0.0.1")
    option("--parent", type=int, default=0, help=argparse.SUPPRESS)  # process that this one ends with
    return parser


class StateCollector:
    """A collector of prometheus_client: the metrics of the newest state."""

    def __init__(self) -> None:
        self.view = LiveView()
        self.state: dict[str, Any] = {}

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for metric, labels, value in samples(self.state):
            if metric.name not in families:
                family = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
                families[metric.name] = family(metric.name, metric.help, labels=[label for label, _ in metric.labels])
            families[metric.name].add_metric(labels, value)
        yield from families.values()
