"""Whether a request or the backend that failed at it is to blame: decided on the failures of late. Pure."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

_BLOCKED_S = 60.0
"""Failures count for this long. A request that is to blame is refused for as long; then one goes on trial: an engine
that was repaired serves it."""

_REMEMBERED_S = 600.0
"""How long a request that is to blame is remembered after its last failure."""

_MOST = 1024
"""Failures that are remembered, requests that are to blame, and shapes that were answered."""

_MOST_ALONE = 3
"""Failures at one backend, one after the other, that tell as much as those of two backends."""

_MOST_IN_TURN = 3
"""Requests of one shape that may harm backends, one after the other, before others of that shape are refused."""

_MOST_OF_TENANT = 4
"""Requests of one tenant, of whatever shape, that may harm backends in turn before it is on probation."""

_ANSWERED_PER_HARM = 8
"""Of a tenant with more requests that are answered for each that does harm, many are there when a backend fails by
itself."""

_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 60.0
"""How long requests of a shape that is to blame are refused after a trial that failed; twice as long after each further
one. The first trial is at once: there may be many requests of a shape, and few of them may do harm."""

_TRIAL_S = 10.0
"""After so long without an end the trial of a shape is followed by another one."""

_MOST_HARMS = 16
"""Harms that are remembered of one shape."""

_MOST_EXPLAINED = 64
"""Deaths that are remembered with the request that is to blame for them."""

_COMPANIONS_S = 1.0
"""Requests that a backend has when it is lost are lost within this time."""

ServedSince = Callable[[str, float], bool]
"""(backend, time) -> has that backend served any request since?"""


ServesOthers = Callable[[str, str], bool]
"""(backend, tenant) -> were requests of another tenant answered there of late?"""

_Key = tuple[str, Hashable]
"""A tenant, and the digest or shape of its requests; None for all of them."""


class Harm(StrEnum):
    """What a backend did at a request that it failed: it answered, if only an error or nonsense; it was silent for too
    long; or it was lost.
    """

    ERRED = "erred"
    HUNG = "hung"
    DIED = "died"


class Suspect(NamedTuple):
    """A request as far as blame goes. Two with the same `digest` ask the same; two of one `shape` use the same features
    of the API, with a prompt of a similar length. `request` is its id.
    """

    tenant: str
    digest: bytes
    shape: Hashable
    request: str

    @property
    def key(self) -> _Key:
        return self.tenant, self.digest

    @property
    def shape_key(self) -> _Key:
        return self.tenant, self.shape

    @property
    def tenant_key(self) -> _Key:
        return self.tenant, None


class FailedTry(NamedTuple):
    """`backend` failed at a request at the time `at`, in seconds, which it was sent at `sent_at`; `when_idle`: over a
    connection that lay idle, so that it may have had no part of the request.
    """

    sent_at: float
    at: float
    backend: str
    suspect: Suspect
    harm: Harm
    when_idle: bool = False


class _Sentence(NamedTuple):
    """Requests of a digest, shape or tenant are to blame. `trial_at`: when one of them may go to a backend again, which
    is `pause_s` after the last failure. `on_trial` is the one that went there last.
    """

    trial_at: float
    forgotten_at: float
    pause_s: float
    on_trial: str = ""


class Blame:
    """The failures of late, and the requests that are to blame for some of them; the oldest go first beyond `most`.

    Requests of one digest are to blame once two backends failed at them, or one three times in turn, and one of these
    has served other requests since. If backends hung or died at them, twice in turn is enough where nothing else
    explains it: neither did these backends so at another request at another time, nor was another request there at two
    of the deaths.

    Requests of one shape are to blame once three of them, each sent after the one before had ended, did such harm, with
    none of that shape answered since, and those of other tenants do not explain it.

    A tenant is on probation once four of its requests, of whatever shapes, did such harm in turn at backends that
    answer other tenants, with few of its own answered between, and no other tenant did the like.
    """

    def __init__(
        self, *, blocked_s: float = _BLOCKED_S, remembered_s: float = _REMEMBERED_S, most: int = _MOST
    ) -> None:
        self._blocked_s, self._remembered_s, self._most = blocked_s, remembered_s, most
        # oldest first; those that a request is to blame for are not among them
        self._failures: dict[FailedTry, None] = {}
        self._by_digest: dict[_Key, list[FailedTry]] = {}
        self._sentences: OrderedDict[_Key, _Sentence] = OrderedDict()
        # what requests of a shape did since one of them was answered
        self._harms: OrderedDict[_Key, deque[FailedTry]] = OrderedDict()
        # answered requests of the tenants that are among these
        self._answered = Counter[str]()
        # of those that requests are to blame for: what else was lost there has an explanation
        self._explained: deque[FailedTry] = deque(maxlen=_MOST_EXPLAINED)
        self.by_tenant: Counter[str] = Counter()
        """What is remembered of each tenant, changed here alone: without anything no digest has to be computed."""

    def __repr__(self) -> str:
        return f"<Blame {len(self._failures)} failures, {len(self._sentences)} requests to blame>"

    def failed(self, failure: FailedTry, served_since: ServedSince) -> Sequence[FailedTry]:
        """Record `failure`. Returns the failures that its request is to blame for; none: a backend may be broken."""
        suspect = failure.suspect
        self._forget(failure.at)
        is_known = suspect.key in self._sentences or suspect.shape_key in self._sentences
        if not is_known and any(_is_companion(failure, death) for death in self._explained):
            return ()
        if failure not in self._failures:
            self._failures[failure] = None
            self._by_digest.setdefault(suspect.key, []).append(failure)
            self.by_tenant[suspect.tenant] += 1
        if len(self._failures) > self._most:
            self._drop(next(iter(self._failures)))
        if failure.harm is not Harm.ERRED:
            self._note_harm(failure, suspect.shape_key)
            self._note_harm(failure, suspect.tenant_key)
        alike = self._by_digest[suspect.key]
        # the backend that failed last had no time to serve others
        if suspect.key in self._sentences or (_are_enough(alike) and _served_others(alike[:-1], served_since)):
            return self._condemn(suspect.key, alike, failure.at)
        for key in (suspect.shape_key, suspect.tenant_key):
            if self._is_sentenced(key, failure.at) and failure.harm is not Harm.ERRED:
                return self._condemn_many(key, alike, failure.at)
        return ()

    def is_suspect(self, suspect: Suspect) -> bool:
        """Did requests of its digest, shape or tenant do so much harm that they may be to blame for it?"""
        found = self._of_digest(suspect), self._of_shape(suspect), self._of_tenant(suspect.tenant)
        return any(harms is not None for harms in found)

    def judge(
        self, suspect: Suspect, now: float, serves_others: ServesOthers = lambda *_: False
    ) -> Sequence[FailedTry]:
        """The failures that `suspect`, or requests of its shape or tenant, are to blame for by the harm that they did;
        none if something else explains that. Asked once what failed with it is recorded too.
        """
        harmful = [each for each in self._failures if each.harm is not Harm.ERRED]
        alike, shaped = self._of_digest(suspect), self._of_shape(suspect)
        if alike is not None and not _are_explained(alike, [each for each in harmful if each not in alike]):
            return self._condemn(suspect.key, alike, now)
        others = [each for each in harmful if each.suspect.tenant != suspect.tenant]
        if shaped is not None and not _are_explained(shaped, others, by_shape=True):
            return self._condemn_many(suspect.shape_key, shaped, now)
        theirs = self._of_tenant(suspect.tenant)
        tenants = {each.suspect.tenant for each in others}
        if (
            theirs is not None
            and any(serves_others(each.backend, suspect.tenant) for each in theirs)
            # those of a busy neighbour are lost in each death too, but many more are answered
            and not any(self._of_tenant(tenant) for tenant in tenants)
        ):
            return self._condemn_many(suspect.tenant_key, theirs, now)
        return ()

    def refuses(self, suspect: Suspect, now: float, served_since: ServedSince) -> bool:
        """Are requests of this digest or shape to blame, so that `suspect` is sent nowhere?

        Once in a while one such request may try again: then not.
        """
        self._forget(now)
        alike = self._by_digest.get(suspect.key, [])
        if _are_enough(alike) and _served_others(alike, served_since):
            self._condemn(suspect.key, alike, alike[-1].at)
        sentences = {key: self._sentences[key] for key in (suspect.key, suspect.shape_key) if key in self._sentences}
        if any(now < sentence.trial_at for sentence in sentences.values()):
            return True
        for key, sentence in sentences.items():
            # others are refused until this one has failed or passed
            trial_s = self._blocked_s if key == suspect.key else _TRIAL_S
            self._sentences[key] = sentence._replace(trial_at=now + trial_s)
        return False

    def probation_s(self, suspect: Suspect, now: float) -> float:
        """Seconds that `suspect` has to wait since its tenant is on probation; 0.0: it may go, and others wait for its
        end. Asked for requests that are not refused.
        """
        if not self._is_sentenced(suspect.tenant_key, now):
            return 0.0
        sentence = self._sentences[suspect.tenant_key]
        if now < sentence.trial_at:
            return sentence.trial_at - now
        self._sentences[suspect.tenant_key] = sentence._replace(trial_at=now + _TRIAL_S, on_trial=suspect.request)
        return 0.0

    def passed(self, suspect: Suspect) -> None:
        """A request was answered: neither its digest nor its shape is to blame, and the next of its tenant may go."""
        if suspect.tenant_key in self._harms:
            self._answered[suspect.tenant] += 1
        sentence = self._sentences.get(suspect.tenant_key)
        if sentence is not None and sentence.on_trial == suspect.request:
            self._sentences[suspect.tenant_key] = sentence._replace(trial_at=-math.inf, on_trial="")
        for failure in tuple(self._by_digest.get(suspect.key, ())):
            self._drop(failure)
        self._release(suspect.key)
        self._release(suspect.shape_key)
        self._forget_harms(suspect.shape_key)

    def check(self) -> None:
        """Assert that the bound on memory holds, and that the counts agree."""
        sizes = len(self._failures), len(self._sentences), len(self._harms)
        assert max(sizes) <= self._most, f"{self!r}: remembers too much"
        indexed = Counter(failure for failures in self._by_digest.values() for failure in failures)
        assert indexed == Counter(self._failures.keys()), f"{self!r}: failures are lost"
        counted = Counter(each.suspect.tenant for each in self._failures)
        counted.update(tenant for tenant, _ in (*self._sentences, *self._harms))
        assert self.by_tenant == counted, f"{self!r}: counts are wrong"

    def _of_digest(self, suspect: Suspect) -> Sequence[FailedTry] | None:
        """The harm that requests of its digest did; None if that is too little to tell anything."""
        alike = [each for each in self._by_digest.get(suspect.key, ()) if each.harm is not Harm.ERRED]
        return alike if len(_occasions(alike)) > 1 else None

    def _of_shape(self, suspect: Suspect) -> Sequence[FailedTry] | None:
        """The harm that requests of its shape did; None if that is too little to tell anything."""
        shaped = self._of_late(suspect.shape_key)
        return shaped if _in_turn(shaped) >= _MOST_IN_TURN else None

    def _of_tenant(self, tenant: str) -> Sequence[FailedTry] | None:
        """The harm that requests of `tenant` did; None if that is too little, for as many, to tell anything."""
        theirs = self._of_late((tenant, None))
        in_turn = _in_turn(theirs)
        is_enough = in_turn >= _MOST_OF_TENANT and self._answered[tenant] <= _ANSWERED_PER_HARM * in_turn
        return theirs if is_enough else None

    def _of_late(self, key: _Key) -> Sequence[FailedTry]:
        harms = self._harms.get(key)
        if not harms:
            return ()
        return [each for each in harms if harms[-1].at - each.at < self._blocked_s]

    def _is_sentenced(self, key: _Key, now: float) -> bool:
        sentence = self._sentences.get(key)
        if sentence is not None and sentence.forgotten_at <= now:
            self._release(key)
            return False
        return sentence is not None

    def _condemn_many(self, key: _Key, failures: Sequence[FailedTry], now: float) -> Sequence[FailedTry]:
        """Requests of a shape or tenant are to blame for `failures`."""
        known, pause_s = self._sentences.get(key), 0.0
        if known is not None:
            pause_s = min(_LONGEST_PAUSE_S, max(_PAUSE_S, 2.0 * known.pause_s))
        return self._condemn(key, failures, now, pause_s=pause_s)

    def _condemn(
        self, key: _Key, failures: Sequence[FailedTry], now: float, *, pause_s: float | None = None
    ) -> Sequence[FailedTry]:
        """Requests of `key` are to blame for `failures`, and for those of the requests that were lost with them."""
        pause_s = self._blocked_s if pause_s is None else pause_s
        self._release(key)
        # one at a time is a hard limit for all that a tenant does
        remembered_s = self._remembered_s if key[1] is not None else self._blocked_s + pause_s
        self._sentences[key] = _Sentence(now + pause_s, now + remembered_s, pause_s)
        self.by_tenant[key[0]] += 1
        if len(self._sentences) > self._most:
            self._release(next(iter(self._sentences)))
        theirs = [
            each for each in self._failures if each in failures or any(_is_companion(each, one) for one in failures)
        ]
        self._explained.extend(failures)
        for failure in theirs:
            self._drop(failure)
            if failure in failures:
                continue
            for one in (failure.suspect.shape_key, failure.suspect.tenant_key):
                harms = self._harms.get(one)
                if harms is not None and failure in harms:
                    harms.remove(failure)
                    if not harms:
                        self._forget_harms(one)
        return theirs

    def _note_harm(self, failure: FailedTry, key: _Key) -> None:
        harms = self._harms.pop(key, None)
        if harms is None:
            harms = deque(maxlen=_MOST_HARMS)
            self.by_tenant[key[0]] += 1
        self._harms[key] = harms
        harms.append(failure)
        if len(self._harms) > self._most:
            self._forget_harms(next(iter(self._harms)))

    def _forget(self, now: float) -> None:
        while self._failures and (oldest := next(iter(self._failures))).at <= now - self._blocked_s:
            self._drop(oldest)
        while self._sentences and next(iter(self._sentences.values())).forgotten_at <= now:
            self._release(next(iter(self._sentences)))
        while self._harms and next(iter(self._harms.values()))[-1].at <= now - self._blocked_s:
            self._forget_harms(next(iter(self._harms)))

    def _drop(self, failure: FailedTry) -> None:
        key = failure.suspect.key
        del self._failures[failure]
        self._by_digest[key].remove(failure)
        if not self._by_digest[key]:
            del self._by_digest[key]
        self._uncount(failure.suspect.tenant)

    def _release(self, key: _Key) -> None:
        if self._sentences.pop(key, None) is not None:
            self._uncount(key[0])

    def _forget_harms(self, key: _Key) -> None:
        if self._harms.pop(key, None) is not None:
            self._uncount(key[0])
        if key[1] is None:
            del self._answered[key[0]]

    def _uncount(self, tenant: str) -> None:
        self.by_tenant[tenant] -= 1
        if not self.by_tenant[tenant]:
            del self.by_tenant[tenant]


def _are_enough(failures: Sequence[FailedTry]) -> bool:
    """Did two backends fail, or one again and again?"""
    return len({failure.backend for failure in failures}) > 1 or len(_occasions(failures)) >= _MOST_ALONE


def _served_others(failures: Iterable[FailedTry], served_since: ServedSince) -> bool:
    """Has one of the backends that failed served others since?"""
    return any(served_since(failure.backend, failure.at) for failure in failures)


def _is_companion(failure: FailedTry, other: FailedTry) -> bool:
    """Were both lost in one death?"""
    is_death = failure.harm is other.harm is Harm.DIED
    were_there = failure.sent_at < other.at and other.sent_at < failure.at
    return is_death and were_there and failure.backend == other.backend and abs(failure.at - other.at) <= _COMPANIONS_S


def _are_explained(failures: Sequence[FailedTry], others: Iterable[FailedTry], *, by_shape: bool = False) -> bool:
    """Do `others`, failures at other requests, explain what backends did in `failures`?

    They do if the same backends did so at other times, or if one other request, or requests of one other shape
    (`by_shape`), were there at two of the deaths.
    """
    backends = {failure.backend for failure in failures}
    shared: dict[_Key, set[tuple[str, float]]] = {}
    for other in others:
        if other.backend not in backends:
            continue
        death = next((failure for failure in failures if _is_companion(other, failure)), None)
        if death is None:
            return True
        key = other.suspect.shape_key if by_shape else other.suspect.key
        shared.setdefault(key, set()).add((death.backend, death.at))
    return any(len(deaths) > 1 for deaths in shared.values())


def _occasions(failures: Iterable[FailedTry]) -> Sequence[FailedTry]:
    """Those of `failures` of which each was sent after the one before had ended: requests that a backend has at one
    time, equal ones too, fail for one reason. So does one that comes to a backend again, over a new connection, in the
    moment in which its idle ones are lost.
    """
    found = list[FailedTry]()
    for failure in failures:
        last = found[-1] if found else None
        if (
            last is not None
            and last.when_idle
            and not failure.when_idle
            and last.backend == failure.backend
            and failure.at - last.at <= _COMPANIONS_S
        ):
            found[-1] = failure
        elif not found or failure.sent_at >= found[-1].at:
            found.append(failure)
    return found


def _in_turn(harms: Iterable[FailedTry]) -> int:
    """How many different requests did `harms`, each sent after the one before had ended?"""
    digests, ended_at = set[bytes](), -math.inf
    for harm in harms:
        if harm.sent_at > ended_at and harm.suspect.digest not in digests:
            digests.add(harm.suspect.digest)
            ended_at = harm.at
    return len(digests)
