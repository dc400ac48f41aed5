"""Why first tokens, and the tokens after them, came later than their class's targets: seconds by cause.

A request's own work takes as long as it would at a usual backend of its pool, by the latency model of the decision. The
log tells what other requests there did meanwhile. The rest is a backend that was slower than that.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from router.operate.diagnose.causes import TPOT_CAUSES, TTFT_CAUSES, CauseText
from router.operate.diagnose.logged import LoggedRequest, Visit
from router.operate.diagnose.nouns import LoggedExample, MissedTarget, TimeCause

_MOST_EXAMPLES = 3


class TimeAccount(NamedTuple):
    """One missed target: the seconds of each cause, which together are the time that was measured."""

    request: LoggedRequest
    seconds: tuple[float, ...]


class _Beside(NamedTuple):
    """What a backend did in some time: seconds of prefills, seconds times sequences that decoded, and seconds times the
    tokens of their contexts, and seconds in which it decoded as many sequences as it runs at once.

    The work of a prefill is taken to be spread evenly from when its prompt was sent to its first token.
    """

    prefill_s: float = 0.0
    sequences: float = 0.0
    contexts: float = 0.0
    full_s: float = 0.0

    def since(self, before: _Beside) -> _Beside:
        """What was done between `before` and this."""
        return _Beside(*(now - then for now, then in zip(self, before, strict=True)))


_NOTHING = _Beside()


@dataclass(slots=True)
class _Company:
    """What the backend of a request did beside it.

    Until its first token it did all that is in `waiting`, itself included, of which prompts that were there before took
    `ahead_s`; from then to its last token it did all that is in `decoding`, itself included.
    """

    ahead_s: float = 0.0
    waiting: _Beside = _NOTHING
    decoding: _Beside = _NOTHING


def missed_targets(
    requests: Sequence[LoggedRequest], ideal: Mapping[str, int] = MappingProxyType({})
) -> tuple[MissedTarget, ...]:
    """The missed TTFT and TPOT targets of `requests`; none for a target that no answered request has.

    `ideal` has the tokens of requests that one infinite cache would have had.
    """
    late = [number for number, request in enumerate(requests) if _is_late(request)]
    slow = [number for number, request in enumerate(requests) if _is_slow(request)]
    company = _companies(requests, {*late, *slow})
    have_ttft = sum(request.ttft_target_s is not None and request.ttft_s is not None for request in requests)
    have_tpot = sum(request.tpot_target_s is not None and request.tpot_s is not None for request in requests)
    found = []
    if have_ttft:
        accounts = [
            TimeAccount(requests[at], _ttft_parts(requests[at], company[at], ideal.get(requests[at].id, 0)))
            for at in late
        ]
        found.append(replace(_missed("TTFT", have_ttft, accounts, TTFT_CAUSES), unjudged=_without_ttft(requests)))
    if have_tpot:
        accounts = [TimeAccount(requests[at], _tpot_parts(requests[at], company[at])) for at in slow]
        found.append(replace(_missed("TPOT", have_tpot, accounts, TPOT_CAUSES), unjudged=_without_tpot(requests)))
    return tuple(found)


def _without_ttft(requests: Sequence[LoggedRequest]) -> dict[str, int]:
    untold = sum(request.ttft_target_s is not None and request.ttft_s is None for request in requests)
    aimless = sum(request.ttft_target_s is None for request in requests)
    return {why: count for why, count in (("have no target", aimless), ("have no first token", untold)) if count}


def _without_tpot(requests: Sequence[LoggedRequest]) -> dict[str, int]:
    untold = sum(request.tpot_target_s is not None and request.tpot_s is None for request in requests)
    aimless = sum(request.tpot_target_s is None for request in requests)
    short = "have fewer than two timed tokens"
    return {why: count for why, count in (("have no target", aimless), (short, untold)) if count}


def _is_late(request: LoggedRequest) -> bool:
    target_s, ttft_s = request.ttft_target_s, request.ttft_s
    return bool(request.visits) and target_s is not None and ttft_s is not None and ttft_s > target_s


def _is_slow(request: LoggedRequest) -> bool:
    target_s, tpot_s = request.tpot_target_s, request.tpot_s
    return target_s is not None and tpot_s is not None and tpot_s > target_s


def _ttft_parts(request: LoggedRequest, company: _Company, ideal: int) -> tuple[float, ...]:
    first, last = request.visits[0], request.visits[-1]
    assert request.ttft_s is not None, "it has a first token"
    split = _Split(request.ttft_s)
    queue_s, retries_s = split.take(first.sent_s - request.at_s), split.take(last.sent_s - first.sent_s)
    # first its own work, which nothing could have spared it
    work_s, least_s = _work_s(request, last), _work_s(request, last, cached=max(ideal, request.cached_tokens or 0))
    prefill_s, lost_s = split.take(_fixed_s(last) + least_s), split.take(work_s - least_s)
    ahead_s = split.take(company.ahead_s)
    behind_s = split.take(company.waiting.prefill_s - work_s - company.ahead_s)
    computing_s = prefill_s + lost_s + ahead_s + behind_s
    # while all places were taken, no prompt was computed
    full_s = split.take(company.waiting.full_s)
    decoding_s = split.take(computing_s * _longer_by_decoding(request, last, company.waiting))
    return queue_s, retries_s, ahead_s + full_s, prefill_s, lost_s, behind_s + decoding_s, split.rest


def _longer_by_decoding(request: LoggedRequest, visit: Visit, beside: _Beside) -> float:
    """The share by which the decoding of others made each step longer in which the request waited."""
    waited_s, speed = (request.ttft_s or 0.0) - (visit.sent_s - request.at_s), visit.speed
    if speed is None or waited_s <= 0.0 or speed.step_s <= 0.0:
        return 0.0
    extra_s = (speed.sequence_s * beside.sequences + speed.context_s * beside.contexts) / waited_s
    return extra_s / speed.step_s


def _tpot_parts(request: LoggedRequest, company: _Company) -> tuple[float, ...]:
    visit, steps = request.visits[-1], request.new_tokens - 1
    whole_s = steps * (request.tpot_s or 0.0)
    split, speed, beside = _Split(whole_s), visit.speed, company.decoding
    if speed is None:
        return 0.0, split.take(beside.prefill_s), split.rest
    pace, context = max(1.0, visit.pace[1]), _context_of(request)
    alone_s = steps * speed.tpot_s(1.0, context) / pace
    sequences, contexts = beside.sequences / whole_s - 1.0, beside.contexts / whole_s - context
    others_s = steps * (speed.sequence_s * max(0.0, sequences) + speed.context_s * max(0.0, contexts)) / pace
    return split.take(alone_s), split.take(others_s + beside.prefill_s), split.rest


def _context_of(request: LoggedRequest) -> float:
    """The mean tokens of its context while it decodes."""
    return request.prompt_tokens + request.new_tokens / 2


def _fixed_s(visit: Visit) -> float:
    """The part of a prefill at a usual backend of the pool that does not depend on the prompt."""
    return 0.0 if visit.speed is None else visit.speed.fixed_s / max(1.0, visit.pace[0])


def _work_s(request: LoggedRequest, visit: Visit, *, cached: int | None = None) -> float:
    """The rest of it, with so many `cached` tokens, or as many as there were; no other prompt is computed meanwhile."""
    if visit.speed is None:
        return max(0.0, (visit.predicted_ttft_s or 0.0) - visit.queue_s)
    cached = min((request.cached_tokens or 0) if cached is None else cached, request.prompt_tokens - 1)
    seconds = visit.speed.prefill_s(request.prompt_tokens - cached, cached) - visit.speed.fixed_s
    return seconds / max(1.0, visit.pace[0])


class _Split:
    """Seconds that are given away in parts, so that the parts and the rest are the whole."""

    def __init__(self, seconds: float) -> None:
        self.rest = max(0.0, seconds)

    def take(self, seconds: float) -> float:
        """So many seconds, or all that are left."""
        part = min(self.rest, max(0.0, seconds))
        self.rest -= part
        return part


class _Prefill(NamedTuple):
    """A prompt that waits for its first token, at `first_s`; each second of that has `rate` seconds of its prefill."""

    first_s: float
    rate: float


@dataclass(slots=True)
class _BackendThen:
    """One backend at a moment of the log; `sums` only grow."""

    prefills: dict[int, _Prefill] = field(default_factory=dict)
    """By the number of the visit."""
    rate: float = 0.0
    places: float = math.inf
    decoding: int = 0
    context: float = 0.0
    sums: _Beside = _NOTHING
    at_s: float = 0.0

    def pass_until(self, at_s: float) -> None:
        """Add up until `at_s`."""
        seconds, (prefill_s, sequences, contexts, full_s) = max(0.0, at_s - self.at_s), self.sums
        self.sums = _Beside(
            prefill_s + seconds * self.rate,
            sequences + seconds * self.decoding,
            contexts + seconds * self.context,
            full_s + seconds * (self.decoding >= self.places),
        )
        self.at_s = at_s

    def ahead_s(self, until_s: float) -> float:
        """Seconds of the prompts here that are computed until then."""
        return sum(rate * (min(first_s, until_s) - self.at_s) for first_s, rate in self.prefills.values())

    def begin(self, number: int, prefill: _Prefill) -> None:
        """A prompt is sent."""
        self.prefills[number] = prefill
        self.rate += prefill.rate

    def end(self, number: int) -> None:
        """Its first token came, or it ended without."""
        gone = self.prefills.pop(number)
        # from zero again, so that rounding does not add up
        self.rate = self.rate - gone.rate if self.prefills else 0.0

    def decodes(self, sequences: int, context: float) -> None:
        """So many more sequences decode, or less if it is negative."""
        self.decoding += sequences
        self.context += sequences * context


class _Stay(NamedTuple):
    """One visit of the request number `at`. Without a first token, `first_s` and `last_s` are when it ended."""

    at: int
    visit: Visit
    first_s: float
    last_s: float


_SENT, _FIRST, _LAST = 0, 1, 2


def _companies(requests: Sequence[LoggedRequest], wanted: Collection[int]) -> Mapping[int, _Company]:
    """Number of each `wanted` request -> what its backend did beside it."""
    company = {number: _Company() for number in wanted}
    stays = list(_stays(requests))
    events = sorted(
        (at_s, kind, number)
        for number, stay in enumerate(stays)
        for kind, at_s in ((_SENT, stay.visit.sent_s), (_FIRST, stay.first_s), (_LAST, stay.last_s))
    )
    backends: defaultdict[str, _BackendThen] = defaultdict(_BackendThen)
    before: dict[int, _Beside] = {}
    for at_s, kind, number in events:
        at, visit, first_s, _ = stays[number]
        request, backend = requests[at], backends[visit.backend]
        observed = company.get(at) if visit is request.visits[-1] else None
        backend.pass_until(at_s)
        if observed is not None:
            if kind == _SENT:
                observed.ahead_s = backend.ahead_s(first_s)
            elif kind == _FIRST:
                observed.waiting = backend.sums.since(before[number])
            else:
                observed.decoding = backend.sums.since(before[number])
            before[number] = backend.sums
        if kind == _SENT:
            backend.places = math.inf if visit.max_requests is None else visit.max_requests
            seconds = first_s - at_s
            backend.begin(number, _Prefill(first_s, _work_s(request, visit) / seconds if seconds > 0.0 else 0.0))
        elif kind == _FIRST:
            backend.end(number)
        if kind != _SENT and visit.first_s is not None:
            backend.decodes(1 if kind == _FIRST else -1, _context_of(request))
    return company


def _stays(requests: Iterable[LoggedRequest]) -> Iterator[_Stay]:
    for at, request in enumerate(requests):
        ends = [*(visit.sent_s for visit in request.visits[1:]), request.ended_s]
        for visit, ended_s in zip(request.visits, ends, strict=False):
            first_s = max(visit.sent_s, ended_s if visit.first_s is None else visit.first_s)
            yield _Stay(at, visit, first_s, max(first_s, visit.last_s or 0.0))


def _missed(
    target: str, requests: int, accounts: Sequence[TimeAccount], causes: Mapping[str, CauseText]
) -> MissedTarget:
    largest = Counter(max(range(len(causes)), key=account.seconds.__getitem__) for account in accounts)
    return MissedTarget(
        target=target,
        requests=requests,
        missed=len(accounts),
        seconds=sum(sum(account.seconds) for account in accounts),
        causes=tuple(
            TimeCause(
                cause=name,
                meaning=meaning,
                seconds=sum(account.seconds[at] for account in accounts),
                requests=largest[at],
                remedy=remedy,
                examples=_examples(at, target, accounts),
            )
            for at, (name, (meaning, remedy)) in enumerate(causes.items())
        ),
    )


def _examples(at: int, target: str, accounts: Iterable[TimeAccount]) -> tuple[LoggedExample, ...]:
    largest = nlargest(_MOST_EXAMPLES, accounts, key=lambda account: account.seconds[at])
    return tuple(
        LoggedExample(
            request=account.request.id,
            at_s=account.request.at_s,
            backend=account.request.visits[-1].backend,
            amount=round(account.seconds[at], 6),
            note=_note(target, account.request),
        )
        for account in largest
        if account.seconds[at] >= _LEAST_S
    )


_LEAST_S = 1e-3


def _note(target: str, request: LoggedRequest) -> str:
    if target == "TTFT":
        return f"TTFT {request.ttft_s:.3f} s, target {request.ttft_target_s:g} s, {request.prompt_tokens:,} tokens"
    tpot_ms, target_ms = 1000 * (request.tpot_s or 0.0), 1000 * (request.tpot_target_s or 0.0)
    return f"TPOT {tpot_ms:.1f} ms, target {target_ms:g} ms, {request.new_tokens:,} tokens"
