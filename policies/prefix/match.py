"""Match: how much of a prompt one backend is believed to hold, and how surely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Match(NamedTuple):
    """How much of a prompt's beginning one backend is believed to hold.

    `blocks` without a gap are held in any tier, the first `device_blocks` of them where the network reads them.
    `credit` is what they are worth in blocks on the device: each counts by the weight of its tier, up to 1. `p_hit`, in
    [0, 1], is how likely they are there when the prompt comes.
    """

    blocks: int
    device_blocks: int
    credit: float
    p_hit: float = 1.0

    @property
    def expected_blocks(self) -> float:
        """The blocks on the device that it is worth on average. Times their prefill cost: expected seconds saved."""
        return self.p_hit * self.credit

    def first(self, blocks: int) -> Match:
        """The same of the first `blocks` of the prompt alone."""
        if blocks >= self.blocks:
            return self
        return Match(blocks, min(self.device_blocks, blocks), min(self.credit, float(blocks)), self.p_hit)


def best(*beliefs: Mapping[str, Match]) -> dict[str, Match]:
    """Of several beliefs about the same prompt, for each backend the one that expects most."""
    joined: dict[str, Match] = {}
    for belief in beliefs:
        for name, match in belief.items():
            known = joined.get(name)
            if known is None or match.expected_blocks > known.expected_blocks:
                joined[name] = match
    return joined


def faded(silent_s: float, *, fresh_s: float = 2.0, half_life_s: float = 60.0) -> float:
    """How likely it is still true what was heard `silent_s` ago, in [0, 1]: surely while fresh, then ever less."""
    return float(0.5 ** (max(0.0, silent_s - fresh_s) / half_life_s))
