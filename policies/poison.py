"""Requests that fail wherever they are sent, while others are served there: the fault is theirs. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

_KEPT_S = 60.0
"""How long a request is remembered after its last failure: what fails today may work after an engine's restart."""

_MOST = 1024

ServedSince = Callable[[str, float], bool]
"""(backend, time) -> has that backend served any request since?"""


class _Failure(NamedTuple):
    """The last failure of one backend at a request of some digest: when, and the id of that request."""

    at: float
    request: str


class PoisonRequests:
    """The failures of requests of late, by tenant and digest; the oldest go first beyond `most`."""

    def __init__(self, *, kept_s: float = _KEPT_S, most: int = _MOST) -> None:
        self._kept_s, self._most = kept_s, most
        # (tenant, digest) -> backends that failed at it, and until when that is remembered; oldest first
        self._failures: OrderedDict[tuple[str, bytes], tuple[Mapping[str, _Failure], float]] = OrderedDict()
        self._by_tenant: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<PoisonRequests {len(self._failures)} failures>"

    def has_any_of(self, tenant: str) -> bool:
        """Is a failure of a request of `tenant` remembered? Without any there is no need to compute a digest."""
        return tenant in self._by_tenant

    def failed(
        self, tenant: str, digest: bytes, request: str, backend: str, now: float, served_since: ServedSince
    ) -> Mapping[str, str]:
        """Record that `backend` failed at `request` (its id) of `digest` at `now`, in seconds.

        Returns the backends that failed at this digest, each with the last request that it failed at, if another one of
        them has served other requests since: then the request is to blame. Else none: the backends may be broken.
        """
        self._forget(now)
        failures = {**self._pop(tenant, digest), backend: _Failure(now, request)}
        self._failures[tenant, digest] = (failures, now + self._kept_s)
        self._by_tenant[tenant] += 1
        if len(self._failures) > self._most:
            self._pop(*next(iter(self._failures)))
        others = (served_since(name, failure.at) for name, failure in failures.items() if name != backend)
        return {name: failure.request for name, failure in failures.items()} if any(others) else {}

    def knows(self, tenant: str, digest: bytes, now: float, served_since: ServedSince) -> bool:
        """Did two backends fail at the request of `digest`, of which one has served others since?"""
        self._forget(now)
        failures, _ = self._failures.get((tenant, digest), ({}, 0.0))
        return len(failures) > 1 and any(served_since(name, failure.at) for name, failure in failures.items())

    def check(self) -> None:
        """Assert that the bound on memory holds, and that the counts agree."""
        assert len(self._failures) <= self._most, f"{self!r}: remembers too much"
        assert self._by_tenant == Counter(tenant for tenant, _ in self._failures), f"{self!r}: counts are wrong"

    def _forget(self, now: float) -> None:
        while self._failures and next(iter(self._failures.values()))[1] <= now:
            self._pop(*next(iter(self._failures)))

    def _pop(self, tenant: str, digest: bytes) -> Mapping[str, _Failure]:
        failures, _ = self._failures.pop((tenant, digest), (None, 0.0))
        if failures is None:
            return {}
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        return failures
