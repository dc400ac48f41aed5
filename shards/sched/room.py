"""Whether running sequences can ever want more blocks than there are: the peak, in closed form. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shards.kv.keys import BLOCK_TOKENS

_NEVER = 1 << 40
"""A step that no sequence lives to see."""


class Claim(NamedTuple):
    """What one sequence holds and how it may grow.

    After t more steps it has KV of at most min(next_tokens + t - 1, final_tokens) positions. One that is `is_steady`
    draws a token in every step, so it is gone `lag` steps after final_tokens - next_tokens + 1 of them; another may
    take any time. The lag is 1 where a step is planned before the one before it was collected.
    """

    blocks: tuple[int, ...]
    next_tokens: int
    final_tokens: int
    is_steady: bool
    lag: int = 0

    @property
    def steps_left(self) -> int:
        """After how many more steps its blocks are released at the latest."""
        return self.final_tokens - self.next_tokens + 1 + self.lag if self.is_steady else _NEVER


class Room:
    """The sequences that run, and whether another may join them. `blocks`: all that they hold or could get.

    Theorem: if everybody who decodes moves in every step and whoever joins `fits`, no sequence ever finds the pool
    without a block for its next token. Proof: let U(t) count the blocks wanted t steps from now by those who may then
    still live, as `peak_blocks` does. A step turns U(t) into at most U(t + 1): who decodes has moved one step towards
    its end; who prefills stays below its bound for t + 1, and is bounded by less once it decodes. To share a cached
    block adds it to one table in place of a block that was wanted; to end early only takes away. So the peak over all
    t >= 1 never rises but by joining, and U(1) is what the next step wants.

    Who verifies a draft may move by several tokens, which the proof does not cover; so nobody drafts unless the room
    `is_sound_at_any_pace`.

    Decoding sequences free their blocks at known times, so this admits more than the sum of all peaks would; between
    two ends everybody only grows, so the ends are the only times to look at (as LightLLM does).
    """

    def __init__(self, blocks: int, claims: Mapping[int, Claim]) -> None:
        self._blocks, self._claims = blocks, dict(claims)

    def __repr__(self) -> str:
        return f"Room({len(self._claims)} claims, {self._blocks - self.peak_blocks} of {self._blocks} blocks to spare)"

    @property
    def peak_blocks(self) -> int:
        """The most blocks that the claims can come to want at once."""
        return peak_blocks(list(self._claims.values()))

    @property
    def is_sound(self) -> bool:
        """Can everybody finish?"""
        return self.peak_blocks <= self._blocks

    @property
    def is_sound_at_any_pace(self) -> bool:
        """Can everybody finish, even if some draw several tokens in a step and others none?

        Then the room is sound after any such step too: nobody ever wants more than what is counted here.
        """
        claims = [one._replace(next_tokens=one.final_tokens, is_steady=False) for one in self._claims.values()]
        return peak_blocks(claims) <= self._blocks

    def fits(self, claim: Claim) -> bool:
        """Could `claim` join so that everybody can finish?"""
        return peak_blocks([*self._claims.values(), claim]) <= self._blocks

    def add(self, id: int, claim: Claim) -> None:  # noqa: A002
        """Let `claim` join as `id`."""
        self._claims[id] = claim

    def without(self, id: int) -> Room:  # noqa: A002
        """The room as it would be if `id` left."""
        return Room(self._blocks, {other: claim for other, claim in self._claims.items() if other != id})


def peak_blocks(claims: Sequence[Claim]) -> int:
    """The most blocks that `claims` can come to want at once. O(n log n + n^2), the latter in numpy: 0.1 ms for 64."""
    if not claims:
        return 0
    ordered = sorted(claims, key=lambda claim: -claim.steps_left)
    # of what it shares, a sequence counts only what is not counted for one that lives longer
    counted_elsewhere = [own - len(claim.blocks) for own, claim in zip(_own_blocks(ordered), ordered, strict=True)]
    columns = [(claim.next_tokens, claim.final_tokens, claim.steps_left) for claim in ordered]
    first, final, left = np.array(columns, dtype=np.int64).T[:, :, None]
    ends = np.unique(left)
    tokens = np.minimum(first + ends - 1, final)
    wanted = -(-tokens // BLOCK_TOKENS) + np.array(counted_elsewhere, dtype=np.int64)[:, None]
    return int(np.where(left >= ends, wanted, 0).sum(0).max())


def _own_blocks(ordered: Sequence[Claim]) -> list[int]:
    """For each claim how many of its blocks none before it holds. Tables that share anything share a beginning."""
    roots = Counter(claim.blocks[0] for claim in ordered if claim.blocks)
    seen: set[int] = set()
    own: list[int] = []
    for claim in ordered:
        start = 0
        if claim.blocks and roots[claim.blocks[0]] > 1:
            start = bisect_left(claim.blocks, True, key=lambda block: block not in seen)
            seen.update(claim.blocks[start:])
        own.append(len(claim.blocks) - start)
    return own
