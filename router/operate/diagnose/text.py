"""A Diagnosis as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from io import StringIO

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from router.operate.diagnose.nouns import Diagnosis, HitRate, LoggedExample, MissedTarget
from router.terminal import inert_console

_WIDTH = 150
_LEAST_SHARE = 0.01
"""Causes with less than this share of a loss are in the table, without a remedy."""


def as_text(diagnosis: Diagnosis) -> str:
    """`diagnosis` as plain text."""
    console = inert_console(file=StringIO(), width=_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(shown(diagnosis))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n")


def shown(diagnosis: Diagnosis) -> RenderableType:
    """`diagnosis` as tables, each followed by remedies and examples of the causes that matter."""
    parts: list[RenderableType] = [Text(_head(diagnosis))]
    if diagnosis.hit_rate is not None:
        parts += [Text(""), *_hit_rate(diagnosis.hit_rate)]
    for target in diagnosis.targets:
        parts += [Text(""), *_target(target)]
    if diagnosis.notes:
        parts += [Text(""), Text("Notes"), *(Padding(Text(f"- {note}"), (0, 0, 0, 2)) for note in diagnosis.notes)]
    return Group(*parts)


def _head(diagnosis: Diagnosis) -> str:
    seconds = diagnosis.last_s - diagnosis.first_s
    return f"{diagnosis.requests:,} requests in {seconds:,.0f} s, from {_time(diagnosis.first_s)}"


def _hit_rate(found: HitRate) -> Iterator[RenderableType]:
    yield Text(
        f"Hit rate: {found.measured:.1f} % measured, {found.ideal:.1f} % with one infinite cache, of "
        f"{found.prompt_tokens:,} prompt tokens in {found.requests:,} requests{_unjudged(found.unjudged)}"
    )
    lost = found.ideal_tokens - found.measured_tokens
    table = _table("", "tokens", "points", "requests", "of the loss")
    table.add_row("ideal", f"{found.ideal_tokens:,}", f"{found.ideal:.1f}", "", "")
    for loss in found.losses:
        share = f"{loss.tokens / lost:.0%}" if lost else ""
        table.add_row(
            f"- {_words(loss.cause)}", *_signed(loss.tokens, f"{loss.points:.1f}"), f"{loss.requests:,}", share
        )
    table.add_row("measured", f"{found.measured_tokens:,}", f"{found.measured:.1f}", "", "")
    yield table
    for loss in sorted(found.losses, key=lambda loss: -loss.tokens):
        if loss.tokens > _LEAST_SHARE * lost:
            yield from _advice(loss.cause, loss.meaning, loss.remedy)
            yield _line(f"most at: {', '.join(f'{name} ({tokens:,})' for name, tokens in loss.where)}")
            yield from (_line(_example(example, f"{example.amount:,.0f} tokens")) for example in loss.examples)


def _target(found: MissedTarget) -> Iterator[RenderableType]:
    share = found.missed / max(1, found.requests)
    judged = f"{found.target}: {found.missed:,} of {found.requests:,} requests missed their target ({share:.1%})"
    yield Text(f"{judged}{_unjudged(found.unjudged)}")
    if not found.missed:
        return
    table = _table("", "seconds", "share", "mean", "largest part of")
    for cause in found.causes:
        table.add_row(
            _words(cause.cause),
            f"{cause.seconds:,.2f}",
            f"{cause.seconds / found.seconds:.0%}",
            f"{1000 * cause.seconds / found.missed:,.0f} ms",
            f"{cause.requests:,}",
        )
    mean_ms = 1000 * found.seconds / found.missed
    table.add_row("measured", f"{found.seconds:,.2f}", "", f"{mean_ms:,.0f} ms", f"{found.missed:,}")
    yield table
    for cause in sorted(found.causes, key=lambda cause: -cause.seconds):
        if cause.seconds > _LEAST_SHARE * found.seconds:
            yield from _advice(cause.cause, cause.meaning, cause.remedy)
            yield from (_line(_example(example, f"{example.amount:,.3f} s")) for example in cause.examples)


def _unjudged(reasons: Mapping[str, int]) -> str:
    if not reasons:
        return ""
    shown = ", ".join(f"{count:,} {why}" for why, count in reasons.items())
    return f"; {sum(reasons.values()):,} more cannot be judged: {shown}"


def _advice(cause: str, meaning: str, remedy: str) -> Iterator[RenderableType]:
    yield Padding(Text(f"{_words(cause)}: {meaning}"), (0, 0, 0, 2))
    yield _line(f"change: {remedy}")


def _example(example: LoggedExample, amount: str) -> str:
    return f"{amount}  {_time(example.at_s)}  {example.request}  {example.backend}  {example.note}"


def _line(text: str) -> RenderableType:
    return Padding(Text(text), (0, 0, 0, 4))


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="")
    for at, column in enumerate(columns):
        table.add_column(column, justify="right" if at else "left", no_wrap=True)
    return table


def _signed(tokens: int, points: str) -> tuple[str, str]:
    return f"-{tokens:,}" if tokens else "0", f"-{points}" if float(points) else "0.0"


def _words(cause: str) -> str:
    return cause.replace("_", " ")


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
