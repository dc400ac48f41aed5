"""The board: the router's last decisions and outcomes, in bounded memory."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from policies.nouns import Decision, Outcome, Request, Usage
from router.call.observer import Account
from router.operate.dashboard.window import Sketch, Window

_NO_USAGE = Usage()

MOST_ROWS = 256
"""Most decisions kept; with 100 backends and four scores they take 10 MB."""

MOST_KEYS = 2**17
"""Most block keys of all kept prompts together: 5 MB. The oldest decisions are dropped first."""

MOST_TOTALS = 4096
"""Most pairs of tenant and model with totals of their own, so that a flood of names cannot fill the memory."""


class Row(msgspec.Struct, eq=False):
    """One decision and its outcome; `decision` is None for a call that ended before its decision.

    `number` never changes and `revision` grows with each change. `at` and `ended_at` are seconds of the router's clock.
    """

    number: int
    revision: int
    request: str
    tenant: str
    service_class: str
    at: float
    asked: Request | None = None
    decision: Decision | None = None
    outcome: str = "running"
    code: str = ""
    ended_at: float | None = None
    ttft_s: float | None = None
    usage: Usage = _NO_USAGE
    is_reported: bool = True


@dataclass(slots=True)
class Totals:
    """Sums over calls. `cost` is in thousandths of the unit of the tenants' budgets. `reported_tokens` counts
    the tokens of prompts at backends that report their cached tokens."""

    outcomes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    reported_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: int = 0

    @property
    def hit_share(self) -> float | None:
        """The cached share of the prompts, in [0, 1]; None if no backend reported any."""
        return min(1.0, self.cached_tokens / self.reported_tokens) if self.reported_tokens else None

    @property
    def requests(self) -> int:
        """Number of calls, whatever their outcome."""
        return self.outcomes.total()

    def count(self, outcome: str, usage: Usage, cost: int, *, is_reported: bool) -> None:
        """Count one more call; `is_reported`: its backend reports how many prompt tokens were cached."""
        self.outcomes[outcome] += 1
        self.prompt_tokens += usage.prompt_tokens
        self.reported_tokens += usage.prompt_tokens if is_reported else 0
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens
        self.cost += cost

    def add(self, other: Totals) -> None:
        """Add the counts of `other`."""
        for word, count in other.outcomes.items():
            self.outcomes[word] += count
        self.prompt_tokens += other.prompt_tokens
        self.reported_tokens += other.reported_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens
        self.cost += other.cost


@dataclass(slots=True)
class ClassMinute:
    """One class in one slot of a window: durations, outcomes, and the steps of `on_miss` that were tried."""

    ttft: Sketch = field(default_factory=Sketch)
    tpot: Sketch = field(default_factory=Sketch)
    outcomes: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Seen:
    """The counts of one slot of the window, by name."""

    classes: defaultdict[str, ClassMinute] = field(default_factory=lambda: defaultdict(ClassMinute))
    tenants: defaultdict[str, Totals] = field(default_factory=lambda: defaultdict(Totals))
    backends: defaultdict[str, Totals] = field(default_factory=lambda: defaultdict(Totals))


class Board:
    """A telemetry listener. `clock` is the router's, and `reports_cache` tells whether a backend reports how much of a
    prompt was cached.

    Names of tenants, classes and backends come from the SLA file, so a slot has a bounded number of entries: one
    for each name, and one for calls of unknown tenants.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        reports_cache: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._clock, self._reports_cache = clock, reports_cache
        self.started_at = clock()
        self._rows: deque[Row] = deque()
        self._newest: dict[str, Row] = {}
        self._keys = 0
        self._number = 0
        self.revision = 0
        self._window: Window[Seen] = Window(Seen)
        self.totals: dict[tuple[str, str], Totals] = {}
        """(tenant, model) -> totals since the router started."""

    def __repr__(self) -> str:
        return f"<Board {len(self._rows)} rows with {self._keys} keys, {len(self.totals)} totals>"

    def decided(self, request: Request, decision: Decision, at: float) -> None:
        before = self._newest.get(request.id)
        if before is not None and before.ended_at is None:
            self._retried(before, at)
        self._add(request.id, request.tenant, request.service_class, at, request, decision)

    def ended(self, account: Account, outcome: Outcome, code: str, at: float) -> None:
        word, usage = str(outcome), account.usage
        cost = sum([spent.cost for spent in account.spent])
        only = self._newest.get(account.id)
        rows, is_reported = self._rows_of(account, at) if only is None else [only], True
        for row in rows:
            if row.decision is not None and row.decision.chosen is not None:
                is_reported = is_reported and self._reports_cache(row.decision.chosen)
        seen, total = self._window.at(at), self.totals.get((account.tenant, account.model))
        for sums in (seen.tenants[account.tenant], self._total(account) if total is None else total):
            sums.count(word, usage, cost, is_reported=is_reported)
        minute = seen.classes[account.service_class]
        minute.outcomes[word] += 1
        ttft_s = None if account.first_at is None else account.first_at - account.started_at
        if ttft_s is not None:
            minute.ttft.add(ttft_s)
        if account.first_at is not None and account.last_at is not None and usage.completion_tokens > 1:
            minute.tpot.add((account.last_at - account.first_at) / (usage.completion_tokens - 1))
        for row in rows:
            row.is_reported = is_reported
            row.outcome, row.code, row.ended_at, row.ttft_s = word, code, at, ttft_s
            # for a call with several prompts only the sum is known
            row.usage = usage if len(rows) == 1 else _NO_USAGE
            self._changed(row)
            if row.decision is not None and row.decision.chosen is not None:
                seen.backends[row.decision.chosen].count(word, row.usage, cost, is_reported=is_reported)

    def missed(self, service_class: str, step: str) -> None:
        self._window.at(self._clock()).classes[service_class].steps[step] += 1

    def rows(self, since: int = 0) -> Iterator[Row]:
        """Rows that changed after revision `since`, oldest decision first."""
        return (row for row in self._rows if row.revision > since)

    def row(self, number: int) -> Row | None:
        """The row with this number; None if it is no longer kept."""
        return next((row for row in reversed(self._rows) if row.number == number), None)

    def of_class(self, name: str, now: float) -> ClassMinute:
        """The class's counts in the window that ends at `now`."""
        minutes = [seen.classes[name] for seen in self._window.within(now) if name in seen.classes]
        outcomes: Counter[str] = Counter()
        steps: Counter[str] = Counter()
        for minute in minutes:
            outcomes.update(minute.outcomes)
            steps.update(minute.steps)
        ttft, tpot = (Sketch.merged(getattr(minute, what) for minute in minutes) for what in ("ttft", "tpot"))
        return ClassMinute(ttft, tpot, outcomes, steps)

    def of_tenant(self, name: str, now: float) -> Totals:
        """The tenant's totals in the window that ends at `now`."""
        return _sum(seen.tenants[name] for seen in self._window.within(now) if name in seen.tenants)

    def of_backend(self, name: str, now: float) -> Totals:
        """The backend's totals in the window that ends at `now`."""
        return _sum(seen.backends[name] for seen in self._window.within(now) if name in seen.backends)

    def check(self) -> None:
        """Assert the bounds, and that every name leads to a row that is still kept."""
        assert len(self._rows) <= MOST_ROWS, f"{self!r} keeps too many rows"
        assert self._keys == sum(map(_keys_of, self._rows)), f"{self!r} has lost count of its keys"
        assert self._keys <= MOST_KEYS or len(self._rows) == 1, f"{self!r} has too many keys"
        assert set(self._newest.values()) <= set(self._rows), f"{self!r} names rows that were dropped"

    def _add(
        self,
        request: str,
        tenant: str,
        service_class: str,
        at: float,
        asked: Request | None = None,
        decision: Decision | None = None,
    ) -> Row:
        """A row at the end; the oldest go where there is no more room."""
        self._number += 1
        self.revision += 1
        row = Row(self._number, self.revision, request, tenant, service_class, at, asked, decision)
        self._rows.append(row)
        self._newest[request] = row
        if asked is not None:
            self._keys += len(asked.block_keys)
        while len(self._rows) > MOST_ROWS or (self._keys > MOST_KEYS and len(self._rows) > 1):
            gone = self._rows.popleft()
            self._keys -= _keys_of(gone)
            if self._newest.get(gone.request) is gone:
                del self._newest[gone.request]
        return row

    def _retried(self, row: Row, at: float) -> None:
        """Reset the row: its attempt failed, and the prompt is decided again."""
        row.outcome, row.ended_at = "retried", at
        self._changed(row)
        if row.decision is not None and row.decision.chosen is not None:
            sums = self._window.at(at).backends[row.decision.chosen]
            sums.count("retried", _NO_USAGE, 0, is_reported=True)

    def _changed(self, row: Row) -> None:
        self.revision += 1
        row.revision = self.revision

    def _rows_of(self, account: Account, at: float) -> list[Row]:
        """The rows of a call with several prompts, one for each, or a new row if none was decided."""
        rows: list[Row] = []
        while f"{account.id}-{len(rows)}" in self._newest:
            rows.append(self._newest[f"{account.id}-{len(rows)}"])
        if not rows:
            rows.append(self._add(account.id, account.tenant, account.service_class, at))
        return rows

    def _total(self, account: Account) -> Totals:
        owner = (account.tenant, account.model)
        if owner not in self.totals and len(self.totals) >= MOST_TOTALS:
            owner = ("others", "")
        return self.totals.setdefault(owner, Totals())


def _sum(parts: Iterable[Totals]) -> Totals:
    whole = Totals()
    for part in parts:
        whole.add(part)
    return whole


def _keys_of(row: Row) -> int:
    return 0 if row.asked is None else len(row.asked.block_keys)
