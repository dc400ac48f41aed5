"""Where cached tokens were lost: from one infinite cache over all prompts, step by step, to the measured value.

Each prompt of the log passes through caches that are ever more like the real ones. The difference between one cache and
the next is the loss for one cause.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import NamedTuple

from router.operate.diagnose.caches import HeldPrefix, LruPrefixes
from router.operate.diagnose.causes import HIT_CAUSES
from router.operate.diagnose.logged import LoggedRequest, Visit
from router.operate.diagnose.nouns import HitRate, LoggedExample, TokenLoss

_BLOCK_TOKENS = 64
"""Engines reuse whole blocks, and compute at least one token of each prompt. Those of ours have this many tokens, those
of other engines less: what they reuse beyond it counts as ideal too."""

_MOST_EXAMPLES = 3


class LostTokens(NamedTuple):
    """Cached tokens of one prompt that were lost, by cause, in the order in which they are lost."""

    capacity: int = 0
    cache_domains: int = 0
    copies: int = 0
    placement: int = 0
    index_errors: int = 0
    overlap: int = 0
    engine_eviction: int = 0


class PromptAccount(NamedTuple):
    """One prompt: the tokens that an infinite cache would have had, those that were cached, and where others went.

    `modelled` tokens would have been cached at the chosen backend if it evicted what was used longest ago. `note` says
    where they were instead.
    """

    request: LoggedRequest
    ideal: int
    measured: int
    modelled: int
    lost: LostTokens
    note: str

    @property
    def backend(self) -> str:
        """The backend that answered."""
        return self.request.visits[-1].backend


@dataclass(frozen=True, slots=True)
class HitReport:
    """The losses, or None if no request can be counted; and backends that do not report cached tokens."""

    hit_rate: HitRate | None
    silent: Mapping[str, int]
    """Backend without reports -> number of its requests, which are not counted."""
    ideal: Mapping[str, int]
    """Request -> the tokens of its prompt that one infinite cache would have had."""


def hit_report(
    requests: Sequence[LoggedRequest], sizes: Mapping[str, int], *, on_done: Callable[[], None] = lambda: None
) -> HitReport:
    """The losses of cached tokens in `requests`. `sizes` has the tokens of caches of a known size.

    `on_done` is called for each try of a request. Memory grows with the number of keys in `requests`.
    """
    accounts = list(accounts_of(requests, sizes, on_done=on_done))
    silent = _silent(accounts)
    ideal = {account.request.id: account.ideal for account in accounts if account.backend not in silent}
    counted = [account for account in accounts if account.backend not in silent]
    if not counted:
        return HitReport(None, silent, ideal)
    prompt_tokens = sum(account.request.prompt_tokens for account in counted)
    losses = tuple(_loss(at, counted, prompt_tokens) for at in range(len(LostTokens._fields)))
    return HitReport(
        HitRate(
            requests=len(counted),
            prompt_tokens=prompt_tokens,
            ideal_tokens=sum(account.ideal for account in counted),
            measured_tokens=sum(account.measured for account in counted),
            losses=losses,
            unjudged=_unjudged(requests, sum(silent.values())),
        ),
        silent,
        ideal,
    )


def _unjudged(requests: Sequence[LoggedRequest], silent: int) -> dict[str, int]:
    unanswered = sum(not request.visits for request in requests)
    untold = sum(bool(request.visits) and request.cached_tokens is None for request in requests)
    reasons = {
        "reached no backend": unanswered,
        "have no number of cached tokens": untold,
        "were at backends that report none": silent,
    }
    return {why: count for why, count in reasons.items() if count}


def accounts_of(
    requests: Sequence[LoggedRequest], sizes: Mapping[str, int], *, on_done: Callable[[], None] = lambda: None
) -> Iterator[PromptAccount]:
    """The account of each answered request, in the order in which they were sent."""
    backends = {visit.backend for request in requests for visit in request.visits}
    caches = _Caches(backends, sizes, _unknown_to_the_router(requests))
    sent = sorted(
        (
            (visit.sent_s, at, number)
            for at, request in enumerate(requests)
            for number, visit in enumerate(request.visits)
        )
    )
    for _, at, number in sent:
        request = requests[at]
        visit = request.visits[number]
        if number == len(request.visits) - 1 and request.cached_tokens is not None:
            yield caches.account(request, visit)
        caches.add(request, visit)
        on_done()


class _Caches:
    """The caches that might have been: one infinite, two of the size of all, and one for each backend.

    Of the backends in `unknown` the router often knew less than they held.
    """

    def __init__(self, backends: Iterable[str], sizes: Mapping[str, int], unknown: Collection[str]) -> None:
        self._unknown = unknown
        self._each = {name: LruPrefixes(sizes.get(name, math.inf)) for name in backends}
        total = sum(cache.size for cache in self._each.values())
        self._infinite, self._total, self._divided = LruPrefixes(), LruPrefixes(total), LruPrefixes(total)

    def account(self, request: LoggedRequest, visit: Visit) -> PromptAccount:
        """What each cache had of the prompt when it was sent, and so where its tokens were lost."""
        keys, step = request.keys, request.key_tokens
        shared = keys if request.shared_keys is None else request.shared_keys
        most = (request.prompt_tokens - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS
        measured = min(request.cached_tokens or 0, request.prompt_tokens)

        def within(tokens: int, upper: int) -> int:
            # what was measured is certain, and each cache has at most what the one before had
            return max(measured, min(tokens, most, upper))

        ideal = within(self._infinite.held(shared, step).tokens, request.prompt_tokens)
        sized = within(self._total.held(shared, step).tokens, ideal)
        divided = within(self._divided.held(keys, step).tokens, sized)
        held = {name: cache.held(keys, step, at_s=visit.sent_s) for name, cache in self._each.items()}
        modelled = within(max(cache.tokens for cache in held.values()), divided)
        elsewhere = {name: self._elsewhere(name, cache.tokens, visit) for name, cache in held.items()}
        best = max(elsewhere, key=lambda name: (elsewhere[name], name == visit.backend))
        spread = within(elsewhere[best], modelled)
        chosen = held.get(visit.backend, HeldPrefix())
        there = within(chosen.tokens, spread)
        computed = within(chosen.computed, there)
        placement, note = _known(visit, best, spread - there)
        return PromptAccount(
            request,
            ideal,
            measured,
            min(chosen.tokens, most),
            LostTokens(
                capacity=ideal - sized,
                cache_domains=sized - divided,
                copies=divided - modelled,
                placement=placement,
                index_errors=spread - there - placement,
                overlap=there - computed,
                engine_eviction=computed - measured + modelled - spread,
            ),
            note,
        )

    def _elsewhere(self, name: str, modelled: int, visit: Visit) -> int:
        """Tokens that the backend `name` held, of those that it has by the model of its cache.

        Where the router's beliefs are good, a backend that it does not believe to hold a prefix has evicted it.
        """
        if name == visit.backend or name in self._unknown or name in visit.dropped or not visit.is_whole:
            return modelled
        return min(modelled, visit.held.get(name, 0))

    def add(self, request: LoggedRequest, visit: Visit) -> None:
        """The prompt is computed at the backend of `visit`, and the answer behind it."""
        keys, step = request.keys, request.key_tokens
        shared = keys if request.shared_keys is None else request.shared_keys
        further = max(0, request.prompt_tokens - len(keys) * step) + request.new_tokens
        computed_s = visit.sent_s if visit.first_s is None else visit.first_s
        self._infinite.add(shared, step)
        self._total.add(shared, step, further=further)
        self._divided.add(keys, step, further=further)
        self._each[visit.backend].add(keys, step, further=further, computed_s=computed_s)


def _unknown_to_the_router(requests: Iterable[LoggedRequest]) -> set[str]:
    """Backends that had cached much more of the prompts that they answered than the router believed."""
    measured: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for request in requests:
        if request.visits and request.cached_tokens:
            visit = request.visits[-1]
            measured[visit.backend] += request.cached_tokens
            unknown[visit.backend] += max(0, request.cached_tokens - visit.held.get(visit.backend, 0))
    # before the first hit nothing is known of the beliefs either
    names = {visit.backend for request in requests for visit in request.visits}
    return {name for name in names if unknown[name] >= _MUCH * measured[name]}


_MUCH = 0.05


def _known(visit: Visit, best: str, tokens: int) -> tuple[int, str]:
    """How many of the `tokens` that only the backend `best` held were left there knowingly; and a note on it."""
    if not tokens:
        return 0, ""
    if (why := visit.dropped.get(best)) is not None:
        return tokens, f"{best} held it, and {why} dropped it"
    there, here = visit.held.get(best, 0), visit.held.get(visit.backend, 0)
    note = f"{best} held it, believed: {there:,} tokens there, {here:,} here"
    return min(tokens, max(0, there - here)), note


def _silent(accounts: Iterable[PromptAccount]) -> dict[str, int]:
    """Backends that reported no cached token in several requests with tokens to be expected, and their requests."""
    requests: defaultdict[str, int] = defaultdict(int)
    expected: defaultdict[str, int] = defaultdict(int)
    measured: defaultdict[str, int] = defaultdict(int)
    for account in accounts:
        requests[account.backend] += 1
        expected[account.backend] += account.modelled > 0
        measured[account.backend] += account.measured
    return {name: count for name, count in requests.items() if not measured[name] and expected[name] >= _FEW}


_FEW = 5
"""After so many expected hits without one, a backend is taken not to report cached tokens."""


def _loss(at: int, accounts: Sequence[PromptAccount], prompt_tokens: int) -> TokenLoss:
    name = LostTokens._fields[at]
    meaning, remedy = HIT_CAUSES[name]
    tokens = sum(account.lost[at] for account in accounts)
    largest = nlargest(_MOST_EXAMPLES, accounts, key=lambda account: account.lost[at])
    return TokenLoss(
        cause=name,
        meaning=meaning,
        tokens=tokens,
        points=round(100.0 * tokens / prompt_tokens, 3),
        requests=sum(account.lost[at] > 0 for account in accounts),
        remedy=remedy,
        where=_where(at, accounts),
        examples=tuple(
            LoggedExample(
                account.request.id, account.request.at_s, account.backend, account.lost[at], _note(name, account)
            )
            for account in largest
            if account.lost[at]
        ),
    )


def _where(at: int, accounts: Sequence[PromptAccount]) -> tuple[tuple[str, int], ...]:
    tokens: Counter[str] = Counter()
    by_tenant = LostTokens._fields[at] == "cache_domains"
    for account in accounts:
        tokens[account.request.tenant if by_tenant else account.backend] += account.lost[at]
    return tuple((name, count) for name, count in tokens.most_common(_MOST_EXAMPLES) if count)


def _note(cause: str, account: PromptAccount) -> str:
    request = account.request
    sizes = f"{account.measured:,} of {request.prompt_tokens:,} cached"
    return f"{sizes}; {account.note}" if cause in ("placement", "index_errors") and account.note else sizes
