"""The backends that a gateway can send a request to. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from backends.base import Backend
from backends.http.backend import HttpBackend
from policies.nouns import BackendView, ClusterView, Decision
from policies.waiting import NEEDS_PREFILL

MOST_FALLBACKS = 2
"""Most endpoints named behind the chosen one, for gateways that retry."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The endpoints for a request to `path`: all that serve it, or those in `subset` (ip:port, or ip).

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
        """`view` with a mark on each backend that cannot get the request."""
        return replace(
            view, backends=tuple(replace(each, unfit=each.unfit or self._unfit(each)) for each in view.backends)
        )

    def _unfit(self, backend: BackendView) -> str | None:
        # a gateway sends a request to one backend
        return NEEDS_PREFILL if backend.needs_prefill else self.unfit(backend.name)

    def named(self, decision: Decision, chosen: HttpBackend) -> dict[str, str]:
        """Endpoint -> name of the `chosen` backend, then of the next best that take the same request unchanged."""
        ranked = sorted(decision.scores, key=lambda pair: -pair[1])
        others = [found for name, _ in ranked if name != chosen.name and (found := self._there(name)) is not None]
        alike = [backend for backend in others if backend.is_like(chosen)]
        best = (chosen, *alike[:MOST_FALLBACKS])
        return {backend.endpoint: backend.name for backend in best if backend.endpoint is not None}

    def _there(self, name: str) -> HttpBackend | None:
        """The backend `name`; None if it has left since the decision, or does not use HTTP."""
        try:
            backend = self.backend_of(name)
        except KeyError:
            return None
        return backend if isinstance(backend, HttpBackend) else None
