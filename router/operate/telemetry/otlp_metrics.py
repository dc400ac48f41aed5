"""The metrics of `/metrics` in OpenTelemetry's data model, from the same registry.

Names and attributes are those of `/metrics`, without `_total`, except where the GenAI conventions have a name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.samples import Exemplar as PrometheusExemplar
    from prometheus_client.samples import Sample

GENAI_NAMES = {
    "pointsman_ttft_seconds": "gen_ai.server.time_to_first_token",
    "pointsman_tpot_seconds": "gen_ai.server.time_per_output_token",
    "pointsman_request_seconds": "gen_ai.server.request.duration",
}
"""Metrics with a name in the GenAI conventions. They have no attributes for operation and model."""

_CUMULATIVE = AggregationTemporality.CUMULATIVE
_SCOPE = InstrumentationScope("pointsman.router")


def metrics_data(registry: CollectorRegistry, resource: Resource, *, now_ns: int) -> MetricsData:
    """All metrics in `registry` at `now_ns`; sums and histograms are cumulative."""
    metrics = [metric for family in registry.collect() if (metric := _metric(family, now_ns)) is not None]
    scope = ScopeMetrics(_SCOPE, metrics, schema_url="")
    return MetricsData([ResourceMetrics(resource, [scope], schema_url=resource.schema_url)])


class MetricsPush:
    """Exports the metrics in `registry` every `every_s`, from a thread of its own, and once more at the end."""

    def __init__(
        self, registry: CollectorRegistry, resource: Resource, exporter: MetricExporter, *, every_s: float
    ) -> None:
        self._registry, self._resource, self._exporter, self._every_s = registry, resource, exporter, every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def __repr__(self) -> str:
        return f"<MetricsPush every {self._every_s} s>"

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, patience_s: float = 5.0) -> None:
        """Export for the last time; gives up after `patience_s` if the receiver does not take it. Blocks."""
        self._stopped.set()
        self._thread.join(patience_s)
        self._exporter.shutdown()

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            goes_on = not self._stopped.wait(self._every_s)
            self._exporter.export(metrics_data(self._registry, self._resource, now_ns=time.time_ns()))


def _metric(family: Family, now_ns: int) -> Metric | None:
    name, unit = GENAI_NAMES.get(family.name, family.name), "s" if family.name.endswith("_seconds") else ""
    if not family.samples:
        return None
    if family.type == "gauge":
        points = [_number(sample, now_ns, now_ns) for sample in family.samples]
        return Metric(name, family.documentation, unit, Gauge(points))
    created = {_labels(sample): int(sample.value * 1e9) for sample in family.samples if _suffix(sample) == "created"}
    if family.type == "counter":
        totals = [sample for sample in family.samples if _suffix(sample) == "total"]
        points = [_number(sample, created.get(_labels(sample), now_ns), now_ns) for sample in totals]
        return Metric(name, family.documentation, unit, Sum(points, _CUMULATIVE, is_monotonic=True))
    histograms = list(_histograms(family.samples, created, now_ns))
    return Metric(name, family.documentation, unit, Histogram(histograms, _CUMULATIVE))


def _number(sample: Sample, start_ns: int, now_ns: int) -> NumberDataPoint:
    return NumberDataPoint(dict(sample.labels), start_ns, now_ns, sample.value)


def _histograms(
    samples: Sequence[Sample], created: dict[tuple[tuple[str, str], ...], int], now_ns: int
) -> Iterator[HistogramDataPoint]:
    """One point for each set of labels; prometheus' buckets are cumulative, OpenTelemetry's are not."""
    for labels, group in groupby(samples, _labels):
        parts = list(group)
        buckets = [sample for sample in parts if _suffix(sample) == "bucket"]
        counts = [int(sample.value) for sample in buckets]
        yield HistogramDataPoint(
            attributes=dict(labels),
            start_time_unix_nano=created.get(labels, now_ns),
            time_unix_nano=now_ns,
            count=counts[-1],
            sum=next(sample.value for sample in parts if _suffix(sample) == "sum"),
            bucket_counts=[count - before for before, count in zip([0, *counts], counts, strict=False)],
            explicit_bounds=[float(sample.labels["le"]) for sample in buckets[:-1]],
            # minimum and maximum are unknown: the encoder leaves them out
            min=None,  # type: ignore[arg-type]
            max=None,  # type: ignore[arg-type]
            exemplars=list(_exemplars(sample.exemplar for sample in buckets)),
        )


def _exemplars(found: Iterable[PrometheusExemplar | None]) -> Iterator[Exemplar]:
    for exemplar in found:
        if exemplar is not None:
            ids = {name: int(exemplar.labels[name], 16) for name in ("trace_id", "span_id")}
            yield Exemplar({}, exemplar.value, int(float(exemplar.timestamp or 0.0) * 1e9), **ids)


def _labels(sample: Sample) -> tuple[tuple[str, str], ...]:
    """The sample's labels without `le`."""
    return tuple((name, value) for name, value in sample.labels.items() if name != "le")


def _suffix(sample: Sample) -> str:
    return sample.name.rpartition("_")[2]
