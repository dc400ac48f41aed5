"""Ranks that improve with waiting. Pure and torch-free."""

from __future__ import annotations

BACKGROUND = 1 << 16
"""Requests of this rank or a worse one yield: waiting does not improve their rank, and they compute nothing while
prompts of better ranks are computed."""


def effective_rank(rank: int, waited_s: float, ageing_s: float) -> int:
    """`rank` (0 is served first), improved by one for each `ageing_s` of waiting, but never better than 0.

    It stops at 0, so that a request given rank 0 never falls behind because it is new: among equal ranks age decides,
    and the longest waiting goes first. So no request starves, and rank 0 never waits for a younger request.
    """
    if rank <= 0 or rank >= BACKGROUND:
        return rank
    return max(0, rank - int(waited_s / ageing_s))
