"""Renders the table of `metrics` when it is scraped: own registry, one collector, nothing counted twice.

Called on the event loop; it reads plain integers that other threads add to, and never waits for the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from expertd.telemetry import readings
from expertd.telemetry.metrics import METRICS, Metric, Scrape
from expertd.telemetry.snapshot import HistogramData, Snapshot
from expertd.telemetry.verdict import Verdict


class ExpertdCollector(Collector):
    """`snapshot` is asked at each scrape, `verdict` gives the last one reached."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        verdict: Callable[[], Verdict],
        kernel: Callable[[], readings.Readings] = readings.take,
    ) -> None:
        self._snapshot, self._verdict, self._kernel = snapshot, verdict, kernel

    def describe(self) -> Iterable[Family]:
        """Nothing: the registry would else collect once at registration, when there is nothing to ask yet."""
        return ()

    def collect(self) -> Iterator[Family]:
        scrape = Scrape(self._snapshot(), self._kernel(), self._verdict())
        for metric in METRICS:
            yield _family(metric, scrape)


class Exporter:
    """The registry of one daemon; `render` is what /metrics answers."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, collector: ExpertdCollector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)


def _family(metric: Metric, scrape: Scrape) -> Family:
    if metric.histogram is not None:
        return _histogram(metric, metric.histogram(scrape))
    family: CounterMetricFamily | GaugeMetricFamily
    if metric.kind == "counter":
        family = CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
    else:
        family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    assert metric.samples is not None
    for labels, value in metric.samples(scrape):
        family.add_metric(labels, float(value))
    return family


def _histogram(metric: Metric, data: HistogramData) -> Family:
    family = HistogramMetricFamily(metric.name, metric.help, labels=())
    names = [*(f"{bound:g}" for bound in data.bounds), "+Inf"]
    family.add_metric((), list(zip(names, map(float, accumulate(data.counts)), strict=True)), sum_value=data.total)
    return family
