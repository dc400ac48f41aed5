"""Proves that running sequences never need more blocks than there are: their peak, in closed form. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shards.kv.keys import BLOCK_TOKENS

_NEVER = 1 << 40
"""A step that no sequence lives to reach."""


class Claim(NamedTuple):
    """The blocks that one sequence holds, and how it may grow.

    After t more steps it has KV of at most min(next_tokens + t - 1, final_tokens) positions. A sequence that
    `is_steady` draws a token in every step, so it has ended `lag` steps after final_tokens - next_tokens + 1 of them;
    another sequence may take any time. The lag is 1 if a step is planned before the previous one is collected.

    If layers with a window have pages of their own, it never holds more than `pages` of them.
    """

    blocks: tuple[int, ...]
    next_tokens: int
    final_tokens: int
    is_steady: bool
    lag: int = 0
    pages: int = 0

    @property
    def steps_left(self) -> int:
        """The number of further steps after which its blocks are released at the latest."""
        return self.final_tokens - self.next_tokens + 1 + self.lag if self.is_steady else _NEVER


class Room:
    """The running sequences, and whether another one may join them. `blocks`: all that they hold or can get.

    Theorem: if every decoding sequence advances in every step and every joining one `fits`, no sequence ever finds the
    pool without a block for its next token. Proof: let U(t) count the blocks needed t steps from now by the sequences
    that may then still run, as `peak_blocks` does. A step turns U(t) into at most U(t + 1): a decoding sequence has
    moved one step towards its end; a prefilling one stays below its bound for t + 1, and has a lower bound once it
    decodes. Sharing a cached block adds it to one table in place of a block that was needed; an early end only
    subtracts. So the peak over all t >= 1 never rises except by joining, and U(1) is the need of the next step.

    A sequence that verifies a draft may advance by several tokens, which the proof does not cover. So drafts are
    allowed only if the room `is_sound_at_any_pace`.

    Decoding sequences free their blocks at known times, so this admits more than the sum of all peaks would. Between
    two ends every sequence only grows, so only the ends must be checked (as LightLLM does).

    `pages`, if there are any, are divided: each sequence has as many as it claims, shared or not, until it ends.
    """

    def __init__(self, blocks: int, claims: Mapping[int, Claim], *, pages: int = 0) -> None:
        self._blocks, self._claims, self._pages = blocks, dict(claims), pages

    def __repr__(self) -> str:
        return f"Room({len(self._claims)} claims, {self._blocks - self.peak_blocks} of {self._blocks} blocks to spare)"

    @property
    def peak_blocks(self) -> int:
        """The most blocks that the claims can need at once."""
        return peak_blocks(list(self._claims.values()))

    @property
    def is_sound(self) -> bool:
        """Whether every sequence can finish."""
        return self.peak_blocks <= self._blocks and self._has_pages(self._claims.values())

    @property
    def is_sound_at_any_pace(self) -> bool:
        """Whether every sequence can finish, even if some draw several tokens in a step and others none.

        Then the room is sound after any such step too: no sequence ever needs more than is counted here.
        """
        claims = [claim._replace(next_tokens=claim.final_tokens, is_steady=False) for claim in self._claims.values()]
        return peak_blocks(claims) <= self._blocks

    def fits(self, claim: Claim) -> bool:
        """Whether every sequence can still finish after `claim` joins."""
        claims = [*self._claims.values(), claim]
        return self._has_pages(claims) and peak_blocks(claims) <= self._blocks

    def add(self, id: int, claim: Claim) -> None:  # noqa: A002
        """Let `claim` join as `id`."""
        self._claims[id] = claim

    def without(self, id: int) -> Room:  # noqa: A002
        """The room as it would be without `id`."""
        others = {other: claim for other, claim in self._claims.items() if other != id}
        return Room(self._blocks, others, pages=self._pages)

    def _has_pages(self, claims: Iterable[Claim]) -> bool:
        return sum(claim.pages for claim in claims) <= self._pages


def peak_blocks(claims: Sequence[Claim]) -> int:
    """The most blocks that `claims` can need at once. O(n log n + n^2), the latter in numpy: 0.1 ms for 64."""
    if not claims:
        return 0
    ordered = sorted(claims, key=lambda claim: -claim.steps_left)
    # a sequence counts shared blocks only if no longer-living sequence counts them
    counted_elsewhere = [own - len(claim.blocks) for own, claim in zip(_own_blocks(ordered), ordered, strict=True)]
    columns = [(claim.next_tokens, claim.final_tokens, claim.steps_left) for claim in ordered]
    first, final, left = np.array(columns, dtype=np.int64).T[:, :, None]
    ends = np.unique(left)
    tokens = np.minimum(first + ends - 1, final)
    wanted = -(-tokens // BLOCK_TOKENS) + np.array(counted_elsewhere, dtype=np.int64)[:, None]
    return int(np.where(left >= ends, wanted, 0).sum(0).max())


def _own_blocks(ordered: Sequence[Claim]) -> list[int]:
    """For each claim the number of blocks that no earlier claim holds. Tables can only share a beginning."""
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
