"""What the dashboard shows, as it travels: `GET /admin/snapshot` is a Snapshot in JSON. Durations are in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Measure:
    """What was seen of one duration in the window, against the class's target: `quantile` of all within `target_s`.

    `at_quantile_s` is what that share really kept; `late` of `count` were longer than the target. None: no target, or
    nothing seen.
    """

    count: int = 0
    p50_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    quantile: float = 0.95
    target_s: float | None = None
    at_quantile_s: float | None = None
    late: int = 0

    @property
    def is_kept(self) -> bool | None:
        """Does the target hold? None: there is none, or nothing was seen."""
        if self.target_s is None or self.at_quantile_s is None:
            return None
        return self.at_quantile_s <= self.target_s


@dataclass(frozen=True, slots=True)
class ClassRow:
    """One service class. `steps` are those of `on_miss` that were tried."""

    name: str
    rank: int
    ttft: Measure
    tpot: Measure
    deadline_s: float | None
    waiting: int
    outcomes: Mapping[str, int]
    steps: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Budget:
    """One limit of a tenant: what is left of it."""

    limit: int
    remaining: int


@dataclass(frozen=True, slots=True)
class TenantRow:
    """One tenant. `share` is its part of what all tenants used in the window (by cost), `entitled` that of its weight
    among those who used anything or wait; both 0..1. `cost` is in units of the budgets; `minute` of the window,
    `cost` since the router started. `hit_share` is the cached part of the `reported_tokens`, which are those of prompts
    whose backends report how much was cached; None without any.
    """

    name: str
    weight: float
    share: float
    entitled: float | None
    running: int
    waiting: int
    outcomes: Mapping[str, int]
    prompt_tokens: int
    reported_tokens: int
    cached_tokens: int
    hit_share: float | None
    completion_tokens: int
    cost_minute: float
    cost: float
    budgets: Mapping[str, Budget] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BackendRow:
    """One backend. `state` is well, draining, ill or unreached; `hit_share` the cached part of the prompts that it
    answered in the window, None where it does not report that; `queue_s` what a prompt sent now would wait;
    `prefill_per_s` tokens. None: nobody knows.
    It is data-parallel `rank` of the `ranks` that its `server` runs. `events` says in words how its cache events are
    used, or why not; empty where none are heard and nothing differs.
    """

    name: str
    server: str
    rank: int
    ranks: int
    pool: str
    kind: str
    models: tuple[str, ...]
    state: str
    draining: bool
    weight: float
    in_flight: int
    running: int
    waiting: int
    most: int | None
    free_tokens: int | None
    total_tokens: int | None
    prompt_tokens: int
    hit_share: float | None
    queue_s: float
    prefill_per_s: float
    outcomes: Mapping[str, int]
    reported_s_ago: float | None
    events: str = ""
    trouble: str = ""
    """Why it gets no requests because of its health."""
    trouble_s: float | None = None
    """For how many seconds it has got none."""


@dataclass(frozen=True, slots=True)
class PlaceRow:
    """One backend where a prefix is: `pinned_tokens` of what it holds stay; who cannot pin keeps it as it likes."""

    backend: str
    held_tokens: int
    pinned_tokens: int
    can_pin: bool


@dataclass(frozen=True, slots=True)
class PrefixRow:
    """One prefix that is kept for `left_s` more, on `shards` backends if all is well; `message` says what is not."""

    id: str
    tenant: str
    model: str
    state: str
    message: str
    tokens: int
    shards: int
    left_s: float
    places: tuple[PlaceRow, ...]


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One line of the stream: a decision, or a call that was refused before there was one. `at` is Unix time.

    Where `prompt_tokens` is an estimate, nine of ten such prompts have as many as the two of `likely_prompt_tokens` and
    what lies between. `cached_tokens` is None where the backend does not report them.
    """

    number: int
    request: str
    at: float
    tenant: str
    service_class: str
    model: str
    prompt_tokens: int
    chosen: str | None
    why: str
    outcome: str
    code: str
    predicted_ttft_s: float | None
    ttft_s: float | None
    seconds: float | None
    cached_tokens: int | None
    completion_tokens: int
    likely_prompt_tokens: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One candidate of a decision, with its scores by name; None where a score could not tell."""

    backend: str
    total: float
    scores: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class DecisionDetail:
    """All of one decision, and where its prompt's prefix lives now: the first `held[backend]` of its `blocks`.

    `blocks` is None where the prompt was not tokenized: only backends that take text serve its model.
    """

    row: DecisionRow
    policy: str
    candidates: tuple[ScoreRow, ...]
    dropped: Mapping[str, str]
    blocks: int | None
    block_tokens: int
    held: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that the dashboard shows at one moment. `at` is Unix time.

    `decisions` are those that changed after the revision that was asked for; ask for `revision` next time. Of
    `all_prefixes` that are kept, `prefixes` are the first few: those that are not as they should be, then the newest.
    """

    at: float
    up_s: float
    window_s: float
    config_version: str
    shadow_version: str | None
    is_ready: bool
    worst_lag_s: float
    in_flight: int
    waiting: int
    requests: int
    models: tuple[str, ...]
    indexed_blocks: int
    classes: tuple[ClassRow, ...]
    tenants: tuple[TenantRow, ...]
    backends: tuple[BackendRow, ...]
    revision: int
    decisions: tuple[DecisionRow, ...]
    prefixes: tuple[PrefixRow, ...] = ()
    all_prefixes: int = 0
