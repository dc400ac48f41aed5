"""Numbers from a page of metrics. Pure. Source: Prometheus text exposition format 0.0.4."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

_SAMPLE = re.compile(rb'^([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]++|"(?:\\.|[^"\\]++)*+")*+)\})?[ \t]+(\S+)', re.ASCII)
_LABEL = re.compile(rb'(?<!\w)([a-zA-Z_]\w*+)\s*+=\s*"((?:\\.|[^"\\]++)*+)"', re.ASCII)
_ESCAPED = re.compile(r'\\(["\\n])')


MOST_SAMPLES = 8192
"""Samples of a page that are read."""


_MOST_LINE_BYTES = 16 << 10
"""Longer lines are passed over: labels are names of models, adapters and ranks."""


class MetricSample(NamedTuple):
    """One line of the page."""

    name: str
    labels: Mapping[str, str]
    value: float


class Metrics:
    """The samples of `names` on `page`; all other lines are passed over without being read.

    Where several label sets share a name (ranks, adapters), `total` adds them up and `mean` averages them. Several
    names given to either are spellings of one metric in different versions: the first that is there counts.
    """

    def __init__(self, page: bytes, names: Collection[str]) -> None:
        self._samples: dict[str, list[MetricSample]] = {}
        for sample in _samples(page, frozenset(name.encode() for name in names)):
            self._samples.setdefault(sample.name, []).append(sample)

    def __repr__(self) -> str:
        return f"<Metrics {', '.join(sorted(self._samples))}>"

    def total(self, *names: str, **labels: str) -> float | None:
        """The sum over all samples with `labels`; None if there is none."""
        values = self._values(names, labels)
        return sum(values) if values else None

    def mean(self, *names: str, **labels: str) -> float | None:
        """The mean over all samples with `labels`; None if there is none."""
        values = self._values(names, labels)
        return sum(values) / len(values) if values else None

    def newest_labels(self, name: str) -> Mapping[str, str] | None:
        """The labels of the sample with the highest value, for metrics with a time as value; or None."""
        samples = self._first((name,))
        return max(samples, key=lambda sample: sample.value).labels if samples else None

    def labels(self, *names: str) -> list[Mapping[str, str]]:
        """The labels of each sample, for metrics with values in labels (`..._info`)."""
        return [sample.labels for sample in self._first(names)]

    def _values(self, names: tuple[str, ...], labels: Mapping[str, str]) -> list[float]:
        return [sample.value for sample in self._first(names) if labels.items() <= sample.labels.items()]

    def _first(self, names: tuple[str, ...]) -> list[MetricSample]:
        return next((self._samples[name] for name in names if name in self._samples), [])


def whole(value: float | None) -> int | None:
    """`value` as a count; None stays None."""
    return None if value is None else round(value)


@lru_cache(maxsize=64)
def _lines_of(names: frozenset[bytes]) -> re.Pattern[bytes]:
    """Matches lines with samples of `names`: most of a page are histograms that are not needed."""
    return re.compile(
        rb"^(?:%b)[{ \t][^\n]{0,%d}+$" % (b"|".join(map(re.escape, sorted(names))), _MOST_LINE_BYTES), re.MULTILINE
    )


def _samples(page: bytes, names: frozenset[bytes]) -> Iterator[MetricSample]:
    for line in islice(_lines_of(names).finditer(page), MOST_SAMPLES):
        if (match := _SAMPLE.match(line[0])) is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if math.isfinite(value):
            labels = {key.decode(): _unescaped(text) for key, text in _LABEL.findall(match[2] or b"")}
            yield MetricSample(match[1].decode(), labels, value)


def _unescaped(text: bytes) -> str:
    return _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], text.decode(errors="replace"))
