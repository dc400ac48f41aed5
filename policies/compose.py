"""Composition: filters, then scores, then one pick make a Policy; and the filters and picks that come with Pointsman.

A filter answers for each backend: may it take this request? It is built from its options and is a pure function of
views. A pick takes one name out of scored candidates; all randomness is the caller's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import itemgetter
from types import MappingProxyType

from policies.legs import is_divisible, may_get_prefill
from policies.nouns import BackendView, ClusterView, Decision, Request
from policies.part import Part
from policies.predict import POOLED, place_s, predicted_ttft_s, whole_s
from policies.quantities import read_count, read_seconds, read_tokens
from policies.waiting import NEEDS_PREFILL, NO_PREFILL, PASSING, PLACE, UNREACHED

Filter = Callable[[Request, BackendView], bool]
"""Whether a backend may take a request."""

Score = Callable[[Request, Sequence[BackendView]], Sequence[float | None]]
"""One value in [0, 1] per candidate, in their order; None if it is unknown."""

Pick = Callable[[Sequence[tuple[str, float]], random.Random], str]
"""One name out of (backend, total score); the sequence is never empty."""

_TOTAL = itemgetter(1)

_SAME = 1e-9
"""Totals closer than this are equal: they differ by rounding."""


@dataclass(frozen=True, slots=True)
class Checks:
    """The filters that come with Pointsman, each switched on or off, with its options: a Filter that asks all that are
    on. A policy joins its own and runs them over all backends at once, without a call for each of them.
    """

    healthy: bool = False
    fresh_s: float = math.inf
    serves_model: bool = False
    fits_context: bool = False
    under_limit: bool = False
    has_room: bool = False
    spare_tokens: int = 0

    def __call__(self, request: Request, backend: BackendView) -> bool:
        """Whether `backend` may take `request`."""
        return bool(self.passing(request, (backend,)))

    def and_(self, other: Checks) -> Checks:
        """The checks that are on here or in `other`, each with the stricter option."""
        return Checks(
            self.healthy or other.healthy,
            min(self.fresh_s, other.fresh_s),
            self.serves_model or other.serves_model,
            self.fits_context or other.fits_context,
            self.under_limit or other.under_limit,
            self.has_room or other.has_room,
            max(self.spare_tokens, other.spare_tokens),
        )

    def passing(self, request: Request, backends: Sequence[BackendView]) -> list[BackendView]:
        """Those of `backends` that may take `request`; the constructors of the filters say what each check asks."""
        healthy, fresh_s, serves_model = self.healthy, self.fresh_s, self.serves_model
        under_limit, has_room, spare_tokens = self.under_limit, self.has_room, self.spare_tokens
        model, prompt_tokens, passing, context = request.model, request.prompt_tokens, [], 0
        if self.fits_context and POOLED.isdisjoint(request.needs):
            # as `may_fit`, without a call for each backend
            least = request.least_prompt_tokens
            context = request.max_new_tokens + (prompt_tokens if least is None else least)
        for backend in backends:
            if healthy:
                age_s = backend.reported_s_ago
                if not backend.healthy or backend.draining or (age_s is not None and age_s > fresh_s):
                    continue
            if serves_model and model not in backend.models:
                continue
            if context and backend.context_tokens is not None and context > backend.context_tokens:
                continue
            there = backend.running + backend.waiting
            if under_limit:
                limit = backend.adaptive_limit if backend.max_requests is None else backend.max_requests
                if limit is not None and there - backend.reclaimable_requests >= limit:
                    continue
            if has_room and there and backend.free_tokens is not None:
                uncached = max(1, prompt_tokens - (backend.held_tokens or 0))
                if uncached + spare_tokens > backend.free_tokens + backend.reclaimable_tokens:
                    continue
            passing.append(backend)
        return passing


@dataclass(frozen=True, slots=True)
class WeightedScore:
    """A score by name, and its weight."""

    name: str
    weight: float
    score: Score


@dataclass(frozen=True, slots=True)
class Policy:
    """Filter, then score, then pick. Same request, view and seed: same decision."""

    name: str
    filters: tuple[tuple[str, Filter], ...]
    scores: tuple[WeightedScore, ...]
    pick: Pick
    allows_shortlist: bool = False
    """Whether it chooses nearly as well from a shortlist of a large fleet; otherwise it gets all backends."""
    waits_for_best: bool = False
    """Whether it scores full backends too, and lets a request wait for one of them while others have room."""
    checks: Checks = field(init=False, repr=False, compare=False)
    """Those of its filters that come with Pointsman."""
    others: tuple[Filter, ...] = field(init=False, repr=False, compare=False)
    """Its other filters."""

    def __post_init__(self) -> None:
        passes = [each for _, each in self.filters]
        checks = reduce(Checks.and_, [each for each in passes if isinstance(each, Checks)], Checks())
        object.__setattr__(self, "checks", checks)
        object.__setattr__(self, "others", tuple([each for each in passes if not isinstance(each, Checks)]))

    def decide(
        self,
        request: Request,
        view: ClusterView,
        rng: random.Random,
        *,
        avoiding: Collection[str] = (),
        takes_any: bool = False,
    ) -> Decision:
        """The backend for `request`, with the reasons. `chosen` is None if no backend is left.

        Some backends are dropped before the policy's own filters: those outside the rule's pools as `in_pools`, those
        in `avoiding` as `avoided`, those that never reported their models as `unreached`, those without a needed
        capability as `incapable`, unfit ones for the reason in the view, and those that compute no prompts as
        `needs_prefill` or, if only their partners are away, as `no_prefill`. A recovering backend that may get no more
        requests yet is dropped as `warming`. Of several objections a permanent one is reported before a passing one. If
        the prompt's length is estimated and some backends certainly fit it, the others that may or may not fit it
        are dropped as `may_not_fit`.

        A policy that waits for the best scores backends without a place as well, and if it picks one of these, the
        decision `awaits` it; not with `takes_any`: then the backends with room are the only candidates.
        """
        waits = self.waits_for_best and not takes_any
        kept, dropped = self._filtered(request, view, avoiding, spare=PLACE if waits else frozenset())
        if not kept:
            return Decision(None, self.name, dropped, left_out=view.left_out)
        totals, details = self._scored(request, kept)
        chosen = self.pick(totals, rng)
        for backend in kept:
            if backend.name == chosen:
                break
        else:
            raise LookupError(f"policy {self.name} picked {chosen}, which is no candidate")
        if waits and dropped:
            full = {name for name, reason in dropped if reason in PLACE}
            if chosen in full:
                has_other = any(other.name not in full for other in kept)
                wait_s = place_s(request, backend, whole_s(request, backend)) if has_other else None
                return Decision(
                    None, self.name, dropped, totals, details, None, view.left_out, awaits=chosen, wait_s=wait_s
                )
        return Decision(chosen, self.name, dropped, totals, details, predicted_ttft_s(request, backend), view.left_out)

    def _filtered(
        self, request: Request, view: ClusterView, avoiding: Collection[str], *, spare: Collection[str]
    ) -> tuple[list[BackendView], tuple[tuple[str, str], ...]]:
        """The candidates, and the objections; the candidates include backends with an objection of `spare`."""
        pools, needs, free = request.pools, request.needs, []
        for backend in view.backends:
            # as `_objection`, without a call for each backend
            if (
                (pools is None or backend.pool in pools)
                and backend.name not in avoiding
                and backend.unfit is None
                and backend.models
                and (not needs or needs <= backend.capabilities)
                and backend.may_take != 0
                and not backend.needs_prefill
            ):
                free.append(backend)  # noqa: PERF401 - a comprehension is a call before Python 3.12
        kept = self.checks.passing(request, free)
        for passes in self.others:
            kept = [backend for backend in kept if passes(request, backend)]
        dropped: list[tuple[str, str]] = []
        if len(kept) < len(view.backends):
            # not the usual case in a fleet that is not full
            names, kept = {backend.name for backend in kept}, []
            for backend in view.backends:
                if backend.name in names:
                    kept.append(backend)
                    continue
                reason = self._objection(request, backend, avoiding)
                if backend.needs_prefill and (reason is None or reason in PASSING):
                    reason = _without_prefill(request, backend, view, avoiding) or reason
                if reason is None or reason in spare:
                    kept.append(backend)
                if reason is not None:
                    dropped.append((backend.name, reason))
        likely = request.likely_prompt_tokens
        if likely is not None and len(kept) > 1 and self.checks.fits_context and POOLED.isdisjoint(request.needs):
            # as `will_fit`, without a call for each backend
            sure, context = [], request.max_new_tokens + likely[1]
            for backend in kept:
                if backend.context_tokens is None or context <= backend.context_tokens:
                    sure.append(backend)  # noqa: PERF401 - a comprehension is a call before Python 3.12
            if 0 < len(sure) < len(kept):
                names = {backend.name for backend in sure}
                dropped += [(backend.name, "may_not_fit") for backend in kept if backend.name not in names]
                kept = sure
        return kept, tuple(dropped)

    def _objection(self, request: Request, backend: BackendView, avoiding: Collection[str]) -> str | None:
        if request.pools is not None and backend.pool not in request.pools:
            return "in_pools"
        if backend.name in avoiding:
            return "avoided"
        if backend.unfit is not None:
            return backend.unfit
        if not backend.models:
            return UNREACHED
        if not request.needs <= backend.capabilities:
            return "incapable"
        passing: str | None = None
        for name, passes in self.filters:
            if passing is not None and name in PASSING and (passing not in PLACE or name in PLACE):
                continue
            if not passes(request, backend):
                if name not in PASSING:
                    return name
                passing = name
        return passing or ("warming" if backend.may_take == 0 else None)

    def _scored(
        self, request: Request, kept: list[BackendView]
    ) -> tuple[tuple[tuple[str, float], ...], tuple[tuple[str, str, float | None], ...]]:
        totals, weights = [0.0] * len(kept), 0.0
        details: list[tuple[str, str, float | None]] = []
        for part in self.scores:
            column, name = part.score(request, kept), part.name
            # a score that is unknown for one candidate is dropped for all: different measures are never compared
            weight = 0.0 if None in column else part.weight
            weights += weight
            for at, (backend, value) in enumerate(zip(kept, column, strict=True)):
                details.append((backend.name, name, value))
                totals[at] += weight * (value or 0.0)
        scale, ranked = weights or 1.0, []
        for backend, total in zip(kept, totals, strict=True):
            ranked.append((backend.name, total / scale))
        return tuple(ranked), tuple(details)


def _without_prefill(
    request: Request, backend: BackendView, view: ClusterView, avoiding: Collection[str]
) -> str | None:
    """The objection to `backend`, which computes no prompts, if no other one can compute that of `request` for it."""
    if backend.prefill is None or not is_divisible(request):
        return NEEDS_PREFILL
    return None if may_get_prefill(request, backend, view.backends, avoiding) else NO_PREFILL


def healthy(*, fresh: float = 10.0) -> Filter:
    """Is the backend well and not draining, with a newest report, if it sends any, at most `fresh` seconds old?"""
    return Checks(healthy=True, fresh_s=fresh)


def serves_model() -> Filter:
    """Does it serve the model that the request names?"""
    return Checks(serves_model=True)


def fits_context() -> Filter:
    """Do prompt and answer together fit its context? A backend that does not report its context passes."""
    return Checks(fits_context=True)


def has_room(*, tokens: int = 0) -> Filter:
    """Does its KV pool have room for the part of the prompt that it does not hold, and for `tokens` more?

    KV that it would preempt for the request counts as room. A backend with unknown room passes, and so does an idle
    one: it never gets more room than it has.
    """
    return Checks(has_room=True, spare_tokens=tokens)


def under_limit() -> Filter:
    """Does it run and queue fewer requests than it runs at once, without those that it would preempt?

    If it does not report that number, the limit is adaptive; without either it passes.
    """
    return Checks(under_limit=True)


def best() -> Pick:
    """The highest score; candidates with equal scores share the requests at random."""
    return _best


def best_of(*, sample: int = 2) -> Pick:
    """The better of `sample` candidates drawn at random.

    Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001. So many routers
    with the same, slightly old view do not all choose the same backend.
    """

    def pick(scored: Sequence[tuple[str, float]], rng: random.Random) -> str:
        return _best(rng.sample(scored, min(sample, len(scored))), rng)

    return pick


def are_equal(total: float, other: float) -> bool:
    """Whether two totals are equal, except for rounding."""
    return abs(total - other) <= _SAME


def _best(scored: Sequence[tuple[str, float]], rng: random.Random) -> str:
    least, ties = max(scored, key=_TOTAL)[1] - _SAME, []
    for name, total in scored:
        if total >= least:
            ties.append(name)
    return ties[0] if len(ties) == 1 else rng.choice(ties)


FILTERS: Mapping[str, Part[Filter]] = MappingProxyType(
    {
        "healthy": Part(healthy, {"fresh": read_seconds}, allows_shortlist=True),
        "serves_model": Part(serves_model, allows_shortlist=True),
        "fits_context": Part(fits_context, allows_shortlist=True),
        "has_room": Part(has_room, {"tokens": read_tokens}, allows_shortlist=True),
        "under_limit": Part(under_limit, allows_shortlist=True),
    }
)
"""The filters that the SLA file can name."""

PICKS: Mapping[str, Part[Pick]] = MappingProxyType(
    {"best": Part(best, allows_shortlist=True), "best_of": Part(best_of, {"sample": read_count})}
)
"""The picks that the SLA file can name."""
