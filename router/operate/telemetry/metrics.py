"""The metrics, each with a bounded number of series. Only this module makes prometheus' objects.

What requests count is kept in plain numbers here, and becomes families of prometheus_client when metrics are read.
Its own Counter takes a lock and its Histogram a loop in Python for each observation: eight to twelve times as long.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

MOST_SERIES = 2048
"""Most combinations of labels of one metric; further ones are counted as OTHER."""

OTHER = "other"

T = TypeVar("T")


class Metric(NamedTuple):
    """One metric as in `/metrics`, without the suffixes of a histogram."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


Labels = str | tuple[str, ...]
"""The values of a metric's labels: one by itself, otherwise all in their order."""


class Sum:
    """One series of a counter: a sum that only grows, since `created_at`."""

    __slots__ = ("created_at", "value")

    def __init__(self, created_at: float) -> None:
        self.created_at, self.value = created_at, 0.0

    def __repr__(self) -> str:
        return f"<Sum {self.value}>"

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`. Raises ValueError if it is negative."""
        if amount < 0:
            raise ValueError(f"a sum that only grows does not take {amount}")
        self.value += amount


class Level:
    """One series of a gauge: a value that may rise and fall."""

    __slots__ = ("_function", "_value")

    def __init__(self) -> None:
        self._value = 0.0
        self._function: Callable[[], float] | None = None

    def __repr__(self) -> str:
        return f"<Level {self.value}>"

    @property
    def value(self) -> float:
        """The present value."""
        return self._value if self._function is None else float(self._function())

    def set(self, value: float) -> None:
        """It is `value` from now on."""
        self._value = float(value)

    def set_function(self, function: Callable[[], float]) -> None:
        """It is what `function` returns, which the thread that reads calls."""
        self._function = function


class Distribution:
    """One series of a histogram: how many observations there were up to each of `bounds` and beyond, and their sum.

    Each bucket keeps the exemplar of its last observation that had one.
    """

    __slots__ = ("_unix_time", "bounds", "counts", "created_at", "exemplars", "sum")

    def __init__(self, bounds: Sequence[float], unix_time: Callable[[], float]) -> None:
        self.bounds, self._unix_time, self.created_at = bounds, unix_time, unix_time()
        self.counts, self.sum = [0] * (len(bounds) + 1), 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def __repr__(self) -> str:
        return f"<Distribution of {sum(self.counts)}>"

    def observe(self, value: float, exemplar: dict[str, str] | None = None) -> None:
        """Count `value`; the labels of `exemplar`, if given, name its trace."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.sum += value
        if exemplar is not None:
            self.exemplars[bucket] = Exemplar(exemplar, value, self._unix_time())


class Series(dict[Labels, T]):
    """The series of one metric by their labels, `series["acme", "chat"].inc()`; of one without labels, `series[()]`.

    A series is made when it is first looked up; once there are `most`, all others are that of OTHER. What was looked up
    before is found without a call.
    """

    def __init__(self, names: Sequence[str], make: Callable[[], T], most: int) -> None:
        self._names, self._make, self._most = names, make, most
        self._other: T | None = None

    def __missing__(self, labels: Labels) -> T:
        if len(self) < self._most:
            made = self[labels] = self._make()
            return made
        if self._other is None:
            self._other = self._make()
        return self._other

    def all(self) -> list[tuple[tuple[str, ...], T]]:
        """Each series with the values of its labels. Safe from any thread."""
        found = [(_values(labels), series) for labels, series in self.copy().items()]
        if self._other is not None:
            found.append(((OTHER,) * len(self._names), self._other))
        return found

    def forget(self, at: int, value: str) -> None:
        """Drop every series with this `value` of label number `at`."""
        for labels in tuple(self):
            if _values(labels)[at] == value:
                del self[labels]


def _values(labels: Labels) -> tuple[str, ...]:
    return (labels,) if isinstance(labels, str) else tuple(map(str, labels))


class _Kept(Collector):
    """The `series` of one metric: each is put into an `empty` family by `add`."""

    def __init__(self, empty: Callable[[], Any], add: Callable[[Any, tuple[str, ...], T], None], series: Series[T]):
        self._empty, self._add, self._series = empty, add, series

    def describe(self) -> Iterable[Any]:
        """Its name, without its series."""
        return [self._empty()]

    def collect(self) -> Iterable[Any]:
        """Its series as they are now."""
        family = self._empty()
        for values, series in self._series.all():
            self._add(family, values, series)
        return [family]


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
    """Makes metrics in `registry` and their series, and keeps them. Names begin with `pointsman_`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        most_series: int = MOST_SERIES,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._registry, self._most_series, self._unix_time = registry, most_series, unix_time
        self._shows_created = _shows_created()
        self._all: list[tuple[Metric, Series[Any]]] = []
        self._computed: list[Metric] = []

    def __repr__(self) -> str:
        return f"<Metrics {len(self._all)} with {sum(len(series) for _, series in self._all)} series>"

    def __iter__(self) -> Iterator[Metric]:
        return iter([*(metric for metric, _ in self._all), *self._computed])

    def counter(self, name: str, help: str, labels: Sequence[str]) -> Series[Sum]:  # noqa: A002
        """A sum that only grows; `/metrics` adds `_total` to its name."""

        def add(family: CounterMetricFamily, values: tuple[str, ...], series: Sum) -> None:
            family.add_metric(values, series.value, series.created_at if self._shows_created else None)

        metric = Metric(f"pointsman_{name}_total", "counter", tuple(labels), help)
        return self._kept(metric, CounterMetricFamily, add, lambda: Sum(self._unix_time()))

    def gauge(self, name: str, help: str, labels: Sequence[str]) -> Series[Level]:  # noqa: A002
        """A value that may rise and fall."""

        def add(family: GaugeMetricFamily, values: tuple[str, ...], series: Level) -> None:
            family.add_metric(values, series.value)

        metric = Metric(f"pointsman_{name}", "gauge", tuple(labels), help)
        return self._kept(metric, GaugeMetricFamily, add, Level)

    def computed(self, name: str, help: str, label: str, compute: Callable[[], Mapping[str, float]]) -> None:  # noqa: A002
        """A gauge with the series that `compute` returns when metrics are read, by the value of its only label.

        `compute` is called in the thread that reads, and bounds the number of series itself.
        """
        self._registry.register(_Computed(f"pointsman_{name}", help, label, compute))
        self._computed.append(Metric(f"pointsman_{name}", "gauge", (label,), help))

    def histogram(
        self,
        name: str,
        help: str,  # noqa: A002
        labels: Sequence[str],
        bounds: Sequence[float],
    ) -> Series[Distribution]:
        """Observations, counted up to each of `bounds`."""
        ends = [str(floatToGoString(bound)) for bound in (*bounds, math.inf)]  # type: ignore[no-untyped-call]

        def add(family: HistogramMetricFamily, values: tuple[str, ...], series: Distribution) -> None:
            counts, found = accumulate(series.counts), map(series.exemplars.get, range(len(ends)))
            buckets = [
                (end, count) if exemplar is None else (end, count, exemplar)
                for end, count, exemplar in zip(ends, counts, found, strict=True)
            ]
            family.add_metric(values, buckets, series.sum)
            if self._shows_created:
                family.add_sample(f"{family.name}_created", dict(zip(labels, values, strict=True)), series.created_at)

        metric = Metric(f"pointsman_{name}", "histogram", tuple(labels), help)
        return self._kept(metric, HistogramMetricFamily, add, lambda: Distribution(bounds, self._unix_time))

    def forget(self, label: str, value: str) -> None:
        """Remove every series in which `label` has this `value`."""
        for metric, series in self._all:
            if label in metric.labels:
                series.forget(metric.labels.index(label), value)

    def _kept(
        self, metric: Metric, family: Any, add: Callable[[Any, tuple[str, ...], T], None], make: Callable[[], T]
    ) -> Series[T]:
        series = Series(metric.labels, make, self._most_series)
        self._registry.register(_Kept(partial(family, metric.name, metric.help, labels=metric.labels), add, series))
        self._all.append((metric, series))
        if not metric.labels:
            # its only series is there before anything was counted
            series[()] = make()
        return series


def _shows_created() -> bool:
    """Does prometheus_client show when each counter and histogram began, as its environment variable tells it?"""
    (family,) = Counter("probe", "Made by no registry", registry=None).collect()
    return any(sample.name == "probe_created" for sample in family.samples)
