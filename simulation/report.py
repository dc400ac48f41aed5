"""A Summary as tables for a terminal. A second one is shown beside the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import StringIO

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from policies.quantities import written_seconds
from policies.quota.budget import COST_UNIT, rounded_cost
from router.terminal import inert_console
from simulation.summary import BackendSummary, ClassSummary, Spread, Summary

_WIDTH = 150
"""Width of a table that is not shown in a terminal."""


def shown(renderable: RenderableType) -> str:
    """`renderable` as plain text."""
    console = inert_console(file=StringIO(), width=_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n")


def tables(summary: Summary) -> RenderableType:
    """All results of one simulation."""
    return Group(
        _head(summary), _classes(summary), _tenants(summary), _backends(summary), *_rest(summary), *_noted(summary)
    )


def compared(named: Mapping[str, Summary]) -> RenderableType:
    """Two simulations of the same requests side by side, with the differences."""
    (name, first), (other, second) = named.items()
    heads = [f"1  {name}: {_head(first)}", f"2  {other}: {_head(second)}"]
    return Group(*heads, _classes_compared(first, second), _pools_compared(first, second))


def difference(first: Summary, second: Summary) -> dict[str, dict[str, float | None]]:
    """By class the second's values minus the first's: seconds, shares and counts. None if either has none."""
    rows = {row.name: row for row in second.classes}
    return {row.name: _difference(row, rows[row.name]) for row in first.classes if row.name in rows}


def as_json(content: object) -> str:
    """`content` as JSON for machines, keys in their order."""
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"


def _head(summary: Summary) -> str:
    verdict = "every class meets its targets" if summary.keeps else f"missed: {', '.join(_broken(summary))}"
    if all(row.keeps is None for row in summary.classes):
        verdict = "no class has a target"
    rate = summary.requests / max(1e-9, summary.seconds)
    return f"{summary.requests:,} requests in {summary.seconds:,.0f} s ({rate:.2f} a second): {verdict}"


def _broken(summary: Summary) -> Iterator[str]:
    return (row.name for row in summary.classes if row.keeps is False)


def _table(*columns: str, texts: int = 1) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="")
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at < texts else "right", no_wrap=True)
    return table


def _classes(summary: Summary) -> Table:
    rows = summary.classes
    # no column for a target that no class has, or an outcome that did not happen
    has_tpot, has_target = (any(row.tpot_target_s for row in rows), any(row.missed is not None for row in rows))
    troubles = [
        name for name in ("refused", "limited", "failed", "fetched", "apart") if any(getattr(row, name) for row in rows)
    ]
    targets = ["target", "missed"] if has_target else []
    speeds = ["target", "slow"] if has_tpot else []
    names = ("TTFT P50", "P95", "P99", *targets, "TPOT P95", *speeds, *troubles, "in", "cached", "out")
    table = _table("class", "", "requests", *names, texts=2)
    for row in rows:
        missed = [_promise(row), _percent(row.missed)] if has_target else []
        slow = [_target(row.tpot_target_s), _percent(row.slow)] if has_tpot else []
        table.add_row(
            row.name,
            _sign(row.keeps),
            f"{row.requests:,}",
            *_three(row.ttft_s),
            *missed,
            _time(_quantile(row.tpot_s, "p95")),
            *slow,
            *(_count(getattr(row, name)) for name in troubles),
            *map(_amount, (row.prompt_tokens, row.cached_tokens, row.completion_tokens)),
        )
    return table


def _tenants(summary: Summary) -> Table:
    table = _table("tenant", "requests", "share", "spend", "in", "out", "refused", "limited")
    for row in summary.tenants:
        table.add_row(
            row.name,
            f"{row.requests:,}",
            f"{row.share:.1%}",
            _spend(row.spend, summary.currency),
            _amount(row.prompt_tokens),
            _amount(row.completion_tokens),
            _count(row.refused),
            _count(row.limited),
        )
    return table


def _backends(summary: Summary) -> Table:
    fetches = any(pool.fetched_tokens for pool in summary.pools)
    more = ("fetched",) if fetches else ()
    table = _table(
        "backend", "requests", "busy", "hit rate", "queue", "computed", "cached", *more, "drawn", "preempted"
    )
    for pool in summary.pools:
        table.add_row(f"{pool.name} ({pool.backends})", *_cells(pool, fetches=fetches))
        for row in summary.backends:
            if row.pool == pool.name and pool.backends > 1:
                table.add_row(f"  {row.name}", *_cells(row, fetches=fetches))
    return table


def _cells(row: BackendSummary, *, fetches: bool) -> Iterator[str]:
    yield f"{row.requests:,}"
    yield f"{row.utilisation:.0%}"
    yield f"{row.hit_rate:.1%}"
    yield _time(row.queue_s)
    yield from map(_amount, (row.prompt_tokens, row.cached_tokens))
    if fetches:
        yield _amount(row.fetched_tokens)
    yield _amount(row.drawn_tokens)
    yield _count(row.preemptions)


def _rest(summary: Summary) -> Iterator[str]:
    if summary.steps:
        tried = ", ".join(f"{name}: {step} {count:,}x" for name, step, count in summary.steps)
        yield f"on_miss  {tried}"
    if summary.agreement is not None:
        agreed = summary.agreement
        same_class, same_backend = (
            count / max(1, agreed.requests) for count in (agreed.same_class, agreed.same_backend)
        )
        yield f"as in the log  class {same_class:.1%}, backend {same_backend:.1%} of {agreed.requests:,} requests"


def _noted(summary: Summary) -> Iterator[str]:
    return (f"note  {note}" for note in summary.notes)


def _classes_compared(first: Summary, second: Summary) -> Table:
    table = _table("class", "", "1", "2", "2 - 1", texts=2)
    others = {row.name: row for row in second.classes}
    for row in first.classes:
        other = others.get(row.name)
        if other is None:
            table.add_row(row.name, "requests", f"{row.requests:,}", "-", "")
            continue
        for at, (what, left, right, change) in enumerate(_measures(row, other)):
            table.add_row(row.name if at == 0 else "", what, left, right, change)
    for name in sorted(others.keys() - {row.name for row in first.classes}):
        table.add_row(name, "requests", "-", f"{others[name].requests:,}", "")
    return table


def _measures(row: ClassSummary, other: ClassSummary) -> Iterator[tuple[str, str, str, str]]:
    yield "requests", f"{row.requests:,}", f"{other.requests:,}", _change(f"{other.requests - row.requests:+,}")
    for label, quantile in (("TTFT P50", "p50"), ("TTFT P95", "p95"), ("TTFT P99", "p99")):
        yield (label, *_times(_quantile(row.ttft_s, quantile), _quantile(other.ttft_s, quantile)))
    yield ("TPOT P95", *_times(_quantile(row.tpot_s, "p95"), _quantile(other.tpot_s, "p95")))
    if row.missed is not None and other.missed is not None:
        points = _change(f"{100 * (other.missed - row.missed):+.1f} points")
        yield "missed", _percent(row.missed), _percent(other.missed), points
    for name in ("fetched", "apart"):
        one, two = getattr(row, name), getattr(other, name)
        if one or two:
            yield name, f"{one:,}", f"{two:,}", _change(f"{two - one:+,}")
    if row.refused or other.refused:
        yield "refused", f"{row.refused:,}", f"{other.refused:,}", _change(f"{other.refused - row.refused:+,}")
    if row.limited or other.limited:
        yield "limited", f"{row.limited:,}", f"{other.limited:,}", _change(f"{other.limited - row.limited:+,}")


def _pools_compared(first: Summary, second: Summary) -> Table:
    table = _table("pool", "", "1", "2", "2 - 1", texts=2)
    others = {row.name: row for row in second.pools}
    for row in first.pools:
        other = others.get(row.name)
        if other is None:
            continue
        busy = _change(f"{100 * (other.utilisation - row.utilisation):+.0f} points")
        hits = _change(f"{100 * (other.hit_rate - row.hit_rate):+.1f} points")
        table.add_row(row.name, "backends", str(row.backends), str(other.backends), "")
        table.add_row("", "busy", f"{row.utilisation:.0%}", f"{other.utilisation:.0%}", busy)
        table.add_row("", "hit rate", f"{row.hit_rate:.1%}", f"{other.hit_rate:.1%}", hits)
        table.add_row("", "queue", *_times(row.queue_s, other.queue_s))
    return table


def _difference(row: ClassSummary, other: ClassSummary) -> dict[str, float | None]:
    def less(left: float | None, right: float | None) -> float | None:
        return None if left is None or right is None else round(right - left, 6)

    return {
        "ttft_p50_s": less(_quantile(row.ttft_s, "p50"), _quantile(other.ttft_s, "p50")),
        "ttft_p95_s": less(_quantile(row.ttft_s, "p95"), _quantile(other.ttft_s, "p95")),
        "ttft_p99_s": less(_quantile(row.ttft_s, "p99"), _quantile(other.ttft_s, "p99")),
        "tpot_p95_s": less(_quantile(row.tpot_s, "p95"), _quantile(other.tpot_s, "p95")),
        "missed": less(row.missed, other.missed),
        "refused": other.refused - row.refused,
        "limited": other.limited - row.limited,
    }


def _quantile(spread: Spread | None, name: str) -> float | None:
    return None if spread is None else float(getattr(spread, name))


def _three(spread: Spread | None) -> tuple[str, str, str]:
    return ("-", "-", "-") if spread is None else (_time(spread.p50), _time(spread.p95), _time(spread.p99))


def _times(left: float | None, right: float | None) -> tuple[str, str, str]:
    if left is None or right is None:
        return _time(left), _time(right), ""
    return _time(left), _time(right), _change(f"{'-' if right < left else '+'}{_time(abs(right - left))}")


def _change(signed: str) -> str:
    """`signed`, a difference as text, without its sign if all of its digits are 0."""
    return signed if any(digit in signed for digit in "123456789") else signed.lstrip("+-")


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 0.1:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def _target(seconds: float | None) -> str:
    return "-" if seconds is None else written_seconds(seconds)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _promise(row: ClassSummary) -> str:
    if row.ttft_target_s is None and row.deadline_s is not None:
        return f"{_target(row.deadline_s)} whole"
    return _target(row.ttft_target_s)


def _count(count: int) -> str:
    return f"{count:,}" if count else "-"


def _spend(units: float, currency: str | None) -> str:
    return _amount(units) if currency is None else rounded_cost(round(units * COST_UNIT), currency)


def _amount(count: float) -> str:
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:,.1f}{unit}"
    return f"{count:,.0f}"


def _sign(keeps: bool | None) -> str:
    return "" if keeps is None else "✓" if keeps else "✗"
