"""A prefix at its backends: computed, pinned, renewed, unpinned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from backends.base import CacheKeeper
from policies.errors import BackendFailed, NoBackend
from policies.nouns import Capability
from policies.prefix.index import PrefixIndex
from router.ask import Ask
from router.fleet.cluster.cluster import Cluster
from router.shared.prefixes.prefix import Place, Prefix, last_key
from router.shared.prefixes.warmer import Warmed, Warmer
from shards.kv.keys import BLOCK_TOKENS

_MOST_PINS = 3
"""Most times to compute and pin a prompt on one backend: its end may be evicted before it is pinned."""


def keeper_of(name: str, cluster: Cluster) -> CacheKeeper | None:
    """The backend `name`, if it is a member and can pin; None otherwise."""
    if name not in cluster:
        return None
    backend = cluster.backend(name)
    report = backend.describe()
    can = report is not None and Capability.PINS in report.capabilities
    return backend if can and isinstance(backend, CacheKeeper) else None


class Places:
    """Pins prefixes at the backends of `cluster`. It has no state of its own.

    `warmer` computes, `index` shows evictions, `now` is Unix time. A backend that is ill for `patience_s` counts as
    having lost its cache.
    """

    def __init__(
        self,
        cluster: Cluster,
        index: PrefixIndex,
        warmer: Warmer,
        *,
        now: Callable[[], float],
        patience_s: float,
    ) -> None:
        self._cluster, self._index, self._warmer = cluster, index, warmer
        self._now, self._patience_s = now, patience_s

    def are_there(self, prefix: Prefix, keys: Sequence[int]) -> bool:
        """Whether every place of `prefix` still has its pinned blocks, as far as is known without a request.

        At a place without pins any block may be evicted at any time.
        """
        if not all(self._is_well(place, prefix) for place in prefix.places):
            return False
        pinned = [place for place in prefix.places if place.pinned_tokens]
        held = self._index.longest(keys) if pinned else {}
        return all(
            place.backend in held and held[place.backend].blocks * BLOCK_TOKENS >= place.pinned_tokens
            for place in pinned
        )

    def left(self, prefix: Prefix) -> tuple[Place, ...]:
        """The places of `prefix` that still have it, as far as can be known without its text."""
        last = last_key(prefix.id)
        held = {} if last is None else self._index.longest([last])
        return tuple(
            place
            for place in prefix.places
            if self._is_well(place, prefix) and (not place.is_pinned or last is None or place.backend in held)
        )

    async def renewed(self, place: Place, prefix: Prefix, keys: Sequence[int]) -> Place | None:
        """`place` with its pin prolonged to the prefix's end; None if the pinned blocks are lost.

        Raises BackendFailed if the backend cannot be asked now.
        """
        if not self._is_well(place, prefix):
            return None
        if not place.can_pin:
            return place
        found = await self._pinned(prefix, keys, place.backend, place.pool)
        return found if found.held_tokens >= max(1, place.pinned_tokens) else None

    async def another(
        self, prefix: Prefix, ask: Ask, keys: Sequence[int], *, taken: frozenset[str], note: Callable[[str], None]
    ) -> Place:
        """One more place for `prefix`, at none of the backends `taken`; `note` gets each backend that is tried.

        Raises the error of computing it, or BackendFailed.
        """
        warmed = await self._warmed(prefix, ask, taken, note)
        others = frozenset(self._cluster.names()) - {warmed.backend}
        place, had = await self._pinned(prefix, keys, *warmed), -1
        for _ in range(_MOST_PINS - 1):
            if place.held_tokens >= prefix.tokens or place.held_tokens <= had:
                break
            # its end was evicted before it was pinned: the pinned part stays, and the rest is computed again
            had = place.held_tokens
            await self._warmer.warm(ask, prefix.tenant, avoiding=others, placed=lambda _: None)
            place = await self._pinned(prefix, keys, *warmed)
        return place

    async def end(self, prefix: Prefix, backends: Collection[str]) -> None:
        """Remove its pins at `backends`; at a backend that cannot be reached they expire."""
        await asyncio.gather(*(self._unpinned(prefix, name) for name in backends))

    async def _warmed(self, prefix: Prefix, ask: Ask, taken: frozenset[str], note: Callable[[str], None]) -> Warmed:
        """Backend and pool that computed it: a backend with room for the pin, if there is one."""
        cramped = self._cramped(prefix) - taken
        try:
            return await self._warmer.warm(ask, prefix.tenant, avoiding=taken | cramped, placed=note)
        except NoBackend:
            if not cramped:
                raise
            return await self._warmer.warm(ask, prefix.tenant, avoiding=taken, placed=note)

    async def _pinned(self, prefix: Prefix, keys: Sequence[int], backend: str, pool: str) -> Place:
        """The place at `backend`, pinned. Raises BackendFailed."""
        keeper = keeper_of(backend, self._cluster)
        if keeper is None:
            return Place(backend, pool, prefix.tokens)
        left_s = max(0.0, prefix.expires_at - self._now())
        found = await keeper.pin(prefix.pin, keys, domain=prefix.domain, for_s=left_s)
        held, pinned = (min(prefix.tokens, blocks * BLOCK_TOKENS) for blocks in (found.held, found.pinned))
        return Place(backend, pool, held, pinned, can_pin=True)

    async def _unpinned(self, prefix: Prefix, backend: str) -> None:
        keeper = keeper_of(backend, self._cluster)
        if keeper is not None:
            try:
                await keeper.unpin(prefix.pin)
            except BackendFailed:
                return

    def _is_well(self, place: Place, prefix: Prefix) -> bool:
        """Whether `place` may still have its blocks, by the health of its backend."""
        if self._cluster.may_serve(place.backend, prefix.model):
            return True
        return 0 < self._cluster.ill_s(place.backend) <= self._patience_s

    def _cramped(self, prefix: Prefix) -> frozenset[str]:
        """Backends that can pin, but lack room for this prefix."""
        rooms = ((name, self._cluster.backend(name).load().pinnable_tokens) for name in self._cluster.names())
        return frozenset(name for name, room in rooms if room is not None and room < prefix.tokens)
