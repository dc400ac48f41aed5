"""Match: how much of a prompt one backend is believed to hold, and how probably."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Match(NamedTuple):
    """How much of a prompt's beginning one backend is believed to hold.

    `blocks` consecutive blocks are held in any tier, the first `device_blocks` of them on the device.
    `credit` is their value in blocks on the device: each counts by the weight of its tier, up to 1. `p_hit`, in
    [0, 1], is the probability that they are there when the prompt comes.
    """

    blocks: int
    device_blocks: int
    credit: float
    p_hit: float = 1.0

    @property
    def expected_blocks(self) -> float:
        """Its expected value in blocks on the device. Times their prefill cost: expected seconds saved."""
        return self.p_hit * self.credit

    def first(self, blocks: int) -> Match:
        """The match of the first `blocks` of the prompt alone."""
        if blocks >= self.blocks:
            return self
        return Match(blocks, min(self.device_blocks, blocks), min(self.credit, float(blocks)), self.p_hit)


def best(*beliefs: Mapping[str, Match]) -> dict[str, Match]:
    """For each backend, the Match with the highest expectation out of several beliefs about the same prompt."""
    joined: dict[str, Match] = {}
    for belief in beliefs:
        for name, match in belief.items():
            known = joined.get(name)
            if known is None or match.expected_blocks > known.expected_blocks:
                joined[name] = match
    return joined


def faded(silent_s: float, *, fresh_s: float = 2.0, half_life_s: float = 60.0) -> float:
    """Probability that a report from `silent_s` ago still holds, in [0, 1]: 1 while fresh, then falling."""
    return float(0.5 ** (max(0.0, silent_s - fresh_s) / half_life_s))
