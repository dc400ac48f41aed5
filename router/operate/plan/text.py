"""A Plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from io import StringIO

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from router.operate.plan.nouns import HourNeed, Plan, PoolPlan
from router.terminal import inert_console

_WIDTH = 150


def as_text(plan: Plan) -> str:
    """`plan` as plain text."""
    console = inert_console(file=StringIO(), width=_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(shown(plan))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n")


def shown(plan: Plan) -> RenderableType:
    """`plan` as one table per pool, each with its reasons and the command that verifies it."""
    seconds = plan.last_s - plan.first_s
    parts: list[RenderableType] = [Text(f"{plan.requests:,} requests in {seconds:,.0f} s, from {_time(plan.first_s)}")]
    for pool in plan.pools:
        parts += [Text(""), *_pool(pool)]
    if plan.notes:
        parts += [Text(""), Text("Notes"), *(_line(f"- {note}") for note in plan.notes)]
    return Group(*parts)


def _pool(plan: PoolPlan) -> Iterator[RenderableType]:
    peak = plan.peak
    missed = f"{peak.missed / peak.with_target:.1%} missed a target" if peak.with_target else "no request had a target"
    yield Text(
        f"{plan.pool}: backends needed: {_number(plan.needed, plan.bound)}, for the hour from {_time(peak.start_s)}, "
        f"when {peak.backends:,} answered and {missed}"
    )
    yield _table(plan)
    for reason in plan.reasons:
        yield _line(f"why: {reason}")
    yield _line(f"verify: {plan.verify}")


def _table(plan: PoolPlan) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="")
    columns = ("hour", "requests", "unserved", "missed", "had", "in flight P95", "highest", "tokens P95", "highest")
    for at, column in enumerate((*columns, "needed", "limited by")):
        table.add_column(column, justify="right" if 0 < at <= len(columns) else "left", no_wrap=True)
    for hour in plan.hours:
        table.add_row(*_row(hour))
    return table


def _row(hour: HourNeed) -> Iterator[str]:
    yield _time(hour.start_s)
    yield f"{hour.requests:,}"
    yield f"{hour.unserved:,}"
    yield f"{hour.missed / hour.with_target:.1%}" if hour.with_target else "-"
    yield f"{hour.backends:,}"
    yield f"{hour.p95_requests:,.0f}"
    yield f"{hour.most_requests:,.0f}"
    yield f"{hour.p95_prompt_tokens:,.0f}"
    yield f"{hour.most_prompt_tokens:,.0f}"
    yield _number(hour.needed, hour.bound)
    yield "" if hour.limited_by is None else hour.limited_by.replace("_", " ")


def _number(needed: int | None, bound: str) -> str:
    if needed is None:
        return "?"
    return {"at_least": f"at least {needed:,}", "or_fewer": f"{needed:,} or fewer"}.get(bound, f"{needed:,}")


def _line(text: str) -> RenderableType:
    return Padding(Text(text), (0, 0, 0, 2))


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M")
