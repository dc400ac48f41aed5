"""Second requests: how many of them a class may send. Pure.

Source: Dean and Barroso, The Tail at Scale (CACM 2013): a second request after the time that most need, so that load
grows by a few percent.
"""

from __future__ import annotations

from policies.nouns import ServiceClass

MOST_SAVED = 10.0
"""Second requests that a tenant can save in a class, for a moment in which many are late."""

_MOST_SAVERS = 10_000


class HedgeBudget:
    """What tenants may spend on second requests, by class: each request earns a part of one, from none.

    So a tenant that sends `requests` has at most `hedge_budget * requests` second ones.
    """

    def __init__(self) -> None:
        # those that earned last come last
        self._saved: dict[tuple[str, str], float] = {}

    def __repr__(self) -> str:
        return f"<HedgeBudget of {len(self._saved)} tenants and classes>"

    def earn(self, tenant: str, service_class: ServiceClass) -> None:
        """`tenant` sends a request in `service_class`."""
        saver = (tenant, service_class.name)
        self._saved[saver] = min(MOST_SAVED, self._saved.pop(saver, 0.0) + service_class.hedge_budget)
        if len(self._saved) > _MOST_SAVERS:
            del self._saved[next(iter(self._saved))]

    def allows(self, tenant: str, service_class: ServiceClass) -> bool:
        """May `tenant` send a second request in `service_class` now?"""
        # 20 requests earn one at 5 %, whatever their sum is in floats
        return self._saved.get((tenant, service_class.name), 0.0) > 1.0 - 1e-9

    def spend(self, tenant: str, service_class: ServiceClass) -> None:
        """`tenant` sends a second request in `service_class`, which was allowed."""
        assert self.allows(tenant, service_class), f"{tenant} has none in {service_class.name}"
        saver = (tenant, service_class.name)
        self._saved[saver] = max(0.0, self._saved[saver] - 1.0)

    def check(self) -> None:
        """Assert that nothing is owed and little saved."""
        assert all(0.0 <= saved <= MOST_SAVED for saved in self._saved.values()), f"{self!r}: {self._saved}"
        assert len(self._saved) <= _MOST_SAVERS, f"{self!r} remembers too many"
