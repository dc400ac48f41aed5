"""Which backends a gateway can send a request to. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backends.base import Backend
from backends.http_backend import HttpBackend
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

    def endpoint(self, name: str) -> str | None:
        """ip:port of the backend `name`; None where it has none."""
        backend = self.backend_of(name)
        return backend.endpoint if isinstance(backend, HttpBackend) else None

    def unfit(self, name: str) -> str | None:
        """Why the backend `name` cannot get the request: `no_endpoint`, `other_dialect`, `not_in_subset`; or None."""
        backend = self.backend_of(name)
        if not isinstance(backend, HttpBackend) or backend.endpoint is None:
            return "no_endpoint"
        if self.path not in backend.own_paths:
            return "other_dialect"
        ip = backend.endpoint.rpartition(":")[0].strip("[]")
        if self.subset is not None and not {backend.endpoint, ip} & self.subset:
            return "not_in_subset"
        return None

    def seen(self, view: ClusterView) -> ClusterView:
        """`view` with those marked that cannot get the request."""
        return ClusterView(tuple(one._replace(unfit=self.unfit(one.name)) for one in view.backends), view.taken_at)

    def named(self, decision: Decision) -> dict[str, str]:
        """Endpoint -> name of the chosen backend, and then of the next best."""
        others = sorted(decision.scores, key=lambda pair: -pair[1])
        names = [decision.chosen, *(name for name, _ in others if name != decision.chosen)][: MOST_FALLBACKS + 1]
        return {endpoint: name for name in names if name is not None and (endpoint := self.endpoint(name)) is not None}
