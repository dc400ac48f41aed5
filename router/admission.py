"""Permits: the right to run one request. Each is settled exactly once, whatever happens."""

from __future__ import annotations

from collections import Counter
from types import TracebackType

from policies.errors import QuotaExceeded
from policies.nouns import Outcome, Tenant, Usage
from router.outcome import outcome_of

_RETRY_AFTER_S = 1.0


class Admission:
    """Says who may run now. Holds the open permits, by tenant."""

    def __init__(self) -> None:
        self._open: set[Permit] = set()
        self._by_tenant: Counter[str] = Counter()
        self.settled: Counter[Outcome] = Counter()

    def __repr__(self) -> str:
        tenants = ", ".join(f"{name}: {count}" for name, count in sorted(self._by_tenant.items()))
        return f"<Admission {len(self._open)} open ({tenants}), {self.settled.total()} settled>"

    def permit(self, tenant: Tenant) -> Permit:
        """A permit for `tenant`, not entered yet."""
        return Permit(self, tenant)

    def is_idle(self) -> bool:
        """Is no permit open?"""
        return not self._open

    def check(self) -> None:
        """The counts agree with the open permits; with none open, nobody is counted."""
        counted = Counter(permit.tenant.name for permit in self._open)
        assert counted == self._by_tenant, f"{self!r}: counts differ from permits {counted}"
        assert all(permit.outcome is None for permit in self._open), f"{self!r}: a settled permit is still open"

    async def admit(self, permit: Permit) -> None:
        """Open `permit` or raise QuotaExceeded. Called by the permit itself."""
        tenant = permit.tenant
        running = self._by_tenant[tenant.name]
        if tenant.limits.concurrent is not None and running >= tenant.limits.concurrent:
            raise QuotaExceeded(
                f"tenant '{tenant.name}' has {running} requests running, which is its limit",
                hint="wait for one to finish",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._open.add(permit)
        self._by_tenant[tenant.name] += 1

    def settle(self, permit: Permit, outcome: Outcome) -> None:
        """Close `permit`. Called by the permit itself, once."""
        self._open.remove(permit)
        self._by_tenant[permit.tenant.name] -= 1
        if not self._by_tenant[permit.tenant.name]:
            del self._by_tenant[permit.tenant.name]
        self.settled[outcome] += 1


class Permit:
    """An async context manager: entered it is open, left it is settled with the Outcome and the `usage` so far."""

    def __init__(self, admission: Admission, tenant: Tenant) -> None:
        self.tenant = tenant
        self.usage = Usage()
        self.outcome: Outcome | None = None
        self._admission = admission

    def __repr__(self) -> str:
        return f"<Permit of {self.tenant.name}: {self.outcome or 'open'}, {self.usage}>"

    def spend(self, usage: Usage) -> None:
        """Charge `usage` on top of what was charged before."""
        before = self.usage
        self.usage = Usage(
            before.prompt_tokens + usage.prompt_tokens,
            before.completion_tokens + usage.completion_tokens,
            before.cached_tokens + usage.cached_tokens,
        )

    async def __aenter__(self) -> Permit:
        await self._admission.admit(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.outcome is None, f"{self!r} is settled twice"
        self.outcome = outcome_of(error)
        self._admission.settle(self, self.outcome)
