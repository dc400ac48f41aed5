"""The results of a plan, as they are in its JSON."""

from __future__ import annotations

import msgspec


class Capacity(msgspec.Struct, frozen=True):
    """The load of one backend at which the targets were still met.

    `measure` is `requests` (in flight, judged by TPOT) or `prompt_tokens` (being computed, judged by TTFT).
    `amount` None: the targets were missed at every load. `is_least`: it is the highest load seen often enough, so the
    capacity may be larger. `judged_by` is the class that limits it, if any. `answers` were judged.
    """

    measure: str
    amount: float | None
    is_least: bool
    judged_by: str | None
    answers: int


class HourNeed(msgspec.Struct, frozen=True):
    """One hour of a pool, or the time until now, from `start_s` (seconds since 1970) on.

    Of its `requests`, `unserved` reached no backend. `missed` of `with_target` missed a target or were unserved.
    `backends` answered. Loads are of the whole pool: P95 and highest, over time. `needed` None: unknown. `bound` is
    `estimate`, `or_fewer` (fewer may be enough) or `at_least`: the classes in `short` missed their targets with the
    backends that were there.
    """

    start_s: float
    requests: int
    unserved: int
    with_target: int
    missed: int
    backends: int
    p95_requests: float
    most_requests: float
    p95_prompt_tokens: float
    most_prompt_tokens: float
    needed: int | None
    bound: str
    limited_by: str | None
    short: tuple[str, ...]


class PoolPlan(msgspec.Struct, frozen=True):
    """The backends that a pool needs: those of its `peak` hour. `reasons` explain the number."""

    pool: str
    needed: int | None
    bound: str
    reasons: tuple[str, ...]
    verify: str
    capacities: tuple[Capacity, ...]
    peak: HourNeed
    hours: tuple[HourNeed, ...]


class Plan(msgspec.Struct, frozen=True):
    """The plan of all pools of a log, with notes on what it cannot show. Times are seconds since 1970."""

    requests: int
    first_s: float
    last_s: float
    pools: tuple[PoolPlan, ...]
    notes: tuple[str, ...]
