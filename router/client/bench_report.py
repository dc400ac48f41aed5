"""What a benchmark measured, in numbers, as text and as a picture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from router.client.load import Timed

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}

_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 40
_WIDTH, _HEIGHT, _MARGIN, _TITLE = 880, 130, 56, 26

_STYLE = """
  svg { background: #fff; color: #1b1f24; font: 13px system-ui, sans-serif }
  text { fill: currentColor }
  .title { font-size: 15px; font-weight: 600 }
  .end { text-anchor: end }
  .curve { fill: none; stroke: #3b6ea5; stroke-width: 2 } .axis { stroke: #9aa4ae }
  .mark { stroke: #d1603d; stroke-dasharray: 3 3 }
  @media (prefers-color-scheme: dark) { svg { background: #14181d; color: #e6e9ec } }
"""


@dataclass(frozen=True, slots=True)
class BenchTimes:
    """One measured time of all answered requests, in seconds, sorted."""

    name: str
    seconds: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        """The mean; 0 without values."""
        return math.fsum(self.seconds) / len(self.seconds) if self.seconds else 0.0

    def quantile(self, share: float) -> float:
        """The least value that `share` of all values do not exceed (nearest rank); 0 without values."""
        return self.seconds[max(0, math.ceil(share * len(self.seconds)) - 1)] if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class BenchResult:
    """All requests of a benchmark that took `wall_s` seconds; `what` describes its load in a line."""

    what: str
    wall_s: float
    requests: tuple[Timed, ...]

    @property
    def measures(self) -> tuple[BenchTimes, ...]:
        """TTFT, TPOT and end to end."""
        tpots = (timed.reply.tpot_s for timed in self.requests if timed.reply is not None)
        return (
            _measure("TTFT", (timed.ttft_s for timed in self.requests)),
            _measure("TPOT", tpots),
            _measure("end to end", (timed.end_s for timed in self.requests)),
        )

    @property
    def failures(self) -> Counter[str]:
        """The reasons of failed requests."""
        return Counter(timed.failure for timed in self.requests if timed.failure is not None)

    def record(self) -> dict[str, Any]:
        """All of it for a program; times in seconds."""
        replies = [timed.reply for timed in self.requests if timed.reply is not None]
        told = [reply for reply in replies if reply.cached_tokens is not None]
        backends = (reply.headers.get("backend") for reply in replies)
        output = sum(reply.output_tokens for reply in replies)
        return {
            "load": self.what,
            "seconds": self.wall_s,
            "answered": len(replies),
            "failed": self.failures.total(),
            "failures": dict(self.failures.most_common(10)),
            "requests_per_s": len(replies) / self.wall_s if self.wall_s else 0.0,
            "output_tokens_per_s": output / self.wall_s if self.wall_s else 0.0,
            "prompt_tokens": sum(reply.prompt_tokens for reply in replies),
            "cached_tokens": sum(reply.cached_tokens or 0 for reply in told) if told else None,
            "output_tokens": output,
            "backends": dict(sorted(Counter(filter(None, backends)).items())),
            "times_s": {measure.name: _numbers(measure) for measure in self.measures},
        }


def as_text(result: BenchResult) -> str:
    """`result` in lines for a terminal: counts, percentiles, and the spread of each time."""
    return "\n".join(_lines(result))


def _lines(result: BenchResult) -> Iterator[str]:
    record = result.record()
    yield result.what
    rate, speed = record["requests_per_s"], record["output_tokens_per_s"]
    yield (
        f"{record['answered']:,} answered and {record['failed']:,} failed in {result.wall_s:.1f} s: "
        f"{rate:.1f} requests and {speed:,.0f} output tokens per second"
    )
    yield from (f"  failed {count:,} times: {reason}" for reason, count in result.failures.most_common(3))
    if not record["answered"]:
        return
    prompt, cached = record["prompt_tokens"], record["cached_tokens"]
    share = "" if cached is None or not prompt else f", {cached / prompt:.0%} of them cached"
    yield (
        f"Prompts of {prompt / record['answered']:,.0f} tokens{share}; "
        f"answers of {record['output_tokens'] / record['answered']:,.0f} tokens"
    )
    if record["backends"]:
        yield f"Backends: {', '.join(f'{name} {count:,}' for name, count in record['backends'].items())}"
    yield ""
    yield f"{'ms':<12}{'mean':>9}" + "".join(f"{name:>9}" for name in QUANTILES) + f"{'max':>9}"
    for measure in result.measures:
        yield f"{measure.name:<12}" + "".join(f"{seconds * 1000:>9,.1f}" for seconds in _numbers(measure).values())
    yield ""
    yield from (f"{measure.name:<12}{spread(measure.seconds)}" for measure in result.measures if measure.seconds)
    if len(result.measures[1].seconds) < record["answered"]:
        counted = f"{len(result.measures[1].seconds):,} of {record['answered']:,}"
        yield f"TPOT counts {counted} answers; the others came whole, or have one token."


def spread(seconds: Sequence[float]) -> str:
    """A histogram in one line, between the least and the greatest value."""
    least, greatest = min(seconds), max(seconds)
    step = (greatest - least) / _COLUMNS or 1.0
    counts = Counter(min(_COLUMNS - 1, int((value - least) / step)) for value in seconds)
    most = max(counts.values())
    bars = "".join(_BLOCKS[math.ceil(counts[column] / most * (len(_BLOCKS) - 1))] for column in range(_COLUMNS))
    return f"{least * 1000:,.1f} ms |{bars}| {greatest * 1000:,.1f} ms"


def as_svg(result: BenchResult) -> str:
    """`result` as an SVG document: of each time, the share of requests that took no longer."""
    measures = [measure for measure in result.measures if measure.seconds]
    row = _HEIGHT + _TITLE + _MARGIN
    height = _MARGIN + row * max(1, len(measures))
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="Benchmark">'
    drawn = [line for at, measure in enumerate(measures) for line in _curve(measure, _MARGIN + at * row)]
    title = f'<text class="title" x="{_MARGIN}" y="24">{escape(result.what)}</text>'
    return "\n".join([head, f"<style>{_STYLE}</style>", title, *drawn, "</svg>", ""])


def _curve(measure: BenchTimes, top: int) -> Iterator[str]:
    """The share of requests that took no longer, over time, with p50 and p99 marked."""
    left, right, base = _MARGIN, _WIDTH - _MARGIN, top + _TITLE + _HEIGHT
    greatest, count = measure.seconds[-1] or 1.0, len(measure.seconds)

    def x(seconds: float) -> float:
        return left + seconds / greatest * (right - left)

    marks = {name: measure.quantile(QUANTILES[name]) for name in ("p50", "p99")}
    told = ", ".join(f"{name} {seconds * 1000:,.1f} ms" for name, seconds in marks.items())
    yield f'<text x="{left}" y="{top + 16}">{measure.name}: {told}</text>'
    yield f'<path class="axis" d="M{left} {base}H{right}M{left} {base - _HEIGHT}H{right}"/>'
    yield f'<text class="end" x="{left - 4}" y="{base}">0</text>'
    yield f'<text class="end" x="{left - 4}" y="{base - _HEIGHT + 10}">100 %</text>'
    # as many points as the width shows
    steps = range(0, count, max(1, count // (right - left)))
    points = " ".join(
        f"{x(measure.seconds[at]):.1f},{base - (at + 1) / count * _HEIGHT:.1f}" for at in (*steps, count - 1)
    )
    yield f'<polyline class="curve" points="{left},{base} {points}"/>'
    for seconds in marks.values():
        yield f'<path class="mark" d="M{x(seconds):.1f} {base}V{base - _HEIGHT}"/>'
    yield f'<text class="end" x="{right}" y="{base + 16}">{greatest * 1000:,.1f} ms</text>'


def _measure(name: str, seconds: Iterator[float | None]) -> BenchTimes:
    return BenchTimes(name, tuple(sorted(value for value in seconds if value is not None)))


def _numbers(measure: BenchTimes) -> dict[str, float]:
    quantiles = {name: measure.quantile(share) for name, share in QUANTILES.items()}
    return {"mean": measure.mean_s, **quantiles, "max": measure.quantile(1.0)}
