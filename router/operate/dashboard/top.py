"""`pointsman top`: the dashboard in a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TypeAlias

import msgspec
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from policies.errors import ExpectedError
from policies.quota.budget import COST_UNIT, rounded_cost
from router.inert import inert
from router.operate.admin_port import AdminPort
from router.operate.dashboard.nouns import BackendRow, Budget, ClassRow, DecisionRow, Snapshot, TargetMeasure, TenantRow
from router.terminal import inert_console
from tls.settings import TlsSettings

_MOST_DECISIONS = 60
_SIGNS = {
    "well": "✓",
    "finished": "✓",
    "draining": "◐",
    "running": "◐",
    "unreached": "○",
    "cancelled": "○",
}


_MOST_TROUBLES = 5

_SNAPSHOTS = msgspec.json.Decoder(Snapshot)

Row: TypeAlias = tuple[str, ...]

# Names of columns, and their order of removal on a narrow terminal: the highest number first, 0 never.
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


class OperatorsPort:
    """Reads snapshots from a router's admin `port`, and collects their decisions."""

    def __init__(self, port: AdminPort) -> None:
        self._port = port
        self._revision = 0
        self._decisions: dict[int, DecisionRow] = {}

    def __repr__(self) -> str:
        return f"<OperatorsPort {self._port!r}, {len(self._decisions)} decisions>"

    def read(self) -> tuple[Snapshot, list[DecisionRow]]:
        """A snapshot, and the newest decisions first. Raises ExpectedError."""
        answer = self._port.call(f"/admin/snapshot?since={self._revision}")
        try:
            snapshot = _SNAPSHOTS.decode(answer)
        except (ValueError, RecursionError) as error:
            raise self._port.no_reply(error) from error
        if snapshot.revision < self._revision:
            self._decisions.clear()
        self._revision = snapshot.revision
        self._decisions.update({row.number: row for row in snapshot.decisions})
        newest = deque(sorted(self._decisions.items()), maxlen=_MOST_DECISIONS)
        self._decisions = dict(newest)
        return snapshot, [row for _, row in reversed(newest)]


def run(url: str, *, once: bool, tls: TlsSettings | None = None, every_s: float = 1.0) -> None:
    """Show the state of the router at `url` until Ctrl-C, or one frame. Raises ExpectedError if it cannot be read."""
    source, console = OperatorsPort(AdminPort.from_environment(url, tls)), inert_console()
    snapshot, decisions = source.read()
    if once:
        console.print(frame(snapshot, decisions, lines=20, width=console.width))
        return
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(frame(snapshot, decisions, lines=console.height, width=console.width), refresh=True)
                time.sleep(every_s)
                try:
                    snapshot, decisions = source.read()
                except ExpectedError as error:
                    last = frame(snapshot, decisions, lines=20, width=console.width)
                    live.update(Group(Text(f"✕ {error}", style="bold red"), last), refresh=True)
    except KeyboardInterrupt:
        return


def frame(snapshot: Snapshot, decisions: list[DecisionRow], *, lines: int, width: int) -> RenderableType:
    """As much as fits into `lines` lines of `width` columns; at least a few decisions."""
    troubles = _troubles(snapshot.backends)
    used = 12 + len(snapshot.classes) + len(snapshot.tenants) + len(snapshot.backends) + len(troubles)
    shown = decisions[: max(5, lines - used)]
    return Group(
        _head(snapshot, width),
        Text(),
        _table(width, _CLASSES, [_class(service_class) for service_class in snapshot.classes]),
        Text(),
        _table(width, _TENANTS, [_tenant(tenant) for tenant in snapshot.tenants]),
        Text(),
        _table(width, _BACKENDS, [_backend(backend) for backend in snapshot.backends]),
        *troubles,
        Text(),
        _table(width, _DECISIONS, [_decision(row) for row in shown]) if shown else Text("nothing was asked yet"),
    )


def _head(snapshot: Snapshot, width: int) -> Text:
    """One line: while it is wider than `width`, the part with the highest number is left out, as of tables."""
    ended = sum(sum(tenant.outcomes.values()) for tenant in snapshot.tenants)
    ready = "✓ ready" if snapshot.is_ready else "✕ not ready"
    parts = {
        f"Pointsman {ready}": 0,
        f"file {snapshot.config_version}": 5,
        f"up {_seconds(snapshot.up_s)}": 4,
        f"{ended / max(1.0, snapshot.window_s):.1f} requests/s": 3,
        f"{snapshot.in_flight} at backends": 2,
        f"{snapshot.waiting} waiting": 1,
    }
    while (line := _signed("  ".join(parts))).cell_len > width and len(parts) > 1:
        del parts[max(parts, key=parts.__getitem__)]
    line.highlight_words(("Pointsman",), "bold")
    return line


def _class(row: ClassRow) -> Row:
    late = f"{row.ttft.late}+{row.tpot.late}" if row.ttft.late or row.tpot.late else "-"
    return row.name, *_measure(row.ttft), *_measure(row.tpot), late, str(row.waiting), _counts(row.outcomes)


def _measure(seen: TargetMeasure) -> tuple[str, str, str, str]:
    if seen.target_s is None:
        target = "-"
    else:
        sign = {True: "✓", False: "✕", None: "○"}[seen.is_kept]
        target = f"p{seen.quantile * 100:.0f} {_seconds(seen.target_s)} {sign}"
    return _seconds(seen.p50_s), _seconds(seen.p95_s), _seconds(seen.p99_s), target


def _tenant(tenant: TenantRow) -> Row:
    numbers = (_share(tenant.share), _share(tenant.entitled), str(tenant.running), str(tenant.waiting), _hits(tenant))
    return (
        tenant.name,
        f"{tenant.weight:g}",
        *numbers,
        _cost(tenant.cost_minute, tenant.currency),
        _cost(tenant.cost, tenant.currency),
        _budgets(tenant.budgets),
    )


def _backend(backend: BackendRow) -> Row:
    used = (
        None
        if not backend.total_tokens or backend.free_tokens is None
        else 1 - backend.free_tokens / backend.total_tokens
    )
    load = (str(backend.running), "-" if backend.most is None else str(backend.most), str(backend.waiting))
    rest = (_share(used), _hits(backend), _seconds(backend.queue_s), f"{backend.weight:g}", _counts(backend.outcomes))
    state = backend.state + (" and draining" if backend.draining and backend.state != "draining" else "")
    name = f"{backend.server} rank {backend.rank}" if backend.ranks > 1 else backend.name
    return name, f"{_sign(backend.state)} {state}", *load, *rest


def _troubles(backends: Iterable[BackendRow]) -> list[Text]:
    """A line for each backend that gets no requests because of its health, for the first few."""
    ill = [backend for backend in backends if backend.trouble]
    return [
        Text(
            f"✕ {backend.name} for {_seconds(backend.trouble_s)}: {backend.trouble}", no_wrap=True, overflow="ellipsis"
        )
        for backend in ill[:_MOST_TROUBLES]
    ]


def _decision(decision: DecisionRow) -> Row:
    at = datetime.fromtimestamp(decision.at).astimezone().strftime("%H:%M:%S")
    outcome = f"{_sign(decision.outcome)} {decision.code or decision.outcome}"
    estimated = "" if decision.likely_prompt_tokens is None else "~"
    sizes = (estimated + _count(decision.prompt_tokens), decision.chosen or "none", _seconds(decision.ttft_s))
    return at, decision.tenant, decision.service_class, *sizes, outcome, decision.why


def _table(width: int, columns: Sequence[tuple[str, int]], rows: Sequence[Row]) -> Table:
    """The columns that fit into `width`: while they do not, the column with the highest number is left out.

    The last column may be cut.
    """
    widest = [
        max(cell_len(inert(text)) for text in (name, *(row[at] for row in rows))) + 2
        for at, (name, _) in enumerate(columns)
    ]
    widest[-1] = min(widest[-1], 30)
    shown = list(range(len(columns)))
    while sum(widest[at] for at in shown) > width and len(shown) > 1:
        spare = max(shown, key=lambda at: columns[at][1])
        if not columns[spare][1]:
            break
        shown.remove(spare)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for at in shown[:-1]:
        table.add_column(columns[at][0], no_wrap=True)
    rest = width - sum(widest[at] for at in shown[:-1])
    table.add_column(columns[shown[-1]][0], max_width=rest, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(_signed(row[at]) for at in shown))
    return table


def _signed(text: str) -> Text:
    """`text`, which names others have chosen may be a part of, with signs in their colours."""
    shown = Text(inert(text))
    shown.highlight_words(("✓",), "blue")
    shown.highlight_words(("✕",), "bold red")
    return shown


def _sign(word: str) -> str:
    return _SIGNS.get(word, "✕")


def _counts(outcomes: Mapping[str, int]) -> str:
    return " ".join(f"{_sign(word)} {count} {word}" for word, count in outcomes.items()) or "-"


def _budgets(budgets: Mapping[str, Budget]) -> str:
    shown = (
        budget.left if name == "cost" else f"{_count(budget.remaining)} {name}" for name, budget in budgets.items()
    )
    return ", ".join(shown) or "no limits"


def _cost(cost: float, currency: str | None) -> str:
    return _count(cost) if currency is None else rounded_cost(round(cost * COST_UNIT), currency)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _hits(row: TenantRow | BackendRow) -> str:
    is_reported = row.hit_share is not None or not row.prompt_tokens
    return _share(row.hit_share) if is_reported else "not reported"


def _count(count: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"
