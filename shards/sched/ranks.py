"""Ranks that improve with waiting. Pure and torch-free."""

from __future__ import annotations


def effective_rank(rank: int, waited_s: float, ageing_s: float) -> int:
    """`rank` (0 is served first), better by one for each `ageing_s` of waiting, but never better than 0.

    It ends at 0 and not below, so that what is given as 0 never falls behind by being new: among equals age decides,
    and who has waited longest goes first. So nobody starves and the best rank waits for nobody younger.
    """
    if rank <= 0:
        return rank
    return max(0, rank - int(waited_s / ageing_s))
