"""Where a line may go."""

from __future__ import annotations

from typing import NamedTuple


class LinePlaces(NamedTuple):
    """Where a line may go: to the backends of `model` in these pools, None: in any."""

    model: str
    pools: tuple[str, ...] | None = None

    def has(self, pool: str) -> bool:
        """Whether it may go to `pool`."""
        return self.pools is None or pool in self.pools

    def meets(self, other: LinePlaces) -> bool:
        """Whether lines of both may go to the same backend."""
        is_one = self.pools is None or other.pools is None or not set(self.pools).isdisjoint(other.pools)
        return self.model == other.model and is_one

    def joined(self, other: LinePlaces) -> LinePlaces:
        """Where lines of either may go."""
        if self.pools is None or other.pools is None:
            return LinePlaces(self.model)
        return LinePlaces(self.model, tuple(dict.fromkeys(self.pools + other.pools)))
