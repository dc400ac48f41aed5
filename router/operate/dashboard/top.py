"""`pointsman top`: what the dashboard shows, in a terminal."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TypeAlias

import msgspec
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from policies.errors import BackendFailed, ExpectedError, InvalidRequest
from router.operate.dashboard.nouns import BackendRow, Budget, ClassRow, DecisionRow, Measure, Snapshot, TenantRow

KEY_VARIABLE = "POINTSMAN_ADMIN_KEY"

_TIMEOUT_S = 5.0
_MOST_DECISIONS = 60
_WHERE = "`pointsman up` and `serve` print where the dashboard is when they start; give that address as --admin"
_SIGNS = {
    "well": "[blue]✓[/]",
    "finished": "[blue]✓[/]",
    "draining": "◐",
    "running": "◐",
    "unreached": "○",
    "cancelled": "○",
}


_MOST_TROUBLES = 5

Row: TypeAlias = tuple[str, ...]

# Names of columns, and how soon each is left out where a terminal is narrow: the highest number first, 0 never.
_CLASSES = (
    *(("class", 0), ("TTFT p50", 6), ("TTFT p95", 1), ("p99", 8), ("target", 2)),
    *(("TPOT p50", 7), ("TPOT p95", 3), ("p99", 9), ("target", 4), ("late", 2), ("waiting", 1), ("ended", 5)),
)
_TENANTS = (
    *(("tenant", 0), ("weight", 7), ("share", 1), ("entitled", 3), ("running", 2), ("waiting", 2)),
    *(("cached", 3), ("cost/min", 5), ("spent", 6), ("left", 1)),
)
_BACKENDS = (
    *(("backend", 0), ("state", 0), ("running", 1), ("of", 3), ("waiting", 2), ("KV in use", 4)),
    *(("hit rate", 3), ("wait", 5), ("weight", 6), ("ended", 2)),
)
_DECISIONS = (
    *(("at", 7), ("tenant", 1), ("class", 2), ("tokens", 5), ("backend", 1), ("first token", 6)),
    *(("outcome", 1), ("why", 1)),
)


class Source:
    """Asks a router's operators' port at `url` for snapshots, and puts their decisions together."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url, self._key = url.rstrip("/").removesuffix("/dashboard"), key
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
                if error.code in (401, 403):
                    raise InvalidRequest(_reason(error.read()), hint=f"keys are read from ${KEY_VARIABLE}") from error
                raise BackendFailed(f"{self._url} serves no operators", hint=_WHERE) from error
        except (OSError, msgspec.DecodeError) as error:
            reason = getattr(error, "reason", error)
            raise BackendFailed(f"no word from {self._url}: {reason}", hint=_WHERE) from error
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
        console.print(frame(told, decisions, lines=20, width=console.width))
        return
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(frame(told, decisions, lines=console.height, width=console.width), refresh=True)
                time.sleep(every_s)
                try:
                    told, decisions = source.read()
                except ExpectedError as error:
                    last = frame(told, decisions, lines=20, width=console.width)
                    live.update(Group(Text(f"✕ {error}", style="bold red"), last), refresh=True)
    except KeyboardInterrupt:
        return


def frame(told: Snapshot, decisions: list[DecisionRow], *, lines: int, width: int) -> RenderableType:
    """What fits into `lines` lines of `width` columns; at least a few decisions."""
    troubles = _troubles(told.backends)
    used = 12 + len(told.classes) + len(told.tenants) + len(told.backends) + len(troubles)
    shown = decisions[: max(5, lines - used)]
    return Group(
        _head(told),
        Text(),
        _table(width, _CLASSES, [_class(one) for one in told.classes]),
        Text(),
        _table(width, _TENANTS, [_tenant(one) for one in told.tenants]),
        Text(),
        _table(width, _BACKENDS, [_backend(one) for one in told.backends]),
        *troubles,
        Text(),
        _table(width, _DECISIONS, [_decision(one) for one in shown]) if shown else Text("nothing was asked yet"),
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


def _class(one: ClassRow) -> Row:
    late = f"{one.ttft.late}+{one.tpot.late}" if one.ttft.late or one.tpot.late else "-"
    return one.name, *_measure(one.ttft), *_measure(one.tpot), late, str(one.waiting), _counts(one.outcomes)


def _measure(seen: Measure) -> tuple[str, str, str, str]:
    if seen.target_s is None:
        target = "-"
    else:
        sign = {True: "[blue]✓[/]", False: "[bold red]✕[/]", None: "○"}[seen.is_kept]
        target = f"p{seen.quantile * 100:.0f} {_seconds(seen.target_s)} {sign}"
    return _seconds(seen.p50_s), _seconds(seen.p95_s), _seconds(seen.p99_s), target


def _tenant(one: TenantRow) -> Row:
    numbers = (_share(one.share), _share(one.entitled), str(one.running), str(one.waiting), _hits(one))
    return one.name, f"{one.weight:g}", *numbers, _count(one.cost_minute), _count(one.cost), _budgets(one.budgets)


def _backend(one: BackendRow) -> Row:
    used = None if not one.total_tokens or one.free_tokens is None else 1 - one.free_tokens / one.total_tokens
    load = (str(one.running), "-" if one.most is None else str(one.most), str(one.waiting))
    rest = (_share(used), _hits(one), _seconds(one.queue_s), f"{one.weight:g}", _counts(one.outcomes))
    state = one.state + (" and draining" if one.draining and one.state != "draining" else "")
    name = f"{one.server} rank {one.rank}" if one.ranks > 1 else one.name
    return name, f"{_sign(one.state)} {state}", *load, *rest


def _troubles(backends: Iterable[BackendRow]) -> list[Text]:
    """A line for each backend that gets no requests because of its health, for the first few."""
    ill = [one for one in backends if one.trouble]
    return [Text(f"✕ {one.name} for {_seconds(one.trouble_s)}: {one.trouble}") for one in ill[:_MOST_TROUBLES]]


def _decision(one: DecisionRow) -> Row:
    at = datetime.fromtimestamp(one.at).astimezone().strftime("%H:%M:%S")
    outcome = f"{_sign(one.outcome)} {one.code or one.outcome}"
    estimated = "" if one.likely_prompt_tokens is None else "~"
    sizes = (estimated + _count(one.prompt_tokens), one.chosen or "nobody", _seconds(one.ttft_s))
    return at, one.tenant, one.service_class, *sizes, outcome, escape(one.why)


def _table(width: int, columns: Sequence[tuple[str, int]], rows: Sequence[Row]) -> Table:
    """The columns that fit into `width`: while they do not, the one with the highest number is left out.

    The last one may be cut.
    """
    widest = [
        max(cell_len(Text.from_markup(text).plain) for text in (name, *(row[at] for row in rows))) + 2
        for at, (name, _) in enumerate(columns)
    ]
    widest[-1] = min(widest[-1], 30)
    shown = list(range(len(columns)))
    while sum(widest[at] for at in shown) > width and columns[spare := max(shown, key=lambda at: columns[at][1])][1]:
        shown.remove(spare)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for at in shown[:-1]:
        table.add_column(columns[at][0], no_wrap=True)
    rest = width - sum(widest[at] for at in shown[:-1])
    table.add_column(columns[shown[-1]][0], max_width=rest, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(row[at] for at in shown))
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


def _hits(one: TenantRow | BackendRow) -> str:
    is_reported = one.hit_share is not None or not one.prompt_tokens
    return _share(one.hit_share) if is_reported else "not reported"


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
