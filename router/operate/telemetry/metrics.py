"""The metrics that there are, each with a bounded number of series. The only place that makes prometheus' objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

MOST_SERIES = 2048
"""Combinations of labels that one metric may have; whatever comes after them is counted as OTHER."""

OTHER = "other"

T = TypeVar("T", Counter, Gauge, Histogram)


class Metric(NamedTuple):
    """One metric as `/metrics` has it, without the suffixes of a histogram."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


class Metrics:
    """Makes metrics in `registry` and their children, and remembers what it made. Names begin with `pointsman_`."""

    def __init__(self, registry: CollectorRegistry, most_series: int = MOST_SERIES) -> None:
        self._registry, self._most_series = registry, most_series
        self._all: list[tuple[Metric, Any]] = []
        # looking a labelled child up with prometheus_client costs four times what counting does
        self._children: dict[Any, dict[tuple[str, ...], Any]] = {}

    def __repr__(self) -> str:
        return f"<Metrics {len(self._all)} with {sum(map(len, self._children.values()))} series>"

    def __iter__(self) -> Iterator[Metric]:
        return (metric for metric, _ in self._all)

    def counter(self, name: str, help: str, labels: Sequence[str]) -> Counter:  # noqa: A002
        """A sum that only grows; its name ends with `_total` outside."""
        made = Counter(f"pointsman_{name}", help, labels, registry=self._registry)
        return self._kept(made, Metric(f"pointsman_{name}_total", "counter", tuple(labels), help))

    def gauge(self, name: str, help: str, labels: Sequence[str]) -> Gauge:  # noqa: A002
        """A value that comes and goes."""
        made = Gauge(f"pointsman_{name}", help, labels, registry=self._registry)
        return self._kept(made, Metric(f"pointsman_{name}", "gauge", tuple(labels), help))

    def histogram(self, name: str, help: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:  # noqa: A002
        """Observations, counted up to each of `buckets`."""
        made = Histogram(f"pointsman_{name}", help, labels, buckets=buckets, registry=self._registry)
        return self._kept(made, Metric(f"pointsman_{name}", "histogram", tuple(labels), help))

    def child(self, metric: Any, *labels: str) -> Any:
        """The series of `metric` with these labels; that of OTHER once there are `most_series`."""
        children = self._children[metric]
        found = children.get(labels)
        if found is None:
            if len(children) >= self._most_series:
                return metric.labels(*(OTHER for _ in labels))
            found = children[labels] = metric.labels(*labels)
        return found

    def forget(self, label: str, value: str) -> None:
        """Let go of every series in which `label` has this `value`."""
        for metric, made in self._all:
            if label not in metric.labels:
                continue
            at, children = metric.labels.index(label), self._children[made]
            for labels in [labels for labels in children if labels[at] == value]:
                del children[labels]
                made.remove(*labels)

    def _kept(self, made: T, metric: Metric) -> T:
        self._all.append((metric, made))
        self._children[made] = {}
        return made
