"""Splits: the pools of a rule share its requests, and a pool that does worse loses its share. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

LEAST_FAILURES, LEAST_MISSES = 3, 10
"""A pool loses its share after so many failures or missed targets at the earliest: a start without a cache is slow."""

CHANCE = 1e-4
"""The most probable accident that still counts as one."""

LATEST = (4, 8, 16, 32, 64)
"""A pool's latest requests, so many of them, are judged by themselves: a pool that was well for long may turn bad."""

CHANCE_OF_LATEST = 1e-7
"""CHANCE for the latest requests: they are looked at anew after each that ended badly."""

USUAL_FAILURES = 0.01
"""The share of failed requests that counts as usual, even if the other pool has fewer."""


@dataclass(frozen=True, slots=True)
class Split:
    """Shares of a rule's requests by pool, above 0 and together 1. `rolls_back`: a pool that does worse loses its own.

    The pool with the largest share, of equals the first, is the `stable` one; the others are canaries.
    """

    shares: tuple[tuple[str, float], ...]
    rolls_back: bool = True

    @property
    def stable(self) -> str:
        """The pool that the others are compared with, and that gets what they lose."""
        return max(self.shares, key=lambda pair: pair[1])[0]

    def pool_of(self, key: str, *, without: Collection[str] = ()) -> str:
        """The pool for all requests with `key`; the stable one in place of those in `without`.

        Canaries have the same keys for as long as their share does not shrink.
        """
        at, end = xxh3_64_intdigest(key.encode("utf-8", "surrogatepass")) / 2**64, 0.0
        for pool, share in self.shares:
            if pool == self.stable:
                continue
            end += share
            if at < end:
                return self.stable if pool in without else pool
        return self.stable


@dataclass(slots=True)
class Tally:
    """How requests of one pool ended: `failed` by a fault of a backend, `missed` a target of their class."""

    ended: int = 0
    failed: int = 0
    missed: int = 0

    def add(self, other: Tally) -> None:
        """Count those of `other` as well."""
        self.ended += other.ended
        self.failed += other.failed
        self.missed += other.missed


def why_worse(canary: Tally, stable: Tally, *, may_miss: float, chance: float = CHANCE) -> str | None:
    """Why `canary` surely does worse than `stable`, in words; None if that is as probable as `chance` by accident.

    A share of USUAL_FAILURES may fail, and a share of `may_miss` may miss a target, however well the stable pool does.
    """
    judged = (
        (canary.failed, stable.failed, USUAL_FAILURES, LEAST_FAILURES, "failed"),
        (canary.missed, stable.missed, may_miss, LEAST_MISSES, "missed a target"),
    )
    for hits, others, usual, least, verb in judged:
        if hits >= least and _is_more(hits, canary.ended, others, stable.ended, usual, chance):
            return f"{hits} of {canary.ended} requests {verb}, and {others} of {stable.ended} at the stable pool"
    return None


def _is_more(hits: int, count: int, other_hits: int, other_count: int, usual: float, chance: float) -> bool:
    """Is a share of `hits` surely larger than that of the others and than the `usual` one?

    By Chernoff's bound of a binomial distribution, with a share of the others at the upper end of what theirs may be.
    """
    other = other_hits / other_count if other_count else 0.0
    spread = 2 * math.sqrt(other * (1 - other) / other_count) if other_count else 0.0
    expected, share = min(max(usual, other + spread), 1 - 1e-9), hits / count
    if share <= expected:
        return False
    return count * _divergence(share, expected) > -math.log(chance)


def _divergence(share: float, expected: float) -> float:
    """The relative entropy of two coins, in nats."""
    rest = 0.0 if share >= 1 else (1 - share) * math.log((1 - share) / (1 - expected))
    return share * math.log(share / expected) + rest
