"""`pointsman top`: what the dashboard shows, in a terminal."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping
from datetime import datetime

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from policies.errors import BackendFailed, ExpectedError, InvalidRequest
from router.dashboard.nouns import BackendRow, Budget, ClassRow, DecisionRow, Measure, Snapshot, TenantRow

KEY_VARIABLE = "POINTSMAN_ADMIN_KEY"

_TIMEOUT_S = 5.0
_MOST_DECISIONS = 60
_SIGNS = {
    "well": "[blue]✓[/]",
    "finished": "[blue]✓[/]",
    "draining": "◐",
    "running": "◐",
    "unreached": "○",
    "cancelled": "○",
}


class Source:
    """Asks a router's operators' port at `url` for snapshots, and puts their decisions together."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url, self._key = url.rstrip("/"), key
        if not self._url.startswith(("http://", "https://")):
            self._url = f"http://{self._url}"
        self._revision = 0
        self._decisions: dict[int, DecisionRow] = {}

    def __repr__(self) -> str:
        return f"<Source {self._url}, {len(self._decisions)} decisions>"

    def read(self) -> tuple[Snapshot, list[DecisionRow]]:
        """A snapshot, and the newest decisions first. Raises ExpectedError."""
        request = urllib.request.Request(f"{self._url}/admin/snapshot?since={self._revision}")  # noqa: S310 - http(s) only
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:  # noqa: S310
                told = msgspec.json.decode(reply.read(), type=Snapshot)
        except urllib.error.HTTPError as error:
            with error:
                raise InvalidRequest(_reason(error.read()), hint=f"keys are read from ${KEY_VARIABLE}") from error
        except (OSError, msgspec.DecodeError) as error:
            hint = "is --admin where the router serves operators? It says so when it starts"
            raise BackendFailed(f"no word from {self._url}: {error}", hint=hint) from error
        if told.revision < self._revision:
            self._decisions.clear()
        self._revision = told.revision
        self._decisions.update({row.number: row for row in told.decisions})
        newest = deque(sorted(self._decisions.items()), maxlen=_MOST_DECISIONS)
        self._decisions = dict(newest)
        return told, [row for _, row in reversed(newest)]


def run(url: str, *, once: bool, every_s: float = 1.0) -> None:
    """Show what the router at `url` says until Ctrl-C, or one frame. Raises ExpectedError if there is no first word."""
    source, console = Source(url, os.environ.get(KEY_VARIABLE)), Console()
    told, decisions = source.read()
    if once:
        console.print(frame(told, decisions, lines=20))
        return
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(frame(told, decisions, lines=console.height), refresh=True)
                time.sleep(every_s)
                try:
                    told, decisions = source.read()
                except ExpectedError as error:
                    live.update(
                        Group(Text(f"✕ {error}", style="bold red"), frame(told, decisions, lines=20)), refresh=True
                    )
    except KeyboardInterrupt:
        return


def frame(told: Snapshot, decisions: list[DecisionRow], *, lines: int) -> RenderableType:
    """What fits into `lines` lines; at least a few decisions."""
    used = 12 + len(told.classes) + len(told.tenants) + len(told.backends)
    return Group(
        _head(told),
        Text(),
        _classes(told.classes),
        Text(),
        _tenants(told.tenants),
        Text(),
        _backends(told.backends),
        Text(),
        _decisions(decisions[: max(5, lines - used)]),
    )


def _head(told: Snapshot) -> Text:
    ended = sum(sum(one.outcomes.values()) for one in told.tenants)
    ready = "[blue]✓ ready[/]" if told.is_ready else "[bold red]✕ not ready[/]"
    parts = (
        f"[bold]Pointsman[/] {ready}",
        f"file {told.config_version}",
        f"up {_seconds(told.up_s)}",
        f"{ended / max(1.0, told.window_s):.1f} requests/s",
        f"{told.in_flight} at backends",
        f"{told.waiting} waiting",
    )
    return Text.from_markup("  ".join(parts))


def _classes(rows: tuple[ClassRow, ...]) -> Table:
    table = _table(
        "class", "TTFT p50", "p95", "p99", "target", "TPOT p50", "p95", "p99", "target", "late", "waiting", "ended"
    )
    for one in rows:
        late = f"{one.ttft.late}+{one.tpot.late}" if one.ttft.late or one.tpot.late else "-"
        table.add_row(one.name, *_measure(one.ttft), *_measure(one.tpot), late, str(one.waiting), _counts(one.outcomes))
    return table


def _measure(seen: Measure) -> tuple[str, str, str, str]:
    if seen.target_s is None:
        target = "-"
    else:
        sign = {True: "[blue]✓[/]", False: "[bold red]✕[/]", None: "○"}[seen.is_kept]
        target = f"p{seen.quantile * 100:.0f} {_seconds(seen.target_s)} {sign}"
    return _seconds(seen.p50_s), _seconds(seen.p95_s), _seconds(seen.p99_s), target


def _tenants(rows: tuple[TenantRow, ...]) -> Table:
    table = _table("tenant", "weight", "share", "entitled", "running", "waiting", "cached", "cost/min", "spent", "left")
    for one in rows:
        cached = one.cached_tokens / one.prompt_tokens if one.prompt_tokens else None
        numbers = (_share(one.share), _share(one.entitled), str(one.running), str(one.waiting), _share(cached))
        costs = (_count(one.cost_minute), _count(one.cost))
        table.add_row(one.name, f"{one.weight:g}", *numbers, *costs, _budgets(one.budgets))
    return table


def _backends(rows: tuple[BackendRow, ...]) -> Table:
    table = _table("backend", "state", "running", "of", "waiting", "KV in use", "hit rate", "wait", "weight", "ended")
    for one in rows:
        used = None if not one.total_tokens or one.free_tokens is None else 1 - one.free_tokens / one.total_tokens
        load = (str(one.running), "-" if one.most is None else str(one.most), str(one.waiting))
        rest = (_share(used), _share(one.hit_share), _seconds(one.queue_s), f"{one.weight:g}", _counts(one.outcomes))
        state = one.state + (" and draining" if one.draining and one.state != "draining" else "")
        table.add_row(one.name, f"{_sign(one.state)} {state}", *load, *rest)
    return table


def _decisions(rows: list[DecisionRow]) -> Table:
    table = _table("at", "tenant", "class", "tokens", "backend", "first token", "outcome", "why")
    for one in rows:
        at = datetime.fromtimestamp(one.at).astimezone().strftime("%H:%M:%S")
        outcome = f"{_sign(one.outcome)} {one.code or one.outcome}"
        sizes = (_count(one.prompt_tokens), one.chosen or "nobody", _seconds(one.ttft_s))
        table.add_row(at, one.tenant, one.service_class, *sizes, outcome, escape(one.why))
    if not rows:
        table.add_row("-", "nothing was asked yet")
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    return table


def _sign(word: str) -> str:
    return _SIGNS.get(word, "[bold red]✕[/]")


def _counts(outcomes: Mapping[str, int]) -> str:
    return " ".join(f"{_sign(word)} {count} {word}" for word, count in outcomes.items()) or "-"


def _budgets(budgets: Mapping[str, Budget]) -> str:
    return ", ".join(f"{_count(one.remaining)} {name}" for name, one in budgets.items()) or "no limits"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _count(count: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def _reason(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "the router answers with an error"
