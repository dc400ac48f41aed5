"""The metrics, each with a bounded number of series. Only this module makes prometheus' objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

MOST_SERIES = 2048
"""Most combinations of labels of one metric; further ones are counted as OTHER."""

OTHER = "other"

T = TypeVar("T", Counter, Gauge, Histogram)


class Metric(NamedTuple):
    """One metric as in `/metrics`, without the suffixes of a histogram."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


Labels = str | tuple[str, ...]
"""The values of a metric's labels: one by itself, otherwise all in their order."""


class Series(dict[Labels, T]):
    """The series of one metric by their labels, `series["acme", "chat"].inc()`; of one without labels, `series[()]`.

    A series is made when it is first looked up; once there are `most`, all others are that of OTHER. What was looked up
    before is found without a call: prometheus_client's own way to it costs four times what counting does.
    """

    def __init__(self, metric: T, most: int) -> None:
        self._metric: Any = metric
        self._most = most

    def __missing__(self, labels: Labels) -> T:
        values = (labels,) if isinstance(labels, str) else labels
        if len(self) >= self._most:
            other: T = self._metric.labels(*(OTHER for _ in values))
            return other
        made: T = self._metric.labels(*values) if values else self._metric
        self[labels] = made
        return made

    def forget(self, at: int, value: str) -> None:
        """Drop every series with this `value` of label number `at`."""
        for labels in tuple(self):
            values = (labels,) if isinstance(labels, str) else labels
            if values[at] == value:
                del self[labels]
                self._metric.remove(*values)


class _Computed(Collector):
    """A gauge with the series that `compute` returns, by the value of its label."""

    def __init__(self, name: str, help: str, label: str, compute: Callable[[], Mapping[str, float]]) -> None:  # noqa: A002
        self._name, self._help, self._label, self._compute = name, help, label, compute

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Its name, without a computation."""
        return [GaugeMetricFamily(self._name, self._help, labels=(self._label,))]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Its series, computed now."""
        family = GaugeMetricFamily(self._name, self._help, labels=(self._label,))
        for value, number in self._compute().items():
            family.add_metric((value,), number)
        return [family]


class Metrics:
    """Makes metrics in `registry` and their children, and keeps them. Names begin with `pointsman_`."""

    def __init__(self, registry: CollectorRegistry, most_series: int = MOST_SERIES) -> None:
        self._registry, self._most_series = registry, most_series
        self._all: list[tuple[Metric, Series[Any]]] = []
        self._computed: list[Metric] = []

    def __repr__(self) -> str:
        return f"<Metrics {len(self._all)} with {sum(len(series) for _, series in self._all)} series>"

    def __iter__(self) -> Iterator[Metric]:
        return iter([*(metric for metric, _ in self._all), *self._computed])

    def counter(self, name: str, help: str, labels: Sequence[str]) -> Series[Counter]:  # noqa: A002
        """A sum that only grows; `/metrics` adds `_total` to its name."""
        made = Counter(f"pointsman_{name}", help, labels, registry=self._registry)
        return self._kept(made, Metric(f"pointsman_{name}_total", "counter", tuple(labels), help))

    def gauge(self, name: str, help: str, labels: Sequence[str]) -> Series[Gauge]:  # noqa: A002
        """A value that may rise and fall."""
        made = Gauge(f"pointsman_{name}", help, labels, registry=self._registry)
        return self._kept(made, Metric(f"pointsman_{name}", "gauge", tuple(labels), help))

    def computed(self, name: str, help: str, label: str, compute: Callable[[], Mapping[str, float]]) -> None:  # noqa: A002
        """A gauge with the series that `compute` returns when metrics are read, by the value of its only label.

        `compute` is called in the thread that reads, and bounds the number of series itself.
        """
        self._registry.register(_Computed(f"pointsman_{name}", help, label, compute))
        self._computed.append(Metric(f"pointsman_{name}", "gauge", (label,), help))

    def histogram(self, name: str, help: str, labels: Sequence[str], buckets: Sequence[float]) -> Series[Histogram]:  # noqa: A002
        """Observations, counted up to each of `buckets`."""
        made = Histogram(f"pointsman_{name}", help, labels, buckets=buckets, registry=self._registry)
        return self._kept(made, Metric(f"pointsman_{name}", "histogram", tuple(labels), help))

    def forget(self, label: str, value: str) -> None:
        """Remove every series in which `label` has this `value`."""
        for metric, series in self._all:
            if label in metric.labels:
                series.forget(metric.labels.index(label), value)

    def _kept(self, made: T, metric: Metric) -> Series[T]:
        series = Series(made, self._most_series)
        self._all.append((metric, series))
        return series
