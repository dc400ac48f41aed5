"""Backends that announced themselves to this router, with their expiry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress

from policies.errors import Overloaded
from router.fleet.discovery.source import Addresses

MOST = 1024
"""Most backends that may announce themselves to one pool."""

GONE_S = 90.0
"""A backend that announces itself only once is forgotten after it was ill for so long, as in LMDeploy's proxy."""

_LOOK_S = 1.0


class Registry:
    """The addresses that announced themselves to one pool. A source; its answers count at once.

    `ill_s` gives the seconds for which the backend at an address has been ill. `clock` is in seconds.
    """

    patience_s = 0.0

    def __init__(self, clock: Callable[[], float], ill_s: Callable[[str], float] = lambda _: 0.0) -> None:
        self._clock, self._ill_s = clock, ill_s
        # address -> time by which it must be renewed; None: never
        self._until: dict[str, float | None] = {}
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Registry of {len(self._until)} backends>"

    def __contains__(self, address: str) -> bool:
        return address in self._until

    def register(self, address: str, *, ttl_s: float | None = None) -> None:
        """Add the backend at `address`, for `ttl_s` unless it is renewed; None: until it is ill for GONE_S.

        Raises Overloaded if there are too many.
        """
        if address not in self._until and len(self._until) >= MOST:
            raise Overloaded(f"{MOST} backends have announced themselves, which is the limit")
        is_new = address not in self._until
        self._until[address] = None if ttl_s is None else self._clock() + ttl_s
        if is_new:
            self._changed.set()

    def unregister(self, address: str) -> bool:
        """Remove the backend at `address`; returns whether it was known."""
        known = address in self._until
        if known:
            del self._until[address]
            self._changed.set()
        return known

    def known(self) -> Mapping[str, float | None]:
        """Each address, and the seconds until it expires without a renewal."""
        now = self._clock()
        return {address: None if until is None else until - now for address, until in self._until.items()}

    async def addresses(self) -> AsyncGenerator[Addresses]:
        while True:
            # also while others announce themselves all the time
            self._forget()
            self._changed.clear()
            yield frozenset(self._until)
            while not self._changed.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._changed.wait()
                self._forget()

    def _forget(self) -> None:
        now = self._clock()
        for address, until in tuple(self._until.items()):
            if self._ill_s(address) >= GONE_S if until is None else now >= until:
                self.unregister(address)
