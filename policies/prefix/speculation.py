"""Speculation: a prompt's blocks count as held where it was just sent, until the backend reports or a time passes."""

from __future__ import annotations

from collections.abc import Sequence

from policies.prefix.index import PrefixIndex
from policies.prefix.match import Match
from policies.prefix.rungs import Rungs

_RUNGS = Rungs(16, 16)
"""So a long prompt costs no more than its length in kibitokens."""


class Speculation:
    """Sends a burst of equal prompts to one backend, before that backend has reported any blocks.

    An entry lasts between `lasts_s` and twice that: there are a young and an old index, and the old one is dropped
    whole.
    """

    def __init__(self, *, lasts_s: float = 5.0, p_hit: float = 0.9, max_bytes: int = 8 * 2**20) -> None:
        self._lasts_s, self._p_hit, self._max_bytes = lasts_s, p_hit, max_bytes
        self._young, self._old = self._new(), self._new()
        self._turned_at: float | None = None

    def __repr__(self) -> str:
        return f"<Speculation young {self._young!r}, old {self._old!r}>"

    def sent(self, backend: str, keys: Sequence[int], now: float) -> tuple[int, ...]:
        """Record that the prompt with blocks `keys` went to `backend`; returns the recorded keys, for `hear`."""
        noted = tuple(_RUNGS.of(keys))
        self.hear(backend, noted, now, sent_at=now)
        return noted

    def hear(self, backend: str, noted: Sequence[int], now: float, *, sent_at: float) -> None:
        """Record that another router sent a prompt with these recorded keys to `backend`."""
        self._turn(now)
        if noted and now - sent_at < self._lasts_s:
            self._young.store(backend, noted)

    def longest(self, keys: Sequence[int], now: float) -> dict[str, Match]:
        """Backend -> how much of the prompt with blocks `keys` was lately sent there, rounded down to recorded keys."""
        self._turn(now)
        if not keys:
            return {}
        rungs = _RUNGS.of(keys)
        depths: dict[str, int] = {}
        for index in (self._old, self._young):
            for name, match in index.longest(rungs).items():
                depths[name] = max(depths.get(name, 0), _RUNGS.blocks(match.blocks))
        return {name: Match(blocks, blocks, float(blocks), self._p_hit) for name, blocks in depths.items()}

    def forget(self, backend: str) -> None:
        """Drop the prompts sent to `backend`: it failed, or restarted."""
        self._young.forget(backend)
        self._old.forget(backend)

    def size_bytes(self) -> int:
        """Approximate memory."""
        return self._young.size_bytes() + self._old.size_bytes()

    def check(self) -> None:
        """Assert that both indexes are correct."""
        self._young.check()
        self._old.check()

    def _new(self) -> PrefixIndex:
        return PrefixIndex(max_bytes=self._max_bytes // 2)

    def _turn(self, now: float) -> None:
        if self._turned_at is None:
            self._turned_at = now
        late_s = now - self._turned_at
        if late_s >= self._lasts_s:
            self._old = self._young if late_s < 2 * self._lasts_s else self._new()
            self._young, self._turned_at = self._new(), now
