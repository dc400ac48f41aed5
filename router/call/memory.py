"""Memory that is lent to tenants within a bound, and the order in which they wait for it."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from policies.errors import Overloaded

SHARE = 3
"""A tenant may hold this many times what stays free: alone three quarters, each of two three sevenths."""

WAIT_S = 10.0
"""Longest time that a request waits for memory."""

MOST_WAITING = 256
MOST_WAITING_OF_A_TENANT = 64
"""Requests that may wait: each of them keeps up to half a megabyte that its connection has read."""


@dataclass(eq=False, slots=True)
class _Waiter:
    size: int
    lent: asyncio.Future[None]


class Memory:
    """Lends `most` bytes. Some of it stays free for a tenant that holds nothing, however many hold all they may.

    Tenants that wait get turns in rotation, and so does each request of a tenant.
    """

    def __init__(self, most: int, *, wait_s: float = WAIT_S) -> None:
        self._most, self._wait_s = most, wait_s
        self._held: Counter[str] = Counter()
        self._total = 0
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Memory {self._total} of {self._most} bytes lent, {self.waiting} requests wait>"

    @property
    def lent(self) -> int:
        """Bytes that are lent now."""
        return self._total

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._waiting.values()))

    def check(self) -> None:
        """Nothing is lent, and no request waits; for an idle router."""
        assert not self._total, f"{self!r}: memory was not given back"
        assert not self._held, f"{self!r}: tenants hold {self._held}"
        assert not self._waiting, f"{self!r}: a request waits"

    def resize(self, most: int) -> None:
        """Lend `most` bytes from now on; more may be lent until they are given back."""
        self._most = most
        if self._waiting:
            self._serve()

    def lend(self, tenant: str, size: int) -> bool:
        """Lend `size` bytes to `tenant` if it may have them at once; may it?"""
        if not size:
            return True
        if tenant in self._waiting or not self._fits(tenant, size):
            return False
        self._held[tenant] += size
        self._total += size
        return True

    async def take(self, tenant: str, size: int) -> None:
        """Lend `size` bytes to `tenant`, perhaps after a while. Raises Overloaded."""
        if self.lend(tenant, size):
            return
        queue = self._waiting.get(tenant, ())
        if len(queue) >= MOST_WAITING_OF_A_TENANT or self.waiting >= MOST_WAITING:
            raise _overloaded()
        waiter = _Waiter(size, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(waiter)
        try:
            async with asyncio.timeout(self._wait_s):
                await waiter.lent
        except BaseException as error:
            self._leave(tenant, waiter)
            if isinstance(error, TimeoutError):
                raise _overloaded() from None
            raise

    def give_back(self, tenant: str, size: int) -> None:
        """`tenant` holds `size` bytes less."""
        self._total -= size
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]
        if self._waiting:
            self._serve()

    def _fits(self, tenant: str, size: int) -> bool:
        return self._held[tenant] + size <= SHARE * (self._most - self._total - size)

    def _leave(self, tenant: str, waiter: _Waiter) -> None:
        """`waiter` waits no more; it gives back what it was lent in the same moment."""
        if waiter.lent.done() and not waiter.lent.cancelled():
            self.give_back(tenant, waiter.size)
            return
        queue = self._waiting[tenant]
        queue.remove(waiter)
        if not queue:
            del self._waiting[tenant]
        # those behind it may be smaller
        self._serve()

    def _serve(self) -> None:
        """Lend to the requests that wait, one of each tenant in turn, until none of the first ones fits."""
        is_changed = True
        while is_changed:
            is_changed = False
            for tenant in list(self._waiting):
                queue = self._waiting[tenant]
                if not self._fits(tenant, queue[0].size):
                    continue
                waiter = queue.popleft()
                self._held[tenant] += waiter.size
                self._total += waiter.size
                waiter.lent.set_result(None)
                self._waiting.move_to_end(tenant)
                if not queue:
                    del self._waiting[tenant]
                is_changed = True


def _overloaded() -> Overloaded:
    hint = "try again in a moment, or have the operator raise server.memory"
    return Overloaded("the router has no memory left for this request", hint=hint, retry_after_s=1.0)
