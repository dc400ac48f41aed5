"""Quotas of many tenants in several stores: each ledger has one, by its name."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from hashlib import blake2b
from typing import Any

from policies.quota.budget import Charge, Descriptor, Refused, Reservation, Standing
from router.shared.store.base import QuotaStore


class SpreadStore:
    """`stores` by name; each ledger is in one of them, the same one at every router with the same names.

    A store that is added takes over an even part of the ledgers, and no others move. If one store fails, the
    tenants of the others notice nothing.
    """

    def __init__(self, stores: Mapping[str, QuotaStore]) -> None:
        assert stores, "there must be a store"
        self._stores = dict(stores)

    def __repr__(self) -> str:
        return f"<SpreadStore {', '.join(map(repr, self._stores.values()))}>"

    def name_for(self, ledger: str) -> str:
        """The name of the store with `ledger`: the largest hash of both (rendezvous hashing)."""
        return max(self._stores, key=lambda name: blake2b(f"{ledger}\n{name}".encode(), digest_size=8).digest())

    def reserve(self, asked: Reservation) -> Reservation | Refused | Coroutine[Any, Any, Reservation | Refused]:
        return self._of(asked.descriptors).reserve(asked) if asked.descriptors else asked

    def settle(self, reservation: Reservation, charge: Charge) -> None:
        if reservation.descriptors:
            self._of(reservation.descriptors).settle(reservation, charge)

    async def renew(self, reservations: Sequence[Reservation]) -> None:
        await asyncio.gather(
            *(
                store.renew([each for each in reservations if each.descriptors and self._of(each.descriptors) is store])
                for store in self._stores.values()
            )
        )

    async def standing(self, descriptors: Sequence[Descriptor]) -> Standing:
        return await (self._of(descriptors) if descriptors else next(iter(self._stores.values()))).standing(descriptors)

    async def levels(self, descriptors: Sequence[Descriptor]) -> Sequence[int]:
        return await self._of(descriptors).levels(descriptors) if descriptors else ()

    async def start(self) -> None:
        await asyncio.gather(*(store.start() for store in self._stores.values()))

    async def close(self) -> None:
        async with AsyncExitStack() as stack:
            for store in self._stores.values():
                stack.push_async_callback(store.close)

    def _of(self, descriptors: Sequence[Descriptor]) -> QuotaStore:
        return self._stores[self.name_for(descriptors[0].ledger)]
