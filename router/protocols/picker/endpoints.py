"""Which backends a gateway can send a request to. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from backends.base import Backend
from backends.http.backend import HttpBackend
from policies.nouns import ClusterView, Decision

MOST_FALLBACKS = 2
"""Endpoints that are named behind the chosen one, for gateways that retry."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Where a request to `path` may go: to every endpoint that serves it, or to those in `subset` (ip:port, or ip).

    `backend_of` gives the backend of a name.
    """

    path: str
    subset: frozenset[str] | None
    backend_of: Callable[[str], Backend]

    def unfit(self, name: str) -> str | None:
        """Why the backend `name` cannot get the request: `no_endpoint`, `other_dialect`, `not_in_subset`; or None."""
        backend = self.backend_of(name)
        if not isinstance(backend, HttpBackend) or backend.endpoint is None:
            return "no_endpoint"
        if self.path not in backend.own_paths:
            return "other_dialect"
        host = backend.endpoint.rpartition(":")[0]
        if self.subset is not None and self.subset.isdisjoint((backend.endpoint, host, host.strip("[]"))):
            return "not_in_subset"
        return None

    def seen(self, view: ClusterView) -> ClusterView:
        """`view` with those marked that cannot get the request."""
        return replace(view, backends=tuple(replace(one, unfit=self.unfit(one.name)) for one in view.backends))

    def named(self, decision: Decision, chosen: HttpBackend) -> dict[str, str]:
        """Endpoint -> name of the `chosen` backend, and then of the next best that are sent the very same."""
        ranked = sorted(decision.scores, key=lambda pair: -pair[1])
        others = [one for name, _ in ranked if name != chosen.name and (one := self._there(name)) is not None]
        alike = [one for one in others if one.is_like(chosen)]
        return {one.endpoint: one.name for one in (chosen, *alike[:MOST_FALLBACKS]) if one.endpoint is not None}

    def _there(self, name: str) -> HttpBackend | None:
        """The backend `name`; None if it has left since it was looked at, or is none over HTTP."""
        try:
            backend = self.backend_of(name)
        except KeyError:
            return None
        return backend if isinstance(backend, HttpBackend) else None
