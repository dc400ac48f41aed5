"""Requests that fail wherever they are sent, while others are served there: the fault is theirs. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

_BLOCKED_S = 60.0
"""How long a request that is to blame is refused; then one goes on trial: an engine that was repaired serves it."""

_REMEMBERED_S = 600.0
"""How long a request that is to blame is remembered after its last failure."""

_MOST = 1024

ServedSince = Callable[[str, float], bool]
"""(backend, time) -> has that backend served any request since?"""


class _Failure(NamedTuple):
    """The last failure of one backend at a request of some digest: when, and the id of that request. `lost`: how often
    the backend was lost before it had begun to answer.
    """

    at: float
    request: str
    lost: int = 0


class _Record(NamedTuple):
    """The failures at requests of one digest, by backend. `trial_at`: when one of these requests may go to a backend
    again; None while they are not to blame.
    """

    failures: Mapping[str, _Failure]
    forgotten_at: float
    trial_at: float | None = None


_MOST_LOST = 3
"""Times that a backend may be lost at a request, if it is the only one."""


_COMPANIONS_S = 1.0
"""Requests that a backend has when it is lost are lost within this time."""


def _has_killed(record: _Record) -> bool:
    """Were two backends lost, or one again and again?"""
    lost = [failure.lost for failure in record.failures.values() if failure.lost]
    return len(lost) > 1 or sum(lost) >= _MOST_LOST


class PoisonRequests:
    """The failures of requests of late, by tenant and digest; the oldest go first beyond `most`."""

    def __init__(
        self, *, blocked_s: float = _BLOCKED_S, remembered_s: float = _REMEMBERED_S, most: int = _MOST
    ) -> None:
        self._blocked_s, self._remembered_s, self._most = blocked_s, remembered_s, most
        # by (tenant, digest), oldest first
        self._records: OrderedDict[tuple[str, bytes], _Record] = OrderedDict()
        self.by_tenant: Counter[str] = Counter()
        """The remembered failures of each tenant, changed here alone: without any no digest has to be computed."""

    def __repr__(self) -> str:
        return f"<PoisonRequests {len(self._records)} failures>"

    def failed(
        self,
        tenant: str,
        digest: bytes,
        request: str,
        backend: str,
        now: float,
        served_since: ServedSince,
        *,
        is_lost: bool = False,
    ) -> Mapping[str, str]:
        """Record that `backend` failed at `request` (its id) of `digest` at `now`, in seconds; if it `is_lost`, by a
        connection that ended before it had begun to answer.

        Returns the backends that failed at this digest, each with the last request that it failed at, if another one of
        them has served other requests since: then the request is to blame. Else none: the backends may be broken.
        """
        self._forget(now)
        before = self._pop(tenant, digest)
        known = before.failures.items() if before is not None else ()
        was_to_blame = before is not None and before.trial_at is not None
        recent = {name: failure for name, failure in known if was_to_blame or now - failure.at < self._blocked_s}
        lost = is_lost + (recent[backend].lost if backend in recent else 0)
        failures = {**recent, backend: _Failure(now, request, lost)}
        others = (served_since(name, failure.at) for name, failure in failures.items() if name != backend)
        is_to_blame = any(others)
        trial_at = now + self._blocked_s if is_to_blame else None
        self._records[tenant, digest] = _Record(failures, now + self._remembered_s, trial_at)
        self.by_tenant[tenant] += 1
        if len(self._records) > self._most:
            self._pop(*next(iter(self._records)))
        return {name: failure.request for name, failure in failures.items()} if is_to_blame else {}

    def is_suspect(self, tenant: str, digest: bytes) -> bool:
        """Were backends lost at requests of `digest` so often that these may have killed them?"""
        record = self._records.get((tenant, digest))
        return record is not None and _has_killed(record)

    def killed(self, tenant: str, digest: bytes, now: float) -> Mapping[str, str]:
        """The backends that were lost at requests of `digest`, which is suspect, if nothing else explains that: then
        these killed them. Else none: they were lost at others at other times, or others were lost with these twice.
        """
        record = self._records.get((tenant, digest))
        if record is None:
            return {}
        lost = {name: failure.at for name, failure in record.failures.items() if failure.lost}
        for key, other in self._records.items():
            if key == (tenant, digest) or other.trial_at is not None:
                continue
            theirs = {name: failure.at for name, failure in other.failures.items() if failure.lost and name in lost}
            were_at_other_times = any(
                _COMPANIONS_S < abs(at - lost[name]) < self._blocked_s for name, at in theirs.items()
            )
            if were_at_other_times or (theirs and _has_killed(other)):
                return {}
        self._records[tenant, digest] = record._replace(trial_at=now + self._blocked_s)
        return {name: failure.request for name, failure in record.failures.items()}

    def refuses(self, tenant: str, digest: bytes, now: float, served_since: ServedSince) -> bool:
        """Did two backends fail at requests of `digest`, of which one has served others since?

        Once in a while one such request may try again: then not.
        """
        self._forget(now)
        record = self._records.get((tenant, digest))
        if record is None:
            return False
        trial_at = record.trial_at
        if trial_at is None:
            failures = {
                name: failure for name, failure in record.failures.items() if now - failure.at < self._blocked_s
            }
            if len(failures) < 2 or not any(served_since(name, failure.at) for name, failure in failures.items()):
                return False
            trial_at = max(failure.at for failure in failures.values()) + self._blocked_s
        if is_trial := now >= trial_at:
            # others are refused until this one has failed or passed
            trial_at = now + self._blocked_s
        self._records[tenant, digest] = record._replace(trial_at=trial_at)
        return not is_trial

    def passed(self, tenant: str, digest: bytes) -> None:
        """A request of `digest` was answered."""
        self._pop(tenant, digest)

    def check(self) -> None:
        """Assert that the bound on memory holds, and that the counts agree."""
        assert len(self._records) <= self._most, f"{self!r}: remembers too much"
        assert self.by_tenant == Counter(tenant for tenant, _ in self._records), f"{self!r}: counts are wrong"

    def _forget(self, now: float) -> None:
        while self._records and next(iter(self._records.values())).forgotten_at <= now:
            self._pop(*next(iter(self._records)))

    def _pop(self, tenant: str, digest: bytes) -> _Record | None:
        record = self._records.pop((tenant, digest), None)
        if record is not None:
            self.by_tenant[tenant] -= 1
            if not self.by_tenant[tenant]:
                del self.by_tenant[tenant]
        return record
