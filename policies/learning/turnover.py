"""Turnover: a clock of caches, which goes as fast as prompts are computed and stands still while none is."""

from __future__ import annotations

from dataclasses import dataclass

_USUAL_CACHE_TOKENS = 262_144
"""The size of a cache if its backend does not report it."""


@dataclass(slots=True)
class Turnover:
    """`at` is how many times the caches were computed anew, on average over all of them.

    What a cache keeps depends on how much was computed since, and not on how long that took.
    """

    at: float = 0.0

    def computed(self, tokens: int, *, cache_tokens: int | None, caches: int) -> None:
        """`tokens` are computed for one cache of `cache_tokens` among so many `caches`."""
        self.at += tokens / (cache_tokens or _USUAL_CACHE_TOKENS) / max(1, caches)
