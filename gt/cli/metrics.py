"""`gt metrics [HOST:PORT] --port N`: metrics of a running server over HTTP, for Prometheus. `gt server --metrics N` runs it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

from gt.cli import observing
from gt.errors import ConfigError, GTError
from gt.observe.bounded_server import LOOPBACK, BoundedHandler, BoundedServer, names_this
from gt.observe.live_view import LiveView
from gt.observe.prometheus import COUNTER, samples
from gt.observe.record_stream import RecordStream
from gt.wire.process_settings import die_with_parent
from gt.wire.records import Record
from gt.wire.socket import port, written

NO_CLIENT = "gt metrics: prometheus_client is not installed: pip install prometheus-client"
INTERVAL_SECONDS = 1.0  # seconds between two Records
RETRY_SECONDS = 2.0  # after the link has ended


def main(args: list[str], text: str) -> int:
    """Exit code: 0 once interrupted, 1 if the server cannot be observed at first, or the port cannot be had."""
    given = _parser(text).parse_args(args)
    if given.parent:
        die_with_parent(given.parent)
    try:
        import prometheus_client  # noqa: F401 - an extra
    except ImportError:
        sys.stderr.write(NO_CLIENT + "\n")
        return 1
    return observing.observe("gt metrics", given, INTERVAL_SECONDS, lambda stream: _serve(stream, given))


def _serve(stream: RecordStream, given: argparse.Namespace) -> int:
    """Serve the newest state until it is interrupted. A link that ends is made again: servers are restarted."""
    collector, losses = StateCollector(), Losses()
    collector.take(stream.next())
    try:
        server = BoundedServer(given.host, given.port, _handler(collector, given.host), "gt-metrics-http")
    except OSError as error:
        raise ConfigError(f"{given.host}:{given.port} cannot be served: {error.strerror}; try --port 0") from None
    try:
        print(f"gt metrics: http://{written(given.host, server.server_port)}/metrics", flush=True)
        while True:
            try:
                while True:
                    collector.take(stream.next())
                    losses.end()
            except GTError as error:
                collector.lose()
                why = str(error)
            stream.close()
            stream = _again(stream.address, given, why, losses)
    finally:
        stream.close()
        server.close()


def _again(address: str, given: argparse.Namespace, why: str, losses: Losses) -> RecordStream:
    """A stream of the server at this address, once there is one. why: the last ended."""
    while True:
        time.sleep(RETRY_SECONDS)  # the end of the server's own process ends this one meanwhile
        losses.tell(why)
        try:
            return RecordStream(address, observing.token(given.token_file), INTERVAL_SECONDS)
        except (GTError, OSError) as error:
            why = str(error)


class Losses:
    """Tells why the server cannot be observed, each reason that differs from the last one."""

    def __init__(self) -> None:
        self._told = ""

    def tell(self, why: str) -> None:
        if why != self._told:
            sys.stderr.write(f"gt metrics: {why}; it tries again, and serves gt_server_up 0 meanwhile\n")
            self._told = why

    def end(self) -> None:
        """The server has answered."""
        self._told = ""


def _handler(collector: StateCollector, host: str) -> type[BoundedHandler]:
    """The handler of requests. On loopback it answers to this machine's names alone: pages of other sites read nothing."""
    from prometheus_client import CollectorRegistry, MetricsHandler

    class Handler(BoundedHandler, MetricsHandler):
        registry = CollectorRegistry(auto_describe=False)

        def do_GET(self) -> None:
            if host in LOOPBACK and not names_this(self.headers.get("Host", ""), host):
                self.send_error(421, "this server has another name")
            else:
                try:
                    MetricsHandler.do_GET(self)
                except ValueError:  # it parses the address before it answers
                    self.send_error(400)

    Handler.registry.register(collector)
    return Handler


def _parser(text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gt metrics", description=text)
    observing.add_options(parser)
    option = parser.add_argument
    option("--port", type=port, default=9470, help="port of the HTTP server, 0 for a free one; default: 9470")
    option("--host", default="127.0.0.1", help="address of the HTTP server, which asks for no token; default: 127.0.0.1")
    option("--parent", type=int, default=0, help=argparse.SUPPRESS)  # process that this one ends with
    return parser


class StateCollector:
    """A collector of prometheus_client: the metrics of the newest state."""

    def __init__(self) -> None:
        self._view = LiveView()
        self._state: dict[str, Any] = {}

    def lose(self) -> None:
        """The server does not answer."""
        self._view, self._state = LiveView(), {}

    def take(self, records: list[Record]) -> None:
        self._state = self._view.update(records)

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for metric, labels, value in samples(self._state):
            if metric.name not in families:
                family = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
                families[metric.name] = family(metric.name, metric.help, labels=[label for label, _ in metric.labels])
            families[metric.name].add_metric(labels, value)
        yield from families.values()
