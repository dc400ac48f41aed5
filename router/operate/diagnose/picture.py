"""A Diagnosis as a picture: the hit rate as a waterfall from ideal to measured, and missed targets as bars. SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from router.operate.diagnose.nouns import Diagnosis, HitRate, MissedTarget

_WIDTH, _MARGIN, _LABEL_WIDTH, _VALUE_WIDTH = 880, 20, 130, 110
_PLOT = _WIDTH - 2 * _MARGIN - _LABEL_WIDTH - _VALUE_WIDTH
_ROW, _BAR, _TITLE = 26, 18, 34

_STYLE = """
  svg { background: #fff; color: #1b1f24; font: 13px system-ui, sans-serif }
  text { fill: currentColor }
  .title { font-size: 15px; font-weight: 600 }
  .value { text-anchor: end; font-variant-numeric: tabular-nums }
  .total { fill: #3b6ea5 } .loss { fill: #d1603d } .line { stroke: #9aa4ae; stroke-dasharray: 2 2 }
  @media (prefers-color-scheme: dark) { svg { background: #14181d; color: #e6e9ec } }
"""


class PictureBar(NamedTuple):
    """One row: a bar from `start` to `end`, both in [0, 1] of the plot. `kind` is the class of its style."""

    label: str
    value: str
    start: float
    end: float
    kind: str
    hint: str = ""


def as_svg(diagnosis: Diagnosis) -> str:
    """`diagnosis` as an SVG document."""
    parts: list[tuple[str, Sequence[PictureBar]]] = []
    if diagnosis.hit_rate is not None:
        parts.append((_hit_title(diagnosis.hit_rate), hit_bars(diagnosis.hit_rate)))
    parts += [(_target_title(found), target_bars(found)) for found in diagnosis.targets if found.missed]
    if not parts:
        parts = [("Nothing to show: no hit rate, and no missed target", ())]
    y, drawn = _MARGIN, []
    for title, bars in parts:
        drawn += list(_part(title, bars, y))
        y += _TITLE + _ROW * len(bars) + _MARGIN
    size = f'viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" height="{y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="Diagnosis">'
    return "\n".join([head, f"<style>{_STYLE}</style>", *drawn, "</svg>", ""])


def hit_bars(found: HitRate) -> list[PictureBar]:
    """The waterfall: each loss begins where the one before ended."""
    whole = max(1, found.ideal_tokens)
    bars = [PictureBar("ideal", f"{found.ideal:.1f} %", 0.0, found.ideal_tokens / whole, "total")]
    left = found.ideal_tokens
    for loss in found.losses:
        value = f"-{loss.points:.1f} points" if loss.tokens else "0"
        bars.append(
            PictureBar(_words(loss.cause), value, (left - loss.tokens) / whole, left / whole, "loss", loss.meaning)
        )
        left -= loss.tokens
    bars.append(PictureBar("measured", f"{found.measured:.1f} %", 0.0, found.measured_tokens / whole, "total"))
    return bars


def target_bars(found: MissedTarget) -> list[PictureBar]:
    """The causes one after the other, and their sum."""
    whole, at = found.seconds or 1.0, 0.0
    bars = []
    for cause in found.causes:
        end = at + cause.seconds / whole
        bars.append(PictureBar(_words(cause.cause), f"{cause.seconds:,.1f} s", at, end, "loss", cause.meaning))
        at = end
    bars.append(PictureBar("measured", f"{found.seconds:,.1f} s", 0.0, 1.0, "total"))
    return bars


def _hit_title(found: HitRate) -> str:
    return f"Hit rate: from {found.ideal:.1f} % with one infinite cache to {found.measured:.1f} % measured"


def _target_title(found: MissedTarget) -> str:
    return f"{found.target}: seconds of the {found.missed:,} requests that missed their target, of {found.requests:,}"


def _part(title: str, bars: Sequence[PictureBar], y: float) -> Iterator[str]:
    yield f'<text class="title" x="{_MARGIN}" y="{y + 15}">{escape(title)}</text>'
    left = _MARGIN + _LABEL_WIDTH
    for row, bar in enumerate(bars):
        top = y + _TITLE + row * _ROW
        x, width = left + _PLOT * bar.start, max(0.0, _PLOT * (bar.end - bar.start))
        base = top + _BAR - 4
        if bar.hint:
            yield f"<g><title>{escape(bar.hint)}</title>"
        yield f'<text x="{_MARGIN}" y="{base}">{escape(bar.label)}</text>'
        yield f'<rect class={quoteattr(bar.kind)} x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}"/>'
        yield f'<text class="value" x="{_WIDTH - _MARGIN}" y="{base}">{escape(bar.value)}</text>'
        if bar.hint:
            yield "</g>"
        if row + 1 < len(bars):
            # to the next bar: a loss begins where the one before left off
            edge = x if bar.kind == "loss" and bars[0].kind == "total" else x + width
            line = f'x1="{edge:.2f}" y1="{top + _BAR}" x2="{edge:.2f}" y2="{top + _ROW}"'
            yield f'<line class="line" {line}/>'


def _words(cause: str) -> str:
    return cause.replace("_", " ")
