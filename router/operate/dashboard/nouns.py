"""The dashboard's records: `GET /admin/snapshot` returns a Snapshot as JSON. Durations are in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.operate.dashboard.batch_row import BatchRow


@dataclass(frozen=True, slots=True)
class TargetMeasure:
    """One duration in the window, compared with its class's target: `quantile` of all values within `target_s`.

    `at_quantile_s` is the observed value at that quantile; `late` of `count` values exceeded the target. None: no
    target, or no values.
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
        """Whether the target is met; None without a target or values."""
        if self.target_s is None or self.at_quantile_s is None:
            return None
        return self.at_quantile_s <= self.target_s


@dataclass(frozen=True, slots=True)
class ClassRow:
    """One service class. `steps` counts the steps of `on_miss` that were tried."""

    name: str
    rank: int
    ttft: TargetMeasure
    tpot: TargetMeasure
    deadline_s: float | None
    waiting: int
    outcomes: Mapping[str, int]
    steps: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Budget:
    """One limit of a tenant and what is left of it; `left` is that as people read it: `12.35 USD`, `420 tokens`."""

    limit: int
    remaining: int
    left: str = ""


@dataclass(frozen=True, slots=True)
class TenantRow:
    """One tenant. `share` is its part of all tenants' usage in the window (by cost), `entitled` the part of its weight
    among tenants with usage or waiting requests; both 0..1. `cost_minute` (in the window) and `cost` (since the router
    started) are in units of the budgets, millionths of `currency` if the file has one. `hit_share` is the cached part
    of `reported_tokens`, which counts the prompts at backends that report their cached tokens; None without any.
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
    currency: str | None = None


@dataclass(frozen=True, slots=True)
class BackendRow:
    """One backend. `state` is well, draining, ill or unreached; `hit_share` is the cached part of its prompts in the
    window, None if it does not report that; `queue_s` is how long a prompt sent now would wait; `prefill_per_s` is in
    tokens. None: unknown.
    It is data-parallel `rank` of the `ranks` that its `server` runs. `events` describes how its cache events are
    used, or why they are not; empty without events and without a difference.
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
    """Why its health keeps requests away; empty if it does not."""
    trouble_s: float | None = None
    """For how many seconds its health has kept requests away."""


@dataclass(frozen=True, slots=True)
class PlaceRow:
    """One backend with a prefix: `pinned_tokens` of `held_tokens` are pinned, none where it cannot pin."""

    backend: str
    held_tokens: int
    pinned_tokens: int
    can_pin: bool


@dataclass(frozen=True, slots=True)
class PrefixRow:
    """One pinned prefix, kept for another `left_s` on `shards` backends if all is well; `message` names the problem."""

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
class MirrorRow:
    """The mirror of a rule since the rule is in force: `pairs` of requests that both sides answered, with the means of
    both; how many failed where; and the requests that were `left_out` because no backend of the pool had room."""

    rule: int
    pool: str
    share: float
    pairs: int
    failed: int
    own_failed: int
    left_out: int
    ttft_s: float | None
    own_ttft_s: float | None
    seconds: float | None
    own_seconds: float | None
    tokens: float | None
    own_tokens: float | None


@dataclass(frozen=True, slots=True)
class SplitRow:
    """One pool of a rule with shares: the `share` in force, and how the requests of the last minutes ended there.

    `lost_because` says why it lost its share; empty if it has it.
    """

    rule: int
    pool: str
    share: float
    requests: int
    failed: int
    missed: int
    lost_because: str


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One row of the stream: a decision, or a call that was rejected before one. `at` is Unix time.

    If `prompt_tokens` is an estimate, nine of ten such prompts have a length between the two of `likely_prompt_tokens`.
    `cached_tokens` is None if the backend does not report it.
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
    """One candidate of a decision with its scores by name; None for a score without a value."""

    backend: str
    total: float
    scores: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class DecisionDetail:
    """All of one decision, and where its prompt is cached now: backend -> first `held[backend]` of its `blocks`.

    `dropped` has the objection to each backend that was dropped, and `objections` its words.

    `blocks` is None if the prompt was not tokenized, because only backends that take text serve its model.
    """

    row: DecisionRow
    policy: str
    candidates: tuple[ScoreRow, ...]
    dropped: Mapping[str, str]
    objections: Mapping[str, str]
    blocks: int | None
    block_tokens: int
    held: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole dashboard at one moment. `at` is Unix time.

    `decisions` has the rows that changed after the revision in the request; send `revision` with the next one. Of
    `all_prefixes` pinned prefixes, `prefixes` has the first few: those with a problem, then the newest.
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
    splits: tuple[SplitRow, ...] = ()
    mirrors: tuple[MirrorRow, ...] = ()
    batches: tuple[BatchRow, ...] = ()
