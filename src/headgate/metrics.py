"""Metrics: what this process has counted, for those who watch it.

Owns: the ways out: a plain dict, prometheus-client, opentelemetry-api. Does not own: the counting
(meters). All names, with their labels, are in ``docs/metrics.md``.

    >>> import headgate as hg
    >>> hg.metrics.snapshot()["headgate_puts_total"]
    [{'labels': {'table': '/data/orders', 'shard': '0000'}, 'value': 3}]

Nothing is exported unless one of these is called, and none of them reads a store: the state of a shard
(lag, runs, consumers) is as the writers of this process know it, or as ``table.status()`` last saw it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from headgate import meters
from headgate.errors import InvalidInputError

PREFIX = "headgate_"

_BOUNDS = [*(f"{bound:g}" for bound in meters.SECONDS), "+Inf"]


@dataclass(frozen=True, slots=True)
class Metric:
    """What a name means."""

    name: str
    """As it is exported; of a histogram without ``_bucket``, ``_sum`` and ``_count``."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]


def catalogue() -> list[Metric]:
    """Every metric there is, whether or not anything was counted."""
    return [Metric(_name(one), one.kind, one.help, one.labels) for one in meters.INSTRUMENTS]


def _name(instrument: meters.Instrument) -> str:
    return f"{PREFIX}{instrument.name}{'_total' if instrument.kind == 'counter' else ''}"


def snapshot() -> dict[str, list[dict[str, Any]]]:
    """All numbers of this process as of now: name -> one dict for each set of labels, with ``labels`` and ``value``.

    Histograms have ``count``, ``sum`` (seconds) and ``buckets`` instead: how many took no longer than each bound.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for numbers in (meters.read_counters(), meters.read_gauges()):
        for instrument, series in numbers.items():
            found[_name(instrument)] = [
                {"labels": dict(zip(instrument.labels, labels, strict=True)), "value": value} for labels, value in sorted(series.items())
            ]
    for histogram, parts in meters.read_histograms().items():
        found[_name(histogram)] = [
            {
                "labels": dict(zip(histogram.labels, labels, strict=True)),
                "count": sum(buckets.counts),
                "sum": buckets.sum,
                "buckets": dict(zip(_BOUNDS, accumulate(buckets.counts), strict=True)),
            }
            for labels, buckets in sorted(parts.items())
        ]
    return found


# -- prometheus-client


def prometheus_collector() -> Any:
    """A collector for a registry of prometheus-client.

    Raises:
        InvalidInputError: prometheus-client is not installed.
    """
    try:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
        from prometheus_client.registry import Collector
    except ImportError:
        raise _missing("prometheus-client") from None

    class HeadgateCollector(Collector):
        def describe(self) -> Iterator[Any]:
            """The names alone: registering asks nobody for numbers."""
            makers = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
            for metric in catalogue():
                yield makers[metric.kind](metric.name, metric.help, labels=metric.labels)

        def collect(self) -> Iterator[Any]:
            for counter, series in meters.read_counters().items():
                family = CounterMetricFamily(_name(counter), counter.help, labels=counter.labels)
                for labels, value in series.items():
                    family.add_metric(labels, value)
                yield family
            for gauge, series in meters.read_gauges().items():
                shown = GaugeMetricFamily(_name(gauge), gauge.help, labels=gauge.labels)
                for labels, value in series.items():
                    shown.add_metric(labels, value)
                yield shown
            for histogram, parts in meters.read_histograms().items():
                timed = HistogramMetricFamily(_name(histogram), histogram.help, labels=histogram.labels)
                for labels, buckets in parts.items():
                    timed.add_metric(labels, list(zip(_BOUNDS, accumulate(buckets.counts), strict=True)), buckets.sum)
                yield timed

    return HeadgateCollector()


def register_prometheus(registry: Any = None) -> Any:
    """Export through a registry of prometheus-client; None: its default one. Returns the collector, for ``unregister``.

    Example:
        >>> hg.metrics.register_prometheus()
        >>> prometheus_client.start_http_server(9100)
    """
    collector = prometheus_collector()
    if registry is None:
        from prometheus_client import REGISTRY

        registry = REGISTRY
    registry.register(collector)
    return collector


def serve(port: int, address: str = "127.0.0.1") -> Callable[[], None]:
    """Answer Prometheus on a port of this machine, from a thread. Returns what stops it.

    Raises:
        InvalidInputError: prometheus-client is not installed.
    """
    collector = prometheus_collector()
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(collector)
    server, thread = start_http_server(port, address, registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


# -- opentelemetry-api


def register_opentelemetry(meter_provider: Any = None) -> None:
    """Export through observable instruments of OpenTelemetry, by the provider or the global one.

    OpenTelemetry has no histogram that is observed, so each is three counters: ``…_bucket`` with an attribute
    ``le`` (how many took no longer), ``…_sum`` and ``…_count``.

    Raises:
        InvalidInputError: opentelemetry-api is not installed.
    """
    try:
        from opentelemetry.metrics import CallbackOptions, Observation, get_meter_provider
    except ImportError:
        raise _missing("opentelemetry-api") from None
    meter = (meter_provider or get_meter_provider()).get_meter("headgate")

    def observed(instrument: meters.Instrument, read: Callable[[], Any], part: Callable[[Any], Any] = lambda value: value) -> Any:
        def callback(options: CallbackOptions) -> Iterator[Observation]:
            for labels, value in read()[instrument].items():
                yield Observation(part(value), dict(zip(instrument.labels, labels, strict=True)))

        return [callback]

    def in_buckets(instrument: meters.Histogram) -> Any:
        def callback(options: CallbackOptions) -> Iterator[Observation]:
            for labels, buckets in meters.read_histograms()[instrument].items():
                about = dict(zip(instrument.labels, labels, strict=True))
                for bound, count in zip(_BOUNDS, accumulate(buckets.counts), strict=True):
                    yield Observation(count, {**about, "le": bound})

        return [callback]

    for one in meters.INSTRUMENTS:
        name = _name(one)
        if isinstance(one, meters.Counter):
            meter.create_observable_counter(name, observed(one, meters.read_counters), description=one.help)
        elif isinstance(one, meters.Gauge):
            meter.create_observable_gauge(name, observed(one, meters.read_gauges), description=one.help)
        elif isinstance(one, meters.Histogram):
            read = meters.read_histograms
            meter.create_observable_counter(f"{name}_bucket", in_buckets(one), description=one.help)
            meter.create_observable_counter(f"{name}_sum", observed(one, read, lambda b: b.sum), "s", one.help)
            meter.create_observable_counter(f"{name}_count", observed(one, read, lambda b: sum(b.counts)), description=one.help)


def _missing(package: str) -> InvalidInputError:
    return InvalidInputError(f"{package} is not installed", hint="pip install 'headgate[metrics]'")
