"""The cached blocks on the device, and their number per domain."""

from __future__ import annotations

from collections import Counter

from shards.kv.prefix import CachedBlock


class Residents(dict[int, CachedBlock]):
    """Block id -> its cached block; `of_domain` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.of_domain: Counter[str] = Counter()

    def enter(self, cached: CachedBlock, block: int) -> None:
        """Record that `block` now holds `cached`."""
        self[block] = cached
        self.of_domain[cached.domain] += 1

    def leave(self, cached: CachedBlock, block: int) -> None:
        """Record that `block` no longer holds `cached`."""
        del self[block]
        self.of_domain[cached.domain] -= 1
        if not self.of_domain[cached.domain]:
            # there may be one domain per user, and a million users
            del self.of_domain[cached.domain]

    def check(self) -> None:
        """Assert that the domains are counted right."""
        counts = Counter(cached.domain for cached in self.values())
        assert dict(counts) == dict(self.of_domain), "a domain's blocks are miscounted, or none are remembered"
