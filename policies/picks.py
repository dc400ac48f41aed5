"""Picks: one name out of scored candidates. All randomness is the caller's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from operator import itemgetter

from policies.compose import Pick

_TOTAL = itemgetter(1)

_SAME = 1e-9
"""Totals closer than this are equal: they differ by rounding."""


def best() -> Pick:
    """The highest score; candidates with equal scores share the requests at random."""
    return _best


def best_of(*, sample: int = 2) -> Pick:
    """The better of `sample` candidates drawn at random.

    Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001. So many routers
    with the same, slightly old view do not all choose the same backend.
    """

    def pick(scored: Sequence[tuple[str, float]], rng: random.Random) -> str:
        return _best(rng.sample(scored, min(sample, len(scored))), rng)

    return pick


def are_equal(total: float, other: float) -> bool:
    """Whether two totals are equal, except for rounding."""
    return abs(total - other) <= _SAME


def _best(scored: Sequence[tuple[str, float]], rng: random.Random) -> str:
    least, ties = max(scored, key=_TOTAL)[1] - _SAME, []
    for name, total in scored:
        if total >= least:
            ties.append(name)
    return ties[0] if len(ties) == 1 else rng.choice(ties)
